"""Roles of a configuration: which go together, and with which algorithms."""

import pytest

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.configuration.role_schema import frozen_roles, role_names, trained_roles

A, B = {"name": "a"}, {"name": "b"}


def test_which_roles_are_trained():
    frozen = {**B, "path": "somewhere"}
    assert trained_roles(from_dict({"roles": [A, frozen]}).roles) == ("", "a")
    assert frozen_roles(from_dict({"roles": [A, frozen]}).roles) == {"b"}
    assert role_names(from_dict({"roles": [A, frozen]}).roles) == ("a", "b")
    assert trained_roles(from_dict({"roles": [frozen]}).roles) == ()


@pytest.mark.parametrize(
    "roles, said",
    [
        ([{}], r"roles\[0\].name: got no name; allowed: a name of its own"),
        ([A, A], r"roles\[1\].name: got 'a', which an earlier role has"),
        ([{"name": "a b"}], r"name: got 'a b'; allowed: 1 to 64 letters"),
        ([{"name": "policy"}], r"name: got 'policy'; allowed: another name"),
        ([{**A, "path": "x", "server": "http://y"}], r"server: got 'http://y' with path='x'"),
        ([{**A, "model": "m"}], r"model: got 'm' without a server; allowed: none"),
        ([{**A, "server": "y"}], r"server: got 'y'; allowed: http://"),
    ],
)
def test_impossible_roles_are_refused(roles, said):
    with pytest.raises(ValueError, match=rf"^config.*{said}"):
        from_dict({"roles": roles})


@pytest.mark.parametrize(
    "choices, said",
    [
        ({"recipe": "spo_tree"}, "forks.kind: got .* with config.roles; allowed: none"),
        ({"recipe": "gdpo"}, "advantage: got gdpo with trained roles"),
        ({"recipe": "prorl"}, "advantage: got prorl with trained roles"),
        ({"algorithm": {"router_replay": "rollout"}}, "router_replay: got 'rollout'"),
        (
            {"algorithm": {"advantage": "rae", "kl_in": "reward"}},
            "kl_in: got 'reward' with advantage=rae",
        ),
        (
            {"algorithm": {"advantage": "rae", "overlong": {"length": 8}}},
            "overlong: got one with advantage=rae",
        ),
    ],
)
def test_algorithms_that_know_no_roles_are_refused(choices, said):
    with pytest.raises(ValueError, match=said):
        from_dict({"roles": [A, B], **choices})
