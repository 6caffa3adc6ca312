"""Adapters per turn and the options that know one policy for all turns."""

import pytest

from seeupo_jax.configuration.loading import from_dict

TURNS = {"model": {"path": "some/model"}, "lora": {"rank": 4, "per_turn": 3}}


def given(**changes):
    lora = TURNS["lora"] | changes.pop("lora", {})
    return from_dict({**TURNS, "lora": lora, **changes})


@pytest.mark.parametrize("recipe", ["seeupo", "seeupo_forward", "parallel", "grpo", "gspo"])
def test_recipes_of_one_policy_take_them(recipe):
    assert given(recipe=recipe).lora.turn_adapters == 3


@pytest.mark.parametrize("number, adapters", [(0, 0), (1, 0), (2, 2), (64, 64)])
def test_one_adapter_is_one_for_all_turns(number, adapters):
    assert given(lora={"per_turn": number}).lora.turn_adapters == adapters


def test_they_need_adapters():
    with pytest.raises(ValueError, match=r"^config\.lora\.per_turn: got 3 without adapters"):
        from_dict({"lora": {"per_turn": 3}})
    with pytest.raises(ValueError, match=r"^config\.lora\.per_turn: got 65; allowed: .* 0 .* 64"):
        given(lora={"per_turn": 65})


REFUSED = [
    ("lora.merge", {"lora": {"merge": True}}, "got True .*: False, since each turn has one"),
    ("algorithm.refresh", {"algorithm": {"refresh": "fused"}}, "got 'fused' .*: auto or separate"),
    ("algorithm.moments", {"algorithm": {"moments": "turn"}}, "got 'turn' .*: shared, since"),
    ("algorithm.critic.kind", {"recipe": "ppo"}, "got 'head' .*: none, since a value function"),
    ("algorithm.advantage", {"recipe": "istar"}, "got 'istar' .*: an estimator that neither"),
    ("algorithm.router_replay", {"algorithm": {"router_replay": "old"}}, "got 'old' .*: none"),
    ("algorithm.forks.kind", {"recipe": "spo_tree"}, "got 'tree' .*: none"),
    ("optimizer.warmup_steps", {"optimizer": {"warmup_steps": 2}}, "got 2 .*: 0, since each"),
    ("offload.optimizer", {"offload": {"optimizer": True}}, "got True .*: False"),
    ("teacher", {"teacher": {"path": "reference"}}, "got .*reference.*: none"),
    ("roles", {"roles": ({"name": "user", "path": "one"},)}, "got .'user'.*: none, since the"),
    ("agent", {"agent": {"command": "run it"}}, "got 'run it' .*: none, since an agent's"),
    ("rollout.devices", {"rollout": {"devices": 1}}, "got 1 .*: 0"),
    ("rollout.port", {"rollout": {"port": 0}}, "got 0 .*: none"),
]


@pytest.mark.parametrize("field, changes, says", REFUSED, ids=[field for field, *_ in REFUSED])
def test_what_does_not_go_with_them_is_refused_by_name(field, changes, says):
    name = field.replace(".", r"\.")
    with pytest.raises(
        ValueError,
        match=rf"^config\.{name}: {says.replace(' .*:', ' with lora.per_turn=3; allowed:', 1)}",
    ):
        given(**changes)
    without = {**changes, "lora": {**changes.get("lora", {}), "per_turn": 1}}
    assert given(**without).lora.turn_adapters == 0


def test_servers_that_sample_are_refused():
    servers = {"engine": "openai", "servers": ("http://127.0.0.1:1",)}
    with pytest.raises(
        ValueError, match=r"^config\.rollout\.engine: got 'openai' with lora\.per_t"
    ):
        given(rollout=servers)
