"""Packs sequences that begin alike into rows as token trees: every shared token is stored once."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, eq=False)
class TokenForest:
    """Token trees packed into rows; index S: the sequences that were packed.

    A token sees exactly its own prefix: query q sees key k when k <= q < end[k].

    tokens, depth, end: one int32 array a row, in pre-order: token ids; position in the sequence;
      one past the last index of the token's subtree.
    row_S: int32, the row that holds sequence S.
    index: one int32 array a sequence: the index in that row of each of its tokens.
    shared_S: int32, the number of first tokens of sequence S that another sequence already counts,
      in this or another row: the remaining ones count every shared token once.
    """

    tokens: tuple[np.ndarray, ...]
    depth: tuple[np.ndarray, ...]
    end: tuple[np.ndarray, ...]
    row_S: np.ndarray
    index: tuple[np.ndarray, ...]
    shared_S: np.ndarray

    def counted(self, shape: tuple[int, int]) -> np.ndarray:
        """The tokens of padded rows that are counted, bool of this shape: each shared one once."""
        counted_RL = np.zeros(shape, bool)
        for row, shared, index_L in zip(self.row_S, self.shared_S, self.index, strict=True):
            counted_RL[row, index_L[shared:]] = True
        return counted_RL


class _Line(NamedTuple):
    """All sequences in one line, those of a tree in lexicographic order; index I: the place.

    sequence_I: the sequence at the place. length_I: its number of tokens.
    common_I: the length of its common prefix with its left neighbour; 0 where a tree begins.
    """

    sequence_I: list[int]
    length_I: list[int]
    common_I: list[int]

    def common(self, left: int, right: int) -> int:
        """The number of tokens that two places share: the minimum over neighbours between them."""
        return min(self.common_I[left + 1 : right + 1])


class _Bin(NamedTuple):
    """Sequences that share one row: their tokens there at most, and their places."""

    size: int
    places: list[int]


def choose_length(
    sequences: Sequence[np.ndarray],
    tree_S: Sequence[int],
    *,
    lengths: Sequence[int],
    rows: int,
    share: bool = True,
    identity: Sequence[np.ndarray] | None = None,
) -> tuple[int, TokenForest]:
    """Packs sequences into rows of the length that computes the fewest tokens, padding included.

    Args:
      sequences: token ids, one array a sequence.
      tree_S: sequences of the same number share their common prefix; others never do. A tree that
        a row does not hold is cut into several, each with all tokens that its sequences need; a
        smaller tree is cut where that saves a row.
      lengths: rising row lengths to choose from. Of equally good ones the longest is taken.
      rows: rows of a microbatch; the last microbatch is filled up with empty rows.
      share: whether prefixes are shared; False: every sequence is a tree of its own.
      identity: numbers below 2**32, one array a sequence: tokens are shared if they are equal;
        None: the token ids.

    Returns: the length, and the sequences packed for it.

    Raises:
      ValueError: a sequence is longer than the longest row.
    """
    line = _line(sequences if identity is None else identity, tree_S, share)
    longest = min(max(line.length_I, default=0), lengths[-1])  # _fill refuses what is longer
    fills = {length: _fill(line, length) for length in lengths if length >= longest}
    padded = {length: -(-len(fill) // rows) * rows * length for length, fill in fills.items()}
    length = min(fills, key=lambda length: (padded[length], -length))
    return length, _lay_out(sequences, line, fills[length])


def _line(sequences: Sequence[np.ndarray], tree_S: Sequence[int], share: bool) -> _Line:
    """Sorts sequences so that each shares the most with its neighbours."""
    trees = list(tree_S) if share else list(range(len(sequences)))
    # Big-endian bytes compare as token ids do, a whole sequence at a time.
    text = [np.asarray(tokens).astype(">u4").tobytes() for tokens in sequences]
    keys = list(zip(trees, text, strict=True))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    common_I = [0] * len(order)
    for place in range(1, len(order)):
        left, right = order[place - 1], order[place]
        if trees[left] == trees[right]:
            common_I[place] = _common(sequences[left], sequences[right])
    return _Line(order, [len(sequences[s]) for s in order], common_I)


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """The length of the common prefix of two sequences."""
    shorter = min(len(left), len(right))
    differs = left[:shorter] != right[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _fill(line: _Line, capacity: int) -> list[list[int]]:
    """The places of the line that share each row.

    Visits the branchings of the trees from the deepest to the root and unites the subtrees of each
    as far as a row holds them: a tree that fits stays whole, and one that does not is cut where it
    shares least. Depth 0 is the branching of all trees: there rows fill up. At the end more trees
    are cut where that saves rows.
    """
    longest = max(line.length_I, default=0)
    if longest > capacity:
        raise ValueError(f"a sequence has {longest} tokens; allowed: at most {capacity}, a row's.")
    open_: list[tuple[int, list[_Bin]]] = [(0, [])]  # branchings of the path to this place
    below: list[_Bin] = []
    for place, (length, common) in enumerate(zip(line.length_I, line.common_I, strict=True)):
        below = _close(open_, below, common, capacity)
        if open_[-1][0] < common:
            open_.append((common, []))
        open_[-1][1].extend(below)
        below = [_Bin(length, [place])]
    root = _close(open_, below, 0, capacity)
    rows = _save_rows(line, _unite([*open_[0][1], *root], 0, capacity), capacity)
    return sorted(sorted(row.places) for row in rows)


def _close(
    open_: list[tuple[int, list[_Bin]]], below: list[_Bin], depth: int, capacity: int
) -> list[_Bin]:
    """Unites at every open branching deeper than this, and takes those from the path."""
    while open_[-1][0] > depth:
        branching, bins = open_.pop()
        below = _unite([*bins, *below], branching, capacity)
    return below


def _unite(bins: list[_Bin], depth: int, capacity: int) -> list[_Bin]:
    """Best-fit decreasing of bins that have their first `depth` tokens in common."""
    united: list[_Bin] = []  # rising sizes
    for bin_ in sorted(bins, key=lambda bin_: (-bin_.size, bin_.places)):
        room = capacity - (bin_.size - depth)
        fullest = bisect_right(united, room, key=attrgetter("size")) - 1
        if fullest >= 0:
            other = united.pop(fullest)
            bin_ = _Bin(other.size + bin_.size - depth, other.places + bin_.places)
        insort(united, bin_, key=attrgetter("size"))
    return united


def _save_rows(line: _Line, rows: list[_Bin], capacity: int) -> list[_Bin]:
    """Empties rows into the room that the others leave, as long as any can be emptied."""
    rows, tried = sorted(rows), 0
    while tried < len(rows) - 1 and sum(row.size for row in rows) <= (len(rows) - 1) * capacity:
        others = rows[:tried] + rows[tried + 1 :]
        filled = _first_fit(line, sorted(rows[tried].places), others, capacity)
        if filled is None:
            tried += 1
        else:
            rows = sorted(filled)
    return rows


def _first_fit(
    line: _Line, places: list[int], rows: list[_Bin], capacity: int
) -> list[_Bin] | None:
    """Rows of rising sizes with these places added, neighbours together; None if not all fit."""
    filled, row = list(rows), 0
    for i, place in enumerate(places):
        new = line.length_I[place] - (line.common(places[i - 1], place) if i else 0)
        if filled[row].size + new > capacity:
            row, new = row + 1, line.length_I[place]
        if row == len(rows) or filled[row].size + new > capacity:
            return None
        filled[row] = _Bin(filled[row].size + new, [*filled[row].places, place])
    return filled


class _Tree(NamedTuple):
    """The pre-order of one row, made of its sequences in their order (index J).

    sequence_J: which sequence. Its tokens from start_J to stop_J are not those of one before it;
    edge_J: where in the row these begin, and at last the row's length.
    """

    sequence_J: list[int]
    start_J: list[int]
    stop_J: list[int]
    edge_J: list[int]

    @classmethod
    def of(cls, line: _Line, places: Sequence[int]) -> _Tree:
        """The row that holds these rising places of the line."""
        start_J = [0, *map(line.common, places, places[1:])]
        stop_J = [line.length_I[place] for place in places]
        edge_J = [0, *np.cumsum(np.subtract(stop_J, start_J)).tolist()]
        return cls([line.sequence_I[place] for place in places], start_J, stop_J, edge_J)

    def new(self, source: Sequence[np.ndarray]) -> np.ndarray:
        """The row in pre-order, from what its sequences have at each of their tokens."""
        cuts = zip(source, self.start_J, self.stop_J, strict=True)
        return np.concatenate([array[start:stop] for array, start, stop in cuts], dtype=np.int32)

    def index(self) -> list[np.ndarray]:
        """The indices in the row of the tokens of each sequence."""
        path = np.empty(max(self.stop_J), np.int32)  # by depth, of the sequence at hand
        index = []
        for start, stop, edge in zip(self.start_J, self.stop_J, self.edge_J, strict=False):
            path[start:stop] = np.arange(edge, edge + stop - start)
            index.append(path[:stop].copy())
        return index

    def end(self) -> np.ndarray:
        """The end of the subtree of each of the row's tokens."""
        path = np.empty(max(self.stop_J), np.int32)  # by depth, of the sequence at hand
        end = np.empty(self.edge_J[-1], np.int32)
        leaves = [*self.start_J[1:], 0]  # the depth at which the next sequence leaves the path
        for j in reversed(range(len(self.stop_J))):
            first, last = self.edge_J[j : j + 2]
            path[leaves[j] : self.stop_J[j]] = last
            end[first:last] = path[self.start_J[j] : self.stop_J[j]]
        return end


def _lay_out(
    sequences: Sequence[np.ndarray], line: _Line, rows: Sequence[list[int]]
) -> TokenForest:
    """Writes the rows that hold these places of the line."""
    trees = [_Tree.of(line, places) for places in rows]
    ramp = np.arange(max(line.length_I, default=0))
    row_S, shared_S = np.zeros((2, len(sequences)), np.int32)
    shared_S[line.sequence_I] = line.common_I
    index = [ramp] * len(sequences)
    for row, tree in enumerate(trees):
        row_S[tree.sequence_J] = row
        for sequence, index_L in zip(tree.sequence_J, tree.index(), strict=True):
            index[sequence] = index_L
    return TokenForest(
        tuple(tree.new([sequences[s] for s in tree.sequence_J]) for tree in trees),
        tuple(tree.new([ramp] * len(tree.sequence_J)) for tree in trees),
        tuple(tree.end() for tree in trees),
        row_S,
        tuple(index),
        shared_S,
    )
