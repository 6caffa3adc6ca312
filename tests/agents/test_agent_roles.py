"""An agent's calls play the roles that they name as their model."""

import pytest
from rollout_cases import NumberTokenizer, Saying

from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.evaluation.episode_host import build_host
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.engine.protocol import Action
from seeupo_jax.rollout.engine.role_engine import FrozenPolicy, RoleEngine
from seeupo_jax.rollout.player import CollectionOptions, RolloutWorker
from seeupo_jax.trajectories.roles import rewards_by_role, turn_roles
from seeupo_jax.types import CONTEXT

AGENT = """
from seeupo_jax.agents.calls import AgentResult

def task_ids(split):
    return ["one"]

async def play(task, client):
    listed = [model.id async for model in client.models.list()]
    histories = {name: [{"role": "user", "content": "2"}] for name in ("a", "b", "policy")}
    names = []
    for turn in range(2):
        for name, messages in histories.items():
            answer = await client.chat.completions.create(model=name, messages=messages)
            names.append(answer.model)
            messages += [answer.choices[0].message, {"role": "user", "content": "1"}]
    info = {"listed": listed, "names": names}
    return AgentResult(0.5, role_rewards={"a": 1.0, "b": -1.0}, info=info)
"""


class Answering(Saying):
    """Says something else than the policy does."""

    def said(self, turn):
        return Action(turn.key, [6, 3], [-3.0, -4.0])

    def cancel(self, key):
        pass


@pytest.fixture
def played(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text(AGENT)

    def play(roles):
        rollout = {"max_turns": 6, "max_action_tokens": 4, "max_context": 40}
        config = from_dict({"agent": {"name": f"{file}:play"}, "rollout": rollout, "roles": roles})
        engine, tasks = Answering(), find_tasks(config)
        engine.said = lambda turn: Action(turn.key, [5, 3], [-1.0, -2.0])
        frozen = {role.name: FrozenPolicy(Answering()) for role in config.roles if role.frozen}
        engine = RoleEngine(engine, frozen)
        tokenizer = NumberTokenizer()
        host = build_host(config, engine, tasks, tokenizer, lambda line: None)
        worker = RolloutWorker(
            engine, host, tokenizer, config.env, config.rollout, roles=config.roles
        )
        try:
            return collect(worker, None, group_requests(["one"], 1, 1), CollectionOptions(3))
        finally:
            host.close()

    return play


def test_each_role_has_its_conversation(played):
    (trajectory,) = played([{"name": "a"}, {"name": "b"}]).trajectories
    assert trajectory.stop == "done", trajectory.info
    assert trajectory.info["names"] == ["a", "b", "policy"] * 2
    assert trajectory.info["listed"] == ["policy", "a", "b"]
    assert [segment.role for segment in trajectory.segments] == ["a", "b", ""]
    assert turn_roles(trajectory) == ["a", "b", ""] * 2
    assert rewards_by_role(trajectory) == {"a": 1.5, "b": -0.5, "": 0.5}
    names = [message.get("name", "") for message in trajectory.messages]
    assert names == ["a", "a", "b", "b", "", ""] * 2


def test_a_frozen_roles_turns_are_context(played):
    collected = played([{"name": "a"}, {"name": "b", "server": "http://localhost:1"}])
    (trajectory,) = collected.trajectories
    assert turn_roles(trajectory) == ["a", "", "a", ""]
    _, frozen, _ = trajectory.segments
    assert set(frozen.turn_L) == {CONTEXT} and frozen.tokens_L.tolist().count(6) == 2
    assert (collected.usage["frozen_turns"], collected.usage["frozen_tokens"]) == (2, 4)
    assert collected.sampled_tokens == 8


def test_without_roles_every_name_is_the_policys(played):
    (trajectory,) = played([]).trajectories
    assert trajectory.stop == "env_error"  # its rewards are of roles that there are not
    assert "role_rewards: got 'a'" in trajectory.info["failure"]
    assert {segment.role for segment in trajectory.segments} == {""}
