"""Agents play as environments do: their calls are turns, and what they do wrong costs their own."""

import asyncio
import contextlib
import dataclasses
import threading
import time

import jax
import numpy as np
import pytest
import rollout_cases
from flax import nnx
from lineage_cases import HERMES, Agents, CharTokenizer, ask, assistant, refusal, say, user
from work_cases import Trainer

from seeupo_jax.agents import agent_player
from seeupo_jax.agents.calls import AgentResult, CallRefused, HistoryMessage
from seeupo_jax.configuration import schema
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.envs.base import StepResult
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rewards.scorer import make_scorer
from seeupo_jax.rollout.asynchronous.sampling_loop import SamplingLoop
from seeupo_jax.rollout.collect import EpisodeRequest, collect, group_requests
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.protocol import Action, Constraint
from seeupo_jax.rollout.engine.sampling import Sampling, task_number
from seeupo_jax.rollout.engine.slots import SlotEngine
from seeupo_jax.rollout.environment_player import EnvironmentHost
from seeupo_jax.rollout.player import CollectionOptions, RolloutWorker
from seeupo_jax.types import CONTEXT, UNKNOWN_VERSION

NUMBERS = CollectionOptions(seed=5, split="test")
TOOL = {"name": "look", "description": "", "parameters": {}}


class Telling:
    """An engine that says what it is told to: `answer(turn)` gives an action's tokens.

    A step gives a turn one token more; None is an action that fails.
    """

    concurrency, poll_interval_s, longest, shard_owners = 4, None, 400, (0,)

    def __init__(self, answer=lambda turn: say("ok"), step_s=0.0):
        self._answer, self._step_s = answer, step_s
        self.turns, self.cancelled, self.released = [], [], []
        self._open = {}

    def begin(self, params, *, seed, temperature=None, version=UNKNOWN_VERSION):
        self._open, self.version = {}, version

    def swap(self, params, version):
        self.version = version

    def one_policy(self):
        return contextlib.nullcontext()

    def fits(self, context):
        return len(context) < self.longest

    def submit(self, turn):
        assert turn.key not in self._open and turn.key not in self.released
        self.turns.append(turn)
        self._open[turn.key] = (turn, [], [])

    def cancel(self, key):
        self.cancelled.append(key)
        self._open.pop(key)

    def release(self, key):
        assert key not in self._open
        self.released.append(key)

    @property
    def busy(self):
        return bool(self._open)

    def step(self, unfinished, stop=False):
        if stop:
            raise Stopped
        time.sleep(self._step_s)
        actions = [action for key in list(self._open) for action in self._grow(key)]
        return actions if unfinished or actions else None

    def _grow(self, key):
        turn, tokens, versions = self._open[key]
        whole = self._answer(turn)
        if whole is None:
            del self._open[key]
            refuses = turn.constraint is not None
            return [Action(key, [], [], failure="the grammar is broken", refuses_tools=refuses)]
        whole = whole[: turn.limit]
        tokens.append(whole[len(tokens)])
        versions.append(self.version)
        kept = None if turn.listen is None else turn.listen(tokens)
        if kept is None and len(tokens) < len(whole):
            return []
        del self._open[key]
        tokens, versions = tokens[:kept], versions[:kept]
        return [Action(key, tokens, [-1.0] * len(tokens), version_L=versions)]

    def usage(self):
        return {}

    def seconds(self):
        return {}


@contextlib.contextmanager
def playing(agent, engine, *, max_turns=4, env=None, rewards=None, stop=lambda: False, **options):
    """A worker whose episodes are an agent's, and the agents."""
    agents = Agents(agent)
    deterministic = options.pop("deterministic", False)
    worker = RolloutWorker(
        engine,
        agents.host(**options),
        CharTokenizer(),
        schema.Env(**(env or {})),
        schema.Rollout(max_turns=max_turns, max_context=400, deterministic=deterministic),
        stop=stop,
        **({} if rewards is None else {"rewards": rewards}),
    )
    try:
        yield worker, agents
    finally:
        worker.host.close()


def play(agent, requests=("task",), *, engine=None, **options):
    """Trajectories of one group each."""
    engine = Telling() if engine is None else engine
    with playing(agent, engine, **options) as (worker, agents):
        trajectories = collect(worker, None, group_requests(requests, 1, 1), NUMBERS).trajectories
        assert sorted(agents.closed) == sorted(agents.sessions) and not engine.busy
        assert set(engine.released) == {turn.key for turn in engine.turns}
        return trajectories


def play_one(agent, **options):
    (trajectory,) = play(agent, **options)
    return trajectory


def marks(trajectory):
    """The turns of each segment, as they stand in it."""
    return [
        list(dict.fromkeys(turn for turn in segment.turn_L.tolist() if turn != CONTEXT))
        for segment in trajectory.segments
    ]


async def talk(session, *words, **options):
    """Says words one after the other in one conversation; the completions."""
    messages, completions = [], []
    for word in words:
        messages.append(user(word))
        completion = await session.complete(ask(*messages, **options))
        messages.append(assistant(completion.content, *completion.calls))
        completions.append(completion)
    return completions


def test_an_agents_calls_are_its_turns_and_its_reward_the_episodes():
    logged = []

    async def agent(task, session):
        logged.append(task)
        await talk(session, "a", "b", tools=(TOOL,))
        return AgentResult(0.75, 0.5, info={"mood": "good"})

    engine = Telling()
    trajectory = play_one(agent, engine=engine, data=lambda task_id, split: [task_id, split])
    (task,) = logged
    assert (task.task_id, task.split, task.data) == ("task", "test", ["task", "test"])
    assert (task.seed, task.max_turns) == (5, 4)
    assert task.episode_seed == EpisodeRequest("task", 0, 0, iteration=1).episode_seed(5)
    assert (trajectory.stop, trajectory.reward, trajectory.turn_rewards) == (
        *("done", 0.75),
        (0.0, 0.75),
    )
    assert {"mood": "good", "score": 0.5, "member": 0}.items() <= trajectory.info.items()
    assert marks(trajectory) == [[0, 1]]
    said = [("user", "a"), ("assistant", "ok"), ("user", "b"), ("assistant", "ok")]
    assert [(m["role"], m["content"]) for m in trajectory.messages] == said
    first, second = engine.turns
    assert (first.turn, second.turn, first.key) == (0, 1, second.key)
    assert (first.group, first.task, first.member) == (0, task_number("task"), 0)
    assert first.tools == (TOOL,)
    (segment,) = trajectory.segments
    assert segment.tokens_L.tolist() == [*second.context, *say("ok")]


def test_an_agents_turns_are_sampled_by_the_newest_policy_of_a_trainer():
    """The second call comes after a swap; what a stop string cuts off has no version either."""
    swapped, engine = threading.Event(), Telling(lambda turn: say("ok then"))

    async def agent(task, session):
        messages = [user("a")]
        messages.append(assistant((await session.complete(ask(*messages))).content))
        while task.task_id == "late" and not swapped.is_set():
            await asyncio.sleep(0.01)
        await session.complete(ask(*messages, user("b"), stop=("th",)))
        return 1.0

    trainer = Trainer([["early"], ["late"]], 1, ahead=1)
    newer_policy = trainer.newer_policy

    def take(than):
        policy = newer_policy(than)
        if policy is not None and policy.version == 1:
            swapped.set()
        return policy

    trainer.newer_policy = take
    with playing(agent, engine) as (worker, agents):
        SamplingLoop(worker, trainer, seed=5, max_lag=1).run()
        assert sorted(agents.closed) == sorted(agents.sessions) and not engine.busy
        assert set(engine.released) == {turn.key for turn in engine.turns}
    ((early,), (late,)) = trainer.taken
    for trajectory, second in ((early, 0), (late, 1)):
        (segment,) = trajectory.segments
        versions = {
            turn: {*segment.version_L[segment.turn_L == turn].tolist()} for turn in (CONTEXT, 0, 1)
        }
        assert versions == {CONTEXT: {UNKNOWN_VERSION}, 0: {0}, 1: {second}}
        assert trajectory.policy_version == 0
        assert len(segment.version_L) == len(segment.tokens_L)


def test_what_an_agent_does_to_its_tasks_data_no_other_episode_sees():
    line, given = {"messages": ["a"]}, []

    async def agent(task, session):
        given.append(list(task.data["messages"]))
        task.data["messages"].append("b")
        await talk(session, *task.data["messages"])
        return 1.0

    with playing(agent, Telling(), data=lambda task_id, split: line) as (worker, _):
        collect(worker, None, group_requests(["task"], 2, 1), NUMBERS)
    assert given == [["a"]] * 2 and line == {"messages": ["a"]}


@pytest.mark.parametrize("together, deterministic", [(True, True), (True, False), (False, True)])
def test_calls_whose_order_a_rerun_may_change_are_warned_of_once(caplog, together, deterministic):
    async def agent(task, session):
        sides = [talk(session, word) for word in ("one", "two", "three")]
        if together:
            await asyncio.gather(*sides)
        else:
            [await side for side in sides]
        return 1.0

    agent_player._warn_of_concurrent_calls.cache_clear()
    for _ in range(2):
        play(agent, ["a", "b"], deterministic=deterministic, engine=Telling(step_s=0.05))
    assert len(caplog.messages) == (together and deterministic)
    assert all("rollout.deterministic: an agent has several" in text for text in caplog.messages)


def test_side_by_side_calls_are_segments_whose_turns_interleave():
    async def agent(task, session):
        async def side(word):
            return (await talk(session, word, "more"))[-1]

        await asyncio.gather(side("one"), side("two"))
        return 1.0

    trajectory = play_one(agent)
    assert sorted(map(tuple, marks(trajectory))) in ([(0, 2), (1, 3)], [(0, 3), (1, 2)])
    assert trajectory.turns == 4 and trajectory.turn_rewards == (0.0, 0.0, 0.0, 1.0)


def test_a_text_is_streamed_up_to_a_stop_string_and_never_by_half_a_character():
    action, pieces = say("né STO, then STOP and more"), []

    async def agent(task, session):
        call = dataclasses.replace(ask("a"), stop=("STOP",))
        completion = await session.complete(call, pieces.append)
        assert completion.text == completion.content == "".join(pieces) == "né STO, then "
        assert completion.finish == "stop" and len(completion.pieces) == len(completion.logp) == 18
        call = dataclasses.replace(ask("b"), max_tokens=3)
        completion = await session.complete(call)
        assert (completion.text, completion.finish) == ("né", "length")
        return 1.0

    trajectory = play_one(agent, engine=Telling(lambda turn: action))
    assert trajectory.stop == "done" and len(pieces) > 5
    assert "n" in pieces and "é" in pieces and not {"S", "ST", "STO"} & set(pieces)
    first, second = trajectory.segments
    assert first.tokens_L[first.turn_L == 0].tolist() == list("né STO, then STOP".encode())
    assert second.tokens_L[second.turn_L == 1].tolist() == list("né".encode())


def test_calls_of_tools_are_read_where_there_are_tools_and_a_clients_rewriting_continues():
    call = ToolCall("look", {"at": 1.0})
    text = f"so {HERMES.render('', [call])}"

    async def agent(task, session):
        answer = await session.complete(ask("a", tools=(TOOL,)))
        assert (answer.content, answer.calls, answer.finish) == ("so", (call,), "tool_calls")
        back = HistoryMessage("assistant", " so", (ToolCall("look", {"at": 1}),))
        await session.complete(ask("a", back, "b", tools=(TOOL,)))
        answer = await session.complete(ask("a"))
        assert (answer.content, answer.calls, answer.finish) == (text, (), "stop")
        return 1.0

    assert marks(play_one(agent, engine=Telling(lambda turn: say(text)))) == [[0, 1], [2]]


@pytest.mark.parametrize("lets_through", [False, True])
def test_a_call_after_the_last_turn_is_refused_and_the_episode_counts(lets_through):
    async def agent(task, session):
        await talk(session, "a", "b")
        for _ in range(2):
            refused = await refusal(session, ask("c"))
            assert (refused.status, refused.code) == (400, "max_turns")
            assert "max_turns=2" in str(refused)
        if lets_through:
            raise refused
        return 0.5

    trajectory = play_one(agent, max_turns=2)
    assert (trajectory.stop, trajectory.turns, trajectory.failed) == ("max_turns", 2, False)
    assert trajectory.info["refused_calls"] == 2
    assert trajectory.reward == trajectory.info["score"] == (0.0 if lets_through else 0.5)
    assert "agent_failure" not in trajectory.info


@pytest.mark.parametrize("compacts", [False, True])
def test_a_history_that_is_too_long_is_refused_and_may_be_compacted(compacts):
    async def agent(task, session):
        (answer,) = await talk(session, "a")
        refused = await refusal(session, ask("a", assistant(answer.content), "b" * 400))
        assert (refused.status, refused.code) == (400, "context_length_exceeded")
        if compacts:
            await talk(session, "in short: a")
        return 1.0

    trajectory = play_one(agent)
    assert trajectory.stop == ("done" if compacts else "max_tokens")
    assert marks(trajectory) == ([[0], [1]] if compacts else [[0]])


def test_a_history_that_is_longer_by_far_is_refused_before_it_is_tokenised(monkeypatch):
    async def agent(task, session):
        await talk(session, "a")
        with monkeypatch.context() as patched:
            patched.delattr(CharTokenizer, "begin")
            assert (await refusal(session, ask("b" * 100))).code == "invalid_messages"
            refused = await refusal(session, ask("b" * 1000, "b" * 1000))
        assert (refused.status, refused.code) == (400, "context_length_exceeded")
        return 1.0

    trajectory = play_one(agent)
    assert (trajectory.stop, trajectory.info["refused_calls"]) == ("max_tokens", 1)


def test_messages_that_no_template_takes_are_refused_and_cost_no_turn():
    async def agent(task, session):
        for content in ("refuse me", "half \ud800"):
            refused = await refusal(session, ask(content))
            assert (refused.code, refused.param) == ("invalid_messages", "messages")
        await talk(session, "a")
        return 1.0

    engine = Telling()
    assert play_one(agent, engine=engine).turns == 1
    assert [turn.turn for turn in engine.turns] == [0]


def test_the_tokens_of_a_call_are_those_of_its_turn_and_cost_none():
    counted = []

    async def agent(task, session):
        for text in ("a", "bc"):
            counted.append(await session.context(ask(text)))
        try:
            await session.context(ask("refuse me"))
        except CallRefused as refused:
            counted.append(refused.code)
        await talk(session, "a", "bc")
        counted.append(await session.context(ask("a", assistant("ok"), "bc")))
        counted.append(session.max_context)
        return 1.0

    engine = Telling()
    assert play_one(agent, engine=engine).turns == 2
    (a, bc, refused, continued, most), (first, second) = counted, engine.turns
    assert [list(a), list(continued)] == [list(first.context), list(second.context)]
    assert (len(bc) - len(a), refused, most) == (1, "invalid_messages", 400)


def test_what_an_agent_does_wrong_costs_its_episode_alone():
    async def agent(task, session):
        await talk(session, "a")
        if task.task_id == "raise":
            raise KeyError("boom")
        wrong = {
            "turns": {"turn_rewards": (0.5, 0.5)},
            "sum": {"reward": 1e9},
            "info": {"info": {"executed": [True, False]}},  # which recipe `spa` reads
        }
        return AgentResult(**({"reward": 1.0} | wrong.get(task.task_id, {})))

    tasks = ("good", "raise", "turns", "sum", "info", "fine")
    played = play(agent, tasks, env={"max_reward": 100.0})
    assert [t.failed for t in played] == [False, True, True, True, True, False]
    _, raised, turns, large, listed, _ = played
    assert (raised.stop, raised.info["agent_failure"]) == ("env_error", "exception")
    assert raised.info["failure"] == "KeyError: 'boom'" and raised.turns == 1
    assert turns.info["failure"] == (
        "the agent's result: turn_rewards: got 2; allowed: none, or one for each of its 1 turns."
    )
    assert {t.info["agent_failure"] for t in (turns, large, listed)} == {"result"}
    assert listed.info["failure"] == (
        'the agent\'s result: info["executed"]: got [True, False] (list); allowed: a list of 1'
        " booleans, one for each step so far."
    )
    assert "max_reward" in large.info["failure"]


@pytest.mark.parametrize("timeout_as", ["failure", "zero_reward"])
def test_an_agent_that_stops_calling_is_ended_and_the_engines_time_is_not_its_own(timeout_as):
    ended = threading.Event()

    async def agent(task, session):
        await talk(session, "a", "b")  # each takes the engine longer than the agent may think
        for _ in range(300):
            with contextlib.suppress(CallRefused):
                await session.complete(ask("refuse me"))  # is no sign of life
            await asyncio.sleep(0.05)
        ended.set()

    engine = Telling(step_s=0.3)  # for each of three tokens
    options = {"timeout_s": 0.8, "env": {"timeout_as": timeout_as}}
    with playing(agent, engine, **options) as (worker, agents):
        (trajectory,) = collect(worker, None, group_requests(["task"], 1, 1), NUMBERS).trajectories
        assert agents.stopped == 1  # and not only as the host closes
    assert not ended.is_set()
    assert (trajectory.stop, trajectory.turns) == ("timeout", 2)
    assert trajectory.failed == (timeout_as == "failure")
    assert trajectory.info["agent_failure"] == "timeout" and "0.8 s" in trajectory.info["failure"]
    assert trajectory.turn_rewards == (0.0, 0.0)


@pytest.mark.parametrize("where", ["sampling", "waiting"])
def test_a_client_that_vanishes_leaves_no_turn(where):
    engine = Telling(step_s=0.01)
    long, engine._answer = say("x" * 300), lambda turn: long if turn.turn == 1 else say("ok")

    async def agent(task, session):
        (answer,) = await talk(session, "a")
        received = asyncio.Event()
        again = ask("a", assistant(answer.content), "b")
        call = session.complete(again, lambda piece: received.set())
        vanishing = asyncio.ensure_future(call)
        if where == "sampling":
            await received.wait()
        else:
            await asyncio.sleep(0)
        vanishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await vanishing
        await session.complete(again)
        return 1.0

    trajectory = play_one(agent, engine=engine)
    assert marks(trajectory) == [[0, 1]] and trajectory.turn_rewards == (0.0, 1.0)
    assert len(engine.cancelled) <= 1 and (where == "waiting" or engine.cancelled)
    assert [turn.turn for turn in engine.turns][-1] == 2  # the third that was begun


def test_an_agent_that_gives_up_all_its_calls_comes_to_an_end():
    async def agent(task, session):
        while True:
            try:
                await asyncio.wait_for(session.complete(ask("a")), 0.02)
            except TimeoutError:
                continue

    engine = Telling(lambda turn: say("x" * 300), step_s=0.005)
    trajectory = play_one(agent, engine=engine, max_turns=3)
    assert (trajectory.stop, trajectory.turns, trajectory.reward) == ("max_turns", 0, 0.0)
    assert len(engine.turns) <= 3


def test_calls_that_are_open_when_an_agent_returns_are_taken_back():
    refused = []

    async def agent(task, session):
        async def left():
            refused.append(await refusal(session, ask("b")))

        background = asyncio.ensure_future(left())
        await talk(session, "a")
        session.background = background  # an event loop holds tasks weakly
        return 1.0

    engine = Telling(lambda turn: say("x" * 300) if turn.context[1] == ord("b") else say("ok"))
    trajectory = play_one(agent, engine=engine)
    assert trajectory.turns == 1 and len(engine.cancelled) == 1
    assert [(each.status, each.code) for each in refused] == [(410, "episode_over")]


def test_calls_of_an_episode_that_is_over_are_refused_in_the_collection_and_after_it():
    late = []

    async def agent(task, session):
        if task.task_id == "over":
            late.append(session)
            return 1.0
        while not late:
            await asyncio.sleep(0.01)
        await talk(session, "a")
        late.append((await refusal(late[0], ask("b"))).code)
        return 1.0

    with playing(agent, Telling()) as (worker, agents):
        over, _ = collect(
            worker, None, group_requests(["over", "other"], 1, 1), NUMBERS
        ).trajectories
        assert over.turns == 0 and over.turn_rewards == () and over.reward == 1.0
        assert late[1:] == ["episode_over"]
        after = agents.submit(refusal(late[0], ask("c"))).result(5)
        assert (after.status, after.code) == (410, "episode_over")


def test_an_action_that_fails_is_the_episodes_failure_and_ends_the_agent():
    async def agent(task, session):
        await talk(session, "a")
        return 1.0

    trajectory = play_one(agent, engine=Telling(lambda turn: None))
    assert (trajectory.stop, trajectory.turns) == ("env_error", 0)
    assert trajectory.info["failure"] == "the grammar is broken"
    assert "agent_failure" not in trajectory.info


def test_a_form_without_a_grammar_is_refused_and_the_episode_goes_on():
    refused = []
    form = Constraint("must", field="tool_choice")

    async def agent(task, session):
        await talk(session, "a", tools=(TOOL,), constraint=form)
        with pytest.raises(CallRefused) as error:
            await talk(session, "b", tools=(TOOL,), constraint=form)
        refused.append((error.value.status, error.value.param, str(error.value)))
        return 1.0

    engine = Telling(lambda turn: say("ok") if len(engine.turns) == 1 else None)
    trajectory = play_one(agent, engine=engine)
    assert (trajectory.stop, trajectory.turns) == ("done", 1)
    assert refused == [(400, "tool_choice", "tool_choice: the grammar is broken")]
    assert [turn.constraint for turn in engine.turns] == [form, form]  # no thoughts before it


def test_a_run_that_stops_ends_its_agents_and_refuses_their_calls():
    codes, calls = [], threading.Semaphore(0)

    async def agent(task, session):
        calls.release()
        try:
            await talk(session, "a")
        except CallRefused as refused:
            codes.append(refused.code)
            raise

    engine = Telling(lambda turn: say("x" * 300), step_s=0.01)

    def stop():
        return len(engine.turns) == 2

    with playing(agent, engine, stop=stop) as (worker, agents):
        with pytest.raises(Stopped):
            collect(worker, None, group_requests(["one", "two"], 1, 1), NUMBERS)
        assert sorted(agents.closed) == sorted(agents.sessions) and agents.stopped == 2
        after = agents.submit(refusal(agents.sessions["0"], ask("c"))).result(5)
        assert after.code == "episode_over"


def paid_by_length(episode):
    return 0.1 * sum(len(m["content"]) for m in episode.messages) + 10 * len(episode.answer)


def test_rewards_have_names_and_weights_and_functions_judge_finished_episodes():
    async def agent(task, session):
        await talk(session, "a", assistant("mine").content)
        session.ignored("top_p")
        session.ignored("seed")
        return AgentResult(1.0, rewards={"style": 0.25}, turn_rewards=(0.75, 0.25))

    config = from_dict({"rewards": [{"function": f"{__name__}:paid_by_length", "weight": 2.0}]})
    scorer = make_scorer(config.rewards)
    with contextlib.closing(scorer):
        trajectory = play_one(agent, rewards=scorer)
    # Texts: a, ok, mine, ok; the last answer has two characters.
    judged = 0.1 * 9 + 10 * 2
    assert trajectory.rewards == {
        "env": 1.0,
        "style": 0.25,
        "paid_by_length": pytest.approx(judged),
    }
    assert trajectory.turn_rewards == (0.75, pytest.approx(0.25 + 0.25 + 2 * judged))
    assert trajectory.info["ignored_sampling"] == 2 and trajectory.info["score"] == 1.0


def test_a_named_reward_of_an_agent_may_be_a_number_for_each_turn():
    async def agent(task, session):
        await talk(session, "a", assistant("mine").content)
        return AgentResult(1.0, rewards={"style": [0.5] * (3 if task.task_id == "long" else 2)})

    trajectory = play_one(agent)
    assert trajectory.turn_rewards == (0.5, 1.5) and trajectory.reward == 2.0
    assert trajectory.rewards == {"env": 1.0, "style": 1.0}


def test_more_agents_than_the_engine_holds_come_as_others_end():
    running, most = [], []

    async def agent(task, session):
        running.append(task)
        most.append(len(running))
        await talk(session, "a", "b")
        running.remove(task)
        return float(task.task_id)

    trajectories = play(agent, [str(number) for number in range(11)])
    assert [t.reward for t in trajectories] == list(range(11))
    assert max(most) <= Telling.concurrency


# An environment, and an agent that plays it by hand: the same trajectories, to the last bit.

SIZES = {"vocab_size": 29, "width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8}


class Numbers(rollout_cases.NumberTokenizer):
    def token_bytes(self):
        return [b"%d " % token for token in range(self.vocab_size)]


class Desk:
    """Ends after as many steps as its task says, and pays for each the number of its words."""

    def reset(self, task_id, seed):
        self._left, self._paid = int(task_id), 0.0
        return ({"role": "user", "content": f"{task_id} 5 6 7"},), (TOOL | {"name": "17 18"},)

    def step(self, text):
        self._left -= 1
        reward = float(len(text.split()))
        self._paid += reward
        done = not self._left
        reply = () if done else ({"role": "tool", "content": f"{self._left} {len(text)}"},)
        return StepResult(reply, reward, done)

    def score(self):
        return min(self._paid / 40, 1.0)

    def close(self):
        pass


async def by_hand(task, session):
    """The desk played by a loop of its own, which takes its time."""
    rng = np.random.default_rng()  # it takes another while each time
    desk, rewards = Desk(), []
    messages, tools = desk.reset(task.task_id, task.seed)
    history = [HistoryMessage(**message) for message in messages]
    while True:
        try:
            answer = await session.complete(ask(*history, tools=tuple(tools)))
        except CallRefused:
            break
        result = desk.step(answer.content)
        rewards.append(result.reward)
        if result.done:
            break
        history += [
            assistant(f" {answer.content}"),
            *(HistoryMessage(**m) for m in result.observation),
        ]
        await asyncio.sleep(float(rng.choice([0, 0.001, 0.01])))
    return AgentResult(sum(rewards), desk.score(), turn_rewards=rewards)


SETTINGS = schema.Rollout(
    concurrency=4,
    page_size=8,
    max_action_tokens=4,
    max_context=48,
    max_turns=3,
    deterministic=True,
)


@pytest.fixture(scope="module")
def sampler():
    """A network, its parameters, and the engine that samples from it."""
    network, params = policy.split_model(
        Transformer(Architecture(**SIZES, mlp_width=24), nnx.Rngs(0))
    )
    sampling = Sampling(0.9, None, None, SETTINGS.max_action_tokens, Numbers.end_ids)
    plan, options = plan_cache(network.arch, SETTINGS), {"prefill_tokens": 64, "few": True}
    engine = SlotEngine(network, sampling, plan, group_size=2, steps=3, **options)
    return network, rollout_cases.stir(params), engine


def test_an_agent_that_plays_an_environment_gives_its_trajectories_to_the_last_bit(sampler):
    _, params, engine = sampler
    requests = group_requests(["1", "3", "2", "9"], 3, 1)
    agents = Agents(by_hand)
    hosts = [
        EnvironmentHost(EnvPool(Desk, 4, workers=4, timeout_s=30.0)),
        *(agents.host() for _ in range(2)),
    ]
    found = []
    for host in hosts:
        worker = RolloutWorker(engine, host, Numbers(), schema.Env(), SETTINGS)
        found.append(collect(worker, params, requests, NUMBERS))
    hosts[0].close()
    agents.close()
    wanted, *others = found
    assert {t.stop for t in wanted.trajectories} == {"done", "max_turns"}
    for collected in others:
        assert collected.usage == wanted.usage
        for got, same in zip(collected.trajectories, wanted.trajectories, strict=True):
            assert (got.stop, got.turn_rewards, got.messages) == (
                *(same.stop, same.turn_rewards),
                same.messages,
            )
            counts = {"lineages": 1, "refused_calls": int(same.stop == "max_turns")}
            assert (got.reward, got.info) == (same.reward, same.info | counts)
            for segment, other in zip(got.segments, same.segments, strict=True):
                for part in ("tokens_L", "turn_L", "logp_L"):
                    np.testing.assert_array_equal(getattr(segment, part), getattr(other, part))


async def restless(task, session):
    """Goes on, branches, asks side by side, compacts, stops early and gives up, at random."""
    rng = np.random.default_rng(task.episode_seed)
    histories = [(user(f"{task.task_id} 5 6"),)]

    async def ask_one(history):
        options = {"stop": ("1",)} if rng.random() < 0.3 else {}
        options |= {"max_tokens": 2} if rng.random() < 0.2 else {}
        call = session.complete(ask(*history, **options), lambda piece: None)
        if rng.random() < 0.25:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(call, float(rng.choice([0.001, 0.01])))
            return
        answer = await call
        histories.append((*history, assistant(f"{answer.content} "), user(str(rng.integers(9)))))

    with contextlib.suppress(CallRefused):
        while True:
            continued = [
                histories[-1 if rng.random() < 0.7 else 0] for _ in range(rng.integers(1, 4))
            ]
            if rng.random() < 0.15:
                continued.append((user(f"8 {len(histories)}"),))
            await asyncio.gather(*map(ask_one, continued))
    return float(rng.random())


@pytest.mark.parametrize("deterministic", [False, True])
def test_whatever_agents_do_the_samplers_log_probabilities_are_the_networks(sampler, deterministic):
    network, params, engine = sampler
    agents, requests = Agents(restless), group_requests(["1", "2", "3", "4", "5"], 3, 1)
    settings = dataclasses.replace(SETTINGS, max_turns=9, deterministic=deterministic)
    worker = RolloutWorker(engine, agents.host(timeout_s=20), Numbers(), schema.Env(), settings)
    with contextlib.closing(worker.host):
        trajectories = collect(worker, params, requests, NUMBERS).trajectories
    assert [t.failed for t in trajectories] == [False] * 15
    assert {t.stop for t in trajectories} <= {"max_turns", "max_tokens"}
    segments = [segment for t in trajectories for segment in t.segments]
    tokens_SL = np.zeros((len(segments), SETTINGS.max_context), np.int32)
    for row, segment in enumerate(segments):
        tokens_SL[row, : len(segment.tokens_L)] = segment.tokens_L
    logits_SLV = jax.jit(lambda tokens: network.bind(params)(tokens))(tokens_SL) / 0.9
    logp_SLV = np.asarray(jax.nn.log_softmax(logits_SLV, axis=-1))
    for row, segment in enumerate(segments):
        (where,) = np.nonzero(segment.turn_L != CONTEXT)
        wanted = logp_SLV[row, where - 1, segment.tokens_L[where]]
        np.testing.assert_allclose(segment.logp_L[where], wanted, atol=2e-5)
    for trajectory in trajectories:
        turns = [turn for own in marks(trajectory) for turn in own]
        assert sorted(turns) == list(range(trajectory.turns)) and 0 < trajectory.turns <= 9
        assert all(own == sorted(own) for own in marks(trajectory))
    assert sum(len(t.segments) > 1 for t in trajectories) > 5
    assert any(
        own != list(range(own[0], own[0] + len(own))) for t in trajectories for own in marks(t)
    )
