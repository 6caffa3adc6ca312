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
from seeupo_jax.policy.files.weights import read_tokenizer, resolve_path
from seeupo_jax.policy_io import build
from seeupo_jax.supervised.warm_starting import BLOCK, train_stage

GOLDEN = {
    name: json.loads((SUPPORT / "golden" / f"{name}_warm_start.json").read_text())
    for name in ("order_desk", "order_desk_level2")
}


class Played(Sequence):
    """The dataset's conversations, played when asked for instead of read from a file."""

    def __init__(self, skill: float, episodes: int, prefix: str = ""):
        self._skill, self._episodes, self._prefix = skill, episodes, prefix

    def __len__(self) -> int:
        return self._episodes

    def __getitem__(self, index: int):
        if index >= self._episodes:
            raise IndexError(index)
        return demonstrate(f"{self._prefix}train/{index}", skill=self._skill)[0]


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", GOLDEN)
def test_the_shipped_policy_is_the_documented_one_and_at_most_four_megabytes(name):
    folder = resolve_path(f"package:{name}")
    files = [file for file in folder.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 4_000_000
    assert digest(folder / "model.safetensors") == GOLDEN[name]["model_sha256"]
    assert GOLDEN[name]["model_sha256"] in (ROOT / "docs" / "order_desk.md").read_text()


def test_the_policy_of_level_2_reads_with_the_tokenizer_of_level_1():
    one, two = (resolve_path(f"package:{name}") for name in GOLDEN)
    for file in (MODEL_FILE, "chat.json"):
        assert (one / file).read_bytes() == (two / file).read_bytes()


def test_conversations_of_level_2_are_short():
    tokenizer = read_tokenizer("package:order_desk_level2")
    shown = Tokenized(Played(skill=0.0, episodes=100, prefix="level2/"), tokenizer)
    lengths = [sum(len(segment.tokens_L) for segment in segments) for segments in shown]
    assert sum(lengths) / len(lengths) < 220 and max(lengths) < 300


def first_losses(name, policy, params, played):
    """Those of the command that made a shipped policy, as many as are stored."""
    config = load_config(ROOT / "configs" / f"{name}_warm_start.py")
    batches = Batches(
        Tokenized(played, policy.tokenizer),
        build.build_shapes(config, policy.mesh, config.warm_start.batch_size),
        config.warm_start.batch_size,
        seed=config.seed,
        block=BLOCK,
    )
    losses = []

    def on_step(step, loss):
        losses.append(loss())
        if step == len(GOLDEN[name]["first_losses"]):
            raise StopIteration

    stage = config.warm_start.stages[0]
    with jax.set_mesh(policy.mesh), contextlib.suppress(StopIteration):
        train_stage(config, policy, params, stage, batches, on_step=on_step)
    return losses


@pytest.mark.exhaustive
def test_the_command_that_made_it_begins_as_it_did():
    config = load_config(ROOT / "configs" / "order_desk_warm_start.py")
    demonstrations = [Played(**stage.demonstrations) for stage in config.warm_start.stages]
    policy, params = build.initial_policy(config, demonstrations[-1])
    shipped = resolve_path("package:order_desk") / MODEL_FILE
    assert policy.tokenizer.model == shipped.read_bytes()
    losses = first_losses("order_desk", policy, params, demonstrations[0])
    # 1e-4: another processor may add up in another order.
    assert losses == pytest.approx(GOLDEN["order_desk"]["first_losses"], rel=1e-4)


@pytest.mark.exhaustive
def test_the_command_that_made_the_policy_of_level_2_begins_as_it_did():
    config = load_config(ROOT / "configs" / "order_desk_level2_warm_start.py")
    policy, params = build.load_policy(config, config.model.path)
    played = Played(**config.warm_start.stages[0].demonstrations, prefix="level2/")
    losses = first_losses("order_desk_level2", policy, params, played)
    assert losses == pytest.approx(GOLDEN["order_desk_level2"]["first_losses"], rel=1e-4)
