"""The table of tool formats."""

from __future__ import annotations

from collections.abc import Mapping

from seeupo_jax.envs.tool_formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from seeupo_jax.envs.tool_formats.gemma import GEMMA
from seeupo_jax.envs.tool_formats.glm import GLM
from seeupo_jax.envs.tool_formats.harmony import HARMONY
from seeupo_jax.envs.tool_formats.hermes import HERMES
from seeupo_jax.envs.tool_formats.kimi import KIMI
from seeupo_jax.envs.tool_formats.llama import LLAMA, LLAMA_FUNCTION
from seeupo_jax.envs.tool_formats.mistral import MISTRAL, MISTRAL_ARGS
from seeupo_jax.envs.tool_formats.qwen3_coder import QWEN3_CODER
from seeupo_jax.envs.tool_formats.tool_format import ToolFormat

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    each.name: each
    for each in (
        *(HERMES, LLAMA, LLAMA_FUNCTION, QWEN3_CODER, GLM, MISTRAL, MISTRAL_ARGS),
        *(DEEPSEEK_V3, DEEPSEEK_V31, KIMI, GEMMA, HARMONY),
    )
}


def choose_format(name: str) -> ToolFormat:
    """Returns a tool format by its name."""
    if name not in TOOL_FORMATS:
        raise ValueError(f"tool_format: got {name!r}; allowed: {', '.join(TOOL_FORMATS)}.")
    return TOOL_FORMATS[name]
