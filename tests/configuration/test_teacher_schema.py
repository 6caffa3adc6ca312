"""Options of teachers that nothing reads, or that do not go together, are refused in a sentence."""

import re

import pytest

from seeupo_jax.configuration.loading import from_dict

PATH = {"path": "models/teacher"}
URL = "http://127.0.0.1:8000/v1"


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"teacher": {"coef": 0.5}}, "teacher.coef: got 0.5 without a teacher, so that nothing"),
        ({"teacher": {"dtype": "float32"}}, "teacher.dtype: got 'float32' without a teacher"),
        (
            {"teacher": PATH | {"server": URL}},
            f"teacher.server: got {URL} with path=models/teacher",
        ),
        (
            {"teacher": {"server": "localhost:8000"}},
            "teacher.server: got 'localhost:8000'; allowed",
        ),
        (
            {"teacher": {"by_task": {"desk": "m"}}},
            "teacher.by_task: got {'desk': 'm'}; allowed: a d",
        ),
        ({"teacher": {"path": "policy"}}, "teacher.hint: got none with the policy as its teacher"),
        (
            {"teacher": {"by_task": {"env=a": URL}}, "rollout": {"temperature": 0.7}},
            "rollout.temperature: got 0.7 with a server as teacher; allowed: 1",
        ),
        ({"teacher": {"top_k": 8}}, "teacher.top_k: got 8 without a teacher, so that nothing"),
        ({"teacher": PATH | {"top_k": 0}}, "teacher.top_k: got 0; allowed: "),
        (
            {"teacher": {"path": "m", "by_task": {"env=a": URL}, "top_k": 8}},
            "teacher.top_k: got 8 with a server as teacher; allowed: none",
        ),
        (
            {"teacher": PATH | {"top_k": 8, "discount": 0.5}},
            "teacher.discount: got 0.5 with top_k=8; allowed: 0",
        ),
        (
            {"teacher": PATH, "algorithm": {"dynamic_sampling": 2, "scale": "none"}},
            "algorithm.dynamic_sampling: got 2 with config.teacher; allowed: 0",
        ),
        (
            {"teacher": PATH, "algorithm": {"reference": {"every": 2}, "kl_coef": 0.0}},
            "algorithm.reference.every: got 2 with kl_coef=0; allowed: none",
        ),
    ],
)
def test_what_is_not_read_is_refused(given, sentence):
    with pytest.raises(ValueError, match=f"^config.{re.escape(sentence)}"):
        from_dict(given)


def test_each_label_has_a_teacher_and_the_path_or_the_server_is_that_of_all_others():
    given = {"by_task": {"env=a": "models/a", "env=b": URL}, "path": "reference"}
    teacher = from_dict({"teacher": given}).teacher
    assert teacher.places == {"env=a": "models/a", "env=b": URL, None: "reference"}
    assert teacher.models == {"models/a"} and teacher.reads_reference
    assert from_dict({"teacher": {"server": URL}}).teacher.places == {None: URL}
    assert not from_dict({}).teacher.given


def test_a_reference_policy_that_teaches_may_move_without_a_penalty():
    moving = {"reference": {"every": 2}, "kl_coef": 0.0}
    assert from_dict({"teacher": {"path": "reference"}, "algorithm": moving}).algorithm.reference
