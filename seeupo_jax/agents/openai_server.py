"""An engine whose policy runs on a server (vLLM, sglang, sglang-jax), for evaluation.

Contexts and actions are token ids in both directions, so tokens are never re-tokenised. Servers
differ:

- Log-probabilities. vLLM returns them before temperature, top-k and top-p, unless it was started
  with `--logprobs-mode processed_logprobs`; sglang and sglang-jax after temperature and before
  top-k and top-p. An end token that a server returns without its log-probability has NaN.
- Seeds. vLLM samples every request from its seed, but rejects seeds on TPU (`seeded=False`);
  sglang uses them with `--enable-deterministic-inference`, sglang-jax with
  `--enable-deterministic-sampling`.
- The model's own end tokens also end an action, even if they are not among `end_ids`.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from seeupo_jax.agents.server_client import KEY_VARIABLE, Refused, ServerClient, TryAgain
from seeupo_jax.agents.server_dialects import DIALECTS, Reply, ServerDialect, complete
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.rollout.engine.protocol import Action, Turn
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.types import UNKNOWN_VERSION

TRIAL_TOKENS = 16  # limit of the request that tests a server
STEP_S = 0.02  # seconds that a step waits for an action; environments may answer meanwhile
# How OpenAI, vLLM, sglang, llama.cpp and this package's server refuse a conversation.
_TOO_LONG = re.compile(r"context[ _](length|size|window)|prompt is too long", re.IGNORECASE)


class _Answer(NamedTuple):
    """An action, the retries of its request, and what it used."""

    action: Action
    retries: int
    usage: Mapping[str, int]


def request_seed(seed: int, iteration: int, task: int, member: int, turn: int) -> int:
    """The seed of one action's request: 31 bits, the same in every process."""
    numbers = f"{seed},{iteration},{task},{member},{turn}".encode()
    return int.from_bytes(hashlib.sha256(numbers).digest()[:4]) >> 1


class OpenAIServer:
    """Samples actions on a server; an `Engine` for one process, which has all conversations.

    Args:
      url, model, timeout_s, retries, retry_wait_s, key_variable: as of `ServerClient`; an action
        whose request fails after its retries is a failure.
      concurrency: number of concurrent requests and open conversations.
      max_context: tokens of a conversation, at most the server's limit; None: the server's own,
        where a conversation ends that does not fit.
      dialect: `vllm`, `sglang`, `auto`: by the owner that the server reports; or one of its own.
      seeded: send a seed with each request.
      prompt: the context of the trial request; empty: an end token.

    Attributes:
      trial: tokens and log-probabilities of the trial, sampled greedily at temperature 1
        where the dialect says so.

    Raises:
      ValueError: the server does not answer, does not serve the model or the context length, or the
        trial returns no token ids with log-probabilities.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        *,
        concurrency: int,
        sampling: Sampling,
        max_context: int | None,
        timeout_s: float,
        retries: int,
        retry_wait_s: float,
        dialect: str | ServerDialect = "auto",
        seeded: bool = True,
        prompt: Sequence[int] = (),
        key_variable: str = KEY_VARIABLE,
    ):
        self._client = ServerClient(
            url,
            model,
            connections=concurrency,
            timeout_s=timeout_s,
            retries=retries,
            retry_wait_s=retry_wait_s,
            key_variable=key_variable,
        )
        if isinstance(dialect, str) and dialect not in ("auto", *DIALECTS):
            raise ValueError(f"dialect: got {dialect!r}; allowed: auto, {', '.join(DIALECTS)}.")
        self.concurrency = concurrency
        self._sampling, self._max_context, self._seeded = sampling, max_context, seeded
        self._dialect = self._choose_dialect(dialect)
        self.trial = self._try(prompt or sampling.end_ids[:1])
        self._threads = ThreadPoolExecutor(concurrency)
        self._pending: dict[Future[_Answer], Turn] = {}
        self._counts: Counter[str] = Counter()
        self.begin(None, seed=0)

    def begin(
        self,
        params: Any,
        *,
        seed: int,
        temperature: float | None = None,
        version: int = UNKNOWN_VERSION,
    ) -> None:
        """Starts a collection; parameters are ignored, since the server has its own."""
        for future in self._pending:
            future.cancel()
        self._pending = {}
        self._counts.clear()
        self._seed, self._version = seed, version
        self._current_sampling = self._sampling
        if temperature is not None:
            self._current_sampling = self._sampling._replace(temperature=temperature)

    def swap(self, params: Any, version: int) -> None:
        """Counts the requests from now on as that version's; parameters are ignored."""
        self._version = version

    @property
    def shard_owners(self) -> Sequence[int]:
        """One shard, since only one process uses a server."""
        return (0,)

    def one_policy(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: the server holds its policy."""
        return contextlib.nullcontext()

    def fits(self, context: Sequence[int]) -> bool:
        """Whether there is room for a full action after a context."""
        limit = self._max_context
        return limit is None or len(context) + self._sampling.max_tokens <= limit

    def submit(self, turn: Turn) -> None:
        """Requests an action; a grammar of the turn's tools is not applied."""
        numbers = self._seed, self._version
        future = self._threads.submit(self._sample, turn, *numbers, self._current_sampling)
        self._pending[future] = turn

    def step(self, unfinished: bool, stop: bool = False) -> list[Action] | None:
        """Returns the actions that have arrived; waits up to `STEP_S` if any is pending.

        Raises:
          ValueError: the server rejects a request.
          Stopped: `stop` is set.
        """
        if stop:
            raise Stopped
        if not unfinished and not self._pending:
            return None
        done, _ = wait(self._pending, STEP_S, FIRST_COMPLETED)
        actions = []
        for turn, answer in [(self._pending.pop(each), each.result()) for each in done]:
            self._counts["server_retries"] += answer.retries
            self._counts["server_failures"] += bool(answer.action.failure)
            self._counts.update(answer.usage)
            actions.append(_cut_at_stop(turn, answer.action))
        return actions

    def cancel(self, key: int) -> None:
        """Drops a turn; the server still completes a running request (`server_dropped`)."""
        for future in [future for future, turn in self._pending.items() if turn.key == key]:
            del self._pending[future]
            self._counts["server_dropped"] += not future.cancel()

    def release(self, key: int) -> None:
        """No effect: the server manages its cache."""

    @property
    def busy(self) -> bool:
        """Whether an action is pending."""
        return bool(self._pending)

    @property
    def poll_interval_s(self) -> float | None:
        """None: a step without pending actions does no work."""
        return None

    def usage(self) -> Mapping[str, int]:
        """The numbers of repeated requests, failed actions and dropped answers, and what the
        dialect reads of the server's (`Reply.usage`)."""
        return self._counts

    def seconds(self) -> Mapping[str, float]:
        """Empty: the server does not report device times."""
        return {}

    def close(self) -> None:
        """Ends the threads, each after its request, and the connections."""
        self._client.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    @property
    def model(self) -> str | None:
        """The served name."""
        return self._client.model

    def _choose_dialect(self, dialect: str | ServerDialect) -> ServerDialect:
        """Finds the model, and the form of requests for its actions."""
        card, url = self._client.card(), self._client.url
        longest = card.get("max_model_len")
        if longest is not None and self._max_context is not None and self._max_context > longest:
            raise ValueError(
                f"max_context: got {self._max_context}; allowed: at most the {longest} that"
                f" {url} was started with."
            )
        if not isinstance(dialect, str):
            return dialect
        if dialect == "auto":
            dialect = "sglang" if card.get("owned_by") == "sglang" else "vllm"
        if dialect == "sglang" and card.get("parent") is not None:
            raise ValueError(
                f"model: got {self.model!r}, adapters of {card['parent']!r}; allowed with sglang:"
                " whole models."
            )
        return DIALECTS[dialect]

    def _try(self, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of a trial request."""
        tokens = min(TRIAL_TOKENS, self._sampling.max_tokens)
        sampling = self._sampling._replace(max_tokens=tokens)
        if self._dialect.greedy_trial:
            sampling = sampling._replace(temperature=1.0, top_k=1)
        try:
            reply, _ = self._act(prompt, sampling, seed=0)
        except TryAgain as error:
            raise ValueError(
                f"{self._client.url}: {error}; allowed: {self._dialect.needs}, or another dialect"
                f" of {', '.join(DIALECTS)}."
            ) from None
        return reply.tokens, reply.logp

    def _sample(self, turn: Turn, seed: int, version: int, sampling: Sampling) -> _Answer:
        """Samples a turn's action."""
        seed = request_seed(seed, turn.iteration, turn.task, turn.member, turn.turn)
        if turn.limit is not None:
            sampling = sampling._replace(max_tokens=min(turn.limit, sampling.max_tokens))
        try:
            reply, retries = self._act(turn.context, sampling, seed)
        except TryAgain as error:
            return _Answer(Action(turn.key, [], [], failure=str(error)), self._client.retries, {})
        except Refused as error:
            if self._max_context is None and _TOO_LONG.search(error.reply):
                return _Answer(Action(turn.key, [], [], too_long=True), 0, {})
            raise
        version_L = [version] * len(reply.tokens)
        action = Action(turn.key, reply.tokens, reply.logp, version_L=version_L)
        return _Answer(action, retries, reply.usage)

    def _act(self, context: Sequence[int], sampling: Sampling, seed: int) -> tuple[Reply, int]:
        """Requests an action; returns it and the number of retries."""
        dialect = self._dialect
        body = dialect.body(self.model, context, sampling, seed if self._seeded else None)
        return self._client.ask(
            "POST", dialect.path, body, lambda reply: complete(dialect.read(reply), sampling)
        )


def _cut_at_stop(turn: Turn, action: Action) -> Action:
    """Truncates an action where its turn's listener ends it."""
    if turn.listen is None or action.failure or action.too_long:
        return action
    count = turn.listen(action.tokens)
    kept = (each[:count] for each in (action.tokens, action.logp, action.version_L))
    tokens, logp, version_L = kept
    return Action(action.key, tokens, logp, version_L=version_L)
