"""Digests of a user's code: the module that a configuration names, and what it imports.

Modules are found as Python would find them, and read but not run: running one could start jax's
devices before the processes have met. What is imported by a computed name, and files that the code
opens, are not found.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

import seeupo_jax
from seeupo_jax.cli.file_digests import text_digest
from seeupo_jax.configuration.user_code import expand_home

_NAMED = re.compile(r"(?P<code>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.+\.py):[A-Za-z_][\w.]*")
_OURS = Path(seeupo_jax.__path__[0]).resolve()
_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
_INSTALLED = {"site-packages", "dist-packages"}


def named_code(text: str) -> str | None:
    """The module or the file of a `module:attribute`, or `FILE.py:attribute`; None: it is none."""
    match = _NAMED.fullmatch(text)
    return None if match is None else match["code"]


class _Source(NamedTuple):
    """A file of code. name: of its module; of a file that is no module, that of the file."""

    name: str
    file: Path
    is_module: bool


def code_digests(code: str) -> dict[str, str | None]:
    """The digests of a module or of a `FILE.py`, and of all of the user's that it imports.

    Returns: `code of MODULE` and its digest, or None where there is no such module; `version of
      PACKAGE` for what is imported from an installed package.
    """
    is_file = code.endswith(".py")
    file = expand_home(code).absolute()
    places = [*sys.path, os.getcwd(), *([str(file.parent)] if is_file else [])]
    if is_file:
        queue = [_Source(file.name, file, False)]
    else:
        queue = list(_sources(code, places))
    digests: dict[str, str | None] = {} if queue else {f"code of {code}": None}
    own = None if is_file else code.partition(".")[0]  # an installed package's own modules count
    while queue:
        source = queue.pop()
        name = f"code of {source.name}"
        if name in digests:
            continue
        content = _read(source.file)
        digests[name] = None if content is None else text_digest(content)
        for imported in _imported(source, content or b""):
            top = imported.partition(".")[0]
            if top != own and _is_installed(top, places):
                digests |= _version(top)
            else:
                queue += _sources(imported, places)
    return digests


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _version(package: str) -> dict[str, str | None]:
    try:
        return {f"version of {package}": metadata.version(package)}
    except metadata.PackageNotFoundError:  # its distribution has another name
        return {}


def _sources(name: str, places: Sequence[str]) -> Iterator[_Source]:
    """The file of a user's module and those of the packages that it lies in; what has none is
    left out, such as an attribute that is imported like a module."""
    for spec in _specs(name, places):
        if spec.origin is not None and spec.has_location and _is_users(Path(spec.origin)):
            yield _Source(spec.name, Path(spec.origin), True)


def _specs(name: str, places: Sequence[str]) -> Iterator[ModuleSpec]:
    """Of each package on the way to a module, and of the module, as far as they are found."""
    top, *rest = name.split(".")
    if top in sys.stdlib_module_names or top == seeupo_jax.__name__:
        return
    spec = PathFinder.find_spec(top, list(places)) or _editable(top)
    full = top
    while spec is not None:
        yield spec
        if not rest or spec.submodule_search_locations is None:
            return
        full = f"{full}.{rest.pop(0)}"
        spec = PathFinder.find_spec(full, list(spec.submodule_search_locations))


def _editable(top: str) -> ModuleSpec | None:
    """A package that is found by a hook, as of an editable installation."""
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None


def _is_users(file: Path) -> bool:
    path = file.resolve()
    in_library = path.is_relative_to(_LIBRARY) and not _INSTALLED & {*path.parts}
    return not in_library and not path.is_relative_to(_OURS)


def _is_installed(top: str, places: Sequence[str]) -> bool:
    spec = next(_specs(top, places), None)
    origin = None if spec is None else spec.origin
    return origin is not None and bool(_INSTALLED & {*Path(origin).parts})


def _imported(source: _Source, content: bytes) -> Iterator[str]:
    """The names that a file imports, wherever in it; those of attributes are among them."""
    if source.file.suffix != ".py":
        return
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return  # importing it says why
    is_package = source.file.name == "__init__.py"
    package = source.name.split(".") if source.is_module else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - is_package
            base = package[: max(0, len(package) - up)] if node.level else []
            parts = [*base, *(node.module or "").split(".")]
            module = ".".join(filter(None, parts))
            yield from filter(None, [module])
            yield from (f"{module}.{alias.name}".lstrip(".") for alias in node.names)
