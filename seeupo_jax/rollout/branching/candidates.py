"""Candidates of each turn: several actions are sampled and judged, and one of them is executed.

A player asks this engine for an action and gets one, as from any engine; the other candidates never
reach an environment, so no environment is copied or replayed. All candidates are sampled from the
policy in the same way. The judge's scores, and a random number derived from the seed, the
iteration, the task and the turn, decide which of them is executed.

When an episode is over, each candidate that was not chosen becomes a trajectory of the same group:
it shares the episode's earlier turns and ends with an action that was never executed (`unchosen`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from seeupo_jax.envs.base import Message
from seeupo_jax.rewards.scorer import POLL_S, REWARD_FAILURE, RewardFailure, Scorer, ScoringResult
from seeupo_jax.rollout.branching.candidate_plan import CandidatePlan, choose
from seeupo_jax.rollout.engine.protocol import Action, Engine, Turn
from seeupo_jax.rollout.engine.sampling import branch_chance
from seeupo_jax.types import (
    UNCHOSEN,
    UNKNOWN_VERSION,
    RewardRow,
    RewardTable,
    Segment,
    Trajectory,
)

JUDGE = "judge"  # the name of the judge's score among a trajectory's rewards


@dataclass
class _Candidate:
    """An action, the conversation up to and including it, and the judge's result."""

    action: Action
    messages: Sequence[Message]
    score: float = 0.0
    failure: RewardFailure | None = None
    judged: bool = False


@dataclass
class _TurnCandidates:
    """The candidates of one turn by number, while they are sampled and judged."""

    turn: Turn
    count: int
    candidates: dict[int, _Candidate] = field(default_factory=dict)
    chosen: int | None = None  # None: no candidate has a score yet

    @property
    def judged(self) -> bool:
        candidates = self.candidates.values()
        return len(candidates) == self.count and all(each.judged for each in candidates)

    @property
    def score(self) -> float:
        return 0.0 if self.chosen is None else self.candidates[self.chosen].score


class CandidateEngine:
    """An `Engine` that samples several candidates of each turn and returns the chosen one.

    Args:
      judge: scores conversations that end with a candidate.
      seed: of the collection.
      max_reward: the largest magnitude of a score.
      wait: whether decoding pauses while the judge works (`rollout.deterministic`).
    """

    def __init__(
        self,
        engine: Engine,
        judge: Scorer,
        plan: CandidatePlan,
        *,
        seed: int,
        max_reward: float,
        wait: bool,
    ):
        self._engine, self._judge, self._plan = engine, judge, plan
        self._seed, self._max_reward, self._wait = seed, max_reward, wait
        self._width = max(plan.counts)
        self._open: dict[int, _TurnCandidates] = {}
        self._steps: dict[int, list[_TurnCandidates]] = {}  # of each open conversation
        self._waited_s = 0.0

    @property
    def concurrency(self) -> int:
        return self._engine.concurrency

    @property
    def busy(self) -> bool:
        return bool(self._open)

    @property
    def poll_interval_s(self) -> float | None:
        return self._engine.poll_interval_s

    def begin(
        self,
        params: Any,
        *,
        seed: int,
        temperature: float | None = None,
        version: int = UNKNOWN_VERSION,
    ) -> None:
        self._engine.begin(params, seed=seed, temperature=temperature, version=version)

    def swap(self, params: Any, version: int) -> None:
        self._engine.swap(params, version)

    @property
    def shard_owners(self) -> Sequence[int]:
        return self._engine.shard_owners

    def one_policy(self) -> contextlib.AbstractContextManager[None]:
        return self._engine.one_policy()

    def fits(self, context: Sequence[int]) -> bool:
        return self._engine.fits(context)

    def submit(self, turn: Turn) -> None:
        count = self._plan.counts[turn.turn]
        self._open[turn.key] = _TurnCandidates(turn, count)
        for number in range(count):
            member = turn.member + self._plan.place(turn.turn, number)
            self._engine.submit(replace(turn, key=turn.key * self._width + number, member=member))

    def step(self, unfinished: bool, stop: bool = False) -> list[Action] | None:
        actions = self._engine.step(unfinished, stop)
        if actions is None:
            return None
        for action in actions:
            self._take(action)
        self._ask(stop)
        ready = sorted(key for key, step in self._open.items() if step.judged)
        return [self._choose(key) for key in ready]

    def cancel(self, key: int) -> None:
        self._open.pop(key, None)
        self._of_all(self._engine.cancel, key)

    def release(self, key: int) -> None:
        self._of_all(self._engine.release, key)

    def usage(self) -> Mapping[str, int]:
        return self._engine.usage()

    def seconds(self) -> Mapping[str, float]:
        return self._engine.seconds()

    def take_waited_s(self) -> float:
        """Seconds of idle waiting for the judge since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def finish(self, key: int, trajectory: Trajectory) -> list[Trajectory]:
        """The trajectory with the judge's scores as rewards, and those of its unchosen candidates.

        The environment's rewards keep their names and have no weight. A candidate that the judge
        failed on is a failed trajectory, and so is an episode without a scored candidate in a turn.
        """
        steps = self._steps.pop(key, [])
        scores = [step.score for step in steps][: trajectory.turns]
        executed = replace(trajectory, reward_table=_judged(trajectory.reward_table.named, scores))
        if steps and steps[-1].chosen is None:
            failure = steps[-1].candidates[0].failure
            executed = replace(executed, info=executed.info | _cause(failure))
        unchosen = [
            self._unchosen(executed, step, number)
            for step in steps
            for number in range(step.count)
            if number != (0 if step.chosen is None else step.chosen)
        ]
        return [executed, *unchosen]

    def _of_all(self, function: Callable[[int], None], key: int) -> None:
        for number in range(self._width):
            function(key * self._width + number)

    def _take(self, action: Action) -> None:
        """Submits a sampled action to the judge."""
        key, number = divmod(action.key, self._width)
        step = self._open[key]
        view = step.turn.view(action.tokens)
        candidate = step.candidates[number] = _Candidate(action, view.messages)
        if action.failure:
            candidate.failure = RewardFailure("grammar", "failed", action.failure)
        if action.failure or step.count == 1:  # a single candidate needs no comparison
            candidate.judged = True
        else:
            self._judge.submit(action.key, view)

    def _ask(self, stop: bool) -> None:
        """Takes the judge's answers; waits for them if there is nothing else to do."""
        began = time.monotonic()
        idle = bool(self._judge.open) and (self._wait or not self._engine.busy)
        while self._judge.open:
            for key, scored in self._judge.poll(self._max_reward, POLL_S if idle else 0.0):
                self._score(key, scored)
            if not self._wait or stop:
                break
        self._waited_s += time.monotonic() - began if idle else 0.0

    def _score(self, key: int, scored: ScoringResult) -> None:
        episode_key, number = divmod(key, self._width)
        if episode_key not in self._open:
            return  # it was cancelled
        candidate = self._open[episode_key].candidates[number]
        candidate.judged, candidate.failure = True, scored.failure
        if scored.failure is not None:
            return
        (name, score), *_ = scored.rewards.items()
        if isinstance(score, Sequence):
            reason = f"{name}: got a list of {len(score)}; allowed: a number, of the last turn"
            candidate.failure = RewardFailure(name, "invalid", reason)
        else:
            candidate.score = score

    def _choose(self, key: int) -> Action:
        """Chooses the candidate that the episode executes."""
        step = self._open.pop(key)
        self._steps.setdefault(key, []).append(step)
        turn = step.turn
        good = [n for n in range(step.count) if step.candidates[n].failure is None]
        if not good:
            reason = step.candidates[0].failure.reason
            return Action(key, [], [], failure=f"every candidate of turn {turn.turn}: {reason}")
        numbers = turn.iteration, turn.task, turn.member, turn.turn
        chance = branch_chance(self._seed, *numbers)
        scores = [step.candidates[number].score for number in good]
        step.chosen = good[choose(scores, self._plan.temperature, chance)]
        for number in {*range(step.count)} - {step.chosen}:
            self._engine.release(key * self._width + number)
        return replace(step.candidates[step.chosen].action, key=key)

    def _unchosen(self, executed: Trajectory, step: _TurnCandidates, number: int) -> Trajectory:
        candidate, turn = step.candidates[number], step.turn.turn
        # The episode takes the chosen one's place, and that one's the first candidate.
        place = self._plan.place(turn, step.chosen if number == 0 else number)
        info: dict[str, Any] = {"member": step.turn.member + place, "retries": 0}
        if candidate.failure is not None:
            info |= {"failure": candidate.failure.reason} | _cause(candidate.failure)
        sampled = [candidate.score] if candidate.action.tokens else []
        named = {
            name: (*rewards[:turn], *[0.0] * len(sampled))
            for name, rewards in executed.named_turn_rewards.items()
            if name != JUDGE
        }
        rows = {name: RewardRow(sum(rewards), rewards) for name, rewards in named.items()}
        return replace(
            executed,
            reward_table=_judged(rows, [*executed.turn_rewards[:turn], *sampled]),
            segments=_with_action(executed.segments, turn, candidate.action),
            stop=UNCHOSEN if candidate.failure is None else "env_error",
            messages=tuple(candidate.messages),
            info=info,
            timeout_counts=False,
            parent=0 if turn else None,
            fork=turn,
        )


def _judged(named: Mapping[str, RewardRow], scores: Sequence[float]) -> RewardTable:
    """The table whose total is the judge's scores; the other rewards keep their names alone."""
    judged = RewardRow(sum(scores), tuple(scores))
    return RewardTable(judged, {**named, JUDGE: judged})


def _cause(failure: RewardFailure) -> dict[str, str]:
    return {REWARD_FAILURE: f"{failure.name}={failure.cause}"}


def _with_action(segments: Sequence[Segment], turn: int, action: Action) -> tuple[Segment, ...]:
    """The segments up to a turn, with another action in place of the turn's own."""
    result: list[Segment] = []
    for segment in segments:
        result.append(segment)
        if (segment.turn_L == turn).any():
            result[-1] = segment.until(int((segment.turn_L == turn).argmax()))
            break
    *earlier, last = result
    action_arrays = action.tokens, [turn] * len(action.tokens), action.logp
    arrays = zip((last.tokens_L, last.turn_L, last.logp_L), action_arrays, strict=True)
    joined = (np.append(x_L, np.asarray(y, x_L.dtype)) for x_L, y in arrays)
    return (*earlier, Segment(*joined, expert_LG=_experts(last, action)))


def _experts(read: Segment, action: Action) -> np.ndarray | None:
    """The context's recorded experts, else the action's record of them; none for the last token."""
    if action.experts is None:
        return None
    unknown = np.iinfo(action.experts.dtype).max
    own_LG = np.append(action.experts, np.full_like(action.experts[:1], unknown), axis=0)
    if read.expert_LG is not None:
        recorded_LG, start = read.expert_LG, len(read.expert_LG)
        own_LG[:start] = np.where(recorded_LG == unknown, own_LG[:start], recorded_LG)
    return own_LG
