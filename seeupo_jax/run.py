"""One training run: its parts, what it records, and how it resumes."""

from __future__ import annotations

import contextlib
import shutil
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax import build, envs
from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.config import Config, to_dict
from seeupo_jax.errors import sentence_errors
from seeupo_jax.evaluate import evaluate
from seeupo_jax.learner.learner import compile_programs
from seeupo_jax.learner.optimizer import make_optimizer
from seeupo_jax.learner.warm_start import Batches, train_stage
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.lora import merge, save_adapters
from seeupo_jax.rollout.collect import Collected, collect, group_requests
from seeupo_jax.telemetry.checksum import checksum
from seeupo_jax.telemetry.compilation import Compilations
from seeupo_jax.telemetry.metrics import MetricsWriter
from seeupo_jax.telemetry.progress import Progress
from seeupo_jax.types import TrainState, learnable


class Run:
    """What the training loop works with; a context that closes all of it."""

    def __init__(
        self, config: Config, workdir: Path, progress: Progress, policy: build.Policy, params: Any
    ):
        self.config, self.policy, self.ref_params = config, policy, params
        self._workdir = workdir
        optimizer = make_optimizer(config.optimizer, total_steps=build.total_steps(config))
        self._fresh: TrainState | None = build.new_state(policy, optimizer, params)
        self.learner = build.build_learner(config, policy, optimizer, self._fresh)
        self.engine = build.build_engine(config, policy)
        self.pool = build.build_pool(config, self.engine.concurrency)
        self._sampler = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._ahead: Future[Collected] | None = None  # the next iteration's trajectories
        self._task_ids = _task_order(config)
        self._progress = progress
        platform = policy.mesh.devices.flat[0].platform
        progress.log(
            f"attention: {policy.network.arch.attention}"
            f" (model.attention={config.model.attention} on {platform})"
        )
        progress.log(str(self.engine.plan))
        self._checkpoints = Checkpoints(
            workdir / "checkpoints", config.checkpoint.keep, log=progress.log
        )
        self._metrics = MetricsWriter(workdir, config.telemetry.trackers)
        self._compilations = Compilations()
        self._spent: Counter[str] = Counter()  # seconds and programs of this iteration

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._sampler.shutdown()
        self._checkpoints.close()
        self._metrics.close()
        self._compilations.close()
        self.pool.close()

    def tasks(self, iteration: int) -> list[str]:
        """The tasks of an iteration: a seeded order, shuffled anew every epoch."""
        count = self.config.rollout.tasks
        first = (iteration - 1) * count
        return [self._task_ids[i] for i in range(first, first + count)]

    def due(self, iteration: int, every: int) -> bool:
        """Whether something done `every` so many iterations, and after the last, is due."""
        return iteration == self.config.iterations or bool(every and iteration % every == 0)

    def restore(self) -> tuple[TrainState, int]:
        """The state of the last whole checkpoint and its iteration; a fresh one and 0 without."""
        state, self._fresh = self._fresh, None  # one copy is enough
        found = self._checkpoints.restore(state)
        done = 0
        if found is not None:
            done, state, notes = found
            self._check_same_run(notes)
            self._progress.log(f"resuming after iteration {done}")
        self._metrics.resume_from(done + 1 if done else 0)
        return state, done

    def compile(self, state: TrainState) -> TrainState:
        """Compiles all programs ahead; the state comes back bit for bit."""
        rollout = self.config.rollout
        count = rollout.tasks * rollout.group_size
        with self.phase("rollout"):
            self.engine.compile(self.policy.whole(state.params))
        with self.phase("sweep"):
            state = compile_programs(self.learner, state, self.ref_params, count)
        for part in ("rollout", "sweep"):
            programs, seconds = (
                self._spent[f"{part}/programs_compiled"],
                self._spent[f"time/{part}_s"],
            )
            self._progress.log(f"compiled the {part}: {programs} programs in {seconds:.0f} s")
        return state

    def rollout(self, iteration: int, state: TrainState) -> Collected:
        """The iteration's trajectories; with `rollout_ahead` the next ones are begun meanwhile.

        Those of an iteration after a checkpoint or an evaluation are sampled in their turn, by the
        policy that is trained on them, so that a resumed run does just what the first one did.
        """
        if self._ahead is None:
            collected = self._sample(iteration, state.params)
        else:
            collected, self._ahead = self._ahead.result(), None
        config = self.config
        stops = (config.evaluation.every, config.checkpoint.every)
        if config.rollout_ahead and not any(self.due(iteration, every) for every in stops):
            copied = jax.tree.map(jnp.copy, state.params)  # the sweep donates the state
            self._ahead = self._sampler.submit(self._sample, iteration + 1, copied, iteration - 1)
        return collected

    def _sample(self, iteration: int, params: Any, version: int | None = None) -> Collected:
        config = self.config
        with jax.set_mesh(self.policy.mesh):  # of this thread
            return collect(
                self.engine,
                self.pool,
                self.policy.tokenizer,
                self.policy.whole(params),
                group_requests(self.tasks(iteration), config.rollout.group_size),
                max_turns=config.rollout.max_turns,
                seed=config.seed,
                iteration=iteration,
                policy_version=iteration - 1 if version is None else version,
                deterministic=config.rollout.deterministic,
            )

    def save(self, iteration: int, state: TrainState) -> None:
        """Saves a checkpoint in the background."""
        position = iteration * self.config.rollout.tasks
        self._checkpoints.save(
            iteration,
            state,
            {
                "config": to_dict(self.config),
                "random": {"seed": self.config.seed, "iteration": iteration},
                "data_position": position,
            },
        )

    def export(self, state: TrainState) -> None:
        """Leaves the trained policy in WORKDIR/policy, or its adapters, for other software."""
        folder = self._workdir / "policy"
        unfinished = self._workdir / "policy.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        model = self.policy.network.bind(self.policy.whole(state.params))
        if model.arch.lora is not None and not self.config.lora.merge:
            save_adapters(model, unfinished, str(self.config.model.path))
        else:
            dtype = self.config.model.param_dtype
            save_pretrained(merge(model), unfinished, self.policy.tokenizer, dtype=dtype)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        self._progress.log(f"wrote {folder}")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of an iteration: shown, timed, and its compilations counted."""
        self._progress.phase(name)
        began = time.perf_counter()
        programs, compiling = self._compilations.programs, self._compilations.seconds
        yield
        self._spent[f"time/{name}_s"] += time.perf_counter() - began
        self._spent[f"{name}/programs_compiled"] += self._compilations.programs - programs
        self._spent["time/compile_s"] += self._compilations.seconds - compiling

    def record(
        self,
        iteration: int,
        state: TrainState,
        collected: Collected,
        sweep_metrics: dict[str, float],
    ) -> None:
        """Writes and shows an iteration's metrics."""
        spent, self._spent = self._spent, Counter()
        values = rollout_metrics(collected) | sweep_metrics | spent
        versions = [t.policy_version for t in collected.trajectories]
        values["rollout/policy_lag"] = iteration - 1 - min(versions)
        if "sweep/tokens" in values:
            values["sweep/tokens_per_second"] = values["sweep/tokens"] / spent["time/sweep_s"]
        if self.config.log_checksum:
            values["state/checksum"] = checksum(state)
        self._metrics.write(iteration, values)
        self._progress.iteration(iteration, values)
        trouble = most_frequent_failure(collected)
        if trouble is not None:
            self._progress.log(f"iteration {iteration}: {trouble}")

    def evaluate(self, state: TrainState, iteration: int) -> None:
        """Evaluates on the held-out split; before and after training on the extra splits too."""
        config = self.config.evaluation
        splits = [config.split]
        if iteration in (0, self.config.iterations):
            splits += config.extra_splits
        self._progress.phase("evaluation")
        values: dict[str, float] = {}
        for split in splits:
            values |= evaluate(
                self.config,
                self.engine,
                self.pool,
                self.policy.tokenizer,
                self.policy.whole(state.params),
                split=split,
                k=config.k,
                iteration=iteration,
            )
        self._metrics.write(iteration, values)
        self._progress.evaluation(iteration, values)

    def _check_same_run(self, notes: dict[str, Any]) -> None:
        """A resumed run must draw the same random numbers and tasks as the one that was stopped."""
        saved, mine = notes["config"], to_dict(self.config)
        for field in ("seed", "rollout", "env"):
            if saved[field] != _plain(mine[field]):
                raise ValueError(
                    f"config.{field}: got {mine[field]}; allowed for this workdir, whose checkpoint"
                    f" has it: {saved[field]}. Choose a new workdir for another run."
                )


def warm_start(config: Config, workdir: Path, progress: Progress) -> None:
    """Trains a policy on demonstrations and leaves it in WORKDIR/warm_start as a model folder."""
    environment = envs.make(config.env.name, **config.env.options)
    stages = config.warm_start.stages
    progress.phase("warm start: demonstrations")
    with sentence_errors():
        load = environment.demonstrations
        demonstrations = [load("train", **stage.demonstrations) for stage in stages]
        if config.model.path is None:
            policy, params = build.new_policy(config, demonstrations[-1])
        else:
            policy, params = build.load_policy(config, config.model.path)
    shapes = build.build_shapes(config, config.warm_start.batch_size)
    with jax.set_mesh(policy.mesh):
        for index, stage in enumerate(stages):
            progress.phase(f"warm start {index + 1}/{len(stages)}")
            batches = Batches(
                demonstrations[index],
                policy.tokenizer,
                shapes,
                config.warm_start.batch_size,
                seed=config.seed + index,
            )

            def show(done: int, loss: Any, total: int = stage.steps) -> None:
                if done % 100 == 0 or done == total:
                    progress.step(done, total, f"loss {loss():.4f}")

            params = train_stage(policy.network, params, stage, batches, on_step=show)
            if batches.counts["cut"]:
                limit = shapes.lengths[-1]
                progress.log(f"{batches.counts['cut']} demonstrations were cut at {limit} tokens")
    unfinished = workdir / "warm_start.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    save_pretrained(policy.network.bind(params), unfinished, policy.tokenizer)
    unfinished.rename(workdir / "warm_start")


def rollout_metrics(collected: Collected) -> dict[str, float]:
    """What a collection says about the policy and about the sampler."""
    trajectories = collected.trajectories
    good = [t for t in trajectories if not t.failed]
    stops = [t.stop for t in trajectories]
    groups = {t.group for t in trajectories}
    kept = {trajectories[i].group for i in np.flatnonzero(learnable(trajectories))}
    mean = lambda values: float(np.mean(values)) if good else float("nan")  # noqa: E731
    counts = {f"rollout/stop_{name}": stops.count(name) for name in sorted(set(stops))}
    usage = {f"rollout/{name}": count for name, count in collected.usage.items()}
    return {
        "rollout/success_rate": mean([t.info["score"] >= 1 for t in good]),
        "rollout/reward_mean": mean([t.reward for t in good]),
        "rollout/turns_mean": mean([t.turns for t in good]),
        "rollout/segments_mean": mean([len(t.segments) for t in good]),
        "rollout/action_tokens": collected.sampled_tokens,
        "rollout/context_tokens": collected.context_tokens,
        "rollout/tokens_per_second": collected.sampled_tokens / collected.wall_s,
        "rollout/failed": len(stops) - len(good),
        "rollout/groups_dropped": len(groups - kept),
        "rollout/retries": sum(t.info["retries"] for t in trajectories),
        "time/environment_s": collected.environment_s,
        **counts,
        **usage,
    }


def most_frequent_failure(collected: Collected) -> str | None:
    """Why environments failed, in a sentence; None where none did."""
    reasons = Counter(t.info["failure"] for t in collected.trajectories if t.failed)
    if not reasons:
        return None
    (reason, times), total = reasons.most_common(1)[0], sum(reasons.values())
    return f"{total} environments failed, {times} of them so: {textwrap.shorten(reason, 200)}"


def _task_order(config: Config) -> Sequence[str]:
    task_ids = envs.make(config.env.name, **config.env.options).task_ids("train")
    return grain.MapDataset.source(task_ids).shuffle(seed=config.seed).repeat()


def _plain(value: Any) -> Any:
    """A value as JSON gives it back: tuples as lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
