"""`generate` over many turns: its tokens are those of our network, and its work is counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seeupo_jax.benchmarks import torch_runner
from seeupo_jax.benchmarks.workloads import Workload, WorkloadConversation
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.network import split_model
from seeupo_jax.policy.transformer import Transformer

torch_generate = torch_runner.load("generate")
VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "width": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "mlp_width": 48,
}
FAMILIES = {"qwen3": {"qk_norm": True}, "llama": {"qk_norm": False}}
MODES = pytest.mark.parametrize("kept", [False, True], ids=["resend", "kept"])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Makes, once a family, a random model and the same in PyTorch."""
    made = {}

    def make(family):
        if family not in made:
            arch = Architecture(**SIZES, **FAMILIES[family])
            network, params = split_model(Transformer(arch, nnx.Rngs(1)))
            actual = network.bind(jax.tree.map(lambda p: 1.7 * p, params))  # attention that matters
            folder = tmp_path_factory.mktemp(family)
            save_pretrained(actual, folder)
            made[family] = actual, torch_generate.load(str(folder), "cpu", "float32")
        return made[family]

    return make


def tokens(count, seed):
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, count).tolist())


def even(groups, lengths, group_size):
    """Conversations of the same lengths: of a prompt, of actions, of observations."""
    prompt, actions, observations = lengths
    conversations = (
        WorkloadConversation(
            tokens(prompt, seed // group_size),
            actions,
            tuple(tokens(n, (seed, turn)) for turn, n in enumerate(observations)),
        )
        for seed in range(groups * group_size)
    )
    return Workload("even", tuple(conversations), group_size, VOCAB)


def ragged():
    """Prompts, actions, observations and numbers of turns that all differ."""
    lengths = ((3, 1, 4), (1, 5, 2), (2,), (4, 4, 1, 3), (2, 6), (5, 1, 1))
    received = ((2, 5), (4, 1), (), (3, 1, 6), (1,), (2, 7))
    prompts = [tokens(5, 0)] * 3 + [tokens(11, 1)] * 3
    conversations = (
        WorkloadConversation(prompt, length, tuple(tokens(n, 100 + n) for n in counts))
        for prompt, length, counts in zip(prompts, lengths, received, strict=True)
    )
    return Workload("ragged", tuple(conversations), group_size=3, vocab_size=VOCAB)


def texts(workload, result):
    """Whole conversations with their actions, and where the actions stand."""
    for conversation, actions in zip(workload.conversations, result.actions, strict=True):
        text, at = list(conversation.prompt), []
        for turn, action in enumerate(actions):
            assert len(action) == conversation.lengths[turn]
            at += range(len(text), len(text) + len(action))
            text += [*action, *(*conversation.observations, ())[turn]]
        yield text, at


def our_logits(actual, workload, result):
    """Our network's logits before every action token, and the tokens: [A, V] and [A]."""
    rows = list(texts(workload, result))
    padded = np.zeros((len(rows), max(len(text) for text, _ in rows)), np.int32)
    for row, (text, _) in enumerate(rows):
        padded[row, : len(text)] = text
    logits = np.asarray(actual(jnp.asarray(padded)))
    before = [logits[row, np.array(at) - 1] for row, (_, at) in enumerate(rows)]
    return np.concatenate(before), np.concatenate([np.array(text)[at] for text, at in rows])


def logp_of(result):
    return np.array([value for row in result.logp for turn in row for value in turn])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [6, 4, 1])
def test_greedy_tokens_of_both_modes_are_those_of_our_network(models, family, batch):
    actual, model = models(family)
    workload, options = ragged(), {"temperature": 0.0, "seed": 0, "batch": batch}
    resend = torch_generate.run(model, workload.conversations, kept=False, **options)
    kept = torch_generate.run(model, workload.conversations, kept=True, **options)
    assert kept.actions == resend.actions
    for result in (resend, kept):
        logits, sampled = our_logits(actual, workload, result)
        np.testing.assert_array_equal(logits.argmax(1), sampled)
        logp = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(sampled)), sampled]
        np.testing.assert_allclose(logp_of(result), logp, atol=2e-5)


def test_a_static_cache_holds_what_a_growing_one_does(models):
    _, model = models("qwen3")
    workload, options = ragged(), {"temperature": 0.0, "seed": 0, "batch": 4, "kept": True}
    kept, static = (
        torch_generate.run(model, workload.conversations, static=static, **options)
        for static in (False, True)
    )
    assert static.actions == kept.actions
    assert static.computed > kept.computed  # ended rows run on as padding
    # Each with its last token, which nothing needs.
    assert 0 <= static.computed_tokens - kept.computed_tokens <= 6


@MODES
def test_log_probabilities_are_of_the_whole_distribution_at_the_temperature(models, kept):
    actual, model = models("qwen3")
    workload = ragged()
    result = torch_generate.run(
        model, workload.conversations, kept=kept, temperature=1.5, seed=0, batch=6
    )
    logits, sampled = our_logits(actual, workload, result)
    logp = np.asarray(jax.nn.log_softmax(logits / 1.5))[np.arange(len(sampled)), sampled]
    np.testing.assert_allclose(logp_of(result), logp, atol=2e-5)


@MODES
def test_unlikely_tokens_are_sampled_too(models, kept):
    """Nothing is cut off: at a high temperature half of the tokens rank below the middle."""
    actual, model = models("qwen3")
    workload = even(2, (74, (1,) * 8, (2,) * 7), group_size=8)
    result = torch_generate.run(
        model, workload.conversations, kept=kept, temperature=1e6, seed=0, batch=16
    )
    logits, sampled = our_logits(actual, workload, result)
    rank = (logits > logits[np.arange(len(sampled)), sampled][:, None]).sum(1)
    assert 0.3 < np.mean(rank > VOCAB / 2) < 0.7


def test_the_seed_decides_what_is_sampled(models):
    _, model = models("qwen3")
    options = {"kept": True, "temperature": 1.0, "batch": 6}
    first, again, other = (
        torch_generate.run(model, ragged().conversations, seed=seed, **options).actions
        for seed in (3, 3, 4)
    )
    assert first == again != other


def test_kept_computes_every_token_once_and_resend_all_of_them_each_turn(models):
    _, model = models("qwen3")
    (prompt, action, observation), turns = (185, 3, 6), 4
    lengths = (prompt, (action,) * turns, (observation,) * (turns - 1))
    workload = even(1, lengths, group_size=3)
    assert workload.conversations[0].tokens == prompt + 4 * action + 3 * observation
    options = {"temperature": 0.0, "seed": 0, "batch": 2}
    kept = torch_generate.run(model, workload.conversations, kept=True, **options)
    once = prompt + turns * action + (turns - 1) * observation - 1
    assert kept.computed == kept.computed_tokens == 3 * once
    assert kept.computed == workload.least_computed + 2 * prompt  # members share no prompt
    resend = torch_generate.run(model, workload.conversations, kept=False, **options)
    contexts = [prompt + turn * (action + observation) for turn in range(turns)]
    assert resend.computed == resend.computed_tokens == 3 * (sum(contexts) + turns * (action - 1))
    assert kept.sampled == resend.sampled == workload.sampled
    assert not model._forward_pre_hooks  # what counted is gone


def test_padding_and_tokens_beyond_an_action_are_counted_apart(models):
    _, model = models("qwen3")
    conversations = (
        WorkloadConversation((1, 2, 3, 4, 5), (2, 2), ((8, 9, 10),)),
        WorkloadConversation((6, 7), (4, 1), ((11,),)),
    )
    workload = Workload("two", conversations, group_size=1, vocab_size=VOCAB)
    options = {"temperature": 0.0, "seed": 0, "batch": 2}
    resend = torch_generate.run(model, workload.conversations, kept=False, **options)
    # Turn 1: 2 rows of 5, then 3 decode steps. Turn 2: 2 rows of 5 + 2 + 3, then 1 step.
    assert resend.computed == 2 * (5 + 3) + 2 * (10 + 1)
    assert resend.computed_tokens == (5 + 2) + (2 + 3) + (10 + 1) + (7 + 1)
    kept = torch_generate.run(model, workload.conversations, kept=True, **options)
    # Turn 2: the fourth token, which has not been fed yet, and 3 of observation.
    assert kept.computed == 2 * (5 + 3) + 2 * (1 + 3 + 1)
    assert kept.computed_tokens == (5 + 2) + (2 + 3) + (3 + 1) + (1 + 1 + 1)


def test_a_folder_cannot_end_or_narrow_the_sampling(tmp_path):
    arch = Architecture(**SIZES, qk_norm=True)
    save_pretrained(Transformer(arch, nnx.Rngs(0)), tmp_path)
    (tmp_path / "generation_config.json").write_text(
        f'{{"eos_token_id": {list(range(VOCAB))}, "top_k": 1, "repetition_penalty": 9.0}}'
    )
    model = torch_generate.load(str(tmp_path), "cpu", "float32")
    result = torch_generate.run(
        model, ragged().conversations, kept=True, temperature=1.0, seed=0, batch=6
    )
    assert [tuple(map(len, row)) for row in result.actions] == [
        c.lengths for c in ragged().conversations
    ]
    assert max(logp_of(result)) < -1  # of one token left to choose from, it would be 0


def test_a_token_that_the_model_lacks_is_refused(models):
    _, model = models("qwen3")
    workload = Workload("one", (WorkloadConversation((1, VOCAB), (2,), ()),), 1, VOCAB + 1)
    with pytest.raises(ValueError, match=f"got token {VOCAB}; allowed: below the model's {VOCAB}"):
        torch_generate.run(
            model, workload.conversations, kept=False, temperature=1.0, seed=0, batch=1
        )
    with pytest.raises(ValueError, match="batch: got 0; allowed: a number >= 1"):
        torch_generate.run(
            model, ragged().conversations, kept=False, temperature=1.0, seed=0, batch=0
        )
    with pytest.raises(ValueError, match="static: got True without kept"):
        torch_generate.run(
            model, ragged().conversations, kept=False, static=True, temperature=1, seed=0, batch=1
        )
