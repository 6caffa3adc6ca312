"""Which conversations a supervised run learns from, and which it only measures its loss on."""

import json
from types import SimpleNamespace

import chat_cases
import imitation_cases
import pyarrow as pa
import pytest
import sft_cases as cases
from training_template_cases import family

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.envs.order_desk.demonstrator import demonstrate
from seeupo_jax.learner.imitation.action_segments import to_segments
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.supervised import data as sft_data
from seeupo_jax.supervised.data import load_data, read_data


def tokens_of(conversations):
    return [segment.tokens_L.tolist() for each in conversations for segment in each]


def desk(split, count):
    shown = [demonstrate(f"{split}/{index}")[0] for index in range(count)]
    return tokens_of(to_segments(each, imitation_cases.tokenizer()) for each in shown)


@pytest.mark.parametrize("kind", ["files", "splits"])
def test_all_of_the_held_out_data_is_held_out_and_nothing_else(kind, tmp_path):
    if kind == "files":
        data = cases.write_desk(tmp_path / "some.jsonl", 5)
        other = cases.write_desk(tmp_path / "other.jsonl", 3, split="test")
        fields, held_out = {"data": str(data), "held_out_data": str(other)}, desk("test", 3)
    else:
        names = "data", "held_out_data"
        fields = {**dict.fromkeys(names, "demonstrations"), "options": {"episodes": 5}}
        held_out = desk("test", 5)
    config = {
        "sft": {**fields, "held_out": 0.5},
        "rollout": {"max_context": 4096},
        "env": {"options": {"data_dir": str(tmp_path)}},
    }
    data = read_data(from_dict(config), imitation_cases.tokenizer(), lambda *_: None)
    assert tokens_of(data.training) == desk("train", 5)
    assert tokens_of(data.held_out) == held_out


ONE = "got 1 conversations, of which none is left to"


@pytest.mark.parametrize(
    "count, sft, message",
    [
        (
            1,
            {"held_out": 0.05},
            f"--data: {ONE} train on, since config.sft.held_out=0.05 holds out",
        ),
        (
            2,
            {"held_out": 0.9},
            "--data: got 2 .* train on, since config.sft.held_out=0.9 holds out 2;",
        ),
        (
            4,
            {"held_out": 0.88},
            "--data: got 4 .* config.sft.held_out=0.88 holds out 4; allowed: more",
        ),
        (
            1,
            {"held_out": 0, "max_context": 33},
            f"--data: {ONE} train on; allowed: at least one of",
        ),
        (1, {"held_out_data": 1, "max_context": 33}, f"--data: {ONE} train on; allowed: at least"),
        (
            1,
            {"held_out_data": 2},
            f"config.sft.held_out_data: {ONE} hold out; allowed: at least one",
        ),
        (1, {"held_out": 0}, None),
        (1, {"held_out_data": 1}, None),
        (2, {"held_out": 0.7}, None),
        (2, {"held_out": 0.05}, None),
    ],
)
def test_a_share_that_leaves_no_conversation_is_refused_with_the_numbers(
    count, sft, message, tmp_path
):
    """Of held_out_data: 1 has a conversation that fits, 2 has one of more than max_context."""
    sft, other = dict(sft), cases.write_desk(tmp_path / "other.jsonl", 1, split="test")
    fields = {"data": str(cases.write_desk(tmp_path / "some.jsonl", count)), "too_long": "skip"}
    which, context = sft.pop("held_out_data", None), sft.pop("max_context", 4096)
    if which is not None:
        fields["held_out_data"] = str(other)
    if which == 2:
        line = json.loads(other.read_text())
        line["messages"][0]["content"] = "order " * 5000
        other.write_text(json.dumps(line) + "\n")
    config = from_dict({"sft": fields | sft, "rollout": {"max_context": context}})
    given = config, imitation_cases.tokenizer(), lambda *_: None
    if message is None:
        assert len(read_data(*given).training) >= 1
        return
    with pytest.raises(ValueError, match=f"^{message}.*[.]$"):
        read_data(*given)


def test_a_share_is_held_out_that_the_seed_draws(tmp_path):
    """7 of 18 conversations are 0.38 of them: the nearest number to 0.37 x 18 = 6.66."""
    file = cases.write_desk(tmp_path / "some.jsonl", 18)
    shown, drawn = desk("train", 18), []
    for seed in (0, 1, 0):
        config = {"seed": seed, "sft": {"data": str(file), "held_out": 0.37}}
        config["rollout"] = {"max_context": 4096}
        data = read_data(from_dict(config), imitation_cases.tokenizer(), lambda *_: None)
        held_out, training = tokens_of(data.held_out), tokens_of(data.training)
        assert len(held_out) == 7 and sorted(held_out + training) == sorted(shown)
        drawn.append(held_out)
    assert drawn[0] == drawn[2] != drawn[1]


def test_a_process_that_is_asked_to_stop_reads_no_further(tmp_path, monkeypatch):
    file, shown = cases.write_desk(tmp_path / "some.jsonl", 5), []
    monkeypatch.setattr(sft_data, "read_tokenizer", lambda *_: imitation_cases.tokenizer())
    config = from_dict({"sft": {"data": str(file)}, "rollout": {"max_context": 4096}})
    progress = SimpleNamespace(phase=lambda _: None, step=lambda *done: shown.append(done))
    with pytest.raises(Stopped, match=r"^after 3 of 5 conversations were read$"):
        load_data(config, progress, lambda: len(shown) == 3)
    assert shown == [(1, 5), (2, 5), (3, 5)]


def test_a_last_message_of_weight_0_is_refused_where_it_alone_is_trained_on(tmp_path):
    def read(train_on):
        config = {"sft": {"data": str(file), "train_on": train_on, "held_out": 0}}
        config["rollout"] = {"max_context": 4096}
        return read_data(from_dict(config), imitation_cases.tokenizer(), lambda *_: None)

    file = cases.write_desk(tmp_path / "some.jsonl", 2)
    row = json.loads(file.read_text().splitlines()[0])
    [m for m in row["messages"] if m["role"] == "assistant"][-1]["weight"] = 0
    file.write_text(json.dumps(row) + "\n")
    assert len(read("all").training) == 1
    with pytest.raises(ValueError, match="line 1.*: messages: got weight 0 for the last one of"):
        read("last")


@pytest.mark.exhaustive
def test_a_file_that_was_written_from_a_table_trains_on_the_same_tokens(tmp_path):
    tokenizer = chat_cases.make("qwen3")
    rows = [conversation(name, argument) for name, argument in (("find", "of"), ("send", "to"))]
    table = pa.Table.from_pylist(rows).to_pylist()
    assert table[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {
        "of": 1,
        "to": None,
    }

    def read(lines):
        file = cases.write(tmp_path / "some.jsonl", lines)
        config = {"sft": {"data": str(file), "held_out": 0}, "rollout": {"max_context": 4096}}
        return read_data(from_dict(config), tokenizer, lambda *_: None)

    wanted, found = read(rows), read(table)
    assert found.fingerprint == wanted.fingerprint and len(wanted.lines()) == 1
    assert found.lines()[1:] == [
        "warning: 4 nulls in tools and in arguments of calls are left out: the schemas do not allow"
        " them, and typed tables write them for what is absent"
    ]
    open_ended = [conversation("find", "of", schema={"type": "object"})]
    open_ended[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["to"] = None
    assert read(open_ended).lines()[1:] == [
        "1 nulls in tools and in arguments of calls stay: the schemas allow them, or do not say"
    ]


def conversation(name, argument, schema=None):
    schema = schema or {"type": "object", "properties": {argument: {"type": "integer"}}}
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": {argument: 1}}}
    return {
        "messages": [
            {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "seen"},
            {"role": "assistant", "content": "Done."},
        ],
        "tools": [{"name": name, "parameters": schema}],
    }


def test_conversations_that_are_a_segment_for_every_turn_are_warned_of(tmp_path):
    thinks = {"role": "assistant", "content": "Yes.", "reasoning_content": "Why?"}
    messages = [{"role": "user", "content": "Is it?"}, thinks] * 3
    file = cases.write(tmp_path / "some.jsonl", [{"messages": messages}] * 4)
    config = {"sft": {"data": str(file), "held_out": 0}, "rollout": {"max_context": 4096}}

    def read(template, **sft):
        options = from_dict(config | {"sft": config["sft"] | sft})
        return read_data(options, family("qwen3", template), lambda *_: None)

    own, kept = read(None), read("keep_thoughts")
    (conversation, *_) = kept.training
    assert [len(each) for each in own.training] == [3] * 4 and len(conversation) == 1
    tokens = sum(len(segment.tokens_L) for segment in own.training[0])
    assert own.lines()[1:] == [
        "warning: in 4 of 4 conversations of several turns every turn is a segment of its own: they"
        f" have {tokens} tokens on average, where one segment would have about"
        f" {len(conversation[0].tokens_L)}. The chat template removes earlier thoughts;"
        " config.chat.template=keep_thoughts keeps them."
    ]
    assert own.trained_tokens == kept.trained_tokens
    assert len(kept.lines()) == len(read(None, train_on="last").lines()) == 1
