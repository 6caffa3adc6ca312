"""The oracle always wins; less skill wins less, by the slips that are named."""

import pytest

from seeupo_jax.envs.order_desk import demonstrator
from seeupo_jax.envs.order_desk.demonstrator import demonstrate
from seeupo_jax.envs.order_desk.desk import MAX_TURNS, TOOLS
from seeupo_jax.envs.order_desk.environment import OrderDesk
from seeupo_jax.envs.tool_calls import parse_hermes


def success(skill, cases=400, **options):
    scores = [demonstrate(f"train/{index}", skill=skill, **options)[1] for index in range(cases)]
    return sum(scores) / cases


@pytest.mark.parametrize("split, cases", [("train", 500), ("test", 200)])
def test_the_oracle_wins_every_case(split, cases):
    assert all(demonstrate(f"{split}/{index}")[1] == 1.0 for index in range(cases))


def test_skill_is_rewarded_from_a_quarter_to_all():
    rates = [success(skill) for skill in (0.0, 0.4, 0.7, 1.0)]
    assert all(more - less > 0.08 for less, more in zip(rates, rates[1:], strict=False))
    assert rates[0] < 0.35 and 0.4 < rates[1] < 0.6 and rates[-1] == 1.0


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_demonstration_is_a_conversation_with_the_desk(split):
    for index in range(30):
        conversation, score = demonstrate(f"{split}/{index}", skill=0.4)
        desk = OrderDesk()
        messages, tools = desk.reset(f"{split}/{index}", seed=0)
        assert conversation.tools == tools == TOOLS
        for message in conversation.messages[len(messages) :]:
            if message["role"] == "assistant":
                result = desk.step(message["content"])
                messages += (message, *result.observation)
        assert messages == conversation.messages
        assert result.done and desk.score() == score


def test_the_oracle_looks_before_it_acts_and_ends_with_one_reply():
    for index in range(100):
        conversation, _ = demonstrate(f"train/{index}")
        actions = [m["content"] for m in conversation.messages if m["role"] == "assistant"]
        names = [call.name for action in actions for call in parse_hermes(action)]
        assert names[:3] == ["find_customer", "list_orders", "get_order"]
        assert names[-1] == "reply" and names.count("reply") == 1
        assert len(actions) == len(names) <= MAX_TURNS - 1  # one turn is left for a mistake


def test_the_same_arguments_give_the_same_conversation_and_a_seed_other_slips():
    one = [demonstrate(f"train/{index}", skill=0.2, seed=3) for index in range(50)]
    assert one == [demonstrate(f"train/{index}", skill=0.2, seed=3) for index in range(50)]
    other = [demonstrate(f"train/{index}", skill=0.2, seed=4) for index in range(50)]
    assert sum(a != b for a, b in zip(one, other, strict=True)) > 25


@pytest.mark.parametrize(
    "slip, low, high",
    [
        ("guess", 0.0, 0.3),
        ("wrong_order", 0.3, 0.7),  # it may be the right one, or be owed the same
        ("obey", 0.4, 0.75),  # what is asked for is often allowed
        ("wrong_reply", 0.05, 0.3),  # one in seven is right after all
        ("bad_call", 1.0, 1.0),  # costs a turn, and there is one
    ],
)
def test_each_slip_costs_what_it_should(monkeypatch, slip, low, high):
    chances = dict.fromkeys(demonstrator.SLIPS, 0.0) | {slip: 1.0}
    monkeypatch.setattr(demonstrator, "SLIPS", chances)
    assert low <= success(0.0) <= high
    assert success(1.0, cases=50) == 1.0


def test_a_bad_call_is_answered_by_an_error(monkeypatch):
    monkeypatch.setattr(
        demonstrator, "SLIPS", dict.fromkeys(demonstrator.SLIPS, 0.0) | {"bad_call": 1}
    )
    conversation, _ = demonstrate("train/0", skill=0.0)
    answers = [m["content"] for m in conversation.messages if m["role"] == "tool"]
    assert sum(answer.startswith('{"error": "no order') for answer in answers) == 1


@pytest.mark.parametrize("skill", [-0.1, 1.1, float("nan")])
def test_a_skill_outside_its_range_is_refused(skill):
    with pytest.raises(ValueError, match=f"order_desk skill: got {skill}; allowed: .* 0 to 1"):
        demonstrate("train/0", skill=skill)
