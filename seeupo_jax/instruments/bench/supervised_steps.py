"""A supervised step in JAX and in `transformers`: same weights, same conversations, same numbers.

A step takes all conversations of the workload, with the loss on the action tokens. The baseline
pads them, in microbatches of similar length, or packs them into rows that its attention separates;
neither shares common prefixes. Both sides need logits at assistant tokens alone. Making the batch
on the host is part of each step.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from seeupo_jax.benchmarks import comparison, machine
from seeupo_jax.benchmarks.comparison import JAX, side, torch_name
from seeupo_jax.benchmarks.jax_runner import by_file_name
from seeupo_jax.benchmarks.settings import PACKED, BenchSettings
from seeupo_jax.benchmarks.torch_runner import (
    MICROBATCH_TOKENS,
    load,
    torch,
    torch_device,
    use_every_core,
)
from seeupo_jax.benchmarks.workloads import Inputs, prepared
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.configuration.schema import Config
from seeupo_jax.learner.imitation.imitation_batches import pack
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.planning.remat import choose_remat
from seeupo_jax.policy_io import build
from seeupo_jax.supervised.sft_config import build_imitation, supervised_config
from seeupo_jax.types import CONTEXT, Segment

CHECKED = 2  # steps of each side that must agree before anything is timed


class StepMeasurement(NamedTuple):
    """The results of a step.

    loss: before the step. grad_norm: before clipping. positions: computed, padding included.
    """

    loss: float
    grad_norm: float
    positions: int


def read_segments(lines: Path) -> list[Segment]:
    """The conversations of a trajectory file, their actions as assistant messages."""
    records = map(json.loads, lines.read_text(encoding="utf-8").splitlines())
    return [
        Segment(
            np.array(record["tokens"], np.int32),
            np.array(record["turn"], np.int32),
            np.zeros(len(record["tokens"]), np.float32),
        )
        for record in records
    ]


class JaxSteps:
    """Steps that go on from each other's weights."""

    def __init__(self, inputs: Inputs, segments: Sequence[Segment]):
        fields = inputs.fields | {
            "model.path": str(inputs.model),
            "rollout.max_context": inputs.work.max_context,
            "rollout.max_action_tokens": 1,  # of no meaning here, and below the context
        }
        config = load_config(Config(), [f"{name}={value}" for name, value in fields.items()])
        config, _ = choose_remat(supervised_config(config, 1))
        self._policy, params = build.load_policy(config, str(inputs.model))
        optimizer = make_optimizer(config.optimizer, total_steps=1)
        self._imitation, self._state = build_imitation(config, self._policy, optimizer, params)
        self._shapes = build.build_shapes(config, self._policy.mesh, len(segments))
        self._conversations = [(segment,) for segment in segments]

    def step(self) -> StepMeasurement:
        batch = pack(self._conversations, self._shapes)
        with jax.set_mesh(self._policy.mesh):
            self._state, metrics = self._imitation.step(self._state, batch.rows)
        jax.block_until_ready(self._state)
        return StepMeasurement(float(metrics["loss"]), float(metrics["grad_norm"]), batch.padded)

    def tensors(self) -> dict[str, np.ndarray]:
        """The weights by their names in files."""
        return by_file_name(self._policy.network.arch, self._state.params)


class TorchSteps:
    """Steps of a Hugging Face model, on padded or packed rows."""

    def __init__(self, inputs: Inputs, segments: Sequence[Segment], way: str):
        self._torch, self._device = torch(), torch_device()
        self._model = load("update").load(inputs.model, self._device).train()
        self._segments, self._pack = segments, way == PACKED
        self._dtype = getattr(self._torch, inputs.arch.dtype)
        tokens = inputs.settings.torch_tokens
        self._tokens = MICROBATCH_TOKENS[self._device] if tokens is None else tokens
        fields = inputs.fields
        self._optimizer = self._torch.optim.Adam(
            self._model.parameters(),
            lr=fields["optimizer.learning_rate"],
            eps=fields["optimizer.kwargs"]["eps"],
            fused=True,
        )

    def step(self) -> StepMeasurement:
        trained = sum(int((s.turn_L != CONTEXT).sum()) for s in self._segments)
        loss, positions = 0.0, 0
        self._optimizer.zero_grad(set_to_none=True)
        for rows in packed(self._segments, self._tokens) if self._pack else self._padded():
            microbatch_loss, computed = self._backward(rows, trained)
            loss, positions = loss + microbatch_loss, positions + computed
        limit = Config().optimizer.max_grad_norm
        norm = self._torch.nn.utils.clip_grad_norm_(self._model.parameters(), limit)
        self._optimizer.step()
        total = float(loss)  # which waits for the device
        if self._device == "cuda":
            self._torch.cuda.synchronize()
        return StepMeasurement(total, float(norm), positions)

    def tensors(self) -> dict[str, np.ndarray]:
        named = self._model.named_parameters()
        return {name: p.detach().float().cpu().numpy().copy() for name, p in named}

    def _padded(self) -> Iterable[list[list[Segment]]]:
        """Microbatches of rows of one conversation, the shortest together."""
        ordered, batch = sorted(self._segments, key=lambda s: len(s.tokens_L)), []
        for segment in ordered:
            if batch and (len(batch) + 1) * len(segment.tokens_L) > self._tokens:
                yield batch
                batch = []
            batch.append([segment])
        yield batch

    def _backward(self, rows: Sequence[Sequence[Segment]], trained: int) -> tuple[Any, int]:
        """Adds a microbatch's gradients; its share of the loss, and positions."""
        library, length = self._torch, max(sum(len(s.tokens_L) for s in row) for row in rows)
        tokens, place, there, acted = (np.zeros((len(rows), length), np.int64) for _ in range(4))
        for number, row in enumerate(rows):
            end = sum(len(s.tokens_L) for s in row)
            tokens[number, :end] = np.concatenate([s.tokens_L for s in row])
            place[number, :end] = np.concatenate([np.arange(len(s.tokens_L)) for s in row])
            acted[number, :end] = np.concatenate([s.turn_L != CONTEXT for s in row])
            there[number, :end] = 1

        def bring(x: np.ndarray) -> Any:
            return library.from_numpy(x).to(self._device)

        # Positions that begin again keep packed conversations apart; padding is masked instead.
        separation = (
            {"position_ids": bring(place)} if self._pack else {"attention_mask": bring(there)}
        )
        ids, where = bring(tokens), bring(np.argwhere(acted))
        wide = self._dtype != library.float32
        with library.autocast(self._device, dtype=self._dtype, enabled=wide):
            hidden = self._model.model(
                input_ids=ids, use_cache=False, **separation
            ).last_hidden_state
            logits = self._model.lm_head(hidden[where[:, 0], where[:, 1] - 1])
        targets = ids[where[:, 0], where[:, 1]]
        loss = library.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")
        (loss / trained).backward()
        return loss.detach() / trained, tokens.size


def packed(segments: Sequence[Segment], tokens: int) -> Iterable[list[list[Segment]]]:
    """Rows of several conversations, the longest first into the fullest row that has room."""
    rows: list[tuple[int, list[Segment]]] = []
    for segment in sorted(segments, key=lambda s: -len(s.tokens_L)):
        size = len(segment.tokens_L)
        room = [place for place, (used, _) in enumerate(rows) if used + size <= tokens]
        if room:
            place = max(room, key=lambda place: rows[place][0])
            rows[place] = rows[place][0] + size, [*rows[place][1], segment]
        else:
            rows.append((size, [segment]))
    return [[row] for _, row in rows]


def run(settings: BenchSettings) -> dict[str, Any]:
    """Checks, measures and prints; the figures.

    Raises:
      ValueError: a wrong setting, or sides that do not compute the same.
    """
    device = machine.only_device()
    with prepared(settings, machine.fast_dtype(device)) as inputs:
        about = comparison.about("sft", settings, inputs.arch, inputs.work)
        segments = read_segments(inputs.lines)
        contenders: dict[str, JaxSteps | TorchSteps] = {JAX: JaxSteps(inputs, segments)}
        if settings.batches:
            use_every_core()
            importlib.import_module("transformers")
        for way in settings.batches:
            contenders[torch_name(way)] = TorchSteps(inputs, segments, way)
    dtype, tokens = inputs.arch.dtype, inputs.work.tokens
    start = contenders[JAX].tensors()
    steps = {name: [each.step() for _ in range(CHECKED)] for name, each in contenders.items()}
    verified = _verify(contenders, start, steps, dtype)
    timings = comparison.alternate(
        {name: comparison.timed(each.step) for name, each in contenders.items()}, settings.repeats
    )
    figures = about | {
        **comparison.against_torch(timings, settings.batches, over={}),
        "contenders": {
            name: timing.as_json()
            | {"tokens_per_second": tokens / timing.median, "positions": steps[name][0].positions}
            for name, timing in timings.items()
        },
        "verified": verified,
    }
    columns = {
        "median s": side("median_s", "{:.3f}"),
        "least": side("least_s", "{:.3f}"),
        "most": side("most_s", "{:.3f}"),
        "tokens/s": side("tokens_per_second", "{:.0f}"),
        "computed tokens": side("positions", "{:.0f}"),
    }
    comparison.print_figures(figures, "a step", columns, {})
    return figures


def _verify(
    contenders: dict[str, JaxSteps | TorchSteps],
    start: dict[str, np.ndarray],
    steps: dict[str, list[StepMeasurement]],
    dtype: str,
) -> dict[str, dict[str, Any]]:
    """The greatest differences from JAX in losses, norms of gradients and weights after the steps,
    with what they may be."""
    jax_tensors, differences = contenders[JAX].tensors(), {}
    moved = {
        "loss": max(step.loss for step in steps[JAX]),
        "parameters": max(comparison.greatest(jax_tensors[key], start[key]) for key in start),
    }
    allowed = comparison.bounds(moved, dtype)
    for name in (name for name in contenders if name != JAX):
        pairs = list(zip(steps[JAX], steps[name], strict=True))
        torch_tensors = contenders[name].tensors()
        differences[name] = {
            "loss": max(comparison.greatest(a.loss, b.loss) for a, b in pairs),
            "grad_norm": max(comparison.off_norm(a.grad_norm, b.grad_norm) for a, b in pairs),
            "parameters": max(
                comparison.greatest(jax_tensors[key], torch_tensors[key]) for key in jax_tensors
            ),
        }
        comparison.require_same(differences[name], name, allowed)
    return {"bounds": allowed, "differences": differences, "moved": moved}
