"""Adapters of matrices that a family's folders hold in one tensor, which is one module to PEFT.

Phi-3's `qkv_proj` has one adapter there; here each of q, k and v has its own, of rank r. Written,
theirs is of rank 3r: the A's lie one below the other, the B's in blocks along a diagonal, and zeros
are around them. Read, one of rank r is the adapter of every part: all have its A, and each has its
rows of B. In what goes through this file, a tensor of the module holds its parts' one below the
other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from seeupo_jax.policy.architecture import LoraAdapters
from seeupo_jax.policy.files.parameter_names import StoredParameter, shape_in_file
from seeupo_jax.policy.files.safetensors_files import Tensors

# Modules -> the projections that they hold, by Hugging Face's names.
MODULES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_A, _B = ".lora_A.weight", ".lora_B.weight"


def module_of(name: str) -> str | None:
    """The fused module that a tensor of adapters belongs to; None: another one."""
    module = name.rpartition(".lora_")[0].rpartition(".")[2]
    return module if module in MODULES else None


def parts_of(modules: Sequence[str]) -> list[str]:
    """Names of modules, with the parts in place of those that are fused."""
    return [part for name in modules for part in MODULES.get(name, (name,))]


def patterns(
    lora: LoraAdapters, modules: Collection[str]
) -> tuple[dict[str, int], dict[str, float]]:
    """Ranks and alphas of fused modules with the adapters of all parts, whose scale is the same."""
    counts = {name: len(MODULES[name]) for name in MODULES if name in modules}
    ranks = {name: lora.rank * count for name, count in counts.items()}
    power = 0.5 if lora.rslora else 1
    return ranks, {name: lora.alpha * count**power for name, count in counts.items()}


def rows_of_parts(adapters: Any, stored: Sequence[StoredParameter]) -> dict[str, tuple[int, ...]]:
    """The outputs of the parts of fused modules, by the modules' names.

    Args:
      adapters: their tree, or that of their shapes.
    """
    rows: dict[str, dict[int, int]] = {}
    for each in stored:
        module = module_of(each.names[0])
        if module is not None and each.first_row is not None and each.path[-1] == "lora_b":
            rows.setdefault(module, {})[each.first_row] = shape_in_file(adapters, each)[0]
    return {module: tuple(sizes[row] for row in sorted(sizes)) for module, sizes in rows.items()}


def to_peft(parts: Sequence[np.ndarray], name: str) -> np.ndarray:
    """A tensor of a module's adapter from those of its parts."""
    if name.endswith(_A):
        return np.concatenate(parts)
    rank = parts[0].shape[1]
    b = np.zeros((sum(map(len, parts)), rank * len(parts)), parts[0].dtype)
    row = 0
    for number, part in enumerate(parts):
        b[row : row + len(part), rank * number : rank * (number + 1)] = part
        row += len(part)
    return b


class FusedAdapterTensors:
    """The tensors of a folder of adapters, those of fused modules as their parts'.

    Raises:
      ValueError: a module of several parts' rank whose B is not blocks along a diagonal.
    """

    def __init__(self, tensors: Tensors, rank: int, rows: Mapping[str, Sequence[int]], place: str):
        """
        Args:
          rank: of each part. rows: the outputs of each part, by the names of fused modules.
          place: for errors.
        """
        self._tensors, self._rank, self._rows = tensors, rank, rows
        self._wide: set[str] = set()  # names of tensors whose module has the ranks of all parts
        self.shapes = dict(tensors.shapes)
        for name, shape in tensors.shapes.items():
            module = module_of(name)
            if module not in rows or len(shape) != 2:
                continue
            parts = len(rows[module])
            if shape[name.endswith(_B)] == rank * parts:
                self._wide.add(name)
            if shape[name.endswith(_B)] in (rank, rank * parts):
                self.shapes[name] = (
                    (shape[0], rank) if name.endswith(_B) else (rank * parts, shape[1])
                )
            if name in self._wide and name.endswith(_B) and self._outside(name, module):
                raise ValueError(
                    f"{place}: {name} has numbers outside of its {parts} blocks of rank {rank};"
                    " allowed: the adapters of its parts, as they are written here."
                )

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """See `Tensors`."""
        if self.shapes[name] == self._tensors.shapes[name]:
            return self._tensors.read(name, index)
        x = self._tensors.read(name, (slice(None), slice(None)))
        if name.endswith(_A):
            return np.concatenate([x] * (self.shapes[name][0] // self._rank))[index]
        return np.concatenate(self._blocks(x, module_of(name) or ""))[index]

    def _blocks(self, b: np.ndarray, module: str) -> list[np.ndarray]:
        """The blocks along the diagonal: views."""
        blocks, row = [], 0
        for number, rows in enumerate(self._rows[module]):
            columns = slice(self._rank * number, self._rank * (number + 1))
            blocks.append(b[row : row + rows, columns])
            row += rows
        return blocks

    def _outside(self, name: str, module: str) -> bool:
        """Whether a number is outside of the blocks."""
        b = np.array(self._tensors.read(name, (slice(None), slice(None))))
        for block in self._blocks(b, module):
            block[...] = 0
        return bool(b.any())
