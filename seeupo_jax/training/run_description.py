"""How a run was started, in WORKDIR/run.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.metrics.run_manifest import Launch, write_run_manifest
from seeupo_jax.policy.files.hub_snapshot import hub_revision
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.training.teacher_files import teachers_note


def write_description(
    workdir: Path,
    config: Config,
    launch: Launch,
    policy: Policy,
    params: Any,
    *,
    resumes: tuple[int, bool] | None,
) -> str | None:
    """Leaves in WORKDIR/run.json how a run was begun, and with what.

    Args:
      params: those that train. resumes: as of `write_run_manifest`.

    Returns: a sentence on what changed where the run resumes; None: nothing did, or it begins.
    """
    devices, path = policy.mesh.devices, config.model.path
    revision = hub_revision(path)
    resumption = write_run_manifest(
        workdir,
        resumes=resumes,
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
            **({} if revision is None else {"revision": revision}),
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(policy.merged(params))),
            **({"teachers": teachers_note(config)} if config.teacher.given else {}),
        },
    )
    if resumption is None:
        return None
    if resumption.changes is None:
        return f"settings of the earlier starts are not known: {workdir} had no run.json to read"
    changed = "; ".join(resumption.lines())
    return f"settings changed {resumption.place}: {changed}" if changed else None
