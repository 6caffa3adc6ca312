"""The lines of `--explain` on the parts of a run: model, mesh, memory, programs, environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from seeupo_jax.agents.agent_tasks import describe_tasks, find_tasks
from seeupo_jax.configuration.flags import command_name
from seeupo_jax.configuration.rules.asynchronous_rules import lag_note
from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.mixture import read_components
from seeupo_jax.envs.tasks import list_task_shares, list_tasks
from seeupo_jax.envs.validation import OWN_REWARD
from seeupo_jax.parallel.device_memory import format_bytes, total_memory
from seeupo_jax.parallel.mesh import make_mesh, samplers_own_mesh
from seeupo_jax.planning.abstract_run import ROLES, AbstractRun, Planned, abstract_run
from seeupo_jax.planning.dealt_conversations import dealt_lines
from seeupo_jax.planning.expected_time import copies
from seeupo_jax.planning.explain.explanation import Section, grouped, listed
from seeupo_jax.planning.remat import PLATFORM, SHARE, RematPlan, choose_remat, plan_remat
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.messages import dropped_messages_notice
from seeupo_jax.policy.files.weights import PACKAGE, resolve_path
from seeupo_jax.policy.network import ADAPTER
from seeupo_jax.policy_io.build import (
    ARCHITECTURES,
    SMALL,
    Policy,
    recurrent_notice,
    uses_few_shapes,
)
from seeupo_jax.policy_io.build_sampler import plan_sampler
from seeupo_jax.rollout.task_draw import repeats, share_counts
from seeupo_jax.tasks.task_folders import TaskFolders
from seeupo_jax.types import TrainState


def plan_run(
    config: Config,
    start: str | None,
    planned: Planned | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[AbstractRun, RematPlan]:
    """The run's parts, and what recomputation was selected by.

    Args:
      start: where the policy lies; None: it has still to be made.
      planned: devices that are meant and not here; None: those that are.
      mesh: of the run; None: that of `config.mesh`, over all devices.
    """
    model = dataclasses.replace(config.model, path=config.model.path if start is None else start)
    config = dataclasses.replace(config, model=model)
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    if config.model.path is None:  # its tokenizer has still to be made, too
        rollout = dataclasses.replace(config.rollout, grammar=None)
        config = dataclasses.replace(config, rollout=rollout)
    if planned is not None:
        memory = planned.memory_bytes
        plan = plan_remat(config, mesh, memory, share=SHARE)
        if config.model.remat == "auto":
            model = dataclasses.replace(config.model, remat=plan.selected)
            config = dataclasses.replace(config, model=model)
        return abstract_run(config, mesh, planned), plan
    config, plan = choose_remat(config, mesh)
    if plan is None:
        plan = plan_remat(config, mesh, total_memory(mesh.local_devices[0]))
    return abstract_run(config, mesh), plan


class Described(Protocol):
    """The fields of a run that `model_lines` reads, with shapes in place of arrays."""

    @property
    def config(self) -> Config: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def state(self) -> TrainState: ...


def model_lines(run: Described, start: str | None) -> list[str]:
    """The architecture of the policy, its parameters and trained ones, and its weights' source."""
    arch, config = run.policy.network.arch, run.config
    params = jax.tree.leaves_with_path(run.policy.merged(run.state.params))
    counts = [(str(path[-1].key).startswith(ADAPTER), x.size) for path, x in params]
    every = sum(size for _, size in counts)
    trained = sum(x.size for x in jax.tree.leaves(run.state.params))
    adapters = sum(size for adapter, size in counts if adapter)
    name = "randomly initialised" if config.model.path is None else config.model.path
    trains = "all of them train" if trained == every else f"{trained:,} of them train"
    unassigned = arch.vocab_size - arch.tokens
    padding = f" ({unassigned:,} of them without a token: never sampled)" if unassigned else ""
    lines = [
        f"{name}: {every:,} parameters, {trains}" + (f", in {_adapters(arch)}" if adapters else ""),
        f"{arch.layers} layers, width {arch.width}, {arch.heads} heads on {_keys(arch)},"
        f" vocabulary {arch.vocab_size:,}{padding}; {arch.dtype}, attention {arch.attention}"
        + (", layers scanned" if arch.scan_layers else ""),
    ]
    if (notice := recurrent_notice(arch)) is not None:
        lines.append(notice)
    if start is None:
        stages = config.warm_start.stages
        steps = ", then ".join(f"{stage.steps:,} steps" for stage in stages)
        lines.append(f"weights: a warm start first, {steps} on demonstrations")
    elif start.startswith(f"{PACKAGE}{ARCHITECTURES}/"):
        lines.append("weights: not here")
    else:
        lines.append(f"weights: {resolve_path(start)}")
        if (notice := dropped_messages_notice(resolve_path(start), config.chat)) is not None:
            lines.append(notice)
    if config.lora.path is not None:
        lines.append(f"adapters: {config.lora.path}")
    if arch.turn_adapters:
        lines.append(_copies(config))
    return lines


def _adapters(arch: Architecture) -> str:
    each = "adapters" if not arch.turn_adapters else f"{arch.turn_adapters} adapters per turn, each"
    return f"{each} of rank {arch.lora.rank}"


def _copies(config: Config) -> str:
    """What it costs that each adapter per turn computes the whole context of its turns."""
    most, computed = config.rollout.max_context, sum(copies(config))
    return (
        f"adapters per turn: a conversation that grows evenly to {most:,} tokens in"
        f" {config.rollout.max_turns} turns is prefilled and scored as {computed:,}"
        f" ({computed / most:.2g} times as many), since each adapter computes the whole context of"
        " its turns (rollout/adapter_prefill_tokens)"
    )


def _keys(arch: Architecture) -> str:
    """What the heads of attention have keys and values from."""
    if arch.latent is None:
        return str(arch.kv_heads)
    return f"latents of {arch.latent.kv_rank} + {arch.latent.rope_dim}"


def teacher_lines(run: AbstractRun) -> list[str]:
    """The teachers, their tasks, and their part in advantages or the loss; empty without any."""
    teacher, lines = run.config.teacher, []
    for (label, path), model in zip(teacher.places.items(), run.learner.teachers, strict=True):
        tasks = "all other tasks" if label is None else f"tasks of {label}"
        tasks = "all tasks" if not teacher.by_task else tasks
        own = "the policy" if model.moves else "earlier weights of the run"
        if model.ask is not None:
            own = "a server"
        elif model.network is not None:
            size = sum(leaf.size for leaf in jax.tree.leaves(model.params))
            own = f"{size:,} parameters, {model.network.arch.dtype}"
        lines.append(f"{path}: {own}, of {tasks}")
    term = f"advantages of tokens get {teacher.coef:g} x log(teacher / policy)"
    if teacher.top_k is not None:
        term = (
            f"the loss gets {teacher.coef:g} x KL(teacher || policy) of each token, over the"
            f" teacher's {teacher.top_k} likeliest tokens and all others as one"
        )
    later = f", that of later tokens with discount {teacher.discount:g}" if teacher.discount else ""
    hint = [] if teacher.hint is None else [f"before its contexts: {teacher.hint!r}"]
    return [*lines, *hint, term + later] if lines else []


def mesh_lines(run: AbstractRun, planned: Planned | None = None) -> list[str]:
    """The devices, the mesh's axes, and how the policy and conversations come to the sampler."""
    mesh, reshard = run.policy.mesh, run.engine.plan.reshard
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    device = mesh.devices.flat[0]
    count = f"{mesh.size} x {device.platform} ({device.device_kind})"
    more = []
    if planned is not None:
        memory = planned.memory_bytes
        each = "" if memory is None else f" of {format_bytes(memory)}"
        count = f"{mesh.size} devices{each} that are not here"
        more = [
            f"kernels and row lengths are those of {device.platform}; {command_name('aot')}"
            " compiles for a TPU slice"
        ]
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    dealt = dealt_lines(run.config.rollout, run.engine.plan)
    return [f"{count}{processes}: {axes if axes else 'one device'}", str(reshard), *dealt, *more]


def sampler_lines(run: AbstractRun, planned: Planned | None = None) -> list[str]:
    """Who samples while the devices of the mesh train, and how old its data may be."""
    rollout = run.config.rollout
    if not rollout.asynchronous:
        return []
    lag, ahead = rollout.max_lag, (rollout.max_lag + 1) * rollout.tasks
    swaps = {"keep": "keep their keys and values", "prefill": "are prefilled again"}
    begins = (
        "conversations begin once the policy that they train is there, as in a run without: the"
        " data are on-policy"
    )
    if lag:
        sweeps = f"{lag} sweep{'s' * (lag > 1)}"
        begins = (
            f"an iteration's conversations may begin {sweeps} before the policy that they train is"
            f" there; those under way {swaps[rollout.on_swap]} when a newer one comes"
        )
    lines = [f"{begins}; at most {ahead} groups have begun and are not trained on"]
    if (note := lag_note(run.config)) is not None:
        lines.append(note)
    if rollout.engine == "openai":
        who = f"{', '.join(rollout.servers)} sample beside training, and the devices here play"
        return [f"{who} evaluations; servers get each version from served_weights/", *lines]
    own = samplers_own_mesh(run.config, run.policy.mesh)
    if own is None:
        port = rollout.port if rollout.port else "a free port"
        where = "processes with --role=rollout sample, and the devices of this one train"
        return [f"{where}; it listens on {rollout.host}, {port}, and publishes weights/", *lines]
    axes = " x ".join(f"{axis} {size}" for axis, size in own.shape.items() if size > 1)
    policy = dataclasses.replace(run.policy, mesh=own)
    plan = plan_sampler(run.config, policy, platform=None if planned is None else PLATFORM)
    count = f"{own.size} devices sample while {run.policy.mesh.size} train"
    return [f"{count}: {axes if axes else 'one device'}", f"each holds {plan}", *lines]


def memory_lines(run: AbstractRun, remat: RematPlan, *, by_plan: bool) -> list[str]:
    """The memory of one device by part, in the order of allocation.

    Args:
      by_plan: whether this plan selected the recomputation.
    """
    config, arch = run.config, run.policy.network.arch
    names = {
        "parameters": "parameters that train",
        "optimizer": "optimizer",
        "reference": "reference policy",
        "teacher": "teachers",
        "frozen": "parameters that do not train",
        "critic": "critic and its optimizer",
        "average": "average of the parameters",
        "scorer": "model that scores turns and its optimizer",
    }
    sizes = {label: run.parts[name] for name, label in names.items() if name in run.parts}
    sizes["gradients, two copies at most"] = remat.standing - sum(sizes.values())
    name = remat.same_as(arch.remat)
    sizes[f"activations of a microbatch, remat {name}"] = remat.activations[name]
    sizes["experts that a step's routers are given"] = remat.replayed
    sizes["likeliest tokens of teachers that a step reads"] = remat.taught
    lines = ["of one device, by estimate:"]
    lines += [f"{format_bytes(size):>12}  {label}" for label, size in sizes.items() if size > 0]
    step = f"{format_bytes(remat.needed(name)):>12}  a step of the sweep"
    lines.append(step + ("" if remat.allowed is None else f", of {format_bytes(remat.allowed)}"))
    if by_plan:
        lines.append(str(remat))
    away = [part for part, waits in vars(config.offload).items() if waits]
    if away:
        lines.append(f"in the host's memory while it waits: {', '.join(away)}")
    return [*lines, *_record_lines(run), *cache_lines(run)]


def _record_lines(run: AbstractRun) -> list[str]:
    """The host memory of recorded experts."""
    replay, routing = run.config.algorithm.router_replay, run.learner.routing
    if replay == "none" or routing is None:
        return []
    token = routing.size * routing.dtype.itemsize
    most = run.trajectories * run.config.rollout.max_context
    cache = ""
    if replay == "rollout":
        pages = run.engine.plan.pages * run.engine.plan.page_size
        cache = f", {format_bytes(pages * token)} a shard of rows for those in the KV cache"
    return [
        f"in the host's memory: at most {format_bytes(most * token)} for the experts of an"
        f" iteration's tokens, {format_bytes(token)} each{cache}"
    ]


def bytes_of(run: AbstractRun, *names: str) -> str:
    """The size of these parts of a run on one device, in units of bytes."""
    return format_bytes(sum(run.parts.get(name, 0) for name in names))


def cache_lines(run: AbstractRun) -> list[str]:
    """The further memory of a rollout; `mesh_lines` has the policy's way to the sampler."""
    plan = run.engine.plan
    sizes = {
        "the sampler's copy of the policy": plan.policy_bytes,
        "KV cache of a rollout": plan.bytes,
        "keys and values that a GPU's decode step gathers of a layer": plan.gathered_bytes,
        "policies that play frozen roles, and their samplers": run.parts.get(ROLES, 0),
    }
    return [
        *(f"{format_bytes(size):>12}  {label}" for label, size in sizes.items() if size),
        str(dataclasses.replace(plan, reshard=None, gathered_bytes=0)),
    ]


def program_lines(run: AbstractRun, iterations: int) -> list[str]:
    """The programs that so many iterations compile."""
    shapes, config = run.learner.shapes, run.config
    rollout, sweep = run.rollout_programs(), run.sweep_programs()
    if not iterations:
        return [f"at most {len(rollout)}, as they are needed: {grouped(rollout)}"]
    lines = [
        f"{len(rollout) + len(sweep)}, compiled before the first iteration and kept in a cache",
        f"rollout: {len(rollout)}: {grouped(rollout)}",
        f"sweep: {len(sweep)}: {grouped(sweep)}",
        f"rows of {listed(shapes.lengths)} tokens, {shapes.rows} a microbatch",
    ]
    if uses_few_shapes(config, run.policy.mesh):
        lines.append(
            f"few shapes, since a policy of at most {SMALL:,} parameters computes a CPU's padding"
            " faster than it compiles more; config.batching.microbatch_tokens asks for more"
        )
    temperature = config.evaluation.temperature
    if temperature not in (None, config.rollout.temperature):
        more = sum("decode" in name for name in rollout)
        lines.append(f"at most {more} more for evaluations at temperature {temperature:g}")
    return lines


def episode_section(config: Config) -> Section:
    """The section on the agent or the environment."""
    if config.agent.given:
        return "agent", _agent_lines(config)
    return "environment", _environment_lines(config)


def _agent_lines(config: Config) -> list[str]:
    agent, rollout = config.agent, config.rollout
    options = ", ".join(f"{name}={value!r}" for name, value in agent.options.items())
    runs = "a function in an event loop of its own"
    if agent.name is None:
        memory = "no limit" if agent.memory_mib is None else f"{agent.memory_mib:,} MiB"
        output = "no limit" if agent.output_kib is None else f"{agent.output_kib:,} KiB"
        runs = f"a process group for each episode; memory: {memory}, output: {output}"
    processes = f" in each of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    port = agent.port if agent.port else "a free port"
    ignored = agent.ignore_sampling or agent.harness is not None
    sampling = "ignored and counted" if ignored else "refused"
    return [
        f"{agent.label}{f' ({options})' if options else ''}: {runs}",
        f"tasks: {describe_tasks(config)}",
        *_sandbox_lines(config),
        f"{rollout.open_at_once:,} at once, each of at most {rollout.max_turns} calls and"
        f" {rollout.max_context:,} tokens; one without an open call for {agent.timeout_s:g} s is"
        " ended",
        f"the policy is served{processes} on {agent.host}, {port}, a key for each episode:"
        " /v1/chat/completions, /v1/responses, /v1/messages; a request at most"
        f" {agent.request_kib:,} KiB, tool calls as {agent.tool_format}, thoughts as"
        f" {agent.thoughts}, other sampling parameters {sampling}",
    ]


def _sandbox_lines(config: Config) -> list[str]:
    tasks, sandbox = find_tasks(config) if config.tasks is not None else None, config.sandbox
    if not isinstance(tasks, TaskFolders):
        return []
    counts = ", ".join(f"{count:,} {split}" for split, count in tasks.count.items())
    memory = "the task's" if sandbox.memory_mib is None else f"{sandbox.memory_mib:,} MiB of"
    shown = f"; it sees {', '.join(sandbox.visible)}" if sandbox.visible else ""
    return [
        f"{counts}; each episode in a sandbox ({sandbox.runtime}): no network but the policy,"
        f" {memory} memory, at most {sandbox.processes} processes, the task's time limits x"
        f" {sandbox.timeout_scale:g}{shown}{'; it sees the solution' if sandbox.solution else ''}"
    ]


def _environment_lines(config: Config) -> list[str]:
    env, mixed = config.env, config.env.name == "mixture"
    where = ", a process for each environment" if env.isolation == "process" else ""
    named = env.name if mixed else _with_options(env.name, env.options)
    parts = read_components(env.options.get("environments")) if mixed else {}
    return [
        f"{named}; {env.workers} threads{where}, a call at most {env.timeout_s:g} s,"
        f" {env.retries} retries",
        *(
            f"{label}, weight {part.weight:g}: {_with_options(part.name, part.options)}"
            for label, part in parts.items()
        ),
    ]


def _with_options(name: str, options: Mapping[str, Any]) -> str:
    listed = ", ".join(f"{option}={value!r}" for option, value in options.items())
    return f"{name} ({listed})" if listed else name


def reward_lines(config: Config) -> list[str]:
    """The parts of an episode's reward; empty if the environment's reward is the only one."""
    env_weight, others = 1.0, []
    if config.algorithm.forks.kind == "candidates":
        judge = config.judge
        limits = f"{judge.concurrency} at a time, a call at most {judge.timeout_s:g} s"
        made_by = "of the environment" if judge.function is None else judge.function
        return [f"judge of each turn's candidates: {made_by}, {limits}; other rewards are logged"]
    for reward in config.rewards:
        if reward.function is None and reward.label == OWN_REWARD:
            env_weight = reward.weight
            continue
        made_by = "named by the environment"
        if reward.function is not None:
            limits = f"{reward.concurrency} at a time, a call at most {reward.timeout_s:g} s"
            made_by = f"{reward.function}, {limits}"
        others.append(f"{reward.weight:g} x {reward.label}: {made_by}")
    own = f"{env_weight:g} x {OWN_REWARD}: what the environment pays"
    if config.rewards and config.algorithm.by_name:
        others.append(f"advantage={config.algorithm.advantage} compares each of them by itself")
    return [own, *others] if config.rewards else []


def task_ids(config: Config, split: str) -> Sequence[str]:
    """The ids of a split's tasks; ValueError: there is no such split."""
    return list_tasks(find_tasks(config), split)


def share_lines(config: Config) -> list[str]:
    """The share of each part of the training tasks in an iteration, if they have parts."""
    shares, count = list_task_shares(find_tasks(config), "train"), config.rollout.tasks
    lines = [*_curriculum_lines(config), *repeats(shares, count)]
    if len(shares) == 1:
        return lines
    counts = zip(share_counts(shares, count), shares, strict=True)
    listed = ", ".join(
        f"{groups} of {each.name} ({len(each.task_ids):,} tasks)" for groups, each in counts
    )
    return [f"groups of every iteration: {listed}", *lines]


def _curriculum_lines(config: Config) -> list[str]:
    """The curriculum that draws tasks; empty if they are drawn in epochs."""
    options = config.curriculum
    weights = {
        "none": "",
        "variance": "4p(1-p)",
        "band": f"1 where {options.low:g} <= p <= {options.high:g}",
    }
    if options.by == "none":
        return []
    return [
        f"drawn by success: a task's weight is {weights[options.by]}, at least {options.floor:g}"
        f" and 1 for a new one; p is its success rate, with memory {options.memory:g}"
    ]
