"""A user's `module:attribute`, and values and errors of a user's code in one sentence."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
NAMES = "1 to 64 letters, digits, underscores, dots and hyphens"  # what `is_name` allows
# Of this package, of Python's library and of what Python runs without a file.
_NOT_USERS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{sysconfig.get_path('stdlib')}{os.sep}",
    "<frozen ",
)
_PACKAGE = "seeupo_jax."
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def is_name(value: Any) -> bool:
    """Whether a value may be a part of a metric's name."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def text_of(value: Any) -> str:
    """A value's text, encodable in UTF-8, whatever its class does."""
    try:
        return escaped(str(value))
    except BaseException:  # of a user's class
        return f"a {type(value).__name__} whose text cannot be read"


def shown(value: Any, most: int = 200) -> str:
    """A value in an error: at most so many characters of its `repr`."""
    try:
        text = escaped(repr(value)).replace("\n", " ")
    except BaseException:  # of a user's class; more digits than Python writes
        return "a value that cannot be shown"
    return shortened(text, most)


def shortened(text: str, most: int = 200) -> str:
    """At most so many characters of a text."""
    return text if len(text) <= most else f"{text[:most]} ..."


def listed(names: Iterable[str], why_none: str) -> str:
    """Names with commas between; where there are none, the end of a sentence says why."""
    return ", ".join(names) or f"none, since {why_none}"


def in_one_line(text: str, most: int) -> str:
    """At most so many characters of a text, each run of its white space as one space."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 6]} [...]"


def escaped(text: str) -> str:
    """A text with surrogates, which UTF-8 cannot encode, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def encodes(text: str) -> bool:
    """Whether UTF-8 can encode a text: Python's may hold half of a surrogate pair."""
    return text.isascii() or escaped(text) == text


def origin(error: BaseException) -> str:
    """`(METHOD, FILE:LINE)` of the user's code that raised an error; empty: raised by no such code.

    The method is the one that we called, the line the innermost one outside of libraries.
    """
    frames = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_NOT_USERS)
        and not {"site-packages", "dist-packages"} & {*Path(frame.f_code.co_filename).parts}
    ]
    if not frames:
        return ""
    code, line = frames[-1]
    return f"({frames[0][0].co_name}, {os.path.basename(code.co_filename)}:{line})"


def describe(error: BaseException) -> str:
    """An error's class and text in one line, without a full stop."""
    text = in_one_line(text_of(error), 300)
    return f"{type(error).__name__}: {text}".removesuffix(": ").rstrip(".")


def located(error: BaseException) -> str:
    """As `describe`, with its `origin`."""
    return f"{describe(error)} {origin(error)}".rstrip()


def public_functions(holder: type | ModuleType) -> set[str]:
    """Names of functions of a user's class, inherited ones too, or that a user's module defines."""
    if isinstance(holder, ModuleType):
        own = holder.__name__
        found = {n: v for n, v in vars(holder).items() if getattr(v, "__module__", None) == own}
    else:
        kinds = [kind for kind in holder.__mro__ if not kind.__module__.startswith(_PACKAGE)]
        found = {name: value for kind in kinds for name, value in vars(kind).items()}
    return {name for name, value in found.items() if name[:1] != "_" and callable(value)}


def near_misses(names: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Names that are likely misspelt, and which of the known ones, that is absent, is meant."""
    given = {*names}
    absent, others = [name for name in known if name not in given], sorted(given.difference(known))
    meant = {name: difflib.get_close_matches(name, absent, n=1, cutoff=0.8) for name in others}
    return {name: close[0] for name, close in meant.items() if close}


def check_arguments(
    signature: inspect.Signature, arguments: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """TypeError where a function does not take these; it names an unknown option before all."""
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        parameters = signature.parameters
        is_open = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        unknown = [name for name in options if name not in parameters and not is_open]
        if unknown and repr(unknown[0]) not in str(error):
            raise TypeError(f"{error}, got an unexpected one: {unknown[0]!r}") from None
        raise


def expand_home(path: str | os.PathLike[str]) -> Path:
    """A path whose `~` or `~USER` is that home folder: no shell expands that of `--workdir=~/x`."""
    return Path(os.path.expanduser(path))


def import_attribute(name: str, field: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    """Imports a user's `module:attribute` or `FILE.py:attribute`.

    Args:
      name: a file's path is relative to the working directory; the file runs once in a process,
        and can import modules from its folder.
      field: the configuration field that names it, for errors.
      kind: what it has to be, in a word; `fits` checks it.

    Raises:
      ValueError: there is no such module or attribute, or the module fails; one sentence.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = _import(module_name)
    except (Exception, SystemExit) as error:  # this runs the module
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(
                f"{field}: got {name!r}, but there is no module {missing!r}; allowed: an installed"
                " one, or one in the working directory."
            ) from None
        raise ValueError(f"{field}: {name!r} cannot be imported: {describe(error)}.") from error
    value = getattr(module, attribute, None)
    if not fits(value):
        those = [key for key, value in vars(module).items() if key[:1] != "_" and fits(value)]
        raise ValueError(
            f"{field}: got {name!r}, but {module_name} has no {kind} {attribute!r}; it has"
            f" {listed(those, 'its names are of other kinds')}."
        )
    return value


def cached_by_name(find: Callable[_P, _T]) -> Callable[_P, _T]:
    """`functools.cache` for what finds a name, its last argument, but no `module:attribute`.

    A module may be reloaded, or be a notebook. A file runs once, and its path is that of the folder
    that the process was in when it was first given.
    """
    cached = functools.cache(find)

    @functools.wraps(find)
    def found(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        module, colon, _ = str(args[-1]).partition(":")
        reloadable = colon and not module.endswith(".py")
        return (find if reloadable else cached)(*args, **kwargs)

    return found


def functions_beside(name: str) -> set[str]:
    """The public functions of the module of a `module:attribute` that imports."""
    return public_functions(_import(name.partition(":")[0]))


def attribute_beside(name: str, other: str) -> Any:
    """Another attribute of the module of a `module:attribute` that imports; None: it has none."""
    return getattr(_import(name.partition(":")[0]), other, None)


def _import(module: str) -> ModuleType:
    # `python -m` puts the working directory on the path, an installed command does not.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if module.endswith(".py"):
        return _import_file(expand_home(module).absolute())
    return importlib.import_module(module)


def _import_file(file: Path) -> ModuleType:
    name = str(file)  # no module that is imported by its name has a slash in it
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    return run_file(name, file)


def run_file(name: str, file: Path) -> ModuleType:
    """A module of that name, which a file whose name ends in .py has just run as.

    The file is compiled: Python's own cache takes two of one size, written in one second, for one.
    """
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look themselves up
    try:
        exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
