"""An environment in a process of its own: the same episodes, and its death costs only its own."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from process_cases import PYTHONPATH
from rollout_cases import Saying, make_worker, play

from seeupo_jax import envs
from seeupo_jax.configuration import loading
from seeupo_jax.envs.order_desk.demonstrator import demonstrate
from seeupo_jax.envs.pool import EnvCall, EnvPool
from seeupo_jax.envs.transport.isolated import IsolatedEnvironment, ProcessDied
from seeupo_jax.evaluation.episode_host import build_pool, check_host
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.engine.protocol import Action
from seeupo_jax.rollout.engine.sampling import task_number
from seeupo_jax.rollout.player import CollectionOptions


def wild(folder=".", kind="Wild", **options):
    return lambda: IsolatedEnvironment(f"isolated_cases:{kind}", {"folder": str(folder)}, **options)


def gone(pid):
    """Whether a process has ended; one that nobody has waited for yet is no process any more."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_that_is_killed_before_its_process_runs_does_not_begin():
    environment = wild()()
    environment.kill()
    with pytest.raises(ProcessDied, match="signal 9"):
        environment.begin()


class Reciting(Saying):
    """Says what a demonstrator of each task's would say."""

    def __init__(self, tokenizer, tasks):
        self._texts = {}
        for task_id in tasks:
            reported, _ = demonstrate(task_id, skill=0.5)
            texts = [m["content"] for m in reported.messages if m["role"] == "assistant"]
            self._texts[task_number(task_id)] = [tokenizer.action(text) for text in texts]

    def fits(self, context):
        return len(context) < 600

    def step(self, unfinished, stop=False):
        turns, self._open = self._open, []
        said = [(turn.key, self._texts[turn.task][turn.turn]) for turn in turns]
        return [Action(k, t, [-0.1] * len(t)) for k, t in said] if unfinished else None


def recited(isolation, data_dir):
    """Trajectories of the order desk in threads or in processes, as a run's pool has them."""
    options = {"data_dir": str(data_dir)}
    config = loading.from_dict({"env": {"options": options, "isolation": isolation}})
    tasks = ["train/3", "train/8", "test/1"]
    tokenizer = read_tokenizer("package:order_desk")
    engine, pool = Reciting(tokenizer, tasks), build_pool(config, 4)
    worker = make_worker(engine, pool, tokenizer, max_turns=20)
    try:
        requests, numbers = group_requests(tasks, 1, 1), CollectionOptions(seed=3)
        return collect(worker, None, requests, numbers).trajectories
    finally:
        pool.close()


def test_threads_and_processes_give_the_same_trajectories_of_the_order_desk(tmp_path):
    threads, processes = (recited(kind, tmp_path) for kind in ("thread", "process"))
    assert [t.stop for t in threads] == ["done"] * 3 and min(t.turns for t in threads) > 1
    for one, other in zip(threads, processes, strict=True):
        for name in vars(one).keys() - {"segments"}:
            assert getattr(one, name) == getattr(other, name)
        for mine, reference in zip(one.segments, other.segments, strict=True):
            for name in vars(mine):
                np.testing.assert_array_equal(getattr(mine, name), getattr(reference, name))


def test_what_ends_a_process_costs_its_episode_and_says_how():
    tasks = ["exit", "2", "segfault", "2", "shut", "prints", "2"]
    died = "ProcessDied: its process "
    found = play(wild(), tasks)
    by_task = {t.task_id: (t.stop, t.info.get("failure")) for t in found}
    assert by_task["exit"] == ("env_error", f"{died}ended with exit code 7")
    assert by_task["segfault"] == ("env_error", f"{died}was ended by signal 11 (SIGSEGV)")
    assert by_task["shut"] == ("env_error", f"{died}ended with exit code 1")
    assert by_task["prints"] == ("max_turns", None)  # what it prints is no answer
    healthy = [t for t in found if t.task_id == "2"]
    assert [(t.stop, t.reward, t.info["score"]) for t in healthy] == [("done", 1.0, 0.25)] * 3
    assert not any(t.info["jax"] or t.info["pid"] == os.getpid() for t in healthy)


def test_an_array_of_info_or_of_a_message_counts_as_one_value_in_a_process_too():
    (thread,) = play(lambda: envs.make("isolated_cases:Screen"), ["2"], timeout_s=30)
    (process,) = play(wild(kind="Screen"), ["2"], timeout_s=30)
    assert thread.stop == process.stop == "done" and thread.info == process.info
    assert np.shape(process.info["screen"]) == (300, 300, 3)
    assert np.shape(process.messages[-1]["image"]) == (300, 300, 3)
    assert process.messages == thread.messages


def test_a_call_that_is_late_ends_its_process_and_all_that_it_started(tmp_path):
    # A process takes seconds to begin where the machine is busy.
    hanging, healthy = play(wild(tmp_path), ["hang", "2"], timeout_s=8)
    assert (hanging.stop, healthy.stop) == ("timeout", "done")
    child, grandchild = map(int, (tmp_path / "hangs").read_text().split())
    until(lambda: gone(child) and gone(grandchild))


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("victim", ["inner", "outer"])
def test_all_that_it_started_ends_when_either_supervisor_is_killed(tmp_path, victim):
    environment, died = wild(tmp_path)(), []
    environment.reset("hang", 0)

    def step():
        with pytest.raises(ProcessDied) as error:
            environment.step("")
        died.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    until(lambda: (tmp_path / "hangs").exists() and (tmp_path / "hangs").read_text())
    process, child = map(int, (tmp_path / "hangs").read_text().split())
    inner = parent_of(process)
    outer = parent_of(inner)
    assert parent_of(outer) == os.getpid()
    os.kill({"inner": inner, "outer": outer}[victim], signal.SIGKILL)
    until(lambda: gone(process) and gone(child))
    thread.join(20)
    assert died


def test_no_thread_is_left_behind_by_an_environment_that_hangs(tmp_path):
    begun = wild(tmp_path)()
    begun.reset("hang", 0)  # without a time limit, since a process begins with it
    pool = EnvPool(lambda: begun, 1, workers=1, timeout_s=1.0)
    (thread,) = pool._threads
    pool.submit(EnvCall(0, lambda env: env.step("")))
    ((_, outcome),) = pool.poll(None)
    assert outcome.result.stop == "timeout" and pool.abandoned == 1
    thread.join(20)  # the one that was at work on it
    assert not thread.is_alive()
    pool.close()


def test_memory_beyond_the_bound_is_the_episodes_error():
    leaking, healthy = play(wild(memory_mib=500), ["leak", "2"], max_turns=4)
    assert leaking.stop == "env_error"
    assert re.fullmatch(r"MemoryError: \(step, isolated_cases\.py:\d+\)", leaking.info["failure"])
    assert healthy.stop == "done"


def test_a_reset_in_which_the_process_dies_is_tried_again(tmp_path):
    (found,) = play(wild(tmp_path), ["dies once"])
    assert (found.stop, found.info["retries"]) == ("max_turns", 1)


def test_an_object_whose_process_died_begins_another_with_its_next_episode():
    environment = wild()()
    environment.reset("exit", 0)
    with pytest.raises(ProcessDied, match="ended with exit code 7"):
        environment.step("")
    environment.reset("1", 0)
    first = environment.step("").info["pid"]
    environment.close()
    assert gone(first)
    environment.reset("1", 0)
    assert environment.step("").info["pid"] != first
    assert environment.task_ids("train") == ["2", "exit"]
    environment.close()
    environment.close()


def test_the_environment_is_closed_and_transient_errors_and_last_rewards_come_through(tmp_path):
    closing, busy = play(wild(tmp_path), ["close", "busy"], max_turns=2)
    assert (tmp_path / "closed").exists() and closing.stop == "max_turns"
    assert (busy.stop, busy.info["retries"], busy.reward) == ("max_turns", 1, 1.0)
    (paid,) = play(wild(tmp_path, "Paying"), ["5"], max_turns=2)
    assert (paid.stop, paid.reward) == ("max_turns", 3.0)


@pytest.mark.parametrize(
    "task", ["half", "toolset", "states", "unspeakable", "exit", "nan", "lost"]
)
def test_what_the_protocol_does_not_allow_is_reported_as_in_a_thread(task):
    make = {
        "thread": lambda: envs.make("hostile_cases:Hostile"),
        "process": lambda: IsolatedEnvironment("hostile_cases:Hostile", {}),
    }
    (thread,), (process,) = (play(make[kind], [task]) for kind in make)
    assert thread.stop == process.stop == "env_error"
    assert thread.info == process.info


TRAINER = """
import signal, sys, time
from rollout_cases import play
from seeupo_jax.envs.transport.isolated import IsolatedEnvironment
signal.signal(signal.SIGINT, lambda *_: print("heard", flush=True))
make = lambda: IsolatedEnvironment("isolated_cases:" + sys.argv[3], {"folder": sys.argv[1]})
if "hang" in sys.argv[2]:
    play(make, [sys.argv[2]], timeout_s=100.0)
environment = make()
environment.reset("2", 0)
print(environment.step("").info["pid"], flush=True)
while "heard":
    time.sleep(0.01)
    if sys.stdin.readline():
        print(environment.step("").info["pid"], flush=True)
"""


def trainer(folder, task, kind="Wild"):
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(folder), task, kind],
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def parent(folder):
    """An environment with four other processes that descend from its own, and their ids."""
    environment = wild(folder, "Parent")()
    environment.reset("exit", 0)
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) == 4 and not any(map(gone, pids))  # the daemon, too, while it plays
    return environment, pids


@pytest.mark.parametrize("how", ["close", "kill", "exit", "SIGKILL"])
def test_all_that_an_environment_has_started_ends_with_it(tmp_path, how):
    environment, pids = parent(tmp_path)
    if how == "SIGKILL":
        environment.reset("2", 0)
        os.kill(environment.step("").info["pid"], signal.SIGKILL)
    if how in ("exit", "SIGKILL"):
        died = "exit code 7" if how == "exit" else r"signal 9 \(SIGKILL\)"
        with pytest.raises(ProcessDied, match=died):
            environment.step("")
    else:
        getattr(environment, how)()
    until(lambda: all(map(gone, pids)))
    environment.close()


@pytest.mark.parametrize("task", ["2", "hang_in_c"])
def test_all_that_an_environment_has_started_ends_with_a_trainer_that_is_killed(tmp_path, task):
    with trainer(tmp_path, task, "Parent") as process:
        if task == "2":
            pids = [int(process.stdout.readline())]
        else:
            until(lambda: (tmp_path / "hangs").exists() and (tmp_path / "hangs").read_text())
            pids = [int(pid) for pid in (tmp_path / "hangs").read_text().split()]
        pids += map(int, (tmp_path / "pids").read_text().split())
        assert not any(map(gone, pids))
        process.kill()
        until(lambda: all(map(gone, pids)))
    assert (tmp_path / "closed").exists() == (task == "2")  # where it can, it closes


def test_the_thread_that_starts_a_process_may_end(tmp_path):
    environment = wild(tmp_path)()
    starting = threading.Thread(target=environment.begin)
    starting.start()
    starting.join()
    environment.reset("2", 0)
    assert environment.step("").reward == 0.5
    environment.close()


def test_ctrl_c_is_the_trainers_to_hear(tmp_path):
    with trainer(tmp_path, "2") as process:
        pid = process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        os.kill(int(pid), signal.SIGINT)
        os.kill(int(pid), signal.SIGTERM)
        assert process.stdout.readline() == "heard\n"
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == pid
        process.kill()
        until(lambda: gone(int(pid)))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"name": "isolated_cases:None"}, "config.env.isolation: got process, where env isolated_"),
        ({"memory_mib": 20}, "20 MiB (config.env.memory_mib) is less than its process has"),
        ({"timeout_s": 0.01}, "cannot be made within 0.01 s (its process was ended by signal 9"),
    ],
)
def test_what_cannot_be_made_in_a_process_is_one_sentence_beforehand(fields, message):
    config = loading.from_dict({"env": {"isolation": "process", **fields}})
    with pytest.raises(ValueError) as error:
        check_host(config)
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_bound_on_memory_that_nothing_would_read_is_refused():
    with pytest.raises(ValueError, match="^config.env.memory_mib: got 500; allowed: none, unless"):
        loading.from_dict({"env": {"memory_mib": 500}})
