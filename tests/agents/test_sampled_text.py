"""A client's text is what the tokens say: whole characters, up to the first stop string."""

import pytest
from places import MODELS
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from seeupo_jax.agents.sampled_text import GrowingText, SampledText, token_bytes
from seeupo_jax.policy.files.tokenizer import load_tokenizer
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.rollout.engine.protocol import Action


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer("package:order_desk")


def follow(tokenizer, tokens, *, stop=(), step=1):
    """Tells of tokens so many at a time, as an engine does; the pieces, and the completion."""
    pieces = []
    sampled = SampledText(tokenizer, stop, pieces.append)
    kept = None
    for end in [*range(step, len(tokens), step), len(tokens)]:
        kept = sampled.listen(tokens[:end])
        if kept is not None:
            break
    tokens = tokens[: end if kept is None else kept]
    action = Action(0, tokens, [-0.5] * len(tokens))
    return pieces, sampled.complete(action, prompt_tokens=3)


@pytest.mark.parametrize("step", [1, 3, 100])
def test_pieces_make_the_text_and_no_character_is_cut(tokenizer, step):
    text = "naïve → 多言語 🙂 done"  # most of it is bytes to this vocabulary
    tokens = tokenizer.action(text)
    pieces, done = follow(tokenizer, tokens, step=step)
    assert "".join(pieces) == done.text == done.content == text
    assert "\ufffd" not in "".join(pieces)
    assert (done.finish, len(done.pieces), done.logp) == (
        "stop",
        len(tokens),
        (-0.5,) * len(tokens),
    )
    assert done.prompt_tokens == 3
    assert b"".join(done.pieces) == text.encode() + b"<|end|>"


@pytest.mark.parametrize("step", [1, 4, 100])
def test_a_stop_string_ends_the_action_at_the_token_that_completes_it(tokenizer, step):
    tokens = tokenizer.action("one STOP two STOPPED three")
    pieces, done = follow(tokenizer, tokens, stop=("two STOPPED", "STOP"), step=step)
    assert "".join(pieces) == done.text == "one "
    assert done.finish == "stop"
    kept = len(done.pieces)
    assert "STOP" in tokenizer.text(tokens[:kept])
    assert "STOP" not in tokenizer.text(tokens[: kept - 1])


def test_the_stop_string_that_ended_it_is_named_whatever_tokens_it_is_of(tokenizer):
    tokens = tokenizer.action("one 語 two")  # the character is three bytes, a token each
    assert len(tokenizer.action("語")) > 2
    _, done = follow(tokenizer, tokens, stop=("two", "語"))
    assert (done.text, done.stopped_at) == ("one ", "語")
    _, done = follow(tokenizer, tokenizer.action("ab"), stop=("b", "a"), step=100)
    assert (done.text, done.stopped_at) == ("", "a")  # where both stand, it was cut
    (token, _), mug = tokenizer.action("mug"), "mug"
    assert tokenizer.text([token]).strip() == mug  # one token has them all
    _, done = follow(tokenizer, [token], stop=("ug", "mu", "g"))
    assert (done.text.strip(), done.stopped_at) == ("", "mu")
    assert follow(tokenizer, tokens, stop=("three",))[1].stopped_at is None


def test_what_may_become_a_stop_string_waits_and_is_given_when_it_does_not(tokenizer):
    first, rest = tokenizer.action("a EN")[:-1], tokenizer.action("TRY")
    pieces = []
    sampled = SampledText(tokenizer, ("END",), pieces.append)
    assert sampled.listen(first) is None and "".join(pieces) == "a "
    done = sampled.complete(Action(0, [*first, *rest], [0.0] * 99), prompt_tokens=1)
    assert "".join(pieces) == done.text == "a ENTRY"


def test_an_action_without_an_end_is_cut_by_its_length(tokenizer):
    _, done = follow(tokenizer, tokenizer.action("cut")[:-1])
    assert done.finish == "length"


def test_only_streams_and_stop_strings_need_to_listen(tokenizer):
    assert not SampledText(tokenizer).listens
    assert SampledText(tokenizer, ("x",)).listens and SampledText(tokenizer, (), print).listens


def test_a_control_tokens_text_is_its_name_and_a_padded_heads_is_empty(tokenizer):
    assert token_bytes(tokenizer, tokenizer.end_ids[0]) == b"<|end|>"
    assert token_bytes(tokenizer, tokenizer.vocab_size + 5) == b""


def llama2(text):
    """Tokens as Llama 2's and their decoder: rare characters are bytes, no first space."""
    pieces = {"<s>": 0, "▁": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    pieces |= {letter: 300 + number for number, letter in enumerate("acdeghinoprstw")}
    library = Tokenizer(BPE(pieces, [], byte_fallback=True))
    library.add_special_tokens(["<s>"])
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    ids = library.encode("▁" + text.replace(" ", "▁")).ids
    return [0, *ids, 0, *ids], library.decode


def order_desk(text):
    tokenizer = read_tokenizer("package:order_desk")
    return tokenizer.action(text), tokenizer.text


def qwen3(text):
    tokenizer = load_tokenizer(MODELS / "qwen3")
    return [*tokenizer.action(text)[:-1], 151_657, *tokenizer.action(text)], tokenizer.text


@pytest.mark.parametrize(
    "case", [llama2, order_desk, pytest.param(qwen3, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("step", [1, 3])
def test_text_that_grows_is_that_of_all_tokens_from_a_few_at_a_time(case, step):
    tokens, decode = case("  it is  a 多言語 🙂🙂 cat\ufffd  on the  step, " * 9)
    sizes = []

    def counted(some):
        sizes.append(len(some))
        return decode(some)

    growing = GrowingText(counted)
    for end in range(step, len(tokens) + 1, step):
        wanted, text = decode(tokens[:end]), growing.text(tokens[:end])
        growing.fix(tokens[:end], text)
        # Llama 2's decoder takes back whole characters where bytes of the next one follow.
        assert text.startswith(wanted.rstrip("\ufffd"))
        assert text == wanted or wanted.endswith("\ufffd")
    assert max(sizes) < 40 < len(tokens) / 5


class _Llama2:
    """A tokenizer whose decoder takes characters back where bytes that are no text follow."""

    end_ids = ()

    def text(self, tokens):
        return llama2("")[1](list(tokens))

    def token_bytes(self):
        raise ValueError("unknown")


@pytest.mark.parametrize(("stop", "end"), [((), "acd"), (("d",), "ac")])
def test_bytes_that_are_no_text_repeat_nothing_in_a_stream(stop, end):
    tokens = [2 + byte for byte in (*"多言".encode(), 0xFF)] + [300, 301, 302]  # and a, c, d
    pieces, done = follow(_Llama2(), tokens, stop=stop)
    streamed = "".join(pieces)
    assert streamed.startswith("多言") and streamed[2:].strip("\ufffd") == end
    assert done.text.strip("\ufffd") == end
