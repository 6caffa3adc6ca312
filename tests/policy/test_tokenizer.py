"""Which tokenizer a folder has, and what a transcript records of a conversation."""

import chat_cases
import numpy as np
import pytest

from seeupo_jax import config
from seeupo_jax.policy.chat_template import HuggingFaceTokenizer
from seeupo_jax.policy.sentence_pieces import SentencePieceTokenizer
from seeupo_jax.policy.tokenizer import Transcript, load_tokenizer, train_tokenizer
from seeupo_jax.types import CONTEXT


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


def test_an_empty_transcript_is_one_empty_segment():
    (segment,) = Transcript().segments()
    assert segment.tokens_L.size == segment.turn_L.size == segment.logp_L.size == 0
    dtypes = (segment.tokens_L.dtype, segment.turn_L.dtype, segment.logp_L.dtype)
    assert dtypes == (np.int32, np.int32, np.float32)


def test_a_folders_files_say_which_tokenizer_it_has(tmp_path):
    made, real = tmp_path / "made", tmp_path / "real"
    made.mkdir()
    train_tokenizer(["two cups of tea"], (), 275, config.Chat(tools="json")).save(made)
    chat_cases.small_library().save_pretrained(real)
    (real / "tokenizer.model").write_bytes(b"of another library")
    assert isinstance(load_tokenizer(made), SentencePieceTokenizer)
    assert isinstance(load_tokenizer(real), HuggingFaceTokenizer)
    with pytest.raises(ValueError, match=f"tokenizer: {tmp_path} has none; allowed: tokenizer.jso"):
        load_tokenizer(tmp_path)
