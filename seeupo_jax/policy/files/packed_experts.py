"""Experts that a model folder packs into one tensor a layer (gpt-oss), in bfloat16 or in MXFP4.

`gate_up_proj` is [E, D, 2F], the columns of gate and up in turn, and `down_proj` [E, F, D]. In
MXFP4 (OCP Microscaling Formats 1.0) `..._blocks` and `..._scales` hold their transposes: 32 numbers
of 4 bits with one exponent. Here every expert's matrices have names of their own, as elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from seeupo_jax.policy.files.safetensors_files import Tensors

_PACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias|_blocks|_scales)?")
_SINGLE = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_FP4 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_FP4 = np.concatenate([_FP4, -_FP4])  # by the 4 bits: sign, two of exponent, one of mantissa
_BLOCK = 32  # numbers of an exponent
_BIAS = 127  # of the exponent
_HALF = {"gate": 0, "up": 1}  # which of every two columns


class PackedExperts:
    """Tensors of a folder, whose packed experts are read one by one.

    Raises:
      ValueError: numbers of 4 bits without their exponents.
    """

    def __init__(self, files: Tensors):
        self._files = files
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in files.shapes.items():
            found = _PACKED.fullmatch(name)
            if found is None:
                self.shapes[name] = shape
                continue
            stem, matrix, kind = found.groups()
            if kind == "_blocks" and (scales := f"{stem}.{matrix}_proj_scales") not in files.shapes:
                raise ValueError(f"a model in MXFP4 lacks {scales}, beside {name}.")
            if kind != "_scales":
                self._add(stem, matrix, kind == "_bias", _shape(shape, kind))

    def _add(self, stem: str, matrix: str, bias: bool, shape: tuple[int, ...]) -> None:
        """Names the experts of a packed tensor, in the orientation [out, in]."""
        count, outputs = shape[0], shape[1]
        halves = ("gate", "up") if matrix == "gate_up" else ("down",)
        kind = "bias" if bias else "weight"
        for expert in range(count):
            for half in halves:
                single = (outputs // len(halves), *shape[2:])
                self.shapes[f"{stem}.{expert}.{half}_proj.{kind}"] = single

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A part of a tensor; `index` is of its rows, or of rows and columns."""
        found = _SINGLE.fullmatch(name)
        if found is None:
            return self._files.read(name, index)
        stem, expert, half, kind = found.groups()
        size = self.shapes[name]
        spans = [part.indices(n)[:2] for part, n in zip(index, size, strict=False)]
        spans += [(0, n) for n in size[len(spans) :]]
        packed = f"{stem}.{'down' if half == 'down' else 'gate_up'}_proj"
        step = 1 if half == "down" else 2
        rows = slice(spans[0][0] * step, spans[0][1] * step)
        only, every = slice(int(expert), int(expert) + 1), slice(_HALF.get(half, 0), None, step)
        if kind == "bias":
            return self._files.read(f"{packed}_bias", (only, rows))[0, every]
        columns = slice(*spans[1])
        if f"{packed}_blocks" in self._files.shapes:
            blocks, scales = (
                self._files.read(f"{packed}{part}", (only, rows))[0, every]
                for part in ("_blocks", "_scales")
            )
            return from_mxfp4(blocks, scales)[:, columns]
        return self._files.read(packed, (only, columns, rows))[0].T[every]


def _shape(packed: tuple[int, ...], kind: str | None) -> tuple[int, ...]:
    """[E, out, in] of a matrix, [E, out] of a bias."""
    if kind == "_blocks":
        return (*packed[:2], packed[2] * _BLOCK)
    return packed if kind == "_bias" else (packed[0], *packed[:0:-1])


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
