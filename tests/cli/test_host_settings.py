"""What processes compare names every setting, file and module that makes results others."""

import json

import jax
import pytest

from seeupo_jax.cli.host_settings import host_settings
from seeupo_jax.configuration.loading import from_dict


def differing(change, fields, config_file=None, **patched):
    """The names whose values a change makes others."""
    before = host_settings(from_dict(fields), config_file)
    change()
    after = host_settings(from_dict(fields), config_file)
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


@pytest.mark.parametrize(
    "variable, value, named",
    [
        (
            "XLA_FLAGS",
            "--xla_gpu_enable_fast_min_max=true",
            ["xla_gpu_enable_fast_min_max of XLA_FLAGS"],
        ),
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math", ["xla_cpu_enable_fast_math of XLA_FLAGS"]),
        ("XLA_FLAGS", "--xla_dump_to=x --xla_force_host_platform_device_count=3", []),
        ("LIBTPU_INIT_ARGS", "--xla_tpu_x=1 --xla_tpu_x=2", ["xla_tpu_x of LIBTPU_INIT_ARGS"]),
        ("NVIDIA_TF32_OVERRIDE", "0", ["NVIDIA_TF32_OVERRIDE"]),
        ("JAX_LOG_COMPILES", "1", []),
    ],
)
def test_flags_of_compilers_are_compared_one_by_one_and_not_those_of_logs(
    variable, value, named, monkeypatch
):
    monkeypatch.delenv(variable, raising=False)
    assert differing(lambda: monkeypatch.setenv(variable, value), {}) == named


def test_flags_in_another_order_are_the_same(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_b=2")
    other = "--xla_b=2  --xla_a=3 --xla_a=1"
    assert differing(lambda: monkeypatch.setenv("XLA_FLAGS", other), {}) == []
    (tmp_path / "flags").write_text("--xla_a=1\n--xla_b=5\n")
    change = differing(lambda: monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags")), {})
    assert change == ["xla_b of XLA_FLAGS"]


@pytest.mark.parametrize(
    "name, value",
    [
        ("jax_default_prng_impl", "rbg"),
        ("jax_default_matmul_precision", "highest"),
        ("jax_numpy_rank_promotion", "warn"),
        ("jax_threefry_partitionable", False),
        ("jax_softmax_custom_jvp", True),
    ],
)
def test_settings_of_jax_that_change_results_are_compared(name, value):
    was = jax.config.values[name]
    try:
        assert differing(lambda: jax.config.update(name, value), {}) == [name]
    finally:
        jax.config.update(name, was)


@pytest.mark.parametrize(
    "name", ["jax_log_compiles", "jax_compilation_cache_dir", "jax_traceback_filtering"]
)
def test_settings_of_one_host_are_not_compared(name):
    assert name in jax.config.values and name not in host_settings(from_dict({}))


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"chat": {"template": "F"}}, "file config.chat.template=F"),
        ({"rollout": {"grammar": "F"}}, "file config.rollout.grammar=F"),
        ({"agent": {"command": "run F", "tasks": "T"}}, "file F of config.agent.command"),
        ({"agent": {"command": "run F", "tasks": "F"}}, "file config.agent.tasks=F"),
        ({"sft": {"data": "F"}}, "file config.sft.data=F"),
        ({"sft": {"held_out_data": "F"}}, "file config.sft.held_out_data=F"),
        (
            {"env": {"name": "bfcl", "options": {"data": "B"}}},
            "file train/b.json of env bfcl data=B",
        ),
    ],
)
def test_files_that_the_configuration_names_are_compared(fields, named, tmp_path):
    (tmp_path / "bfcl/train").mkdir(parents=True)
    file, inner = tmp_path / "file", tmp_path / "bfcl/train/b.json"
    file.write_text("a")
    inner.write_text("a")

    def placed(text):
        return text.replace("F", str(file), 1).replace("B", str(tmp_path / "bfcl"), 1)

    fields = json.loads(
        json.dumps(fields)
        .replace('"F"', f'"{file}"')
        .replace("run F", f"run {file}")
        .replace('"B"', f'"{tmp_path / "bfcl"}"')
    )

    def change():
        file.write_text("b")
        inner.write_text("b")

    assert placed(named) in differing(change, fields)


def test_the_folders_of_a_harnesss_tasks_are_compared(tmp_path):
    tasks, folder = tmp_path / "tasks.jsonl", tmp_path / "work"
    (folder / "sub").mkdir(parents=True)
    tasks.write_text(json.dumps({"task_id": "t", "folder": str(folder)}))
    fields = {"agent": {"harness": "codex", "tasks": str(tasks)}}
    for change in (
        lambda: (folder / "sub/a.txt").write_text("1"),
        lambda: (folder / "sub/a.txt").write_text("2"),
        lambda: (folder / "sub/a.txt").rename(folder / "a.txt"),
    ):
        assert differing(change, fields) == [f"folder {folder} of config.agent.tasks"]
    tasks.write_text("no task")  # its check says so
    host_settings(from_dict(fields))


def test_the_folders_of_sandboxed_tasks_are_compared(tmp_path):
    fields = {"agent": {"command": "sh a"}, "tasks": f"harbor:{tmp_path}"}
    file = tmp_path / "one" / "task.toml"
    file.parent.mkdir()
    for change in (lambda: file.write_text("1"), lambda: file.write_text("2")):
        assert differing(change, fields) == [f"folder of config.tasks=harbor:{tmp_path}"]


MODULE = "import sub_module\n\n\nclass Env:\n    pass\n\n\ndef score(episode):\n    return 0\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"env": {"name": "user_module:Env"}},
        {"env": {"name": "mixture", "options": {"environments": [{"name": "user_module:Env"}]}}},
        {"rewards": [{"function": "user_module:score"}]},
        {"agent": {"name": "user_module:score"}},
        {"agent": {"name": "user_module.py:score"}},
        {"agent": {"command": "python user_module.py --fast"}},
        {"agent": {"command": "python -m user_module"}},
        {"optimizer": {"schedule": "user_module:score"}},
        {"optimizer": {"name": "user_module:score"}},
    ],
)
def test_code_that_the_configuration_names_anywhere_is_compared(fields, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user_module.py").write_text(MODULE)
    (tmp_path / "sub_module.py").write_text("")
    named = differing(lambda: (tmp_path / "sub_module.py").write_text("x = 1\n"), fields)
    (field,) = {name.partition(", for ")[2] for name in named}
    assert named == [f"code of sub_module, for {field}"]
    assert field.startswith(f"config.{next(iter(fields))}")


def test_a_command_that_cannot_be_split_is_left_to_the_check_of_agents():
    host_settings(from_dict({"agent": {"command": "run 'x"}}))


def test_code_of_the_configurations_file_is_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub_module.py").write_text("")
    (tmp_path / "config.py").write_text("import sub_module\n")

    def change():
        (tmp_path / "sub_module.py").write_text("x = 1\n")

    assert differing(change, {}, "config.py:tiny") == ["code of sub_module, for --config"]
    assert "code of quickstart.py, for --config" in host_settings(
        from_dict({}), "package:quickstart"
    )


def test_the_library_of_the_environment_is_compared_and_no_trackers():
    assert "version of bfcl-eval" not in host_settings(from_dict({}))
    named = {*host_settings(from_dict({"env": {"name": "gymnasium_text"}}))}
    assert {"version of gymnasium", "version of jaxlib", "version of optax"} <= named
    assert "version of wandb" not in named
