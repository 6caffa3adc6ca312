"""What is another run, or another evaluation, than the one that was begun."""

import dataclasses

import pytest

from seeupo_jax.configuration.loading import from_dict, to_dict
from seeupo_jax.runtime.checks import check_same_run, made_by
from seeupo_jax.runtime.evaluation_run import episodes_name, evaluation_settings


def test_a_run_that_is_resumed_with_another_models_path_is_warned(caplog):
    saved = to_dict(from_dict({"model": {"path": "first/policy"}}))
    check_same_run(from_dict({"model": {"path": "first/policy"}}), saved)
    assert not caplog.records
    check_same_run(from_dict({"model": {"path": "second"}}), saved)
    (record,) = caplog.records
    assert "got second; this workdir's checkpoint began with first/policy" in record.getMessage()


@pytest.mark.parametrize("layout", [{"remat": "full"}, {"attention": "xla"}, {"scan_layers": True}])
def test_stored_rollouts_are_of_a_model_in_any_layout(layout):
    made = made_by(from_dict({}))
    assert made_by(from_dict({"model": layout})) == made
    assert made_by(from_dict({"model": {"dtype": "bfloat16"}})) != made


def test_episodes_that_were_sampled_in_int8_are_of_another_evaluation():
    config = from_dict({})
    int8 = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, quantize="int8"))
    plain, coarse = (evaluation_settings(each, "test", 4, {}) for each in (config, int8))
    assert coarse == plain | {"config.rollout.quantize": "int8"}
    name = episodes_name(coarse | {"iteration": 30})
    assert name == "test-k4-temperature1.0-iteration30-int8.jsonl"
    server = {"server": "http://localhost:1", "model": "x"}
    assert evaluation_settings(int8, "test", 4, server) == plain | server
