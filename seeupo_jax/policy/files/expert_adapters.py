"""Adapters of experts in PEFT's files, where a layer's experts share two tensors for each matrix.

PEFT (`target_parameters`) wraps the parameters `gate_up_proj` and `down_proj` of a module that
holds all experts of a layer: of the one wrapped first, names have `base_layer`. A is [E·r, in], B
is [out, r·E]; gate and up have one A. Axes as in `policy/moe.py`, and r the rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from seeupo_jax.policy.files.safetensors_files import Tensors

PARAMETERS = {
    ("gate_proj", "up_proj"): "mlp.experts.gate_up_proj",
    ("down_proj",): "mlp.experts.down_proj",
}
_MODULE = ".mlp.experts."
_OUR_NAME = re.compile(r"(.*\.mlp\.experts\.)(lora_\w+)")


def parameters_of(targets: tuple[str, ...]) -> list[str]:
    """The parameters that PEFT has adapters of, for projections by Hugging Face's names."""
    return [name for parts, name in PARAMETERS.items() if set(parts) <= set(targets)]


def targets_of(parameters: list[str]) -> list[str]:
    """The inverse of `parameters_of`."""
    return [part for parts, name in PARAMETERS.items() if name in parameters for part in parts]


def name_in_layer(leaf: str) -> str:
    """What follows a layer's name in ours of a tensor, which has the parameter's own shape."""
    return f"mlp.experts.{leaf}"


def to_peft(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of adapters by PEFT's names, from those of experts by ours."""
    found, experts = {}, {}
    for name, x in tensors.items():
        if match := _OUR_NAME.fullmatch(name):
            experts.setdefault(match[1], {})[match[2]] = x
        else:
            found[name] = x
    for module, leaves in experts.items():
        inner = "lora_gate_up_a" in leaves and "lora_down_a" in leaves
        if "lora_gate_up_a" in leaves:
            both = np.concatenate([leaves["lora_gate_b"], leaves["lora_up_b"]], axis=2)
            prefix = f"{module}base_layer." if inner else module
            found |= _peft_pair(prefix, leaves["lora_gate_up_a"], both)
        if "lora_down_a" in leaves:
            found |= _peft_pair(module, leaves["lora_down_a"], leaves["lora_down_b"])
    return found


def _peft_pair(prefix: str, a_EDR: np.ndarray, b_ERF: np.ndarray) -> dict[str, np.ndarray]:
    experts, width, rank = a_EDR.shape
    a = a_EDR.transpose(0, 2, 1).reshape(experts * rank, width)
    b = b_ERF.transpose(2, 1, 0).reshape(b_ERF.shape[2], rank * experts)
    return {
        f"{prefix}lora_A.weight": np.ascontiguousarray(a),
        f"{prefix}lora_B.weight": np.ascontiguousarray(b),
    }


class ExpertAdapterTensors:
    """The tensors of a folder of adapters, those of experts by our names and in our shapes.

    One that is not as PEFT's is left under its name, which no parameter has.
    """

    def __init__(self, tensors: Tensors, experts: int, targets: tuple[str, ...]):
        """
        Args:
          experts: of a layer. targets: projections of experts that have adapters.
        """
        self._tensors, self._experts = tensors, experts
        self._parts: dict[str, tuple[str, slice]] = {}  # our name -> PEFT's, and rows of it
        self.shapes = dict(tensors.shapes)
        fused, both = "gate_proj" in targets, {"gate_proj", "down_proj"} <= {*targets}
        for name, shape in tensors.shapes.items():
            module, _, rest = name.partition(_MODULE)
            inner = rest.startswith("base_layer.")
            side = rest.removeprefix("base_layer.").removesuffix(".weight")
            if side not in ("lora_A", "lora_B") or len(shape) != 2 or inner > both:
                continue
            if not shape[side == "lora_B"] % experts:
                self._split(f"{module}{_MODULE}", name, side, inner if both else fused)

    def _split(self, prefix: str, name: str, side: str, fused: bool) -> None:
        rows, columns = self.shapes.pop(name)
        E, whole = self._experts, slice(None)
        if side == "lora_A":
            leaf = "lora_gate_up_a" if fused else "lora_down_a"
            self._parts[prefix + leaf] = name, whole
            self.shapes[prefix + leaf] = (E, columns, rows // E)
            return
        half = rows // 2
        parts = {"lora_down_b": whole}
        if fused:
            parts = {"lora_gate_b": slice(half), "lora_up_b": slice(half, rows)}
        for leaf, part in parts.items():
            self._parts[prefix + leaf] = name, part
            self.shapes[prefix + leaf] = (E, columns // E, len(range(rows)[part]))

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """See `Tensors`."""
        if name not in self._parts:
            return self._tensors.read(name, index)
        stored, rows = self._parts[name]
        x = self._tensors.read(stored, (rows, slice(None)))
        E, inputs, outputs = self.shapes[name]
        if name.endswith("_a"):
            return x.reshape(E, outputs, inputs).transpose(0, 2, 1)[index]
        return x.reshape(outputs, inputs, E).transpose(2, 1, 0)[index]
