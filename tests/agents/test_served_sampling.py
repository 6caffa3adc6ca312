"""A server samples as each request asks, and in the form that it asks for: by real clients."""

import contextlib
import functools
import json
import threading

import anthropic
import numpy as np
import openai
import openai_cases
import pytest
from flax import nnx
from rollout_cases import stir

from seeupo_jax.agents.answer_form import AnswerForm
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.agents.endpoint import Endpoint
from seeupo_jax.agents.openai_server import OpenAIServer
from seeupo_jax.agents.serving import ServingSession
from seeupo_jax.configuration import schema
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy.rope import Rope
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.constraints import Constraints
from seeupo_jax.rollout.engine.protocol import Turn
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine

ACTION, CONTEXT = 64, 256
FORMAT = TOOL_FORMATS["hermes"]
PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "at": {"enum": ["home", "work"]}},
    "required": ["on", "at"],
    "additionalProperties": False,
}
TOOL = {"name": "light", "description": "", "parameters": PARAMETERS}
OTHER = {"name": "wait", "description": "", "parameters": {"type": "object", "properties": {}}}


@functools.cache
def tokenizer():
    return read_tokenizer("package:order_desk")


@functools.cache
def network():
    sizes = openai_cases.SIZES | {"vocab_size": tokenizer().vocab_size}
    arch = Architecture(**sizes, mlp_width=24, rope=Rope(theta=100.0))
    made, params = policy.split_model(Transformer(arch, nnx.Rngs(0)))
    return made, stir(params)


@functools.cache
def logits_LV():
    return openai_cases.logits_of(*network(), CONTEXT)


@pytest.fixture(scope="module")
def served():
    """The address and the key of a server, and its session."""
    made, params = network()
    rollout = schema.Rollout(
        tasks=1, group_size=4, max_action_tokens=ACTION, max_context=CONTEXT, page_size=16
    )
    engine = SlotEngine(
        made,
        Sampling(1.0, None, None, ACTION, tokenizer().end_ids),
        plan_cache(made.arch, rollout),
        steps=4,
        few=True,
        per_turn=True,
        constraints=Constraints(tokenizer(), made.arch.vocab_size, FORMAT),
    )
    engine.begin(params, seed=1)
    limits = {"max_action_tokens": ACTION, "max_context": CONTEXT}
    serving = ServingSession(engine, tokenizer(), AnswerForm(FORMAT), **limits)
    rules = SamplingRules(1.0, serves=True, constrains=True)
    endpoint = Endpoint(sampling=rules, model="m", form=AnswerForm(FORMAT))
    thread = threading.Thread(target=serving.run)
    with contextlib.ExitStack() as stack:
        thread.start()
        stack.callback(thread.join, 30)
        stack.callback(serving.stop)
        endpoint.start()
        stack.callback(endpoint.close)
        yield endpoint.open_key(serving), serving


@pytest.fixture(scope="module")
def client(served):
    access, _ = served
    with openai.OpenAI(
        base_url=access.base_url, api_key=access.api_key, max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="module")
def other_client(served):
    access, _ = served
    url = access.base_url.removesuffix("/v1")
    with anthropic.Anthropic(
        base_url=url, api_key=access.api_key, max_retries=0, timeout=60
    ) as client:
        yield client


def chat(client, text="hello", **options):
    messages = [{"role": "user", "content": text}]
    options = {"max_tokens": 8} | options
    return client.chat.completions.create(model="m", messages=messages, **options)


def pieces(choice):
    """The bytes of each token of an answer."""
    return [bytes(each.bytes) for each in choice.logprobs.content]


def greedy(text, count):
    """The likeliest tokens after a question, and the model's log-probabilities there: [L, V]."""
    context = list(tokenizer().begin([{"role": "user", "content": text}], ()).tokens)
    sampled, rows = [], []
    while len(sampled) < count and not set(sampled) & set(tokenizer().end_ids):
        logits_V = logits_LV()([*context, *sampled])[-1]
        rows.append(logits_V - np.logaddexp.reduce(logits_V))
        sampled.append(int(logits_V.argmax()))
    return sampled, rows


def test_temperature_zero_is_greedy_in_all_three_apis_with_the_models_log_probabilities(
    client, other_client
):
    tokens, logp = greedy("hello", 8)
    wanted = tokenizer().text(tokens)
    (choice,) = chat(client, temperature=0, logprobs=True, top_logprobs=3).choices
    assert choice.message.content == wanted
    for each, token, logp_V in zip(choice.logprobs.content, tokens, logp, strict=True):
        np.testing.assert_allclose(each.logprob, logp_V[token], atol=1e-4)
        likeliest = np.sort(logp_V)[::-1][:3]
        np.testing.assert_allclose([t.logprob for t in each.top_logprobs], likeliest, atol=1e-4)
        assert each.top_logprobs[0].token == each.token
    reply = client.responses.create(
        model="m", input="hello", temperature=0, top_p=0.5, max_output_tokens=8
    )
    assert reply.output_text == wanted
    assert (reply.temperature, reply.top_p) == (0, 0.5)
    messages = [{"role": "user", "content": "hello"}]
    options = {"temperature": 0, "top_k": 5, "top_p": 0.9}
    reply = other_client.messages.create(
        model="m", max_tokens=8, messages=messages, extra_body=options
    )
    assert "".join(block.text for block in reply.content) == wanted


def test_a_seed_repeats_an_answer_and_several_answers_have_seeds_of_their_own(client):
    options = {"temperature": 2, "n": 3, "logprobs": True}
    alone = [pieces(each) for each in chat(client, seed=11, **options).choices]
    assert len({tuple(each) for each in alone}) == 3
    with_others = []
    threads = [
        threading.Thread(target=lambda: chat(client, "others", n=4, temperature=1.5))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    with_others = [pieces(each) for each in chat(client, seed=11, **options).choices]
    for thread in threads:
        thread.join()
    assert with_others == alone
    assert [pieces(each) for each in chat(client, seed=-(2**63), **options).choices] != alone
    unseeded = [pieces(chat(client, temperature=2, logprobs=True).choices[0]) for _ in range(3)]
    assert len({tuple(each) for each in unseeded}) == 3


def test_several_answers_come_in_one_reply_or_stream_and_share_the_prompt(client, served):
    question = "please tell me where the order of the customer is " * 2
    reply = chat(client, question, seed=5, n=3, temperature=2, logprobs=True)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    usage = reply.usage
    assert usage.completion_tokens == sum(len(pieces(each)) for each in reply.choices)
    assert usage.prompt_tokens == len(
        tokenizer().begin([{"role": "user", "content": question}], ()).tokens
    )
    texts, ends, usages = {}, [], []
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in chat(client, question, seed=5, n=3, temperature=2, **options):
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            ends += [choice.index] if choice.finish_reason else []
    assert texts == {each.index: each.message.content for each in reply.choices}
    assert sorted(ends) == [0, 1, 2] and [each.completion_tokens for each in usages] == [
        usage.completion_tokens
    ]


def test_any_of_several_answers_can_be_continued_with_its_sampled_tokens(client):
    reply = chat(client, "hello", seed=7, n=3, temperature=2, max_tokens=5, logprobs=True)
    for choice in reply.choices:
        history = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": choice.message.content},
            {"role": "user", "content": "go on"},
        ]
        again = client.chat.completions.create(model="m", messages=history, max_tokens=1)
        first = reply.usage.prompt_tokens + len(pieces(choice))
        assert again.usage.prompt_tokens_details.cached_tokens >= first - 1


def test_a_json_schema_holds_for_the_answer_in_all_three_apis(client, other_client):
    named = {"name": "n", "schema": PARAMETERS, "strict": True}
    texts = []
    for _ in range(3):
        form = {"type": "json_schema", "json_schema": named}
        reply = chat(client, response_format=form, max_tokens=ACTION, temperature=2)
        texts.append(reply.choices[0].message.content)
    form = {"format": {"type": "json_schema", **named}}
    texts.append(client.responses.create(model="m", input="hello", text=form).output_text)
    messages = [{"role": "user", "content": "hello"}]
    form = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    reply = other_client.messages.create(
        model="m", max_tokens=ACTION, messages=messages, output_config=form
    )
    texts.append(reply.content[0].text)
    for text in texts:
        value = json.loads(text)
        assert set(value) == {"on", "at"}
        assert isinstance(value["on"], bool) and value["at"] in ("home", "work")


def test_forced_calls_come_in_all_three_apis_and_a_plain_call_beside_them_is_free(
    client, other_client
):
    tools = [{"type": "function", "function": tool} for tool in (TOOL, OTHER)]
    free = []
    beside = threading.Thread(
        target=lambda: free.append(chat(client, temperature=0, logprobs=True))
    )
    beside.start()
    options = {"tools": tools, "max_tokens": ACTION, "parallel_tool_calls": False}
    named = {"type": "function", "function": {"name": "light"}}
    reply = chat(client, **options, tool_choice=named, temperature=2, logprobs=True)
    beside.join()
    assert pieces(free[0].choices[0])[: len(greedy("hello", 8)[0])] == pieces(
        chat(client, temperature=0, logprobs=True).choices[0]
    )
    (choice,) = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert call.function.name == "light" and set(json.loads(call.function.arguments)) == {
        "on",
        "at",
    }
    forced = [each.logprob for each in choice.logprobs.content]
    assert 0.0 in forced and min(forced) < 0  # where the grammar leaves one token, and more
    flat = [{"type": "function", **tool} for tool in (TOOL, OTHER)]
    reply = client.responses.create(model="m", input="x", tools=flat, tool_choice="required")
    assert reply.output and all(item.type == "function_call" for item in reply.output)
    given = [{"name": t["name"], "input_schema": t["parameters"]} for t in (TOOL, OTHER)]
    reply = other_client.messages.create(
        model="m",
        max_tokens=ACTION,
        messages=[{"role": "user", "content": "hello"}],
        tools=given,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert [block.type for block in reply.content] == ["tool_use"]


OUT_OF_RANGE = {
    "temperature": -1,
    "top_p": 1.5,
    "n": 0,
    "top_logprobs": 21,
    "presence_penalty": 3,
    "logit_bias": {"99999": 1},
    "best_of": 2,
    "seed": 2**63,
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_value_that_cannot_be_is_refused_by_its_name(client, name):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, extra_body={name: OUT_OF_RANGE[name]})
    assert caught.value.param == name


def test_penalties_and_biases_reach_the_engine(client):
    tokens, _ = greedy("hello", 1)
    banned = chat(client, temperature=0, max_tokens=1, logit_bias={str(tokens[0]): -100})
    assert banned.choices[0].message.content != tokenizer().text(tokens)
    penalties = (
        {},
        {"repetition_penalty": 5.0},
        {"frequency_penalty": 2},
        {"presence_penalty": -2},
        {"min_p": 0.5},
    )
    plain, *changed, same = (
        pieces(chat(client, temperature=0, max_tokens=20, logprobs=True, extra_body=x).choices[0])
        for x in penalties
    )
    assert same == plain and len({tuple(each) for each in (plain, *changed)}) == 4


def logp_of(tokens):
    """The model's log-probability of each token but the first, and those of all in its place."""
    logits = logits_LV()(tokens)[:-1]
    logp_LV = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return logp_LV[np.arange(len(tokens) - 1), tokens[1:]], logp_LV


def continue_prompt(client, prompt, **options):
    return client.completions.create(model="m", prompt=prompt, **({"max_tokens": 8} | options))


def continued(context, count):
    """The likeliest tokens after a context, up to an end token."""
    sampled = []
    while len(sampled) < count and not set(sampled) & set(tokenizer().end_ids):
        sampled.append(int(logits_LV()([*context, *sampled])[-1].argmax()))
    return sampled


def test_a_plain_prompt_is_continued_as_a_text_or_as_tokens(client):
    tokens = tokenizer().encode("Where is my order?")
    wanted = tokenizer().text(continued(tokens, 8))
    for prompt in ("Where is my order?", tokens):
        done = continue_prompt(client, prompt, temperature=0)
        assert done.choices[0].text == wanted and done.object == "text_completion"
        assert done.usage.prompt_tokens == len(tokens)
    pieces = [
        event.choices[0].text
        for event in continue_prompt(client, tokens, temperature=0, stream=True)
    ]
    assert "".join(pieces) == wanted
    sixteen = client.completions.create(model="m", prompt=tokens, temperature=0)
    assert sixteen.usage.completion_tokens == len(continued(tokens, 16))


def test_a_prompts_continuation_comes_as_token_ids_too_as_vllm_gives_them(client):
    tokens, asked = tokenizer().encode("Where is my order?"), {"return_token_ids": True}
    done = continue_prompt(client, tokens, temperature=0, logprobs=0, extra_body=asked)
    (choice,) = done.choices
    assert choice.token_ids == continued(tokens, 8)
    assert len(choice.logprobs.token_logprobs) == len(choice.token_ids)
    *_, last = continue_prompt(client, tokens, temperature=0, stream=True, extra_body=asked)
    assert last.choices[0].token_ids == choice.token_ids
    assert not hasattr(continue_prompt(client, tokens).choices[0], "token_ids")


def test_a_client_that_asks_by_tokens_samples_what_the_policy_does(served):
    """What plays a role at a server, or evaluates one: contexts and answers are token ids."""
    access, _ = served
    sampling = Sampling(1.0, 1, None, 8, tokenizer().end_ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", access.api_key)
        server = OpenAIServer(
            access.base_url,
            None,
            concurrency=2,
            sampling=sampling,
            max_context=CONTEXT,
            timeout_s=60,
            retries=0,
            retry_wait_s=0.1,
        )
    with contextlib.closing(server):
        prompts = [tokenizer().encode(text) for text in ("Where is my order?", "Hello")]
        for key, prompt in enumerate(prompts):
            server.submit(Turn(key, prompt, 0, 0, key, 0))
        actions = []
        while server.busy:
            actions += server.step(True)
    sampled = {action.key: list(action.tokens) for action in actions}
    assert sampled == {key: continued(prompt, 8) for key, prompt in enumerate(prompts)}


def test_a_prompt_is_scored_as_evaluation_harnesses_ask(client):
    """lm-evaluation-harness sends batches of tokens, of which it reads the echoed ones."""
    rng = np.random.default_rng(0)
    vocabulary = tokenizer().vocab_size
    batch = [rng.integers(0, vocabulary, size).tolist() for size in (5, 64, 65, 150)]
    options = {"echo": True, "logprobs": 2, "temperature": 0, "seed": 1234}
    done = continue_prompt(client, batch, max_tokens=1, **options)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    for choice, tokens in zip(done.choices, batch, strict=True):
        sampled = continued(tokens, 1)
        logp_L, logp_LV = logp_of([*tokens, *sampled])
        got = choice.logprobs
        assert got.token_logprobs[0] is None and got.top_logprobs[0] is None
        np.testing.assert_allclose(got.token_logprobs[1:], logp_L, atol=1e-4)
        assert len(got.tokens) == len(got.text_offset) == len(tokens) + 1
        for token, shown, logp_V in zip(got.tokens[1:], got.top_logprobs[1:], logp_LV, strict=True):
            assert token in shown and 1 <= len(shown) <= 3
            assert max(shown.values()) == pytest.approx(logp_V.max(), abs=1e-4)
    assert done.usage.prompt_tokens == sum(map(len, batch))
    alone = continue_prompt(client, batch[1], max_tokens=0, **options).choices[0]
    assert alone.text == tokenizer().text(batch[1])
    assert len(alone.logprobs.tokens) == len(batch[1])
    np.testing.assert_array_equal(
        alone.logprobs.token_logprobs[1:], done.choices[1].logprobs.token_logprobs[1:-1]
    )


def test_a_prompt_may_have_several_continuations(client):
    done = continue_prompt(client, ["Hello", "Thanks"], n=2, seed=3, echo=True)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert [choice.text[:5] for choice in done.choices] == ["Hello"] * 2 + ["Thank"] * 2
    again = continue_prompt(client, ["Hello", "Thanks"], n=2, seed=3, echo=True)
    assert [choice.text for choice in again.choices] == [choice.text for choice in done.choices]


@pytest.mark.parametrize(
    "param, options",
    [
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [100_000]}),
        ("prompt", {"prompt": [1] * 300}),
        ("prompt", {"prompt": "order " * 20_000}),
        ("max_tokens", {"max_tokens": 0}),
        ("echo", {"echo": True, "stream": True}),
        ("logprobs", {"logprobs": 21}),
        ("suffix", {"suffix": "x"}),
        ("stop_token_ids", {"extra_body": {"stop_token_ids": [6]}}),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused_by_its_field(client, param, options):
    with pytest.raises(openai.BadRequestError) as caught:
        continue_prompt(client, **({"prompt": "x"} | options))
    assert caught.value.param.partition("[")[0] == param


def test_a_text_is_tokenized(client):
    answer = client.post("../tokenize", body={"prompt": "Hello"}, cast_to=object)
    tokens = tokenizer().encode("Hello")
    assert answer == {"count": len(tokens), "max_model_len": CONTEXT, "tokens": tokens}
