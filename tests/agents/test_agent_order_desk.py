"""The order desk by an agent's loop gives what its environment gives, bit for bit."""

import dataclasses

import jax
import numpy as np
import pytest
from places import CONFIGS

from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.evaluation.episode_host import build_host
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.build_sampler import build_engine
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.player import CollectionOptions, RolloutWorker
from seeupo_jax.train import train

SMALL = (
    "iterations=2",
    "rollout.tasks=2",
    "rollout.group_size=4",
    "rollout.max_action_tokens=8",  # its longest actions are cut
    "rollout.prefill_tokens=32",
    "evaluation.tasks=2",
    "evaluation.k=2",
    "evaluation.every=0",
    "checkpoint.every=0",
    "checkpoint.export=False",
    "batching.buckets=(128,)",
    "telemetry.trackers=()",
    "telemetry.display=plain",
    "log_checksum=True",
)
CONFIG = {
    "environment": load_config("package:quickstart", SMALL),
    "agent": load_config(CONFIGS / "agent_order_desk.py", SMALL),
}


pytestmark = pytest.mark.usefixtures("one_device")


def test_the_two_configurations_differ_in_who_plays_only():
    agent, environment = (load_config(f"package:{n}") for n in ("agent_order_desk", "quickstart"))
    differing = [name for name, x in vars(agent).items() if x != vars(environment)[name]]
    assert differing == ["agent"]


@pytest.fixture(scope="module")
def trajectories():
    """What either plays with one engine, by its name and the limit on turns: 4 tasks, 4 times."""
    config = CONFIG["environment"]
    made, params = build.load_policy(config, config.model.path)
    engine, found = build_engine(config, made), {}
    requests = group_requests([f"train/{number}" for number in range(4)], 4, 1)
    options = CollectionOptions(seed=0, policy_version=3)
    with jax.set_mesh(made.mesh):
        for name, config in CONFIG.items():
            host = build_host(config, engine, find_tasks(config), made.tokenizer, print)
            for turns in (6, 3):
                rollout = dataclasses.replace(config.rollout, max_turns=turns)
                worker = RolloutWorker(engine, host, made.tokenizer, config.env, rollout)
                collected = collect(worker, made.merged(params), requests, options)
                found[name, turns] = collected.trajectories
            host.close()
    return found


@pytest.mark.parametrize("turns", [6, 3])
def test_its_trajectories_are_those_of_the_environment_to_the_last_bit(trajectories, turns):
    names = ("reward", "turn_rewards", "rewards", "stop", "messages", "group", "task_id", "seed")
    names += ("policy_version", "timeout_counts")
    both = trajectories["agent", turns], trajectories["environment", turns]
    for agent, environment in zip(*both, strict=True):
        for name in names:
            assert getattr(agent, name) == getattr(environment, name), name
        assert len(agent.segments) == len(environment.segments) == 1
        for field in ("tokens_L", "turn_L", "logp_L"):
            x, y = (getattr(each.segments[0], field) for each in (agent, environment))
            np.testing.assert_array_equal(x, y, strict=True)
        shared = agent.info.keys() & environment.info.keys()
        assert shared >= {"score", "member"}
        assert all(agent.info[name] == environment.info[name] for name in shared)


def test_the_episodes_compared_end_in_all_ways(trajectories):
    found = trajectories["environment", 6] + trajectories["environment", 3]
    assert {t.stop for t in found} == {"done", "max_tokens", "max_turns"}
    assert {t.reward for t in found} == {0.0, 1.0} and len({t.turns for t in found}) > 2
    assert any(t.info["bad_calls"] for t in found)


@pytest.mark.exhaustive
def test_it_trains_to_the_same_numbers(tmp_path):
    lines = {}
    for name, config in CONFIG.items():
        train(config, tmp_path / name)
        lines[name] = read_metrics(tmp_path / name)
    timed = ("time/", "per_second", "programs_compiled")
    agent, environment = (
        [{k: x for k, x in line.items() if not any(part in k for part in timed)} for line in each]
        for each in (lines["agent"], lines["environment"])
    )
    own = ("rollout/lineages_mean", "rollout/refused_calls", "rollout/ignored_sampling")
    counted = [[line.pop(name) for name in own] for line in agent if own[0] in line]
    assert counted == [[1.0, 0, 0]] * 2
    assert agent == environment
    assert len({line["state/checksum"] for line in agent if "state/checksum" in line}) == 2
