"""One process of a collection over several: `rollout_process.py RANK COUNT PORT OUT`."""

import itertools
import pickle
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import rollout_cases
from places import SUPPORT

from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.configuration import schema
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.envs.base import StepResult
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.evaluation.episode_host import build_host
from seeupo_jax.parallel.mesh import (
    make_mesh,
    param_shardings,
    row_shards,
    sampler_mesh,
)
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.rollout.collect import Collected, collect, group_requests, prefetch
from seeupo_jax.rollout.dealing import deal
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.protocol import Turn
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine
from seeupo_jax.rollout.player import CollectionOptions, RolloutWorker
from seeupo_jax.rollout.resample import resample
from seeupo_jax.types import Trajectory

RANK, COUNT, PORT = map(int, sys.argv[1:4])
SIZES = {"vocab_size": 30, "width": 16, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 8}
OTHERS = ["3", "2!", "1", "4", "2"]  # instead of those that fail
TASKS = ["4", "2", "3!", "5", "2!", "4", "1", "3"]  # turns; "!": its environment fails then


class Slow:
    """Answers after a random while, in every process another one."""

    wait = random.Random(RANK)

    def reset(self, task_id, seed):
        self._turns, self._fails, self._step = int(task_id[0]), "!" in task_id, 0
        return ({"role": "user", "content": " ".join("123456789" * (1 + int(task_id[0])))},), ()

    def step(self, text):
        time.sleep(self.wait.choice([0, 0.001, 0.02]))
        self._step += 1
        done = self._step == self._turns
        if done and self._fails:
            raise RuntimeError("it fails")
        answer = () if done else ({"role": "tool", "content": f"{self._step} {len(text)}"},)
        return StepResult(answer, float(len(text)), done)

    def score(self):
        return self._step / 5

    def close(self):
        pass


def uncancelled(engine: SlotEngine, params: Any) -> dict[int, Any]:
    """Actions of this process's turns but every third, which it takes back at a random moment.

    The policy is swapped for itself meanwhile, by all processes between the same steps.
    """
    engine.begin(params, seed=1)
    shard_N = deal([key // 3 for key in range(24)], engine.shard_owners)
    own = [key for key in range(24) if engine.shard_owners[shard_N[key]] == jax.process_index()]
    for key in own:
        context = np.random.default_rng(key // 3).integers(12, 30, 20 + 2 * key).tolist()
        more = {"shard": shard_N[key], "iteration": 9}
        engine.submit(Turn(key, context, key // 3, key // 3, key, 0, **more))
    moments = {key: Slow.wait.randrange(6) for key in own if key % 3 == 0}
    actions: dict[int, Any] = {}
    for step in itertools.count():
        if step in (2, 5):
            engine.swap(params, step)
        for key in [key for key, moment in moments.items() if moment == step]:
            engine.cancel(key)
        found = engine.step(engine.busy)
        if found is None:
            return {key: action for key, action in actions.items() if key not in moments}
        actions |= {action.key: (action.tokens, action.logp) for action in found}
    raise AssertionError


def of_agents(engine: SlotEngine, params: Any) -> Sequence[Trajectory]:
    """What agents play, at an endpoint of each process."""
    config = from_dict({"agent": {"name": f"{SUPPORT / 'slow_agent.py'}:play"}})
    tokenizer = rollout_cases.NumberTokenizer()
    host = build_host(config, engine, find_tasks(config), tokenizer, print)
    rollout = schema.Rollout(max_turns=4)
    worker = RolloutWorker(engine, host, tokenizer, config.env, rollout)
    options = CollectionOptions(seed=1)
    try:
        return collect(worker, params, group_requests(TASKS, 3, 12), options).trajectories
    finally:
        host.close()


def random_params(shapes: Any) -> Any:
    """Of these shapes, in the host's memory: to draw them there compiles nothing."""
    rng = np.random.default_rng(0)

    def draw(leaf: Any) -> np.ndarray:
        is_scale = leaf.ndim == 1
        deviation = 0.2 if is_scale else leaf.shape[-1] ** -0.5
        return rng.normal(float(is_scale), deviation, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(draw, shapes)


def main() -> None:
    if COUNT > 1:
        jax.distributed.initialize(f"localhost:{PORT}", COUNT, RANK)
    tensor = 2 if jax.device_count() > 2 and jax.local_device_count() > 1 else 1
    mesh = make_mesh(schema.Mesh(data=1, fsdp=-1, tensor=tensor))
    own = sampler_mesh(mesh, schema.Mesh(data=-1, tensor=tensor))
    arch = Architecture(**SIZES, mlp_width=24)
    network, shapes = policy.abstract_network(arch)
    params = random_params(shapes)
    params = jax.tree.map(
        lambda x, where: jax.make_array_from_callback(x.shape, where, lambda index: x[index]),
        params,
        param_shardings(mesh, network.logical_axes(), params),
    )
    rollout = schema.Rollout(
        tasks=8, group_size=3, max_action_tokens=6, max_context=96, concurrency=16, slots=8
    )
    plan = plan_cache(arch, rollout, shards=row_shards(own), tensor=tensor)
    sampling = Sampling(0.8, None, None, 6, (3, 7, 11))
    with jax.set_mesh(mesh):
        how = {"group_size": 3, "steps": 2, "prefill_tokens": 64, "on_swap": "prefill"}
        engine = SlotEngine(network, sampling, plan, mesh=own, **how)
        pool = EnvPool(Slow, engine.concurrency, workers=4, timeout_s=60)

        worker = rollout_cases.make_worker(engine, pool, max_turns=4)

        def sample(number: int, tasks: Sequence[str]) -> Collected:
            requests, options = group_requests(tasks, 3, 1 + number), CollectionOptions(1)
            prefetched = None
            if number == 1:  # whatever number of processes, in the same collections
                prefetched = prefetch(worker, requests, options, max_idle_s=60)
            return collect(worker, params, requests, options, prefetched=prefetched)

        collected = [
            sample(1, TASKS).trajectories,
            resample(sample, TASKS, iter(OTHERS), rounds=3).sampled,  # the first not prefetched
            of_agents(engine, params),
            uncancelled(engine, params),
        ]
        pool.close()
    with open(sys.argv[4], "wb") as file:
        pickle.dump(collected, file)


main()
