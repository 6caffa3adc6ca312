"""Evaluation: avg@k and pass@k of a policy on a split, with 95% intervals.

python -m seeupo_jax.evaluate --config=FILE.py --workdir=DIR
    [--untrained | --step=latest|best|N] [--weights=ema|trained] [--split=test] [--k=4] [--greedy]
    [--explain] [--json=OUT] [--bfcl_results=FOLDER]
    [--server=http://HOST:PORT [--server_model=NAME] [--server_dialect=auto|vllm|sglang|chat]
    [--server_seeded=True] [--server_timeout_s=600] [--server_key_variable=OPENAI_API_KEY]
    [--server_max_tokens=N]]

The policy is the run's: of its last checkpoint, and after sft of the one with the lowest held-out
loss, as WORKDIR/policy has it. With --untrained it is the one that the run starts from; with
--server, the one that the server serves, and no model is loaded or computed here. vLLM and sglang
are sent tokens: the tokenizer must be the run's. Any other OpenAI-compatible server is sent
messages and tools (chat), as a baseline. --explain prints which episodes would be played, and plays
none.

Every episode is written to DIR/evaluation as soon as it ends (`trajectories/episodes.py`).
Rerunning the command plays the missing episodes only, and those whose environment failed. With
several processes each writes a file of its own episodes; process 0's is complete in the end, also
where fewer processes resume.
"""

# Types of jax's own functions are partly unknown.
# pyright: strict, reportUnknownMemberType=false

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import sys
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax

from seeupo_jax import envs
from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.agents.server_dialects import CHAT, DIALECTS
from seeupo_jax.checkpoint import check_may_write, check_writable
from seeupo_jax.cli.command_line import (
    add_cluster_flags,
    add_run_flags,
    cluster_flags,
    fail_all_processes,
    join_cluster,
    log_to_stderr,
    prepare_xla,
    quiet_logs,
    read_config,
    run_folder,
)
from seeupo_jax.configuration.flags import Flags, integer, output_file, path, positive
from seeupo_jax.configuration.loading import ConfigSource, load_config
from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.terminal import safe_output
from seeupo_jax.envs.bfcl.result_files import export_results
from seeupo_jax.envs.tasks import check_tasks
from seeupo_jax.errors import file_sentences, name_file, printable, sentence_errors
from seeupo_jax.evaluation.compared_policies import policies_table
from seeupo_jax.evaluation.evaluation_run import (
    EvaluationResult,
    episodes_name,
    evaluate_policy,
    evaluation_settings,
)
from seeupo_jax.evaluation.policy_sources import (
    about_policy,
    run_policy,
    starting_policy_folder,
)
from seeupo_jax.evaluation.served_policy import (
    Server,
    check_served,
    find_dialect,
    served_policy,
)
from seeupo_jax.parallel.cluster import exit_on_error
from seeupo_jax.parallel.platform import cpu_only
from seeupo_jax.planning.explain.explain_evaluation import (
    explain_episodes,
    explain_policy,
    explain_server,
)
from seeupo_jax.planning.explain.explanation import EXPLAIN, Section, print_explanation
from seeupo_jax.policy_io.policy_folder import (
    STEP,
    WEIGHTS,
    check_trained,
    saved_weights,
    warn_of_selection,
)
from seeupo_jax.policy_io.resuming import chat_note
from seeupo_jax.training.checks import check_config, check_first_tasks
from seeupo_jax.trajectories.episodes import read_episodes, read_played
from seeupo_jax.trajectories.json_lines import write_json

_LOGGER = logging.getLogger(__name__)
# Of a server's requests: what the engine counts, by its name in the API.
_TOKENS = {"prompt_tokens": "prompt_tokens", "completion_tokens": "decoded_tokens"}
_UNTRAINED = (
    ", or --untrained (in Python untrained=True) to evaluate the policy that the configuration"
    " starts from"
)


def _explain(config: Config, workdir: Path, which: _Which, split: str, k: int) -> list[Section]:
    """Describes what this evaluation would do; sends no request to a server."""
    server = which.server
    if server is None:
        folder = starting_policy_folder(config, workdir)
        part = None if which.untrained else saved_weights(config, which.weights)
        explained = explain_policy(config, workdir, folder, part, which.step)
        same: dict[str, Any] | None = about_policy(config, explained.iteration, part)
    else:
        explained = explain_server(server.url, server.model)
        same = None if server.model is None else {"server": server.url, "model": server.model}
    path, played = workdir / "evaluation", None
    if same is not None:
        chat = None
        if server is not None and server.dialect == CHAT:
            same |= server.chat_identity(config)
        else:
            chat = chat_note(config, workdir)
        settings = evaluation_settings(config, split, k, same, chat)
        path = path / episodes_name(settings)
        played = read_played(path, settings)
    return [*explained.sections, *explain_episodes(config, split, k, path, played)]


def _choices(
    config: Config, split: str | None, k: int | None, *, greedy: bool
) -> tuple[Config, str, int]:
    """The configuration as the evaluation is to be, the split, and k."""
    if greedy:
        config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, top_k=1))
        k = 1 if k is None else k
    k = config.evaluation.k if k is None else k
    if greedy and k > 1:
        _LOGGER.warning(
            f"--greedy: the {k} episodes of a task are alike, unless its environment is random."
        )
    split = config.evaluation.split if split is None else split
    if not config.evaluation.tasks:
        raise ValueError(
            "config.evaluation.tasks: got 0, with which training evaluates nothing; allowed to"
            " evaluate: a whole number >= 1."
        )
    return config, split, k


def _flags() -> Flags:
    flags = Flags("evaluate", __doc__)
    add_run_flags(flags)
    add_cluster_flags(flags)
    flags.switch("explain", EXPLAIN)
    flags.switch("untrained", "evaluate the policy that the configuration starts from.")
    flags.flag("step", STEP)
    flags.flag("weights", WEIGHTS)
    flags.flag("split", "the split to evaluate; default: config.evaluation.split.")
    flags.flag(
        "k", "episodes per task; default: config.evaluation.k, and 1 with --greedy.", integer(1)
    )
    flags.switch("greedy", "always take the likeliest token.")
    flags.flag(
        "bfcl_results", "also write result files for `bfcl evaluate` into this folder.", path
    )
    flags.flag("json", "also write the metrics to this file.", output_file)
    flags.flag("server", "evaluate the policy that this server serves.")
    flags.flag("server_model", "what the server calls it; default: the only one that it lists.")
    flags.flag(
        "server_dialect",
        "vllm or sglang, which are sent tokens; chat: any OpenAI-compatible server, which is sent"
        " messages and tools; auto (default): by the owner of the model that the server reports.",
    )
    flags.switch(
        "server_seeded",
        "give each request a seed (default); vLLM on TPU refuses seeds.",
        default=None,
    )
    flags.flag(
        "server_timeout_s",
        "of a request (default: 600); retries as in config.env.retries.",
        positive,
    )
    flags.flag(
        "server_key_variable",
        "the environment variable with the server's key; default: OPENAI_API_KEY, if it is set.",
    )
    flags.flag(
        "server_max_tokens",
        "of an answer, with chat; default: config.rollout.max_action_tokens.",
        integer(1),
    )
    return flags


def _server(given: argparse.Namespace) -> Server | None:
    """The server that is named, if one is."""
    options = {
        name: value
        for name in ("model", "dialect", "seeded", "timeout_s", "key_variable", "max_tokens")
        if (value := vars(given)[f"server_{name}"]) is not None
    }
    if given.server is not None:
        return Server(given.server, **options)
    if options:
        raise ValueError(
            f"--server_{next(iter(options))}: got a value; allowed: none without --server."
        )
    return None


def _platform(server: Server | None) -> contextlib.AbstractContextManager[None]:
    """Where an evaluation computes."""
    return contextlib.nullcontext() if server is None else cpu_only()


@quiet_logs()
def evaluate(
    config: ConfigSource,
    workdir: str | Path,
    *,
    split: str | None = None,
    k: int | None = None,
    greedy: bool = False,
    untrained: bool = False,
    step: int | str | None = None,
    weights: str | None = None,
    server: Server | None = None,
) -> EvaluationResult:
    """avg@k and pass@k of a run's policy on a split; missing episodes alone are played.

    Args:
      config: of `load_config`, or what that takes.
      workdir: the folder of the run.
      split: None: `config.evaluation.split`.
      k: episodes per task; None: `config.evaluation.k`, and 1 if greedy.
      greedy: always take the likeliest token.
      untrained: evaluate the policy that the configuration starts from.
      step: a checkpoint's number, latest or best; None: that of WORKDIR/policy, which is the last
        one, and after sft that of the lowest held-out loss.
      weights: trained, or ema for their average; None: the average where the run has one.
      server: evaluate the policy that it serves, and compute none here. Where jax has not started
        in this process, it keeps off the accelerator meanwhile.

    Raises:
      ValueError: what cannot be evaluated, before anything is played.
      NameTaken: as of `train`.
    """
    _check_arguments(split, k, step, server)
    config, workdir = load_config(config), run_folder(workdir)
    if server is None:
        prepare_xla()
        join_cluster(config)
    config, split, k = _choices(config, split, k, greedy=greedy)
    which = _Which(server, untrained, None if step is None else str(step), weights)
    with _platform(server):
        which = _check(config, workdir, which, split)
        return _evaluate(config, workdir, which, split=split, k=k)


def _check_arguments(split: Any, k: Any, step: Any, server: Any) -> None:
    if split is not None and not isinstance(split, str):
        raise ValueError(f"split: got {split!r}; allowed: the name of a split.")
    if isinstance(step, bool) or not isinstance(step, str | Integral | None):
        raise ValueError(f"step: got {step!r}; allowed: latest, best, or a number.")
    if k is not None and (isinstance(k, bool) or not isinstance(k, Integral) or k < 1):
        raise ValueError(f"k: got {k!r}; allowed: a whole number >= 1.")
    if server is not None and not isinstance(server, Server):
        raise ValueError(f"server: got {server!r}; allowed: a seeupo_jax.Server.")


class _Which(NamedTuple):
    """The policy that is meant; see `evaluate`."""

    server: Server | None
    untrained: bool
    step: str | None
    weights: str | None


def _check(
    config: Config, workdir: Path, which: _Which, split: str, *, asks: bool = True
) -> _Which:
    """The policy that is meant; ValueError where there is nothing to evaluate, or no way to.

    Args:
      asks: whether a server may be asked what it is.
    """
    server, untrained, step, weights = which
    for name, value in (("step", step), ("weights", weights)):
        if value is not None and (server is not None or untrained):
            raise ValueError(
                f"--{name}: got {value!r}; allowed: none with --server and --untrained, which say"
                " what is evaluated."
            )
    if server is not None and untrained:
        raise ValueError("--untrained: got True; allowed: without --server, which has its policy.")
    if server is None:
        check_config(config, [split])
        saved_weights(config, weights)
    check_tasks(find_tasks(config), [split], labelled=0)
    if server is not None:
        check_served(config, server)
        server = find_dialect(config, server) if asks else server
        check_first_tasks(config, [split], tokenized=server.dialect in DIALECTS)
    if server is None and not untrained:
        selection = check_trained(config, workdir, step, weights, _UNTRAINED)
        if step == "best" and selection is not None:
            warn_of_selection(config, *selection, split)
    return which._replace(server=server)


def _evaluate(
    config: Config, workdir: Path, which: _Which, *, split: str, k: int
) -> EvaluationResult:
    check_writable(workdir)
    server, untrained, step, weights = which
    if server is None:
        opened = run_policy(config, workdir, untrained=untrained, weights=weights, step=step)
    else:
        opened = served_policy(config, workdir, server)
    with opened as source:
        return evaluate_policy(config, workdir, source, split=split, k=k)


@safe_output()
def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
        server = _server(given)
    log_to_stderr()
    with exit_on_error(), file_sentences(), sentence_errors(), _platform(server):
        workdir = given.workdir
        config = fail_all_processes(given, lambda: read_config(given))
        fail_all_processes(given, lambda: check_may_write(workdir))
        if server is None:
            prepare_xla()
            join_cluster(config, **cluster_flags(given))
        config, split, k = _choices(config, given.split, given.k, greedy=given.greedy)
        if given.bfcl_results is not None:
            _check_bfcl(config, given.bfcl_results)
        which = _Which(server, given.untrained, given.step, given.weights)
        which = _check(config, workdir, which, split, asks=not given.explain)
        if given.explain:
            return print_explanation(_explain(config, workdir, which, split, k))
        result = _evaluate(config, workdir, which, split=split, k=k)
        if jax.process_index() == 0:
            _report(config, given, result)


def _check_bfcl(config: Config, folder: Path) -> None:
    """ValueError where no result files of the benchmark could be written in the end."""
    if config.env.name != "bfcl":
        raise ValueError(
            f"--bfcl_results: got env {config.env.name!r}; allowed: config.env.name=bfcl."
        )
    if config.env.options.get("data") is not None:
        raise ValueError(
            f"--bfcl_results: got env.options.data={config.env.options['data']!r}; allowed:"
            " none, since the scorer only has the official tasks."
        )
    if config.agent.given:
        raise ValueError(
            f"--bfcl_results: got the agent {config.agent.label!r}; allowed: none, whose"
            " episodes are not the benchmark's."
        )
    check_may_write(folder, "--bfcl_results")


def _report(config: Config, given: argparse.Namespace, result: EvaluationResult) -> None:
    """Prints what the evaluation came to, and writes what else was asked for."""
    print(printable(f"{result}\n\nEvery episode: {result.file}"))
    print(f"Played before, taken from that file: {result.resumed} of {len(result.episodes)}")
    if config.sandbox.solution:
        print(printable("\n".join(_unsolved(result.file))))
    counted: Mapping[str, int] = result.usage if "server" in result.policy else {}
    served = {name: counted[ours] for name, ours in _TOKENS.items() if ours in counted}
    if served:
        print("Counted by the server:", ", ".join(f"{n:,} {name}" for name, n in served.items()))
    if result.policies[1:]:
        table = policies_table(result.policies)
        print(printable(f"\nPolicies evaluated in this folder, on these tasks:\n{table}"))
    about = {**result.policy, "episodes": str(result.file), **({"usage": served} if served else {})}
    others = [{**o.about, "episodes": str(o.file), **o.metrics} for o in result.policies[1:]]
    more = {"others": others} if others else {}
    write_json(given.json, {**about, **result.metrics, **more})
    if given.bfcl_results is not None:
        environment = cast(Any, envs.make(config.env.name, **config.env.options))
        played = ((e.task_id, e.member, e.messages) for e in result.episodes)
        with name_file(given.bfcl_results):
            commands = export_results(environment, played, given.bfcl_results)
        print(*commands, sep="\n")


def _unsolved(file: Path) -> list[str]:
    """A line for each episode without success, sorted: its task, its reward or why it failed."""
    _, episodes = read_episodes(file)
    lines = {
        f"  {e.task_id}: {e.info['failure'] if e.failed else f'reward {e.reward:g}'}"
        for e in episodes.values()
        if not e.success >= 1
    }
    return [f"Not solved: {len(lines) or 'none'}", *sorted(lines)]


if __name__ == "__main__":
    main()
