"""Candidates of a turn are sampled from one context, and judged before one of them is executed."""

import asyncio
import dataclasses
import threading
import time

import numpy as np
import pytest
from fork_cases import BUDGET, Counting, Drawing, assert_same, config, grow
from judge_cases import judging

from seeupo_jax.configuration.loading import from_dict, to_dict
from seeupo_jax.configuration.reward import Judge
from seeupo_jax.policy_io.resume_check import check_same_run, sampling_hash
from seeupo_jax.rewards.candidate_judge import make_judge
from seeupo_jax.rewards.reward_functions import RewardFunction
from seeupo_jax.rewards.scorer import Scorer
from seeupo_jax.rollout.branching import plans
from seeupo_jax.rollout.branching.candidate_plan import CandidatePlan, candidate_counts, choose
from seeupo_jax.rollout.engine.protocol import Action
from seeupo_jax.rollout.engine.sampling import branch_chance, task_number
from seeupo_jax.rollout.episode_metrics import rollout_metrics
from seeupo_jax.trajectories.forks import find_forks, new_turns
from seeupo_jax.types import UNCHOSEN

PLAN = CandidatePlan((3, 1, 4, 2), 0.7, BUDGET)
ASKED = []


def worth(episode):
    """Of the candidate's text, and of what was said before."""
    *said, last = [m["content"] for m in episode.messages if m["role"] == "assistant"]
    assert episode.stop == "candidate" and episode.turns == len(said) + 1
    ASKED.append((episode.task_id, *said, last))
    return float(last.split()[0]) / 10 + len(said)


async def slowly(episode):
    await asyncio.sleep(float(np.random.default_rng().random()) / 50)
    return worth(episode)


def several(
    call=worth, tasks=("4",), plan=PLAN, make=Counting, *, timeout_s=5.0, engine=None, **options
):
    """What a plan's groups became: trajectories, the collection, what environments were asked."""
    ASKED.clear()
    judge = Scorer((RewardFunction("judge", call, 4, timeout_s),))
    try:
        return grow(make, tasks, plan, engine=engine or Wide(), judge=judge, **options)
    finally:
        judge.close()


def said_by(task, member, turn):
    """One of nine tokens, so that candidates mostly differ."""
    rng = np.random.default_rng([task, member, turn])
    return int(rng.choice([4, 5, 6, 8, 9, 10, 12, 13, 14]))


class Wide(Drawing):
    def _action(self, turn):
        said = said_by(turn.task, turn.member, turn.turn)
        return Action(turn.key, [said, 3], [-1.5, -2.0])


def test_one_of_a_turns_candidates_is_executed_and_the_others_end_with_it():
    collected, asked = several(tasks=("4", "2"))
    for group, turns in ((0, 4), (1, 2)):
        whole, *others = [t for t in collected.trajectories if t.group == group]
        assert (whole.turns, whole.stop, whole.parent, whole.fork) == (turns, "done", None, 0)
        counts = PLAN.counts[:turns]
        assert [t.fork for t in others] == [k for k, n in enumerate(counts) for _ in range(n - 1)]
        assert len({t.info["member"] for t in (whole, *others)}) == 1 + len(others)
        for one in others:
            assert (one.stop, one.parent, one.turns) == (
                UNCHOSEN,
                0 if one.fork else None,
                one.fork + 1,
            )
            (own,), (chosen,) = one.segments, whole.segments
            start = int((chosen.turn_L == one.fork).argmax())
            for name in ("tokens_L", "turn_L", "logp_L"):
                np.testing.assert_array_equal(
                    getattr(own, name)[:start], getattr(chosen, name)[:start]
                )
            assert own.turn_L[start:].tolist() == [one.fork] * 2
            assert own.logp_L[start:].tolist() == [-1.5, -2.0]
            # What it was paid before its own turn, and the judge's score of that.
            *before, score = one.turn_rewards
            assert tuple(before) == whole.turn_rewards[: one.fork]
            said = one.messages[-1]["content"]
            assert score == int(said) / 10 + one.fork and own.tokens_L[start] == int(said)
            assert one.messages[:-1] == whole.messages[: len(one.messages) - 1]
        unjudged = [k for k, n in enumerate(counts) if n == 1]  # not compared with anything
        assert [whole.turn_rewards[k] for k in unjudged] == [0.0] * len(unjudged)
    # Environments have seen what was chosen, and nothing else.
    assert asked["reset"] == 2 and asked["step"] == 6 and asked["fork"] == 0
    assert len(ASKED) == (3 + 4 + 2) + 3
    usage = collected.usage
    assert usage["unused_trajectories"] == 24 - len(collected.trajectories) == 24 - 7 - 3
    assert usage["forks"] == sum(t.fork > 0 for t in collected.trajectories)
    assert collected.sampled_tokens == 2 * (3 + 1 + 4 + 2 + 3 + 1)
    # Their tokens say what tree it is.
    bare = [dataclasses.replace(t, parent=None, fork=0) for t in collected.trajectories[:7]]
    for found, one in zip(find_forks(bare), collected.trajectories, strict=False):
        same = len(
            {t.messages[-1]["content"] for t in collected.trajectories if t.fork == one.fork}
        )
        assert found.fork >= one.fork or same == 1


def test_the_judges_scores_are_what_is_paid_and_the_environments_rewards_have_names():
    collected, _ = several()
    for one in collected.trajectories:
        assert one.reward == sum(one.turn_rewards) == one.rewards["judge"]
        assert one.named_turn_rewards["judge"] == one.turn_rewards
        assert set(one.rewards) == {"env", "judge"}
        assert len(one.named_turn_rewards["env"]) == one.turns
    whole = collected.trajectories[0]
    assert whole.named_turn_rewards["env"] == tuple(
        float(m["content"]) for m in whole.messages if m["role"] == "assistant"
    )
    metrics = rollout_metrics(collected)
    # Of episodes alone: candidates that were not executed say nothing of how tasks go.
    assert metrics["rollout/turns_mean"] == 4 and metrics["rollout/stop_unchosen"] == 6
    assert metrics["rollout/reward_mean"] == whole.reward and metrics["rollout/failed"] == 0
    assert metrics["rollout/reward/env"] == whole.rewards["env"]


def chances(scores, temperature):
    """softmax(A / temperature) as the paper writes it; standard deviation of n - 1."""
    scores = np.asarray(scores, np.float64)
    deviation = np.std(scores, ddof=1) if len(scores) > 1 else 0.0
    weights = np.exp((scores - scores.mean()) / (deviation + 1e-6) / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize("scores", [[1.0, 0.0], [0.2, 0.2, 0.2], [3.0, -1e6, 5.0, 2.0], [7.0]])
@pytest.mark.parametrize("temperature", [0.7, 0.05])
def test_the_one_that_goes_on_is_drawn_from_the_softmax_of_advantages(scores, temperature):
    grid = (np.arange(20_000) + 0.5) / 20_000
    drawn = np.bincount([choose(scores, temperature, u) for u in grid], minlength=len(scores))
    np.testing.assert_allclose(drawn / len(grid), chances(scores, temperature), atol=1e-4)
    assert choose(scores, temperature, np.nextafter(1.0, 0.0)) < len(scores)


def test_two_candidates_by_hand():
    # A = 0.5 / sqrt(0.5) = 0.70711 and -0.70711; e^(2 A / 0.7) = 7.5399.
    np.testing.assert_allclose(chances([1, 0], 0.7)[0], 7.5399 / 8.5399, atol=1e-5)
    assert [choose([1, 0], 0.7, u) for u in (0.8828, 0.8831)] == [0, 1]


def test_seed_iteration_task_and_turn_draw_it_and_nothing_else_does():
    tasks = ("4", "3", "4")
    collected, _ = several(tasks=tasks)
    for group in range(3):
        whole, *others = [t for t in collected.trajectories if t.group == group]
        task, first = task_number(whole.task_id), whole.info["member"]
        texts = [int(m["content"]) for m in whole.messages if m["role"] == "assistant"]
        for turn in (0, 2):
            members = [first + PLAN.place(turn, number) for number in range(PLAN.counts[turn])]
            said = [said_by(task, member, turn) for member in members]
            scores = [text / 10 + turn for text in said]
            chosen = choose(scores, 0.7, branch_chance(3, 1, task, first, turn))
            assert said[chosen] == texts[turn]
            unchosen = [t.turn_rewards[-1] for t in others if t.fork == turn]
            assert sorted(unchosen) == sorted(scores[:chosen] + scores[chosen + 1 :])
    again, _ = several(slowly, tasks, workers=1)
    assert_same(collected.trajectories, again.trajectories)
    waiting, _ = several(slowly, tasks, deterministic=True)
    assert_same(collected.trajectories, waiting.trajectories)
    first, _ = several(tasks=tasks[:2])
    assert_same(first.trajectories, [t for t in collected.trajectories if t.group < 2])


class Holding(Wide):
    """Knows which conversations it holds when each turn begins."""

    def __init__(self):
        self.held, self.before = set(), {}

    def submit(self, turn):
        self.before.setdefault(turn.turn, set(self.held))
        self.held.add(turn.key)
        super().submit(turn)

    def release(self, key):
        self.held.discard(key)


def test_candidates_that_do_not_go_on_give_their_room_back_before_the_next_turn():
    engine = Holding()
    several(engine=engine)
    # Of the 3 candidates of turn 0 and the 4 of turn 2 the chosen one is held.
    assert [len(engine.before[turn]) for turn in (0, 1, 3)] == [0, 1, 1] and not engine.held


class Part(Wide):
    """That of one of two processes, which share the groups out."""

    def __init__(self, number):
        self.shard_owners = -number, 1 - number  # this process is 0


def test_processes_share_the_groups_out():
    tasks = ("4", "3", "4")
    together, _ = several(tasks=tasks)
    parts = [several(tasks=tasks, engine=Part(number))[0].trajectories for number in range(2)]
    assert [{t.group for t in part} for part in parts] == [{0, 1}, {2}]
    joined = sorted((t for part in parts for t in part), key=lambda t: t.group)
    assert_same(joined, together.trajectories)


def test_a_candidate_without_a_score_fails_alone_and_does_not_go_on():
    lock, count = threading.Lock(), [0]

    def moody(episode):
        with lock:
            count[0] += 1
            number = count[0]
        if len(episode.messages) == 2 and number == 2:
            raise KeyError("no mood")
        return worth(episode)

    collected, _ = several(moody)
    whole, *others = collected.trajectories
    (failed,) = [t for t in others if t.failed]
    assert not whole.failed and failed.stop == "env_error" and failed.fork == 0
    assert failed.info["failure"] == "reward judge: KeyError: 'no mood'"
    metrics = rollout_metrics(collected)
    assert metrics["rollout/reward_failed/judge=KeyError"] == metrics["rollout/failed"] == 1


@pytest.mark.parametrize(
    "call, cause, reason",
    [
        (lambda episode: None, "invalid", "judge: got None"),
        (lambda episode: [1.0] * episode.turns, "invalid", "judge: got a list of 1; allowed: a nu"),
        (lambda episode: float("nan"), "invalid", "judge: got nan"),
        (lambda episode: time.sleep(30), "timeout", "judge: no answer in 0.2 s"),
    ],
)
def test_an_episode_whose_candidates_all_lack_a_score_fails(call, cause, reason):
    collected, asked = several(call, timeout_s=0.2)
    assert len(collected.trajectories) == 3 and asked["step"] == 0
    assert all(t.failed for t in collected.trajectories)
    assert collected.trajectories[0].info["failure"].startswith("every candidate of turn 0: ")
    assert reason in collected.trajectories[0].info["failure"]
    assert {t.info["reward_failure"] for t in collected.trajectories} == {f"judge={cause}"}
    assert sum(len(turn_L) > 0 for t in collected.trajectories for turn_L in new_turns(t)) == 3


class Breaking(Counting):
    def step(self, text):
        if len(self.actions) == 2:
            raise RuntimeError("broken")
        return super().step(text)


def test_what_was_sampled_before_an_environment_fails_is_kept():
    collected, _ = several(make=Breaking)
    whole, *others = collected.trajectories
    assert whole.failed and whole.turns == 3
    assert [t.fork for t in others] == [0, 0, 2, 2, 2] and not any(t.failed for t in others)


def test_a_groups_trajectories_are_shared_out_over_turns():
    def counts(candidates, group_size, max_turns):
        budget = dataclasses.replace(BUDGET, group_size=group_size, max_turns=max_turns)
        return candidate_counts(candidates, budget)

    assert counts(5, 17, 4) == (5, 5, 5, 5)  # SLATE's
    assert counts(5, 100, 3) == (5, 5, 5)
    assert counts(5, 8, 6) == (3, 2, 2, 2, 2, 2)
    assert counts(5, 4, 6) == (2, 2, 2, 1, 1, 1)
    assert counts(3, 2, 1) == (2,)


def slate(**options):
    forks = {"kind": "candidates"} | options
    return config(forks=forks, estimator={"baseline": "siblings"})


def test_what_cannot_be_is_refused_before_anything_is_sampled():
    assert plans.make_plan(slate()).counts == (4, 3, 3)
    with pytest.raises(
        ValueError, match="forks.tokens: got 49; allowed: at least 50, what 10 cand"
    ):
        plans.make_plan(slate(tokens=49))
    one = dataclasses.replace(slate(), rollout=dataclasses.replace(slate().rollout, group_size=1))
    with pytest.raises(ValueError, match="group_size: got 1 with forks.kind=candidates; allowed: "):
        plans.make_plan(one)
    with pytest.raises(ValueError, match="judge.function: got none with env bfcl; allowed: module"):
        make_judge(Judge(), "bfcl")
    with pytest.raises(ValueError, match="config.judge.function: "):
        make_judge(Judge("json:no_such"), "order_desk")
    judge = {"function": "json:dumps"}
    for values, sentence in (
        (
            {"judge": judge},
            "config.judge: got one with algorithm.forks.kind=none; allowed: none, unless",
        ),
        (
            {"recipe": "slate", "rewards": [judge]},
            r"rewards\[0\].weight: got 1 of dumps with forks",
        ),
        (
            {"recipe": "slate", "algorithm": {"forks": {"roots": 2}}},
            "roots: got 2 with forks.kind=c",
        ),
        ({"recipe": "arpo", "algorithm": {"forks": {"every": 2}}}, "allowed with forks.kind=tree."),
        (
            {"recipe": "slate", "algorithm": {"estimator": {"baseline": "root"}}},
            "'candidates' with an estimator that",
        ),
        (
            {"recipe": "grpo", "algorithm": {"forks": {"kind": "candidates"}}},
            "kind: got 'candidates' with",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            from_dict(values)
    assert from_dict({"recipe": "slate", "judge": judge}).judge.function == "json:dumps"


def test_a_resumed_run_has_the_judge_that_it_had():
    made = [from_dict({"recipe": "slate", "judge": {"function": f"m:{name}"}}) for name in "ab"]
    check_same_run(dataclasses.replace(made[0], judge=Judge("m:a", timeout_s=3)), to_dict(made[0]))
    with pytest.raises(ValueError, match="config.judge.function: got 'm:b'"):
        check_same_run(made[1], to_dict(made[0]))
    assert sampling_hash(made[0]) != sampling_hash(made[1])
    older = to_dict(from_dict({}))
    del older["judge"]
    check_same_run(from_dict({}), older)


def test_the_judge_of_a_server_judges_candidates():
    pytest.importorskip("openai")
    options = {"model": "m", "key_variable": None, "retries": 0}
    options["prompt"] = "{{ messages[-1].content }} of {{ turns }}"
    answers = {f"{text} of 1": [f"Score: {text % 11}"] for text in range(20)}
    with judging(answers) as server:
        made = make_judge(
            Judge("seeupo_jax.rewards.judge:Judge", {**options, "base_url": server.url}), "appworld"
        )
        try:
            plan = CandidatePlan((4, 1, 1, 1), 0.7, BUDGET)
            collected, _ = grow(plan=plan, engine=Wide(), judge=made)
        finally:
            made.close()
        assert len(server.requests) == 4
    for one in collected.trajectories:
        said = next(m["content"] for m in one.messages if m["role"] == "assistant")
        assert one.turn_rewards[0] == pytest.approx(int(said) % 11 / 10)
