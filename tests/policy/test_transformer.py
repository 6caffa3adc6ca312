"""The transformer against its NumPy twin, and every way of computing the same numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import pytest
from flax import nnx
from twin_policy import network_of, numpy_weights, random_network, tensors_of, twin_arch

from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture, LoraAdapters, Moe
from seeupo_jax.policy.kernels.attention import NOWHERE, Past, Tree
from seeupo_jax.policy.kernels.paged import PageTable, new_pages
from seeupo_jax.policy.rope import Rope
from seeupo_jax.policy.transformer import REMAT, Transformer

TEMPERATURE = 0.7
ROWS, LENGTH = 3, 11
PAGE, WIDTH, POOL = 4, 4, 14  # tokens of a page, pages of a row, pages in all: two are nobody's

QWEN3 = Architecture(
    vocab_size=23,
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=6,
    mlp_width=20,
    rope=Rope(100.0),
    norm_eps=1e-3,
)
VARIANTS = {
    "qk_norm, grouped heads, tied": QWEN3,
    "qkv_bias, one key head, untied": dataclasses.replace(
        QWEN3, qk_norm=False, qkv_bias=True, kv_heads=1, tied=False
    ),
    "plain, as many key heads, tied": dataclasses.replace(QWEN3, qk_norm=False, kv_heads=4),
}
# What a pass over a cache must get right beyond what the twin has.
WAYS = {
    "full": QWEN3,
    "window": dataclasses.replace(QWEN3, windows=(3, None)),
    "yarn": dataclasses.replace(QWEN3, rope=Rope(100.0, "yarn", 4.0, 8)),
    "experts": dataclasses.replace(QWEN3, moe=Moe(4, 2, 10, True, dense_layers=(1,))),
    "bounded scores": dataclasses.replace(
        QWEN3,
        norm_offset=1.0,
        output_norms=True,
        activation="gelu_tanh",
        query_scale=0.9,
        attention_cap=1.5,
        logit_cap=3.0,
        embedding_scale=4.0,
        windows=(3, None),
        ropes=(Rope(100.0), Rope(500.0, "linear", 2.0)),
    ),
    "sinks": dataclasses.replace(
        QWEN3,
        input_norms=False,
        output_norms=True,
        joint_qk_norm=True,
        sinks=True,
        residual_scale=0.7,
        logit_scale=0.5,
        windows=(None, 3),
        ropes=(
            None,
            Rope(100.0, partial=0.7, interleaved=True, query_growth=0.3, original_positions=3),
        ),
    ),
    "adapters": dataclasses.replace(QWEN3, lora=LoraAdapters(2, 4.0, ("q_proj", "down_proj"))),
}
LAYOUTS = [(False, "dots"), (False, "attention"), (True, "none"), (True, "full")]


@functools.cache
def make(arch):
    """A network and its parameters; they are the NumPy twin's, so no part of them is trivial."""
    return network_of(numpy_weights(arch), arch)


def tokens_and_pulls(arch):
    """Tokens [N, L] and a random weight for every token's log-probability."""
    rng = np.random.default_rng(1)
    tokens_NL = rng.integers(0, arch.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    return tokens_NL, rng.normal(size=(ROWS, LENGTH - 1)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(network, params, tokens_NL, pull_NL):
    """Logits [N, L, V], log-probabilities [N, L-1], and the gradient of their weighted sum."""

    def loss(params):
        hidden_NLD, _ = policy.hidden(network, params, tokens_NL)
        logp_NL = policy.token_logp(
            network, params, hidden_NLD[:, :-1], tokens_NL[:, 1:], temperature=TEMPERATURE
        )
        return jnp.sum(logp_NL * pull_NL), logp_NL

    grads, logp_NL = jax.grad(loss, has_aux=True)(params)
    return network.bind(params)(tokens_NL), logp_NL, grads


@functools.partial(jax.jit, static_argnums=0)
def full_pass(network, params, tokens_NL, **rows):
    """Hidden states and keys and values of whole rows."""
    return policy.hidden(network, params, tokens_NL, **rows)


def each_alone(network, params, sequences):
    """`full_pass` of sequences, a row each; what pads a row stands to their right."""
    rows = np.zeros((ROWS, LENGTH), np.int32)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return jax.device_get(full_pass(network, params, rows))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_logp_and_gradients_equal_the_numpy_twin(variant):
    arch = VARIANTS[variant]
    tokens_NL, pull_NL = tokens_and_pulls(arch)
    logits, logp, grads = evaluate(*make(arch), tokens_NL, pull_NL)
    assert logits.dtype == jnp.float32
    twin = numpy_weights(arch)
    wanted_grads = {}
    for row in range(ROWS):
        wanted, _ = numpy_model.forward(twin, tokens_NL[row], twin_arch(arch))
        np.testing.assert_allclose(logits[row], wanted, atol=2e-5, rtol=0)
        wanted, back = numpy_model.token_logps(twin, tokens_NL[row], twin_arch(arch), TEMPERATURE)
        np.testing.assert_allclose(logp[row], wanted[1:], atol=2e-5, rtol=0)
        back(np.concatenate([[0.0], pull_NL[row]]), wanted_grads)
    got = tensors_of(grads, arch)
    assert got.keys() == wanted_grads.keys()
    for name, wanted in wanted_grads.items():
        np.testing.assert_allclose(got[name], wanted, atol=1e-4, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("scan_layers, remat", LAYOUTS)
def test_scanning_and_rematerialising_change_no_value_and_no_gradient(scan_layers, remat):
    tokens_NL, pull_NL = tokens_and_pulls(QWEN3)
    arch = dataclasses.replace(QWEN3, scan_layers=scan_layers, remat=remat)
    wanted = evaluate(*make(QWEN3), tokens_NL, pull_NL)
    got = evaluate(*make(arch), tokens_NL, pull_NL)
    for a, b in zip(got[:2], wanted[:2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)
    tensors = [tensors_of(grads, a) for grads, a in ((got[2], arch), (wanted[2], QWEN3))]
    for name in tensors[1]:
        np.testing.assert_allclose(tensors[0][name], tensors[1][name], atol=2e-5, rtol=1e-5)


@functools.partial(jax.jit, static_argnums=0)
def replay(network, params, tokens_NL, given_NLG):
    """Hidden states of a pass with given experts, and the gradient of a sum of them."""

    def loss(params):
        hidden_NLD = policy.compute(network, params, tokens_NL, given_NLG=given_NLG).hidden_NLD
        direction_X = jnp.cos(jnp.arange(hidden_NLD.size, dtype=jnp.float32))
        return direction_X @ hidden_NLD.reshape(-1), hidden_NLD

    grads, hidden_NLD = jax.grad(loss, has_aux=True)(params)
    return hidden_NLD, grads


def test_a_scan_gives_each_layer_its_own_experts():
    arch = dataclasses.replace(QWEN3, moe=Moe(4, 2, 10, True))
    network, params = random_network(arch)
    scanned, _ = random_network(dataclasses.replace(arch, scan_layers=True))

    def stacked(tree):
        return tree | {"layers": jax.tree.map(lambda *x: np.stack(x), *tree["layers"].values())}

    tokens_NL, _ = tokens_and_pulls(arch)
    # Two of four in the first layer, and the other two in the second.
    every_NLE = np.broadcast_to(np.arange(4, dtype=np.uint8), (*tokens_NL.shape, 4))
    given_NLG = np.random.default_rng(2).permuted(every_NLE, axis=2)
    hidden_NLD, grads = replay(network, params, tokens_NL, given_NLG)
    got_NLD, got = replay(scanned, stacked(params), tokens_NL, given_NLG)
    np.testing.assert_allclose(got_NLD, hidden_NLD, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, stacked(grads))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_full_remat_computes_products_again_and_dots_keeps_them(scan_layers):
    tokens_NL, pull_NL = tokens_and_pulls(QWEN3)
    products = {}
    for remat in REMAT:
        arch = dataclasses.replace(QWEN3, scan_layers=scan_layers, remat=remat)
        program = jax.make_jaxpr(evaluate, static_argnums=0)(*make(arch), tokens_NL, pull_NL)
        products[remat] = str(program).count("dot_general")
    assert products["none"] == products["dots"] < products["attention"] == products["full"]


def test_what_stands_to_the_right_never_reaches_a_row():
    tokens_NL, pull_NL = tokens_and_pulls(QWEN3)
    network, params = make(QWEN3)
    pull_NL[:, 5:] = 0.0  # the real part is 6 tokens: 5 predictions
    other_NL = tokens_NL.copy()
    other_NL[:, 6:] = (other_NL[:, 6:] + 1) % QWEN3.vocab_size
    one, two = (evaluate(network, params, t, pull_NL) for t in (tokens_NL, other_NL))
    assert not np.array_equal(one[0][:, 6:], two[0][:, 6:])
    np.testing.assert_array_equal(one[0][:, :6], two[0][:, :6])
    np.testing.assert_array_equal(one[1][:, :5], two[1][:, :5])
    jax.tree.map(np.testing.assert_array_equal, one[2], two[2])


def test_rows_do_not_see_each_other():
    tokens_NL, pull_NL = tokens_and_pulls(QWEN3)
    network, params = make(QWEN3)
    logits, logp, _ = evaluate(network, params, tokens_NL, pull_NL)
    swapped = evaluate(network, params, tokens_NL[::-1], pull_NL)
    np.testing.assert_allclose(swapped[0][::-1], logits, atol=1e-6)
    np.testing.assert_allclose(swapped[1][::-1], logp, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way, scan_layers", [*((way, False) for way in WAYS), ("full", True)])
def test_what_follows_a_past_is_as_in_the_full_pass(way, scan_layers):
    arch = dataclasses.replace(WAYS[way], scan_layers=scan_layers)
    network, params = random_network(arch)
    tokens_NL, _ = tokens_and_pulls(arch)
    whole, whole_keys = full_pass(network, params, tokens_NL)
    # The past holds each row's own later keys too, which must not be seen.
    length_N = np.array([7, 4, 1], np.int32)
    new_NL = np.stack([tokens_NL[row, n : n + 4] for row, n in enumerate(length_N)])

    def end_NL(length):
        return np.full((3, length), length)

    depth_NL = np.broadcast_to(np.arange(tokens_NL.shape[1])[None, :], tokens_NL.shape)
    old = Tree(depth_NL, end_NL(tokens_NL.shape[1]))
    new = Tree(length_N[:, None] + np.arange(4), end_NL(4))
    past = Past(whole_keys, old, np.repeat(length_N[:, None] - 1, 4, axis=1))
    hidden, keys = full_pass(network, params, new_NL, tree=new, past=past)
    whole, whole_keys, hidden, keys = jax.device_get((whole, whole_keys, hidden, keys))
    for row, n in enumerate(length_N):
        np.testing.assert_allclose(hidden[row], whole[row, n : n + 4], atol=1e-5)
        for new, old in zip(keys, whole_keys, strict=True):
            np.testing.assert_allclose(new.k[row], old.k[row, n : n + 4], atol=1e-5)
            np.testing.assert_allclose(new.v[row], old.v[row, n : n + 4], atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way, scan_layers", [*((way, False) for way in WAYS), ("full", True)])
def test_a_token_of_a_tree_is_computed_as_if_its_path_stood_alone(way, scan_layers):
    arch = dataclasses.replace(WAYS[way], scan_layers=scan_layers)
    network, params = random_network(arch)
    # 1 2 3 with 4 5 6 and 7 8 below it; 9 10; and padding, each token of it alone.
    tokens_NL = np.array([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0]], np.int32)
    depth_NL = np.array([[0, 1, 2, 3, 4, 5, 3, 4, 0, 1, 7]])
    end_NL = np.array([[8, 8, 8, 6, 6, 6, 8, 8, 10, 10, 11]])
    hidden, keys = full_pass(network, params, tokens_NL, tree=Tree(depth_NL, end_NL))
    paths = [0, 1, 2, 3, 4, 5], [0, 1, 2, 6, 7], [8, 9]
    hidden, keys = jax.device_get((hidden, keys))
    alone, own = each_alone(network, params, [tokens_NL[0, path] for path in paths])
    for row, path in enumerate(paths):
        np.testing.assert_allclose(hidden[0, path], alone[row, : len(path)], atol=1e-5)
        for packed, single in zip(keys, own, strict=True):
            for x, y in zip(packed, single, strict=True):
                np.testing.assert_allclose(x[0, path], y[row, : len(path)], atol=1e-5)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("kernel", "block"))
def extend(network, params, tokens_RL, position_RL, pages, page_table, **options):
    found = network.bind(params).extend(tokens_RL, position_RL, pages, page_table, **options)
    return found[:2]


def table_of_rows():
    """The pages of each row, in no order."""
    return np.random.default_rng(3).permutation(POOL)[: ROWS * WIDTH].reshape(ROWS, WIDTH)


def new_cache(arch):
    """An empty cache, and what each row reaches of it."""
    page_table = PageTable(np.asarray(table_of_rows(), np.int32), np.zeros(ROWS, np.int32))
    return new_pages(arch, POOL, PAGE), page_table


def in_rows(x_KPSd):
    """Cached keys or values by row and position: [R, WIDTH * PAGE, kv_heads, head_dim]."""
    own = np.asarray(x_KPSd)[:, table_of_rows()].transpose(1, 2, 3, 0, 4)
    return own.reshape(ROWS, WIDTH * PAGE, *own.shape[3:])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "way, chunk, block",
    [
        *((way, 4, None) for way in WAYS),
        ("full", 1, None),
        ("full", 3, PAGE),
        ("full", 16, None),
        ("window", 1, PAGE),
    ],
)
def test_a_cache_filled_in_chunks_gives_the_full_pass(way, chunk, block):
    network, params = random_network(WAYS[way])
    tokens_NL, _ = tokens_and_pulls(QWEN3)
    wanted, wanted_keys = full_pass(network, params, tokens_NL)
    pages, page_table = new_cache(WAYS[way])
    hidden = []
    for start in range(0, LENGTH, chunk):
        real = min(chunk, LENGTH - start)
        tokens = np.full((ROWS, chunk), 22, np.int32)
        tokens[:, :real] = tokens_NL[:, start : start + real]
        position = np.where(np.arange(chunk) < real, start + np.arange(chunk), NOWHERE)
        position = np.broadcast_to(position, (ROWS, chunk)).astype(np.int32)
        out, pages = extend(network, params, tokens, position, pages, page_table, block=block)
        hidden.append(np.asarray(out)[:, :real])
    pages = jax.device_get(pages)
    np.testing.assert_allclose(np.concatenate(hidden, axis=1), wanted, atol=1e-5)
    nobodys = np.setdiff1d(np.arange(POOL), table_of_rows())
    for kept, keys in zip(pages, wanted_keys, strict=True):
        for cached, computed in zip(kept, keys, strict=True):
            np.testing.assert_allclose(in_rows(cached)[:, :LENGTH], computed, atol=1e-5)
            assert not in_rows(cached)[:, LENGTH:].any() and not cached[:, nobodys].any()


def test_rows_extend_from_their_own_positions_and_see_nothing_stale():
    network, params = make(QWEN3)
    tokens_NL, _ = tokens_and_pulls(QWEN3)
    wanted, _ = full_pass(network, params, tokens_NL)
    position_NL = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
    # An earlier conversation fills every page; the new one overwrites only what it reaches.
    pages, page_table = new_cache(QWEN3)
    _, pages = extend(network, params, tokens_NL[::-1], position_NL, pages, page_table)
    length_N = np.array([6, 3, 0], np.int32)
    position_NL = np.where(position_NL < length_N[:, None], position_NL, NOWHERE)
    _, pages = extend(network, params, tokens_NL, position_NL, pages, page_table)
    new_NL = np.stack([tokens_NL[row, n : n + 1] for row, n in enumerate(length_N)])
    hidden, _ = extend(network, params, new_NL, length_N[:, None], pages, page_table)
    for row, n in enumerate(length_N):
        np.testing.assert_allclose(hidden[row, 0], wanted[row, n], atol=1e-5)


def test_rows_that_share_pages_go_on_each_by_itself():
    network, params = random_network(QWEN3)
    tokens_NL, _ = tokens_and_pulls(QWEN3)
    tokens_NL[:, :PAGE] = tokens_NL[0, :PAGE]
    wanted, _ = full_pass(network, params, tokens_NL)
    pages, page_table = new_cache(QWEN3)
    position_L = np.arange(LENGTH, dtype=np.int32)[None, :]
    first = np.full((ROWS, PAGE), NOWHERE, np.int32)
    first[0] = np.arange(PAGE)  # one row reads what all begin with
    _, pages = extend(network, params, tokens_NL[:, :PAGE], first, pages, page_table)
    page_table.table_RP[:, 0] = page_table.table_RP[0, 0]
    rest = np.broadcast_to(position_L[:, PAGE:], (ROWS, LENGTH - PAGE))
    hidden, _ = extend(network, params, tokens_NL[:, PAGE:], rest, pages, page_table)
    np.testing.assert_allclose(hidden, wanted[:, PAGE:], atol=1e-5)


def test_how_a_cache_is_read_is_the_callers_choice():
    network, params = make(QWEN3)
    tokens_NL, _ = tokens_and_pulls(QWEN3)
    position_NL = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
    pages, page_table = new_cache(QWEN3)
    read = functools.partial(extend, network, params, tokens_NL, position_NL, pages, page_table)
    loops = [str(jax.make_jaxpr(functools.partial(read, block=b))()) for b in (PAGE, None)]
    assert ["while" in program for program in loops] == [True, False]
    with pytest.raises(ValueError, match="kernel 'paged' got 11 tokens a row"):
        read(kernel="paged")


@pytest.mark.parametrize("way", ["window", "experts"])
def test_a_row_of_several_sequences_gives_what_each_gives_alone(way):
    network, params = random_network(WAYS[way])
    tokens_NL, _ = tokens_and_pulls(WAYS[way])
    segment_NL = np.array([[0] * 4 + [1] * 7, [3] * 11, [0] * 1 + [1] * 5 + [2] * 5], np.int32)
    packed, _ = jax.device_get(full_pass(network, params, tokens_NL, segment_NL=segment_NL))
    parts = [(row, segment_NL[row] == n) for row in range(ROWS) for n in set(segment_NL[row])]
    assert len(parts) == 2 * ROWS
    for some in (parts[:ROWS], parts[ROWS:]):
        alone, _ = each_alone(network, params, [tokens_NL[row, own] for row, own in some])
        for single, (row, own) in zip(alone, some, strict=True):
            np.testing.assert_allclose(packed[row, own], single[: own.sum()], atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("packed", [False, True])
def test_a_fused_kernel_changes_no_value_and_no_gradient(packed):
    results = []
    tokens_NL = np.random.default_rng(4).integers(0, 23, (2, 128)).astype(np.int32)
    segment_NL = np.repeat([[0, 1]], 2, axis=0).repeat(64, axis=1) if packed else None
    for kernel in ("xla", "splash"):
        arch = dataclasses.replace(
            QWEN3, head_dim=8, windows=(40, None), attention=kernel, remat="full"
        )
        network, params = random_network(arch)

        def loss(params, network=network):
            hidden, _ = network.bind(params).hidden(tokens_NL, segment_NL=segment_NL)
            return jnp.sum(jnp.sin(hidden)), hidden

        grads, hidden = jax.jit(jax.grad(loss, has_aux=True))(params)
        results.append((hidden, tensors_of(grads, arch)))
    (plain, plain_grads), (fused, fused_grads) = results
    np.testing.assert_allclose(fused, plain, atol=2e-5)
    assert not np.array_equal(fused, plain)  # another kernel did run
    for name, wanted in plain_grads.items():
        gap = np.abs(fused_grads[name] - wanted).max()
        assert gap <= 1e-4 * np.abs(wanted).max(), name


def test_bfloat16_is_of_the_activations_only():
    arch = dataclasses.replace(QWEN3, dtype="bfloat16")
    network, params = make(arch)
    tokens_NL, pull_NL = tokens_and_pulls(arch)
    logits, logp, grads = evaluate(network, params, tokens_NL, pull_NL)
    assert logits.dtype == logp.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    # Float32 logits of bfloat16 factors do not all fit into bfloat16.
    assert not np.array_equal(logits, logits.astype(jnp.bfloat16).astype(jnp.float32))
    hidden, keys = jax.eval_shape(functools.partial(full_pass, network), params, tokens_NL)
    assert hidden.dtype == keys[0].k.dtype == jnp.bfloat16
    position_NL = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
    extended, pages = extend(network, params, tokens_NL, position_NL, *new_cache(arch))
    assert extended.dtype == pages[0].k.dtype == pages[1].v.dtype == jnp.bfloat16
    wanted = evaluate(*make(QWEN3), tokens_NL, pull_NL)
    assert np.abs(logp - wanted[1]).mean() < 0.05


def test_every_parameter_is_float32_and_names_one_logical_axis_a_dimension():
    for scan_layers in (False, True):
        arch = dataclasses.replace(QWEN3, qkv_bias=True, tied=False, scan_layers=scan_layers)
        network, params = make(arch)
        names = network.logical_axes()

        def is_names(node):
            return isinstance(node, tuple)

        flat = jax.tree.leaves(names, is_leaf=is_names)
        assert [len(n) for n in flat] == [p.ndim for p in jax.tree.leaves(params)]
        assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        stacked = jax.tree.leaves(names["layers"], is_leaf=is_names)
        assert all((n[0] == "layers") == scan_layers for n in stacked)


def test_random_initialisation_gives_useful_logits_and_another_seed_another_model():
    tokens_NL, pull_NL = tokens_and_pulls(QWEN3)
    logits = []
    for seed in (0, 0, 1):
        network, params = policy.split_model(Transformer(QWEN3, nnx.Rngs(seed)))
        logits.append(evaluate(network, params, tokens_NL, pull_NL)[0])
    assert 0.5 < np.std(logits[0]) < 2.0  # unit-size states read by vectors of unit length
    np.testing.assert_array_equal(logits[0], logits[1])
    assert np.abs(logits[0] - logits[2]).max() > 0.1
