"""A version is published whole or not at all, in the sampler's types, and the newest two stay."""

import hashlib
import json
import re
import resource
import signal
import sys

import jax
import loaded_python
import ml_dtypes
import numpy as np
import pytest
import weights_cases as cases
from fault_fs import FaultFs
from flax.traverse_util import flatten_dict
from places import SUPPORT
from process_cases import environment
from safetensors.numpy import load_file

from seeupo_jax.rollout.weights.publishing import publish
from seeupo_jax.rollout.weights.versions import checked_version, newest_version, versions


def published(folder):
    """The arrays of a version by name, as safetensors' own reader has them."""
    arrays = {}
    for file in sorted(folder.glob("*.safetensors")):
        arrays |= load_file(file)
    return arrays


def expected(params, *, layers, kept=("scale", "selection_bias", "conv1d", "a_log", "dt_bias")):
    """By hand: names unstacked; what computes in float32 keeps its type, all else is bfloat16."""
    arrays = {}
    for path, x in flatten_dict(params).items():
        x = np.asarray(x)
        x = x if path[-1] in (*kept, "norm_scale") else x.astype(ml_dtypes.bfloat16)
        if path[0] == "layers" and isinstance(path[1], str):
            names = ["/".join(map(str, ("layers", i, *path[1:]))) for i in range(layers)]
            arrays |= dict(zip(names, x, strict=True))
        else:
            arrays["/".join(map(str, path))] = x
    return arrays


@pytest.mark.parametrize(
    "name, layers",
    [("bfloat16", 2), ("stacked", 3), ("experts", 1), ("recurrent", 2), ("adapters", 2)],
)
def test_arrays_are_published_in_the_types_that_the_sampler_uses(tmp_path, name, layers):
    network, params, _ = cases.policy(name)
    publication = publish(tmp_path, params, 3, network)
    found, wanted = published(tmp_path / "3"), expected(params, layers=layers)
    assert found.keys() == wanted.keys()
    for array, x in wanted.items():
        assert found[array].dtype == x.dtype and found[array].tobytes() == x.tobytes(), array
    files = [*(tmp_path / "3").glob("model*")]
    assert publication.failure is None and publication.version == 3
    assert publication.bytes == sum(file.stat().st_size for file in files)


def test_only_what_trains_is_published(tmp_path):
    for name, wanted in {
        "adapters": r"layers/\d/(q|mlp/down)/lora_[ab]",
        "frozen": r"layers/\d/(q|k|v|out|mlp/(gate|up|down))/kernel",
    }.items():
        network, params, _ = cases.policy(name)
        publish(tmp_path / name, params, 0, network)
        names = published(tmp_path / name / "0")
        assert names and all(re.fullmatch(wanted, each) for each in names)
        assert len(names) == len(flatten_dict(params))


def test_matrices_that_a_sampler_rounds_keep_the_trainers_type(tmp_path):
    network, params, _ = cases.policy("int8")
    publish(tmp_path, params, 0, network, int8=True)
    for name, x in published(tmp_path / "0").items():
        exact = name.endswith(("kernel", "scale"))
        assert x.dtype == (np.float32 if exact else ml_dtypes.bfloat16)


def test_the_manifest_says_what_is_there(tmp_path):
    network, params, _ = cases.policy("stacked")
    publication = publish(tmp_path, params, 7, network)
    manifest = json.loads((tmp_path / "7" / "manifest.json").read_text())["manifest"]
    assert manifest["version"] == 7
    assert manifest["arrays"]["layers/2/q/kernel"] == "bfloat16[16,32]"
    assert manifest["arrays"]["norm/scale"] == "float32[16]"
    there = {file.name for file in (tmp_path / "7").iterdir()}
    assert there == {"manifest.json", *manifest["files"]}
    for name, file in manifest["files"].items():
        content = (tmp_path / "7" / name).read_bytes()
        assert file == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    text = json.dumps(manifest, sort_keys=True)
    assert publication.identity == hashlib.sha256(text.encode()).hexdigest()


def test_files_are_bounded_and_large_arrays_are_cut_into_rows(tmp_path):
    network, params, _ = cases.policy("stacked")
    publish(tmp_path, params, 0, network, file_bytes=600)
    files, joined = sorted((tmp_path / "0").glob("*.safetensors")), {}
    assert len(files) > 10
    for file in files:
        tensors = load_file(file)
        assert sum(x.nbytes for x in tensors.values()) <= 600
        for name, x in tensors.items():
            whole, _, first = name.partition("[")
            joined.setdefault(whole, []).append((int(first.partition(":")[0] or 0), x))
    for name, x in expected(params, layers=3).items():
        rows = [part for _, part in sorted(joined[name], key=lambda part: part[0])]
        assert np.concatenate(rows).tobytes() == x.tobytes()
    assert len(joined["embedding"]) == 2 and len(joined["norm/scale"]) == 1


def test_the_newest_two_stay(tmp_path):
    network, params, _ = cases.policy("bfloat16")
    assert newest_version(tmp_path / "none") is None
    for version in (0, 1, 2, 11):
        publish(tmp_path, params, version, network)
        assert newest_version(tmp_path) == version
    assert versions(tmp_path) == [2, 11]
    assert {path.name for path in tmp_path.iterdir()} == {"2", "11"}


def test_a_run_that_goes_on_from_an_older_checkpoint_takes_newer_versions_back(tmp_path):
    network, params, _ = cases.policy("bfloat16")
    first = [publish(tmp_path, params, version, network) for version in (3, 4, 5)]
    again = publish(tmp_path, params, 4, network)
    assert again.identity == first[1].identity and versions(tmp_path) == [4]
    others = jax.tree.map(lambda x: x + 1, params)
    changed = publish(tmp_path, others, 4, network)
    assert changed.identity != first[1].identity and versions(tmp_path) == [4]
    found = published(tmp_path / "4")["norm/scale"]
    assert found.tobytes() == np.asarray(others["norm"]["scale"]).tobytes()


def test_the_same_bytes_published_again_replace_a_damaged_version(tmp_path):
    network, params, _ = cases.policy("bfloat16")
    publish(tmp_path, params, 0, network)
    file = tmp_path / "0" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    publish(tmp_path, params, 0, network)
    with checked_version(tmp_path / "0"):
        pass


def test_no_room_is_one_sentence_and_the_older_version_stays(tmp_path, caplog):
    network, params, _ = cases.policy("bfloat16")
    publish(tmp_path, params, 1, network)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        failed = publish(tmp_path, params, 2, network)
        nothing = publish(tmp_path / "new", params, 2, network)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    sentence = f"version 2 could not be published in {tmp_path}: File too large; samplers go on"
    assert failed.failure == f"{sentence} with 1." and failed.bytes == 0
    assert nothing.failure.endswith("File too large; there is no other for samplers.")
    assert [record.message for record in caplog.records] == [failed.failure, nothing.failure]
    assert {path.name for path in tmp_path.iterdir()} == {"1", "new"}
    with checked_version(tmp_path / "1"):
        pass
    assert publish(tmp_path, params, 2, network).failure is None


@pytest.fixture
def faults(tmp_path):
    (tmp_path / "weights").mkdir()
    return FaultFs(tmp_path / "faults", tmp_path / "weights")


def run(program, faults):
    command = [sys.executable, SUPPORT / program, str(faults.root)]
    done = loaded_python.run(command, env=environment(4) | faults.environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_failure_of_any_call_leaves_a_whole_version(faults):
    outcomes = run("publish_faults_process.py", faults)
    failed = [each for each in outcomes if each["failure"]]
    assert len(outcomes) > 20 and len(failed) > 10
    for each in outcomes:
        wanted = each["before"] if each["failure"] else each["published"]
        assert each["newest"] == wanted and each["whole"], each
        assert not each["failure"] or "No space left on device" in each["failure"]


def test_a_trainer_killed_at_any_call_leaves_a_whole_version(faults):
    outcomes = run("publish_killed_process.py", faults)
    assert len(outcomes) > 20
    assert {each["killed"] for each in outcomes[:-1]} == {True} and not outcomes[-1]["killed"]
    new = [each["newest"] == each["published"] for each in outcomes]
    assert new == sorted(new) and new[-1] and not new[0]  # from one call on
    for each in outcomes:
        assert each["newest"] in (each["published"], each["before"]) and each["whole"]
        assert each["left"] <= 1  # what is unfinished


# In a process of its own; /proc's peak is set back first, since importing leaves a high one.
MEASURE = """
import pathlib, sys
import jax, jax.numpy as jnp
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.network import abstract_network
from seeupo_jax.rollout.weights.publishing import publish
from seeupo_jax.rollout.weights.reading import read_version

def resident(kind):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024

def measured(action):
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    made = action()
    return made, resident("VmHWM") - before

arch = Architecture(vocab_size=200_000, width=256, layers=1, heads=1, kv_heads=1, head_dim=8,
                    mlp_width=8, dtype="bfloat16", tied=False)
network, shapes = abstract_network(arch)
params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
folder, file_bytes = pathlib.Path(sys.argv[1]), 2**24
publish(folder, params, 0, network, file_bytes=file_bytes)  # whatever the first one needs
read_version(folder / "0", network, params, None)
_, published = measured(lambda: publish(folder, params, 1, network, file_bytes=file_bytes))
found, read = measured(lambda: read_version(folder / "1", network, params, None))
held = sum(x.nbytes for x in jax.tree.leaves(found.params))
print(published / file_bytes, (read - held) / file_bytes, held / file_bytes)
"""


@pytest.mark.exhaustive
def test_the_host_holds_little_more_than_a_file(tmp_path):
    (tmp_path / "measure.py").write_text(MEASURE)
    command = [sys.executable, tmp_path / "measure.py", str(tmp_path / "weights")]
    done = loaded_python.run(command, env=environment())
    assert done.returncode == 0, done.stderr
    publishing, reading, policy = map(float, done.stdout.split())
    assert publishing < 3 and reading < 3 and policy > 12  # files
