"""Conversations before they become tokens: roles, tools as text, options of templates."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from seeupo_jax.configuration import loading, schema
from seeupo_jax.configuration.user_code import listed, shown
from seeupo_jax.envs.base import TEXT_TAGS, THOUGHT_TAGS, Message, Tool
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.envs.tool_formats.tool_format import ToolFormat
from seeupo_jax.policy.files.folder_files import check_content, read_json_object

ROLES = ("system", "user", "assistant", "tool")
CHAT_FILE = "chat.json"  # a model folder's own chat options
KEEP_THOUGHTS = "keep_thoughts"  # as `chat.template`: a training template
PROBE = "the-answer"  # found again in a rendered conversation
# Roles of short conversations, and which of the texts before, between and behind their messages
# are a template's own. Before a first user's message may be a system message that it adds, and an
# assistant's begins with thoughts in some templates.
_PROBED = {
    ("user", "assistant", "user"): (2, 3),
    ("user", "assistant", "tool"): (2, 3),
    ("system", "user"): (0, 1),
}

# Templates that write the date (Llama 3) would change the prompt every day. Their clock is fixed at
# the default date of Llama's template; a `date_string` in template_kwargs takes precedence.
# `strftime_now` becomes a macro; the library trims the newline after it.
_DATE = datetime.datetime(2024, 7, 26)
_CODES = "".join(f" | replace('%{c}', '{_DATE.strftime('%' + c)}')" for c in "aAbBdHIjmMpSyY")
STOPPED_CLOCK = f"{{% macro strftime_now(format) %}}{{{{ format{_CODES} }}}}{{% endmacro %}}\n"


class TaggedText(str):
    """An assistant's content, in which some names of `TAGS` are the control tokens, if there are.

    Only our own code makes one: what comes as JSON or through an environment's gate is plain text.

    tags: where these names begin, in order.
    """

    tags: tuple[int, ...]

    def __new__(cls, text: str, tags: Sequence[int]) -> TaggedText:
        made = super().__new__(cls, text)
        made.tags = tuple(tags)
        return made


_TAG = re.compile("|".join(map(re.escape, TEXT_TAGS)))


def model_text(text: str) -> TaggedText:
    """A text as the model itself would write it, with all of `TEXT_TAGS`."""
    return TaggedText(text, [match.start() for match in _TAG.finditer(text)])


def check_messages(messages: Sequence[Message]) -> None:
    """ValueError: an unknown role, or a content that is not a text."""
    for message in messages:
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ValueError(f"message: role is {role!r}; allowed: {', '.join(ROLES)}.")
        if not isinstance(content, str):
            raise ValueError(f"message: content of {role} is {content!r}; allowed: a text.")


def drop_unread_messages(messages: Sequence[Message], chat: schema.Chat) -> list[Message]:
    """The messages that the model reads: `chat.system` may drop system messages."""
    return [m for m in messages if chat.system or m["role"] != "system"]


def map_roles(messages: Sequence[Message], roles: Mapping[str, str]) -> list[Message]:
    """The messages under the roles that `config.chat.roles` sends them as.

    A tool's reply under another role gets the tags that Qwen's templates write around it. Messages
    in a row of a role that others are sent as are joined: many templates want roles to alternate.
    """
    sent: list[Message] = []
    joins = False  # the last message is one that others may be joined to
    was_tool = False
    for message in messages:
        role = roles.get(message["role"], message["role"])
        is_tool = message["role"] == "tool"
        if role != message["role"]:
            text = message["content"]
            text = f"<tool_response>\n{text}\n</tool_response>" if is_tool else text
            message = {"role": role, "content": text}
        if joins and sent[-1]["role"] == role:
            between = "\n" if was_tool and is_tool else "\n\n"
            text = f"{sent[-1]['content']}{between}{message['content']}"
            sent[-1] = {"role": role, "content": text}
        else:
            sent.append(message)
        joins, was_tool = role in roles.values(), is_tool
    return sent


def arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """The messages with the arguments of their calls as texts of JSON, as OpenAI's are."""

    def written(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    return [
        {**message, "tool_calls": [written(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def format_tools(tools: Sequence[Tool], kind: str) -> str:
    """The tools as text for a system message, in one of the forms of `config.chat.tools`."""
    return TOOL_LISTINGS[kind](tools) if tools else ""


def resolve_chat(folder: Path, chat: schema.Chat | None) -> schema.Chat:
    """The options to load a folder with: those given, else the folder's own `chat.json`.

    Options that are given but all at their defaults give way to the folder's own.

    Raises:
      ValueError: `chat.json` is damaged.
    """
    file = folder / CHAT_FILE
    if not file.is_file() or (chat is not None and chat != schema.Chat()):
        return schema.Chat() if chat is None else chat
    try:
        return loading.from_dict({"chat": read_json_object(file)}).chat
    except ValueError as error:
        raise ValueError(f"tokenizer: {folder} cannot be read: {error}") from None


def dropped_messages_notice(folder: Path, chat: schema.Chat | None) -> str | None:
    """A sentence on the parts of conversations that the model does not read; None: it reads all."""
    options = resolve_chat(folder, chat)
    unread = {"system messages": not options.system, "lists of tools": options.tools == "none"}
    if not any(unread.values()):
        return None
    by = "config.chat" if options == chat else str(folder / CHAT_FILE)
    parts = " and no ".join(name for name, is_unread in unread.items() if is_unread)
    return f"chat: the model reads no {parts}, as {by} has it"


def save_chat(folder: Path, chat: schema.Chat) -> None:
    """Writes the options into a model folder, where `resolve_chat` finds them."""
    values: dict[str, Any] = dataclasses.asdict(chat)
    del values["template"]  # the folder holds the template itself
    for name in ("template_kwargs", "roles"):
        if not values[name]:
            del values[name]
    (folder / CHAT_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def add_tool_listing(messages: Sequence[Message], listing: str) -> list[Message]:
    """Messages with a listing of tools in the system message, which is added if missing."""
    if not listing:
        return list(messages)
    if messages and messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{listing}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": listing}, *messages]


def check_rendered(message: Mapping[str, Any], written: str) -> None:
    """ValueError where a template has left out a part of an assistant's message."""
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    # White space around a thought is the template's.
    texts = re.split("|".join(map(re.escape, chain(*THOUGHT_TAGS))), message["content"])
    for part in (*texts, message.get("reasoning_content", ""), *calls):
        if part.strip() not in written:
            shown = part.strip() if len(part.strip()) <= 60 else f"{part.strip()[:60]} ..."
            raise ValueError(
                f"chat template: it does not write {shown!r} of an assistant's message; allowed:"
                " content, reasoning_content and tool_calls that the template writes together."
            )


def choose_template(stored: Any, chat: schema.Chat, where: str) -> str | None:
    """The template that `chat.template` names, else the one that a tokenizer stores, if any.

    Where it is `KEEP_THOUGHTS`, the one that is stored, of which a training template is made.

    Args:
      stored: by the tokenizer: a text, or texts by name.
      where: the model, in errors.

    Raises:
      ValueError: no such template, a file that is not UTF-8, or several templates of which none is
        named; one that is no text.
    """
    named = stored if isinstance(stored, Mapping) else {}
    chosen = named.get(chat.template, stored)
    if chat.template == KEEP_THOUGHTS and (chosen is None or chosen is named):
        found = f"the chat templates {', '.join(map(str, named))}" if named else "no chat template"
        raise ValueError(
            f"config.chat.template: got {KEEP_THOUGHTS!r} for {where}, which has {found}; allowed:"
            " a Jinja file" + (", or the name of one." if named else ".")
        )
    if chat.template not in (None, KEEP_THOUGHTS) and chat.template not in named:
        chosen = _read_template(chat.template, named)
    elif chat.template is None and named:
        raise ValueError(
            f"tokenizer: {where} has the chat templates {', '.join(map(str, named))}; allowed: the"
            " name of one, or a Jinja file, in config.chat.template."
        )
    if chosen is None or isinstance(chosen, str):
        return chosen
    raise ValueError(
        f"tokenizer: {where}: chat_template is {shown(chosen)}; allowed: a text, in Jinja."
    )


def _read_template(path: str, names: Iterable[str]) -> str:
    file = Path(path)
    if not file.is_file():
        stored = "".join(f", or {name}" for name in (KEEP_THOUGHTS, *names))
        raise ValueError(f"config.chat.template: got {path!r}; allowed: a Jinja file{stored}.")
    try:
        check_content(file)
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config.chat.template: {file} cannot be read: {error}.") from None


def template_boundaries(render: Callable[..., str]) -> tuple[list[str], str]:
    """Returns the texts that a template writes around messages, and its header of an answer.

    Args:
      render: the text of messages, of tools or None, with or without that `header`; it raises where
        the template refuses the messages.
    """
    around, header = [], ""
    for roles, places in _PROBED.items():
        messages = [{"role": role, "content": PROBE} for role in roles]
        try:
            text = render(messages, None, header=False)
            header = header or render(messages, None, header=True).removeprefix(text).lstrip()
        except Exception:  # of any class: not every template takes a system message or a tool's
            continue
        parts = text.split(PROBE)
        around += [parts[place] for place in places if len(parts) == len(roles) + 1]
    return around, header


def bake_template_kwargs(template: str | None, chat: schema.Chat) -> str | None:
    """The template with `chat.template_kwargs` as its defaults, for other software."""
    if template is None:
        return None
    # The library trims a newline after a tag: the template begins a line, as it does without these.
    given = "".join(
        f"{{%- if {name} is not defined -%}}{{%- set {name} = {value!r} -%}}{{%- endif %}}\n"
        for name, value in chat.template_kwargs.items()
    )
    return template if template.startswith(given) else given + template


def template_variables(template: str) -> frozenset[str]:
    """The variables that a template reads."""
    # A tag of the library's own, without effect here.
    plain = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(plain)))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template: line {error.lineno}: {str(error).rstrip('.')}.") from None
    except RecursionError:
        raise ValueError(
            "chat template: got one nested deeper than Jinja reads; allowed: a template whose"
            " brackets and blocks are closed."
        ) from None


def check_kwargs(chat: schema.Chat, reads: frozenset[str]) -> None:
    """ValueError: a name in `chat.template_kwargs` that the template does not read."""
    for name in chat.template_kwargs:
        if name not in reads:
            raise ValueError(
                f"config.chat.template_kwargs: got {name!r}; allowed: what the chat template reads"
                f" ({listed(sorted(reads), 'it reads no variable')})."
            )


def _signatures(tools: Sequence[Tool]) -> str:
    lines = []
    for tool in tools:
        parameters = tool.get("parameters") or {}
        required = parameters.get("required") or ()
        names = (n if n in required else f"{n}=" for n in parameters.get("properties") or ())
        lines.append(f"{tool['name']}({', '.join(names)})")
    return "\n".join(lines)


def _schemas(tools: Sequence[Tool]) -> str:
    return "\n".join(json.dumps(tool) for tool in tools)


def _with_example(tool_format: ToolFormat) -> Callable[[Sequence[Tool]], str]:
    """Lists tools as JSON schemas, with an example of a call in a format."""

    def listed(tools: Sequence[Tool]) -> str:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "You have tools. Each line between the tags describes one: its name, what it does, and"
            f" its parameters as a JSON schema.\n<tools>\n{schemas}\n</tools>\n"
            "To use a tool, write a call in this form, one block for each call, and nothing after"
            f" the last:\n{tool_format.example}"
        )

    return listed


# How tools are listed where the chat template does not list them itself.
TOOL_LISTINGS: Mapping[str, Callable[[Sequence[Tool]], str]] = {
    "auto": _with_example(TOOL_FORMATS["hermes"]),
    "none": lambda tools: "",
    "signatures": _signatures,
    "json": _schemas,
    **{name: _with_example(tool_format) for name, tool_format in TOOL_FORMATS.items()},
}
