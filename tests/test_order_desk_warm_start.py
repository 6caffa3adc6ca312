"""The shipped policy: its checksum, its size, and that its command begins as it did."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest
from places import ROOT, SUPPORT

from seeupo_jax.configuration.loading import load_config
from seeupo_jax.envs.order_desk.demonstrator import demonstrate
from seeupo_jax.learner.imitation.action_segments import Tokenized
from seeupo_jax.learner.imitation.imitation_batches import Batches
from seeupo_jax.policy.files.tokenizer import MODEL_FILE
from seeupo_jax.policy.files.weights import resolve_path
from seeupo_jax.runtime import build
from seeupo_jax.runtime.training.warm_starting import train_stage

GOLDEN = json.loads((SUPPORT / "golden" / "order_desk_warm_start.json").read_text())


class Played(Sequence):
    """The dataset's conversations, played when asked for instead of read from a file."""

    def __init__(self, skill: float, episodes: int):
        self._skill, self._episodes = skill, episodes

    def __len__(self) -> int:
        return self._episodes

    def __getitem__(self, index: int):
        if index >= self._episodes:
            raise IndexError(index)
        return demonstrate(f"train/{index}", skill=self._skill)[0]


@pytest.fixture(scope="module")
def config():
    return load_config(ROOT / "configs" / "order_desk_warm_start.py")


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_shipped_policy_is_the_documented_one_and_at_most_four_megabytes():
    folder = resolve_path("package:order_desk")
    files = [file for file in folder.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 4_000_000
    assert digest(folder / "model.safetensors") == GOLDEN["model_sha256"]
    assert GOLDEN["model_sha256"] in (ROOT / "docs" / "order_desk.md").read_text()


def test_the_command_that_made_it_begins_as_it_did(config):
    stages = config.warm_start.stages
    demonstrations = [Played(**stage.demonstrations) for stage in stages]
    policy, params = build.new_policy(config, demonstrations[-1])
    with jax.set_mesh(policy.mesh):
        shipped = resolve_path("package:order_desk") / MODEL_FILE
        assert policy.tokenizer.model == shipped.read_bytes()
        batches = Batches(
            Tokenized(demonstrations[0], policy.tokenizer),
            build.build_shapes(config, policy.mesh, config.warm_start.batch_size),
            config.warm_start.batch_size,
            seed=config.seed,
        )
        losses = []

        def on_step(step, loss):
            losses.append(loss())
            if step == len(GOLDEN["first_losses"]):
                raise StopIteration

        with contextlib.suppress(StopIteration):
            train_stage(config, policy, params, stages[0], batches, on_step=on_step)
    # 1e-4: another processor may add up in another order.
    assert losses == pytest.approx(GOLDEN["first_losses"], rel=1e-4)
