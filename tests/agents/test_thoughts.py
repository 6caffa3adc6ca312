"""Thoughts in a field of their own: in replies, in streams, and in histories that come back."""

import anthropic
import format_cases
import openai
import pytest
from agent_cases import CALLS, FORMAT, FOUND, PARAMETERS, TOOL, make_endpoint, opened
from lineage_cases import HERMES, CharTokenizer, ask, assistant, readable, say, user

from seeupo_jax.agents.answer_form import AnswerForm
from seeupo_jax.agents.calls import HistoryMessage, ModelCall
from seeupo_jax.agents.conversation_cache import CachedConversation, ConversationCache
from seeupo_jax.agents.lineages import Lineages, to_tokenizer_message
from seeupo_jax.agents.sampled_text import SampledText
from seeupo_jax.envs.base import MISTRAL_TAGS
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.policy.files.template_knowledge import knows_thoughts
from seeupo_jax.rollout.engine.protocol import Action

FORM = AnswerForm(FORMAT, thoughts_apart=True)
SAID = f"<think>\nWhich?\nThis.\n</think>\n\n{CALLS}"
ANSWER = HistoryMessage("assistant", "I look.", FOUND, "Which?\nThis.")


@pytest.fixture(scope="module")
def endpoint():
    endpoint = make_endpoint(FORM)
    yield endpoint
    endpoint.close()


@pytest.fixture
def episode(endpoint):
    with opened(endpoint, form=FORM) as episode:
        yield episode


@pytest.fixture
def client(episode):
    access = episode[1]
    with openai.OpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as client:
        yield client


CHAT_TOOLS = [{"type": "function", "function": TOOL}]


def test_a_chat_completion_has_them_as_reasoning_content_and_takes_them_back(client, episode):
    asked = [{"role": "user", "content": SAID}]
    reply = client.chat.completions.create(model="m", messages=asked, tools=CHAT_TOOLS)
    message = reply.choices[0].message
    assert message.content == "I look." and message.reasoning_content == "Which?\nThis."
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls
    ]
    history = [*asked, message, *results, {"role": "user", "content": "x"}]
    client.chat.completions.create(model="m", messages=history, tools=CHAT_TOOLS)
    assert episode[0].calls[-1].messages[1] == ANSWER


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_either_name_is_read_and_only_of_an_assistant(client, episode, field):
    def send(role, **more):
        said = {"role": role, "content": "I look.", **more}
        history = [{"role": "user", "content": "go"}, said, {"role": "user", "content": "x"}]
        client.chat.completions.create(model="m", messages=history)

    send("assistant", **{field: " Hm.\n"})
    assert episode[0].calls[-1].messages[1] == HistoryMessage("assistant", "I look.", (), "Hm.")
    send("assistant", **{field: None})
    assert episode[0].calls[-1].messages[1] == HistoryMessage("assistant", "I look.")
    with pytest.raises(openai.BadRequestError, match=rf"\[1\].{field}: only an assistant's"):
        send("user", **{field: "Hm."})
    with pytest.raises(openai.BadRequestError, match="differs from reasoning_content"):
        send("assistant", reasoning="a", reasoning_content="b")


def test_without_thoughts_a_message_has_no_such_field(client):
    asked = [{"role": "user", "content": "<think>\n\n</think>\n\nHello."}]
    message = client.chat.completions.create(model="m", messages=asked).choices[0].message
    assert message.content == "Hello." and "reasoning_content" not in message.model_dump()


def test_a_chat_stream_sends_thoughts_before_content(client):
    asked = [{"role": "user", "content": SAID}]
    chunks = client.chat.completions.create(
        model="m", messages=asked, tools=CHAT_TOOLS, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    contents = [delta.content or "" for delta in deltas]
    assert ("".join(thoughts), "".join(contents)) == ("Which?\nThis.", "I look.")
    assert sum(map(bool, thoughts)) > 2 and sum(map(bool, contents)) > 1
    last = max(index for index, text in enumerate(thoughts) if text)
    assert not any(contents[:last])
    assert sum(len(delta.tool_calls or ()) for delta in deltas) == 2


@pytest.fixture
def claude(episode):
    access = episode[1]
    address = access.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=address, api_key=access.api_key, max_retries=0) as client:
        yield client


CLAUDE = {
    "model": "m",
    "max_tokens": 200,
    "tools": [{"name": "find", "description": "Finds.", "input_schema": PARAMETERS}],
}


def results_of(content):
    return [
        {"type": "tool_result", "tool_use_id": block.id, "content": "7"}
        for block in content
        if block.type == "tool_use"
    ]


def test_a_message_of_anthropic_s_has_them_as_a_block_and_takes_it_back(claude, episode):
    asked = [{"role": "user", "content": SAID}]
    reply = claude.messages.create(messages=asked, **CLAUDE)
    thinking, text, *uses = reply.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Which?\nThis.")
    assert thinking.signature and (text.text, len(uses)) == ("I look.", 2)
    history = [
        *asked,
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [*results_of(reply.content), {"type": "text", "text": "x"}]},
    ]
    claude.messages.create(messages=history, **CLAUDE)
    assert episode[0].calls[-1].messages[1] == ANSWER
    history[0] = {"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}
    with pytest.raises(anthropic.BadRequestError, match="got 'thinking' in a message of 'user'"):
        claude.messages.create(messages=history, **CLAUDE)


def test_a_stream_of_anthropic_s_is_the_same_message(claude):
    asked = [{"role": "user", "content": SAID}]
    whole = claude.messages.create(messages=asked, **CLAUDE)
    with claude.messages.stream(messages=asked, **CLAUDE) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()

    def blocks(message):
        made = [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
        return [(block["type"], block.get("thinking"), block.get("signature")) for block in made]

    assert blocks(streamed) == blocks(whole)
    assert kinds.count("thinking") > 2 and kinds.count("signature") == 1


def test_a_response_has_them_as_an_item_and_takes_it_back(client, episode):
    tools = [{"type": "function", "strict": False, **TOOL}]
    asked = [{"role": "user", "content": SAID}]
    reply = client.responses.create(model="m", input=asked, tools=tools)
    reasoning, message, *calls = reply.output
    assert reasoning.type == "reasoning" and message.content[0].text == "I look."
    assert [part.text for part in reasoning.content] == ["Which?\nThis."]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "7"} for call in calls
    ]
    client.responses.create(model="m", input=[*asked, *reply.output, *results], tools=tools)
    assert episode[0].calls[-1].messages[1] == ANSWER
    client.responses.create(model="m", input=results, previous_response_id=reply.id, tools=tools)
    assert episode[0].calls[-1].messages[1] == ANSWER


def test_a_streamed_response_ends_with_the_whole_one(client):
    asked = [{"role": "user", "content": SAID}]
    tools = [{"type": "function", "strict": False, **TOOL}]
    with client.responses.stream(model="m", input=asked, tools=tools) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Which?\nThis." and len(deltas) > 2
    assert [item.type for item in final.output] == ["reasoning", "message", *["function_call"] * 2]
    added = [(e.output_index, e.item.type) for e in events if e.type.endswith("item.added")]
    assert added == [(0, "reasoning"), (1, "message"), (2, "function_call"), (3, "function_call")]


def answer_with(lineages, call, text, answer):
    """A turn that samples a text, and what the client was told of it."""
    turn = lineages.begin(lineages.read(call))
    lineages.act(turn, say(text), [0.0] * len(say(text)), answer)
    return turn


def segments(lineages):
    return [readable(segment) for segment in lineages.segments()]


@pytest.mark.parametrize("sent", ["Hm.", " Hm.\n", ""])
def test_a_history_with_its_thoughts_or_without_continues_token_by_token(sent):
    lineages, text = Lineages(CharTokenizer(), HERMES), "<think>\nHm.\n</think>\n\nyes"
    first = ask("go")
    answer_with(lineages, first, text, HistoryMessage("assistant", "yes", (), "Hm."))
    back = HistoryMessage("assistant", " yes", (), sent)
    answer_with(lineages, ask(*first.messages, back, "and?"), "no", assistant("no"))
    assert segments(lineages) == [["/go//", (0, f"{text}/"), "/and?//", (1, "no/")]]


def test_other_thoughts_are_another_history_with_them_as_context():
    lineages, text = Lineages(CharTokenizer(), HERMES), "<think>\nHm.\n</think>\n\nyes"
    answer_with(lineages, ask("go"), text, HistoryMessage("assistant", "yes", (), "Hm."))
    back = HistoryMessage("assistant", "yes", (), "Oh.")
    answer_with(lineages, ask("go", back, "and?"), "no", assistant("no"))
    context = "/go//<think>\nOh.\n</think>\n\nyes//and?//"
    assert segments(lineages)[1] == [context, (1, "no/")]


def test_of_two_answers_with_one_content_the_one_with_these_thoughts_continues():
    lineages, turns = Lineages(CharTokenizer(), HERMES), []
    for thought in ("a", "b"):
        text = f"<think>\n{thought}\n</think>\n\nyes"
        answer = HistoryMessage("assistant", "yes", (), thought)
        turns.append(answer_with(lineages, ask("go"), text, answer))
    for thought, turn in zip("ab", turns, strict=True):
        back = HistoryMessage("assistant", "yes", (), thought)
        assert lineages.read(ask("go", back, "and?")).parent is turn


def test_a_cached_conversation_is_found_with_its_thoughts_or_without():
    cache, asked = ConversationCache(1000, lambda key: None), [user("go")]
    answered = CachedConversation(CharTokenizer().begin([], ()), [1], 0, "Hm.")
    answer = HistoryMessage("assistant", "yes", (), "Hm.")
    cache.add(0, [*asked, answer], (), answered)
    for thoughts, found in (("Hm.", True), (" Hm.\n", True), ("", True), ("Oh.", False)):
        back = HistoryMessage("assistant", "yes", (), thoughts)
        assert (cache.find([*asked, back, user("and?")], ()) is not None) is found


def test_thoughts_of_a_history_are_written_before_its_content():
    message = HistoryMessage("assistant", "I look.", (), "Hm.")
    written = to_tokenizer_message(message, CharTokenizer(), HERMES)
    assert written == {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nI look."}
    assert written["content"].tags == (0, 12)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("context", ["assistant: <think>\n", "assistant: "])
def test_behind_a_header_that_opens_thoughts_an_answer_begins_with_thoughts(context, apart):
    pieces = []
    sampled = SampledText(
        CharTokenizer(),
        on_text=pieces.append,
        form=AnswerForm(FORMAT, apart),
        context=say(context, end=False),
    )
    tokens = say("Hm.</think> yes")
    for count in range(len(tokens)):
        sampled.listen(tokens[:count])
    completion = sampled.complete(Action(0, tokens, [0.0] * len(tokens)), prompt_tokens=1)
    opened_apart = apart and "<think>" in context
    expected = ("Hm.", "yes") if opened_apart else ("", "Hm.</think> yes")
    assert (completion.thoughts, completion.content) == expected
    assert "".join(pieces) == completion.text
    assert completion.text.startswith("<think>") is opened_apart


def test_magistrals_thoughts_stand_between_its_control_tokens():
    """In replies, and in histories of which the policy has not written the message."""
    made = format_cases.tokenizer(
        format_cases.written("mistral_args"), (*MISTRAL_TAGS, "[THINK]", "[/THINK]")
    )
    assert knows_thoughts(made) and not knows_thoughts(
        format_cases.tokenizer(format_cases.written("mistral_args"))
    )
    tool_format = TOOL_FORMATS["mistral_args"]
    form = AnswerForm(tool_format, thoughts_apart=True).with_tools((TOOL,))
    asked = (HistoryMessage("user", "go"),)
    lineages = Lineages(made, tool_format)
    turn = lineages.begin(lineages.read(ModelCall(asked, (TOOL,))))
    action = made.action('[THINK]Which?[/THINK]I look.[TOOL_CALLS]find[ARGS]{"n": 1}')
    sampled = SampledText(made, form=form, tools=(TOOL,))
    done = sampled.complete(Action(0, action, [0.0] * len(action)), prompt_tokens=0)
    assert (done.thoughts, done.content) == ("Which?", "I look.")
    assert done.calls == (ToolCall("find", {"n": 1}),)
    lineages.act(turn, action, [0.0] * len(action), done.message)
    read = lineages.read(ModelCall((*asked, done.message), (TOOL,)))
    assert read.parent is turn
    message = to_tokenizer_message(HistoryMessage("assistant", "Hi", (), "Hm."), made, tool_format)
    (opening, closing) = (made.action(tag)[0] for tag in ("[THINK]", "[/THINK]"))
    tokens = made.begin([{"role": "user", "content": "[THINK]"}, message], ()).tokens
    assert tokens.count(opening) == tokens.count(closing) == 1
    assert "[THINK]\nHm.\n[/THINK]\n\nHi" in made.text(tokens)
