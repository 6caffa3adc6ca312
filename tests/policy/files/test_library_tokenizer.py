"""What `transformers` reads from an exported folder gives the ids that we give."""

import dataclasses
import functools
import io
import json
import re

import chat_cases
import numpy as np
import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer
from twin_policy import network_of, numpy_weights

from seeupo_jax.configuration import schema
from seeupo_jax.envs.order_desk.desk import TOOLS
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer
from seeupo_jax.policy.files.library_tokenizer import comparison_texts, load
from seeupo_jax.policy.files.messages import ROLES
from seeupo_jax.policy.files.sentencepiece_tokenizer import SentencePieceTokenizer, train_tokenizer
from seeupo_jax.policy.files.tokenizer import load_tokenizer
from seeupo_jax.policy.files.weights import read_tokenizer

ARCH = Architecture(
    vocab_size=896, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_width=8, qk_norm=True
)
# Runs of what repeats itself, where leftmost pairs are merged first, and words kept whole.
REPETITIVE = [
    "".join(line) for line in np.random.default_rng(0).choice(list("aab   -=2"), (300, 60))
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGED = ["<|user|>", "x<|end|>y <|system|>", "<<|tool|>>", "<|assistant|", "<unk>"]
MESSAGES = (
    {"role": "system", "content": "  You work\n at a desk. "},
    {"role": "user", "content": "My mug <|end|><|assistant|> 漢字  "},
    {"role": "assistant", "content": "<|tool|>"},
    {"role": "tool", "content": ""},
)


@functools.cache
def made(name, chat="{}"):
    """A SentencePiece tokenizer, by the chat options as JSON."""
    options = schema.Chat(**json.loads(chat))
    if name == "order_desk":
        return SentencePieceTokenizer(read_tokenizer("package:order_desk").model, options)
    return train_tokenizer(REPETITIVE, (" aab", "22", "-"), 310, options)


def export(tokenizer, folder, arch=ARCH):
    """The library's tokenizer of a policy's folder."""
    network, params = network_of(numpy_weights(arch), arch)
    save_pretrained(network.bind(params), folder, tokenizer)
    return AutoTokenizer.from_pretrained(folder)


def random_texts(tokenizer):
    """Others than those that the export itself compares."""
    rng = np.random.default_rng(1)
    pieces = [piece.decode() for piece in tokenizer.token_bytes() if piece.isascii()]
    texts = comparison_texts(pieces, seed=1) + [chat_cases.random_text(rng) for _ in range(200)]
    return [*texts, *("".join(rng.choice(list("ab a=-2"), 60)) for _ in range(200))]


@pytest.mark.parametrize("name", ["order_desk", "repetitive"])
def test_a_sentencepiece_policy_has_the_same_ids_and_texts_there(tmp_path, name):
    actual = made(name)
    reference = export(actual, tmp_path)
    for text in [*random_texts(actual), *FORGED]:
        ids = actual.action(text)[:-1]
        found = reference(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert found == ids, text
        assert reference.decode(ids) == actual.text(ids) == text.replace("▁", " ")
        if not any(f"<|{name}|>" in text for name in (*ROLES, "end")):
            assert reference(text).input_ids == ids, text  # nothing is added, nothing to be split
    assert (reference.eos_token_id,) == actual.end_ids
    assert len(reference) == actual.vocab_size
    header = actual.observation(())
    assert reference("<|assistant|>").input_ids == header  # as in every tokenizer of that library
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, SentencePieceTokenizer) and loaded.model == actual.model


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("tools", ["none", "signatures", "json", "hermes", "auto"])
def test_its_chat_template_gives_our_ids_whatever_the_messages_hold(tmp_path, system, tools):
    actual = made("repetitive", json.dumps({"system": system, "tools": tools}))
    actual.save(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    nulls = {"properties": {"x": {}, "y": {}}, "required": None}
    shown = (*TOOLS, {"name": "a"}, {"name": "b", "parameters": None})
    shown = (*shown, {"name": "c", "parameters": nulls})
    wrapped = [{"type": "function", "function": tool} for tool in shown]
    for given, listed in ((None, ()), (list(shown), shown), (wrapped, shown)):
        found = reference.apply_chat_template(
            list(MESSAGES), tools=given, add_generation_prompt=True, return_dict=False
        )
        assert found == list(actual.begin(MESSAGES, listed).tokens)
    whole = reference.apply_chat_template(list(MESSAGES), return_dict=False)
    assert whole == list(actual.begin(MESSAGES, ()).tokens)[:-1]
    with pytest.raises(Exception, match="allowed: texts of system, user, assistant, tool"):
        reference.apply_chat_template([{"role": "critic", "content": "?"}])


def unigram():
    """A model that tokenizer.json cannot say with certainty."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(REPETITIVE),
        model_writer=model,
        model_type="unigram",
        vocab_size=280,
        byte_fallback=True,
        hard_vocab_limit=False,
        control_symbols=[f"<|{name}|>" for name in (*ROLES, "end")],
        minloglevel=2,
    )
    return SentencePieceTokenizer(model.getvalue(), schema.Chat())


@pytest.mark.parametrize(
    "make, arch, reason",
    [
        (unigram, ARCH, "without a byte-pair encoding, without texts as they are"),
        (
            lambda: made("repetitive"),
            dataclasses.replace(ARCH, qk_norm=False, qkv_bias=True),  # qwen2
            "Qwen2Tokenizer of transformers, which is what it takes for .* gives other tokens",
        ),
    ],
)
def test_what_would_have_other_ids_there_is_not_written_and_that_is_said(
    tmp_path, caplog, make, arch, reason
):
    actual = make()
    reference = export(actual, tmp_path, arch)
    assert len(reference) <= 1 and not reference.encode("ab")  # made of nothing: no wrong ids
    assert not {"tokenizer.json", "tokenizer.model"} & {file.name for file in tmp_path.iterdir()}
    (record,) = caplog.records
    assert record.getMessage().endswith("sentencepiece.model, which this package reads.")
    assert re.search(reason, record.getMessage())
    loaded = load_tokenizer(tmp_path)
    assert loaded.begin(MESSAGES, ()).tokens == actual.begin(MESSAGES, ()).tokens


def test_a_policy_that_transformers_has_saved_again_is_read(tmp_path):
    actual, again = made("order_desk"), tmp_path / "again"
    export(actual, tmp_path).save_pretrained(again)
    found = load_tokenizer(again).begin(MESSAGES, ()).tokens
    assert found == actual.begin(MESSAGES, ()).tokens


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_folder_of_the_library_keeps_ids_and_template(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    template = "{% if loud %}{{ strftime_now('%d %b %Y') }}{% endif %}" + CHATML
    library = chat_cases.small_library()
    library.chat_template = template
    chat = schema.Chat(template_kwargs={"loud": True})
    actual = HuggingFaceTokenizer(library, chat, generation={}, where="here")
    actual.save(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": " two  cups "}]
    found = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert found == list(actual.begin(messages, ()).tokens)
    assert reference.decode(found).startswith("26 Jul 2024<|im_start|>")
    quiet = reference.apply_chat_template(messages, loud=False, tokenize=False)
    assert quiet.startswith("<|im_start|>")
    for text in comparison_texts(["order", " the", "list", "\n"], seed=2):
        assert reference(text).input_ids == actual.action(text)[:-1]
    again = tmp_path / "again"
    load_tokenizer(tmp_path).save(again)
    assert (again / "chat_template.jinja").read_text() == reference.chat_template


@pytest.mark.exhaustive
def test_a_folder_that_transformers_would_read_otherwise_has_no_tokenizer(tmp_path, caplog):
    # Whatever the folder says, this family is read by a class that normalises.
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    library = chat_cases.small_library()
    actual = HuggingFaceTokenizer(library, schema.Chat(), generation={}, where="here")
    actual.save(tmp_path)
    (record,) = caplog.records
    assert "Qwen2Tokenizer" in record.getMessage()
    assert record.getMessage().endswith("no tokenizer is written.")
    assert load_tokenizer(tmp_path) is None


# Normaliser and decoder of the tokenizer.json of Llama 2, TinyLlama and Vicuna, and of Yi, which
# puts no space before a text.
PREFIXED, BARE = (
    [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")],
    [normalizers.Replace(" ", "▁")],
)
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)


def llama_folder(folder, steps):
    """A folder as Llama 2 has it, without its tokenizer.model; returns that model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(REPETITIVE),
        model_writer=model,
        model_type="bpe",
        vocab_size=310,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=steps is PREFIXED,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    names = [pieces.id_to_piece(index) for index in range(len(pieces))]
    ranked = [n for i, n in enumerate(names) if not (pieces.is_control(i) or pieces.is_byte(i))]
    merges = [
        (name[:at], name[at:])
        for name in sorted(ranked, key=lambda name: -pieces.get_score(names.index(name)))
        for at in range(1, len(name))
        if {name[:at], name[at:]} <= {*ranked}
    ]
    tokenizer = Tokenizer(
        BPE({name: index for index, name in enumerate(names)}, merges, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(steps)
    strip = [decoders.Strip(" ", 1, 0)] if steps is PREFIXED else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens([AddedToken(n, normalized=False) for n in names[:3]])
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "LlamaTokenizer", "chat_template": PLAIN_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return pieces


@pytest.mark.parametrize("steps", [PREFIXED, BARE], ids=["prefixed", "bare"])
def test_a_llama_folder_has_sentencepieces_ids_and_so_has_its_export(tmp_path, caplog, steps):
    """As version 4 of `transformers` reads it; version 5 has a pre-tokenizer of its own."""
    pieces = llama_folder(tmp_path, steps)
    actual, again = load_tokenizer(tmp_path), tmp_path / "again"
    assert "LlamaTokenizer of transformers" in caplog.text
    for text in ["ab", " two  spaces", "-=2 ab\nab", "漢字"]:
        # The file's normaliser prepares the text behind a control token anew.
        wanted = [*pieces.encode(text), 2, *pieces.encode("a: ")]
        assert actual.begin([{"role": "user", "content": text}], ()).tokens == wanted
    assert actual.text([*pieces.encode("ab 2"), 2]) == "ab 2"
    assert (actual.end_ids, actual.vocab_size) == ((2,), 310)  # the class names </s>
    again.mkdir()
    (again / "config.json").write_text('{"model_type": "llama"}')
    actual.save(again)
    exported = AutoTokenizer.from_pretrained(again)
    assert exported.encode("-=2 ab", add_special_tokens=False) == pieces.encode("-=2 ab")
    stored = [json.loads((f / "tokenizer.json").read_text()) for f in (tmp_path, again)]
    assert stored[0]["normalizer"] == stored[1]["normalizer"]
    values = json.loads((again / "tokenizer_config.json").read_text())
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast"  # which version 4 has, too


@pytest.mark.exhaustive
def test_a_file_that_another_class_would_split_otherwise_is_what_tokenises(tmp_path, caplog):
    """The digits of SmolLM2's pre-tokenizer; qwen2, whose class normalises, cannot be exported."""
    library, folder = chat_cases.small_library(), tmp_path / "again"
    folder.mkdir()
    digits = pre_tokenizers.Digits(individual_digits=True)
    library.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, library.backend_tokenizer.pre_tokenizer]
    )
    library.save_pretrained(tmp_path)
    for family, reading in (("llama", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer")):
        values = json.loads((tmp_path / "tokenizer_config.json").read_text())
        values["tokenizer_class"] = reading
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
        for place in (tmp_path, folder):
            (place / "config.json").write_text(json.dumps({"model_type": family}))
        caplog.clear()
        actual = load_tokenizer(tmp_path)
        (record,) = caplog.records
        assert f"{reading} of transformers" in record.getMessage()
        file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        for text in (" ４５ ½ ²", "e\u0301", "the order"):
            assert actual.action(text)[:-1] == file.encode(text).ids
        actual.save(folder)
        assert (load_tokenizer(folder) is None) is (family == "qwen2")
    assert caplog.records[-1].getMessage().endswith("no tokenizer is written.")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_2"])
def test_the_models_own_class_reads_the_same_and_is_kept(caplog, name):
    library = load(chat_cases.MODELS / name)
    assert type(library) is type(chat_cases.library(name)) and not caplog.records


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options, is_kept",
    [
        ({"continuing_subword_prefix": None, "end_of_word_suffix": None}, True),
        ({"continuing_subword_prefix": "", "end_of_word_suffix": "", "dropout": 0.0}, True),
        ({"dropout": 0.5}, False),
    ],
)
def test_options_of_the_model_that_have_no_effect_are_no_difference(
    tmp_path, caplog, options, is_kept
):
    """GPT2Tokenizer has empty texts where publishers may have null."""
    chat_cases.small_library().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    file = tmp_path / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"] |= options
    file.write_text(json.dumps(values))
    load(tmp_path)
    assert (not caplog.records) is is_kept


def test_a_gguf_files_vocabulary_keeps_ids_and_template(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    actual = chat_cases.make("smollm2")
    actual.save(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    rng = np.random.default_rng(2)
    texts = [chat_cases.random_text(rng).replace("<|im_end|>", "") for _ in range(300)]
    for text in ["", "  ", "\x00\r\n", *texts]:
        ids = reference(text).input_ids
        assert ids == actual.action(text)[:-1]
        assert reference.decode(ids) == actual.text(ids)
    messages = [{"role": "user", "content": "hi"}]
    found = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert found == list(actual.begin(messages, ()).tokens)
