"""Options of importance weights."""

from __future__ import annotations

from dataclasses import dataclass

from seeupo_jax.options import Group, Setting, checked, choice, refused, required


@dataclass(frozen=True)
class Importance(Group):
    """Options of importance weights."""

    clip: float = required("a number > 0 and <= 1000", lambda value: 0 < value <= 1000)
    """The largest weight, or the upper end of the range of quotients that are accepted."""
    level: str = choice("sequence", "geometric")
    """The quotient of several tokens: of the probabilities of all, or their geometric mean."""
    method: str = choice("truncate", "mask", "reject")
    """truncate: the weight is the quotient, at most `clip`. mask, reject: tokens whose quotient is
    outside [low, clip] are not learned from; others weigh by it (mask) or weigh 1 (reject)."""
    per: str = choice("action", "token", "turn", "trajectory")
    """The tokens that have one quotient; action: those with one ratio, with ratio=token each."""
    low: float | None = checked(None, "a number > 0 and <= 1000, or none", lambda x: 0 < x <= 1000)
    """With mask and reject, the lower end of the range; none: it has none."""

    def check(self, setting: Setting) -> None:
        ratio = setting.algorithm.ratio
        if self.unit(ratio) == "token" and self.level != Importance.level:
            given = "ratio=token" if self.per == "action" else "per=token"
            raise refused(
                "importance.level",
                f"{self.level} with {given}, which does not read it",
                f"{Importance.level}, unless per=turn, per=trajectory or an action has one ratio",
            )
        if self.low is None:
            return
        if self.method == "truncate":
            raise refused(
                "importance.low",
                f"{self.low} with method=truncate, which does not read it",
                "none, unless method=mask or method=reject",
            )
        if self.low >= self.clip:
            raise refused("importance.low", self.low, f"a number below clip={self.clip}")

    def unit(self, ratio: str) -> str:
        """`token`, `turn`, `action` or `trajectory`: what has one quotient, for these ratios."""
        return "token" if (self.per, ratio) == ("action", "token") else self.per
