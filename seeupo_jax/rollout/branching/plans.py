"""The plan that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from seeupo_jax.algorithms.forks import CandidateForks, EntropyForks, TreeForks
from seeupo_jax.configuration.schema import Config
from seeupo_jax.rollout.branching.candidate_plan import CandidatePlan, candidate_counts
from seeupo_jax.rollout.branching.entropy_plan import EntropyPlan
from seeupo_jax.rollout.branching.fork_plan import Budget, ForkPlan
from seeupo_jax.rollout.branching.tree_plan import TreePlan, scaled_factors
from seeupo_jax.rollout.episode import EpisodeRequest


def make_plan(config: Config) -> ForkPlan | None:
    """The plan of `config.algorithm.forks`; None: nothing branches.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.forks.kind == "none":
        return None
    if config.agent.given:
        raise ValueError(
            f"config.algorithm.forks.kind: got {algorithm.forks.kind!r} with config.agent; allowed:"
            " none, since an agent's own loop cannot be brought to where it was after a turn."
        )
    budget = Budget(
        rollout.group_size, rollout.max_action_tokens, rollout.max_turns, algorithm.forks.tokens
    )
    plan = _PLANS[algorithm.forks.kind](algorithm.forks, budget)
    needed = plan.roots * budget.most_tokens(0)
    if budget.tokens is not None and budget.tokens < needed:
        raise ValueError(
            f"config.algorithm.forks.tokens: got {budget.tokens}; allowed: at least {needed}, what"
            f" {plan.roots} episodes of {budget.max_turns} turns of {budget.turn_tokens} tokens may"
            " sample."
        )
    return plan


def root_requests(
    requests: Sequence[EpisodeRequest], plan: ForkPlan | None
) -> list[EpisodeRequest]:
    """The requests that a collection starts with, out of those of whole groups."""
    if plan is None:
        return list(requests)
    size = plan.budget.group_size
    return [each for each in requests if each.member % size < plan.roots]


def _tree(forks: TreeForks, budget: Budget) -> ForkPlan:
    return TreePlan(scaled_factors(forks.factors, budget.group_size), forks.every, budget)


def _entropy(forks: EntropyForks, budget: Budget) -> ForkPlan:
    size = budget.group_size
    roots = -(-size // 2) if forks.roots is None else forks.roots
    if roots > size:
        raise ValueError(
            f"config.algorithm.forks.roots: got {roots}; allowed: at most {size},"
            " rollout.group_size."
        )
    return EntropyPlan(roots, forks.entropy_coef, forks.probability, budget)


def _candidates(forks: CandidateForks, budget: Budget) -> ForkPlan:
    if budget.group_size < 2:
        raise ValueError(
            f"config.rollout.group_size: got {budget.group_size} with forks.kind=candidates;"
            " allowed: at least 2, an episode and another candidate of a turn."
        )
    counts = candidate_counts(forks.candidates, budget)
    needed = sum(counts) * budget.turn_tokens
    if budget.tokens is not None and budget.tokens < needed:
        raise ValueError(
            f"config.algorithm.forks.tokens: got {budget.tokens}; allowed: at least {needed}, what"
            f" {sum(counts)} candidates of {budget.turn_tokens} tokens may have."
        )
    return CandidatePlan(counts, forks.temperature, budget)


# Kind of `config.algorithm.forks` -> the function that makes its plan.
_PLANS: dict[str, Callable[[Any, Budget], ForkPlan]] = {
    "tree": _tree,
    "entropy": _entropy,
    "candidates": _candidates,
}
