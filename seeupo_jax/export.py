"""Exports the policy of a checkpoint as a folder that other software loads.

    python -m seeupo_jax.export --config=FILE.py [--config.FIELD=VALUE ...] --workdir=DIR \\
        [--step=latest|best|N] --output=FOLDER

Only the parameters of the checkpoint are read, onto the available devices. The folder is one that
`transformers` loads or, with adapters that are not merged, `peft`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax

from seeupo_jax.configuration.flags import Flags, path
from seeupo_jax.errors import sentence_errors
from seeupo_jax.parallel.cluster import errors_end_at_once
from seeupo_jax.runtime.cli import (
    add_cluster_flags,
    add_run_flags,
    cluster_flags,
    join_cluster,
    log_to_stderr,
    read_config,
)
from seeupo_jax.runtime.policy_folder import export_policy


def _flags() -> Flags:
    flags = Flags("export", __doc__)
    add_run_flags(flags)
    add_cluster_flags(flags)
    flags.flag("step", "which checkpoint: latest, best, or its number.", default="latest")
    flags.flag("output", "the folder to write; a new one, or empty.", path, required=True)
    return flags


def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
    log_to_stderr()
    with errors_end_at_once(), sentence_errors():
        config = read_config(given)
        join_cluster(config, **cluster_flags(given))
        step = export_policy(config, given.workdir, given.step, given.output)
        if jax.process_index() == 0:
            print(f"wrote {given.output}: the policy after iteration {step}")


if __name__ == "__main__":
    main()
