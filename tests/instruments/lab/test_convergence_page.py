"""Every command of docs/convergence.md is one that the laboratory accepts."""

import re
import shlex

import pytest
from places import ROOT

from seeupo_jax.configuration.fields import build, parse
from seeupo_jax.instruments.lab.gradient_bias import BiasSettings, check_bias
from seeupo_jax.instruments.lab.laboratory import LabSettings
from seeupo_jax.instruments.lab.problems import PROBLEMS
from seeupo_jax.options import names_of

PAGE = (ROOT / "docs" / "convergence.md").read_text()
LINES = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("python -m seeupo_jax.lab")
]


@pytest.mark.parametrize("line", LINES)
def test_a_command_names_problems_recipes_and_settings_that_there_are(line):
    words = [word.removeprefix("--") for word in shlex.split(line, comments=True)[3:]]
    flags = dict(word.partition("=")[::2] for word in words)
    recipes = flags.pop("recipes", "seeupo").split(",")
    problems = flags.pop("problem", "long").split(",")
    assert set(problems) <= set(PROBLEMS)
    files = {name: flags.pop(name, "") for name in ("problem_file", "json", "plot")}
    assert not files["problem_file"] or f"savez('{files['problem_file']}'" in PAGE
    lags = [int(lag) for lag in flags.pop("bias", "0").split(",")]
    values = {name: True if name == "exact" else parse(text, name) for name, text in flags.items()}
    weights = {name: values.pop(name) for name in names_of(BiasSettings) if name in values}
    settings, weights = build(LabSettings, values, "lab"), build(BiasSettings, weights, "lab")
    for recipe in recipes:
        settings.algorithm(recipe)
        if lags != [0]:
            for problem in problems:
                check_bias(PROBLEMS[problem](), recipe, settings, lags, weights)


def test_the_page_shows_what_its_commands_draw():
    images = re.findall(r"!\[.*?\]\((.*?)\)", PAGE)
    assert len(images) == 4
    for image in images:
        assert f"--plot=docs/{image}" in PAGE
        assert (ROOT / "docs" / image).stat().st_size < 150_000
