"""Which tokenizer a folder has, and what a transcript records of a conversation."""

import io
import json

import chat_cases
import numpy as np
import pytest
import sentencepiece
from transformers import AutoTokenizer

from seeupo_jax.configuration import schema
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer
from seeupo_jax.policy.files.sentencepiece_tokenizer import SentencePieceTokenizer
from seeupo_jax.policy.files.tokenizer import Transcript, load_tokenizer, train_tokenizer
from seeupo_jax.types import CONTEXT, UNKNOWN_VERSION


def recorded(transcript):
    fields = ("tokens_L", "turn_L", "logp_L")
    return [tuple(getattr(s, name).tolist() for name in fields) for s in transcript.segments()]


def test_a_context_that_continues_stays_in_its_segment():
    transcript = Transcript()
    transcript.read([5, 6])
    transcript.act([7, 8], 0, [-0.5, -1.0])
    assert transcript.shared([5, 6, 7, 8, 9]) == 4
    transcript.read([5, 6, 7, 8, 9])
    transcript.act([4], 1, [-2.0])
    turns = [CONTEXT, CONTEXT, 0, 0, CONTEXT, 1]
    assert recorded(transcript) == [([5, 6, 7, 8, 9, 4], turns, [0, 0, -0.5, -1, 0, -2])]


@pytest.mark.parametrize(
    "context, shared",
    [
        ([5, 6, 7, 1, 9], 3),
        ([1, 6, 7, 8, 9], 0),
        ([5, 6, 7, 8], 3),  # all that was said, and nothing new to read: the last is read again
        ([5, 6], 1),
        ([5], 0),
        ([], 0),
    ],
)
def test_any_other_context_starts_a_segment_in_which_earlier_turns_are_context(context, shared):
    transcript = Transcript()
    transcript.read([5, 6])
    transcript.act([7, 8], 0, [-0.5, -1.0])
    assert transcript.shared(context) == shared
    transcript.read(context)
    transcript.act([4], 1, [-2.0])
    first, second = recorded(transcript)
    assert first == ([5, 6, 7, 8], [CONTEXT, CONTEXT, 0, 0], [0, 0, -0.5, -1])
    count = len(context)
    assert second == ([*context, 4], [CONTEXT] * count + [1], [0.0] * count + [-2.0])


def test_experts_are_those_of_the_first_action_behind_a_token():
    transcript = Transcript()
    transcript.read([5, 6])
    transcript.act([7, 8], 0, [-0.5, -1.0], np.array([[1], [2], [3]], np.uint8))
    transcript.read([5, 6, 7, 8, 9])
    copied = transcript.copy()
    transcript.act([4], 1, [-2.0], np.array([[0], [0], [0], [4], [5]], np.uint8))
    transcript.read([5, 1])
    transcript.act([2, 3], 2, [-2.0, -1.0], np.array([[6], [7], [8]], np.uint8))
    first, second = transcript.segments()
    assert first.expert_LG.tolist() == [[1], [2], [3], [4], [5], [255]]
    assert second.expert_LG.tolist() == [[6], [7], [8], [255]]
    (branch,) = copied.segments()
    assert branch.expert_LG.tolist() == [[1], [2], [3], [255], [255]]
    assert Transcript().segments()[0].expert_LG is None


def test_versions_are_of_sampled_tokens_alone():
    transcript, unknown = Transcript(), UNKNOWN_VERSION
    transcript.read([5, 6])
    transcript.act([7, 8], 0, [-0.5, -1.0], version_L=[3, 4])
    transcript.read([5, 6, 7, 8, 9])
    copied = transcript.copy()
    transcript.act([4], 1, [-2.0], version_L=[4])
    transcript.read([5, 1])
    transcript.act([2, 3], 2, [-2.0, -1.0])
    first, second = transcript.segments()
    assert first.version_L.tolist() == [unknown, unknown, 3, 4, unknown, 4]
    assert second.version_L is None  # as its trajectory's `policy_version` says
    (branch,) = copied.segments()
    assert branch.version_L.tolist() == [unknown, unknown, 3, 4, unknown]


def test_an_empty_transcript_is_one_empty_segment():
    (segment,) = Transcript().segments()
    assert segment.tokens_L.size == segment.turn_L.size == segment.logp_L.size == 0
    dtypes = (segment.tokens_L.dtype, segment.turn_L.dtype, segment.logp_L.dtype)
    assert dtypes == (np.int32, np.int32, np.float32)


LLAMA_2_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def test_a_sentencepiece_model_of_a_published_folder_is_read(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(
            ["two cups of tea, please", "a cup for two of [INST] us [/INST]"] * 9
        ),
        model_writer=model,
        model_type="bpe",
        vocab_size=310,
        byte_fallback=True,
        minloglevel=2,
        **{f"{name}_id": number for number, name in enumerate(("unk", "bos", "eos"))},
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    values = {"tokenizer_class": "LlamaTokenizer", "chat_template": LLAMA_2_TEMPLATE, **names}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    library = AutoTokenizer.from_pretrained(tmp_path)
    assert library.encode("tea for two", add_special_tokens=False) == pieces.encode("tea for two")
    message = {"role": "user", "content": "tea for two"}
    wanted = library.apply_chat_template([message], return_dict=False)
    assert list(tokenizer.begin([message], ()).tokens) == wanted
    assert wanted[0] == 1 and pieces.decode(wanted) == "[INST] tea for two [/INST]"
    assert (tokenizer.end_ids, tokenizer.vocab_size) == ((2,), 310)
    action = tokenizer.action("a cup")
    assert (action[-1], tokenizer.text(action)) == (2, "a cup")
    again = tmp_path / "again"
    again.mkdir()
    tokenizer.save(again)  # though <unk> and </s> are in the texts that are compared
    saved = AutoTokenizer.from_pretrained(again)
    assert saved.apply_chat_template([message], return_dict=False) == wanted


def test_a_folders_files_say_which_tokenizer_it_has(tmp_path):
    made, real = tmp_path / "made", tmp_path / "real"
    made.mkdir()
    train_tokenizer(["two cups of tea"], (), 275, schema.Chat(tools="json")).save(made)
    chat_cases.small_library().save_pretrained(real)
    (real / "tokenizer.model").write_bytes(b"of another library")
    assert isinstance(load_tokenizer(made), SentencePieceTokenizer)
    assert isinstance(load_tokenizer(real), HuggingFaceTokenizer)
    assert load_tokenizer(tmp_path) is None
