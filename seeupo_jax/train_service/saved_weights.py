"""Saved adapters of runs, as folders: `tinker://RUN/weights/NAME` and `tinker://RUN/sampler_weights/NAME`.

A folder is one of adapters in PEFT's format, with `training_run.json`: the base model and the
options of the run. That of `weights` also has the optimizer's state, `optimizer.npz`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from seeupo_jax.policy.files.folder_files import read_json_object
from seeupo_jax.policy.lora import load_adapters, read_lora, save_adapters
from seeupo_jax.policy.network import split_model, split_trainable
from seeupo_jax.policy_io.policy_folder import replace_folder
from seeupo_jax.train_service.adapter_run import AdapterRun, BasePolicy
from seeupo_jax.train_service.refusals import RequestRefused

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}  # and how Tinker's API calls them
ABOUT, OPTIMIZER = "training_run.json", "optimizer.npz"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}"
_RUN = r"[A-Za-z0-9_-]+:train:[0-9]+"


class Saved(NamedTuple):
    """A saved folder. about: what its run is."""

    path: str
    folder: Path
    kind: str
    about: Mapping[str, Any]


class SavedWeights:
    """The folders under one folder, which outlive the server.

    Args:
      base_folder: that the base model was loaded from, as PEFT's files name it.
    """

    def __init__(self, root: Path, base: BasePolicy, base_folder: Path):
        self._root, self._base, self._base_folder = root, base, base_folder

    def check_name(self, run: str, kind: str, name: str, *, overwrite: bool = False) -> Path:
        """The folder of a name that may be written.

        Raises:
          RequestRefused: no name, or one that is there.
        """
        if re.fullmatch(_NAME, name) is None or _is_remnant(name):
            raise RequestRefused(
                f"path: got {name[:80]!r}; allowed: up to 200 letters, digits and _ . -, of which"
                " neither . nor - is the first."
            )
        folder = self._folder(run, kind, name)
        if folder.exists() and not overwrite:
            raise RequestRefused(
                f"path: got {name!r}, which this run has; allowed: another name.", 409
            )
        return folder

    def save(
        self, run: AdapterRun, run_id: str, kind: str, name: str, about: Any, *, overwrite: bool
    ) -> str:
        """Writes a run's adapters, complete or not at all; their path."""
        folder = self.check_name(run_id, kind, name, overwrite=overwrite)
        model = run.network.bind(run.policy.merged(run.state.params))

        def write(unfinished: Path) -> None:
            save_adapters(model, unfinished, self._base_folder, run.policy.tokenizer)
            stored = {**about, "time": time.time()}
            (unfinished / ABOUT).write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
            if kind == "weights":
                np.savez(unfinished / OPTIMIZER, **dict(_named_leaves(run.state.opt_state)))

        folder.parent.mkdir(parents=True, exist_ok=True)
        replace_folder(folder, write)
        return f"{SCHEME}{run_id}/{kind}/{name}"

    def find(self, path: str) -> Saved:
        """The folder of a path.

        Raises:
          RequestRefused: there is none.
        """
        match = re.fullmatch(f"{SCHEME}({_RUN})/({'|'.join(KINDS)})/({_NAME})", path)
        folder = None if match is None else self._folder(*match.groups())
        if match is None or folder is None or not (folder / ABOUT).is_file():
            raise RequestRefused(
                f"path: got {path[:200]!r}; allowed: {SCHEME}RUN/weights/NAME or"
                f" {SCHEME}RUN/sampler_weights/NAME, of weights that were saved here.",
                404,
            )
        return Saved(path, folder, match[2], read_json_object(folder / ABOUT))

    def load(self, saved: Saved, *, optimizer: bool) -> AdapterRun:
        """A run that begins with saved adapters.

        Args:
          optimizer: whether also with its optimizer's state.

        Raises:
          RequestRefused: no such state was saved.
        """
        base, lora = self._base, read_lora(saved.folder)
        model = load_adapters(base.network.bind(base.params), saved.folder, mesh=base.policy.mesh)
        network, params = split_model(model)
        adapters, _ = split_trainable(network, params)
        run = AdapterRun(base, lora, adapters=adapters)
        if not optimizer:
            return run
        if saved.kind != "weights":
            raise RequestRefused(
                f"path: got {saved.path!r} with the optimizer's state; allowed: {SCHEME}RUN/"
                "weights/NAME, since weights for sampling have none."
            )
        tree = jax.tree.structure(run.state.opt_state)
        with np.load(saved.folder / OPTIMIZER) as stored:
            arrays = [
                jax.device_put(stored[name], leaf.sharding)
                for name, leaf in _named_leaves(run.state.opt_state)
            ]
        run.load(adapters, jax.tree.unflatten(tree, arrays))
        return run

    def list(self, run_id: str | None = None) -> list[Saved]:
        """All that is saved, the oldest first.

        Args:
          run_id: of this run; None: of all.
        """
        pattern = "*" if run_id is None else _folder_name(run_id)
        found = []
        for file in self._root.glob(f"{pattern}/*/*/{ABOUT}"):
            run, kind, name = file.parts[-4:-1]
            if kind in KINDS and re.fullmatch(_NAME, name) and not _is_remnant(name):
                about = read_json_object(file)
                path = f"{SCHEME}{run.replace('.', ':')}/{kind}/{name}"
                found.append(Saved(path, file.parent, kind, about))
        return sorted(found, key=lambda each: each.about["time"])

    def _folder(self, run_id: str, kind: str, name: str) -> Path:
        return self._root / _folder_name(run_id) / kind / name


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The arrays of a tree with the names that they are stored under."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def _folder_name(run_id: str) -> str:
    """A run's name without colons, which some file systems do not have."""
    return run_id.replace(":", ".")


def _is_remnant(name: str) -> bool:
    """Whether `replace_folder` left a folder when it was killed."""
    return name.endswith((".unfinished", ".before"))
