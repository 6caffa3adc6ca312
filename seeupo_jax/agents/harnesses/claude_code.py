"""Anthropic's Claude Code: `claude --print`, on Anthropic's messages."""

from __future__ import annotations

from pathlib import Path

from seeupo_jax.agents.harnesses.harness import PATIENCE_MS, Harness, HarnessLaunch, PolicyAccess


def _launch(instruction: str, access: PolicyAccess, home: Path) -> HarnessLaunch:
    env = {
        "ANTHROPIC_BASE_URL": access.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": access.api_key,
        "ANTHROPIC_MODEL": access.model,
        "ANTHROPIC_SMALL_FAST_MODEL": access.model,  # for titles and summaries
        "CLAUDE_CODE_SUBAGENT_MODEL": access.model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(access.max_answer),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(access.max_context),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(access.max_context),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # telemetry, reports, updates
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "API_TIMEOUT_MS": str(PATIENCE_MS),
        "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS": str(PATIENCE_MS),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(PATIENCE_MS),
        "API_FORCE_IDLE_TIMEOUT": "0",
        "CLAUDE_CODE_MAX_RETRIES": "0",  # each repetition would be a turn
        "MAX_THINKING_TOKENS": "0",  # the chat template decides about thoughts
        "IS_SANDBOX": "1",  # else it refuses to act without questions as root
    }
    return HarnessLaunch(("--print", "--dangerously-skip-permissions", "--", instruction), env)


CLAUDE_CODE = Harness("claude", "2.1.332", _launch, volatile=(r"^x-anthropic-billing-header:.*$",))
