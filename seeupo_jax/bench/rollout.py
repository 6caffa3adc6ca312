"""Our engine beside `transformers`' `generate` on PyTorch: the same model, the same conversations.

Contenders take turns, so that a noisy machine slows all of them; each one's best run counts.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from absl import flags
from flax import nnx

from seeupo_jax import config
from seeupo_jax.bench import torch_side, workload
from seeupo_jax.bench.workload import Workload
from seeupo_jax.policy import network as policy
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.engine import Turn
from seeupo_jax.rollout.memory import plan_cache
from seeupo_jax.rollout.sampling import Sampling
from seeupo_jax.rollout.slots import SlotEngine, choose_reading

_SHAPE = flags.DEFINE_enum("shape", "bfcl", ["bfcl", "order_desk"], "Of the conversations.")
_MODEL = flags.DEFINE_string("model", "tiny", "One of `MODELS`: random weights of this size.")
_SCALE = flags.DEFINE_float("scale", 0.125, "Of the BFCL shape's lengths.", lower_bound=0)
_GROUPS = flags.DEFINE_integer("groups", 2, "Prompts, each with eight conversations.", 1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each contender.", 1)
_SLOTS = flags.DEFINE_integer("slots", None, "That decode together; default: all.", 1)
_STEPS = flags.DEFINE_integer("decode_steps", 16, "Tokens a dispatch decodes at most.", 1)
_SEED = flags.DEFINE_integer("seed", 0, "Of weights, conversations and sampling.")

_SMALL = {"vocab_size": 8192, "width": 256, "layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 64}
_QWEN = {"vocab_size": 151_936, "head_dim": 64, "kv_heads": 2, "qkv_bias": True, "qk_norm": False}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": _SMALL | {"mlp_width": 512},
    "135m": {
        "vocab_size": 49_152,
        "width": 576,
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "mlp_width": 1536,
        "qk_norm": False,
    },
    "0.5b": _QWEN | {"width": 896, "layers": 24, "heads": 14, "mlp_width": 4864},
    "1.5b": _QWEN | {"width": 1536, "layers": 28, "heads": 12, "mlp_width": 8960, "head_dim": 128},
}


@dataclass(frozen=True)
class Figures:
    """One run. computed: tokens of conversations that went through the network; positions: all
    that did, padding and idle rows included."""

    seconds: float
    sampled: int
    computed: int
    positions: int


def run() -> dict[str, Any]:
    """Measures, prints a table and returns its figures."""
    if _MODEL.value not in MODELS:
        raise ValueError(f"--model: got {_MODEL.value!r}; allowed: {', '.join(MODELS)}.")
    device = jax.devices()[0]
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    arch = Architecture(**MODELS[_MODEL.value], dtype=dtype)
    work = _workload(arch.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        model = Transformer(arch, nnx.Rngs(_SEED.value))
        save_pretrained(model, folder, dtype=dtype)
        theirs = torch_side.load("generate").load(folder, _torch_device(device.platform), dtype)
    contenders = {
        "generate, conversation sent again": _generate(theirs, work, kept=False),
        "generate, KV cache kept": _generate(theirs, work, kept=True),
        "seeupo_jax": _engine(model, work, device.platform),
    }
    runs: dict[str, list[Figures]] = {name: [] for name in contenders}
    for repeat in range(_REPEATS.value):
        for name, contend in contenders.items():
            runs[name].append(contend(_SEED.value + repeat))
    best = {name: min(each, key=lambda f: f.seconds) for name, each in runs.items()}
    figures = _figures(best, runs, work, arch, device)
    _print(figures)
    return figures


def _workload(vocab_size: int) -> Workload:
    if _SHAPE.value == "order_desk":
        return workload.order_desk(_GROUPS.value, seed=_SEED.value)
    return workload.bfcl(_SCALE.value, _GROUPS.value, vocab_size, _SEED.value)


def _torch_device(platform: str) -> str:
    return "cuda" if platform in ("gpu", "cuda") else "cpu"


def _generate(model: Any, work: Workload, *, kept: bool) -> Callable[[int], Figures]:
    generate = torch_side.load("generate")

    def contend(seed: int) -> Figures:
        everything = work.conversations
        result = generate.run(
            model, everything, kept=kept, temperature=1.0, seed=seed, batch=len(everything)
        )
        return Figures(result.seconds, result.sampled, result.computed_tokens, result.computed)

    return contend


def _engine(model: Transformer, work: Workload, platform: str) -> Callable[[int], Figures]:
    """Our engine, compiled, as a function of the seed."""
    network, params = policy.split(model)
    count = len(work.conversations)
    rollout = config.Rollout(
        tasks=count // work.group_size,
        group_size=work.group_size,
        max_action_tokens=work.action_tokens,
        max_context=work.max_context,
        slots=_SLOTS.value,
    )
    engine = SlotEngine(
        network,
        Sampling(1.0, None, None, work.action_tokens, ()),
        plan_cache(network.arch, rollout),
        group_size=work.group_size,
        steps=_STEPS.value,
        reading=choose_reading(network.arch, rollout.page_size, platform),
    )
    engine.compile(params)

    def contend(seed: int) -> Figures:
        began = time.perf_counter()
        sampled = _converse(engine, params, work, seed)
        seconds = time.perf_counter() - began
        usage = engine.usage()
        positions = usage["prefill_positions"] + usage["decode_positions"]
        return Figures(
            seconds, sampled, usage["prefilled_tokens"] + usage["decoded_tokens"], positions
        )

    return contend


def _converse(engine: SlotEngine, params: Any, work: Workload, seed: int) -> int:
    """Plays a workload's conversations; how many tokens were sampled."""
    engine.begin(params, seed=seed, iteration=0)
    conversations = work.conversations
    contexts = [list(c.prompt) for c in conversations]
    turns = [0] * len(conversations)

    def submit(key: int) -> None:
        limit, group = conversations[key].lengths[turns[key]], key // work.group_size
        engine.submit(Turn(key, contexts[key], group, group, key, turns[key], limit=limit))

    for key in range(len(conversations)):
        submit(key)
    open_, sampled = len(conversations), 0
    while (actions := engine.step(open_ > 0)) is not None:
        for action in actions:
            key = action.key
            sampled += len(action.tokens)
            turns[key] += 1
            if turns[key] == len(conversations[key].lengths):
                engine.retire(key)
                open_ -= 1
                continue
            heard = conversations[key].observations[turns[key] - 1]
            contexts[key] = [*contexts[key], *action.tokens, *heard]
            submit(key)
    return sampled


def _figures(
    best: dict[str, Figures],
    runs: dict[str, list[Figures]],
    work: Workload,
    arch: Architecture,
    device: jax.Device,
) -> dict[str, Any]:
    slowest = max(f.seconds for f in best.values())
    return {
        "shape": work.name,
        "conversations": len(work.conversations),
        "group_size": work.group_size,
        "sampled": work.sampled,
        "observed": work.observed,
        "prompt_tokens": work.prompt_tokens,
        "least_computed_per_sampled": work.least_computed / work.sampled,
        "model": _MODEL.value,
        "dtype": arch.dtype,
        "device": device.device_kind,
        "machine": platform.processor() or platform.machine(),
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "contenders": {
            name: {
                "seconds": f.seconds,
                "seconds_each": [run.seconds for run in runs[name]],
                "sampled_per_second": f.sampled / f.seconds,
                "computed_per_sampled": f.computed / f.sampled,
                "positions_per_sampled": f.positions / f.sampled,
                "waste": f.computed / work.least_computed,
                "speed_over_slowest": slowest / f.seconds,
            }
            for name, f in best.items()
        },
    }


def _print(figures: dict[str, Any]) -> None:
    print(
        f"{figures['shape']}: {figures['conversations']} conversations in groups of"
        f" {figures['group_size']}, {figures['sampled']} sampled and {figures['observed']} observed"
        f" tokens, prompts of {figures['prompt_tokens']}; model {figures['model']},"
        f" {figures['dtype']}, {figures['device']}, best of {_REPEATS.value}"
    )
    head = ("contender", "s", "sampled/s", "speed", "computed/sampled", "with padding", "waste")
    rows: list[Sequence[str]] = [head]
    for name, f in figures["contenders"].items():
        rows.append(
            (
                name,
                f"{f['seconds']:.2f}",
                f"{f['sampled_per_second']:.0f}",
                f"{f['speed_over_slowest']:.2f}x",
                f"{f['computed_per_sampled']:.2f}",
                f"{f['positions_per_sampled']:.2f}",
                f"{f['waste']:.2f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *rest = (cell for cell in row)
        print(first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True)))
    least = figures["least_computed_per_sampled"]
    print(f"at least {least:.2f} tokens must be computed for each sampled one (waste 1)")
