"""Episodes over the official simulators: a user asks in turns, official checkers judge them."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

from seeupo_jax.configuration.user_code import escaped
from seeupo_jax.envs.base import Demonstration, Message, StepResult, Tool, check_choice
from seeupo_jax.envs.bfcl.benchmark_files import added_docs, listed_docs, read_docs
from seeupo_jax.envs.bfcl.formats import FORMATS, to_tool
from seeupo_jax.envs.bfcl.mistakes import with_mistakes
from seeupo_jax.envs.bfcl.simulated_apis import CALL_FAILED, MultiTurnTask, Verdict, World
from seeupo_jax.envs.call_matching import MatchingReward
from seeupo_jax.envs.episode_rewards import REWARDS, EpisodeReward
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError

TURN_REWARDS = {"matching_hard": "hard", "matching_soft": "soft"}
CLOSING = "Done."  # how the demonstrator ends a user's turn


@dataclass(kw_only=True)
class MultiTurn:
    """The environment of `bfcl` and `bfcl_worlds`, which differ in where tasks come from.

    A message without a call ends the user's turn. The tools and messages that `reset` returns are
    shared: do not change them.

    format: how calls are written, one of `FORMATS`. `hermes`: `<tool_call>` blocks, the tools are
      the chat template's. `python`: the leaderboard's `[f(x=1), g()]` and its system message, which
      holds the tools, so that `reset` returns none and `config.chat.system` must be left on.
    reward: what an episode earns, one of `REWARDS`; each step gives what it adds.
      `official`: `score()`, so nothing before the end. `fraction`: the share of user turns passed.
      `shaped`: 1 + 0.5·share when all passed (1.5), 0.5·share otherwise; but −1 once a message
      repeats itself or holds a control token (`is_degenerate`), whatever follows.
    turn_reward: what each message earns besides, as the reward `matching`, one of `TURN_REWARDS`
      or None for nothing: the mean over its calls of what they get when the calls of a user turn
      are matched with its reference calls (`envs.call_matching`). It is paid with the calls; later
      calls of the user turn change what earlier ones get. `score()` stays the verdict.
    max_calls: messages of the policy in an episode; the last of them ends it.
    max_calls_per_user_turn: messages with calls in one user turn; one more ends the episode.
    max_observation_chars: longer answers of a tool are cut, for the policy only; None: never.
    compact: leave out the sentence about the tool's family before the description of each tool; in
      `python` also its return value, a hint that it is Python, and white space. Without `compact`
      the prompt is the official one to the letter.
    """

    name: ClassVar[str]

    format: str = "hermes"
    reward: str = "official"
    max_calls: int = 10
    max_calls_per_user_turn: int = 20
    max_observation_chars: int | None = None
    compact: bool = True
    turn_reward: str | None = None

    def __post_init__(self) -> None:
        check_choice(f"{self.name} format", self.format, FORMATS)
        check_choice(f"{self.name} reward", self.reward, REWARDS)
        if self.turn_reward is not None:
            check_choice(f"{self.name} turn_reward", self.turn_reward, TURN_REWARDS)
        check_bound(f"{self.name} max_calls", self.max_calls)
        check_bound(f"{self.name} max_calls_per_user_turn", self.max_calls_per_user_turn)
        if self.max_observation_chars is not None:
            check_bound(f"{self.name} max_observation_chars", self.max_observation_chars)
        self._episode: _Episode | None = None

    def task_ids(self, split: str) -> Sequence[str]:
        """Names of a split's tasks."""
        raise NotImplementedError

    def find_task(self, task_id: str) -> MultiTurnTask:
        """A task by its name. Raises ValueError if there is no such task."""
        raise NotImplementedError

    def simulators(self) -> Sequence[str]:
        """Names of all simulators that the tasks use."""
        raise NotImplementedError

    def reset(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts an episode with the user's first question. Nothing is random: `seed` is unused."""
        task = self.find_task(task_id)
        self._episode = _Episode(task, self)
        system, tools = FORMATS[self.format].begin(listed_docs(task), self.compact)
        return ({"role": "system", "content": system}, *_begin_user_turn(task, 0, self)), tools

    def step(self, text: str) -> StepResult:
        """Runs a message's calls, each answered by one `tool` message, or ends the user's turn.

        info: `user_turns` that ended, `user_turns_passed` before the first that failed,
        `user_turns_of_task`, `observations_cut` so far, `degenerate` when a message so far was,
        `bad_call` when this message's calls could not be read (none of them is run then),
        `out_of_calls` when a bound ended the episode.
        """
        return self._running().step(text)

    def score(self) -> float:
        """1 when every user turn ended and passed the official checkers, else 0."""
        return self._running().score()

    def close(self) -> None:
        self._episode = None

    def demonstrations(
        self, split: str, *, calls_per_message: str = "turn", skill: float = 1.0, seed: int = 0
    ) -> PlayedDemonstrations:
        """Conversations of a demonstrator with this environment: the reference solutions, or worse.

        Args:
          calls_per_message: `turn`, all calls of a user turn in one message, or `one` each.
          skill: 1 makes no mistake, 0 those of `mistakes.MISTAKES`. A conversation that they make
            too long ends where the environment ends it.
          seed: of the mistakes; the same arguments give the same conversations.
        """
        check_choice(f"{self.name} calls_per_message", calls_per_message, _CALLS_PER_MESSAGE)
        if not 0 <= skill <= 1:
            raise ValueError(f"{self.name} skill: got {skill}; allowed: a number from 0 to 1.")
        ids = self.task_ids(split)
        fitting = [task_id for task_id in ids if self._fits(task_id, calls_per_message)]
        play = functools.partial(
            self.play, calls_per_message=calls_per_message, skill=skill, seed=seed
        )
        return PlayedDemonstrations(self, fitting, play, skipped=len(ids) - len(fitting))

    def vocabulary(self) -> Sequence[str]:
        """Names of tools and parameters, except plain words, which other text may hold."""
        docs = [doc for name in self.simulators() for doc in read_docs(name)]
        tools = [to_tool(doc, self.compact) for doc in docs]
        names = [n for tool in tools for n in (tool["name"], *tool["parameters"]["properties"])]
        return tuple(dict.fromkeys(name for name in names if "_" in name or not name.islower()))

    def play(
        self, task_id: str, calls_per_message: str = "turn", skill: float = 1.0, seed: int = 0
    ) -> Iterator[tuple[str, ...]]:
        """The demonstrator's messages of each user turn; at skill 1 they solve it."""
        task, form = self.find_task(task_id), FORMATS[self.format]
        world, rng = World(task), Random(f"demonstrator/{task_id}/{skill}/{seed}")
        reference = [[form.solve(world, source) for source in turn] for turn in task.reference]
        for calls in with_mistakes(reference, skill, rng):
            yield (*map(form.render, _CALLS_PER_MESSAGE[calls_per_message](calls)), CLOSING)

    def _fits(self, task_id: str, calls_per_message: str) -> bool:
        pack = _CALLS_PER_MESSAGE[calls_per_message]
        sizes = [len(pack(turn)) for turn in self.find_task(task_id).reference]
        in_episode = sum(sizes) + len(sizes)  # a closing message ends each user turn
        return in_episode <= self.max_calls and max(sizes) <= self.max_calls_per_user_turn

    def _running(self) -> _Episode:
        if self._episode is None:
            raise ValueError(f"{self.name}: reset() must come before step() and score().")
        return self._episode


class PlayedDemonstrations(Sequence[Demonstration]):
    """The demonstrator's conversations, played when they are asked for.

    skipped: tasks left out because the environment's bounds would end them too early.
    """

    def __init__(
        self,
        env: MultiTurn,
        task_ids: Sequence[str],
        play: Callable[[str], Iterator[tuple[str, ...]]],
        skipped: int,
    ):
        self._env, self._ids, self._play = env, task_ids, play
        self.skipped = skipped

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Demonstration:
        env = replace(self._env)  # a copy: threads may ask at once, and an episode may be running
        messages, tools = env.reset(self._ids[index], seed=0)
        for action in itertools.chain.from_iterable(self._play(self._ids[index])):
            result = env.step(action)
            messages += ({"role": "assistant", "content": action}, *result.observation)
            if result.done:
                break
        return Demonstration(messages, tools)


class _Episode:
    """One conversation: the world, the verdict so far, and the counts that the bounds limit."""

    def __init__(self, task: MultiTurnTask, options: MultiTurn):
        self._task, self._options = task, options
        self._world, self._verdict = World(task), Verdict(task)
        self._responses: list[str] = []  # of this user turn's calls
        self._executed: list[bool] = []  # of each step
        self._user_turns = self._calls = self._calls_in_user_turn = self._observations_cut = 0
        self._done = False
        self._reward = EpisodeReward(options.reward)
        kind = options.turn_reward
        self._matching = None if kind is None else MatchingReward((), TURN_REWARDS[kind])
        self._begin_matching()

    def step(self, text: str) -> StepResult:
        if self._done:
            raise ValueError(
                f"{self._options.name}: the episode is done; reset() must come before step()."
            )
        self._calls += 1
        self._calls_in_user_turn += 1
        self._reward.read(text)
        self._executed.append(True)
        try:
            calls, bad_call = FORMATS[self._options.format].parse(text), False
        except ToolCallError as error:
            observation, bad_call = (self._answer(json.dumps({"error": str(error)})),), True
            self._executed[-1] = False
            rewards = self._match(())
        else:
            rewards = self._match(calls)
            observation = self._run(calls) if calls else self._end_user_turn()
        ended = self._user_turns == len(self._task.questions)
        self._done = ended or self._out_of_calls()
        info = {
            "user_turns": self._user_turns,
            "user_turns_passed": self._verdict.turns_passed,
            "user_turns_of_task": len(self._task.questions),
            "observations_cut": self._observations_cut,
            "degenerate": self._reward.degenerate,
            "bad_call": bad_call,
            "executed": [*self._executed],
            "out_of_calls": self._done and not ended,
        }
        paid = self._reward.pay(self._verdict.share)
        return StepResult(observation, paid, self._done, info, rewards)

    def score(self) -> float:
        return float(self._verdict.valid)

    def _run(self, calls: Sequence[ToolCall]) -> tuple[Message, ...]:
        responses = [self._world.call(call) for call in calls]
        self._responses += responses
        self._executed[-1] = not any(text.startswith(CALL_FAILED) for text in responses)
        return tuple(self._answer(response) for response in responses)

    def _end_user_turn(self) -> tuple[Message, ...]:
        self._verdict.end_turn(self._world, self._responses)
        self._responses = []
        self._calls_in_user_turn = 0
        self._user_turns += 1
        if self._user_turns == len(self._task.questions):
            return ()
        self._begin_matching()
        return _begin_user_turn(self._task, self._user_turns, self._options)

    def _begin_matching(self) -> None:
        """Lets the calls of the user turn that begins be matched with its reference calls."""
        if self._matching is not None:
            sources = self._task.reference[self._user_turns]
            self._matching.begin([self._world.read(source) for source in sources])

    def _match(self, calls: Sequence[ToolCall]) -> dict[str, Sequence[float]]:
        """The named reward of a message with these calls."""
        if self._matching is None:
            return {}
        return {"matching": self._matching.pay([*map(self._world.name_arguments, calls)])}

    def _out_of_calls(self) -> bool:
        options = self._options
        in_user_turn = self._calls_in_user_turn > options.max_calls_per_user_turn
        return in_user_turn or self._calls >= options.max_calls

    def _answer(self, text: str) -> Message:
        # Escaped JSON can hold half a character, which no tokenizer takes.
        text = escaped(text)
        limit = self._options.max_observation_chars
        if limit is not None and len(text) > limit:
            self._observations_cut += 1
            text = f"{text[:limit]}... [{len(text) - limit} more characters]"
        return {"role": "tool", "content": text}


def _begin_user_turn(task: MultiTurnTask, turn: int, options: MultiTurn) -> tuple[Message, ...]:
    """The messages that open a user turn; tools that were held out until then come last."""
    docs = added_docs(task, turn)
    if not docs:
        return task.questions[turn]
    text = FORMATS[options.format].add(docs, options.compact)
    return (*task.questions[turn], {"role": "user", "content": text})


# How the demonstrator packs the calls of a user turn into messages.
_CALLS_PER_MESSAGE: dict[str, Callable[[Sequence[Any]], Sequence[Sequence[Any]]]] = {
    "turn": lambda calls: [calls] if calls else [],
    "one": lambda calls: [[call] for call in calls],
}


def check_bound(option: str, value: Any) -> None:
    """Raises ValueError where an option is no positive integer."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{option}: got {value!r}; allowed: an integer >= 1.")
