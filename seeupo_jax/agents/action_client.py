"""One server's answers to requests for actions: token ids in, token ids out."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from seeupo_jax.agents.server_client import KEY_VARIABLE, ServerClient, TryAgain
from seeupo_jax.agents.server_dialects import DIALECTS, Reply, ServerDialect, complete
from seeupo_jax.rollout.engine.protocol import Turn
from seeupo_jax.rollout.engine.sampling import Sampling

TRIAL_TOKENS = 16  # limit of the request that tests a server


@dataclasses.dataclass(frozen=True)
class ServerRequests:
    """How requests for actions are made, to any server.

    timeout_s, retries, retry_wait_s, key_variable: as of `ServerClient`.
    dialect: `vllm`, `sglang`, `auto`: by the owner that the server reports; or one of its own.
    seeded: send a seed with each request.
    prompt: the context of the trial request; empty: an end token.
    """

    timeout_s: float
    retries: int
    retry_wait_s: float
    key_variable: str = KEY_VARIABLE
    dialect: str | ServerDialect = "auto"
    seeded: bool = True
    prompt: Sequence[int] = ()


class ActionClient:
    """Requests to a server for the actions of one of its models.

    Args:
      url, model: as of `ServerClient`.
      connections: concurrent requests.
      max_context: tokens of a conversation, at most the server's limit; None: the server's own.

    Attributes:
      client: of the server. dialect: of its actions, and its name; "": one of its own.

    Raises:
      ValueError: the server does not answer, or does not serve the model or the context length.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        requests: ServerRequests,
        *,
        connections: int,
        sampling: Sampling,
        max_context: int | None,
    ):
        self.client = ServerClient(
            url,
            model,
            connections=connections,
            timeout_s=requests.timeout_s,
            retries=requests.retries,
            retry_wait_s=requests.retry_wait_s,
            key_variable=requests.key_variable,
        )
        dialect = requests.dialect
        if isinstance(dialect, str) and dialect not in ("auto", *DIALECTS):
            raise ValueError(f"dialect: got {dialect!r}; allowed: auto, {', '.join(DIALECTS)}.")
        self._seeded = requests.seeded
        self.dialect, self.dialect_name = self._choose_dialect(dialect, max_context)
        self._prompt, self._sampling = requests.prompt or sampling.end_ids[:1], sampling

    def ask(self, turn: Turn, seed: int, sampling: Sampling) -> tuple[Reply, int]:
        """Requests a turn's action; returns it and the number of retries.

        Args:
          seed: of the collection.

        Raises:
          TryAgain, Refused: as `ServerClient.ask`.
        """
        seed = request_seed(seed, turn.iteration, turn.task, turn.member, turn.turn)
        if turn.limit is not None:
            sampling = sampling._replace(max_tokens=min(turn.limit, sampling.max_tokens))
        return self._act(turn.context, sampling, seed)

    def close(self) -> None:
        """Ends the connections; nothing is tried again."""
        self.client.close()

    def _choose_dialect(
        self, dialect: str | ServerDialect, max_context: int | None
    ) -> tuple[ServerDialect, str]:
        """Finds the model, and the form of requests for its actions."""
        card, url = self.client.card(), self.client.url
        longest = card.get("max_model_len")
        if longest is not None and max_context is not None and max_context > longest:
            raise ValueError(
                f"max_context: got {max_context}; allowed: at most the {longest} that"
                f" {url} was started with."
            )
        if not isinstance(dialect, str):
            return dialect, ""
        if dialect == "auto":
            dialect = "sglang" if card.get("owned_by") == "sglang" else "vllm"
        if dialect == "sglang" and card.get("parent") is not None:
            raise ValueError(
                f"model: got {self.client.model!r}, adapters of {card['parent']!r}; allowed with"
                " sglang: whole models."
            )
        return DIALECTS[dialect], dialect

    def try_once(self) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of a trial request, which is greedy at temperature 1 where
        the dialect says so.

        Raises:
          ValueError: it returns no token ids with log-probabilities.
        """
        sampling = self._sampling
        sampling = sampling._replace(max_tokens=min(TRIAL_TOKENS, sampling.max_tokens))
        if self.dialect.greedy_trial:
            sampling = sampling._replace(temperature=1.0, top_k=1)
        try:
            reply, _ = self._act(self._prompt, sampling, seed=0)
        except TryAgain as error:
            raise ValueError(
                f"{self.client.url}: {error}; allowed: {self.dialect.needs}, or another dialect"
                f" of {', '.join(DIALECTS)}."
            ) from None
        return reply.tokens, reply.logp

    def _act(self, context: Sequence[int], sampling: Sampling, seed: int) -> tuple[Reply, int]:
        dialect, model = self.dialect, self.client.model
        body: Any = dialect.body(model, context, sampling, seed if self._seeded else None)
        return self.client.ask(
            "POST", dialect.path, body, lambda reply: complete(dialect.read(reply), sampling)
        )


def request_seed(seed: int, iteration: int, task: int, member: int, turn: int) -> int:
    """The seed of one action's request: 31 bits, the same in every process."""
    numbers = f"{seed},{iteration},{task},{member},{turn}".encode()
    return int.from_bytes(hashlib.sha256(numbers).digest()[:4]) >> 1
