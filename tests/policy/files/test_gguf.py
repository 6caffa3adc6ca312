"""GGUF files: llama.cpp's layout comes out as Hugging Face's, and what is wrong is named."""

import math
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from gguf_cases import (
    DROPPED,
    EMBEDDING,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    MLP,
    SETTINGS,
    VOCAB,
    WIDTH,
    llama_cpp_tensors,
    random_weights,
    write,
    write_llama,
)
from places import MODELS

from seeupo_jax.policy.files.gguf import GgufFile
from seeupo_jax.policy.files.model_config import read_architecture

SMOLLM2 = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_come_back_by_the_names_and_in_the_order_of_transformers(tmp_path, family, kind):
    weights = random_weights(family)
    file = GgufFile(
        write(tmp_path / "m.gguf", family, llama_cpp_tensors(family, weights), kind=kind)
    )
    assert file.shapes == {name: weight.shape for name, weight in weights.items()}
    for name, weight in weights.items():
        wanted = dequantize(quantize(weight, kind), kind) if weight.ndim == 2 else weight
        read = file.read(name, (slice(None),) * weight.ndim)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, wanted, err_msg=name)


def test_biases_of_a_llama_are_in_the_order_of_transformers_too(tmp_path):
    weights = random_weights("llama", attention_bias=True)
    file = GgufFile(write(tmp_path / "m.gguf", "llama", llama_cpp_tensors("llama", weights)))
    assert file.config["attention_bias"]
    for name, weight in weights.items():
        np.testing.assert_array_equal(file.read(name), weight, err_msg=name)
    bias = "model.layers.0.self_attn.k_proj.bias"
    np.testing.assert_array_equal(file.read(bias, (slice(5, 50),)), weights[bias][5:50])


@pytest.mark.parametrize("name", [EMBEDDING, Q_PROJ, "model.layers.0.mlp.down_proj.weight"])
@pytest.mark.parametrize(
    "index",
    [
        (slice(3, 9),),
        (slice(5, 39), slice(None)),
        (slice(None), slice(32, 64)),
        (slice(1, 40, 3), slice(7, 50, 2)),
        (slice(4, 4), slice(None)),
    ],
)
def test_a_part_equals_the_same_part_of_the_whole(tmp_path, monkeypatch, name, index):
    monkeypatch.setattr(
        "seeupo_jax.policy.files.gguf._BLOCK", 7 * WIDTH
    )  # several blocks, one partial
    file = GgufFile(write_llama(tmp_path, kind=Kind.Q8_0))
    np.testing.assert_array_equal(file.read(name, index), file.read(name)[index])


def test_reading_a_part_holds_little_more_than_that_part(tmp_path):
    table = np.random.default_rng(0).normal(size=(16_384, WIDTH)).astype(np.float32)
    changes = {"vocab_size": len(table)}
    tensors = {"token_embd.weight": table, "output.weight": DROPPED}
    file = GgufFile(write_llama(tmp_path, tensors=tensors, changes=changes, kind=Kind.Q4_1))
    for rows in (slice(None), slice(0, 8192)):
        tracemalloc.start()
        size = file.read(EMBEDDING, (rows, slice(None))).nbytes
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1.3 * size + 2**18, (rows, peak / size)  # 256 KiB of slack for the small


def test_the_config_is_that_of_transformers(tmp_path):
    wanted = {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    tensors = llama_cpp_tensors("qwen3", random_weights("qwen3", tied=True))
    fields = {"tokenizer.ggml.tokens": ["a", "ü"], "tokenizer.ggml.token_type": [1, 3]}
    fields |= {"tokenizer.ggml.scores": [0.5, -1.0], "tokenizer.ggml.add_bos_token": False}
    file = GgufFile(write(tmp_path / "m.gguf", "qwen3", tensors, fields=fields))
    assert file.config == wanted
    assert "lm_head.weight" not in file.shapes
    assert fields.items() <= file.fields.items()


def test_what_a_file_may_leave_out_has_the_default_of_llama_cpp(tmp_path):
    optional = ("vocab_size", "attention.head_count_kv", "attention.value_length")
    optional += ("rope.dimension_count", "rope.freq_base")
    weights = random_weights("qwen2")
    weights |= {k: w[:64] for k, w in weights.items() if "q_proj" in k}
    weights |= {k: w[:, :64] for k, w in weights.items() if "o_proj" in k}
    changes = dict.fromkeys((*optional, "attention.key_length"), DROPPED)
    tensors = llama_cpp_tensors("qwen2", weights)
    config = GgufFile(write(tmp_path / "m.gguf", "qwen2", tensors, changes=changes)).config
    assert config["vocab_size"] == VOCAB
    assert config["num_key_value_heads"] == HEADS
    assert config["head_dim"] == WIDTH // HEADS
    assert config["rope_theta"] == 10_000.0


@pytest.mark.parametrize(
    "changes, wanted",
    [
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128, "finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        (
            {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        ),
    ],
)
def test_rope_scaling_is_that_of_transformers(tmp_path, changes, wanted):
    changes = {f"rope.scaling.{key}": value for key, value in changes.items()}
    config = GgufFile(write_llama(tmp_path, changes=changes)).config
    assert config["rope_scaling"] == wanted
    kind = "none" if wanted is None else wanted["rope_type"]
    assert read_architecture(config, "file").rope.scaling == kind


def llama3_divisors(factor, high=4.0):
    """What Llama 3's scaling divides each frequency by, from wavelengths, as Meta wrote it."""
    divisors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * 500_000.0 ** (i / HEAD_DIM)
        if wavelength < 8192 / high:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (high - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_recovered_from_its_divisors(tmp_path, factor):
    divisors = llama3_divisors(factor)
    assert np.any((divisors > 1) & (divisors < factor))
    config = GgufFile(write_llama(tmp_path, tensors={"rope_freqs.weight": divisors})).config
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert read_architecture(config, "file").rope.scaling == "llama3"


@pytest.mark.parametrize("divisors", [llama3_divisors(8.0, high=5.0), np.ones(4, np.float32)])
def test_divisors_that_are_not_llama_3s_are_refused(tmp_path, divisors):
    path = write_llama(tmp_path, tensors={"rope_freqs.weight": divisors})
    with pytest.raises(
        ValueError, match="llama.gguf: rope_freqs.weight is .*allowed: the divisors"
    ):
        GgufFile(path)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"block_count": DROPPED}, "llama.block_count is None; allowed: a whole number >= 1"),
        ({"attention.head_count": [4, 2]}, r"head_count is \[4, 2\]; allowed: a whole number"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "epsilon is 0.0; allowed: a number > 0"),
        ({"rope.dimension_count": 16}, "dimension_count is 16; allowed: 32, the size of a head"),
        ({"rope.scaling.type": "longrope"}, "'longrope'; allowed: none, linear, yarn"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, "unknown setting .*yarn_ext_factor; allowed: con"),
        ({"attention.sliding_window": 128}, "unknown setting llama.attention.sliding_window"),
        ({"expert_used_count": 8}, "llama.expert_used_count is 8; allowed: 0"),
        ({"expert_count": 8}, "llama.expert_used_count is None; allowed: a whole number >= 1"),
        ({"attention.causal": False}, "llama.attention.causal is False; allowed: True"),
        ({"attention.head_count": 3}, "q_proj.weight has 128 rows; allowed: 3 heads x 32"),
        ({"block_count": 1}, "has unknown blk.1.*; allowed: exactly .* llama model of 1 layers"),
        ({"block_count": 3}, "lacks blk.2.attn_norm.weight, .*; allowed: exactly"),
        ({"block_count": 2**32 - 1}, "lacks blk.2.attn_norm.weight, .*; allowed: exactly"),
    ],
)
def test_a_setting_that_is_not_computed_is_refused(tmp_path, changes, reason):
    with pytest.raises(ValueError, match=f"llama.gguf.*{reason}"):
        GgufFile(write_llama(tmp_path, changes=changes))


@pytest.mark.parametrize(
    "tensors, reason",
    [
        ({"token_embd.weight": DROPPED}, "lacks token_embd.weight"),
        ({"blk.1.ffn_up.weight": DROPPED}, "lacks blk.1.ffn_up.weight; allowed: exactly the"),
        ({"blk.0.attn_q.bias": np.ones(128, np.float32)}, "lacks blk.0.attn_k.bias, blk.0.attn_v"),
        ({"blk.0.ffn_sub_norm.weight": np.ones(96, np.float32)}, "unknown blk.0.ffn_sub_norm"),
        ({"output_norm.weight": np.ones(64, np.int8)}, "norm.weight is of type I8; allowed: F32, "),
        ({"output_norm.weight": np.ones((), np.float32)}, r"norm.weight is \(\) in F32; allowed"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path, tensors, reason):
    with pytest.raises(ValueError, match=f"llama.gguf.*{reason}"):
        GgufFile(write_llama(tmp_path, tensors=tensors))


def test_frequency_divisors_where_no_llama_has_them_are_refused(tmp_path):
    tensors = llama_cpp_tensors("qwen2", random_weights("qwen2"))
    path = write(
        tmp_path / "m.gguf", "qwen2", tensors | {"rope_freqs.weight": llama3_divisors(8.0)}
    )
    with pytest.raises(ValueError, match="m.gguf: rope_freqs.weight in a qwen2 model"):
        GgufFile(path)
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    freqs = {"rope_freqs.weight": llama3_divisors(8.0)}
    with pytest.raises(ValueError, match="with rope_scaling .*'linear'.*; allowed: .* without one"):
        GgufFile(write_llama(tmp_path, tensors=freqs, changes=scaled))


def write_parts(folder, count=3, *, of_part=None):
    """A model cut as llama.cpp's gguf-split does it: only the first part has its settings.

    of_part: for a part's number, metadata of its own.
    """
    weights = random_weights("llama")
    tensors = [*llama_cpp_tensors("llama", weights).items()]
    split = {"split.count": count, "split.tensors.count": len(tensors)}
    paths = [folder / f"m-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    for number, path in enumerate(paths):
        own = dict(tensors[number::count])
        fields = split | {"split.no": number} | (of_part or {}).get(number, {})
        changes = dict.fromkeys(SETTINGS, DROPPED) if number else ()
        write(path, "llama", own, fields=fields, changes=changes)
    return weights, paths


def test_a_model_in_several_files_is_read_by_the_first(tmp_path):
    weights, paths = write_parts(tmp_path)
    file = GgufFile(paths[0])
    assert file.shapes == {name: weight.shape for name, weight in weights.items()}
    for name, weight in weights.items():
        np.testing.assert_array_equal(file.read(name), weight, err_msg=name)


def test_parts_that_are_missing_or_of_another_model_are_named(tmp_path):
    (tmp_path / "other").mkdir()
    weights, paths = write_parts(tmp_path)
    with pytest.raises(ValueError, match="is part 2 of a model in 3 files; allowed: the first one"):
        GgufFile(paths[1])
    _, others = write_parts(tmp_path / "other", of_part={1: {"split.no": 2}})
    with pytest.raises(ValueError, match="00002-of-00003.gguf is part 2 of 3, counted from 0; all"):
        GgufFile(others[0])
    _, others = write_parts(tmp_path / "other", of_part={0: {"split.tensors.count": 50}})
    with pytest.raises(ValueError, match="its other parts have 21 tensors; allowed: the 50 of spl"):
        GgufFile(others[0])
    _, others = write_parts(tmp_path / "other", of_part={0: {"split.no": 1}})
    with pytest.raises(ValueError, match="is part 1 of 3, counted from 0; allowed: a whole model"):
        GgufFile(others[0])
    _, others = write_parts(tmp_path / "other")
    others[2].write_bytes(others[1].read_bytes())
    with pytest.raises(ValueError, match="00003-of-00003.gguf is part 1 of 3, counted from 0; all"):
        GgufFile(others[0])
    second = dict([*llama_cpp_tensors("llama", weights).items()][1::3])
    fields = {"split.no": 2, "split.count": 3}
    write(others[2], "llama", second, fields=fields, changes=dict.fromkeys(SETTINGS, DROPPED))
    with pytest.raises(ValueError, match="00003-of-00003.gguf has .*, as an earlier part has; all"):
        GgufFile(others[0])
    paths[2].unlink()
    with pytest.raises(ValueError, match="of which m-00003-of-00003.gguf is not there; allowed: a"):
        GgufFile(paths[0])


def test_another_architecture_and_a_part_of_a_model_are_refused(tmp_path):
    path = write(tmp_path / "m.gguf", "gemma", {"token_embd.weight": np.ones((4, 4), np.float32)})
    with pytest.raises(ValueError, match="architecture is 'gemma'; allowed: llama, qwen2, qwen3"):
        GgufFile(path)
    with pytest.raises(
        ValueError, match="llama.gguf is part 0 of 3, counted from 0; allowed: a whole model"
    ):
        GgufFile(write_llama(tmp_path, fields={"split.count": 3}))


@pytest.fixture(scope="module")
def smollm2():
    """The real file, read here and by llama.cpp's own package."""
    return GgufFile(SMOLLM2), gguf.GGUFReader(SMOLLM2)


@pytest.mark.exhaustive
def test_smollm2_is_read_whole(smollm2):
    file, reference = smollm2
    assert file.config == {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    other = {names.get_name(name, (".weight",)): shape for name, shape in file.shapes.items()}
    assert other == {t.name: tuple(reversed(t.shape.tolist())) for t in reference.tensors}
    assert len(other) == 272
    for name, shape in file.shapes.items():
        assert file.read(name, (slice(2),)).shape == (min(2, shape[0]), *shape[1:])


def test_smollm2s_metadata_are_those_of_llama_cpps_package(smollm2):
    file, reference = smollm2
    wanted = {k: f.contents() for k, f in reference.fields.items() if not k.startswith("GGUF.")}
    for name in ("llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"):
        assert np.float32(file.fields[name]) == wanted.pop(name)
    assert len(file.fields["tokenizer.ggml.tokens"]) == 49_152
    assert {k: v for k, v in file.fields.items() if k in wanted} == wanted


@pytest.mark.parametrize("projection, heads", [("q", 9), ("k", 3)])
def test_smollm2s_queries_and_keys_are_those_of_transformers(smollm2, projection, heads):
    file, reference = smollm2
    (stored,) = [t for t in reference.tensors if t.name == f"blk.0.attn_{projection}.weight"]
    pairs = dequantize(stored.data, stored.tensor_type).reshape(heads, 32, 2, 576)
    wanted = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(heads * 64, 576)
    read = file.read(f"model.layers.0.self_attn.{projection}_proj.weight")
    np.testing.assert_array_equal(read, wanted)
