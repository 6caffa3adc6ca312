"""The official BFCL simulators, called by name with JSON data, and the official verdict.

The official executor evaluates the model's text and keeps its simulators in module globals. Here
each episode has its own simulators and a call is data: a name to look up and arguments to pass.
"""

from __future__ import annotations

import contextlib
import copy
import decimal
import functools
import importlib
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from seeupo_jax.envs.base import EnvironmentUnavailable, Message
from seeupo_jax.envs.tool_calls import ToolCall, parse_python

CALL_FAILED = (
    "Error during execution: "  # prefix of the official executor's answer to a failed call
)
MAX_DIGITS = 1000  # of a computed number: mpmath takes 5 ms for 1000 digits, 0.8 s for 30,000
MAX_PATHS = 100_000  # characters of all paths that a file system may list


@dataclass(frozen=True)
class MultiTurnTask:
    """One task in the official form; read-only, since episodes share it.

    questions: the messages that open each user turn.
    classes: names of the simulators, in the official order.
    scenario: the initial state of each simulator.
    reference: the calls that solve each user turn, as Python source.
    held_out: by user turn, names of the tools that are listed only from then on.
    long_context: the simulators pad files, listings and answers with irrelevant text.
    """

    task_id: str
    questions: tuple[tuple[Message, ...], ...]
    classes: tuple[str, ...]
    scenario: Mapping[str, Any]
    reference: tuple[tuple[str, ...], ...]
    held_out: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    long_context: bool = False


def official(module: str) -> ModuleType:
    """Imports a module of the official package.

    Raises:
      EnvironmentUnavailable: the package, or the library that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise EnvironmentUnavailable(
            f"bfcl: got no module {error.name!r}; install the official benchmark with"
            " `pip install --no-deps bfcl-eval==2026.3.23 mpmath==1.3.0`."
        ) from None


class World:
    """The simulators of one episode. instances: by class name."""

    def __init__(self, task: MultiTurnTask):
        config = official("bfcl_eval.constants.executable_backend_config")
        self.instances: dict[str, Any] = {}
        self._methods: dict[str, Callable[..., Any]] = {}
        self._signatures: dict[str, inspect.Signature] = {}
        for name in task.classes:
            instance = getattr(official(config.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in config.STATELESS_CLASSES:
                scenario = copy.deepcopy(task.scenario.get(name, {}))
                instance._load_scenario(scenario, long_context=task.long_context)
            if task.long_context:
                # The padding (such as credit cards) is shared by the module until it is copied.
                vars(instance).update(copy.deepcopy(vars(instance)))
            self.instances[name] = instance
            signatures = _signatures(type(instance))
            self._signatures |= signatures
            self._methods |= {key: getattr(instance, key) for key in signatures}
        self._defaults = {name: _own_defaults(s) for name, s in self._signatures.items()}

    def call(self, call: ToolCall) -> str:
        """Executes a call; returns the official executor's text, also for errors. Never raises.

        A call is refused with an error text if the official executor would run for minutes or
        exhaust the memory (see `_FITS`), or if an argument contains NaN or an infinity. Tools that
        are held out can be called: officially they can, and one reference solution does so.
        """
        try:
            return self._run(call)
        except Exception as error:
            return f"{CALL_FAILED}{error}"

    def read(self, source: str) -> ToolCall:
        """Parses a reference call from its Python source; every argument gets its name."""
        (call,) = parse_python(f"[{source}]")
        return ToolCall(call.name, self._name_arguments(call))

    def name_arguments(self, call: ToolCall) -> ToolCall:
        """Returns a call with every argument by name; unchanged if no tool accepts it."""
        try:
            return ToolCall(call.name, self._name_arguments(call))
        except (KeyError, TypeError):
            return call

    def _run(self, call: ToolCall) -> str:
        if call.name not in self._methods:
            raise NameError(f"name '{call.name}' is not defined")
        method = self._methods[call.name]
        call = copy.deepcopy(call)  # simulators keep lists, and later calls change them
        # The verdict compares states, in which a NaN would not equal itself.
        json.dumps([call.positional, call.arguments], allow_nan=False)
        try:
            arguments = self._defaults[call.name] | self._name_arguments(call)
        except TypeError:
            # Python refuses the arguments too, with the text of the official answer.
            return _as_text(method(*call.positional, **call.arguments))
        if call.name in _FITS and not _FITS[call.name](method.__self__, arguments):
            raise ValueError(f"{call.name} refused: the result would be too large")
        with _ALONE.get(call.name, contextlib.nullcontext)():
            return _as_text(method(**arguments))

    def _name_arguments(self, call: ToolCall) -> dict[str, Any]:
        bound = self._signatures[call.name].bind(*call.positional, **call.arguments)
        return dict(bound.arguments)


class Verdict:
    """The official verdict of one episode, updated at the end of each user turn.

    A user turn passes if the official checkers find the same state as after the reference calls
    and, among all responses so far, the responses of the turn's reference calls. A turn with
    reference calls needs at least one call; a turn without reference calls passes. The first
    failure is final.
    """

    def __init__(self, task: MultiTurnTask):
        self._reference = task.reference
        self._world = World(task)
        self._responses: list[str] = []
        self._ended = 0
        self.turns_passed = 0

    @property
    def share(self) -> float:
        """The fraction of user turns that have passed; 1 if `valid`."""
        return self.turns_passed / len(self._reference)

    @property
    def valid(self) -> bool:
        """Whether every user turn has ended and passed."""
        return self.turns_passed == len(self._reference)

    def end_turn(self, world: World, responses: Sequence[str]) -> None:
        """Judges a user turn.

        Args:
          world: the policy's world after the turn.
          responses: the responses to the turn's calls.
        """
        failed = self.turns_passed < self._ended
        wanted = [self._world.call(self._world.read(c)) for c in self._reference[self._ended]]
        self._responses += responses
        self._ended += 1
        if failed or (wanted and not (responses and self._agrees(world, wanted))):
            return
        self.turns_passed += 1

    def _agrees(self, world: World, wanted: list[str]) -> bool:
        checker = official("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
        state = checker.state_checker(world.instances, self._world.instances)
        response = checker.response_checker(self._responses, wanted, self._ended)
        return state["valid"] and response["valid"]


@functools.cache  # reading them for every episode would take a quarter of its time
def _signatures(simulator: type) -> dict[str, inspect.Signature]:
    """Signatures of a simulator's public methods, without `self`."""
    functions = inspect.getmembers(simulator, inspect.isfunction)
    signatures = {key: inspect.signature(f) for key, f in functions if not key.startswith("_")}
    return {
        key: signature.replace(parameters=list(signature.parameters.values())[1:])
        for key, signature in signatures.items()
    }


def _own_defaults(signature: inspect.Signature) -> dict[str, Any]:
    # `post_tweet` has lists as defaults, to which `mention` appends: each world needs a copy.
    parameters = signature.parameters.values()
    return {p.name: copy.copy(p.default) for p in parameters if isinstance(p.default, list)}


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, dict):
        with contextlib.suppress(Exception):  # JSON has no numbers of mpmath and decimal
            return json.dumps(result)
    return str(result)


# Locks of process-wide state: calls that change it run one at a time.
_PRECISION = threading.Lock()
_WEATHER = threading.Lock()


@contextlib.contextmanager
def _own_precision() -> Iterator[None]:
    """Holds the numerical precision exclusively and restores it afterwards."""
    with _PRECISION, decimal.localcontext(), official("mpmath").workdps(15):
        yield


# Calls that change process-wide state, and the locks that they hold.
_ALONE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "logarithm": _own_precision,
    "square_root": _own_precision,
    "get_outside_temperature_from_google": lambda: _WEATHER,  # a module's dict, in long contexts
}


def _power_fits(_: Any, arguments: Mapping[str, Any]) -> bool:
    base, exponent = arguments.get("base"), arguments.get("exponent")
    if not isinstance(base, int) or not isinstance(exponent, int) or abs(base) < 2:
        return True  # floats overflow instead
    return exponent * base.bit_length() <= 4 * MAX_DIGITS  # a digit is 3.3 bits


def _rounding_fits(_: Any, arguments: Mapping[str, Any]) -> bool:
    number, places = arguments.get("number"), arguments.get("decimal_places")
    if not isinstance(number, int) or not isinstance(places, int):
        return True
    return places >= -MAX_DIGITS  # rounding an integer computes 10 ** -places


def _precision_fits(_: Any, arguments: Mapping[str, Any]) -> bool:
    try:
        return int(arguments["precision"]) <= MAX_DIGITS
    except (KeyError, TypeError, ValueError, OverflowError):
        return True  # not a number: the simulator reports it


def _logarithm_fits(_: Any, arguments: Mapping[str, Any]) -> bool:
    # mpmath expands a text such as "1e999999999".
    texts = [value for value in arguments.values() if isinstance(value, str)]
    return _precision_fits(_, arguments) and not any("e" in text.lower() for text in texts)


def _tree_fits(system: Any, _: Mapping[str, Any]) -> bool:
    # A copied folder shares its subfolders with the original, and a folder copied into itself
    # contains itself: a few calls can make an infinite tree.
    pending = [(system.root, 0), (system._current_dir, 0)]
    characters = 0
    while pending and characters <= MAX_PATHS:
        folder, depth = pending.pop()
        for name, item in folder.contents.items():
            length = depth + 1 + len(name)
            characters += length
            if isinstance(item, type(system.root)):
                pending.append((item, length))
    return characters <= MAX_PATHS


# For calls whose cost grows faster than their text: whether given arguments are affordable.
_FITS: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "power": _power_fits,
    "round_number": _rounding_fits,
    "square_root": _precision_fits,
    "logarithm": _logarithm_fits,
    "find": _tree_fits,
    "du": _tree_fits,
}
