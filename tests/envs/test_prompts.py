"""The environment of prompts: rewards, retries and thoughts, beside reward functions."""

import pytest
from places import CONFIGS, ROOT
from task_files import write_rows

from seeupo_jax import envs
from seeupo_jax.configuration.loading import from_dict, load_config
from seeupo_jax.envs.tasks import list_tasks, task_labels, task_reference
from seeupo_jax.envs.validation import check_step, reset_episode
from seeupo_jax.evaluation.episode_host import check_host


def make(folder, **options):
    given = {"file": write_rows(folder, "jsonl"), "prompt": "question", "answer": "answer"}
    return envs.make("prompts", **{**given, "test_share": 0, **options})


def begun(env, number=3):
    reset_episode(env, list_tasks(env, "train")[number], 0, 0)
    return env


@pytest.mark.parametrize(
    "text, reward",
    [
        ("6", 1.0),
        (" 6\n", 1.0),
        ("<think>It is 5, no, 6.</think>\n6", 1.0),
        ("<think>6", 0.0),
        ("66", 0.0),
        ("", 0.0),
    ],
)
def test_one_answer_is_rewarded_by_the_checker_without_its_thoughts(text, reward, tmp_path):
    env = begun(make(tmp_path))
    result = check_step(env.step(text), turn=0)
    assert (result.reward, env.score(), result.done) == (reward, reward, True)
    assert result.observation == () and result.info["answer"] == "6"
    assert result.info["row"] == {"answer": "6", "subject": "sums"}
    with pytest.raises(ValueError, match="got an answer after the last one"):
        env.step("6")


def test_a_retry_begins_with_the_checkers_message_and_rewards_add_up_to_the_score(tmp_path):
    env = begun(make(tmp_path, retries=2))
    first = env.step("5")
    assert not first.done and first.reward == 0.0 and first.info["attempts"] == 1
    assert first.observation == ({"role": "user", "content": first.info["check"]},)
    second = env.step("6")
    assert (second.done, second.reward, second.observation) == (True, 1.0, ())
    begun(env)
    results = [env.step(text) for text in ("1", "2", "3")]
    assert [result.done for result in results] == [False, False, True] and env.score() == 0.0


def test_partial_scores_are_rewarded_for_what_they_change(tmp_path):
    """Half of the score is for the number, half for its form: 0.5, then 0, then 1."""
    checks = {
        "check": {"number": 0.5, "format": 0.5},
        "check_options": {"format": {"pattern": "It is [0-9]+[.]"}},
    }
    env = begun(make(tmp_path, retries=2, **checks))
    results = [env.step(text) for text in ("6", "x", "It is 6.")]
    assert [result.reward for result in results] == [0.5, -0.5, 1.0] and env.score() == 1.0
    assert [result.done for result in results] == [False, False, True]
    assert results[0].observation[0]["content"] == results[0].info["check"] != ""


def test_an_answer_within_another_column_reaches_the_checker(tmp_path):
    rows = [{"prompt": "1 + 1?", "gold": {"number": 2}}] * 2
    options = {"prompt": "prompt", "answer": "gold.number", "check": "number"}
    env = make(tmp_path, file=write_rows(tmp_path, "parquet", rows), **options)
    assert begun(env, 1).step("It is 2.").reward == 1.0


def test_a_task_has_labels_a_reference_and_a_demonstration(tmp_path):
    env = make(tmp_path, label_columns=["subject"], system="Be brief.")
    (task,) = list_tasks(env, "train")[3:4]
    assert task_labels(env, task) == {"subject": "sums"} and task_reference(env, task) == "6"
    shown = env.demonstrations("train", episodes=4)
    assert len(shown) == 4 and shown[3].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 3 + 3?"},
        {"role": "assistant", "content": "6"},
    )
    assert env.demonstrations("train", answer="subject")[0].messages[-1]["content"] == "sums"
    with pytest.raises(ValueError, match="got no nosuch; allowed: an answer to imitate"):
        env.demonstrations("train", answer="nosuch")[0]


def test_without_a_checker_rewards_come_from_functions_alone(tmp_path):
    env = begun(make(tmp_path, answer=None))
    result = env.step("6")
    assert (result.reward, result.done, env.score()) == (0.0, True, 0.0)
    assert result.info["row"]["answer"] == "6"  # for reward functions
    assert task_reference(env, list_tasks(env, "train")[0]) is None
    with pytest.raises(ValueError, match="got no column of answers to imitate"):
        env.demonstrations("train")


@pytest.mark.parametrize(
    "options, says",
    [
        ({"retries": -1}, "retries: got -1; allowed: a whole number >= 0"),
        ({"retries": 1, "answer": None}, "retries: got 1 without a checker"),
        ({"check": "nosuch"}, "got 'nosuch'; allowed: .*exact"),
        ({"check": "exact", "check_options": {"x": 1}}, "check_options: exact refused .*'x'"),
        ({"check": "number", "answer": "subject"}, "line 1: answer: got 'sums' in the column"),
        ({"empty": "keep"}, "empty: got 'keep'; allowed: error, skip"),
        ({"test_share": 1}, "test_share: got 1; allowed: a number from 0 to below 1"),
        ({"system": ""}, "system: got ''; allowed: a text, or none"),
        ({"template": "x"}, "got 'x' without {question}; allowed: a text with the column"),
        ({"file": 3}, "file: got 3; allowed: a file .jsonl"),
        ({"file": {"train": 3}}, r"file\['train'\]: got 3; allowed"),
        ({"file_options": {"x": 1}}, "file_options: got {'x': 1}; allowed: none"),
        ({"colour": 1}, "refused .*'colour'"),
    ],
)
def test_a_wrong_option_is_told_in_one_sentence(options, says, tmp_path):
    with pytest.raises(ValueError, match=says) as error:
        make(tmp_path, **options).task_ids("train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("turns, allowed", [(1, False), (2, False), (3, True)])
def test_a_run_has_the_turns_that_retries_take(turns, allowed):
    env = {"name": "prompts", "options": {"file": "x.jsonl", "retries": 2}}
    config = from_dict({"env": env, "rollout": {"max_turns": turns}})
    if allowed:
        return check_host(config)
    says = f"config.rollout.max_turns: got {turns} with env.options.retries=2; allowed: at least 3"
    with pytest.raises(ValueError, match=says):
        check_host(config)


def test_environments_of_a_run_share_the_rows_of_a_file(tmp_path):
    file = write_rows(tmp_path, "jsonl")
    first, second = (envs.make("prompts", file=file, prompt="question") for _ in range(2))
    assert first.task_ids("train") is second.task_ids("train")


def test_generated_sums_are_right_and_no_test_is_trained_on():
    options = {"file": "seeupo_jax.tasks.arithmetic:additions", "prompt": "question"}
    sizes = {"tasks": 300, "validation_tasks": 50, "test_tasks": 100, "digits": [2, 1], "seed": 1}
    env = envs.make("prompts", answer="answer", file_options=sizes, **options)
    asked = {}
    for split, count in (("train", 300), ("validation", 50), ("test", 100)):
        shown = [each.messages for each in env.demonstrations(split)]
        asked[split] = {messages[0]["content"] for messages in shown}
        assert len(asked[split]) == count
        for question, answer in shown:
            a, b = question["content"].removesuffix(" =").split(" + ")
            assert int(a) + int(b) == int(answer["content"]) and len(a) <= 2 and len(b) == 1
    assert len(set.union(*asked.values())) == 450
    with pytest.raises(
        ValueError, match="got 90 tasks and 20 test_tasks; allowed with .*: at most 100"
    ):
        sizes = {"tasks": 90, "test_tasks": 20, "digits": [1, 1]}
        envs.make("prompts", file_options=sizes, **options)


def test_the_config_for_gsm8ks_form_plays_its_example_file(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(CONFIGS / "gsm8k.py")
    env = envs.make("prompts", **config.env.options)
    assert [len(list_tasks(env, split)) for split in ("train", "test")] == [36, 4]
    task = next(task for task in env.task_ids("train") if task.startswith("train/1-"))
    messages, _ = reset_episode(env, task, 0, 0)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert "pays with 27 dollars" in messages[1]["content"]
    first = env.step("27 - 20 = 8\n#### 8")
    assert first.reward == 0.0 and not first.done and len(first.observation) == 1
    last = env.step("It is 27 - 20.\n#### 7")
    assert (last.reward, last.done, env.score()) == (1.0, True, 1.0)
