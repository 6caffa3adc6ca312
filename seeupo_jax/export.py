"""Exports the policy of a checkpoint as a folder that other software loads.

    python -m seeupo_jax.export --config=FILE.py [--config.FIELD=VALUE ...] --workdir=DIR \\
        [--step=latest|best|N] [--weights=ema|trained] --output=FOLDER
        [--push_to_hub=USER/NAME [--private]]

Only the parameters of the checkpoint are read, onto the available devices. The folder is one that
`transformers` loads or, with adapters that are not merged, `peft`. --push_to_hub also uploads it,
with a model card that has the run's figures, with the token in HF_TOKEN or of `hf auth login`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax

from seeupo_jax.cli.command_line import (
    add_cluster_flags,
    add_run_flags,
    cluster_flags,
    fail_all_processes,
    join_cluster,
    log_to_stderr,
    read_config,
)
from seeupo_jax.configuration.flags import Flags, path
from seeupo_jax.display.terminal import safe_output
from seeupo_jax.durable_files import write_atomically
from seeupo_jax.errors import file_sentences, sentence_errors
from seeupo_jax.parallel.cluster import exit_on_error
from seeupo_jax.policy_io.hub import CARD, hub_client, model_card, push
from seeupo_jax.policy_io.policy_folder import (
    STEP,
    WEIGHTS,
    export_policy,
    kept_message,
    saved_weights,
)


def _flags() -> Flags:
    flags = Flags("export", __doc__)
    add_run_flags(flags)
    add_cluster_flags(flags)
    flags.flag("step", STEP)
    flags.flag("weights", WEIGHTS)
    flags.flag("output", "the folder to write; a new one, or empty.", path, required=True)
    flags.flag("push_to_hub", "also upload it to this repository of the Hugging Face Hub.")
    flags.switch("private", "make that repository a private one, if it is not there yet.")
    return flags


@safe_output()
def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
    log_to_stderr()
    kept = kept_message(given.output)
    with exit_on_error(), file_sentences(kept), sentence_errors():
        config = fail_all_processes(given, lambda: read_config(given))
        repo = given.push_to_hub
        if given.private and repo is None:
            raise ValueError("--private: got True; allowed: with --push_to_hub=USER/NAME.")
        join_cluster(config, **cluster_flags(given))
        writes = jax.process_index() == 0
        client = hub_client(repo) if repo is not None and writes else None
        step = export_policy(config, given.workdir, given.step, given.output, given.weights)
        if writes:
            print(f"wrote {given.output}: the policy after iteration {step}")
        if client is not None:
            part = saved_weights(config, given.weights)
            card = model_card(config, given.workdir, step, part, repo)
            write_atomically(given.output / CARD, card.encode())
            print(f"pushed to {push(client, given.output, repo, private=given.private)}")


if __name__ == "__main__":
    main()
