"""The built-in engine: slots that decode together over a paged KV cache, kept full by the host.

One step: turns that can begin take a slot and pages; all actions under way decode a few tokens in
one dispatch; contexts that are not in the cache yet are prefilled in tiles. Results are fetched
once the next dispatch is on its way, so the device never waits for Python between tokens. All
programs run under the sampler's own mesh, whatever mesh is set around them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from seeupo_jax.parallel.compiling import Between, compile_all, never_stop
from seeupo_jax.parallel.distributed import (
    local_rows,
    max_over_processes,
    row_shard_owners,
    to_global,
)
from seeupo_jax.parallel.mesh import sharding
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.policy.architecture import Routing
from seeupo_jax.policy.network import Network
from seeupo_jax.rollout.engine import sampler
from seeupo_jax.rollout.engine.cache_memory import CachePlan
from seeupo_jax.rollout.engine.clock import Clock, TimedDispatch
from seeupo_jax.rollout.engine.constraints import Constraints
from seeupo_jax.rollout.engine.context_scores import ContextScores, score_context
from seeupo_jax.rollout.engine.grammar import Grammars
from seeupo_jax.rollout.engine.jobs import LONG, SHORT, Job, SlotShard
from seeupo_jax.rollout.engine.protocol import Action, Turn, TurnSampling
from seeupo_jax.rollout.engine.read_plan import ANYWHERE, KVReadPlan
from seeupo_jax.rollout.engine.row_sizes import at_least, cover, decoded_rows, prefilled_rows
from seeupo_jax.rollout.engine.sampler_layout import SamplerLayout
from seeupo_jax.rollout.engine.sampling import Sampling, Streams
from seeupo_jax.types import UNKNOWN_VERSION


class Program(NamedTuple):
    """A program of a collection: `function.lower(*arguments)`, under the sampler's mesh.

    function: jitted. arguments: shape structs with shardings, and static values.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]

    def lower(self) -> jax.stages.Lowered:
        """The program before compilation; under the sampler's mesh."""
        return self.function.lower(*self.arguments)


class _PendingDispatch(NamedTuple):
    """A decode dispatch whose results are not fetched yet: the jobs of each shard's rows.

    records: expert records of the prefills since the previous decoding.
    """

    jobs: list[list[Job]]
    sampled: sampler.Sampled
    timed: TimedDispatch
    records: list[Callable[[], None]]


class SlotEngine:
    """The sampler inside the trainer's process, on the trainer's devices; see `Engine`.

    Args:
      network: as the trainer has it.
      plan: sizes of the cache.
      mesh: the sampler's, over the trainer's devices in their order; None is one device.
      group_size: number of conversations that are likely to share a prefix.
      steps: tokens that a dispatch decodes at most; with grammars it is one, since the host makes a
        mask after every token.
      prefill_tokens: the most tokens that a dispatch prefills, on each shard of the rows.
      few: whether decoding and prefilling are compiled for few numbers of rows only.
      records: whether actions come with the experts of their tokens.
      int8: whether the sampler's matrices of the layers are rounded to 8 bits.
      constraints: what makes the grammars of turns that ask for one; None: none may. Where only
        these constrain, a dispatch decodes one token while an action of its has a grammar.
      fixed_steps: as of `sampler.decode`.
      per_turn: whether turns may have their own sampling, which is of all others then the default.
        One program draws for all, and computes no entropies.
      agree: from numbers of this process to the largest of each over all processes.
      on_swap: keep: conversations keep their keys and values when the policy is swapped; prefill:
        the new policy computes them again.

    Attributes:
      prepared: how often the cache was allocated and the policy laid out.
    """

    def __init__(
        self,
        network: Network,
        sampling: Sampling,
        plan: CachePlan,
        *,
        mesh: jax.sharding.Mesh | None = None,
        group_size: int = 1,
        steps: int = 8,
        prefill_tokens: int = 1024,
        few: bool = False,
        records: bool = False,
        int8: bool = False,
        fixed_steps: bool = False,
        per_turn: bool = False,
        read_plan: KVReadPlan = ANYWHERE,
        grammars: Grammars | None = None,
        constraints: Constraints | None = None,
        agree: Callable[[Sequence[int]], list[int]] = max_over_processes,
        on_swap: str = "keep",
    ):
        self._arch, self._sampling, self.plan = network.arch, sampling, plan
        self._layout, self._reshard_bytes = SamplerLayout(network, mesh, int8=int8), 0
        self._training, self._per_turn = sampling.temperature, per_turn
        self._fixed_steps = fixed_steps
        self._mesh, self._read_plan, self._grammars = mesh, read_plan, grammars
        self._constraints, self._agree = constraints, agree
        if on_swap not in ("keep", "prefill"):
            raise ValueError(f"on_swap: got {on_swap!r}; allowed: keep, prefill.")
        self._prefills_on_swap = on_swap == "prefill"
        self._steps = 1 if grammars is not None else min(steps, sampling.max_tokens)
        self._group_size = group_size if read_plan.kernel == "xla" else 1
        self._owners = [jax.process_index()] if mesh is None else row_shard_owners(mesh)
        local = [i for i, owner in enumerate(self._owners) if owner == jax.process_index()]
        self._records, routing = records, self._arch.routing if records else None
        self._shards = {number: self._new_shard(routing) for number in local}
        parts = 1 if read_plan.block is not None else 4
        self._widths = sorted({-(-plan.row_pages * i // parts) for i in range(1, parts + 1)})
        halvings = 3 if parts == 1 else 1
        self._row_sizes = decoded_rows(plan.slots, halvings=halvings, few=few)
        self._tile_sizes = {
            length: prefilled_rows(prefill_tokens, length, few=few) for length in (LONG, SHORT)
        }
        self._params: Any = None
        # Of the parameters that `_params` are of, where these are kept; weak, not to hold both.
        self._given: Sequence[weakref.ref[Any]] = ()
        self._keeps, self.prepared = False, 0
        self._seed, self._version, self._swaps = np.uint32(0), UNKNOWN_VERSION, 0
        self._flights: deque[_PendingDispatch] = deque()
        self._landed: list[Action] = []  # finished by dispatches that a swap has waited for
        self._to_record: list[Callable[[], None]] = []
        self._pages: Any = None
        self._slots: Any = None
        self._clock = Clock()

    @property
    def concurrency(self) -> int:
        return self.plan.concurrency * len(self._shards)

    @property
    def turn_adapters(self) -> int:
        """Adapters of the policy's turns; 0: all turns have the same."""
        return self._arch.turn_adapters

    @property
    def busy(self) -> bool:
        return bool(self._landed) or any(shard.busy for shard in self._shards.values())

    @property
    def poll_interval_s(self) -> float | None:
        return None if jax.process_count() == 1 else 0.005

    @property
    def shard_owners(self) -> Sequence[int]:
        return self._owners

    @contextlib.contextmanager
    def one_policy(self) -> Iterator[None]:
        outer, self._keeps = self._keeps, True
        try:
            yield
        finally:
            self._keeps = outer
            if not outer:
                self._free()

    def fits(self, context: Sequence[int]) -> bool:
        return len(context) + self._sampling.max_tokens <= self.plan.max_context

    def begin(
        self,
        params: Any,
        *,
        seed: int,
        temperature: float | None = None,
        version: int = UNKNOWN_VERSION,
    ) -> None:
        """Starts a collection with an empty cache."""
        for shard in self._shards.values():
            shard.reset()
        self._end_collection()
        self._clock.begin()
        given, self._reshard_bytes, self._swaps = jax.tree.leaves(params), 0, 0
        if not _same_arrays(given, self._given):
            self._free()
            self._prepare(params)
            self._given = [*map(weakref.ref, given)] if self._keeps else ()
        self._seed, self._version = np.uint32(seed), version
        temperature = self._training if temperature is None else temperature
        self._sampling = self._sampling._replace(temperature=temperature)

    def swap(self, params: Any, version: int) -> None:
        """As of `Engine`; the old policy's copy is freed before the new one's is made."""
        while self._flights:
            self._landed += self._land()
        jax.block_until_ready(self._pages)  # also of prefills, which do not land
        began, given = self._clock.now(), jax.tree.leaves(params)
        if not _same_arrays(given, self._given):
            self._params, self._given = None, ()
            self._place(params)
            self._given = [*map(weakref.ref, given)] if self._keeps else ()
        for shard in self._shards.values():
            shard.swap(prefill=self._prefills_on_swap)
        self._version, self._swaps = version, self._swaps + 1
        self._clock.swap(began)

    def submit(self, turn: Turn) -> None:
        self._shards[turn.shard].waiting.append(turn)

    def cancel(self, key: int) -> None:
        self._landed = [action for action in self._landed if action.key != key]
        for shard in self._shards.values():
            shard.cancel(key)

    def release(self, key: int) -> None:
        for shard in self._shards.values():
            shard.release(key)

    def step(self, unfinished: bool, stop: bool = False) -> list[Action] | None:
        shards = self._shards.values()
        copies = [shard.admit(self._grammars, self._constraints) for shard in shards]
        masked = self._grammars is not None or any(shard.constrained for shard in shards)
        ready = [shard.decodable(landed=masked) for shard in shards]
        wants = [
            int(unfinished or self.busy),
            max(map(len, copies)),
            max(map(len, ready)),
            max((len(job.lease.pages) for jobs in ready for job in jobs), default=0),
            *(max(shard.tiles(length) for shard in shards) for length in (LONG, SHORT)),
            max(len(shard.uncounted()) for shard in shards),
            int(masked),
            int(stop),
        ]
        more, copying, rows, width, *tiles, begun, masked, stopping = self._agree(wants)
        if stopping or not more:
            self._end_collection()
        if stopping:
            self._free()
            raise Stopped
        if not more:
            return None
        with self.mesh_in_force():
            if copying:
                self._copy(copies)
            for shard in shards:
                shard.copied()
            for _ in range(begun):
                self._begin_context()
            if rows:
                rows, width = at_least(self._row_sizes, rows), at_least(self._widths, width)
                self._decode(ready, rows, width, masked=bool(masked))
            for length, count in zip((LONG, SHORT), tiles, strict=True):
                for size in cover(count, self._tile_sizes[length]):
                    self._prefill(length, size)
        actions, self._landed = self._landed, []
        actions += [action for shard in shards for action in shard.take_failed()]
        while len(self._flights) > (1 if rows and not masked else 0):
            actions += self._land()
        return actions

    def compile(self, params: Any, between: Between = never_stop) -> None:
        """Compiles every program ahead, and runs each on empty rows; see `compile_all`."""
        self.begin(params, seed=0)
        programs = [*self._programs(self._params, self._pages, self._slots)]
        empty: list[list[Any]] = [[] for _ in self._shards]
        with self.mesh_in_force():
            compile_all([program.lower for program in programs], between)
            self._copy(empty)
            if self._per_turn:
                self._begin_context()
            for length, rows in self._tiles():
                self._prefill(length, rows)
            for rows, width in self._tables():
                self._decode(empty, rows, width, masked=self._grammars is not None)
                self._land()
        jax.block_until_ready(self._pages)
        self._end_collection()

    def programs(self, params: Any) -> Iterator[Program]:
        """Every program that `compile` runs, by the shapes of its arguments; nothing is allocated.

        Names contain rows x tokens of a prefill, or rows x table pages of a decoding, summed over
        all devices.

        Args:
          params: all of the policy's, as the trainer holds them: arrays, or shape structs with
            shardings. The meshes may be of devices that are not here.
        """
        if (program := self._layout.program(params)) is not None:
            function, changed = program
            yield Program("rollout/reshard", function, (changed,))
        params = self._layout.shapes(params)
        with self.mesh_in_force():
            cache, slots = jax.eval_shape(self._empty)
            axes = [sampler.cache_axes(layer) for layer in cache]
        pages = [self._structs(layer, *axes) for layer, axes in zip(cache, axes, strict=True)]
        slots = self._structs(slots, *sampler.HISTORY_AXES)
        yield from self._programs(params, pages, slots)

    def _programs(self, params: Any, pages: Any, slots: Any) -> Iterator[Program]:
        """The programs that run on the sampler's copy of the policy, a cache and slots."""
        shards, idle = self.plan.shards, self._new_shard()
        pairs = self._global_shapes(self._pairs([]))
        yield Program("rollout/copy", sampler.copy_pages, (pages, *pairs))
        if self._per_turn:
            contexts = self._global_shapes(idle.take_context())
            yield Program("rollout/context", sampler.begin_contexts, (slots, *contexts))
        for length, rows in self._tiles():
            tiles = self._global_shapes(idle.take_tiles(rows, length))
            how = self._read_plan.block, self._records
            arguments = self._layout.network, params, pages, *tiles, *how
            yield Program(f"rollout/prefill {rows * shards}x{length}", sampler.prefill, arguments)
        for rows, width in self._tables():
            masked = self._grammars is not None
            part = self._global_shapes(self._rows(idle, [], rows, width, masked=masked))
            arguments = self._decode_arguments(params, pages, slots, *part)
            yield Program(f"rollout/decode {rows * shards}x{width}", sampler.decode, arguments)

    def score(self, tokens: Sequence[int], top: int) -> ContextScores:
        """The log-probabilities of a context's tokens; arguments as of `score_context`."""
        with self.mesh_in_force():
            return score_context(self._layout.network, self._params, tokens, top)

    def usage(self) -> Mapping[str, int]:
        usage: Counter[str] = Counter(reshard_bytes=self._reshard_bytes)
        if self._swaps:
            usage["swaps"] = self._swaps
        for shard in self._shards.values():
            usage.update(shard.usage())  # unlike +, it keeps zeros
        return usage

    def seconds(self) -> Mapping[str, float]:
        return self._clock.seconds

    @property
    def idle_s(self) -> float:
        """Seconds of the collection in which no prefill or decoding was dispatched."""
        return self._clock.idle_s

    def mesh_in_force(self) -> contextlib.AbstractContextManager[Any]:
        """Where the engine's programs run and compile."""
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def _new_shard(self, routing: Routing | None = None) -> SlotShard:
        words = -(-self._arch.vocab_size // 32)
        return SlotShard(
            self.plan,
            self._sampling.max_tokens,
            routing,
            mask_words=words,
            adapters=self._arch.turn_adapters,
        )

    def _prepare(self, params: Any) -> None:
        """Takes the devices' memory: the policy's copy's, and the cache's."""
        self._place(params)
        with self.mesh_in_force():
            self._pages, self._slots = self._empty()
        self.prepared += 1

    def _place(self, params: Any) -> None:
        """Lays the policy out."""
        with self.mesh_in_force():
            self._params = jax.block_until_ready(self._layout.place(params))  # needs memory itself
        self._reshard_bytes += self._layout.reshard(params).own_bytes

    def _end_collection(self) -> None:
        """Forgets the dispatches; leaves the devices' memory to the sweep unless it is kept."""
        self._flights.clear()
        self._landed.clear()
        self._to_record.clear()
        self._clock.end()
        if not self._keeps:
            self._free()

    def _free(self) -> None:
        """Frees the memory that `_prepare` took."""
        self._params = self._pages = self._slots = None
        self._given = ()

    def _empty(self) -> tuple[Any, Any]:
        """The cache and the slots, with nothing in them."""
        plan = self.plan
        shards = plan.shards
        return sampler.allocate(
            self._arch,
            shards * plan.pages,
            plan.page_size,
            shards * plan.slots,
            shards * plan.states,
            self._per_turn,
        )

    def _tiles(self) -> Iterator[tuple[int, int]]:
        """Lengths and numbers of rows that prefill is compiled for."""
        return ((length, rows) for length, sizes in self._tile_sizes.items() for rows in sizes)

    def _tables(self) -> Iterator[tuple[int, int]]:
        """Numbers of rows and pages of their tables that decoding is compiled for."""
        return ((rows, width) for rows in self._row_sizes for width in self._widths)

    def _where(self, *logical: str | None) -> Any:
        return None if self._mesh is None else sharding(self._mesh, logical)

    def _join_shards(self, parts: Sequence[Any]) -> Any:
        """Trees of arrays, one a shard of this process, as one tree of global arrays."""
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        return to_global(joined, self._where("rows"))

    def _global_shapes(self, part: Any) -> Any:
        """The shape structs that `_join_shards` gives where every shard has such a part."""

        def shape(x: np.ndarray) -> tuple[int, ...]:
            return (self.plan.shards * x.shape[0], *x.shape[1:])

        return jax.tree.map(lambda x: self._struct(shape(x), x.dtype, "rows"), part)

    def _struct(self, shape: Any, dtype: Any, *logical: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._where(*logical))

    def _structs(self, layer: Any, *axes: str | None) -> Any:
        """The arrays of a layer's cache, of as many axes or of fewer, the first of them."""
        return jax.tree.map(lambda x: self._struct(x.shape, x.dtype, *axes[: x.ndim]), layer)

    def _pairs(self, pairs: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        missing = [(0, self.plan.pages)] * (self.plan.slots - len(pairs))
        source_X, target_X = np.array([*pairs, *missing], np.int32).T
        return source_X, target_X

    def _copy(self, copies: Sequence[Sequence[tuple[int, int]]]) -> None:
        pairs = self._join_shards([*map(self._pairs, copies)])
        self._pages = sampler.copy_pages(self._pages, *pairs)
        if self._records:
            for shard, shard_copies in zip(self._shards.values(), copies, strict=True):
                self._to_record.append(functools.partial(shard.experts.copy, shard_copies))

    def _begin_context(self) -> None:
        contexts = [shard.take_context() for shard in self._shards.values()]
        self._slots = sampler.begin_contexts(self._slots, *self._join_shards(contexts))

    def _prefill(self, length: int, rows: int) -> None:
        tiles = [shard.take_tiles(rows, length) for shard in self._shards.values()]
        state, began = (self._layout.network, self._params, self._pages), self._clock.now()
        self._pages, mark, routed_RLG = sampler.prefill(
            *state, *self._join_shards(tiles), self._read_plan.block, self._records
        )
        self._clock.prefill(began, mark)
        if self._records:
            self._to_record.append(functools.partial(self._record_tiles, tiles, routed_RLG))

    def _record_tiles(self, tiles: Sequence[Any], routed_RLG: jax.Array) -> None:
        parts = np.split(local_rows(routed_RLG), len(tiles))
        for shard, (_, *where), part in zip(self._shards.values(), tiles, parts, strict=True):
            shard.experts.write_tiles(*where, part)

    def _rows(
        self, shard: SlotShard, jobs: Sequence[Job], rows: int, width: int, *, masked: bool
    ) -> Any:
        return shard.take_rows(
            jobs,
            rows,
            width,
            group_size=self._group_size,
            steps=1 if masked else self._steps,
            # Of rows with their own sampling there is one program, which always has masks.
            masked=masked or self._per_turn,
            own=self._default if self._per_turn else None,
        )

    @property
    def _default(self) -> TurnSampling:
        """The sampling of turns that say nothing."""
        temperature, top_k, top_p, *_ = self._sampling
        if top_k == 1:
            return TurnSampling(temperature=0.0)
        return TurnSampling(temperature, 1.0 if top_p is None else top_p, top_k or 0)

    def _decode_arguments(
        self, params: Any, pages: Any, slots: Any, who: Any, page_table: Any, streams: Any
    ) -> tuple[Any, ...]:
        sampling, steps = self._sampling, self._steps
        if self._per_turn:  # one program for all of them
            own = {"temperature": 1.0, "top_k": None, "top_p": None, "entropy_tokens": 0}
            sampling = sampling._replace(**own)
        elif who.mask_RW is not None:
            steps = 1
        return (
            self._layout.network,
            sampling,
            params,
            pages,
            slots,
            who,
            page_table,
            Streams(self._seed, *streams),
            steps,
            *self._read_plan,
            self._records,
            self._fixed_steps,
        )

    def _decode(self, jobs: Sequence[list[Job]], rows: int, width: int, *, masked: bool) -> None:
        taken = [each[:rows] for each in jobs]
        parts = [
            self._rows(shard, each, rows, width, masked=masked)
            for shard, each in zip(self._shards.values(), taken, strict=True)
        ]
        state, began = (self._params, self._pages, self._slots), self._clock.now()
        sampled, self._pages, self._slots = sampler.decode(
            *self._decode_arguments(*state, *self._join_shards(parts))
        )
        jax.copy_to_host_async(sampled)
        timed = self._clock.decode(began, sampled)
        self._flights.append(_PendingDispatch(taken, sampled, timed, self._to_record))
        self._to_record = []

    def _land(self) -> list[Action]:
        """Fetches the oldest dispatch; the actions that it finished."""
        flight = self._flights.popleft()
        self._clock.land(flight.timed)
        for record in flight.records:
            record()
        sampled = jax.tree.map(local_rows, flight.sampled)
        tokens_RK, logp_RK, count_R, alive_R, (steps,), entropy_RK, routed_RKG, *top = sampled
        rows = len(count_R) // len(self._shards)
        actions = []
        for index, (shard, jobs) in enumerate(zip(self._shards.values(), flight.jobs, strict=True)):
            shard.counts["decode_positions"] += rows * int(steps)
            for row, job in enumerate(jobs, index * rows):
                count = int(count_R[row])
                result = tokens_RK[row, :count].tolist(), logp_RK[row, :count].tolist()
                if entropy_RK is not None:
                    job.add_entropy(entropy_RK[row, :count].tolist())
                if top[0] is not None:
                    job.add_top(*(each_RKT[row, :count] for each_RKT in top))
                job.version_L += [self._version] * count
                routed_KG = None if routed_RKG is None else routed_RKG[row, :count]
                alive = bool(alive_R[row])
                actions += shard.on_result(job, *result, alive=alive, routed_KG=routed_KG)
        return actions


def _same_arrays(arrays: Sequence[Any], references: Sequence[weakref.ref[Any]]) -> bool:
    same = (x is reference() for x, reference in zip(arrays, references, strict=False))
    return len(arrays) == len(references) and all(same)
