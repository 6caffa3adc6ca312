"""Rollouts by the JAX engine and by `transformers`' `generate`; with a sweep, an iteration.

Both have the same model and the same conversations. The sampled tokens differ and are cut to given
lengths, so the work is the same and the numbers are not. In an iteration each side sweeps over its
own samples; `bench update` compares the numbers of sweeps.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from seeupo_jax.benchmarks import comparison, machine, torch_runner, workloads
from seeupo_jax.benchmarks.comparison import JAX, Alone, Timing, side
from seeupo_jax.benchmarks.jax_runner import JaxSweeps
from seeupo_jax.benchmarks.settings import BenchSettings, architecture, write_model
from seeupo_jax.benchmarks.torch_runner import TorchSweeps, torch_sweeps
from seeupo_jax.benchmarks.workloads import Actions, Inputs, Workload, prepared, trajectory_lines
from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import row_shards
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.network import Network
from seeupo_jax.rollout.dealing import deal
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.protocol import Turn
from seeupo_jax.rollout.engine.read_plan import choose_read_plan
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine

RESENT, KEPT = "generate, conversation sent again", "generate, KV cache kept"
STATIC = "generate, static KV cache kept"
# A way of `--generate` -> its name for people, and the options of the baseline.
WAYS: dict[str, tuple[str, dict[str, bool]]] = {
    "resent": (RESENT, {"kept": False}),
    "kept": (KEPT, {"kept": True}),
    "static": (STATIC, {"kept": True, "static": True}),
}
# The end of a contender's name whose rollout does not send conversations again.
CACHE_KEPT = "KV cache kept"

Parts = tuple[float, float]  # seconds of the rollout and of the sweep


def run_rollout(settings: BenchSettings, *, alone: Alone | None = None) -> dict[str, Any]:
    """Measures, prints a table and returns its figures.

    Args:
      alone: is given the figures of our side before `generate` runs.

    Raises:
      ValueError: a wrong setting.
    """
    dtype = machine.fast_dtype(machine.only_device())
    arch = architecture(settings.model, dtype)
    work = workloads.make(settings, arch.vocab_size)
    about = comparison.about("rollout", settings, arch, work)
    with tempfile.TemporaryDirectory() as folder:
        write_model(arch, Path(folder), seed=settings.seed, dtype=dtype)
        torch_model = None
        if settings.generate:
            load = torch_runner.load("generate").load
            torch_model = load(folder, torch_runner.torch_device(), dtype)
            torch_runner.use_every_core()
        model, _ = from_pretrained(folder, dtype=dtype)
    network, params = policy.split_model(model)
    engine = make_engine(network, work, settings)
    engine.compile(params)
    sides: dict[str, dict[str, Any]] = {}

    def jax_rollout(number: int) -> float:
        played, usage = converse(engine, params, work, settings.seed + number), engine.usage()
        # Tokens of conversations that went through the network, and all that did, padding and
        # idle rows included.
        computed = usage["prefilled_tokens"] + usage["decoded_tokens"]
        positions = usage["prefill_positions"] + usage["decode_positions"]
        sides[JAX] = {"computed": computed, "positions": positions, **engine.seconds()}
        return played.seconds

    def of_torch(name: str, options: Mapping[str, bool]) -> Callable[[int], float]:
        def contend(number: int) -> float:
            result = generate(torch_model, work, seed=settings.seed + number, **options)
            sides[name] = {"computed": result.computed_tokens, "positions": result.computed}
            return result.seconds

        return contend

    def measured(ways: Mapping[str, dict[str, bool]]) -> dict[str, Any]:
        contenders = {name: of_torch(name, options) for name, options in ways.items()}
        timings = comparison.alternate(contenders | {JAX: jax_rollout}, settings.repeats)
        return about | _figures(timings, sides, work)

    if alone is not None:
        alone(measured({}))
    figures = measured(dict(WAYS[way] for way in settings.generate))
    _print(figures)
    return figures


def ratios(timings: Mapping[str, Timing]) -> dict[str, Any]:
    """JAX against the fastest side, and against the fastest of each kind; None if none ran.

    Iterations with sweeps by the recipe or over packed rows count only in their own ratios.

    Args:
      timings: of a rollout's or an iteration's sides, whose names contain their kind.
    """
    kinds = {name: name.split(", ")[1:] for name in timings if name != JAX}
    baseline = [name for name, kind in kinds.items() if not set(kind) & set(comparison.OVER)]

    def over(names: Sequence[str]) -> dict[str, float] | None:
        if not names:
            return None
        return comparison.ratio(timings[comparison.fastest(timings, names)], timings[JAX])

    against = comparison.fastest(timings, baseline) if baseline else None
    return {
        "against": against,
        **(over(baseline) or {}),
        "over_resent": over([name for name in baseline if not name.endswith(CACHE_KEPT)]),
        "over_kept": over([name for name in baseline if CACHE_KEPT in kinds[name]]),
        "over_static": over([name for name in baseline if name == STATIC]),
        **{
            key: over([name for name, kind in kinds.items() if way in kind])
            for way, key in comparison.OVER.items()
        },
    }


def with_ratios(figures: comparison.Figures) -> comparison.Figures:
    """A rollout's or an iteration's figures with `ratios`; older ones have those to other sides."""
    sides = figures["contenders"]
    return figures | ratios({name: Timing(tuple(s["each_s"])) for name, s in sides.items()})


def _figures(
    timings: Mapping[str, Timing], sides: Mapping[str, dict[str, Any]], work: Workload
) -> dict[str, Any]:
    """Figures of the sides by the amount of their work, the baseline's variants first."""
    contenders = {}
    for name, timing in timings.items():
        side = sides[name] | timing.as_json()
        contenders[name] = side | {
            "tokens_per_second": work.sampled / timing.median,
            "computed_per_sampled": side["computed"] / work.sampled,
            "positions_per_sampled": side["positions"] / work.sampled,
            "waste": side["computed"] / work.least_computed,
        }
    return {
        **ratios(timings),
        "least_computed_per_sampled": work.least_computed / work.sampled,
        "contenders": contenders,
    }


def _print(figures: comparison.Figures) -> None:
    columns = {
        "median s": side("median_s", "{:.2f}"),
        "sampled/s": side("tokens_per_second", "{:.0f}"),
        "computed/sampled": side("computed_per_sampled", "{:.2f}"),
        "with padding": side("positions_per_sampled", "{:.2f}"),
        "waste": side("waste", "{:.2f}"),
    }
    over = {
        "over_resent": "the conversation sent again",
        "over_kept": "the cache kept",
        "over_static": "a static cache kept",
    }
    comparison.print_figures(figures, "a rollout", columns, over)
    least = figures["least_computed_per_sampled"]
    print(f"at least {least:.2f} tokens must be computed for each sampled one (waste 1)")
    print(phases(figures))


def phases(figures: comparison.Figures) -> str:
    """A sentence on where our side's last rollout spent its time, by the engine's clock."""
    side = figures["contenders"][JAX]
    return (
        f"{JAX}, last rollout: {side['prefill_s']:.2f} s prefilling, {side['decode_s']:.2f} s"
        " decoding, as the host sees the ends of both."
    )


def generate(model: Any, work: Workload, *, seed: int, **options: bool) -> Any:
    """All conversations, sampled together by the baseline; its `Result`."""
    run_all = torch_runner.load("generate").run
    batch = len(work.conversations)
    return run_all(model, work.conversations, temperature=1.0, seed=seed, batch=batch, **options)


def make_engine(
    network: Network,
    work: Workload,
    settings: BenchSettings,
    *,
    mesh: jax.sharding.Mesh | None = None,
    **options: Any,
) -> SlotEngine:
    """An engine with room for all of a workload's conversations; nothing is compiled yet.

    Args:
      mesh: the sampler's; None: one device. options: more of `SlotEngine`.
    """
    rollout = schema.Rollout(
        tasks=len(work.conversations) // work.group_size,
        group_size=work.group_size,
        max_action_tokens=work.action_tokens,
        max_context=work.max_context,
        slots=settings.slots,
    )
    platform = jax.devices()[0].platform
    return SlotEngine(
        network,
        Sampling(1.0, None, None, work.action_tokens, ()),
        plan_cache(network.arch, rollout, shards=1 if mesh is None else row_shards(mesh)),
        mesh=mesh,
        group_size=work.group_size,
        steps=settings.decode_steps,
        read_plan=choose_read_plan(network.arch, rollout, platform),
        **options,
    )


class SampledWorkload(NamedTuple):
    """A workload's conversations.

    seconds: that they took. actions, logp: [conversation][turn], token ids, and their
    log-probabilities by the sampler.
    """

    seconds: float
    actions: list[list[list[int]]]
    logp: list[list[list[float]]]


def converse(engine: SlotEngine, params: Any, work: Workload, seed: int) -> SampledWorkload:
    """Plays a workload's conversations, of several processes each those that its engine owns."""
    began = time.perf_counter()
    engine.begin(params, seed=seed)
    conversations = work.conversations
    contexts = [list(c.prompt) for c in conversations]
    actions: list[list[list[int]]] = [[] for _ in conversations]
    logp: list[list[list[float]]] = [[] for _ in conversations]

    def submit(key: int) -> None:
        turn, group = len(actions[key]), key // work.group_size
        limit = conversations[key].lengths[turn]
        place = group, group, key, turn  # group, task, member, turn
        engine.submit(Turn(key, contexts[key], *place, limit=limit, shard=shard_N[key]))

    owners = engine.shard_owners
    shard_N = deal([key // work.group_size for key in range(len(conversations))], owners)
    own = [key for key, shard in enumerate(shard_N) if owners[shard] == jax.process_index()]
    for key in own:
        submit(key)
    open_ = len(own)
    while (sampled := engine.step(open_ > 0)) is not None:
        for action in sampled:
            key, conversation = action.key, conversations[action.key]
            actions[key].append(action.tokens)
            logp[key].append(action.logp)
            turn = len(actions[key])
            if turn == len(conversation.lengths):
                engine.release(key)
                open_ -= 1
                continue
            contexts[key] = [*contexts[key], *action.tokens, *conversation.observations[turn - 1]]
            submit(key)
    return SampledWorkload(time.perf_counter() - began, actions, logp)


def run_iteration(settings: BenchSettings) -> dict[str, Any]:
    """Measures and prints; the figures.

    Raises:
      ValueError: a wrong setting.
    """
    if not settings.torch:
        raise ValueError("--torch: got none; allowed: a way to run what JAX is measured against.")
    parts: dict[str, list[Parts]] = {}
    with prepared(settings, machine.fast_dtype(machine.only_device())) as inputs:
        about = comparison.about("iteration", settings, inputs.arch, inputs.work)
        sides = {JAX: _jax_rollout(JaxSweeps(inputs), inputs)}
        for name, sweeps in torch_sweeps(inputs).items():
            sides[name] = _of_torch(sweeps, inputs, keep_cache=False)
            sides[f"{name}, {CACHE_KEPT}"] = _of_torch(sweeps, inputs, keep_cache=True)
    for contend in sides.values():
        contend(-1)  # compiles

    def timed(name: str) -> Callable[[int], float]:
        def contend(number: int) -> float:
            parts.setdefault(name, []).append(sides[name](number))
            return sum(parts[name][-1])

        return contend

    timings = comparison.alternate({name: timed(name) for name in sides}, settings.repeats)
    figures = about | {
        **ratios(timings),
        "contenders": {
            name: timing.as_json()
            | {
                "tokens_per_second": inputs.work.tokens / timing.median,
                "rollout_s": Timing(tuple(rollout for rollout, _ in parts[name])).median,
                "sweep_s": Timing(tuple(sweep for _, sweep in parts[name])).median,
            }
            for name, timing in timings.items()
        },
    }
    columns = {
        "median s": side("median_s", "{:.3f}"),
        "least": side("least_s", "{:.3f}"),
        "most": side("most_s", "{:.3f}"),
        "rollout s": side("rollout_s", "{:.3f}"),
        "sweep s": side("sweep_s", "{:.3f}"),
        "tokens/s": side("tokens_per_second", "{:.0f}"),
    }
    over = {
        "over_resent": "the conversation sent again at every turn",
        "over_kept": "the KV cache kept from turn to turn",
    }
    comparison.print_figures(figures, "an iteration", columns, comparison.OVER_WORDS | over)
    return figures


def _swept(sweeps: JaxSweeps | TorchSweeps, inputs: Inputs, actions: Actions) -> float:
    """Seconds of a sweep over the samples, without writing and reading them."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "sampled.jsonl")
        made = trajectory_lines(inputs.work, actions, seed=inputs.settings.seed)
        lines.write_text("\n".join(made) + "\n", encoding="utf-8")
        return sweeps.run(lines)


def _jax_rollout(sweeps: JaxSweeps, inputs: Inputs) -> Callable[[int], Parts]:
    engine = make_engine(sweeps.policy.network, inputs.work, inputs.settings)
    engine.compile(sweeps.params())

    def contend(number: int) -> Parts:
        seed = inputs.settings.seed + number + 1
        played = converse(engine, sweeps.params(), inputs.work, seed)
        return played.seconds, _swept(sweeps, inputs, played.actions)

    return contend


def _of_torch(sweeps: TorchSweeps, inputs: Inputs, *, keep_cache: bool) -> Callable[[int], Parts]:
    def contend(number: int) -> Parts:
        model, copying = sweeps.sampler()
        seed = inputs.settings.seed + number + 1
        result = generate(model, inputs.work, seed=seed, kept=keep_cache)
        return result.seconds + copying, _swept(sweeps, inputs, result.actions)

    return contend
