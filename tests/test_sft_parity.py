"""Against PyTorch: `transformers` trained on the same conversations, its own tokens and masks."""

import json

import jax
import numpy as np
import pytest
import sft_cases as cases
import torch
import transformers
from chat_cases import small_library
from places import TINY
from transformers import AutoModelForCausalLM

from seeupo_jax import load_config, sft
from seeupo_jax.metrics.metrics_log import read_metrics

FAMILIES = {"llama": {}, "qwen3": {"head_dim": 16, "tie_word_embeddings": True}}
SIZES = {
    "vocab_size": 280,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# The library finds assistants' tokens between marks that the template has for it.
TEMPLATE = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' -%}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{%- else -%}{{ m.content }}<|im_end|>{%- endif %}
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
STEPS, RATE, DECAY, NORM = 3, 0.01, 0.1, 0.5
SYSTEM = {"role": "system", "content": "the order of the user is in the list"}


def conversations():
    """Several begin alike; of one to three answers."""
    texts = ("is it in the list", "the order", "of the user", "in")
    made = []
    for i in range(6):
        messages = [SYSTEM] if i % 3 else []
        for turn in range(1 + i % 3):
            messages.append({"role": "user", "content": texts[(i // 2 + turn) % 4]})
            messages.append({"role": "assistant", "content": texts[(i + turn) % 4] * (1 + i % 2)})
        made.append({"messages": messages})
    return made


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **SIZES, **FAMILIES[request.param])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    library = small_library()
    library.chat_template = TEMPLATE
    library.save_pretrained(folder)
    return folder


def torch_training(folder):
    """Losses and weights of `STEPS` steps on all conversations, padded, in `transformers`."""
    library = transformers.AutoTokenizer.from_pretrained(folder)
    encoded = [
        library.apply_chat_template(
            each["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        for each in conversations()
    ]
    longest = max(len(each["input_ids"]) for each in encoded)
    shape = len(encoded), longest
    tokens, labels, there = (np.full(shape, fill) for fill in (0, -100, 0))
    for row, each in enumerate(encoded):
        size, acted = len(each["input_ids"]), np.array(each["assistant_masks"], bool)
        tokens[row, :size], there[row, :size] = each["input_ids"], 1
        labels[row, :size][acted] = np.array(each["input_ids"])[acted]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    losses, norms = [], []
    for _ in range(STEPS):
        found = model(
            input_ids=torch.tensor(tokens),
            attention_mask=torch.tensor(there),
            labels=torch.tensor(labels),
        )
        optimizer.zero_grad()
        found.loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)))
        optimizer.step()
        losses.append(float(found.loss.detach()))
    return losses, norms, (labels != -100).sum(), model.state_dict()


@pytest.mark.parametrize("rows", [128, 512])
def test_losses_and_weights_are_those_of_transformers(folder, rows, tmp_path, monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    choices = (
        *("warm_start.stages=()", "telemetry.trackers=()", "chat.system=True", "chat.tools=auto"),
        *(f"model.path={folder}", "model.dtype=float32", "model.remat=none"),
        *(f"batching.buckets=({rows},)", "sft.held_out=0.0", f"sft.epochs={STEPS}"),
        *("sft.batch_size=6", "optimizer.name=adamw", f"optimizer.learning_rate={RATE}"),
        *(f"optimizer.kwargs={{'weight_decay': {DECAY}}}", f"optimizer.max_grad_norm={NORM}"),
    )
    data = cases.write(tmp_path / "data.jsonl", conversations())
    result = sft(load_config(TINY, choices), data, tmp_path / "run")
    losses, norms, trained, weights = torch_training(folder)
    lines = [line for line in read_metrics(result.workdir) if "sft/loss" in line]
    assert [line["sft/trained_tokens"] for line in lines] == [trained] * STEPS
    np.testing.assert_allclose([line["sft/loss"] for line in lines], losses, atol=1e-4)
    np.testing.assert_allclose([line["sft/grad_norm"] for line in lines], norms, rtol=1e-4)
    assert rows < 512 or lines[0]["sft/shared_fraction"] > 0.2  # smaller rows share less
    actual = AutoModelForCausalLM.from_pretrained(result.policy, dtype=torch.float32).state_dict()
    assert actual.keys() == weights.keys()
    for name, wanted in weights.items():
        np.testing.assert_allclose(actual[name], wanted, atol=1e-4, err_msg=name)
    written = json.loads((result.policy / "config.json").read_text())
    assert written["model_type"] == transformers.AutoConfig.from_pretrained(folder).model_type
