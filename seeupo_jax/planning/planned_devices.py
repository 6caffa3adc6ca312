"""Devices to explain a run for, where they are not here."""

from __future__ import annotations

import argparse

import jax

from seeupo_jax.configuration.flags import Flags, integer, size
from seeupo_jax.planning.abstract_run import Planned

_MOST = 16384  # more than the largest slice has


def add_planned_flags(flags: Flags) -> None:
    """Declares the flags of `--explain` for devices that are not here."""
    flags.flag(
        "devices",
        "with --explain: how many the run would have; the model, its tokenizer and the"
        " environment's files need not be here either.",
        integer(1, _MOST),
    )
    flags.flag(
        "device_memory",
        "with --devices: of each, as 95GiB; a step or a rollout may take 0.9 of it.",
        size,
    )


def plan_devices(given: argparse.Namespace) -> Planned | None:
    """The devices that are meant, as so many of the CPU's; None: those that are here.

    Before the first array is made.

    Raises:
      ValueError: flags that need others, or a process that has devices already.
    """
    for name, needed, there in (
        ("devices", "explain", given.explain),
        ("device_memory", "devices", given.devices is not None),
    ):
        if getattr(given, name) is not None and not there:
            raise ValueError(
                f"--{name}: got {getattr(given, name)} without --{needed}; allowed: with it only."
            )
    if given.devices is None:
        return None
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.devices)
        available = jax.device_count()
    except RuntimeError as error:
        raise ValueError(f"--devices: got {given.devices}, and {error}.") from None
    if available != given.devices:
        raise ValueError(
            f"--devices: got {given.devices}; allowed: {available}, which XLA_FLAGS ask for here."
        )
    return Planned(given.device_memory)
