"""One iteration's updates: SeeUPO as PyTorch trainers run it, turn after turn.

Before a turn's step its old and reference log-probabilities are computed, after it the new ones,
each in a pass of its own over all samples of the turn, and a sample is a turn's whole context;
what the samples of a group begin with may be computed once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torch_baseline.advantage import group_relative
from torch_baseline.clock import Clock
from torch_baseline.objective import row_terms, updated_factor
from torch_baseline.optimizer import Stepper
from torch_baseline.options import Options
from torch_baseline.samples import Microbatch, microbatches, samples_of
from torch_baseline.trajectories import Trajectory, learnable

Logps = list[torch.Tensor]  # of each microbatch, of its action tokens


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    loss: the negative objective. kl, clip_fraction: means over actions; the KL is NaN where no
    policy was at hand to take it against. weights: M of each trajectory as the step used it, NaN
    where it is left out.
    """

    turn: int
    loss: float
    kl: float
    grad_norm: float
    clip_fraction: float
    weights: np.ndarray


@dataclass(frozen=True)
class Result:
    """The results and counts of a sweep.

    advantages: [N], NaN for excluded trajectories. seconds: by phase. tokens, positions: processed
    by the network in each phase, without and with padding. skipped: steps not taken, since their
    gradients were not finite.
    """

    steps: list[Step]
    advantages: np.ndarray
    seconds: dict[str, float]
    tokens: dict[str, int]
    positions: dict[str, int]
    skipped: int


@dataclass
class _SweepState:
    """A sweep under way: what it reads of the trajectories and what it keeps on the device.

    batches, sizes: of each turn, the microbatches and how many real samples they hold.
    old, ref: log-probabilities of a turn, once known. factor: [N], M = advantage x factor.
    """

    batches: dict[int, list[Microbatch]]
    sizes: dict[int, int]
    valid: int
    advantage: torch.Tensor
    factor: torch.Tensor
    clock: Clock
    old: dict[int, Logps] = field(default_factory=dict)
    ref: dict[int, Logps] = field(default_factory=dict)
    records: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Sweep:
    """A model with an optimizer, which it keeps from sweep to sweep.

    Args:
      model: a Hugging Face causal language model in float32; it is trained in place.
      reference: of the KL penalty, with the model's architecture; None: the model as it is now.
    """

    def __init__(self, model: Any, options: Options, *, reference: Any = None) -> None:
        self.model, self.options = model, options
        self.device = model.device
        if options.algorithm.kl_coef and reference is None:
            reference = copy.deepcopy(model)
        self.reference = None if reference is None else reference.eval()
        if options.checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model.train(options.checkpointing)  # without dropout the two modes differ in that alone
        self.stepper = Stepper(
            list(model.parameters()),
            options.optimizer,
            iterations=options.iterations,
            total_steps=options.total_steps,
        )
        for compiled in (model, self.reference) if options.compile else ():
            _compile_layers(compiled)

    def run(self, trajectories: Sequence[Trajectory], *, iteration: int = 1) -> Result:
        """Updates the model with one iteration's trajectories.

        Args:
          iteration: seeds the random order, with the seed of the options, and sets the learning
            rate.
        """
        algorithm, kept = self.options.algorithm, learnable(trajectories)
        self.stepper.iteration = iteration
        current = self._begin(trajectories, kept)
        order = update_order(len(current.batches), algorithm.order, (self.options.seed, iteration))
        order = [turn for turn in order if current.batches[turn]]
        skipped = self.stepper.skipped
        if algorithm.old_policy == "iteration":
            for turn in order:
                current.old[turn] = self._score(self.model, current, turn, "old")
        for turn in order:
            self._update_turn(current, turn, last=turn == order[-1])
        return Result(
            _steps(current),
            current.advantage.double().cpu().numpy(),
            current.clock.seconds(),
            current.clock.tokens,
            current.clock.positions,
            self.stepper.skipped - skipped,
        )

    def _begin(self, trajectories: Sequence[Trajectory], kept: np.ndarray) -> _SweepState:
        algorithm = self.options.algorithm
        advantage = group_relative(
            [t.reward for t in trajectories],
            [t.group for t in trajectories],
            kept,
            scale=algorithm.scale,
            clip=algorithm.advantage_clip,
        )
        turns = max((trajectories[i].turns for i in np.flatnonzero(kept)), default=0)
        samples = {
            turn: samples_of(trajectories, kept, turn, null_turns=self.options.null_turns)
            for turn in range(turns)
        }
        real = {turn: sum(sample.real for sample in own) for turn, own in samples.items()}
        budget, share = self.options.microbatch_tokens, self.options.share_prefixes
        return _SweepState(
            {
                t: microbatches(own if real[t] else [], budget, self.device, share_prefixes=share)
                for t, own in samples.items()
            },
            real,
            int(kept.sum()),
            torch.tensor(advantage, dtype=torch.float32, device=self.device),
            torch.ones(len(trajectories), device=self.device),
            Clock(self.device),
        )

    def _update_turn(self, current: _SweepState, turn: int, *, last: bool) -> None:
        algorithm = self.options.algorithm
        if algorithm.old_policy == "turn":
            current.old[turn] = self._score(self.model, current, turn, "old")
        if algorithm.kl_coef:
            current.ref[turn] = self._score(self.reference, current, turn, "reference")
        elif algorithm.old_policy == "iteration":
            current.ref[turn] = current.old[turn]  # what the sweep began with
        for _ in range(algorithm.inner_epochs):
            self._train(current, turn)
        # Nobody would read what the last turn's step does to the weights.
        if algorithm.cumulative_ratio and not last:
            new = self._score(self.model, current, turn, "refresh")
            triples = zip(current.batches[turn], new, current.old[turn], strict=True)
            for batch, logp, old in triples:
                current.factor = updated_factor(algorithm, batch, logp, old, current.factor)

    def _score(self, model: Any, current: _SweepState, turn: int, phase: str) -> Logps:
        """Log-probabilities of a turn's actions, without gradients."""
        with current.clock.phase(phase), self._no_grad(), self._autocast():
            return [self._logp(model, batch, current, phase) for batch in current.batches[turn]]

    def _train(self, current: _SweepState, turn: int) -> None:
        """One optimizer step on one turn."""
        algorithm = self.options.algorithm
        count = {"all": current.valid, "active": current.sizes[turn]}[algorithm.normalize_by]
        weight = current.advantage * current.factor
        total = torch.zeros(3, device=self.device)
        ref = current.ref.get(turn, [None] * len(current.batches[turn]))
        with current.clock.phase("train"):
            for batch, old_logp, ref_logp in zip(
                current.batches[turn], current.old[turn], ref, strict=True
            ):
                with self._autocast():
                    logp = self._logp(self.model, batch, current, "train")
                own = weight[batch.trajectory]
                terms = row_terms(algorithm, batch, logp, old_logp, ref_logp, own)
                loss = terms.loss.sum() / count
                loss.backward()
                own_sums = (loss.detach(), terms.kl.sum(), terms.clipped.sum())
                total += torch.stack(own_sums)
            norm = self.stepper.step()
        total[1:] /= current.sizes[turn]
        current.records.append((turn, torch.cat([total, norm[None]]), weight))

    def _logp(
        self, model: Any, batch: Microbatch, current: _SweepState, phase: str
    ) -> torch.Tensor:
        current.clock.count(phase, batch.length, batch.tokens.numel())
        return token_logp(model, batch, self.options.temperature)

    def _no_grad(self) -> Any:
        # What is compiled in inference mode is compiled anew for training.
        return torch.no_grad() if self.options.compile else torch.inference_mode()

    def _autocast(self) -> Any:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.options.dtype == "bfloat16"
        )


def token_logp(model: Any, batch: Microbatch, temperature: float) -> torch.Tensor:
    """Log-probabilities of action tokens [X]: logits are computed where one is predicted only."""
    decoded = model.get_decoder()(
        input_ids=batch.tokens,
        position_ids=batch.depth,
        attention_mask=batch.visible,
        use_cache=False,
    )
    hidden = decoded.last_hidden_state.flatten(0, 1)[batch.source]
    logits = model.get_output_embeddings()(hidden).float()
    if temperature != 1:
        logits = logits / temperature
    return -torch.nn.functional.cross_entropy(logits, batch.target, reduction="none")


def _compile_layers(model: Any) -> None:
    """Compiles a model's layers, all of them once: whole, a model would make a mask to attend by.

    With a mask that is a tensor there is no flash attention.
    """
    for layer in [] if model is None else model.get_decoder().layers:
        layer.compile(dynamic=True)


def update_order(turns: int, order: str, seed: Sequence[int]) -> list[int]:
    """The turns of a sweep, first to be updated first."""
    backwards = range(turns - 1, -1, -1)
    orders = {
        "reverse": lambda: list(backwards),
        "forward": lambda: list(range(turns)),
        "random": lambda: [backwards[i] for i in np.random.default_rng(seed).permutation(turns)],
    }
    return orders[order]()


def _steps(current: _SweepState) -> list[Step]:
    """Copies the recorded steps to the host, which waits for the device."""
    steps = []
    for turn, numbers, weight in current.records:
        loss, kl, clip_fraction, norm = numbers.tolist()
        weights = weight.double().cpu().numpy()
        steps.append(Step(turn, loss, kl, norm, clip_fraction, weights))
    return steps
