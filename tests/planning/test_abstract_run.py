"""A run with shapes in place of arrays, where devices say what memory they have free."""

import jax
import pytest
from places import CONFIGS

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.planning import abstract_run as module
from seeupo_jax.planning.abstract_run import abstract_run


def test_the_cache_has_what_the_state_that_is_not_allocated_would_leave(monkeypatch):
    """Parameters, AdamW's two moments and a reference policy: four trees, and two counts."""
    config = load_config(CONFIGS / "quickstart.py", ["algorithm.kl_coef=0.1"])
    mesh = make_mesh(schema.Mesh(), jax.devices()[:1])
    run = abstract_run(config, mesh)
    trees = 4 * 4 * sum(leaf.size for leaf in jax.tree.leaves(run.state.params))
    needed = run.engine.plan.bytes + trees // jax.local_device_count()  # which share the host's
    monkeypatch.setattr(module, "free_memory", lambda device: needed - 1)
    with pytest.raises(ValueError, match="rollout.cache_gib: got .* that are free"):
        abstract_run(config, mesh)
    monkeypatch.setattr(module, "free_memory", lambda device: needed + 64)  # and its counts
    assert abstract_run(config, mesh).engine.plan.bytes == run.engine.plan.bytes
    monkeypatch.setattr(
        module, "free_memory", lambda device: None
    )  # as of a slice that is not here
    assert abstract_run(config, mesh).parts == run.parts
