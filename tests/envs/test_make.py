"""Environments by name, and by where their code lies."""

import sys

import pytest

from seeupo_jax import envs

CODE = """
class Dumb(Exception):
    def __str__(self): raise RuntimeError

MISTAKES = {13: TypeError("an own mistake"), 14: SystemExit(2), 15: Dumb()}

class Whole:
    def __init__(self, level=1):
        if level in MISTAKES:
            raise MISTAKES[level]
        self.level = level
    def task_ids(self, split): return ["a"]
    def reset(self, task_id, seed): return (), ()
    def step(self, text): return None
    def score(self): return 0.0
    def close(self): pass

class Half:
    def task_ids(self, split): return ["a"]
    def reset(self, task_id, seed): return (), ()
    step = 5

def factory(): return Whole(level=7)
number = 5
"""


MISTAKES = {
    13: "TypeError: an own mistake",
    14: "SystemExit: 2",
    15: "Dumb: a Dumb whose text cannot be read",
}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    (tmp_path / "own_world.py").write_text(CODE)
    (tmp_path / "broken_world.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_world", None)


def test_a_class_is_found_in_its_module_and_gets_the_options():
    assert envs.make("own_world:Whole", level=3).level == 3
    assert envs.make("own_world:factory").level == 7


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("no_such_world:Whole", "got 'no_such_world:Whole', but there is no module 'no_such_w"),
        ("own_world:Nothing", "own_world has no class 'Nothing'; it has Dumb, Whole, Half, fac"),
        ("broken_world:Whole", "cannot be imported: ZeroDivisionError"),
        ("own_world:", "own_world has no class ''"),
        (":Whole", "cannot be imported"),
        ("own_world:number", "own_world has no class 'number'; it has Dumb, Whole"),
        ("own_world:Half", "'own_world:Half' has no step, no score, no close"),
        ("nothing", "got 'nothing'; allowed: order_desk, .*, or module:Class"),
    ],
)
def test_what_is_no_environment_is_refused_in_a_sentence(name, wanted):
    with pytest.raises(ValueError, match=f"env.name: .*{wanted}"):
        envs.make(name)


def test_unknown_options_are_refused_and_a_constructor_that_fails_is_a_sentence():
    with pytest.raises(ValueError, match="env.options: own_world:Whole refused {'size': 1}"):
        envs.make("own_world:Whole", size=1)
    for level, said in MISTAKES.items():
        with pytest.raises(ValueError) as error:
            envs.make("own_world:Whole", level=level)
        line = CODE.splitlines().index("            raise MISTAKES[level]") + 1
        where = f"(__init__, own_world.py:{line})"
        assert str(error.value) == f"env.name: 'own_world:Whole' cannot be made: {said} {where}."


def test_every_name_of_the_table_leads_to_a_class():
    for name in envs.ENVIRONMENTS:
        with pytest.raises(ValueError, match=f"env.options: {name} refused"):
            envs.make(name, no_such_option=1)
