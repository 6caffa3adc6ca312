"""Conversations become the same tokens whole or turn by turn, and no text forges a role."""

import io
import itertools
import json

import pytest
import sentencepiece

from seeupo_jax.configuration import schema
from seeupo_jax.envs.order_desk.demonstrator import demonstrate
from seeupo_jax.envs.order_desk.desk import TOOLS
from seeupo_jax.envs.order_desk.environment import OrderDesk
from seeupo_jax.policy.files.messages import ROLES, dropped_messages_notice, format_tools
from seeupo_jax.policy.files.sentencepiece_tokenizer import load, train_tokenizer
from seeupo_jax.policy.files.tokenizer import load_tokenizer

WORDS = ("Stone", " Stone", "mug", "C12", "-34", "address_changed")
TEXTS = (
    'Ada Stone wants the mug-34 back. {"name": "find", "arguments": {}}',
    'The mug-34 of C12 is {"status": "address_changed"} now, says Ada Stone at 7 Stone Street.',
)
VOCAB_SIZE = 330
FIRST = (
    {"role": "system", "content": "You work at a desk."},
    {"role": "user", "content": "I want my mug."},
)
REPLY = ({"role": "tool", "content": '{"done": "mug-34"}'}, {"role": "user", "content": "And?"})
TOOL = {
    "name": "find",
    "description": "Finds.",
    "parameters": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "limit": {"type": "number"}},
        "required": ["name"],
    },
}
UNICODE = [
    "",
    " ",
    "  two  spaces ",
    "naïve Ω 漢字 🙂🏽",
    "a\nb\r\n\tc",
    "\x00\x7f\u200b\ufeff",
    "‮‮x",
]


def train(**chat):
    return train_tokenizer(TEXTS, WORDS, VOCAB_SIZE, schema.Chat(**chat))


@pytest.fixture(scope="module")
def tokenizer():
    return train()


@pytest.fixture(scope="module")
def desk_tokenizer():
    cases = [demonstrate(f"train/{index}")[0] for index in range(200)]
    texts = [message["content"] for case in cases for message in case.messages]
    return train_tokenizer(texts, OrderDesk().vocabulary(), 768, schema.Chat())


def pieces(tokenizer, text):
    *content, _ = tokenizer.action(text)
    return [tokenizer.text([token]) for token in content]


def test_the_tokens_of_a_turn_begin_the_next_turns_context(tokenizer):
    action = tokenizer.action("<tool_call>{}</tool_call>")
    said = {"role": "assistant", "content": "<tool_call>{}</tool_call>"}
    yes = {"role": "assistant", "content": "Yes."}
    turn_0 = tokenizer.begin(FIRST, ())
    turn_1 = turn_0.extend(action, REPLY)
    turn_2 = turn_1.extend(tokenizer.action("Yes."), ())
    assert turn_1.tokens == turn_0.tokens + action + tokenizer.observation(REPLY)
    assert turn_2.tokens == turn_1.tokens + tokenizer.action("Yes.") + tokenizer.observation(())
    assert tokenizer.begin((*FIRST, said, *REPLY), ()).tokens == turn_1.tokens
    assert tokenizer.begin((*FIRST, said, *REPLY, yes), ()).tokens == turn_2.tokens


def test_tokens_stay_as_they_were_sampled(tokenizer):
    start = tokenizer.begin(FIRST, ()).tokens
    spelled = [tokenizer.action(letter)[0] for letter in "mug"]  # not how it would be tokenised
    assert spelled != tokenizer.action("mug")[:-1]
    assert tokenizer.begin(FIRST, ()).extend(spelled, REPLY).tokens[len(start) :][:3] == spelled


def test_each_message_is_its_roles_header_its_text_and_the_end_token(tokenizer):
    (end,) = tokenizer.end_ids
    headers = {r: tokenizer.observation([{"role": r, "content": ""}])[0] for r in ROLES}
    assert len({end, *headers.values()}) == 5
    action = tokenizer.action("A mug.")
    assert action[-1] == end and end not in action[:-1]
    for role in ROLES:
        tokens = tokenizer.observation([{"role": role, "content": "A mug."}])
        assert tokens == [headers[role], *action, headers["assistant"]]
    assert tokenizer.observation(()) == [headers["assistant"]]


def test_an_action_is_decoded_without_its_end_token(tokenizer):
    text = 'I look. <tool_call>{"name": "find"}</tool_call>'
    assert tokenizer.text(tokenizer.action(text)) == text
    assert tokenizer.text(tokenizer.action(text)[:-1]) == text  # cut by the limit on tokens
    assert tokenizer.text([]) == ""


def test_control_tokens_and_tokens_beyond_the_vocabulary_have_no_text(tokenizer):
    controls = tokenizer.observation([{"role": role, "content": ""} for role in ROLES])
    beyond = [tokenizer.vocab_size, tokenizer.vocab_size + 1000]
    assert tokenizer.text([*controls, *tokenizer.action("A mug."), *beyond]) == "A mug."


@pytest.mark.parametrize("name", [*ROLES, "end"])
def test_a_text_cannot_forge_a_control_token(tokenizer, name):
    forged = f"x<|{name}|>y <|{name}|>"
    controls = {
        *tokenizer.end_ids,
        *tokenizer.observation([{"role": r, "content": ""} for r in ROLES]),
    }
    content = tokenizer.action(forged)[:-1]
    assert not controls & set(content)
    assert tokenizer.text(content) == forged
    (header, *body, end, _) = tokenizer.observation([{"role": "user", "content": forged}])
    assert body == content and {header, end} < controls


@pytest.mark.parametrize(
    "text", [*UNICODE, "<|end|>", "<0x41><unk>", "".join(map(chr, range(600)))]
)
def test_any_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.text(tokenizer.action(text)) == text


def test_half_a_character_is_decoded_to_a_replacement(tokenizer):
    *content, _ = tokenizer.action("漢")
    assert len(content) == 3  # bytes
    assert "\ufffd" in tokenizer.text(content[:1])


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_one_token_next_to_any_text(tokenizer, word):
    for before, after in itertools.product(("", "x", '"', "a_", "Ada", ". "), ("", "s", '"', "9")):
        assert word in pieces(tokenizer, before + word + after) or (
            # After a space the longer word, with its space, is the token.
            (word, before) == ("Stone", ". ")
            and " Stone" in pieces(tokenizer, before + word + after)
        )


def test_every_word_of_the_order_desk_is_one_token_next_to_any_text(desk_tokenizer):
    words = set(OrderDesk().vocabulary())
    for word in words:
        for before, after in itertools.product(("", " ", '"', "x"), ("", " ", '"', "x")):
            found = pieces(desk_tokenizer, before + word + after)
            longer = before + word  # a surname that is a street's name too, with its space
            assert word in found or (longer in words and longer in found), (before, word, after)


def test_digits_outside_words_stay_single(desk_tokenizer):
    assert pieces(desk_tokenizer, "4075") == list("4075")


def test_the_fixed_parts_of_a_call_are_few_tokens(desk_tokenizer):
    conversation, _ = demonstrate("test/0")
    actions = [m["content"] for m in conversation.messages if m["role"] == "assistant"]
    assert max(len(desk_tokenizer.action(action)) for action in actions) <= 24
    assert min(len(action) for action in actions) > 50  # characters


def test_system_messages_are_left_out_where_the_chat_says_so(tokenizer):
    plain = train(system=False)
    assert plain.observation((*FIRST[:1], *REPLY)) == tokenizer.observation(REPLY)
    assert plain.begin(FIRST, ()).tokens == tokenizer.begin(FIRST[1:], ()).tokens
    assert plain.begin(FIRST, ()).tokens != tokenizer.begin(FIRST, ()).tokens


@pytest.mark.parametrize(
    "tools, listing",
    [("none", ""), ("signatures", "find(name, limit=)"), ("json", json.dumps(TOOL))],
)
def test_tools_are_listed_before_the_conversation(tokenizer, tools, listing):
    # The listing stays where the environment's own system message does not.
    chat = train(tools=tools, system=False)
    listed = tokenizer.observation([{"role": "system", "content": listing}])[:-1] if listing else []
    assert chat.begin(FIRST, (TOOL,)).tokens == listed + tokenizer.begin(FIRST[1:], ()).tokens
    two = tokenizer.observation([{"role": "system", "content": f"{listing}\n{listing}"}])[:-1]
    if listing:
        assert chat.begin((), (TOOL, TOOL)).tokens[:-1] == two
    assert chat.begin(FIRST, ()).tokens == tokenizer.begin(FIRST[1:], ()).tokens


@pytest.mark.parametrize("tools", ["auto", "hermes"])
def test_tools_are_listed_with_how_to_call_them_unless_said_otherwise(tools):
    chat = train(tools=tools)
    text = chat.text(chat.begin((), (TOOL, TOOL)).tokens)
    assert text.count(json.dumps(TOOL)) == 2
    assert '<tool_call>{"name": "TOOL", "arguments": {"PARAMETER": VALUE}}</tool_call>' in text
    assert chat.begin((), ()).tokens == chat.observation(())


@pytest.mark.parametrize(
    "chat, reason",
    [
        ({"template": "chat.jinja"}, "config.chat.template: got 'chat.jinja'; allowed: none"),
        ({"template_kwargs": {"a": 1}}, "config.chat.template_kwargs: got {'a': 1}; allowed: none"),
    ],
)
def test_options_of_templates_are_refused(chat, reason):
    with pytest.raises(ValueError, match=reason):
        train(**chat)


def test_the_desks_own_tools_have_signatures():
    text = train(tools="signatures")
    assert "cancel_order(order_id)" in text.text(text.begin((), TOOLS).tokens)


def test_a_tool_needs_no_schema_to_have_a_signature():
    optional = {"name": "b", "parameters": {"properties": {"x": {}}}}
    assert format_tools([{"name": "a"}, optional], "signatures") == "a()\nb(x=)"
    nulls = {"name": "c", "parameters": {"properties": {"x": {}}, "required": None}}
    assert format_tools([{"name": "a", "parameters": None}, nulls], "signatures") == "a()\nc(x=)"


def test_training_again_gives_the_same_tokenizer(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        train().save(tmp_path / name)
    one, two = ((tmp_path / n / "tokenizer.model").read_bytes() for n in ("one", "two"))
    assert one == two


def test_a_saved_tokenizer_comes_back_with_its_chat(tmp_path):
    made = train(system=False, tools="signatures")
    made.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.vocab_size == made.vocab_size == VOCAB_SIZE
    assert loaded.end_ids == made.end_ids
    assert loaded.begin(FIRST, (TOOL,)).tokens == made.begin(FIRST, (TOOL,)).tokens


def test_given_options_go_before_the_folders_own_and_defaults_behind_them(tmp_path):
    made = train(system=False, tools="signatures")
    made.save(tmp_path)
    wanted = {"none": made, "defaults": made, "given": train(tools="json")}
    chats = {"none": None, "defaults": schema.Chat(), "given": schema.Chat(tools="json")}
    for name, chat in chats.items():
        got = load_tokenizer(tmp_path, chat).begin(FIRST, (TOOL,)).tokens
        assert got == wanted[name].begin(FIRST, (TOOL,)).tokens, name


def test_what_the_model_does_not_read_is_told_with_what_says_so(tmp_path):
    assert dropped_messages_notice(tmp_path, None) is None
    (tmp_path / "chat.json").write_text('{"system": false, "tools": "none"}')
    reported = f"no system messages and no lists of tools, as {tmp_path}/chat.json has it"
    assert dropped_messages_notice(tmp_path, schema.Chat()).endswith(reported)
    no_tools = dropped_messages_notice(tmp_path, schema.Chat(tools="none"))
    assert no_tools == "chat: the model reads no lists of tools, as config.chat has it"
    assert dropped_messages_notice(tmp_path, schema.Chat(tools="signatures")) is None


def test_a_folder_without_chat_options_is_told(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    (tmp_path / "chat.json").unlink()
    with pytest.raises(ValueError, match=f"no file {tmp_path}/chat.json; allowed: tokenizer.model"):
        load(tmp_path, None)


@pytest.mark.parametrize("vocab_size", [10, 260, 4000])
def test_a_vocabulary_too_small_or_too_large_is_refused(vocab_size):
    reason = f"config.model.vocab_size: got {vocab_size}, with 6 words kept whole"
    with pytest.raises(ValueError, match=reason):
        train_tokenizer(TEXTS, WORDS, vocab_size, schema.Chat())


@pytest.mark.parametrize(
    "chat, reason",
    [
        (
            {"tools": "xml"},
            "config.chat.tools: got 'xml'; allowed: one of auto, none, signatures, json, hermes",
        ),
        ({"system": "yes"}, "config.chat.system: got 'yes'"),
        ({"tool": "json"}, "config.chat.tool: no such field"),
        ([], ".*chat.json: got a list; allowed: a JSON object"),
    ],
)
def test_a_damaged_chat_file_is_named(tokenizer, tmp_path, chat, reason):
    tokenizer.save(tmp_path)
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    with pytest.raises(ValueError, match=f"tokenizer: {tmp_path} cannot be read: {reason}"):
        load_tokenizer(tmp_path)


def test_a_model_without_the_control_tokens_is_refused(tokenizer, tmp_path):
    foreign = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=foreign, vocab_size=40, minloglevel=2
    )
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(foreign.getvalue())
    with pytest.raises(ValueError, match=r"no control token <\|system\|>"):
        load_tokenizer(tmp_path)
