"""mini-SWE-agent: `mini`, by litellm on OpenAI's chat completions."""

from __future__ import annotations

from pathlib import Path

from seeupo_jax.agents.harnesses.harness import PATIENCE_MS, Harness, HarnessLaunch, PolicyAccess


def _launch(instruction: str, access: PolicyAccess, home: Path) -> HarnessLaunch:
    env = {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_BASE": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched
        "MSWEA_CONFIGURED": "true",  # else it asks questions
        "MSWEA_COST_TRACKING": "ignore_errors",  # the policy has no price
        "MSWEA_SILENT_STARTUP": "1",
        "REQUEST_TIMEOUT": str(PATIENCE_MS // 1000),
        "DEFAULT_MAX_RETRIES": "0",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # each repetition would be a turn
    }
    words = (
        *("--agent-class", "default"),  # the interactive one needs a terminal
        *("--model", f"openai/{access.model}"),
        *("--cost-limit", "0"),
        *("--output", str(home / "trajectory.json")),
        *("--task", instruction),
    )
    return HarnessLaunch(words, env)


MINI_SWE_AGENT = Harness("mini", "2.4.6", _launch)
