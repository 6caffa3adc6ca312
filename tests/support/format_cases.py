"""Chat templates that write calls in each tool format."""

import copy

from chat_cases import library, small_library
from places import SUPPORT
from tokenizers import AddedToken

from seeupo_jax.configuration import schema
from seeupo_jax.envs.base import HARMONY_TAGS
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer

CHAT = (
    "{tools}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}"
    "{{% for t in m.tool_calls or [] %}}{{% set f = t.function %}}{{% if loop.first %}}"
    "{begin}{{% endif %}}{call}{{% if loop.last %}}{end}{{% endif %}}{{% endfor %}}<|im_end|>\n"
    "{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{header}"
    "{{% endif %}}"
)
LISTS = "{% if tools %}{{ tools | tojson }}{% endif %}"
ARGUMENTS, NAME = "{{ f.arguments | tojson }}", "{{ f.name }}"
KIMI = "<|tool_call_begin|>{{ t.id }}<|tool_call_argument_begin|>"
# The part of each template that writes calls, by what the makers' templates write: Qwen2.5's,
# Llama 3.2's, Llama 3.1's prompt, Qwen3-Coder's, GLM-4.5's, Mistral-Small-3.1's and Magistral's,
# DeepSeek-V3's and V3.1's, Kimi-K2's, and that of Google's page on Gemma.
CALLS = {
    "hermes": (
        "",
        f'\n<tool_call>\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n</tool_call>',
        "",
    ),
    "llama": ("", f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}', ""),
    "llama_function": ("", f"<function={NAME}>{ARGUMENTS}</function>", ""),
    "qwen3_coder": (
        "",
        f"\n<tool_call>\n<function={NAME}>\n{{% for k, v in f.arguments | items %}}"
        "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        "",
    ),
    "glm": (
        "",
        f"\n<tool_call>{NAME}\n{{% for k, v in f.arguments | items %}}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>"
        "\n{% endfor %}</tool_call>",
        "",
    ),
    "mistral": (
        "[TOOL_CALLS] [",
        "{% if t.id | length < 9 %}{{ raise_exception('ids of nine letters') }}{% endif %}"
        f'{{"name": "{NAME}", "arguments": {ARGUMENTS}, "id": "{{{{ t.id }}}}"}}'
        '{{ "" if loop.last else ", " }}',
        "]",
    ),
    "mistral_args": ("", f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}", ""),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>{{{{ t.type }}}}<｜tool▁sep｜>{NAME}\n```json\n{ARGUMENTS}\n```"
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi": (
        "<|tool_calls_section_begin|>",
        f"{KIMI}{ARGUMENTS}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "gemma": (
        "\n```tool_code\n",
        f"{NAME}({{% for k, v in f.arguments | items %}}{{{{ k }}}}={{{{ v }}}}{{% endfor %}})\n",
        "```",
    ),
}


HARMONY = (SUPPORT / "chat_templates/gpt_oss.jinja").read_text()


def tokenizer(template, control=(), chosen=None, **chat):
    """A tokenizer of bytes with a template, and more control tokens; chosen: by `chat.template`."""
    if "<|channel|>" in template:
        control = dict.fromkeys((*control, *HARMONY_TAGS, "<|return|>"))
    made = small_library() if control else copy.copy(library("small"))
    made.add_tokens([AddedToken(name, special=True) for name in control])
    made.chat_template = template
    return HuggingFaceTokenizer(
        made, schema.Chat(template=chosen, **chat), generation={}, where="small"
    )


def written(name, header="", tools=LISTS):
    """A template that writes calls in a format."""
    if name == "harmony":
        return HARMONY if tools else HARMONY.replace("if tools", "if false")
    begin, call, end = CALLS[name]
    return CHAT.format(begin=begin, call=call, end=end, header=header, tools=tools)
