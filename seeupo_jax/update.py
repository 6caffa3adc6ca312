"""One sweep over stored trajectories, from a fresh optimizer state.

    python -m seeupo_jax.update --config=FILE.py [--config.FIELD=VALUE ...] --model=HF_FOLDER \\
        --trajectories=FILE.jsonl --output=HF_FOLDER [--json=OUT]

The same as the first sweep of a training run with this configuration on these trajectories: the
reference policy is the model as loaded, and a critic starts at 0. `trajectories/stored.py`
describes a line of the file; lengths of rows and actions are the file's. The output is a folder
that `transformers` loads or, with adapters that are not merged, `peft`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from seeupo_jax.checkpoint import exclusive_output
from seeupo_jax.cli.command_line import add_config_flags, log_to_stderr, prepare_xla
from seeupo_jax.configuration.flags import Flags, output_file, path
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.display.terminal import safe_output
from seeupo_jax.errors import file_sentences, sentence_errors
from seeupo_jax.planning.remat import choose_remat
from seeupo_jax.policy_io.build import check_trainable, is_small_policy, load_policy
from seeupo_jax.policy_io.policy_folder import check_output, kept_message, write_policy
from seeupo_jax.training.stagnation import idle_reason
from seeupo_jax.training.stored_update import prepare_update, update_stored
from seeupo_jax.trajectories.json_lines import write_json


def _flags() -> Flags:
    flags = Flags("update", __doc__)
    add_config_flags(flags)
    flags.flag("model", "a folder, a .gguf file, or package:NAME.", required=True)
    flags.flag("trajectories", "a file with one per line.", required=True)
    flags.flag("output", "the folder to write; new, or empty.", path, required=True)
    flags.flag("json", "also write what every step did to this file.", output_file)
    return flags


@safe_output()
def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
    log_to_stderr()

    def log(sentence: str) -> None:
        print(sentence, file=sys.stderr)

    folder = given.output
    with contextlib.ExitStack() as held:
        held.enter_context(file_sentences(kept_message(folder)))
        with sentence_errors():
            # The model is the one that is named here, whatever a training run would begin with.
            overrides = (f"model.path={given.model!r}", "warm_start.stages=()")
            config = load_config(given.config, (*given.override, *overrides))
            prepare_xla(small=is_small_policy(config))
            check_output(folder)
            held.enter_context(exclusive_output(folder))
            check_output(folder)  # which another one may just have written
            check_trainable(config)
            config, trajectories = prepare_update(config, given.trajectories, log)
            config, _ = choose_remat(config)
            policy, params = load_policy(config, config.model.path)
        params, done = update_stored(config, policy, params, trajectories)
        write_policy(config, policy, params, folder)
        print(f"wrote {folder}: {_summary(done, given.model)}")
        write_json(given.json, done)


def _summary(done: Mapping[str, Any], model: str) -> str:
    steps, metrics = len(done["steps"]), done["metrics"]
    if not steps:
        return f"no step was taken, since {idle_reason(metrics)}; the weights are those of {model}"
    trained = sum(advantage is not None for advantage in done["advantages"])
    return (
        f"{steps} steps on {trained} trajectories, loss {metrics['sweep/loss']}, kl"
        f" {metrics['sweep/kl']}"
    )


if __name__ == "__main__":
    main()
