"""The contents of the cache of a model with recurrent layers: a tree of states and their pages.

A recurrent layer's state holds all tokens before it in one, so keys and values in pages are of use
only up to a position whose state was kept. A node is such a position: the tokens from its parent's
position to its own, the pages with their keys and values, and the number of a state in the pool of
the device. A context goes on from the deepest node whose tokens it begins with.

States are kept where contexts are likely to meet: at the end of a context, before its action (the
members of a group begin there, and branches of a turn); at the end of an action, where the next
turn goes on; and where a context parts from the tokens of another (`SPLIT`), for those that will
part there, too. Nothing is copied to keep a state: a dispatch reads one and writes another.

The bookkeeping relies on the device running programs in the order of their dispatch:
  - a kept state is never written again, and its number is given to another only when no lease is
    still to read it;
  - a node's last page, where its tokens do not fill it, is written behind these tokens by the first
    lease that continues there; any other copies the page;
  - the pages of a node are given to others only when no open lease uses it or a node below it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from seeupo_jax.rollout.engine.kv_pages import Lease, LeaseRefusal, check_lease_size

SPLIT = 32  # tokens that a state between two nodes has to save
_BYTES = np.dtype(np.int32).itemsize
_NONE = -1  # no state


@dataclass(eq=False, slots=True, kw_only=True)
class StateLease(Lease):
    """The pages and states that one turn holds.

    path: the nodes that its context passes, from the first one on.
    source: the node whose state is still to be read.
    read: the state that its next dispatch reads. write: the one that it writes, the lease's own.
    extends: it writes into the last page of the last node of its path.
    """

    read: int
    write: int
    extends: bool


class _Node:
    """A position whose state is kept, or was.

    tokens: int32, those from the parent's position to `end`, the node's own.
    pages: of its tokens, without the parent's last page if the node extends it.
    extends: its tokens go on in its parent's last page. extended: another's do in its own.
    ready: computed. state: None: not computed yet, or evicted.
    after_action: its tokens end with an action, which one conversation goes on from.
    leases: open ones that use it; these use its ancestors, too. readers: those still to read it.
    """

    __slots__ = (
        "parent",
        "tokens",
        "end",
        "pages",
        "extends",
        "extended",
        "ready",
        "state",
        "after_action",
        "leases",
        "readers",
        "children",
    )

    def __init__(self, parent: _Node | None, tokens: bytes, pages: list[int], *, extends: bool):
        self.parent, self.tokens, self.pages, self.extends = parent, tokens, pages, extends
        self.end = len(tokens) // _BYTES + (0 if parent is None else parent.end)
        self.extended = self.ready = self.after_action = False
        self.state: int | None = None
        self.leases = self.readers = 0
        self.children: dict[_Node, None] = {}  # in an order that is the same in every run


class StateTree:
    """The pages and states of one row shard, with the methods of `PageTree`.

    refusal, hits, evicted: as of `PageTree`.
    evicted_states: kept states given to others.
    """

    def __init__(self, pages: int, page_size: int, states: int) -> None:
        """As of `PageTree`; states: of the pool, at least as many as there are leases at a time."""
        self.pages = pages
        self.page_size = page_size
        self.states = states
        self.refusal: LeaseRefusal | None = None
        self.hits = 0
        self.evicted = 0
        self.evicted_states = 0
        self._open = 0  # leases
        self._roots: dict[int, _Node] = {}  # by policy
        self._free = list(range(pages))[::-1]
        self._free_states = list(range(states))[::-1]
        # Nodes without leases in the order of their eviction, children before their parents: a
        # closed lease appends the deepest first, and no child is used without its parent.
        self._idle: OrderedDict[_Node, None] = OrderedDict()
        self._idle_pages = 0
        # Nodes with states, the next to lose its own first: those that are unlikely to be of use
        # again, and after them the others.
        self._stale: OrderedDict[_Node, None] = OrderedDict()
        self._kept: OrderedDict[_Node, None] = OrderedDict()

    def lease(self, context: Sequence[int], reserve: int, policy: int = 0) -> StateLease | None:
        """As of `PageTree`; what is cached ends where a state was kept."""
        check_lease_size(len(context), reserve, self.pages, self.page_size)
        tokens = np.asarray(context[:-1], np.int32).tobytes()
        total = -(-(len(context) - 1 + reserve) // self.page_size)
        root = self._roots.setdefault(policy, _new_root())
        base, common = self._find(root, tokens)
        if not base.ready:
            self.refusal = LeaseRefusal.PENDING
            return None
        # Without another lease to wait for, all may have to go.
        bases = [base] if self._open else [base, root]
        base = next((base for base in bases if self._has_room(base, total)), None)
        self.refusal = LeaseRefusal.PAGES if base is None else None
        return None if base is None else self._begin(base, common, tokens, total, policy)

    def advance(self, lease: StateLease) -> None:
        """A dispatch has been made up for the lease: the next one reads what this one writes."""
        self._let_go_of_source(lease)
        lease.read = lease.write

    def computed(self, lease: StateLease) -> None:
        """The lease's copy, and its prefill up to its first stop, have been dispatched."""
        assert lease.open, "the lease is closed"
        if lease.stops:
            node = next(node for node in lease.path if not node.ready)
            node.ready = True
            del lease.stops[0]
            self._keep_apart(lease, node)
        lease.pending = bool(lease.stops)

    def release(self, lease: StateLease, tokens: Sequence[int]) -> None:
        """The action is finished; its pages and its state stay until they are evicted.

        Args:
          tokens: those that the state has seen after context[:-1]: the context's last one and the
            action's, its last one left out. Nothing dispatched from now on may write for the lease.
        """
        assert lease.open and not lease.pending, "the lease is closed, or was never computed"
        tip = self._tip(lease)
        written, first = np.asarray(tokens, np.int32).tobytes(), self._first_private(lease, tip)
        ends = (node for node in tip.children if node.tokens == written and node.ready)
        node = next(ends, None)
        if node is None:
            last = -(-(tip.end + len(tokens)) // self.page_size)
            node = _Node(tip, written, lease.pages[first:last], extends=lease.extends)
            node.ready, lease.extends, first = True, False, last
            tip.children[node] = None
            lease.path.append(node)
            node.leases += 1
        else:
            self._hold(node)
            lease.path.append(node)
        node.after_action = True
        if node.state is None:
            node.state, lease.write = lease.write, _NONE
            self._kept[node] = None
        self._close(lease, tip, lease.pages[first:])

    def cancel(self, lease: StateLease) -> None:
        """Ends a lease whose turn failed, or whose state has seen more than its action's tokens."""
        assert lease.open, "the lease is closed"
        self._let_go_of_source(lease)
        tip = self._tip(lease)
        unused = lease.pages[self._first_private(lease, tip) :]
        while lease.path and not lease.path[-1].ready:
            self._remove(lease.path.pop())
        self._close(lease, tip, unused)

    def evict_first(self, lease: StateLease) -> None:
        """The conversation of a closed lease is over: what only it needed goes first."""
        assert not lease.open, "the lease is open"
        chain: list[_Node] = []
        for node in reversed(lease.path):
            if len(node.children) > len(chain[-1:]):
                break  # other conversations continue from here
            chain += [node] if node in self._idle else []  # skips nodes in use and evicted ones
        for node in reversed(chain):
            self._idle.move_to_end(node, last=False)
            self._set_stale(node)

    def forget(self, kept: Collection[int]) -> None:
        """As of `PageTree`; frees states, too."""
        for policy in [policy for policy in self._roots if policy not in kept]:
            nodes = [self._roots.pop(policy)]
            for node in nodes:
                nodes += node.children
            for node in nodes[:0:-1]:  # children before their parents
                self._remove(node)

    def _find(self, root: _Node, tokens: bytes) -> tuple[_Node, int]:
        """The deepest node to go on from, and how many tokens any node's path shares."""
        best, common, passed = root, 0, [root]
        for node in passed:
            start = node.end * _BYTES
            for child in node.children:
                if not tokens.startswith(child.tokens, start):
                    rest = tokens[start : start + len(child.tokens)]
                    common = max(common, node.end + _common(child.tokens, rest))
                    continue
                passed.append(child)
                common = max(common, child.end)
                usable = child.state is not None or not child.ready
                best = child if usable and child.end > best.end else best
        return best, common

    def _has_room(self, base: _Node, total: int) -> bool:
        """Whether pages and a state are available without evicting the base."""
        path = self._path(base)
        retained = sum(len(node.pages) for node in path if not node.leases)
        reused = base.end // self.page_size + (self._is_partial(base) and not base.extended)
        enough = total - reused <= len(self._free) + self._idle_pages - retained
        return enough and self._state_to_take([self._stale, self._kept], base)

    def _begin(
        self, base: _Node, common: int, tokens: bytes, total: int, policy: int
    ) -> StateLease:
        path, size, cacheable = self._path(base), self.page_size, len(tokens) // _BYTES
        for node in path:
            self._hold(node)
        pages, copied = self._pages_of(path), self._is_partial(base) and base.extended
        source = pages.pop() if copied else None
        first = len(pages)
        pages += [self._take() for _ in range(total - first)]
        extends = self._is_partial(base) and not copied
        base.extended |= extends
        base.readers += 1
        lease = StateLease(
            pages=pages,
            cached=base.end,
            copy=None if source is None else (source, pages[first]),
            shared=cacheable // size,
            pending=copied or base.end < cacheable,
            path=path,
            source=base,
            policy=policy,
            read=0 if base.state is None else base.state,
            write=self._take_state([self._stale, self._kept]),
            extends=extends,
        )
        splits = common - base.end >= SPLIT and common < cacheable
        lease.stops = [common] * splits + [cacheable] * (base.end < cacheable)
        for end in lease.stops:
            last = -(-end // size)
            self._announce(lease, tokens, pages[first:last], end)
            first = last
        self._use(base)
        self._open += 1
        self.hits += base.end
        return lease

    def _announce(self, lease: StateLease, tokens: bytes, pages: list[int], end: int) -> None:
        """Adds the next node of a lease's path, which it is going to compute."""
        parent = self._tip(lease)
        part = tokens[parent.end * _BYTES : end * _BYTES]
        node = _Node(parent, part, pages, extends=lease.extends)
        node.leases = 1
        node.extended = lease.extends = self._is_partial(node)
        parent.children[node] = None
        lease.path.append(node)

    def _keep_apart(self, lease: StateLease, node: _Node) -> None:
        """Keeps the state at a node that was just computed, if there is another to go on with.

        In the middle of a conversation that only grows, the end of its action will be of more use:
        nothing but stale states gives way to it there.
        """
        stale = node.parent.after_action
        among = [self._stale] if stale else [self._stale, self._kept]
        if not self._state_to_take(among):
            return
        node.state, lease.read = lease.write, lease.write
        lease.write, lease.source = self._take_state(among), node
        node.readers += 1
        (self._stale if stale else self._kept)[node] = None

    def _tip(self, lease: StateLease) -> _Node:
        """The last node of its path, or its policy's root."""
        return lease.path[-1] if lease.path else self._roots[lease.policy]

    def _use(self, node: _Node) -> None:
        """A lease goes on from a node: at an action's end most likely the only one."""
        if node.after_action:
            self._set_stale(node)
        elif node in self._kept:
            self._kept.move_to_end(node)

    def _set_stale(self, node: _Node) -> None:
        if node in self._kept:
            del self._kept[node]
            self._stale[node] = None

    def _path(self, node: _Node) -> list[_Node]:
        """The nodes to this one, the root left out."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _pages_of(self, path: list[_Node]) -> list[int]:
        pages: list[int] = []
        for node in path:
            if self._is_partial(node.parent) and not node.extends:
                pages.pop()  # it has a copy
            pages += node.pages
        return pages

    def _is_partial(self, node: _Node) -> bool:
        """Whether its last page has room for more tokens."""
        return node.end % self.page_size > 0

    def _first_private(self, lease: StateLease, tip: _Node) -> int:
        """Index of the first page that no node of the lease's path has."""
        return tip.end // self.page_size + lease.extends

    def _take(self) -> int:
        """A free page, one of the node to be evicted next if there is none."""
        while not self._free:
            self._evict(next(iter(self._idle)))
        return self._free.pop()

    def _state_to_take(
        self, among: Sequence[OrderedDict[_Node, None]], retained: _Node | None = None
    ) -> bool:
        """Whether a state is free, or one of these nodes can lose its own."""
        nodes = (node for nodes in among for node in nodes)
        return bool(self._free_states) or any(not n.readers and n is not retained for n in nodes)

    def _take_state(self, among: Sequence[OrderedDict[_Node, None]]) -> int:
        if not self._free_states:
            self._evict(next(node for nodes in among for node in nodes if not node.readers))
        return self._free_states.pop()

    def _evict(self, node: _Node) -> None:
        """Takes a node's state, and the pages that only states behind it needed."""
        pages = len(self._free)
        self.evicted_states += node.state is not None
        self._lose_state(node)
        self._prune(node)
        self.evicted += len(self._free) - pages

    def _lose_state(self, node: _Node) -> None:
        if node.state is not None:
            self._free_states.append(node.state)
            node.state = None
            for nodes in (self._stale, self._kept):
                nodes.pop(node, None)

    def _prune(self, node: _Node) -> None:
        """Removes a node without a use, and the ones before it that had one for its sake only."""
        while node in self._idle and node.state is None and not node.children:
            self._remove(node)
            node = node.parent

    def _remove(self, node: _Node) -> None:
        """Removes a node without children; its pages and its state are free."""
        del node.parent.children[node]
        if node.extends:
            node.parent.extended = False
        self._lose_state(node)
        self._free += node.pages
        if node in self._idle:
            del self._idle[node]
            self._idle_pages -= len(node.pages)

    def _hold(self, node: _Node) -> None:
        if not node.leases:
            del self._idle[node]
            self._idle_pages -= len(node.pages)
        node.leases += 1

    def _let_go_of_source(self, lease: StateLease) -> None:
        if lease.source is not None:
            lease.source.readers -= 1
            lease.source = None

    def _close(self, lease: StateLease, tip: _Node, unused: list[int]) -> None:
        """Gives back what the lease holds, the page of `tip` that it extends included."""
        self._let_go_of_source(lease)
        if lease.extends:
            tip.extended = False
        self._free += unused
        self._free_states += [] if lease.write == _NONE else [lease.write]
        for node in reversed(lease.path):
            node.leases -= 1
            if not node.leases:
                self._idle[node] = None
                self._idle_pages += len(node.pages)
                self._prune(node)
        self._open -= 1
        lease.open = False


def _new_root() -> _Node:
    root = _Node(None, b"", [], extends=False)
    root.ready = True
    return root


def _common(edge: bytes, tokens: bytes) -> int:
    """How many leading tokens are equal."""
    size = min(len(edge), len(tokens)) // _BYTES
    differs = np.frombuffer(edge, np.int32, size) != np.frombuffer(tokens, np.int32, size)
    return int(differs.argmax()) if differs.any() else size
