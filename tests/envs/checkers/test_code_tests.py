"""The forms of tests that data sets have."""

import json

import pytest

from seeupo_jax.envs.checkers.code_tests import PipeTest, StatementTest, ValueTest, read_tests

HUMANEVAL_2 = '''

METADATA = {
    'author': 'jt',
    'dataset': 'test'
}


def check(candidate):
    """Of HumanEval/2."""
    assert candidate(3.5) == 0.5
    assert abs(candidate(1.33) - 0.33) < 1e-6
'''
HUMANEVAL_LOOP = """
def check(candidate):
    for i in range(3):
        assert candidate(i) == i
"""


def test_asserts_of_mbpp_are_compared_outside_where_they_end_in_a_literal():
    tests = read_tests(
        [
            "assert set(similar_elements((3, 4), (4, 10))) == set((4,))",
            "assert max_chain_length([(5, 24)], 4) == 3, 'wrong'",
            "assert is_not_prime(2) == False",
            "assert not is_prime(4)",
        ],
        None,
    )
    assert tests.calls == (
        StatementTest("assert set(similar_elements((3, 4), (4, 10))) == set((4,))"),
        ValueTest("max_chain_length([(5, 24)], 4)", (3,)),
        ValueTest("is_not_prime(2)", (False,)),
        StatementTest("assert not is_prime(4)"),
    )


def test_the_check_of_humaneval_is_split_where_it_has_only_asserts():
    tests = read_tests(HUMANEVAL_2, "truncate_number")
    assert tests.calls == (
        ValueTest("candidate(3.5)", (0.5,)),
        StatementTest("assert abs(candidate(1.33) - 0.33) < 1e-06"),
    )
    assert tests.after.endswith("candidate = truncate_number")
    loop = read_tests(HUMANEVAL_LOOP, "f")
    assert loop.calls == (StatementTest("check(f)"),) and loop.after == HUMANEVAL_LOOP


def test_pairs_of_apps_and_livecodebench_are_inputs_and_outputs():
    apps = {"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", "5"]}
    wanted = (PipeTest("1\n", "2\n"), PipeTest("2\n3", "5"))
    assert read_tests(apps, None).pipes == read_tests(json.dumps(apps), None).pipes == wanted
    pairs = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
    assert read_tests(json.dumps(pairs), None).pipes == (PipeTest("1\n", "2\n"),)


def test_calls_of_apps_and_livecodebench_name_their_function():
    apps = read_tests({"fn_name": "add", "inputs": [[1, "a"]], "outputs": [[3]]}, None)
    assert apps.calls == (ValueTest("add(1, 'a')", ([3], 3), lists=True),)
    pair = {"input": '[1, 2]\n"a"', "output": "[3]", "testtype": "functional"}
    livecodebench = read_tests([pair], "add")
    assert livecodebench.calls == (ValueTest("add([1, 2], 'a')", ([3],), lists=True),)
    assert "add = Solution().add" in livecodebench.after


@pytest.mark.parametrize(
    "value, entry_point, reason",
    [
        (
            {"fn_name": "f;g", "inputs": [[1]], "outputs": [1]},
            None,
            "name of the function is 'f;g'",
        ),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, None, "no list of arguments"),
        ([{"input": "1"}], None, "lacks an input or output"),
        (
            [{"input": "1", "output": "1", "testtype": "functional"}],
            None,
            "with the option entry_p",
        ),
        ([{"input": "x", "output": "1", "testtype": "functional"}], "f", "no JSON"),
        (HUMANEVAL_2, None, "needs the option entry_point"),
        (["assert f("], None, "no Python"),
        ("x = 1", None, "no assert"),
        (3, None, "no list of tests"),
    ],
)
def test_other_forms_are_refused_with_the_reason(value, entry_point, reason):
    with pytest.raises(ValueError, match=reason):
        read_tests(value, entry_point)
