"""The command `compare --study`."""

from __future__ import annotations

import argparse
import os
import sys

from seeupo_jax.checkpoint import check_may_write
from seeupo_jax.cli.command_line import check_places
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.errors import sentence_errors
from seeupo_jax.instruments.study.cell_results import by_key, changed_cells, read_results
from seeupo_jax.instruments.study.study import STAGES, read_study
from seeupo_jax.instruments.study.study_page import explain_study, write_page
from seeupo_jax.instruments.study.study_runs import THREADS, Places, choose, train_study
from seeupo_jax.parallel.stop_signal import Stopped


def run(given: argparse.Namespace) -> None:
    """Trains a study, or as much as there is time for, and writes its page."""
    with sentence_errors():
        study = read_study(given.config, given.override)
        default = given.workdir / "results"
        places = Places(given.workdir, default if given.results is None else given.results)
        results = read_results(places.results)
        if given.explain:
            return print(explain_study(study, by_key(results)))
        check_may_write(places.results, "--results")
        check_places(load_config(study.config_file, given.override), given.workdir)
        cells = [cell for s in STAGES for cell in study.cells(s, choose(study, by_key(results)))]
        for sentence in changed_cells(cells, results):
            print(sentence)
    os.environ.update(THREADS)
    failed = 0
    with sentence_errors():
        try:
            minutes = given.limit_minutes
            failed = 0 if given.draw_only else train_study(study, places, minutes=minutes)
        except Stopped as stopped:
            print(stopped)
        page = write_page(study, by_key(read_results(places.results)), places.results)
    print(f"wrote {page}")
    if failed:
        sys.exit(f"error: {failed} runs failed; rerun the command to retry them.")
