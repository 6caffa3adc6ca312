"""The workloads by name: the real order desk, and lengths of three kinds filled with random tokens.

Members of a group differ. `order_desk` has what its demonstrator does in several tries. Elsewhere
every member's tokens are its own; each of its actions is between 3/4 and 5/4 as long as the
lengths say; and with a chance of a quarter it ends early, after a turn that any but the last is
equally likely to be. All of it is decided by the seed.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from seeupo_jax.bench.settings import Settings
from seeupo_jax.bench.workload import Conversation, Tokens, Workload
from seeupo_jax.envs.order_desk.demonstrator import demonstrate
from seeupo_jax.learner.warm_start import to_segments
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.types import Segment

ORDER_DESK = "package:order_desk"  # whose tokenizer and chat options `order_desk` counts with
SKILL = 0.4  # of its demonstrator, whose slips make the members of a group differ
BFCL_FILE = "assets/bench/bfcl_lengths.json"
STOPS_EARLY = 0.25
SHORTER, LONGER = 0.75, 1.25  # of an action's length, a member's own


@dataclass(frozen=True)
class Lengths:
    """Of a conversation, in tokens; as many observations as actions but one."""

    prompt: int
    actions: tuple[int, ...]
    observations: tuple[int, ...]

    def scaled(self, scale: float) -> Lengths:
        """Every length times `scale`, and 1 at least."""
        each = lambda lengths: tuple(max(1, round(scale * n)) for n in lengths)  # noqa: E731
        return Lengths(*each([self.prompt]), each(self.actions), each(self.observations))

    def of_turns(self, turns: int) -> Lengths:
        """Cut to so many turns, or gone through from the beginning again until there are as many.

        What stands between two rounds is as long as the first observation (or action).
        """
        between = (*self.observations, *(self.observations or self.actions)[:1])
        rounds = -(-turns // len(self.actions))
        return Lengths(
            self.prompt, (self.actions * rounds)[:turns], (between * rounds)[: turns - 1]
        )


# The parts that the facts give: contexts of 16,000 tokens of which 13,000 are the prompt's. How the
# rest comes to at most ten turns is a choice: 100 tokens of code and 200 of output each.
APPWORLD = Lengths(13_000, (100,) * 10, (200,) * 9)
LONG = Lengths(256, (48,) * 16, (96,) * 15)
# What a workload is scaled by unless it is told: a CPU has done a sweep in seconds then.
SCALES = {"bfcl": 0.125, "appworld": 0.05, "long": 0.5}


def make(settings: Settings, vocab_size: int) -> Workload:
    """The workload that the settings name.

    Args:
      vocab_size: of the model.

    Raises:
      ValueError: an unknown name; a size that this workload has of its own; a vocabulary that is
        too small.
    """
    if settings.workload not in WORKLOADS:
        allowed = ", ".join(WORKLOADS)
        raise ValueError(f"--workload: got {settings.workload!r}; allowed: {allowed}.")
    made = WORKLOADS[settings.workload](settings, vocab_size)
    if made.vocab_size > vocab_size:
        raise ValueError(
            f"--model: got a vocabulary of {vocab_size}; allowed with --workload={made.name}: at"
            f" least {made.vocab_size}."
        )
    return made


def fill(
    name: str,
    groups: Sequence[Lengths],
    *,
    group_size: int,
    vocab_size: int,
    seed: int,
    alike: bool = False,
) -> Workload:
    """Conversations of random tokens.

    Args:
      groups: the lengths that the members of each group are made after.
      alike: every member has exactly these lengths.
    """
    rng = np.random.default_rng(seed)

    def text(length: int) -> Tokens:
        return tuple(rng.integers(0, vocab_size, length).tolist())

    def own(lengths: Lengths) -> Lengths:
        factor = 1.0 if alike else rng.uniform(SHORTER, LONGER, len(lengths.actions))
        actions = np.maximum(1, np.rint(factor * np.array(lengths.actions)).astype(int))
        varied = Lengths(lengths.prompt, tuple(actions.tolist()), lengths.observations)
        stops = not alike and len(actions) > 1 and rng.random() < STOPS_EARLY
        return varied.of_turns(int(rng.integers(1, len(actions)))) if stops else varied

    members = [[own(lengths) for _ in range(group_size)] for lengths in groups]
    return Workload(
        name=name,
        prompts=tuple(text(lengths.prompt) for lengths in groups),
        lengths=tuple(tuple(one.actions for one in group) for group in members),
        observations=tuple(
            tuple(tuple(map(text, one.observations)) for one in group) for group in members
        ),
        vocab_size=vocab_size,
    )


def _random(settings: Settings, vocab_size: int, groups: Sequence[Lengths]) -> Workload:
    """Lengths as the settings change them, filled."""
    scale = SCALES[settings.workload] if settings.scale is None else settings.scale
    changed = [lengths.scaled(scale) for lengths in groups]
    if settings.turns is not None:
        changed = [lengths.of_turns(settings.turns) for lengths in changed]
    if settings.prompt is not None:
        changed = [Lengths(settings.prompt, c.actions, c.observations) for c in changed]
    return fill(
        settings.workload,
        changed,
        group_size=settings.group_size,
        vocab_size=vocab_size,
        seed=settings.seed,
    )


def _bfcl(settings: Settings, vocab_size: int) -> Workload:
    """Lengths of real conversations, those of other tasks for every seed."""
    tasks = bfcl_lengths()
    order = np.random.default_rng(settings.seed).permutation(len(tasks))
    return _random(
        settings, vocab_size, [tasks[order[g % len(tasks)]] for g in range(settings.groups)]
    )


def _appworld(settings: Settings, vocab_size: int) -> Workload:
    return _random(settings, vocab_size, [APPWORLD] * settings.groups)


def _long(settings: Settings, vocab_size: int) -> Workload:
    return _random(settings, vocab_size, [LONG] * settings.groups)


@functools.cache
def bfcl_lengths() -> tuple[Lengths, ...]:
    """Of BFCL's multi-turn base tasks that are trained on, as `bench/bfcl_lengths.py` found them.

    An action is all that one model call says: the calls that a user's turn needs, or its closing
    message.
    """
    file = importlib.resources.files("seeupo_jax") / BFCL_FILE
    conversations = json.loads(file.read_text())["conversations"]
    return tuple(Lengths(prompt, tuple(a), tuple(o)) for prompt, a, o in conversations)


def _order_desk(settings: Settings, vocab_size: int) -> Workload:
    for flag in ("scale", "turns", "prompt"):
        if getattr(settings, flag) is not None:
            raise ValueError(
                f"--{flag}: got {getattr(settings, flag)}; allowed with --workload=order_desk:"
                " nothing, its conversations are real."
            )
    return order_desk(settings.groups, group_size=settings.group_size, seed=settings.seed)


def order_desk(groups: int, *, group_size: int = 8, seed: int = 0) -> Workload:
    """Conversations at the real order desk, as its demonstrator has them.

    A group is a case of the training split, a member one try of a demonstrator who slips; tokens
    are those of the policy that ships with the package. Numbers of turns and all lengths differ.

    Args:
      groups, group_size: at least 1.
      seed: of the slips.
    """
    tokenizer = read_tokenizer(ORDER_DESK)
    played = [
        [_play(tokenizer, f"train/{group}", seed * group_size + m) for m in range(group_size)]
        for group in range(groups)
    ]
    return Workload(
        name="order_desk",
        prompts=tuple(members[0].prompt for members in played),
        lengths=tuple(tuple(c.lengths for c in members) for members in played),
        observations=tuple(tuple(c.observations for c in members) for members in played),
        vocab_size=tokenizer.vocab_size,
    )


def _play(tokenizer: Tokenizer, task_id: str, seed: int) -> Conversation:
    demonstration, _ = demonstrate(task_id, skill=SKILL, seed=seed)
    (segment,) = to_segments(demonstration, tokenizer)  # its history is never rewritten
    return cut(segment)


def cut(segment: Segment) -> Conversation:
    """A segment, which ends with an action, as what was given and how much was sampled."""
    changes = np.flatnonzero(np.diff(segment.turn_L)) + 1
    parts = [tuple(part.tolist()) for part in np.split(segment.tokens_L, changes)]
    prompt, *observations = parts[::2]
    return Conversation(prompt, tuple(map(len, parts[1::2])), tuple(observations))


WORKLOADS: dict[str, Callable[[Settings, int], Workload]] = {
    "bfcl": _bfcl,
    "order_desk": _order_desk,
    "appworld": _appworld,
    "long": _long,
}
