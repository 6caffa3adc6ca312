"""The options of importance weights."""

from __future__ import annotations

from dataclasses import dataclass

from seeupo_jax.options import Group, Setting, choice, refused, required

# Level of importance weights -> that of a ratio.
_IMPORTANCE = {"sequence": "product", "geometric": "geometric"}


@dataclass(frozen=True)
class Importance(Group):
    """Options of truncated importance sampling."""

    clip: float = required("a number > 0 and <= 1000", lambda value: 0 < value <= 1000)
    """Surrogates are weighted by trainer / sampler probability, at most this."""
    level: str = choice("sequence", "geometric")
    """The probability of an action: of all its tokens, or their geometric mean. With ratio=token
    each token has its own weight."""

    def check(self, setting: Setting) -> None:
        if setting.algorithm.ratio == "token" and self.level != Importance.level:
            raise refused(
                "importance.level",
                f"{self.level} with ratio=token, which does not read it",
                f"{Importance.level}, unless ratio=geometric or ratio=product",
            )

    def ratio_level(self, ratio: str) -> str:
        """Level of the weights, as that of a ratio, for ratios of this level."""
        return "token" if ratio == "token" else _IMPORTANCE[self.level]
