"""The flags of a command, with a one-sentence error for all others."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from seeupo_jax.configuration.field_reference import fields_help
from seeupo_jax.configuration.fields import is_url
from seeupo_jax.configuration.user_code import expand_home

_MODULE, _SCRIPT = "python -m seeupo_jax.", "seeupo-"


def as_overrides(arguments: Sequence[str]) -> list[str]:
    """A command line with every `--config.FIELD=VALUE` as `--override=FIELD=VALUE`."""
    return [re.sub(r"^--config\.", "--override=", argument) for argument in arguments]


def command_name(command: str) -> str:
    """A command as a user types it here: `seeupo-train`, or `python -m seeupo_jax.train`."""
    if Path(sys.argv[0]).name.startswith(_SCRIPT):
        return _SCRIPT + command.replace("_", "-")
    return _MODULE + command


class Flags(argparse.ArgumentParser):
    """The flags of one command; undeclared ones are refused."""

    def __init__(self, command: str, about: str | None):
        super().__init__(
            prog=command_name(command),
            description=re.sub(rf"{_MODULE}(\w+)", lambda m: command_name(m[1]), about or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._command = command
        self._required: list[tuple[str, str]] = []

    def flag(
        self,
        name: str,
        words: str,
        kind: Callable[[str], Any] | None = None,
        *,
        default: Any = None,
        required: bool = False,
        **more: Any,
    ) -> None:
        """Declares `--NAME=VALUE`.

        Args:
          words: for `--help`.
          kind: converts the text, or raises `Wrong`; None: any text that is not empty.
          more: of `ArgumentParser.add_argument`.
        """
        if required:
            self._required.append((name, words))
        kind = text if kind is None else kind
        about = words if words.endswith("...") else words.rstrip(".")
        if kind in _METAVARS:
            more.setdefault("metavar", _METAVARS[kind])
        elif isinstance(kind, _Integer):
            more.setdefault("metavar", "N")
            about += f"; {kind.allowed}"
        if default and "default" not in words and not required:
            value = ",".join(default) if isinstance(default, list | tuple) else default
            about += f"; default: {value}"
        about = about.replace("%", "%%") + ("; required." if required else ".")
        self.add_argument(f"--{name}", type=kind, default=default, help=about, **more)

    def switch(self, name: str, words: str, *, default: bool | None = False) -> None:
        """Declares `--NAME`, `--NAME=False` and `--noNAME`."""
        more = {"nargs": "?", "const": True, "metavar": "True|False"}
        self.flag(name, words, _truth, default=default, **more)
        self.add_argument(f"--no{name}", dest=name, action="store_false", help=argparse.SUPPRESS)

    def overrides(self) -> None:
        """Declares `--override=FIELD=VALUE`, and so `--config.FIELD=VALUE`."""
        self.add_argument(
            "--override",
            action="append",
            default=[],
            metavar="FIELD.SUB=VALUE",
            help="on top of the config; --config.FIELD.SUB=VALUE is the same.",
        )

    def format_help(self) -> str:
        """The help, with the fields of the configuration where the command takes them."""
        text = super().format_help()
        if "--override" not in self._option_string_actions:
            return text
        return f"{text}\n{fields_help(min(100, shutil.get_terminal_size().columns))}"

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The values of a command line.

        Args:
          arguments: without the program's name.

        Raises:
          ValueError: an unknown flag, a wrong value, or a missing one.
        """
        names = self._option_string_actions
        given = list(arguments)
        if "--override" in names:
            given = as_overrides(given)
        values, unknown = self.parse_known_args(given)
        if unknown:
            raise ValueError(self._unknown(unknown[0]))
        for name, words in self._required:
            if getattr(values, name) is None:
                raise ValueError(f"--{name}: got none; allowed: {words}")
        return values

    def error(self, message: str) -> NoReturn:
        """Raises argparse's error as a ValueError of one sentence."""
        raise ValueError(f"{message.removeprefix('argument ').rstrip('.')}.")

    def _unknown(self, argument: str) -> str:
        hidden = ("--no", "--help")
        every = [name for name in self._option_string_actions if name.startswith("--")]
        flags = [name for name in every if not name.startswith(hidden)]
        if not argument.startswith("-"):
            return f"{self._command}: got {argument!r}; allowed: flags only, as --NAME=VALUE."
        name = argument.partition("=")[0]
        near = difflib.get_close_matches("--" + name.lstrip("-"), flags, n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        return f"{name}: {self._command} has no such flag;{hint} allowed: {', '.join(flags)}."


class Wrong(argparse.ArgumentTypeError):
    """A value that a flag does not allow."""

    def __init__(self, got: str, allowed: str):
        super().__init__(f"got {got[:200]!r}; allowed: {allowed}")


def text(value: str) -> str:
    """Any text but the empty one."""
    if not value.strip():
        raise Wrong(value, "a text that is not empty")
    return value


def path(value: str) -> Path:
    """An absolute path of this machine."""
    if not value.strip():
        raise Wrong(value, "a path")
    if is_url(value):
        raise Wrong(value, "a path of this machine, such as a bucket that gcsfuse mounts")
    return expand_home(value).absolute()


def output_file(value: str) -> Path:
    """A file that can be written, known before long work starts; its folder may have to be made."""
    file = path(value)
    try:
        if not file.exists():  # as a link to a file that is still to be written
            file = Path(os.path.realpath(file))
        there = next(each for each in (file, *file.parents) if each.exists())
    except OSError:  # a name that is too long, a folder that is closed to this user
        raise Wrong(value, "a file that can be written") from None
    free = there.is_dir() != (there == file)
    circle = file.is_symlink() and there != file  # of links
    if circle or not (free and os.access(there, os.W_OK)):
        raise Wrong(value, "a file that can be written")
    return file


def names(value: str) -> list[str]:
    """Names with commas between them."""
    return [name.strip() for name in text(value).split(",") if name.strip()]


def one_of(*allowed: str) -> Callable[[str], str]:
    """One of these names."""

    def read(value: str) -> str:
        if value not in allowed:
            raise Wrong(value, ", ".join(allowed))
        return value

    return read


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Whole numbers from `low` on, up to `high`."""
    return _Integer(low, high)


@dataclasses.dataclass(frozen=True)
class _Integer:
    low: int
    high: int | None

    @property
    def allowed(self) -> str:
        bounds = f">= {self.low}" if self.high is None else f"from {self.low} to {self.high}"
        return f"a whole number {bounds}"

    def __call__(self, value: str) -> int:
        # Longer ones than the largest int64 are no counts; int() refuses 4,300 digits and more.
        if not re.fullmatch(r"[+-]?\d{1,19}", value.strip()) or int(value) < self.low:
            raise Wrong(value, self.allowed)
        if self.high is not None and int(value) > self.high:
            raise Wrong(value, self.allowed)
        return int(value)


def size(value: str) -> int:
    """Bytes, from texts such as 95GiB, 80GB or 1.5TiB."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([MGT])(i?)B", value.strip())
    count = 0.0 if match is None else float(match[1])
    if match is None or not count:
        raise Wrong(value, "a size above 0 with its unit, as 95GiB (MiB, GiB, TiB, MB, GB, TB)")
    return int(count * (1024 if match[3] else 1000) ** (" KMGT".index(match[2])))


def positive(value: str) -> float:
    """A finite number above 0."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise Wrong(value, "a number > 0")
    return number


def _truth(value: str) -> bool:
    truths = {"true": True, "1": True, "false": False, "0": False}
    if value.lower() not in truths:
        raise Wrong(value, "True or False")
    return truths[value.lower()]


_METAVARS = {
    text: "TEXT",
    path: "PATH",
    output_file: "FILE",
    names: "A,B,...",
    positive: "NUMBER",
    size: "SIZE",
}
