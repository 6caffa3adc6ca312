"""A teacher behind an OpenAI-compatible server, which scores the tokens of prompts."""

from __future__ import annotations

import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from seeupo_jax.errors import NotLearning

KEY_VARIABLE = "SEEUPO_TEACHER_KEY"
_AT_ONCE = 8  # requests
_TIMEOUT_S = 600.0  # of one, whose program the server may have to compile
_WAITS_S = (1.0, 5.0, 20.0)  # before a request that failed on its way is sent again
# Prompts are echoed with their log-probabilities (vLLM and seeupo-serve), or else as vLLM has them.
_ECHOED = {"max_tokens": 0, "echo": True, "logprobs": 0}
_OF_PROMPT = {"max_tokens": 1, "prompt_logprobs": 0}


class _Refused(Exception):
    """The server answered that it will not: its own words."""


@dataclass(frozen=True)
class TeacherServer:
    """A server's model; every request has token ids as its prompt, so nothing is tokenised.

    url: with the version, such as http://127.0.0.1:8000/v1; `SEEUPO_TEACHER_KEY` is its key.
    field: of the configuration that has the url.
    """

    url: str
    field: str

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probabilities of every token but the first of each sequence [L - 1], nats, at
        temperature 1.

        Raises:
          NotLearning: one sentence, where the server does not answer or has none.
        """
        try:
            model = self._model()
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                return [*pool.map(lambda tokens: self._scores(model, tokens)[0], sequences)]
        except ValueError as error:
            raise NotLearning(str(error)) from error

    def check(self, contents: dict[int, bytes]) -> None:
        """Checks that the server answers, scores prompts, and has these tokens.

        Args:
          contents: the policy's tokens by id; up to 64 of them are compared, as texts.

        Raises:
          ValueError: one sentence.
        """
        ids = [token for token, content in contents.items() if _is_word(content)]
        asked = np.array(ids[:: max(1, len(ids) // 64)][:64], np.int32)
        if not asked.size:
            asked = np.array([*contents][:2], np.int32)
        _, texts = self._scores(self._model(), asked)
        for token, text in zip(asked.tolist(), texts, strict=False):
            wanted = contents[token].decode(errors="replace")
            if text is not None and text.strip() != wanted.strip():
                raise ValueError(
                    f"{self.field}: got {self.url}, whose token {token} is {text!r} instead of"
                    f" {wanted!r}; allowed: a model with the policy's tokenizer."
                )

    def _model(self) -> str:
        listed = self._ask("models", None)
        try:
            return listed["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{self.field}: {self.url}/models lists no model.") from None

    def _scores(self, model: str, tokens: np.ndarray) -> tuple[np.ndarray, list[str | None]]:
        """Of one sequence: the log-probabilities of all tokens but the first, and their texts."""
        refusals = []
        for how in (_ECHOED, _OF_PROMPT):
            body = {"model": model, "prompt": tokens.tolist(), "temperature": 1, **how}
            try:
                choice = self._ask("completions", body)["choices"][0]
                found = _read(choice, tokens)
            except _Refused as refusal:
                refusals.append(str(refusal))
                continue
            except (KeyError, IndexError, TypeError, ValueError):
                found = None
            if found is not None:
                return found
        why = f": {refusals[0]}" if refusals else ""
        raise ValueError(
            f"{self.field}: {self.url} gave no log-probabilities of a prompt of {len(tokens)}"
            f" token ids; allowed: a server of /completions with echo and logprobs, or with"
            f" prompt_logprobs, for contexts of that length{why}"
        )

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        url, problem = f"{self.url.rstrip('/')}/{path}", ""
        for wait in (*_WAITS_S, None) if body is not None else (None,):
            try:
                request = urllib.request.Request(url, data, headers)
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                problem = _message(error)
                if body is not None and error.code in (400, 404, 413, 422):
                    raise _Refused(problem) from error
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, ValueError) as error:
                problem = str(error)
            if wait is not None:
                time.sleep(wait)
        raise ValueError(
            f"{self.field}: {url} does not answer: {problem[:300]}; allowed: a server that runs,"
            f" whose key {KEY_VARIABLE} has."
        )


def _read(choice: Any, tokens: np.ndarray) -> tuple[np.ndarray, list[str | None]] | None:
    """The scores of an answer in either form; None: it has not one for every token."""
    if choice.get("prompt_logprobs") is not None:
        entries = choice["prompt_logprobs"][1:]
        own = [each[str(token)] for each, token in zip(entries, tokens[1:].tolist(), strict=True)]
        logp = [each["logprob"] for each in own]
        texts = [None, *(each.get("decoded_token") for each in own)]
    else:
        logp = choice["logprobs"]["token_logprobs"][1 : len(tokens)]
        texts = [*choice["logprobs"]["tokens"][: len(tokens)]]
    if len(logp) != len(tokens) - 1 or not all(p is not None and math.isfinite(p) for p in logp):
        return None
    return np.array(logp, np.float32), texts


def _is_word(content: bytes) -> bool:
    """Whether every tokenizer shows a token as the same text, but for spaces around it."""
    return content.strip().isalnum() and content.isascii()


def _message(error: urllib.error.HTTPError) -> str:
    """What a server says of its refusal."""
    text = error.read().decode(errors="replace")
    try:
        told = json.loads(text)
        return str(told.get("error", told).get("message", text))[:300]
    except (ValueError, AttributeError):
        return text[:300] or str(error)
