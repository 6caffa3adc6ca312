"""A tiny random model of any family, in the folder that `transformers` writes, with a tokenizer."""

import torch_models
import transformers

from seeupo_jax.policy import from_pretrained

# By key of a config.json: whichever of these keys a family's config has.
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "sliding_window": 24,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "query_pre_attn_scalar": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "num_nextn_predict_layers": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def config_values(family, vocab):
    """A family's own defaults at these sizes, with a layer of every kind that it has."""
    default = transformers.AutoConfig.for_model(family)
    values = {key: size for key, size in SIZES.items() if hasattr(default, key)}
    kinds = sorted(set(getattr(default, "layer_types", None) or ()))
    if len(kinds) > 1:
        values["layer_types"] = kinds
    if "kv_lora_rank" in values:  # keys and values of every head, from what all heads share
        values["num_key_value_heads"] = values["num_attention_heads"]
    return values | {"vocab_size": vocab}


def write(family, folder, seed=0):
    """Writes the folder, with the tokenizer of the package's policy; returns the PyTorch model."""
    _, tokenizer = from_pretrained("package:order_desk")
    model, _ = torch_models.make(family, config_values(family, tokenizer.vocab_size), seed, folder)
    tokenizer.save(folder)
    return model
