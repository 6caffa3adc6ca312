"""`model.remat=auto`: as little is computed again as the memory of a device allows."""

import dataclasses

import jax
import pytest

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.parallel.device_memory import GIB
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.planning import remat
from seeupo_jax.planning.remat import RematPlan, choose_remat, plan_remat

MODEL = {"vocab_size": 256, "width": 64, "layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 16}


def config_of(*, scan_layers=True, rows=8, length=128, **others):
    model = MODEL | {"mlp_width": 192, "scan_layers": scan_layers}
    rollout = {"tasks": 8, "group_size": 8, "max_context": length}
    parts = {"batching": {"microbatch_tokens": rows * length}, "rollout": rollout, "model": model}
    return from_dict(parts | {"warm_start": {"stages": [{}]}} | others)


@pytest.fixture(scope="module")
def one():
    """A mesh of one device."""
    return make_mesh(config_of().mesh, jax.devices()[:1])


def test_the_least_recomputation_that_fits_is_chosen(one):
    plan = plan_remat(config_of(), one, None)
    needed = {name: plan.needed(name) for name in ("none", "dots", "full")}
    assert needed["none"] > needed["dots"] > needed["full"] > plan.standing
    # On CPU half of the memory is for the step.
    for name in needed:
        config, found = choose_remat(config_of(), one, memory_bytes=2 * needed[name])
        assert (config.model.remat, found.selected) == (name, name)
    less, found = choose_remat(config_of(), one, memory_bytes=2 * needed["full"] - 2)
    assert less.model.remat == "full" and "more than available" in str(found)


def test_the_choice_is_told_in_a_sentence():
    plan = RematPlan(GIB, {"none": 4 * GIB, "dots": 2 * GIB, "full": GIB // 2}, 4 * GIB)
    assert str(plan) == (
        "remat: dots (model.remat=auto): about 3 GiB of 4 GiB per device for a step, 2 GiB of it"
        " activations; none needs 5 GiB"
    )
    assert "none (model.remat=auto): about 5 GiB" in str(dataclasses.replace(plan, allowed=5 * GIB))
    unknown = dataclasses.replace(plan, allowed=None)
    assert unknown.selected == "none" and "not known" in str(unknown)


@pytest.mark.parametrize("scan_layers, last", [(True, "full"), (False, "none")])
def test_what_recomputes_nothing_more_there_is_counted_as_what_it_comes_to(one, scan_layers, last):
    plan = plan_remat(config_of(scan_layers=scan_layers), one, None)
    assert plan.same_as("attention") == last  # no kernel of a CPU names what it gives
    assert plan.needed("attention") == plan.needed(last)
    assert plan.same_as("none") == "none"


@pytest.mark.parametrize("name", ["none", "dots", "attention", "full"])
def test_what_was_chosen_by_hand_stays(one, name):
    model = MODEL | {"mlp_width": 192, "remat": name}
    config = config_of(model=model)
    assert choose_remat(config, one, memory_bytes=1) == (config, None)


def test_nothing_else_of_the_configuration_changes(one):
    config = config_of()
    planned, _ = choose_remat(config, one, memory_bytes=64 * GIB)
    model = dataclasses.replace(config.model, remat="none")
    assert config.model.remat == "auto" and planned == dataclasses.replace(config, model=model)


def test_a_cpu_computes_nothing_again_where_layers_are_not_scanned(one):
    config, plan = choose_remat(config_of(scan_layers=False), one, memory_bytes=1)
    assert config.model.remat == "none" and [*plan.activations] == ["none"]


def test_parameters_that_devices_share_are_counted_once():
    config = config_of()
    meshes = [config_of(mesh=sizes).mesh for sizes in ({"data": 8}, {"data": 1, "fsdp": 8})]
    sharded, cut = (plan_remat(config, make_mesh(mesh), None) for mesh in meshes)
    alone = plan_remat(config, make_mesh(config.mesh, jax.devices()[:1]), None)
    assert sharded.standing == alone.standing and cut.standing < alone.standing / 4
    assert sharded.activations == cut.activations == alone.activations  # each has its own rows


def test_what_does_not_train_has_no_gradient(one):
    plain = plan_remat(config_of(), one, None)
    params = 4 * 6 * (64 * (64 + 32 + 32 + 64 + 3 * 192) + 2 * 64 + 2 * 16) + 4 * (256 + 1) * 64
    # Parameters, those of the reference, Adam's two moments, two trees of gradients; two counters
    # of the state and one of Adam's.
    assert 0 <= plain.standing - 6 * params <= 64
    critic = plan_remat(
        config_of(algorithm={"critic": {"kind": "model"}, "advantage": "gae"}), one, None
    )
    assert critic.activations["full"] == 2 * plain.activations["full"]


def test_processes_choose_alike_and_by_what_there_is_not_by_what_is_free(one, monkeypatch):
    plan = plan_remat(config_of(), one, None)
    memory = 2 * plan.needed("none")
    monkeypatch.setattr(remat, "total_memory", lambda device: memory)
    assert choose_remat(config_of(), one)[0].model.remat == "none"
    monkeypatch.setattr(remat, "gather", lambda own: [own, own - 2])  # another has less
    assert choose_remat(config_of(), one)[0].model.remat == "dots"
    monkeypatch.setattr(remat, "gather", lambda own: [own, 0])  # another does not know
    assert choose_remat(config_of(), one)[1].allowed is None
