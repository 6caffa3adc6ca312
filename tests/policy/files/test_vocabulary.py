"""Each token's bytes: joined they are the text that the tokenizer itself reads and writes."""

import functools
import io
import json
import tempfile
import unicodedata
from pathlib import Path

import chat_cases
import numpy as np
import pytest
import sentencepiece
from chat_cases import FETCHED, FOLDERS, MODELS
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from seeupo_jax.configuration import schema
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer
from seeupo_jax.policy.files.tokenizer import load_tokenizer
from seeupo_jax.policy.files.vocabulary import byte_fallback, byte_level
from seeupo_jax.policy.files.weights import read_tokenizer

NAMES = (*FETCHED, "order_desk", "llama_2_kind")


def llama_2_kind():
    """A SentencePiece model with bytes to fall back on, read by Hugging Face's library."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["two cups of tea, please", "a cup for two of us"] * 9),
        model_writer=model,
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        minloglevel=2,
        **{f"{name}_id": number for number, name in enumerate(("unk", "bos", "eos"))},
    )
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer.model").write_bytes(model.getvalue())
        values = {"tokenizer_class": "LlamaTokenizer", **names}
        (folder / "tokenizer_config.json").write_text(json.dumps(values))
        return load_tokenizer(folder)


OTHERS = {
    "order_desk": lambda: read_tokenizer("package:order_desk"),
    "llama_2_kind": llama_2_kind,
}


@functools.cache
def vocabulary(name):
    """A tokenizer and its tokens' bytes."""
    tokenizer = OTHERS[name]() if name in OTHERS else chat_cases.make(name)
    return tokenizer, tuple(tokenizer.token_bytes())


def small(decoder, eos="<e>", generation=None, added=()):
    """A tokenizer of few tokens, with gaps between their ids; 5 and on are added ones."""
    names = {name: number for number, name in enumerate(added, start=5)}
    backend = Tokenizer(BPE({"a": 0, "Ġ": 2, "<e>": 4} | names, []))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<e>", special=True)])
    backend.add_tokens(list(added))
    library = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    generation = {} if generation is None else generation
    return HuggingFaceTokenizer(library, schema.Chat(), generation=generation, where="small")


def random_characters(rng, count):
    """Characters from all of Unicode, as Qwen's tokenizers write them."""
    drawn = [chr(c) for c in rng.integers(0, [128, 2**11, 2**16, 0x110000], (count, 4)).ravel()]
    kept = (c for c in drawn if unicodedata.category(c) not in ("Cs", "Cn") and c != "▁")
    return unicodedata.normalize("NFC", "".join(kept))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(6))
def test_the_bytes_of_a_texts_tokens_are_its_utf8(name, seed):
    tokenizer, pieces = vocabulary(name)
    rng = np.random.default_rng(seed)
    fragments = unicodedata.normalize("NFC", chat_cases.random_text(rng, pieces=40))
    for text in ("x" + fragments, "x" + random_characters(rng, 60)):
        tokens = tokenizer.action(text)[:-1]
        assert b"".join(pieces[token] for token in tokens) == text.encode()
        assert tokenizer.text(tokens) == text


@pytest.mark.parametrize("name", (*NAMES, "smollm2"))
def test_all_tokens_in_any_order_are_decoded_to_their_bytes(name):
    tokenizer, pieces = vocabulary(name)
    # Bytes to fall back on are left out: a run of them that is no UTF-8 is replaced as a whole.
    odd = {bytes([byte]) for byte in range(128, 256)} if name in OTHERS else set()
    plain = [i for i, p in enumerate(pieces) if p and p[:1] != b"\xff" and p not in odd]
    # Some tokenizers strip the first space.
    tokens = [pieces.index(b"a"), *np.random.default_rng(0).permutation(plain).tolist()]
    joined = b"".join(pieces[token] for token in tokens)
    assert tokenizer.text(tokens) == joined.decode(errors="replace")


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_are_no_utf8_can_be_spelled_and_are_replaced_in_the_text(name):
    tokenizer, pieces = vocabulary(name)
    # The last is a letter's own token, where there is one beside the byte to fall back on.
    tokens = {piece: token for token, piece in enumerate(pieces)}

    def spell(data):
        return tokenizer.text([tokens[bytes([byte])] for byte in data])

    rng = np.random.default_rng(0)
    some = [b"\x80", b"\xff", b"\xc3", b"\xf8", "é".encode(), "漢".encode(), "🙂".encode()]
    data = b"a" + b"".join(some[i] + b"u" for i in rng.integers(0, len(some), 50))
    assert spell(data) == data.decode(errors="replace")
    assert {bytes([byte]) for byte in range(256)} <= tokens.keys()
    if name in FOLDERS:
        data = rng.bytes(500)
        assert spell(data) == data.decode(errors="replace")


@pytest.mark.parametrize("name", FETCHED)
def test_control_tokens_are_marked_and_other_added_tokens_are_text(name):
    _, pieces = vocabulary(name)
    stored = json.loads((MODELS / name / "tokenizer.json").read_text())["added_tokens"]
    for token in stored:
        mark = b"\xff" if token["special"] else b""
        assert pieces[token["id"]] == mark + token["content"].encode()
    special = {token["id"] for token in stored if token["special"]}
    assert {i for i, piece in enumerate(pieces) if piece[:2] == b"\xff<"} == special


def test_control_tokens_of_sentencepiece_are_marked_and_the_unknown_token_has_no_bytes():
    _, pieces = vocabulary("order_desk")
    marked = [piece for piece in pieces if piece[:1] == b"\xff" != piece]
    names = ("system", "user", "assistant", "tool", "end")
    assert marked == [b"\xff" + f"<|{name}|>".encode() for name in names]
    assert [i for i, piece in enumerate(pieces) if not piece] == [0]
    _, pieces = vocabulary("llama_2_kind")
    assert pieces[:3] == (b"\xff<unk>", b"\xff<s>", b"\xff</s>")
    assert [piece for piece in pieces[3:] if piece[:1] == b"\xff"] == [b"\xff"]


def test_an_end_token_is_marked_though_its_vocabulary_calls_it_text():
    tokenizer = small(decoders.ByteLevel(), generation={"eos_token_id": 5}, added=["<x>", "<y>"])
    assert tokenizer.token_bytes()[4:] == [b"\xff<e>", b"\xff<x>", b"<y>"]


def test_ids_without_a_token_have_no_bytes():
    assert small(decoders.ByteLevel()).token_bytes() == [b"a", b"", b" ", b"", b"\xff<e>"]


def test_an_added_tokens_other_characters_are_text_as_they_stand():
    added = ["a b", "漢Ġ", "Ã©"]
    tokenizer = small(decoders.ByteLevel(), added=added)
    pieces = tokenizer.token_bytes()[5:]
    assert pieces == [b"a b", "漢Ġ".encode(), "é".encode()]
    assert [tokenizer.text([token]) for token in (5, 6, 7)] == [p.decode() for p in pieces]


@pytest.mark.parametrize(
    ("decoder", "kinds"),
    [
        (None, "nothing"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.Metaspace(), decoders.Fuse()]), "Metaspace, Fuse"),
    ],
)
def test_a_decoder_that_hides_bytes_is_refused(decoder, kinds):
    reason = f"small decodes by {kinds}, .*; allowed: ByteLevel, ByteFallback"
    with pytest.raises(ValueError, match=f"^tokenizer: {reason}.$"):
        small(decoder).token_bytes()


def test_the_alphabet_of_byte_level_names_is_the_librarys():
    alphabet = ByteLevel.alphabet()
    assert {byte_level(character) for character in alphabet} == {bytes([b]) for b in range(256)}
    assert byte_level("ĠaĊÃ©ð") == b" a\n\xc3\xa9\xf0"


def test_names_of_bytes_to_fall_back_on():
    assert byte_fallback("<0xE6>") == b"\xe6"
    assert byte_fallback("▁a▁<0xE6>") == b" a <0xE6>"
    assert [byte_fallback(name) for name in ("<0xE>", "<0xGG>")] == [b"<0xE>", b"<0xGG>"]
