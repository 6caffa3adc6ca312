"""The page tree: what is found, what is copied, what is evicted, and that no position is lost."""

import random

import numpy as np
import pytest

from seeupo_jax.rollout.engine.kv_pages import Lease, LeaseRefusal, PageTree


def turn(tree: PageTree, context: list[int], action: list[int], reserve: int = 4) -> Lease:
    """One whole turn on an otherwise idle tree: the action's last token is never fed."""
    lease = tree.lease(context, max(reserve, len(action)))
    tree.computed(lease)
    tree.release(lease, [*context[-1:], *action[:-1]])
    return lease


def opened(tree: PageTree, context: list[int], reserve: int = 4) -> Lease:
    """A lease whose prefill has been dispatched."""
    lease = tree.lease(context, reserve)
    tree.computed(lease)
    return lease


def test_pages_cover_the_context_and_all_but_the_last_sampled_token():
    tree = PageTree(8, 4)
    # 6 context tokens and 3 sampled: positions 0..7 are written, the ninth token never is.
    assert len(tree.lease(list(range(6)), 3).pages) == 2
    assert len(tree.lease(list(range(50, 56)), 4).pages) == 3


def test_next_turn_goes_on_in_place():
    tree = PageTree(8, 4)
    first = turn(tree, [1, 2, 3, 4, 5], [6, 7, 8])  # written: 1 2 3 4 | 5 6 7
    second = tree.lease([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 3)
    assert second.pages[:2] == first.pages[:2]
    assert (second.cached, second.copy, second.shared) == (7, None, 2)
    assert len(second.pages) == 3
    assert tree.hits == 7


def test_sibling_waits_for_the_announced_prompt_and_then_shares_it():
    tree = PageTree(8, 4)
    first = tree.lease([1, 2, 3, 4, 5, 6], 2)
    free = len(tree._free)
    assert tree.lease([1, 2, 3, 4, 5, 6], 2) is None
    assert tree.refusal is LeaseRefusal.PENDING
    assert len(tree._free) == free
    tree.computed(first)
    second = tree.lease([1, 2, 3, 4, 5, 6], 2)
    assert tree.refusal is None
    assert second.pages[0] == first.pages[0]
    assert second.copy == (first.pages[1], second.pages[1])  # the first is writing there
    assert (second.cached, second.shared, second.pending) == (5, 1, True)


def test_of_two_leases_that_continue_one_page_the_second_copies():
    tree = PageTree(8, 4)
    done = turn(tree, [1, 2, 3], [9])  # written: 1 2 3
    first = opened(tree, [1, 2, 3, 4, 5])
    assert (first.pages[0], first.copy) == (done.pages[0], None)
    second = tree.lease([1, 2, 3, 7, 8], 4)
    assert second.copy == (first.pages[0], second.pages[0])
    assert (second.cached, second.shared) == (3, 1)


def test_copied_page_stays_until_the_copy_is_dispatched():
    tree = PageTree(4, 4)
    turn(tree, [1, 2, 3], [9])
    copying = tree.lease([1, 2, 7], 2)
    source = copying.copy[0]
    assert tree.lease([20, 21, 22, 23, 24, 25], 8) is None  # 4 pages: its own and the source
    others = tree.lease([20, 21, 22, 23, 24], 4)
    assert source not in others.pages
    assert len(tree._idle) == 0
    tree.computed(copying)
    assert len(tree._idle) == 1


def test_extension_in_place_leaves_what_another_copies():
    tree = PageTree(8, 4)
    turn(tree, [1, 2], [9])  # written: 1 2
    copying = tree.lease([1, 7, 8], 2)
    extending = opened(tree, [1, 2, 3, 4, 5])
    assert extending.pages[0] == copying.copy[0]
    assert copying.cached == 1  # of position 0 only, which the extension does not write


def test_sibling_with_a_longer_context_waits_for_a_part_of_a_page():
    tree = PageTree(8, 4)
    short = tree.lease([1, 2, 3], 2)  # announces 1 2
    assert tree.lease([1, 2, 3, 4], 2) is None
    assert tree.refusal is LeaseRefusal.PENDING
    tree.computed(short)
    longer = tree.lease([1, 2, 3, 4], 2)
    assert (longer.cached, longer.copy) == (2, (short.pages[0], longer.pages[0]))


def test_contexts_that_part_within_an_announced_page_do_not_wait():
    tree = PageTree(8, 4)
    tree.lease([1, 2, 3, 4, 5], 2)
    other = tree.lease([1, 2, 30, 40, 50], 2)
    assert (other.cached, other.copy) == (0, None)


def test_ready_part_of_a_page_is_copied_while_its_rest_is_announced():
    tree = PageTree(8, 4)
    turn(tree, [1, 2], [9])  # written: 1 2
    extending = tree.lease([1, 2, 3, 4, 5], 2)
    other = tree.lease([1, 2, 30, 40, 50], 2)
    assert (other.cached, other.copy) == (2, (extending.pages[0], other.pages[0]))


def test_context_of_one_token_has_nothing_to_prefill():
    tree = PageTree(4, 4)
    lease = tree.lease([5], 3)
    assert (len(lease.pages), lease.cached, lease.shared, lease.pending) == (1, 0, 0, False)
    tree.release(lease, [5, 6, 7])
    assert tree.lease([5, 6, 7, 8], 1).cached == 3


def test_fully_cached_context_has_nothing_to_prefill():
    tree = PageTree(4, 4)
    turn(tree, [1, 2, 3, 4, 5], [6])
    lease = tree.lease([1, 2, 3, 4, 5, 6], 2)
    assert (lease.cached, lease.copy, lease.pending) == (5, None, False)
    tree.release(lease, [6])


def test_rewritten_context_copies_the_page_where_it_parts():
    tree = PageTree(8, 4)
    old = turn(tree, [1, 2, 3, 4, 5], [6, 7, 8])  # written: 1 2 3 4 | 5 6 7
    new = opened(tree, [1, 2, 3, 4, 5, 6, 70, 80, 90, 100])
    assert new.pages[0] == old.pages[0]
    assert (new.cached, new.copy) == (6, (old.pages[1], new.pages[1]))
    tree.release(new, [100])
    assert tree.lease([1, 2, 3, 4, 5, 6, 7, 8], 1).cached == 7  # the old one is still there


def test_child_that_ends_where_the_context_does_is_extended_rather_than_copied():
    tree = PageTree(8, 4)
    opened(tree, [1, 2, 3, 4])  # has 1 2 3
    short = turn(tree, [1, 2], [9])  # written: 1 2, after a copy of 1
    again = tree.lease([1, 2, 30, 4], 2)
    assert (again.pages[0], again.copy) == (short.pages[0], None)


def test_siblings_that_sample_the_same_tokens_keep_one_page_of_them():
    tree = PageTree(9, 4)
    turn(tree, [50], [51])
    first, second = opened(tree, [1, 2, 3], 8), opened(tree, [1, 2, 3], 8)
    tree.release(first, [3, 4, 5, 6, 7, 8])  # 1 2 3 4 | 5 6 7 8
    tree.release(second, [3, 4, 5, 6, 7, 8])
    # The second's first page stays with the tokens it had, 1 2, and is the next to be evicted.
    assert (len(nodes(tree)), len(tree._free)) == (4, 5)
    assert opened(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9], 1).pages[:2] == first.pages[:2]
    assert second.pages[0] in tree.lease(list(range(20, 33)), 8).pages  # five; four are free
    assert tree.evicted == 1


def test_what_follows_a_page_that_two_computed_is_found():
    tree = PageTree(8, 2)
    first, second = opened(tree, [1, 2], 5), opened(tree, [1, 2], 5)
    tree.release(first, [2, 3, 4])
    tree.release(second, [2, 3, 4, 5, 6])
    assert tree.lease([1, 2, 3, 4, 5, 6, 7], 1).cached == 6


def test_nothing_is_kept_below_a_page_that_another_has_only_announced():
    tree = PageTree(8, 2)
    sampling = opened(tree, [1], 6)
    announcing = tree.lease([1, 2, 3], 1)
    tree.release(sampling, [1, 2, 3, 4])
    tree.cancel(announcing)
    assert (len(nodes(tree)), len(tree._free)) == (0, 8)


def test_release_returns_the_pages_that_were_not_used():
    tree = PageTree(8, 4)
    lease = opened(tree, [1, 2, 3, 4, 5], 20)
    assert (len(tree._free), len(nodes(tree))) == (2, 1)
    tree.release(lease, [5, 6])
    assert (len(tree._free), len(nodes(tree))) == (6, 2)


def test_cancelled_announcement_vanishes():
    tree = PageTree(8, 4)
    turn(tree, [1, 2], [9])  # written: 1 2
    lease = tree.lease(list(range(1, 11)), 2)
    assert lease.cached == 2
    tree.cancel(lease)
    assert (len(tree._free), len(nodes(tree)), lease.open) == (7, 1, False)
    again = tree.lease(list(range(1, 11)), 2)
    assert (again.cached, again.copy) == (2, None)


def test_cancelled_copy_lets_go_of_its_source():
    tree = PageTree(8, 4)
    turn(tree, [1, 2, 3], [9])
    lease = tree.lease([1, 2, 7], 2)
    tree.cancel(lease)
    assert (len(tree._idle), len(tree._free)) == (1, 7)


def test_lease_cancelled_after_its_prefill_leaves_the_context_cached():
    tree = PageTree(8, 4)
    tree.cancel(opened(tree, [1, 2, 3, 4, 5, 6]))
    assert (len(tree._free), len(nodes(tree))) == (6, 2)
    assert tree.lease([1, 2, 3, 4, 5, 6], 1).cached == 5


def test_least_recently_used_leaf_is_evicted_first():
    tree = PageTree(5, 2)
    turn(tree, [1, 2, 3], [9], reserve=1)  # pages: 1 2 | 3
    turn(tree, [5, 6, 7], [9], reserve=1)  # pages: 5 6 | 7
    turn(tree, [1, 2, 30], [9], reserve=1)  # uses 1 2 again, but not 3
    left = [{(1, 2), (5, 6), (7,), (30,)}, {(1, 2), (5, 6), (30,)}, {(1, 2), (30,)}, {(1, 2)}]
    for evicted, tokens in enumerate(left, 1):
        assert len(tree.lease([20], 1).pages) == 1
        assert {node.tokens for node in nodes(tree)} == tokens
        assert tree.evicted == evicted


def test_parent_is_evicted_after_its_children_only():
    tree = PageTree(3, 2)
    turn(tree, [1, 2, 3, 4, 5], [9], reserve=1)
    for left in ([(1, 2), (3, 4)], [(1, 2)], []):
        tree.lease([20], 1)
        assert [node.tokens for node in nodes(tree)] == left


def test_retired_conversation_is_evicted_before_older_ones():
    tree = PageTree(6, 2)
    turn(tree, [1, 2, 3], [9], reserve=1)
    last = turn(tree, [5, 6, 7], [9], reserve=1)
    tree.evict_first(last)
    lease = tree.lease([20, 21, 22, 23], 5)
    assert tree.evicted == 2
    tree.cancel(lease)
    assert tree.lease([1, 2, 3, 4], 1).cached == 3
    assert tree.lease([5, 6, 7, 8], 1).cached == 0


def test_retiring_one_sibling_keeps_the_place_of_what_the_other_has():
    tree = PageTree(8, 2)
    first = turn(tree, [1, 2, 3, 4, 5], [9], reserve=1)
    turn(tree, [1, 2, 30, 40, 50], [9], reserve=1)  # pages: 1 2 | 3 4 | 5 and 30 40 | 50
    tree.evict_first(first)
    lease = tree.lease(list(range(60, 68)), 3)  # 5 pages: 3 are free
    assert tree.evicted == 2
    assert tree.lease([1, 2, 30, 40, 50, 60], 1).cached == 5
    tree.cancel(lease)


def test_retired_path_in_use_keeps_its_place():
    tree = PageTree(8, 2)
    old = turn(tree, [8, 9, 10], [11], reserve=1)
    last = turn(tree, [1, 2, 3], [9], reserve=1)
    using = opened(tree, [1, 2, 30, 40], 1)
    tree.evict_first(last)
    tree.release(using, [40])  # its pages: 1 2 | 30 40
    lease = tree.lease(list(range(60, 70)), 1)  # 5 pages: 3 are free; 3 was retired, 10 is old
    assert set(old.pages[1:] + last.pages[1:]) <= set(lease.pages)
    assert opened(tree, [1, 2, 30, 40, 50], 1).cached == 4


def test_retiring_twice_or_after_eviction_does_nothing():
    tree = PageTree(4, 2)
    first = turn(tree, [1, 2, 3], [9], reserve=1)
    tree.cancel(tree.lease([20, 21, 22], 3))  # three pages: evicts that of 3
    assert tree.evicted == 1
    tree.evict_first(first)
    tree.evict_first(first)
    assert tree.lease([1, 2, 3], 1).cached == 2


def test_lease_is_released_once_and_after_its_prefill_only():
    tree = PageTree(4, 2)
    lease = tree.lease([1, 2, 3], 1)
    with pytest.raises(AssertionError, match="never computed"):
        tree.release(lease, [3])
    with pytest.raises(AssertionError, match="is open"):
        tree.evict_first(lease)
    tree.computed(lease)
    with pytest.raises(AssertionError, match="more than was reserved"):
        tree.release(lease, [3, 4, 5])
    assert lease.open
    tree.cancel(lease)
    for close in (tree.cancel, tree.computed, lambda lease: tree.release(lease, [3])):
        with pytest.raises(AssertionError, match="closed"):
            close(lease)


def test_lease_without_room_leaves_everything_as_it_was():
    tree = PageTree(4, 2)
    turn(tree, [1, 2, 3], [9], reserve=1)
    lease = opened(tree, [1, 2, 30], 2)
    before = state(tree)
    assert tree.lease([1, 2, 40, 50], 5) is None  # three more: one is free, one evictable
    assert tree.refusal is LeaseRefusal.PAGES
    assert state(tree) == before
    tree.release(lease, [30])
    assert tree.lease([1, 2, 40, 50], 5) is not None


def test_copy_is_given_up_where_there_is_no_room_for_its_source():
    tree = PageTree(2, 4)
    turn(tree, [1, 2, 3], [9])
    lease = tree.lease([1, 2, 7], 6)  # both pages
    assert (lease.cached, lease.copy, tree.evicted) == (0, None, 1)


def test_whole_pool_can_be_leased_when_no_other_lease_is_open():
    tree = PageTree(4, 2)
    turn(tree, [1, 2, 3, 4, 5], [6, 7])
    assert len(tree.lease([1, 2, 3, 4, 9], 4).pages) == 4


@pytest.mark.parametrize("context, reserve", [([], 1), ([1], 0), ([1, 2], 8)])
def test_lease_that_can_never_be_is_refused_by_name(context, reserve):
    with pytest.raises(ValueError, match=f"context of {len(context)} tokens"):
        PageTree(4, 2).lease(context, reserve)


def nodes(tree: PageTree, policy: int | None = None) -> list:
    """All nodes, parents first; of one policy, or of all."""
    found = [root for number, root in tree._roots.items() if policy in (None, number)]
    roots = len(found)
    for node in found:
        found += node.children.values()
    return found[roots:]


def state(tree: PageTree) -> tuple:
    """All that a refused lease must leave as it was."""
    held = [(n.page, n.tokens, n.ready, n.references, n.writing) for n in nodes(tree)]
    idle = [n.page for n in tree._idle]
    return held, idle, list(tree._free), tree.hits, tree.evicted


def check_tree(tree: PageTree, leases: list[Lease]) -> None:
    """Every page is free, private to a lease, or in one node; references are the open leases'."""
    found = nodes(tree)
    private = [page for lease in leases for page in lease.pages[len(lease.path) :]]
    pages = [node.page for node in found] + private + tree._free
    assert sorted(pages) == list(range(tree.pages))
    assert all(lease.open for lease in leases)
    place = {node: index for index, node in enumerate(tree._idle)}
    for node in found:
        users = sum((node in lease.path) + (node is lease.source) for lease in leases)
        writers = sum(node in lease.path[-1:] for lease in leases)
        full = len(node.tokens) == tree.page_size
        assert node.references == users
        assert node.writing == (writers > 0 and not full) and (full or writers <= 1)
        assert 1 <= len(node.tokens) <= tree.page_size and (full or not node.children)
        assert (users == 0) == (node in place)
        assert all(
            place.get(child, -1) < place.get(node, len(found)) for child in node.children.values()
        )
    assert len(place) == sum(not node.references for node in found)


def longest_cached(tree: PageTree, wanted: list[int], policy: int) -> int:
    """The longest prefix of `wanted` that some node's path holds computed, by looking at all."""
    best, prefix = 0, dict.fromkeys(tree._roots.values(), ())
    for node in nodes(tree, policy):
        before = prefix[node.parent]
        prefix[node] = before + node.tokens
        ready = before + node.tokens[: node.ready]
        for count in range(len(before) + 1, len(ready) + 1):
            if list(ready[:count]) == wanted[:count]:
                best = max(best, count)
    return best


def fingerprints(policy: int, tokens: list[int]) -> np.ndarray:
    """One number a position, of the policy and the prefix that keys and values depend on."""
    marks = [hash((policy, *tokens[: n + 1])) for n in range(len(tokens))]
    return np.array(marks, np.int64)


class Turn:
    """An open lease on the model device, and the tokens it has written so far."""

    def __init__(self, lease: Lease, context: list[int], reserve: int):
        self.lease, self.context, self.reserve = lease, context, reserve
        self.sampled: list[int] = []
        self.written = lease.cached

    @property
    def tokens(self) -> list[int]:
        return self.context + self.sampled


class Simulation:
    """Turns in random order on a device that is an array of fingerprints, pages x page_size.

    swaps: whether the policy is swapped now and then, which earlier conversations outlive or not.
    """

    def __init__(self, seed: int, pages: int, size: int, swaps: bool = False):
        self.random = random.Random(seed)
        self.tree, self.size = PageTree(pages, size), size
        self.device = np.zeros((pages, size), np.int64)
        self.open: list[Turn] = []
        self.closed: list[Lease] = []
        self.swaps, self.policy = swaps, 0
        self.histories: list[tuple[int, list[int]]] = [(0, [])]  # of a policy
        self.refused = {LeaseRefusal.PENDING: 0, LeaseRefusal.PAGES: 0}
        self.copies = self.in_place = 0

    def draw(self, least: int, most: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(self.random.randint(least, most))]

    def write(self, turn: Turn, end: int) -> None:
        """Writes the turn's positions up to `end`."""
        marks = fingerprints(turn.lease.policy, turn.tokens[:end])
        for position in range(turn.written, end):
            page = turn.lease.pages[position // self.size]
            self.device[page, position % self.size] = marks[position]
        turn.written = end

    def spoil(self, turn: Turn) -> None:
        """Overwrites all that is the turn's to write on: padding, steps dispatched ahead."""
        for position in range(turn.written, len(turn.lease.pages) * self.size):
            self.device[turn.lease.pages[position // self.size], position % self.size] = -1

    def begin(self) -> None:
        """A context that goes on from an earlier one, rewritten at its end or not."""
        policy, history = self.random.choice(self.histories)
        kept = self.random.choice([len(history), self.random.randint(0, len(history))])
        most = self.tree.pages * self.size
        context = (history[:kept] + self.draw(1, 5))[: most // 2]
        reserve = self.random.randint(1, 6)
        wanted = context[:-1]
        expected, before = longest_cached(self.tree, wanted, policy), state(self.tree)
        room = len(self.tree._free) + len(self.tree._idle)
        lease = self.tree.lease(context, reserve, policy)
        if lease is None:
            self.refused[self.tree.refusal] += 1
            assert state(self.tree) == before
            assert self.open, "an idle pool refuses nothing"
            return
        given_up = lease.cached == expected // self.size * self.size and room <= len(lease.pages)
        assert lease.cached == expected or given_up
        assert lease.shared == len(wanted) // self.size
        assert len(lease.pages) == -(-(len(wanted) + reserve) // self.size)
        self.copies += lease.copy is not None
        self.in_place += lease.copy is None and lease.cached % self.size > 0
        self.open.append(Turn(lease, context, reserve))

    def prefill(self, turn: Turn) -> None:
        if turn.lease.copy is not None:
            source, own = turn.lease.copy
            self.device[own] = self.device[source]
        self.check_reads(turn)
        self.write(turn, len(turn.context) - 1)
        self.spoil(turn)
        self.tree.computed(turn.lease)

    def decode(self, turn: Turn) -> None:
        """Feeds the last token and samples one."""
        if len(turn.sampled) == turn.reserve:
            return self.finish(turn)
        self.write(turn, len(turn.tokens))
        turn.sampled += self.draw(1, 1)

    def finish(self, turn: Turn) -> None:
        self.spoil(turn)
        self.open.remove(turn)
        self.tree.release(turn.lease, turn.tokens[len(turn.context) - 1 : turn.written])
        self.closed.append(turn.lease)
        self.histories = [*self.histories[-5:], (turn.lease.policy, turn.tokens)]

    def swap(self) -> None:
        """Another policy; half the time all that was computed before is given up."""
        self.policy += 1
        if self.random.random() < 0.5:
            for turn in list(self.open):
                self.cancel(turn)
            self.histories, self.closed = [], []
            self.tree.forget({self.policy})
            assert len(self.tree._free) == self.tree.pages
        self.histories.append((self.policy, []))

    def forget(self) -> None:
        """Frees what no conversation goes on from any more."""
        used = {turn.lease.policy for turn in self.open} | {which for which, _ in self.histories}
        self.tree.forget(used)
        assert self.tree._roots.keys() <= used

    def cancel(self, turn: Turn) -> None:
        self.spoil(turn)
        self.open.remove(turn)
        self.tree.cancel(turn.lease)
        self.closed.append(turn.lease)

    def check_reads(self, turn: Turn) -> None:
        """What the turn may read by now is of its own tokens."""
        held = self.device[turn.lease.pages].reshape(-1)[: turn.written]
        marks = fingerprints(turn.lease.policy, turn.tokens[: turn.written])
        np.testing.assert_array_equal(held, marks)

    def step(self) -> None:
        if self.swaps and self.random.random() < 0.1:
            return self.forget() if self.random.random() < 0.7 else self.swap()
        kind = self.random.random()
        if kind < 0.3 or not self.open:
            return self.begin()
        turn = self.random.choice(self.open)
        if kind < 0.33:
            self.cancel(turn)
        elif kind < 0.36 and self.closed:
            self.tree.evict_first(self.random.choice(self.closed[-4:]))
        elif turn.lease.pending:
            self.prefill(turn)
        elif kind < 0.9:
            self.decode(turn)
        else:
            self.finish(turn)

    def check(self) -> None:
        check_tree(self.tree, [turn.lease for turn in self.open])
        for turn in self.open:
            if not turn.lease.pending:
                self.check_reads(turn)

    def check_cache(self) -> None:
        """Every position that a later lease could be given holds what its tokens say."""
        for policy, root in self.tree._roots.items():
            prefix: dict = {root: []}
            for node in nodes(self.tree, policy):
                before = prefix[node.parent]
                prefix[node] = before + list(node.tokens)
                marks = fingerprints(policy, prefix[node])[len(before) :][: node.ready]
                np.testing.assert_array_equal(self.device[node.page, : node.ready], marks)


@pytest.mark.parametrize("pages, size", [(12, 1), (10, 2), (9, 3), (7, 4), (24, 4)])
def test_no_lease_ever_reads_what_another_wrote_over(pages, size):
    totals = np.zeros(5, int)
    for seed in range(4):
        simulation = Simulation(seed, pages, size)
        for _ in range(250):
            simulation.step()
            simulation.check()
            simulation.check_cache()
        while simulation.open:
            turn = simulation.open[0]
            if turn.lease.pending:
                simulation.prefill(turn)
            simulation.finish(turn)
        simulation.check()
        assert len(simulation.tree._idle) + len(simulation.tree._free) == pages
        whole = simulation.tree.lease([7] * (pages * size), 1)
        assert sorted(whole.pages) == list(range(pages))
        simulation.tree.cancel(whole)
        assert len(simulation.tree._free) == pages
        refused = simulation.refused.values()
        totals += [*refused, simulation.tree.evicted, simulation.copies, simulation.in_place]
    # Each of what can go wrong has come up; a page of one token is never shared in part.
    assert (totals[: 5 if size > 1 else 3] > 0).all(), totals


@pytest.mark.parametrize("pages, size", [(12, 1), (9, 3), (24, 4)])
def test_leases_of_different_policies_share_nothing(pages, size):
    cached = swaps = 0
    for seed in range(4):
        simulation = Simulation(seed, pages, size, swaps=True)
        for _ in range(250):
            simulation.step()
            simulation.check()
            simulation.check_cache()
        cached, swaps = cached + simulation.tree.hits, swaps + simulation.policy
        for turn in list(simulation.open):
            simulation.cancel(turn)
        simulation.tree.forget(())
        assert sorted(simulation.tree._free) == list(range(pages))
        assert not (simulation.tree._idle or simulation.tree._roots)
    assert cached > 100 and swaps > 20
