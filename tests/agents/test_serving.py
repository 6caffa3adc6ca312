"""Calls of clients are answered by the engine: what it would sample for exactly their tokens."""

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import numpy as np
import openai_cases
import pytest
from flax import nnx
from lineage_cases import HERMES, CharTokenizer, context_tokens, say
from rollout_cases import NumberTokenizer, stir

from seeupo_jax.agents.answer_form import AnswerForm
from seeupo_jax.agents.calls import CallRefused, HistoryMessage, ModelCall
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.agents.endpoint import Endpoint
from seeupo_jax.agents.serving import ServingSession
from seeupo_jax.configuration import schema
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import choose_format
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.rope import Rope
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.protocol import Action
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine

ACTION, CONTEXT = 6, openai_cases.LENGTH
TOKENIZER = NumberTokenizer()
TOOL = {"name": "look", "description": "", "parameters": {}}
ROLLOUT = schema.Rollout(
    tasks=1, group_size=3, max_action_tokens=ACTION, max_context=CONTEXT, page_size=8
)


@pytest.fixture(scope="module")
def made():
    arch = Architecture(**openai_cases.SIZES, mlp_width=24, rope=Rope(theta=100.0))
    network, params = policy.split_model(Transformer(arch, nnx.Rngs(0)))
    sampling = Sampling(1.0, None, None, ACTION, TOKENIZER.end_ids)
    return SlotEngine(network, sampling, plan_cache(arch, ROLLOUT), steps=2), stir(params)


@pytest.fixture
def serve(made):
    """Serves at a temperature, in a thread that ends with the test."""
    engine, params = made
    with contextlib.ExitStack() as stack:

        def start(temperature=0.01, **options):
            engine.begin(params, seed=1, temperature=temperature)
            limits = {"max_action_tokens": ACTION, "max_context": CONTEXT}
            serving = ServingSession(
                engine, TOKENIZER, AnswerForm(choose_format("hermes")), **limits, **options
            )
            thread = threading.Thread(target=serving.run)
            thread.start()
            stack.callback(thread.join, 30)
            stack.callback(serving.stop)
            serving.thread = thread
            return serving

        yield start


def user(content):
    return HistoryMessage("user", content)


def assistant(content):
    return HistoryMessage("assistant", content)


def ask(serving, *messages, on_text=None, **fields):
    """The answer to one call."""
    return asyncio.run(serving.complete(ModelCall(messages, **fields), on_text))


def greedy(context, limit=ACTION):
    """What follows a context, likeliest first: by the network on whole sequences."""
    sampled = []
    while len(sampled) < limit and not set(sampled) & set(TOKENIZER.end_ids):
        sampled.append(int(np.argmax(openai_cases.logits_LV([*context, *sampled])[-1])))
    return sampled


def tokens_of(done):
    return [int(piece) if piece else None for piece in done.pieces]


def test_calls_side_by_side_get_what_each_would_alone(serve):
    serving = serve()
    prompts = ["1 2", "5 6 8 9", "12 13 15", "1 2 4", "18"]  # more than there are slots

    async def together():
        calls = (serving.complete(ModelCall((user(prompt),))) for prompt in prompts)
        return await asyncio.gather(*calls)

    for prompt, done in zip(prompts, asyncio.run(together()), strict=True):
        context = TOKENIZER.observation([{"role": "user", "content": prompt}])
        wanted = greedy(context)
        assert done.text == done.content == TOKENIZER.text(wanted)
        assert done.prompt_tokens == len(context) and len(done.logp) == len(wanted)
        ended = wanted[-1] in TOKENIZER.end_ids
        assert done.finish == ("stop" if ended else "length")


def test_what_was_sampled_is_not_tokenised_again(serve):
    serving = serve()
    opening = [{"role": "user", "content": "5 6"}]
    context = TOKENIZER.observation(opening)
    cut = greedy(context, limit=2)  # without an end token, which its text alone would get
    first = ask(serving, user("5 6"), max_tokens=2)
    assert first.finish == "length" and first.content == TOKENIZER.text(cut)
    context = [*context, *cut, *TOKENIZER.observation([{"role": "user", "content": "9"}])]
    again = ask(serving, user("5 6"), assistant(f" {first.content}\n"), user("9"))
    assert again.content == TOKENIZER.text(greedy(context))
    assert (again.prompt_tokens, again.cached_tokens) == (len(context), len(cut) + 4)
    branch = ask(serving, user("5 6"), assistant(first.content), user("9 9"))
    assert branch.prompt_tokens == len(context) + 1


def test_the_tokens_of_a_call_are_those_of_its_answer(serve):
    serving = serve()
    asyncio.run(serving.context(ModelCall((user("5 6"),))))
    assert serving.counts == {} and not serving.waiting
    first = ask(serving, user("5 6"), max_tokens=2)
    call = ModelCall((user("5 6"), assistant(first.content), user("9")))
    tokens = asyncio.run(serving.context(call))
    assert tokens[: first.prompt_tokens + 2][-2:] == greedy(tokens[: first.prompt_tokens], limit=2)
    assert asyncio.run(serving.complete(call)).prompt_tokens == len(tokens)
    with pytest.raises(CallRefused, match="got 20000 characters; allowed: fewer"):
        asyncio.run(serving.context(ModelCall((user("5 " * 10_000),))))
    serving.stop()
    serving.thread.join(30)
    with pytest.raises(CallRefused, match="shutting down"):
        asyncio.run(serving.context(call))


def test_a_forgotten_conversation_is_tokenised_as_it_reads(serve):
    serving = serve(cache_tokens=1)
    first = ask(serving, user("5 6"), max_tokens=2)
    ask(serving, user("8"))  # now the latest
    again = ask(serving, user("5 6"), assistant(first.content), user("9"))
    kept = [{"role": r, "content": c} for r, c in (("user", "5 6"), ("assistant", first.content))]
    context = TOKENIZER.observation([*kept, {"role": "user", "content": "9"}])
    assert again.prompt_tokens == len(context)
    assert again.content == TOKENIZER.text(greedy(context))


def test_no_two_requests_draw_the_same_random_numbers(serve):
    serving = serve(temperature=100.0)
    assert len({ask(serving, user("1 2")).text for _ in range(4)}) == 4


def test_text_is_streamed_and_ends_before_a_stop_string(serve):
    serving, pieces = serve(temperature=100.0), []
    whole = ask(serving, user("1 2"), on_text=pieces.append)
    assert len(pieces) > 1 and "".join(pieces) == whole.text
    serving = serve(temperature=0.01)
    text = ask(serving, user("1 2")).text
    stop = text.split(" ")[1]
    done = ask(serving, user("1 2"), stop=(stop,))
    assert (done.text, done.finish) == (text[: text.index(stop)], "stop")


def test_an_answer_ends_where_the_context_does(serve):
    serving = serve()
    long = " ".join(["5"] * (CONTEXT - 5))  # and three tokens around it
    done = ask(serving, user(long))
    assert len(done.pieces) <= 2 == CONTEXT - done.prompt_tokens
    with pytest.raises(CallRefused, match=f"got {CONTEXT + 1} tokens; allowed: fewer") as refused:
        ask(serving, user(f"{long} 5 5 5"))
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    # What litellm looks for in the texts of OpenAI's and Anthropic's errors.
    sentence = str(refused.value).lower()
    assert f"this model's maximum context length is {CONTEXT} tokens" in sentence
    assert "prompt is too long" in sentence
    with pytest.raises(CallRefused, match="got 9999 characters; .* context length is 40 tokens"):
        ask(serving, user("5" * 9999))
    with pytest.raises(CallRefused, match="messages: .* invalid literal") as refused:
        ask(serving, user("no number"))
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert ask(serving, user("1 2")).text


def test_a_client_that_vanishes_frees_its_slot_and_leaves_nothing(serve, made):
    serving = serve(temperature=100.0)

    async def vanish():
        calls = [asyncio.ensure_future(serving.complete(ModelCall((user("1"),)))) for _ in range(9)]
        await asyncio.sleep(0)
        for call in calls[:-1]:
            call.cancel()
        return await asyncio.wait_for(calls[-1], 30)

    assert asyncio.run(vanish()).prompt_tokens == 4
    assert ask(serving, user("2")).text is not None
    assert not made[0].busy
    assert serving.counts["answered"] + serving.counts["cancelled"] == 10


class Released:
    """An engine, and the keys that it was told to forget."""

    def __init__(self, engine):
        self._engine, self.keys = engine, []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def release(self, key):
        self.keys.append(key)
        self._engine.release(key)


def test_the_pages_of_a_client_that_vanished_are_released(made):
    engine, params = made
    engine.begin(params, seed=1, temperature=0.01)
    released = Released(engine)
    limits = {"max_action_tokens": ACTION, "max_context": CONTEXT}
    serving = ServingSession(released, TOKENIZER, AnswerForm(choose_format("hermes")), **limits)

    async def vanish():
        call = asyncio.ensure_future(serving.complete(ModelCall((user("1 2"),))))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])

    asyncio.run(vanish())
    serving.stop()
    serving.run()
    assert serving.counts == {"cancelled": 1} and released.keys == [0]


class Told:
    """An engine that gives each turn the next of these actions, and keeps the turns."""

    plan = SimpleNamespace(shards=2)

    def __init__(self, *actions):
        self._actions, self.turns, self.released = iter(actions), [], []

    def submit(self, turn):
        self.turns.append(turn)

    def release(self, key):
        self.released.append(key)

    def step(self, unfinished):
        tokens, fields = next(self._actions)
        return [Action(self.turns[-1].key, tokens, [-1.0] * len(tokens), **fields)]


@contextlib.contextmanager
def told(engine):
    """Serves characters by such an engine."""
    limits = {"max_action_tokens": 200, "max_context": 400}
    serving = ServingSession(engine, CharTokenizer(), AnswerForm(HERMES), **limits)
    thread = threading.Thread(target=serving.run)
    thread.start()
    try:
        yield serving
    finally:
        serving.stop()
        thread.join(30)


def test_a_tool_that_the_grammar_refuses_is_the_clients_and_other_failures_are_logged(caplog):
    refused = {"failure": "tool 'look': no such format", "refuses_tools": True}
    engine = Told(([], {"failure": "the grammar is stuck"}), ([], refused))
    replies = []
    with told(engine) as serving:
        for _ in range(2):
            with pytest.raises(CallRefused) as error:
                ask(serving, user("a"), tools=(TOOL,), max_tokens=999)
            replies.append((error.value.status, error.value.param, str(error.value)))
    assert replies == [
        (500, "", "the grammar is stuck"),
        (400, "tools", "tools: tool 'look': no such format"),
    ]
    assert caplog.messages == ["a call failed: the grammar is stuck"]
    assert engine.released == [turn.key for turn in engine.turns] == [0, 1]
    assert serving.counts == {"refused": 2}
    turn = engine.turns[0]
    # 1: the engine takes turns of number 0 after all others.
    assert (turn.limit, turn.turn, turn.tools) == (200, 1, (TOOL,))


def test_calls_of_tools_are_read_where_there_are_tools_and_continue_as_they_were_sampled():
    call = ToolCall("look", {"at": 1})
    action = say("so\n\n\n" + HERMES.render("", [call]))
    engine = Told((action, {}), (say("ok"), {}), (action, {}))
    with told(engine) as serving:
        done = ask(serving, user("a"), tools=(TOOL,))
        assert (done.content, done.calls) == ("so", (call,))
        back = HistoryMessage("assistant", done.content, done.calls)
        ask(serving, user("a"), back, user("b"), tools=(TOOL,))
        plain = ask(serving, user("a"))
    assert (plain.content, plain.calls) == (CharTokenizer().text(action), ())
    first, second, third = engine.turns
    new = context_tokens([{"role": "user", "content": "b"}])
    assert list(second.context) == [*first.context, *action, *new]
    assert second.group == first.group and third.tools == ()


def test_it_sleeps_while_there_is_nothing_to_sample(serve):
    serving = serve()
    ask(serving, user("1 2"))
    spent = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - spent < 0.05


def test_what_is_open_when_it_stops_is_refused_and_what_comes_later_too(serve):
    serving = serve()

    async def stopped():
        calls = [asyncio.ensure_future(serving.complete(ModelCall((user("1"),)))) for _ in range(9)]
        serving.stop()  # before any of them is taken
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(stopped())
    serving.thread.join(30)
    assert not serving.thread.is_alive()
    with pytest.raises(CallRefused) as late:
        ask(serving, user("1 2"))
    assert {error.status for error in [*outcomes, late.value]} == {503}
    assert late.value.code == "shutting_down"


def test_a_call_that_waits_when_the_server_stops_is_answered_503(made):
    engine, params = made
    engine.begin(params, seed=1, temperature=0.01)
    limits = {"max_action_tokens": ACTION, "max_context": CONTEXT}
    serving = ServingSession(engine, TOKENIZER, AnswerForm(choose_format("hermes")), **limits)
    endpoint = Endpoint(
        sampling=SamplingRules(1.0), model="x", form=AnswerForm(choose_format("hermes"))
    )
    endpoint.start()
    access = endpoint.open_key(serving)
    body = {"model": "x", "messages": [{"role": "user", "content": "1 2"}]}
    with httpx.Client(headers={"x-api-key": access.api_key}, timeout=30) as http:
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(http.post, f"{access.base_url}/chat/completions", json=body)
            while serving.waiting == 0:
                time.sleep(0.01)
            serving.stop()
            serving.run()
            endpoint.close(cancel=False)
            reply = asked.result()
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")


def test_fields_without_effect_are_counted_by_name_and_their_names_are_bounded(made, caplog):
    serving = ServingSession(
        made[0], TOKENIZER, AnswerForm(choose_format("hermes")), max_action_tokens=1, max_context=2
    )
    for number in range(3):
        serving.ignored(f"tools[{number}].function.response")
    assert serving.counts == {"ignored 'tools[].function.response'": 3}
    assert [record.getMessage() for record in caplog.records] == [
        "warning: clients set fields without effect here: ignored 'tools[].function.response'."
    ]
    for number in range(1000):
        serving.ignored(f"x{number}" + "x" * 1000)
    assert len(serving.counts) == 65 and serving.counts["ignored otherwise"] == 1000 - 63
    assert max(map(len, serving.counts)) < 100
