"""Options of branching conversations; `rollout/branching/` has the plans."""

from __future__ import annotations

from dataclasses import dataclass

from seeupo_jax.options import Group, Setting, above, at_least, checked, choice, refused, within


@dataclass(frozen=True)
class NoForks(Group):
    """Conversations do not branch."""

    kind: str = choice("none")


@dataclass(frozen=True)
class Forks(Group):
    """Options of every kind of branching."""

    tokens: int | None = at_least(1, None)
    """Tokens that a group may sample at most: branches for which it leaves no room are not begun;
    none: no bound."""

    def check(self, setting: Setting) -> None:
        algorithm, kind = setting.algorithm, vars(self)["kind"]
        if not algorithm.reads_forks:
            given = f"{kind!r} with advantage={algorithm.advantage}"
            readers = algorithm.entries("advantage", lambda entry: "node_NK" in entry.needs)
            raise refused(
                "forks.kind", given, f"none unless {' and '.join(readers)}, which reads them"
            )


@dataclass(frozen=True)
class TreeForks(Forks):
    """Trees of fixed numbers of children."""

    kind: str = choice("tree")
    factors: tuple[int, ...] = checked(
        (6, 6, 6),
        "at least one number, each from 1 to 1000",
        lambda value: len(value) > 0 and all(1 <= factor <= 1000 for factor in value),
    )
    """Children of the root and of each level's nodes, at most; scaled to rollout.group_size."""
    every: int = at_least(1, 1)
    """Turns from one level of nodes to the next."""


@dataclass(frozen=True)
class EntropyForks(Forks):
    """Branches where the policy is less certain than in the first turn."""

    kind: str = choice("entropy")
    roots: int | None = at_least(1, None)
    """Episodes that a group begins with; none: half of rollout.group_size."""
    probability: float = within(0, 1, 0.5)
    """Probability of a branch after a turn that is as certain as the first one."""
    entropy_coef: float = within(0, 1000, 0.2)
    """Increase of that probability with a turn's entropy over the first turn's."""
    entropy_tokens: int = within(1, 10_000, 20)
    """First tokens of a turn whose entropies, in units of log V, are added up."""


@dataclass(frozen=True)
class CandidateForks(Forks):
    """Several actions are sampled for a turn, and a judge's scores select the executed one."""

    kind: str = choice("candidates")
    candidates: int = within(2, 1000, 5)
    """Actions sampled for a turn, at most; scaled to rollout.group_size."""
    temperature: float = above(0, 0.7, most=1000)
    """Temperature of the softmax over their advantages that the executed one is drawn from."""

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if not setting.algorithm.estimator.compares_siblings:
            raise refused(
                "forks.kind",
                "'candidates' with an estimator that compares rewards of the episode's end",
                "none, tree or entropy, unless estimator.baseline=siblings, since candidates that"
                " are not executed have none",
            )
