"""What a token's name in a vocabulary stands for: bytes of a text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from tokenizers.decoders import Decoder

CONTROL = b"\xff"  # stands before a control token's name; in no UTF-8 text

_SPACE = "▁"  # how SentencePiece writes a space


def name_decoder(decoder: Decoder | None, where: str) -> Callable[[str], bytes]:
    """How the names of a vocabulary of the `tokenizers` library become bytes.

    Args:
      decoder: the tokenizer's.
      where: what an error calls the model.

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
    """The bytes of a name that has a character a byte; any other name is text as it stands."""
    # An added token's name may have other characters.
    return bytes(map(_BYTES.get, name)) if _BYTES.keys() >= set(name) else name.encode()


def byte_fallback(name: str) -> bytes:
    """The byte that a name like `<0x41>` states; any other name is text, with "▁" for a space."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", name)
    return bytes.fromhex(byte[1]) if byte else name.replace(_SPACE, " ").encode()


def _printed_bytes() -> dict[str, int]:
    """Characters of byte-level vocabularies: printable Latin-1 is itself, the rest from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _printed_bytes()

# A step of the library's decoders -> what it makes of a name.
DECODERS: Mapping[str, Callable[[str], bytes]] = {
    "ByteLevel": byte_level,
    "ByteFallback": byte_fallback,
}
