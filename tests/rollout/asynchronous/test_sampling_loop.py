"""What a loop samples for a trainer is what a collection samples, and nothing of it stays."""

import dataclasses
import functools
import gc
import itertools
import threading
import time

import numpy as np
import pytest
import rollout_cases
from flax import nnx
from rollout_cases import NumberTokenizer, make_worker
from work_cases import Trainer, Versioned

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.configuration.role_schema import Role
from seeupo_jax.envs.base import StepResult
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rewards.scorer import make_scorer
from seeupo_jax.rollout.asynchronous.sampling_loop import SamplingLoop
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.role_engine import FrozenPolicy, RoleEngine
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine
from seeupo_jax.rollout.player import CollectionOptions
from seeupo_jax.rollout.watch import Watch
from seeupo_jax.types import CONTEXT, UNKNOWN_VERSION

SEED = 5
SIZES = {"vocab_size": 29, "width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8}


class Desk:
    """Task `TURNS` ends after so many turns, every other one of role `b` where it is `talk TURNS`.
    Until it is released, `slow TURNS` does not begin, and `gate TURNS` does not answer its first.
    """

    released = threading.Event()

    def reset(self, task_id, seed):
        *self._kind, turns = task_id.split()
        self._left = int(turns)
        self._wait("slow")
        return ({"role": "user", "content": f"{turns} 1"},), ()

    def step(self, text):
        self._wait("gate")
        self._left -= 1
        done, role = self._left == 0, "b" if "talk" in self._kind and self._left % 2 else ""
        return StepResult(({"role": "tool", "content": "2"},), 0.5, done=done, role=role)

    def score(self):
        return 1.0

    def close(self):
        pass

    def _wait(self, kind):
        assert kind not in self._kind or self.released.wait(60)


@pytest.fixture
def pool():
    Desk.released.clear()
    pool = EnvPool(Desk, 4, workers=4, timeout_s=60)
    yield pool
    Desk.released.set()
    pool.close()


@functools.cache
def network_params():
    arch = Architecture(**SIZES, mlp_width=24)
    return policy.split_model(Transformer(arch, nnx.Rngs(0)))


def slot_engine(concurrency=4):
    network, _ = network_params()
    rollout = schema.Rollout(
        concurrency=concurrency, page_size=8, max_action_tokens=4, max_context=40
    )
    sampling = Sampling(1.0, None, None, rollout.max_action_tokens, NumberTokenizer.end_ids)
    plan = plan_cache(network.arch, rollout)
    return SlotEngine(network, sampling, plan, group_size=2, steps=3, prefill_tokens=64)


def rollout_of(tasks, group_size, **options):
    return schema.Rollout(tasks=tasks, group_size=group_size, max_turns=3, **options)


def sample_for(trainer, engine, pool, rollout, *, max_lag=0, **options):
    worker = make_worker(engine, pool, max_turns=3, rollout=rollout, **options)
    loop = SamplingLoop(worker, trainer, seed=SEED, max_lag=max_lag)
    loop.run()
    return loop


def sampled_versions(trajectory):
    return [v for s in trajectory.segments for v in s.version_L[s.turn_L != CONTEXT].tolist()]


def assert_same(got, wanted):
    for field in dataclasses.fields(got):
        if field.name != "segments":
            assert getattr(got, field.name) == getattr(wanted, field.name), field.name
    for segment, other in zip(got.segments, wanted.segments, strict=True):
        for name in ("tokens_L", "turn_L", "logp_L", "version_L"):
            np.testing.assert_array_equal(getattr(segment, name), getattr(other, name), name)


@pytest.mark.parametrize("concurrency", [4, 8])  # a part of an iteration, and all of one
def test_without_lag_each_iteration_is_sampled_as_by_a_collection_to_the_bit(concurrency):
    """Other policies every time, an engine whose rows the episodes' order decides."""
    iterations = [["2", "3", "1"], ["3", "3", "2"], ["1", "2", "3"]]
    params = [rollout_cases.stir(network_params()[1], seed) for seed in range(3)]
    rollout, pool = (
        rollout_of(3, 2, deterministic=True),
        EnvPool(Desk, concurrency, workers=4, timeout_s=60),
    )
    trainer = Trainer(iterations, 2, iter(params))
    sample_for(trainer, slot_engine(concurrency), pool, rollout)
    worker = make_worker(slot_engine(concurrency), pool, max_turns=3, rollout=rollout)
    for number, (tasks, of_version) in enumerate(zip(iterations, params, strict=True), 1):
        requests = group_requests(tasks, 2, number)
        options = CollectionOptions(SEED, policy_version=number - 1)
        wanted = collect(worker, of_version, requests, options).trajectories
        for got, trajectory in zip(trainer.taken[number - 1], wanted, strict=True):
            assert_same(got, trajectory)
            assert {*sampled_versions(got)} == {number - 1}
    pool.close()


def test_what_the_engine_has_counted_is_delivered_once(pool):
    iterations, params = [["2", "3", "1"], ["3", "3", "2"]], network_params()[1]
    trainer = Trainer(iterations, 2, itertools.repeat(params))
    sample_for(trainer, slot_engine(), pool, rollout_of(3, 2))
    tokens = [len(sampled_versions(t)) for taken in trainer.taken for t in taken]
    assert trainer.usage["decoded_tokens"] == sum(tokens) > 0
    assert trainer.usage["decode_s"] > 0
    waited = [trainer.usage[name] for name in ("environment_s", "reset_s", "reward_s", "idle_s")]
    assert trainer.usage["wall_s"] >= sum(waited) - trainer.usage["reset_s"]  # which is part of one


def test_a_policy_that_comes_amid_a_conversation_samples_its_further_turns(pool):
    trainer = Trainer([["1"], ["gate 3"]], 1, ahead=1)
    newer_policy, engine = trainer.newer_policy, Versioned()

    def take(than):
        policy = newer_policy(than)
        if policy is not None and policy.version == 1:
            Desk.released.set()
        return policy

    trainer.newer_policy = take
    loop = sample_for(trainer, engine, pool, rollout_of(1, 1), max_lag=1)
    assert loop.policy.version == 1 and engine.begun == 1  # the policy was swapped in
    (trajectory,) = trainer.taken[1]
    (segment,) = trajectory.segments
    assert sampled_versions(trajectory) == [0, 0, 1, 1, 1, 1]  # two tokens a turn
    assert (segment.version_L[segment.turn_L == CONTEXT] == UNKNOWN_VERSION).all()
    assert trajectory.policy_version == 0


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_no_token_is_older_than_the_lag_allows(pool, max_lag):
    trainer = Trainer([["1", "3", "2"]] * 6, 2, ahead=max_lag)
    sample_for(trainer, Versioned(), pool, rollout_of(3, 2), max_lag=max_lag)
    for iteration, taken in enumerate(trainer.taken, 1):
        versions = [version for t in taken for version in sampled_versions(t)]
        assert iteration - 1 - max_lag <= min(versions) <= max(versions) <= iteration - 1
    assert len(trainer.taken) == 6


def test_a_ticket_waits_for_the_policy_that_may_sample_it(pool):
    """Weights may arrive after the tickets that they admit."""
    trainer = Trainer([["1"], ["1"]], 1)
    newer_policy, leased = trainer.newer_policy, []

    def late(than):
        policy = newer_policy(than)
        if policy is None or policy.version != 1:
            return policy
        leased.append(trainer.book.counts().leased)
        return policy if len(leased) > 3 else None

    trainer.newer_policy = late
    sample_for(trainer, Versioned(), pool, rollout_of(1, 1))
    assert 1 in leased[:-1]  # it was leased, and had not begun
    assert [taken[0].policy_version for taken in trainer.taken] == [0, 1]


def test_a_slow_environment_holds_back_no_other_ticket(pool):
    """Three seats play whatever is admitted while the fourth one waits for its environment."""
    trainer = Trainer([["slow 1", "1", "1", "1"], ["1"] * 4, ["1"] * 4], 1, ahead=2)

    def release(trainer):
        if len(trainer.delivered) == 11:
            Desk.released.set()

    trainer.on_delivery = release
    sample_for(trainer, Versioned(), pool, rollout_of(4, 1), max_lag=2)
    numbers = [number for number, _ in trainer.delivered]
    assert sorted(numbers) == list(range(12)) and numbers[-1] == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_a_thousand_tickets_leave_nothing_behind(pool, frozen):
    """Objects after 100, 550 and 1000 of them, of the loop and all that it calls."""
    held, engine = {}, Versioned()

    def count(trainer):
        if trainer.version in (20, 110, 200):
            gc.collect()
            held[trainer.version] = len(gc.get_objects())
            sizes[trainer.version] = size_of(engine)
        trainer.taken.clear()
        trainer.delivered.clear()

    tasks, roles, sizes = ["1", "2", "1", "1", "1"], (), {}
    if frozen:
        tasks, roles = ["1", "talk 2", "1", "talk 3", "1"], (Role(name="b", server="http://a"),)
        engine = RoleEngine(engine, {"b": FrozenPolicy(Versioned())})
    trainer = Trainer([tasks] * 202, 1, ahead=1)
    trainer.on_delivery = count
    sample_for(trainer, engine, pool, rollout_of(5, 1), max_lag=1, roles=roles)
    assert held.keys() == {20, 110, 200}
    # What is made once, such as a cache, falls into one half of 900 tickets; growth into both.
    assert min(held[110] - held[20], held[200] - held[110]) < 50 and sizes[200] <= sizes[20] + 8


def size_of(engine):
    """How many things the containers of an engine hold."""
    return sum(len(each) for each in vars(engine).values() if isinstance(each, list | dict | set))


def test_waiting_for_tickets_takes_no_time_of_the_processor(pool):
    trainer = Trainer([["1"]], 1)
    lease, trainer.lease = trainer.lease, lambda conversations: []
    timer = threading.Timer(2.0, lambda: setattr(trainer, "lease", lease))
    timer.start()
    began, cpu = time.monotonic(), time.process_time()
    sample_for(trainer, Versioned(), pool, rollout_of(1, 1))
    assert time.monotonic() - began >= 2.0 and time.process_time() - cpu < 0.5
    assert trainer.usage["idle_s"] > 1.5 > trainer.usage["environment_s"]


def test_the_end_of_a_run_drops_conversations_that_nobody_waits_for(pool):
    trainer = Trainer([["slow 1", "1"]], 1)

    def end(trainer):
        trainer.closed = True

    trainer.on_delivery = end
    sample_for(trainer, Versioned(), pool, rollout_of(2, 1))
    assert trainer.delivered == [(1, 0)]


def test_a_loop_that_is_asked_to_stop_has_delivered_what_is_finished(pool):
    trainer, asked = Trainer([["slow 1", "1"]], 1), threading.Event()
    trainer.on_delivery = lambda _: asked.set()
    with pytest.raises(Stopped):
        sample_for(trainer, Versioned(), pool, rollout_of(2, 1), stop=asked.is_set)
    assert trainer.delivered == [(1, 0)] and trainer.book.counts().leased == 1


def test_a_trainer_that_went_back_has_its_older_policy_taken(pool):
    """After a restart from a checkpoint its tickets are of iterations that were trained before."""
    trainer = Trainer([["1"]] * 4, 1)

    def restart(trainer):
        if trainer.version == 2:
            trainer.on_delivery = lambda _: None
            trainer.go_back()

    trainer.on_delivery = restart
    sample_for(trainer, Versioned(), pool, rollout_of(1, 1))
    assert [taken[0].policy_version for taken in trainer.taken] == [0, 1, 0, 1, 2, 3]


def test_reward_functions_judge_what_a_loop_plays(pool):
    config = from_dict({"rewards": [{"function": "reward_cases:one", "name": "kind"}]})
    scorer, trainer = make_scorer(config.rewards), Trainer([["1", "2"]] * 2, 2)
    try:
        sample_for(trainer, Versioned(), pool, rollout_of(2, 2), rewards=scorer)
    finally:
        scorer.close()
    played = [trajectory for taken in trainer.taken for trajectory in taken]
    assert len(played) == 8
    assert all(t.rewards == {"env": 0.5 * t.turns, "kind": 1.0} for t in played)


def test_others_see_how_far_a_loop_is(pool):
    trainer, watch, seen = Trainer([["1", "2"]], 2), Watch(), []
    trainer.on_delivery = lambda _: seen.append(watch.look())
    sample_for(trainer, Versioned(), pool, rollout_of(2, 2), watch=watch)
    assert watch.look() is None
    assert seen[-1].total == seen[-1].finished == 4 and not seen[-1].active
