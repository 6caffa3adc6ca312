"""Tensors in safetensors files: read piece by piece, written in files of bounded size."""

from __future__ import annotations

import collections
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from seeupo_jax.configuration.user_code import shown
from seeupo_jax.durable_files import make_folder
from seeupo_jax.policy.files.folder_files import check_content, read_json_object

_LOGGER = logging.getLogger(__name__)
FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")
FP8 = "F8_E4M3"


class Tensors(Protocol):
    """Named tensors that can be read in parts; names and orientation are Hugging Face's."""

    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, of any floating-point type."""
        ...


class SafetensorsFolder:
    """The tensors of a model folder: one file, or several and their index.

    A file is mapped into memory only while one of its tensors is read: the pages of a model larger
    than the host's memory are never all held.

    Raises:
      ValueError: a file that is missing, truncated or not safetensors, a tensor that the index
        places in a file without it, or numbers of another type than float32, float16, bfloat16.
    """

    def __init__(
        self,
        folder: Path,
        file: str = FILE,
        *,
        prefix: str = "",
        more: Sequence[str] = (),
    ):
        """
        Args:
          file: the name of a single file. prefix: what every name in it begins with, and is left
            out here. more: types that are allowed too, by the format's names.
        """
        self._prefix = prefix
        self._allowed = (*_DTYPES, *more)
        self._file_of = _index(folder, file)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._first_byte: dict[Path, dict[str, int]] = {}
        for file in sorted(set(self._file_of.values())):
            self._read_header(file)
        for name, place in self._file_of.items():
            if name.removeprefix(prefix) not in self.shapes:
                raise ValueError(f"{place} lacks {name}, which the index of {folder} places there.")

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        if self.dtypes[name] == FP8:
            return self._read_fp8(name, index)
        name = self._prefix + name
        with _open(self._file_of[name]) as tensors:
            return tensors.get_slice(name)[index]

    def _read_fp8(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor of a type that the library does not give to NumPy: bytes, by hand."""
        file = self._file_of[self._prefix + name]
        if file not in self._first_byte:
            self._first_byte[file] = _first_bytes(file)
        first = self._first_byte[file][self._prefix + name]
        tensor = np.memmap(file, np.uint8, "r", offset=first, shape=self.shapes[name])
        return np.array(tensor[index]).view(ml_dtypes.float8_e4m3fn)

    def _read_header(self, file: Path) -> None:
        with _open(file) as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_slice(name)
                if not name.startswith(self._prefix):
                    raise ValueError(f"{file} holds {name}; allowed: {self._prefix}NAME.")
                if self._file_of.setdefault(name, file) != file:
                    raise ValueError(f"{file} and {self._file_of[name]} both hold {name}.")
                if tensor.get_dtype() not in self._allowed:
                    raise ValueError(
                        f"{file}: {name} is of type {tensor.get_dtype()}; allowed:"
                        f" {', '.join(self._allowed)}."
                    )
                name = name.removeprefix(self._prefix)
                self.shapes[name] = tuple(tensor.get_shape())
                self.dtypes[name] = tensor.get_dtype()


class RenamedTensors:
    """Some tensors of a folder, under other names; that the others are not read a warning says.

    begins: beginnings of names in the folder -> of names here.
    """

    def __init__(self, tensors: Tensors, begins: Mapping[str, str], folder: Path):
        self._tensors, self._name_there = tensors, dict[str, str]()
        for name in tensors.shapes:
            begin = next((each for each in begins if name.startswith(each)), None)
            if begin is not None:
                self._name_there[begins[begin] + name.removeprefix(begin)] = name
        self.shapes = {name: tensors.shapes[there] for name, there in self._name_there.items()}
        if others := tensors.shapes.keys() - set(self._name_there.values()):
            parts = ", ".join(sorted({_part(name) for name in others}))
            _LOGGER.warning("%s: %d tensors are not read: %s", folder, len(others), parts)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._tensors.read(self._name_there[name], index)


def _part(name: str) -> str:
    """The part of a model that a tensor's name begins with."""
    first, *rest = name.split(".")
    if first != "model":
        return first
    return ".".join([first, *rest[: 2 if rest[0] == "layers" else 1]])


def _index(folder: Path, file: str) -> dict[str, Path]:
    """Which file holds which tensor: the single file where there is one, as in `transformers`."""
    single, index = folder / file, folder / f"{file}.index.json"
    if single.is_file():
        with _open(single) as tensors:
            return dict.fromkeys(tensors.keys(), single)
    if not index.is_file():
        raise ValueError(f"{folder}: no {single.name} and no {index.name}; allowed: one of them.")
    placed = read_json_object(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(each, str) for each in placed.values()):
        raise ValueError(
            f"{index}: weight_map is {shown(placed)}; allowed: the file of each tensor, by name."
        )
    files = {name: folder / file for name, file in placed.items()}
    for file in sorted(set(files.values())):
        if not file.is_file():
            raise ValueError(f"no file {file}, which {index} names.")
    return files


def _first_bytes(file: Path) -> dict[str, int]:
    """Where each tensor begins in a file: after its header, whose length is the first number."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


def _open(file: Path) -> Any:
    try:
        check_content(file)
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from None


def write_file(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Writes one file, which may be read by whom other new files may: the library's only by us."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)


def write_tensors(
    folder: Path,
    sizes: Mapping[str, int],
    read: Callable[[str], np.ndarray],
    max_file_bytes: int,
    *,
    writes: bool = True,
) -> None:
    """Writes tensors into a folder in the layout of `transformers`, in place of older files.

    Args:
      sizes: bytes of each tensor. read: loads it; one file's tensors are held at a time.
      max_file_bytes: of a file that holds more than one tensor.
      writes: False where another process writes and this one only takes part in reading.
    """
    parts = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    names = itertools.chain(*parts.filename_to_tensors.values())
    tensors = ((name, read(name)) for name in names)
    try:
        if writes:
            _write_files(folder, parts, tensors)
    finally:
        # Reading is collective: where writing fails, the others still wait for the rest.
        collections.deque(tensors, maxlen=0)


def _write_files(
    folder: Path, parts: StateDictSplit, tensors: Iterator[tuple[str, np.ndarray]]
) -> None:
    make_folder(folder)
    for old in [*folder.glob("model*.safetensors"), folder / INDEX_FILE]:
        old.unlink(missing_ok=True)
    for file, names in parts.filename_to_tensors.items():
        write_file(dict(itertools.islice(tensors, len(names))), folder / file)
    if parts.is_sharded:
        index = {"metadata": parts.metadata, "weight_map": parts.tensor_to_filename}
        (folder / INDEX_FILE).write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
