"""A SentencePiece byte-pair encoding as files from which `transformers` reads the same ids.

Both libraries merge the pair whose piece has the best score, the leftmost of equal ones. But one
ranks pieces, the other pairs: the written files are compared on many texts before they are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import sentencepiece
import sentencepiece.sentencepiece_model_pb2 as schema
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from seeupo_jax.policy.files.chat.renderer import MARK
from seeupo_jax.policy.files.library_tokenizer import CONFIG_FILE, TOKENIZER_FILE, check_same_ids
from seeupo_jax.policy.files.messages import CHAT_FILE, ROLES, TOOL_LISTINGS

MADE_FROM = "sentencepiece_model"  # key of tokenizer_config.json: the file it was made from
_SPACE = "▁"
_PIECE = schema.ModelProto.SentencePiece


def save(folder: Path, model: bytes, file: str, template: str, end: str) -> None:
    """Writes tokenizer.json and tokenizer_config.json, or neither.

    Args:
      folder: with the config.json of the model, if any. file: its file with the model.
      template: a chat template. end: the name of the token that ends a message.

    Raises:
      ValueError: a kind of model without an equivalent tokenizer.json.
    """
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
        MADE_FROM: file,
    }
    convert(model).save(str(folder / TOKENIZER_FILE))
    (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    try:
        _compare(folder, model)
    except ValueError:
        (folder / TOKENIZER_FILE).unlink()
        (folder / CONFIG_FILE).unlink()
        raise


def sentencepiece_file(folder: Path) -> str | None:
    """The file from which `save` made a folder's tokenizer.json; None: made elsewhere.

    Neither is there where `transformers` saved it again, which keeps its config's fields.
    """
    try:
        file = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")).get(MADE_FROM)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # the reader of the file reports what is wrong with it
    has_source = file is not None and any(
        (folder / name).exists() for name in (str(file), CHAT_FILE)
    )
    return file if has_source else None


def chat_template(controls: Mapping[str, str], end: str, *, system: bool, tools: str) -> str:
    """Jinja that renders a conversation as `SentencePieceTokenizer` does.

    Args:
      controls: the header of each role. system, tools: as in `config.Chat`.
    """
    escaped = "".join(
        f" | replace({_quote(name)}, {_quote(protect(name))})" for name in (*controls.values(), end)
    )
    headers = ", ".join(f"{_quote(role)}: {_quote(name)}" for role, name in controls.items())
    condition = "" if system else ' if message.role != "system"'
    return (
        f"{{%- set headers = {{{headers}}} -%}}"
        "{%- macro say(role, text) -%}"
        "{%- if role not in headers or text is not string -%}"
        f'{{{{ raise_exception("allowed: texts of {", ".join(ROLES)}") }}}}'
        "{%- endif -%}"
        f"{{{{ headers[role] }}}}{{{{ text{escaped} }}}}{{{{ {_quote(end)} }}}}"
        "{%- endmacro -%}"
        f"{_listing(tools)}"
        f"{{%- for message in messages{condition} -%}}"
        "{{ say(message.role, message.content) }}"
        "{%- endfor -%}"
        '{%- if add_generation_prompt -%}{{ headers["assistant"] }}{%- endif -%}'
    )


def _listing(kind: str) -> str:
    """Jinja that lists the tools in a system message, in a form of `TOOL_LISTINGS`."""
    signature = (
        "{%- set p = f.parameters or {} -%}{%- set required = p.required or [] -%}"
        '{{ f.name }}({%- for n in p.properties or [] -%}{{ "" if loop.first else ", " }}'
        '{{ n if n in required else n + "=" }}{%- endfor -%})'
    )
    shown = {
        "none": "",
        "signatures": signature,
        "json": "{{ f | tojson(ensure_ascii=true) }}",
    }.get(kind, "{{ f | tojson }}")
    if not shown:
        return ""
    probe = {"name": "?", "parameters": {"properties": {}, "required": []}}
    line = "?()" if kind == "signatures" else json.dumps(probe)
    before, after = TOOL_LISTINGS[kind]([probe]).split(line)
    return (
        f"{{%- if tools -%}}{{%- set listing -%}}{{{{ {_quote(before)} }}}}"
        "{%- for tool in tools -%}"
        "{%- set f = tool.function if tool.function is defined else tool -%}"
        f'{{{{ "" if loop.first else "\\n" }}}}{shown}'
        f"{{%- endfor -%}}{{{{ {_quote(after)} }}}}{{%- endset -%}}"
        '{{ say("system", listing) }}{%- endif -%}'
    )


def _quote(text: str) -> str:
    """A Jinja string."""
    return json.dumps(text, ensure_ascii=False)  # Jinja knows no surrogates


def convert(model: bytes) -> Tokenizer:
    """The tokenizer with the ids of a SentencePiece model.

    A control token's name in a text is that token, unless special tokens are split; a `protect`ed
    name is text.

    Raises:
      ValueError: a model of another kind.
    """
    proto = schema.ModelProto.FromString(model)
    _check_kind(proto)
    tokenizer = Tokenizer(
        BPE(
            {piece.piece: index for index, piece in enumerate(proto.pieces)},
            _merges({p.piece: p.score for p in proto.pieces if p.type == _PIECE.NORMAL}),
            byte_fallback=True,
        )
    )
    controls = _of_type(proto, _PIECE.CONTROL)
    tokenizer.normalizer = normalizers.Sequence(
        [
            *(normalizers.Replace(protect(name), name) for name in controls),
            normalizers.Replace(" ", _SPACE),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    words = _of_type(proto, _PIECE.USER_DEFINED)
    tokenizer.add_tokens([AddedToken(word, normalized=True) for word in words])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in controls])
    return tokenizer


def protect(name: str) -> str:
    """A control token's name, written so that it is tokenised as text."""
    return name[0] + MARK + name[1:]


def _compare(folder: Path, model: bytes) -> None:
    """Checks that `transformers` reads a model's ids and texts from a folder.

    It takes a second, so a process does it once for what it writes several times.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jinja"))
    contents = [(path.name.encode(), path.read_bytes()) for path in files]
    digest = hashlib.sha256(repr((model, contents)).encode()).digest()
    if digest in _COMPARED:
        return
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [library.id_to_piece(index).replace(_SPACE, " ") for index in range(len(library))]
    check_same_ids(folder, pieces, library.encode, library.decode, split=True)
    _COMPARED.add(digest)


_COMPARED: set[bytes] = set()  # digests of models and files that were found to be the same


def _check_kind(proto: schema.ModelProto) -> None:
    """Checks that a model can be converted."""
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    wanted = {
        "a byte-pair encoding": trainer.model_type == trainer.BPE,
        "a fallback to bytes": len(_of_type(proto, _PIECE.BYTE)) == 256,
        "texts as they are": not (
            normalizer.precompiled_charsmap
            or normalizer.add_dummy_prefix
            or normalizer.remove_extra_whitespaces
            or not normalizer.escape_whitespaces
            or trainer.treat_whitespace_as_suffix
            or proto.denormalizer_spec.precompiled_charsmap
        ),
        "no unused pieces": not _of_type(proto, _PIECE.UNUSED),
    }
    missing = [what for what, there in wanted.items() if not there]
    normal = [p for p in proto.pieces if p.type == _PIECE.NORMAL]
    letters, long = {p.piece for p in normal}, [p for p in normal if len(p.piece) > 1]
    if any(letter not in letters for piece in long for letter in piece.piece):
        missing.append("all letters of pieces as pieces")
    if len({piece.score for piece in long}) < len(long):
        missing.append("a score of its own for each piece")
    if missing:
        raise ValueError(
            f"tokenizer: got a SentencePiece model without {', without '.join(missing)}, which"
            " tokenizer.json cannot express"
        )


def _of_type(proto: schema.ModelProto, kind: int) -> list[str]:
    return [piece.piece for piece in proto.pieces if piece.type == kind]


def _merges(score: dict[str, float]) -> list[tuple[str, str]]:
    """Pairs of pieces that make up a piece, the best piece first."""
    merges = []
    for piece in sorted((p for p in score if len(p) > 1), key=lambda p: -score[p]):
        splits = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        merges += [pair for pair in splits if {*pair} <= score.keys()]
    return merges
