"""The policy of a warm start is also kept where the configuration says, once."""

import json
import math

import jax.numpy as jnp
import pytest

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.configuration.supervised_schema import WarmStartStage
from seeupo_jax.policy_io.resuming import warm_start_note
from seeupo_jax.supervised.warm_starting import (
    BLOCK,
    _keep_output,
    stage_batches,
    stage_optimizer,
    start_policy,
)


@pytest.mark.parametrize("written", ["new", "new/", "far/new", "empty", "link", "other"])
def test_the_output_gets_the_policy_where_it_has_none(tmp_path, monkeypatch, written):
    monkeypatch.chdir(tmp_path)
    for name in ("warm", "empty", "other", "linked"):
        (tmp_path / name).mkdir()
    for name in ("config.json", "warm_start.json"):
        (tmp_path / "warm" / name).write_text("warm")
    (tmp_path / "other" / "config.json").write_text("another")
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    config = from_dict({"warm_start": {"stages": [{"steps": 2}], "output": written}})
    for _ in range(2):
        _keep_output(config, str(tmp_path / "warm"))
    text = (tmp_path / written / "config.json").read_text()
    assert text == ("another" if written == "other" else "warm")
    assert [path.name for path in (tmp_path / written).iterdir()] == ["config.json"]
    assert not list(tmp_path.rglob("*.unfinished")) and (tmp_path / "link").is_symlink()


def test_a_run_starts_from_its_own_warm_start_only(tmp_path):
    config, other = (from_dict({"seed": n, "warm_start": {"stages": [{}]}}) for n in (0, 1))
    folder = tmp_path / "warm_start"
    folder.mkdir()
    (folder / "warm_start.json").write_text(json.dumps(warm_start_note(config)))
    assert start_policy(config, tmp_path, None, None) == str(folder)
    with pytest.raises(ValueError, match="^config.seed: got 1; allowed for this workdir"):
        start_policy(other, tmp_path, None, None)


def test_a_stage_is_adamw_whose_rate_rises_for_a_tenth_and_falls_to_a_twentieth():
    """By hand: under a constant gradient of 1 a step is the rate times 1 and the decay's 0.01 w."""
    optimizer, weight = stage_optimizer(WarmStartStage(20, 0.02, {})), 5.0
    params, gradient = jnp.float32(weight), jnp.float32(1.0)
    state, steps = optimizer.init(params), []
    for _ in range(21):
        update, state = optimizer.update(gradient, state, params)
        steps.append(-float(update) / (1 + 0.01 * weight))
    fall = [0.05 + 0.95 * (1 + math.cos(math.pi * i / 18)) / 2 for i in range(19)]
    assert steps == pytest.approx([0.02 * share for share in (0, 0.5, *fall)], rel=1e-4)


def test_a_stage_has_an_order_of_its_own():
    config = from_dict({"seed": 5, "warm_start": {"batch_size": 4, "stages": [{}, {}]}})
    batches = [stage_batches(config, index, (), None) for index in range(2)]
    assert [each.seed for each in batches] == [5, 6]
    assert {(each.batch_size, each.block) for each in batches} == {(4, BLOCK)}
