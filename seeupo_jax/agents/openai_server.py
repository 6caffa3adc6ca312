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

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import urllib3

from seeupo_jax.agents.server_dialects import DIALECTS, ServerDialect, complete
from seeupo_jax.configuration.user_code import listed
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.rollout.engine.protocol import Action, Turn
from seeupo_jax.rollout.engine.sampling import Sampling

TRIAL_TOKENS = 16  # limit of the request that tests a server
STEP_S = 0.02  # seconds that a step waits for an action; environments may answer meanwhile
SHOWN = 300  # characters of a reply that an error quotes

Read = TypeVar("Read")


class _TryAgain(Exception):
    """A request failed and may be repeated; the text is the reason."""


def request_seed(seed: int, iteration: int, task: int, member: int, turn: int) -> int:
    """The seed of one action's request: 31 bits, the same in every process."""
    numbers = f"{seed},{iteration},{task},{member},{turn}".encode()
    return int.from_bytes(hashlib.sha256(numbers).digest()[:4]) >> 1


class OpenAIServer:
    """Samples actions on a server; an `Engine` for one process, which has all conversations.

    The key is the environment variable OPENAI_API_KEY, if set.

    Args:
      url: with or without `/v1` at the end.
      model: the served name; None: the only model that the server lists.
      concurrency: number of concurrent requests and open conversations.
      max_context: tokens of a conversation, at most the server's limit.
      timeout_s: a request fails after this many seconds without an answer.
      retries: of a request that failed temporarily (no connection, no answer in time, status 408,
        429 or 5xx, an invalid reply); after them its action is a failure.
      retry_wait_s: seconds before the first retry, doubled for each further one.
      dialect: `vllm`, `sglang`, or `auto`: by the owner that the server reports.
      seeded: send a seed with each request.
      prompt: the context of the trial request; empty: an end token.

    Attributes:
      trial: tokens and log-probabilities of the trial, sampled greedily at temperature 1.

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
        max_context: int,
        timeout_s: float,
        retries: int,
        retry_wait_s: float,
        dialect: str = "auto",
        seeded: bool = True,
        prompt: Sequence[int] = (),
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: got {url!r}; allowed: http://... or https://...")
        if dialect not in ("auto", *DIALECTS):
            raise ValueError(f"dialect: got {dialect!r}; allowed: auto, {', '.join(DIALECTS)}.")
        self.concurrency = concurrency
        self._url, self.model = url.rstrip("/").removesuffix("/v1"), model
        self._sampling, self._max_context, self._seeded = sampling, max_context, seeded
        self._retries, self._retry_wait_s = retries, retry_wait_s
        key = os.environ.get("OPENAI_API_KEY")
        self._http = urllib3.PoolManager(
            maxsize=concurrency,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=timeout_s,
            retries=False,
        )
        self._closed = threading.Event()
        self._dialect, self.trial = self._choose_dialect(dialect, prompt or sampling.end_ids[:1])
        self._threads = ThreadPoolExecutor(concurrency)
        self._pending: dict[Future[tuple[Action, int]], Turn] = {}
        self._counts: Counter[str] = Counter()
        self.begin(None, seed=0, iteration=0)

    def begin(
        self, params: Any, *, seed: int, iteration: int, temperature: float | None = None
    ) -> None:
        """Starts a collection; parameters are ignored, since the server has its own."""
        for future in self._pending:
            future.cancel()
        self._pending = {}
        self._counts.clear()
        self._numbers = (seed, iteration)
        self._current_sampling = self._sampling
        if temperature is not None:
            self._current_sampling = self._sampling._replace(temperature=temperature)

    def owns(self, group: int) -> bool:
        """Always true: only one process uses a server."""
        return True

    def fits(self, context: Sequence[int]) -> bool:
        """Whether there is room for a full action after a context."""
        return len(context) + self._sampling.max_tokens <= self._max_context

    def submit(self, turn: Turn) -> None:
        """Requests an action; a grammar of the turn's tools is not applied."""
        future = self._threads.submit(self._sample, turn, self._numbers, self._current_sampling)
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
        finished = [(self._pending.pop(future), future.result()) for future in done]
        answers = [(_cut_at_stop(turn, action), retries) for turn, (action, retries) in finished]
        self._counts["server_retries"] += sum(retries for _, retries in answers)
        self._counts["server_failures"] += sum(bool(action.failure) for action, _ in answers)
        return [action for action, _ in answers]

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
        """The numbers of repeated requests, failed actions and dropped answers."""
        return self._counts

    def seconds(self) -> Mapping[str, float]:
        """Empty: the server does not report device times."""
        return {}

    def close(self) -> None:
        """Ends the threads, each after its request, and the connections."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.clear()

    def _choose_dialect(
        self, dialect: str, prompt: Sequence[int]
    ) -> tuple[ServerDialect, tuple[list[int], list[float]]]:
        """Chooses the dialect; returns it with the result of a trial request."""
        card = self._card()
        if dialect == "auto":
            dialect = "sglang" if card.get("owned_by") == "sglang" else "vllm"
        if dialect == "sglang" and card.get("parent") is not None:
            raise ValueError(
                f"model: got {self.model!r}, adapters of {card['parent']!r}; allowed with sglang:"
                " whole models."
            )
        candidate = DIALECTS[dialect]
        tokens = min(TRIAL_TOKENS, self._sampling.max_tokens)
        greedy = self._sampling._replace(temperature=1.0, top_k=1, max_tokens=tokens)
        try:
            trial, _ = self._act(candidate, prompt, greedy, seed=0)
        except _TryAgain as error:
            raise ValueError(
                f"{self._url}: {error}; allowed: {candidate.needs}, which returns token ids and"
                f" log-probabilities, or another dialect of {', '.join(DIALECTS)}."
            ) from None
        return candidate, trial

    def _card(self) -> Mapping[str, Any]:
        """Returns the server's description of the model."""
        try:
            cards, _ = self._ask("GET", "/v1/models", None, _read_models)
        except _TryAgain as error:
            raise ValueError(f"{self._url}: {error}; allowed: a server that answers.") from None
        if self.model is None and len(cards) == 1:
            (self.model,) = cards
        if self.model not in cards:
            raise ValueError(
                f"model: got {self.model!r}; allowed at {self._url}:"
                f" {listed(cards, 'it serves no model')}."
            )
        card = cards[self.model]
        longest = card.get("max_model_len")
        if longest is not None and self._max_context > longest:
            raise ValueError(
                f"max_context: got {self._max_context}; allowed: at most the {longest} that"
                f" {self._url} was started with."
            )
        return card

    def _sample(
        self, turn: Turn, numbers: tuple[int, int], sampling: Sampling
    ) -> tuple[Action, int]:
        """Samples a turn's action; returns it with the number of retries."""
        seed = request_seed(*numbers, turn.task, turn.member, turn.turn)
        if turn.limit is not None:
            sampling = sampling._replace(max_tokens=min(turn.limit, sampling.max_tokens))
        try:
            sampled, retries = self._act(self._dialect, turn.context, sampling, seed)
        except _TryAgain as error:
            return Action(turn.key, [], [], failure=str(error)), self._retries
        return Action(turn.key, *sampled), retries

    def _act(
        self, dialect: ServerDialect, context: Sequence[int], sampling: Sampling, seed: int
    ) -> tuple[tuple[list[int], list[float]], int]:
        """Requests an action; returns its tokens and log-probabilities, and the retries."""
        body = dialect.body(self.model, context, sampling, seed if self._seeded else None)
        return self._ask(
            "POST", dialect.path, body, lambda reply: complete(dialect.read(reply), sampling)
        )

    def _ask(
        self, method: str, path: str, body: Any, read: Callable[[Any], Read]
    ) -> tuple[Read, int]:
        """Sends a request; returns its reply, parsed by `read`, and the number of retries."""
        number = 0
        while True:
            try:
                return self._ask_once(method, path, body, read), number
            except _TryAgain:
                if number == self._retries or self._closed.wait(self._retry_wait_s * 2**number):
                    raise
            number += 1

    def _ask_once(self, method: str, path: str, body: Any, read: Callable[[Any], Read]) -> Read:
        try:
            reply = self._http.request(method, self._url + path, json=body)
        except urllib3.exceptions.HTTPError as error:
            raise _TryAgain(f"{path}: {error}") from error
        answered = f"{path} answered {reply.status}: {_error_text(reply.data)}"
        if reply.status in (408, 429) or reply.status >= 500:
            raise _TryAgain(answered)
        if reply.status != 200:
            raise ValueError(f"{self._url}: {answered}")
        try:
            return read(json.loads(reply.data))
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
            raise _TryAgain(f"{path} gave an unexpected reply: {_error_text(reply.data)}") from None


def _cut_at_stop(turn: Turn, action: Action) -> Action:
    """Truncates an action where its turn's listener ends it."""
    count = None if turn.listen is None or action.failure else turn.listen(action.tokens)
    return Action(action.key, action.tokens[:count], action.logp[:count], action.failure)


def _read_models(reply: Any) -> dict[str, Mapping[str, Any]]:
    return {card["id"]: card for card in reply["data"]}


def _error_text(body: bytes) -> str:
    """Returns the message of an error reply, or the beginning of its body."""
    text = body.decode(errors="replace")
    try:
        reply = json.loads(text)
        return str(reply.get("error", reply)["message"])
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return text[:SHOWN]
