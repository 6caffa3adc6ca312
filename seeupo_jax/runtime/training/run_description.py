"""How a run was started, in WORKDIR/run.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.metrics.run_manifest import Launch, write_run_manifest
from seeupo_jax.runtime.build import Policy


def write_description(
    workdir: Path, config: Config, launch: Launch, policy: Policy, params: Any, *, resumed: bool
) -> None:
    """Leaves in WORKDIR/run.json how a run was begun, and with what.

    Args:
      params: those that train. resumed: whether the run resumes from a checkpoint.
    """
    devices, path = policy.mesh.devices, config.model.path
    write_run_manifest(
        workdir,
        resumed=resumed,
        launch=launch,
        config=to_dict(config),
        devices={
            "platform": devices.flat[0].platform,
            "kind": devices.flat[0].device_kind,
            "count": devices.size,
            "processes": jax.process_count(),
        },
        model={
            "name": "randomly initialised" if path is None else path,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(policy.merged(params))),
        },
    )
