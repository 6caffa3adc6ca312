"""What continues what: tokens that were sampled stay, and each turn lies in exactly one segment."""

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from chat_cases import encode, library_tokens, make, raw_text
from lineage_cases import HERMES, CharTokenizer, ask, assistant, context_tokens, readable, say, user

from seeupo_jax.agents.answer_form import AnswerForm
from seeupo_jax.agents.calls import CallRefused, HistoryMessage, ModelCall
from seeupo_jax.agents.lineages import Lineages, check_length
from seeupo_jax.agents.sampled_text import SampledText
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import choose_format
from seeupo_jax.rollout.engine.protocol import Action
from seeupo_jax.types import CONTEXT

TOOL = {"name": "look", "description": "", "parameters": {}}
LOOK = ToolCall("look", {"at": {"b": 1, "a": [1.0, "x"]}})


def made():
    return Lineages(CharTokenizer(), HERMES)


def play(lineages, call, text, *, answer=None, end=True):
    """A turn, and what the client was told."""
    turn = lineages.begin(lineages.read(call))
    tokens = say(text, end=end)
    answered = assistant(*_parted(text)) if answer is None else answer
    lineages.act(turn, tokens, [-1.0] * len(tokens), answered)
    return answered


def _parted(text):
    content, calls = HERMES.parse(text)
    return content, *calls


def segments(lineages):
    return [readable(segment) for segment in lineages.segments()]


def test_a_history_that_goes_on_is_one_segment():
    lineages = made()
    first = ask(HistoryMessage("system", "be"), "hi")
    said = play(lineages, first, "yes")
    play(lineages, ask(*first.messages, said, "and?"), "no")
    assert segments(lineages) == [["/be//hi//", (0, "yes/"), "/and?//", (1, "no/")]]
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [m["role"] for m in lineages.messages()] == roles
    assert not any("history" in message for message in lineages.messages())


def test_arguments_of_calls_count_in_a_length_before_they_are_tokenised():
    check_length(ask("go", assistant("", LOOK)), CharTokenizer(), 400)
    call = ask("go", assistant("", ToolCall("look", {"at": "x" * 10**7})))
    with pytest.raises(CallRefused, match="^messages: got 100000.. characters") as refused:
        check_length(call, CharTokenizer(), 400)
    assert refused.value.code == "context_length_exceeded"


def test_tools_count_in_a_length_where_a_conversation_lists_them():
    def described(length):
        return ask("go", tools=(TOOL | {"description": "x" * length},))

    check_length(described(1000), CharTokenizer(), 400)
    with pytest.raises(CallRefused, match="^tools: got 1000.. characters with the mess") as refused:
        check_length(described(10**5), CharTokenizer(), 400)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "tools")

    class Deaf(CharTokenizer):
        def begin(self, messages, tools):
            return super().begin(messages, ())

    check_length(described(10**5), Deaf(), 400)


# How clients send our answer back.
REWRITTEN = {
    "as it was": lambda answered: answered,
    "white space": lambda answered: dataclasses.replace(
        answered, content=f"\n {answered.content}  "
    ),
    "other order and numbers": lambda answered: dataclasses.replace(
        answered, calls=(ToolCall("look", {"at": {"a": [1, "x"], "b": 1.0}}),)
    ),
    "through JSON": lambda answered: dataclasses.replace(
        answered, calls=(ToolCall("look", json.loads(json.dumps(LOOK.arguments, indent=2))),)
    ),
}


@pytest.mark.parametrize("client", REWRITTEN)
def test_what_was_sampled_stays_also_where_a_client_normalises_it(client):
    lineages, text = made(), f"  so {HERMES.render('', [LOOK])}"
    said = play(lineages, ask("go", tools=(TOOL,)), text)
    assert said.calls == (LOOK,)
    result = HistoryMessage("tool", "seen")
    play(lineages, ask("go", REWRITTEN[client](said), result, tools=(TOOL,)), "fine")
    assert segments(lineages) == [["/look//go//", (0, f"{text}/"), "/seen//", (1, "fine/")]]


LLAMA, PYTHON_TAG, EOT = choose_format("llama"), 128010, 128009  # tokens of Llama 3
SEARCH = ToolCall("look", {"for": "Grüße <|python_tag|>"})
SEARCH_TEXT = '{"name": "look", "parameters": {"for": "Grüße <|python_tag|>"}}'


def llama_lineages(said):
    """Two calls: a turn whose call follows Llama's token, behind what it says; and its answer."""
    lineages, first = Lineages(make("llama3_2"), LLAMA), ask("go <|python_tag|>", tools=(TOOL,))
    turn, call = lineages.begin(lineages.read(first)), encode("llama3_2", SEARCH_TEXT, plain=True)
    action = [*encode("llama3_2", said), PYTHON_TAG, *call, EOT]
    sampled = SampledText(make("llama3_2"), form=AnswerForm(LLAMA))
    done = sampled.complete(Action(0, action, [-1.0] * len(action)), prompt_tokens=1)
    answer = assistant(done.content, *done.calls)
    lineages.act(turn, action, done.logp, answer)
    history = (*first.messages, answer, HistoryMessage("tool", "seen <|python_tag|>"))
    return lineages, history, [*turn.read.conversation.tokens, *action]


@pytest.mark.exhaustive
@pytest.mark.parametrize("said", ["", "I look. "])
def test_a_call_behind_llamas_control_token_is_one_and_goes_on(said):
    lineages, history, before = llama_lineages(said)
    assert history[1] == assistant(said.strip(), SEARCH)
    after = lineages.read(ask(*history, tools=(TOOL,))).conversation.tokens
    assert after[: len(before)] == before and after.count(PYTHON_TAG) == 1
    assert lineages.messages()[1]["content"] == f"{said}<|python_tag|>{SEARCH_TEXT}"


@pytest.mark.exhaustive
def test_a_history_has_llamas_token_between_text_and_calls_only():
    _, history, _ = llama_lineages("I look. ")
    tokens = Lineages(make("llama3_2"), LLAMA).read(ask(*history)).conversation.tokens
    place = tokens.index(PYTHON_TAG)
    assert raw_text("llama3_2", tokens[:place]).endswith("\n\nI look.")
    assert raw_text("llama3_2", tokens[place + 1 :]).startswith(f"{SEARCH_TEXT}<|eot_id|>")
    assert tokens.count(PYTHON_TAG) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_2"])
def test_calls_in_a_clients_history_are_written_as_the_model_knows_them(name):
    call = ToolCall("look", {"for": "Grüße", "n": [1, 2.5]})
    said = assistant("", call) if name == "llama3_2" else assistant("I look.", call, call)
    functions = [
        {"type": "function", "function": {"name": "look", "arguments": dict(call.arguments)}}
        for _ in said.calls
    ]
    wanted = library_tokens(
        name,
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": said.content, "tool_calls": functions},
            {"role": "user", "content": "and?"},
        ],
    )
    lineages = Lineages(make(name), LLAMA if name == "llama3_2" else HERMES)
    assert lineages.read(ask("hi", said, "and?")).conversation.tokens == wanted
    half = ToolCall("look", {"for": "\ud83d"})
    with pytest.raises(ValueError, match="surrogates not allowed"):
        lineages.read(ask("hi", assistant("", half), "and?"))


# What is another message than our answer `yes`, or another question than `hi`.
OTHERS = {
    "another word": ask("hi", assistant("no"), "and?"),
    "another case": ask("hi", assistant("Yes"), "and?"),
    "inner white space": ask("hi", assistant("y es"), "and?"),
    "a call": ask("hi", assistant("yes", ToolCall("look", {})), "and?"),
    "another role": ask("hi", user("yes"), "and?"),
    "another question": ask("ho", assistant("yes"), "and?"),
    "one more before": ask("oh", "hi", assistant("yes"), "and?"),
    "other tools": ask("hi", assistant("yes"), "and?", tools=(TOOL,)),
    "a compacted history": ask("they said yes", "and?"),
}


@pytest.mark.parametrize("change", OTHERS)
def test_what_differs_begins_a_segment_with_all_before_as_context(change):
    lineages, call = made(), OTHERS[change]
    play(lineages, ask("hi"), "yes")
    play(lineages, call, "no")
    first, second = lineages.segments()
    assert readable(first) == ["/hi//", (0, "yes/")]
    shown = [{"role": "system", "content": "look"}] if call.tools else []
    written = [
        {"role": m.role, "content": HERMES.render(m.content, m.calls) if m.calls else m.content}
        for m in call.messages
    ]
    context = context_tokens([*shown, *written])
    assert second.tokens_L.tolist() == [*context, *say("no")]
    assert second.turn_L.tolist() == [CONTEXT] * len(context) + [1] * 3
    sent = [m for m in lineages.messages() if "history" in m]
    assert len(sent) == sum(m.role == "assistant" for m in call.messages)


def test_a_turn_of_true_is_not_one_of_1():
    lineages = made()
    said = play(lineages, ask("hi"), HERMES.render("", [ToolCall("look", {"at": True})]))
    other = dataclasses.replace(said, calls=(ToolCall("look", {"at": 1}),))
    assert lineages.read(ask("hi", other, "and?")).parent is None
    assert lineages.read(ask("hi", said, "and?")).parent is not None


def test_a_branch_repeats_what_was_sampled_as_context_and_the_first_to_go_on_stays():
    lineages = made()
    said = play(lineages, ask("hi"), "  yes")
    more = play(lineages, ask("hi", said, "left?"), "L")
    play(lineages, ask("hi", said, "right?"), "R")
    play(lineages, ask("hi", said, "left?", more, "on?"), "M")
    left = ["/hi//", (0, "  yes/"), "/left?//", (1, "L/"), "/on?//", (3, "M/")]
    right = ["/hi//  yes//right?//", (2, "R/")]  # the white space that was sampled
    assert segments(lineages) == [left, right]


def test_the_same_history_twice_is_two_lineages_and_the_later_one_goes_on():
    lineages = made()
    for _ in range(2):
        said = play(lineages, ask("hi"), "yes")
    play(lineages, ask("hi", said, "on"), "a")
    play(lineages, ask("hi", said, "on"), "b")
    later, earlier = ["/hi//", (1, "yes/"), "/on//"], ["/hi//", (0, "yes/"), "/on//"]
    assert segments(lineages) == [[*earlier, (3, "b/")], [*later, (2, "a/")]]


def test_calls_side_by_side_are_numbered_as_they_were_begun():
    lineages = made()
    said = play(lineages, ask("plan"), "two")
    calls = [ask("plan", said, "one?"), ask("you are a helper", "sub"), ask("plan", said, "two?")]
    turns = [lineages.begin(lineages.read(call)) for call in calls]
    for turn, text in reversed(list(zip(turns, ("A", "B", "C"), strict=True))):
        lineages.act(turn, say(text), [-1.0, -2.0], assistant(text))
    assert segments(lineages) == [
        ["/plan//", (0, "two/"), "/one?//", (1, "A/")],
        ["/you are a helper//sub//", (2, "B/")],
        ["/plan//two//two?//", (3, "C/")],
    ]
    assert [m["content"] for m in lineages.messages() if m["role"] == "assistant"] == [
        *("two", "A", "B", "C")
    ]


def test_a_cancelled_turn_leaves_no_hole_and_its_history_goes_on():
    lineages = made()
    said = play(lineages, ask("hi"), "yes")
    lost = lineages.begin(lineages.read(ask("hi", said, "on")))
    alone = lineages.begin(lineages.read(ask("else")))
    lineages.cancel(lost)
    lineages.cancel(alone)
    assert (lineages.turns, lineages.cancelled) == (1, 2)
    turn = lineages.begin(lineages.read(ask("hi", said, "on")))
    assert (turn.number, turn.lineage) == (3, 0)
    lineages.act(turn, say("a"), [-1.0, -1.0], assistant("a"))
    assert segments(lineages) == [["/hi//", (0, "yes/"), "/on//", (1, "a/")]]


def test_an_action_that_was_cut_goes_on_as_it_is():
    lineages = made()
    said = play(lineages, ask("hi"), "yes STOP", answer=assistant("yes"), end=False)
    play(lineages, ask("hi", said, "on"), "a")
    assert segments(lineages) == [["/hi//", (0, "yes STOP"), "/on//", (1, "a/")]]


def test_an_answer_may_be_continued_without_a_message():
    lineages = made()
    said = play(lineages, ask("hi"), "yes")
    play(lineages, ask("hi", said), "and more")
    assert segments(lineages) == [["/hi//", (0, "yes/"), "/", (1, "and more/")]]


def test_an_episode_without_a_call_has_an_empty_segment():
    (segment,) = made().segments()
    assert segment.tokens_L.size == 0 and made().messages() == []


@pytest.mark.parametrize("content", ["refuse me", "half \ud800"])
def test_what_cannot_be_read_changes_nothing(content):
    lineages = made()
    with pytest.raises((ValueError, RuntimeError)):
        lineages.read(ask(content))
    assert (lineages.turns, lineages.cancelled) == (0, 0)


def long_history(tokenizer, said, count):
    """An episode of so many turns in a row: it, its turns, contexts, and histories after each."""
    lineages, history = Lineages(tokenizer, HERMES), [user("go")]
    turns, contexts, histories = [], [], []
    for number in range(count):
        turn = lineages.begin(lineages.read(ask(*history, tools=(dict(TOOL),))))
        contexts.append(turn.read.conversation)
        action, answer = said(number)
        lineages.act(turn, action, [-1.0] * len(action), answer)
        turns.append(turn)
        histories.append([*history, answer])
        history += [answer, HistoryMessage("tool", f"row {number}")]
    return lineages, turns, contexts, histories


def test_a_long_episode_keeps_few_of_its_conversations_and_no_message_twice():
    _, turns, _, histories = long_history(CharTokenizer(), lambda n: (say("y"), assistant("y")), 40)
    kept = [turn.number for turn in turns if turn.read.kept is not None]
    assert kept == [0, 16, 32, 39]
    assert sum(len(turn.read.new) for turn in turns) == len(histories[-1]) - 40
    assert all(turn.read.tools is turns[0].read.tools for turn in turns)


@pytest.mark.sampled("characters")
@pytest.mark.parametrize("name", ["characters", "qwen3"])
def test_a_branch_from_any_turn_of_a_long_episode_reads_on_from_its_tokens(name):
    tokenizer = CharTokenizer() if name == "characters" else make(name)

    def said(number):  # the template of Qwen3 takes thoughts out of a history
        text = f"row {number}"
        if name == "characters":
            return say(text), assistant(text)
        return tokenizer.action(f"<think>\nhm\n</think>\n\n{text}"), assistant(text)

    lineages, turns, contexts, histories = long_history(tokenizer, said, 20)
    end = {"role": "user", "content": "end"}
    for number in np.random.default_rng(0).permutation(20).tolist():
        read = lineages.read(ask(*histories[number], "end", tools=(TOOL,)))
        assert read.parent is turns[number]
        wanted = contexts[number].extend(turns[number].action, [end])
        assert read.conversation.tokens == wanted.tokens


class Oracle:
    """The rules once more, naively: whole histories, compared one by one."""

    def __init__(self):
        self.turns = []

    def begin(self, call):
        """The context that a call has to be read as."""
        found = None
        for place, turn in enumerate(self.turns):
            if turn.answer is None or turn.call.tools != call.tools:
                continue
            whole = [*turn.call.messages, turn.answer]
            alike = len(whole) <= len(call.messages) and all(
                same(one, other) for one, other in zip(whole, call.messages, strict=False)
            )
            if alike:
                found = max(found or (0, 0, 0), (len(whole), self.goes_on(place) is None, place))
        if found is None:
            context = context_tokens([*as_messages(call.tools), *as_messages(call.messages)])
        else:
            known, _, place = found
            before = self.turns[place]
            context = [
                *before.context,
                *before.action,
                *context_tokens(as_messages(call.messages[known:])),
            ]
        parent = found[2] if found is not None and found[1] else None
        self.turns.append(OracleTurn(call, context, parent))
        return context

    def goes_on(self, place):
        """The turn that continues one in its own segment, if any does."""
        following = [t for t in self.turns if t.parent == place and not t.gone]
        assert len(following) <= 1
        return following[0] if following else None

    def segments(self):
        """Tokens, and the turn that sampled each."""
        answered = [turn for turn in self.turns if turn.answer is not None]
        segments = []
        for first in (turn for turn in answered if turn.parent is None):
            turn, marks = first, []
            while turn is not None:
                marks += [CONTEXT] * (len(turn.context) - len(marks))
                marks += [answered.index(turn)] * len(turn.action)
                tokens = [*turn.context, *turn.action]
                turn = self.goes_on(self.turns.index(turn))
            segments.append((tokens, marks))
        return segments


@dataclasses.dataclass(eq=False)
class OracleTurn:
    """parent: the turn that it continues in the same segment. gone: it was cancelled."""

    call: ModelCall
    context: list
    parent: int | None
    action: list | None = None
    answer: HistoryMessage | None = None
    gone: bool = False


def same(one, other):
    def calls(message):
        def numbers(value):
            return json.loads(json.dumps(value), parse_int=float)

        return [(call.name, numbers(call.arguments)) for call in message.calls]

    texts = one.content.strip() == other.content.strip()
    return one.role == other.role and texts and calls(one) == calls(other)


def as_messages(messages):
    return [
        {"role": "system", "content": each["name"]}
        if isinstance(each, dict)
        else {"role": each.role, "content": HERMES.render(each.content, each.calls)}
        for each in messages
    ]


def sent_back(message, rng):
    """An assistant's message as some client writes it anew."""
    content = rng.choice(["", " ", "\n"]) + message.content + rng.choice(["", " "])
    calls = (json.loads(json.dumps([c.name, c.arguments])) for c in message.calls)
    calls = tuple(ToolCall(name, dict(reversed(args.items()))) for name, args in calls)
    return HistoryMessage(message.role, content, calls)


def random_call(rng, answered):
    """What an agent may ask next, after these calls and their answers."""
    word = str(rng.integers(2))
    if not answered or rng.random() < 0.15:
        tools = (TOOL,) if rng.random() < 0.2 else ()
        return ModelCall((user(word), *([user("x")] * int(rng.integers(2)))), tools)
    call, answer = answered[-1 if rng.random() < 0.6 else int(rng.integers(len(answered)))]
    tools, sent = call.tools, [*call.messages, answer]
    sent = [sent_back(each, rng) if each.role == "assistant" else each for each in sent]
    change = rng.random()
    if change < 0.1:  # rewrites a message
        place = int(rng.integers(len(sent)))
        sent[place] = dataclasses.replace(sent[place], content=sent[place].content + "!")
    elif change < 0.2:  # compacts
        sent = [user(f"so far {len(sent)}")]
    elif change < 0.3:
        tools = () if tools else (TOOL,)
    new = [HistoryMessage(str(rng.choice(["user", "tool"])), word)] * int(rng.integers(3))
    return ModelCall((*sent, *new), tools)


def random_answer(rng):
    """Tokens of an action, and what the client is told."""
    text = str(rng.integers(2))
    if rng.random() < 0.3:
        text = HERMES.render(text, [ToolCall("look", {"at": int(rng.integers(2)), "b": 1.5})])
    return say(text, end=bool(rng.random() < 0.8)), assistant(*_parted(text))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(30))
def test_random_agents_against_a_naive_oracle(seed):
    rng, lineages, oracle = np.random.default_rng(seed), made(), Oracle()
    waiting, answered, seen = [], [], Counter()
    for step in range(60):
        if step < 50 and (rng.random() < 0.55 or not waiting):
            call = random_call(rng, answered)
            read = lineages.read(call)
            assert read.conversation.tokens == oracle.begin(call)
            waiting.append((lineages.begin(read), oracle.turns[-1]))
            seen["branch"] += read.parent is not None and oracle.turns[-1].parent is None
            seen["goes on"] += oracle.turns[-1].parent is not None
        elif waiting:
            turn, known = waiting.pop(int(rng.integers(len(waiting))))
            if step >= 50 or rng.random() < 0.2:
                lineages.cancel(turn)
                known.gone = True
                continue
            known.action, known.answer = random_answer(rng)
            lineages.act(turn, known.action, [-1.0] * len(known.action), known.answer)
            answered.append((known.call, known.answer))
    for turn, known in waiting:
        lineages.cancel(turn)
        known.gone = True
    got = [(s.tokens_L.tolist(), s.turn_L.tolist()) for s in lineages.segments()]
    assert got == oracle.segments()
    turns = [set(marks) - {CONTEXT} for _, marks in got]
    assert sorted(itertools.chain(*turns)) == list(range(len(answered))) == [*range(lineages.turns)]
    assert seen["goes on"] >= 5 and len(got) >= 3
    assert all((s.logp_L == np.where(s.turn_L >= 0, -1, 0)).all() for s in lineages.segments())


BILLED = r"^billing: .*$"


@pytest.mark.parametrize("volatile, count", [((BILLED,), 1), ((), 2)])
def test_volatile_texts_of_a_system_message_do_not_begin_a_lineage(volatile, count):
    lineages = Lineages(CharTokenizer(), HERMES, volatile)
    system = [HistoryMessage("system", f"billing: {number}\nbe brief") for number in (1, 2)]
    said = play(lineages, ask(system[0], "go"), "one")
    play(lineages, ask(system[1], "go", said, "on"), "two")
    assert lineages.count == count
    if volatile:  # the policy keeps the text that it read first
        first = "/billing: 1\nbe brief//go//"
        assert segments(lineages) == [[first, (0, "one/"), "/on//", (1, "two/")]]


def test_volatile_texts_count_in_other_messages_and_beside_other_words():
    lineages = Lineages(CharTokenizer(), HERMES, (BILLED,))
    said = play(
        lineages, ask(HistoryMessage("system", "billing: 1\nbe brief"), "billing: 1"), "one"
    )
    for system, asked in (
        ("billing: 1\nbe long", "billing: 1"),
        ("billing: 1\nbe brief", "billing: 2"),
    ):
        play(lineages, ask(HistoryMessage("system", system), asked, said, "on"), "two")
    assert lineages.count == 3
