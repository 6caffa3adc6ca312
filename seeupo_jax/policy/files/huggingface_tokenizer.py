"""Hugging Face tokenizers with their chat templates: made, read and saved."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.user_code import describe, shortened
from seeupo_jax.envs.base import Message, Tool
from seeupo_jax.policy.files import gguf_vocabulary, library_tokenizer, vocabulary
from seeupo_jax.policy.files.chat.call_format import find_format
from seeupo_jax.policy.files.chat.renderer import PROBE_SECONDS, Renderer, probe_limit
from seeupo_jax.policy.files.chat.template_conversation import TemplateConversation
from seeupo_jax.policy.files.chat.training_templates import training_template, why_rewritten
from seeupo_jax.policy.files.folder_files import check_content, read_json_object
from seeupo_jax.policy.files.library_tokenizer import CONFIG_FILE, TOKENIZER_FILE, render_template
from seeupo_jax.policy.files.messages import (
    KEEP_THOUGHTS,
    STOPPED_CLOCK,
    bake_template_kwargs,
    check_kwargs,
    choose_template,
    format_tools,
    resolve_chat,
    save_chat,
    template_variables,
)

_LOGGER = logging.getLogger(__name__)

TEMPLATE_FILE, GENERATION_FILE = "chat_template.jinja", "generation_config.json"
_MODEL_FILE = "config.json"
# Files of which the library makes a tokenizer, and all that it reads for one.
_VOCABULARIES = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "vocab.txt")
_READ_FILES = {
    *(*_VOCABULARIES, CONFIG_FILE, TEMPLATE_FILE),
    *("merges.txt", "special_tokens_map.json", "added_tokens.json"),
}
_STATED = f"{GENERATION_FILE}, or without that file in {_MODEL_FILE}"

# Variables that every template gets; `config.chat.template_kwargs` may not set them.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception"}


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library with a chat template.

    Without a template (a base model's) it tokenises, but begins no conversation. Thread-safe: it
    does not change after construction.

    Args:
      library: `transformers`' tokenizer.
      chat: the options; `chat.template` replaces the library's template.
      generation: the content of generation_config.json, or the end ids of config.json.
      where: the model, in errors.

    Raises:
      ValueError: several chat templates, a template that is not Jinja, does not end, or does not
        write a plain conversation, options that it does not read, no end token.
    """

    def __init__(
        self,
        library: transformers.PreTrainedTokenizerBase,
        chat: schema.Chat,
        *,
        generation: Mapping[str, Any],
        where: str,
    ):
        if not library.is_fast:
            raise ValueError(f"tokenizer: {where} has no {TOKENIZER_FILE}; allowed: one that has.")
        self._library, self._chat, self._generation = library, chat, dict(generation)
        self._where = where
        self._backend = library.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.ids = frozenset(library.get_vocab().values())
        self.vocab_size = 1 + max(self.ids)
        eos = _eos_ids(library, generation, where)
        self._render = functools.partial(render_template, library, chat.template_kwargs)
        template = self._template = self._choose_template()
        reads = template_variables(template or "")
        check_kwargs(chat, reads - _GIVEN - library.special_tokens_map.keys())
        library.chat_template = bake_template_kwargs(template, chat)
        self._renderer = Renderer(library, template, chat, eos=eos, where=where)
        self.end_ids, self.unwritten = self._renderer.end_ids, self._renderer.unwritten
        self.writes_calls = chat.tools == "auto" and self._renderer.writes_calls

    def _choose_template(self) -> str | None:
        stored = self._library.chat_template
        template = choose_template(stored, self._chat, self._where)
        if "strftime_now" in template_variables(template or ""):
            template = STOPPED_CLOCK + str(template)
        if self._chat.template != KEEP_THOUGHTS or template is None or isinstance(stored, Mapping):
            return template
        with probe_limit(2 * PROBE_SECONDS):  # several templates
            return training_template(template, self._render, self._where)

    def why_rewritten(self) -> str:
        return why_rewritten(self._template or "", self._render)

    @functools.cached_property
    def tool_listing(self) -> str | None:
        if self._chat.tools != "auto":
            return self._chat.tools
        if self._renderer.lists_tools:
            return None
        written = find_format(self)
        return "hermes" if written is None else written.name

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TemplateConversation:
        renderer = self._renderer
        if tools and self.tool_listing is None:
            listing, functions = "", [{"type": "function", "function": tool} for tool in tools]
        else:
            listing, functions = format_tools(tools, self.tool_listing) if tools else "", None
        protected, functions = renderer.read(messages, listing), renderer.protect(functions)
        text = renderer.render(protected, functions)
        tokens = renderer.encode(text, follows=False)
        return TemplateConversation(renderer, protected, functions, text, tokens)

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text).ids

    def action(self, text: str) -> list[int]:
        return self._renderer.action(text)

    def text(self, tokens: Sequence[int]) -> str:
        body = tokens[:-1] if tokens and tokens[-1] in self.end_ids else tokens
        return self._renderer.text(body)

    def token_bytes(self) -> list[bytes]:
        decode = vocabulary.name_decoder(self._backend.decoder, self._where)
        pieces = [b""] * self.vocab_size
        for name, token in self._library.get_vocab().items():
            pieces[token] = decode(name)
        for token, name in self._renderer.control.items():
            mark = b"" if token in self._renderer.written else vocabulary.CONTROL
            pieces[token] = mark + name.encode()
        return pieces

    def save(self, folder: Path) -> None:
        library_tokenizer.save(self._library, folder)
        try:
            library_tokenizer.check_same_ids(
                folder, self._texts(), self._renderer.tokens, self._decode_all
            )
        except ValueError as error:
            for name in (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE):
                (folder / name).unlink(missing_ok=True)
            _LOGGER.warning("%s: no tokenizer is written.", error)
            return
        file = folder / GENERATION_FILE
        values = (
            (read_json_object(file) if file.is_file() else {})
            | self._generation
            | {"eos_token_id": list(self.end_ids)}
        )
        file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        save_chat(folder, self._chat)

    def _decode_all(self, tokens: Sequence[int]) -> str:
        """As the library's: with the names of control tokens, which some texts have."""
        return self._backend.decode(list(tokens), skip_special_tokens=False)

    def _texts(self) -> list[str]:
        """The text of each token, without tokens of incomplete characters."""
        texts = self._backend.decode_batch([[token] for token in range(self.vocab_size)])
        return [text for text in texts if text and "\ufffd" not in text]


def load(folder: Path, chat: schema.Chat | None) -> HuggingFaceTokenizer:
    """The tokenizer of a folder in Hugging Face's layout; reads files only.

    Raises:
      ValueError: a damaged file, or as `HuggingFaceTokenizer` says.
    """
    options = resolve_chat(folder, chat)
    there = sorted(file.name for file in folder.iterdir() if file.is_file())
    for name in _READ_FILES.intersection(there):
        check_content(folder / name)
    try:
        library = library_tokenizer.load(folder)
    except Exception as error:  # the library raises errors of any class for a damaged file
        if any(name in there for name in _VOCABULARIES):
            raise ValueError(f"tokenizer: {folder} cannot be read: {describe(error)}.") from error
        raise ValueError(
            f"tokenizer: {folder} has no {' and no '.join(_VOCABULARIES)}; allowed: one of them,"
            f" such as {TOKENIZER_FILE}; it has {shortened(', '.join(there))}."
        ) from error
    generation = _generation(folder)
    return HuggingFaceTokenizer(library, options, generation=generation, where=str(folder))


def _generation(folder: Path) -> dict[str, Any]:
    """generation_config.json; without it what config.json says, as `transformers` reads it."""
    file, config = folder / GENERATION_FILE, folder / _MODEL_FILE
    if file.is_file():
        return read_json_object(file)
    values = read_json_object(config) if config.is_file() else {}
    return {name: value for name, value in values.items() if name == "eos_token_id"}


def gguf_tokenizer(fields: Mapping[str, Any], chat: schema.Chat | None) -> HuggingFaceTokenizer:
    """The tokenizer that a GGUF file's metadata holds.

    Args:
      fields: the metadata by key, such as `tokenizer.ggml.tokens`.

    Raises:
      ValueError: missing metadata, or an unsupported kind of vocabulary.
    """
    options = schema.Chat() if chat is None else chat
    library = gguf_vocabulary.build_tokenizer(fields)
    generation = {"eos_token_id": gguf_vocabulary.end_ids(fields)}
    return HuggingFaceTokenizer(library, options, generation=generation, where="the GGUF file")


def _eos_ids(
    library: transformers.PreTrainedTokenizerBase, generation: Mapping[str, Any], where: str
) -> list[int]:
    """Ids that end a generation, by the model's files."""
    stated = generation.get("eos_token_id")
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if library.eos_token_id is not None:
        ids = [*ids, library.eos_token_id]
    if not ids:
        raise ValueError(
            f"tokenizer: {where} names no end token; allowed: an eos_token in"
            f" tokenizer_config.json, or an eos_token_id in {_STATED}."
        )
    for token in ids:
        if not isinstance(token, int) or token not in library.added_tokens_decoder:
            raise ValueError(
                f"tokenizer: {where}: eos_token_id is {token!r}; allowed: an added token in"
                f" {_STATED}."
            )
    return ids
