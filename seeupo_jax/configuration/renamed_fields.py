"""Names that fields had before, for one sentence of error that gives the new one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from seeupo_jax.options import SECTION, names_of

# Those that do not end in the name of the option that they are now.
_RENAMED = {
    "gae_lambda": "estimator.lam",
}


def new_name(cls: type, key: str) -> str | None:
    """The full name, below a dataclass with sections, of a field that it had as `key`.

    An option had its own name, or that with a prefix: `canon_mu` is `estimator.mu`. Of options in
    several sections, the prefix tells: `fork_every` is in `forks`.
    """
    if key in _RENAMED and _RENAMED[key].partition(".")[0] in names_of(cls):
        return _RENAMED[key]
    options = {*_options(cls)}
    found = [pair for pair in options if key == pair[1] or key.endswith(f"_{pair[1]}")]
    found.sort(key=lambda pair: (len(pair[1]), pair[0].startswith(key.partition("_")[0])))
    return ".".join(found[-1]) if found else None


def _options(cls: type) -> Iterator[tuple[str, str]]:
    """Names of the sections of a dataclass, each with the name of an option of it."""
    for field in dataclasses.fields(cls):
        if section := field.metadata.get(SECTION):
            for name in section.names():
                yield from ((field.name, option) for option in names_of(section.find(name)))
