"""A worker computes with published weights what the trainer's own sampler computes, to the bit."""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import weights_cases as cases
from flax.traverse_util import flatten_dict, unflatten_dict
from places import SUPPORT
from process_cases import environment, run_processes
from rollout_cases import converse

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, row_shards, sampler_mesh
from seeupo_jax.policy.network import join_params
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.sampler_layout import SamplerLayout
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine
from seeupo_jax.rollout.weights.publishing import publish
from seeupo_jax.rollout.weights.reading import read_version
from seeupo_jax.rollout.weights.versions import (
    UnusableVersion,
    checked_version,
    newest_version,
    receive_version,
)

ROLLOUT = schema.Rollout(tasks=2, group_size=4, max_action_tokens=4, max_context=96, page_size=8)
SAMPLING = Sampling(0.6, None, None, 4, (3, 7, 11))
PROMPTS = {
    key: (key // 4, np.random.default_rng(key // 4).integers(0, 32, 20).tolist())
    for key in range(8)
}


def merged(params, frozen, mesh, network):
    """All parameters on a worker's mesh, given those that it has read."""
    where = param_shardings(mesh, network.logical_axes(), join_params(frozen, params))
    host = jax.tree.map(np.asarray, frozen)
    paths, where = flatten_dict(host), flatten_dict(where)
    placed = {path: jax.device_put(x, where[path]) for path, x in paths.items()}
    return join_params(params, unflatten_dict(placed))


def same_bits(one, other):
    one, other = flatten_dict(one), flatten_dict(other)
    assert one.keys() == other.keys()
    for path, x in one.items():
        assert x.dtype == other[path].dtype, path
        assert np.asarray(x).tobytes() == np.asarray(other[path]).tobytes(), path


@pytest.mark.parametrize("sizes", [(1, 1, 2), (4, 1, 1), (1, 1, 1), (1, 4, 2)], ids=str)
@pytest.mark.parametrize("name", cases.POLICIES)
def test_a_sampler_has_the_same_bits_as_the_trainers(tmp_path, name, sizes):
    """Also on another number of devices, in another layout."""
    network, params, frozen = cases.policy(name)
    int8 = cases.POLICIES[name][3]
    publish(tmp_path, params, 5, network, int8=int8, file_bytes=3000)
    data, fsdp, tensor = sizes
    devices = jax.devices()[-data * fsdp * tensor :]
    worker = schema.Mesh(data=data, fsdp=fsdp, tensor=tensor)
    found, mesh = cases.read_as_worker(name, tmp_path, worker, devices)
    assert found.version == 5
    own = make_mesh(cases.TRAINING, jax.devices()[:4])
    everything = join_params(params, frozen)
    trainers = SamplerLayout(network, sampler_mesh(own, None), int8=int8).place(everything)
    workers = SamplerLayout(network, sampler_mesh(mesh, None), int8=int8).place(
        merged(found.params, frozen, mesh, network)
    )
    same_bits(trainers, workers)
    shardings = flatten_dict(param_shardings(mesh, network.logical_axes(), everything))
    for path, x in flatten_dict(found.params).items():
        assert x.sharding.is_equivalent_to(shardings[path], x.ndim)


@pytest.mark.sampled("bfloat16", "int8")
@pytest.mark.parametrize("name", ["bfloat16", "int8", "stacked adapters", "float32"])
def test_actions_are_those_of_the_trainers_sampler_to_the_bit(tmp_path, name):
    network, params, frozen = cases.policy(name)
    int8 = cases.POLICIES[name][3]
    publish(tmp_path, params, 1, network, int8=int8)

    def play(mesh, everything):
        mesh = sampler_mesh(mesh, schema.Mesh(data=2, tensor=2))
        plan = plan_cache(network.arch, ROLLOUT, shards=row_shards(mesh), tensor=2)
        options = {"mesh": mesh, "group_size": 4, "steps": 2, "prefill_tokens": 32, "int8": int8}
        engine = SlotEngine(network, SAMPLING, plan, **options)
        return converse(engine, everything, PROMPTS, turns=2, answer=lambda key, turn: [key, turn])

    wanted = play(make_mesh(cases.TRAINING, jax.devices()[:4]), join_params(params, frozen))
    found, mesh = cases.read_as_worker(name, tmp_path, cases.TRAINING, jax.devices()[4:])
    assert play(mesh, merged(found.params, frozen, mesh, network)) == wanted
    assert len({tuple(action) for turns in wanted.values() for _, action, _ in turns}) > 8


def test_a_worker_may_stack_layers_or_not_whatever_the_trainer_does(tmp_path):
    network, params, _ = cases.policy("stacked")
    unstacked = cases.unstacked(network)
    publish(tmp_path / "stacked", params, 0, network)
    mesh = make_mesh(schema.Mesh(data=1), jax.devices()[:1])
    one = read_version(tmp_path / "stacked" / "0", *unstacked, mesh)
    publish(tmp_path / "not", one.params, 0, unstacked[0])
    other, _ = cases.read_as_worker("stacked", tmp_path / "not", schema.Mesh(), jax.devices()[:1])
    direct, _ = cases.read_as_worker(
        "stacked", tmp_path / "stacked", schema.Mesh(), jax.devices()[:1]
    )
    same_bits(other.params, direct.params)
    for layer in range(3):
        q = np.asarray(params["layers"]["q"]["kernel"][layer].astype("bfloat16"))
        assert np.asarray(one.params["layers"][layer]["q"]["kernel"]).tobytes() == q.tobytes()


@pytest.fixture
def folder(tmp_path):
    network, params, _ = cases.policy("bfloat16")
    for version in (1, 2):
        publish(tmp_path, params, version, network, file_bytes=3000)
    return tmp_path


def read_here(folder):
    return cases.read_as_worker("bfloat16", folder, schema.Mesh(data=1), jax.devices()[:1])[0]


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "flipped": (flip, "has a file {name} that changed after it was written"),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes in {name} where"),
    "removed": (lambda file: file.unlink(), "lacks its file {name}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_not_used(folder, damage):
    change, sentence = DAMAGES[damage]
    for file in sorted((folder / "2").glob("model*")):
        content = file.read_bytes()
        change(file)
        with pytest.raises(UnusableVersion) as raised:
            read_here(folder)
        said = str(raised.value)
        assert said.startswith(f"{folder / '2'} ") and sentence.format(name=file.name) in said
        assert not raised.value.gone
        file.write_bytes(content)
    assert read_here(folder).version == 2


def test_an_edited_manifest_is_damage(folder):
    file = folder / "2" / "manifest.json"
    file.write_text(file.read_text().replace('"version": 2', '"version": 3'))
    with pytest.raises(UnusableVersion, match="manifest.json that changed") as raised:
        read_here(folder)
    assert not raised.value.gone


def test_what_is_not_finished_is_no_version(folder):
    (folder / "2" / "manifest.json").unlink()
    shutil.copytree(folder / "1", folder / ".unfinished")
    (folder / "notes").mkdir()
    assert newest_version(folder) == 1 and read_here(folder).version == 1


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_version_that_goes_while_it_is_read_is_to_be_read_again(folder, change):
    network, params, _ = cases.policy("bfloat16")
    with pytest.raises(UnusableVersion, match="was removed or replaced") as raised:
        with checked_version(folder / "2"):
            if change == "removed":
                for version in (3, 4):
                    publish(folder, params, version, network)
            else:
                publish(folder, jax.tree.map(lambda x: x + 1, params), 2, network)
    assert raised.value.gone
    with pytest.raises(UnusableVersion) as raised:
        read_version(folder / "0", network, params, None)
    assert raised.value.gone


def test_the_policy_of_another_configuration_is_refused(tmp_path):
    network, params, _ = cases.policy("adapters")
    publish(tmp_path, params, 0, network)
    with pytest.raises(ValueError, match="lacks embedding, layers/0/attention_norm/scale"):
        read_here(tmp_path)


def test_a_version_that_came_over_a_connection_is_as_the_trainers(folder, tmp_path):
    copies, asked = tmp_path / "copies", []

    def fetch(name, to):
        asked.append(name)
        shutil.copy(folder / "2" / name, to)

    assert receive_version(copies, 2, fetch) == copies / "2"
    assert sorted(asked) == sorted(file.name for file in (folder / "2").iterdir())
    one, other = read_here(folder), read_here(copies)
    assert one.identity == other.identity
    same_bits(one.params, other.params)


def test_what_came_damaged_or_was_cut_off_is_no_version(folder, tmp_path):
    copies = tmp_path / "copies"

    def damaged(name, to):
        shutil.copy(folder / "2" / name, to)
        if name.startswith("model-00002-of"):
            flip(to)

    with pytest.raises(UnusableVersion, match=r"version 2, as received .* that changed after"):
        receive_version(copies, 2, damaged)

    def lost(name, to):
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        receive_version(copies, 2, lost)

    with pytest.raises(UnusableVersion, match="is version 2"):
        receive_version(copies, 3, lambda name, to: shutil.copy(folder / "2" / name, to))
    assert [*copies.iterdir()] == []


def test_several_trainer_processes_publish_and_a_worker_of_its_own_reads(tmp_path):
    reported = run_processes("publish_process.py", 2, 2, tmp_path, tmp_path, read=json.loads)
    first, second = reported
    assert first["written"] is None and first["written again"] is None
    assert "version 1 could not be published" in first["no room"]
    assert "File too large; samplers go on with 0." in first["no room"]
    for name, others in second.items():
        assert (others is None) == (first[name] is None)
    for name in ("bfloat16", "stacked", "adapters"):
        _, params, _ = cases.policy(name)
        found, _ = cases.read_as_worker(
            name, tmp_path / name, schema.Mesh(data=1, tensor=2), jax.devices()[:2]
        )
        assert found.version == 1
        for path, x in flatten_dict(found.params).items():
            wanted = np.asarray(flatten_dict(params)[path].astype(x.dtype))
            assert np.asarray(x).tobytes() == wanted.tobytes()


def test_a_reader_beside_trainers_that_are_killed_always_gets_a_whole_version(tmp_path):
    """Every number of version v is v."""
    program = SUPPORT / "publish_forever_process.py"
    publisher = subprocess.Popen(
        [sys.executable, program, str(tmp_path / "weights")], env=environment(4)
    )
    network, params, _ = cases.policy("bfloat16")
    mesh, seen = make_mesh(schema.Mesh(data=1), jax.devices()[:1]), []
    while publisher.poll() is None:
        newest = newest_version(tmp_path / "weights")
        try:
            found = read_version(tmp_path / "weights" / str(newest), network, params, mesh)
        except UnusableVersion as error:  # three newer ones meanwhile, or none yet
            assert error.gone
            continue
        for x in jax.tree.leaves(found.params):
            assert (np.asarray(x, np.float32) == found.version).all()
        seen.append(found.version)
    assert publisher.returncode == 0 and len(set(seen)) > 10 and seen == sorted(seen)
