"""Serves a policy to clients of OpenAI's and Anthropic's APIs, until SIGTERM or Ctrl-C.

python -m seeupo_jax.serve --config=FILE.py [--config.FIELD=VALUE ...]
    [--workdir=DIR [--step=latest|best|N] [--weights=ema|trained] | --model=FOLDER]
    [--host=127.0.0.1] [--port=8000] [--cors=ORIGIN,...] [--temperature=T] [--ignore_sampling]
    [--weight_updates=FOLDER]

The policy is a checkpoint of the run in DIR, a model folder's, or the one that the configuration
starts from. Of the configuration `model`, `lora`, `chat`, `mesh`, `rollout` and `agent.tool_format`
say how it answers: with at most rollout.max_action_tokens, in conversations of at most
rollout.max_context tokens, to rollout.concurrency calls at once. The key is SEEUPO_API_KEY of the
environment, or one that is made and printed. With --weight_updates whoever has the key may have
the weights of folders below FOLDER served instead, as a training run does whose rollout.engine is
openai. See docs/serving.md.
"""

# Types of jax's own functions are partly unknown.
# pyright: strict, reportUnknownMemberType=false

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import ipaddress
import logging
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from seeupo_jax.agents.answer_form import AnswerForm, resolve_form
from seeupo_jax.agents.calls import Access, is_header_value
from seeupo_jax.agents.control import Control
from seeupo_jax.agents.serving import DEFAULT_VERSION, ServingSession
from seeupo_jax.cli.command_line import add_run_flags, log_to_stderr, prepare_xla, read_config
from seeupo_jax.configuration.flags import Flags, Wrong, integer
from seeupo_jax.configuration.schema import Config, WarmStart
from seeupo_jax.display.terminal import safe_output
from seeupo_jax.envs.transport.open_files import raise_open_files
from seeupo_jax.errors import file_sentences, sentence_errors
from seeupo_jax.evaluation.episode_host import check_endpoint, make_endpoint
from seeupo_jax.evaluation.policy_sources import PolicySource, run_policy
from seeupo_jax.parallel.stop_signal import StoppedCompiling, StopRequest
from seeupo_jax.policy_io.policy_folder import STEP, WEIGHTS, check_trained, saved_weights
from seeupo_jax.policy_io.served_weights import load_weights
from seeupo_jax.rollout.engine.slots import SlotEngine
from seeupo_jax.training.checks import check_sampling

_LOGGER = logging.getLogger(__name__)
KEY_VARIABLE = "SEEUPO_API_KEY"


def _temperature(value: str) -> float:
    """0, or what `config.rollout.temperature` may be."""
    with contextlib.suppress(ValueError):
        if (number := float(value)) == 0 or 0.01 <= number <= 100:
            return number
    raise Wrong(value, "0, which takes the likeliest token, or a number from 0.01 to 100")


def _origins(value: str) -> tuple[str, ...]:
    """Origins of web pages (RFC 6454): a scheme, a host, and perhaps a port."""
    origins = tuple(value.split(","))
    for origin in origins if origins != ("*",) else ():
        if re.fullmatch(r"https?://[^/\s@,]+", origin) is None:
            raise Wrong(value, "*, or origins such as http://localhost:3000, with commas")
    return origins


def _folder(value: str) -> Path:
    """A folder that is there."""
    if not (folder := Path(value)).is_dir():
        raise Wrong(value, "a folder that is there")
    return folder


def _flags() -> Flags:
    flags = Flags("serve", __doc__)
    add_run_flags(flags, required=False)
    flags.flag("step", STEP)
    flags.flag("weights", WEIGHTS)
    flags.flag("model", "a model folder or GGUF file, instead of a run.")
    flags.flag("host", "where to listen; others than a loopback address let other machines call.",
               default="127.0.0.1")  # fmt: skip
    flags.flag("port", "where to listen; 0 is a free one.", integer(0, 65_535), default=8000)
    flags.flag("cors", "origins of web pages that may call, with commas, such as"
               " http://localhost:3000; *: all; default: none.", _origins, default=())  # fmt: skip
    flags.flag("temperature", "of requests that set none; 0: the likeliest token; default: the"
               " configuration's.",
               _temperature)  # fmt: skip
    flags.switch("ignore_sampling", "ignore fields of requests that cannot be honoured; default:"
                 " refuse such requests.", default=None)  # fmt: skip
    flags.flag("weight_updates", "a folder; requests may have the weights of folders below it"
               " served, as SGLang's and vLLM's do; default: none may.", _folder)  # fmt: skip
    return flags


class _Source(NamedTuple):
    """The policy to serve. workdir: of a run; None: what the configuration starts from."""

    workdir: Path | None
    step: str | None
    weights: str | None


def _choose(config: Config, given: argparse.Namespace) -> tuple[Config, _Source]:
    """The configuration as it is to be served, and where its policy is.

    Raises:
      ValueError: flags that do not go together, or no policy.
    """
    for name in ("step", "weights"):
        if getattr(given, name) is not None and given.workdir is None:
            got = getattr(given, name)
            raise ValueError(f"--{name}: got {got!r}; allowed: with --workdir=DIR.")
    if given.model is not None and given.workdir is not None:
        raise ValueError(f"--model: got {given.model!r} with --workdir; allowed: one of the two.")
    if given.model is not None:
        model = dataclasses.replace(config.model, path=given.model)
        config = dataclasses.replace(config, model=model, warm_start=WarmStart())
    if given.workdir is None and (config.warm_start.stages or config.model.path is None):
        raise ValueError(
            "--workdir: got none; allowed: the folder of a run, or --model=FOLDER, since the"
            " configuration makes its policy from nothing."
        )
    rollout, agent = config.rollout, config.agent
    if given.temperature == 0:
        rollout = dataclasses.replace(rollout, top_k=1, temperature=1.0)
    elif given.temperature is not None:
        rollout = dataclasses.replace(rollout, temperature=given.temperature)
    if given.ignore_sampling is not None:
        agent = dataclasses.replace(agent, ignore_sampling=given.ignore_sampling)
    config = dataclasses.replace(config, rollout=rollout, agent=agent)
    return config, _Source(given.workdir, given.step, given.weights)


def _check(config: Config, source: _Source, host: str, port: int) -> None:
    """Warns of an address that other machines reach, before anything is loaded.

    Raises:
      ValueError: there is nothing to serve or no address.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ValueError(
            f"--port: got {port} at {host}, which cannot be had ({error.strerror}); allowed:"
            " a free one of this machine, or 0."
        ) from None
    if not is_header_value(os.environ.get(KEY_VARIABLE, "unset")):
        raise ValueError(
            f"{KEY_VARIABLE}: got a key that is empty or has a space or an odd character; allowed:"
            " letters, digits and other signs of ASCII, or no variable."
        )
    if source.workdir is not None:
        saved_weights(config, source.weights)
        other = ", or --model=FOLDER to serve a model folder's policy"
        check_trained(config, source.workdir, source.step, source.weights, other)
    check_endpoint()
    check_sampling(config)
    if not _is_loopback(host):
        _LOGGER.warning(
            f"warning: --host={host}: whoever reaches this machine and has the key is answered, and"
            " what they send and get is not encrypted."
        )


def _load(config: Config, source: _Source) -> contextlib.AbstractContextManager[PolicySource]:
    """The policy that is meant."""
    return run_policy(
        config,
        Path() if source.workdir is None else source.workdir,
        untrained=source.workdir is None,
        weights=source.weights,
        step=source.step,
        per_turn=True,
    )


def _begin(
    config: Config,
    source: PolicySource,
    form: AnswerForm,
    stop: StopRequest,
    version: str = DEFAULT_VERSION,
) -> ServingSession:
    """A policy in an engine that is compiled and has begun; version: the name of its weights.

    Raises:
      StoppedCompiling: the command was asked to stop meanwhile.
    """

    def between(_done: int, _total: int) -> None:
        if stop.asked:
            raise StoppedCompiling

    engine, rollout = source.engine, config.rollout
    assert isinstance(engine, SlotEngine)
    engine.compile(source.params, between)
    engine.begin(source.params, seed=config.seed, version=0)
    return ServingSession(
        engine,
        source.tokenizer,
        form,
        max_action_tokens=rollout.max_action_tokens,
        max_context=rollout.max_context,
        version=version,
    )


def _controls(
    config: Config, source: PolicySource, serving: ServingSession, root: Path | None, place: Path
) -> Sequence[Control]:
    """The requests that update the weights by folders below a root; None: there are none."""
    if root is None:
        return ()
    from seeupo_jax.agents.weight_updates import WeightUpdates  # needs the extra `agents`

    assert source.policy is not None, "it is no server's"
    load = functools.partial(load_weights, config, source.policy)
    updates = WeightUpdates(
        serving, root, load, on_swap=config.rollout.on_swap, model_path=str(place)
    )
    return updates.controls


def _name(place: Path) -> str:
    """The name under which the policy of a folder is served."""
    return Path(os.path.abspath(place)).name.removeprefix("package:")


def _announce(
    config: Config, about: str, access: Access, engine: SlotEngine, form: AnswerForm
) -> None:
    """Says that clients may call, what, and within which limits."""
    rollout = config.rollout
    sampling = "greedy" if rollout.top_k == 1 else f"temperature {rollout.temperature:g}"
    print(f"Serving {about} at {access.base_url}")
    print(
        f"context: {rollout.max_context} tokens; answers: at most {rollout.max_action_tokens};"
        f" concurrent calls: {engine.concurrency}, others wait; {sampling}; tool calls:"
        f" {form.tool_format.name}; thoughts: {'a field' if form.thoughts_apart else 'content'}"
    )
    made = f"Key: {access.api_key} (made for this server; {KEY_VARIABLE} sets one)"
    print(f"Key: as in {KEY_VARIABLE}" if KEY_VARIABLE in os.environ else made, flush=True)


def _answer(config: Config, source: _Source, given: argparse.Namespace) -> None:
    """Loads the policy, and answers until a signal comes."""
    place = source.workdir if source.workdir is not None else Path(str(config.model.path))
    name = _name(place)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        policy = stack.enter_context(_load(config, source))
        form = resolve_form(config.agent, policy.tokenizer)
        version = DEFAULT_VERSION if source.workdir is None else str(policy.iteration)
        serving = _begin(config, policy, form, stop, version)
        policy = policy._replace(params=None)  # the engine lets go of them at an update
        endpoint = make_endpoint(
            config,
            name,
            form,
            serves=True,
            origins=given.cors,
            metrics=serving.metrics.text,
            controls=_controls(config, policy, serving, given.weight_updates, place),
        )
        endpoint.start(given.host, given.port)
        stack.callback(endpoint.close)
        key = os.environ.get(KEY_VARIABLE)
        access = endpoint.open_key(serving, key=key, unique_ids=True)
        number = "" if source.workdir is None else f", checkpoint {policy.iteration}"
        _announce(config, f"{place}{number} as {name!r}", access, policy.engine, form)
        stop.wakes(serving.stop)
        serving.run()
        endpoint.close(cancel=False)  # its last answers are on their way
        counts = ", ".join(f"{count} {name}" for name, count in serving.counts.items())
        print(f"Stopped by {stop.reason}; calls: {counts or 'none'}.")


@safe_output()
@file_sentences()
def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
    log_to_stderr()
    with sentence_errors(), contextlib.suppress(StoppedCompiling):
        config, source = _choose(read_config(given), given)
        prepare_xla()
        raise_open_files()  # a client's connection is one
        _check(config, source, given.host, given.port)
        _answer(config, source, given)


def _is_loopback(host: str) -> bool:
    """Whether an address or a name is for this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    main()
