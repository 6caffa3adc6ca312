"""A policy's folder on the Hugging Face Hub, with a model card that has the run's figures."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, HfApi, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.configuration.user_code import describe
from seeupo_jax.errors import WriteError
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.metrics.run_manifest import read_resumptions, read_run_manifest
from seeupo_jax.metrics.statistics import markdown_table, read_estimates

Lines = Sequence[Mapping[str, Any]]  # of metrics.jsonl
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
    except (HTTPError, OSError) as error:  # the last where HF_HUB_OFFLINE is set
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


def model_card(config: Config, workdir: str | Path, step: int, part: str, repo: str) -> str:
    """Markdown with the metadata that the hub reads: the run's settings, and its evaluations.

    Args:
      config: that the policy is exported with; the run's own is in its run.json.
      workdir: of the run, whose metrics.jsonl and run.json are read; either may be missing.
      step: the iteration, or the step of supervised fine-tuning, whose policy this is.
      part: of the checkpoint, which the policy is: params or ema.
    """
    lines, manifest = read_metrics(workdir), read_run_manifest(workdir) or {}
    run = _run_config(manifest, config)
    lines_until = [line for line in lines if line["iteration"] <= step]
    if any("sft/loss" in line for line in lines):
        about = _supervised(run, lines_until, step)
    else:
        about = _trained(run, lines_until, step, part)
    adapters = (config.lora.rank or config.lora.path) and not config.lora.merge
    data = ModelCardData(
        model_name=repo.rpartition("/")[2],
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-generation",
        tags=["seeupo_jax", about.tag, "agents"],
        eval_results=about.results,
    )
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {repo.rpartition('/')[2]}\n",
        f"{about.what}\n",
        f"## Evaluation\n\n{about.measured}\n",
        about.evaluations,
        "\n## Training\n",
        markdown_table(("", ""), _settings(run, manifest, about.settings).items()),
    ]
    return "\n".join(parts) + "\n"


def _run_config(manifest: Mapping[str, Any], config: Config) -> Config:
    """The configuration in a run's manifest; the given one where it has none that can be read."""
    try:
        return from_dict(manifest["config"])
    except (LookupError, TypeError, ValueError):
        return config


class _About(NamedTuple):
    """The parts of a model card that depend on the kind of run.

    measured: how the policy was measured. evaluations: a table.
    """

    tag: str
    what: str
    measured: str
    evaluations: str
    results: list[EvalResult] | None
    settings: dict[str, Any]


def _trained(config: Config, lines: Lines, step: int, part: str) -> _About:
    split, k = config.evaluation.split, _episodes(lines, config.evaluation.k)
    name, rollout = f"eval/avg@{k}", config.rollout
    played = config.agent.label if config.agent.given else config.env.name
    scored = [line for line in lines if line.get(name) is not None]
    last, results, note = scored[-1] if scored else {}, None, ""
    averaged = bool(last.get("eval/ema"))
    if last.get("iteration") == step and averaged == (part == "ema"):
        result = EvalResult(
            task_type="text-generation",
            dataset_type=played,
            dataset_name=played,
            dataset_split=split,
            metric_type=f"avg@{k}",
            metric_value=last[name],
        )
        results = [result]
    elif scored:
        note = (
            " This very policy was not evaluated: the last figures are those of iteration"
            f" {last['iteration']}{', of the averaged parameters' * averaged}."
        )
    if last.get("eval/selected_on"):
        note += (
            " The best checkpoint is selected on this split too: its figure here is biased upwards."
        )
    linked = " ([SeeUPO](https://arxiv.org/abs/2602.06554))"
    figures = [_figures(line, k) for line in _first_and_last(scored)]
    return _About(
        tag="reinforcement-learning",
        what=f"The policy after iteration {step} of a run of seeupo_jax: multi-turn reinforcement"
        f" learning with the recipe `{config.recipe}`"
        f"{linked * config.recipe.startswith('seeupo')}.",
        measured=f"On the split `{split}` of `{played}`, {k} episodes per task,"
        f" with 95% intervals.{note}",
        evaluations=markdown_table(
            ("iteration", "tasks", f"avg@{k}", f"pass@{k}"),
            figures or [("none was recorded", "", "", "")],
        ),
        results=results,
        settings={
            "environment": None if config.agent.given else config.env.name,
            "agent": config.agent.label if config.agent.given else None,
            "iterations planned": config.iterations,
            "tasks x trajectories per iteration": f"{rollout.tasks} x {rollout.group_size}",
        },
    )


def _episodes(lines: Lines, planned: int) -> int:
    """The k of the last avg@k that was measured; as planned where there is none."""
    measured = [
        int(name.rpartition("@")[2])
        for line in lines
        for name, estimate in read_estimates(line).items()
        if name.startswith("eval/avg@") and not math.isnan(estimate.value)
    ]
    return [planned, *measured][-1]


def _supervised(config: Config, lines: Lines, step: int) -> _About:
    measured = [line for line in lines if line.get("eval/loss") is not None]
    losses = [(line["iteration"], f"{line['eval/loss']:.4f}") for line in _first_and_last(measured)]
    return _About(
        tag="sft",
        what=f"The policy after step {step} of supervised fine-tuning with seeupo_jax, on the"
        " assistant messages of conversations.",
        measured="Mean loss of assistant tokens, in nats, of conversations that were held out.",
        evaluations=markdown_table(
            ("step", "held-out loss"), losses or [("none was recorded", "")]
        ),
        results=None,
        settings={"data": config.sft.data, "conversations per step": config.sft.batch_size},
    )


def _first_and_last(lines: Lines) -> Lines:
    return [*lines[:1], *lines[1:][-1:]]


def _settings(
    config: Config, manifest: Mapping[str, Any], of_kind: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the settings of a run, from its run.json and its configuration.

    of_kind: those of its kind of run.
    """
    optimizer, versions = config.optimizer, manifest.get("versions", {})
    settings = {
        "model": config.model.path,
        **of_kind,
        "optimizer": f"{optimizer.name}, learning rate {optimizer.learning_rate:g}",
        "seed": config.seed,
        "devices": _words(manifest.get("devices")),
        "began": manifest.get("began"),
        "versions": _words({name: versions[name] for name in _VERSIONS if name in versions}),
        "command": " ".join(map(str, manifest.get("command", ()))),
    }
    for each in read_resumptions(manifest):  # `config` is that of the last start
        name = f"changed on resuming {each.place}"
        settings[name] = "; ".join(filter(None, (settings.get(name), *each.lines())))
    return {name: value for name, value in settings.items() if value not in (None, "")}


def _words(devices: Any) -> str | None:
    if not isinstance(devices, Mapping):
        return None
    return ", ".join(f"{name} {value}" for name, value in devices.items())


def _figures(line: Mapping[str, Any], k: int) -> list[str]:
    """A row of the table of evaluations."""
    cells = [str(line["iteration"]), str(line.get("eval/tasks", "-"))]
    for name in (f"eval/avg@{k}", f"eval/pass@{k}"):
        value, low, high = (line.get(f"{name}{end}") for end in ("", "_low", "_high"))
        bounds = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
        cells.append("-" if value is None else f"{value:.2f}{bounds}")
    return cells
