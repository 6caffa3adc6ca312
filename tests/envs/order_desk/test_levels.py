"""Each level has tasks, tools and labels of its own, and its ids are refused by the other."""

import pytest
from places import ROOT

from seeupo_jax import envs
from seeupo_jax.envs.order_desk import dataset, errands
from seeupo_jax.envs.order_desk.account_desk import ERRAND_TOOLS
from seeupo_jax.envs.order_desk.demonstrator import demonstrate
from seeupo_jax.envs.order_desk.environment import OrderDesk
from seeupo_jax.envs.order_desk.levels import LEVELS, level_of

ID = "level2/test/3"


def test_an_id_names_its_level():
    desk = envs.make("order_desk", level=2)
    ids = desk.task_ids("test")
    assert ids[3] == ID and len(ids) == 2000 and len(desk.task_ids("train")) == 50_000
    assert [level_of(each) for each in (ID, "test/3")] == [2, 1]


def test_a_case_opens_with_its_levels_policy_message_and_tools():
    messages, tools = OrderDesk(level=2).reset(ID, seed=0)
    errand = errands.make_errand("test", 3)
    assert [m["content"] for m in messages] == [errands.POLICY, errand.message]
    assert tools is ERRAND_TOOLS and len(tools) == 9


def test_labels_say_how_many_requests_whether_their_order_matters_and_what_is_looked_up():
    desk, met = OrderDesk(level=2), {}
    assert isinstance(desk, envs.Labelled)
    for index in range(150):
        errand = errands.make_errand("test", index)
        labels = desk.labels(f"level2/test/{index}")
        assert labels["requests"] == str(len(errand.requests))
        assert labels["look_ups"] == str(len(errands.plan(errand)[0]))
        for name, value in labels.items():
            met.setdefault(name, set()).add(value)
    wanted = {"requests": {"2", "3"}, "order": {"matters", "free"}, "look_ups": {"0", "1", "2"}}
    assert met == wanted


@pytest.mark.parametrize("index", range(5))
def test_the_reference_is_the_oracles_last_reply(index):
    conversation, _ = demonstrate(f"level2/test/{index}")
    desk = OrderDesk(level=2)
    assert desk.reference(f"level2/test/{index}") == conversation.messages[-1]["content"]


def test_words_of_level_2_are_those_of_level_1():
    assert OrderDesk(level=2).vocabulary() == OrderDesk().vocabulary()


@pytest.mark.parametrize("task_id", ["test/3", "level2/test", "level2/test/x", "level2/", ""])
def test_an_id_of_another_level_is_refused(task_id):
    allowed = "allowed: level2/SPLIT/NUMBER"
    with pytest.raises(ValueError, match=f"order_desk task: got '{task_id}'; {allowed}"):
        OrderDesk(level=2).reset(task_id, seed=0)
    with pytest.raises(ValueError, match=f"order_desk task: got '{ID}'; allowed: SPLIT/NUMBER"):
        OrderDesk().reset(ID, seed=0)


@pytest.mark.parametrize("level", [0, 3, "2", None, True, 2.0])
def test_a_level_that_does_not_exist_is_named(level):
    for use in (OrderDesk, lambda level: envs.make("order_desk", level=level)):
        with pytest.raises(ValueError, match=f"order_desk level: got {level!r}; allowed: 1, 2"):
            use(level=level)
    with pytest.raises(ValueError, match="order_desk level"):
        dataset.builder(level=level)


def test_demonstrations_of_level_2_lie_in_a_folder_of_their_own(tmp_path):
    desk = OrderDesk(level=2, data_dir=str(tmp_path))
    shown = desk.demonstrations("test", skill=0.4, episodes=5, seed=2)
    assert len(shown) == 5 and shown[3] == demonstrate(ID, skill=0.4, seed=2)[0]
    assert shown[3].tools == LEVELS[2].tools
    folders = {str(dataset.builder(level=n, data_dir=str(tmp_path)).data_dir) for n in LEVELS}
    assert len(folders) == 2


def test_the_page_shows_a_case_as_the_oracle_plays_it():
    page = (ROOT / "docs" / "order_desk.md").read_text()
    conversation, _ = demonstrate("level2/train/194")
    _, first, *rest = conversation.messages
    assert f"user       {first['content']}\n" in page
    shown = "".join(f"{m['role']:10s} {m['content']}\n" for m in rest[14:])
    assert shown.startswith("assistant") and shown in page
