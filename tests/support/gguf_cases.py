"""Small models, and GGUF files of them as llama.cpp's converter lays them out."""

import re

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 40, 64, 2, 4, 2, 32, 96
SETTINGS = {
    "context_length": 512,
    "embedding_length": WIDTH,
    "block_count": LAYERS,
    "feed_forward_length": MLP,
    "vocab_size": VOCAB,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": HEAD_DIM,
    "rope.freq_base": 500_000.0,
}
EMBEDDING = "model.embed_tokens.weight"
DROPPED = object()


def random_weights(family, *, tied=False, attention_bias=False, seed=0):
    """Weights of a small model by Hugging Face name."""
    random = np.random.default_rng(seed)
    shapes = {EMBEDDING: (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, WIDTH)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in (f"model.layers.{i}." for i in range(LAYERS)):
        projections = {"q_proj": (q, WIDTH), "k_proj": (kv, WIDTH), "v_proj": (kv, WIDTH)}
        projections["o_proj"] = (WIDTH, q)
        for name, shape in projections.items():
            shapes[f"{layer}self_attn.{name}.weight"] = shape
            if attention_bias or family == "qwen2" and name != "o_proj":
                shapes[f"{layer}self_attn.{name}.bias"] = shape[:1]
        if family == "qwen3":
            shapes |= {f"{layer}self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (WIDTH,)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{layer}mlp.{name}.weight"] = (MLP, WIDTH)
        shapes[f"{layer}mlp.down_proj.weight"] = (WIDTH, MLP)
    return {k: random.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}


def interleaved(rows):
    """llama.cpp's order of the rows of heads: the first of either half, the second of either ..."""
    half = HEAD_DIM // 2
    order = []
    for start in range(0, len(rows), HEAD_DIM):
        for pair in range(half):
            order += [start + pair, start + half + pair]
    return rows[order]


def llama_cpp_tensors(family, weights):
    """The same weights by llama.cpp's names, in its order of rows."""
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[family]
    names = gguf.get_tensor_name_map(architecture, LAYERS)
    tensors = {}
    for name, weight in weights.items():
        if family == "llama" and re.search(r"\.[qk]_proj\.", name):
            weight = interleaved(weight)
        tensors[names.get_name(name, (".weight", ".bias"))] = weight
    return tensors


def write(path, family, tensors, *, kind=Kind.F32, changes=(), fields=()):
    """A GGUF file. changes: to the settings, `DROPPED` removes one. fields: other metadata."""
    writer = gguf.GGUFWriter(path, family)
    settings = {k: v for k, v in (SETTINGS | dict(changes)).items() if v is not DROPPED}
    values = {f"{family}.{key}": value for key, value in settings.items()} | dict(fields)
    adders = {str: writer.add_string, bool: writer.add_bool, list: writer.add_array}
    adders |= {int: writer.add_uint32, float: writer.add_float32}
    for key, value in values.items():
        adders[type(value)](key, value)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_llama(folder, *, tensors=None, **options):
    """A llama file with some tensors replaced, added, or dropped."""
    written = llama_cpp_tensors("llama", random_weights("llama"))
    written |= {} if tensors is None else tensors
    kept = {name: tensor for name, tensor in written.items() if tensor is not DROPPED}
    return write(folder / "llama.gguf", "llama", kept, **options)
