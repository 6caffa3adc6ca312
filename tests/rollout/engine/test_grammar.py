"""Masks let through what a grammar allows and nothing else, whatever the tokens are."""

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_cases import with_control_tags
from places import MODELS

from seeupo_jax.configuration import schema
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError, parse_hermes, render_hermes
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS, choose_format
from seeupo_jax.policy.files.tokenizer import load_tokenizer, train_tokenizer
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.rollout.engine.grammar import Grammars, apply_mask

TOOLS = (
    {
        "name": "look_up/order",
        "parameters": {
            "type": "object",
            "properties": {
                "id": {"type": "integer"},
                "fields": {"type": "array", "items": {"enum": ["price", "état"]}},
                "note": {"type": "string"},
            },
            "required": ["id"],
        },
    },
    {"name": "wait", "parameters": {"type": "object", "properties": {}, "required": []}},
    {
        "name": 'say "hé"',
        "parameters": {
            "properties": {"to": {"$ref": "#/$defs/person"}},
            "required": ["to"],
            "$defs": {
                "person": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "vip": {"type": "boolean"}},
                    "required": ["name", "vip"],
                    "additionalProperties": False,
                }
            },
        },
    },
)
ARGUMENTS = {
    "look_up/order": lambda a: (
        a.keys() <= {"id", "fields", "note"}
        and type(a["id"]) is int
        and set(a.get("fields", ())) <= {"price", "état"}
        and isinstance(a.get("note", ""), str)
    ),
    "wait": lambda a: a == {},
    'say "hé"': lambda a: (
        a.keys() == {"to"}
        and a["to"].keys() == {"name", "vip"}
        and isinstance(a["to"]["name"], str)
        and isinstance(a["to"]["vip"], bool)
    ),
}


@functools.cache
def load(name):
    """Read where it is needed: every worker imports this file."""
    if name == "order_desk":
        return read_tokenizer("package:order_desk")
    return load_tokenizer(MODELS / name)


TOKENIZERS = (
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("qwen3", "llama3_2")),
    "order_desk",
)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return load(request.param)


@pytest.fixture(scope="module")
def tool_calls(tokenizer):
    return Grammars("tool_calls", tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def tiny():
    """A tokenizer of pieces and bytes: the same text has many spellings."""
    texts = ["the cat and the car", "the dog", "a cab"] * 9
    return train_tokenizer(texts, ["cat"], 300, schema.Chat())


def write(folder, name, text):
    (folder / name).write_text(text)
    return str(folder / name)


def allowed(matcher, size):
    words_W = np.full(-(-size // 32), -1, np.int32)
    matcher.allowed(words_W)
    bits = np.unpackbits(words_W.view(np.uint8), bitorder="little")
    assert not bits[size:].any()
    return np.flatnonzero(bits[:size])


def accept(matcher, tokenizer, text):
    tokens = tokenizer.action(text)[:-1]
    for token in tokens:
        assert token in allowed(matcher, tokenizer.vocab_size), (text, token)
        matcher.accept(token)
    return tokens


@functools.cache
def closing(tokenizer):
    """Which tokens bring an action to its end: end tokens, else punctuation of JSON."""
    punctuation = re.compile(rb'[\]}",:{\s]+')
    marks = [punctuation.fullmatch(piece) is not None for piece in tokenizer.token_bytes()]
    return np.isin(np.arange(tokenizer.vocab_size), tokenizer.end_ids), np.array(marks)


def sample(matcher, tokenizer, rng, tokens=(), patience=12, steps=300):
    """An action of uniformly drawn tokens; those of punctuation alone after a while, to end it."""
    tokens = list(tokens)
    for step in range(steps):
        choices = allowed(matcher, tokenizer.vocab_size)
        endings = [choices[which[choices]] for which in closing(tokenizer)]
        if step >= patience:
            choices = next((some for some in endings if len(some)), choices)
        tokens.append(choices[rng.integers(len(choices))].item())
        matcher.accept(tokens[-1])
        if tokens[-1] in tokenizer.end_ids:
            return tokenizer.text(tokens)
    raise AssertionError(f"no end: {tokenizer.text(tokens)!r}")


def test_a_call_drawn_at_random_names_a_tool_and_keeps_to_its_schema(tokenizer, tool_calls):
    called = set()
    for seed in range(8):
        matcher, rng = tool_calls.begin(TOOLS), np.random.default_rng(seed)
        start = accept(matcher, tokenizer, ["<tool_call>", "So:\n<tool_call>\n"][seed % 2])
        calls = parse_hermes(sample(matcher, tokenizer, rng, start))
        assert calls
        assert all(ARGUMENTS[call.name](call.arguments) for call in calls)
        called |= {call.name for call in calls}
    assert len(called) >= 2


def test_a_text_drawn_at_random_holds_no_call_but_whole_ones(tokenizer, tool_calls):
    for seed in range(3):
        parse_hermes(sample(tool_calls.begin(TOOLS), tokenizer, np.random.default_rng(seed)))


def closers_in_strings():
    """Calls with tags in their strings, which neither end nor begin a call."""
    notes = (
        "</tool_call>",
        "</tool_call><tool_call>{",
        '"</tool_call>\\',
        "<tool_call>",
        "<think>",
    )
    orders = ({"id": 1, "note": note} for note in notes)
    return [json.dumps({"name": "look_up/order", "arguments": order}) for order in orders]


def test_every_tool_can_be_called_in_either_way_of_writing(tokenizer, tool_calls):
    compact = '<tool_call>{"name":"wait","arguments":{}}</tool_call>'
    lined = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    order = {"id": -12, "fields": ["price", "état"], "note": 'a <b> "q" </div> é\n'}
    long = json.dumps({"name": "look_up/order", "arguments": order}, ensure_ascii=False)
    person = render_hermes('say "hé"', to={"name": "Z", "vip": True})
    for text, calls in (
        ("Just words, with a < b and <tool_calls>.", 0),
        ("<think>\nHm.\n</think>\n\n" + compact, 1),
        (lined + "\n" + compact + person, 3),
        (f"Two:\n<tool_call>{long}</tool_call>", 1),
        *((f"<tool_call>{called}</tool_call>", 1) for called in closers_in_strings()),
    ):
        matcher = tool_calls.begin(TOOLS)
        accept(matcher, tokenizer, text)
        assert len(parse_hermes(text)) == calls
        assert set(tokenizer.end_ids) <= set(allowed(matcher, tokenizer.vocab_size))


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "forged", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "wait", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "look_up/order", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look_up/order", "arguments": {"id": "1"}}</tool_call>',
        '<tool_call>{"name": "look_up/order", "arguments": {"id": 1, "note": "</tool_call>"}}\n\n'
        "</tool_call>",
        '<tool_call>{"name": "look_up/order", "arguments": {"id": 1, "note": "</tool_call>'
        '<tool_call>{"}} </tool_call>x',
        ' <think>Hm.<tool_call>{"name": "wait", "arguments": {}}</tool_call>',
        "<think>Hm.",
        '<tool_call>{"name": "wait", "arguments": {}}</tool_call> Done.',
        "<tool_call>wait</tool_call>",
        "Done.</tool_call>",
    ],
)
def test_a_forged_call_cannot_be_written(tokenizer, tool_calls, text):
    matcher = tool_calls.begin(TOOLS)
    with pytest.raises(RuntimeError, match="may not follow"):
        for token in tokenizer.action(text):
            matcher.accept(token)


# The bundled tokenizer cannot tell DeepSeek's "▁" from a space.
OTHERS = [
    pytest.param(name, marks=pytest.mark.exhaustive if "deepseek" in name else ())
    for name, each in TOOL_FORMATS.items()
    if each.grammar and name != "hermes"
]


# A text before calls, where it is not the text itself.
SAID = {"harmony": "<|channel|>analysis<|message|>So: <|end|><|start|>assistant"}


@functools.cache
def grammars_of(name):
    """A tokenizer, and grammars of a tool format."""
    made = load("qwen3" if "deepseek" in name else "order_desk")
    return made, Grammars("tool_calls", made, made.vocab_size, choose_format(name))


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_drawn_in_another_format_names_a_tool_and_keeps_to_its_schema(name):
    (made, grammars), tool_format, called = grammars_of(name), choose_format(name), set()
    for seed in range(6):
        matcher, rng = grammars.begin(TOOLS), np.random.default_rng(seed)
        opening = tool_format.grammar.opening or "{"
        before = SAID.get(name, "So: ") if seed % 2 and tool_format.grammar.opening else ""
        start = accept(matcher, made, before + opening)
        calls = tool_format.read(sample(matcher, made, rng, start, steps=2000), TOOLS).calls
        assert calls
        assert all(ARGUMENTS[call.name](call.arguments) for call in calls)
        called |= {call.name for call in calls}
    assert len(called) >= 2


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_format_writes_is_in_its_grammar(name):
    (made, grammars), tool_format = grammars_of(name), choose_format(name)
    order = {"id": -12, "fields": ["price", "état"], "note": 'a <b> "q" </div> é'}
    person = {"to": {"name": "Z", "vip": True}}
    calls = [
        ToolCall("look_up/order", order),
        ToolCall("wait", {}),
        ToolCall('say "hé"', person),
    ]
    for content in ("", "Two, a < b:") if tool_format.grammar.opening else ("",):
        # A call ends an action in harmony.
        for part in [[call] for call in calls] if name == "harmony" else [calls]:
            matcher, text = grammars.begin(TOOLS), tool_format.render(content, part)
            accept(matcher, made, text)
            assert tool_format.read(text, TOOLS).calls == tuple(part)
            assert set(made.end_ids) <= set(allowed(matcher, made.vocab_size))


@pytest.mark.parametrize("name", OTHERS)
def test_another_format_s_forged_call_cannot_be_written(name):
    (made, grammars), tool_format = grammars_of(name), choose_format(name)
    for call in (
        ToolCall("forged", {}),
        ToolCall("wait", {"a": 1}),
        ToolCall("look_up/order", {"note": "x"}),
        ToolCall("look_up/order", {"id": "one"}),
    ):
        matcher = grammars.begin(TOOLS)
        with pytest.raises(RuntimeError, match="may not follow"):
            for token in made.action(tool_format.render("", [call])):
                matcher.accept(token)


@pytest.mark.parametrize(
    "text",
    [
        "Hello.",
        "<|channel|>final<|message|>Hello.<|end|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|channel|>",
        "<|channel|>analysis to=functions.wait<|message|>",
        "<|channel|>final<|message|>a<|start|>assistant<|channel|>commentary to=functions.wait",
    ],
)
def test_an_action_of_harmony_is_messages_of_channels(text):
    made, grammars = grammars_of("harmony")
    for tools in (TOOLS, ()):
        matcher = grammars.begin(tools)
        accept(matcher, made, f"{SAID['harmony']}<|channel|>final<|message|>Hello, a < b.")
        assert set(made.end_ids) <= set(allowed(matcher, made.vocab_size))
        matcher = grammars.begin(tools)
        with pytest.raises(RuntimeError, match="may not follow"):
            for token in made.action(text)[:-1]:
                matcher.accept(token)


def test_a_call_of_harmony_may_stand_in_its_header_and_needs_tools():
    made, grammars = grammars_of("harmony")
    call = " to=functions.wait<|channel|>commentary {}json<|message|>{{}}"
    for text in (call.format(""), call.format("<|constrain|>")):
        accept(grammars.begin(TOOLS), made, text)
        with pytest.raises(RuntimeError, match="may not follow"):
            for token in made.action(text):
                grammars.begin(()).accept(token)


def test_a_format_without_a_grammar_is_refused():
    made = load("order_desk")
    with pytest.raises(ValueError, match="in the format 'gemma'; allowed: none, a file, or calls"):
        Grammars("tool_calls", made, made.vocab_size, choose_format("gemma"))


def test_tools_of_one_name_have_the_arguments_of_either(tokenizer, tool_calls):
    kinds = [{"properties": {key: {"type": "integer"}}} for key in "ab"]
    tools = [{"name": "go", "parameters": kind} for kind in kinds]
    for arguments in ('{"a": 1}', '{"b": 1}'):
        call = f'<tool_call>{{"name": "go", "arguments": {arguments}}}</tool_call>'
        accept(tool_calls.begin(tools), tokenizer, call)


def test_arguments_are_an_object_whatever_type_a_tool_says(tokenizer, tool_calls):
    tools = [{"name": "go", "parameters": {"type": "null"}}]
    start = '<tool_call>{"name": "go", "arguments": '
    accept(tool_calls.begin(tools), tokenizer, start + "{}}</tool_call>")
    with pytest.raises(RuntimeError, match="may not follow"):
        matcher = tool_calls.begin(tools)
        for token in tokenizer.action(start + "null}</tool_call>"):
            matcher.accept(token)


@pytest.mark.exhaustive
def test_a_tag_is_the_same_in_one_token_and_spelled_out():
    tokenizer = load("qwen3")
    grammars = Grammars("tool_calls", tokenizer, tokenizer.vocab_size)
    one = tokenizer.action("<tool_call>")[:-1]
    assert len(one) == 1
    spelled = [*tokenizer.action("<")[:-1], *tokenizer.action("tool_call>")[:-1]]
    masks = []
    for tokens in (one, spelled):
        matcher = grammars.begin(TOOLS)
        for token in tokens:
            matcher.accept(token)
        masks.append(allowed(matcher, tokenizer.vocab_size))
    np.testing.assert_array_equal(*masks)
    assert len(masks[0]) < 10


@pytest.mark.exhaustive
def test_a_tag_that_is_a_control_token_begins_and_ends_calls(tmp_path):
    tags = ("<tool_call>", "</tool_call>")
    tokenizer = load_tokenizer(with_control_tags(tmp_path, tags))
    tool_calls = Grammars("tool_calls", tokenizer, tokenizer.vocab_size)
    call = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
    tokens = accept(tool_calls.begin(TOOLS), tokenizer, f"So: {call}")
    assert {151657, 151658} <= set(tokens)  # Qwen3's ids of the tags
    assert parse_hermes(tokenizer.text(tokens)) == (ToolCall("wait", {}),)
    matcher = tool_calls.begin(())
    assert 151657 not in allowed(matcher, tokenizer.vocab_size)
    with pytest.raises(RuntimeError, match="may not follow"):
        matcher.accept(151657)


@pytest.mark.parametrize("text", ["Now <tool_call>", "<think>Hm."])
def test_without_tools_no_call_begins_and_thoughts_end(tokenizer, tool_calls, text):
    matcher = tool_calls.begin(())
    with pytest.raises(RuntimeError, match="may not follow"):
        for token in tokenizer.action(text):
            matcher.accept(token)


def test_an_end_token_is_allowed_exactly_where_the_action_is_complete(tokenizer, tool_calls):
    call = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    text = f"Well <then:\n{call}\n{call}"
    matcher, tokens, ends = tool_calls.begin(TOOLS), [], set(tokenizer.end_ids)
    for token in tokenizer.action(text):
        present = ends & set(allowed(matcher, tokenizer.vocab_size))
        try:
            parse_hermes(tokenizer.text(tokens) + "|")
            complete = True
        except ToolCallError:
            complete = tokenizer.text(tokens).endswith("</tool_call>")
        assert present == (ends if complete else set()), tokenizer.text(tokens)
        matcher.accept(token)
        tokens.append(token)
    assert set(allowed(matcher, tokenizer.vocab_size)) == ends


@pytest.mark.exhaustive
def test_every_end_token_ends_and_no_other_control_token_is_text(tmp_path):
    for file in (MODELS / "qwen3").iterdir():
        (tmp_path / file.name).symlink_to(file)
    write(tmp_path, "generation_config.json", '{"eos_token_id": [151645, 151643]}')
    tokenizer = load_tokenizer(tmp_path)
    controls = {i for i, piece in enumerate(tokenizer.token_bytes()) if piece[:2] == b"\xff<"}
    assert len(controls) == 14
    source = write(tmp_path, "asks.lark", 'start: /(?s:.*)/ | <|box_start|> "x" <|box_end|>')
    matcher = Grammars(source, tokenizer, tokenizer.vocab_size).begin(())
    assert controls & set(allowed(matcher, tokenizer.vocab_size)) == {151643, 151645, 151648}
    for token in (151648, *tokenizer.action("x")[:-1], 151649):
        assert token in allowed(matcher, tokenizer.vocab_size)
        matcher.accept(token)
    assert list(allowed(matcher, tokenizer.vocab_size)) == [151643, 151645]
    matcher.accept(151643)


def test_ids_beyond_the_tokenizer_are_never_allowed(tokenizer):
    size = tokenizer.vocab_size + 70
    grammars = Grammars("tool_calls", tokenizer, size)
    assert grammars.words == -(-size // 32)
    assert allowed(grammars.begin(TOOLS), size).max() < tokenizer.vocab_size
    with pytest.raises(ValueError, match="allowed: at least as many"):
        Grammars("tool_calls", tokenizer, tokenizer.vocab_size - 1)


def test_a_regular_expression_holds_for_the_whole_action(tokenizer, tmp_path):
    pattern = r"[a-c]{2,5}é+(, [0-9]{3}){1,3}\."
    source = write(tmp_path, "whole.regex", pattern + "\n")
    grammars = Grammars(source, tokenizer, tokenizer.vocab_size)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        text = sample(grammars.begin(()), tokenizer, rng, patience=300)
        assert re.fullmatch(pattern, text)


def test_a_json_schema_holds_for_the_whole_action(tokenizer, tmp_path):
    schema = {
        "type": "object",
        "properties": {
            "sure": {"type": "boolean"},
            "price": {"type": "number", "minimum": 0, "maximum": 9},
            "words": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        },
        "required": ["sure", "price", "words"],
        "additionalProperties": False,
    }
    source = write(tmp_path, "whole.json", json.dumps(schema))
    grammars = Grammars(source, tokenizer, tokenizer.vocab_size)
    for seed in range(4):
        value = json.loads(sample(grammars.begin(()), tokenizer, np.random.default_rng(seed)))
        assert list(value) == ["sure", "price", "words"]
        assert isinstance(value["sure"], bool)
        assert 0 <= value["price"] <= 9
        assert 1 <= len(value["words"]) <= 2
        assert all(isinstance(word, str) for word in value["words"])


def test_a_mask_is_what_brute_force_finds(tiny, tmp_path):
    words = ["cat", "car", "do", "dog", "é"]
    language = {" ".join(some) for n in (1, 2) for some in itertools.product(words, repeat=n)}
    options = '%llguidance {"no_forcing": true}\n'
    source = write(tmp_path, "l.lark", f'{options}start: W (" " W)?\nW: /cat|car|dog?|é/')
    grammars, pieces = Grammars(source, tiny, tiny.vocab_size), tiny.token_bytes()
    prefixes = {text.encode()[:n] for text in language for n in range(9)}
    rng = np.random.default_rng(0)
    for _ in range(10):
        matcher, said, token = grammars.begin(()), b"", -1
        while token not in tiny.end_ids:
            texts = {i for i, p in enumerate(pieces) if p and said + p in prefixes}
            ends = set(tiny.end_ids) if said in {text.encode() for text in language} else set()
            assert set(allowed(matcher, tiny.vocab_size)) == texts | ends, said
            token = int(rng.choice(sorted(texts | ends)))
            matcher.accept(token)
            said += pieces[token]


def test_where_one_text_is_left_the_tokenizer_s_own_tokens_remain(tokenizer, tmp_path):
    text = "Nothing but this sentence, and 42."
    source = write(tmp_path, "one.regex", re.escape(text))
    grammars = Grammars(source, tokenizer, tokenizer.vocab_size)
    assert len(allowed(grammars.begin(()), tokenizer.vocab_size)) == 1
    accept(grammars.begin(()), tokenizer, text)


@pytest.mark.exhaustive
def test_text_that_the_tokenizer_would_normalise_can_be_written(tmp_path):
    tokenizer = load("qwen3")
    source = write(tmp_path, "nfd.regex", "cafe\u0301!")  # Qwen's tokenizer writes é as one letter
    matcher = Grammars(source, tokenizer, tokenizer.vocab_size).begin(())
    assert sample(matcher, tokenizer, np.random.default_rng(0)) == "cafe\u0301!"


def test_matchers_of_one_grammar_do_not_share_a_state(tiny, tmp_path):
    grammars = Grammars(write(tmp_path, "two.regex", "cat|do"), tiny, tiny.vocab_size)
    first, second = grammars.begin(()), grammars.begin(())
    before = allowed(second, tiny.vocab_size)
    accept(first, tiny, "do")
    np.testing.assert_array_equal(allowed(second, tiny.vocab_size), before)


def test_a_stuck_grammar_names_the_text(tiny, tmp_path):
    source = write(tmp_path, "stuck.lark", "start: A B\nA: /c/\nB: /a+/ & /b/")
    matcher = Grammars(source, tiny, tiny.vocab_size).begin(())
    with pytest.raises(RuntimeError, match="stuck after 'c'"):
        for token in tiny.action("c"):
            matcher.allowed(np.zeros(-(-tiny.vocab_size // 32), np.uint32))
            matcher.accept(token)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("g.txt", "a", "allowed: none, 'tool_calls', or a file .json, .regex, .lark"),
        ("g.json", "{", "cannot be read: Expecting"),
        ("g.json", '{"type": "strin"}', "Invalid type: strin"),
        ("g.regex", "a(b", "unclosed group"),
        ("g.lark", 'start: "a" b', "unknown name"),
    ],
)
def test_a_bad_grammar_is_refused_with_a_sentence(tiny, tmp_path, name, text, reason):
    source = write(tmp_path, name, text)
    with pytest.raises(ValueError, match=f"^config.rollout.grammar: [^\n]*{reason}[^\n]*$"):
        Grammars(source, tiny, tiny.vocab_size)


def test_a_missing_file_and_a_missing_word_are_told_apart(tiny, tmp_path):
    with pytest.raises(ValueError, match="no file '.*gone.lark'"):
        Grammars(str(tmp_path / "gone.lark"), tiny, tiny.vocab_size)
    with pytest.raises(ValueError, match="got 'tool_call'; allowed: none, 'tool_calls'"):
        Grammars("tool_call", tiny, tiny.vocab_size)


def test_a_tool_that_cannot_be_enforced_is_named_unless_it_says_lenient(tiny):
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "colour"}}}
    tool = {"name": "paint", "description": "", "parameters": schema}
    grammars = Grammars("tool_calls", tiny, tiny.vocab_size)
    with pytest.raises(ValueError, match="refused tool 'paint': .*colour"):
        grammars.begin((tool,))
    grammars.begin((tool | {"parameters": schema | {"x-guidance": {"lenient": True}}},))
    grammars.begin(({"name": "paint"},))  # without parameters it takes any
    with pytest.raises(ValueError, match="tool 'paint': x-guidance: got 5; allowed: a dict"):
        grammars.begin((tool | {"parameters": {"x-guidance": 5}},))


def test_a_tool_too_large_for_the_parser_is_refused_before_a_call_of_it(tool_calls):
    """With 1,000 optional strings a row of the parser has 4 items for each; 2,000 are allowed."""

    def listed(count):
        keys = {f"p{number}": {"type": "string"} for number in range(count)}
        large = {"name": "lärge", "parameters": {"type": "object", "properties": keys}}
        return [*TOOLS, large, {"name": "f", "parameters": {}}]

    tool_calls.begin(listed(100))
    with pytest.raises(ValueError, match="refused tool 'lärge': .* max is 2000"):
        tool_calls.begin(listed(1000))
    # Of 14 times 14 pairs of properties: a short schema with many beginnings.
    halves = [[{"properties": {f"{half}{i}": {}}} for i in range(14)] for half in "ab"]
    pairs = {"allOf": [{"anyOf": half} for half in halves]}
    assert len(json.dumps(pairs)) < 1000
    with pytest.raises(ValueError, match="refused tool 'pairs': .* max is 2000"):
        tool_calls.begin([{"name": "pairs", "parameters": pairs}])


def test_only_a_call_of_a_tool_that_may_be_too_large_is_tried(tool_calls, monkeypatch):
    tried = []
    monkeypatch.setattr(tool_calls, "_try_call", lambda parser, tool: tried.append(tool))
    long = {"type": "object", "properties": {"a": {"description": "a" * 4096}}}
    either = {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    tools = [{"name": "long", "parameters": long}, {"name": "either", "parameters": either}]
    tool_calls.begin([*TOOLS, *tools])
    assert tried == ["long", "either"]


@pytest.mark.parametrize("vocab_size", [64, 71])
@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
def test_masked_logits_agree_with_numpy(vocab_size, dtype):
    rng = np.random.default_rng(0)
    allowed_NV = rng.random((3, vocab_size)) < 0.5
    padded = np.pad(allowed_NV, ((0, 0), (0, -vocab_size % 32)))
    mask_NW = np.packbits(padded, axis=1, bitorder="little").view(dtype)
    logits_NV = rng.normal(size=(3, vocab_size)).astype(np.float32)
    masked = jax.jit(apply_mask)(jnp.asarray(logits_NV), jnp.asarray(mask_NW))
    np.testing.assert_array_equal(masked, np.where(allowed_NV, logits_NV, -np.inf))


@pytest.mark.usefixtures("optimized")
def test_masking_logits_needs_no_more_memory_than_the_logits():
    logits = jax.ShapeDtypeStruct((8, 4096), jnp.float32)
    mask = jax.ShapeDtypeStruct((8, 128), jnp.uint32)
    memory = jax.jit(apply_mask).lower(logits, mask).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 8 * 4096 * 4
