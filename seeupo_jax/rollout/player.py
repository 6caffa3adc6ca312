"""The interface of the players of a collection's episodes, and their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.role_schema import Role
from seeupo_jax.envs.base import TurnRewards
from seeupo_jax.envs.validation import check_reward
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.rewards.reward_functions import by_turn, weighted_sum
from seeupo_jax.rewards.scorer import Scorer
from seeupo_jax.rollout.branching.fork_plan import ForkPlan
from seeupo_jax.rollout.engine.protocol import Action, Engine
from seeupo_jax.rollout.episode import Episode, EpisodeRequest
from seeupo_jax.rollout.watch import Watch

STOP_POLL_S = 0.5  # how long it may take to notice that the run shall stop


@dataclass(frozen=True)
class RolloutWorker:
    """This process's part of a rollout: a sampler, a host of players, and the rules of episodes.

    tokenizer: the policy's.
    env: bounds of environments' answers, and the treatment of their failures.
    rollout: `max_turns` of an episode; `deterministic`: all open episodes answer before the engine
      steps again, so that the rows of a batch, and with them the last bit of every number, do not
      depend on the environments' speed.
    rewards: functions of finished episodes, and the weight of each reward.
    judge: of candidates of a turn, if collections sample them.
    roles: that environments and calls may name.
    stop: whether this process was asked to stop.
    watch: shows this process's progress to other threads.
    """

    engine: Engine
    host: Host
    tokenizer: Tokenizer
    env: schema.Env
    rollout: schema.Rollout
    rewards: Scorer = field(default_factory=Scorer)
    judge: Scorer | None = None
    roles: Sequence[Role] = ()
    stop: Callable[[], bool] = lambda: False
    watch: Watch = field(default_factory=Watch)

    def weigh(self, rewards: Mapping[str, TurnRewards], where: str, earned: float) -> list[float]:
        """The weighted sums of rewards by name that an episode gets in addition to `earned`.

        Returns:
          A reward for each of the last turns, at least one; see `by_turn`.

        Raises:
          ProtocolError: a sum is no reward; `where` says whose.
        """
        sums: list[float] = []
        for turn_rewards in by_turn(rewards):
            total = weighted_sum(turn_rewards, self.rewards.weights) if turn_rewards else 0.0
            sums.append(
                check_reward(total, where, max_reward=self.env.max_reward, earned=sum(sums, earned))
            )
        return sums


@dataclass(frozen=True)
class CollectionOptions:
    """Options that differ between collections.

    seed: what random numbers derive from, with `EpisodeRequest.iteration`; no two collections share
      both.
    temperature: None is the training's.
    policy_version: of the parameters, as recorded in the trajectories.
    split: of the tasks.
    forks: the plan of the groups' trees; None: no conversation branches.
    """

    seed: int
    temperature: float | None = None
    policy_version: int | None = None
    split: str = "train"
    forks: ForkPlan | None = None


@dataclass(frozen=True)
class Prefetched:
    """Episodes whose environments are reset before their collection begins.

    requests: its first ones.
    options: of that collection; its policy need not be known yet.
    until: deadline for the collection to begin, in seconds of the monotonic clock.
    """

    requests: tuple[EpisodeRequest, ...]
    options: CollectionOptions
    until: float


class Player(Protocol):
    """Plays the episodes of one collection: asks the engine for actions and receives each.

    Keys name episodes; turns that it submits to the engine have keys of its own choice.
    """

    @property
    def room(self) -> int:
        """How many more episodes may be open."""
        ...

    @property
    def beginning(self) -> bool:
        """Whether an open episode has yet to begin."""
        ...

    def adopt(self, keys: Sequence[int], prefetched: Prefetched) -> None:
        """Opens episodes that its host has prefetched, before any other."""
        ...

    def open(self, key: int, request: EpisodeRequest) -> None:
        """Begins an episode; there must be room."""
        ...

    def poll(self, wait_s: float) -> list[tuple[int, Episode]]:
        """Handles arrived answers; returns the episodes that have finished since the last poll.

        Args:
          wait_s: how long to wait for a first answer.
        """
        ...

    def act(self, action: Action) -> None:
        """Handles an action that the engine has sampled."""
        ...

    @property
    def stepping(self) -> int:
        """Number of episodes that wait for an environment or agent; any thread may call this."""
        ...

    @property
    def slowest(self) -> tuple[str, float] | None:
        """The task that has waited longest, and its seconds; any thread may call this."""
        ...

    def close(self) -> None:
        """Ends the open episodes when the collection is over or has failed."""
        ...


class Host(Protocol):
    """The parts of a player that outlive collections: environments, or agents."""

    def player(self, worker: RolloutWorker, options: CollectionOptions) -> Player:
        """A player for one collection; one at a time."""
        ...

    def prefetch(
        self,
        worker: RolloutWorker,
        requests: Sequence[EpisodeRequest],
        options: CollectionOptions,
        max_idle_s: float,
    ) -> Prefetched | None:
        """Begins the first episodes of the next collection without waiting; None: not supported."""
        ...

    def drain(self) -> None:
        """Ends prefetched episodes that will not be collected."""
        ...

    def close(self) -> None:
        """Closes its environments or agents."""
        ...
