"""A compiled program read from its HLO text: instructions, loops, and the arrays in its memory.

The text is `compiled.as_text()`, of one device: shapes in it are each device's own part.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

# How often a loop runs whose count the program decides while it runs, by the loop's scope.
Trips = Callable[[str], int]
Shape = tuple[str, tuple[int, ...]]  # HLO's name of a type (f32, bf16, ...), and dimensions

_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*?)\)(.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%[^\s,]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SCOPE = re.compile(r'op_name="([^"]*)"')
_COPIES = ("copy", "bitcast", "copy-start", "copy-done")
# Instructions whose result is an array, or a part of one, that another instruction made.
_ALIASES = ("bitcast", "get-tuple-element", "tuple", "while", "conditional", "call")
_LARGEST = 5  # arrays that are named


@dataclass(frozen=True)
class Instruction:
    """A line of a computation: `%name = shape op(operands)rest`."""

    name: str
    shape: str
    op: str
    operands: str
    rest: str

    @functools.cached_property
    def inputs(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([^\s,]+)", self.operands)

    @property
    def shapes(self) -> list[Shape]:
        """Shapes of the result; several for a tuple."""
        return [
            (dtype, tuple(int(dim) for dim in dims.split(",") if dim))
            for dtype, dims in _SHAPE.findall(self.shape)
        ]

    @property
    def scope(self) -> str:
        """The scope in the source that it comes from; empty if unknown."""
        match = _SCOPE.search(self.rest)
        return match[1] if match else ""

    @property
    def called(self) -> list[str]:
        """Computations that run when this one does; not what a reduction applies to elements."""
        return [
            name
            for key, names in _CALLED.findall(self.rest)
            if key != "to_apply" or self.op == "call"
            for name in re.findall(r"%([^\s,{}]+)", names)
        ]

    def named(self, key: str) -> str:
        """The computation that an attribute names."""
        return re.search(rf"\b{key}=%([^\s,]+)", self.rest)[1]

    @property
    def index(self) -> int | None:
        """The index of the tuple element that it takes; None: it takes none."""
        match = re.search(r"index=(\d+)", self.rest)
        return int(match[1]) if match and self.op == "get-tuple-element" else None


@dataclass
class Module:
    """A program: the instructions of each computation by name, in order.

    roots: the result of each computation. callers: the first one that calls each.
    """

    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)
    roots: dict[str, Instruction] = field(default_factory=dict)
    callers: dict[str, Instruction] = field(default_factory=dict)
    entry: str = ""

    def runs(self, unknown_trips: Trips = lambda _: 1) -> dict[str, int]:
        """Runs of each computation in one execution, without those that never run."""
        runs: dict[str, int] = {}

        def visit(computation: str, times: int) -> None:
            runs[computation] = runs.get(computation, 0) + times
            for instruction in self.computations[computation].values():
                each = times
                if instruction.op == "while":
                    trips = self.trips(computation, instruction)
                    each *= unknown_trips(instruction.scope) if trips is None else trips
                for called in instruction.called:
                    visit(called, each)

        visit(self.entry, 1)
        return runs

    def trips(self, computation: str, loop: Instruction) -> int | None:
        """Iterations of a loop in a computation; None: they depend on the data.

        The CPU's compiler annotates them. The TPU's does not: there they follow from the test of a
        counter against a constant, its first value and the increment in the body.
        """
        count = _TRIP_COUNT.search(loop.rest)
        if count:
            return int(count[1])
        test = self.roots[loop.named("condition")]
        start = self._source(computation, loop.inputs[0])
        if test.op != "compare" or "direction=LT" not in test.rest or start.op != "tuple":
            return None
        counter, limit = (self.computations[loop.named("condition")][name] for name in test.inputs)
        last = self._constant(loop.named("condition"), limit.name)
        if counter.index is None or last is None:
            return None
        first = self._constant(computation, start.inputs[counter.index])
        step = self._step(loop.named("body"), counter.index)
        return None if first is None or step is None else max(0, -(-(last - first) // step))

    def _step(self, body: str, index: int) -> int | None:
        """The constant that a loop's body adds to part `index` of its state; None: no constant."""
        after = self._source(body, self.roots[body].inputs[index])
        if after.op != "add":
            return None
        parts = [self._source(body, name).index for name in after.inputs]
        added = [self._constant(body, name) for name in after.inputs]
        return next((step for step in added if step), None) if index in parts else None

    def _constant(self, computation: str, name: str) -> int | None:
        made = self._source(computation, name)
        is_integer = made.op == "constant" and re.fullmatch(r"-?\d+", made.operands)
        return int(made.operands) if is_integer else None

    def _source(self, computation: str, name: str) -> Instruction:
        """The instruction that made a value, seen through copies of it."""
        instruction = self.computations[computation][name]
        while instruction.op in _COPIES:
            instruction = self.computations[computation][instruction.inputs[0]]
        return instruction

    def operand_bytes(self, computation: str, instruction: Instruction) -> int:
        """Bytes of an instruction's operands."""
        operands = (self.computations[computation][name] for name in instruction.inputs)
        return sum(array_bytes(shape) for operand in operands for shape in operand.shapes)

    def scope(self, computation: str, instruction: Instruction) -> str:
        """The named scope of an instruction; without one, that of the fusion that calls it."""
        caller = self.callers.get(computation, instruction)
        return instruction.scope if instruction.scope else caller.scope


@functools.lru_cache(maxsize=2)
def parse(text: str) -> Module:
    """The instructions of a compiled program, `compiled.as_text()`."""
    module, here, last = Module(), "", None
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        match = _INSTRUCTION.match(line) if here else None
        if header:
            here = header[2]
            module.computations[here] = {}
            module.entry = here if header[1] else module.entry
        elif match:
            root, *parts = match.groups()
            last = Instruction(*parts)
            module.computations[here][last.name] = last
            if root:
                module.roots[here] = last
        elif line == "}":
            here = ""
        elif here and last is not None:  # a kernel's attributes go on over several lines
            last = Instruction(last.name, last.shape, last.op, last.operands, last.rest + line)
            module.computations[here][last.name] = last
    for computation in module.computations.values():
        for caller in computation.values():
            module.callers = dict.fromkeys(caller.called, caller) | module.callers
    return module


def array_bytes(shape: Shape) -> int:
    """Bytes of an array without what a layout adds to it."""
    dtype, dims = shape
    if dtype == "token":  # only orders instructions
        return 0
    bits = re.search(r"\d+", dtype)
    return math.prod(dims) * (int(bits[0]) if bits else 8) // 8


@dataclass(frozen=True)
class Array:
    """An array that a program makes, on one device.

    op: the instruction's kind. scope: where in the source it comes from.
    """

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    op: str
    name: str
    scope: str


def largest_arrays(text: str) -> list[Array]:
    """The largest arrays that lie in memory, one of each type and shape, largest first."""
    arrays = _distinct(array for array in _arrays(parse(text)) if array.op not in _ALIASES)
    return sorted(arrays, key=lambda array: -array.bytes)[:_LARGEST]


def find_shapes(text: str, predicate: Callable[[str, tuple[int, ...]], bool]) -> list[Array]:
    """The arrays in memory whose type and dimensions fulfil a predicate, one of each.

    Args:
      predicate: of HLO's name of the type (f32, bf16, s32, ...) and the dimensions.
    """
    return _distinct(a for a in _arrays(parse(text)) if predicate(a.dtype, a.dims))


def score_matrix(length: int, *, context: int = 1) -> Callable[[str, tuple[int, ...]], bool]:
    """A predicate of arrays that hold a number for each pair of a row's tokens.

    These have two dimensions made of the row's length: the length itself, a multiple of it (heads
    or rows merged into it) or, with the length cut over `context` devices, its part. The answer is
    sure only where no other dimension of the program (width, vocabulary, ...) looks like that.
    """

    def holds(_: str, dims: tuple[int, ...]) -> bool:
        return sum(dim > 0 and dim % (length // context) == 0 for dim in dims) >= 2

    return holds


def logits(vocab: int, tokens: int, *, tensor: int = 1) -> Callable[[str, tuple[int, ...]], bool]:
    """A predicate of arrays that hold a number for each of at least `tokens` tokens and each word.

    Args:
      tokens: of one device. The parameters' tables [V, D] match too unless it is above their D.
      tensor: devices that the vocabulary may be cut over.
    """

    def holds(_: str, dims: tuple[int, ...]) -> bool:
        words = [size for size in (vocab, vocab // tensor) if size in dims]
        return bool(words) and math.prod(dims) >= tokens * words[0]

    return holds


def _distinct(arrays: Iterable[Array]) -> list[Array]:
    """The first array of each type and shape."""
    first: dict[tuple[str, tuple[int, ...]], Array] = {}
    for array in arrays:
        first.setdefault((array.dtype, array.dims), array)
    return list(first.values())


def _arrays(module: Module) -> Iterator[Array]:
    """All results but those inside of fusions, which never lie in memory as a whole."""
    inner = {
        name
        for computation in module.computations.values()
        for instruction in computation.values()
        if instruction.op == "fusion"
        for name in instruction.called
    }
    for computation in module.runs():
        if computation in inner:
            continue
        for instruction in module.computations[computation].values():
            scope = module.scope(computation, instruction)
            for dtype, dims in instruction.shapes:
                size = array_bytes((dtype, dims))
                yield Array(dtype, dims, size, instruction.op, instruction.name, scope)
