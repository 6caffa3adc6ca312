"""Prints the table of published weights in docs/rollout.md.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python docs/tools/weights.py

Two devices train, with `fsdp=2`, and two sample, each with the whole policy. It needs SmolLM2-135M,
which `sh third_party/models/setup.sh` fetches.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.configuration.schema import Mesh
from seeupo_jax.parallel.mesh import make_mesh, param_shardings
from seeupo_jax.policy.network import join_params
from seeupo_jax.policy_io.build import load_policy
from seeupo_jax.rollout.weights.device_copy import copy_to
from seeupo_jax.rollout.weights.publishing import publish
from seeupo_jax.rollout.weights.reading import read_version

REPEATS = 5
SMOLLM2 = "third_party/models/SmolLM2-135M-Instruct.Q4_1.gguf"
POLICIES = {  # its folder or file, the compute dtype, and further fields of the configuration
    "quickstart's, float32": ("package:order_desk", "float32", {}),
    "SmolLM2-135M, bfloat16": (SMOLLM2, "bfloat16", {}),
    "SmolLM2-135M, bfloat16, LoRA of rank 16": (SMOLLM2, "bfloat16", {"lora": {"rank": 16}}),
}


def seconds(action: Callable[[int], Any]) -> tuple[Any, str]:
    """A result, and how long it took: at the first time, and then by the clock and of the CPU."""
    walls, cpus = [], []
    for number in range(REPEATS + 1):
        began, worked = time.monotonic(), time.process_time()
        made = action(number)
        walls.append(time.monotonic() - began)
        cpus.append(time.process_time() - worked)
    later, cpu = statistics.median(walls[1:]), statistics.median(cpus[1:])
    return made, f"{walls[0]:.2f}, {later:.2f} ({cpu:.2f})"


def row(name: str, path: str, dtype: str, fields: dict[str, Any]) -> str:
    """A line of the table."""
    training = make_mesh(Mesh(data=1, fsdp=2), jax.devices()[:2])
    sampling = make_mesh(Mesh(data=2), jax.devices()[2:])
    policy, params = load_policy(
        from_dict({"model": {"path": path, "dtype": dtype}} | fields), path
    )
    network = policy.network
    everything = join_params(params, policy.frozen)
    where = flatten_dict(param_shardings(training, network.logical_axes(), everything))
    placed = {at: jax.device_put(x, where[at]) for at, x in flatten_dict(params).items()}
    params = unflatten_dict(placed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        made, published = seconds(lambda version: publish(folder, params, version, network))
        newest = folder / str(made.version)
        _, read = seconds(lambda _: read_version(newest, network, params, sampling))
    _, copied = seconds(lambda _: copy_to(params, network, sampling))
    return f"| {name} | {made.bytes / 1e6:.1f} | {published} | {read} | {copied} |"


print("| policy | MB | publish | read | copy |")
for name, settings in POLICIES.items():
    print(row(name, *settings), flush=True)
