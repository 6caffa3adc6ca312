"""A base class for environments whose tools are typed Python functions.

    class Shop(ToolEnvironment):
        @tool
        def price(self, item: str) -> str:
            '''The price of an item in cents.

            Args:
                item: its name, as in the request.
            '''
            return f"{self.prices[item]} cents"

Schemas come from signatures and docstrings in Google's style; calls are read in the policy's tool
format, checked against the schemas, and dispatched.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from seeupo_jax.configuration.user_code import describe, shortened, shown
from seeupo_jax.envs.base import Demonstration, Message, StepResult, Tool
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError
from seeupo_jax.envs.tool_formats.formats import choose_format

_MARK = "is_tool"  # attribute of a method that is a tool
_SHOWN = 60  # characters of an argument that a message shows
_F = TypeVar("_F", bound=Callable[..., Any])


def tool(method: _F) -> _F:
    """Marks a method of a `ToolEnvironment` as a tool: its arguments have types and descriptions.

    A call that the method cannot execute raises `ToolCallError`, whose text the policy reads. Any
    other exception is a failure of the environment. A method may be `async`.
    """
    setattr(method, _MARK, True)
    return method


class ToolEnvironment(abc.ABC):
    """An environment whose tools are methods marked with `tool`, and perhaps further functions.

    A step executes the calls of a message in order and answers each with a message of role `tool`.
    What is wrong with a call (its form, its tool's name, a missing or unknown argument, a value of
    another type) is a message that the policy reads. A step's reward is what it adds to `score()`,
    so an episode's reward is its score, whoever ends it. `info` has the number of `tool_calls` and
    of `tool_errors` among them, and `executed`: for each step whether all its calls were.

    Attributes:
      functions: tools that need no episode, beside the methods.
      tool_format: of `envs.tool_formats`, in which the policy writes calls; `hermes` is Qwen's and
        that of most models.
      tool_timeout_s: seconds that a call of an `async` tool may take; the policy reads that it took
        longer. `config.env.timeout_s` bounds the whole step, with other tools in it.
      done: a tool sets it to end the episode.
    """

    functions: Sequence[Callable[..., Any]] = ()
    tool_format: str = "hermes"
    tool_timeout_s: float = 30.0
    done: bool = False

    @abc.abstractmethod
    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of a split, as `Environment.task_ids`."""

    @abc.abstractmethod
    def begin(self, task_id: str, seed: int) -> Sequence[Message]:
        """Starts an episode of a task; returns its first messages."""

    @abc.abstractmethod
    def score(self) -> float:
        """The episode's result so far in [0, 1]; 1 is success."""

    def answer(self, text: str) -> str:
        """Answers a message without a call, which is a mistake unless a class overrides this.

        Raises:
          ToolCallError: the policy reads why the message is none.
        """
        names = ", ".join(self._tools)
        raise ToolCallError(f"the message has no tool call; the tools are {names}")

    def play(self, task_id: str, calls: Sequence[ToolCall], seed: int = 0) -> Demonstration:
        """Plays an episode of these calls, one a message; returns its conversation.

        It is what tests of an environment and its `demonstrations` need.
        """
        messages, tools = self.reset(task_id, seed)
        written = choose_format(self.tool_format)
        for call in calls:
            text = written.render("", [call])
            messages += ({"role": "assistant", "content": text}, *self.step(text).observation)
        return Demonstration(messages, tools)

    def vocabulary(self) -> Sequence[str]:
        """Words that a tokenizer made for this environment keeps whole, as of `Demonstrator`."""
        return ()

    def close(self) -> None:
        """Frees what the episode holds."""
        self._replies = []

    def reset(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts an episode; returns its first messages and the tools.

        Raises:
          ValueError: a tool without types or descriptions.
        """
        self._executed: list[bool] = []
        self._replies: list[Message] = []
        self._calls, self._errors, self.done = 0, 0, False
        messages = tuple(self.begin(task_id, seed))
        self._score = self.score()
        return messages, tuple(schema for schema, _ in self._tools.values())

    def step(self, text: str) -> StepResult:
        """Executes the calls of a message.

        After a `TransientError` the same message may be given again: calls that were answered are
        not executed again.
        """
        errors = self._errors
        self._execute(text)
        self._executed.append(self._errors == errors)
        observation, self._replies = tuple(self._replies), []
        before, self._score = self._score, self.score()
        info = {
            "tool_calls": self._calls,
            "tool_errors": self._errors,
            "executed": list(self._executed),
        }
        return StepResult(observation, self._score - before, self.done, info)

    def _execute(self, text: str) -> None:
        """Leaves the answers to a message's calls in `_replies`."""
        schemas = [schema for schema, _ in self._tools.values()]
        try:
            calls = choose_format(self.tool_format).read(text, schemas).calls
        except ToolCallError as error:
            self._errors += 1
            return self._reply("tool", f"Error: {error}.")
        if not calls:
            return self._reply("user", self._attempt(self.answer, text))
        for call in calls[len(self._replies) :]:
            if self.done:
                break
            reply = self._attempt(self._call, call)
            self._calls += 1
            self._reply("tool", reply, name=call.name)

    def _reply(self, role: str, content: str, **more: str) -> None:
        self._replies.append({"role": role, "content": content, **more})

    def _attempt(self, function: Callable[[Any], str], argument: Any) -> str:
        """What a function returns, or its refusal as the policy reads it."""
        try:
            return function(argument)
        except ToolCallError as error:
            self._errors += 1
            return f"Error: {str(error).rstrip('.')}."

    def _call(self, call: ToolCall) -> str:
        """The result of a call as a text."""
        if call.name not in self._tools:
            names = ", ".join(self._tools)
            raise ToolCallError(
                f"there is no tool {shown(call.name, _SHOWN)}; the tools are {names}"
            )
        schema, function = self._tools[call.name]
        check_arguments(schema, call)
        result = function(**call.arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(self._bounded(call.name, result))
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)

    async def _bounded(self, name: str, awaitable: Any) -> Any:
        try:
            async with asyncio.timeout(self.tool_timeout_s) as bound:
                return await awaitable
        except TimeoutError:
            if not bound.expired():  # the tool's own, such as a socket's
                raise
            reason = f"{name} took longer than {self.tool_timeout_s:g} s"
            raise ToolCallError(reason) from None

    @functools.cached_property
    def _tools(self) -> Mapping[str, tuple[Tool, Callable[..., Any]]]:
        """The tools by name, in their order of definition: schema and function."""
        marked = [
            getattr(self, name)  # of a subclass, where it overrides the method; None: it has none
            for kind in reversed(type(self).__mro__)
            for name, value in vars(kind).items()
            if hasattr(value, _MARK)
        ]
        functions = [each for each in [*marked, *self.functions] if each is not None]
        found = {each.__name__: (tool_schema(each), each) for each in functions}
        if not found:
            raise ValueError(f"{type(self).__name__}: got no tool; allowed: methods with @tool.")
        return found


def tool_schema(function: Callable[..., Any]) -> Tool:
    """The description of a function as a tool, from its type hints and its docstring.

    Types are those of `transformers.utils.get_json_schema`: str, int, float, bool, list, dict,
    Literal, Union and Optional of them. A default makes an argument optional.

    Raises:
      ValueError: an argument without a type or a description, or a type that JSON does not have.
    """
    # Here, since importing it takes seconds, and most environments have no such tools.
    from transformers.utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema = get_json_schema(function)["function"]
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        raise ValueError(
            f"tool {function.__qualname__}: got {describe(error)}; allowed: a type hint and a line"
            " under Args: for every argument, below a sentence on the tool."
        ) from error
    return {name: schema[name] for name in ("name", "description", "parameters")}


def check_arguments(schema: Tool, call: ToolCall) -> None:
    """Checks a call's arguments against its tool's schema; unknown ones are mistakes, too.

    Raises:
      ToolCallError: a missing or an unknown argument, or a value of another type; the policy reads
        the text.
    """
    from jsonschema.exceptions import best_match  # here for the same reason

    if call.positional:
        raise ToolCallError(f"{call.name} takes its arguments by name")
    closed = _without_nullable(schema["parameters"]) | {"additionalProperties": False}
    error = best_match(_validator()(closed).iter_errors(dict(call.arguments)))
    if error is not None:
        place = "".join(f"[{key!r}]" for key in error.absolute_path)
        reason = f"{call.name}{place}: {shortened(error.message)}"
        names = ", ".join(closed.get("properties", {})) or "none"
        raise ToolCallError(f"{reason}; its arguments: {names}")


@functools.cache
def _validator() -> Callable[[Any], Any]:
    """A checker of JSON schemas for which, as in Python's type hints, 1.0 is no integer."""
    import jsonschema

    def is_integer(_: Any, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    draft = jsonschema.Draft202012Validator
    types = draft.TYPE_CHECKER.redefine("integer", is_integer)
    return jsonschema.validators.extend(draft, type_checker=types)


def _without_nullable(schema: Any) -> Any:
    """A schema in which `nullable`, which is OpenAPI's, is JSON schema's `anyOf`."""
    if isinstance(schema, list):
        return [_without_nullable(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    parts = {key: _without_nullable(value) for key, value in schema.items()}
    if parts.pop("nullable", False) is True:
        return {"anyOf": [parts, {"type": "null"}]}
    return parts
