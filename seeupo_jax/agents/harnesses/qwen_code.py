"""Qwen Code: `qwen --yolo`, on OpenAI's chat completions."""

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
    generation = {
        "contextWindowSize": access.max_context,
        "timeout": PATIENCE_MS,
        "streamIdleTimeoutMs": 0,  # none
        "streamMaxLifetimeMs": 0,
        "maxRetries": 0,  # each repetition would be a turn
    }
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": access.model, "generationConfig": generation},
    }
    env = {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_MODEL": access.model,
        "QWEN_CODE_MAX_OUTPUT_TOKENS": str(access.max_answer),
        "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
    }
    words = ("--yolo", "--chat-recording=false", "--prompt", instruction)
    return HarnessLaunch(words, env, {".qwen/settings.json": as_json(settings)})


QWEN_CODE = Harness("qwen", "0.24.4", _launch)
