"""A configuration file: Python whose `get_config()` returns the values of a run."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import seeupo_jax
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.layers import differing
from seeupo_jax.configuration.schema import Config
from seeupo_jax.configuration.user_code import (
    describe,
    expand_home,
    import_attribute,
    run_file,
    shown,
)

if TYPE_CHECKING:
    from ml_collections import ConfigDict

PACKAGE = "package:"  # prefix of the names of configurations that ship with the package
_ROOT = Path(seeupo_jax.__path__[0])
_SHIPPED = _ROOT / "configs"  # of a checkout, a link to its folder `configs`
_CHECKOUT = _ROOT.parent / "third_party"
_DEEPEST = 64  # levels of nested values, more than any field allows


def find_config(given: str | Path) -> Path:
    """The file of a path, or of `package:NAME`: a configuration that ships with the package.

    Raises:
      ValueError: an unknown name.
    """
    name = str(given)
    if not name.startswith(PACKAGE):
        return expand_home(given)
    names = sorted(file.stem for file in _SHIPPED.glob("*.py"))
    if name.removeprefix(PACKAGE) not in names:
        raise ValueError(
            f"--config: got {shown(name)}; allowed: a file, or {PACKAGE}NAME with one of"
            f" {', '.join(names)}."
        )
    return (_SHIPPED / f"{name.removeprefix(PACKAGE)}.py").resolve()


def third_party(path: str) -> str:
    """Where a script of `third_party` leaves a file: in the checkout, else below this folder."""
    return str(_CHECKOUT / path if _CHECKOUT.is_dir() else Path(_CHECKOUT.name) / path)


def read_values(given: str | Path, function: str = "get_config") -> dict[str, Any]:
    """The nested values that `get_config()` of a file or of `package:NAME`, or that a
    `module:function`, returns.

    `FILE.py:TEXT` and `package:NAME:TEXT` call `get_config(TEXT)`.

    Args:
      function: another one of the file, as `get_study`.

    Raises:
      ValueError: no such file, a file that fails, or one whose function returns no values; one
        sentence with the file, the line where there is one, and the reason.
    """
    name, argument = _split(str(given))
    path = find_config(name)
    if ":" in name and not path.exists():
        return _checked(_of_function(name), f"--config: {name} returned")
    if not path.is_file():
        raise ValueError(f"--config: no file {path}.")
    path = path.absolute()
    try:
        values = _values(_module(path), path, function, argument)
    except _NoConfig as error:
        raise ValueError(str(error)) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # anything, sys.exit() too
        raise ValueError(f"--config: {_place(error, path)}{_reason(error, path)}.") from error
    return _checked(values, f"--config: {function}() of {path} returned")


def code_of(given: str | Path) -> str:
    """The file, or of a `module:function` the module, whose code makes a configuration's values."""
    name, _ = _split(str(given))
    path = find_config(name)
    return name.partition(":")[0] if ":" in name and not path.exists() else str(path)


def given_values(given: Any) -> dict[str, Any]:
    """The nested values of a ConfigDict, a dict or a Config.

    Raises:
      ValueError: anything else, or a ConfigDict with a `required_placeholder` that was never set.
    """
    try:
        values = _plain(given)
    except ValueError:
        raise
    except Exception as error:  # of ml_collections
        raise ValueError(f"config: got values that cannot be read: {describe(error)}.") from error
    places = f"a file's path, {PACKAGE}NAME, module:function, "
    return _checked(values, "config: got", places)


def _split(given: str) -> tuple[str, tuple[str, ...]]:
    """A file or name, and what its function is called with: nothing, or one text."""
    match = re.fullmatch(rf"(.+?\.py|{PACKAGE}[^:]+):(.*)", given)
    return (given, ()) if match is None or Path(given).exists() else (match[1], (match[2],))


def read_layouts(file: Path) -> dict[str, dict[str, Any]]:
    """Fields of configurations by the slice that they are for, as `aot --tune` leaves them.

    Raises:
      ValueError: a file that cannot be read, or that holds something else.
    """
    try:
        layouts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {describe(error)}.") from error
    if not isinstance(layouts, dict) or not all(isinstance(x, dict) for x in layouts.values()):
        raise ValueError(f"{file}: allowed: an object of objects, slices and fields by name.")
    return layouts


def lay_out(config: ConfigDict, file: Path, slice: str | None) -> ConfigDict:
    """A configuration with a slice's fields of a file of `read_layouts`; None: as it is.

    Raises:
      ValueError: no such slice in the file.
    """
    if slice is None:
        return config
    layouts = read_layouts(file)
    if slice not in layouts:
        raise ValueError(
            f"slice: got {slice!r}; allowed: {''.join(f'{name}, ' for name in layouts)}and what"
            f" python -m seeupo_jax.aot --topology=SLICE --tune={file} adds"
        )
    for name, value in layouts[slice].items():
        *parents, field = name.split(".")
        part = config
        for parent in parents:
            if parent not in part:  # the file left all of it at its defaults
                part[parent] = {}
            part = part[parent]
        part[field] = value
    return config


def _checked(values: Any, got: str, places: str = "") -> dict[str, Any]:
    """`places`: what else is allowed."""
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{got} {shown(values)} ({type(values).__name__}); allowed: {places}a ConfigDict, a"
            " dict, or a Config."
        )
    return dict(values)


def _of_function(name: str) -> Any:
    """Calls a `module:function`; returns its result in plain values."""
    function = import_attribute(name, "--config", "function", callable)
    try:
        return _plain(function())
    except (Exception, SystemExit) as error:  # of a user's code
        raise ValueError(f"--config: {name} failed: {describe(error)}.") from error


class _NoConfig(Exception):
    """A file that runs but is no configuration; the text says why."""


def _module(path: Path) -> ModuleType:
    if path.suffix != ".py":
        raise _NoConfig(f"--config: {path} is not a Python file.")
    return run_file(f"configuration {path}", path)


def _values(module: ModuleType, path: Path, function: str, argument: tuple[str, ...] = ()) -> Any:
    """Calls the module's function; returns its result in plain values."""
    build = getattr(module, function, None)
    if not callable(build):
        raise _NoConfig(f"--config: {path} has no function {function}().")
    return _plain(build(*argument))


def _plain(values: Any, within: tuple[int, ...] = ()) -> Any:
    """A copy of nested values, with dicts in the place of ConfigDicts and dataclasses.

    An Algorithm stays, since it has to agree with its recipe, and so does what holds itself or is
    nested deeper than any field allows.

    Args:
      within: ids of the values that hold this one.
    """
    if len(within) > _DEEPEST or id(values) in within or isinstance(values, Algorithm):
        return values
    within = (*within, id(values))
    if isinstance(values, Config) and isinstance(values.algorithm, Algorithm):
        # What the recipe gave is not the file's, and another may replace it.
        given = Config(recipe=values.recipe).algorithm
        values = _fields(values) | {"algorithm": differing(values.algorithm, given)}
    elif dataclasses.is_dataclass(values) and not isinstance(values, type):
        values = _fields(values)
    elif any(kind.__name__ == "ConfigDict" for kind in type(values).__mro__):  # of ml_collections
        values = values.to_dict()
    if isinstance(values, Mapping):
        return {key: _plain(value, within) for key, value in values.items()}
    if isinstance(values, list | tuple):
        plain = [_plain(value, within) for value in values]
        return plain if isinstance(values, list) else tuple(plain)
    return values


def _fields(values: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(values)]
    return {name: getattr(values, name) for name in names if not name.startswith("_")}


def _place(error: BaseException, path: Path) -> str:
    """The file, and its line that failed or that called what failed."""
    line = error.lineno if _is_of(error, path) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{path}: " if line is None else f"{path}, line {line}: "


def _reason(error: BaseException, path: Path) -> str:
    if not isinstance(error, SyntaxError):
        return describe(error)
    elsewhere = error.filename is not None and not _is_of(error, path)
    where = f"{error.filename}, line {error.lineno}: " if elsewhere else ""
    return f"{where}{type(error).__name__}: {error.msg}"


def _is_of(error: BaseException, path: Path) -> bool:
    return isinstance(error, SyntaxError) and error.filename == str(path)
