"""Paged attention on hand-worked values, and against a softmax in float64 over the true tokens."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_cases
from jax.experimental.pallas import tpu as pltpu

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, sharding
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.kernels import attention, paged
from seeupo_jax.policy.kernels.attention import NOWHERE, KeyValues
from seeupo_jax.policy.kernels.paged import (
    Pages,
    PageTable,
    Prefixes,
    copy_pages,
    decode_kernel,
    new_pages,
)

run = jax.jit(paged.attend, static_argnames=("window", "kernel", "block"))
write = jax.jit(paged.write)
copy = jax.jit(copy_pages)
plain_attention = jax.jit(attention.attend)

PAGE, HEAD, WIDTH, POOL, LENGTH = 4, 8, 8, 48, 5
PREFIXES = (8, 12, 0)  # tokens; the last is no prefix
CONVERSATIONS = ((0, 27), (0, 9), (None, 14), (1, 13), (0, 20), (1, 22))  # prefix, tokens
# Conversation, first token of the pass, tokens of the pass; None is an idle row. The first, the
# third and the last conversation have several rows; the last begins within its own first page.
ROWS = ((0, 17, 5), (2, 0, 5), None, (0, 22, 5), (1, 8, 1), (2, 5, 5), (3, 12, 1), (2, 10, 4))
ROWS += ((4, 15, 5), (5, 12, 5), (5, 17, 5), None)
MEMBERS = ((0, 3, 4, 8, 12), (9, 6, 10, 12, 12), (12,) * 5)  # rows of each prefix; 12 is none


class Case(NamedTuple):
    """A pass over the rows; `whole` reaches everything by own tables, `shared` also by prefixes."""

    q: np.ndarray
    before: Pages
    new: KeyValues
    position_RL: np.ndarray
    whole: PageTable
    shared: PageTable
    after: Pages  # `before` with the pass's tokens in it
    wanted: np.ndarray
    spare: int  # a page that nothing lies in


def make_case(seed, *, kv_heads=2, groups=2, window=None, sharpness=1.0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    free = list(rng.permutation(POOL))

    def take(tokens):
        return [free.pop() for _ in range(-(-tokens // PAGE))]

    common = [(normal(2, n, kv_heads, HEAD), take(n)) for n in PREFIXES]
    truth, numbers = [], []
    for prefix, tokens in CONVERSATIONS:
        first, pages = (normal(2, 0, kv_heads, HEAD), []) if prefix is None else common[prefix]
        rest = tokens - first.shape[1]
        truth.append(np.concatenate([first, normal(2, rest, kv_heads, HEAD)], axis=1))
        numbers.append(pages + take(rest))
    q = sharpness * normal(len(ROWS), LENGTH, kv_heads * groups, HEAD)
    new = normal(2, len(ROWS), LENGTH, kv_heads, HEAD)
    position = np.full((len(ROWS), LENGTH), NOWHERE, np.int32)
    before, after = (np.array(x) for x in [normal(2, kv_heads, POOL, PAGE, HEAD)] * 2)
    begins = [min(row[1] for row in filter(None, ROWS) if row[0] == c) for c in range(len(truth))]
    for c, pages in enumerate(numbers):
        for i in range(truth[c].shape[1]):
            slot = np.s_[:, :, pages[i // PAGE], i % PAGE]
            after[slot] = truth[c][:, i]
            before[slot] = truth[c][:, i] if i < begins[c] else before[slot]
    for r, row in enumerate(ROWS):
        c, first, count = (0, 0, 0) if row is None else row
        position[r, :count] = np.arange(first, first + count)
        new[:, r, :count] = truth[c][:, first : first + count]
    return Case(
        q,
        Pages(*before),
        KeyValues(*new),
        position,
        reach_of(rng, numbers),
        reach_of(rng, numbers, [pages for _, pages in common]),
        Pages(*after),
        softmax_attention(q, truth, window),
        sorted(free)[1],
    )


def reach_of(rng, numbers, prefixes=None):
    """Tables filled up with numbers of any page, and of none."""
    table = rng.integers(-1, POOL + 1, size=(len(ROWS), WIDTH))
    start = np.zeros(len(ROWS), np.int64)
    for r, row in enumerate(ROWS):
        if row is None:
            continue
        prefix = CONVERSATIONS[row[0]][0]
        start[r] = 0 if prefixes is None or prefix is None else PREFIXES[prefix]
        pages = numbers[row[0]][start[r] // PAGE :]
        table[r, : len(pages)] = pages
    if prefixes is None:
        return PageTable(table.astype(np.int32), start.astype(np.int32))
    shared = rng.integers(-1, POOL + 1, size=(len(prefixes), WIDTH - 3))
    for own, pages in zip(shared, prefixes, strict=True):
        own[: len(pages)] = pages
    arrays = [np.asarray(x, np.int32) for x in (table, start, shared, PREFIXES, MEMBERS)]
    return PageTable(*arrays[:2], Prefixes(*arrays[2:]))


def softmax_attention(q, truth, window):
    """One query at a time, in float64; padding is 0."""
    out = np.zeros(q.shape)
    for r, row in enumerate(ROWS):
        c, first, count = (0, 0, 0) if row is None else row
        for i, h in np.ndindex(count, q.shape[2]):
            newest = first + i
            oldest = 0 if window is None else max(0, newest - window + 1)
            k, v = truth[c][:, oldest : newest + 1, h * truth[c].shape[2] // q.shape[2]]
            score = k.astype(np.float64) @ q[r, i, h] / np.sqrt(HEAD)
            weight = np.exp(score - score.max())
            out[r, i, h] = weight @ v / weight.sum()
    return out


def passed(case, page_table, **options):
    """Writes the pass's tokens, then attends."""
    pages = write(case.before, case.new, case.position_RL, page_table)
    return run(case.q, pages, case.position_RL, page_table, **options)


@pytest.mark.parametrize("kv_heads, groups, window", [(2, 1, None), (1, 7, 7), (3, 2, 1)])
def test_rows_that_reach_by_tables_and_prefixes_equal_the_softmax(kv_heads, groups, window):
    case = make_case(0, kv_heads=kv_heads, groups=groups, window=window)
    for page_table in (case.whole, case.shared):
        out = passed(case, page_table, window=window, block=8)
        np.testing.assert_allclose(out, case.wanted, atol=1e-6)


def test_neither_blocks_nor_prefixes_change_the_result():
    case = make_case(1, window=7)
    wanted = passed(case, case.whole, window=7, block=None)
    np.testing.assert_allclose(wanted, case.wanted, atol=1e-6)
    for block in (PAGE, 3 * PAGE, None):
        out = passed(case, case.shared, window=7, block=block)
        np.testing.assert_allclose(out, wanted, atol=1e-6, err_msg=f"block {block}")


def test_scores_of_hundreds_neither_overflow_nor_lose_the_blocks_before():
    case = make_case(2, sharpness=100.0)
    # float32 scores of 300 are off by 2e-5.
    np.testing.assert_allclose(passed(case, case.shared, block=PAGE), case.wanted, atol=1e-4)


def test_padding_is_zero_also_where_every_row_is_idle():
    case = make_case(3)
    idle = np.full_like(case.position_RL, NOWHERE)
    for block in (None, PAGE):
        out = np.asarray(passed(case, case.shared, block=block))
        assert not out[case.position_RL == NOWHERE].any()
        assert not np.asarray(run(case.q, case.after, idle, case.shared, block=block)).any()


def test_a_query_weighs_its_prefix_and_its_own_page_by_the_softmax():
    # Scores [2, 0, 0, 2] * 4**-0.5 = [1, 0] in the prefix and [0, 1] in the row's page: the values
    # 1, 2, 3, 4 have weights e, 1, 1, e; the last slot, 9, lies behind the query.
    k, v = np.zeros((1, 3, 3, 4)), np.zeros((1, 3, 3, 4))
    k[0, 2, 0, 0] = k[0, 0, 1, 0] = 2
    v[0, 2, :, 0], v[0, 0, :, 0] = [1, 2, 50], [3, 4, 9]
    pages = Pages(*(np.float32(x[:, :, :2]) for x in (k, v)))

    def number(*x):
        return np.asarray(x, np.int32)

    page_table = PageTable(number([0]), number(2), Prefixes(number([2]), number(2), number([0])))
    q = np.float32([[[[1.0, 0, 0, 0]]]])
    out = np.asarray(run(q, pages, number([3]), page_table))
    wanted = (np.e + 2 + 3 + 4 * np.e) / (2 * np.e + 2)
    np.testing.assert_allclose(out[0, 0, 0], [wanted, 0, 0, 0], rtol=1e-6)
    before_the_last = np.asarray(run(q, pages, number([2]), page_table))
    np.testing.assert_allclose(before_the_last[0, 0, 0, 0], (np.e + 2 + 3) / (np.e + 2), rtol=1e-6)


@pytest.mark.parametrize("window", [None, 6])
def test_the_loop_reads_no_block_that_is_masked_for_all_rows(window):
    # Rows at 9..13 of tables of 32 tokens: pages from 16 on, and with the window those before 4.
    rng = np.random.default_rng(4)
    keys, values = rng.normal(size=(2, 1, 3 * WIDTH, PAGE, HEAD)).astype(np.float32)
    table = rng.permutation(3 * WIDTH).reshape(3, WIDTH)
    unseen = table[:, 4:] if window is None else np.delete(table, [1, 2, 3], axis=1)
    values[:, unseen] = np.nan
    position = np.asarray([[9, 10], [12, 13], [NOWHERE, NOWHERE]], np.int32)
    page_table = PageTable(table.astype(np.int32), np.zeros(3, np.int32))
    rows = np.ones((3, 2, 1, HEAD), np.float32), Pages(keys, values), position, page_table
    assert np.isfinite(np.asarray(run(*rows, window=window, block=PAGE))).all()
    assert np.isnan(np.asarray(run(*rows, window=window, block=None))).any()


def test_the_loop_over_prefixes_ends_with_the_longest():
    case = make_case(5)
    own, prefixes = case.shared.table_RP, case.shared.prefixes
    beyond = prefixes.table_QP.copy()
    beyond[:, max(PREFIXES) // PAGE :] = case.spare
    page_table = PageTable(
        np.where(own == case.spare, np.int32(0), own),
        case.shared.start_R,
        prefixes._replace(table_QP=beyond),
    )
    poisoned = np.array(case.after.v)
    poisoned[:, case.spare] = np.nan
    poisoned_case = (case.q, Pages(case.after.k, poisoned), case.position_RL, page_table)
    np.testing.assert_allclose(run(*poisoned_case, block=PAGE), case.wanted, atol=1e-6)
    assert np.isnan(np.asarray(run(*poisoned_case, block=None))).any()


def test_a_pass_is_written_to_its_own_slots_and_nowhere_else():
    case = make_case(6)
    for page_table in (case.whole, case.shared):
        written = write(case.before, case.new, case.position_RL, page_table)
        np.testing.assert_array_equal(written.k, case.after.k)
        np.testing.assert_array_equal(written.v, case.after.v)


def test_tokens_outside_of_their_table_are_written_nowhere():
    # Two pages from position 4 on: 3 lies before, 12 behind, 8 in a page beyond the pool or below.
    pages = new_pages(ARCH, 3, PAGE)[0]
    new = KeyValues(*(np.ones((3, 2, 2, HEAD), np.float32) for _ in "kv"))
    page_table = PageTable(
        np.asarray([[1, 3], [2, 0], [0, -3]], np.int32), np.asarray([4, 4, 4], np.int32)
    )
    position = np.asarray([[3, 8], [12, NOWHERE], [5, 8]], np.int32)
    written = write(pages, new, position, page_table)
    for x in written:
        np.testing.assert_array_equal(np.argwhere(np.asarray(x).any((0, 3))), [[0, 1]])


ARCH = Architecture(
    vocab_size=8, width=16, layers=2, heads=4, kv_heads=2, head_dim=HEAD, mlp_width=8
)


def test_new_pages_are_zeros_a_layer_in_the_compute_dtype():
    made = [x for layer in new_pages(ARCH, 6, PAGE) for x in layer]
    assert [(x.shape, x.dtype) for x in made] == [((2, 6, PAGE, HEAD), jnp.float32)] * 4
    assert not any(np.asarray(x).any() for x in made)


def test_pages_are_copied_as_they_were_before_and_none_beyond_the_pool():
    x = np.arange(5, dtype=np.float32)[None, :, None, None] + np.zeros((2, 5, PAGE, HEAD), "f")

    def number(*x):
        return np.asarray(x, np.int32)

    copied = jax.device_get(copy(Pages(x, -x), number(3, 0, 2, 2), number(0, 3, 5, 9)))
    np.testing.assert_array_equal(copied.k[1, :, 0, 0], [3, 1, 2, 0, 4])
    np.testing.assert_array_equal(copied.v[0, :, 1, 1], [-3, -1, -2, 0, -4])


def test_bfloat16_is_as_near_to_the_exact_result_as_plain_attention():
    rng = np.random.default_rng(7)
    q, k, v = (rng.normal(size=(4, 32, 2, HEAD)).astype(jnp.bfloat16) for _ in "qkv")
    position = np.broadcast_to(np.arange(32, dtype=np.int32)[None], (4, 32))
    page_table = PageTable(np.arange(32, dtype=np.int32).reshape(4, 8), np.zeros(4, np.int32))
    pages = Pages(*(np.zeros((2, 32, PAGE, HEAD), jnp.bfloat16) for _ in "kv"))
    out = run(q, write(pages, KeyValues(k, v), position, page_table), position, page_table, block=8)
    plain = plain_attention(q, KeyValues(k, v), position, position)
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    exact = plain_attention(q, KeyValues(k, v), position, position)
    assert out.dtype == jnp.bfloat16
    out, plain, exact = (np.asarray(x, np.float32) for x in (out, plain, exact))
    assert np.abs(out - exact).max() <= 1.5 * np.abs(plain - exact).max()


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_shards_with_pages_of_their_own_give_what_each_gives_alone(kv_heads):
    # Four row shards, each with its own case by local numbers; two devices share the heads, or do
    # the same where there is one key head only.
    cases = [make_case(10 + i, kv_heads=kv_heads) for i in range(4)]
    alone = [passed(case, case.shared, block=8) for case in cases]
    mesh = make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2))

    def along(axis, parts):
        return np.concatenate([np.asarray(x) for x in parts], axis=axis)

    with jax.set_mesh(mesh):
        axes = paged.page_axes(kv_heads)

        def put(x, *names):
            return jax.device_put(x, sharding(mesh, names))

        rows = [(c.q, c.new, c.position_RL, c.shared) for c in cases]
        q, new, position, page_table = jax.tree.map(lambda *x: put(along(0, x), "rows"), *rows)
        before, after = (
            [along(1, x) for x in zip(*pages, strict=True)]
            for pages in ([c.before for c in cases], [c.after for c in cases])
        )
        pages = write(Pages(*(put(x, *axes) for x in before)), new, position, page_table)
        out = run(q, pages, position, page_table, block=8)
        assert pages.v.sharding.is_equivalent_to(sharding(mesh, axes), 4)
    np.testing.assert_allclose(out, along(0, alone), atol=1e-6)
    for got, wanted in zip(pages, after, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_every_shard_copies_pages_of_its_own():
    # Pools of two pages: shard 1 copies its first to its second, shard 2 the other way.
    x = np.broadcast_to(np.arange(8.0)[None, :, None, None], (2, 8, PAGE, HEAD))
    mesh = make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        by_shard = sharding(mesh, paged.page_axes(2))
        pages = Pages(*(jax.device_put(y, by_shard) for y in (x, -x)))
        source, target = (np.asarray(n, np.int32) for n in ([0, 0, 1, 0], [2, 1, 0, 2]))
        copied = jax.device_get(copy(pages, source, target))
        made = jax.jit(new_pages, static_argnums=(0, 1, 2))(ARCH, 8, PAGE)
    np.testing.assert_array_equal(copied.k[1, :, 0, 0], [0, 1, 2, 2, 5, 5, 6, 7])
    np.testing.assert_array_equal(copied.v[0, :, 1, 1], [0, -1, -2, -2, -5, -5, -6, -7])
    assert made[1].k.sharding.is_equivalent_to(by_shard, 4)


def decode_case(dtype=jnp.bfloat16, *, page=16, width=6, groups=4):
    """Rows of a token each: at a page's end, its begin, from page 1 on, with one key; idle ones."""
    rng = np.random.default_rng(8)
    shape = (2, 8 * width, page, 128)
    q, k, v = (rng.normal(size=n).astype(dtype) for n in ((8, 1, 2 * groups, 128), shape, shape))

    def number(x):
        return np.asarray(x, np.int32)

    table = rng.permutation(8 * width).reshape(8, width)
    table[0], table[-1], table[5, 1:] = -1, -1, 8 * width
    position = [NOWHERE, 4 * page - 1, 4 * page, NOWHERE, NOWHERE, 0, 3 * page + 5, NOWHERE]
    start = np.where(np.arange(8) == 6, page, 0)
    return q, Pages(k, v), number(position)[:, None], PageTable(number(table), number(start))


@pytest.mark.parametrize("groups", [7, 8])
def test_the_tpu_kernel_equals_the_gathered_pages(groups):
    case = decode_case(groups=groups)
    wanted = np.asarray(run(*case), np.float32)
    with pltpu.force_tpu_interpret_mode():
        out = run(*case, kernel="paged")
    assert out.dtype == jnp.bfloat16
    # A unit in the last place of bfloat16 at 1.
    np.testing.assert_allclose(np.asarray(out, np.float32), wanted, atol=2**-7)
    idle = np.asarray(case[2][:, 0]) == NOWHERE
    assert idle.sum() == 4 and not np.asarray(out)[idle].any()


def test_the_tpu_kernel_lowers_from_a_machine_without_one():
    exported = jax.export.export(
        jax.jit(functools.partial(paged.attend, kernel="paged")), platforms=["tpu"]
    )(*decode_case())
    assert exported.mlir_module().count("@tpu_custom_call(") == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", ["xla", "paged"])
@pytest.mark.usefixtures("optimized")
def test_decode_compiles_for_tpu_without_a_copy_of_the_pages(kernel):
    place = jax.sharding.SingleDeviceSharding(tpu_cases.devices("v5e:2x2")[0])
    q, pages, position, page_table = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), decode_case(width=512)
    )
    new = KeyValues(*(jax.ShapeDtypeStruct((8, 1, 2, 128), q.dtype, sharding=place) for _ in "kv"))

    def step(pages, q, new, position, page_table):
        pages = paged.write(pages, new, position, page_table)
        return pages, paged.attend(q, pages, position, page_table, kernel=kernel)

    compiled = jax.jit(step, donate_argnums=0).lower(pages, q, new, position, page_table).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pages.k.size * 2 / 8


@pytest.mark.parametrize(
    "width, page, count", [(256, 16, 32), (100, 16, 25), (7, 64, 7), (8, 1024, 1)]
)
def test_the_tpu_kernel_holds_as_many_pages_as_divide_the_table_up_to_512_tokens(
    width, page, count
):
    assert paged._pages_at_once(width, page) == count


def test_the_decode_kernel_is_the_tpu_one_where_its_shapes_allow():
    shape = {"head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
    assert decode_kernel("tpu", **shape) == ("paged", "as preferred")
    for platform, change, reason in [
        ("cpu", {}, "paged is for tpu: got cpu"),
        ("tpu", {"dtype": "float32"}, "paged needs bfloat16: got float32"),
        ("tpu", {"head_dim": 64}, "paged needs a head_dim divisible by 128: got 64"),
        ("tpu", {"page_size": 12}, "paged needs a page_size divisible by 8: got 12"),
        ("tpu", {"window": 512}, "paged needs a layer without a window: got 512"),
        ("tpu", {"sinks": True}, "paged has no attention sinks"),
    ]:
        assert decode_kernel(platform, **shape | change) == ("xla", reason)


def test_a_pass_that_a_kernel_does_not_take_is_refused():
    q, pages, position, page_table = decode_case()
    with pytest.raises(ValueError, match="got kernel 'flash'; allowed: xla, paged"):
        paged.attend(q, pages, position, page_table, kernel="flash")
    two = (np.concatenate([q, q], 1), pages, np.concatenate([position, position], 1), page_table)
    with pytest.raises(
        ValueError, match="got 2 tokens a row, window None and no prefixes; allowed"
    ):
        paged.attend(*two, kernel="paged")
    with pytest.raises(ValueError, match="got 1 tokens a row, window 3 and no prefixes; allowed"):
        paged.attend(q, pages, position, page_table, window=3, kernel="paged")
    prefixes = Prefixes(page_table.table_RP[:1], page_table.start_R[:1], np.full((1, 2), 8))
    with pytest.raises(ValueError, match="window None and prefixes; allowed: 1 token, no window"):
        paged.attend(q, pages, position, page_table._replace(prefixes=prefixes), kernel="paged")
