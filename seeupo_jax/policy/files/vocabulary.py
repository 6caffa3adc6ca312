"""The bytes of text that a token's name in a vocabulary stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from tokenizers.decoders import Decoder
from transformers.convert_slow_tokenizer import bytes_to_unicode

CONTROL = b"\xff"  # before a control token's name; in no UTF-8 text

_SPACE = "▁"  # how SentencePiece writes a space


def name_decoder(decoder: Decoder | None, where: str) -> Callable[[str], bytes]:
    """Maps names in a vocabulary of the `tokenizers` library to bytes.

    Args:
      decoder: the tokenizer's.
      where: the model, in errors.

    Raises:
      ValueError: a decoder that writes neither bytes as characters nor `<0x41>` for a byte.
    """
    steps = {"type": "nothing"} if decoder is None else json.loads(decoder.__getstate__())
    kinds = [step["type"] for step in steps.get("decoders", [steps])]
    for kind, decode in DECODERS.items():
        if kind in kinds:
            return decode
    raise ValueError(
        f"tokenizer: {where} decodes by {', '.join(kinds)}, which hides its tokens' bytes; allowed:"
        f" {', '.join(DECODERS)}."
    )


def byte_level(name: str) -> bytes:
    """The bytes of a name with one character per byte; any other name is text."""
    # An added token's name may have other characters.
    return bytes(map(_BYTES.get, name)) if _BYTES.keys() >= set(name) else name.encode()


def byte_fallback(name: str) -> bytes:
    """The byte that a name like `<0x41>` states; any other name is text, with "▁" for a space."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", name)
    return bytes.fromhex(byte[1]) if byte else name.replace(_SPACE, " ").encode()


_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}

# A step of the library's decoders -> the bytes of a name.
DECODERS: Mapping[str, Callable[[str], bytes]] = {
    "ByteLevel": byte_level,
    "ByteFallback": byte_fallback,
}
