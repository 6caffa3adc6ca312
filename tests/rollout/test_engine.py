"""The sampler: its tokens belong to a trajectory, its log-probabilities to the network."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_cases
from flax import nnx

from seeupo_jax import config
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.rope import Rope
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.engine import (
    Engine,
    Sampling,
    Streams,
    chunk_bucket,
    draw,
    filter_logits,
    stream_keys,
    task_number,
)

SIZES = {"vocab_size": 29, "width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8}
ARCH = Architecture(**SIZES, mlp_width=24, rope=Rope(theta=100.0))
END_IDS = (3, 7, 11)
TEMPERATURE = 0.6
ROLLOUT = config.Rollout(max_action_tokens=6, max_context=40, temperature=TEMPERATURE)


@functools.cache
def make():
    """A network and parameters that make its distributions far from uniform."""
    network, params = policy.split(Transformer(ARCH, nnx.Rngs(0)))
    return network, rollout_cases.stir(params)


def make_engine(rows=4, rollout=ROLLOUT):
    engine = Engine(make()[0], rollout, END_IDS, rows=rows)
    engine.start()
    return engine


def streams_of(who, *, turn=0, seed=1, iteration=2):
    """Streams of rows that are (task, member) pairs."""
    task, member = np.array(who, np.uint32).T
    return Streams(np.uint32(seed), np.uint32(iteration), task, member, np.int32(turn))


def context_of(who, turn=0, length=None):
    rng = np.random.default_rng((*who, turn))
    return rng.integers(0, 29, length if length else rng.integers(2, 9)).tolist()


def play(engine, who, turns=3, **numbers):
    """Conversations of rows that are (task, member) pairs: per row its contexts and actions."""
    engine.start()
    rows = [[] for _ in who]
    idle = engine.rows - len(who)
    for turn in range(turns):
        contexts = [context_of(w, turn) for w in who]
        streams = streams_of([*who, *[(0, 0)] * idle], turn=turn, **numbers)
        sampled = engine.turn(make()[1], contexts + [[]] * idle, streams)
        for row, context in enumerate(contexts):
            count = sampled.count_N[row]
            action = sampled.tokens_NA[row, :count].tolist()
            rows[row].append((context, action, sampled.logp_NA[row, :count]))
    return rows


def assert_same_conversation(got, wanted):
    for (context, action, logp), (wanted_context, wanted_action, wanted_logp) in zip(
        got, wanted, strict=True
    ):
        assert (context, action) == (wanted_context, wanted_action)
        np.testing.assert_allclose(logp, wanted_logp, atol=1e-5)


@jax.jit
def log_softmax(tokens_NL):
    network, params = make()
    return jax.nn.log_softmax(network.bind(params)(tokens_NL) / TEMPERATURE, axis=-1)


WHO = [(5, 0), (5, 1), (6, 0), (7, 3)]


@functools.cache
def played():
    return play(make_engine(), WHO)


def test_the_recorded_logp_is_the_networks_at_the_temperature():
    tokens_NL = np.zeros((4, 40), np.int32)
    for row, turns in enumerate(played()):
        tokens = [token for context, action, _ in turns for token in (*context, *action)]
        tokens_NL[row, : len(tokens)] = tokens
    logp_NLV = np.asarray(log_softmax(tokens_NL))
    for row, turns in enumerate(played()):
        position = 0
        for context, action, logp in turns:
            position += len(context)
            for token, recorded in zip(action, logp, strict=True):
                assert recorded == pytest.approx(logp_NLV[row, position - 1, token], abs=1e-5)
                position += 1


def test_a_turn_continues_the_conversation_as_if_it_had_been_read_from_scratch():
    engine = make_engine()
    contexts, wanted = [], []
    for first, second, _ in played():
        contexts.append(first[0] + first[1] + second[0])
        wanted.append(second)
    sampled = engine.turn(make()[1], contexts, streams_of(WHO, turn=1))
    for row, (_, action, logp) in enumerate(wanted):
        assert sampled.tokens_NA[row, : sampled.count_N[row]].tolist() == action
        np.testing.assert_allclose(sampled.logp_NA[row, : len(action)], logp, atol=1e-5)


def test_a_trajectory_does_not_depend_on_its_row_or_its_batch():
    engine = make_engine()
    reversed_rows = play(engine, WHO[::-1])
    alone = play(engine, WHO[2:3])
    narrow = play(make_engine(rows=2), WHO[1:3])
    for row in range(4):
        assert_same_conversation(reversed_rows[3 - row], played()[row])
    assert_same_conversation(alone[0], played()[2])
    for row in range(2):
        assert_same_conversation(narrow[row], played()[1 + row])


def test_a_trajectory_does_not_depend_on_the_length_that_its_chunk_is_padded_to():
    engine = make_engine()
    contexts = [context_of(w) for w in WHO[:3]] + [context_of((7, 3), length=34)]
    sampled = engine.turn(make()[1], contexts, streams_of(WHO))
    assert chunk_bucket(34) > chunk_bucket(max(map(len, contexts[:3])))
    for row in range(3):
        _, action, logp = played()[row][0]
        assert sampled.tokens_NA[row, : sampled.count_N[row]].tolist() == action
        np.testing.assert_allclose(sampled.logp_NA[row, : len(action)], logp, atol=1e-5)


def test_an_engine_starts_again_from_nothing():
    engine = make_engine()
    play(engine, [(8, 0), (9, 0), (8, 1), (9, 1)])
    for got, wanted in zip(play(engine, WHO), played(), strict=True):
        assert_same_conversation(got, wanted)


@pytest.mark.parametrize("beyond", ["nothing", "a context", "most of an action", "an action's end"])
def test_a_row_goes_on_from_any_of_its_tokens_as_if_the_rest_had_never_been(beyond):
    engine, fresh = make_engine(), make_engine()
    first, second = ([context_of(w, turn) for w in WHO] for turn in range(2))
    (context, action, _), *_ = played()[1]
    whole = [*context, *action]
    keep = {
        "nothing": len(whole),
        "a context": 0,
        "most of an action": len(context) + 1,
        "an action's end": len(whole) - 1,
    }[beyond]
    engine.turn(make()[1], first, streams_of(WHO))
    engine.rewind(1, keep)
    got = engine.turn(make()[1], second, streams_of(WHO, turn=1))
    from_scratch = [c + a + new for ((c, a, _), *_), new in zip(played(), second, strict=True)]
    from_scratch[1] = whole[:keep] + second[1]
    wanted = fresh.turn(make()[1], from_scratch, streams_of(WHO, turn=1))
    np.testing.assert_array_equal(got.count_N, wanted.count_N)
    np.testing.assert_array_equal(got.tokens_NA, wanted.tokens_NA)
    np.testing.assert_allclose(got.logp_NA, wanted.logp_NA, atol=1e-5)
    room = ROLLOUT.max_context - ROLLOUT.max_action_tokens - len(from_scratch[1])
    room -= wanted.count_N[1]
    assert engine.fits(1, [0] * room) and not engine.fits(1, [0] * (room + 1))


def test_an_action_ends_with_its_first_end_token_or_at_the_limit():
    engine, ended, cut = make_engine(), 0, 0
    for iteration in range(12):
        engine.start()
        streams = streams_of(WHO, iteration=iteration)
        sampled = engine.turn(make()[1], [context_of(w) for w in WHO], streams)
        for row, count in enumerate(sampled.count_N):
            action = sampled.tokens_NA[row, :count]
            assert not np.isin(action[:-1], END_IDS).any()
            ended += np.isin(action[-1], END_IDS)
            cut += not np.isin(action[-1], END_IDS)
            assert count == 6 or np.isin(action[-1], END_IDS)
            assert not sampled.tokens_NA[row, count:].any()
            assert not sampled.logp_NA[row, count:].any()
            assert (sampled.logp_NA[row, :count] < 0).all()
    assert ended > 5 and cut > 5


def test_a_row_without_context_takes_no_part_and_goes_on_later():
    engine = make_engine()
    first, second = [context_of(w) for w in WHO], [context_of(w, 1) for w in WHO]
    engine.turn(make()[1], first, streams_of(WHO))
    waited = engine.turn(make()[1], [[], second[1], [], []], streams_of(WHO, turn=1))
    assert waited.count_N.tolist() == [0, len(played()[1][1][1]), 0, 0]
    sampled = engine.turn(make()[1], [second[0], [], second[2], second[3]], streams_of(WHO, turn=1))
    for row in (0, 2, 3):
        _, action, logp = played()[row][1]
        assert sampled.tokens_NA[row, : sampled.count_N[row]].tolist() == action
        np.testing.assert_allclose(sampled.logp_NA[row, : len(action)], logp, atol=1e-5)


def test_every_step_of_an_action_has_random_numbers_of_its_own():
    zero = jax.tree.map(jnp.zeros_like, make()[1])  # every token is equally likely
    contexts = [context_of(w) for w in WHO]
    sampled = make_engine().turn(zero, contexts, streams_of(WHO))
    tokens = [sampled.tokens_NA[row, :count] for row, count in enumerate(sampled.count_N)]
    assert max(len(set(action.tolist())) for action in tokens) >= 3
    np.testing.assert_allclose(sampled.logp_NA[0, 0], -np.log(29), rtol=1e-6)


def test_top_k_of_one_is_greedy_and_certain():
    engine = make_engine(rows=2, rollout=config.Rollout(**{**vars(ROLLOUT), "top_k": 1}))
    (turns, _) = play(engine, WHO[:2], turns=1)
    context, action, logp = turns[0]
    np.testing.assert_array_equal(logp, 0.0)
    tokens_NL = np.zeros((4, 40), np.int32)
    tokens_NL[0, : len(context) + len(action)] = context + action
    best_L = np.asarray(log_softmax(tokens_NL))[0].argmax(-1)
    assert best_L[len(context) - 1 :][: len(action)].tolist() == action


def test_a_conversation_fits_while_a_full_action_has_room_after_it():
    engine = make_engine()
    assert engine.fits(0, [0] * 34) and not engine.fits(0, [0] * 35)  # 34 + 6 = 40
    contexts = [[1] * 5, [2] * 3, [], []]
    sampled = engine.turn(make()[1], contexts, streams_of(WHO))
    for row, used in enumerate((5 + sampled.count_N[0], 3 + sampled.count_N[1], 0, 0)):
        assert engine.fits(row, [0] * (34 - used))
        assert not engine.fits(row, [0] * (35 - used))


def test_the_last_slot_of_the_cache_is_used_without_loss():
    # 34 tokens of context and 6 of action fill the row; nothing is dropped on the way.
    contexts = [context_of(w, length=34) for w in WHO]
    sampled = make_engine().turn(make()[1], contexts, streams_of(WHO))
    tokens_NL = np.concatenate([contexts, sampled.tokens_NA], axis=1).astype(np.int32)
    logp_NLV = np.asarray(log_softmax(tokens_NL))
    assert 6 in sampled.count_N
    for row, count in enumerate(sampled.count_N):
        for step in range(count):
            wanted = logp_NLV[row, 33 + step, tokens_NL[row, 34 + step]]
            assert sampled.logp_NA[row, step] == pytest.approx(wanted, abs=1e-5)


def test_keys_tell_seed_iteration_task_member_and_turn_apart():
    numbers = [
        {"who": [(2, 1)]},
        {"who": [(1, 2)]},
        {"who": [(2, 2)]},
        {"who": [(1, 1)]},
        {"who": [(2, 1)], "turn": 1},
        {"who": [(2, 1)], "turn": 2},
        {"who": [(2, 1)], "iteration": 1},
        {"who": [(2, 1)], "iteration": 3},
        {"who": [(2, 1)], "seed": 2},
        {"who": [(2, 1)], "seed": 2, "iteration": 1},
    ]
    keys = [jax.random.key_data(stream_keys(streams_of(**n))).tobytes() for n in numbers]
    assert len(set(keys)) == len(numbers)
    both = jax.random.key_data(stream_keys(streams_of([(1, 2), (2, 1)])))
    assert [both[1].tobytes(), both[0].tobytes()] == keys[:2]


def test_a_tasks_number_is_the_crc_of_its_name():
    assert task_number("123456789") == 0xCBF43926  # the check value of CRC-32
    assert task_number("train/1") != task_number("train/2")


@pytest.mark.parametrize(
    "length, wanted",
    [(1, 16), (16, 16), (17, 24), (24, 24), (25, 32), (33, 48), (49, 64), (65, 96), (1000, 1024)],
)
def test_chunks_have_few_lengths(length, wanted):
    assert chunk_bucket(length) == wanted


P_V = [0.4, 0.3, 0.15, 0.1, 0.05]


@pytest.mark.parametrize(
    "top_k, top_p, kept",
    [
        (None, None, 5),
        (3, None, 3),
        (1, None, 1),
        (5, None, 5),
        (9, None, 5),
        (None, 1.0, 5),
        (None, 0.99, 5),
        (None, 0.75, 3),  # 0.4 + 0.3 does not reach it; the token that does is in
        (None, 0.65, 2),
        (None, 0.39, 1),
        (None, 0.0, 1),  # the likeliest is always kept
        (2, 0.5, 1),  # of two, the first has 4/7 of the mass
        (2, 0.6, 2),
        (4, 0.99, 4),
    ],
)
def test_the_filter_keeps_the_k_likeliest_and_the_nucleus(top_k, top_p, kept):
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        logits_V = np.log(np.array(P_V, np.float32))[order] + 3.0
        (got_V,) = filter_logits(jnp.asarray(logits_V[None]), top_k=top_k, top_p=top_p)
        wanted_V = np.where(np.array(order) < kept, logits_V, -np.inf)
        np.testing.assert_array_equal(got_V, wanted_V)


def test_a_draw_follows_the_renormalised_distribution_at_the_temperature():
    draws = 4000
    logits_NV = jnp.broadcast_to(jnp.log(jnp.asarray(P_V))[None], (draws, 5))
    keys = jax.random.split(jax.random.key(0), draws)
    sampling = Sampling(0.5, top_k=4, top_p=0.9, max_tokens=1, end_ids=(0,))
    token_N, logp_N = jax.jit(draw, static_argnums=2)(logits_NV, keys, sampling)
    # At temperature 1/2: P^2 over four, [16, 9, 2.25, 1] / 28.25 of mass; three reach 0.9.
    wanted = np.array([16, 9, 2.25]) / 27.25
    assert set(np.asarray(token_N)) == {0, 1, 2}
    np.testing.assert_allclose(np.exp(logp_N), wanted[np.asarray(token_N)], rtol=1e-5)
    frequency = np.bincount(token_N, minlength=3) / draws
    np.testing.assert_allclose(frequency, wanted, atol=0.03)  # 4 standard deviations
