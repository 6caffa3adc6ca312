"""OpenAI's Codex: `codex exec`, on OpenAI's responses."""

from __future__ import annotations

import json
from pathlib import Path

from seeupo_jax.agents.harnesses.harness import PATIENCE_MS, Harness, HarnessLaunch, PolicyAccess

# JSON's texts and numbers are TOML's. It retries nothing: each repetition would be a turn.
_CONFIG = """\
model = {model}
model_provider = "policy"
model_context_window = {max_context}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
analytics.enabled = false
feedback.enabled = false
history.persistence = "none"

[model_providers.policy]
name = "policy"
base_url = {base_url}
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
stream_idle_timeout_ms = {patience_ms}
"""


def _launch(instruction: str, access: PolicyAccess, home: Path) -> HarnessLaunch:
    config = _CONFIG.format(
        model=json.dumps(access.model),
        base_url=json.dumps(access.base_url),
        max_context=access.max_context,
        patience_ms=PATIENCE_MS,
    )
    words = ("exec", "--skip-git-repo-check", "--ephemeral", "--", instruction)
    env = {"OPENAI_API_KEY": access.api_key, "CODEX_HOME": str(home / ".codex")}
    return HarnessLaunch(words, env, {".codex/config.toml": config})


CODEX = Harness("codex", "0.171.0", _launch)
