"""Options of limits on tokens whose log-probability and advantage vary most together."""

from __future__ import annotations

from dataclasses import dataclass

from seeupo_jax.options import Group, Setting, above, choice, refused, within


@dataclass(frozen=True)
class NoCovariance(Group):
    """No token is limited."""

    kind: str = choice("none")


@dataclass(frozen=True)
class Covariance(Group):
    """Options of every kind of limit."""

    share: float = above(0, 2e-4, most=1)
    """Share of a step's action tokens that are limited, rounded down, but at least one."""

    def check(self, setting: Setting) -> None:
        algorithm, kind = setting.algorithm, vars(self)["kind"]
        for name, allowed in (
            ("ratio", "token"),  # of a whole action there is one log-probability, and no such token
            ("objective", "clipped"),
            ("old_policy", "iteration"),
        ):
            if (got := vars(algorithm)[name]) != allowed:
                raise refused(
                    "covariance.kind",
                    f"{kind!r} with {name}={got}",
                    f"none unless {name}={allowed}, since it limits the ratios of single tokens to"
                    " the policy that sampled them",
                )


@dataclass(frozen=True)
class ClipCovariance(Covariance):
    """Clip-Cov (arXiv:2505.22617): no gradient at tokens of a large covariance."""

    kind: str = choice("clip")
    low: float = within(-1e6, 1e6, 1.0)
    """Lower bound of the covariance of limited tokens."""
    high: float = within(-1e6, 1e6, 5.0)
    """Upper bound of the covariance of limited tokens."""

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if self.low >= self.high:
            raise refused("covariance.low", f"{self.low:g}", f"a number < high={self.high:g}")


@dataclass(frozen=True)
class KlCovariance(Covariance):
    """KL-Cov (arXiv:2505.22617): a penalty on changes of the tokens of the largest covariance."""

    kind: str = choice("kl")
    coef: float = above(0, 1.0, most=1000)
    """Coefficient of the penalty."""

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if setting.steps == 1 and not setting.ahead:
            raise refused(
                "covariance.kind",
                "'kl' with one optimizer step an iteration",
                "none or clip, unless inner_epochs or minibatches_per_turn is above 1, since the"
                " penalty has no gradient before a step has changed the policy",
            )
