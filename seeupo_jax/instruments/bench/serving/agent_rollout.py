"""The cost of an agent's loop and the endpoint in a rollout: the order desk with and without them.

The same episodes with the same random numbers, once played by the environment in this process and
once by the agent of configs/agent_order_desk.py, which calls the policy over HTTP; in turn, by one
engine. Measured with the bundled example policy, and with a larger random one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from seeupo_jax import envs
from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.benchmarks import comparison, machine
from seeupo_jax.benchmarks.settings import MODELS, architecture, write_model
from seeupo_jax.cli.command_line import prepare_xla
from seeupo_jax.configuration.agent_schema import Agent
from seeupo_jax.configuration.flags import Flags, integer, one_of, output_file
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.configuration.schema import Config
from seeupo_jax.evaluation.episode_host import build_host
from seeupo_jax.planning.flops import parameters
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.build_sampler import build_engine
from seeupo_jax.rollout.collect import Collected, collect, group_requests
from seeupo_jax.rollout.player import CollectionOptions, RolloutWorker

CONFIG, BUNDLED = "package:agent_order_desk", "package:order_desk"
AGENT, ENVIRONMENT = "agent at the endpoint", "environment"
TARGET = 1.15  # of the rollout's time, at most


def add_flags(parser: Flags) -> None:
    """The episodes and policies of the measurement."""
    sizes = f"size of the random policy: {', '.join(MODELS)}"
    parser.flag("model", sizes, one_of(*MODELS), default="tiny")
    parser.flag("tasks", "groups of episodes", integer(1), default=16)
    parser.flag("group_size", "episodes of a group", integer(2), default=8)
    parser.flag("repeats", "rounds", integer(1), default=5)
    parser.flag("seed", "of weights and episodes", integer(0), default=0)
    parser.switch("deterministic", "the engine waits until all agents call; default: it does not.")
    parser.flag("json", "also write the figures to this file", output_file)


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints and returns the figures.

    Raises:
      ValueError: a wrong setting; both sides did not sample the same.
    """
    prepare_xla()
    device = machine.only_device()
    about = machine.describe(device)  # its load, before there is ours
    with tempfile.TemporaryDirectory() as folder:
        larger, dtype = Path(folder) / "model", machine.fast_dtype(device)
        arch, tokenizer = architecture(given.model, dtype), read_tokenizer(BUNDLED)
        write_model(arch, larger, tokenizer, seed=given.seed, dtype=dtype)
        policies = {"the bundled policy": BUNDLED, f"random, {given.model}": str(larger)}
        measured = {name: _measure(given, path) for name, path in policies.items()}
    figures = {
        "benchmark": "agents",
        "episodes": given.tasks * given.group_size,
        "deterministic": given.deterministic,
        "target": TARGET,
        "machine": about,
        "policies": measured,
    }
    print(f"{figures['episodes']} episodes of the order desk, {figures['machine']['device']}")
    for name, result in measured.items():
        _print(name, result)
    return figures


def _print(name: str, size: dict[str, Any]) -> None:
    sides = size["contenders"]
    print(
        f"{name} ({size['parameters'] / 1e6:.1f}M parameters): {size['ratio']:.2f}x"
        f" ({size['ratio_least']:.2f} to {size['ratio_most']:.2f} by rounds) the rollout's time,"
        f" target at most {TARGET}: {AGENT} {_seconds(sides[AGENT])}, {ENVIRONMENT}"
        f" {_seconds(sides[ENVIRONMENT])}, {sides[AGENT]['turns']} turns,"
        f" {sides[AGENT]['sampled']} tokens"
    )


def _seconds(side: dict[str, Any]) -> str:
    return f"{side['median_s']:.3f} s ({side['cpu_s']:.3f} s of CPU)"


def _measure(given: argparse.Namespace, path: str) -> dict[str, Any]:
    """Rounds of one policy."""
    fields = {
        "model.path": path,
        "rollout.tasks": given.tasks,
        "rollout.group_size": given.group_size,
        "rollout.deterministic": given.deterministic,
        "env.options": {},
    }
    config = load_config(CONFIG, [f"{name}={value}" for name, value in fields.items()])
    made, trained = build.load_policy(config, path)
    with jax.set_mesh(made.mesh), contextlib.ExitStack() as stack:
        params, engine = made.merged(trained), build_engine(config, made)
        engine.compile(params)
        workers = stack.enter_context(_workers(config, engine, made.tokenizer))
        environment = envs.make(config.env.name, **config.env.options)
        tasks = environment.task_ids("train")[: given.tasks]
        last: dict[str, Collected] = {}
        spent: dict[str, list[float]] = {name: [] for name in workers}

        def plays(name: str) -> Callable[[int], float]:
            def play(number: int) -> float:
                requests = group_requests(tasks, given.group_size, number)
                options = CollectionOptions(given.seed)
                began = time.process_time()
                last[name] = collect(workers[name], params, requests, options)
                spent[name].append(time.process_time() - began)
                return last[name].wall_s

            return play

        contenders = {name: plays(name) for name in workers}
        for play in contenders.values():
            play(given.repeats)  # warm
        _check_same(last, exact=given.deterministic)
        timings = comparison.alternate(contenders, given.repeats)
    return {
        "parameters": parameters(made.network.arch),
        **comparison.ratio(timings[AGENT], timings[ENVIRONMENT]),
        "contenders": {
            name: timing.as_json()
            | {
                "cpu_s": statistics.median(spent[name][1:]),  # without the first, which warms up
                "sampled": last[name].sampled_tokens,
                "turns": sum(trajectory.turns for trajectory in last[name].trajectories),
            }
            for name, timing in timings.items()
        },
    }


@contextlib.contextmanager
def _workers(config: Config, engine: Any, tokenizer: Any) -> Iterator[dict[str, RolloutWorker]]:
    """The two sides, which share an engine."""
    alone = dataclasses.replace(config, agent=Agent())
    with contextlib.ExitStack() as stack:
        workers = {}
        for name, each in ((AGENT, config), (ENVIRONMENT, alone)):
            tasks = find_tasks(each)
            stack.callback(tasks.close)
            host = build_host(each, engine, tasks, tokenizer, lambda line: None)
            stack.callback(host.close)
            workers[name] = RolloutWorker(engine, host, tokenizer, config.env, config.rollout)
        yield workers


def _check_same(last: dict[str, Collected], *, exact: bool) -> None:
    """Raises ValueError where an agent failed, or the sides did not play the same episodes."""
    tokens = {
        name: [[s.tokens_L.tolist() for s in t.segments] for t in each.trajectories]
        for name, each in last.items()
    }
    failed = [t.info for each in last.values() for t in each.trajectories if t.failed]
    if failed:
        raise ValueError(f"bench: {len(failed)} episodes failed, the first with {failed[0]}.")
    if exact and tokens[AGENT] != tokens[ENVIRONMENT]:
        raise ValueError("bench: the agent's episodes are not the environment's.")
