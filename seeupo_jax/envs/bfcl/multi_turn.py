"""Episodes on the official simulators: a user's requests in turns, judged by official checkers."""

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
from seeupo_jax.envs.bfcl.formats import FORMATS, known_tools, to_tool
from seeupo_jax.envs.bfcl.mistakes import with_mistakes
from seeupo_jax.envs.bfcl.simulated_apis import CALL_FAILED, MultiTurnTask, Verdict, World
from seeupo_jax.envs.call_matching import MatchingReward
from seeupo_jax.envs.episode_rewards import REWARDS, EpisodeReward
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError

TURN_REWARDS = {"matching_hard": "hard", "matching_soft": "soft"}
CLOSING = "Done."  # the demonstrator's message that ends a user turn


@dataclass(kw_only=True)
class MultiTurn:
    """The common environment of `bfcl` and `bfcl_worlds`, which differ in the source of tasks.

    A message without a call ends the user's turn. The tools and messages that `reset` returns are
    shared: do not modify them.

    format: how calls are written, one of `FORMATS`: `hermes` (`<tool_call>` blocks) or another
      tool format; the chat template lists the tools. `python`: the leaderboard's `[f(x=1), g()]`;
      its system message lists the tools, so `reset` returns none and `config.chat.system` must
      stay on.
    reward: the episode's reward, one of `REWARDS`; a step's reward is the increase.
      `official`: `score()`, so 0 before the end. `fraction`: the share of user turns passed.
      `shaped`: 1 + 0.5·share if all passed (1.5), 0.5·share otherwise; permanently −1 once a
      message repeats itself or contains a control token other than those of its format
      (`is_degenerate`).
    turn_reward: an additional reward of each message, named `matching`: one of `TURN_REWARDS`, or
      None. The calls of a user turn are matched with its reference calls (`envs.call_matching`); a
      message gets the mean over its calls, with the step that makes them. Later calls of the user
      turn change the rewards of earlier ones. `score()` is unaffected.
    max_calls: messages of the policy per episode; the last one ends it.
    max_calls_per_user_turn: messages with calls per user turn; one more ends the episode.
    max_observation_chars: longer answers of a tool are truncated, for the policy only; None: never.
    compact: omit the sentence about the tool's class in the description of each tool; in `python`
      also its return value, a hint that it is Python, and white space. Without `compact` the prompt
      is exactly the official one.
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
        """Returns the ids of a split's tasks."""
        raise NotImplementedError

    def find_task(self, task_id: str) -> MultiTurnTask:
        """Returns a task by its id. Raises ValueError if there is no such task."""
        raise NotImplementedError

    def simulators(self) -> Sequence[str]:
        """Returns the names of all simulators that the tasks use."""
        raise NotImplementedError

    def reset(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts an episode with the user's first question. Nothing is random: `seed` is unused."""
        task = self.find_task(task_id)
        self._episode = _Episode(task, self)
        system, tools = FORMATS[self.format].begin(listed_docs(task), self.compact)
        return ({"role": "system", "content": system}, *_begin_user_turn(task, 0, self)), tools

    def step(self, text: str) -> StepResult:
        """Runs a message's calls, each answered by one `tool` message, or ends the user's turn.

        info: `user_turns`: ended so far; `user_turns_passed`: before the first failure;
        `user_turns_of_task`; `observations_cut` so far; `degenerate`: a message so far was;
        `bad_call`: this message's calls could not be parsed, so none was run; `out_of_calls`: a
        limit ended the episode.
        """
        return self._running().step(text)

    def score(self) -> float:
        """1 if every user turn ended and passed the official checkers, else 0."""
        return self._running().score()

    def close(self) -> None:
        self._episode = None

    def demonstrations(
        self, split: str, *, calls_per_message: str = "turn", skill: float = 1.0, seed: int = 0
    ) -> PlayedDemonstrations:
        """Conversations of a demonstrator: the reference solutions, or solutions with mistakes.

        Args:
          calls_per_message: `turn`: all calls of a user turn in one message, unless the format has
            one call a message; `one`: one call each.
          skill: 1 makes no mistakes, 0 those of `mistakes.MISTAKES`. If mistakes make a
            conversation too long, the environment's limits end it.
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
        """Names of tools and parameters, except plain words, which also occur in other text."""
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
            yield (*map(form.render, self._pack(calls, calls_per_message)), CLOSING)

    def _pack(self, calls: Sequence[Any], calls_per_message: str) -> Sequence[Sequence[Any]]:
        """The calls of each message of a user turn."""
        one = FORMATS[self.format].single
        return _CALLS_PER_MESSAGE["one" if one else calls_per_message](calls)

    def _fits(self, task_id: str, calls_per_message: str) -> bool:
        reference = self.find_task(task_id).reference
        sizes = [len(self._pack(turn, calls_per_message)) for turn in reference]
        in_episode = sum(sizes) + len(sizes)  # a closing message ends each user turn
        return in_episode <= self.max_calls and max(sizes) <= self.max_calls_per_user_turn

    def _running(self) -> _Episode:
        if self._episode is None:
            raise ValueError(f"{self.name}: reset() must come before step() and score().")
        return self._episode


class PlayedDemonstrations(Sequence[Demonstration]):
    """The demonstrator's conversations, played on access.

    skipped: number of tasks omitted because the environment's limits would end them too early.
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
        env = replace(self._env)  # a copy: several threads may play, and an episode may be running
        messages, tools = env.reset(self._ids[index], seed=0)
        for action in itertools.chain.from_iterable(self._play(self._ids[index])):
            result = env.step(action)
            messages += ({"role": "assistant", "content": action}, *result.observation)
            if result.done:
                break
        return Demonstration(messages, tools)


class _Episode:
    """One conversation: the world, the verdict so far, and the limited counts."""

    def __init__(self, task: MultiTurnTask, options: MultiTurn):
        self._task, self._options = task, options
        self._world, self._verdict = World(task), Verdict(task)
        self._tools = known_tools(tuple(task.classes))
        self._responses: list[str] = []  # to this user turn's calls
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
        self._reward.read(FORMATS[self._options.format].without_tags(text))
        self._executed.append(True)
        try:
            calls, bad_call = FORMATS[self._options.format].parse(text, self._tools), False
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
        reward = self._reward.step_reward(self._verdict.share)
        return StepResult(observation, reward, self._done, info, rewards)

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
        """Matches the next calls with the reference calls of the user turn that begins."""
        if self._matching is not None:
            sources = self._task.reference[self._user_turns]
            self._matching.begin([self._world.read(source) for source in sources])

    def _match(self, calls: Sequence[ToolCall]) -> dict[str, Sequence[float]]:
        """The named reward of a message with these calls."""
        if self._matching is None:
            return {}
        return {"matching": self._matching.step_rewards([*map(self._world.name_arguments, calls)])}

    def _out_of_calls(self) -> bool:
        options = self._options
        in_user_turn = self._calls_in_user_turn > options.max_calls_per_user_turn
        return in_user_turn or self._calls >= options.max_calls

    def _answer(self, text: str) -> Message:
        # Escaped JSON can contain lone surrogates, which no tokenizer accepts.
        text = escaped(text)
        limit = self._options.max_observation_chars
        if limit is not None and len(text) > limit:
            self._observations_cut += 1
            text = f"{text[:limit]}... [{len(text) - limit} more characters]"
        return {"role": "tool", "content": text}


def _begin_user_turn(task: MultiTurnTask, turn: int, options: MultiTurn) -> tuple[Message, ...]:
    """The messages that open a user turn; tools that it adds come last."""
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
    """Raises ValueError if an option is no positive integer."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{option}: got {value!r}; allowed: an integer >= 1.")
