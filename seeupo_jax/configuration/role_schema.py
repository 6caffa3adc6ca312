"""`config.roles`: who plays each role of an episode, and which of them are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.fields import path_field
from seeupo_jax.configuration.user_code import NAMES, is_name
from seeupo_jax.options import checked

# Inputs of estimators that are of whole episodes, or of rewards by name.
_OF_EPISODES = (
    *("gain_NK", "implicit_NK", "progress_NL", "node_NK", "rewards_NQ", "reward_weight_Q"),
    *("rewards_NKQ", "turn_weight_Q", "running_mean_Q", "running_std_Q"),
)
POLICY = "policy"  # what turns without a role are called in metrics, and by agents


@dataclass(frozen=True)
class Role:
    """A role of an episode; the policy plays it and learns from it, unless it is frozen."""

    name: str | None = checked(None, NAMES, is_name)
    """Its name, as environments and calls of agents give it."""
    path: str | None = path_field()
    """A model folder whose policy plays it, and is not trained; it has the policy's tokenizer."""
    server: str | None = checked(
        None, "http://... or https://...", lambda value: value.startswith(("http://", "https://"))
    )
    """A server (vLLM, sglang) whose model plays it, and is not trained."""
    model: str | None = checked(None, "a name", bool)
    """The name of the server's model; none: the only one."""

    @property
    def frozen(self) -> bool:
        """Whether it is played by a policy that is not trained."""
        return self.path is not None or self.server is not None


def trained_roles(roles: Sequence[Role]) -> tuple[str, ...]:
    """The roles that advantages are apart for: `""`, of turns without a role, and the trained ones.

    Empty where no role is trained by its name.
    """
    names = policy_roles(roles)
    return ("", *names) if names else ()


def policy_roles(roles: Sequence[Role]) -> tuple[str, ...]:
    """The names of the roles that the policy plays."""
    return tuple(str(role.name) for role in roles if not role.frozen)


def frozen_roles(roles: Sequence[Role]) -> frozenset[str]:
    """The names of the roles that are not trained."""
    return frozenset(str(role.name) for role in roles if role.frozen)


def role_names(roles: Sequence[Role]) -> tuple[str, ...]:
    """The names of all roles."""
    return tuple(str(role.name) for role in roles)


def check_roles(roles: Sequence[Role], algorithm: Algorithm) -> None:
    """Checks the roles, and that the algorithm knows them.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    names: set[str] = set()
    for number, role in enumerate(roles):
        field = f"config.roles[{number}]"
        if role.name is None or role.name in names:
            got = "no name" if role.name is None else f"{role.name!r}, which an earlier role has"
            raise ValueError(f"{field}.name: got {got}; allowed: a name of its own.")
        if role.name == POLICY:
            raise ValueError(
                f"{field}.name: got {POLICY!r}; allowed: another name, since calls and turns that"
                " name no role are the policy's."
            )
        names.add(role.name)
        if role.path is not None and role.server is not None:
            raise ValueError(
                f"{field}.server: got {role.server!r} with path={role.path!r}; allowed: one of the"
                " two."
            )
        if role.model is not None and role.server is None:
            raise ValueError(f"{field}.model: got {role.model!r} without a server; allowed: none.")
    if roles:
        _check_algorithm(algorithm, bool(trained_roles(roles)))


def _check_algorithm(algorithm: Algorithm, several: bool) -> None:
    if algorithm.forks.kind != "none":
        raise ValueError(
            f"config.algorithm.forks.kind: got {algorithm.forks.kind} with config.roles; allowed:"
            " none, since only an episode of one conversation can branch."
        )
    if algorithm.router_replay == "rollout":
        raise ValueError(
            "config.algorithm.router_replay: got 'rollout' with config.roles; allowed: none or old,"
            " since a frozen role's experts are another policy's."
        )
    unread = [name for name in algorithm.estimator_entry.needs if name in _OF_EPISODES]
    if several and unread:
        raise ValueError(
            f"config.algorithm.advantage: got {algorithm.advantage} with trained roles in"
            f" config.roles; allowed: an estimator without {', '.join(unread)}, which is not of one"
            " role."
        )
