"""Episodes in the real AppWorld, on three small tasks made by hand (third_party/appworld)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from seeupo_jax import envs
from seeupo_jax.envs.appworld.environment import HOME
from seeupo_jax.envs.appworld.prompt import output_message, truncate
from seeupo_jax.envs.appworld.server import Address, ServerError, python_path
from seeupo_jax.envs.pool import EnvCall, EnvPool, Failure
from seeupo_jax.envs.validation import check_step

LOGIN = """
passwords = {p['account_name']: p['password'] for p in apis.supervisor.show_account_passwords()}
def log_in(app, username):
    return apis[app].login(username=username, password=passwords[app])['access_token']
"""
ORACLE = {
    "shopping_1": (
        LOGIN + "token = log_in('simple_note', 'ann.lee@example.com')",
        "notes = apis.simple_note.search_notes(access_token=token)\n"
        "note = next(n for n in notes if n['title'] == 'Shopping')\n"
        "note = apis.simple_note.show_note(note_id=note['note_id'], access_token=token)\n"
        "print(note['content'])",
        "apis.simple_note.delete_note(note_id=note['note_id'], access_token=token)",
        "apis.supervisor.complete_task(answer=len(note['content'].splitlines()))",
    ),
    "packing_1": (
        LOGIN + "token = log_in('simple_note', 'ann.lee@example.com')\n"
        "apis.simple_note.create_note(title='Packing', content='tent, rope', access_token=token)",
        "apis.supervisor.complete_task()",
    ),
    "contact_1": (
        LOGIN + "token = log_in('phone', '5551234567')\n"
        "print(apis.phone.search_contacts(query='Dana', access_token=token)[0]['phone_number'])",
        "apis.supervisor.complete_task(answer='5550001111')",
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder of the hand-made tasks' data."""
    if not python_path(HOME).exists():
        pytest.skip("AppWorld is not set up: sh third_party/appworld/setup.sh")
    folder = tmp_path_factory.mktemp("appworld")
    maker = HOME / "make_tasks.py"
    subprocess.run([python_path(HOME), maker, folder], check=True, cwd=folder)
    return folder


@pytest.fixture
def make(root):
    """Makes environments, and closes them in the end."""
    made = []

    def make_one(**options):
        made.append(envs.make("appworld", root=str(root), **options))
        return made[-1]

    yield make_one
    for env in made:
        env.close()


@pytest.fixture(scope="module")
def world(root):
    """An environment that tests share: a reset is all that keeps them apart, and all they need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_KEY", "xyzzy")
        env = envs.make("appworld", root=str(root), memory_mb=500)
        yield env
    env.close()


def wait_for(happens):
    until = time.monotonic() + 30
    while not happens() and time.monotonic() < until:
        time.sleep(0.05)
    assert happens()


def block(code):
    return f"I think.\n```python\n{code}\n```"


def output(env, code):
    return env.step(block(code)).observation[0]["content"]


def health(env):
    return env._server.call("health")


def pid(env):
    return env._server.pid


def assert_lost(env, end, how):
    """The policy's last step, after which its world is gone: no success, and the reason is said."""
    end = check_step(end)
    assert end.done and env.score() == 0 and end.info["requirements_passed"] == 0
    assert [k for k in ("hung", "crashed", "damaged") if end.info[k]] == [how] and end.info["lost"]
    assert end.info["executed"] == [True, False] and not end.info["completed"]


@pytest.mark.parametrize("task_id", ORACLE)
def test_the_oracle_succeeds(world, task_id):
    world.reset(task_id, seed=0)
    results = [world.step(block(code)) for code in ORACLE[task_id]]
    assert [r.done for r in results] == [False] * (len(results) - 1) + [True]
    assert world.score() == 1 and sum(r.reward for r in results) == pytest.approx(1)
    info = results[-1].info
    assert info["completed"] and not info["out_of_calls"] and info["calls"] == len(results)
    assert info["requirements_passed"] == info["requirements"]


def test_doing_nothing_meets_only_what_asks_for_nothing(world):
    for task_id, score in {"shopping_1": 1 / 3, "packing_1": 1 / 2, "contact_1": 0}.items():
        world.reset(task_id, seed=0)
        assert world.score() == score
        result = world.step(block("apis.supervisor.complete_task()"))
        assert result.done and world.score() == result.reward == score


def test_rewards_add_up_to_what_the_world_is_worth_wherever_the_episode_is_cut_off(world):
    world.reset("shopping_1", seed=0)
    rewards = []
    for code in ORACLE["shopping_1"]:
        rewards.append(world.step(block(code)).reward)
        assert sum(rewards) == pytest.approx(world.score())
    assert rewards == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


@pytest.mark.parametrize("reward, solved, idle", [("official", 1, 0), ("shaped", 1.5, 0.25)])
def test_other_rewards(world, monkeypatch, reward, solved, idle):
    monkeypatch.setattr(world, "reward", reward)
    world.reset("packing_1", seed=0)
    assert sum(world.step(block(code)).reward for code in ORACLE["packing_1"]) == solved
    world.reset("packing_1", seed=0)
    assert world.step(block("print(1)")).reward == idle
    looping = world.step("and so on " * 100)
    assert idle + looping.reward == (-1 if reward == "shaped" else idle)


def test_the_prompt_names_the_apps_the_supervisor_and_the_task(world):
    (system, user), tools = world.reset("contact_1", seed=0)
    assert tools == () and system["role"] == "system" and user["role"] == "user"
    for text in ("- phone: ", "- simple_note: ", "Ann Lee", "ann.lee@example.com", "5551234567"):
        assert text in system["content"]
    assert "2023-05-18 12:00:00" in system["content"] and "{{" not in system["content"]
    assert user["content"] == "Task: What is the phone number of my contact Dana?"


@pytest.mark.parametrize(
    "code, words",
    [
        ("x = 1 +", "Syntax error"),
        ("1 / 0", "ZeroDivisionError"),
        ("apis.phone.fly()", "fly"),
        ("apis.phone.search_contacts()", "access token is missing"),
        ("import subprocess", "not allowed: subprocess"),
        ("input()", "not allowed"),
        ("x = 'a' * (2 * 10**9)", "MemoryError"),
    ],
)
def test_wrong_code_gets_the_reason_and_the_episode_continues(world, code, words):
    world.reset("contact_1", seed=0)
    result = world.step(block("kept = 7\n" + code))
    text = result.observation[0]["content"]
    assert text.startswith("Output:\n```\nExecution failed.") and words in text
    assert not result.done and not result.info["bad_call"]
    assert result.info["executed"] == [False]
    assert "1" in output(world, "print(1)")


@pytest.mark.parametrize("text", ["The answer is 5.", "```json\n{}\n```", "```python\nprint(1)"])
def test_a_message_without_a_block_gets_the_reason_and_counts_as_a_call(world, text):
    world.reset("contact_1", seed=0)
    result = world.step(text)
    assert result.observation[0]["content"].startswith("Nothing was run: ")
    assert result.info["bad_call"] and result.info["calls"] == 1 and not result.done


def test_variables_stay_for_the_episode_and_no_longer(world):
    world.reset("contact_1", seed=0)
    world.step(block("kept = 7"))
    assert output(world, "print(kept)") == "Output:\n```\n7\n```"
    world.reset("contact_1", seed=0)
    assert "NameError" in output(world, "print(kept)")
    outputs = world._server._folder / "experiments" / "outputs"
    assert len(list(outputs.iterdir())) == 1  # the last episode's are gone


def test_two_environments_at_once_are_two_worlds(world, make):
    other = make()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda env: env.reset("packing_1", seed=0), (world, other)))
    processes = [pid(world), pid(other)]
    assert len(set(processes)) == 2
    for code in ORACLE["packing_1"]:
        other.step(block(code))
    assert other.score() == 1 and world.score() == 1 / 2
    assert "NameError" in output(world, "print(token)")
    other.close()
    assert pid(other) is None and not Path(f"/proc/{processes[1]}").exists()
    assert output(world, "print(2)") == "Output:\n```\n2\n```"


def test_long_output_is_cut_and_episodes_are_bounded(world, monkeypatch):
    monkeypatch.setattr(world, "max_output_tokens", 20)
    monkeypatch.setattr(world, "max_calls", 2)
    world.reset("contact_1", seed=0)
    result = world.step(block("print('7' * 100)"))
    text = result.observation[0]["content"]
    assert text == f"Output:\n```\n{'7' * 20}\n... [81 more characters are left out]\n```"
    assert result.info["outputs_cut"] == 1 and not result.done
    last = world.step("no code")
    assert last.done and last.info["out_of_calls"] and not last.info["completed"]
    with pytest.raises(ValueError, match="the episode is done"):
        world.step(block("print(1)"))


@pytest.mark.parametrize(
    "code, words",
    [
        (r"print('a\ud800b')", r"a\ud800b"),
        (r"raise ValueError('\udc80')", r"ValueError: \udc80"),
        ("print('a' * 70 * 2**20)", "more characters are left out"),
        ("raise ValueError('a' * 70 * 2**20)", "more characters are left out"),
        ("apis.supervisor.complete_task(answer='a' * 10**7)", "A request of more than 1048576"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        (
            "kept = []\ntry:\n    while True:\n        kept.append(bytes(10**6))\n"
            "except MemoryError:\n    pass",
            "Execution successful",
        ),
    ],
)
def test_no_output_and_no_error_of_the_code_fails_the_episode(world, code, words):
    world.reset("shopping_1", seed=0)
    result = check_step(world.step(block(code)))
    assert words in result.observation[0]["content"] and not result.done
    assert world.score() == 1 / 3
    assert world.step(block("apis.supervisor.complete_task()")).info["completed"]


@pytest.mark.parametrize("code", ["while True: pass", "while True: print('spam ' * 200)"])
def test_code_is_interrupted_at_its_limit_and_the_episode_continues(world, monkeypatch, code):
    monkeypatch.setattr(world, "code_s", 2)
    world.reset("shopping_1", seed=0)
    result = check_step(world.step(block(code)))
    assert "timed out after 2 seconds" in result.observation[0]["content"]
    assert not result.done and result.info["executed"] == [False]
    assert world.score() == 1 / 3
    assert world.step(block("apis.supervisor.complete_task()")).info["completed"]


@pytest.mark.parametrize("answer", [r"'\ud800'", "float('nan')", "float('inf')"])
def test_an_answer_that_json_cannot_hold_is_a_wrong_answer(world, answer):
    world.reset("contact_1", seed=0)
    result = check_step(world.step(block(f"apis.supervisor.complete_task(answer={answer})")))
    assert result.done and result.info["completed"] and world.score() == 0


def test_a_dead_server_is_replaced_by_the_next_reset(world):
    world.reset("contact_1", seed=0)
    os.kill(pid(world), 9)
    world._server._process.wait()  # it has not taken the block: no failure of the policy
    with pytest.raises(ServerError, match="execute"):
        world.step(block("print(1)"))
    world.reset("contact_1", seed=0)
    os.kill(pid(world), 9)  # between two episodes: nothing is lost
    world.reset("contact_1", seed=0)
    assert "1" in output(world, "print(1)")


def test_a_server_ends_with_a_killed_trainer_and_leaves_nothing(root, tmp_path):
    said = tmp_path / "said"
    daemon = f"setsid sh -c 'echo $$ > {said}; exec sleep 1000' &"
    daemon += f" until [ -s {said} ]; do sleep 0.01; done"
    code = f"__import__('ctypes').CDLL(None).system({daemon.encode()})"
    play = (
        "import os, sys, tempfile; from seeupo_jax import envs\n"
        f"env = envs.make('appworld', root={str(root)!r}); env.reset('contact_1', 0)\n"
        f"env.step({block(code)!r})\n"
        "print(env._server.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    places = os.environ | {"TMPDIR": str(tmp_path)}
    trainer = subprocess.run(
        [sys.executable, "-c", play], capture_output=True, text=True, env=places
    )
    assert trainer.returncode == -9
    started = int(said.read_text())
    said.unlink()
    process, daemon = Path(f"/proc/{int(trainer.stdout)}"), Path(f"/proc/{started}")
    wait_for(lambda: not (process.exists() or daemon.exists() or any(tmp_path.iterdir())))


def test_a_server_listens_on_loopback_only_and_asks_for_its_token(world):
    world.reset("contact_1", seed=0)
    port = world._server.port
    with pytest.raises(ServerError, match="401"):
        Address(port, "wrong").ask("health", {}, 10)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    hosts = {row[1].split(":")[0] for row in rows if int(row[1].split(":")[1], 16) == port}
    assert hosts == {"0100007F"}


def test_the_policys_code_gets_no_variable_of_the_trainer(world):
    world.reset("contact_1", seed=0)
    names = output(world, "import os; print(dict(os.environ))")
    assert "PATH" in names and "xyzzy" not in names


# A pool that is told to end in the middle of a fork, once a file is there.
SERVE = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {home!r})
import serve
os.register_at_fork(
    after_in_parent=lambda: Path({end!r}).exists() and os.kill(os.getpid(), signal.SIGTERM)
)
serve.main()
"""


@pytest.fixture(scope="module")
def pool(root, tmp_path_factory):
    """The file of a pool of two servers with low limits; it ends while it restarts one."""
    folder, end = tmp_path_factory.mktemp("pool"), tmp_path_factory.mktemp("end") / "end"
    file = folder / "servers"
    program = SERVE.format(home=str(HOME), end=str(end))
    command = [python_path(HOME), "-c", program, "--servers=2", f"--file={file}"]
    with subprocess.Popen(
        [*command, f"--root={root}", "--request_s=3", "--memory_mb=500"],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(folder), "SECRET_KEY": "xyzzy"},
    ) as process:
        wait_for(file.exists)
        yield file
        end.touch()
        servers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(servers[0]), signal.SIGKILL)
        try:
            process.wait(60)
        finally:
            process.kill()
    assert process.returncode == 0 and not any(folder.iterdir())


def test_a_pool_lends_each_environment_a_server_and_restarts_what_dies(pool, make):
    assert pool.stat().st_mode & 0o777 == 0o600
    first, second, third = (make(servers=str(pool), start_s=4, code_s=2) for _ in range(3))
    for env in (first, second):
        env.reset("contact_1", seed=0)
    ports = {first._server.port, second._server.port}
    assert ports == set(json.loads(pool.read_text())["ports"])
    with pytest.raises(ServerError, match="409, another client has this server"):
        third.reset("contact_1", seed=0)
    assert "xyzzy" not in output(first, "import os; print(dict(os.environ))")
    second.close()
    third.reset("contact_1", seed=0)
    os.kill(health(third)["pid"], 9)
    with pytest.raises(ServerError, match="execute"):
        third.step(block("print(1)"))
    third.reset("contact_1", seed=0)
    for env in (first, third):
        assert [env.step(block(code)).done for code in ORACLE["contact_1"]] == [False, True]
        assert env.score() == 1


def test_a_server_killed_in_the_middle_of_an_episode_costs_one_trajectory(pool, make):
    slots = EnvPool(lambda: make(servers=str(pool), code_s=2), 1, workers=1, timeout_s=60)

    def ask(what):
        slots.submit(EnvCall(0, what))
        ((_, outcome),) = slots.poll(None)
        return outcome.result

    ask(lambda env: env.reset("contact_1", seed=0))
    os.kill(ask(health)["pid"], 9)
    failure = ask(lambda env: env.step(block("print(1)")))
    assert isinstance(failure, Failure) and failure.stop == "env_error"
    assert "ServerError" in failure.reason
    ask(lambda env: env.reset("contact_1", seed=0))
    for code in ORACLE["contact_1"]:
        ask(lambda env, code=code: env.step(block(code)))
    assert ask(lambda env: env.score()) == 1
    slots.close()


def test_code_that_no_signal_interrupts_ends_server_and_episode_without_success(pool, make):
    """A failure of the environment would not count, and the policy could end bad episodes so."""
    env = make(servers=str(pool), code_s=1)
    env.reset("contact_1", seed=0)
    paid = env.step(block("print(1)")).reward
    start = time.monotonic()
    end = env.step(block("sum(range(10**12))"))  # C code that never looks for signals
    assert 3 <= time.monotonic() - start < 10
    assert end.done and end.info["hung"] and end.info["executed"] == [True, False]
    assert env.score() == paid + end.reward == 0.0
    env.reset("contact_1", seed=0)
    assert "1" in output(env, "print(1)")


@pytest.mark.parametrize("borrowed", [False, True])
def test_code_that_crashes_python_ends_the_episode_without_success(world, pool, make, borrowed):
    env = make(servers=str(pool), code_s=2) if borrowed else world
    env.reset("shopping_1", seed=0)
    paid = env.step(block("print(1)")).reward
    crash = "x = ()\nfor _ in range(3 * 10**5): x = (x,)\nhash(x)"  # a stack overflow of C
    end = env.step(block(crash))
    assert_lost(env, end, "crashed")
    assert paid == 1 / 3 and paid + end.reward == 0.0
    env.reset("shopping_1", seed=0)
    assert "1" in output(env, "print(1)")
    os.kill(health(env)["pid"], 9)  # as what code has started may do between two blocks
    assert_lost(env, env.step(block("print(1)")), "crashed")


@pytest.mark.parametrize(
    "code, how, reason",
    [
        ("import json\njson.dumps = None", "damaged", "execute was answered with 500, TypeError"),
        ("import json\njson.dumps = lambda *_, **__: '{}'", "damaged", "execute .* no answer"),
        ("import appworld\nappworld.evaluator.evaluate_task = None", "damaged", "evaluate .* 500"),
        ("import time\ntime.clock_gettime = None", "crashed", "task_completed had no answer"),
    ],
)
def test_a_server_that_code_has_broken_ends_with_the_policys_episode(pool, make, code, how, reason):
    """An error of the environment would not count, and the next episode needs a sound server."""
    env = make(servers=str(pool), start_s=10, code_s=2)
    env.reset("shopping_1", seed=0)
    paid = env.step(block("print(1)")).reward
    broken = health(env)["pid"]
    end = env.step(block(code))
    assert_lost(env, end, how)
    assert re.search(reason, end.info["lost"]) and paid == 1 / 3 and paid + end.reward == 0
    other = make(servers=str(pool), start_s=10, code_s=2)
    for each in (env, other):  # both servers of the pool
        each.reset("contact_1", seed=0)
        assert health(each)["pid"] != broken
        assert [each.step(block(code)).done for code in ORACLE["contact_1"]] == [False, True]
        assert each.score() == 1


def test_a_server_that_could_not_open_a_world_is_free_at_once(pool, make, root):
    broken = root / "data" / "tasks" / "broken_1"
    broken.mkdir()
    env = make(servers=str(pool), start_s=2, code_s=2)
    with pytest.raises(ServerError, match="initialize was answered with 500"):
        env.reset("broken_1", seed=0)
    broken.rmdir()
    for _ in range(2):  # all servers of the pool
        make(servers=str(pool), start_s=10, code_s=2).reset("contact_1", seed=0)


def test_a_pool_whose_servers_end_before_code_is_interrupted_is_refused(pool, make):
    with pytest.raises(ValueError, match="appworld code_s: got 3; allowed: less than 3"):
        make(servers=str(pool), code_s=3)


def test_a_server_over_the_memory_ceiling_is_replaced_before_the_next_episode(pool, make):
    env = make(servers=str(pool), code_s=2)
    env.reset("contact_1", seed=0)
    first = health(env)
    env.reset("contact_1", seed=0)
    assert health(env)["pid"] == first["pid"]
    env.step(block("leak = [bytearray(10**6) for _ in range(400)]"))
    assert health(env)["memory_mb"] > 500 > first["memory_mb"]
    assert output(env, "print(len(leak))") == "Output:\n```\n400\n```"
    env.reset("contact_1", seed=0)
    after = health(env)
    assert after["pid"] != first["pid"] and after["memory_mb"] < 500


def test_splits_are_the_datasets_of_the_data_folder(world):
    assert world.task_ids("train") == ["shopping_1", "packing_1"]
    assert world.task_ids("test") == world.task_ids("dev") == ["contact_1"]
    with pytest.raises(ValueError, match="test_normal.txt exists"):
        world.task_ids("test_normal")
    with pytest.raises(ValueError, match="allowed: train, test, dev, test_normal, test_challenge"):
        world.task_ids("validation")
    for task_id in ("", "nothing_1", "../tasks/contact_1"):
        with pytest.raises(ValueError, match="appworld task"):
            world.reset(task_id, seed=0)


def test_missing_data_are_said_at_the_start_with_the_command_that_gets_them(root, tmp_path):
    with pytest.raises(ValueError, match="appworld download data --root"):
        envs.make("appworld", root=str(tmp_path))


def test_a_missing_installation_is_said_at_the_start(tmp_path):
    with pytest.raises(ValueError, match="setup.sh"):
        envs.make("appworld", home=str(tmp_path))


def test_an_outputs_fence_is_longer_than_any_in_it():
    assert output_message("a\n") == "Output:\n```\na\n```"
    assert output_message("````\n") == "Output:\n`````\n````\n`````"


@pytest.mark.parametrize(
    "text, limit, shown",
    [
        ("one two", 2, "one two"),
        ("one two three", 2, "one two"),
        ("2024", 3, "202"),
        ("日本語", 2, "日本"),
        (" " * 40, 2, " " * 32),
    ],
)
def test_outputs_are_cut_by_words_digits_and_signs(text, limit, shown):
    left = len(text) - len(shown)
    note = f"\n... [{left} more characters are left out]" if left else ""
    assert truncate(text, limit) == shown + note
