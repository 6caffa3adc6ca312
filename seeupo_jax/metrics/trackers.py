"""Trackers of metrics, histograms and sample conversations: TensorBoard, W&B."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from seeupo_jax.durable_files import write_atomically

TENSORBOARD_FOLDER = "tensorboard"
WANDB_FOLDER = "wandb"
_LENIENT = "seeupo_jax"  # how paths begin whose files tensorboardX is to open as we do
_LONGEST = 4000  # characters of a message that a tracker is given
_NOT_OF_TAGS = re.compile(r"[^-/\w.]")  # characters that TensorBoard's tags do not allow
# Names that can be read back from a tag: of their characters only the `@` of `avg@K` and one `=` of
# the last part become `_`. The `=` was before the number at the end, else at the part's first `_`.
_READ_BACK = re.compile(
    r"(?:eval[-/\w.]*/(?:avg|pass)@)?[-/\w.]*"
    r"(?:(?<![^/])[-\w.]*=\d+|(?<![^/])(?:(?!_)[-\w.])*=(?!.*_\d+\Z)[-\w.]*)?"
)


@dataclass(frozen=True)
class Sample:
    """A conversation that represents its iteration.

    about: summary for a reader, by name.
    """

    split: str
    about: Mapping[str, str]
    messages: Sequence[Mapping[str, str]]

    @property
    def text(self) -> str:
        """The whole sample as text; long parts are cut, with a note."""
        parts = [f"{name}: {value}" for name, value in self.about.items()]
        for message in self.messages:
            parts.append(f"\n[{message['role']}]\n{_cut(str(message['content']))}")
        return "\n".join(parts)


def _cut(text: str) -> str:
    remaining = len(text) - _LONGEST
    return text if remaining <= 0 else f"{text[:_LONGEST]} ... and {remaining} characters more"


class Tracker(Protocol):
    """Records a run's metrics elsewhere; `MetricsWriter` drops a tracker that raises an error."""

    def write(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Scalars; texts and missing numbers are skipped."""
        ...

    def draw(
        self, iteration: int, histograms: Mapping[str, np.ndarray], samples: Sequence[Sample]
    ) -> None:
        """Takes histograms, each of at least one finite number, and conversations."""
        ...

    def close(self) -> None: ...


def tag_of(name: str) -> str:
    """A metric's unique tag in TensorBoard: characters that tags do not allow become `_`.

    Where the name cannot be read back from that, eight digits of its SHA-256 follow.
    """
    tag = _NOT_OF_TAGS.sub("_", name)
    if tag == name or _READ_BACK.fullmatch(name):
        return tag
    return f"{tag}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class _TensorBoard:
    """Event files under DIR/tensorboard."""

    def __init__(self, workdir: Path, purge_from: int | None):
        from tensorboardX import SummaryWriter
        from tensorboardX.record_writer import register_writer_factory

        self._files = _LenientFiles()
        register_writer_factory(_LENIENT, self._files)
        folder = f"{_LENIENT}:{workdir / TENSORBOARD_FOLDER}"
        # The purge makes TensorBoard hide a killed run's values of iterations that run again.
        self._writer = SummaryWriter(folder, purge_step=purge_from)

    def write(self, iteration: int, values: Mapping[str, Any]) -> None:
        for name, value in _numbers(values).items():
            self._writer.add_scalar(tag_of(name), value, iteration)
        self._flush()

    def draw(
        self, iteration: int, histograms: Mapping[str, np.ndarray], samples: Sequence[Sample]
    ) -> None:
        for name, values in histograms.items():
            self._writer.add_histogram(tag_of(name), values, iteration)
        for number, sample in enumerate(samples):
            tag = f"sample/{sample.split}/{number}"
            self._writer.add_text(tag, as_code(sample.text), iteration)
        self._flush()

    def close(self) -> None:
        self._writer.close()
        if self._files.errors:
            raise self._files.errors[0]

    def _flush(self) -> None:
        self._writer.flush()
        if self._files.errors:
            self.close()


class _LenientFiles:
    """Opens event files for tensorboardX, which writes them in a thread of its own.

    An error there would end the thread, and whoever waits for it would hang: it is kept in `errors`
    instead.
    """

    def __init__(self) -> None:
        self.errors: list[OSError] = []

    def open(self, path: str) -> _LenientFile:
        return _LenientFile(Path(path.removeprefix(f"{_LENIENT}:")), self.errors)

    def directory_check(self, path: str) -> None:
        with contextlib.suppress(OSError):  # `open` reports it
            os.makedirs(path.removeprefix(f"{_LENIENT}:"), exist_ok=True)


class _LenientFile:
    """A file that is closed at the first error, which is appended to `errors`."""

    def __init__(self, path: Path, errors: list[OSError]):
        self._path, self._errors = path, errors
        self._file: BinaryIO | None = None
        self._try(self._open)

    def write(self, data: bytes) -> None:
        if self._file is not None:
            self._try(lambda: self._file.write(data))

    def flush(self) -> None:
        if self._file is not None:
            self._try(self._file.flush)

    def close(self) -> None:
        if self._file is not None:
            self._try(self._file.close)

    def _open(self) -> None:
        self._file = self._path.open("wb")

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError as error:
            self._errors.append(error)
            file, self._file = self._file, None
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


def as_code(text: str) -> str:
    """Escapes a text so that Markdown shows it unchanged."""
    return "\n".join("    " + line for line in text.splitlines())


class _Wandb:
    """Weights & Biases, configured by WANDB_MODE, WANDB_PROJECT and its other variables.

    The run's id, WANDB_RUN_ID's or a new one, is kept in DIR/wandb, so that a resumed run is one
    run there too. An application's own run continues untouched. Iterations are a separate axis:
    those that run again are drawn again, over their earlier values.
    """

    def __init__(self, workdir: Path, purge_from: int | None):
        import wandb

        self._wandb, other = wandb, wandb.run
        number = _stored_id(workdir / WANDB_FOLDER, None if other is None else other.id)
        begin = functools.partial(
            wandb.init,
            dir=str(workdir),
            project=os.environ.get("WANDB_PROJECT", "seeupo_jax"),
            name=os.environ.get("WANDB_NAME", workdir.name),
            id=number,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),  # the display is ours
        )
        try:
            self._run = begin(reinit="return_previous" if other is None else "create_new")
            if self._run.id != number:  # the application's, which is not always `wandb.run`
                self._run = begin(reinit="create_new")
        except wandb.Error as error:
            raise ValueError(
                f"config.telemetry.trackers: wandb cannot begin ({error}); allowed: after"
                " `wandb login`, or with WANDB_MODE=offline."
            ) from None
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, iteration: int, values: Mapping[str, Any]) -> None:
        self._run.log({"iteration": iteration, **_numbers(values)})

    def draw(
        self, iteration: int, histograms: Mapping[str, np.ndarray], samples: Sequence[Sample]
    ) -> None:
        drawn: dict[str, Any] = {
            f"histogram/{name}": self._wandb.Histogram(values)
            for name, values in histograms.items()
        }
        for split in dict.fromkeys(sample.split for sample in samples):
            of_split = [sample for sample in samples if sample.split == split]
            columns = ["iteration", *of_split[0].about, "conversation"]
            rows = [[iteration, *sample.about.values(), sample.text] for sample in of_split]
            drawn[f"sample/{split}"] = self._wandb.Table(columns=columns, data=rows)
        self._run.log({"iteration": iteration, **drawn})

    def close(self) -> None:
        self._run.finish()


def _stored_id(folder: Path, taken: str | None = None) -> str:
    """The run's id: the environment's, else the kept one, else a new one; not one that is taken."""
    file = folder / "run-id.txt"
    stored = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    known = (os.environ.get("WANDB_RUN_ID"), stored, secrets.token_hex(4))
    run_id = next(each for each in known if each and each != taken)
    if run_id != stored:
        write_atomically(file, f"{run_id}\n".encode())
    return run_id


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in values.items() if isinstance(v, int | float)}


TRACKERS = {"tensorboard": _TensorBoard, "wandb": _Wandb}
_OPTIONAL = {"wandb": "pip install 'seeupo_jax[wandb]'"}  # trackers whose package need not be here


def check_trackers(names: Iterable[str]) -> None:
    """Raises ValueError on a name that is not in `TRACKERS`, or whose package is not installed."""
    for name in names:
        if name not in TRACKERS:
            allowed = ", ".join(TRACKERS)
            raise ValueError(f"config.telemetry.trackers: got {name!r}; allowed: {allowed}.")
        if name in _OPTIONAL and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"config.telemetry.trackers: got {name!r}, whose package is not installed; allowed"
                f" after: {_OPTIONAL[name]}."
            )
