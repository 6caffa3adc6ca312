"""The contents of the KV cache's pages: a radix tree over a static pool of pages.

A page holds the keys and values of `page_size` consecutive positions. A node of the tree is one
page, the tokens whose keys and values it holds, and the node of the page before it. So cached
tokens are found whether an earlier turn, a sibling or another task computed them.

The bookkeeping relies on the device running programs in the order of their dispatch. These rules
keep a position from being overwritten while it may still be read:
  - a page with all its tokens is shared and never written again;
  - a page with fewer has one writer at most, which writes after those tokens only; another lease
    that wants them copies the page, and holds it until the copy has been dispatched;
  - a page is given to another only when no open lease holds its node or a node below it.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class LeaseRefusal(enum.Enum):
    """Why a lease could not start now."""

    PENDING = "tokens it shares are about to be computed by another lease"
    PAGES = "too few pages are free or evictable"


@dataclass(eq=False, slots=True)
class Lease:
    """The pages that one turn holds, from before its prefill until its action is finished.

    pages: page numbers for all positions of context and action, `page_size` positions each.
    cached: how many leading tokens need no prefill; at most the context's length - 1.
    copy: (source, own) pages: the whole source is copied before this lease's prefill.
    shared: how many leading pages hold context tokens only; nothing writes them once computed.
    pending: its copy or prefill has not been dispatched yet.
    policy: whose keys and values it shares; see `PageTree.lease`.
    open: neither released nor cancelled.
    path: the tree's nodes of its leading pages.
    source: the node it copies, until the copy has been dispatched.
    stops: positions in its context that no row of its prefill crosses, in their order; the tree
      is told of each. Empty: one prefill in any rows.
    """

    pages: list[int]
    cached: int
    copy: tuple[int, int] | None
    shared: int
    pending: bool
    path: list[Any] = field(repr=False)
    source: Any = field(repr=False)
    policy: int
    open: bool = True
    stops: list[int] = field(default_factory=list)


class _Node:
    """A page and the tokens in it. Only one that has all its tokens may have children.

    ready: how many of its tokens have been dispatched; the others are announced by its writer.
    references: open leases that use it; a lease that uses a node uses its ancestors too.
    writing: an open lease writes after its tokens.
    children: by tokens if they have all of them, else by page.
    """

    __slots__ = ("parent", "page", "tokens", "ready", "references", "writing", "children")

    def __init__(self, parent: _Node | None, page: int, tokens: tuple[int, ...]):
        self.parent = parent
        self.page = page
        self.tokens = tokens
        self.ready = 0
        self.references = 0
        self.writing = False
        self.children: dict[tuple[int, ...] | int, _Node] = {}


class _Match(NamedTuple):
    """The child that gives most tokens of a page which no child has whole."""

    node: _Node | None = None
    tokens: int = 0
    in_place: bool = False  # the page can be written on; else it has to be copied


class PageTree:
    """The pages of one row shard: leases them to turns and records their tokens.

    refusal: why the last `lease` returned None; None where it did not.
    hits: tokens that leases found in the cache.
    evicted: cached pages given to others.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        """Takes the pool's size in pages and a page's in positions, each >= 1."""
        self.pages = pages
        self.page_size = page_size
        self.refusal: LeaseRefusal | None = None
        self.hits = 0
        self.evicted = 0
        self._roots: dict[int, _Node] = {}  # by policy
        self._free = list(range(self.pages))[::-1]
        # Nodes without references in the order of their eviction. Closing a lease appends deepest
        # first, and a child is never used without its parent: children always precede parents.
        self._idle: OrderedDict[_Node, None] = OrderedDict()

    def lease(self, context: Sequence[int], reserve: int, policy: int = 0) -> Lease | None:
        """Pages for a context and an action; other leases wait for the tokens that it will compute.

        Args:
          context: every token before the action, at least one; all but the last get prefilled.
          reserve: the most tokens of the action, at least one.
          policy: its number; leases of different policies share no pages.

        Returns:
          The lease, or None (see `refusal`), which leaves everything as it was.

        Raises:
          ValueError: an empty context or action, or more positions than the pool has.
        """
        tokens = tuple(context)
        check_lease_size(len(tokens), reserve, self.pages, self.page_size)
        size, cacheable = self.page_size, len(tokens) - 1
        total = -(-(cacheable + reserve) // size)
        root = self._roots.setdefault(policy, _Node(None, -1, ()))
        path = self._match_pages(root, tokens, cacheable)
        if path is None:
            self.refusal = LeaseRefusal.PENDING
            return None
        full = len(path)
        rest = tokens[full * size : min(full * size + size, cacheable)]
        match = self._match_part(path[-1] if path else root, rest)
        if match is None:
            self.refusal = LeaseRefusal.PENDING
            return None
        if match.node is not None and not match.in_place:
            # The source takes a page besides the lease's own: without room, compute it again.
            match = match if self._has_room(total - full, [*path, match.node]) else _Match()
        source = None if match.in_place else match.node
        path += [match.node] if match.in_place else []
        if not self._has_room(total - len(path), path):
            self.refusal = LeaseRefusal.PAGES
            return None

        for node in path if source is None else [*path, source]:
            self._hold(node)
        pages = [node.page for node in path]
        pages += [self._take() for _ in range(total - len(path))]
        if match.in_place:
            self._set_tokens(match.node, rest)
        for start in range(len(path) * size, cacheable, size):
            chunk = tokens[start : min(start + size, cacheable)]
            path.append(self._add(path[-1] if path else root, pages[len(path)], chunk))
        if cacheable % size:
            path[-1].writing = True
        cached = full * size + match.tokens
        self.refusal = None
        self.hits += cached
        return Lease(
            pages=pages,
            cached=cached,
            copy=None if source is None else (source.page, pages[full]),
            shared=cacheable // size,
            pending=source is not None or cached < cacheable,
            path=path,
            source=source,
            policy=policy,
        )

    def computed(self, lease: Lease) -> None:
        """The lease's copy and prefill have been dispatched: later programs may read them."""
        assert lease.open, "the lease is closed"
        self._let_go_of_source(lease)
        first = lease.cached // self.page_size
        for node in lease.path[first:]:
            node.ready = len(node.tokens)
        lease.pending = False

    def release(self, lease: Lease, tokens: Sequence[int]) -> None:
        """The action is finished; its pages stay in the cache until they are evicted.

        Args:
          tokens: those written after context[:-1]: the context's last one and the action's, its
            last one left out. Nothing dispatched from now on may write for this lease.
        """
        assert lease.open and not lease.pending, "the lease is closed, or was never computed"
        path, size = lease.path, self.page_size
        private = len(path)
        tip = path[-1] if path and len(path[-1].tokens) < size else None
        first, root = private if tip is None else private - 1, self._roots[lease.policy]
        written = (() if tip is None else tip.tokens) + tuple(tokens)
        assert len(written) <= (len(lease.pages) - first) * size, "more than was reserved"
        del path[first:]
        for start in range(0, len(written), size):
            chunk = written[start : start + size]
            end = path[-1] if path else root
            twin = end.children.get(chunk)
            if twin is not None and twin.ready < size:
                break  # another lease may yet cancel it: nothing can be kept below
            if twin is not None:
                self._hold(twin)
                path.append(twin)
            elif tip is not None and start == 0:
                self._set_tokens(tip, chunk)
                path.append(tip)
            else:
                path.append(self._add(end, lease.pages[len(path)], chunk))
            path[-1].ready = len(chunk)
        if tip is not None:
            tip.writing = False
        if tip is not None and tip not in path[first:private]:
            self._drop([tip])  # a twin has its tokens and more
            self._move_to_front([tip] if tip in self._idle else [])
        used = {node.page for node in path[private:]}
        self._close(lease, [page for page in lease.pages[private:] if page not in used])

    def cancel(self, lease: Lease) -> None:
        """Ends a lease whose turn failed: only the computed part of its context stays cached."""
        assert lease.open, "the lease is closed"
        self._let_go_of_source(lease)
        private = len(lease.path)
        unused = lease.pages[private:]
        for node in reversed(lease.path[lease.cached // self.page_size :]):
            node.writing = False
            if node.ready:  # computed, or extended in place: then what it held before is left
                self._set_tokens(node, node.tokens[: node.ready])
            else:
                self._remove(lease.path.pop())
                unused.append(node.page)
        self._close(lease, unused)

    def evict_first(self, lease: Lease) -> None:
        """The conversation of a closed lease is over: pages that only it needed go first."""
        assert not lease.open, "the lease is open"
        chain: list[_Node] = []
        for node in reversed(lease.path):
            if len(node.children) > len(chain[-1:]):
                break  # other conversations continue from here
            chain += [node] if node in self._idle else []  # skips nodes in use and evicted ones
        self._move_to_front(chain)

    def forget(self, kept: Collection[int]) -> None:
        """Frees the pages of all policies but these; no lease of the others is open."""
        for policy in [policy for policy in self._roots if policy not in kept]:
            nodes = [self._roots.pop(policy)]
            for node in nodes:
                nodes += node.children.values()
            for node in nodes[1:]:
                del self._idle[node]
                self._free.append(node.page)

    def _match_pages(
        self, node: _Node, tokens: tuple[int, ...], cacheable: int
    ) -> list[_Node] | None:
        """Nodes of the leading whole pages after a root; None if one is about to be computed."""
        size, path = self.page_size, []
        for start in range(0, cacheable - size + 1, size):
            node = node.children.get(tokens[start : start + size])
            if node is None:
                break
            if node.ready < size:
                return None
            path.append(node)
        return path

    def _match_part(self, parent: _Node, rest: tuple[int, ...]) -> _Match | None:
        """The child that shares most with `rest`; None if a better one is about to be computed.

        Only a child that begins with `rest`, or that `rest` begins with, is waited for: contexts
        that part within this page would wait for one another in turn, to save less than a page.
        """
        best, awaited = _Match(), 0
        head = rest[:0]
        for child in parent.children.values():
            if child.tokens[: len(head)] != head:
                continue
            common = _common(child.tokens, rest, len(head))
            if common > child.ready and common in (len(child.tokens), len(rest)):
                awaited = max(awaited, common)
            common = min(common, child.ready)
            in_place = common == len(child.tokens) and not child.writing
            if (common, in_place) > (best.tokens, best.in_place):
                best, head = _Match(child, common, in_place), rest[:common]
        return best if best.tokens >= awaited else None

    def _has_room(self, pages: int, retained: list[_Node]) -> bool:
        """Whether a number of pages is available without evicting the nodes to be kept."""
        idle = len(self._idle) - sum(not node.references for node in retained)
        return pages <= len(self._free) + idle

    def _take(self) -> int:
        """A free page, or that of the node to be evicted next."""
        if self._free:
            return self._free.pop()
        node, _ = self._idle.popitem(last=False)
        self._remove(node)
        self.evicted += 1
        return node.page

    def _key(self, node: _Node) -> tuple[int, ...] | int:
        return node.tokens if len(node.tokens) == self.page_size else node.page

    def _add(self, parent: _Node, page: int, tokens: tuple[int, ...]) -> _Node:
        """A new node, which the lease that adds it holds."""
        node = _Node(parent, page, tokens)
        node.references = 1
        parent.children[self._key(node)] = node
        return node

    def _remove(self, node: _Node) -> None:
        del node.parent.children[self._key(node)]

    def _set_tokens(self, node: _Node, tokens: tuple[int, ...]) -> None:
        del node.parent.children[self._key(node)]
        node.tokens = tokens
        node.parent.children[self._key(node)] = node

    def _hold(self, node: _Node) -> None:
        if not node.references:
            del self._idle[node]
        node.references += 1

    def _drop(self, path: list[_Node]) -> None:
        """Gives up a reference to each node, the deepest one last in `path`."""
        for node in reversed(path):
            node.references -= 1
            if not node.references:
                self._idle[node] = None

    def _let_go_of_source(self, lease: Lease) -> None:
        if lease.source is not None:
            self._drop([lease.source])
            lease.source = None

    def _move_to_front(self, chain: list[_Node]) -> None:
        """Moves idle nodes to the front, `chain[0]` to the very front."""
        for node in reversed(chain):
            self._idle.move_to_end(node, last=False)

    def _close(self, lease: Lease, unused: list[int]) -> None:
        self._drop(lease.path)
        self._free += unused
        lease.open = False


def check_lease_size(context: int, reserve: int, pages: int, page_size: int) -> None:
    """ValueError: an empty context or action, or more positions than so many pages have."""
    if context < 1 or reserve < 1 or context - 1 + reserve > pages * page_size:
        raise ValueError(
            f"A lease for a context of {context} tokens and an action of {reserve}; allowed: at"
            f" least 1 of each, and together at most {pages * page_size + 1},"
            f" what {pages} pages of {page_size} positions can hold."
        )


def _common(tokens: tuple[int, ...], rest: tuple[int, ...], start: int) -> int:
    """How many leading tokens are equal, the first `start` being so."""
    end = min(len(tokens), len(rest))
    for index in range(start, end):
        if tokens[index] != rest[index]:
            return index
    return end
