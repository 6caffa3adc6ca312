"""A policy on a server: one whose tokens are sampled there, or any model that answers chats."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from seeupo_jax.agents.chat_messages import ChatMessages
from seeupo_jax.agents.openai_server import OpenAIServer
from seeupo_jax.agents.server_client import KEY_VARIABLE, Refused, ServerClient
from seeupo_jax.agents.server_dialects import CHAT, DIALECTS, ServerDialect, owners_dialect
from seeupo_jax.configuration.schema import Config
from seeupo_jax.evaluation.episode_host import check_host
from seeupo_jax.evaluation.policy_sources import PolicySource, starting_policy_folder
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy_io.build_sampler import build_sampling, environment_format
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.trajectories.policy_fingerprint import FINGERPRINT, fingerprint

_LOGGER = logging.getLogger(__name__)
_QUESTION = "Who are you, and what can you do?"  # its likeliest answer tells served policies apart
_NEWER_LIMIT = "max_completion_tokens"  # what OpenAI's reasoning models call the limit of an answer


@dataclasses.dataclass(frozen=True)
class Server:
    """Where a policy is served.

    model: what the server calls it; None: the only one that it lists.
    dialect: vllm or sglang, which are sent tokens; chat: any OpenAI-compatible server, which is
      sent messages and tools; auto: by who the server says owns the model.
    seeded: give each request a seed.
    timeout_s: of a request.
    key_variable: the environment variable with the server's key; None: OPENAI_API_KEY, if it is
      set.
    max_tokens: of an answer, with chat; None: config.rollout.max_action_tokens.
    """

    url: str
    model: str | None = None
    dialect: str = "auto"
    seeded: bool = True
    timeout_s: float = 600.0
    key_variable: str | None = None
    max_tokens: int | None = None

    def asked_by(self, config: Config) -> dict[str, Any]:
        """The arguments of every client of this server."""
        key = KEY_VARIABLE if self.key_variable is None else self.key_variable
        return {
            "url": self.url,
            "model": self.model,
            "timeout_s": self.timeout_s,
            "retries": config.env.retries,
            "retry_wait_s": config.env.retry_wait_s,
            "key_variable": key,
        }

    def answer_tokens(self, config: Config) -> int:
        """The most tokens of an answer, with chat."""
        return config.rollout.max_action_tokens if self.max_tokens is None else self.max_tokens

    def chat_identity(self, config: Config) -> dict[str, Any]:
        """What decides its answers, with chat, beside what every evaluation's settings have."""
        return {"dialect": CHAT, "max_tokens": self.answer_tokens(config)}


def check_served(config: Config, server: Server) -> None:
    """ValueError: a setting that is not sent to servers, or what `check_host` refuses."""
    dialect, key = server.dialect, server.key_variable
    if dialect not in ("auto", *DIALECTS, CHAT):
        names = ", ".join(("auto", *DIALECTS, CHAT))
        raise ValueError(f"dialect: got {dialect!r}; allowed: {names}.")
    if key is not None and not os.environ.get(key):
        raise ValueError(
            f"key_variable: got {key!r}, which is not set; allowed: an environment variable that"
            " holds the server's key."
        )
    if config.rollout.grammar is not None:
        raise ValueError(
            f"config.rollout.grammar: got {config.rollout.grammar!r}; allowed with --server: none,"
            " since it is not sent to a server."
        )
    if config.agent.constraints:
        raise ValueError(
            "config.agent.constraints: got True; allowed with --server: False, since constraints"
            " are not sent to a server."
        )
    if dialect == CHAT:
        _check_chat(config)
    elif dialect != "auto" and server.max_tokens is not None:
        raise ValueError(
            f"max_tokens: got {server.max_tokens} with the dialect {dialect}; allowed: none, since"
            " config.rollout.max_action_tokens counts the policy's tokens."
        )
    check_host(config)


def _check_chat(config: Config) -> None:
    if config.agent.given:
        raise ValueError(
            f"config.agent: got {config.agent.label!r}; allowed with the dialect {CHAT}: none."
            " Run the agent with the address and the key of the server instead."
        )
    for number, role in enumerate(config.roles):
        if role.frozen:
            raise ValueError(
                f"config.roles[{number}]: got a frozen role; allowed with the dialect {CHAT}: roles"
                " of the policy, since a frozen one is sent tokens, which this dialect does not"
                " know."
            )
    if config.rollout.top_k not in (None, 1):
        raise ValueError(
            f"config.rollout.top_k: got {config.rollout.top_k}; allowed with the dialect {CHAT}:"
            " none, or 1 (greedy), since chat completions have no top-k."
        )


def find_dialect(config: Config, server: Server) -> Server:
    """The server with its dialect, and with `auto` its model; it is asked for these.

    Raises:
      ValueError: it does not answer or does not serve the model, or what `check_served` refuses.
    """
    if server.dialect != "auto":
        return server
    client = ServerClient(**server.asked_by(config), connections=1)
    with contextlib.closing(client):
        dialect = owners_dialect(client.card())
    found = dataclasses.replace(server, dialect=dialect, model=client.model)
    check_served(config, found)
    return found


@contextlib.contextmanager
def served_policy(config: Config, workdir: Path, server: Server) -> Iterator[PolicySource]:
    """The policy at a server; at the end its cost is logged, if there was any.

    Args:
      server: of `find_dialect`.
    """
    if server.dialect == CHAT:
        engine, tokenizer = _chat_engine(config, server)
    else:
        folder = starting_policy_folder(config, workdir)
        tokenizer = read_tokenizer(folder, config.chat)
        if tokenizer is None:
            raise ValueError(f"{folder}: got no tokenizer; allowed: that of the model served.")
        engine = _engine(
            config,
            server,
            build_sampling(config, tokenizer),
            server.dialect,
            _question(tokenizer),
            config.rollout.max_context,
        )
    with contextlib.closing(engine):
        about = {"server": server.url, "model": engine.model}
        if server.dialect == CHAT:
            same = about | server.chat_identity(config)
        else:
            tokens, logp = engine.trial
            same = about | {FINGERPRINT: fingerprint(tokenizer.text(tokens), tokens, logp)}
        yield PolicySource(engine, tokenizer, None, 0, about, same)
        _report_cost(server.url, engine.usage())


def _engine(
    config: Config,
    server: Server,
    sampling: Sampling,
    dialect: str | ServerDialect,
    prompt: Sequence[int],
    max_context: int | None,
) -> OpenAIServer:
    return OpenAIServer(
        **server.asked_by(config),
        concurrency=config.rollout.open_at_once,
        sampling=sampling,
        max_context=max_context,
        dialect=dialect,
        seeded=server.seeded,
        prompt=prompt,
    )


def _chat_engine(config: Config, server: Server) -> tuple[OpenAIServer, Tokenizer]:
    """An engine of chat completions, and what numbers its messages."""
    rollout, most = config.rollout, server.answer_tokens(config)
    sampling = Sampling(rollout.temperature, rollout.top_k, rollout.top_p, most, ())
    messages = ChatMessages(environment_format(config))
    tokenizer = cast(Tokenizer, messages)  # a player of environments only begins and reads
    prompt = _question(tokenizer)
    try:
        return _engine(config, server, sampling, messages.dialect, prompt, None), tokenizer
    except Refused as refusal:
        if _NEWER_LIMIT not in refusal.reply:
            raise
        messages.limit_field = _NEWER_LIMIT
        return _engine(config, server, sampling, messages.dialect, prompt, None), tokenizer


def _report_cost(url: str, usage: Mapping[str, int]) -> None:
    if usage["server_retries"] or usage["server_failures"] or usage["server_dropped"]:
        _LOGGER.warning(
            f"{url}: requests repeated: {usage['server_retries']}; given up:"
            f" {usage['server_failures']}, whose episodes do not count."
        )
    if usage["cut_answers"]:
        _LOGGER.warning(
            f"{url}: answers cut at the limit of tokens: {usage['cut_answers']};"
            " --server_max_tokens raises it."
        )


def _question(tokenizer: Tokenizer) -> Sequence[int]:
    """The prompt of a served policy's trial; empty where the template refuses it."""
    try:
        return list(tokenizer.begin([{"role": "user", "content": _QUESTION}], ()).tokens)
    except Exception:  # a template may raise anything
        return ()
