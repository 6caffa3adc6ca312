"""The order desk's tasks and demonstrations as a TensorFlow Datasets builder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from seeupo_jax.envs.base import Demonstration, Tool
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.demonstrator import demonstrate
from seeupo_jax.envs.order_desk.levels import LEVELS, check_level

SOURCE = Path(__file__).parent  # the code of the desk and its demonstrator


@dataclass
class OrderDeskConfig(tfds.core.BuilderConfig):
    """One demonstrator.

    level: of the desk. skill: of the demonstrator, 0 to 1. episodes: in the train split. seed: of
    the mistakes.
    """

    level: int = 1
    skill: float = 1.0
    episodes: int = 8000
    seed: int = 0


class OrderDeskDataset(tfds.core.GeneratorBasedBuilder):
    """One record per task: its id, the demonstrator's conversation as JSON, and the score."""

    name = "order_desk"
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Cases with one customer, one or several requests."}
    BUILDER_CONFIGS: list[OrderDeskConfig] = []

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {
                "task_id": tfds.features.Text(),
                "messages": tfds.features.Text(),
                "score": tfds.features.Scalar(np.float32),
            }
        )
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, _: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {
            "train": self._generate_examples("train", self.builder_config.episodes),
            "test": self._generate_examples("test", min(1000, self.builder_config.episodes)),
        }

    def _generate_examples(self, split: str, episodes: int) -> Iterator[tuple[int, dict[str, Any]]]:
        config = self.builder_config
        for index in range(episodes):
            task_id = f"{LEVELS[config.level].prefix}{split}/{index}"
            conversation, score = demonstrate(task_id, skill=config.skill, seed=config.seed)
            messages = json.dumps(conversation.messages)
            yield index, {"task_id": task_id, "messages": messages, "score": np.float32(score)}


class StoredDemonstrations(Sequence[Demonstration]):
    """A split's conversations, read from array_record by random access."""

    def __init__(self, source: Sequence[dict[str, Any]], tools: tuple[Tool, ...]):
        self._source, self._tools = source, tools

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Demonstration:
        position = range(len(self))[index]  # supports negative indices, and ends an iteration
        messages = json.loads(self._source[position]["messages"])
        return Demonstration(tuple(messages), self._tools)


def builder(
    *,
    level: int = 1,
    skill: float = 1.0,
    episodes: int = 8000,
    seed: int = 0,
    data_dir: str | None = None,
) -> OrderDeskDataset:
    """Makes the dataset builder of one demonstrator.

    Args:
      data_dir: as in `tfds`; None: its default.

    Raises:
      ValueError: the level is unknown, the skill outside 0 to 1, or there are fewer tasks.
    """
    check_level(level)
    if not 0 <= skill <= 1:
        raise ValueError(f"order_desk skill: got {skill}; allowed: a number from 0 to 1.")
    if not 1 <= episodes <= world.SPLITS["train"]:
        allowed = f"1 to {world.SPLITS['train']}"
        raise ValueError(f"order_desk episodes: got {episodes}; allowed: {allowed}.")
    name = f"skill{float(skill)}_episodes{episodes}_seed{seed}_source{_source_digest()}"
    if level != 1:
        name = f"level{level}_{name}"
    config = OrderDeskConfig(name=name, level=level, skill=skill, episodes=episodes, seed=seed)
    with _quietly():
        return OrderDeskDataset(config=config, data_dir=data_dir, file_format="array_record")


def _source_digest() -> str:
    """A digest of the desk's code: demonstrations of other code are not reused."""
    files = sorted(SOURCE.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def load(split: str, *, data_dir: str | None = None, **options: Any) -> StoredDemonstrations:
    """Loads a split's demonstrations, which are generated on first use; options as in `builder`."""
    dataset = builder(data_dir=data_dir, **options)
    try:
        with _quietly():
            dataset.download_and_prepare()
    except FileExistsError:  # another process has written the same demonstrations
        dataset = builder(data_dir=data_dir, **options)
    tools = LEVELS[dataset.builder_config.level].tools
    return StoredDemonstrations(dataset.as_data_source(split=split), tools)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silences the builder's progress bars and messages."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
