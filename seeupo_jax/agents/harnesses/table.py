"""The harnesses by the name that `config.agent.harness` has."""

from __future__ import annotations

from seeupo_jax.agents.harnesses.claude_code import CLAUDE_CODE
from seeupo_jax.agents.harnesses.codex import CODEX
from seeupo_jax.agents.harnesses.harness import Harness
from seeupo_jax.agents.harnesses.mini_swe_agent import MINI_SWE_AGENT
from seeupo_jax.agents.harnesses.opencode import OPENCODE
from seeupo_jax.agents.harnesses.qwen_code import QWEN_CODE

HARNESSES: dict[str, Harness] = {
    "claude_code": CLAUDE_CODE,
    "codex": CODEX,
    "mini_swe_agent": MINI_SWE_AGENT,
    "opencode": OPENCODE,
    "qwen_code": QWEN_CODE,
}
# Of all harnesses: a server does not know which of them calls.
VOLATILE = tuple(pattern for harness in HARNESSES.values() for pattern in harness.volatile)
