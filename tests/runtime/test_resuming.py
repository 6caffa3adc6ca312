"""What a run that resumes must not do to the work of the one before it."""

import json
import re

import pytest

from seeupo_jax.configuration.loading import from_dict, load_config, to_dict
from seeupo_jax.runtime.resuming import check_same_sweep

FADING = ("optimizer.schedule=linear", "iterations=30")


def as_saved(config):
    return json.loads(json.dumps(to_dict(config)))


@pytest.mark.parametrize(
    ("begun", "resumed", "field"),
    [
        ((), ("algorithm.order=forward",), "algorithm.order: got 'forward'; allowed: 'reverse'"),
        ((), ("recipe=grpo",), "algorithm."),
        ((), ("algorithm.tis_clip=2",), "algorithm.tis_clip: got 2.0; allowed: None"),
        (("optimizer.learning_rate=0.5",), (), "optimizer.learning_rate: got "),
        (FADING, (*FADING, "iterations=60"), "iterations: got 60; allowed: 30"),
        (FADING, FADING, None),
        ((), ("iterations=90",), None),  # at the same rate
        ((), ("checkpoint.every=1", "evaluation.k=2", "batching.buckets=(256,)"), None),
    ],
)
def test_a_stopped_sweep_ends_by_the_rule_that_it_began_with(begun, resumed, field):
    config, saved = load_config({}, resumed), as_saved(load_config({}, begun))
    if field is None:
        return check_same_sweep(config, 7, saved, "runs/x/stopped")
    with pytest.raises(ValueError, match=f"^config.{re.escape(field)}.* iteration 7.* runs/x/stop"):
        check_same_sweep(config, 7, saved, "runs/x/stopped")


def test_a_sweep_that_an_earlier_version_stopped_had_the_default_of_a_field_that_is_new():
    saved = as_saved(from_dict({}))
    del saved["algorithm"]["tis_clip"]
    check_same_sweep(from_dict({}), 7, saved, "stopped")
    with pytest.raises(ValueError, match="^config.algorithm.tis_clip: got 2.0; allowed: None"):
        check_same_sweep(from_dict({"algorithm": {"tis_clip": 2}}), 7, saved, "stopped")
