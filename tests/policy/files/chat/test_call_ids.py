"""Results have the ids of their calls in templates that write ids, as the makers' templates do."""

import pytest
from format_cases import tokenizer

from seeupo_jax.agents.calls import HistoryMessage, ModelCall
from seeupo_jax.agents.lineages import Lineages
from seeupo_jax.envs.base import KIMI_TAGS, MISTRAL_TAGS
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.policy.files.template_knowledge import resolve_format, template_writes

TOOLS = ({"name": "find", "description": "", "parameters": {"properties": {"n": {}}}},)
FUNCTIONS = "{% if tools %}{{ tools | tojson }}{% endif %}"
# After moonshotai's Kimi-K2-Instruct: the id is the call's head, a result's is a heading.
KIMI = FUNCTIONS + (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for t in m.tool_calls %}"
    "<|tool_call_begin|>{{ t.id }}<|tool_call_argument_begin|>{{ t.function.arguments | tojson }}"
    "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CHECKS = (
    "{% set seen = namespace(user=true) %}{% for m in messages if m.role == 'user' or"
    " (m.role == 'assistant' and m.tool_calls is not defined) %}"
    "{% if (m.role == 'user') != seen.user %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% set seen.user = not seen.user %}{% endfor %}"
)
_NINE = (
    "{% if {} is not defined or {} | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}"
)
# After Mistral-7B-Instruct-v0.3 (tokenizer v3): roles alternate, but for calls and results.
MISTRAL = (
    _CHECKS
    + FUNCTIONS
    + (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% elif m.tool_calls is defined %}[TOOL_CALLS] [{% for t in m.tool_calls %}"
        + _NINE.replace("{}", "t.id")
        + '{"name": "{{ t.function.name }}", "arguments": {{ t.function.arguments | tojson }}, '
        '"id": "{{ t.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]<|im_end|>'
        "{% elif m.role == 'assistant' %} {{ m.content }}<|im_end|>{% elif m.role == 'tool' %}"
        + _NINE.replace("{}", "m.tool_call_id")
        + '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}'
        "[/TOOL_RESULTS]{% endif %}{% endfor %}"
    )
)
CASES = {
    "kimi": (KIMI, KIMI_TAGS, "functions.find:{}", "## Return of functions.find:{}\n{}"),
    "mistral": (
        MISTRAL,
        MISTRAL_TAGS,
        "abcdefgh{}",
        '{{"content": {1}, "call_id": "abcdefgh{0}"}}',
    ),
}
ASKED = [{"role": "user", "content": "go"}]


def action_text(name, *numbers):
    form = CASES[name][2]
    if name == "kimi":
        calls = (
            f'<|tool_call_begin|>{form.format(n)}<|tool_call_argument_begin|>{{"n": {n}}}'
            "<|tool_call_end|>"
            for n in numbers
        )
        return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"
    calls = (
        f'{{"name": "find", "arguments": {{"n": {n}}}, "id": "{form.format(n)}"}}' for n in numbers
    )
    return f"[TOOL_CALLS] [{', '.join(calls)}]"


def made(name):
    template, tags, *_ = CASES[name]
    return tokenizer(template, tags)


@pytest.mark.parametrize("name", CASES)
def test_the_format_is_found_and_written_with_ids(name):
    assert resolve_format("auto", made(name)) is TOOL_FORMATS[name]
    # Mistral's template writes a text or calls.
    assert template_writes(made(name), TOOL_FORMATS[name]) is (name == "kimi")
    assert template_writes(made(name), TOOL_FORMATS[name], after_text=False)
    assert "tool" not in made(name).unwritten


@pytest.mark.parametrize("name", CASES)
def test_an_environments_results_have_the_ids_that_the_model_wrote(name):
    tokens = made(name)
    conversation = tokens.begin(ASKED, TOOLS)
    for numbers in ((5, 3), (4,)):
        action = tokens.action(action_text(name, *numbers))
        results = [{"role": "tool", "content": f"r{n}"} for n in numbers]
        longer = conversation.extend(action, results)
        start = len(conversation.tokens)
        assert longer.tokens[: start + len(action)] == [*conversation.tokens, *action]
        new = tokens.text(longer.tokens[start + len(action) :])
        places = [new.index(CASES[name][3].format(n, f"r{n}")) for n in numbers]
        assert places == sorted(places)
        conversation = longer


@pytest.mark.parametrize("name", CASES)
def test_an_agents_results_have_them_and_a_rewritten_history_has_ids_of_its_own(name):
    tokens, tool_format = made(name), TOOL_FORMATS[name]
    lineages, asked = Lineages(tokens, tool_format), (HistoryMessage("user", "go"),)
    turn = lineages.begin(lineages.read(ModelCall(asked, TOOLS)))
    action = tokens.action(action_text(name, 5, 3))
    calls = (ToolCall("find", {"n": 5}), ToolCall("find", {"n": 3}))
    answer = HistoryMessage("assistant", "", calls)
    lineages.act(turn, action, [0.0] * len(action), answer)
    results = (HistoryMessage("tool", "r5"), HistoryMessage("tool", "r3"))
    read = lineages.read(ModelCall((*asked, answer, *results), TOOLS))
    text = tokens.text(read.conversation.tokens)
    assert read.parent is turn
    assert all(CASES[name][3].format(n, f"r{n}") in text for n in (5, 3))
    # The calls of a history that the model has not sampled are written with other ids.
    read = Lineages(tokens, tool_format).read(ModelCall((*asked, answer, *results), TOOLS))
    text = tokens.text(read.conversation.tokens)
    for number, n in enumerate((5, 3)):
        given = f"functions.find:{number}" if name == "kimi" else f"call0000{number}"
        assert text.count(given) == 2
        call, result = (text.index(given), text.rindex(given))
        assert text.index(f"{n}", call) < result and f"r{n}" in text[result - 30 : result + 30]


@pytest.mark.parametrize("name", CASES)
def test_ids_of_another_origin_become_the_formats_and_results_follow_them(name):
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "find", "arguments": {"n": n}}}
        for n in (5, 3)
    ]
    results = [{"role": "tool", "content": f"r{n}", "tool_call_id": f"call_{n}"} for n in (3, 5)]
    history = [*ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    text = made(name).text(made(name).begin(history, TOOLS).tokens)
    assert "call_5" not in text and "call_3" not in text
    first, second = text.index("r3"), text.index("r5")
    ids = ("functions.find:1", "functions.find:0") if name == "kimi" else ("call00001", "call00000")
    assert ids[0] in text[first - 40 : second] and ids[1] in text[first : second + 40]
