"""Repetition and leaked control tokens are found, ordinary text is not."""

import random
import string

import pytest

from seeupo_jax.envs.episode_rewards import (
    MAX_CHARS,
    MAX_PIECE,
    MIN_REPEATED,
    MIN_REPEATS,
    is_degenerate,
)

LOOP = "and again " * 60
CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<\uff5cbegin\uff5c>"]
CONTROL += ["<tool_response>", "</tool_response>", "<end_of_turn>", "<start_of_turn>", "[/INST]"]


@pytest.mark.parametrize("name", CONTROL)
def test_a_control_tokens_name_is_a_leak_wherever_it_stands(name):
    assert is_degenerate(name) and is_degenerate(f"Done.{name}user\n")
    assert is_degenerate(f"[echo(content='{name}')]")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Done.",
        "<think>\nI look.\n</think>\n<tool_call></tool_call>",
        "a < b | c > d, a<|b, x|>y, <|a b|>",
        "[INSTALL] <end of turn> <tools></tools>",
        "".join(random.Random(0).choices(string.ascii_lowercase + " ", k=5000)),
        str([*range(1000)]),
        "\n".join(f"{i}. The folder {i} holds {i * 7 % 13} files." for i in range(100)),
    ],
)
def test_ordinary_text_is_no_degenerate_one(text):
    assert not is_degenerate(text)


@pytest.mark.parametrize("length", [1, 2, 7, 49, 50, 51, 200, MAX_PIECE])
def test_repetition_begins_at_the_stated_number_of_repeats_and_characters(length):
    rng = random.Random(length)
    piece = "".join(rng.sample([chr(0x4E00 + i) for i in range(2 * length)], length))
    enough = max(MIN_REPEATS * length, MIN_REPEATED)
    repeated = (piece * (enough // length + 1))[:enough]
    for before, after in (("", ""), ("before ", " after"), ("x" * 300, "\ud800" * 300)):
        assert is_degenerate(before + repeated + after)
        assert not is_degenerate(before + repeated[:-1] + after)


def test_a_longer_piece_or_an_earlier_one_is_not_looked_for():
    letters = [chr(0x4E00 + i) for i in range(MAX_PIECE + 1)]
    assert not is_degenerate("".join(letters) * 20)
    noise = "".join(random.Random(0).choices(letters, k=MAX_CHARS))
    assert not is_degenerate("x" * 1000 + noise) and is_degenerate(noise + "x" * 1000)
