"""Members of a group begin alike, and what happens to each of them then is its own."""

import contextlib
import logging

import pytest
from remote_cases import OldServer, remote, served
from rollout_cases import Saying, make_worker, play

pytest.importorskip("gymnasium")

from slippery_cases import DeafLake, Lake  # noqa: E402

from seeupo_jax.envs.pool import EnvPool  # noqa: E402
from seeupo_jax.envs.transport.isolated import IsolatedEnvironment  # noqa: E402
from seeupo_jax.rollout.collect import collect, group_requests, prefetch  # noqa: E402
from seeupo_jax.rollout.episode import EpisodeRequest  # noqa: E402
from seeupo_jax.rollout.player import CollectionOptions  # noqa: E402

GROUP, TASKS = 8, ["train/0", "train/1", "train/0"]


@pytest.fixture
def token_file(tmp_path):
    return tmp_path / "token"


def walks(make, *, tasks=TASKS, **options):
    """Where each member stands from its beginning on; the policy only says up."""
    played = play(make, tasks, group_size=GROUP, max_turns=5, timeout_s=30.0, **options)
    assert {trajectory.stop for trajectory in played} == {"max_turns"}
    return [fields(trajectory) for trajectory in played]


def fields(trajectory):
    return tuple(m["content"] for m in trajectory.messages if m["role"] == "user")


@pytest.fixture(scope="module")
def wanted():
    return walks(Lake)


def test_the_members_of_a_group_slip_each_in_its_own_way(wanted):
    groups = [wanted[first : first + GROUP] for first in range(0, len(wanted), GROUP)]
    assert {walk[0] for walk in wanted} == {"0"}
    assert all(len(set(group)) > GROUP // 2 for group in groups)
    assert groups[0] != groups[1] and groups[0] != groups[2]


def test_the_same_collection_slips_the_same_and_another_one_does_not(wanted):
    assert walks(Lake) == wanted
    assert walks(Lake, tasks=TASKS[::-1])[GROUP : 2 * GROUP] == wanted[GROUP : 2 * GROUP]
    assert walks(Lake, iteration=2) != wanted
    assert walks(Lake, seed=4) != wanted


def test_processes_and_a_server_bring_the_same(wanted, token_file):
    assert walks(lambda: IsolatedEnvironment("slippery_cases:Lake", {})) == wanted
    with served(Lake, token_file) as server:
        assert walks(lambda: remote(server.url, token_file)) == wanted


def test_prefetched_environments_slip_the_same(wanted):
    numbers = CollectionOptions(seed=3)
    requests = group_requests(TASKS, GROUP, 1)
    with contextlib.closing(EnvPool(Lake, 4, workers=4, timeout_s=30.0)) as pool:
        worker = make_worker(Saying(), pool, max_turns=5)
        prefetched = prefetch(worker, requests, numbers, max_idle_s=60)
        found = collect(worker, None, requests, numbers, prefetched=prefetched)
    assert [fields(trajectory) for trajectory in found.trajectories] == wanted


def test_an_environment_that_does_not_name_the_keyword_is_begun_as_ever():
    groups = walks(DeafLake, tasks=["train/0", "train/1"])
    assert len(set(groups[:GROUP])) == len(set(groups[GROUP:])) == 1


def test_an_older_server_is_asked_without_and_that_is_said_once(token_file, caplog):
    with served(Lake, token_file, kind=OldServer) as server:
        with caplog.at_level(logging.WARNING, "seeupo_jax.envs.transport.remote"):
            found = walks(lambda: remote(server.url, token_file), tasks=["train/0"])
        # Each of the pool's four environments asks once with the keyword.
        assert server.refused == 4 and len(set(found)) == 1
        (said,) = (
            r.getMessage() for r in caplog.records if r.name == "seeupo_jax.envs.transport.remote"
        )
    assert said.startswith(f"{server.url} does not take episode_seed")


def test_an_older_client_and_one_of_today_play_on_one_server(token_file):
    with served(Lake, token_file) as server:
        env = remote(server.url, token_file)
        old, own = [], []
        for _ in range(2):
            env.reset("train/0", 3)
            old.append([env.step("5").observation for _ in range(8)])
            env.reset("train/0", 3, episode_seed=1)
            own.append([env.step("5").observation for _ in range(8)])
    assert old[0] == old[1] != own[0] == own[1]


def test_seeds_of_episodes_differ_and_are_small_enough_for_any_generator():
    requests = [
        EpisodeRequest(f"train/{task}", 0, member, iteration=iteration)
        for task in range(40)
        for member in range(16)
        for iteration in (1, 2, 2**31 + 1)
    ]
    seeds = [request.episode_seed(seed) for request in requests for seed in (0, 1)]
    assert len(set(seeds)) == len(seeds) and 0 <= min(seeds) and max(seeds) < 2**31
