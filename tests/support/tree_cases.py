"""Random token trees, and attention over them: our kernels, all pairs at once, path by path."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.policy.kernels import tree_attention, tree_kernels, tree_kernels_gpu
from seeupo_jax.policy.kernels.tree_mask import TreeMask


class Case(NamedTuple):
    """Rows of tokens, their mask, and the paths that the tokens lie on.

    query_NC: index of each key's own query, -1 for none.
    paths: (row, indices of keys from a root down) of every leaf.
    """

    tree_mask: TreeMask
    query_NC: np.ndarray
    paths: list[tuple[int, list[int]]]


def parents_of(rng, length):
    """Trees in pre-order: the parent of each token, -1 at roots."""
    parents = []
    for index in range(length):
        spine = [-1] if index == 0 else [index - 1]
        while spine[-1] != -1:
            spine.append(parents[spine[-1]])
        # Mostly the path goes on; now and then it leaves an ancestor, or begins anew.
        parents.append(spine[0] if rng.random() < 0.9 else spine[rng.integers(len(spine))])
    return np.asarray(parents)


def ends_of(parents):
    end = np.arange(1, len(parents) + 1)
    for index in reversed(range(len(parents))):
        if parents[index] >= 0:
            end[parents[index]] = max(end[parents[index]], end[index])
    return end


def path_to(parents, index):
    path = []
    while index >= 0:
        path.append(int(index))
        index = parents[index]
    return path[::-1]


def leaves(parents):
    return sorted(set(range(len(parents))) - set(parents.tolist()))


def as_case(rows):
    """rows: of each, (order, first, end, depth, query, paths), past keys first."""
    columns = list(zip(*rows, strict=True))
    order, first, end, depth, query = (np.stack(x).astype(np.int32) for x in columns[:5])
    new = order.shape[1]
    tree_mask = TreeMask(order, depth[:, -new:], first, end, depth)
    paths = [(n, path) for n, row in enumerate(columns[5]) for path in row]
    return Case(tree_mask, query, paths)


def trees(seed, rows, length, parents_of=parents_of):
    """Random trees, several in a row."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(rows):
        parents, index = parents_of(rng, length), np.arange(length)
        paths = [path_to(parents, leaf) for leaf in leaves(parents)]
        depth = [len(path_to(parents, x)) - 1 for x in index]
        made.append((index, index, ends_of(parents), depth, index, paths))
    return as_case(made)


def causal(seed, rows, length):
    return trees(seed, rows, length, lambda rng, length: np.arange(length) - 1)


def sequences(seed, rows, length):
    def parents_of(rng, length):
        parents = np.arange(length) - 1
        parents[rng.integers(0, length, 3)] = -1
        return parents

    return trees(seed, rows, length, parents_of)


def continued(seed, rows, length):
    """New trees below random tokens of trees of an earlier pass; some keys are always masked."""
    rng, made, past = np.random.default_rng(seed), [], 90
    step = length + 1
    for _ in range(rows):
        old, new = parents_of(rng, past), parents_of(rng, length)
        root = np.asarray([path_to(new, x)[0] for x in range(length)])
        below = np.sort(rng.integers(0, past, length))[root]
        order = below * step + 1 + np.arange(length)
        paths = [
            path_to(old, below[leaf]) + [past + x for x in path_to(new, leaf)]
            for leaf in leaves(new)
        ]
        place = {key: depth for path in paths for depth, key in enumerate(path)}
        depth = [place.get(key, 0) for key in range(past + length)]
        first, end = np.arange(past) * step, ends_of(old) * step
        idle = np.asarray([key not in place for key in range(past)])
        end[idle] = first[idle]
        first = np.concatenate([first, order])
        end = np.concatenate([end, below * step + 1 + ends_of(new)])
        query = np.concatenate([np.full(past, -1), np.arange(length)])
        made.append((order, first, end, depth, query, paths))
    return as_case(made)


CASES = {
    "trees": trees(0, 2, 150),
    "causal": causal(1, 2, 150),
    "sequences": sequences(2, 2, 150),
    "continued": continued(3, 2, 150),
    "long trees": trees(4, 1, 300),  # beyond two blocks of 128
}


def random_arrays(case, H=4, kv_heads=2, d=16, dtype=jnp.float32):
    """Queries, keys, values, and the weight of each output in the loss."""
    rng = np.random.default_rng(9)
    N, L = case.tree_mask.order_NL.shape
    C = case.tree_mask.first_NC.shape[1]
    shapes = [(N, L, H, d), (N, C, kv_heads, d), (N, C, kv_heads, d), (N, L, H, d)]
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def all_pairs(q, k, v, *tree_mask, window, block=None):
    """The scores of all pairs, in the dtype of q, with a softmax over the visible ones."""
    order, depth, first, end, key_depth = tree_mask
    order, depth = order[:, :, None], depth[:, :, None]
    visible = (first[:, None] <= order) & (order < end[:, None])
    if window is not None:
        visible &= key_depth[:, None] > depth - window
    visible = visible[:, None, None]
    (N, L, H, d), kv_heads = q.shape, k.shape[2]
    q = q.reshape(N, L, kv_heads, H // kv_heads, d)
    scores = jnp.einsum("nlkgd,nckd->nkglc", q, k, preferred_element_type=jnp.float32) * d**-0.5
    weights = jnp.where(visible, jax.nn.softmax(jnp.where(visible, scores, -2e30), axis=-1), 0.0)
    return jnp.einsum("nkglc,nckd->nlkgd", weights.astype(q.dtype), v).reshape(N, L, H, d)


IMPLEMENTATIONS = {
    "all_pairs": all_pairs,
    "xla": tree_attention.attend,
    "pallas": tree_kernels.attend,
    "triton": tree_kernels_gpu.attend,
}


def attend(q, k, v, *, tree_mask, implementation, window=None, block=None, **scoring):
    arrays = (q, k, v, *tree_mask)
    if implementation == "all_pairs":
        return all_pairs(*arrays, window=window, block=block)
    return IMPLEMENTATIONS[implementation](*arrays, window=window, block=block, **scoring)[0]


def along_paths(q, k, v, *, case, window=None):
    """Each path computed alone, causally, its heads in full; a shared token is taken from one."""
    N, L, H, d = q.shape
    longest = max(len(path) for _, path in case.paths)
    row = np.asarray([n for n, _ in case.paths])[:, None]
    key = np.asarray([path + [-1] * (longest - len(path)) for _, path in case.paths])
    query = np.where(key >= 0, case.query_NC[row, key], -1)
    place = np.where(query >= 0, row * L + query, N * L).reshape(-1)
    taken = np.full_like(place, N * L)
    once = np.unique(place, return_index=True)[1]
    taken[once] = place[once]

    queries = q[row, query]
    keys, values = (jnp.repeat(x[row, key], H // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("plhd,pchd->phlc", queries, keys) * d**-0.5
    back = np.arange(longest)[:, None] - np.arange(longest)[None, :]
    visible = (back >= 0) & (back < (longest if window is None else window))
    weights = jax.nn.softmax(jnp.where(visible[None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("phlc,pchd->plhd", weights, values).reshape(-1, H, d)
    return jnp.zeros((N * L, H, d)).at[taken].set(out, mode="drop").reshape(q.shape)


def with_gradients(f, q, k, v, weight):
    """Outputs, and gradients of their weighted sum."""

    def loss(*qkv):
        return (lambda out: (jnp.sum(out * weight), out))(f(*qkv))

    (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return out, *gradients


@functools.partial(jax.jit, static_argnames=("implementation", "block", "window"))
def trained(q, k, v, weight, tree_mask, **options):
    """`with_gradients` of our attention."""
    return with_gradients(
        functools.partial(attend, tree_mask=tree_mask, **options), q, k, v, weight
    )


def assert_equal(got, wanted):
    names = ("out", "d_q", "d_k", "d_v")
    for name, x, y in zip(names, *jax.device_get((got, wanted)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max(), err_msg=name)


@functools.cache
def wanted(name, window):
    """By all scores at once; which equals what each path gives alone."""
    case = CASES[name]
    arrays = random_arrays(case)
    found = trained(*arrays, case.tree_mask, window=window, implementation="all_pairs")
    alone = functools.partial(along_paths, case=case, window=window)
    assert_equal(found, jax.jit(functools.partial(with_gradients, alone))(*arrays))
    return jax.device_get(found)
