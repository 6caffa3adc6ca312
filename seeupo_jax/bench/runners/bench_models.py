"""Networks to measure with: real sizes, random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from flax import nnx

from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.transformer import Transformer

_SMALL = {"vocab_size": 8192, "width": 256, "layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 64}
_QWEN = {"vocab_size": 151_936, "head_dim": 64, "kv_heads": 2, "qkv_bias": True, "qk_norm": False}
# For rehearsals, with the vocabulary of the order desk's tokenizer; Qwen3's layout; that of
# SmolLM2-135M, Qwen2.5-0.5B and Qwen2.5-1.5B.
MODELS: dict[str, dict[str, Any]] = {
    "nano": {
        "vocab_size": 896,
        "width": 16,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "mlp_width": 24,
    },
    "tiny": _SMALL | {"mlp_width": 512},
    "135m": {
        "vocab_size": 49_152,
        "width": 576,
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "mlp_width": 1536,
        "qk_norm": False,
    },
    "0.5b": _QWEN | {"width": 896, "layers": 24, "heads": 14, "mlp_width": 4864},
    "1.5b": _QWEN | {"width": 1536, "layers": 28, "heads": 12, "mlp_width": 8960, "head_dim": 128},
}


def architecture(name: str, dtype: str) -> Architecture:
    """Of one of `MODELS`.

    Args:
      dtype: of activations.

    Raises:
      ValueError: an unknown name.
    """
    if name not in MODELS:
        raise ValueError(f"--model: got {name!r}; allowed: {', '.join(MODELS)}.")
    return Architecture(**MODELS[name], dtype=dtype)


def activations(platform: str) -> str:
    """The type that a platform is fast in: on CPU float32, where XLA's bfloat16 is slower still."""
    return "float32" if platform == "cpu" else "bfloat16"


def write(arch: Architecture, folder: Path, *, seed: int, dtype: str = "float32") -> None:
    """A folder with random weights that both sides load.

    Args:
      dtype: of the weights in it.
    """
    save_pretrained(Transformer(arch, nnx.Rngs(seed)), folder, dtype=dtype)


def only_device() -> jax.Device:
    """The device to measure on.

    Raises:
      ValueError: there are several, which the baseline would not use.
    """
    devices = jax.devices()
    if len(devices) != 1:
        raise ValueError(
            f"bench: got {len(devices)} devices; allowed: one, as with CUDA_VISIBLE_DEVICES=0."
        )
    return devices[0]


def torch_device(platform: str) -> str:
    """PyTorch's name of a platform."""
    return "cuda" if platform in ("gpu", "cuda") else "cpu"
