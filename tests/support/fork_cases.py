"""Groups whose conversations branch, without a policy: what is sampled, an environment, a plan."""

import dataclasses
from collections import Counter

import numpy as np
from rollout_cases import Saying, make_worker

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.base import StepResult
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.rollout.branching import plans
from seeupo_jax.rollout.branching.fork_plan import Budget
from seeupo_jax.rollout.branching.tree_plan import TreePlan
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.engine.protocol import Action
from seeupo_jax.rollout.player import CollectionOptions


class Drawing(Saying):
    """Draws an action by its task, member and turn; a context of 60 tokens leaves no more room."""

    def fits(self, context):
        return len(context) < 60

    def step(self, unfinished, stop=False):
        turns, self._open = self._open, []
        return [self._action(turn) for turn in turns] if unfinished else None

    def _action(self, turn):
        drawn = np.random.default_rng([turn.task, turn.member, turn.turn]).integers(4, 7)
        return Action(turn.key, [int(drawn), 3], [-1.0 - turn.member, -2.0])


class Counting:
    """Answers with all that it was told; a task `LENGTH` ends after so many turns.

    The task `LENGTH@TURN` answers otherwise the second time that it is at a turn.
    """

    asked = Counter()  # of all environments: resets, steps, forks, and ends

    def reset(self, task_id, seed, *, episode_seed=None):
        self.asked["reset"] += 1
        length, _, moody = task_id.partition("@")
        self.length, self.moody = int(length), int(moody) if moody else None
        self.actions, self.seeds = [], [seed % 7, episode_seed % 11]
        return ({"role": "user", "content": f"9 {seed % 7}"},), ()

    def step(self, text):
        self.asked["step"] += 1
        self.actions.append(text)
        turn = len(self.actions)
        mood = self.asked["moody"] if turn == self.moody else 0
        self.asked["moody"] += turn == self.moody
        reply = {
            "role": "tool",
            "content": f"{sum(map(int, ' '.join(self.actions).split()))} {mood}",
        }
        reply["content"] += f" {self.seeds[1]}"
        done = turn == self.length
        return StepResult(() if done else (reply,), float(self.actions[-1].split()[0]), done)

    def score(self):
        return len(self.actions) / 10

    def close(self):
        self.asked["close"] += 1


class Forking(Counting):
    def fork(self):
        self.asked["fork"] += 1
        copy = type(self)()
        copy.__dict__ |= vars(self) | {"actions": list(self.actions)}
        return copy


BUDGET = Budget(12, turn_tokens=4, max_turns=4)
PLAN = TreePlan((2, 3, 2), 1, BUDGET)


def grow(make=Counting, tasks=("4",), plan=PLAN, workers=3, engine=None, **options):
    """Trajectories of the tasks' trees, the collection, and what environments were asked."""
    Counting.asked.clear()
    pool = EnvPool(make, 4, workers=workers, timeout_s=5.0, retries=1, retry_wait_s=0.01)
    worker = make_worker(engine or Drawing(), pool, max_turns=4, **options)
    requests = plans.root_requests(group_requests(tasks, plan.budget.group_size, 1), plan)
    try:
        collected = collect(worker, None, requests, CollectionOptions(3, forks=plan))
    finally:
        pool.close()
    return collected, Counter(Counting.asked)


def assert_same(one, other):
    for left, right in zip(one, other, strict=True):
        assert dataclasses.replace(left, segments=()) == dataclasses.replace(right, segments=())
        for a, b in zip(left.segments, right.segments, strict=True):
            for name in ("tokens_L", "turn_L", "logp_L"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def config(**choices):
    rollout = schema.Rollout(group_size=8, max_turns=3, max_action_tokens=5)
    algorithm = Algorithm(advantage="tree", **{"forks": {"kind": "tree"}} | choices)
    return dataclasses.replace(Config(), rollout=rollout, algorithm=algorithm)
