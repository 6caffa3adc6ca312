"""opencode: `opencode run`, on OpenAI's chat completions."""

from __future__ import annotations

from pathlib import Path

from seeupo_jax.agents.harnesses.harness import (
    PATIENCE_MS,
    Harness,
    HarnessLaunch,
    PolicyAccess,
    as_json,
)


def _launch(instruction: str, access: PolicyAccess, home: Path) -> HarnessLaunch:
    limit = {"context": access.max_context, "output": access.max_answer}
    options = {
        "baseURL": access.base_url,
        "apiKey": "{env:OPENAI_API_KEY}",
        **dict.fromkeys(("timeout", "headerTimeout", "chunkTimeout"), PATIENCE_MS),
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": options,
        "models": {access.model: {"limit": limit}},
    }
    name = f"policy/{access.model}"
    config = {
        "model": name,
        "small_model": name,
        "provider": {"policy": provider},
        "permission": {"*": "allow"},
        "autoupdate": False,
        "share": "disabled",
        "snapshot": False,
    }
    env = {
        "OPENAI_API_KEY": access.api_key,
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    }
    # Without a title the policy would be asked for one in a conversation of its own.
    words = ("run", "--pure", "--title", "episode", "--", instruction)
    return HarnessLaunch(words, env, {".config/opencode/opencode.json": as_json(config)})


OPENCODE = Harness("opencode", "1.18.33", _launch)
