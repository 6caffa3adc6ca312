"""Loads model folders and files into a sharded model; writes folders for `transformers`."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import seeupo_jax
from seeupo_jax.configuration import schema
from seeupo_jax.parallel.distributed import to_host
from seeupo_jax.parallel.mesh import param_shardings
from seeupo_jax.policy import lora
from seeupo_jax.policy.architecture import SELECTION_BIAS, Architecture
from seeupo_jax.policy.families import FAMILIES, WITH_IMAGES, WITH_MORE, WITH_MORE_LAYERS
from seeupo_jax.policy.files import gguf_vocabulary
from seeupo_jax.policy.files.block_scaled import BlockScaledTensors, block_size, is_fp8
from seeupo_jax.policy.files.folder_files import read_json_object
from seeupo_jax.policy.files.gguf_parts import part_files
from seeupo_jax.policy.files.hub_snapshot import hub_snapshot, is_hub_name
from seeupo_jax.policy.files.huggingface_tokenizer import gguf_tokenizer
from seeupo_jax.policy.files.model_config import config_json, read_architecture
from seeupo_jax.policy.files.parameter_names import (
    StoredParameter,
    leaf_at,
    shapes_in_file,
    stored_parameters,
)
from seeupo_jax.policy.files.placement import check_tensors, load_params
from seeupo_jax.policy.files.safetensors_files import (
    FP8,
    RenamedTensors,
    SafetensorsFolder,
    Tensors,
    write_tensors,
)
from seeupo_jax.policy.files.stacked_experts import StackedExperts, pack
from seeupo_jax.policy.files.tokenizer import Tokenizer, load_tokenizer
from seeupo_jax.policy.network import abstract_network, split_model
from seeupo_jax.policy.transformer import Transformer

if TYPE_CHECKING:
    from seeupo_jax.policy.files.gguf import GgufFile

CONFIG_FILE = "config.json"
PACKAGE = "package:"  # prefix of the paths of bundled policies
MAX_FILE_BYTES = 5 * 10**9


def resolve_path(path: str | Path) -> Path:
    """The folder or file of a model path; `package:NAME` is a bundled policy.

    OWNER/NAME or OWNER/NAME@REVISION that is nothing here is a model of the Hugging Face Hub.

    Raises:
      ValueError: neither a folder with a config.json or adapters, nor a GGUF file, nor a model of
        the hub that is in its cache or can be downloaded.
    """
    place, hub = Path(path), "OWNER/NAME of the Hugging Face Hub"
    if str(path).startswith(PACKAGE):
        place = Path(seeupo_jax.__path__[0]) / "assets" / str(path).removeprefix(PACKAGE)
    elif is_hub_name(path):
        try:
            place = hub_snapshot(str(path))
        except ValueError as error:
            hub = str(error)
    if is_model(place):
        return place
    fetch = ""
    if "third_party" in place.parts:
        fetch = ", which `sh third_party/models/setup.sh` of the repository fetches"
    raise ValueError(
        f"model path: got {str(path)!r}; allowed: a folder with a {CONFIG_FILE}, a .gguf file"
        f"{fetch}, {PACKAGE}NAME, or {hub}."
    )


def is_model(place: Path) -> bool:
    """Whether a folder has a model or adapters, or a file is a GGUF file."""
    if place.suffix == ".gguf" and place.is_file():
        return True
    if lora.turn_folders(place):
        return True
    return any((place / file).is_file() for file in (CONFIG_FILE, lora.CONFIG_FILE))


def base_model_folder(place: Path) -> Path:
    """The folder or file of a model: for a folder of adapters, that of the model they belong to.

    Raises:
      ValueError: adapters whose model is not here.
    """
    base = None if (place / CONFIG_FILE).is_file() else lora.base_model_path(place)
    if base is None:
        return place
    try:
        found = resolve_path(base)
        if lora.base_model_path(found) is None:
            return found
    except ValueError:
        pass  # the sentence below says which adapters it is of
    of_adapters = next(iter(lora.turn_folders(place)), place) / lora.CONFIG_FILE
    raise ValueError(
        f"{of_adapters}: base_model_name_or_path is {base!r}; allowed: a model that is"
        " here, or its folder as config.model.path and these adapters as config.lora.path."
    )


def load_architecture(path: str | Path, **compute_options: Any) -> Architecture:
    """The architecture of a model folder or a GGUF file; no weights are read.

    That of a folder of adapters is their model's.

    Args:
      compute_options: fields of `Architecture` that no config.json has (dtype, scan_layers, ...).

    Raises:
      ValueError: a missing or damaged file, or a setting that is not supported.
    """
    place = base_model_folder(resolve_path(path))
    if place.suffix == ".gguf":
        return read_architecture(_gguf(place).config, str(place), **compute_options)
    file = place / CONFIG_FILE
    return read_architecture(read_json_object(file), str(file), **compute_options)


def _gguf(file: Path) -> GgufFile:
    """A GGUF file; its library is imported with the first one."""
    stats = [part.stat() for part in part_files(file)]
    return _read_gguf(file.absolute(), *((stat.st_mtime_ns, stat.st_size) for stat in stats))


# The last one is kept: a start asks for its config, its vocabulary and its tensors in turn.
@functools.lru_cache(maxsize=1)
def _read_gguf(file: Path, *_stamps: tuple[int, int]) -> GgufFile:
    from seeupo_jax.policy.files.gguf import GgufFile

    return GgufFile(file)


def read_tokenizer(path: str | Path, chat: schema.Chat | None = None) -> Tokenizer | None:
    """The tokenizer of a model folder or a GGUF file; None where it has none.

    A folder of adapters without one has that of their model.

    Raises:
      ValueError: a missing or damaged file; a GGUF file's vocabulary that is not supported;
        options that the tokenizer cannot honour.
    """
    place = resolve_path(path)
    if place.suffix == ".gguf":
        fields = _gguf(place).fields
        return gguf_tokenizer(fields, chat) if gguf_vocabulary.KIND in fields else None
    tokenizer, base = load_tokenizer(place, chat), base_model_folder(place)
    return tokenizer if tokenizer is not None or base == place else read_tokenizer(base, chat)


def from_pretrained(
    path: str | Path,
    *,
    mesh: jax.sharding.Mesh | None = None,
    dtype: str = "bfloat16",
    chat: schema.Chat | None = None,
    **compute_options: Any,
) -> tuple[Transformer, Tokenizer | None]:
    """Loads a model folder or a GGUF file; a folder of adapters as their model with them merged.

    Adapters per turn are not merged: a call of their model names the turn.

    Every device's part of a tensor is read separately and placed at once: the host holds one part
    at a time.

    Args:
      path: a folder, a `.gguf` file, `package:NAME`, or OWNER/NAME[@REVISION] of the Hugging Face
        Hub.
      mesh: where the parameters go, by the table in `parallel/mesh.py`; None: the default device.
      dtype: of the activations; parameters are float32 unless `param_dtype` says otherwise.
      chat: how conversations become tokens; None: as the model's own files say.
      compute_options: further fields of `Architecture`: `scan_layers`, `remat`, `attention`,
        `param_dtype`.

    Returns: the model, whose call gives logits, and its tokenizer; None where it has none.

    Raises:
      ValueError: a missing or damaged file; a tensor that is missing, extra or of another shape; a
        setting that is not supported.
    """
    folder = resolve_path(path)
    place = base_model_folder(folder)
    arch = load_architecture(place, dtype=dtype, **compute_options)
    tokenizer = read_tokenizer(folder, chat)
    tensors: Tensors = _gguf(place) if place.suffix == ".gguf" else _folder_tensors(place, arch)
    if tokenizer is not None and tokenizer.vocab_size > arch.vocab_size:
        raise ValueError(
            f"{place}: the tokenizer has {tokenizer.vocab_size} tokens; allowed: at most the"
            f" model's {arch.vocab_size}."
        )
    network, shapes = abstract_network(arch)
    stored = list(stored_parameters(arch, shapes))
    check_tensors(tensors, stored, shapes, place)
    logical_axes = network.logical_axes()
    if mesh is not None:
        param_shardings(mesh, logical_axes, shapes)  # raises where an axis does not divide
    params = load_params(tensors, stored, shapes, logical_axes, mesh, arch.param_dtype)
    model = network.bind(params)
    if folder != place:
        model = lora.load_adapters(model, folder, mesh=mesh)
        model = model if model.arch.turn_adapters else lora.merge_adapters(model)
    return model, tokenizer


def _folder_tensors(place: Path, arch: Architecture) -> Tensors:
    """The tensors of a model folder: of a model of texts and images those of its text model."""
    values = read_json_object(place / CONFIG_FILE)
    family = values["model_type"]
    packed = family in FAMILIES and FAMILIES[family].packed_experts
    tensors = _plain_tensors(place, values, more=("U8",) if packed else ())
    if (begins := _names_to_read(family, arch)) is not None:
        tensors = RenamedTensors(tensors, begins, place)
    return tensors if arch.moe is None else StackedExperts(tensors, arch.moe, packed=packed)


def _names_to_read(family: str, arch: Architecture) -> Mapping[str, str] | None:
    """Beginnings of names in a family's folders -> of a text model's; None: all are read."""
    if family not in WITH_MORE_LAYERS:
        return (WITH_IMAGES | WITH_MORE).get(family)
    layers = (f"model.layers.{layer}." for layer in range(arch.layers))
    return {name: name for name in ("model.embed_tokens.", "model.norm.", "lm_head.", *layers)}


def _plain_tensors(place: Path, values: Mapping[str, Any], *, more: Sequence[str]) -> Tensors:
    """The tensors of a folder with this config.json, those of 8 bits by their values.

    Args:
      more: types that are allowed too.
    """
    text = values.get("text_config")
    stated = [each.get("quantization_config") for each in (values, text) if isinstance(each, dict)]
    quantization = next((each for each in stated if is_fp8(each)), None)
    if quantization is None:
        return SafetensorsFolder(place, more=more)
    files = SafetensorsFolder(place, more=(*more, FP8))
    return BlockScaledTensors(files, block_size(quantization, str(place / CONFIG_FILE)))


def save_pretrained(
    model: Transformer,
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: str = "float32",
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a model folder that `transformers` loads; the tokenizer too where one is given.

    With several processes all of them call it, and process 0 writes.

    Args:
      dtype: of the tensors in the files, but for selection biases, which are float32.
      max_file_bytes: above it there are several, and an index.

    Raises:
      ValueError: no published family has the model's architecture, or it has adapters that are not
        merged (`policy/lora.py`).
    """
    if model.arch.lora is not None:
        raise ValueError(
            "save_pretrained: got a model with adapters; allowed: merge_adapters(model)."
            " The adapters themselves are written by save_adapters(model, path)."
        )
    end_ids = () if tokenizer is None else tokenizer.end_ids
    values = config_json(model.arch, end_ids, dtype)
    arch = replace(model.arch, family=values["model_type"])
    folder = Path(path)
    writes = jax.process_index() == 0
    _, params = split_model(model)
    parameters = list(stored_parameters(arch, params))
    parts: dict[str, list[tuple[StoredParameter, int]]] = {}
    for stored in parameters:
        for number, name in enumerate(stored.names):
            parts.setdefault(name, []).append((stored, number))

    def kind_of(stored: StoredParameter) -> np.dtype:
        return jnp.dtype("float32" if stored.path[-1] == SELECTION_BIAS else dtype)

    def read(name: str) -> np.ndarray:
        shares = sorted(parts[name], key=lambda part: part[0].first_row or 0)
        rows = [read_rows(*share) for share in shares]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def read_rows(stored: StoredParameter, number: int) -> np.ndarray:
        leaf = leaf_at(params, stored.path)
        leaf = leaf if stored.layer is None else leaf[stored.layer]
        leaf = leaf[number] if stored.grouped else leaf
        tensor = to_host(leaf.astype(kind_of(stored)))
        return np.ascontiguousarray(tensor.T if stored.transposed else tensor)

    sizes = {
        name: math.prod(shape) * kind_of(parts[name][0][0]).itemsize
        for name, shape in shapes_in_file(params, parameters).items()
    }
    if FAMILIES[values["model_type"]].packed_experts:
        sizes, read = pack(sizes, read)
    write_tensors(folder, sizes, read, max_file_bytes, writes=writes)
    if not writes:
        return
    (folder / CONFIG_FILE).write_text(
        json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    if tokenizer is not None:
        tokenizer.save(folder)
