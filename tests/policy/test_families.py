"""Published configs become the architectures that their models have; others are refused."""

import copy
import dataclasses
import json
import math

import pytest
from published_cases import (
    DEEPSEEK_V3,
    DOTS_LLM1,
    LLAMA_3_1_8B,
    MIXTRAL_8X7B,
    QWEN1_5_MOE_A2_7B,
    QWEN2_5_14B,
    QWEN3_14B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B_A3B,
)
from transformers import AutoConfig, AutoModelForCausalLM

from seeupo_jax.policy.architecture import Architecture, DeltaNet, LatentAttention, Moe
from seeupo_jax.policy.files.model_config import config_json, read_architecture
from seeupo_jax.policy.rope import Rope

PUBLISHED = {
    "Qwen2.5-14B": (
        QWEN2_5_14B,
        Architecture(
            152064,
            5120,
            48,
            40,
            8,
            128,
            13824,
            Rope(1e6),
            qk_norm=False,
            qkv_bias=True,
            tied=False,
            family="qwen2",
        ),
    ),
    "Qwen3-14B": (
        QWEN3_14B,
        Architecture(
            151936,
            5120,
            40,
            40,
            8,
            128,
            17408,
            Rope(1e6),
            tied=False,
            max_positions=40960,
            family="qwen3",
        ),
    ),
    "Llama-3.1-8B": (
        LLAMA_3_1_8B,
        Architecture(
            128256,
            4096,
            32,
            32,
            8,
            128,
            14336,
            Rope(500_000.0, "llama3", 8.0, 8192, 1.0, 4.0),
            norm_eps=1e-5,
            qk_norm=False,
            tied=False,
            max_positions=131072,
            family="llama",
        ),
    ),
    "Qwen3-30B-A3B": (
        QWEN3_30B_A3B,
        Architecture(
            151936,
            2048,
            48,
            32,
            4,
            128,
            6144,
            Rope(1e6),
            tied=False,
            moe=Moe(128, 8, 768, True),
            max_positions=40960,
            family="qwen3_moe",
        ),
    ),
    "Mixtral-8x7B": (
        MIXTRAL_8X7B,
        Architecture(
            32000,
            4096,
            32,
            32,
            8,
            128,
            14336,
            Rope(1e6),
            norm_eps=1e-5,
            qk_norm=False,
            tied=False,
            moe=Moe(8, 2, 14336, True, names="mixtral"),
            family="mixtral",
        ),
    ),
    "Qwen1.5-MoE-A2.7B": (
        QWEN1_5_MOE_A2_7B,
        Architecture(
            151936,
            2048,
            24,
            16,
            16,
            128,
            5632,
            Rope(1e6),
            qk_norm=False,
            qkv_bias=True,
            tied=False,
            moe=Moe(60, 4, 1408, False, shared_width=5632, shared_gate=True),
            max_positions=8192,
            family="qwen2_moe",
        ),
    ),
    "dots.llm1": (
        DOTS_LLM1,
        Architecture(
            152064,
            4096,
            62,
            32,
            32,
            128,
            10944,
            Rope(1e7),
            norm_eps=1e-5,
            tied=False,
            moe=Moe(
                128,
                6,
                1408,
                True,
                dense_layers=(0,),
                scores="sigmoid",
                scale=2.5,
                selection_bias=True,
                shared_width=2816,
                names="deepseek",
            ),
            family="dots1",
        ),
    ),
    "DeepSeek-V3": (
        DEEPSEEK_V3,
        Architecture(
            129280,
            7168,
            61,
            128,
            128,
            192,
            18432,
            Rope(
                1e4,
                "yarn",
                40.0,
                4096,
                mscale=1.0,
                mscale_all_dim=1.0,
                interleaved=True,
            ),
            qk_norm=False,
            # softmax_scale of the published modeling_deepseek.py, inference/model.py.
            query_scale=192**-0.5 * (0.1 * math.log(40) + 1.0) ** 2,
            tied=False,
            moe=Moe(
                256,
                8,
                2048,
                True,
                dense_layers=(0, 1, 2),
                scores="sigmoid",
                scale=2.5,
                selection_bias=True,
                groups=8,
                groups_per_token=4,
                shared_width=2048,
                names="deepseek",
            ),
            latent=LatentAttention(1536, 512, 128, 64, 128),
            max_positions=163840,
            family="deepseek_v3",
        ),
    ),
    "Qwen3-Next-80B-A3B": (
        QWEN3_NEXT_80B_A3B,
        Architecture(
            151936,
            2048,
            48,
            16,
            2,
            256,
            5120,
            Rope(1e7, partial=0.25),
            norm_offset=1.0,
            attention_gate=True,
            tied=False,
            moe=Moe(512, 10, 512, True, shared_width=512, shared_gate=True),
            delta=DeltaNet(
                tuple(i for i in range(48) if i % 4 != 3), 16, 32, 128, 128, 4, grouped=True
            ),
            max_positions=262144,
            family="qwen3_next",
        ),
    ),
}


def test_a_config_is_as_it_was_once_it_has_been_read():
    scaling = dict(LLAMA_3_1_8B["rope_scaling"])
    values = LLAMA_3_1_8B | {"rope_theta": 1e6, "rope_scaling": scaling}
    assert read_architecture(values, "F.json").rope.theta == 1e6
    assert scaling == LLAMA_3_1_8B["rope_scaling"] and "rope_theta" not in scaling


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_its_model_is(name):
    values, wanted = PUBLISHED[name]
    assert read_architecture(values, name) == wanted


def tiny(values):
    """A config of the same class, whose model is made at once."""
    sizes = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
    more = {"intermediate_size": 4, "num_key_value_heads": 1, "head_dim": 4}
    experts = {key: 4 for key in ("moe_intermediate_size", "shared_expert_intermediate_size")}
    kept = {key: x for key, x in values.items() if key not in ("rope_scaling", "layer_types")}
    return AutoConfig.for_model(**copy.deepcopy(kept) | sizes | more | experts)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_reads_the_same_and_names_the_class(name):
    values, arch = PUBLISHED[name]
    written = json.loads(json.dumps(config_json(arch, (7, 9), "bfloat16")))
    assert read_architecture(written, name) == arch
    assert written["model_type"] == values["model_type"]
    wanted = type(AutoModelForCausalLM.from_config(tiny(values)))
    assert written["architectures"] == [wanted.__name__]
    assert (written["eos_token_id"], written["bos_token_id"]) == ([7, 9], None)
    assert written["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("scaling", [{}, {"rope_type": "yarn", "factor": 2.5, "beta_fast": 16.0}])
def test_rope_is_written_for_transformers_4_and_5(name, scaling):
    # Copies, since transformers writes into what it is given.
    values = copy.deepcopy(PUBLISHED[name][0] | ({"rope_scaling": scaling} if scaling else {}))
    written = json.loads(json.dumps(config_json(read_architecture(values, name))))
    assert written["rope_theta"] == values["rope_theta"]
    stated, given = written["rope_scaling"], without_defaults(values.get("rope_scaling"))
    assert stated == given or stated == {**stated, **given}
    read, published = (
        AutoConfig.for_model(**copy.deepcopy(each)).rope_parameters for each in (written, values)
    )
    assert read == written["rope_parameters"] == {**read, **without_defaults(published)}


def without_defaults(scaling):
    """Without YaRN's own turns (arXiv:2309.00071), and without the old name of `rope_type`."""
    usual = {"beta_fast": 32, "beta_slow": 1, "type": "yarn"}
    if scaling is None:
        return None
    return {key: value for key, value in scaling.items() if usual.get(key) != value}


def test_a_window_lies_in_the_layers_that_say_so():
    on = {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 4}
    old = read_architecture(QWEN2_5_14B | on | {"max_window_layers": 3}, "old")
    assert old.windows == (None, None, None, 64)
    kinds = ["sliding_attention", "full_attention"] * 2
    named = read_architecture(QWEN3_14B | on | {"layer_types": kinds}, "new")
    assert named.windows == (64, None, 64, None)
    replicated = read_architecture(QWEN3_30B_A3B | on, "moe")
    assert replicated.windows == (64,) * 4
    off = read_architecture(QWEN2_5_14B | on | {"use_sliding_window": False}, "off")
    assert off.windows == ()
    for arch in (old, named, replicated):
        assert read_architecture(config_json(arch), "again") == arch


def test_layers_without_experts_are_found_by_list_and_by_step():
    changes = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    arch = read_architecture(QWEN3_30B_A3B | changes, "moe")
    assert arch.moe.dense_layers == (0, 2, 3, 4)
    assert [arch.is_sparse(i) for i in range(6)] == [False, True, False, False, False, True]
    assert read_architecture(config_json(arch), "again") == arch


def test_yarn_takes_its_original_length_from_the_model_where_it_says_none():
    scaling = {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    rope = read_architecture(QWEN3_14B | scaling, "yarn").rope
    assert rope == Rope(1e6, "yarn", 4.0, 40960)
    scaling["rope_scaling"] |= {"mscale": 0, "mscale_all_dim": 0.0}  # as if they were not there
    assert read_architecture(QWEN3_14B | scaling, "yarn").rope == rope


# As the model cards of Qwen2.5 and Qwen3 say; as the documentation of Qwen3 and of vLLM says.
QWEN_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
SPELLINGS = (
    {"rope_scaling": QWEN_YARN | {"type": "yarn"}},
    {"rope_scaling": QWEN_YARN | {"rope_type": "yarn"}},
    {"rope_scaling": QWEN_YARN | {"rope_type": "yarn", "rope_theta": 1e6}},
    {"rope_parameters": QWEN_YARN | {"rope_type": "yarn", "rope_theta": 1000000}},
)


@pytest.mark.parametrize("added", SPELLINGS)
@pytest.mark.parametrize("published", [QWEN2_5_14B, QWEN3_14B, QWEN3_30B_A3B])
def test_yarn_as_qwens_pages_add_it_stretches_the_context(published, added):
    """They leave max_position_embeddings as it was, and give 131,072 tokens as the context."""
    arch = read_architecture(copy.deepcopy(published | added), "yarn")
    assert arch.rope == Rope(1e6, "yarn", 4.0, 32768)
    assert arch.max_positions == 131_072 > published["max_position_embeddings"]
    assert read_architecture(config_json(arch), "again") == arch


def test_a_context_that_a_config_states_is_not_shortened_by_yarn():
    values = QWEN3_14B | {"max_position_embeddings": 262_144, **SPELLINGS[0]}
    assert read_architecture(values, "yarn").max_positions == 262_144


def test_dynamic_scaling_leaves_the_context_of_the_model():
    values = QWEN3_14B | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    arch = read_architecture(copy.deepcopy(values), "dynamic")
    assert (arch.rope, arch.max_positions) == (Rope(1e6, "dynamic", 4.0), 40960)
    assert read_architecture(config_json(arch), "again") == arch


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    "changes, reason",
    [
        (
            {"model_type": "bloom"},
            "model_type is 'bloom'; allowed: llama, qwen2, qwen3, qwen3_moe, qwen2_moe, mixtral",
        ),
        ({"vocab_size": None}, "vocab_size missing"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; allowed: silu, gelu_pytorch_tanh, gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is "),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config is {"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; allowed: 0.0"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}},
            "'dynamic' with alpha; allowed: rope_theta, partial_rotary_factor, factor",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "config|longrope"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "extra": 1}},
            "with extra; allowed",
        ),
        (
            {"rope_scaling": YARN | {"factor": 0.5}},
            "rope's factor is 0.5; allowed: a number from 1 to",
        ),
        (
            {"rope_scaling": YARN, "rope_theta": 1.0},
            "rope's rope_theta is 1.0; allowed: a number > 1",
        ),
        (
            {"rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"low_freq_factor": 4.0}},
            "rope's high_freq_factor is 4.0; allowed: a number > low_freq_factor=4.0",
        ),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor is 0.01; allowed: an even part"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'; allowed: a whole"),
        (
            {
                "layer_types": ["chunked_attention"] * 40,
                "sliding_window": 8,
                "use_sliding_window": True,
            },
            "F",
        ),
    ],
)
def test_what_our_network_does_not_compute_is_refused(changes, reason):
    with pytest.raises(ValueError, match=f"F.json: .*({reason})|{reason}"):
        read_architecture(QWEN3_14B | changes, "F.json")


@pytest.mark.parametrize(
    "published, changes, reason",
    [
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; allowed: from 1 to"),
        (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; allowed: 0.0"),
        (QWEN1_5_MOE_A2_7B, {"shared_expert_intermediate_size": 0}, "size is 0; allowed: a whole"),
        (DOTS_LLM1, {"n_group": 3}, "n_group is 3 and topk_group 1 for 128 experts; allowed:"),
        (DOTS_LLM1, {"n_group": 128}, "n_group is 128 .* two experts at least"),
        (DOTS_LLM1, {"n_group": 64}, "num_experts_per_tok is 6; allowed: from 1 to the 2 experts"),
        (DOTS_LLM1, {"n_shared_experts": None}, "n_shared_experts missing; a model of experts"),
        (DOTS_LLM1, {"first_k_dense_replace": -1}, "is -1; allowed: 0 to fewer than all layers"),
    ],
)
def test_experts_that_our_network_does_not_have_are_refused(published, changes, reason):
    with pytest.raises(ValueError, match=f"F.json: .*{reason}"):
        read_architecture(published | changes, "F.json")


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"layer_types": ["linear_attention"] * 3}, "must be equal to the number of"),
        ({"layer_types": ["sliding_attention"] * 48}, "allowed: 48 of full_attention, linear_att"),
        ({"layer_types": ["linear_attention"] * 48}, "allowed: at least one full_attention"),
        ({"linear_num_key_heads": 12}, "key_heads is 12; allowed: a divisor of the 32"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0; allowed: a whole number"),
        ({"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim is '4'; allowed: a whole"),
    ],
)
def test_recurrent_layers_that_our_network_does_not_have_are_refused(changes, reason):
    with pytest.raises(ValueError, match=f"F.json: .*{reason}"):
        read_architecture(QWEN3_NEXT_80B_A3B | changes, "F.json")


def test_a_window_in_a_family_without_is_refused():
    with pytest.raises(ValueError, match="sliding_window is 16; allowed for this family: null"):
        read_architecture(LLAMA_3_1_8B | {"sliding_window": 16}, "F.json")


def test_no_family_is_guessed_for_a_combination_that_none_has():
    odd = Architecture(8, 8, 2, 2, 2, 4, 8, qk_norm=False, out_bias=True)
    with pytest.raises(
        ValueError, match="out_bias=True.*allowed: a combination that one of llama, qwen2"
    ):
        config_json(odd)


def test_a_width_that_the_heads_do_not_divide_is_no_reason_to_refuse_another_family():
    arch = Architecture(8, 24, 2, 7, 1, 6, 8)
    written = config_json(arch)
    assert written["model_type"] == "qwen3"
    assert read_architecture(written, "again") == dataclasses.replace(arch, family="qwen3")


def test_windows_of_two_sizes_are_of_no_family():
    with pytest.raises(ValueError, match=r"windows=\(4, 5\).*allowed: a combination"):
        config_json(Architecture(8, 8, 2, 2, 2, 4, 8, windows=(4, 5)))


def test_layers_of_two_kinds_cannot_be_stacked():
    with pytest.raises(ValueError, match="scan_layers: got True for a model whose layers differ"):
        Architecture(8, 8, 2, 2, 2, 4, 8, windows=(4, None), scan_layers=True)
