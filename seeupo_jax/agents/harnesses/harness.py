"""What a harness is: a coding agent's program, started once per episode without a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# How long a program waits for an answer: the policy's time is not limited.
PATIENCE_MS = 86_400_000


@dataclass(frozen=True)
class PolicyAccess:
    """How a program reaches the policy in one episode.

    base_url: of OpenAI's APIs, ends in /v1. api_key: of the episode. model: the policy's name.
    max_context: tokens of a conversation. max_answer: tokens of an answer.
    """

    base_url: str
    api_key: str
    model: str
    max_context: int
    max_answer: int


# Variables by which a harness would reach another model, or find settings of the user or the place
# of the result.
_REMOVED = (
    *("ANTHROPIC_", "CLAUDE", "CODEX_", "LITELLM_", "MSWEA_", "OPENAI_", "OPENCODE", "QWEN_"),
    *("SEEUPO_", "XDG_"),
)


@dataclass(frozen=True)
class HarnessLaunch:
    """The start of a program: words after its name, variables, and files by path in its HOME."""

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])

    def variables(self, given: Mapping[str, str]) -> dict[str, str]:
        """The program's own variables, and those of `given` that do not lead it elsewhere."""
        kept = {name: x for name, x in given.items() if not name.startswith(_REMOVED)}
        return {**kept, **self.env}


@dataclass(frozen=True)
class Harness:
    """A coding agent.

    program: its usual name. tested: the release that the tests run.
    launch: of an instruction, the access and the HOME that the program will have.
    volatile: patterns of texts in its system messages that may differ between two calls of one
      conversation.
    """

    program: str
    tested: str
    launch: Callable[[str, PolicyAccess, Path], HarnessLaunch]
    volatile: tuple[str, ...] = ()


def as_json(settings: Mapping[str, Any]) -> str:
    """The text of a configuration file."""
    return json.dumps(settings, indent=1)
