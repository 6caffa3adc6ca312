"""A policy's folder on the Hugging Face Hub, with a model card that has the run's figures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from seeupo_jax.configuration.schema import Config
from seeupo_jax.configuration.user_code import describe
from seeupo_jax.errors import WriteError
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.metrics.run_manifest import read_run_manifest
from seeupo_jax.metrics.statistics import markdown_table

CARD = "README.md"
_VERSIONS = ("python", "seeupo_jax", "jax")  # of run.json, in the card


def hub_client(repo: str) -> HfApi:
    """A client of the hub that may write, of HF_ENDPOINT and with the user's token.

    Raises:
      ValueError: a name that no repository can have, no token, or one that the hub refuses.
      WriteError: the hub cannot be reached.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise ValueError(f"--push_to_hub: got {repo!r}; allowed: a name as USER/NAME.") from None
    if get_token() is None:
        raise ValueError(
            "--push_to_hub: got no token; allowed: one that may write, in HF_TOKEN or left by"
            " `hf auth login`."
        )
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="seeupo_jax")
    try:
        api.whoami()
    except HTTPError as error:
        raise _as_sentence(error, f"{api.endpoint} did not take the token") from error
    return api


def push(api: HfApi, folder: Path, repo: str, *, private: bool) -> str:
    """Uploads a folder as a repository of models, which is made if there is none; its address.

    Raises:
      ValueError: the token may not write there. WriteError: any other failure.
    """
    try:
        made = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id, folder_path=folder, commit_message="A policy of seeupo_jax"
        )
    except (HTTPError, OSError, RuntimeError) as error:  # the last two from large files' transport
        failure = f"{repo} could not be written at {api.endpoint}; {folder} is complete"
        raise _as_sentence(error, failure) from error
    return str(made)


def _as_sentence(error: Exception, failure: str) -> Exception:
    response = error.response if isinstance(error, HfHubHTTPError) else None
    refused = response is not None and response.status_code in (401, 403)
    kind = ValueError if refused else WriteError
    return kind(f"--push_to_hub: {failure}: {describe(error)}.")


def model_card(config: Config, workdir: str | Path, step: int, repo: str) -> str:
    """Markdown with the metadata that the hub reads: the run's settings, and its evaluations.

    Args:
      workdir: of the run, whose metrics.jsonl and run.json are read; either may be missing.
      step: the iteration whose policy this is.
    """
    split, k = config.evaluation.split, config.evaluation.k
    name = f"eval/avg@{k}"
    played = config.agent.label if config.agent.given else config.env.name
    scored = [line for line in read_metrics(workdir) if line.get(name) is not None]
    scored = [line for line in scored if line["iteration"] <= step]
    results = None
    if scored:
        result = EvalResult(
            task_type="text-generation",
            dataset_type=played,
            dataset_name=played,
            dataset_split=split,
            metric_type=f"avg@{k}",
            metric_value=scored[-1][name],
        )
        results = [result]
    adapters = (config.lora.rank or config.lora.path) and not config.lora.merge
    data = ModelCardData(
        model_name=repo.rpartition("/")[2],
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-generation",
        tags=["seeupo_jax", "reinforcement-learning", "agents"],
        eval_results=results,
    )
    figures = [_figures(line, k) for line in (scored[:1] + scored[1:][-1:])]
    lines = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {repo.rpartition('/')[2]}\n",
        f"The policy after iteration {step} of a run of seeupo_jax: multi-turn reinforcement"
        f" learning with the recipe `{config.recipe}`"
        " ([SeeUPO](https://arxiv.org/abs/2602.06554)).\n",
        f"## Evaluation\n\nOn the split `{split}` of `{played}`, {k} episodes per task,"
        " with 95% intervals.\n",
        markdown_table(
            ("iteration", f"avg@{k}", f"pass@{k}"), figures or [("none was recorded", "", "")]
        ),
        "\n## Training\n",
        markdown_table(("", ""), _settings(config, workdir).items()),
    ]
    return "\n".join(lines) + "\n"


def _settings(config: Config, workdir: str | Path) -> dict[str, Any]:
    """What the run was made with, as its run.json and its configuration say."""
    manifest = read_run_manifest(workdir) or {}
    rollout, optimizer = config.rollout, config.optimizer
    versions = manifest.get("versions", {})
    found = {
        "model": config.model.path,
        "environment": None if config.agent.given else config.env.name,
        "agent": config.agent.label if config.agent.given else None,
        "iterations planned": config.iterations,
        "tasks x trajectories per iteration": f"{rollout.tasks} x {rollout.group_size}",
        "optimizer": f"{optimizer.name}, learning rate {optimizer.learning_rate:g}",
        "seed": config.seed,
        "devices": _words(manifest.get("devices")),
        "began": manifest.get("began"),
        "versions": _words({name: versions[name] for name in _VERSIONS if name in versions}),
        "command": " ".join(map(str, manifest.get("command", ()))),
    }
    return {name: value for name, value in found.items() if value not in (None, "")}


def _words(devices: Any) -> str | None:
    if not isinstance(devices, Mapping):
        return None
    return ", ".join(f"{name} {value}" for name, value in devices.items())


def _figures(line: Mapping[str, Any], k: int) -> list[str]:
    """A row of the table of evaluations."""
    cells = [str(line["iteration"])]
    for name in (f"eval/avg@{k}", f"eval/pass@{k}"):
        value, low, high = (line.get(f"{name}{end}") for end in ("", "_low", "_high"))
        bounds = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
        cells.append("-" if value is None else f"{value:.2f}{bounds}")
    return cells
