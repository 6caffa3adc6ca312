"""Real tokenizers with their chat templates, and random conversations for them."""

import copy
import functools
import json

import pytest
from places import MODELS, SUPPORT
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from seeupo_jax.configuration import schema
from seeupo_jax.policy.files import gguf_vocabulary
from seeupo_jax.policy.files.gguf_header import read_header
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer

# As the fetched tokenizer has it, for tests that run without it. Apache-2.0, by the Qwen team.
QWEN3_TEMPLATE = SUPPORT / "qwen3_chat_template.jinja"
QWEN_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
GLM_CONTROL = ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>", "<|user|>")
GGUF_FILE = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDERS = ("qwen3", "qwen2_5", "llama3_2")
FETCHED = tuple(pytest.param(name, marks=pytest.mark.exhaustive) for name in FOLDERS)  # by npm
NAMES = (*FETCHED, "smollm2")  # cases of tests
TOOL = {
    "name": "find",
    "description": "Finds an order, “by name”.",
    "parameters": {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
    },
}
# The last lines of the templates of Qwen3-*-Thinking-2507, which are Qwen3's else.
ASKS_FOR_THOUGHTS = (
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n<think>\\n' }}\n{%- endif %}"
)
# As DeepSeek-R1-Distill has it: no message of the history has thoughts.
FORGETS_THOUGHTS = (
    "{% for m in messages %}{% set said = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in said %}"
    "{% set said = said.split('</think>')[-1] %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ said }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Of Zephyr's and TinyLlama's kind: no branch for the replies of tools.
DROPS_TOOLS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}<|im_end|>"
    "{% elif m.role == 'system' %}<|system|>\n{{ m.content }}<|im_end|>"
    "{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Of Gemma's kind: messages of the user and the assistant alternate; a system message comes first.
ALTERNATES = (
    "{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<|{{ m.role }}|>\n{{ system if loop.first }}{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Words, digits, code, spaces and line ends; letters and signs beyond ASCII; bits of templates.
FRAGMENTS = (
    *("order", " is", " Don't", "I'LL", " we've", "x", "_id", " naïve", "Straße", " 漢字かな"),
    *("한국", "1", "23", " 4075", "3.14", "１２", "½", "²", "٣٤", "Ⅷ"),
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", " \n "),
    *(
        "def f(x):\n    return x",
        "{'a': [1, 2]}",
        '{"a": "b\\n"}',
        "</b>",
        "a/b.c",
        "--",
        "…",
        "”!",
    ),
    *("🙂", "🙂🏽", "👩‍👩‍👧", "e\u0301", "\u200b", "\ufeff", "\x00", "\u2028", "ﬁ", "Å"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|", "|>", "<|im_end|>", "<|eot_id|>"),
)


@functools.cache
def gguf_fields():
    """The metadata of SmolLM2's file."""
    fields, _ = read_header(GGUF_FILE)
    return fields


@functools.cache
def library(name):
    """The library's own tokenizer of a model; `small` is none's."""
    if name == "smollm2":
        return gguf_vocabulary.build_tokenizer(gguf_fields())
    if name == "small":
        return small_library()
    return AutoTokenizer.from_pretrained(MODELS / name)


@functools.cache
def make(name, chat="{}"):
    """Our tokenizer of a model, made once for each of the chat options (as JSON)."""
    # The copy has a template of its own; loading the files again would take seconds.
    options = schema.Chat(**json.loads(chat))
    return HuggingFaceTokenizer(copy.copy(library(name)), options, generation={}, where=name)


@functools.cache
def thinking(template=None):
    """The library's tokenizer with a template whose header opens a thought, and ours of it."""
    theirs = copy.copy(library("qwen3"))
    shared, asks, _ = theirs.chat_template.partition("{%- if add_generation_prompt %}")
    assert asks
    theirs.chat_template = shared + ASKS_FOR_THOUGHTS if template is None else template
    own = copy.copy(theirs)
    return theirs, HuggingFaceTokenizer(own, schema.Chat(), generation={}, where="a test")


def with_control_tags(folder, names, name="qwen3"):
    """A copy of a model's tokenizer whose files list some of its added tokens as special."""
    for file in (MODELS / name).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    for token in values["added_tokens"]:
        token["special"] |= token["content"] in names
    file.write_text(json.dumps(values))
    file = folder / "tokenizer_config.json"
    values = json.loads(file.read_text())
    for token in values["added_tokens_decoder"].values():
        token["special"] |= token["content"] in names
    file.write_text(json.dumps(values))
    return folder


def small_library(template=None, control=QWEN_CONTROL):
    """A tokenizer of about 280 tokens, with Qwen3's template and control tokens unless others are
    given; the last one ends a message."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=272, initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(["the order of the user is in the list of tools"] * 2, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in control])
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<x>"])
    library = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=control[-1])
    library.chat_template = QWEN3_TEMPLATE.read_text() if template is None else template
    return library


def encode(name, text, *, plain=False):
    """The library's own tokens of a text; `plain`: names of control tokens are text in it."""
    return library(name).encode(text, add_special_tokens=False, split_special_tokens=plain)


def library_tokens(name, messages, tools=(), **options):
    """The library's own tokens of a conversation, with the next header; Llama's date as ours."""
    options |= {"date_string": "26 Jul 2024"} if name == "llama3_2" else {}
    functions = [{"type": "function", "function": tool} for tool in tools]
    return library(name).apply_chat_template(
        list(messages),
        tools=functions if functions else None,
        add_generation_prompt=True,
        return_dict=False,
        **options,
    )


def raw_text(name, tokens):
    """The text of tokens, control tokens included."""
    return library(name).decode(tokens, clean_up_tokenization_spaces=False)


def random_text(rng, pieces=8):
    """Up to so many fragments in any order."""
    picked = rng.integers(0, len(FRAGMENTS), rng.integers(1, pieces))
    return "".join(FRAGMENTS[i] for i in picked)


def random_messages(rng, *roles):
    """A message of random text a role."""
    return [{"role": role, "content": random_text(rng)} for role in roles]
