"""A GGUF's vocabulary gives the tokens of the tokenizer that it was converted from."""

import io
import json

import chat_cases as cases
import numpy as np
import pytest
import sentencepiece
import sentencepiece.sentencepiece_model_pb2 as schema_of_pieces
from tokenizers import Tokenizer

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
@pytest.mark.parametrize(
    "name, pre",
    [
        ("qwen3", "qwen2"),
        ("llama3_2", "llama-bpe"),
        ("deepseek_v3", "deepseek-v3"),
    ],
)
def test_tokens_are_those_of_the_original(name, pre):
    built = gguf_vocabulary.build_tokenizer(converted(name, pre)).backend_tokenizer
    original = cases.library(name).backend_tokenizer
    rng = np.random.default_rng(0)
    for _ in range(500):
        text = cases.random_text(rng, pieces=30)
        tokens = original.encode(text, add_special_tokens=False).ids
        assert built.encode(text, add_special_tokens=False).ids == tokens, text
        assert built.decode(tokens) == original.decode(tokens)


@pytest.mark.exhaustive
def test_the_pieces_of_llama_2_are_those_of_the_original():
    """Scores are the places of merges, as in the published tokenizer.model."""
    stored = json.loads((cases.MODELS / "llama2" / "tokenizer.json").read_text())["model"]
    names = sorted(stored["vocab"], key=stored["vocab"].get)
    place = {merge.replace(" ", "", 1): -i for i, merge in reversed([*enumerate(stored["merges"])])}
    types = {"<unk>": 2, "<s>": 3, "</s>": 3} | {f"<0x{byte:02X}>": 6 for byte in range(256)}
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": [float(place.get(name, -1e6)) for name in names],
        "tokenizer.ggml.token_type": [types.get(name, 1) for name in names],
    }
    built = gguf_vocabulary.build_tokenizer(fields).backend_tokenizer
    # As the file says: version 5 of transformers puts no space before the text.
    original = Tokenizer.from_file(str(cases.MODELS / "llama2" / "tokenizer.json"))
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


TEXT = "I'LL say 1234½ HTTPServer's\n\n  naïve e\u0301te漢字, x==y don't"
CONTRACTED = ["I", "'LL", " say", " ", "123", "4½", " HTTPServer", "'s", "\n\n", " ", " naïve"]
CONTRACTED += [" e", "\u0301te漢字", ",", " x", "==", "y", " don", "'t"]
DIGITS = ["I", "'LL", " say", " ", "1", "2", "3", "4", "½", *CONTRACTED[6:]]
CASED = ["I'LL", " say", " ", "123", "4½", " HTTPServer's", "\n\n", " ", " naïve", " e\u0301te漢字"]
CASED += [",", " x", "==", "y", " don't"]
GPT2 = ["I", "'", "LL", " say", " 1234½", " HTTPServer", "'s", "\n\n ", " naïve", " e", "\u0301"]
GPT2 += ["te漢字", ",", " x", "==", "y", " don", "'t"]


@pytest.mark.parametrize(
    "pres, wanted",
    [
        (("llama-bpe", "dbrx", "chatglm-bpe", "glm4"), CONTRACTED),
        (("qwen2",), DIGITS),
        (("qwen35",), [*DIGITS[:-8], " e\u0301te漢字", *DIGITS[-6:]]),
        (("gpt-4o", "llama4"), CASED),
        (
            ("tekken",),
            ["I", "'LL", " say", " ", "1", "2", "3", "4", "½", " HTTPServer", "'s", *CASED[6:-1]]
            + [" don", "'t"],
        ),
        (("gpt-2", "phi-2"), GPT2),
        (
            ("smollm", "refact", "starcoder", "command-r"),
            [*GPT2[:4], " ", "1", "2", "3", "4", "½", *GPT2[5:]],
        ),
        (
            ("deepseek-v3",),
            [*CONTRACTED[:4], "123", "4½", " HTTPServer", *CONTRACTED[7:11]]
            + [" e\u0301te", "漢字", ",", " x", "==", "y", " don", "'t"],
        ),
        (
            ("deepseek-llm",),
            ["I", "'", "LL", " say", " ", "1234½", " HTTPServer", "'", "s", "\n", "\n", " "]
            + [
                " na",
                "ï",
                "ve",
                " e",
                "\u0301",
                "te",
                "漢字",
                ",",
                " x",
                "==",
                "y",
                " don",
                "'",
                "t",
            ],
        ),
    ],
    ids=lambda value: value[0],
)
def test_texts_are_cut_into_the_words_of_each_family(pres, wanted):
    """Words by hand, from the expressions in the families' own tokenizer.json."""
    for pre in pres:
        words = gguf_vocabulary.PREPARATIONS[pre][1].pre_tokenize_str(TEXT)
        assert [TEXT[start:end] for _, (start, end) in words] == wanted, pre


def trained(prefix):
    """A small SentencePiece model as the library has it, and as llama.cpp's converter writes it."""
    stream = io.BytesIO()
    rng = np.random.default_rng(1)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([cases.random_text(rng, pieces=12) for _ in range(2000)]),
        model_writer=stream,
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        control_symbols=["<turn>"],
        user_defined_symbols=["<call>", "▁▁", "▁▁▁"],
        minloglevel=2,
    )
    proto = schema_of_pieces.ModelProto.FromString(stream.getvalue())
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": [
            p.piece.replace("▁", " ") if p.type == p.USER_DEFINED else p.piece for p in proto.pieces
        ],
        "scores": [p.score for p in proto.pieces],
        "token_type": [p.type for p in proto.pieces],
        "add_space_prefix": prefix,
        "eos_token_id": 2,
    }
    fields = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    library = sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())
    return library, fields | {
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_pieces_are_those_of_their_library(prefix):
    library, fields = trained(prefix)
    built = gguf_vocabulary.build_tokenizer(fields)
    rng = np.random.default_rng(2)
    texts = [cases.random_text(rng, pieces=30) for _ in range(400)]
    texts += ["", " ", "a", "  two   spaces", "漢字\U0010ffff", "aaaaaaaaa", "<0x41>"]
    # A space is put before what follows an added token too, as llama.cpp does.
    texts += [] if prefix else ["no <call> yes<call>"]
    names = [library.id_to_piece(i) for i in range(len(library)) if library.is_control(i)]
    compared = 0
    for text in texts:
        if any(name in text for name in (*names, "<unk>")):
            continue  # which the library of pieces takes for text
        compared += 1
        tokens = library.encode(text)
        if text:  # of none there is nothing to put a space before
            assert built.encode(text, add_special_tokens=False) == tokens, text
        assert built.decode(tokens) == library.decode(tokens)
    assert compared > 300


@pytest.mark.parametrize("prefix", [True, False])
def test_a_policy_speaks_in_sentence_pieces(prefix):
    _, fields = trained(prefix)
    tokenizer = gguf_tokenizer(fields, None)
    tokens = tokenizer.action("a word <call>")
    assert tokens[-1] == 2 and tokenizer.text(tokens) == "a word <call>"
    spelt = b" " * prefix + b"a word <call>"
    assert b"".join(tokenizer.token_bytes()[i] for i in tokens[:-1]) == spelt


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
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; allowed: gpt2, llama"),
        ({"model": "llama"}, "GGUF: no key tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.5]}, "12 tokens and 1 scores; allowed: a score for each"),
        ({"model": "llama", "scores": [1] * 12}, "ggml.scores is .*; allowed: a list of numbers"),
        (
            {"model": "llama", "scores": [0.5] * 12, "remove_extra_whitespaces": True},
            "remove_extra_whitespaces is True; allowed: False",
        ),
        ({"pre": "falcon"}, "tokenizer.ggml.pre is 'falcon'; allowed: llama-bpe, qwen2, qwen35,"),
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
