"""The table of checkers: names, options, columns, and several checks of one answer."""

import pytest

from seeupo_jax.envs.checkers import CHECKERS, CheckResult, make_checker

# What each checker needs beside a column.
NEEDED = {"json": {"schema": {}}, "format": {"pattern": "a"}, "length": {"max": 1}}
SURROGATE = "\ud800"


@pytest.mark.parametrize("name", CHECKERS)
def test_every_checker_refuses_an_unknown_option_in_a_sentence(name):
    with pytest.raises(ValueError, match=f"check_options: {name} refused .*'no_such'.* allowed: "):
        make_checker(name, {**NEEDED.get(name, {}), "no_such": 1}, "a")


@pytest.mark.parametrize("name", ["exact", "choice", "number", "math", "code", "json"])
def test_a_checker_that_compares_needs_a_column(name):
    with pytest.raises(ValueError, match=f"check: got '{name}' without "):
        make_checker(name, {}, None)


def test_an_unknown_checker_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"check: got 'nubmer'; allowed: exact, choice, number, "):
        make_checker("nubmer", {}, "a")


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("exact", {"ignore_case": 1}, "ignore_case: got 1; allowed: true or false."),
        ("choice", {"letters": "A"}, "letters: got 'A'; allowed: two or more different "),
        ("choice", {"letters": "A]^"}, "letters: got 'A]^'; allowed: two or more different "),
        ("number", {"tolerance": -1}, "tolerance: got -1; allowed: a number >= 0."),
        ("number", {"relative_tolerance": float("nan")}, "relative_tolerance: got nan; allowed: "),
        ("math", {"timeout_s": 0}, "timeout_s: got 0; allowed: a number > 0."),
        ("code", {"score": "half"}, "score: got 'half'; allowed: all, share."),
        ("code", {"memory_mib": 1}, "memory_mib: got 1; allowed: an integer >= 128."),
        ("code", {"entry_point": 3}, "entry_point: got 3; allowed: a column, or none."),
        ("json", {"schema": {"type": "objekt"}}, "schema: got {'type': 'objekt'} ('objekt' is not"),
        ("json", {"schema": []}, "schema: got [] ("),
        (
            "json",
            {"schema": {"$ref": "http://a/b"}},
            "schema: got {'$ref': 'http://a/b'} (its $ref",
        ),
        ("format", {"pattern": "("}, "pattern: got '(', which cannot be read (missing ) at"),
        ("length", {"max": 2, "min": 3}, "max: got 2; allowed: an integer >= 1 and >= min (3), or"),
        ("length", {"max": 2, "unit": "tokens"}, "unit: got 'tokens'; allowed: words, characters."),
    ],
)
def test_an_impossible_option_is_refused_in_a_sentence(name, options, sentence):
    with pytest.raises(ValueError) as refused:
        make_checker(name, options, "a")
    assert str(refused.value).startswith(f"check_options.{sentence}")


def test_a_length_without_bounds_is_refused():
    with pytest.raises(ValueError, match="length got neither min nor max"):
        make_checker("length", {}, None)


@pytest.mark.parametrize(
    "name, options, value",
    [
        ("exact", {}, None),
        ("exact", {}, []),
        ("exact", {}, {"a": 1}),
        ("choice", {}, "E"),
        ("choice", {}, 4),
        ("choice", {}, -1),
        ("number", {}, "none"),
        ("number", {}, float("nan")),
        ("number", {}, True),
        ("math", {}, " "),
        ("math", {}, []),
        ("code", {}, "f = 1"),
        ("code", {}, []),
        ("code", {}, ["assert f("]),
        ("code", {}, {"inputs": ["1"], "outputs": []}),
        ("code", {}, "def check(candidate):\n    assert candidate(1)"),
        ("json", {}, "{"),
        ("json", {}, {"type": 3}),
    ],
)
def test_a_value_of_a_row_that_cannot_be_read_is_refused_before_the_run(name, options, value):
    checker = make_checker(name, options, "gold")
    with pytest.raises(ValueError, match="^answer: got .*'gold'.*\\.$"):
        checker.check_row({"question": "?", "gold": value})
    with pytest.raises(ValueError, match="^answer: "):
        checker.check("```\nx = 1\n```", {"question": "?", "gold": value})


def test_a_row_without_the_column_is_refused_with_its_columns():
    with pytest.raises(ValueError, match="without 'gold'; its columns: question, answer"):
        make_checker("number", {}, "gold").check("1", {"question": "?", "answer": 1})


WEIGHTS = {"number": 0.9, "format": 0.1}
PATTERN = {"format": {"pattern": "<think>.*</think>#### .*"}}


@pytest.mark.parametrize(
    "text, score",
    [
        ("<think>4?</think>#### 5", 1.0),
        ("#### 5", 0.9),
        ("<think>5</think>#### 4", 0.1),
        ("<think>5", 0.0),
    ],
)
def test_the_score_of_several_checks_is_their_weighted_sum(text, score):
    checker = make_checker(WEIGHTS, PATTERN, "a")
    assert checker.reads_thoughts
    result = checker.check(text, {"a": 5})
    assert result.score == pytest.approx(score, abs=1e-12)
    assert (result.message == "") == (score == 1)


@pytest.mark.parametrize(
    "weights",
    [{}, {"number": 0.5}, {"number": 1.5, "exact": -0.5}, {"number": True}, {"number": "1"}],
)
def test_weights_that_do_not_add_up_to_one_are_refused(weights):
    with pytest.raises(ValueError, match="allowed: a name, or names with weights above 0 that add"):
        make_checker(weights, {}, "a")


def test_options_of_several_checks_are_by_name():
    with pytest.raises(ValueError, match="check_options: got 'tolerance'; allowed with several"):
        make_checker({"number": 1.0}, {"tolerance": 0.1}, "a")
    near = make_checker({"number": 1.0}, {"number": {"tolerance": 0.3}}, "a")
    assert near.check("1.3", {"a": 1}) == CheckResult(1.0, "")
    assert near.check("1.31", {"a": 1}) == CheckResult(0.0, "Your answer 1.31 is wrong.")


HOSTILE = ("", "\0", SURROGATE, "9" * 10**6, "[" * 10**5, "{" * 10**5, "\\boxed{" * 10**5)
ROWS = {
    "exact": "x",
    "choice": "B",
    "number": "7",
    "code": ["assert f(1) == 2"],
    "json": '{"type": "object"}',
}


@pytest.mark.parametrize("name", [name for name in CHECKERS if name != "math"])
def test_hostile_text_scores_and_neither_raises_nor_hangs(name):
    checker = make_checker(name, NEEDED.get(name, {}) if name != "json" else {}, "a")
    answers = [*HOSTILE, "-" * 10**5, "answer is " * 10**5, "1/" * 10**5, "1,234" * 10**5]
    if name == "code":
        answers = [*answers, "```\n" * 10**5]
    for text in answers:
        result = checker.check(text, {"a": ROWS.get(name)})
        assert 0 <= result.score < 1 or name == "length"
        assert len(result.message) < 500
        result.message.encode()


def test_no_message_has_the_expected_answer():
    secret = "73519"
    calls = [f"assert f(1) == {secret}", f"assert f(2) in [{secret}], {secret}"]
    program = "```\ndef f(x):\n    assert x == 2\n```"
    cases = (("exact", secret, "4"), ("number", secret, "4"), ("code", calls, program))
    for name, value, text in cases:
        result = make_checker(name, {}, "a").check(text, {"a": value})
        assert result.score == 0 and result.message
        assert secret not in result.message
