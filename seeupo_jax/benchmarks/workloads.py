"""Conversations for measurements by name, and the inputs of both sides of a benchmark.

`order_desk` has episodes that its demonstrator plays with several attempts. The others have lengths
of three kinds, filled with random tokens that differ between a group's members. Each action is
between 3/4 and 5/4 as long as the lengths state; with probability 1/4 a conversation ends early,
after a turn drawn uniformly from all but the last. The seed determines everything.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seeupo_jax.benchmarks import machine
from seeupo_jax.benchmarks.settings import BenchSettings, architecture, write_model
from seeupo_jax.checkpoint.process_sync import on_primary
from seeupo_jax.envs.order_desk.demonstrator import demonstrate
from seeupo_jax.learner.imitation.action_segments import to_segments
from seeupo_jax.parallel.distributed import broadcast_from_primary
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.types import CONTEXT, Segment

ORDER_DESK = "package:order_desk"  # whose tokenizer and chat options `order_desk` counts with
SKILL = 0.4  # of its demonstrator, whose slips make the members of a group differ
BFCL_FILE = "assets/bench/bfcl_lengths.json"
STOPS_EARLY = 0.25
SHORTER, LONGER = 0.75, 1.25  # of an action's length, a member's own
# Large enough for the first sweep to change the weights M and the parameters, which are compared.
# With the usual eps Adam scales a gradient of rounding errors up to the size of any other.
_LEARNING_RATE, _EPS = 1e-3, 1e-3
# Default scale of a workload: a sweep on a CPU then takes seconds.
SCALES = {"bfcl": 0.125, "appworld": 0.05, "long": 0.5}

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class WorkloadConversation:
    """One conversation of a workload: observation t stands between the actions t and t + 1.

    lengths: tokens of each turn's action, at least one turn and one token; every sampler gives an
      action this length, whatever it samples, so that all of them do the same work.
    observations: one fewer than there are turns, none of them empty.

    Raises:
      ValueError: parts whose numbers do not fit together.
    """

    prompt: Tokens
    lengths: tuple[int, ...]
    observations: tuple[Tokens, ...]

    def __post_init__(self) -> None:
        texts = (self.prompt, *self.observations)
        if len(self.lengths) != len(texts) or min(self.lengths) < 1 or not all(texts):
            raise ValueError(
                f"workload: got actions of {self.lengths} tokens and texts of"
                f" {tuple(map(len, texts))}; allowed: as many of each, none of them empty."
            )

    @property
    def tokens(self) -> int:
        """All tokens, those of the last action included."""
        return len(self.prompt) + sum(self.lengths) + sum(map(len, self.observations))


@dataclass(frozen=True)
class Workload:
    """Groups of conversations whose actions are sampled.

    conversations: those of a group side by side; all of a group have its prompt.
    vocab_size: above every token id; the model's may be larger.
    """

    name: str
    conversations: tuple[WorkloadConversation, ...]
    group_size: int
    vocab_size: int

    @property
    def prompts(self) -> tuple[Tokens, ...]:
        """One of each group."""
        return tuple(c.prompt for c in self.conversations[:: self.group_size])

    @property
    def turns(self) -> int:
        """The turns of the conversation that has most."""
        return max(len(c.lengths) for c in self.conversations)

    @property
    def action_tokens(self) -> int:
        """The tokens of the longest action."""
        return max(max(c.lengths) for c in self.conversations)

    @property
    def max_context(self) -> int:
        """Tokens of the longest conversation."""
        return max(c.tokens for c in self.conversations)

    @property
    def sampled(self) -> int:
        """Tokens of all actions."""
        return sum(sum(c.lengths) for c in self.conversations)

    @property
    def tokens(self) -> int:
        """The tokens of all conversations, a group's prompt once for each member."""
        return sum(c.tokens for c in self.conversations)

    @property
    def least_computed(self) -> int:
        """Token positions that any sampler must run through the network.

        A prompt once a group, every action and observation once; but not a conversation's last
        token, after which nothing is sampled.
        """
        repeated = sum(len(prompt) for prompt in self.prompts) * (self.group_size - 1)
        return self.tokens - repeated - len(self.conversations)


@dataclass(frozen=True)
class Lengths:
    """Lengths of a conversation, in tokens; it has one observation fewer than actions."""

    prompt: int
    actions: tuple[int, ...]
    observations: tuple[int, ...]

    def scaled(self, scale: float) -> Lengths:
        """Every length times `scale`, and 1 at least."""

        def each(lengths: Sequence[int]) -> tuple[int, ...]:
            return tuple(max(1, round(scale * n)) for n in lengths)

        return Lengths(*each([self.prompt]), each(self.actions), each(self.observations))

    def of_turns(self, turns: int) -> Lengths:
        """The lengths cut to a number of turns, or repeated from the beginning to reach it.

        The observation between two repetitions is as long as the first observation (or action).
        """
        between = (*self.observations, *(self.observations or self.actions)[:1])
        rounds = -(-turns // len(self.actions))
        return Lengths(
            self.prompt, (self.actions * rounds)[:turns], (between * rounds)[: turns - 1]
        )


# Contexts of 16,000 tokens of which 13,000 are the prompt's are the paper's. How the rest comes to
# at most ten turns is a choice: 100 tokens of code and 200 of output each.
APPWORLD = Lengths(13_000, (100,) * 10, (200,) * 9)
LONG = Lengths(256, (48,) * 16, (96,) * 15)


def make(settings: BenchSettings, vocab_size: int) -> Workload:
    """The workload that the settings name.

    Args:
      vocab_size: of the model.

    Raises:
      ValueError: a size that this workload has of its own; a vocabulary that is too small.
    """
    made = MAKERS[settings.workload](settings, vocab_size)
    if made.vocab_size > vocab_size:
        raise ValueError(
            f"--model: got a vocabulary of {vocab_size}; allowed with --workload={made.name}: at"
            f" least {made.vocab_size}."
        )
    return made


def _random(
    settings: BenchSettings, vocab_size: int, *, lengths: Lengths | None = None
) -> Workload:
    """Conversations of random tokens.

    Args:
      lengths: that they are made after; None: BFCL's, of other tasks for every seed.
    """
    scale = SCALES[settings.workload] if settings.scale is None else settings.scale
    tasks = bfcl_lengths() if lengths is None else (lengths,)
    order = np.random.default_rng(settings.seed).permutation(len(tasks))
    groups = [tasks[order[g % len(tasks)]].scaled(scale) for g in range(settings.groups)]
    if settings.turns is not None:
        groups = [one.of_turns(settings.turns) for one in groups]
    if settings.prompt is not None:
        groups = [Lengths(settings.prompt, one.actions, one.observations) for one in groups]
    rng, size = np.random.default_rng(settings.seed), settings.group_size

    def tokens(length: int) -> Tokens:
        return tuple(rng.integers(0, vocab_size, length).tolist())

    def varied(one: Lengths) -> Lengths:
        """A member's own."""
        factor = rng.uniform(SHORTER, LONGER, len(one.actions))
        actions = np.maximum(1, np.rint(factor * np.array(one.actions)).astype(int))
        member = Lengths(one.prompt, tuple(actions.tolist()), one.observations)
        stops = len(actions) > 1 and rng.random() < STOPS_EARLY
        return member.of_turns(int(rng.integers(1, len(actions)))) if stops else member

    members = [[varied(one) for _ in range(size)] for one in groups]
    prompts = [tokens(one.prompt) for one in groups]
    conversations = (
        WorkloadConversation(prompt, one.actions, tuple(map(tokens, one.observations)))
        for prompt, group in zip(prompts, members, strict=True)
        for one in group
    )
    return Workload(settings.workload, tuple(conversations), size, vocab_size)


@functools.cache
def bfcl_lengths() -> tuple[Lengths, ...]:
    """Lengths of BFCL's multi-turn base tasks for training, from `third_party/bfcl/lengths.py`.

    An action is the whole text of one model call: the calls that a user's turn needs, or its
    closing message.
    """
    file = importlib.resources.files("seeupo_jax") / BFCL_FILE
    conversations = json.loads(file.read_text(encoding="utf-8"))["conversations"]
    return tuple(Lengths(prompt, tuple(a), tuple(o)) for prompt, a, o in conversations)


def _order_desk(settings: BenchSettings, vocab_size: int) -> Workload:
    """Conversations at the real order desk, as its demonstrator has them.

    A group is a case of the training split, a member one try of a demonstrator who slips; tokens
    are those of the policy that ships with the package. Numbers of turns and all lengths differ.
    """
    for flag in ("scale", "turns", "prompt"):
        if getattr(settings, flag) is not None:
            raise ValueError(
                f"--{flag}: got {getattr(settings, flag)}; allowed with --workload=order_desk:"
                " nothing, its conversations are real."
            )
    tokenizer, size = read_tokenizer(ORDER_DESK), settings.group_size
    played = (
        _play(tokenizer, f"train/{group}", settings.seed * size + member)
        for group in range(settings.groups)
        for member in range(size)
    )
    return Workload("order_desk", tuple(played), size, tokenizer.vocab_size)


def _play(tokenizer: Tokenizer, task_id: str, seed: int) -> WorkloadConversation:
    demonstration, _ = demonstrate(task_id, skill=SKILL, seed=seed)
    (segment,) = to_segments(demonstration, tokenizer)  # its history is never rewritten
    return cut(segment)


def cut(segment: Segment) -> WorkloadConversation:
    """A segment that ends with an action, as its context and the lengths of its actions."""
    changes = np.flatnonzero(np.diff(segment.turn_L)) + 1
    parts = [tuple(part.tolist()) for part in np.split(segment.tokens_L, changes)]
    prompt, *observations = parts[::2]
    return WorkloadConversation(prompt, tuple(map(len, parts[1::2])), tuple(observations))


MAKERS: dict[str, Callable[[BenchSettings, int], Workload]] = {
    "bfcl": _random,
    "order_desk": _order_desk,
    "appworld": functools.partial(_random, lengths=APPWORLD),
    "long": functools.partial(_random, lengths=LONG),
}

Actions = Sequence[Sequence[Sequence[int]]]  # [conversation][turn], token ids
Logp = Sequence[Sequence[Sequence[float]]]  # of each


def random_actions(work: Workload, seed: int) -> Actions:
    """Actions of the workload's lengths, every token of its vocabulary as likely as any other."""
    rng = np.random.default_rng((seed, 1))
    return [
        [rng.integers(0, work.vocab_size, length).tolist() for length in conversation.lengths]
        for conversation in work.conversations
    ]


def trajectory_lines(
    work: Workload, actions: Actions, *, seed: int, logp: Logp | None = None
) -> list[str]:
    """The lines of a trajectory file (`trajectories/stored.py`); rewards are uniform in [0, 1).

    Args:
      logp: by the sampler; None: those of a uniform distribution, since no configuration of the
        benchmarks reads the sampler's record.
    """
    rewards = np.random.default_rng((seed, 2)).random(len(work.conversations)).tolist()
    guess = -math.log(work.vocab_size)
    lines = []
    for number, (conversation, sampled) in enumerate(zip(work.conversations, actions, strict=True)):
        sampled_logp = logp[number] if logp else [[guess] * len(action) for action in sampled]
        record: dict[str, Any] = {"tokens": list(conversation.prompt)}
        record["turn"] = [CONTEXT] * len(conversation.prompt)
        record["logp"] = [0.0] * len(conversation.prompt)
        for turn, (action, action_logp) in enumerate(zip(sampled, sampled_logp, strict=True)):
            observation = conversation.observations[turn] if turn + 1 < len(sampled) else ()
            record["tokens"] += [*action, *observation]
            record["turn"] += [turn] * len(action) + [CONTEXT] * len(observation)
            record["logp"] += [*action_logp, *[0.0] * len(observation)]
        record |= {"reward": rewards[number], "group": number // work.group_size}
        lines.append(json.dumps(record))
    return lines


@dataclass(frozen=True)
class Inputs:
    """The inputs of one run.

    model: a folder. lines: a file of trajectories.
    fields: of the configuration by their full names; all others are as they are by default.
    """

    settings: BenchSettings
    arch: Architecture
    work: Workload
    model: Path
    lines: Path
    fields: Mapping[str, Any]


@contextlib.contextmanager
def prepared(settings: BenchSettings, dtype: str) -> Iterator[Inputs]:
    """Files of random weights, and of the workload's conversations with random actions.

    Several processes of a machine share those of process 0.

    Args:
      dtype: of activations.

    Raises:
      ValueError: a wrong setting.
    """
    arch = architecture(settings.model, dtype)
    work = make(settings, arch.vocab_size)
    fields = {
        "seed": settings.seed,
        "model.dtype": dtype,
        "model.scan_layers": machine.scans_layers(jax.devices()[0]),
        "optimizer.name": "adam",
        "optimizer.learning_rate": _LEARNING_RATE,
        "optimizer.kwargs": {"eps": _EPS},
        "rollout.max_turns": work.turns,
        "rollout.temperature": 1.0,
    }
    with tempfile.TemporaryDirectory() as own:
        folder = broadcast_from_primary(own)
        model, lines = Path(folder, "model"), Path(folder, "trajectories.jsonl")
        write_model(arch, model, seed=settings.seed)
        actions = random_actions(work, settings.seed)
        made = trajectory_lines(work, actions, seed=settings.seed)
        on_primary(lambda: lines.write_text("\n".join(made) + "\n", encoding="utf-8"))
        yield Inputs(settings, arch, work, model, lines, fields)
