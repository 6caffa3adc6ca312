"""Serves training and sampling to clients of Tinker's API, until SIGTERM or Ctrl-C.

python -m seeupo_jax.train_server --config=FILE.py [--config.FIELD=VALUE ...] --workdir=DIR
    [--model=FOLDER] [--model_name=NAME] [--host=127.0.0.1] [--port=8000]

The base policy is a model folder's, or the one that the configuration starts from. Clients create
runs, each with adapters of its own, and train and sample as they like; DIR holds what they save.
Of the configuration `model`, `mesh`, `batching` and `rollout` say how the policy is computed:
sequences have at most rollout.max_context tokens, samples at most rollout.max_action_tokens. The
key is SEEUPO_API_KEY of the environment, which begins with tml-, or one that is made and printed.
See docs/training_service.md.
"""

# Types of jax's own functions are partly unknown.
# pyright: strict, reportUnknownMemberType=false

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Sequence

import jax

from seeupo_jax.agents.served_address import check_address, choose_key, describe_key
from seeupo_jax.checkpoint import check_writable
from seeupo_jax.cli.command_line import add_run_flags, log_to_stderr, prepare_xla, read_config
from seeupo_jax.configuration.flags import Flags, integer
from seeupo_jax.configuration.schema import Config, Lora, WarmStart
from seeupo_jax.display.terminal import safe_output
from seeupo_jax.errors import file_sentences, sentence_errors
from seeupo_jax.parallel.stop_signal import StopRequest
from seeupo_jax.training.checks import check_sampling

_KEY_PREFIX = "tml-"  # of all keys that Tinker's SDK sends


def _flags() -> Flags:
    flags = Flags("train_server", __doc__)
    add_run_flags(flags)
    flags.flag("model", "a model folder, instead of the configuration's.")
    flags.flag("model_name", "by which clients call the model, and find its tokenizer; default: its"
               " folder.")  # fmt: skip
    flags.flag("host", "where to listen; others than a loopback address let other machines call.",
               default="127.0.0.1")  # fmt: skip
    flags.flag("port", "where to listen; 0 is a free one.", integer(0, 65_535), default=8000)
    return flags


def _choose(config: Config, given: argparse.Namespace) -> Config:
    """The configuration with the base policy that is meant.

    Raises:
      ValueError: there is none, or it has adapters; or adapters per turn.
    """
    if config.lora.path is not None:
        raise ValueError(
            f"config.lora.path: got {config.lora.path!r}; allowed: none, since clients' adapters"
            " are on the model itself. Export the adapters with it: config.lora.merge=True."
        )
    if config.lora.turn_adapters:
        raise ValueError(
            f"config.lora.per_turn: got {config.lora.per_turn}; allowed: 0 and 1, since a client's"
            " samples and passes name no turn."
        )
    if given.model is not None:
        model = dataclasses.replace(config.model, path=given.model)
        config = dataclasses.replace(config, model=model, warm_start=WarmStart())
    if config.warm_start.stages or config.model.path is None:
        raise ValueError(
            "--model: got none; allowed: a model folder, since the configuration makes its policy"
            " from nothing."
        )
    return dataclasses.replace(config, lora=Lora())  # clients choose adapters


def _serve(config: Config, given: argparse.Namespace) -> None:
    """Loads the policy, and does what clients ask for until a signal comes."""
    from seeupo_jax.train_service.build_service import check_server, open_service

    check_server(config)
    check_sampling(config)
    check_writable(given.workdir)
    key = choose_key(_KEY_PREFIX)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        service, listener = open_service(config, given.workdir, given.model_name, key)
        stack.enter_context(jax.set_mesh(service.mesh))
        address = listener.start(given.host, given.port)
        stack.callback(listener.close)
        print(f"Serving {config.model.path} as {service.model_name!r} at {address}")
        rollout = config.rollout
        print(
            f"sequences: at most {service.max_context} tokens; samples: at most"
            f" {min(rollout.max_action_tokens, rollout.max_context)}; saved in {given.workdir}"
        )
        print(describe_key(key), flush=True)
        stop.wakes(service.stop)
        service.run()
        print(f"Stopped by {stop.reason}.")


@safe_output()
@file_sentences()
def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
    log_to_stderr()
    with sentence_errors():
        config = _choose(read_config(given), given)
        prepare_xla()
        check_address(given.host, given.port)
        _serve(config, given)


if __name__ == "__main__":
    main()
