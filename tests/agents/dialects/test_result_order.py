"""Results of parallel calls reach the policy in the order of the calls, in whatever order and by
whatever API they come, and in conversations to learn from."""

import json
import random

import chat_cases
import pytest
from agent_cases import RULES
from lineage_cases import HERMES

from seeupo_jax.agents.calls import CallRefused
from seeupo_jax.agents.dialects import anthropic_messages, chat_completions, responses
from seeupo_jax.agents.dialects.exchange import Caller
from seeupo_jax.agents.lineages import Lineages, history_digests
from seeupo_jax.learner.imitation.action_segments import to_segments
from seeupo_jax.supervised.conversation import read_conversation

READ = {
    "chat": chat_completions.DIALECT.read,
    "responses": responses.DIALECT.read,
    "messages": anthropic_messages.DIALECT.read,
}


def chat(turns, *, ids=True):
    """OpenAI's messages of turns: (question, calls, the numbers of the calls as results come)."""
    messages = []
    for question, calls, arrival in turns:
        named = [{"id": call} if ids else {} for call in calls]
        functions = [{"name": "find", "arguments": json.dumps({"of": call})} for call in calls]
        messages += [
            {"role": "user", "content": question},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {"type": "function", "function": function, **name}
                    for function, name in zip(functions, named, strict=True)
                ],
            },
            *(
                {"role": "tool", "content": f"result {calls[n]}"}
                | ({"tool_call_id": calls[n]} if ids else {})
                for n in arrival
            ),
        ]
    return {"model": "m", "messages": messages}


def items(turns):
    given = []
    for question, calls, arrival in turns:
        given += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "I look."},
            *(
                {
                    "type": "function_call",
                    "call_id": call,
                    "name": "find",
                    "arguments": json.dumps({"of": call}),
                }
                for call in calls
            ),
            *(
                {
                    "type": "function_call_output",
                    "call_id": calls[n],
                    "output": f"result {calls[n]}",
                }
                for n in arrival
            ),
        ]
    return {"model": "m", "input": given}


def blocks(turns):
    messages = []
    for question, calls, arrival in turns:
        uses = [
            {"type": "tool_use", "id": call, "name": "find", "input": {"of": call}}
            for call in calls
        ]
        results = [
            {"type": "tool_result", "tool_use_id": calls[n], "content": f"result {calls[n]}"}
            for n in arrival
        ]
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, *uses]},
            {"role": "user", "content": results},
        ]
    return {"model": "m", "max_tokens": 9, "messages": messages}


WRITE = {"chat": chat, "responses": items, "messages": blocks}


def read(dialect, tree, **options):
    caller = Caller("m", 1, RULES, options.get("responses", {}), ())
    return READ[dialect](tree, caller).call


def random_turns(rng):
    turns = []
    for turn in range(rng.randint(1, 4)):
        # Some clients number the calls of each message from 0: ids come again.
        prefix = rng.choice(["call", f"t{turn}"])
        calls = [f"{prefix}_{n}" for n in range(rng.choice([1, 2, 3, 8]))]
        rng.shuffle(calls)
        turns.append((f"question {turn}", calls, list(range(len(calls)))))
    return turns


def shuffled(rng, turns):
    return [(said, calls, rng.sample(order, len(order))) for said, calls, order in turns]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(12))
def test_shuffled_results_give_the_tokens_and_digests_of_ordered_ones(seed):
    rng, tokenizer = random.Random(seed), chat_cases.make("qwen3")
    turns = random_turns(rng)
    wanted = read("chat", chat(turns)).messages
    tools = [m.content for m in wanted if m.role == "tool"]
    assert tools == [f"result {call}" for _, calls, _ in turns for call in calls]
    tokens = Lineages(tokenizer, HERMES).read(read("chat", chat(turns))).conversation.tokens
    for dialect in READ:
        call = read(dialect, WRITE[dialect](shuffled(rng, turns)))
        assert call.messages == wanted
        assert [*history_digests(call.messages, ())] == [*history_digests(wanted, ())]
        assert Lineages(tokenizer, HERMES).read(call).conversation.tokens == tokens


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(12))
def test_conversations_to_learn_from_have_results_in_the_order_of_their_calls(seed):
    rng, tokenizer = random.Random(seed), chat_cases.make("qwen3")
    turns = random_turns(rng)

    def segments(turns, **options):
        messages = chat(turns, **options)["messages"]
        answer = {"role": "assistant", "content": "Done."}
        shown = read_conversation({"messages": [*messages, answer]}, "here")
        return [each.tokens_L.tolist() for each in to_segments(shown, tokenizer)]

    assert segments(shuffled(rng, turns)) == segments(turns) == segments(turns, ids=False)


def test_calls_that_are_the_last_message_to_learn_from_need_no_results():
    messages = chat([("a", ["c"], [])])["messages"]
    assert len(read_conversation({"messages": messages}, "here").messages) == 2
    cut = chat([("a", ["c", "d"], [1])])["messages"]
    with pytest.raises(ValueError, match=r"^here: messages\[1\].tool_calls\[0\].id: got 'c' with"):
        read_conversation({"messages": cut}, "here")


UNKNOWN = {
    "chat": "messages[2].tool_call_id: got 'x'; allowed: 'c' or 'd' (messages with role 'tool'",
    "responses": "input[4].call_id: got 'x'; allowed: 'c' or 'd' (No tool call found for",
    "messages": "messages[2].content[0].tool_use_id: got 'x'; allowed: 'c' or 'd' (each `tool_r",
}
MISSING = {
    "chat": "messages[1].tool_calls[1].id: got 'd' without a result; allowed: one result for each"
    " call (an assistant message with 'tool_calls' must be followed by tool messages",
    "responses": "input[3].call_id: got 'd' without a result; allowed: one result for each call"
    " (No tool output found for function call)",
    "messages": "messages[1].content[2].id: got 'd' without a result; allowed: one result for each"
    " call (each `tool_use` block must have",
}
DOUBLED_RESULT = {
    "chat": "messages[3].tool_call_id: got 'c' a second time; allowed: one result for each call.",
    "responses": "input[5].call_id: got 'c' a second time; allowed: one result for each call.",
    "messages": "messages[2].content[1].tool_use_id: got 'c' a second time; allowed: one result",
}
DOUBLED_CALL = {
    "chat": "messages[1].tool_calls[1].id: got 'c' for two calls; allowed: a different id",
    "responses": "input[3].call_id: got 'c' for two calls; allowed: a different id",
    "messages": "messages[1].content[2].id: got 'c' for two calls; allowed: a different id",
}


def renamed(tree, old, new):
    """A request in which results answer another id: the first `old` among them."""
    text = json.dumps(tree)
    for name in ("tool_call_id", "tool_use_id", '"function_call_output", "call_id'):
        text = text.replace(f'{name}": "{old}"', f'{name}": "{new}"', 1)
    return json.loads(text)


@pytest.mark.parametrize("dialect", READ)
@pytest.mark.parametrize(
    "turn, rename, sentences",
    [
        (("a", ["c", "d"], [0, 1]), ("c", "x"), UNKNOWN),
        (("a", ["c", "d"], [0]), None, MISSING),
        (("a", ["c", "d"], [0, 1]), ("d", "c"), DOUBLED_RESULT),
        (("a", ["c", "d"], [0, 0]), None, DOUBLED_RESULT),
        (("a", ["c", "c"], [0, 1]), None, DOUBLED_CALL),
    ],
)
def test_ids_that_do_not_match_are_refused_with_the_field(dialect, turn, rename, sentences):
    tree = WRITE[dialect]([turn])
    if rename:
        tree = renamed(tree, *rename)
    with pytest.raises(CallRefused) as caught:
        read(dialect, tree)
    refused = caught.value
    assert (refused.status, refused.code) == (400, "invalid_value")
    assert str(refused).startswith(f"{refused.param}: got ")
    assert str(refused).startswith(sentences[dialect])


@pytest.mark.parametrize("dialect", READ)
def test_calls_without_any_result_are_refused(dialect):
    with pytest.raises(CallRefused, match="got 'c' without a result"):
        read(dialect, WRITE[dialect]([("a", ["c", "d"], []), ("b", ["e"], [0])]))


@pytest.mark.parametrize("dialect", READ)
def test_a_result_answers_no_call_of_an_earlier_message(dialect):
    tree = renamed(WRITE[dialect]([("a", ["c"], [0]), ("b", ["e"], [0])]), "e", "c")
    with pytest.raises(CallRefused, match="got 'c'; allowed: 'e'"):
        read(dialect, tree)


def test_a_users_text_keeps_its_place_between_results():
    tree = blocks([("a", ["c", "d"], [1, 0])])
    results = tree["messages"][-1]["content"]
    results.insert(1, {"type": "text", "text": "And:"})
    wanted = [("tool", "result c"), ("user", "And:"), ("tool", "result d")]
    assert [(m.role, m.content) for m in read("messages", tree).messages[2:]] == wanted
    # Users' messages in a row are one to Anthropic's API.
    tree["messages"][-1:] = [{"role": "user", "content": [each]} for each in results]
    assert [(m.role, m.content) for m in read("messages", tree).messages[2:]] == wanted


def test_a_chats_results_stand_right_behind_their_calls():
    tree = chat([("a", ["c", "d"], [0, 1])])
    tree["messages"].insert(3, {"role": "user", "content": "And?"})
    with pytest.raises(CallRefused, match=r"tool_calls\[1\].id: got 'd' without a result"):
        read("chat", tree)


def test_items_of_a_response_may_come_one_after_the_other():
    tree = items([("a", ["c", "d"], [0, 1])])
    asked, said, first, second, *results = tree["input"]
    tree["input"] = [asked, said, first, results[0], second, results[1]]
    roles = ["user", "assistant", "tool", "assistant", "tool"]
    assert [m.role for m in read("responses", tree).messages] == roles
    tree["input"] = [asked, first, said, second, *reversed(results)]
    contents = [m.content for m in read("responses", tree).messages]
    assert contents == ["a", "", "I look.", "result c", "result d"]


@pytest.mark.parametrize("arrival, extra", [([0, 1], 0), ([0], 0), ([0, 1], 1)])
def test_without_ids_results_are_in_order_and_as_many_as_calls(arrival, extra):
    tree = chat([("a", ["c", "d"], arrival)], ids=False)
    tree["messages"] += [{"role": "tool", "content": "result"}] * extra
    if len(arrival) == 2 and not extra:
        contents = [m.content for m in read("chat", tree).messages[2:]]
        assert contents == ["result c", "result d"]
        return
    with pytest.raises(CallRefused, match="got (a call without|one more) result|without a result"):
        read("chat", tree)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda m: m[2].pop("tool_call_id"), "messages[2].tool_call_id: got no id; allowed: 'c'"),
        (lambda m: m[1]["tool_calls"][1].pop("id"), "messages[1].tool_calls[1].id: got no id besi"),
        (
            lambda m: m[1]["tool_calls"][0].pop("id"),
            "messages[1].tool_calls[1].id: got 'd' together",
        ),
        (
            lambda m: [call.pop("id") for call in m[1]["tool_calls"]],
            "messages[2].tool_call_id: got",
        ),
    ],
)
def test_ids_beside_none_are_refused(change, sentence):
    messages = chat([("a", ["c", "d"], [0, 1])])["messages"]
    change(messages)
    with pytest.raises(CallRefused) as caught:
        read("chat", {"model": "m", "messages": messages})
    assert str(caught.value).startswith(sentence)
    messages.append({"role": "assistant", "content": "Done."})
    with pytest.raises(ValueError) as found:
        read_conversation({"messages": messages}, "c.jsonl, line 3")
    assert str(found.value).startswith(f"c.jsonl, line 3: {sentence}")


def test_a_name_counts_only_where_there_are_no_ids():
    tree = chat([("a", ["c"], [0])])
    tree["messages"][2]["name"] = "other"
    assert read("chat", tree).messages[2].content == "result c"
    tree = chat([("a", ["c"], [0])], ids=False)
    tree["messages"][2]["name"] = "find"
    assert read("chat", tree).messages[2].content == "result c"
    tree["messages"][2]["name"] = "other"
    with pytest.raises(CallRefused, match="got a result of 'other' without an id; allowed: an id"):
        read("chat", tree)


def test_results_of_calls_that_are_texts_need_no_ids():
    said = {"role": "assistant", "content": HERMES.render("", read("chat", ONE).messages[1].calls)}
    results = [{"role": "tool", "content": str(n)} for n in range(2)]
    messages = [{"role": "user", "content": "a"}, said, *results]
    contents = [m.content for m in read("chat", {"model": "m", "messages": messages}).messages[2:]]
    assert contents == ["0", "1"]
    with pytest.raises(CallRefused, match="got 'x'; allowed: none"):
        read("chat", {"model": "m", "messages": [*messages, results[0] | {"tool_call_id": "x"}]})


ONE = chat([("a", ["c"], [0])])


@pytest.mark.parametrize("ids", [True, False])
def test_many_calls_take_no_time_that_grows_with_their_square(ids):
    names = [str(number) for number in range(20_000)]
    tree = chat(
        [("a", names, range(len(names) - 1, -1, -1) if ids else range(len(names)))], ids=ids
    )
    contents = [m.content for m in read("chat", tree).messages[2:]]
    assert contents == [f"result {name}" for name in names]
