"""The experts of a sweep's tokens: recorded once, replayed in its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from seeupo_jax.learner.step.expert_load import RouterCounts
from seeupo_jax.learner.token_trees import TokenForest
from seeupo_jax.policy.architecture import Routing
from seeupo_jax.types import Segment


@dataclass(frozen=True, eq=False)
class ExpertRecord:
    """Experts of every token: [L, G] of `routing.dtype`, one array a segment.

    `routing.unknown` where nothing was recorded: there the router chooses.
    """

    routing: Routing
    expert_LG: tuple[np.ndarray, ...]

    @classmethod
    def of_segments(cls, routing: Routing, segments: Sequence[Segment]) -> ExpertRecord:
        """The experts that the sampler recorded.

        Raises:
          ValueError: it recorded none, or those of another policy's routers.
        """
        records = []
        for segment in segments:
            record, wanted = segment.expert_LG, (len(segment.tokens_L), routing.size)
            if record is None and not (segment.turn_L >= 0).any():
                record = _unknown(routing, wanted[0])  # nothing was sampled in it
            if record is None or (record.shape, record.dtype) != (wanted, routing.dtype):
                got = "none" if record is None else f"{record.dtype.name} {record.shape}"
                raise ValueError(
                    f"config.algorithm.router_replay: got 'rollout' with trajectories whose record"
                    f" of experts is {got}; allowed: {routing.dtype.name} {wanted} of each token of"
                    " this policy, as its own sampler records them."
                )
            records.append(record)
        return cls(routing, tuple(records))

    @classmethod
    def of_pass(
        cls,
        routing: Routing,
        lengths: Sequence[int],
        segments: Sequence[int],
        forest: TokenForest,
        routed_RLG: np.ndarray,
    ) -> ExpertRecord:
        """The experts that routers chose in a pass over a forest's rows.

        Args:
          lengths: tokens of each segment.
          segments: the segment of each of the forest's sequences; those beyond `lengths` are not
            recorded.
        """
        record = [_unknown(routing, length) for length in lengths]
        for place, segment in enumerate(segments):
            if segment < len(record):
                index_L = forest.index[place]
                record[segment][: index_L.size] = routed_RLG[forest.row_S[place], index_L]
        return cls(routing, tuple(record))

    def with_more(self, expert_LG: Sequence[np.ndarray]) -> ExpertRecord:
        """The record with more segments."""
        return ExpertRecord(self.routing, (*self.expert_LG, *expert_LG))

    def struct(self, *shape: int) -> jax.ShapeDtypeStruct:
        """The shape of a record of so many tokens."""
        return jax.ShapeDtypeStruct((*shape, self.routing.size), self.routing.dtype)

    def unknown(self, *shape: int) -> np.ndarray:
        """A record of so many tokens whose experts are unknown."""
        return _unknown(self.routing, *shape)

    def rows(
        self, shape: tuple[int, int], segments: Sequence[int], forest: TokenForest
    ) -> np.ndarray:
        """Experts of a forest's padded rows, [R, L, G] for [R, L]; arguments as of `of_pass`."""
        expert_RLG = self.unknown(*shape)
        for place, segment in enumerate(segments):
            index_L = forest.index[place]
            expert_RLG[forest.row_S[place], index_L] = self.expert_LG[segment][: index_L.size]
        return expert_RLG

    def identity(self, tokens: Sequence[np.ndarray], group_S: np.ndarray) -> tuple[np.ndarray, ...]:
        """Numbers of the segments' tokens, equal within a group iff token and experts are equal."""
        numbers = list(tokens)
        for group in np.unique(group_S):
            members = np.flatnonzero(group_S == group)
            token_X = np.concatenate([tokens[segment] for segment in members]).astype(np.uint32)
            expert_XG = np.concatenate([self.expert_LG[segment] for segment in members])
            as_bytes = [x.view(np.uint8).reshape(token_X.size, -1) for x in (token_X, expert_XG)]
            both = np.concatenate(as_bytes, axis=1)
            # Of bytes as one: by columns, a sort compares them one by one.
            whole_X = both.view(np.dtype((np.void, both.shape[1])))[:, 0]
            _, number_X = np.unique(whole_X, return_inverse=True)
            ends = np.cumsum([len(tokens[segment]) for segment in members])[:-1]
            for segment, number_L in zip(members, np.split(number_X, ends), strict=True):
                numbers[segment] = number_L.astype(np.int32)
        return tuple(numbers)


def _unknown(routing: Routing, *shape: int) -> np.ndarray:
    return np.full((*shape, routing.size), routing.unknown, routing.dtype)


def describe_routers(counts: RouterCounts) -> dict[str, float]:
    """Metrics of the load of the experts in a pass, and of the routers' agreement with a record.

    With p the share of a layer's (token, expert) pairs that an expert has: the largest p times the
    number of experts; the mean over layers of the entropy of p by that of an even spread; and the
    experts of all layers with p = 0. Where experts were replayed, the share of (token, layer)
    pairs whose router would have chosen others.
    """
    load_YE, replayed, mismatched = map(np.asarray, counts)
    share_YE = load_YE / np.maximum(load_YE.sum(axis=1, keepdims=True), 1)
    log_YE = np.log(share_YE, out=np.zeros_like(share_YE), where=share_YE > 0)
    experts = load_YE.shape[1]
    entropy = float(-(share_YE * log_YE).sum(axis=1).mean())
    metrics = {
        "sweep/expert_load_max": float(share_YE.max() * experts),
        "sweep/expert_load_entropy": entropy / float(np.log(experts)) if experts > 1 else 1.0,
        "sweep/dead_experts": int((load_YE == 0).sum()),
    }
    return metrics | ({"logp/router_mismatch": float(mismatched / replayed)} if replayed else {})
