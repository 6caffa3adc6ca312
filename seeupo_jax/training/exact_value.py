"""The exact value of a policy: its expected reward over all episodes of an environment."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from seeupo_jax import envs
from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.base import Environment, Listed
from seeupo_jax.envs.tasks import list_tasks
from seeupo_jax.envs.validation import reset_episode
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.sweep_start import turn_logp
from seeupo_jax.policy.files.tokenizer import Tokenizer, Transcript
from seeupo_jax.policy.files.vocabulary import CONTROL
from seeupo_jax.types import Trajectory

MOST_EPISODES = 4096  # of a task


@dataclass(frozen=True)
class EpisodeTree:
    """All episodes that begin with some actions.

    row: of an episode that begins with them, in the task's list. turn: actions so far.
    reward: the mean reward if the episode ends here: its own, or where another text ends it.
    children: after each spelling of each action; (): the episode is over.
    """

    row: int
    turn: int
    reward: float
    children: tuple[EpisodeTree, ...] = ()

    def value(self, logp_NK: np.ndarray) -> float:
        """The expected reward from here on, given log-probabilities of every episode's turns."""
        probability = self._probabilities(logp_NK)
        inside = sum(p * c.value(logp_NK) for p, c in zip(probability, self.children, strict=True))
        return float(inside + (1 - probability.sum()) * self.reward)

    def outside(self, logp_NK: np.ndarray) -> float:
        """The probability that a text which is no action ends the episode."""
        if not self.children:
            return 0.0
        probability = self._probabilities(logp_NK)
        later = sum(p * c.outside(logp_NK) for p, c in zip(probability, self.children, strict=True))
        return float(later + 1 - probability.sum())

    @property
    def optimum(self) -> float:
        """The expected reward of the best policy."""
        return max([self.reward, *(child.optimum for child in self.children)])

    def _probabilities(self, logp_NK: np.ndarray) -> np.ndarray:
        return np.exp(np.array([logp_NK[child.row, self.turn] for child in self.children], float))


class ExactValue:
    """The episodes of the evaluated tasks, over which expectations are exact.

    The probability of an action is that of all token sequences that the environment reads as its
    text; the rest of a turn's probability ends the episode.

    Raises:
      ValueError: an environment that lists no episodes, more than `MOST_EPISODES` of a task, or
        episodes with more turns or longer actions than the configuration allows.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer):
        with contextlib.closing(envs.make(config.env.name, **config.env.options)) as environment:
            tasks = list_tasks(environment, config.evaluation.split)[: config.evaluation.tasks]
            listed = [_Listing(config, environment, tokenizer, task_id) for task_id in tasks]
        self._tasks = [(each.tree, each.trajectories) for each in listed]

    def metrics(self, learner: Learner, params: Any) -> dict[str, float]:
        """The metrics `exact/` of a policy, with the parameters that train."""
        numbers = []
        for tree, trajectories in self._tasks:
            logp_NK = turn_logp(learner, params, trajectories)
            numbers.append((tree.value(logp_NK), tree.optimum, tree.outside(logp_NK)))
        value, optimum, outside = np.mean(numbers, axis=0).tolist()
        return {"exact/value": value, "exact/optimum": optimum, "exact/outside": outside}


def check_exact(config: Config) -> None:
    """ValueError: the configuration asks for exact values that it cannot have."""
    if not config.evaluation.exact:
        return
    wrong = None
    if not isinstance(envs.make(config.env.name, **config.env.options), Listed):
        wrong = f"env {config.env.name}, which has no action_texts() and expected_reward()"
    elif config.rollout.truncated or config.agent.given or config.roles or config.rewards:
        wrong = "top_k, top_p, a grammar, an agent, roles or config.rewards"
    elif not config.evaluation.tasks:
        wrong = "evaluation.tasks=0"
    if wrong is not None:
        raise ValueError(f"config.evaluation.exact: got True with {wrong}; allowed: False.")


class _Listing:
    """The episodes of one task, each played once; `tree` and `trajectories`."""

    def __init__(
        self, config: Config, environment: Environment, tokenizer: Tokenizer, task_id: str
    ):
        self._rollout, self._seed = config.rollout, config.seed
        self._environment, self._tokenizer, self._task_id = environment, tokenizer, task_id
        self.trajectories: list[Trajectory] = []
        most = config.rollout.max_action_tokens
        texts = cast(Listed, environment).action_texts()
        self._spellings = {text: spellings(tokenizer, text, most) for text in texts}
        if unspelt := [text for text, tokens in self._spellings.items() if not tokens]:
            raise ValueError(
                f"config.rollout.max_action_tokens: got {most} with the action {unspelt[0]!r} of"
                f" env {config.env.name}; allowed with evaluation.exact: as many as it takes."
            )
        self.tree = self._list((), ())

    def _list(self, texts: tuple[str, ...], actions: tuple[Sequence[int], ...]) -> EpisodeTree:
        transcript, over = self._play(texts, actions)
        row, turn = len(self.trajectories), len(texts)
        reward = cast(Listed, self._environment).expected_reward(self._task_id, texts)
        if over:
            self._add(transcript)
            return EpisodeTree(row, turn, reward)
        if turn == self._rollout.max_turns:
            raise ValueError(
                f"config.rollout.max_turns: got {turn}, after which an episode of"
                f" {self._task_id!r} is not over; allowed with evaluation.exact: as many turns as"
                " an episode has."
            )
        spelt = [(text, tokens) for text, each in self._spellings.items() for tokens in each]
        children = (self._list((*texts, text), (*actions, tokens)) for text, tokens in spelt)
        return EpisodeTree(row, turn, reward, tuple(children))

    def _play(
        self, texts: Sequence[str], actions: Sequence[Sequence[int]]
    ) -> tuple[Transcript, bool]:
        """The transcript of some actions, and whether the episode is over after them."""
        messages, tools = reset_episode(self._environment, self._task_id, self._seed, 0)
        conversation, transcript = self._tokenizer.begin(messages, tools), Transcript()
        over = False
        for turn, (text, tokens) in enumerate(zip(texts, actions, strict=True)):
            self._check_room(len(conversation.tokens))
            transcript.read(conversation.tokens)
            transcript.act(tokens, turn, [float("nan")] * len(tokens))
            step = self._environment.step(text)
            over = step.done
            if not over:
                conversation = conversation.extend(tokens, step.observation)
        return transcript, over

    def _check_room(self, context: int) -> None:
        """ValueError: the sampler would end an episode before an action for want of room."""
        rollout = self._rollout
        if (most := context + rollout.max_action_tokens) > rollout.max_context:
            raise ValueError(
                f"config.rollout.max_context: got {rollout.max_context} with an episode of"
                f" {self._task_id!r} that needs {most} or more; allowed with evaluation.exact: room"
                " for every action of every episode."
            )

    def _add(self, transcript: Transcript) -> None:
        if len(self.trajectories) == MOST_EPISODES:
            raise ValueError(
                f"config.evaluation.exact: got True for {self._task_id!r} with more than"
                f" {MOST_EPISODES} episodes; allowed: tasks with fewer."
            )
        segments = transcript.segments()
        self.trajectories.append(Trajectory.of(segments, 0.0, group=0, task_id=self._task_id))


def spellings(tokenizer: Tokenizer, text: str, most: int) -> list[tuple[int, ...]]:
    """All actions of at most so many tokens that read as a text, with their end tokens.

    Raises:
      ValueError: more than `MOST_EPISODES`.
    """
    wanted = text.encode()
    by_bytes: dict[bytes, list[int]] = {}
    for token, read in enumerate(tokenizer.token_bytes()):
        by_bytes.setdefault(b"" if read.startswith(CONTROL) else read, []).append(token)
    # Those that add nothing to a text; one that ends the action ends it.
    silent = [
        token
        for token in by_bytes.pop(b"", [])
        if token not in tokenizer.end_ids and not tokenizer.text([token])
    ]

    def spell(done: int, room: int) -> Iterator[tuple[int, ...]]:
        if done == len(wanted):
            yield ()
        if not room:
            return
        heads = [(done, token) for token in silent]
        heads += [
            (stop, token)
            for stop in range(done + 1, len(wanted) + 1)
            for token in by_bytes.get(wanted[done:stop], ())
        ]
        for stop, token in heads:
            yield from ((token, *rest) for rest in spell(stop, room - 1))

    ended = ((*tokens, end) for tokens in spell(0, most - 1) for end in tokenizer.end_ids)
    read = (tokens for tokens in ended if tokenizer.text(tokens) == text)
    found = list(itertools.islice(read, MOST_EPISODES + 1))
    if len(found) > MOST_EPISODES:
        raise ValueError(
            f"config.rollout.max_action_tokens: got {most}, in which the action {text!r} is spelt"
            f" in more than {MOST_EPISODES} ways; allowed with evaluation.exact: fewer tokens."
        )
    return found
