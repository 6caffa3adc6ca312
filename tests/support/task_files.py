"""The same rows in files of every format that `seeupo_jax.tasks` reads."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = [
    {"question": f"What is {n} + {n}?", "answer": str(2 * n), "subject": "sums"} for n in range(5)
]


def write_rows(folder: Path, form: str, rows: Sequence[dict[str, Any]] = ROWS) -> str:
    """Writes rows in a format; returns what `open_records` opens."""
    path = folder / f"rows.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "json":
        path.write_text(json.dumps(rows))
    elif form in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            columns = list(rows[0])
            writer = csv.DictWriter(file, columns, delimiter="\t" if form == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=2)
    elif form == "arrow":
        write_arrow(path, rows)
    elif form == "saved":
        save_to_disk(path, rows)
    elif form == "tfds":
        return write_tfds(folder / "tfds", rows)
    return str(path)


FORMS = ("jsonl", "json", "csv", "tsv", "parquet", "arrow", "saved", "tfds")


def write_arrow(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(list(rows))
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)


def save_to_disk(folder: Path, rows: Sequence[dict[str, Any]], shards: int = 2) -> None:
    """The files that `Dataset.save_to_disk` of datasets 5.2 writes."""
    folder.mkdir(parents=True)
    names = [f"data-{shard:05d}-of-{shards:05d}.arrow" for shard in range(shards)]
    size = -(-len(rows) // shards)
    for shard, name in enumerate(names):
        write_arrow(folder / name, rows[shard * size : (shard + 1) * size])
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state | {"_fingerprint": "0", "_split": None}))
    (folder / "dataset_info.json").write_text("{}")


def save_splits(folder: Path, splits: dict[str, Sequence[dict[str, Any]]]) -> None:
    """The files that `DatasetDict.save_to_disk` writes."""
    for split, rows in splits.items():
        save_to_disk(folder / split, rows, shards=1)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))


def write_tfds(folder: Path, rows: Sequence[dict[str, str]]) -> str:
    """A dataset of texts, prepared by tfds itself, with the splits train and test."""
    builder = _builder()(data_dir=folder, file_format="array_record")
    builder.rows = {"train": rows, "test": rows[:2]}
    with contextlib.redirect_stdout(io.StringIO()):
        builder.download_and_prepare()
    return f"tfds:{next(folder.glob('task_rows/*'))}"


@functools.cache
def _builder() -> Any:
    import tensorflow_datasets as tfds  # it takes seconds
    from absl import logging

    logging.set_verbosity(logging.ERROR)
    tfds.disable_progress_bar()

    class TaskRows(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            features = {name: tfds.features.Text() for name in ROWS[0]}
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                disable_shuffling=True,
            )

        def _split_generators(self, _: Any) -> Any:
            return {split: list(enumerate(rows)) for split, rows in self.rows.items()}

        def _generate_examples(self) -> Any:
            raise NotImplementedError  # the splits are lists

    return TaskRows
