"""A GGUF's vocabulary gives the tokens of the tokenizer that it was converted from."""

import json

import chat_cases as cases
import numpy as np
import pytest

from seeupo_jax.configuration import schema
from seeupo_jax.policy.files import gguf_vocabulary
from seeupo_jax.policy.files.huggingface_tokenizer import gguf_tokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# Bytes as letters, two merges, and tokens of every kind.
SMALL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|im_end|>", *"abc12", "Ġ", "ab", "abc", "<call>", "[PAD1]", "12"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 1, 1, 4, 5, 1],
    "tokenizer.ggml.merges": ["a b", "ab c", "1 2"],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": CHATML,
}


def converted(name, pre):
    """A folder's tokenizer as the metadata that llama.cpp's converter writes."""
    stored = json.loads((cases.MODELS / name / "tokenizer.json").read_text())
    model, added = stored["model"], stored["added_tokens"]
    names = {token: text for text, token in model["vocab"].items()}
    kinds = dict.fromkeys(names, 1)
    names |= {token["id"]: token["content"] for token in added}
    kinds |= {token["id"]: 3 if token["special"] else 4 for token in added}
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return SMALL | {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [names[token] for token in range(len(names))],
        "tokenizer.ggml.token_type": [kinds[token] for token in range(len(names))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": cases.library(name).eos_token_id,
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, pre", [("qwen3", "qwen2"), ("llama3_2", "llama-bpe")])
def test_tokens_are_those_of_the_original(name, pre):
    built = gguf_vocabulary.build_tokenizer(converted(name, pre)).backend_tokenizer
    original = cases.library(name).backend_tokenizer
    rng = np.random.default_rng(0)
    for _ in range(500):
        text = cases.random_text(rng, pieces=30)
        tokens = original.encode(text, add_special_tokens=False).ids
        assert built.encode(text, add_special_tokens=False).ids == tokens, text
        assert built.decode(tokens) == original.decode(tokens)


def test_smollms_digits_stand_alone_and_words_keep_their_space():
    encode = cases.library("smollm2").backend_tokenizer.encode
    assert encode(" the 407 cats").tokens == ["Ġthe", "Ġ", "4", "0", "7", "Ġcats"]
    assert encode("don't\n\n  x").tokens == ["don", "'t", "ĊĊĠ", "Ġx"]


def test_kinds_of_tokens_are_kept_apart():
    library = gguf_vocabulary.build_tokenizer(SMALL)
    encode = library.backend_tokenizer.encode
    assert encode("abc<call>ab12<|im_end|>").ids == [8, 9, 7, 4, 5, 0]
    assert library.decode([8, 9, 0, 10], skip_special_tokens=True) == "abc<call>"  # 10: unused
    assert library.eos_token_id == 0


def test_a_word_of_llamas_that_is_a_token_needs_no_merges():
    fields = SMALL | {"tokenizer.ggml.tokens": [*SMALL["tokenizer.ggml.tokens"][:-1], "ca"]}
    fields |= {"tokenizer.ggml.merges": ["a b", "ab c"]}
    encoded = {}
    for pre in ("llama-bpe", "qwen2"):
        library = gguf_vocabulary.build_tokenizer(fields | {"tokenizer.ggml.pre": pre})
        encoded[pre] = library.backend_tokenizer.encode("ca").tokens
    assert encoded == {"llama-bpe": ["ca"], "qwen2": ["c", "a"]}


def test_the_ends_of_turns_and_texts_both_end_an_action():
    fields = SMALL | {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eos_token_id": 9}
    assert gguf_tokenizer(fields, None).end_ids == (0, 9)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'; allowed: gpt2"),
        ({"pre": "dbrx"}, "tokenizer.ggml.pre is 'dbrx'; allowed: llama-bpe, qwen2, smollm"),
        ({"pre": None}, "GGUF: no key tokenizer.ggml.pre"),
        ({"pre": ["smollm"]}, r"ggml.pre is \['smollm'\]; allowed: a text"),
        ({"tokens": "abc"}, "ggml.tokens is 'abc'; allowed: a list of texts"),
        ({"tokens": [[1]]}, "ggml.tokens is .*; allowed: a list of texts"),
        ({"token_type": ["a"] * 12}, "ggml.token_type is .*; allowed: a list of whole numbers"),
        ({"merges": [1]}, "ggml.merges is .1.; allowed: a list of texts"),
        ({"merges": ["ab"]}, "ggml.merges cannot be used: .*; allowed: pairs of tokens"),
        ({"merges": ["a zz"]}, "ggml.merges cannot be used: .*; allowed: pairs of tokens"),
        ({"eos_token_id": 99}, "ggml.eos_token_id is 99; allowed: an id from 0 to 11"),
        ({"eos_token_id": [0]}, "ggml.eos_token_id is .0.; allowed: an id from 0 to 11"),
        ({"token_type": [3]}, "12 tokens .12 different. and 1 types"),
        ({"tokens": ["a"] * 12}, "12 tokens .1 different. and 12 types"),
        ({"eos_token_id": None}, "the GGUF file names no end token"),
    ],
)
def test_metadata_that_is_missing_or_unknown_is_told(changes, reason):
    changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    fields = {key: value for key, value in (SMALL | changes).items() if value is not None}
    with pytest.raises(ValueError, match=reason):
        gguf_tokenizer(fields, schema.Chat())


def test_a_file_without_a_template_needs_one_from_the_config(tmp_path):
    fields = {k: v for k, v in SMALL.items() if k != "tokenizer.chat_template"}
    with pytest.raises(ValueError, match="the GGUF file has no chat template; allowed: one, or a"):
        gguf_tokenizer(fields, None).begin([{"role": "user", "content": "?"}], ())
    file = tmp_path / "chat.jinja"
    file.write_text(CHATML)
    made = gguf_tokenizer(fields, schema.Chat(template=str(file)))
    assert made.end_ids == (0,)
