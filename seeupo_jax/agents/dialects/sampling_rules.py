"""Rules for request fields that change sampling, which a run determines and a server does not."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from seeupo_jax.agents.calls import CallRefused
from seeupo_jax.rollout.engine.protocol import TurnSampling

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
    "text.verbosity": ("medium",),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "reasoning.effort": ("none",),
    "thinking": ({"type": "disabled"},),
    "truncation": ("disabled",),
    "background": (False,),
}


# Wishes of which a server may do nothing: clients send some of them with every request.
HINTS = (
    *("reasoning_effort", "reasoning.effort", "output_config.effort", "thinking"),
    *("verbosity", "text.verbosity", "truncation"),
)
IGNORED_WITH = "agent.ignore_sampling=True, or --ignore_sampling of serve,"


# What a server takes from a request: the least and the most of each field.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "seed": (-(2**63), 2**63 - 1),
    "n": (1, 128),
    "top_logprobs": (0, 20),
}
_BIASES, _BIAS = 300, 100  # number of biased tokens, and how much each is biased at most


class RequestSampling(NamedTuple):
    """What a request says of its sampling; fields as of `ModelCall`."""

    sampling: TurnSampling | None = None
    seed: int | None = None
    answers: int = 1


@dataclass(frozen=True)
class SamplingRules:
    """The sampling of the policy, which requests can change at a server only.

    ignore: a request that asks for other sampling is answered nevertheless, and counted.
    serves: each request may have its own sampling; the rules are what holds where it says nothing.
    constrains: a request may determine the form of its answer.
    without_media: images and files of a request are replaced by a text and counted, not refused.
    """

    temperature: float
    top_p: float | None = None
    top_k: int | None = None
    ignore: bool = False
    serves: bool = False
    constrains: bool = False
    without_media: bool = False

    def read(self, fields: Mapping[str, Any]) -> tuple[RequestSampling, list[str]]:
        """Returns a request's sampling, and the names of fields that are ignored.

        Args:
          fields: that may change the sampling; None: not given.

        Raises:
          CallRefused: a field asks for what cannot be had.
        """
        if not self.serves:
            return RequestSampling(), self.conflicting_fields(fields)
        given = {name: value for name, value in fields.items() if value is not None}
        for name, (least, most) in RANGES.items():
            if name in given and not least <= given[name] <= most:
                _refuse(name, given[name], f"{least} to {most}")
        answers = given.get("n", 1)
        if given.pop("best_of", answers) != answers:
            _refuse("best_of", fields["best_of"], "the value of n")
        sampling = self._sampling(given)
        others = {name: value for name, value in given.items() if name not in RANGES}
        others.pop("logit_bias", None)
        hints = [name for name in HINTS if not self._allows(name, others.pop(name, None))]
        request = RequestSampling(sampling, given.get("seed"), answers)
        return request, hints + self.conflicting_fields(others)

    def _sampling(self, given: Mapping[str, Any]) -> TurnSampling:
        top_k = given.get("top_k", self.top_k or 0)
        return TurnSampling(
            temperature=given.get("temperature", self.temperature),
            top_p=given.get("top_p", 1.0 if self.top_p is None else self.top_p),
            top_k=max(top_k, 0),
            min_p=given.get("min_p", 0.0),
            presence=given.get("presence_penalty", 0.0),
            frequency=given.get("frequency_penalty", 0.0),
            repetition=given.get("repetition_penalty", 1.0),
            bias=_read_biases(given.get("logit_bias", {})),
            top_logprobs=given.get("top_logprobs", 0),
        )

    def conflicting_fields(self, fields: Mapping[str, Any]) -> list[str]:
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

    def refuse_constraint(self, name: str) -> str:
        """Refuses a field that determines the form of an answer; returns it if it is ignored."""
        if self.ignore:
            return name
        raise CallRefused(
            f"{name}: got a form of the answer; allowed: none, unless the run has"
            f" agent.constraints=True ({IGNORED_WITH} ignores the field).",
            code="unsupported_value",
            param=name,
        )

    def refuse_ids(self, name: str) -> str:
        """Refuses a field that asks for token ids in an episode; returns it if it is ignored."""
        if self.ignore:
            return name
        raise CallRefused(
            f"{name}: got true in an episode, whose tokens the run keeps; allowed: no value"
            f" ({IGNORED_WITH} ignores the field).",
            code="unsupported_value",
            param=name,
        )

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


def _read_biases(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Biases by token."""
    if len(biases) > _BIASES:
        _refuse("logit_bias", f"{len(biases)} tokens", f"at most {_BIASES}")
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and abs(bias) <= _BIAS):
            got = {token: bias}
            _refuse("logit_bias", got, f"numbers from -{_BIAS} to {_BIAS} by token id")
    return tuple((int(token), bias) for token, bias in biases.items())


def _refuse(name: str, got: Any, allowed: str) -> NoReturn:
    sentence = f"{name}: got {reprlib.repr(got)}; allowed: {allowed}."
    raise CallRefused(sentence, code="invalid_value", param=name)
