"""Kuhn poker: its rules, its equilibrium, and its two roles."""

import itertools
import math

import pytest

from seeupo_jax import envs
from seeupo_jax.envs.kuhn_poker.environment import MOVES, ROLES, strategy_of
from seeupo_jax.envs.kuhn_poker.game import (
    CARDS,
    DEALS,
    DECISIONS,
    EQUILIBRIUM,
    VALUE,
    expected_payoff,
    exploitability,
    payoff,
)
from seeupo_jax.envs.validation import check_step


@pytest.mark.parametrize(
    "deal, history, chips",
    [
        *(("KQ", "pp", 1), ("JQ", "pp", -1), ("JK", "bp", 1), ("KJ", "pbp", -1)),
        *(("QJ", "bb", 2), ("QK", "bb", -2), ("KJ", "pbb", 2), ("JQ", "pbb", -2)),
    ],
)
def test_who_wins_how_much(deal, history, chips):
    assert payoff(deal, history) == chips
    environment = envs.make("kuhn_poker")
    _, tools = environment.reset(f"train/{deal}", 0)
    assert tools == ()
    for turn, move in enumerate(history):
        assert environment.role == ROLES[turn % 2]
        step = check_step(environment.step(MOVES[move]), turn=turn, roles=ROLES)
        assert step.role == environment.role
    assert step.done and step.reward == 0
    assert step.role_rewards == {"player_1": chips, "player_2": -chips}
    assert environment.score() == float(chips > 0)


def test_an_equilibrium_has_the_value_of_the_game_and_cannot_be_exploited():
    """-1/18 (Kuhn 1950); a uniform strategy: `nash_conv` 11/12 in OpenSpiel's tests."""
    assert expected_payoff(EQUILIBRIUM, EQUILIBRIUM) == pytest.approx(VALUE, abs=1e-15)
    assert exploitability(EQUILIBRIUM) == pytest.approx(0, abs=1e-15)
    others = {"J": 1 / 3, "K": 1.0, "Qpb": 2 / 3}  # alpha = 1/3: J alpha, K 3 alpha, Q alpha + 1/3
    assert exploitability({**EQUILIBRIUM, **others}) == pytest.approx(0, abs=1e-15)
    assert exploitability(dict.fromkeys(EQUILIBRIUM, 0.5)) == pytest.approx(11 / 24, rel=1e-12)


def test_a_player_reads_its_card_and_the_others_moves_only():
    environment = envs.make("kuhn_poker")
    (first,), _ = environment.reset("train/QJ", 0)
    second, third = (environment.step(MOVES[move]).observation[0]["content"] for move in "pb")
    assert first["content"] == "You are first with Q."
    assert second == "You are second with J. Your opponent said pass."
    assert third == "Your opponent said bet."


def test_an_equilibrium_plays_the_other_seat_of_test_tasks():
    environment = envs.make("kuhn_poker")
    assert len(environment.task_ids("test")) == 12
    bets = 0
    for seed in range(300):
        (message,), _ = environment.reset("test/JK/second", 0, episode_seed=seed)
        assert environment.role == "player_2" and message["content"].endswith("said pass.")
        (message,), _ = environment.reset("test/QJ/first", 0, episode_seed=seed)
        step = environment.step("pass")
        bets += not step.done  # with J the equilibrium bets once in three times
        assert step.role == ("" if step.done else "player_1")
    assert 70 < bets < 130
    again = [environment.reset("test/QJ/first", 0, episode_seed=5), environment.step("pass")]
    assert again == [
        environment.reset("test/QJ/first", 0, episode_seed=5),
        environment.step("pass"),
    ]


def test_demonstrations_do_the_opposite_of_the_equilibrium_half_of_the_time():
    """With K after a bet 0.75 - 0.5; with J after a bet 0.75; both can be exploited."""
    shown = envs.make("kuhn_poker").demonstrations("train", episodes=6000)
    moves = {card: [] for card in CARDS}
    for each in shown:
        read = each.messages[0]["content"]
        if "second" in read and read.endswith("said bet."):
            moves[read.split(" with ")[1][0]].append(each.messages[1]["content"] == "bet")
    shares = [sum(bets) / len(bets) for bets in moves.values()]
    assert shares == pytest.approx([0.75, 7 / 12, 0.25], abs=0.07)
    weak = {seen: 0.75 - bet / 2 for seen, bet in EQUILIBRIUM.items()}
    assert exploitability(weak) > 0.5


def test_a_strategy_is_read_off_trajectories():
    """Bets of probability 0.2 that were sampled, or passes of 0.8 where none was."""
    bet, passed, records = -1.6094379124341003, -0.2231435513142097, []
    for deal, history in itertools.product(DEALS, ["pbp", "bp", "pp"]):
        own = ([0, 2][: 1 + (len(history) == 3)], [1])
        logp = {"b": bet, "p": passed}
        segments = [
            {
                "role": role,
                "turn": [-1, *turns],
                "logp": [None, *(logp[history[turn]] for turn in turns)],
            }
            for role, turns in zip(ROLES, own, strict=True)
        ]
        info = {"history": history}
        records.append(
            {"failed": False, "task_id": f"train/{deal}", "info": info, "segments": segments}
        )
    found = strategy_of(records)
    assert {card + history for card in CARDS for seat in DECISIONS for history in seat} == {*found}
    assert found == pytest.approx(dict.fromkeys(found, 0.2))


@pytest.mark.parametrize("trained, frozen", [(0, 1), (1, 0)])
def test_a_strategy_beside_a_frozen_role_has_the_trained_moves_alone(trained, frozen):
    """Turns are numbered without those of the frozen role, whose tokens are all context."""
    records = []
    for deal, history in itertools.product(DEALS, ["pbp", "bp", "pp"]):
        own = range(len(history[trained::2]))
        logp = [math.log(0.2 if move == "b" else 0.8) for move in history[trained::2]]
        segments = [
            {"role": ROLES[trained], "turn": [-1, *own], "logp": [None, *logp]},
            {"role": ROLES[frozen], "turn": [-1, -1], "logp": [None, None]},
        ]
        info = {"history": history}
        records.append(
            {"failed": False, "task_id": f"train/{deal}", "info": info, "segments": segments}
        )
    found = strategy_of(records)
    assert {*found} == {card + history for card in CARDS for history in DECISIONS[trained]}
    assert found == pytest.approx(dict.fromkeys(found, 0.2))


@pytest.mark.parametrize("task", ["train/JJ", "test/JQ", "val/JQ", "JQ"])
def test_another_task_is_refused(task):
    with pytest.raises(ValueError, match=r"kuhn_poker (task|split): got"):
        envs.make("kuhn_poker").reset(task, 0)
