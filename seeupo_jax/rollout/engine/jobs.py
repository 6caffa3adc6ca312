"""One row shard's bookkeeping on the host: waiting turns, running actions, the next dispatch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from seeupo_jax.policy.architecture import Routing
from seeupo_jax.policy.kernels.attention import NOWHERE
from seeupo_jax.policy.kernels.paged import PageTable, Prefixes, StateRows
from seeupo_jax.rollout.engine.cache_memory import CachePlan
from seeupo_jax.rollout.engine.constraints import Constraints
from seeupo_jax.rollout.engine.expert_pages import ExpertPages
from seeupo_jax.rollout.engine.grammar import Grammars, Matcher
from seeupo_jax.rollout.engine.kv_pages import Lease, LeaseRefusal, PageTree
from seeupo_jax.rollout.engine.protocol import Action, Turn, TurnSampling
from seeupo_jax.rollout.engine.row_sampling import row_sampling
from seeupo_jax.rollout.engine.sampler import SlotRows
from seeupo_jax.rollout.engine.state_tree import StateTree

COUNTS = (
    "prefilled_tokens",
    "prefill_positions",
    "decoded_tokens",
    "decode_positions",
    "memory_waits",
)
OF_ADAPTERS = "adapter_prefill_tokens"  # counted where adapters are per turn
LONG, SHORT = 128, 16  # tokens of a prefilled row
# Attention reads a prefix that rows share once if it has at least this many tokens.
PREFIX_AT_LEAST = 128


@dataclass(eq=False)
class Job:
    """An action that is being decoded.

    limit: the most tokens that it may have.
    context: tokens that its lease begins with: the turn's, and those of the action that were
      sampled before a swap of the policy, after which they are prefilled like a context.
    prefilled: leading context tokens whose keys and values are in the cache, or dispatched.
    cached: as of `Action`.
    dispatched: decoding steps that have been dispatched; 0: none.
    matcher: of a grammar, and mask_W, the bits of the tokens that it allows next.
    entropy, top, version_L: as of `Action`, so far.
    counted: whether its slot's history has begun with the context, if penalties need it.
    adapter: of its tokens and of its context, where adapters are per turn.
    """

    turn: Turn
    limit: int
    lease: Lease
    slot: int
    context: Sequence[int]
    prefilled: int
    cached: int
    dispatched: int = 0
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version_L: list[int] = field(default_factory=list)
    matcher: Matcher | None = None
    mask_W: np.ndarray | None = None
    entropy: float | None = None
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    counted: bool = False
    adapter: int = 0

    def add_entropy(self, entropy: Sequence[float]) -> None:
        """Adds that of more tokens."""
        self.entropy = sum(entropy, 0.0 if self.entropy is None else self.entropy)

    def add_top(self, top_KT: np.ndarray, logp_KT: np.ndarray) -> None:
        """Adds the likeliest tokens at more tokens, as many as the turn asks for."""
        most = 0 if self.turn.sampling is None else self.turn.sampling.top_logprobs
        if most:
            pairs = zip(top_KT[:, :most].tolist(), logp_KT[:, :most].tolist(), strict=True)
            self.top += [list(zip(*pair, strict=True)) for pair in pairs]

    @property
    def position(self) -> int:
        """The position of the last token, which is not in the cache yet."""
        return len(self.turn.context) - 1 + len(self.tokens)

    @property
    def unread(self) -> int:
        """Context tokens to prefill; the last one is decoding's first input."""
        return len(self.context) - 1 - self.prefilled

    @property
    def unread_to_stop(self) -> int:
        """Those of them that one row may have."""
        return self.lease.stops[0] - self.prefilled if self.lease.stops else self.unread

    @property
    def written(self) -> list[int]:
        """Tokens that decoding has put into the cache after the context; empty before it began."""
        new = self.tokens[len(self.context) - len(self.turn.context) :]
        return [self.context[-1], *new[:-1]] if new else []

    def lay_down(self) -> None:
        """Its lease is over: all tokens so far will be the context of another."""
        self.context = [*self.turn.context, *self.tokens]

    def take_up(self, lease: Lease) -> None:
        """Goes on with a new lease, in the same slot."""
        self.lease, self.prefilled = lease, lease.cached


class SlotShard:
    """The slots and pages of one part of the devices.

    action: the most tokens of an action. experts: the record of those in the cache; None: none.
    mask_words: words of a mask over the vocabulary.
    adapters: of turns; each has keys and values of its own. 0: all turns have the same.
    Of a model with recurrent layers a dispatch prefills one row of a context, which the next one
    continues.
    """

    def __init__(
        self,
        plan: CachePlan,
        action: int,
        routing: Routing | None = None,
        *,
        mask_words: int = 0,
        adapters: int = 0,
    ):
        self._plan, self._action, self._routing = plan, action, routing
        self._mask_words, self._adapters = mask_words, adapters
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.counts: Counter[str] = Counter()
        self.waiting: list[Turn] = []
        self.jobs: dict[int, Job] = {}  # by slot, in the order of their beginning
        self._laid_down: list[Job] = []  # that have a slot, and no pages since a swap
        self.failed: list[Action] = []  # before their first token
        size = self._plan.pages, self._plan.page_size
        self._states = StateTree(*size, self._plan.states) if self._plan.states else None
        self._tree = PageTree(*size) if self._states is None else self._states
        self.experts = None if self._routing is None else ExpertPages(self._routing, *size)
        self._free = list(range(self._plan.slots))[::-1]
        self._leases: dict[int, Lease] = {}  # of each open conversation's last action
        self._swaps = 0  # since the collection began
        self._policies: dict[int, int] = {}  # swaps before the first turn of each open conversation
        # Tokens of each open conversation that an adapter has computed, and which lease's it was.
        self._computed: dict[int, tuple[int, int]] = {}

    @property
    def busy(self) -> bool:
        """Whether any turn is not finished."""
        return bool(self.jobs or self._laid_down or self.waiting or self.failed)

    def swap(self, *, prefill: bool) -> None:
        """The policy has changed, and all dispatches have landed.

        Conversations that begin from now on share no keys and values with earlier ones.

        Args:
          prefill: whether earlier ones lose theirs, too.
        """
        self._swaps += 1
        if prefill:
            for job in self.jobs.values():
                self._tree.cancel(job.lease)
                job.lay_down()
            self._laid_down = [*self.jobs.values(), *self._laid_down]
            self.jobs, self._leases, self._policies, self._computed = {}, {}, {}, {}
        self._forget_policies()

    def _forget_policies(self) -> None:
        """Frees the pages of policies that no open conversation began with."""
        kept = {self._swaps, *self._policies.values()}
        each = range(max(1, self._adapters))
        self._tree.forget({self._root(swaps, adapter) for swaps in kept for adapter in each})

    def _root(self, swaps: int, adapter: int) -> int:
        """The number by which the tree knows the policy after so many swaps, with an adapter."""
        return swaps * max(1, self._adapters) + adapter

    def _adapter_of(self, turn: Turn) -> int:
        return min(turn.action, self._adapters - 1) if self._adapters else 0

    def admit(
        self, grammars: Grammars | None, constraints: Constraints | None = None
    ) -> list[tuple[int, int]]:
        """Starts the turns that can start, open conversations first; returns pages to copy first.

        A turn whose context another one is about to prefill waits to share it. A turn without
        enough memory blocks all turns behind it, so that none waits forever. Actions that were
        under way when the policy changed come before all turns.
        """
        copies = []
        for job in list(self._laid_down):
            reserve = job.limit - len(job.tokens)
            lease = self._lease(job.turn.key, job.context, reserve, job.adapter)
            if lease is None and self._tree.refusal is LeaseRefusal.PAGES:
                return copies
            if lease is None:
                continue
            self._laid_down.remove(job)
            job.take_up(lease)
            self.jobs[job.slot] = job
            copies += [] if lease.copy is None else [lease.copy]
        self.waiting.sort(key=lambda turn: turn.turn == 0)
        for turn in list(self.waiting):
            if not self._free:
                break
            limit = self._action if turn.limit is None else min(turn.limit, self._action)
            adapter = self._adapter_of(turn)
            lease = self._lease(turn.key, turn.context, limit, adapter)
            if lease is None and self._tree.refusal is LeaseRefusal.PAGES:
                break
            if lease is None:
                continue
            self.waiting.remove(turn)
            slot, cached = self._free.pop(), lease.cached
            job = Job(turn, limit, lease, slot, turn.context, cached, cached, adapter=adapter)
            self.jobs[job.slot] = job
            if self._constrain(job, grammars, constraints) and lease.copy is not None:
                copies.append(lease.copy)
        return copies

    def _lease(self, key: int, context: Sequence[int], reserve: int, adapter: int) -> Lease | None:
        """A lease for a conversation, among the pages of the policy that it began with."""
        root = self._root(self._policies.get(key, self._swaps), adapter)
        lease = self._tree.lease(context, reserve, root)
        if lease is not None:
            if self._adapters:
                self._leave_adapter(key, lease, len(context) - 1)
            self._leases[key] = lease
            self._policies.setdefault(key, self._swaps)
        elif self._tree.refusal is LeaseRefusal.PAGES:
            self.counts["memory_waits"] += 1
        return lease

    def _leave_adapter(self, key: int, lease: Lease, unread: int) -> None:
        """Where a conversation goes on under another adapter: counts what is prefilled again.

        Args:
          unread: tokens of its context, those in the cache included, but the last one.
        """
        computed, policy = self._computed.get(key, (0, lease.policy))
        if policy == lease.policy:
            return
        self.counts[OF_ADAPTERS] += max(0, min(computed, unread) - lease.cached)
        del self._computed[key]
        previous = self._leases.get(key)
        if previous is not None and not previous.open:
            self._tree.evict_first(previous)

    def _constrain(
        self, job: Job, grammars: Grammars | None, constraints: Constraints | None
    ) -> bool:
        """Begins an action's grammar, if it has one; ends the action where that fails."""
        tools, wanted = job.turn.tools, job.turn.constraint
        if wanted is not None and wanted.optional and grammars is None:
            wanted = None
        if grammars is None and wanted is None:
            return True
        try:
            if wanted is None:
                assert grammars is not None
                job.matcher = grammars.begin(tools)
            else:
                assert constraints is not None, "an engine without constraints got one"
                job.matcher = constraints.begin(wanted, tools)
            job.mask_W = np.zeros(self._mask_words, np.uint32)
            job.matcher.allowed(job.mask_W)
        except (ValueError, RuntimeError) as error:
            self._end(job)
            refused = isinstance(error, ValueError)
            failed = Action(job.turn.key, [], [], failure=str(error), refuses_tools=refused)
            self.failed.append(failed)
            return False
        return True

    def uncounted(self) -> list[Job]:
        """The jobs whose slots' histories have to begin."""
        return [
            job
            for job in self.jobs.values()
            if job.turn.sampling is not None and job.turn.sampling.penalizes and not job.counted
        ]

    def take_context(self) -> tuple[np.ndarray, np.ndarray]:
        """The slot, [1], and the context, [1, max_context], of the next history that begins."""
        slot_R = np.full(1, self._plan.slots, np.int32)
        context_RC = np.full((1, self._plan.max_context), -1, np.int32)
        for job in self.uncounted()[:1]:
            slot_R[0], job.counted = job.slot, True
            context_RC[0, : len(job.turn.context)] = job.turn.context
        return slot_R, context_RC

    @property
    def constrained(self) -> bool:
        """Whether an action has a grammar."""
        return any(job.matcher is not None for job in self.jobs.values())

    def copied(self) -> None:
        """After the copies have been dispatched: contexts that are cached in full may be shared."""
        for job in self.jobs.values():
            if job.lease.pending and not job.unread:
                self._tree.computed(job.lease)

    def tiles(self, length: int) -> int:
        """How many rows of this length there are to prefill now."""
        return len(self._tiles(length))

    def _tiles(self, length: int) -> list[Job]:
        """The jobs of these rows; of each with a state one row, which the next one continues."""
        most = None if self._states is None else 1
        return [job for job in self.jobs.values() for _ in range(_tiles_of(job, length))[:most]]

    def take_tiles(self, rows: int, length: int) -> tuple[np.ndarray, np.ndarray, PageTable]:
        """The next rows to prefill: tokens and positions [rows, length], and their page tables."""
        tokens_RL = np.zeros((rows, length), np.int32)
        position_RL = np.full((rows, length), NOWHERE, np.int32)
        tiles = self._tiles(length)[:rows]
        page_table = self._page_table(tiles, rows, self._plan.row_pages, group_size=1)
        for row, job in enumerate(tiles):
            count = min(length, job.unread_to_stop)
            end = job.prefilled + count
            tokens_RL[row, :count] = job.context[job.prefilled : end]
            position_RL[row, :count] = np.arange(job.prefilled, end)
            job.prefilled = end
            self.counts["prefilled_tokens"] += count
            if not job.unread or end in job.lease.stops:
                self._tree.computed(job.lease)
        self.counts["prefill_positions"] += tokens_RL.size
        return tokens_RL, position_RL, page_table

    def decodable(self, *, landed: bool) -> list[Job]:
        """Actions to decode; `landed`: only those whose every step has been fetched."""
        return [
            job
            for job in self.jobs.values()
            if not job.unread
            and job.dispatched < job.limit
            and not (landed and job.dispatched > len(job.tokens))
        ]

    def take_rows(
        self,
        jobs: Sequence[Job],
        rows: int,
        width: int,
        *,
        group_size: int,
        steps: int,
        masked: bool,
        own: TurnSampling | None = None,
    ) -> tuple[SlotRows, PageTable, tuple[np.ndarray, ...]]:
        """Rows to decode, their page tables (`width` pages), and the numbers of their streams.

        Args:
          group_size: rows that one shared prefix may serve; 1: no shared prefixes.
          masked: whether there are masks.
          own: of the turns that say nothing, if each may have its own; else None.
        """
        slot_R = np.full(rows, self._plan.slots, np.int32)
        token_R, position_R, limit_R = np.zeros((3, rows), np.int32)
        fresh_R = np.zeros(rows, bool)
        numbers_4R = np.zeros((4, rows), np.uint32)
        for row, job in enumerate(jobs):
            turn = job.turn
            slot_R[row], fresh_R[row] = job.slot, job.dispatched == 0
            token_R[row], position_R[row] = turn.context[-1], len(turn.context) - 1
            limit_R[row] = job.limit
            numbers_4R[:, row] = turn.iteration, turn.task, turn.member, turn.turn
            job.dispatched += steps
        mask_RW = _masks(jobs, rows, self._mask_words) if masked else None
        sampling = None
        if own is not None:
            sampling = row_sampling([job.turn.sampling or own for job in jobs], rows, steps)
        who = SlotRows(slot_R, fresh_R, token_R, position_R, limit_R, mask_RW, sampling)
        return who, self._page_table(jobs, rows, width, group_size), tuple(numbers_4R)

    def _page_table(self, jobs: Sequence[Job], rows: int, width: int, group_size: int) -> PageTable:
        """The page table of rows: the pages that a group shares once, and each row's own."""
        prefixes, skipped = None, {}
        if group_size > 1:
            prefixes, skipped = self._prefixes(jobs, rows, width, group_size)
        table_RP = np.zeros((rows, width), np.int32)
        start_R = np.zeros(rows, np.int32)
        for row, job in enumerate(jobs):
            skip = skipped.get(row, 0)
            pages = job.lease.pages[skip:]
            table_RP[row, : len(pages)] = pages
            start_R[row] = skip * self._plan.page_size
        adapter_R = None
        if self._adapters:
            adapter_R = np.zeros(rows, np.int32)
            adapter_R[: len(jobs)] = [job.adapter for job in jobs]
        states = self._state_rows(jobs, rows)
        return PageTable(table_RP, start_R, prefixes, states, adapter_R)

    def _state_rows(self, jobs: Sequence[Job], rows: int) -> StateRows | None:
        """The states that a dispatch of rows reads and writes, which the next ones continue."""
        if self._states is None:
            return None
        read_R, write_R = np.full((2, rows), self._plan.states, np.int32)
        for row, job in enumerate(jobs):
            read_R[row], write_R[row] = job.lease.read, job.lease.write
            self._states.advance(job.lease)
        return StateRows(read_R, write_R)

    def _prefixes(
        self, jobs: Sequence[Job], rows: int, width: int, group_size: int
    ) -> tuple[Prefixes, dict[int, int]]:
        """The prefixes that groups of rows share, and how many of its pages a row thereby skips."""
        count = max(1, rows // group_size)
        table_QP = np.zeros((count, width), np.int32)
        length_Q = np.zeros(count, np.int32)
        rows_QG = np.full((count, group_size), rows, np.int32)
        groups: dict[tuple[int, int], list[int]] = {}
        for row, job in enumerate(jobs):
            groups.setdefault((job.turn.group, job.lease.policy), []).append(row)
        parts = (
            members[first : first + group_size]
            for members in groups.values()
            for first in range(0, len(members), group_size)
        )
        skipped: dict[int, int] = {}
        prefix = 0
        for members in parts:
            leases = (jobs[row].lease for row in members)
            pages = _common([lease.pages[: lease.shared] for lease in leases])
            tokens = len(pages) * self._plan.page_size
            if prefix == count or len(members) == 1 or tokens < PREFIX_AT_LEAST:
                continue
            table_QP[prefix, : len(pages)], length_Q[prefix] = pages, tokens
            rows_QG[prefix, : len(members)] = members
            skipped |= dict.fromkeys(members, len(pages))
            prefix += 1
        return Prefixes(table_QP, length_Q, rows_QG), skipped

    def on_result(
        self,
        job: Job,
        tokens: list[int],
        logp: list[float],
        *,
        alive: bool,
        routed_KG: np.ndarray | None = None,
    ) -> list[Action]:
        """Takes an action's tokens from a dispatch; returns the action once it is complete."""
        if self.jobs.get(job.slot) is not job:
            return []  # it had ended before
        if self.experts is not None:
            self.experts.write(job.lease.pages, job.position, routed_KG)
        job.tokens += tokens
        job.logp += logp
        self.counts["decoded_tokens"] += len(tokens)
        count = None if job.turn.listen is None else job.turn.listen(job.tokens)
        exact = not alive and (count is None or count >= len(job.tokens))
        if count is not None:
            # A dispatch on its way may write behind these tokens; what has the pages next is
            # dispatched after it.
            job.tokens, job.logp, alive = job.tokens[:count], job.logp[:count], False
            job.top, job.version_L = job.top[:count], job.version_L[:count]
        try:
            if alive and job.matcher is not None:
                job.matcher.accept(tokens[-1])
                job.matcher.allowed(job.mask_W)
        except RuntimeError as error:
            self._end(job)
            failed = {"failure": str(error), "version_L": job.version_L}
            return [Action(job.turn.key, job.tokens, job.logp, **failed)]
        if alive:
            return []
        statistics = {"cached": job.cached, "entropy": job.entropy, "top": job.top or None}
        statistics["version_L"] = job.version_L
        if self.experts is not None:
            statistics["experts"] = self.experts.read(job.lease.pages, job.position)
        self._end(job, exact=exact)
        return [Action(job.turn.key, job.tokens, job.logp, **statistics)]

    def _end(self, job: Job, *, exact: bool = False) -> None:
        """Frees an action's slot; its keys and values stay in the cache.

        exact: no dispatch has or will put more of its tokens into its state, which stays only then.
        """
        del self.jobs[job.slot]
        self._free.append(job.slot)
        if self._adapters:
            self._computed[job.turn.key] = job.position, job.lease.policy
        if job.written and (exact or self._states is None):
            self._tree.release(job.lease, job.written)
        else:
            self._tree.cancel(job.lease)

    def cancel(self, key: int) -> None:
        """Ends a conversation's open turn, however far it is."""
        self.waiting = [turn for turn in self.waiting if turn.key != key]
        self.failed = [action for action in self.failed if action.key != key]
        for job in [job for job in self.jobs.values() if job.turn.key == key]:
            self._end(job)
        for job in [job for job in self._laid_down if job.turn.key == key]:
            self._laid_down.remove(job)
            self._free.append(job.slot)

    def take_failed(self) -> list[Action]:
        """Actions that could not begin."""
        failed, self.failed = self.failed, []
        return failed

    def usage(self) -> dict[str, int]:
        """Counts since the last reset."""
        names = (*COUNTS, OF_ADAPTERS) if self._adapters else COUNTS
        counts = {name: self.counts[name] for name in names}
        states = 0 if self._states is None else self._states.evicted_states
        return counts | {
            "cached_tokens": self._tree.hits,
            "evicted_pages": self._tree.evicted,
            "evicted_states": states,
        }

    def release(self, key: int) -> None:
        """Lets go of a conversation that is over."""
        lease = self._leases.pop(key, None)
        self._computed.pop(key, None)
        if lease is not None:
            self._tree.evict_first(lease)
        if self._policies.pop(key, self._swaps) != self._swaps:
            self._forget_policies()


def _tiles_of(job: Job, length: int) -> int:
    """Splits tokens into full long rows and then short rows; the last one may be padded."""
    unread = job.unread_to_stop
    if length == LONG:
        return unread // LONG
    return 0 if unread >= LONG else -(-unread // length)


def _common(lists: Sequence[list[int]]) -> list[int]:
    """The common prefix of all lists."""
    first, *others = lists
    for other in others:
        if other[: len(first)] == first:
            continue
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=False))
        first = [page for page, _ in same]
    return first


def _masks(jobs: Sequence[Job], rows: int, words: int) -> np.ndarray:
    """Bits of the tokens that each row's grammar allows next; all where there is none."""
    mask_RW = np.full((rows, words), np.uint32(2**32 - 1))
    for row, job in enumerate(jobs):
        if job.mask_W is not None:
            mask_RW[row] = job.mask_W
    return mask_RW
