"""Generated tasks as official files: read by official code, and by `bfcl`."""

import json
import subprocess
import sys
from importlib.resources import files

import pytest
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_irrelevance_checker
from world_cases import official_verdict

from seeupo_jax import envs
from seeupo_jax.envs.bfcl.benchmark_files import file_name
from seeupo_jax.envs.bfcl.environment import Bfcl
from seeupo_jax.instruments.bfcl_worlds.__main__ import main
from seeupo_jax.instruments.bfcl_worlds.environment import BfclWorlds
from seeupo_jax.instruments.bfcl_worlds.generator import SPLITS, VARIANTS
from seeupo_jax.instruments.bfcl_worlds.official_format import export_tasks

SIZES = {"train_tasks": 16, "validation_tasks": 4, "test_tasks": 8}


@pytest.fixture(scope="module")
def worlds():
    return envs.make("bfcl_worlds", categories=list(VARIANTS), turns=[1, 3], **SIZES)


@pytest.fixture(scope="module")
def folder(worlds, tmp_path_factory):
    folder = tmp_path_factory.mktemp("official")
    written = export_tasks(worlds, folder)
    assert written.total() == 28 and len(written) == 12
    return folder


def rows(path):
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_official_code_finds_the_exported_answers_valid(folder):
    name = file_name("multi_turn_miss_func")
    official = json.loads((files("bfcl_eval") / "data" / name).read_text().splitlines()[0])
    seen = set()
    for category in VARIANTS:
        for split in SPLITS:
            entries = rows(folder / split / file_name(category))
            answers = rows(folder / split / "possible_answer" / file_name(category))
            assert list(entries) == list(answers) and not seen & set(entries)
            seen |= set(entries)
            for task_id, entry in entries.items():
                assert entry.keys() | {"missed_function"} == official.keys()
                truth = answers[task_id]["ground_truth"]
                assert len(truth) == len(entry["question"])
                assert official_verdict(entry, truth, truth)
                decoded = [[turn] if turn else [] for turn in truth]
                assert multi_turn_irrelevance_checker(decoded, truth)["valid"]
                assert not official_verdict(entry, truth, [*truth[:-1], truth[-1][:-1]])
    assert len(seen) == 28


def test_bfcl_plays_the_exported_tasks(worlds, folder):
    for category in VARIANTS:
        env = Bfcl(category, data=str(folder), max_calls=40)
        played = 0
        for split in SPLITS:
            for task_id in env.task_ids(split):
                messages, _ = env.reset(task_id, seed=0)
                for message in [m for turn in env.play(task_id) for m in turn]:
                    env.step(message)
                assert env.score() == 1
                played += 1
        assert played == 7
        assert len(env.demonstrations("test")) == 2
    same = Bfcl("multi_turn_base", data=str(folder)).find_task("multi_turn_base_0")
    made = worlds.find_task("train/0")
    assert (same.questions, same.reference, same.scenario) == (
        made.questions,
        made.reference,
        made.scenario,
    )


def test_the_command_writes_the_folder_and_refuses_in_a_sentence(tmp_path, capsys):
    options = json.dumps(SIZES | {"classes": ["MathAPI"]})
    main([f"--output={tmp_path}", f"--options={options}"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{tmp_path}/train/BFCL_v4_multi_turn_base.json: 16 tasks"
    assert len(said) == 3 and len(Bfcl(data=str(tmp_path)).task_ids("train")) == 16
    for wrong, sentence in (
        ("[]", "--options: got '[]'"),
        ("{bad", "--options: got '{bad'; allowed: a JSON object."),
        ('{"turns": 1}', "bfcl_worlds turns: got 1"),
    ):
        with pytest.raises(SystemExit) as left:
            main([f"--output={tmp_path}", f"--options={wrong}"])
        assert left.value.code == 2 and sentence in capsys.readouterr().err


def test_nothing_of_an_earlier_export_stays(tmp_path):
    base, other = file_name("multi_turn_base"), file_name("multi_turn_miss_param")
    earlier = [f"{split}/{name}" for split in SPLITS for name in (base, other)]
    earlier += [f"{split}/possible_answer/{name}" for split in SPLITS for name in (base, other)]
    kept = ["dev/" + base, "train/notes.json"]  # which no export writes
    for path in [*earlier, *kept]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("earlier")
    sizes = {"train_tasks": 1, "validation_tasks": 1, "test_tasks": 1}
    export_tasks(BfclWorlds(categories=("multi_turn_base",), turns=(1, 1), **sizes), tmp_path)
    left = {str(file.relative_to(tmp_path)): file for file in tmp_path.rglob("*.json")}
    assert {*left} == {path for path in [*earlier, *kept] if other not in path}
    assert {path for path, file in left.items() if file.read_text() == "earlier"} == {*kept}


def test_a_folder_that_is_none_of_this_format_is_refused_in_a_sentence(folder, tmp_path):
    with pytest.raises(
        ValueError, match="bfcl data: got .*, which has no SPLIT/BFCL_v4_multi_turn_b"
    ):
        Bfcl(data=str(tmp_path))
    place = tmp_path / "train" / file_name("multi_turn_base")
    place.parent.mkdir()
    place.write_text('{"id": "multi_turn_base_0"}\n')
    with pytest.raises(
        ValueError, match="bfcl data: got .*, whose BFCL_v4_.* cannot be read: FileN"
    ):
        Bfcl(data=str(tmp_path))
    with pytest.raises(ValueError, match="bfcl split: got 'dev'; allowed: test, train, validation"):
        Bfcl(data=str(folder)).task_ids("dev")


ROW = {"id": "t", "question": [[{"role": "user", "content": "Go."}]], "initial_config": {}}
ROW |= {"involved_classes": ["MathAPI"]}
BROKEN = {"GorillaFileSystem": {"root": {"x": {"type": "directory"}}}}
TRUTH = {"id": "t", "ground_truth": [["mean(numbers=[1, 3])"]]}


def asked(content):
    return ROW | {"question": [[{"role": "user", "content": content}]]}


@pytest.mark.parametrize(
    "rows, truths, sentence",
    [
        ([ROW, ROW], [TRUTH], "ValueError: t is there twice"),
        ([ROW], [TRUTH, TRUTH], "ValueError: t is there twice"),
        ([ROW], [TRUTH | {"ground_truth": [[], []]}], "t has 1 user turns and calls for 2"),
        ([ROW], [TRUTH | {"ground_truth": []}], "t has 1 user turns and calls for 0"),
        ([ROW | {"involved_classes": ["Math"]}], [TRUTH], "t has no simulator Math; there are"),
        ([ROW], [TRUTH | {"ground_truth": [["add(a=1, b=2)", "fly()"]]}], "t has no tool 'fly'"),
        ([ROW | {"missed_function": {"0": ["fly"]}}], [TRUTH], "t has no tool 'fly'"),
        ([ROW], [], "KeyError: 't'"),
        ([ROW | {"question": []}], [TRUTH | {"ground_truth": []}], "t has no user turn"),
        (
            [ROW | {"question": ["Go."]}],
            [TRUTH],
            "t has an invalid question: got a message 'G'",
        ),
        (
            [asked(None)],
            [TRUTH],
            "t has an invalid question: got a content None; allowed: a te",
        ),
        ([asked("\ud800")], [TRUTH], "t has an invalid question: got a content"),
        (
            [ROW | {"involved_classes": ["GorillaFileSystem"], "initial_config": BROKEN}],
            [TRUTH],
            "t has an initial_config that no simulator takes: KeyError: 'contents'",
        ),
        (
            [ROW | {"initial_config": None, "involved_classes": ["TradingBot"]}],
            [TRUTH],
            "t has an ini",
        ),
    ],
)
def test_a_task_that_cannot_be_played_is_refused_before_the_run(tmp_path, rows, truths, sentence):
    name = file_name("multi_turn_base")
    for place, lines in (("", rows), ("possible_answer", truths)):
        (tmp_path / "train" / place).mkdir(exist_ok=True, parents=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "train" / place / name).write_text(text)
    with pytest.raises(ValueError, match=f"bfcl data: got .*{sentence}"):
        Bfcl(data=str(tmp_path))


def test_the_command_is_a_module(tmp_path):
    command = [sys.executable, "-m", "seeupo_jax.instruments.bfcl_worlds", "--help"]
    assert "official format" in subprocess.check_output(command, text=True)
