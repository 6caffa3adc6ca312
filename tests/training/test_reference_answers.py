"""Reference answers as tokens, and runs that lack them."""

import dataclasses

import pytest

from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.order_desk.demonstrator import demonstrate
from seeupo_jax.envs.order_desk.environment import OrderDesk
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.training.reference_answers import ReferenceAnswers, check_references

TOKENIZER = read_tokenizer("package:order_desk")


class Answers:
    """Tasks whose names are their answers; an empty one has none."""

    def __init__(self):
        self.asked = []

    def task_ids(self, split):
        return ["fine", "", "mug-34 is cancelled"]

    def reference(self, task_id):
        self.asked.append(task_id)
        if task_id == "broken":
            raise RuntimeError("no such file")
        return task_id or None


def own_text(answer):
    return TOKENIZER.text(answer.tokens_L[answer.scored_L].tolist())


@pytest.mark.parametrize("template", ["{answer}", "The end: {answer}.", "{answer} it is, or é{"])
def test_the_answers_own_tokens_are_scored_and_what_follows_them_is_left_out(template):
    answers, said = ReferenceAnswers(Answers(), TOKENIZER, template, lambda s: None), []
    for text in ("mug-34 is cancelled", "refused", "é ü"):
        (found,) = answers.of([text, text]).values()
        whole = TOKENIZER.action(template.replace("{answer}", text))
        assert found.tokens_L.tolist() == whole[: found.tokens_L.size] and found.scored_L[-1]
        assert text in own_text(found) and len(own_text(found)) <= len(text) + 2
        before = TOKENIZER.text(found.tokens_L[~found.scored_L].tolist())
        assert template.partition("{answer}")[0].startswith(before)
        said.append(found.scored_L.all())
    assert all(said) == template.startswith("{answer}")


def test_a_task_is_asked_once_and_one_without_an_answer_is_told_of():
    tasks, logged = Answers(), []
    answers = ReferenceAnswers(tasks, TOKENIZER, "{answer}", logged.append)
    for _ in range(2):
        assert answers.of(["fine", "", "broken", "fine"]).keys() == {"fine"}
    assert tasks.asked == ["fine", "", "broken"]
    assert logged == [
        "task '' has no reference answer: its turns have no gain.",
        "task 'broken' has no gains: Answers.reference('broken') raised RuntimeError: no such"
        " file.",
    ]


def test_the_desks_answer_is_the_oracles_last_message():
    desk = OrderDesk()
    for index in range(12):
        demonstration, score = demonstrate(f"train/{index}")
        last = [m["content"] for m in demonstration.messages if m["role"] == "assistant"][-1]
        assert desk.reference(f"train/{index}") == last and score == 1


def test_a_run_without_answers_is_refused_unless_rewards_of_turns_are_meant():
    config = Config(recipe="a2tgpo")
    check_references(config, OrderDesk())
    with pytest.raises(ValueError) as error:
        check_references(config, Answers())
    assert str(error.value) == (
        "config.algorithm.estimator.gain: got reference with advantage=a2tgpo, but task '' has no"
        " reference answer; allowed: turn_reward, where the environment rewards turns, or tasks"
        " with reference(task_id)."
    )
    rewarded = dataclasses.replace(config.algorithm, estimator={"gain": "turn_reward"})
    check_references(dataclasses.replace(config, algorithm=rewarded), Answers())
    check_references(Config(), Answers())
    estimators = [Config(recipe=name).algorithm.estimator for name in ("seeupo", "gigpo")]
    assert not any(estimator.scores_answers for estimator in estimators)
