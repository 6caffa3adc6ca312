"""Prints the table of GPUs in docs/hardware.md, from the memory estimate of `--explain`.

    python docs/tools/hardware.py

It compiles nothing and needs no GPU: CPU devices stand for the GPUs.
"""

import itertools
import math
from collections.abc import Iterator

import jax

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.parallel.device_memory import GIB
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.planning.abstract_run import CACHE, Planned, abstract_run
from seeupo_jax.planning.remat import SHARE, RematPlan, plan_remat

GPU_GIB = 80
MODELS = {  # `rollout.mesh.tensor` of the sampler on eight GPUs
    "Qwen2.5-0.5B-Instruct": 1,
    "Qwen3-1.7B": 1,
    "Qwen3-4B": 1,
    "Qwen3-8B": 1,
    "Qwen3-14B": 2,
    "Qwen3-30B-A3B": 2,
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")  # adapted in a model with experts
CONVERSATION = 8192  # tokens
MICROBATCHES = (4 * CONVERSATION, 2 * CONVERSATION, CONVERSATION)
HEADINGS = (
    "model, GPUs, trained, mesh, sampler's mesh, microbatch, remat, sweep, cache, concurrent,"
    " rollout"
).split(", ")


def settings(model: str, gpus: int, rank: int, microbatch: int) -> Config:
    """A configuration with 128 conversations per iteration, of at most 8,192 tokens each."""
    tensor = MODELS[model]
    return from_dict(
        {
            "model": {
                "path": f"package:architectures/{model}",
                "dtype": "bfloat16",
                "param_dtype": "bfloat16" if rank else "float32",
                "scan_layers": True,
            },
            "lora": {"rank": rank} | ({"targets": ATTENTION} if rank and "-A3B" in model else {}),
            "mesh": {"data": 1, "fsdp": gpus},
            "optimizer": {"name": "adamw"},
            "rollout": {
                "tasks": 16,
                "group_size": 8,
                "max_turns": 8,
                "max_action_tokens": 1024,
                "max_context": CONVERSATION,
                "cache_gib": 2.0,
                "mesh": {"data": gpus // tensor, "tensor": tensor} if gpus > 1 else None,
            },
            "batching": {"microbatch_tokens": microbatch},
        }
    )


def row(model: str, gpus: int, rank: int) -> list[str]:
    """A row of the table: the largest microbatch that fits, the least recomputation, the cache."""
    given = [model, str(gpus), "adapters" if rank else "everything"]
    for microbatch in MICROBATCHES:
        config = settings(model, gpus, rank, microbatch)
        mesh = make_mesh(config.mesh, jax.devices()[:gpus])
        plan = plan_remat(config, mesh, GPU_GIB * GIB, share=SHARE)
        if plan.needed(plan.selected) <= (plan.allowed or 0):
            return [*given, *layout(config), f"{microbatch:,}", *sizes(config, mesh, plan)]
    return [*given, *layout(config), f"{microbatch:,}", *too_large(plan)]


def too_large(plan: RematPlan) -> list[str]:
    """The cells of a model whose step does not fit."""
    needed = plan.needed(plan.selected) / GIB
    return [plan.selected, f"{needed:.1f}, does not fit", "-", "-", "-"]


def layout(config: Config) -> list[str]:
    sampler = config.rollout.mesh
    tensor = "" if sampler is None or sampler.tensor == 1 else f", tensor {sampler.tensor}"
    held = "-" if sampler is None else f"data {sampler.data}{tensor}"
    return ["-" if config.mesh.fsdp == 1 else f"fsdp {config.mesh.fsdp}", held]


def sizes(config: Config, mesh: jax.sharding.Mesh, plan: RematPlan) -> list[str]:
    """The cells of the sweep and of the rollout, with the largest cache that fits or is needed."""
    swept = [plan.selected, f"{plan.needed(plan.selected) / GIB:.1f}"]
    try:
        run = abstract_run(config, mesh, Planned(GPU_GIB * GIB))
    except ValueError:  # the sampler's copy of the policy
        return [*swept, "-", "-", "does not fit"]
    cache = run.engine.plan
    held = sum(size for part, size in run.parts.items() if part != CACHE) + cache.gathered_bytes
    each = cache.row_pages * cache.page_size * cache.token_bytes  # of a whole conversation
    room = math.floor(10 * (SHARE * GPU_GIB * GIB - held) / GIB) / 10
    gib = min(room, math.ceil(10 * cache.concurrency * each / GIB) / 10)
    at_once = min(cache.concurrency, int(gib * GIB) // each) * cache.shards
    return [*swept, f"{gib:.1f}", str(at_once), f"{held / GIB + gib:.1f}"]


def rows() -> Iterator[list[str]]:
    for gpus in (1, 8):
        for model in MODELS:
            for rank in (0, 32):
                yield row(model, gpus, rank)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for cells in itertools.chain((HEADINGS, ["---"] * len(HEADINGS)), rows()):
        print(f"| {' | '.join(cells)} |", flush=True)
