"""A real pretrained model, SmolLM2-135M-Instruct, out of its quantised GGUF file."""

import math

import gguf
import jax
import numpy as np
import pytest
import torch
import transformers
from places import MODELS
from rollout_cases import converse

from seeupo_jax.configuration import schema
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy import network as policy
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine

FILE = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = """In 1969, two people walked on the Moon for the first time, while a third one waited for
them in orbit. They stayed for less than a day, and brought 21.5 kg of rocks home with them.

Water boils at 100 degrees Celsius at sea level, and earlier on a high mountain. That is why an
egg needs longer there: the water around it is not as hot, however long it boils.

def area(width, height):
    return width * height
"""
LINEAR = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@pytest.fixture(scope="module")
def loaded():
    # Its 30 layers are compiled as one: `test_transformer.py` says that this changes nothing.
    return from_pretrained(str(FILE), dtype="float32", scan_layers=True)


@pytest.fixture  # of one test: it takes half a gigabyte
def reference():
    """The same file in PyTorch: dequantised by the `gguf` package, put in place by hand."""
    values = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(values)
    state = {}
    for tensor in gguf.GGUFReader(FILE).tensors:
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        head, _, rest = tensor.name.partition(".")
        if head != "blk":
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[head]
            state[f"{name}.weight"] = weight
            continue
        layer, part, _ = rest.split(".")
        if part in ("attn_q", "attn_k"):  # llama.cpp alternates the rows of a head's two halves
            heads = weight.reshape(-1, 64, 576)
            weight = torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).reshape(-1, 576)
        state[f"model.layers.{layer}.{LINEAR[part]}.weight"] = weight
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    rotary = type(model.model.rotary_emb)(values)  # its frequencies are in no file
    model.model.rotary_emb = rotary
    return model.eval()


def perplexity(logp):
    return math.exp(-float(np.mean(logp)))


def test_the_perplexity_of_a_text_is_that_of_pytorch(loaded, reference):
    model, tokenizer = loaded
    ids = np.array([tokenizer.action(TEXT)[:-1]])
    assert ids.shape[1] > 100
    network, params = policy.split_model(model)
    hidden, _ = policy.hidden(network, params, ids[:, :-1])
    actual = policy.token_logp(network, params, hidden, ids[:, 1:], temperature=1.0)
    with torch.no_grad():
        logits = reference(torch.tensor(ids)).logits[:, :-1]
    other = torch.log_softmax(logits.float(), dim=-1).numpy()
    other = np.take_along_axis(other, ids[:, 1:, None], axis=2)[..., 0]
    assert perplexity(actual) == pytest.approx(perplexity(other), abs=1e-3)
    assert 5 < perplexity(other) < 30
    np.testing.assert_allclose(actual, other, atol=1e-3)


def test_it_answers_a_question(loaded):
    model, tokenizer = loaded
    network, params = policy.split_model(model)
    rollout = schema.Rollout(tasks=1, concurrency=1, max_action_tokens=24, max_context=96)
    sampling = Sampling(1.0, 1, None, 24, tokenizer.end_ids)
    engine = SlotEngine(network, sampling, plan_cache(network.arch, rollout))
    question = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    prompt = tokenizer.begin([question], ()).tokens
    (((_, answer, _),),) = converse(engine, params, {0: (0, prompt)}, turns=1).values()
    assert "Paris" in tokenizer.text(answer)
    assert answer[-1] in tokenizer.end_ids


def test_as_a_folder_it_is_the_same_model_and_vocabulary_to_transformers(loaded, tmp_path):
    model, tokenizer = loaded
    save_pretrained(model, tmp_path, tokenizer, dtype="bfloat16")
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    conversation = [{"role": "user", "content": "Hi!\n  \tnaïve 1234 🙂"}]
    options = {"add_generation_prompt": True, "return_dict": False}
    wanted = other.apply_chat_template(conversation, **options)
    assert list(tokenizer.begin(conversation, ()).tokens) == wanted
    again, _ = from_pretrained(str(tmp_path), dtype="float32", scan_layers=True)
    assert again.arch == model.arch
    params, rounded = policy.split_model(again)[1], policy.split_model(model)[1]
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype("bfloat16")), params, rounded
    )
    settings = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert set(settings.eos_token_id) == set(tokenizer.end_ids)
