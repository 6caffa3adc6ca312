"""Whatever a model's files say, it is an architecture or one sentence, before anything is built."""

import json
import re
import struct

import numpy as np
import pytest
from gguf_cases import write_llama
from published_cases import LLAMA_3_1_8B, QWEN2_5_14B, QWEN3_14B, QWEN3_30B_A3B
from refusals import refusal

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.gguf import GgufFile
from seeupo_jax.policy.files.gguf_header import read_header
from seeupo_jax.policy.files.messages import resolve_chat
from seeupo_jax.policy.files.model_config import read_architecture
from seeupo_jax.policy.files.weights import from_pretrained, load_architecture
from seeupo_jax.policy.lora import read_lora
from seeupo_jax.policy.rope import frequencies

DEEP = "[" * 100_000 + "]" * 100_000
HOSTILE = ([], {}, [[]], "x", "", True, -1, 0, 10**8, 10**400, 1.5, -1e308, float("nan"), 1e999)
FAMILIES = {"llama": LLAMA_3_1_8B, "qwen2": QWEN2_5_14B, "moe": QWEN3_30B_A3B}
MORE = (
    "model_type", "head_dim", "rope_scaling", "rope_theta", "layer_types", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "num_local_experts", "use_sliding_window", "sliding_window",
)  # fmt: skip
ROPE = ("rope_type", "factor", "original_max_position_embeddings", "low_freq_factor", "rope_theta")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_with_any_value_is_read_or_refused_in_arefusal(name):
    values = FAMILIES[name]
    for key in {*values, *MORE}:
        for value in HOSTILE:
            try:
                arch = read_architecture(values | {key: value}, "F.json")
            except ValueError as error:
                assert "\n" not in str(error) and len(str(error)) < 1000, (key, value)
            else:
                assert isinstance(arch, Architecture) and arch.layers < 10**4
                hash(arch)  # what its programs are kept by
                for size in (arch.vocab_size, arch.width, arch.heads, arch.kv_heads, arch.head_dim):
                    assert type(size) is int and 0 < size < 10**8, (key, value)


def test_an_adapter_config_with_any_value_is_read_or_refused_in_arefusal(tmp_path):
    file = tmp_path / "adapter_config.json"
    values = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    for key in (*values, "bias", "use_dora", "rank_pattern", "init_lora_weights", "lora_dropout"):
        for value in (*HOSTILE, [{}], [["q_proj"]], ["q_proj", 1], {"q_proj": 1}, None, 10**30):
            file.write_text(json.dumps(values | {key: value}))
            try:
                lora = read_lora(tmp_path)
            except ValueError as error:
                text = str(error)
                assert text.startswith(f"{file}: {key} ") and "\n" not in text, (key, value)
                assert len(text) < 1000
            else:
                assert type(lora.rank) is int and 0 < lora.rank <= 2**18, (key, value)
                assert type(lora.alpha) is float and 0 < lora.alpha < 1e9, (key, value)
                assert lora.targets == ("q_proj",), (key, value)


def test_rope_settings_of_any_value_are_read_or_refused_in_arefusal():
    llama = LLAMA_3_1_8B["rope_scaling"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
    settings = [(llama, key) for key in ROPE] + [(yarn, key) for key in (*yarn, "rope_theta")]
    for scaling, key in settings:
        for value in (*HOSTILE, 1.0, 0.5):
            changed = {"rope_scaling": scaling | {key: value}}
            try:
                rope = read_architecture(LLAMA_3_1_8B | changed, "F.json").rope
            except ValueError as error:
                assert str(error).startswith("F.json: ") and "\n" not in str(error), (key, value)
            else:
                assert 0 < rope.factor < 1e9 and 0 < rope.theta < 1e38, (key, value)
                assert np.isfinite(frequencies(rope, 128)[0]).all(), (key, value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": []}, "model_type is []; allowed: llama, qwen2"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000; allowed: a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; allowed: a whole number from 1 to"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; allowed: a whole number"),
        ({"vocab_size": 10**400}, "vocab_size is 1000"),
        ({"hidden_size": 2.5}, "hidden_size is 2.5; allowed: a whole number from 1 to"),
        ({"head_dim": 127}, "head_dim is 127; allowed: an even number"),
        ({"num_key_value_heads": 7}, "num_key_value_heads is 7; allowed: a divisor of"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; allowed: a number > 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; allowed: true or false"),
    ],
)
def test_sizes_are_bounded_and_typed_before_anything_is_built(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_14B | changes))
    text = refusal(lambda: load_architecture(str(tmp_path)))
    assert f"{tmp_path / 'config.json'}: {message}" in text


@pytest.mark.parametrize(
    "name, most",
    [("layers", 1024), ("width", 2**18), ("vocab_size", 2**24), ("heads", 4096)],
)
def test_a_model_made_from_nothing_is_bounded_too(name, most):
    # Llama 3.1 405B, arXiv:2407.21783 Table 3: 126 layers, width 16,384, 128 heads; Gemma 3 has
    # 262,144 tokens: what is published is far below.
    text = refusal(lambda: from_dict({"model": {name: 10**8}}))
    assert text == f"config.model.{name}: got 100000000; allowed: a number from 1 to {most}."


@pytest.mark.parametrize(
    "name, got", [("dtype", "bf16"), ("remat", "auto"), ("attention", "flash")]
)
def test_from_python_compute_options_are_a_configuration_s_that_has_decided(tmp_path, name, got):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_14B))
    reported = refusal(lambda: from_pretrained(tmp_path, **{name: got}))
    of_the_configuration = refusal(lambda: from_dict({"model": {name: "?"}}))
    allowed = reported.removeprefix(f"{name}: got '{got}'; allowed: ").removesuffix(".").split(", ")
    assert {*allowed} == {*of_the_configuration.split("one of ")[1][:-1].split(", ")} - {"auto"}
    for value in allowed:
        assert getattr(load_architecture(tmp_path, **{name: value}), name) == value


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, f'{{"chat": {DEEP}}}'], ids=range(3))
def test_files_nested_without_end_are_arefusal(tmp_path, text):
    for name in ("config.json", "chat.json", "adapter_config.json"):
        (tmp_path / name).write_text(text)
    assert str(tmp_path / "config.json") in refusal(lambda: load_architecture(str(tmp_path)))
    assert str(tmp_path) in refusal(lambda: resolve_chat(tmp_path, None))
    assert str(tmp_path) in refusal(lambda: read_lora(tmp_path))


def _gguf(path, value):
    """A header with one field, whose value is given as its bytes."""
    key = b"general.note"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    path.write_bytes(head + struct.pack("<Q", len(key)) + key + value)
    return path


def test_a_gguf_array_nested_without_end_is_arefusal(tmp_path):
    array, level = struct.pack("<I", 9), struct.pack("<IQ", 9, 1)
    end = struct.pack("<IQ", 4, 1) + bytes(4)
    path = _gguf(tmp_path / "deep.gguf", array + level * 100_000 + end)
    text = refusal(lambda: read_header(path))
    assert text.startswith(f"{path} is damaged: ") and "at most 8 levels" in text
    path = _gguf(tmp_path / "flat.gguf", array + level * 7 + struct.pack("<IQI", 4, 1, 5))
    assert read_header(path)[0] == {"general.note": [[[[[[[[5]]]]]]]]}


@pytest.mark.parametrize("value", [[1], "x", True, 10**8, 2**32 - 1], ids=repr)
def test_a_gguf_setting_of_any_value_is_arefusal(tmp_path, value):
    for key in ("block_count", "embedding_length", "attention.head_count", "vocab_size"):
        file = write_llama(tmp_path, changes={key: value})
        text = refusal(lambda file=file: load_architecture(str(file)))
        assert re.search(r"llama\.gguf", text)


@pytest.mark.parametrize(
    "key", ["general.architecture", "split.count", "llama.rope.scaling.type", "general.alignment"]
)
def test_a_gguf_field_of_another_type_is_arefusal(tmp_path, key):
    file = write_llama(tmp_path, fields={key: [1]})
    assert "llama.gguf" in refusal(lambda: GgufFile(file))
