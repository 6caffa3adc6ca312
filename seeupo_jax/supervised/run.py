"""One supervised run: what its loop calls, each a step from one `SftState` to the next."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.checkpoint.process_sync import on_primary
from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.errors import DataChanged, NotLearning
from seeupo_jax.evaluation.evaluation import is_due
from seeupo_jax.learner.imitation.imitation_batches import ImitationBatch
from seeupo_jax.learner.optimization.schedule import at_share
from seeupo_jax.learner.state_layout import final_params
from seeupo_jax.learner.step.expert_balance import ROUTER_LOSSES
from seeupo_jax.metrics.checksum import checksum
from seeupo_jax.metrics.run_manifest import Launch
from seeupo_jax.parallel.distributed import max_over_processes, to_global
from seeupo_jax.parallel.stop_signal import Stopped, StopRequest
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.policy_io.policy_folder import write_policy
from seeupo_jax.policy_io.resuming import check_no_lost_checkpoints
from seeupo_jax.supervised.data import SftData
from seeupo_jax.supervised.sft_checkpoints import SftCheckpoints
from seeupo_jax.supervised.sft_components import (
    BestLoss,
    SftComponents,
    SftState,
    build_sft_components,
)
from seeupo_jax.training.callbacks import Callback
from seeupo_jax.training.run_description import write_description


def begin_sft(
    config: Config,
    given: Config,
    workdir: Path,
    progress: ProgressDisplay,
    request: StopRequest,
    policy: Policy,
    params: Any,
    data: SftData,
    launch: Launch,
    callbacks: Sequence[Callback] = (),
) -> tuple[SftRun, SftState]:
    """A run, and where it begins: anew, or after its newest checkpoint.

    Args:
      config, given: as in `SftComponents`.

    Raises:
      ValueError: the workdir holds another run.
    """
    parts, train = build_sft_components(
        config, given, workdir, progress, request, policy, params, data, callbacks
    )
    run = SftRun(parts)
    with contextlib.ExitStack() as opened:  # what does not begin is closed
        opened.enter_context(run)
        restored = run.checkpoints.restore(train)
        if restored is None:
            on_primary(lambda: check_no_lost_checkpoints(config, workdir))
        state = SftState(0, train) if restored is None else restored
        if jax.process_index() == 0:
            resumed = restored is not None
            parts.metrics.resume_from(state.done + 1 if resumed else 0)
            parts.metrics.open()
            resumes = (state.done, False) if resumed else None
            changed = write_description(
                workdir, given, launch, policy, state.train.params, resumes=resumes
            )
            if changed is not None:
                progress.log(changed)
        opened.pop_all()
    return run, state


class SftRun:
    """The run that the loop steps; a context that closes its parts.

    With several processes each calls everything, and process 0 writes.
    """

    def __init__(self, parts: SftComponents):
        self.parts, self.checkpoints = parts, SftCheckpoints(parts)
        self._upcoming: Iterator[ImitationBatch] = iter(())
        self._next: tuple[int, ImitationBatch] | None = None  # of which step, and its batch
        self._changed: DataChanged | None = None  # what this process found, until all know

    def __enter__(self) -> SftRun:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as closing:  # all are closed, even where one of them fails
            for part in (self.parts.metrics, self.checkpoints):
                closing.callback(part.close)

    def exhausted(self, state: SftState) -> bool:
        """Whether the held-out loss has not fallen for as long as the run is patient."""
        patience = self.parts.config.sft.patience
        return patience is not None and state.worse >= patience

    def prepare_step(self, state: SftState) -> None:
        """Makes the next step's batch, or ends the run where a process wants that.

        Processes agree before every step: the loss of the last one has been waited for anyway.

        Raises:
          Stopped: one of them was asked to stop.
          DataChanged: one of them cannot read its conversations again.
        """
        if self._next is None or self._next[0] != state.done + 1:
            self._upcoming = self.parts.batches.after(state.done)
            self._next = self._numbered(state.done + 1)
        self._agree_to_go_on(state)

    def check_learns(self, state: SftState) -> None:
        """Warns of a step whose gradient was not finite; NotLearning: it is one too many."""
        most, first = self.parts.config.stop_after_idle, state.done - state.idle
        if state.idle == 1:
            self.parts.progress.log(
                f"step {state.done}: the gradient is not finite; the step was skipped"
            )
        if most is not None and state.idle >= most:
            raise NotLearning(
                f"the gradients of {state.idle} steps in a row were not finite, so nothing was"
                f" learned after step {first}; lower config.optimizer.learning_rate, or set"
                " config.stop_after_idle=none."
            )

    def step(self, state: SftState) -> SftState:
        """One optimizer step, with its line of metrics."""
        parts, number = self.parts, state.done + 1
        began = time.perf_counter()
        assert self._next is not None and self._next[0] == number  # `prepare_step` has made it
        batch = self._next[1]
        with parts.times.counted("sft"):
            share = parts.schedule.share(number)
            train = at_share(state.train, share, lambda x: to_global(x, parts.imitation.replicated))
            train, device_metrics = parts.imitation.step(train, batch.rows)
            # Made while the device computes.
            self._next = None if number == parts.steps else self._numbered(number + 1)
            metrics = {name: float(value) for name, value in device_metrics.items()}
        values = self._values(number, batch, metrics, time.perf_counter() - began)
        if parts.config.log_checksum:
            values["state/checksum"] = checksum(train)
        values |= parts.times.take()
        self._write(number, values, sync=False)  # a step may take less time than a sync
        parts.callbacks.iteration(number, values)
        parts.progress.step(number, parts.steps, f"loss {metrics['loss']:.4f}")
        idle = state.idle + 1 if metrics["update_skipped"] else 0
        evaluated = not is_due(parts.config, number, parts.config.sft.eval_every)
        return state._replace(done=number, train=train, evaluated=evaluated, saved=False, idle=idle)

    def evaluate(self, state: SftState) -> SftState:
        """Measures the held-out loss, if anything is held out; it ends as `prepare_step` does."""
        parts, held_out = self.parts, self.parts.held_out
        state = state._replace(evaluated=True)
        if held_out is None:
            return state
        params = final_params(state.train)
        with parts.times.phase("evaluation"):
            sums, tokens, batches = [], 0, held_out.in_order()
            while (batch := self._agreed(batches, state)) is not None:
                sums.append(parts.imitation.loss(params, batch.rows))
                tokens += batch.trained
            loss = math.fsum(map(float, sums)) / tokens
        parts.progress.phase("steps", state.done)
        values = {"eval/loss": loss, "eval/tokens": tokens, **parts.times.take()}
        if parts.config.optimizer.ema is not None:
            values["eval/ema"] = 1.0
        if state.done:
            state = with_held_out_loss(state, loss)
            values["eval/worse"] = state.worse
        else:
            state = state._replace(before=loss)
        self._write(state.done, values)
        parts.callbacks.evaluation(state.done, values)
        parts.progress.log(f"held-out loss {loss:.4f} after step {state.done}")
        return state

    def due_to_save(self, state: SftState) -> bool:
        """Whether a checkpoint is due: by number of steps, or since the held-out loss is lowest."""
        best, settings = state.best, self.parts.config.checkpoint
        improved = best is not None and best.step == state.done and settings.keep_best > 0
        return improved or is_due(self.parts.config, state.done, settings.every)

    def finish(self, state: SftState) -> int:
        """Waits for the last checkpoint and leaves the policy in WORKDIR/policy.

        It is that of the lowest held-out loss, where one was measured and checkpoints of the best
        are kept; else the last.

        Returns: after which step it is.
        """
        parts, best = self.parts, state.best
        if not state.saved:
            state = self.checkpoints.save(state)
        self.checkpoints.wait()
        step, params = state.done, final_params(state.train)
        if best is not None and best.step != step and parts.config.checkpoint.keep_best:
            try:
                step, params = best.step, self.checkpoints.policy_at(best.step, state.train)
            except ValueError as error:  # a life that kept fewer checkpoints removed it
                parts.progress.log(
                    f"the policy of the lowest held-out loss, after step {best.step}, is gone"
                    f" ({error}); the last one takes its place"
                )
        if parts.config.checkpoint.export:
            folder = parts.workdir / "policy"
            write_policy(parts.given, parts.policy, params, folder)
            measured = ""
            if best is not None and best.step == step:
                measured = f", held-out loss {best.loss:.4f}"
            parts.progress.log(f"wrote {folder}: after step {step}{measured}")
        if best is not None and state.before is not None and best.loss >= state.before:
            parts.progress.log(
                f"warning: the held-out loss was {state.before:.4f} before the first step and is"
                f" {best.loss:.4f} at its lowest since, after step {best.step}: no policy of this"
                " run is better than the one that it began with"
            )
        return step

    def stopped(self, state: SftState) -> None:
        """Saves all that is needed to resume this run where it was stopped."""
        if not state.saved:
            self.checkpoints.save(state)
        self.checkpoints.wait()
        self.parts.progress.log(f"stopped after step {state.done}; rerun the command to resume")

    def _numbered(self, number: int) -> tuple[int, ImitationBatch] | None:
        """The next batch, of that step; None: its conversations have changed."""
        batch = self._made(self._upcoming)
        return None if batch is None else (number, batch)

    def _agreed(self, batches: Iterator[ImitationBatch], state: SftState) -> ImitationBatch | None:
        """The next batch, where all processes go on; None: there is none."""
        batch = self._made(batches)
        self._agree_to_go_on(state)
        return batch

    def _made(self, batches: Iterator[ImitationBatch]) -> ImitationBatch | None:
        try:
            return next(batches, None)
        except DataChanged as error:  # the others may not have found it: all agree on it first
            self._changed = error
            return None

    def _agree_to_go_on(self, state: SftState) -> None:
        asked, changed = max_over_processes([self.parts.request.asked, self._changed is not None])
        if changed:
            raise self._changed or DataChanged(
                "--data: got conversations that have changed, as another process found; allowed: a"
                " file that stays as it is until the run is complete."
            )
        if asked:
            raise Stopped(f"after step {state.done}")

    def _values(
        self, number: int, batch: ImitationBatch, metrics: dict[str, float], seconds: float
    ) -> dict[str, float | str]:
        parts, size = self.parts, self.parts.config.sft.batch_size
        data = parts.data
        return {
            "sft/loss": metrics["loss"],
            "sft/grad_norm": metrics["grad_norm"],
            **{f"sft/{name}": metrics[name] for name in ROUTER_LOSSES if name in metrics},
            "sft/updates_skipped": metrics["update_skipped"],
            "sft/learning_rate": parts.schedule.rate(number, number - 1),
            "sft/epoch": number * size / len(data.training),
            "sft/trained_tokens": batch.trained,
            "sft/tokens": batch.tokens,
            "sft/tokens_per_second": batch.tokens / seconds,
            "sft/shared_fraction": 1 - batch.computed / batch.tokens,
            "sft/padding_fraction": 1 - batch.computed / batch.padded,
            "sft/skipped_conversations": data.skipped,
            "sft/cut_conversations": data.cut,
        }

    def _write(self, number: int, values: dict[str, Any], *, sync: bool = True) -> None:
        if jax.process_index() == 0:
            self.parts.metrics.write(number, values, sync=sync)


def with_held_out_loss(state: SftState, loss: float) -> SftState:
    """The state with a held-out loss that was measured after a step, in nats per token."""
    best = state.best
    lower = best is None or loss < best.loss
    falls = lower and (state.before is None or loss < state.before)
    return state._replace(
        best=BestLoss(state.done, loss) if lower else best, worse=0 if falls else state.worse + 1
    )
