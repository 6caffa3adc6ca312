"""Writes `gguf_families/`: files of llama.cpp's converter, and the logits of what it converted.

    python tests/support/convert_gguf.py LLAMA_CPP

LLAMA_CPP holds `conversion/` and `gguf-py/` of llama.cpp's sources, which the source distribution
of llama-cpp-python contains (the files here: 0.3.36). The models are random ones of
`transformers`, rounded to bfloat16; they are converted without a vocabulary.
"""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

HERE = Path(__file__).parent / "gguf_families"
HEADS = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SIZES = HEADS | {"head_dim": 12}
GEMMA = SIZES | {"sliding_window": 6, "query_pre_attn_scalar": 12}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.2, 1.7],
    "long_factor": [2.0, 4.0, 8.0],
}
CASES = {
    "mistral": ("mistral", SIZES | {"sliding_window": None, "rope_theta": 1e6}),
    "llama_biases": ("llama", SIZES | {"attention_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", HEADS | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "qwen2_moe",
        HEADS | EXPERTS | {"num_experts": 3, "shared_expert_intermediate_size": 40},
    ),
    "qwen3_moe": ("qwen3_moe", SIZES | EXPERTS | {"num_experts": 3, "norm_topk_prob": True}),
    "dots1": (
        "dots1",
        SIZES
        | EXPERTS
        | {
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        SIZES
        | {
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "ministral3": (
        "ministral3",
        SIZES
        | {
            "max_position_embeddings": 64,
            "rope_parameters": YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": (
        "gemma3_text",
        GEMMA
        | {
            "num_hidden_layers": 6,
            "hidden_size": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "smollm3": ("smollm3", HEADS | {"num_hidden_layers": 4, "intermediate_size": 32}),
    "granite": (
        "granite",
        HEADS
        | {
            "embedding_multiplier": 12.0,
            "logits_scaling": 6.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.05,
        },
    ),
    "olmo2": ("olmo2", HEADS),
    "olmo3": (
        "olmo3",
        HEADS
        | {
            "num_hidden_layers": 4,
            "intermediate_size": 32,
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": YARN | {"attention_factor": 1.3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "glm4": ("glm4", SIZES),
    "glm4_without_biases": ("glm4", SIZES | {"attention_bias": False}),
    "phi3": ("phi3", HEADS | {"original_max_position_embeddings": 256, "sliding_window": 6}),
    "phi3_longrope": (
        "phi3",
        HEADS
        | {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
            "rope_parameters": LONGROPE,
        },
    ),
}


def convert(folder, target):
    """By llama.cpp's class for the folder's model."""
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    values = ModelBase.load_hparams(folder, False)
    converter = get_model_class(get_model_architecture(values, ModelType.TEXT))
    converter.set_vocab = lambda self: None
    converter(folder, gguf.LlamaFileType.MOSTLY_BF16, target, eager=True).write()


def main(llama_cpp):
    sys.path[:0] = [str(Path(llama_cpp) / "gguf-py"), llama_cpp]
    import torch
    import torch_models

    HERE.mkdir(exist_ok=True)
    for case, (family, values) in CASES.items():
        with TemporaryDirectory() as folder:
            model, _ = torch_models.make(family, values, 0, folder)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16).float()
            model.save_pretrained(folder)
            words = {"vocab": {str(i): i for i in range(values["vocab_size"])}}
            vocabulary = {"model": words, "added_tokens": []}  # Gemma 3 asks for its size
            Path(folder, "tokenizer.json").write_text(json.dumps(vocabulary))
            convert(Path(folder), HERE / f"{case}.gguf")
            logits = torch_models.torch_logits(model, torch_models.tokens(values["vocab_size"], 2))
            np.save(HERE / f"{case}.npy", logits)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(*sys.argv[1:])
