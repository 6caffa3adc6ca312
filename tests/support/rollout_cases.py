"""What the tests of rollouts share."""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.configuration import schema
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.dealing import deal
from seeupo_jax.rollout.engine.protocol import Action, Turn
from seeupo_jax.rollout.environment_player import EnvironmentHost
from seeupo_jax.rollout.player import CollectionOptions, RolloutWorker


def stir(params: Any, seed: int = 0) -> Any:
    """Parameters moved at random, so that every part of the network matters."""
    rng = np.random.default_rng(seed)

    def move(leaf: jax.Array) -> jax.Array:
        scale = 0.2 if leaf.ndim == 1 else leaf.shape[-1] ** -0.5
        return leaf + jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(move, params)


@dataclass(frozen=True)
class NumberConversation:
    tokenizer: "NumberTokenizer"
    tokens: list

    def extend(self, action, messages):
        answer = self.tokenizer.observation(messages)
        return NumberConversation(self.tokenizer, self.tokens + action + answer)


class NumberTokenizer:
    """Texts are numbers, each one token; tokens 20 to 22 head messages, token 3 ends them."""

    vocab_size = 29
    end_ids, writes_calls, tool_listing = (3, 7, 11), False, "auto"
    headers = {"system": 19, "user": 20, "tool": 21, "assistant": 22}

    def begin(self, messages, tools):
        listing = [{"role": "system", "content": tool["name"]} for tool in tools]
        return NumberConversation(self, self.observation([*listing, *messages]))

    def observation(self, messages):
        tokens = []
        for message in messages:
            tokens += [self.headers[message["role"]], *map(int, message["content"].split()), 3]
        return [*tokens, self.headers["assistant"]]

    def action(self, text):
        return [*map(int, re.findall(r"\d+", text)), 3]

    def text(self, tokens):
        return " ".join(str(token) for token in tokens if token not in self.end_ids)

    def token_bytes(self):
        return [self.text([token]).encode() for token in range(self.vocab_size)]


def converse(
    engine: Any,
    params: Any,
    prompts: dict[int, tuple[int, list[int]]],
    *,
    turns: int = 3,
    answer: Any = lambda key, turn: [],
    seed: int = 1,
    iteration: int = 2,
    shuffle: int | None = None,
    delay: int = 0,
) -> dict[int, list[tuple[list[int], list[int], list[float]]]]:
    """Conversations with an engine: a turn each (context, action, log-probabilities).

    Args:
      prompts: group and first context, by the conversation's key; the member is the key.
      answer: what follows an action, by key and turn.
      shuffle: seed of the order in which conversations arrive; delay: their answers take up to so
        many steps of the engine.
    """
    rng = np.random.default_rng(shuffle)
    shard_N = deal([group for group, _ in prompts.values()], engine.shard_owners)
    shards = dict(zip(prompts, shard_N, strict=True))
    engine.begin(params, seed=seed)
    queued = list(prompts) if shuffle is None else rng.permutation(list(prompts)).tolist()
    played: dict[int, list[Any]] = {key: [] for key in prompts}
    context = {key: list(tokens) for key, (_, tokens) in prompts.items()}
    thinking: list[tuple[int, int]] = []  # steps to wait, key
    live: set[int] = set()

    def submit(key: int) -> None:
        group, turn = prompts[key][0], len(played[key])
        place = group, 100 + group, key, turn  # group, task, member, turn
        more = {"shard": shards[key], "iteration": iteration}
        engine.submit(Turn(key, list(context[key]), *place, **more))

    while True:
        while queued and len(live) < engine.concurrency:
            live.add(queued[0])
            submit(queued.pop(0))
        for _, key in [one for one in thinking if one[0] <= 0]:
            submit(key)
        thinking = [(wait - 1, key) for wait, key in thinking if wait > 0]
        actions = engine.step(bool(live or queued))
        if actions is None:
            return played
        for action in actions:
            key = action.key
            played[key].append((list(context[key]), action.tokens, action.logp))
            context[key] += action.tokens + list(answer(key, len(played[key]) - 1))
            if len(played[key]) == turns or not engine.fits(context[key]):
                live.discard(key)
                engine.release(key)
            else:
                thinking.append((int(rng.integers(0, delay + 1)), key))


class Saying:
    """Says the same in every turn; a context of 40 tokens leaves no room for more."""

    concurrency, poll_interval_s, busy, shard_owners = 4, None, False, (0,)

    def begin(self, params, **numbers):
        self._open = []

    def fits(self, context):
        return len(context) < 40

    def submit(self, turn):
        self._open.append(turn)

    def step(self, unfinished, stop=False):
        turns, self._open = self._open, []
        return [self.said(turn) for turn in turns] if unfinished else None

    def said(self, turn):
        return Action(turn.key, [5, 3], [-1.0, -2.0])

    def release(self, key):
        pass

    def usage(self):
        return {}

    def seconds(self):
        return {}


def make_worker(engine, pool, tokenizer=None, *, max_turns, deterministic=False, **options):
    """Plays episodes of so many turns; without a tokenizer, of numbers."""
    rollout = schema.Rollout(max_turns=max_turns, deterministic=deterministic)
    tokenizer = NumberTokenizer() if tokenizer is None else tokenizer
    return RolloutWorker(
        engine,
        EnvironmentHost(pool),
        tokenizer,
        **({"env": schema.Env(), "rollout": rollout} | options),
    )


def play(make, tasks, *, group_size=1, max_turns=2, timeout_s=5.0, seed=3, iteration=1, **options):
    """Trajectories of a group for each task."""
    pool = EnvPool(make, 4, workers=4, timeout_s=timeout_s, retries=1, retry_wait_s=0.01)
    worker = make_worker(Saying(), pool, max_turns=max_turns, **options)
    requests, numbers = group_requests(tasks, group_size, iteration), CollectionOptions(seed)
    try:
        return collect(worker, None, requests, numbers).trajectories
    finally:
        pool.close()
