"""Experts that a model folder stacks in one tensor for all of a layer, read one by one.

As transformers 5 has them in memory, and Qwen3.5 in its folders, `mlp.experts.gate_up_proj` is
[E, 2F, D], the rows of gate above those of up, and `mlp.experts.down_proj` [E, D, F]. In gpt-oss
they are packed: [E, D, 2F], the columns of gate and up in turn, and [E, F, D], with biases; in
MXFP4 (OCP Microscaling Formats 1.0) `..._blocks` and `..._scales` hold the transposes of these: 32
numbers of 4 bits with one exponent. Only packed ones are written so: transformers writes the others
expert by expert, as most are published.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from seeupo_jax.policy.architecture import Moe
from seeupo_jax.policy.files.parameter_names import EXPERTS
from seeupo_jax.policy.files.safetensors_files import Tensors

_STACKED = re.compile(r"(.*\.)mlp\.experts\.(gate_up|down)_proj(_bias|_blocks|_scales)?")
_SINGLE = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_ROUTER = "mlp.gate.weight"
_FP4 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_FP4 = np.concatenate([_FP4, -_FP4])  # by the 4 bits: sign, two of exponent, one of mantissa
_BLOCK = 32  # numbers of an exponent
_BIAS = 127  # of the exponent


class _Part(NamedTuple):
    """An expert's matrix or bias in a stacked tensor: every `step`-th row from `first` on."""

    stacked: str
    kind: str
    expert: int
    first: int
    step: int


class StackedExperts:
    """Tensors of a folder, whose stacked experts are read one by one, by their family's names.

    Raises:
      ValueError: numbers of 4 bits without their exponents.
    """

    def __init__(self, files: Tensors, moe: Moe, *, packed: bool):
        """
        Args:
          packed: whether stacked experts are as gpt-oss has them.
        """
        self._files, self._packed = files, packed
        self._names, _ = EXPERTS[moe.names]
        self._parts: dict[str, _Part] = {}
        self._renamed: dict[str, str] = {}
        self.shapes = dict(files.shapes)
        for name, shape in files.shapes.items():
            found = _STACKED.fullmatch(name)
            if found is None or (not packed and (found[3] or len(shape) != 3)):
                continue
            prefix, matrix, kind = found[1], found[2], found[3] or ""
            del self.shapes[name]
            if kind == "_blocks" and (scales := _scales(name)) not in files.shapes:
                raise ValueError(f"a model in MXFP4 lacks {scales}, beside {name}.")
            if kind != "_scales":
                self._add(prefix, name, matrix, kind)
            self._rename_router(prefix)

    def _add(self, prefix: str, stacked: str, matrix: str, kind: str) -> None:
        """Names the experts of a stacked tensor, in the orientation [out, in]."""
        shape = self._files.shapes[stacked]
        if kind == "_blocks":
            shape = (*shape[:2], shape[2] * _BLOCK)
        elif self._packed and not kind:
            shape = (shape[0], *shape[:0:-1])
        halves = ("gate", "up") if matrix == "gate_up" else ("down",)
        rows, step = shape[1] // len(halves), len(halves) if self._packed else 1
        for expert in range(shape[0]):
            for place, half in enumerate(halves):
                leaf = f"mlp/{half}_bias" if kind == "_bias" else f"mlp/{half}"
                single = prefix + self._names[leaf].format(expert=expert)
                first = place if self._packed else place * rows
                self._parts[single] = _Part(stacked, kind, expert, first, step)
                self.shapes[single] = (rows, *shape[2:])

    def _rename_router(self, prefix: str) -> None:
        """transformers has one name for all families' routers in memory."""
        renamed, router = prefix + self._names["mlp/router"], prefix + _ROUTER
        if renamed != router and router in self.shapes:
            self._renamed[renamed] = router
            self.shapes[renamed] = self.shapes.pop(router)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor; `index` is of its rows, or of rows and columns."""
        if name not in self._parts:
            return self._files.read(self._renamed.get(name, name), index)
        stacked, kind, expert, first, step = self._parts[name]
        start, stop, _ = index[0].indices(self.shapes[name][0])
        columns = index[1] if len(index) > 1 else slice(None)
        only, lead = slice(expert, expert + 1), first % step
        span = slice(first - lead + start * step, first - lead + stop * step)
        if kind == "_blocks":
            both = (self._files.read(x, (only, span)) for x in (stacked, _scales(stacked)))
            return from_mxfp4(*(x[0, lead::step] for x in both))[:, columns]
        if self._packed and not kind:
            return self._files.read(stacked, (only, columns, span))[0].T[lead::step]
        return self._files.read(stacked, (only, span, *index[1:]))[0, lead::step]


def _scales(blocks: str) -> str:
    """The name of the exponents that belong to numbers of 4 bits."""
    return f"{blocks.removesuffix('_blocks')}_scales"


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers of MXFP4, float32 [..., 32 · G].

    Args:
      blocks: uint8 [..., G, 16], two numbers a byte, the lower bits first. scales: uint8 [..., G].
    """
    pairs = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, _BLOCK)
    exponent = scales.astype(np.int32)[..., None] - _BIAS
    return np.ldexp(_FP4[pairs], exponent).reshape(*scales.shape[:-1], -1)


def pack(
    sizes: Mapping[str, int], read: Callable[[str], np.ndarray]
) -> tuple[dict[str, int], Callable[[str], np.ndarray]]:
    """The inverse, for writing: sizes in bytes by the packed names, and how to read these."""
    packed: dict[str, int] = {}
    parts: dict[str, dict[int, dict[str, str]]] = {}
    for name, size in sizes.items():
        found = _SINGLE.fullmatch(name)
        target = name if found is None else _packed_name(*found.group(1, 3, 4))
        packed[target] = packed.get(target, 0) + size
        if found is not None:
            parts.setdefault(target, {}).setdefault(int(found[2]), {})[found[3]] = name

    def read_packed(name: str) -> np.ndarray:
        if name not in parts:
            return read(name)
        experts = [names for _, names in sorted(parts[name].items())]
        joined = [_joined([read(names[half]) for half in sorted(names)]) for names in experts]
        return np.ascontiguousarray(np.stack(joined))

    return packed, read_packed


def _packed_name(stem: str, half: str, kind: str) -> str:
    name = f"{stem}.{'down' if half == 'down' else 'gate_up'}_proj"
    return name if kind == "weight" else f"{name}_bias"


def _joined(halves: Iterable[np.ndarray]) -> np.ndarray:
    """One expert's packed matrix [in, out], or its bias."""
    turned = [half.T for half in halves]
    return np.stack(turned, axis=-1).reshape(*turned[0].shape[:-1], -1)
