"""The explanation of a training run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.checkpoint import Checkpoints, find_directory
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.layers import differing
from seeupo_jax.configuration.optimizer_schema import ParameterGroup
from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.base import EnvironmentUnavailable
from seeupo_jax.evaluation.evaluation import evaluated_splits, is_due, is_evaluated, selection_split
from seeupo_jax.evaluation.missing import remaining_splits
from seeupo_jax.learner.optimization.parameter_groups import group_of, of_all_layers, path_name
from seeupo_jax.learner.optimization.schedule import Schedule
from seeupo_jax.metrics.run_manifest import flatten
from seeupo_jax.parallel.mesh import training_mesh
from seeupo_jax.planning.abstract_run import AbstractRun, Planned
from seeupo_jax.planning.expected_time import planned_sweep, time_lines
from seeupo_jax.planning.explain.explain_files import checkpoint_lines, file_lines
from seeupo_jax.planning.explain.explain_parts import (
    episode_section,
    memory_lines,
    mesh_lines,
    model_lines,
    plan_run,
    program_lines,
    reward_lines,
    sampler_lines,
    share_lines,
    task_ids,
    teacher_lines,
)
from seeupo_jax.planning.explain.explanation import Section, choices, listed
from seeupo_jax.policy.network import split_trainable
from seeupo_jax.policy_io.policy_folder import starting_folder
from seeupo_jax.policy_io.resume_check import check_same_run, check_training
from seeupo_jax.policy_io.resuming import (
    check_no_lost_checkpoints,
    check_same_chat,
    check_same_sweep,
    check_same_warm_start,
    resume_message,
)
from seeupo_jax.training.teacher_files import check_same_teachers

# What of an algorithm is always shown; the other fields where they are not the default.
_SHOWN = "order ratio objective advantage scale old_policy weight_clip kl_coef".split()


class _Start(NamedTuple):
    """The point that a run resumes from.

    done: finished iterations. left: splits that the policy after them is still evaluated on.
    lines: the point in words.
    """

    done: int
    left: Sequence[str]
    lines: list[str]


def explain_training(
    config: Config,
    workdir: Path,
    planned: Planned | None = None,
    missing: Sequence[str] = (),
) -> list[Section]:
    """The explanation of `seeupo_jax.train` with a configuration that passes every check.

    Args:
      planned: devices of the planned run that are not here; None: this machine's.
      missing: further requirements of the run that this machine lacks.

    Raises:
      ValueError: the errors that the run would raise.
    """
    check_same_warm_start(config, workdir)
    start = starting_folder(config, workdir)
    run, remat = plan_run(config, start, planned, training_mesh(config))
    selects_on = _selection(config)
    begins = _start(run, config, workdir, selects_on)
    evaluated = _evaluated(config, begins, selects_on)
    lacks = [f"a run needs, and this machine has not: {what}" for what in missing]
    return [
        ("missing", lacks),
        ("model", model_lines(run, start)),
        ("teacher", teacher_lines(run)),
        ("mesh", mesh_lines(run, planned)),
        ("samplers", sampler_lines(run, planned)),
        ("memory", memory_lines(run, remat, by_plan=config.model.remat == "auto")),
        ("programs", program_lines(run, config.iterations - begins.done)),
        *([("time", time_lines(run))] if planned is None and config.iterations else []),
        episode_section(config),
        ("rewards", reward_lines(config)),
        ("tasks", _tasks(config, evaluated)),
        ("recipe", _recipe(config)),
        ("optimizer", _optimizer(config)),
        ("parameters", _parameters(run)),
        ("iterations", _iterations(config, begins)),
        ("evaluations", _evaluations(config, evaluated)),
        ("checkpoints", _checkpoints(run, workdir, begins)),
        ("files", _files(config, workdir)),
    ]


def _start(run: AbstractRun, config: Config, workdir: Path, selects_on: str | None) -> _Start:
    """The point where a run in this folder with this unresolved configuration would resume."""
    folder = find_directory(config.checkpoint, workdir)
    passed: list[str] = []
    files, stopped = (
        Checkpoints(each, 1, log=passed.append) for each in (folder, f"{folder}/stopped")
    )
    noted, sweep = files.newest({}, partial=True, optional=True), stopped.latest()
    if noted is not None:
        notes = noted[1]
        check_training(notes)
        check_same_run(config, notes["config"], notes.get("adapters"))
        check_same_chat(config, workdir, notes)
        check_same_teachers(config, notes.get("teachers"))
    newest = files.newest(run.state)
    files.close()
    stopped.close()
    done, notes = (0, {}) if newest is None else newest
    if sweep is not None and done < sweep <= config.iterations:  # else it is skipped
        if (found := stopped.newest({}, partial=True, optional=True)) is not None:
            check_same_sweep(config, sweep, found[1]["config"], f"{folder}/stopped")
            line = f"resuming in the sweep of iteration {sweep}, where a run was stopped"
            return _Start(sweep - 1, [], [*passed, line])
        passed.append(f"the stopped sweep of iteration {sweep} starts again")
    if newest is None:
        with contextlib.suppress(PermissionError):  # of a folder that is meant on another machine
            check_no_lost_checkpoints(config, workdir)
        left = evaluated_splits(config, selects_on, 0)
        return _Start(0, left, [*passed, f"from the start: {folder} has no checkpoint"])
    left = remaining_splits(config, selects_on, done, notes, files.score(done))
    line = resume_message("iteration", done, config.iterations)
    return _Start(done, left, [*passed, f"{line}, from {folder}"])


def _tasks(config: Config, evaluated: Mapping[str, Sequence[int]]) -> list[str]:
    evaluation, lines = config.evaluation, []
    try:
        shares = share_lines(config)
    except EnvironmentUnavailable:
        return [f"not known here; {evaluation.tasks} of {evaluation.split} are tested"]
    tests = [evaluation.split, *evaluated] if evaluation.tasks else []
    for split in dict.fromkeys(("train", *tests)):
        count = len(task_ids(config, split))
        tested = f", of which {min(count, evaluation.tasks)} are tested"
        lines.append(f"{split}: {count:,}" + tested * (split in tests))
    return [*lines, *shares]


def _recipe(config: Config) -> list[str]:
    algorithm = config.algorithm
    usual = Algorithm(advantage=algorithm.advantage)
    shown = {name: vars(algorithm)[name] for name in _SHOWN}
    shown |= dict(flatten({"estimator": dataclasses.asdict(algorithm.estimator)}))
    shown |= dict(flatten(differing(algorithm, usual)))
    lines = [f"{config.recipe}: " + choices(shown)]
    recipe = Config(recipe=config.recipe).algorithm
    if other := dict(flatten(differing(algorithm, recipe))):
        lines.append(f"other than the recipe: {choices(other)}")
    return lines


def _optimizer(config: Config) -> list[str]:
    """The optimizer's name, learning rates at some iterations, groups, and the average."""
    optimizer, last = config.optimizer, config.iterations
    rate = f"learning rate {optimizer.learning_rate:g} ({optimizer.schedule})"
    for unit in ("iterations", "steps"):
        if warmup := vars(optimizer)[f"warmup_{unit}"]:
            rate += f", warm-up over {warmup} {unit}"
    lines = [f"{optimizer.name}, {rate}"]
    schedule, parts = Schedule(optimizer, last), (0.25, 0.5, 0.75, 1)
    shown = {1, optimizer.warmup_iterations, last - optimizer.decay_iterations}
    shown = sorted((shown | {math.ceil(part * last) for part in parts}) - {0})
    rates = {i: schedule.share(i) * optimizer.learning_rate for i in shown if i <= last}
    if len(set(rates.values())) > 1:
        at = ", ".join(f"{iteration}: {rate:.3g}" for iteration, rate in rates.items())
        lines.append(f"learning rate by iteration: {at}")
    for index, group in enumerate(optimizer.groups):
        usual = vars(ParameterGroup()) | {"pattern": None}
        changed = {name: value for name, value in vars(group).items() if value != usual[name]}
        lines.append(f"group {index}: {choices(changed)}")
    if config.algorithm.moments == "turn":
        turns = config.rollout.max_turns
        lines.append(f"{turns} states of it, one for each turn, in memory and in checkpoints")
    if optimizer.ema is not None:
        lines.append(
            f"the average of the parameters over iterations, decay {optimizer.ema:g}, is evaluated"
            " and exported"
        )
    return lines


def _parameters(run: AbstractRun) -> list[str]:
    """Paths of what could train, layers of a kind together: shapes, counts and groups."""
    policy, groups = run.policy, run.config.optimizer.groups
    params, _ = split_trainable(policy.network, policy.merged(run.state.params))
    layers: dict[tuple[str, Any, int | None], list[int]] = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        name = path_name(path)
        number = int((re.findall(r"layers/(\d+)/", name) or ["0"])[0])
        kind = of_all_layers(name), leaf.shape, group_of(groups, name)
        layers.setdefault(kind, []).append(number)
    rows = sorted(layers.items(), key=lambda row: (row[0][0], row[1]))
    kinds = Counter(kind for (kind, _, _), _ in rows)
    width, lines = max(map(len, kinds)), []
    for (kind, shape, group), numbers in rows:
        times = f"{len(numbers)} x " if len(numbers) > 1 else ""
        line = f"{kind:{width}}  {times}{shape}: {len(numbers) * math.prod(shape):,}"
        if kinds[kind] > 1:
            line += f", of layer{'s' * (len(numbers) > 1)} {listed(numbers)}"
        if group is not None:
            line += f"; group {group}" + ", frozen" * groups[group].frozen
        lines.append(line)
    return lines


def _iterations(config: Config, begins: _Start) -> list[str]:
    rollout, steps = config.rollout, planned_sweep(config).count("turn")
    return [
        f"{config.iterations}, {begins.lines[-1]}",
        *begins.lines[:-1],
        f"each of {rollout.tasks} tasks x {rollout.group_size} = {rollout.trajectories}"
        f" trajectories of at most {rollout.max_turns} turns, {rollout.max_context:,} tokens,"
        f" {rollout.max_action_tokens:,} per action",
        f"and of at most {steps} optimizer steps; {max(0, config.iterations - begins.done)} are"
        " left",
    ]


def _due(config: Config, every: int, done: int) -> list[int]:
    """Remaining iterations that are followed by an action due `every` so many."""
    return [i for i in range(done + 1, config.iterations + 1) if is_due(config, i, every)]


def _selection(config: Config) -> str | None:
    """The split that checkpoints are selected on; None: none, or not known here."""
    try:
        return selection_split(config, find_tasks(config))
    except EnvironmentUnavailable:
        compared = config.checkpoint.keep_best and config.evaluation.tasks
        return config.evaluation.select_on if compared else None


def _evaluated(config: Config, begins: _Start, selects_on: str | None) -> dict[str, list[int]]:
    """After which iterations each split is evaluated."""
    splits: dict[str, list[int]] = {split: [begins.done] for split in begins.left}
    left = range(begins.done + 1, config.iterations + 1)
    for iteration in (i for i in left if is_evaluated(config, i)):
        for split in evaluated_splits(config, selects_on, iteration):
            splits.setdefault(split, []).append(iteration)
    return splits


def _evaluations(config: Config, evaluated: Mapping[str, Sequence[int]]) -> list[str]:
    k, lines = config.evaluation.k, []
    for split, iterations in evaluated.items():
        tasks = config.evaluation.tasks
        with contextlib.suppress(EnvironmentUnavailable):
            tasks = min(tasks, len(task_ids(config, split)))
        count, after = len(iterations), listed(iterations)
        lines.append(
            f"{split}: {count}, after iterations {after}: {tasks} tasks x k={k},"
            f" {count * tasks * k:,} episodes"
        )
    if config.evaluation.patience:
        lines.append(f"{config.evaluation.patience} without a higher success end the run")
    if config.evaluation.exact:
        lines.append(f"the exact value on {config.evaluation.split}, after every iteration too")
    off = " (config.evaluation.tasks=0)" if not config.evaluation.tasks else ""
    return lines or [f"none{off}"]


def _checkpoints(run: AbstractRun, workdir: Path, begins: _Start) -> list[str]:
    again = [begins.done] if begins.left and begins.done else []  # with what it was evaluated by
    after = again + _due(run.config, run.config.checkpoint.every, begins.done)
    when = f"{len(after)}, after iterations {listed(after)}"
    if not after:
        return ["none"]
    evaluated = run.config.evaluation.tasks > 0
    return checkpoint_lines(run.config, workdir, run.state, when, evaluated=evaluated)


def _files(config: Config, workdir: Path) -> list[str]:
    written = {
        "trajectories/": True,
        "rollouts/, until a checkpoint covers them": True,
        "weights/, workers.json": config.rollout.port is not None,
        "served_weights/": config.rollout.engine == "openai",
        "warm_start/": bool(config.warm_start.stages),
        "profile/": bool(config.profile.steps),
        "learning_curve.png": True,
    }
    return file_lines(config, workdir, written)
