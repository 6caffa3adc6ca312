"""What an evaluation's episodes are played with, so that those of another are not taken for its."""

import json

import pytest

from seeupo_jax.configuration.loading import from_dict, load_config
from seeupo_jax.evaluation.evaluation_run import episodes_name, evaluation_settings
from seeupo_jax.policy_io.resuming import chat_note
from seeupo_jax.trajectories.episodes import EpisodeFile, read_played


def settings(*overrides, **same):
    return evaluation_settings(load_config({}, overrides), "test", 4, same)


def differing(one, other):
    return {name for name in one | other if one.get(name) != other.get(name)}


@pytest.mark.parametrize(
    "override, name, value",
    [
        ("seed=7", "config.seed", 7),
        ("env.name=bfcl", "config.env.name", "bfcl"),
        ('env.options={"x": 1}', "config.env.options", {"x": 1}),
        ("env.timeout_as=zero_reward", "config.env.timeout_as", "zero_reward"),
        ("env.max_reward=2", "config.env.max_reward", 2.0),
        ("chat.system=False", "config.chat.system", False),
        ("chat.tools=none", "config.chat.tools", "none"),
        ("chat.template=a.jinja", "config.chat.template", "a.jinja"),
        ("chat.template_kwargs.x=1", "config.chat.template_kwargs", {"x": 1}),
        ("chat.roles.tool=user", "config.chat.roles", {"tool": "user"}),
        ("rollout.max_turns=2", "config.rollout.max_turns", 2),
        ("rollout.max_action_tokens=5", "config.rollout.max_action_tokens", 5),
        ("rollout.max_context=512", "config.rollout.max_context", 512),
        ("rollout.top_k=3", "config.rollout.top_k", 3),
        ("rollout.top_p=0.5", "config.rollout.top_p", 0.5),
        ("rollout.grammar=a.lark", "config.rollout.grammar", "a.lark"),
        (
            "rollout.temperature=0.5",
            "config.evaluation.temperature",
            0.5,
        ),  # training's, if no other
        ("evaluation.temperature=0.5", "config.evaluation.temperature", 0.5),
    ],
)
def test_a_field_that_decides_how_an_episode_goes_is_among_its_settings(override, name, value):
    assert differing(settings(), settings(override)) == {name}
    assert settings(override)[name] == value


def test_rewards_and_agents_are_among_the_settings_but_not_how_they_are_called():
    reward, agent = 'rewards=[{{"function": "a:b", "weight": {}, "timeout_s": {}}}]', "agent.name="
    assert differing(settings(), settings(reward.format(2, 9))) == {"config.rewards"}
    assert differing(*(settings(reward.format(w, 9)) for w in (2, 3))) == {"config.rewards"}
    assert not differing(*(settings(reward.format(2, s)) for s in (9, 8)))
    assert differing(settings(), settings(f"{agent}a:b")) == {"config.agent"}
    assert differing(*(settings(f"{agent}a:{x}") for x in "bc")) == {"config.agent"}
    for free in ("env.workers=3", "env.timeout_s=9", "rollout.concurrency=2", "evaluation.tasks=9"):
        assert not differing(settings(), settings(free))


def test_the_folder_of_tasks_and_what_limits_them_are_among_the_settings(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "task.toml").touch()

    def played(*more):
        return settings("agent.harness=codex", f"tasks=harbor:{tmp_path}/a", *more)

    plain, agent = settings("agent.command=codex"), {"config.agent"}
    assert "harness" not in plain["config.agent"]  # as in files of versions that had none
    tasks, digest = {"config.tasks", "config.sandbox"}, {"digest of config.tasks"}
    assert differing(plain, before := played()) == agent | tasks | digest
    assert differing(before, played(f"tasks=harbor:{tmp_path}/b")) == {"config.tasks"}
    assert differing(played(), played("agent.harness=opencode")) == agent
    assert differing(played(), played("sandbox.memory_mib=9")) == {"config.sandbox"}
    assert not differing(played(), played("sandbox.runtime=podman", "sandbox.processes=9"))
    (tmp_path / "a" / "task.toml").write_text("a change of a task")
    assert differing(before, played()) == digest


def test_the_split_k_and_the_policy_are_among_the_settings():
    given = evaluation_settings(from_dict({}), "dev", 2, {"iteration": 5, "policy": "abc"})
    wanted = {"split": "dev", "k": 2, "iteration": 5, "policy": "abc"}
    assert differing(settings(), given) == {*wanted} and given.items() >= wanted.items()


def test_episodes_that_were_sampled_in_int8_are_of_another_evaluation():
    plain, coarse = settings(), settings("rollout.quantize=int8")
    assert coarse == plain | {"config.rollout.quantize": "int8"}
    name = episodes_name(coarse | {"iteration": 30})
    assert name == "test-k4-temperature1.0-iteration30-int8.jsonl"
    server = {"server": "http://localhost:1", "model": "x"}
    assert settings("rollout.quantize=int8", **server) == plain | server


def test_episodes_that_another_chat_of_the_model_folder_played_are_not_taken(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = from_dict({"model": {"path": str(tmp_path)}})
    path = tmp_path / "one.jsonl"

    def now(**chat):
        (tmp_path / "chat.json").write_text(json.dumps({"system": False, "tools": "json"} | chat))
        return evaluation_settings(config, "test", 4, {}, chat_note(config, tmp_path))

    EpisodeFile(path, evaluation_settings(config, "test", 4, {})).close()
    EpisodeFile(path, now()).close()  # of a version that noted none
    path.unlink()
    for _ in range(2):
        EpisodeFile(path, now()).close()
    for read in (EpisodeFile, read_played):
        with pytest.raises(ValueError, match="^chat.system: got True; allowed: False, with which"):
            read(path, now(system=True))
