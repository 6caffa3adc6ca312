"""Candidates of each turn: sampled side by side, judged, and one of them passed on.

What plays episodes asks for an action and gets one, as of any engine; nothing of the others reaches
an environment. So no environment is copied or replayed, and what is passed on to it was sampled
from the policy as the others were: which one it is, the judge's scores and a random number of the
seed, the iteration, the task and the turn decide.

When an episode is over, so are those that were not chosen: trajectories of its group that share
its turns before theirs and end with an action that was never executed (`unchosen`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from seeupo_jax.envs.base import Message
from seeupo_jax.rewards.scorer import POLL_S, REWARD_FAILURE, RewardFailure, Scored, Scorer
from seeupo_jax.rollout.branching.candidate_plan import CandidatePlan, choose
from seeupo_jax.rollout.engine.protocol import Action, Engine, Turn
from seeupo_jax.rollout.engine.sampling import branch_chance
from seeupo_jax.types import UNCHOSEN, RewardRow, RewardTable, Segment, Trajectory

JUDGE = "judge"  # the name of its score among a trajectory's rewards


@dataclass
class _Candidate:
    """An action, the conversation that ends with it, and what the judge said of it."""

    action: Action
    messages: Sequence[Message]
    score: float = 0.0
    failure: RewardFailure | None = None
    judged: bool = False


@dataclass
class _Step:
    """A turn whose candidates are sampled and judged, by number."""

    turn: Turn
    count: int
    candidates: dict[int, _Candidate] = field(default_factory=dict)
    chosen: int | None = None  # none: no judge's score has come of it

    @property
    def judged(self) -> bool:
        candidates = self.candidates.values()
        return len(candidates) == self.count and all(each.judged for each in candidates)

    @property
    def score(self) -> float:
        return 0.0 if self.chosen is None else self.candidates[self.chosen].score


class CandidateEngine:
    """An `Engine` that samples several candidates of each turn and gives the one that goes on.

    Args:
      judge: scores conversations that end with a candidate.
      seed, iteration: of the collection.
      max_reward: the largest magnitude of a score.
      wait: whether no step is made while the judge is asked (`rollout.deterministic`).
    """

    def __init__(
        self,
        engine: Engine,
        judge: Scorer,
        plan: CandidatePlan,
        *,
        seed: int,
        iteration: int,
        max_reward: float,
        wait: bool,
    ):
        self._engine, self._judge, self._plan = engine, judge, plan
        self._numbers, self._max_reward, self._wait = (seed, iteration), max_reward, wait
        self._width = max(plan.counts)
        self._open: dict[int, _Step] = {}
        self._steps: dict[int, list[_Step]] = {}  # of each open conversation
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
        self, params: Any, *, seed: int, iteration: int, temperature: float | None = None
    ) -> None:
        self._engine.begin(params, seed=seed, iteration=iteration, temperature=temperature)

    def owns(self, group: int) -> bool:
        return self._engine.owns(group)

    def fits(self, context: Sequence[int]) -> bool:
        return self._engine.fits(context)

    def submit(self, turn: Turn) -> None:
        count = self._plan.counts[turn.turn]
        self._open[turn.key] = _Step(turn, count)
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
        return [self._pass_on(key) for key in ready]

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
        """Seconds since it was last asked in which there was nothing to do but to wait."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def finish(self, key: int, trajectory: Trajectory) -> list[Trajectory]:
        """An episode that is over, paid by the judge, and the candidates that were not chosen.

        The environment's rewards are named ones beside the judge's, without weight. A candidate
        that the judge failed on is a trajectory that failed, and so is an episode none of whose
        candidates has a score.
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
        """Has an action that was sampled judged."""
        key, number = divmod(action.key, self._width)
        step = self._open[key]
        view = step.turn.view(action.tokens)
        candidate = step.candidates[number] = _Candidate(action, view.messages)
        if action.failure:
            candidate.failure = RewardFailure("grammar", "failed", action.failure)
        if action.failure or step.count == 1:  # which is not compared with anything
            candidate.judged = True
        else:
            self._judge.submit(action.key, view)

    def _ask(self, stop: bool) -> None:
        """Takes what the judge has answered; waits where there is nothing else to do."""
        began = time.monotonic()
        idle = bool(self._judge.open) and (self._wait or not self._engine.busy)
        while self._judge.open:
            for key, scored in self._judge.poll(self._max_reward, POLL_S if idle else 0.0):
                self._score(key, scored)
            if not self._wait or stop:
                break
        self._waited_s += time.monotonic() - began if idle else 0.0

    def _score(self, key: int, scored: Scored) -> None:
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

    def _pass_on(self, key: int) -> Action:
        """The candidate with which an episode goes on."""
        step = self._open.pop(key)
        self._steps.setdefault(key, []).append(step)
        turn = step.turn
        good = [n for n in range(step.count) if step.candidates[n].failure is None]
        if not good:
            reason = step.candidates[0].failure.reason
            return Action(key, [], [], failure=f"every candidate of turn {turn.turn}: {reason}")
        chance = branch_chance(*self._numbers, turn.task, turn.member, turn.turn)
        scores = [step.candidates[number].score for number in good]
        step.chosen = good[choose(scores, self._plan.temperature, chance)]
        for number in {*range(step.count)} - {step.chosen}:
            self._engine.release(key * self._width + number)
        return replace(step.candidates[step.chosen].action, key=key)

    def _unchosen(self, executed: Trajectory, step: _Step, number: int) -> Trajectory:
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
            segments=_until(executed.segments, turn, candidate.action),
            stop=UNCHOSEN if candidate.failure is None else "env_error",
            messages=tuple(candidate.messages),
            info=info,
            timeout_counts=False,
            parent=0 if turn else None,
            fork=turn,
        )


def _judged(named: Mapping[str, RewardRow], scores: Sequence[float]) -> RewardTable:
    """Rewards of which the judge's scores of the turns count; the named ones weigh nothing."""
    judged = RewardRow(sum(scores), tuple(scores))
    return RewardTable(judged, {**named, JUDGE: judged})


def _cause(failure: RewardFailure) -> dict[str, str]:
    return {REWARD_FAILURE: f"{failure.name}={failure.cause}"}


def _until(segments: Sequence[Segment], turn: int, action: Action) -> tuple[Segment, ...]:
    """What was read before a turn, and another action in its place."""
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
    """Of what was read those that it has, of the rest the action's own; of the last token none."""
    if action.experts is None:
        return None
    unknown = np.iinfo(action.experts.dtype).max
    own_LG = np.append(action.experts, np.full_like(action.experts[:1], unknown), axis=0)
    if read.expert_LG is not None:
        recorded_LG, start = read.expert_LG, len(read.expert_LG)
        own_LG[:start] = np.where(recorded_LG == unknown, own_LG[:start], recorded_LG)
    return own_LG
