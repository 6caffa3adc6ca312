"""Rules for request fields that would change sampling, which the run determines."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.agents.calls import CallRefused

# Values without effect, by field; any value of other fields would have an effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "text.format": ({"type": "text"},),
    "text.verbosity": ("medium",),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "reasoning.effort": ("none",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ("auto", "none"),
    "tool_choice.type": ("auto", "none"),
    "truncation": ("disabled",),
    "background": (False,),
}


IGNORED_WITH = "agent.ignore_sampling=True, or --ignore_sampling of serve,"


@dataclass(frozen=True)
class SamplingRules:
    """The sampling of the policy, which requests cannot change.

    ignore: a request that asks for other sampling is answered nevertheless, and counted.
    """

    temperature: float
    top_p: float | None = None
    top_k: int | None = None
    ignore: bool = False

    def asks_otherwise(self, fields: Mapping[str, Any]) -> list[str]:
        """Returns the fields that ask for other sampling than the rules; None has no effect.

        Raises:
          CallRefused: there is such a field, and it is not ignored.
        """
        others = [name for name, value in fields.items() if not self._allows(name, value)]
        if others and not self.ignore:
            name, allowed = others[0], self._allowed(others[0])
            hint = "; --temperature of serve sets it" if name == "temperature" else ""
            raise CallRefused(
                f"{name}: got {reprlib.repr(fields[name])}; allowed:"
                f" {' or '.join(map(repr, allowed)) if allowed else 'no value'},"
                " since the run or server determines the sampling"
                f" ({IGNORED_WITH} ignores the field{hint}).",
                code="unsupported_value",
                param=name,
            )
        return others

    def _allowed(self, name: str) -> tuple[Any, ...]:
        match name:
            case "temperature":
                return (self.temperature,)
            case "top_p":
                return (1 if self.top_p is None else self.top_p,)
            case "top_k":
                allowed = (-1, 0) if self.top_k is None else (self.top_k,)
                return allowed if self.temperature else (*allowed, 1)  # 1 is greedy too
            case _:
                return NEUTRAL.get(name, ())

    def _allows(self, name: str, value: Any) -> bool:
        if value is None or value in self._allowed(name):
            return True
        # Greedy sampling takes the likeliest token, which either field keeps.
        return not self.temperature and (name == "top_p" or (name == "top_k" and value >= 1))
