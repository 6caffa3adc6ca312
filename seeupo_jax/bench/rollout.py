"""Our engine beside `transformers`' `generate` on PyTorch: the same model, the same conversations.

What is sampled differs, and is cut to the lengths that are given: the work is the same.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from seeupo_jax.bench import comparison, machine, torch_runner, workloads
from seeupo_jax.bench.comparison import OURS, side
from seeupo_jax.bench.inputs import architecture, write_model
from seeupo_jax.bench.settings import Settings
from seeupo_jax.bench.workloads import Workload
from seeupo_jax.configuration import schema
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.network import Network
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.protocol import Turn
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine, choose_read_plan

RESENT, KEPT = "generate, conversation sent again", "generate, KV cache kept"
STATIC = "generate, static KV cache kept"
# A way of `--generate` -> its name for people, and the options of the baseline.
WAYS: dict[str, tuple[str, dict[str, bool]]] = {
    "resent": (RESENT, {"kept": False}),
    "kept": (KEPT, {"kept": True}),
    "static": (STATIC, {"kept": True, "static": True}),
}


def run(settings: Settings) -> dict[str, Any]:
    """Measures, prints a table and returns its figures.

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
    network, params = policy.split(model)
    engine = make_engine(network, work, settings)
    engine.compile(params)
    ways = dict(WAYS[way] for way in settings.generate)
    figures: dict[str, dict[str, Any]] = {name: {} for name in (*ways, OURS)}

    def ours(number: int) -> float:
        played, usage = converse(engine, params, work, settings.seed + number), engine.usage()
        # Tokens of conversations that went through the network, and all that did, padding and
        # idle rows included.
        computed = usage["prefilled_tokens"] + usage["decoded_tokens"]
        positions = usage["prefill_positions"] + usage["decode_positions"]
        figures[OURS] |= {"computed": computed, "positions": positions}
        return played.seconds

    def of_torch(name: str, options: Mapping[str, bool]) -> Callable[[int], float]:
        def contend(number: int) -> float:
            result = generate(torch_model, work, seed=settings.seed + number, **options)
            figures[name] |= {"computed": result.computed_tokens, "positions": result.computed}
            return result.seconds

        return contend

    contenders = {name: of_torch(name, options) for name, options in ways.items()} | {OURS: ours}
    timings = comparison.alternate(contenders, settings.repeats)
    for name, timing in timings.items():
        figures[name] |= timing.as_json()
        figures[name] |= {
            "tokens_per_second": work.sampled / timing.median,
            "computed_per_sampled": figures[name]["computed"] / work.sampled,
            "positions_per_sampled": figures[name]["positions"] / work.sampled,
            "waste": figures[name]["computed"] / work.least_computed,
        }
    over = {name: comparison.ratio(timings[name], timings[OURS]) for name in ways}
    against = next(iter(ways), None)
    done = about | {
        **over.get(against, {}),
        "against": against,
        "over_kept": over.get(KEPT),
        "over_static": over.get(STATIC),
        "least_computed_per_sampled": work.least_computed / work.sampled,
        "contenders": figures,
    }
    _print(done)
    return done


def _print(figures: comparison.Figures) -> None:
    columns = {
        "median s": side("median_s", "{:.2f}"),
        "sampled/s": side("tokens_per_second", "{:.0f}"),
        "computed/sampled": side("computed_per_sampled", "{:.2f}"),
        "with padding": side("positions_per_sampled", "{:.2f}"),
        "waste": side("waste", "{:.2f}"),
    }
    ratios = {"over_kept": "the cache kept", "over_static": "a static cache kept"}
    comparison.print_figures(figures, "a rollout", columns, ratios)
    least = figures["least_computed_per_sampled"]
    print(f"at least {least:.2f} tokens must be computed for each sampled one (waste 1)")


def generate(model: Any, work: Workload, *, seed: int, **options: bool) -> Any:
    """All conversations, sampled together by the baseline; its `Result`."""
    run_all = torch_runner.load("generate").run
    batch = len(work.conversations)
    return run_all(model, work.conversations, temperature=1.0, seed=seed, batch=batch, **options)


def make_engine(network: Network, work: Workload, settings: Settings) -> SlotEngine:
    """An engine with room for all of a workload's conversations; nothing is compiled yet."""
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
        plan_cache(network.arch, rollout),
        group_size=work.group_size,
        steps=settings.decode_steps,
        read_plan=choose_read_plan(network.arch, rollout.page_size, platform),
    )


class Played(NamedTuple):
    """A workload's conversations.

    seconds: that they took. actions, logp: [conversation][turn], token ids, and their
    log-probabilities by the sampler.
    """

    seconds: float
    actions: list[list[list[int]]]
    logp: list[list[list[float]]]


def converse(engine: SlotEngine, params: Any, work: Workload, seed: int) -> Played:
    """Plays a workload's conversations."""
    began = time.perf_counter()
    engine.begin(params, seed=seed, iteration=0)
    conversations = work.conversations
    contexts = [list(c.prompt) for c in conversations]
    actions: list[list[list[int]]] = [[] for _ in conversations]
    logp: list[list[list[float]]] = [[] for _ in conversations]

    def submit(key: int) -> None:
        turn, group = len(actions[key]), key // work.group_size
        limit = conversations[key].lengths[turn]
        engine.submit(Turn(key, contexts[key], group, group, key, turn, limit=limit))

    for key in range(len(conversations)):
        submit(key)
    open_ = len(conversations)
    while (found := engine.step(open_ > 0)) is not None:
        for action in found:
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
    return Played(time.perf_counter() - began, actions, logp)
