"""States and pages of recurrent models: found where contexts meet, never read after another's."""

import random

import numpy as np
import pytest

from seeupo_jax.rollout.engine.kv_pages import LeaseRefusal
from seeupo_jax.rollout.engine.state_tree import SPLIT, StateLease, StateTree

PROMPT = list(range(1, 11))  # its last token is decoding's first input


def opened(tree: StateTree, context: list[int], reserve: int = 4) -> StateLease:
    """A lease whose prefill and first decoding have been dispatched."""
    lease = tree.lease(context, reserve)
    assert lease is not None
    tree.computed(lease) if not lease.stops else None
    while lease.stops:
        tree.advance(lease)
        tree.computed(lease)
    tree.advance(lease)
    return lease


def turn(tree: StateTree, context: list[int], action: list[int]) -> StateLease:
    lease = opened(tree, context, len(action))
    tree.release(lease, [context[-1], *action[:-1]])
    return lease


def cached(tree: StateTree, context: list[int]) -> int:
    lease = tree.lease(context, 1)
    tree.cancel(lease)
    return lease.cached


def test_the_next_turn_goes_on_behind_the_last_token_that_the_state_has_seen():
    tree = StateTree(16, 4, 4)
    first = turn(tree, PROMPT, [20, 21, 22])
    lease = tree.lease([*PROMPT, 20, 21, 22, 30, 31], 2)
    assert lease.cached == 12  # 9 of the prompt and its last; 20 and 21, but not 22
    assert lease.read == first.path[-1].state != lease.write
    assert lease.pages[:3] == first.pages[:3] and lease.copy is None
    assert lease.stops == [14]


def test_a_context_that_leaves_an_action_goes_on_from_the_end_of_the_one_before():
    tree = StateTree(16, 4, 4)
    turn(tree, PROMPT, [20, 21, 22])
    assert cached(tree, [*PROMPT, 20, 30, 31]) == 9
    assert cached(tree, [*PROMPT[:8], 30, 31]) == 0  # no state in the middle of tokens


def test_members_wait_for_their_prompt_and_begin_with_its_state():
    tree = StateTree(32, 4, 8)
    first = tree.lease(PROMPT, 3)
    assert tree.lease(PROMPT, 3) is None and tree.refusal is LeaseRefusal.PENDING
    tree.advance(first)
    tree.computed(first)
    # Before the first one has decoded: it reads the kept state, too, and writes another.
    second, third = tree.lease(PROMPT, 3), tree.lease(PROMPT, 3)
    assert first.read == second.read == third.read == first.path[-1].state
    assert len({first.read, first.write, second.write, third.write}) == 4
    assert second.cached == third.cached == 9 and tree.hits == 18
    # Two pages are shared; of the third, which the first one writes into, others have copies.
    assert first.pages[:2] == second.pages[:2] == third.pages[:2]
    assert [second.copy[0], third.copy[0]] == 2 * first.pages[2:3]


def test_a_state_is_kept_where_a_context_parts_from_another():
    tree = StateTree(64, 4, 8)
    system = list(range(100, 100 + SPLIT))
    turn(tree, [*system, 1, 2, 3], [20])
    second = tree.lease([*system, 5, 6, 7], 1)
    assert second.cached == 0 and second.stops == [SPLIT, SPLIT + 2]
    assert tree.lease([*system, 8, 9], 1) is None and tree.refusal is LeaseRefusal.PENDING
    tree.advance(second)
    tree.computed(second)
    assert tree.lease([*system, 8, 9], 1).cached == SPLIT
    short = StateTree(64, 4, 8)
    turn(short, [*system[1:], 1, 2, 3], [20])
    assert short.lease([*system[1:], 5, 6, 7], 1).stops == [SPLIT + 1]  # it would save too little


def test_the_state_that_is_least_likely_to_be_of_use_goes_first():
    tree = StateTree(64, 4, 6)
    prompts = [[n] * 5 for n in range(3)]
    for prompt in prompts[:2]:
        turn(tree, prompt, [20, 21])  # a state behind the prompt, one behind the action
    turn(tree, [*prompts[0], 20, 21, 30], [22])  # has used that of the first action
    assert tree.evicted_states == 0
    turn(tree, prompts[2], [23])
    assert tree.evicted_states == 2  # that one, and the one behind 30, of which 22 has a better
    assert cached(tree, [*prompts[0], 20, 21, 30, 22, 7]) == 8
    assert cached(tree, [*prompts[0], 20, 31]) == 0  # the oldest of the others made room for it
    assert cached(tree, [*prompts[1], 20, 31]) == 6


def test_without_another_state_the_lease_goes_on_in_its_own_and_keeps_none():
    tree = StateTree(64, 4, 1)
    lease = opened(tree, PROMPT)
    assert lease.read == lease.write and lease.path[-1].state is None
    assert tree.lease([5, 6], 1) is None and tree.refusal is LeaseRefusal.PAGES
    tree.release(lease, [PROMPT[-1]])
    again = tree.lease([*PROMPT, 20, 21], 1)  # the only state would have to be read and written
    assert again.cached == 0


def test_a_cut_action_leaves_the_state_of_its_context_only():
    tree = StateTree(16, 4, 4)
    tree.cancel(opened(tree, PROMPT))
    assert cached(tree, [*PROMPT, 20, 21]) == 9


def test_what_a_cancelled_prefill_announced_is_not_waited_for():
    tree = StateTree(16, 4, 4)
    tree.cancel(tree.lease(PROMPT, 2))
    assert cached(tree, PROMPT) == 0


def test_what_was_used_last_is_kept_longest():
    tree = StateTree(64, 4, 5)
    for prompt in ([1] * 5, [2] * 5):
        turn(tree, prompt, [20])
    turn(tree, [1] * 5, [20])  # the same action: its end is kept once
    assert tree.evicted_states == 0 and len(tree._free_states) == 1
    turn(tree, [3] * 5, [20])  # a state of its prompt, and one of its action, for one that is free
    assert cached(tree, [1, 1, 1, 1, 9]) == 4 and cached(tree, [2, 2, 2, 2, 9]) == 0


def test_in_the_middle_of_a_conversation_no_better_state_gives_way_to_its_contexts():
    tree = StateTree(64, 4, 5)
    turn(tree, [1] * 5, [20])
    turn(tree, [2] * 5, [20])
    lease = tree.lease([1] * 5 + [20, 30], 1)
    tree.advance(lease)
    tree.lease([3] * 5, 1)  # takes the state that the other one has read
    tree.computed(lease)
    assert lease.path[-1].state is None and tree.evicted_states == 1


def test_a_conversation_that_is_over_loses_its_pages_and_states_first():
    tree = StateTree(4, 4, 8)
    turn(tree, [1] * 5, [5])
    tree.evict_first(turn(tree, [2] * 5, [5]))
    turn(tree, [3] * 5, [5, 5, 5, 5])
    assert tree.evicted == 2
    assert cached(tree, [1, 1, 1, 1, 1, 5]) == 5
    tree = StateTree(64, 4, 4)
    turn(tree, [1] * 5, [5])
    tree.evict_first(turn(tree, [2] * 5, [5]))
    opened(tree, [3] * 5)
    assert tree.evicted_states == 2
    assert cached(tree, [1, 1, 1, 1, 1, 5]) == 5


def test_the_whole_pool_can_be_leased_when_no_other_lease_is_open():
    tree = StateTree(4, 2, 2)
    turn(tree, [1, 2, 3, 4], [5, 6])
    assert len(tree.lease([1, 2, 3, 4, 9], 4).pages) == 4


@pytest.mark.parametrize("context, reserve", [([], 1), ([1], 0), ([1, 2], 8)])
def test_a_lease_that_can_never_be_is_refused_by_name(context, reserve):
    with pytest.raises(ValueError, match=f"context of {len(context)} tokens"):
        StateTree(4, 2, 2).lease(context, reserve)


def nodes(tree: StateTree, policy: int | None = None) -> list:
    """All nodes, parents first; of one policy, or of all."""
    found = [root for number, root in tree._roots.items() if policy in (None, number)]
    roots = len(found)
    for node in found:
        found += node.children
    return found[roots:]


def tokens_to(node) -> list[int]:
    before = [] if node.parent is None else tokens_to(node.parent)
    return before + np.frombuffer(node.tokens, np.int32).tolist()


def longest_kept(tree: StateTree, wanted: list[int], policy: int) -> int:
    """The most tokens that `wanted` begins with and a kept state has seen, by looking at all."""
    seen = [tokens_to(node) for node in nodes(tree, policy) if node.state is not None]
    return max((len(tokens) for tokens in seen if wanted[: len(tokens)] == tokens), default=0)


def private_pages(lease: StateLease) -> list[int]:
    of_nodes = {page for node in lease.path for page in node.pages}
    return [page for page in lease.pages if page not in of_nodes]


def check_tree(tree: StateTree, leases: list[StateLease]) -> None:
    """Every page and every state is free, an open lease's or a node's."""
    found, idle = nodes(tree), list(tree._idle)
    pages = [page for node in found for page in node.pages] + tree._free
    pages += [page for lease in leases for page in private_pages(lease)]
    assert sorted(pages) == list(range(tree.pages))
    states = [node.state for node in found if node.state is not None] + tree._free_states
    assert sorted(states + [lease.write for lease in leases]) == list(range(tree.states))
    assert tree._idle_pages == sum(len(node.pages) for node in idle)
    assert set(idle) == {node for node in found if not node.leases}
    for node in found:
        assert node.leases == sum(node in lease.path for lease in leases)
        assert node.readers == sum(node is lease.source for lease in leases)
        assert (node.state is not None) == (node in tree._kept) + (node in tree._stale)
        assert node.leases or node.children or node.state is not None
        extending = sum(child.extends for child in node.children)
        extending += sum(lease.extends and lease.path[-1:] == [node] for lease in leases)
        assert extending == node.extended
        if not node.leases:
            assert all(idle.index(child) < idle.index(node) for child in node.children)


class Turn:
    """An open lease on the model device: the tokens that its state has seen, and its samples."""

    def __init__(self, lease: StateLease, context: list[int], reserve: int):
        self.lease, self.context, self.reserve = lease, context, reserve
        self.sampled: list[int] = []
        self.seen = lease.cached

    @property
    def tokens(self) -> list[int]:
        return self.context + self.sampled


class Simulation:
    """Turns in random order on a device whose pages and states are what they have seen.

    swaps: whether the policy is swapped now and then, which earlier conversations outlive or not.
    """

    def __init__(
        self, seed: int, pages: int, size: int, states: int, slots: int, swaps: bool = False
    ):
        self.random = random.Random(seed)
        self.tree, self.size, self.slots = StateTree(pages, size, states), size, slots
        self.keys = np.full((pages, size), None)
        self.states = np.full(states, None)
        self.open: list[Turn] = []
        self.closed: list[StateLease] = []
        self.swaps, self.policy = swaps, 0
        self.histories: list[tuple[int, list[int]]] = [(0, [])]  # of a policy
        self.continued = self.refused = self.copies = 0

    def draw(self, least: int, most: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(self.random.randint(least, most))]

    def dispatch(self, turn: Turn, end: int) -> None:
        """A row of the turn's tokens up to `end`; all before them must be there to be read."""
        lease, policy = turn.lease, turn.lease.policy
        if turn.seen:
            assert self.states[lease.read] == (policy, *turn.tokens[: turn.seen])
        held = self.keys[lease.pages].reshape(-1)[: turn.seen]
        assert list(held) == [(policy, *turn.tokens[: n + 1]) for n in range(turn.seen)]
        for position in range(turn.seen, len(lease.pages) * self.size):  # padding behind the end
            mark = (policy, *turn.tokens[: position + 1]) if position < end else "spoilt"
            self.keys[lease.pages[position // self.size], position % self.size] = mark
        self.states[lease.write] = (policy, *turn.tokens[:end])
        self.tree.advance(lease)
        turn.seen = end

    def begin(self) -> None:
        """A context that continues an earlier one, rewritten at its end or not."""
        if len(self.open) == self.slots:
            return
        policy, history = self.random.choice(self.histories)
        kept = self.random.choice([len(history), len(history), self.random.randint(0, 60)])
        most = self.tree.pages * self.size
        context = (history[:kept] + self.draw(1, 50))[: most // 2]
        reserve = self.random.randint(1, 6)
        longest = longest_kept(self.tree, context[:-1], policy)
        lease = self.tree.lease(context, reserve, policy)
        if lease is None:
            self.refused += 1
            assert self.open, "an idle pool refuses nothing"
            return
        assert lease.cached == longest or not (lease.cached or self.open)
        assert lease.shared == (len(context) - 1) // self.size
        assert len(lease.pages) == -(-(len(context) - 1 + reserve) // self.size)
        if lease.copy is not None:
            self.copies += 1
            source, own = lease.copy
            self.keys[own] = self.keys[source]
        if lease.pending and not lease.stops:
            self.tree.computed(lease)
        self.continued += lease.cached > 0
        self.open.append(Turn(lease, context, reserve))

    def work(self, turn: Turn) -> None:
        """A row of prefill, or a step of decoding."""
        if turn.lease.stops:
            stop = turn.lease.stops[0]
            self.dispatch(turn, self.random.randint(turn.seen + 1, stop))
            if turn.seen == stop:
                self.tree.computed(turn.lease)
        elif len(turn.sampled) == turn.reserve:
            self.end(turn, cut=self.random.random() < 0.2)
        else:
            self.dispatch(turn, len(turn.tokens))
            turn.sampled += self.draw(1, 1)

    def end(self, turn: Turn, *, cut: bool) -> None:
        self.open.remove(turn)
        if cut or not turn.sampled:
            self.tree.cancel(turn.lease)
        else:
            self.tree.release(turn.lease, turn.tokens[len(turn.context) - 1 : turn.seen])
            self.histories = [*self.histories[-5:], (turn.lease.policy, turn.tokens)]
        self.closed.append(turn.lease)

    def swap(self) -> None:
        """Another policy; half the time all that was computed before is given up."""
        self.policy += 1
        if self.random.random() < 0.5:
            for turn in list(self.open):
                self.end(turn, cut=True)
            self.histories, self.closed = [], []
            self.tree.forget({self.policy})
            assert len(self.tree._free) == self.tree.pages
        self.histories.append((self.policy, []))

    def forget(self) -> None:
        """Frees what no conversation goes on from any more."""
        used = {turn.lease.policy for turn in self.open} | {which for which, _ in self.histories}
        self.tree.forget(used)
        assert self.tree._roots.keys() <= used

    def step(self) -> None:
        if self.swaps and self.random.random() < 0.05:
            return self.forget() if self.random.random() < 0.7 else self.swap()
        kind = self.random.random()
        if kind < 0.25 or not self.open:
            self.begin()
        elif kind < 0.28:
            self.end(self.random.choice(self.open), cut=True)
        elif kind < 0.31 and self.closed:
            self.tree.evict_first(self.random.choice(self.closed[-4:]))
        else:
            self.work(self.random.choice(self.open))

    def check_cache(self) -> None:
        """Every position that a later lease could be given holds what its tokens say."""
        for policy in self.tree._roots:
            for node in nodes(self.tree, policy):
                tokens = tokens_to(node)
                if node.ready and node.state is not None:
                    assert self.states[node.state] == (policy, *tokens)
                pages = self.tree._pages_of(self.tree._path(node))
                held = self.keys[pages].reshape(-1)[: len(tokens)]
                marks = [(policy, *tokens[: n + 1]) for n in range(len(tokens))]
                assert not node.ready or list(held) == marks


@pytest.mark.parametrize(
    "pages, size, states, slots", [(150, 1, 6, 3), (90, 2, 12, 4), (40, 7, 5, 5), (60, 8, 30, 6)]
)
def test_no_lease_ever_reads_what_another_wrote(pages, size, states, slots):
    totals = np.zeros(5, int)
    for seed in range(3):
        simulation = Simulation(seed, pages, size, states, slots)
        for _ in range(250):
            simulation.step()
            check_tree(simulation.tree, [turn.lease for turn in simulation.open])
        simulation.check_cache()
        tree = simulation.tree
        counts = simulation.continued, simulation.refused, tree.evicted, tree.evicted_states
        totals += *counts, simulation.copies
    assert all(totals[:4]) and (size == 1 or totals[4])


def test_leases_of_different_policies_share_nothing():
    continued = swaps = 0
    for seed in range(4):
        simulation = Simulation(seed, 90, 2, 12, 4, swaps=True)
        tree = simulation.tree
        for _ in range(500):
            simulation.step()
            check_tree(tree, [turn.lease for turn in simulation.open])
        simulation.check_cache()
        continued, swaps = continued + simulation.continued, swaps + simulation.policy
        for turn in list(simulation.open):
            simulation.end(turn, cut=True)
        tree.forget(())
        assert sorted(tree._free) == list(range(90)) and sorted(tree._free_states) == [*range(12)]
        assert not (tree._idle or tree._kept or tree._stale or tree._roots)
    assert continued > 50 and swaps > 10, (continued, swaps)
