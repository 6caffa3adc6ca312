"""Trajectories hold what was sampled and read, and a bad environment costs only its own."""

import dataclasses
import functools
import threading
import time
from collections import Counter

import chat_cases
import jax
import numpy as np
import pytest
import rollout_cases
from flax import nnx
from rollout_cases import NumberConversation, NumberTokenizer, Saying, make_worker

from seeupo_jax.configuration import schema
from seeupo_jax.envs.base import StepResult, TransientError
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.branching.entropy_plan import EntropyPlan
from seeupo_jax.rollout.branching.fork_plan import Budget
from seeupo_jax.rollout.branching.plans import root_requests
from seeupo_jax.rollout.branching.tree_plan import TreePlan
from seeupo_jax.rollout.collect import EpisodeRequest, collect, group_requests, prefetch
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.protocol import Action, Turn
from seeupo_jax.rollout.engine.sampling import Sampling, task_number
from seeupo_jax.rollout.engine.slots import SlotEngine
from seeupo_jax.rollout.player import CollectionOptions
from seeupo_jax.rollout.watch import Watch
from seeupo_jax.types import CONTEXT, rewards_of

SIZES = {"vocab_size": 29, "width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8}
ROLLOUT = schema.Rollout(
    concurrency=4, page_size=8, max_action_tokens=4, max_context=40, temperature=0.9
)
TIMEOUT_S = 1.0
RETRIES = 2
TOOL = {
    "name": "17 18",
    "description": "",
    "parameters": {"type": "object", "properties": {}},
}


class Script:
    """Its task `EVENT@STEP` says what happens at which step; step 0 is the reset.

    The event `EVENT*TIMES` happens so many times in a collection, over all environments.
    """

    released = threading.Event()  # lets hung calls end with the test
    happened = Counter()
    calm = False  # nothing happens
    errors = {"raise": KeyError("boom"), "busy": TransientError("busy")}

    def reset(self, task_id, seed):
        event, _, step = task_id.partition("@")
        self._event, _, times = event.partition("*")
        self._times = int(times) if times else None
        self._at, self._step, self._heard = int(step), 0, []
        self._happen(0)
        return ({"role": "user", "content": f"{len(task_id)} {seed}"},), (TOOL,)

    def step(self, text):
        self._happen(self._step + 1)
        self._step += 1
        self._heard.append(text)
        now = self._step == self._at
        if now and self._event == "mute":
            return StepResult((), 0.0, False)
        if now and self._event == "nothing":
            return None
        content = "1 " * 30 if now and self._event == "long" else f"{self._step} 2"
        role = "nobody" if now and self._event == "role" else "tool"
        info = {"calls": 1, "odd": self._step % 2 == 1, "part": 0.5, "heard": list(self._heard)}
        done = now and self._event == "done"
        observation = () if done else ({"role": role, "content": content},)
        return StepResult(observation, 0.25, done, info)

    def score(self):
        return self._step / 10

    def close(self):
        pass

    def _happen(self, step):
        if step != self._at or self.calm:
            return
        self.happened[self._event] += 1
        if self._times is not None and self.happened[self._event] > self._times:
            return
        if self._event in self.errors:
            raise self.errors[self._event]
        if self._event == "hang":
            self.released.wait(30)
        if self._event == "sleep":
            time.sleep(0.1)


def engine_of(network, rollout, end_ids):
    sampling = Sampling(rollout.temperature, None, None, rollout.max_action_tokens, end_ids, 2)
    plan = plan_cache(network.arch, rollout)
    return SlotEngine(network, sampling, plan, group_size=2, steps=3, prefill_tokens=64)


@functools.cache
def make():
    arch = Architecture(**SIZES, mlp_width=24)
    network, params = policy.split_model(Transformer(arch, nnx.Rngs(0)))
    return engine_of(network, ROLLOUT, NumberTokenizer.end_ids), rollout_cases.stir(params)


NUMBERS = CollectionOptions(seed=5)


def collect_with(engine, pool, requests, *, max_turns=3, seen_by=None, **options):
    """Options: those of `CollectionOptions`; seen_by: what the worker is given besides."""
    Script.happened.clear()
    worker = make_worker(engine, pool, max_turns=max_turns, **(seen_by or {}))
    options = dataclasses.replace(NUMBERS, **options)
    return collect(worker, make()[1], requests, options)


@pytest.fixture(scope="module")
def run():
    """Collects requests on the scripted environment; all tests share one engine and pool."""
    engine, _ = make()
    pool = EnvPool(
        Script,
        engine.concurrency,
        workers=3,
        timeout_s=TIMEOUT_S,
        retries=RETRIES,
        retry_wait_s=0.01,
    )
    yield functools.partial(collect_with, engine, pool)
    Script.released.set()
    pool.close()


def one(run, task_id, iteration=1, **options):
    request = EpisodeRequest(task_id, 0, 0, iteration=iteration)
    (trajectory,) = run([request], **options).trajectories
    return trajectory


def assert_same_tokens(got, wanted):
    (got,), (wanted,) = got.segments, wanted.segments
    np.testing.assert_array_equal(got.tokens_L, wanted.tokens_L)
    np.testing.assert_array_equal(got.turn_L, wanted.turn_L)
    np.testing.assert_allclose(got.logp_L, wanted.logp_L, atol=1e-5)


def test_turns_mark_exactly_what_was_sampled_and_the_rest_is_context(run):
    tokenizer, trajectory = NumberTokenizer(), one(run, "done@3")
    (segment,) = trajectory.segments
    first, action_0, reply_0, action_1, reply_1, action_2 = trajectory.messages
    assert [first["role"], action_0["role"], reply_0["role"]] == ["user", "assistant", "tool"]
    wanted_tokens, wanted_turns = tokenizer.begin((first,), (TOOL,)).tokens, []
    wanted_turns = [CONTEXT] * len(wanted_tokens)
    for turn, (action, reply) in enumerate(
        [(action_0, reply_0), (action_1, reply_1), (action_2, None)]
    ):
        sampled = segment.tokens_L[segment.turn_L == turn]
        assert tokenizer.text(sampled) == action["content"]
        read = tokenizer.observation((reply,)) if reply else []
        wanted_tokens += [*sampled, *read]
        wanted_turns += [turn] * len(sampled) + [CONTEXT] * len(read)
    np.testing.assert_array_equal(segment.tokens_L, wanted_tokens)
    np.testing.assert_array_equal(segment.turn_L, wanted_turns)
    assert trajectory.turns == 3
    assert ((segment.logp_L < 0) == (segment.turn_L != CONTEXT)).all()
    assert not segment.logp_L[segment.turn_L == CONTEXT].any()
    dtypes = (segment.tokens_L.dtype, segment.turn_L.dtype, segment.logp_L.dtype)
    assert dtypes == (np.int32, np.int32, np.float32)


def test_rewards_add_up_and_the_last_info_stays(run):
    trajectory = one(run, "done@3", seed=9)
    assert (trajectory.stop, trajectory.failed) == ("done", False)
    assert (trajectory.reward, trajectory.info["score"]) == (0.75, 0.3)
    assert (trajectory.task_id, trajectory.group, trajectory.seed) == ("done@3", 0, 9)
    said = [m["content"] for m in trajectory.messages if m["role"] == "assistant"]
    counters = {"calls": 1, "odd": True, "part": 0.5, "heard": said, "member": 0}
    assert counters.items() <= trajectory.info.items()
    assert trajectory.messages[0]["content"] == "6 9"  # the seed reached the reset


class Paying(Script):
    """Pays a tenth for the first step, a fifth for the second, seven tenths for the third."""

    def step(self, text):
        result = super().step(text)
        return dataclasses.replace(result, reward=(0.1, 0.2, 0.7)[self._step - 1])


def test_every_turns_reward_is_kept_and_their_sum_is_the_trajectorys():
    pool = EnvPool(Paying, 4, workers=2, timeout_s=60, retries=1, retry_wait_s=0.01)
    requests = group_requests(
        ["done@3", "done@1", "raise@2", "raise@0", "long@1", "busy*1@2"], 1, 1
    )
    trajectories = collect_with(make()[0], pool, requests).trajectories
    pool.close()
    rewards = [trajectory.turn_rewards for trajectory in trajectories]
    # Where an environment failed, the turn that it did not answer brought nothing.
    whole = (0.1, 0.2, 0.7)
    assert rewards == [whole, (0.1,), (0.1, 0.0), (), (0.1,), whole]
    for trajectory in trajectories:
        assert len(trajectory.turn_rewards) == trajectory.turns
        assert trajectory.reward == sum(trajectory.turn_rewards)
        assert rewards_of(trajectory) == list(trajectory.turn_rewards)


def test_an_episode_that_does_not_end_stops_at_the_limit_on_turns(run):
    trajectory = one(run, "done@9", max_turns=2)
    assert (trajectory.stop, trajectory.turns) == ("max_turns", 2)
    (segment,) = trajectory.segments
    assert segment.turn_L[-1] == 1  # the reply to the last action is read by nobody
    assert trajectory.messages[-1]["role"] == "tool"


def test_a_reply_that_leaves_no_room_for_an_action_stops_the_episode(run):
    trajectory = one(run, "long@1")
    assert (trajectory.stop, trajectory.turns, trajectory.failed) == ("max_tokens", 1, False)
    assert trajectory.segments[0].turn_L[-1] == 0
    assert trajectory.reward == 0.25


def test_a_reply_without_messages_asks_for_the_next_action(run):
    trajectory = one(run, "mute@1", max_turns=2)
    (segment,) = trajectory.segments
    first = int((segment.turn_L == 0).nonzero()[0][-1])
    assert segment.turn_L[first + 1 : first + 3].tolist() == [CONTEXT, 1]
    assert segment.tokens_L[first + 1] == 22


@pytest.mark.parametrize(
    "task_id, turns, failure, retries",
    [
        ("raise@0", 0, "KeyError: 'boom'", RETRIES),
        ("raise@2", 2, "KeyError: 'boom'", 0),
        ("busy@2", 2, "TransientError: busy", RETRIES),
        ("role@1", 1, "step() observation: got a role 'nobody'", 0),
        ("nothing@2", 2, "step(): got None; allowed: a StepResult", 0),
    ],
)
def test_an_environment_that_fails_is_an_env_error_and_spoils_no_other(
    run, task_id, turns, failure, retries
):
    healthy = ["done@3", "done@9", "done@2"]
    wanted = run(group_requests(healthy, 1, 1)).trajectories
    requests = [EpisodeRequest(task_id, 7, 1), *group_requests(healthy, 1, 1)]
    failed, *others = run(requests).trajectories
    assert (failed.stop, failed.turns, failed.failed) == ("env_error", turns, True)
    assert failed.info["failure"].startswith(failure)
    assert (failed.group, failed.info["member"], failed.info["retries"]) == (7, 1, retries)
    for got, trajectory in zip(others, wanted, strict=True):
        assert_same_tokens(got, trajectory)
        assert (got.stop, got.reward) == (trajectory.stop, trajectory.reward)


def test_an_environment_that_hangs_costs_its_time_limit_and_its_own_episode(run):
    wanted = run(group_requests(["done@3"], 3, 1)).trajectories
    requests = [EpisodeRequest("hang@2", 1, 0), *group_requests(["done@3"], 3, 1)]
    began = time.monotonic()
    hung, *others = run(requests).trajectories
    assert TIMEOUT_S <= time.monotonic() - began < TIMEOUT_S + 10
    assert (hung.stop, hung.turns, hung.failed) == ("timeout", 2, True)
    assert hung.info["failure"] == "no answer in 1 s"
    for got, trajectory in zip(others, wanted, strict=True):
        assert_same_tokens(got, trajectory)
    assert one(run, "done@2").stop == "done"  # the same slot, a new environment


@pytest.mark.parametrize(
    "task_id, retries",
    [("raise*2@0", 2), ("hang*1@0", 1), ("busy*2@0", 2), ("busy*2@1", 2), ("busy*1@3", 1)],
)
def test_a_trajectory_after_retries_is_the_undisturbed_one(run, monkeypatch, task_id, retries):
    requests = [EpisodeRequest(task_id, 0, 0), *group_requests(["done@3"], 3, 1)]
    got, *others = run(requests).trajectories
    assert (got.stop, got.info["retries"]) == ("max_turns", retries)
    assert sum(Script.happened.values()) == retries + 1 + 3  # "done" happens in the others
    monkeypatch.setattr(Script, "calm", True)
    wanted, *others_wanted = run(requests).trajectories
    assert got.info == wanted.info | {"retries": retries}
    assert_same_tokens(got, wanted)
    assert got.messages == wanted.messages
    assert got.reward == wanted.reward
    for other, other_wanted in zip(others, others_wanted, strict=True):
        assert_same_tokens(other, other_wanted)
        assert other.info == other_wanted.info and other.info["retries"] == 0


def test_a_message_that_the_tokenizer_refuses_is_not_asked_for_again(run, monkeypatch):
    calls = []

    def refuse(self, messages, tools):
        calls.append(messages)
        raise TransientError("not here")

    monkeypatch.setattr(NumberTokenizer, "begin", refuse)
    trajectory = one(run, "done@1")
    assert (trajectory.stop, trajectory.info["retries"], len(calls)) == ("env_error", 0, 1)


def test_members_of_a_group_start_alike_and_act_differently(run):
    trajectories = run(group_requests(["done@3"], 4, 1)).trajectories
    assert len({t.segments[0].tokens_L.tobytes() for t in trajectories}) == 4
    assert len({t.messages[0]["content"] for t in trajectories}) == 1
    assert [t.info["member"] for t in trajectories] == [0, 1, 2, 3]


def test_more_requests_than_the_engine_holds_come_in_order_and_are_the_same_in_any(run):
    requests = group_requests(["done@3", "done@1", "done@2"], 2, 1)
    assert [(r.group, r.member) for r in requests] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert len(requests) > make()[0].concurrency
    together = run(requests)
    backwards = run(requests[::-1])
    for request, got, again in zip(
        requests, together.trajectories, reversed(backwards.trajectories), strict=True
    ):
        assert (got.task_id, got.group) == (request.task_id, request.group)
        assert_same_tokens(got, again)


def test_seed_and_iteration_change_the_actions_and_nothing_else_does(run):
    first = {}
    for seed, iteration in [(5, 1), (5, 2), (6, 1), (5, 1)]:
        trajectory = one(run, "done@3", iteration, seed=seed)
        tokens = trajectory.segments[0].tokens_L.tobytes()
        assert first.setdefault((seed, iteration), tokens) == tokens
    assert len(set(first.values())) == 3


def test_tokens_are_counted_once_and_times_are_of_the_parts(run):
    collected = run(group_requests(["done@2", "raise@1", "done@9"], 2, 1))
    turn_L = np.concatenate([t.segments[0].turn_L for t in collected.trajectories])
    assert collected.sampled_tokens == (turn_L >= 0).sum() > 0
    assert collected.context_tokens == (turn_L == CONTEXT).sum() > 0
    assert 0 < collected.environment_s < collected.wall_s


def test_trajectories_say_which_policy_sampled_them(run):
    requests = group_requests(["done@1", "raise@1"], 2, 1)
    for version in (7, 0, None):
        collected = run(requests, policy_version=version)
        assert {t.policy_version for t in collected.trajectories} == {version}
    assert one(run, "done@1").policy_version is None


class LastToAnswer(Script):
    """Its task `last@1` answers once nine other episodes are over."""

    over = threading.Semaphore(0)

    def step(self, text):
        if self._event == "last" and self._step == 0:
            assert all(self.over.acquire(timeout=30) for _ in range(9))
        result = super().step(text)
        if result.done:
            self.over.release()
        return result


def test_a_slow_environment_delays_only_itself(run):
    others = group_requests(["done@3"], 9, 1)
    wanted = run(others).trajectories
    pool = EnvPool(LastToAnswer, 4, workers=4, timeout_s=60)
    slow, *rest = collect_with(
        make()[0], pool, [EpisodeRequest("last@1", 1, 0), *others]
    ).trajectories
    pool.close()
    assert (slow.stop, slow.turns) == ("max_turns", 3)
    for got, trajectory in zip(rest, wanted, strict=True):
        assert_same_tokens(got, trajectory)


class Refusing(Saying):
    """Samples the same first action for all, and refuses every other."""

    concurrency = 2

    def __init__(self, busy=False):
        self._always, self._open = busy, []
        self.begun, self.turns, self.released = [], [], []

    @property
    def busy(self):
        return self._always or bool(self._open)

    def begin(self, params, **numbers):
        self.begun.append(numbers)

    def fits(self, context):
        return True

    def submit(self, turn):
        super().submit(turn)
        self.turns.append(turn)

    def said(self, turn):
        if turn.turn:
            return Action(turn.key, [], [], failure=f"no server for turn {turn.turn}")
        return super().said(turn)

    def release(self, key):
        self.released.append(key)

    def usage(self):
        return {"asked": len(self.turns)}


@pytest.fixture
def pair():
    """A pool of two scripted environments."""
    pool = EnvPool(Script, 2, workers=2, timeout_s=60)
    yield pool
    pool.close()


def test_an_engine_that_gives_no_action_is_an_env_error_with_its_reason(pair):
    engine = Refusing()
    requests = group_requests(["done@1", "done@2", "done@3"], 2, 1)  # three times the concurrency
    collected = collect_with(engine, pair, requests)
    assert [t.stop for t in collected.trajectories[:2]] == ["done", "done"]
    for failed in collected.trajectories[2:]:
        assert (failed.stop, failed.turns, failed.failed) == ("env_error", 1, True)
        assert failed.info["failure"] == "no server for turn 1"
        (segment,) = failed.segments
        assert segment.tokens_L[segment.turn_L == 0].tolist() == [5, 3]
        assert segment.logp_L[segment.turn_L == 0].tolist() == [-1, -2]
        assert (failed.reward, failed.turn_rewards) == (0.25, (0.25,))
    assert sorted(engine.released) == [0, 1, 2, 3, 4, 5]
    assert collected.usage == {"asked": 10}


def test_an_engine_is_told_whose_turn_it_is_and_what_is_known_of_it(pair):
    engine, tokenizer = Refusing(), NumberTokenizer()
    requests = [
        EpisodeRequest("done@1", 4, 6, iteration=9),
        EpisodeRequest("done@2", 2, 3, iteration=2**31 + 7),
    ]
    options = {"seed": 8, "temperature": 0.4, "policy_version": 5}
    collected = collect_with(engine, pair, requests, **options)
    assert engine.begun == [{"seed": 8, "temperature": 0.4, "version": 5}]
    user, action, reply, *_ = collected.trajectories[1].messages
    first = tokenizer.begin([user], (TOOL,)).tokens
    later = [*first, 5, 3, *tokenizer.observation([reply])]
    number = task_number("done@2")
    assert [turn for turn in engine.turns if turn.key == 1] == [
        Turn(1, first, 2, number, 3, 0, (TOOL,), iteration=2**31 + 7),
        Turn(1, later, 2, number, 3, 1, (TOOL,), iteration=2**31 + 7, action=1),
    ]
    (other,) = [turn for turn in engine.turns if turn.key == 0]
    assert (other.group, other.task, other.member) == (4, task_number("done@1"), 6)
    assert other.iteration == 9


def test_a_branchs_shared_turns_are_in_the_cache(run):
    plan = TreePlan((2, 2, 2), 1, Budget(8, turn_tokens=4, max_turns=3))
    requests = root_requests(group_requests(["done@9", "done@9"], 8, 1), plan)
    collected, again = (run(requests, forks=plan, seed=9) for _ in range(2))
    assert len(collected.trajectories) == 16 and collected.usage["forks"] == 12
    for one, other in zip(collected.trajectories, again.trajectories, strict=True):
        assert one.segments[0].tokens_L.tolist() == other.segments[0].tokens_L.tolist()
    usage = collected.usage
    assert usage["decoded_tokens"] == collected.sampled_tokens
    # What trajectories begin with alike is computed once, but for what little the cache evicted.
    sequences = [t.segments[0].tokens_L.tolist() for t in collected.trajectories]
    begun = {tuple(each[: end + 1]) for each in sequences for end in range(len(each))}
    computed = usage["prefilled_tokens"] + usage["decoded_tokens"]
    assert computed < 1.2 * len(begun) < 0.5 * sum(map(len, sequences))


def test_trees_by_entropy_are_the_same_again(run):
    plan = EntropyPlan(3, coef=4.0, probability=0.3, budget=Budget(8, turn_tokens=4, max_turns=3))
    requests = root_requests(group_requests(["done@9", "done@9"], 8, 1), plan)
    one, other = (run(requests, forks=plan, seed=9) for _ in range(2))
    assert len(one.trajectories) == 16 and one.usage["forks"] > 4
    for left, right in zip(one.trajectories, other.trajectories, strict=True):
        assert left.segments[0].tokens_L.tolist() == right.segments[0].tokens_L.tolist()
        assert (left.parent, left.fork) == (right.parent, right.fork)
        assert len(left.info["entropy"]) == left.turns
        np.testing.assert_allclose(left.info["entropy"], right.info["entropy"], atol=1e-4)
        assert all(0 < entropy < 2 for entropy in left.info["entropy"])


def test_groups_of_the_same_task_have_random_numbers_of_their_own():
    requests = group_requests(["a", "b", "a", "a"], 2, 1)
    assert [(r.task_id, r.group, r.member) for r in requests] == [
        ("a", 0, 0),
        ("a", 0, 1),
        ("b", 1, 0),
        ("b", 1, 1),
        ("a", 2, 2),
        ("a", 2, 3),
        ("a", 3, 4),
        ("a", 3, 5),
    ]


@pytest.mark.parametrize("busy", [False, True])
def test_environments_are_waited_for_only_while_nothing_is_sampled(pair, busy):
    collected = collect_with(Refusing(busy), pair, [EpisodeRequest("sleep@1", 0, 0)])
    assert collected.wall_s > 0.1
    assert (0.1 < collected.environment_s < collected.wall_s) != busy
    assert (collected.environment_s == 0) == busy


def test_a_prompt_that_leaves_no_room_gives_a_trajectory_without_turns(run, monkeypatch):
    long = NumberConversation(NumberTokenizer(), [1] * 37)
    monkeypatch.setattr(NumberTokenizer, "begin", lambda self, messages, tools: long)
    trajectory = one(run, "done@1")
    assert (trajectory.stop, trajectory.turns) == ("max_tokens", 0)
    assert trajectory.segments[0].tokens_L.size == 0


class Desk:
    """Answers three times: a tool, the user, the user and a tool."""

    answers = (("tool", "It is sent."), ("user", "And?"), ("user", "Now?"))

    def reset(self, task_id, seed):
        self._step = 0
        return ({"role": "user", "content": f"the order {task_id}"},), ()

    def step(self, text):
        role, content = self.answers[self._step % 3]
        self._step += 1
        return StepResult(({"role": role, "content": content},), 0.0, False)

    def score(self):
        return 0.0

    def close(self):
        pass


LIMIT = 168  # tokens of a segment


def converse(**template_kwargs):
    """Trajectories of a tiny policy that talks by Qwen3's template, and its network."""
    chat = schema.Chat(template_kwargs=template_kwargs)
    tokenizer = HuggingFaceTokenizer(
        chat_cases.small_library(), chat, generation={}, where="the small one"
    )
    sizes = SIZES | {"vocab_size": tokenizer.vocab_size, "layers": 1}
    arch = Architecture(**sizes, mlp_width=24)
    network, params = policy.split_model(Transformer(arch, nnx.Rngs(0)))
    params = rollout_cases.stir(params)
    rollout = dataclasses.replace(ROLLOUT, max_action_tokens=5, max_context=LIMIT)
    engine = engine_of(network, rollout, tokenizer.end_ids)
    pool = EnvPool(Desk, 4, workers=4, timeout_s=60)
    requests = group_requests(["1", "22"], 2, 1)
    worker = make_worker(engine, pool, tokenizer, max_turns=4)
    collected = collect(worker, params, requests, CollectionOptions(seed=0))
    pool.close()
    return collected, tokenizer, jax.jit(network.bind(params))


@pytest.fixture(scope="module")
def rewritten():
    return converse(enable_thinking=False)


def test_a_rewritten_context_starts_a_segment_that_ends_with_its_turn(rewritten):
    collected, tokenizer, _ = rewritten
    for trajectory in collected.trajectories:
        assert (trajectory.stop, trajectory.turns) == ("max_turns", 4)
        assert len(trajectory.segments) == 4  # the empty thought is taken out of every answer
        for turn, segment in enumerate(trajectory.segments):
            assert set(segment.turn_L) == {CONTEXT, turn}
            (where,) = np.nonzero(segment.turn_L == turn)
            assert where[-1] == len(segment.turn_L) - 1
            received = trajectory.messages[: 2 * turn + 1]
            wanted = tokenizer.begin(received, ()).tokens
            assert segment.tokens_L[: where[0]].tolist() == wanted


@pytest.mark.parametrize("kind", ["rewritten", "extended"])
def test_the_samplers_log_probabilities_are_the_networks_in_every_segment(kind, request):
    collected, _, model = (
        request.getfixturevalue("rewritten") if kind == "rewritten" else converse()
    )
    segments = [s for t in collected.trajectories for s in t.segments]
    assert (len(segments) == 16) == (kind == "rewritten")
    tokens_NL = np.zeros((16, LIMIT), np.int32)
    for row, segment in enumerate(segments):
        tokens_NL[row, : len(segment.tokens_L)] = segment.tokens_L
    logp_NLV = np.asarray(jax.nn.log_softmax(model(tokens_NL) / 0.9, axis=-1))
    for row, segment in enumerate(segments):
        (where,) = np.nonzero(segment.turn_L != CONTEXT)
        wanted = logp_NLV[row, where - 1, segment.tokens_L[where]]
        np.testing.assert_allclose(segment.logp_L[where], wanted, atol=2e-5)


def test_the_limit_on_context_is_one_of_each_segment(rewritten):
    for trajectory in rewritten[0].trajectories:
        lengths = [len(segment.tokens_L) for segment in trajectory.segments]
        assert max(lengths) <= LIMIT < sum(lengths)


def test_a_deterministic_collection_is_the_same_to_the_last_bit_however_long_answers_take(
    monkeypatch,
):
    engine, params = make()
    requests = group_requests(["done@3", "done@1", "raise@2", "done@2"], 3, 1)
    collected = []
    for delays in (None, 1, 2):
        rng = np.random.default_rng(delays)

        class Slow(Script):
            wait = staticmethod(functools.partial(rng.choice, [0, 0.003, 0.02]))

            def step(self, text):
                time.sleep(self.wait())
                return super().step(text)

        pool = EnvPool(Script if delays is None else Slow, 4, workers=4, timeout_s=TIMEOUT_S)
        worker = make_worker(engine, pool, max_turns=3, deterministic=True)
        collected.append(collect(worker, params, requests, NUMBERS))
        pool.close()
    first, *others = collected
    for other in others:
        assert other.usage == first.usage
        for got, wanted in zip(other.trajectories, first.trajectories, strict=True):
            for segment, same in zip(got.segments, wanted.segments, strict=True):
                np.testing.assert_array_equal(segment.logp_L, same.logp_L)
            assert (got.messages, got.info) == (wanted.messages, wanted.info)


def test_a_collection_can_be_looked_at_while_it_goes_on():
    engine, _ = make()
    requests = group_requests(["done@1", "raise@1", "done@3"], 2, 1)
    watch, seen, held = Watch(), [], threading.Event()

    class Held(Script):
        def step(self, text):
            if self._at == 3 and self._step == 1:
                seen.append(watch.look())
                held.wait(0.1)
                seen.append(watch.look())
            return super().step(text)

    pool = EnvPool(Held, 4, workers=4, timeout_s=30)
    collected = collect_with(engine, pool, requests, seen_by={"watch": watch})
    pool.close()
    assert watch.look() is None
    assert {each.total for each in seen} == {6}
    assert all(each.active + each.finished <= 6 and each.stepping >= 1 for each in seen)
    assert all(0 < each.tokens <= collected.sampled_tokens for each in seen)
    assert max(each.failed for each in seen) <= 2 == sum(t.failed for t in collected.trajectories)
    task_id, seconds = max((each.slowest for each in seen), key=lambda slowest: slowest[1])
    assert task_id == "done@3" and 0.1 <= seconds < 30


def test_what_a_collection_says_ends_with_it_also_where_it_fails():
    engine, _ = make()
    watch, stopped = Watch(), []

    def stop():
        stopped.append(watch.look())
        return True

    pool = EnvPool(Script, 4, workers=4, timeout_s=TIMEOUT_S)
    with pytest.raises(Stopped):
        requests, seen_by = group_requests(["done@1"], 4, 1), {"watch": watch, "stop": stop}
        collect_with(engine, pool, requests, seen_by=seen_by)
    pool.close()
    assert stopped[0].total == stopped[0].active == 4 and watch.look() is None


def test_every_trajectory_is_told_of_when_it_is_over():
    engine, params = make()
    requests, logged = group_requests(["done@1", "raise@1", "done@3"], 2, 1), []
    pool = EnvPool(Script, 4, workers=4, timeout_s=TIMEOUT_S)
    collected = collect(
        make_worker(engine, pool, max_turns=3),
        params,
        requests,
        NUMBERS,
        on_finished=lambda *finished: logged.append(finished),
    )
    pool.close()
    request_of = {id(trajectory): request for request, trajectory in logged}
    assert [request_of[id(t)] for t in collected.trajectories] == requests
    assert logged[-1][0].task_id == "done@3"


class Watched(Script):
    """Counts resets that were asked for, and closed environments."""

    asked, closed = Counter(), []

    def reset(self, task_id, seed):
        self.asked[task_id] += 1
        return super().reset(task_id, seed)

    def close(self):
        self.closed.append(self)


@pytest.fixture
def watched():
    """Makes pools of four watched environments."""
    pools = []

    def make_pool(**options):
        Script.released.clear()
        Script.happened.clear()
        Watched.asked.clear()
        Watched.closed.clear()
        limits = {"timeout_s": TIMEOUT_S, "retries": RETRIES, "retry_wait_s": 0.01}
        pools.append(EnvPool(Watched, 4, workers=2, **(limits | options)))
        return pools[-1]

    yield make_pool
    Script.released.set()
    for pool in pools:
        pool.close()


def collect_prefetched(pool, requests, max_idle_s=60.0, meanwhile=lambda: None):
    """A collection whose environments are prefetched; None: they are not."""
    engine, params = make()
    worker, prefetched = make_worker(engine, pool, max_turns=3, deterministic=True), None
    if max_idle_s is not None:
        prefetched = prefetch(worker, requests, NUMBERS, max_idle_s)
        meanwhile()
    return collect(worker, params, requests, NUMBERS, prefetched=prefetched)


def prefetch_in(pool, requests):
    return prefetch(make_worker(make()[0], pool, max_turns=3), requests, NUMBERS, max_idle_s=1)


# More than environments. Of the first, which are prefetched: one comes at its third try, one not.
BEGINNING = ["busy*2@0", "done@3", "raise@0", "sleep@0", "done@1", "raise@2", "done@2"]


@pytest.mark.parametrize("max_idle_s, resets", [(60.0, 1), (0.0, 2)])
def test_prefetched_environments_bring_the_same_trajectories(watched, max_idle_s, resets):
    requests = group_requests(BEGINNING, 1, 1)
    wanted = collect_prefetched(watched(), requests, None).trajectories
    assert Watched.asked["done@3"] == 1
    got = collect_prefetched(watched(), requests, max_idle_s, lambda: time.sleep(0.1)).trajectories
    # What was begun too long ago begins once more; what had not begun yet does so once.
    assert (Watched.asked["done@3"], Watched.asked["done@2"]) == (resets, 1)
    assert [t.stop for t in got] == [t.stop for t in wanted]
    assert [t.failed for t in got] == [False, False, True, False, False, True, False]
    for trajectory, same in zip(got, wanted, strict=True):
        assert trajectory.messages == same.messages
        tries = {} if max_idle_s else {"retries": trajectory.info["retries"]}
        assert trajectory.info == same.info | tries
        for segment, other in zip(trajectory.segments, same.segments, strict=True):
            np.testing.assert_array_equal(segment.tokens_L, other.tokens_L)
            np.testing.assert_array_equal(segment.logp_L, other.logp_L)


def test_a_prefetched_reset_that_hangs_is_given_up_and_made_again(watched):
    requests = group_requests(["hang*1@0", "done@2"], 1, 1)
    pool = watched()
    hung, other = collect_prefetched(pool, requests, meanwhile=lambda: time.sleep(0.2)).trajectories
    assert (hung.stop, hung.info["retries"], other.stop) == ("max_turns", 1, "done")
    assert pool.abandoned == 1 and Watched.asked == {"hang*1@0": 2, "done@2": 1}


def test_no_more_environments_are_prefetched_than_there_are(watched):
    pool = watched()
    requests = group_requests(BEGINNING, 1, 1)
    prefetched = prefetch_in(pool, requests)
    assert list(prefetched.requests) == requests[:4] and pool.open == 4
    pool.drain()
    assert Watched.asked == {"busy*2@0": 3, "done@3": 1, "raise@0": 3, "sleep@0": 1}
    assert (
        pool.open == 0 and collect_prefetched(pool, requests, None).trajectories[1].stop == "done"
    )


def test_waiting_for_resets_is_timed_and_takes_no_time_where_they_are_over(watched):
    requests = group_requests(["sleep@0"], 4, 1)
    late = collect_prefetched(watched(), requests, None)
    assert 0.2 < late.reset_s <= late.environment_s  # two workers, two resets of 0.1 s each
    ahead = collect_prefetched(watched(), requests, meanwhile=lambda: time.sleep(1))
    assert ahead.reset_s < 0.1


def test_a_pool_that_is_closed_while_environments_begin_closes_them_all(watched):
    before, pool = threading.active_count(), watched(timeout_s=30)
    requests = group_requests(["sleep@0"], 4, 1)
    prefetch_in(pool, requests)
    pool.close()
    assert len(set(map(id, Watched.closed))) == 4 and threading.active_count() <= before


def test_what_began_for_other_trajectories_is_not_taken(watched):
    engine, params = make()
    requests = group_requests(["done@1", "done@2"], 1, 1)
    prefetched = prefetch_in(watched(), requests)
    worker = make_worker(engine, watched(), max_turns=3)
    with pytest.raises(AssertionError):
        collect(worker, params, requests[::-1], NUMBERS, prefetched=prefetched)
