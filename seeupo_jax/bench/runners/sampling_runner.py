"""Our engine playing a workload's conversations."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from seeupo_jax.bench.settings import Settings
from seeupo_jax.bench.workload import Workload
from seeupo_jax.configuration import schema
from seeupo_jax.policy.network import Network
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.protocol import Turn
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine, choose_read_plan


def make_engine(network: Network, work: Workload, settings: Settings, platform: str) -> SlotEngine:
    """An engine with room for all of a workload's conversations; nothing is compiled yet."""
    rollout = schema.Rollout(
        tasks=len(work.conversations) // work.group_size,
        group_size=work.group_size,
        max_action_tokens=work.action_tokens,
        max_context=work.max_context,
        slots=settings.slots,
    )
    return SlotEngine(
        network,
        Sampling(1.0, None, None, work.action_tokens, ()),
        plan_cache(network.arch, rollout),
        group_size=work.group_size,
        steps=settings.decode_steps,
        read_plan=choose_read_plan(network.arch, rollout.page_size, platform),
    )


class Played(NamedTuple):
    """A workload's conversations.

    seconds: that they took. actions, logp: [conversation][turn], token ids, and their
    log-probabilities by the sampler.
    """

    seconds: float
    actions: list[list[list[int]]]
    logp: list[list[list[float]]]


def converse(engine: SlotEngine, params: Any, work: Workload, seed: int) -> Played:
    """Plays a workload's conversations."""
    began = time.perf_counter()
    engine.begin(params, seed=seed, iteration=0)
    conversations = work.conversations
    contexts = [list(c.prompt) for c in conversations]
    actions: list[list[list[int]]] = [[] for _ in conversations]
    logp: list[list[list[float]]] = [[] for _ in conversations]

    def submit(key: int) -> None:
        turn, group = len(actions[key]), key // work.group_size
        limit = conversations[key].lengths[turn]
        engine.submit(Turn(key, contexts[key], group, group, key, turn, limit=limit))

    for key in range(len(conversations)):
        submit(key)
    open_ = len(conversations)
    while (found := engine.step(open_ > 0)) is not None:
        for action in found:
            key, conversation = action.key, conversations[action.key]
            actions[key].append(action.tokens)
            logp[key].append(action.logp)
            turn = len(actions[key])
            if turn == len(conversation.lengths):
                engine.release(key)
                open_ -= 1
                continue
            contexts[key] = [*contexts[key], *action.tokens, *conversation.observations[turn - 1]]
            submit(key)
    return Played(time.perf_counter() - began, actions, logp)


def spent(engine: SlotEngine) -> Mapping[str, int]:
    """Of the last collection: `computed`, tokens of conversations that went through the network,
    and `positions`, all that did, padding and idle rows included."""
    usage = engine.usage()
    return {
        "computed": usage["prefilled_tokens"] + usage["decoded_tokens"],
        "positions": usage["prefill_positions"] + usage["decode_positions"],
    }
