"""What a user's `module:attribute` stands for, and one sentence for what does not stand for any."""

import importlib
import sys
from pathlib import Path

import pytest

from seeupo_jax.configuration.entry_points import entry_names, find_entry
from seeupo_jax.configuration.loading import from_dict, load_config, to_dict

ESTIMATORS = entry_names("advantage")
OBJECTIVES = entry_names("objective")
OWN = """
from dataclasses import dataclass
from seeupo_jax.algorithms.estimator_options import Options
from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.algorithms.objectives import Objective
from seeupo_jax.options import choice, within

def rewards(reward_N):
    return reward_N

def scored(reward_NL, value_NL):
    return reward_NL - value_NL, reward_NL

def plain(ratio, weight):
    return ratio * weight, 0 * weight

def bare(logp, weight):
    return logp * weight, 0 * weight

ALONE = Estimator(rewards, "trajectory", ("reward_N",))
VALUED = Estimator(scored, "token", ("reward_NL", "value_NL"))
PER_TURN = Estimator(rewards, "turn", ("reward_NK",))
@dataclass(frozen=True)
class Power(Options):
    power: float = within(0, 4, 2.0)
    kind: str = choice("root", "square")

def powers(reward_N, power, kind):
    return reward_N**power

POWERS = Estimator(powers, "trajectory", ("reward_N",), Power)
PLAIN, BARE = Objective(plain, ("ratio", "weight")), Objective(bare, ("logp", "weight"))

FIELDS = {"ratio": "token", "custom_order": [], "advantage": "own_parts:ALONE"}

def recipe():
    return FIELDS

def misspelt():
    return {"ratoi": "token"}

def wrong():
    return {"ratio": "tokens"}

def raises():
    raise LookupError("no fields\\nhere")

def nothing():
    return None
"""


@pytest.fixture(autouse=True)
def own_parts(tmp_path, monkeypatch):
    """Modules in the working directory, which an installed command does not have on its path."""
    (tmp_path / "own_parts.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import no_such_dependency\n")
    (tmp_path / "own_failing.py").write_text("raise SystemExit(3)\n")
    source = "from seeupo_jax.algorithms.estimators import Estimator\n"
    source += "X = Estimator(print, 'trajectory', needs=('reward',))\n"
    (tmp_path / "own_needy.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_parts", None)


def test_a_name_is_what_its_module_has_now_as_after_a_reload():
    with_choices(advantage="own_parts:ALONE")
    assert from_dict({"recipe": "own_parts:recipe"}).algorithm.ratio == "token"
    Path("own_parts.py").write_text(OWN.replace('"ratio": "token"', '"ratio": "product"'))
    module = importlib.reload(sys.modules["own_parts"])
    assert find_entry("advantage", "own_parts:ALONE") is module.ALONE
    assert from_dict({"recipe": "own_parts:recipe"}).algorithm.ratio == "product"


def with_choices(**choices):
    return from_dict({"algorithm": choices})


def test_names_of_ones_own_stay_texts_and_are_what_they_declare():
    config = with_choices(advantage="own_parts:ALONE", objective="own_parts:PLAIN", inner_epochs=3)
    assert to_dict(config)["algorithm"]["advantage"] == "own_parts:ALONE"
    assert from_dict(to_dict(config)) == config
    assert not config.algorithm.grouped
    with_choices(advantage="own_parts:VALUED", critic={"kind": "head"}, kl_in="reward")
    with_choices(advantage="own_parts:ALONE", kl_in="reward", scale="none")


def test_options_of_ones_own_are_set_as_the_packages():
    overrides = ["algorithm.advantage=own_parts:POWERS", "algorithm.estimator.power=3"]
    config = load_config({}, [*overrides, "algorithm.estimator.kind=square"])
    assert vars(config.algorithm.estimator) == {"power": 3.0, "kind": "square"}
    assert from_dict(to_dict(config)) == config
    assert vars(with_choices(advantage="own_parts:POWERS").algorithm.estimator)["power"] == 2.0


@pytest.mark.parametrize(
    "choices, said",
    [
        (
            {"advantage": "own_parts:VALUED"},
            "critic.kind: got 'none' with advantage=own_parts:VALUED;",
        ),
        (
            {"advantage": "own_parts:VALUED"},
            "allowed: head or model with advantage=own_parts:VALUED.",
        ),
        (
            {"advantage": "own_parts:ALONE", "critic": {"kind": "head"}},
            "critic.kind: got 'head' with advantage=",
        ),
        (
            {"advantage": "own_parts:ALONE", "scale": "group"},
            "scale: got 'group' with advantage=own_parts:ALONE; allowed: batch or none with"
            " advantage=own_parts:ALONE, which has no scale of its own.",
        ),
        (
            {"advantage": "own_parts:ALONE", "estimator": {"baseline": "batch"}},
            "with advantage=own_parts:ALONE, which does not have it; allowed with advantage=grae or"
            " advantage=istar or advantage=tree.",
        ),
        (
            {"advantage": "own_parts:POWERS", "estimator": {"power": 5}},
            "estimator.power: got 5.0; allowed: a number from 0 to 4.",
        ),
        (
            {"advantage": "own_parts:POWERS", "estimator": {"kind": "cube"}},
            "estimator.kind: got 'cube'; allowed: one of root, square.",
        ),
        (
            {"advantage": "own_parts:POWERS", "estimator": {"pover": 3}},
            "estimator.pover: no such field; did you mean power? allowed: power, kind.",
        ),
        ({"advantage": "own_parts:PER_TURN", "kl_in": "reward"}, "kl_in: got 'reward' with adva"),
        ({"objective": "own_parts:BARE", "inner_epochs": 2}, "inner_epochs: got 2 with objective="),
        ({"objective": "own_parts:PLAIN", "clip_dual": 3.0}, "clip_dual: got 3.0 with objective="),
        ({"advantage": "own_parts:rewards"}, "has no Estimator 'rewards'; it has ALONE, VALUED,"),
        ({"advantage": "own_parts:PLAIN"}, "has no Estimator 'PLAIN'; it has ALONE, VALUED"),
        (
            {"objective": "own_parts:ALONE"},
            "own_parts has no Objective 'ALONE'; it has PLAIN, BARE",
        ),
        (
            {"objective": "own_ports:PLAIN"},
            "objective: got 'own_ports:PLAIN', but there is no modu",
        ),
        ({"advantage": "own_broken:X"}, "'own_broken:X' cannot be imported: ModuleNotFoundError"),
        ({"advantage": "own_failing:X"}, "'own_failing:X' cannot be imported: SystemExit: 3."),
        ({"advantage": "own_needy:X"}, "got ('reward',); allowed: a tuple of reward_N, group_N"),
        ({"advantage": "own_needy:X"}, " [...]."),
        (
            {"advantage": "grea"},
            f"advantage: got 'grea'; allowed: one of {', '.join(ESTIMATORS)}, or",
        ),
        (
            {"objective": "ppo"},
            f"got 'ppo'; allowed: one of {', '.join(OBJECTIVES)}, or module:attrib",
        ),
    ],
)
def test_what_does_not_go_together_or_is_not_there_is_one_sentence(choices, said):
    with pytest.raises(ValueError) as error:
        with_choices(**choices)
    text = str(error.value)
    assert text.startswith("config.algorithm.") and said in text and "\n" not in text


def test_what_has_no_ratio_may_not_be_sampled_ahead():
    with pytest.raises(
        ValueError, match="objective='own_parts:BARE'; allowed: .*cispo or clipped or dppo_kl"
    ):
        from_dict(
            {"rollout": {"max_lag": 1, "devices": 1}, "algorithm": {"objective": "own_parts:BARE"}}
        )
    from_dict(
        {"rollout": {"max_lag": 1, "devices": 1}, "algorithm": {"objective": "own_parts:PLAIN"}}
    )


@pytest.mark.parametrize("recipe", ["own_parts:recipe", "own_parts:FIELDS"])
def test_a_recipe_of_ones_own_is_a_function_or_a_dict(recipe, tmp_path):
    config = from_dict({"recipe": recipe, "algorithm": {"clip_high": 0.28}})
    assert (config.algorithm.ratio, config.algorithm.clip_high) == ("token", 0.28)
    assert config.algorithm.custom_order == () and not config.algorithm.grouped
    assert from_dict(to_dict(config)) == config and config.recipe == recipe
    file = Path(tmp_path / "config.py")
    file.write_text("def get_config():\n    return {'algorithm': {'scale': 'none', 'seed': 1}}\n")
    with pytest.raises(ValueError, match="config.algorithm.seed: no such field"):
        load_config(file, [f"recipe={recipe}"])
    file.write_text(
        "def get_config():\n    return {'algorithm': {'scale': 'none', 'ratio': 'x'}}\n"
    )
    algorithm = load_config(
        file, [f"recipe={recipe}", "algorithm.cumulative_ratio=False"]
    ).algorithm
    # What the recipe leaves out is SeeUPO's, whatever the file has.
    assert (algorithm.ratio, algorithm.scale, algorithm.cumulative_ratio) == (
        "token",
        "batch",
        False,
    )


@pytest.mark.parametrize(
    "recipe, said",
    [
        ("own_parts:misspelt", "own_parts:misspelt.ratoi: no such field; did you mean ratio?"),
        ("own_parts:wrong", "own_parts:wrong.ratio: got 'tokens'; allowed: one of geometric"),
        ("own_parts:raises", "own_parts:raises failed: LookupError: no fields here."),
        ("own_parts:nothing", "own_parts:nothing returned None (NoneType); allowed: a dict"),
        ("own_parts:nowhere", "own_parts has no recipe 'nowhere'; it has "),
        ("own_ports:recipe", "got 'own_ports:recipe', but there is no module 'own_ports'"),
    ],
)
def test_a_wrong_recipe_is_one_sentence(recipe, said):
    with pytest.raises(ValueError) as error:
        from_dict({"recipe": recipe})
    text = str(error.value)
    assert text.startswith("config.recipe: ") and said in text and "\n" not in text
