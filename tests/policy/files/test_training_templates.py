"""Training templates write what a model's own template does, and keep the thoughts of all turns."""

import json

import chat_cases as cases
import numpy as np
import pytest
from refusals import refusal
from training_template_cases import OFF, OWN, SMOLLM3, SYSTEM, THANKS, USER, family, make, play
from transformers import AutoTokenizer

from seeupo_jax.configuration import schema
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer, load

# Every header of every family that is shipped.
CASES = [
    *(("qwen3", kwargs) for kwargs in ({}, OFF)),
    ("qwen3_thinking", {}),
    *(("qwen3_5", kwargs) for kwargs in ({}, OFF)),
    *(("glm4_5", kwargs) for kwargs in ({}, OFF)),
]
# What a model samples behind its header: thought and answer.
SAMPLED = {
    "qwen3": "<think>\nWhy {0}?\n</think>\n\nYes {0}.",
    "qwen3_thinking": "Why {0}?\n</think>\n\nYes {0}.",
    "qwen3_5": "Why {0}?\n</think>\n\nYes {0}.",
    "glm4_5": "\n<think>Why {0}?</think>\nYes {0}.",
}
RESULT = {"role": "tool", "content": "On its way."}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"n": 2, "to": ["a", "ß"]}}}
OTHER = {
    "type": "function",
    "function": {"name": "ask", "arguments": {"name": "Ann\nB", "ok": True}},
}


def exported(tokenizer, folder):
    """The library's tokenizer of an exported folder, which renders as other software does."""
    tokenizer.save(folder)
    return AutoTokenizer.from_pretrained(folder)


def rendered(library, messages, tools=(), **options):
    functions = [{"type": "function", "function": tool} for tool in tools]
    options = {"tokenize": False, "tools": functions or None} | options
    return library.apply_chat_template(messages, **options)


def said(text="", **more):
    return {"role": "assistant", "content": text, **more}


def random_history(rng, *, thoughts):
    """Questions, each with rounds of calls and an answer; thoughts in either form, or none."""
    messages = [SYSTEM] * rng.integers(0, 2)
    for number in range(rng.integers(1, 4)):
        messages.append(USER | {"content": f"Question {number}"})
        for turn in range(rng.integers(1, 4)):
            name = f"{number}-{turn}"
            content, more = "", {}
            if thoughts and rng.integers(0, 2):
                content = f"<think>\nWhy {name}?\n</think>\n\n"
            elif thoughts:
                more = {"reasoning_content": f"Why {name}?"}
            content += f"So {name}." * rng.integers(0, 2)
            calls = [CALL, OTHER][: rng.integers(1, 3)]
            messages.append(said(content, tool_calls=calls, **more))
            messages += [RESULT] * len(calls)
        messages.append(
            said(f"Answer {number}", **({"reasoning_content": "So."} if thoughts else {}))
        )
    return messages


def without_empty_thoughts(text):
    for empty in ("<think>\n\n</think>\n\n", "<think></think>"):
        text = text.replace(empty, "")
    return text


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name, kwargs", CASES)
def test_without_earlier_thoughts_the_text_is_that_of_the_models_own(name, kwargs, tmp_path):
    """But for empty thoughts of earlier messages, which stay too where the header writes one."""
    theirs = cases.small_library(OWN[name])
    ours = exported(family(name, kwargs=kwargs), tmp_path)
    rng = np.random.default_rng(0)
    for case in range(8):
        tools = (cases.TOOL,) * (case % 3)
        plain = [*random_history(rng, thoughts=False), THANKS]
        texts = [
            rendered(each, plain, tools, add_generation_prompt=True, **kwargs)
            for each in (theirs, ours)
        ]
        if name == "qwen3" and not kwargs:
            assert texts[0] == texts[1]
        assert without_empty_thoughts(texts[0]) == without_empty_thoughts(texts[1])
        # Thoughts since the last question are written by the model's own too.
        history = random_history(rng, thoughts=True)
        start = max(i for i, message in enumerate(history) if message["role"] == "user")
        current = [SYSTEM, *history[start:]]
        assert rendered(ours, current, tools, **kwargs) == rendered(
            theirs, current, tools, **kwargs
        )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name, kwargs", CASES)
def test_a_longer_conversation_begins_with_the_shorter(name, kwargs, tmp_path):
    ours, rng = exported(family(name, kwargs=kwargs), tmp_path), np.random.default_rng(1)
    for case in range(8):
        messages = [*random_history(rng, thoughts=case % 2 == 0), THANKS]
        ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        whole = rendered(ours, messages, (cases.TOOL,), **kwargs)
        for end in ends:
            assert whole.startswith(rendered(ours, messages[: end + 1], (cases.TOOL,), **kwargs))
        assert whole.count("Why") == sum("Why" in str(message) for message in messages)


def actions_of(tokenizer, name, kwargs, replies):
    """As sampled, with the end token that the next role makes."""
    actions = []
    for turn, reply in enumerate(replies):
        text = SAMPLED[name].format(turn)
        if kwargs:  # the header has closed the thought
            text = ("\n" if name == "glm4_5" else "") + f"Yes {turn}."
        action = tokenizer.action(text)
        if name == "glm4_5":
            role = "<|user|>" if reply["role"] == "user" else "<|observation|>"
            action[-1] = cases.small_library("", cases.GLM_CONTROL).convert_tokens_to_ids(role)
        actions.append(action)
    return actions


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name, kwargs", CASES)
def test_an_episode_is_one_segment_that_holds_what_was_sampled(name, kwargs):
    replies = [USER, RESULT, USER, THANKS]
    tokenizer = family(name, kwargs=kwargs)
    actions = actions_of(tokenizer, name, kwargs, replies)
    segments, conversation = play(tokenizer, actions, replies)
    (segment,) = segments
    for turn, action in enumerate(actions):
        assert segment.tokens_L[segment.turn_L == turn].tolist() == action
    text = conversation.text
    assert text.count("Why") == (0 if kwargs else 4)
    assert text.count("<think>") == text.count("</think>") + (text.endswith("<think>\n"))
    own = family(name, None, kwargs)
    forgotten, _ = play(own, actions, replies)
    # Questions follow the turns 0 and 2. Qwen3 removes an empty thought before a tool's reply too;
    # GLM-4.5 writes one into every message.
    assert len(forgotten) == {("qwen3", True): 4, ("glm4_5", True): 1}.get((name, bool(kwargs)), 3)


def test_an_episode_of_qwen3_in_full():
    tokenizer = family("qwen3")
    actions = actions_of(tokenizer, "qwen3", {}, [THANKS, THANKS])
    _, conversation = play(tokenizer, actions, [THANKS, THANKS])
    assert conversation.text == (
        "<|im_start|>system\nYou work at a desk.<|im_end|>\n"
        "<|im_start|>user\nWhere is it?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nWhy 0?\n</think>\n\nYes 0.<|im_end|>\n"
        "<|im_start|>user\nThanks!<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nWhy 1?\n</think>\n\nYes 1.<|im_end|>\n"
        "<|im_start|>user\nThanks!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tool_calls_of_qwen3_5_and_glm_in_full():
    message = said("So.", reasoning_content="Why?", tool_calls=[CALL, OTHER])
    wanted = {
        "qwen3_5": "Why?\n</think>\n\nSo.\n\n"
        '<tool_call>\n<function=find>\n<parameter=n>\n2\n</parameter>\n<parameter=to>\n["a", "ß"]\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=ask>\n<parameter=name>\n"
        "Ann\nB\n</parameter>\n<parameter=ok>\nTrue\n</parameter>\n</function>\n</tool_call>",
        "glm4_5": "\n<think>Why?</think>\nSo.\n<tool_call>find\n<arg_key>n</arg_key>\n<arg_value>2"
        '</arg_value>\n<arg_key>to</arg_key>\n<arg_value>["a", "ß"]</arg_value>\n</tool_call>\n'
        "<tool_call>ask\n<arg_key>name</arg_key>\n<arg_value>Ann\nB</arg_value>\n<arg_key>ok"
        "</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
    }
    for name, text in wanted.items():
        tokenizer = family(name)
        assert tokenizer.text(tokenizer.begin([USER], (cases.TOOL,)).say(message)) == text


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name, kwargs", CASES)
@pytest.mark.parametrize("text", ["Why", " x \n", "a</think>b", "<think>c", "\n\n</think>\n", ""])
def test_odd_actions_stay_one_segment_too(name, kwargs, text):
    """A thought that was cut short, two of them, other white space than the template writes."""
    if name == "glm4_5":
        text = "\n" + text  # what a model writes behind the header begins a line
    # Where the header has closed a thought, a message that brings one has no empty one before it.
    marks = "</think>" if name == "glm4_5" else "<think>"
    brings_thought = bool(kwargs) and marks in text
    tokenizer = family(name, kwargs=kwargs)
    action = tokenizer.action(text)
    segments, _ = play(tokenizer, [action, action], [THANKS, THANKS])
    assert len(segments) == (2 if brings_thought else 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name, kwargs", CASES)
def test_an_exported_folder_renders_as_the_run_did(name, kwargs, tmp_path):
    tokenizer = family(name, kwargs=kwargs)
    library = exported(tokenizer, tmp_path)
    thought = SAMPLED[name].format(0)
    messages = [USER, said(thought if thought[0] in "<\n" else "<think>\n" + thought), THANKS]
    wanted = tokenizer.begin(messages, (cases.TOOL,))
    assert "template" not in json.loads((tmp_path / "chat.json").read_text())
    # As `serve --model`, and as a run that names the option again.
    for chat in (None, schema.Chat(template="keep_thoughts", template_kwargs=kwargs)):
        assert load(tmp_path, chat).begin(messages, (cases.TOOL,)).tokens == wanted.tokens
    text = rendered(library, messages, (cases.TOOL,), add_generation_prompt=True)
    assert text == wanted.text and "Why 0?" in text


def test_a_template_that_removes_nothing_stays_the_models_own(tmp_path):
    plain = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    plain += "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
    for template, kwargs in ((plain, {}), (SMOLLM3, {}), (SMOLLM3, OFF)):
        own, kept = make(template, None, kwargs), make(template, kwargs=kwargs)
        messages = [SYSTEM, USER, said("<think>\nWhy?\n</think>\n\nYes."), RESULT]
        assert own.begin(messages, ()).tokens == kept.begin(messages, ()).tokens
        assert own.begin(messages, ()).text.count("Why?") == 1
        action = kept.action("Yes." if kwargs else "<think>\nWhy?\n</think>\n\nYes.")
        assert len(play(kept, [action] * 3, [THANKS, RESULT, THANKS])[0]) == 1


@pytest.mark.parametrize(
    "condition, variable",
    [
        ("preserve_thinking is defined and preserve_thinking is true", "preserve_thinking"),
        ("clear_thinking is defined and not clear_thinking", "clear_thinking"),
    ],
)
def test_a_models_own_variable_that_keeps_thoughts_is_set(condition, variable):
    """As in Qwen3.6's template, and in GLM-4.7's."""
    template = OWN["qwen3_5"].replace(
        "if loop.index0 > says.last", f"if ({condition}) or loop.index0 > says.last"
    )
    odd = template.replace("You have access to", "Here are")  # so that no family that is shipped
    tokenizer = make(odd)
    action = tokenizer.action("Why?\n</think>\n\nYes.")
    assert len(play(tokenizer, [action] * 3, [THANKS] * 3)[0]) == 1
    assert len(play(make(odd, None), [action] * 3, [THANKS] * 3)[0]) == 3
    off = {variable: variable == "clear_thinking"}
    text = refusal(lambda: make(odd, kwargs=off))
    assert text.startswith(f"config.chat.template_kwargs: got '{variable}'")


@pytest.mark.parametrize("kwargs", [{}, OFF])
def test_glm_4_7_keeps_thoughts_by_its_own_variable(kwargs):
    """It has no line ends, and a message without a thought has only the end of one."""
    keeps = "(clear_thinking is defined and not clear_thinking) or loop.index0 > asked.last"
    changes = {
        "'<|assistant|>\\n<think>' ~ (thought | trim if loop.index0 > asked.last else '')"
        " ~ '</think>'": (
            f"'<|assistant|>' ~ ('<think>' ~ thought | trim if thought and ({keeps}) else '')"
            " ~ '</think>'"
        ),
        "'\\n' ~ text | trim if": "text | trim if",
        "('\\n<think></think>' if quiet else '')": "('</think>' if quiet else '<think>')",
    }
    template = OWN["glm4_5"]
    for old, new in changes.items():
        assert old in template
        template = template.replace(old, new)
    tokenizer = make(template, kwargs=kwargs, glm=True)
    user = cases.small_library("", cases.GLM_CONTROL).convert_tokens_to_ids("<|user|>")
    action = [*tokenizer.action("Yes." if kwargs else "Why?</think>Yes.")[:-1], user]
    segments, conversation = play(tokenizer, [action] * 3, [THANKS] * 3)
    assert len(segments) == 1 and conversation.text.count("Why?") == (0 if kwargs else 3)
    own = make(template, None, kwargs, glm=True)
    assert len(play(own, [action] * 3, [THANKS] * 3)[0]) == (1 if kwargs else 3)


def test_a_template_that_keeps_thoughts_in_another_form_rewrites_messages():
    written = "{%- if loop.index0 > says.last -%}"
    written += "{{ '<think>\\n' ~ thought | trim ~ '\\n</think>\\n\\n' }}"
    assert written in OWN["qwen3_5"]
    changes = OWN["qwen3_5"].replace(
        written, written + "{%- else -%}{{ '<think>' ~ thought ~ '</think>' }}"
    )
    tokenizer = make(changes)
    action = tokenizer.action("Why?\n</think>\n\nYes.")
    assert len(play(tokenizer, [action] * 2, [THANKS] * 2)[0]) == 1
    assert len(play(make(changes, None), [action] * 2, [THANKS] * 2)[0]) == 2


@pytest.mark.parametrize(
    "template",
    [
        cases.FORGETS_THOUGHTS,
        OWN["qwen3"].replace("You may call one", "You can call one"),
        OWN["qwen3_5"].replace("~ text ~ '<|im_end|>", "~ m.content ~ '<|im_end|>"),
        OWN["glm4_5"].replace("'/nothink'", "''").replace("<|observation|>", "<|user|>"),
    ],
)
def test_a_template_that_no_family_writes_is_refused(template):
    """Also where it differs from a family's in one word, in white space, or in a role's name."""
    glm = "gMASK" in template
    assert refusal(lambda: make(template, glm=glm)) == (
        "config.chat.template: got 'keep_thoughts' for a test, whose chat template removes earlier"
        " thoughts and writes conversations as none of Qwen3, Qwen3.5, GLM-4.5 does, for which one"
        " that keeps them is shipped; allowed: a Jinja file that keeps them, or none."
    )


def test_a_models_own_template_of_that_name_wins():
    own = cases.DROPS_TOOLS
    named = {"default": OWN["qwen3"], "keep_thoughts": own}
    assert make(named).begin([USER], ()).text == make(own, None).begin([USER], ()).text
    assert refusal(lambda: make({"default": own, "tool_use": own})) == (
        "config.chat.template: got 'keep_thoughts' for a test, which has the chat templates"
        " default, tool_use; allowed: a Jinja file, or the name of one."
    )


def test_a_model_without_a_template_has_no_training_template():
    library = cases.small_library()
    library.chat_template = None
    chat = schema.Chat(template="keep_thoughts")
    text = refusal(lambda: HuggingFaceTokenizer(library, chat, generation={}, where="a test"))
    assert text == (
        "config.chat.template: got 'keep_thoughts' for a test, which has no chat template; allowed:"
        " a Jinja file."
    )


@pytest.mark.exhaustive
def test_a_template_that_does_not_end_is_one_sentence_here_too():
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    assert refusal(lambda: make(loop + OWN["qwen3"])).startswith("chat template: it computes for")
