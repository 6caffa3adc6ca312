"""In every tool format a conversation with calls goes on with the tokens that were sampled."""

import numpy as np
import pytest
from format_cases import tokenizer, written

from seeupo_jax.agents.answer_form import AnswerForm, AnswerSplitter, Shown
from seeupo_jax.agents.calls import HistoryMessage, ModelCall
from seeupo_jax.agents.lineages import Lineages, to_tokenizer_message
from seeupo_jax.agents.sampled_text import SampledText
from seeupo_jax.envs.base import DEEPSEEK_TAGS, GLM_TAGS, KIMI_TAGS, MISTRAL_TAGS
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.rollout.engine.protocol import Action

PARAMETERS = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
}
TOOLS = ({"name": "find", "description": "", "parameters": PARAMETERS},)
CALLS = (ToolCall("find", {"name": "é [TOOL_CALLS]", "count": 2}), ToolCall("find", {"name": "x"}))
CONTROL = (*MISTRAL_TAGS, *DEEPSEEK_TAGS, *KIMI_TAGS, *GLM_TAGS)
ASKED = (HistoryMessage("user", "go"),)


@pytest.mark.parametrize("control", [(), CONTROL], ids=["text", "control tokens"])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_sampled_call_is_read_and_its_history_continues_token_by_token(name, control):
    # Harmony's own template writes past calls otherwise than the model.
    options = {"chosen": "keep_thoughts"} if name == "harmony" else {}
    tool_format, made = TOOL_FORMATS[name], tokenizer(written(name), control, **options)
    lineages, pieces = Lineages(made, tool_format), []
    # Of Llama's form, calls are the whole message.
    content = "" if name == "llama" else "I look."
    action = made.action(tool_format.render(content, CALLS[1:]))
    turn = lineages.begin(lineages.read(ModelCall(ASKED, TOOLS)))
    context = turn.read.conversation.tokens
    form = AnswerForm(tool_format).with_tools(TOOLS)
    sampled = SampledText(made, (), pieces.append, form, TOOLS, context)
    for count in range(len(action)):
        sampled.listen(action[:count])
    logp = [0.0] * len(action)
    done = sampled.complete(Action(0, action, logp), prompt_tokens=len(context))
    assert (done.content, done.calls) == (content, CALLS[1:])
    assert "".join(pieces) == done.text
    lineages.act(turn, action, logp, done.message)
    results = (HistoryMessage("tool", "7"),)
    read = lineages.read(ModelCall((*ASKED, done.message, *results), TOOLS))
    assert read.parent is turn
    assert read.conversation.tokens[: len(context) + len(action)] == [*context, *action]


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "harmony"])
def test_the_complete_calls_of_a_cut_answer_are_answered_and_its_tokens_stay(name):
    """All of them, also of the call that was cut, which the client does not see."""
    tool_format, made = TOOL_FORMATS[name], tokenizer(written(name), CONTROL)
    lineages, form = Lineages(made, tool_format), AnswerForm(tool_format)
    content = "" if name == "llama" else "I look."
    first, second = ToolCall("find", {"count": 2}), ToolCall("find", {"name": "lost and not found"})
    whole = made.action(tool_format.render(content, (first, second)))
    turn = lineages.begin(lineages.read(ModelCall(ASKED, TOOLS)))
    context = turn.read.conversation.tokens
    cut = next(n for n in range(len(whole)) if made.text(whole[:n]).endswith("lost and"))
    action, logp = whole[:cut], [-0.5] * cut
    splitter = AnswerSplitter(form)
    shown = []
    sampled = SampledText(
        made, (), lambda text: shown.append(splitter.feed(text).content), form, TOOLS, context
    )
    for count in range(len(action)):
        sampled.listen(action[:count])
    done = sampled.complete(Action(0, action, logp), prompt_tokens=len(context))
    assert (done.content, done.calls, done.finish) == (content, (first,), "length")
    assert len(done.pieces) == len(done.logp) == len(action)
    rest = splitter.rest(Shown(done.thoughts, done.content)).content
    assert "".join([*shown, rest]).strip() == content
    lineages.act(turn, action, logp, done.message)
    read = lineages.read(ModelCall((*ASKED, done.message, HistoryMessage("tool", "7")), TOOLS))
    assert read.parent is turn
    tokens = read.conversation.tokens
    assert tokens[: len(context) + len(action)] == [*context, *action]
    lineages.act(lineages.begin(read), whole, [-0.5] * len(whole), done.message)
    (segment,) = lineages.segments()
    assert segment.tokens_L.tolist() == [*tokens, *whole]
    assert np.flatnonzero(segment.turn_L == 0).tolist() == [
        *range(len(context), len(context) + len(action))
    ]


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "harmony"])
def test_tags_of_a_client_s_calls_are_control_tokens_and_those_in_values_are_not(name):
    tool_format, made = TOOL_FORMATS[name], tokenizer(written(name), CONTROL)
    names = {made.action(tag)[0]: tag for tag in CONTROL}
    assert len(names) == len(CONTROL)
    message = HistoryMessage("assistant", "", CALLS)
    read = to_tokenizer_message(message, made, tool_format)
    tokens = made.begin([{"role": "user", "content": "go"}, read], ()).tokens
    found = [names[token] for token in tokens if token in names]
    text = tool_format.render("", CALLS)
    places = tool_format.tags("", CALLS)
    tags = [tag for place in places for tag in CONTROL if text.startswith(tag, place)]
    assert found == tags
    assert bool(tags) == (name not in ("hermes", "llama", "llama_function", "qwen3_coder", "gemma"))
