"""The programs of the sampler work in place: a cache is never copied, however large."""

import jax
import numpy as np
import pytest
from flax import nnx

from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.kernels.paged import PageTable, Prefixes
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.engine import sampler
from seeupo_jax.rollout.engine.sampling import Sampling, Streams

ARCH = Architecture(
    vocab_size=64, width=32, layers=3, heads=4, kv_heads=2, head_dim=16, mlp_width=48
)
ROWS, PAGES, PAGE_SIZE, WIDTH = 8, 16_384, 16, 64
CACHE = ARCH.layers * 2 * ARCH.kv_heads * PAGES * PAGE_SIZE * ARCH.head_dim * 4  # bytes


def memory_of(program, *arguments, **options):
    lowered = program.lower(*arguments, **options)
    return lowered.compile().memory_analysis()


def shapes_of(rows, length):
    network, params = policy.split_model(nnx.eval_shape(lambda: Transformer(ARCH, nnx.Rngs(0))))
    pages, slots = jax.eval_shape(lambda: sampler.allocate(ARCH, PAGES, PAGE_SIZE, ROWS, 0))

    def ints(*shape):
        return np.zeros(shape, np.int32)

    prefixes = Prefixes(ints(2, WIDTH), ints(2), ints(2, 4))
    page_table = PageTable(ints(rows, WIDTH), ints(rows), prefixes)
    return network, params, pages, slots, page_table, ints(rows, length)


def assert_in_place(memory):
    assert memory.alias_size_in_bytes >= CACHE
    one_array = CACHE / (2 * ARCH.layers)
    assert memory.temp_size_in_bytes < 0.6 * one_array


@pytest.mark.exhaustive
@pytest.mark.usefixtures("optimized")
def test_decoding_holds_no_second_cache():
    network, params, pages, slots, page_table, _ = shapes_of(ROWS, 1)
    ints_R = np.zeros(ROWS, np.int32)
    rows = sampler.SlotRows(ints_R, ints_R > 0, ints_R, ints_R, ints_R)
    numbers = np.zeros(ROWS, np.uint32)
    streams = Streams(np.uint32(0), *[numbers] * 4)
    sampling = Sampling(1.0, None, None, 8, (3,))
    memory = memory_of(
        sampler.decode,
        network,
        sampling,
        params,
        pages,
        slots,
        rows,
        page_table,
        streams,
        steps=8,
        kernel="xla",
        block=256,
    )
    assert_in_place(memory)


@pytest.mark.usefixtures("optimized")
def test_prefill_holds_no_second_cache():
    network, params, pages, _, page_table, tokens_RL = shapes_of(ROWS, 128)
    memory = memory_of(
        sampler.prefill,
        network,
        params,
        pages,
        tokens_RL,
        tokens_RL,
        page_table._replace(prefixes=None),
        block=256,
    )
    assert_in_place(memory)


@pytest.mark.usefixtures("optimized")
def test_copies_hold_no_second_cache():
    *_, pages, _, _, _ = shapes_of(ROWS, 1)
    some = np.zeros(ROWS, np.int32)
    assert_in_place(memory_of(sampler.copy_pages, pages, some, some))


def test_layers_of_one_kind_are_lowered_once():
    network, params, pages, _, page_table, tokens_RL = shapes_of(ROWS, 128)
    page_table = page_table._replace(prefixes=None)
    lowered = sampler.prefill.lower(
        network, params, pages, tokens_RL, tokens_RL, page_table, block=256
    )
    text = lowered.as_text()
    # And once the last, of which a prefill wants the keys and values only.
    assert text.count("func.func private @run_layer") == 2
    assert text.count("call @run_layer") == ARCH.layers == 3
