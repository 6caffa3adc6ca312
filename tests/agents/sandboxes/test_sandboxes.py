"""Episodes in sandboxes of bubblewrap: what they see, their limits, their verifier, their end."""

import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agent_cases import make_endpoint, opened
from places import ROOT
from sandbox_cases import (
    ACCESS,
    needs_bubblewrap,
    outcomes,
    runner,
    sandboxes_of,
    start,
    start_trainer,
    wait_for,
    write_programs,
    write_task,
)

from seeupo_jax.agents.calls import AgentFailure, AgentResult
from seeupo_jax.agents.sandboxes.sandbox_checks import check_sandboxes
from seeupo_jax.configuration.sandbox_schema import Sandbox
from seeupo_jax.tasks.task_folders import TaskFolders, find_folder

pytestmark = needs_bubblewrap


def outcome(tmp_path, program, sandbox=None, access=ACCESS, output_kib=64, **task):
    """What an agent that is a program of the shell came to in one task."""
    write_task(tmp_path / "tasks" / "one", **task)
    (tmp_path / "agent.sh").write_text(program)
    tasks = TaskFolders(tmp_path / "tasks", local=True)
    found = outcomes(tasks, f"bash {tmp_path}/agent.sh", sandbox, access, output_kib)
    return found["one"]


def seen(tmp_path, program, **options):
    """What an agent printed."""
    result = outcome(tmp_path, program, **options)
    assert isinstance(result, AgentResult), result
    return result.info["output"]


def bundled():
    return TaskFolders(find_folder("harbor:package:sandboxed_tasks"), local=True)


def test_the_solution_of_each_bundled_task_solves_it_and_no_other_agent_does():
    tasks = bundled()
    assert sum(tasks.count.values()) == 10
    check_sandboxes(sandboxes_of(tasks, "bash", Sandbox(solution=True)))
    solved = outcomes(tasks, "bash /solution/solve.sh", Sandbox(solution=True))
    assert {name: result.reward for name, result in solved.items()} == dict.fromkeys(solved, 1.0)
    assert solved["find_addresses"].rewards == {"exact": 1.0}
    damage = "bash -c 'for f in *; do echo damaged > $f; done; echo damaged > greeting.txt'"
    damaged = outcomes(tasks, damage)
    assert {name: result.reward for name, result in damaged.items()} == dict.fromkeys(solved, 0.0)


def test_the_solution_is_seen_only_where_it_is_asked_for(tmp_path):
    failed = outcomes(bundled(), "bash /solution/solve.sh")
    assert {type(result) for result in failed.values()} == {AgentFailure}
    assert all(result.answered.reward == 0.0 for result in failed.values())


def test_it_sees_only_its_own_files_processes_variables_and_loopback(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "the-users.own")
    program = f"""
        echo "[$(pwd)] $HOME $OPENAI_API_KEY $SEEUPO_TASK ${{WANDB_API_KEY-unset}}"
        ls -d {Path(__file__).parent} {Path.home()}/.ssh /tests /solution 2>/dev/null
        ls /proc | grep -cE '^[0-9]+$'
        tail -n +3 /proc/net/dev | cut -d: -f1
        touch /usr/planted /etc/ssl/planted 2>/dev/null || echo read-only
        (exec 3<>/dev/tcp/1.1.1.1/80) 2>/dev/null || echo offline
        touch /anywhere /etc/own /root/own /tmp/own && echo writable
        cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep -c the-users.own || true
    """
    lines = seen(tmp_path, program).split("\n")
    assert lines[0] == "[/app] /root key-of-the-episode /.seeupo/task.json unset"
    assert int(lines[1]) <= 6  # bubblewrap, this shell, ls and grep
    expected = ["lo", "read-only", "offline", "writable", "0"]
    assert [line.strip() for line in lines[2:7]] == expected


def test_what_the_dockerfile_states_is_there(tmp_path):
    docker = "COPY notes /srv/notes/\nCOPY a.txt b.txt ./\nENV COLOUR=red SIZE='very large'\n"
    for name in ("notes/x", "a.txt", "b.txt"):
        place = tmp_path / "tasks/one/environment" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(name)
    program = "echo $(cat /srv/notes/x a.txt /app/b.txt) $COLOUR $SIZE $TASKS"
    settings = '[environment.env]\nTASKS = "${NOT_SET_ANYWHERE:-own}"\n'
    said = seen(tmp_path, program, docker=docker, settings=settings)
    assert said == "notes/xa.txtb.txt red very large own\n"


@pytest.mark.parametrize("docker", ["COPY a.txt app/inside/\n", "WORKDIR inside\n"])
def test_a_link_of_a_tasks_files_does_not_lead_out_of_the_sandbox(tmp_path, docker):
    """A task that others wrote does not write to this machine."""
    outside, environment = tmp_path / "outside", tmp_path / "tasks/one/environment"
    outside.mkdir()
    (environment / "tree").mkdir(parents=True)
    (environment / "tree" / "app").symlink_to(outside)
    (environment / "a.txt").write_text("a")
    docker = f"WORKDIR /\nCOPY tree/ /\n{docker.replace('WORKDIR ', 'WORKDIR /app/')}"
    failure = outcome(tmp_path, "true", docker=docker)
    assert isinstance(failure, AgentFailure) and failure.cause == "sandbox"
    assert "/app" in failure.reason and "a link that leads out" in failure.reason
    assert not list(outside.iterdir())


CLIENT = """
import json, os, urllib.request
task = json.load(open(os.environ["SEEUPO_TASK"]))
body = {"model": "policy", "messages": [{"role": "user", "content": task["data"]["instruction"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def test_the_endpoint_is_reached_from_a_sandbox_with_the_machines_interpreter(
    tmp_path, monkeypatch
):
    (tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setenv("TMPDIR", f"{tmp_path}/{'long' * 30}")  # longer than a socket's address
    write_task(tmp_path / "tasks" / "one")
    (tmp_path / "client.py").write_text(CLIENT)
    tasks, endpoint = TaskFolders(tmp_path / "tasks", local=True), make_endpoint()
    with opened(endpoint) as (session, access):
        found = outcomes(tasks, f"{sys.executable} {tmp_path}/client.py", access=access)
        assert found["one"].info["output"] == "Do it.\n\n" and len(session.calls) == 1
    endpoint.close()


def test_the_example_runs_the_commands_of_the_policy(tmp_path):
    """A policy that says what the last message says: the instruction, then its output."""
    instruction = "```bash\ntouch kept; echo done\n```"
    write_task(tmp_path / "tasks" / "one", tests=_IF_KEPT, instruction=instruction)
    tasks, endpoint = TaskFolders(tmp_path / "tasks", local=True), make_endpoint()
    agent = ROOT / "docs" / "examples" / "agents" / "shell_agent.py"
    with opened(endpoint) as (session, access):
        found = outcomes(tasks, f"{sys.executable} {agent}", access=access)
        assert found["one"].reward == 0.5, found
        assert [call.messages[-1].content for call in session.calls] == [instruction, "done\n"]
    endpoint.close()


LIMITS = {
    "time": ("sleep 9999", {"settings": "[agent]\ntimeout_sec = 5\n"}),
    "processes": (
        "for i in $(seq 60); do sleep 9999 & done; wait",
        {"sandbox": Sandbox(processes=20)},
    ),
    "memory": (
        "x=$(head -c 200000000 /dev/zero | tr '\\0' x); sleep 9999",
        {"sandbox": Sandbox(memory_mib=100)},
    ),
}

SHARE = "import mmap, time; m = mmap.mmap(-1, 2 * 10**8)"
SHARE += "; [m.write(bytes(10**6)) for _ in range(200)]; time.sleep(9999)"


def test_shared_memory_counts(tmp_path):
    program = f'exec {sys.executable} -c "{SHARE}"'
    sandbox = Sandbox(memory_mib=100, visible=(sys.prefix, sys.base_prefix))
    found = outcome(tmp_path, program, sandbox=sandbox)
    assert isinstance(found, AgentFailure) and "its limit of memory" in found.reason, found


@pytest.mark.parametrize("limit", LIMITS)
def test_an_agent_beyond_a_limit_is_ended_and_what_it_left_is_verified(tmp_path, limit):
    program, options = LIMITS[limit]
    found = outcome(tmp_path, f"touch kept; {program}", tests=_IF_KEPT, **options)
    # It counts if the policy has answered a call.
    assert isinstance(found, AgentFailure) and found.answered.reward == 0.5, found
    if limit == "processes" and os.getuid():  # an ordinary user cannot start more
        assert found.cause == "exit" and "fork" in found.reason
    else:
        assert f"it was ended by its limit of {limit}" in found.reason and found.cause == "limit"
        assert found.answered.info["agent_limit"] == limit


_IF_KEPT = "[ -e kept ] && echo 0.5 > /logs/verifier/reward.txt"


def test_a_file_larger_than_the_storage_is_cut(tmp_path):
    program = "head -c 3000000 /dev/zero > large; stat -c %s large"
    settings = "[environment]\nstorage_mb = 1\n"
    assert seen(tmp_path, program, settings=settings).endswith(f"{2**20}\n")


def test_more_output_than_allowed_is_a_failure(tmp_path):
    failure = outcome(tmp_path, "exec cat /dev/zero", output_kib=8)
    assert isinstance(failure, AgentFailure) and failure.cause == "output"


REWARDS = {
    "nothing": (":", "it wrote no reward; allowed: /logs/verifier/reward.txt or reward.json"),
    "crash": ("echo broken; exit 7", "exit code 7; it printed: broken"),
    "garbage": ("echo x > /logs/verifier/reward.txt", "reward.txt: got 'x'; allowed: a number"),
    "nan": ("echo nan > /logs/verifier/reward.txt", "got 'nan'; allowed: finite numbers"),
    "json": ("echo [1] > /logs/verifier/reward.json", "reward.json: got '[1]'; allowed: an object"),
    "text": ("""echo '{"reward": "1"}' > /logs/verifier/reward.json""", "allowed: finite numbers"),
    "large": ("echo 1e9 > /logs/verifier/reward.txt", "of magnitude at most 10"),
    "late": ("echo so far; sleep 9999", "it was ended by its limit of time; it printed: so far"),
    "pipe": ("mkfifo /logs/verifier/reward.txt", "it wrote no reward"),
    "link": ("ln -s /etc/hostname /logs/verifier/reward.txt", "it wrote no reward"),
    "folder": ("mkdir /logs/verifier/reward.txt; echo oh", "code 0; it printed: oh"),
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_verifier_without_a_reward_is_the_episodes_error(tmp_path, name):
    tests, says = REWARDS[name]
    settings = "[verifier]\ntimeout_sec = 5\n" if name == "late" else ""
    failure = outcome(tmp_path, "true", tests=tests, settings=settings)
    assert isinstance(failure, AgentFailure), failure
    assert (failure.stop, failure.cause) == ("env_error", "verifier") and says in failure.reason


def test_reward_txt_precedes_reward_json_and_other_numbers_are_rewards_by_name(tmp_path):
    both = "cd /logs/verifier; echo 0.25 > reward.txt; echo '{\"reward\": 1}' > reward.json"
    assert outcome(tmp_path, "true", tests=both).reward == 0.25
    named = """echo '{"reward": 2, "style": 0.5}' > /logs/verifier/reward.json; exit 1"""
    found = outcome(tmp_path, "true", tests=named)
    assert (found.reward, found.score, found.rewards) == (2.0, 1.0, {"style": 0.5})


def test_what_an_agent_plants_does_not_reach_the_verifier(tmp_path):
    """Neither a reward, tests of its own, another shell, nor a process that goes on."""
    program = """
        echo 1 > /logs/verifier/reward.txt
        ln -s /app /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /app/test.sh
        rm /bin && mkdir /bin && printf '#!/usr/bin/true' > /bin/sh; chmod +x /bin/sh
        (setsid bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done' &)
        sleep 0.1
    """
    tests = "sleep 0.5; ls /logs/verifier; [ -L /bin ] || ls / ; exit 4"
    failure = outcome(tmp_path, program, tests=tests)
    assert isinstance(failure, AgentFailure), failure
    assert failure.reason.endswith("it ended with exit code 4")


@pytest.mark.parametrize(
    "damage", ["rm -rf /app", "rm -rf /app; ln -s /nowhere /app", "chmod 0 /app"]
)
def test_an_agent_that_removes_its_folder_is_verified(tmp_path, damage):
    """Else a policy could take itself out of the statistics."""
    tests = "ls app/kept || echo 0 > /logs/verifier/reward.txt"
    result = outcome(tmp_path, f"touch kept; cd /; {damage}", tests=tests)
    assert isinstance(result, AgentResult) and result.reward == 0.0, result


def test_a_deep_folder_in_the_place_of_the_tests_hinders_neither_the_verifier_nor_the_end(
    tmp_path, monkeypatch
):
    (tmp_path / "episodes").mkdir()
    monkeypatch.setenv("TMPDIR", f"{tmp_path}/episodes")
    deep = "p=$(printf 'a/%.0s' $(seq 400)); for _ in 1 2 3; do mkdir -p $p; cd $p; done"
    result = outcome(tmp_path, f"mkdir /tests; cd /tests; {deep}", tests=_IF_NOTHING_BESIDE)
    assert isinstance(result, AgentResult) and result.reward == 1.0, result
    assert not os.listdir(tmp_path / "episodes")


_IF_NOTHING_BESIDE = "[ $(ls /tests) = test.sh ] && echo 1 > /logs/verifier/reward.txt"


_REMOVE = """
import sys
sys.path[:] = {path!r}
from pathlib import Path
from seeupo_jax.agents.sandboxes.local_sandbox import remove
remove([Path({place!r})])
"""


def test_folders_without_permissions_are_removed_and_what_links_lead_to_stays(tmp_path):
    """As by an ordinary user: root needs no permissions."""
    kept, place = tmp_path / "kept", tmp_path / "place"
    kept.mkdir(mode=0o755)
    (place / "a" / "b").mkdir(parents=True)
    (place / "link").symlink_to(kept)
    (place / "a" / "b").chmod(0)
    (place / "a").chmod(0)
    program = _REMOVE.format(path=sys.path, place=str(place))
    words = ["bwrap", "--unshare-user", "--cap-drop", "ALL", "--dev-bind", "/", "/"]
    subprocess.run([*words, sys.executable, "-c", program], check=True)
    assert not place.exists() and kept.stat().st_mode & 0o777 == 0o755


def test_an_exit_code_counts_as_a_failure_until_the_policy_has_answered(tmp_path):
    failure = outcome(tmp_path, "echo oh; exit 9", tests=_IF_KEPT.replace("kept", "/app"))
    assert isinstance(failure, AgentFailure) and failure.cause == "exit"
    assert "exit code 9; it printed: oh" in failure.reason and failure.answered.reward == 0.5


def sleepers(seconds):
    """Processes of this machine that sleep for so long."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("ends", ["stopped", "killed"])
def test_everything_in_a_sandbox_ends_with_the_episode_and_with_a_killed_trainer(tmp_path, ends):
    seconds = 100_000 + os.getpid() + 7 * (ends == "killed")  # by which its processes are found
    begin = f"(setsid sleep {seconds} &); sh -c 'sleep {seconds} & wait' & wait"
    (tmp_path / "agent.sh").write_text(begin)
    write_task(tmp_path / "tasks" / "one")
    command = f"bash {tmp_path}/agent.sh"
    if ends == "stopped":
        tasks = TaskFolders(tmp_path / "tasks", local=True)
        agents = runner(tasks, command)
        stop = start(agents, tasks, "one", "train", lambda outcome: None)
        wait_for(lambda: len(sleepers(seconds)) == 2)
        stop()
        wait_for(lambda: not sleepers(seconds))
        agents.close()
        return
    trainer = start_trainer(tmp_path / "tasks", "one", command, Sandbox())
    wait_for(lambda: len(sleepers(seconds)) == 2)
    trainer.kill()
    trainer.wait()
    wait_for(lambda: not sleepers(seconds))


def driver_of(pid):
    """The driver of the episode that a process belongs to."""
    while b"sandboxed_episode" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def test_a_program_beside_the_tasks_does_not_make_them_seen(tmp_path, monkeypatch):
    """They have the verifiers and the solutions."""
    look = f"#!/bin/sh\nls {tmp_path} {tmp_path}/tasks; touch {tmp_path}/tasks/own || true\n"
    write_programs(tmp_path, **{"bin/tool": look})
    write_task(tmp_path / "tasks" / "one")
    found = outcomes(TaskFolders(tmp_path / "tasks", local=True), f"{tmp_path}/bin/tool")["one"]
    printed = found.info["output"].split("\n")
    assert printed[:4] == [f"{tmp_path}:", "bin", "tasks", ""]
    assert printed[4] == f"{tmp_path}/tasks:" and "Read-only" in printed[5]


def test_an_episode_whose_driver_is_killed_has_failed_and_nothing_of_it_is_left(tmp_path):
    seconds, ended = 200_000 + os.getpid(), queue.SimpleQueue()
    write_task(tmp_path / "tasks" / "one")
    tasks = TaskFolders(tmp_path / "tasks", local=True)
    agents = runner(tasks, f"sleep {seconds}")
    start(agents, tasks, "one", "train", ended.put)
    wait_for(lambda: sleepers(seconds))
    os.kill(driver_of(sleepers(seconds)[0]), signal.SIGKILL)
    failure = ended.get(timeout=120)
    assert failure.cause == "sandbox" and "ended with signal 9 (SIGKILL)" in failure.reason
    wait_for(lambda: not sleepers(seconds))
    agents.close()


def test_episodes_run_at_once(tmp_path):
    seconds = 300_000 + os.getpid()
    write_task(tmp_path / "tasks" / "one")
    tasks = TaskFolders(tmp_path / "tasks", local=True)
    agents = runner(tasks, f"sleep {seconds}")
    stops = [start(agents, tasks, "one", "train", lambda outcome: None) for _ in range(16)]
    wait_for(lambda: len(sleepers(seconds)) == 16)
    for stop in stops:
        stop()
    wait_for(lambda: not sleepers(seconds))
    agents.close()


def test_a_runtime_that_is_not_there_is_refused_by_name(tmp_path, monkeypatch):
    write_task(tmp_path / "tasks" / "one")
    tasks = TaskFolders(tmp_path / "tasks", local=True)
    with pytest.raises(ValueError, match="config.sandbox.visible: got /not/there"):
        check_sandboxes(sandboxes_of(tasks, "/bin/sh", Sandbox(visible=("/not/there",))))
    with pytest.raises(ValueError, match="config.sandbox.solution: got True with .*/one"):
        check_sandboxes(sandboxes_of(tasks, "/bin/sh", Sandbox(solution=True)))
    broken = tmp_path / "bin" / "bwrap"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho no namespaces here >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:/usr/bin:/bin")
    with pytest.raises(ValueError, match="got local, with which .*printed: no namespaces"):
        check_sandboxes(sandboxes_of(tasks, "/bin/sh"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="got local, whose program bwrap is not on the PATH"):
        check_sandboxes(sandboxes_of(tasks, "/bin/sh"))
    with pytest.raises(ValueError, match="got podman, whose program podman is not on the PATH"):
        check_sandboxes(sandboxes_of(tasks, "/bin/sh", Sandbox(runtime="podman")))


def test_a_program_that_a_sandbox_does_not_have_is_refused_by_name(tmp_path, monkeypatch):
    """Such as a shim, which starts a program of another folder."""
    write_task(tmp_path / "tasks" / "one")
    write_programs(tmp_path, **{"shims/tool": "#!/bin/sh\n", "bin/tool": "#!/bin/sh\n"})
    tasks = TaskFolders(tmp_path / "tasks", local=True)
    monkeypatch.setenv("PATH", f"{tmp_path}/shims", prepend=os.pathsep)
    with pytest.raises(
        ValueError, match="config.agent.command: got tool, which a sandbox does not"
    ):
        check_sandboxes(sandboxes_of(tasks, "tool"))
    check_sandboxes(sandboxes_of(tasks, "tool", Sandbox(visible=(f"{tmp_path}/shims",))))
    check_sandboxes(sandboxes_of(tasks, f"{tmp_path}/shims/tool"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    check_sandboxes(sandboxes_of(tasks, "tool"))
