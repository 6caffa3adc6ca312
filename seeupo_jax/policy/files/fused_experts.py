"""Experts that a model folder holds as transformers 5 does in memory: one tensor for a layer's.

`mlp.experts.gate_up_proj` is [E, 2F, D], the rows of gate above those of up, and
`mlp.experts.down_proj` [E, D, F]. Published folders have every expert's matrices by themselves, and
so does what transformers writes unless it is asked not to.
"""

from __future__ import annotations

import re

import numpy as np

from seeupo_jax.policy.architecture import Moe
from seeupo_jax.policy.files.parameter_names import EXPERTS
from seeupo_jax.policy.files.safetensors_files import Tensors

_FUSED = re.compile(r"(.*\.)mlp\.experts\.(gate_up|down)_proj")
_ROUTER = "mlp.gate.weight"


class FusedExperts:
    """Tensors of a folder, whose fused experts are read one by one, by their family's names."""

    def __init__(self, files: Tensors, moe: Moe):
        self._files = files
        self._parts: dict[str, tuple[str, int, int]] = {}  # name: fused one, expert, first row
        self._renamed: dict[str, str] = {}
        self.shapes = dict(files.shapes)
        names, _ = EXPERTS[moe.names]
        for name, shape in files.shapes.items():
            found = _FUSED.fullmatch(name)
            if found is None or len(shape) != 3:
                continue
            del self.shapes[name]
            prefix, matrix = found.groups()
            halves = ("gate", "up") if matrix == "gate_up" else ("down",)
            rows = shape[1] // len(halves)
            for expert in range(shape[0]):
                for place, half in enumerate(halves):
                    single = prefix + names[f"mlp/{half}"].format(expert=expert)
                    self._parts[single] = name, expert, place * rows
                    self.shapes[single] = (rows, shape[2])
            router = prefix + _ROUTER
            if names["mlp/router"] != _ROUTER and router in self.shapes:
                renamed = prefix + names["mlp/router"]
                self._renamed[renamed] = router
                self.shapes[renamed] = self.shapes.pop(router)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor; `index` is of its rows, or of rows and columns."""
        if name not in self._parts:
            return self._files.read(self._renamed.get(name, name), index)
        fused, expert, first = self._parts[name]
        start, stop, _ = index[0].indices(self.shapes[name][0])
        rows = slice(first + start, first + stop)
        return self._files.read(fused, (slice(expert, expert + 1), rows, *index[1:]))[0]
