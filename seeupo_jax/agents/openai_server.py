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

import re
from collections.abc import Sequence

from seeupo_jax.agents.action_client import ActionClient, ServerRequests
from seeupo_jax.agents.request_engine import Answer, RequestEngine
from seeupo_jax.agents.server_client import KEY_VARIABLE, Refused, TryAgain
from seeupo_jax.agents.server_dialects import ServerDialect
from seeupo_jax.rollout.engine.protocol import Action, Turn
from seeupo_jax.rollout.engine.sampling import Sampling

# How OpenAI, vLLM, sglang, llama.cpp and this package's server refuse a conversation.
_TOO_LONG = re.compile(r"context[ _](length|size|window)|prompt is too long", re.IGNORECASE)


class OpenAIServer(RequestEngine):
    """Samples actions on a server, whose policy is its own.

    Args:
      url, model, timeout_s, retries, retry_wait_s, key_variable: as of `ServerClient`; an action
        whose request fails after its retries is a failure.
      concurrency, max_context: as of `RequestEngine`.
      dialect, seeded, prompt: as of `ServerRequests`.

    Attributes:
      trial: as `ActionClient.try_once` returns it.

    Raises:
      ValueError: as `ActionClient` and its trial.
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
        requests = ServerRequests(
            timeout_s, retries, retry_wait_s, key_variable, dialect, seeded, prompt
        )
        self._server = ActionClient(
            url,
            model,
            requests,
            connections=concurrency,
            sampling=sampling,
            max_context=max_context,
        )
        self.trial = self._server.try_once()
        super().__init__(concurrency=concurrency, sampling=sampling, max_context=max_context)

    def ask(self, turn: Turn, seed: int, version: int, sampling: Sampling) -> Answer:
        client = self._server.client
        try:
            reply, retries = self._server.ask(turn, seed, sampling)
        except TryAgain as error:
            return Answer(Action(turn.key, [], [], failure=str(error)), client.retries, {})
        except Refused as error:
            if self._max_context is None and _TOO_LONG.search(error.reply):
                return Answer(Action(turn.key, [], [], too_long=True), 0, {})
            raise
        version_L = [version] * len(reply.tokens)
        action = Action(turn.key, reply.tokens, reply.logp, version_L=version_L)
        return Answer(action, retries, reply.usage)

    def close(self) -> None:
        """Ends the threads, each after its request, and the connections."""
        self._server.client.stop()
        super().close()
        self._server.close()

    @property
    def model(self) -> str | None:
        """The served name."""
        return self._server.client.model
