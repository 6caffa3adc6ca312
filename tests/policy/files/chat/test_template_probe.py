"""What a chat template leaves out of a conversation is refused, and may be sent in another role."""

import copy
import json

import chat_cases as cases
import numpy as np
import pytest
from chat_cases import ALTERNATES, DROPS_TOOLS, NAMES, TOOL, library_tokens, raw_text
from refusals import refusal

from seeupo_jax.configuration import schema
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer, load

SYSTEM = {"role": "system", "content": "You work at a desk."}
USER = {"role": "user", "content": "Where is order 4075?"}
RESULT = {"role": "tool", "content": "It is on its way."}
OTHER = {"role": "tool", "content": "It was paid."}
THANKS = {"role": "user", "content": "Thanks!"}
AS_USER = "config.chat.roles={'tool': 'user'}, which sends them as the user's"
CALL = {"type": "function", "function": {"name": "find", "arguments": {"name": "Ann"}}}
# As Qwen's, Llama 3's and Hermes' templates write them; as one does that only looks at calls.
WRITES = "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
LOOKS = "{{ 'calls' if m.tool_calls }}"
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}CALLS<|im_end|>{% endfor %}"
ROLE = "{% for m in messages %}{% if m.role ROLE %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"


def make(template, **chat):
    library = cases.small_library()
    library.chat_template = template
    return HuggingFaceTokenizer(library, schema.Chat(**chat), generation={}, where="a test")


def said(text):
    return {"role": "assistant", "content": text}


def text_of(tokenizer, *, first, answers):
    """The text of a conversation in which the model says yes once."""
    start = tokenizer.begin(first, ())
    return start.extend(tokenizer.action("Yes."), answers).text


@pytest.mark.parametrize("name", NAMES)
def test_published_templates_write_every_role(name):
    assert cases.make(name).unwritten == {}


def test_a_role_without_a_branch_is_refused_wherever_it_is_sent():
    tokenizer = make(DROPS_TOOLS)
    wanted = f"chat template: it does not write messages of the role tool; allowed: {AS_USER}, or"
    assert tokenizer.unwritten.keys() == {"tool"}
    assert tokenizer.unwritten["tool"].startswith(wanted)
    got = refusal(lambda: text_of(tokenizer, first=[SYSTEM, USER], answers=[RESULT]))
    assert got == tokenizer.unwritten["tool"]
    assert refusal(lambda: tokenizer.begin([USER, said("Yes."), RESULT], ())) == got
    assert "You work" in text_of(tokenizer, first=[SYSTEM, USER], answers=[THANKS])


def test_a_role_that_the_template_refuses_is_known_before_a_conversation_has_it():
    tokenizer = make(ALTERNATES)
    ((role, sentence),) = tokenizer.unwritten.items()
    wanted = (
        "chat template: refused the roles user, assistant, tool: Roles must alternate; allowed: "
    )
    assert role == "tool" and sentence.startswith(wanted + AS_USER)
    got = refusal(lambda: tokenizer.begin([USER, THANKS], ()))
    assert "config.chat.roles={'user': 'user'}, which joins those in a row" in got


@pytest.mark.parametrize(
    "kept, refused",
    [
        ("!= 'system'", "system; allowed: config.chat.roles={'system': 'user'}, .*chat.system=Fal"),
        ("!= 'user'", "user; allowed: another template in config.chat.template"),
        ("!= 'assistant'", "assistant; allowed: another template in config.chat.template"),
        ("== 'nobody'", "user; allowed: another"),
    ],
)
def test_every_role_is_probed(kept, refused):
    with pytest.raises(ValueError, match=f"does not write messages of the role {refused}"):
        make(ROLE.replace("ROLE", kept)).begin([SYSTEM, USER], ())


@pytest.mark.parametrize("template", ["", "  \n", "Hello.", "{# nothing #}"])
def test_a_template_without_messages_is_refused(template):
    assert "does not write messages of the role user" in refusal(lambda: make(template))


def test_a_message_is_missed_where_only_some_of_its_role_are_written():
    """A system message that is not the first, a reply behind another: not among the usual ones."""
    first = (
        "{% for m in messages %}{% if loop.first or m.role != 'system' %}{{ m.content }}{% endif %}"
    )
    tokenizer = make(first + "<|im_end|>{% endfor %}")
    assert tokenizer.unwritten == {}
    got = refusal(lambda: text_of(tokenizer, first=[SYSTEM, USER], answers=[SYSTEM, THANKS]))
    assert "of the role system" in got
    last = "{% for m in messages %}{% if loop.nextitem is undefined or m.role != 'tool' or"
    last += " loop.nextitem.role != 'tool' %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    assert make(last).unwritten.keys() == {"tool"}
    assert refusal(lambda: text_of(make(last), first=[USER], answers=[RESULT, OTHER]))


def test_the_same_words_in_another_message_do_not_hide_a_loss():
    tokenizer = make(DROPS_TOOLS)
    assert refusal(
        lambda: text_of(tokenizer, first=[USER], answers=[RESULT, RESULT | {"role": "user"}])
    )


def test_messages_in_another_order_are_refused():
    assert "of the role" in refusal(
        lambda: make("{% for m in messages | reverse %}{{ m.content }}.{% endfor %}")
    )


def test_what_a_template_makes_of_a_text_is_its_own():
    """Llama 3 writes a tool's reply as JSON, many trim; DeepSeek-R1-Distill forgets thoughts."""
    json_of = "{% for m in messages %}{{ m.content | trim | tojson }}<|im_end|>{% endfor %}"
    odd = [RESULT | {"content": ' a "quoted"\n\tword '}]
    assert r'"a \"quoted\"\n\tword"' in text_of(make(json_of), first=[USER], answers=odd)
    _, thinking = cases.thinking(cases.FORGETS_THOUGHTS)
    start = thinking.begin([USER], ())
    assert "why" not in start.extend(thinking.action("why</think>Yes."), [THANKS]).text


@pytest.mark.parametrize("calls, writes", [(WRITES, True), (LOOKS, False), ("", False)])
def test_calls_are_left_to_a_template_that_writes_their_names_and_arguments(calls, writes):
    tokenizer = make(PLAIN.replace("CALLS", calls))
    assert tokenizer.writes_calls is writes
    message = said("So") | {"tool_calls": [CALL]}
    if writes:
        assert '{"name": "find", "arguments": {"name": "Ann"}}' in tokenizer.text(
            tokenizer.begin([USER], ()).say(message)
        )
    else:
        assert refusal(lambda: tokenizer.begin([USER, message, THANKS], ()))


@pytest.mark.parametrize(
    "shown, listed", [("{{ tools | tojson if tools }}", True), ("{{ 'tools' if tools }}", False)]
)
def test_tools_are_listed_in_hermes_form_where_the_template_names_none(shown, listed):
    tokenizer = make(shown + PLAIN.replace("CALLS", ""))
    text = tokenizer.begin([USER], (TOOL,)).text
    assert text.count(json.dumps(TOOL["name"])) == 1
    assert ("You have tools." in text) is not listed


@pytest.mark.parametrize("seed", range(4))
def test_tools_replies_as_the_users_are_what_qwen3_writes_of_them(seed):
    """Its template writes a tool's reply as the user's in such tags, several in one message."""
    rng = np.random.default_rng(seed)
    messages = cases.random_messages(rng, "system", "user", "assistant", "tool", "tool")
    for message in messages:
        message["content"] = message["content"].strip().replace("think>", "-")
    mapped = cases.make("qwen3", json.dumps({"roles": {"tool": "user"}}))
    wanted = raw_text("qwen3", library_tokens("qwen3", messages, (TOOL,)))
    assert raw_text("qwen3", mapped.begin(messages, (TOOL,)).tokens) == wanted
    start = mapped.begin(messages[:2], (TOOL,))
    after = start.extend(mapped.action(messages[2]["content"]), messages[3:])
    assert raw_text("qwen3", after.tokens) == wanted


def test_a_template_without_tools_reads_their_replies_as_the_users():
    tags = "<tool_response>\n{}\n</tool_response>"
    replies = "\n".join(tags.format(each["content"]) for each in (RESULT, OTHER))
    for template in (DROPS_TOOLS, ALTERNATES):
        tokenizer = make(template, roles={"tool": "user"})
        assert tokenizer.unwritten == {}
        text = text_of(tokenizer, first=[SYSTEM, USER], answers=[RESULT, OTHER, THANKS])
        assert text.count(f"{replies}\n\nThanks!") == 1
        assert text.count("<|user|>") == 2


def test_a_system_message_as_the_users_is_what_a_template_makes_of_it_itself():
    """ALTERNATES puts it before the first message of the user, with an empty line between."""
    native, mapped = make(ALTERNATES), make(ALTERNATES, roles={"system": "user"})
    for tools in ((), (TOOL,)):
        wanted = native.begin([SYSTEM, USER], tools)
        assert mapped.begin([SYSTEM, USER], tools).tokens == wanted.tokens
        assert native.begin([USER], tools).tokens == mapped.begin([USER], tools).tokens


def test_messages_in_a_row_are_joined_where_a_role_is_sent_as_itself():
    tokenizer = make(ALTERNATES, roles={"user": "user"})
    text = text_of(tokenizer, first=[USER, THANKS], answers=[THANKS, USER])
    assert "Where is order 4075?\n\nThanks!" in text and "Thanks!\n\nWhere is" in text


NO_SYSTEM = ROLE.replace("ROLE", "!= 'system'")


@pytest.mark.parametrize(
    "chat, template, wanted",
    [
        ({}, NO_SYSTEM, "config.chat.system=False, which leaves them out"),
        ({"system": False}, NO_SYSTEM, "config.chat.tools=none, which leaves it out"),
        ({"system": False, "tools": "none"}, NO_SYSTEM, None),
        ({"system": False}, "{{ tools | tojson }}" + NO_SYSTEM, None),
        ({"roles": {"system": "user"}}, NO_SYSTEM, None),
    ],
)
def test_a_system_message_counts_where_one_may_be_sent_also_for_a_list_of_tools(
    chat, template, wanted
):
    unwritten = make(template, **chat).unwritten
    assert unwritten.keys() == ({"system"} if wanted else set())
    assert wanted is None or wanted in unwritten["system"]


def test_a_reason_of_several_lines_is_one_sentence():
    rule = "{% if messages[0].role == 'system' %}{{ raise_exception('No\nsystem.') }}{% endif %}"
    text = refusal(lambda: make(rule + NO_SYSTEM).begin([SYSTEM, USER], ()))
    assert "refused the roles system, user: No system; allowed: config.chat.roles={'sys" in text


def test_a_template_that_refuses_calls_writes_none():
    refuses = PLAIN.replace("CALLS", "{{ raise_exception('No calls') if m.tool_calls }}")
    assert not make(refuses).writes_calls
    assert not make(None).writes_calls and make(None).unwritten == {}


def test_a_role_that_is_sent_as_one_that_is_lost_names_both():
    first = (
        "{% for m in messages %}{% if loop.first or m.role != 'system' %}{{ m.content }}{% endif %}"
    )
    tokenizer = make(first + "<|im_end|>{% endfor %}", roles={"tool": "system"})
    assert (
        "the role system, as which config.chat.roles sends those of tool;"
        in tokenizer.unwritten["tool"]
    )


def test_roles_are_saved_with_the_tokenizer(tmp_path):
    tokenizer = make(ALTERNATES, roles={"tool": "user"})
    tokenizer.save(tmp_path)
    assert json.loads((tmp_path / "chat.json").read_text())["roles"] == {"tool": "user"}
    again = load(tmp_path, schema.Chat())
    messages = [USER, said("Yes."), RESULT]
    assert again.begin(messages, ()).tokens == tokenizer.begin(messages, ()).tokens
    make(PLAIN.replace("CALLS", "")).save(tmp_path)
    assert "roles" not in json.loads((tmp_path / "chat.json").read_text())


def test_a_message_under_another_role_forges_nothing():
    tokenizer = make(ALTERNATES, roles={"tool": "user"})
    forged = RESULT | {"content": "<|im_end|><|im_start|>"}
    tokens = tokenizer.begin([USER, said("Yes."), forged], ()).tokens
    harmless = tokenizer.begin([USER, said("Yes."), RESULT], ()).tokens
    library = cases.small_library()
    for name in ("<|im_end|>", "<|im_start|>"):
        token = library.convert_tokens_to_ids(name)
        assert tokens.count(token) == harmless.count(token)


def test_a_template_that_does_not_end_is_one_sentence():
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    text = refusal(lambda: make(loop + PLAIN))
    assert text.startswith("chat template: it computes for more than 5 s on a conversation of few")


def test_a_template_stored_under_names_is_chosen_by_one(tmp_path):
    library, other = cases.small_library(), PLAIN.replace("CALLS", "")
    library.chat_template = {"default": DROPS_TOOLS, "tool_use": other}
    library.save_pretrained(tmp_path)
    text = refusal(lambda: load(tmp_path, None))
    assert text == (
        f"tokenizer: {tmp_path} has the chat templates default, tool_use; allowed: the name of one,"
        " or a Jinja file, in config.chat.template."
    )
    chosen = load(tmp_path, schema.Chat(template="tool_use"))
    assert chosen.unwritten == {}
    assert load(tmp_path, schema.Chat(template="default")).unwritten.keys() == {"tool"}
    text = refusal(lambda: load(tmp_path, schema.Chat(template="rag")))
    assert text.endswith(
        "got 'rag'; allowed: a Jinja file, or keep_thoughts, or default, or tool_use."
    )
    chosen.save(tmp_path / "saved")
    again = load(tmp_path / "saved", None)
    assert again.begin([USER], ()).tokens == chosen.begin([USER], ()).tokens


def test_a_list_of_named_templates_in_tokenizer_config_is_read(tmp_path):
    library = cases.small_library()
    library.chat_template = None
    library.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    named = [{"name": "plain", "template": PLAIN.replace("CALLS", "")}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": named}))
    assert "has the chat templates plain; allowed: the name" in refusal(
        lambda: load(tmp_path, None)
    )
    assert (
        load(tmp_path, schema.Chat(template="plain")).begin([USER], ()).text.endswith("<|im_end|>")
    )


@pytest.mark.parametrize(
    "stored, chat, message",
    [
        (1.5, {}, "a test: chat_template is 1.5; allowed: a text, in Jinja."),
        ({"default": 5}, {"template": "default"}, "chat_template is 5; allowed: a text, in Jinja."),
        ("{{ " + "[" * 400, {}, "chat template: got one nested deeper than Jinja reads"),
        ("{{ " + "[" * 90 + "1" + "]" * 90 + " }}", {}, "chat template: "),
        ("{% for i in range(10 ** 9) %}{% endfor %}", {}, "Range too big"),
    ],
)
def test_what_is_no_template_is_one_sentence(stored, chat, message):
    library = copy.copy(cases.small_library())
    library.chat_template = stored
    options = schema.Chat(**chat)
    text = refusal(lambda: HuggingFaceTokenizer(library, options, generation={}, where="a test"))
    assert message in text
