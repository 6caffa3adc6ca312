"""Files of llama.cpp's own converter give the logits that PyTorch gives of what was converted.

`tests/support/convert_gguf.py` wrote the files from random models of `transformers`.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_models
import transformers
from convert_gguf import CASES, HERE
from gguf_cases import write_llama

from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.files.gguf import GgufFile
from seeupo_jax.policy.files.gguf_families import ARCHITECTURES, Settings
from seeupo_jax.policy.files.gguf_header import read_header

IDS = torch_models.tokens(32, 2)


@pytest.mark.sampled("gemma2", "mixtral", "glm4", "phi3_longrope")
@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_converted_file_are_those_of_pytorch(case, tmp_path):
    model, tokenizer = from_pretrained(HERE / f"{case}.gguf", dtype="float32")
    wanted = np.load(HERE / f"{case}.npy")
    assert tokenizer is None
    np.testing.assert_allclose(model(jnp.asarray(IDS)), wanted, atol=1e-4 * wanted.std())
    save_pretrained(model, tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    family = CASES[case][0]
    assert again.config.model_type == ("llama" if family == "mistral" else family)
    logits = torch_models.torch_logits(again, IDS)
    np.testing.assert_allclose(logits, wanted, atol=1e-5 * wanted.std())


def test_every_architecture_has_a_converted_file():
    by_packages_names = {"llama", "qwen2", "qwen3"}  # of `test_gguf.py`
    converted = {read_header(HERE / f"{case}.gguf")[0]["general.architecture"] for case in CASES}
    assert converted | by_packages_names == set(ARCHITECTURES)


@pytest.mark.parametrize(
    "architecture, layers, width, heads, scalar",
    [  # as Gemma's config.json have it: 2B and 9B, 27B; 1B, 27B
        ("gemma2", 26, 2304, 8, 256),
        ("gemma2", 46, 4608, 32, 144),
        ("gemma3", 26, 1152, 4, 256),
        ("gemma3", 62, 5376, 32, 168),
    ],
)
def test_gemmas_scores_are_scaled_as_those_of_the_published_size(
    architecture, layers, width, heads, scalar
):
    values = {
        "block_count": layers,
        "embedding_length": width,
        "attention.head_count": heads,
        "attention.key_length": 128 if layers in (46, 62) else 256,
        "attention.sliding_window": 512,
    }
    config = ARCHITECTURES[architecture].read(Settings(HERE, architecture, values))
    assert config["query_pre_attn_scalar"] == scalar
    wanted = 2 if architecture == "gemma2" else 6
    assert config["layer_types"].index("full_attention") == wanted - 1


LAYERS = {"block_count": 2, "attention.sliding_window": 6}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}


@pytest.mark.parametrize(
    "architecture, values, reason",
    [
        ("gpt-oss", LAYERS | EXPERTS | {"attention.sliding_window_pattern": 0}, "pattern is 0;"),
        (
            "gemma2",
            LAYERS | {"attention.sliding_window_pattern": [1]},
            r"pattern is \[1\]; allowed",
        ),
        ("dots1", {"expert_gating_func": 1}, "expert_gating_func is 1; allowed: 2, a sigmoid"),
        ("dots1", {"expert_weights_norm": 1}, "expert_weights_norm is 1; allowed: true or false"),
        ("qwen3moe", EXPERTS, "qwen3moe.expert_feed_forward_length is None; allowed: a whole"),
        ("mistral3", {}, "mistral3.rope.scaling.yarn_log_multiplier is None; allowed: a number"),
        ("granite", {"rope.scaling.finetuned": False}, "finetuned is False; allowed: True"),
        ("granite", {"attention.scale": 0.1}, "granite.embedding_scale is None; allowed: a number"),
        (
            "granite",
            {"attention.scale": 0.0, "logit_scale": 0.0},
            "attention.scale is 0.0; allowed: a number > 0",
        ),
    ],
)
def test_a_setting_that_is_not_computed_is_refused(architecture, values, reason):
    sizes = {"embedding_length": 8, "attention.head_count": 2}
    with pytest.raises(ValueError, match=f"m.gguf: .*{reason}"):
        ARCHITECTURES[architecture].read(Settings("m.gguf", architecture, sizes | values))


def test_experts_that_are_not_as_many_as_stated_are_refused(tmp_path):
    fields, _ = read_header(HERE / "mixtral.gguf")
    text = (HERE / "mixtral.gguf").read_bytes()
    key, count = b"llama.expert_count", fields["llama.expert_count"]
    place = text.index(key) + len(key) + 4
    assert text[place] == count
    path = tmp_path / "m.gguf"
    path.write_bytes(text[:place] + bytes([count - 1]) + text[place + 1 :])
    with pytest.raises(ValueError, match="ffn_.*_exps.weight is of 3 experts; allowed: 2"):
        GgufFile(path)


def test_factors_of_a_rope_that_another_family_has_are_refused(tmp_path):
    tensors = {"rope_factors_long.weight": np.ones(16, np.float32)}
    with pytest.raises(
        ValueError, match="rope_factors_long.weight in a llama model; allowed: rope"
    ):
        GgufFile(write_llama(tmp_path, tensors=tensors))
