"""A conversation with tools has the same tokens by each API, environment and line to learn from."""

import json
import random

import chat_cases
import pytest

from seeupo_jax.agents.dialects import anthropic_messages, chat_completions, responses
from seeupo_jax.agents.dialects.exchange import Caller
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.agents.lineages import Lineages
from seeupo_jax.envs.base import StepResult
from seeupo_jax.envs.validation import check_reset, check_step
from seeupo_jax.policy.files.template_knowledge import find_format
from seeupo_jax.supervised.conversation import read_conversation
from seeupo_jax.supervised.data import tokenize
from seeupo_jax.types import CONTEXT

WORDS = ("order", "é", "7", "{}", "a\nb", "find it", " x", "漢", '"quoted"')
VALUES = ("x", 7, 1.5, True, ["a", 2], {"b": None})


def drawn(rng, *, parallel):
    """A conversation: (role, content, calls), and tools in a client's own form."""
    tools = [drawn_tool(rng, name) for name in rng.sample(["find", "look", "send"], 2)]
    messages = [("system", words(rng), [])] if rng.random() < 0.5 else []
    messages.append(("user", words(rng), []))
    for _ in range(rng.randrange(4)):
        calls = drawn_calls(rng, tools, parallel)
        # Of Llama's form, calls are the whole message.
        content = words(rng) if parallel or not calls else ""
        messages.append(("assistant", content, calls))
        messages += [("tool", words(rng), []) for _ in calls] or [("user", words(rng), [])]
    return messages, tools


def words(rng):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 4))).strip()


def drawn_tool(rng, name):
    """What is absent may be left out or empty, and keys are in any order."""
    properties = {key: {"type": "string"} for key in rng.sample("abc", rng.randrange(3))}
    schema = {"type": "object", "properties": properties}
    if properties and rng.random() < 0.5:
        schema["required"] = list(properties)
    tool = {"name": name, "parameters": schema}
    if rng.random() < 0.5:
        tool["description"] = rng.choice(["", words(rng)])
    if not properties and rng.random() < 0.5:
        tool["parameters"] = rng.choice([{}, {"type": "object"}])
    return dict(rng.sample(list(tool.items()), len(tool)))


def drawn_calls(rng, tools, parallel):
    count = rng.randrange(3) if parallel else rng.randrange(2)
    return [
        (
            rng.choice(tools)["name"],
            {key: rng.choice(VALUES) for key in rng.sample("abc", rng.randrange(3))},
        )
        for _ in range(count)
    ]


def with_ids(rng, messages):
    """The messages, each with the ids of its calls or its result: those that a client makes up."""
    waiting, made = [], []
    for role, content, calls in messages:
        if role == "tool":
            made.append((role, content, calls, [waiting.pop(0)]))
            continue
        waiting = [f"{rng.getrandbits(40):x}" for _ in calls]
        made.append((role, content, calls, list(waiting)))
    return made


def by_chat(rng, messages, tools):
    body = []
    for role, content, calls, ids in with_ids(rng, messages):
        message = {"role": role, "content": content}
        if role == "tool":
            message |= {"tool_call_id": ids[0], "name": None}
        if calls:
            message["tool_calls"] = [
                {
                    "id": own,
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for own, (name, arguments) in zip(ids, calls, strict=True)
            ]
        if role == "user" and rng.random() < 0.5:
            message["content"] = [{"type": "text", "text": content}]
        body.append(message)
    functions = [{"type": "function", "function": tool} for tool in tools]
    return chat_completions.DIALECT, {"messages": body, "tools": functions}


def by_responses(rng, messages, tools):
    items = []
    for role, content, calls, ids in with_ids(rng, messages):
        if role == "tool":
            output = {"type": "function_call_output", "call_id": ids[0], "output": content}
            items.append(output)
            continue
        if content:
            items.append({"type": "message", "role": role, "content": content})
        for own, (name, arguments) in zip(ids, calls, strict=True):
            call = {"call_id": own, "name": name, "arguments": json.dumps(arguments)}
            items.append({"type": "function_call", **call})
    functions = [{"type": "function", "strict": False, **tool} for tool in tools]
    return responses.DIALECT, {"input": items, "tools": functions}


def by_messages(rng, messages, tools):
    body, system = [], None
    for role, content, calls, ids in with_ids(rng, messages):
        if role == "system":
            system = content
            continue
        if role == "tool":
            block = {"type": "tool_result", "tool_use_id": ids[0], "content": content}
            if body[-1]["role"] == "user":  # results of one message stand in one
                body[-1]["content"].append(block)
            else:
                body.append({"role": "user", "content": [block]})
            continue
        blocks = [{"type": "text", "text": content}] if content else []
        for own, (name, arguments) in zip(ids, calls, strict=True):
            blocks.append({"type": "tool_use", "id": own, "name": name, "input": arguments})
        body.append({"role": role, "content": blocks})
    own = [
        {**{k: v for k, v in tool.items() if k != "parameters"}, "input_schema": tool["parameters"]}
        for tool in tools
    ]
    request = {"messages": body, "tools": own, "max_tokens": 9}
    return anthropic_messages.DIALECT, request | ({} if system is None else {"system": system})


def tokens_of_request(tokenizer, tool_format, dialect, body):
    caller = Caller("m", 1, SamplingRules(1.0), {}, ())
    call = dialect.read({"model": "m", **body}, caller).call
    assert caller.ignored == []
    return list(Lineages(tokenizer, tool_format).read(call).conversation.tokens)


def tokens_of_line(rng, tokenizer, messages, tools):
    """Of a line to learn from, whose last message is the assistant's."""
    _, body = by_chat(rng, messages, tools)
    listed = rng.choice([body["tools"], tools])
    line = {"messages": [*body["messages"], {"role": "assistant", "content": "end"}]}
    read = read_conversation(line | {"tools": listed}, "a line")
    (*_, segment), *_ = tokenize([read], tokenizer, train_on="last")
    return segment.tokens_L[: list(segment.turn_L != CONTEXT).index(True)].tolist()


def as_qwen_writes(content, calls):
    """As its published template has it."""
    made = [json.dumps({"name": n, "arguments": a}, ensure_ascii=False) for n, a in calls]
    parts = [content] * bool(content) + [f"<tool_call>\n{x}\n</tool_call>" for x in made]
    return "\n".join(parts)


def as_llama_writes(content, calls):
    ((name, arguments),) = calls
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


MODELS = {"qwen2_5": as_qwen_writes, "llama3_2": as_llama_writes}


def tokens_of_episode(tokenizer, written, messages, tools):
    """Of an environment that shows tools and answers; the policy writes what the assistant says."""
    roles = [role for role, *_ in messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    plain = [{"role": role, "content": content} for role, content, _ in messages]
    opening, shown = check_reset((plain[:first], tools))
    conversation = tokenizer.begin(opening, shown)
    while first < len(messages):
        _, content, calls = messages[first]
        last = next(
            (i for i in range(first + 1, len(roles)) if roles[i] == "assistant"), len(roles)
        )
        said = written(content, calls) if calls else content
        step = check_step(StepResult(tuple(plain[first + 1 : last]), 0.0, False))
        conversation = conversation.extend(tokenizer.action(said), step.observation)
        first = last
    return list(conversation.tokens)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("model", MODELS)
def test_all_ways_give_the_same_tokens(model, seed):
    rng, tokenizer = random.Random(seed), chat_cases.make(model)
    tool_format = find_format(tokenizer)
    messages, tools = drawn(rng, parallel=model != "llama3_2")
    made = {
        kind.__name__: tokens_of_request(tokenizer, tool_format, *kind(rng, messages, tools))
        for kind in (by_chat, by_responses, by_messages)
    }
    made["line"] = tokens_of_line(rng, tokenizer, messages, tools)
    made["episode"] = tokens_of_episode(tokenizer, MODELS[model], messages, tools)
    texts = {name: tokenizer.text(tokens) for name, tokens in made.items()}
    assert len(set(texts.values())) == 1, texts
    assert len({tuple(tokens) for tokens in made.values()}) == 1
