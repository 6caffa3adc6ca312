"""Containers of docker and podman: their command lines."""

from pathlib import Path

import pytest

from seeupo_jax.agents.calls import Access
from seeupo_jax.agents.sandboxes.container_sandbox import ContainerSandbox
from seeupo_jax.agents.sandboxes.sandboxes import Sandboxes
from seeupo_jax.configuration.agent_schema import Agent
from seeupo_jax.configuration.sandbox_schema import Sandbox
from seeupo_jax.configuration.schema import Rollout
from seeupo_jax.tasks.task_folders import TaskFolders, find_folder


@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_the_command_line_of_a_container(tmp_path, runtime):
    tasks = TaskFolders(find_folder("harbor:package:sandboxed_tasks"), local=False)
    sandbox = Sandbox(runtime=runtime, processes=64, visible=("/opt/agent",), solution=True)
    access = Access("http://127.0.0.1:4000/v1", "key")
    task = tasks.task("sum_prices", "train")
    plan = Sandboxes(sandbox, tasks, ["agent"], Agent(command="agent"), Rollout()).plan(
        task, access
    )
    container = ContainerSandbox(plan, tmp_path)
    words, name = container.run_words(), container.run_words()[5]
    assert name.startswith("seeupo-") and len(name) == 23
    tag = f"seeupo-sum-prices:{task.digest[:16]}"
    expected = f"""{runtime} run --rm --interactive --name {name} --network none --memory 512m
        --cpus 1 --pids-limit 64 --security-opt no-new-privileges --volume {tmp_path}/logs:/logs
        --volume {tmp_path}/private:/.seeupo:ro --volume {tmp_path}/work:{tmp_path}/work
        --volume /opt/agent:/opt/agent:ro --volume {task.folder}/solution:/solution:ro
        --entrypoint sh {tag} -c"""
    assert words == [*expected.split(), "echo; exec cat >/dev/null"]
    build = Path(plan.build)
    assert container.build_words() == (
        ["build", "--quiet", "--tag", tag, "--file", f"{build}/Dockerfile", f"{build}"]
    )
