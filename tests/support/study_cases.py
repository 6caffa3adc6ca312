"""Studies of a file, and results of their cells that no run made."""

import textwrap

from seeupo_jax.instruments.study.cell_results import CellResult, by_key
from seeupo_jax.instruments.study.study import read_study

RATE = "optimizer.learning_rate"


def study_of(folder, text="", overrides=()):
    """The study of `study_config.py` with some lines after it, where `study` is its dict."""
    file = folder / "study.py"
    lines = "import study_config\n\ndef get_config():\n    return study_config.get_config()\n"
    lines += "\ndef get_study():\n    study = study_config.get_study()\n"
    file.write_text(lines + textwrap.indent(textwrap.dedent(text), "    ") + "\n    return study\n")
    return read_study(str(file), overrides)


def done(cell, success=(0.25, 0.5), *, after=0.5, tokens=100, cpu_s=10.0):
    """A result of so many rollouts, from a first policy of 0.25 [0.125, 0.5]."""
    metric, last = cell.metric, cell.config.iterations
    before = {metric: 0.25, f"{metric}_low": 0.125, f"{metric}_high": 0.5}
    records = [{"iteration": 0, **before}]
    for number, rate in enumerate(success, 1):
        own = {"rollout/success_rate": rate, "rollout/action_tokens": tokens, "sweep/steps": 4}
        records.append({"iteration": number, **own})
    records.append({"iteration": last, metric: after})
    return CellResult(
        cell.stage, cell.variant, cell.name, cell.key, cell.definition(), cpu_s, {}, records
    )


def finished(cells, **values):
    return by_key([done(cell, **values) for cell in cells])
