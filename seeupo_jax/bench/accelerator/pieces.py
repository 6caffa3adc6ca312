"""The pieces, most valuable first: what each measures, in which sizes, and how long it may take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from seeupo_jax.bench.accelerator import kernels, numerics, quickstart, speed
from seeupo_jax.bench.accelerator.record import Record
from seeupo_jax.bench.runners import bench_models
from seeupo_jax.bench.settings import Settings
from seeupo_jax.planning.flops import parameters

GIB = 2**30
CORRECTNESS, UPDATE, ROLLOUT, QUICKSTART = "correctness", "update", "rollout", "quickstart"
LIMIT_S = 450.0  # of a piece: with what surrounds it, under eight minutes
REHEARSAL_LIMIT_S = 300.0
# Bytes a parameter at the peak of a sweep: float32 weights, the reference policy's, two moments
# and gradients, and a copy in bfloat16; the baseline samples with one more.
_OURS, _THEIRS = 22, 24
_SAMPLED = 2  # of a rollout, a side: weights in bfloat16
_TOKENS = 9000  # of a microbatch of one group's conversations, at real lengths, about
_BESIDE = 6 * GIB  # logits, caches and the libraries themselves, about


@dataclass(frozen=True)
class Size:
    """What a piece is measured with, and the memory that it takes at its peak, about.

    bytes: with both sides. alone: without PyTorch.
    """

    settings: Settings
    bytes: float = 0.0
    alone: float = 0.0

    def __str__(self) -> str:
        s = self.settings
        scaled = "" if s.scale in (None, 1.0) else f", lengths times {s.scale:g}"
        alone = "" if s.torch else ", without PyTorch"
        return f"{s.model}, {s.workload}, {s.groups} groups of {s.group_size}{scaled}{alone}"


@dataclass(frozen=True)
class Piece:
    """One process.

    measure: is given the sizes' settings, whether this is a rehearsal, and where results go.
    words: what it shows. section: of the page. sizes: from the largest to the smallest.
    about_s: what it may take at the most likely; it is not begun with less time left.
    """

    name: str
    section: str
    words: str
    measure: Callable[[Record, Settings, bool], None]
    sizes: tuple[Size, ...]
    about_s: float

    def fitting(self, free_bytes: int | None, *, alone: bool) -> tuple[list[int], list[str]]:
        """Indices of the sizes to try, and sentences on those that are too large.

        Args:
          free_bytes: of the device; None: not known, all are tried.
          alone: whether PyTorch does not run beside ours.
        """
        kept, notes = [], []
        for index, size in enumerate(self.sizes):
            needed = size.alone if alone or not size.settings.torch else size.bytes
            if free_bytes is None or needed <= free_bytes:
                kept.append(index)
            else:
                notes.append(
                    f"{size} would take about {needed / GIB:.0f} GiB of the"
                    f" {free_bytes / GIB:.0f} that are free."
                )
        return kept, notes


def _of_sweep(settings: Settings) -> Size:
    """Weights and what lies beside them, and what layers keep for the backward pass."""
    arch = bench_models.architecture(settings.model, "bfloat16")
    P, scale = parameters(arch), settings.scale or 1.0
    kept = 2 * arch.layers * (6 * arch.width + 3 * arch.mlp_width) * _TOKENS * scale
    return Size(settings, (_OURS + _THEIRS) * P + 2 * kept + _BESIDE, _OURS * P + kept + _BESIDE)


def _of_rollout(settings: Settings) -> Size:
    P = parameters(bench_models.architecture(settings.model, "bfloat16"))
    return Size(settings, 2 * (_SAMPLED * P + _BESIDE), _SAMPLED * P + _BESIDE)


def _update(workload: str, model: str, groups: int) -> tuple[Size, ...]:
    desk = workload == "order_desk"
    first = Settings(
        workload=workload,
        model=model,
        groups=groups,
        scale=None if desk else 1.0,
        torch=("compile",),
        repeats=3,
    )
    few = replace(first, groups=max(1, groups // 4), scale=None if desk else 0.5)
    last = replace(few, model="135m") if model == "0.5b" else replace(first, torch=())
    return tuple(map(_of_sweep, (first, few, last)))


def _rollout(model: str, groups: int) -> tuple[Size, ...]:
    first = Settings(
        workload="bfcl", model=model, groups=groups, scale=1.0, generate=("static", "kept")
    )
    few = replace(first, groups=max(1, groups // 4))
    last = replace(few, model="135m") if model == "0.5b" else replace(few, scale=0.5)
    return tuple(map(_of_rollout, (first, few, last)))


def _checked(model: str, *smaller: str) -> tuple[Size, ...]:
    """For checks of numbers: short conversations."""
    each = (
        Settings(workload="bfcl", model=name, groups=1, group_size=4, scale=0.125)
        for name in (model, *smaller)
    )
    return tuple(map(_of_sweep, each))


_SMALL = (Size(Settings(), 4 * GIB, 4 * GIB),)
_TREES = "attention over token trees by the platform's kernel against plain attention, {}"

PIECES = (
    *(
        Piece(
            f"trees_{dtype}",
            CORRECTNESS,
            _TREES.format(dtype),
            functools.partial(kernels.trees, dtype=dtype),
            _SMALL,
            60,
        )
        for dtype in ("bfloat16", "float32")
    ),
    Piece(
        "rows",
        CORRECTNESS,
        "fused attention over rows, and over pages of the KV cache, against plain attention",
        kernels.rows,
        _SMALL,
        60,
    ),
    Piece(
        "parity",
        CORRECTNESS,
        "logits and gradients against PyTorch, float32 and bfloat16",
        numerics.parity,
        _checked("0.5b", "135m"),
        90,
    ),
    Piece(
        "sweep",
        CORRECTNESS,
        "a sweep with fused against separate refresh and against PyTorch; the sampler's"
        " log-probabilities against the trainer's; float32 and bfloat16",
        numerics.sweeps,
        _checked("135m"),
        120,
    ),
    *(
        Piece(
            f"update_{workload}_{model}",
            UPDATE,
            f"an update sweep, {workload}-shaped, {model}, against PyTorch",
            speed.update,
            _update(workload, model, groups),
            about_s,
        )
        for model, workload, groups, about_s in (
            ("0.5b", "bfcl", 4, 180),
            ("0.5b", "order_desk", 64, 180),
        )
    ),
    Piece(
        "rollout_0.5b",
        ROLLOUT,
        "a rollout, bfcl-shaped, 0.5b, against generate with a static KV cache",
        speed.rollout,
        _rollout("0.5b", 4),
        150,
    ),
    Piece(
        "quickstart",
        QUICKSTART,
        "configs/quickstart.py trained to its end",
        quickstart.train,
        _SMALL,
        150,
    ),
    *(
        Piece(
            f"update_{workload}_1.5b",
            UPDATE,
            f"an update sweep, {workload}-shaped, 1.5b, against PyTorch",
            speed.update,
            _update(workload, "1.5b", groups),
            240,
        )
        for workload, groups in (("bfcl", 4), ("order_desk", 32))
    ),
    Piece(
        "rollout_1.5b",
        ROLLOUT,
        "a rollout, bfcl-shaped, 1.5b, against generate with a static KV cache",
        speed.rollout,
        _rollout("1.5b", 4),
        200,
    ),
)
BY_NAME = {piece.name: piece for piece in PIECES}


def rehearsed(settings: Settings) -> Settings:
    """The smallest sizes of the same kind."""
    desk = settings.workload == "order_desk"
    return replace(
        settings,
        workload="order_desk" if desk else "long",
        model="nano",
        scale=None if desk else 0.05,
        turns=None if desk else 2,
        groups=1,
        group_size=2,
        repeats=1,
        torch=("eager",),
    )


def run(piece: Piece, record: Record, size: int, *, rehearse: bool) -> None:
    """Measures a piece in one of its sizes, in this process."""
    settings = piece.sizes[size].settings
    if rehearse:
        settings = rehearsed(settings)
    about: dict[str, Any] = {"rehearsal": rehearse}
    if piece.section != QUICKSTART:  # whose training takes the device
        about["device"] = jax.devices()[0].device_kind
    if piece.sizes is not _SMALL:
        about["size"] = str(Size(settings))
    record.put(**about)
    piece.measure(record, settings, rehearse)
