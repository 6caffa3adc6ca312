"""Each reader of tool calls takes exactly its form, and says what is wrong with all else."""

import ast
import functools
import gc
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files

import bfcl_eval
import pytest
from cpu_cases import costs_less

from seeupo_jax.envs.base import DEEPSEEK_TAGS, KIMI_TAGS
from seeupo_jax.envs.thoughts import thoughts_end
from seeupo_jax.envs.tool_calls import (
    MAX_CHARS,
    MAX_DEPTH,
    MAX_DIGITS,
    ToolCall,
    ToolCallError,
    parse_fenced,
    parse_hermes,
    parse_python,
    render_hermes,
    render_python,
)
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS

ANSWERS = files(bfcl_eval) / "data" / "possible_answer"
# Pieces that end strings, blocks and thoughts, or that readers like to change.
PIECES = ["a", " ", "'", '"', "\\", "\n", "\r\n", "\0", "\u2028", "é", "\U0001f600", "\ud800"]
PIECES += "''' ``` [ </tool_call> <tool_call> <think> </think> # \\d {x}".split()


def block(body):
    return f"<tool_call>{body}</tool_call>"


def cases(table):
    """(text, reason) for each text of a table from reasons to texts."""
    return [(text, reason) for reason, texts in table.items() for text in texts]


def random_value(rng, depth=0):
    """A value that JSON and Python have in common, nested four deep at most."""
    text = "".join(rng.choices(PIECES, k=rng.randrange(6)))
    number = rng.choice([0, -1, 10**30, -0.0, 2.5, -1e-9, 1e308])
    leaves = [text, text, number, rng.randint(-99, 99), True, False, None]
    if depth == 4 or rng.random() < 0.6:
        return rng.choice(leaves)
    parts = [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return parts if rng.random() < 0.5 else {f"{i}{text}": part for i, part in enumerate(parts)}


def random_calls(rng):
    return tuple(
        ToolCall(
            rng.choice(["f", "np.linalg.norm", "été", "_x.y1"]),
            {name: random_value(rng) for name in rng.sample(["a", "b", "name", "x_1"], k=2)},
            tuple(random_value(rng) for _ in range(rng.choice([0, 0, 1, 2]))),
        )
        for _ in range(rng.randrange(4))
    )


def official_answers():
    """The reference calls of the official multi-turn tasks, by turn."""
    for path in ANSWERS.glob("BFCL_v4_multi_turn_*.json"):
        for line in path.read_text("utf-8").splitlines():
            yield json.loads(line)["ground_truth"]


def test_letters_of_a_rendered_call_stand_as_they_are_but_for_halves():
    text = render_hermes("find", name="李小龙", city="Zürich", half="a\ud800")
    assert text == block(
        '{"name": "find", "arguments": {"name": "李小龙", "city": "Zürich", "half": "a\\ud800"}}'
    )
    assert text.encode() and parse_hermes(text)[0].arguments["half"] == "a\ud800"


def test_a_rendered_call_is_read_back():
    arguments = {"text": 'a "quoted" é\n<b>', "count": -3, "part": 0.5, "flags": [True, None, {}]}
    text = render_hermes("tell", **arguments)
    assert parse_hermes(text) == (ToolCall("tell", arguments),)


def test_an_argument_may_be_called_name():
    assert parse_hermes(render_hermes("find", name="x")) == (ToolCall("find", {"name": "x"}),)


def test_calls_are_read_in_order_and_the_text_around_them_is_skipped():
    text = f"I will look.\n{render_hermes('a')} then\n{render_hermes('b', x=1)} \n"
    assert parse_hermes(text) == (ToolCall("a", {}), ToolCall("b", {"x": 1}))


def test_a_closing_tag_in_a_string_ends_no_call_and_one_is_still_needed():
    call = '{"name": "f", "arguments": {"x": "</tool_call>", "y": "<tool_call>"}}'
    read = ToolCall("f", {"x": "</tool_call>", "y": "<tool_call>"})
    assert parse_hermes(f"So {block(call)} and {block(CALL)}") == (read, *parse_hermes(block(CALL)))
    with pytest.raises(ToolCallError, match="every <tool_call> needs its </tool_call>"):
        parse_hermes(f"<tool_call>{call}")
    with pytest.raises(ToolCallError, match="must be one JSON object"):
        parse_hermes(f"<tool_call>{call} x</tool_call>")


def test_white_space_and_key_order_inside_a_block_are_free():
    text = block('\n{"arguments": {"x": [1]},\n "name": "a"}\n')
    assert parse_hermes(text) == (ToolCall("a", {"x": [1]}),)


@pytest.mark.parametrize("text", ["", "Done.", '{"name": "a", "arguments": {}}', "<tool>a</tool>"])
def test_a_text_without_a_block_holds_no_call(text):
    assert parse_hermes(text) == ()


def test_thoughts_at_the_start_hold_no_hermes_call():
    thoughts = f"<think>\n{render_hermes('g')} or <tool_call>?\n</think>\n\n"
    assert parse_hermes(f"{thoughts}Done.") == ()
    assert parse_hermes(thoughts + render_hermes("f")) == (ToolCall("f", {}),)
    later = render_hermes("f", x="<think>") + render_hermes("g")
    assert [call.name for call in parse_hermes(later)] == ["f", "g"]
    with pytest.raises(ToolCallError, match="needs its </think>"):
        parse_hermes("<think>" + render_hermes("f"))


def test_the_end_of_thoughts_costs_little_for_each_streamed_piece():
    for text in ("word " * 400_000, "I look.\n" * 250_000 + "</think>\n"):
        assert costs_less(functools.partial(thoughts_end, text), 0.008)


CALL = '{"name": "a", "arguments": {}}'
HERMES_REASONS = {
    "needs its </tool_call>": ["<tool_call>" + CALL, CALL + "</tool_call>"],
    "every <tool_call> needs": [block(CALL) + "<tool_call>", "</tool_call>" + block(CALL)],
    "nothing may follow": [block(CALL) + " bye"],
}
HERMES_BODY_REASONS = {
    "one JSON object": ["", CALL[:-1], CALL + " {}", block(CALL), "{'name': 'a', 'arguments': {}}"],
    "exactly the keys": ["[]", '"name arguments"', '{"name": "a"}', CALL[:-1] + ', "id": 1}'],
    "must be a string": ['{"name": 1, "arguments": {}}'],
    "an object": ['{"name": "a", "arguments": []}'],
    "occurs twice": [CALL[:-1] + ', "name": "b"}', CALL.replace("{}", '{"x": [{"y": 1, "y": 2}]}')],
    "must be finite": [CALL.replace("{}", f'{{"x": {x}}}') for x in ("NaN", "-Infinity", "1e999")],
    "digits": [CALL.replace("{}", f'{{"x": {sign}1{"0" * MAX_DIGITS}}}') for sign in ("", "-")],
    "tool call must be one JSON object": [CALL.replace("{}", '{"x": "line\nline"}')],
}


@pytest.mark.parametrize(
    ("text", "reason"),
    cases(HERMES_REASONS) + [(block(body), reason) for body, reason in cases(HERMES_BODY_REASONS)],
)
def test_a_broken_form_is_refused_with_its_reason(text, reason):
    with pytest.raises(ToolCallError, match=reason):
        parse_hermes(text)


def test_one_broken_block_refuses_the_whole_message():
    with pytest.raises(ToolCallError):
        parse_hermes(render_hermes("a") + block("{") + render_hermes("b"))


@pytest.mark.parametrize(
    "value", ["[" * 100_000, "9" * 10_000, "[" * 900 + "]" * 900 + ",", '"' + "x" * 100_000]
)
def test_a_text_too_deep_or_too_long_for_json_is_an_ordinary_error(value):
    with pytest.raises(ToolCallError, match="one JSON object"):
        parse_hermes(block('{"name": "a", "arguments": {"x": ' + value + "}}"))


def test_an_error_is_a_text_for_the_model_and_a_value_error():
    with pytest.raises(ValueError) as caught:
        parse_hermes(block("{}"))
    assert json.loads(json.dumps(str(caught.value))).startswith("a tool call has exactly")


def test_a_nesting_deeper_than_the_bound_is_refused_in_both_forms():
    texts = ["f(x=@)", "f(@)", block(CALL.replace("{}", '{"x": @}'))]
    for text, parse in zip(texts, (parse_python, parse_python, parse_hermes), strict=True):
        assert len(parse(text.replace("@", "[" * MAX_DEPTH + "]" * MAX_DEPTH))) == 1
        with pytest.raises(ToolCallError, match=f"at most {MAX_DEPTH} deep"):
            parse(text.replace("@", "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)))


def test_deep_values_far_down_the_stack_are_an_ordinary_error():
    def read_below(frames):
        return read_below(frames - 1) if frames else parse_python(f"f({'[' * 190 + ']' * 190})")

    with pytest.raises(ToolCallError, match="too deep|at most 64 deep"):  # Python 3.13 gets further
        read_below(700)


def test_half_a_character_in_escapes_is_a_value_and_in_source_is_not():
    assert parse_hermes(render_hermes("f", x="\ud800"))[0].arguments == {"x": "\ud800"}
    assert parse_python("f(x='\\ud800')")[0].arguments == {"x": "\ud800"}
    with pytest.raises(ToolCallError, match="not text"):
        parse_python("f(x='\ud800')")


def test_hermes_values_survive_a_round_trip():
    rng = random.Random(0)
    for _ in range(300):
        arguments = {name: random_value(rng) for name in ("name", "x")}
        assert parse_hermes(render_hermes("f", **arguments)) == (ToolCall("f", arguments),)


def test_a_number_that_is_not_json_is_never_rendered():
    with pytest.raises(ValueError, match="JSON"):
        render_hermes("f", x=float("nan"))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f(a=1, b='x')]", [ToolCall("f", {"a": 1, "b": "x"})]),
        ("""g.h(c=[1, {"k": True}])""", [ToolCall("g.h", {"c": [1, {"k": True}]})]),
        ("cd(folder='x')", [ToolCall("cd", {"folder": "x"})]),  # the brackets are added,
        ("a(), b()", [ToolCall("a", {}), ToolCall("b", {})]),
        ("a(x=[1])", [ToolCall("a", {"x": [1]})]),
        ("[a()", [ToolCall("a", {})]),  # each by itself
        ("a()]", [ToolCall("a", {})]),
        ("```\n[a()]\n```", [ToolCall("a", {})]),
        (" \t\r\n[a(\n  x=1,\r\n),]\n", [ToolCall("a", {"x": 1})]),
        ("sort('f.txt', n=2)", [ToolCall("sort", {"n": 2}, ("f.txt",))]),
        ("f(x='a' \"b\")", [ToolCall("f", {"x": "ab"})]),
        ("f(x='''a\nb''')", [ToolCall("f", {"x": "a\nb"})]),
        ("f(x={-1: {}, 'k': (-2.5,)})", [ToolCall("f", {"x": {-1: {}, "k": (-2.5,)}})]),
        ("[f(), # '''\n f(x=r'\\d')]", [ToolCall("f", {}), ToolCall("f", {"x": r"\d"})]),
        ("<think>\n[g()] or cd(x=1)?\n</think>\n\n[f()]", [ToolCall("f", {})]),
        ("Let me call f(x=1).\n</think>\n\n[f()]", [ToolCall("f", {})]),
        ("\n</think>[f()]", [ToolCall("f", {})]),
        ("f(x='a </think> b')", [ToolCall("f", {"x": "a </think> b"})]),
        ("f(x='<think></think>')", [ToolCall("f", {"x": "<think></think>"})]),
    ],
)
def test_python_calls_are_read(text, calls):
    assert parse_python(text) == tuple(calls)


@pytest.mark.parametrize(
    ("source", "value"),
    [
        (r"'\d+\.'", r"\d+\."),
        (r"R'\d\\'", r"\d\\"),
        (r"r'a' '\d'", r"a\d"),
        (r"""'''\d'\q'''""", r"\d'\q"),
        (r"'\\d\n\''", "\\d\n'"),
        (r"'\N{BULLET}\x41\101'", "\u2022AA"),
        ("'a\\\nb'", "ab"),
    ],
)
def test_a_backslash_that_begins_no_escape_stays_without_a_warning(source, value):
    # Python's own reader would warn, and in this test run a warning is an error.
    assert parse_python(f"f(x={source})") == (ToolCall("f", {"x": value}),)


PROSE = ["", " ``` ", "[]", "Done.", "1, 2 and 3", "[1, 2]", "[See the list.]", "Thanks (again)"]
PROSE += ["The folder has 3 files (see above).", "I used the function(s) that you named."]
PROSE += ["[docs](https://example.org)", '{"name": "f", "arguments": {}}', "It's ' not \\ closed"]
PROSE += ["word " * MAX_CHARS, "<think>f()</think>Done."]


@pytest.mark.parametrize("text", PROSE)
def test_prose_holds_no_python_call(text):
    assert parse_python(text) == ()


@pytest.mark.parametrize(
    "value",
    "lambda: 1; b'a'; 1j; ...; +1; --1; -True; not True; 1 if True else 2; [y for y in 'a']; a;"
    " a.b; 'a'[0]; (y := 1); {**{}}; {[1]}; f(); 1 + 2; 9**9**9; f'{1}'; {1, 2}; [*[1]]".split(
        "; "
    ),
)
def test_an_expression_that_is_no_literal_is_refused(value):
    for text in (f"f(x={value})", f"f({value})", f"f(x=[{{'k': ({value}, 1)}}])"):
        with pytest.raises(ToolCallError, match="^a value must be a text in quotes, a number, "):
            parse_python(text)


PYTHON_REASONS = {
    "nothing else$": ["[f(x=1", "f(x=1))]", "I will call f(x=1)", "I will call ls()"],
    "and nothing else": ["I will call [f(x=1)]", "```python\n[f()]\n```", "[f(x=1)] Done."],
    "one list": ["[f()], [g()]", "[f()][0]", "[f() for x in 'ab']", "[Note(s): all done]"],
    "and nothing else: unterminated": ["[f(x='a)]"],
    "and nothing else: .* does not match": ["[f(x=1]"],
    "must be one list": ["[f(x=1) g()]", "f(x='\0')", f"f(x={'9' * 5000})"],
    "follows keyword": ["[f(x=1, 2)]"],
    "assign to None": ["[f(None=1)]"],
    "every element": ["[[f()]]", "[f(), 1]"],
    "by its name": ["[f()()]", "['a'.join()]", "[None.f()]", "[f(x=1).g()]"],
    "true is not Python: write True": ["f(x=true)"],
    "is not Python: write (False|None)": ["f(x=[false])", "f(x={'a': null})"],
    "text in quotes$": ["f(x=folder)", "cd(folder)"],
    "result instead of the call": ["f(x=g())", "f(x=g(y=1))"],
    "result instead of the arithmetic": ["f(x=9**9**9)", "f(x='a' * 10**9)"],
    "f-string": ["f(x=f'{1}')"],
    "list instead of a set": ["f(x={1, 2})"],
    "[*] is not allowed": ["f(*[1])", "f(x=[*[1]])", "f(**{'x': 1})"],
    "dict's keys": ["f(x={[1]: 2})", "f(x={(1, []): 2})", "f(x={{}: 2})"],
    "occurs twice": ["f(x=1, x=2)", "f(x={'a': 1, 'a': 2})", "f(x={1: 1, True: 2})"],
    "an argument occurs twice": ["f(\ufb01=1, fi=2)"],  # one name to Python
    "must be finite": ["f(x=1e999)", "f(-1e999)", "f(x={-1e999: 0})"],
    f"at most {MAX_DIGITS} digits": [f"f(x=0x{'f' * 5000})", f"f(-1{'0' * MAX_DIGITS})"],
    f"fit in {MAX_CHARS} characters": [f"f(x='{'a' * MAX_CHARS}')"],
    "needs its </think>": ["<think>f()"],
}


@pytest.mark.parametrize(("text", "reason"), cases(PYTHON_REASONS))
def test_a_broken_python_call_is_refused_with_its_reason(text, reason):
    with pytest.raises(ToolCallError, match=reason):
        parse_python(text)


def literal_call(source):
    tree = ast.parse(source, mode="eval").body
    named = {word.arg: ast.literal_eval(word.value) for word in tree.keywords}
    return ToolCall(tree.func.id, named, tuple(map(ast.literal_eval, tree.args)))


def test_every_official_answer_is_read():
    tasks = list(official_answers())
    assert len(tasks) == 800
    for task in tasks:
        for turn in filter(None, task):
            expected = tuple(map(literal_call, turn))
            assert parse_python(f"[{', '.join(turn)}]") == expected
            assert parse_python(turn[0]) == expected[:1]
            assert parse_python(render_python(expected)) == expected


def test_threads_read_at_once_while_garbage_is_collected():
    def let_others_run(phase, info):
        time.sleep(0)

    text = f"[f(x={'[' * 40}1{']' * 40}, y={{'a': 1}})]"
    expected, threshold = parse_python(text), gc.get_threshold()
    gc.callbacks.append(let_others_run)
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(parse_python, [text] * 100)) == [expected] * 100
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(let_others_run)


def test_python_values_survive_a_round_trip():
    rng = random.Random(0)
    for _ in range(400):
        calls = random_calls(rng)
        assert parse_python(render_python(calls)) == calls
    assert render_python([ToolCall("f", {"a": 1, "b": "x"}, (None,))]) == "[f(None, a=1, b='x')]"


NAMES = ["f(), g", "class", "", "a b", "'a'.join", "f #", "\ufb01"]
ARGUMENTS = [{"from": 1}, {"a=1, b": 2}, {"x": {1, 2}}, {"x": b"a"}, {"x": "a" * MAX_CHARS}]
ARGUMENTS += [{"x": float("nan")}, {"x": [float("inf")]}]


@pytest.mark.parametrize(
    "call", [ToolCall(name, {}) for name in NAMES] + [ToolCall("f", named) for named in ARGUMENTS]
)
def test_a_call_that_would_not_be_read_back_is_never_rendered(call):
    with pytest.raises(ValueError, match="render_python: got .* not allowed: "):
        render_python([call])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("No code here.", None),
        ("Inline ```python print(1)``` is none.", None),
        ("```python\nprint(1)\n```", "print(1)"),
        ("I look.\n```python\nx = 1\n\nprint(x)\n```\nThat was it.", "x = 1\n\nprint(x)"),
        ("```python \r\nx = 1\r\n  y\r\n``` \r\n", "x = 1\n  y"),
        ("``` python\nx\n```", "x"),
        ("```python\nprint('```')\n    ```\n```", "print('```')\n    ```"),
        ('````python\ns = """\n```\n"""\n````', 's = """\n```\n"""'),
        ("```python\nx\n`````", "x"),
        ("```python\na\u2028b\x0cc\n```", "a\u2028b\x0cc"),
        ("<think>\n```json\n{}\n```\n</think>\n```python\nx\n```", "x"),
        ("\n```json\n{}\n```\n</think>\n```python\nx\n```", "x"),
        ("```python\ns = '''\n</think>\n'''\n```", "s = '''\n</think>\n'''"),
    ],
)
def test_the_fenced_code_is_read(text, code):
    assert parse_fenced(text) == code
    assert parse_fenced(text.replace("python", "bash"), language="bash") == code


FENCE_REASONS = {
    "must open with a line ```python": ["```\nx\n```", "```py\nx\n```", "```Python\nx\n```"],
    "open with a line ```python": ["```python x = 1\n```", "Code: ```python\nx\n```"],
    "first block must": ["```json\n{}\n```\n```python\nx\n```", "```python3\nx\n```"],
    "must be closed": ["```python", "```python\nx\n", "```python\nx```", "```python\nx\n``` done"],
    "closed by a line ```": ["````python\nx\n```"],
    "is empty": ["```python\n```", "```python\n \n\t\n```"],
    "one code block": ["```python\nx\n```\n```python\ny\n```", "```python\nx\n```\n```\nout\n```"],
    "longer ````": ['```python\ns = """\n```\n"""\n```'],
    "needs its </think>": ["<think>```python\nx\n```"],
}


@pytest.mark.parametrize(("text", "reason"), cases(FENCE_REASONS))
def test_a_broken_block_is_refused_with_its_reason(text, reason):
    with pytest.raises(ToolCallError, match=reason):
        parse_fenced(text)


def read(parse, text):
    """A reading that ends in a result or in a ToolCallError."""
    try:
        parse(text)
    except ToolCallError as error:
        assert len(str(error)) < 1000


READERS = [parse_hermes, parse_python, parse_fenced]
READERS += [functools.partial(each.read, tools=(), cut=False) for each in TOOL_FORMATS.values()]
BOMBS = "( [ { {1: f( f(x= f() f()() - (1, lambda: 9**9 1+ a. f. x=1, f(x=1, ' ''' #' f'{ a".split()
BOMBS += "'''\\' r'\\ \\ é [a a( ` 0x 1_ <think> </think> <tool_call> </tool_call>".split()
BOMBS += ["not ", "[ ", "a( ", "```\n", "```python\n", "\n", "\r", "\0", '"""\\', block("")]
BOMBS += [
    "<function=f>",
    "<function=f>{}</function>",
    "<parameter=x>",
    "</parameter>\n",
    "</function>",
]
BOMBS += ["<tool_call><function=f><parameter=x>", "<tool_call>f<arg_key>x</arg_key><arg_value>"]
BOMBS += ["</arg_value><arg_key>", "[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS] [{"]
BOMBS += [TAG for TAGS in (DEEPSEEK_TAGS, KIMI_TAGS) for TAG in TAGS]
BOMBS += [DEEPSEEK_TAGS[0] + DEEPSEEK_TAGS[2], "```tool_code\nf()\n```", "```tool_code\n"]
BOMBS += ['<tool_call>{"a":', '{"a":', "\\'''\n", '\\"""\n']


@pytest.mark.parametrize("reader", READERS)
def test_repeated_pieces_cost_little_and_never_break_a_reader(reader):
    for piece in BOMBS:
        for count in (20, 150, 900, MAX_CHARS // len(piece) - 10, 100_000 // len(piece)):
            for text in (piece * count, "f(x=" + piece * count, "[f(x='" + piece * count + "1')]"):
                assert costs_less(functools.partial(read, reader, text), 0.1), (piece, count)


@pytest.mark.parametrize("reader", READERS)
def test_random_changes_of_valid_texts_never_break_a_reader(reader):
    rng = random.Random(0)
    pieces = PIECES + BOMBS + list("=,:()]}.-+*\"'") + ["None", "true", "python", "1e999", "\udc00"]
    for _ in range(500):
        calls = random_calls(rng)
        blocks = [render_hermes(call.name, **call.arguments) for call in calls]
        code = render_python(calls)
        text = rng.choice(["\n".join(blocks), code, f"```python\n{code}\n```"])
        for _ in range(rng.randrange(1, 4)):
            start = rng.randrange(len(text) + 1)
            stop = start + rng.choice([0, 0, 1, 5])
            text = text[:start] + rng.choice(pieces) + text[stop:]
        assert costs_less(functools.partial(read, reader, text), 0.1), text
