"""Roles of environments in other processes and in mixtures are those of the environment itself."""

import json

import pytest

from seeupo_jax import envs
from seeupo_jax.envs.base import StepResult
from seeupo_jax.envs.kuhn_poker.environment import KuhnPoker
from seeupo_jax.envs.transport import remote_calls
from seeupo_jax.envs.transport.isolated import IsolatedEnvironment
from seeupo_jax.envs.validation import ProtocolError, check_step, first_role

MOVES = ("pass", "bet", "pass")


def played(environment, task="train/KQ"):
    """The role that begins, and each step's."""
    environment.reset(task, 0, episode_seed=1)
    return [first_role(environment), *map(environment.step, MOVES)]


def test_in_a_process_of_its_own():
    environment = IsolatedEnvironment("kuhn_poker", {})
    try:
        assert played(environment) == played(KuhnPoker())
    finally:
        environment.close()


def test_over_the_wire():
    """As JSON; older clients read neither, and older servers send neither."""
    environment = KuhnPoker()
    assert remote_calls.reset(environment, "train/KQ", 0)["role"] == "player_1"
    for text, wanted in zip(MOVES, played(KuhnPoker())[1:], strict=True):
        sent = json.loads(json.dumps(remote_calls.step(environment, text)))
        assert remote_calls.read_step(sent) == wanted
        old = {name: sent[name] for name in remote_calls.STEP}
        assert remote_calls.read_step(old).role == ""


def test_in_a_mixture_which_names_the_environment_that_baselines_are_of():
    parts = [{"name": "kuhn_poker"}, {"name": "order_desk"}]
    mixture = envs.make("mixture", environments=parts)
    *steps, last = played(mixture, "kuhn_poker:train/KQ")
    *wanted, end = played(KuhnPoker())
    assert steps == wanted and last.role_rewards == end.role_rewards
    assert last.info == {"env": "kuhn_poker", **end.info}
    mixture.reset("order_desk:train/3", 0)
    assert first_role(mixture) == ""


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"role": "c"}, "step.. role: got 'c' .*, or a name of config.roles: a, b"),
        ({"role": 3}, "step.. role: got 3"),
        ({"role_rewards": {"c": 1.0}}, "step.. role_rewards: got 'c' "),
        ({"role_rewards": [1.0]}, "step.. role_rewards: got .* numbers by role"),
        ({"role_rewards": {"a": float("nan")}}, r"role_rewards\['a'\]: got nan"),
        ({"role_rewards": {"a": 9.0}}, r"role_rewards\['a'\]: got 9.*magnitude at most 8"),
    ],
)
def test_what_is_no_role_is_refused(fields, said):
    with pytest.raises(ProtocolError, match=said):
        check_step(StepResult((), 0.0, True, **fields), max_reward=8.0, roles=("a", "b"))
