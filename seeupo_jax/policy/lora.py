"""Low-rank adapters: attached to a model, merged into it, stored in PEFT's format."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.model_schema import MODEL_SIZES, PROJECTIONS, is_pattern
from seeupo_jax.configuration.user_code import shown
from seeupo_jax.durable_files import make_folder
from seeupo_jax.parallel.distributed import place, to_host
from seeupo_jax.parallel.mesh import param_shardings
from seeupo_jax.policy.architecture import FEED_FORWARD, Architecture, LoraAdapters
from seeupo_jax.policy.families import FAMILIES
from seeupo_jax.policy.files import fused_adapters
from seeupo_jax.policy.files.expert_adapters import (
    PARAMETERS,
    ExpertAdapterTensors,
    parameters_of,
    targets_of,
    to_peft,
)
from seeupo_jax.policy.files.folder_files import read_json_object
from seeupo_jax.policy.files.hub_snapshot import hub_revision, is_hub_name, split_revision
from seeupo_jax.policy.files.parameter_names import leaf_at, stored_parameters
from seeupo_jax.policy.files.placement import check_tensors, load_params
from seeupo_jax.policy.files.safetensors_files import SafetensorsFolder, Tensors, write_file
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy.network import (
    ADAPTER,
    Network,
    abstract_network,
    join_params,
    split_model,
    split_trainable,
)
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.policy.turn_adapters import adapter_of, stack_adapters

_LOGGER = logging.getLogger(__name__)
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
TURN_FOLDER = "adapter_{}"  # of one turn's adapter, where adapters are per turn
PREFIX = "base_model.model."  # before every module's name in PEFT's files
TARGETS = schema.Lora.targets
_KEPT = 0.9  # of what adapters add, where merging them is not worth a warning
_LARGEST_ALPHA = 10**6  # thousands are published
# Fields of an adapter_config.json that change the computation, and their supported values.
_FIXED: dict[str, Sequence[Any]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "layers_pattern": (None, [], "", "layers", ["layers"]),
    "exclude_modules": (None, []),
    "trainable_token_indices": (None, []),
    # The others change the base model's weights when they are loaded.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "mica"),
    "alora_invocation_tokens": (None, []),  # the adapter would begin within a text
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "arrow_config": (None,),
}


def attach_adapters(
    model: Transformer, lora: LoraAdapters, *, seed: int = 0, mesh: jax.sharding.Mesh | None = None
) -> Transformer:
    """The model with new adapters, which have no effect yet: B is zero.

    A is uniform within 1/sqrt(fan-in), as in PEFT; each layer's depends on its name and the seed.
    Adapters per turn all begin as the one would that is for all turns.

    Raises:
      ValueError: the model has adapters already, or lacks a target.
    """
    if model.arch.lora is not None:
        raise ValueError("attach: the model has adapters already; allowed: merge_adapters(model).")
    if lora.per_turn:
        alone = attach_adapters(model, replace(lora, per_turn=0), seed=seed, mesh=mesh)
        return stack_adapters([alone] * lora.per_turn, mesh)
    network, shapes = with_adapters(model.arch, lora)
    new, _ = split_trainable(network, shapes)
    for stored in stored_parameters(network.arch, new):
        name = f"{stored.names[0]}{stored.first_row or ''}"
        *parents, leaf = stored.path
        node = leaf_at(new, parents)
        shape = node[leaf].shape
        if stored.layer is None:
            node[leaf] = _initial(name, leaf, shape, seed)
            continue
        if stored.layer == 0:
            node[leaf] = jnp.zeros(shape)
        layer = _initial(name, leaf, shape[1:], seed)
        node[leaf] = node[leaf].at[stored.layer].set(layer)
    if mesh is not None:
        logical_axes, _ = split_trainable(network, network.logical_axes())
        new = jax.tree.map(place, new, param_shardings(mesh, logical_axes, new))
    return network.bind(join_params(new, split_model(model)[1]))


def merge_adapters(model: Transformer) -> Transformer:
    """The model with its adapters added into its kernels, in float32; without them it is itself.

    Kernels keep their type. Where its rounding loses more than a tenth of what the adapters add, a
    warning says so.

    Raises:
      ValueError: adapters per turn.
    """
    if model.arch.lora is None:
        return model
    if model.arch.turn_adapters:
        raise ValueError(
            f"merge_adapters: got {model.arch.turn_adapters} adapters per turn; allowed: one of"
            " them, as adapter_of(model, turn) gives it."
        )
    scale = model.arch.lora.scale
    added: list[tuple[jax.Array, jax.Array]] = []  # along what the adapters add, and all of it

    def merged(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        node = _with_merged_experts(node, scale, added)
        if "lora_a" in node:
            kernel = node["kernel"]
            delta = jnp.matmul(node["lora_a"], node["lora_b"], precision="highest") * scale
            old = kernel.astype(jnp.float32)
            node = node | {"kernel": (old + delta).astype(kernel.dtype)}
            change = node["kernel"].astype(jnp.float32) - old
            added.append((jnp.sum(change * delta), jnp.sum(delta * delta)))
        return {k: merged(v) for k, v in node.items() if not str(k).startswith(ADAPTER)}

    network, _ = abstract_network(replace(model.arch, lora=None))
    params = merged(split_model(model)[1])
    along, whole = (float(sum(each)) for each in zip(*added, strict=True))
    if along < _KEPT * whole:
        _LOGGER.warning(
            "merging adapters: rounding to the model's type keeps %.0f%% of what they add; all of"
            " it is kept with lora.merge=False, or with model.param_dtype=float32.",
            100 * along / whole,
        )
    return network.bind(params)


def save_adapters(
    model: Transformer, path: str | Path, base: str | Path, tokenizer: Tokenizer | None = None
) -> None:
    """Writes a model's adapters as PEFT does; with several processes all call it, 0 writes.

    Those of turns go into folders of their own, `adapter_0` and so on, which `load_adapters` reads
    together and PEFT one by one.

    Args:
      base: the model that they belong to. A folder is written as an absolute path, by which PEFT
        and `from_pretrained` find it from any folder; a name of the Hugging Face Hub as it is, with
        its revision.
      tokenizer: written too where one is given.

    Raises:
      ValueError: the model has none, or some that such a folder cannot hold.
    """
    lora = model.arch.lora
    if lora is None:
        raise ValueError("save_adapters: got a model without adapters; allowed: one with them.")
    if lora.per_turn:
        return _save_turns(model, Path(path), base, tokenizer)
    network, params = split_model(model)
    adapters, _ = split_trainable(network, params)
    if some := adapters_of_some_parts(model.arch, adapters):
        raise ValueError(f"save_adapters: got adapters {some}; allowed: merge_adapters(model).")
    tensors = to_peft(_tensors_in_file(model.arch, adapters))
    if jax.process_index() != 0:
        return
    folder = Path(path)
    make_folder(folder)
    write_file(tensors, folder / WEIGHTS_FILE)
    values = {**_base_json(base), **_config_json(model.arch, tensors)}
    (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)


def _save_turns(
    model: Transformer, folder: Path, base: str | Path, tokenizer: Tokenizer | None
) -> None:
    for number in range(model.arch.turn_adapters):
        save_adapters(adapter_of(model, number), folder / TURN_FOLDER.format(number), base)
    if tokenizer is not None and jax.process_index() == 0:
        tokenizer.save(folder)


def _base_json(base: str | Path) -> dict[str, Any]:
    """How an adapter_config.json names the adapters' model."""
    if not is_hub_name(base):
        return {"base_model_name_or_path": os.path.abspath(base)}
    repo, _ = split_revision(str(base))
    return {"base_model_name_or_path": repo, "revision": hub_revision(base)}


def _tensors_in_file(arch: Architecture, adapters: Any) -> dict[str, np.ndarray]:
    """The tensors of adapters by PEFT's names, but for those of experts."""
    parts: dict[str, dict[int | None, np.ndarray]] = {}
    for stored in stored_parameters(arch, adapters):
        leaf = leaf_at(adapters, stored.path)
        x = to_host(leaf if stored.layer is None else leaf[stored.layer])
        x = np.ascontiguousarray(x.T if stored.transposed else x)
        parts.setdefault(PREFIX + stored.names[0], {})[stored.first_row] = x
    return {
        name: rows[None]
        if None in rows
        else fused_adapters.to_peft([rows[row] for row in sorted(rows)], name)
        for name, rows in parts.items()
    }


def _config_json(arch: Architecture, tensors: Iterable[str]) -> dict[str, Any]:
    """The adapter_config.json of a model's adapters, without the model's place.

    Args:
      tensors: their names.
    """
    lora, of_experts = arch.lora, arch.expert_adapters
    fused = {name for name in map(fused_adapters.module_of, tensors) if name is not None}
    within = {part: name for name in fused for part in fused_adapters.MODULES[name]}
    names = dict.fromkeys(within.get(name, name) for name in _modules(arch))
    ranks, alphas = fused_adapters.patterns(lora, fused)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "lora_dropout": 0.0,
        "target_modules": list(names) if lora.pattern is None else lora.pattern,
        "target_parameters": None if of_experts is None else parameters_of(of_experts.targets),
        "layers_to_transform": None if lora.layers is None else list(lora.layers),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "use_rslora": lora.rslora,
        "modules_to_save": None,
        "inference_mode": True,
    }


def adapters_of_some_parts(arch: Architecture, adapters: Any) -> str | None:
    """Which adapters a folder in PEFT's format cannot hold; None: it can hold all.

    Matrices that share a tensor in the family's folders (`qkv_proj` of Phi-3) are one module to
    PEFT, so all of them have adapters, selected by names.

    Args:
      adapters: their tree, or that of their shapes.
    """
    stored = list(stored_parameters(arch, adapters))
    if _packs_experts(arch) and any(".experts." in each.names[0] for each in stored):
        return f"of experts, which {arch.family} packs in another order than PEFT's files here"
    counts: dict[str, int] = {}
    for each in stored:
        if each.first_row is not None:
            counts[each.names[0]] = counts.get(each.names[0], 0) + 1
    modules = {name: fused_adapters.module_of(name) or "" for name in counts}
    wrong = {
        module
        for name, module in modules.items()
        if arch.lora.pattern is not None or counts[name] < len(fused_adapters.MODULES[module])
    }
    if not wrong:
        return None
    how = "" if arch.lora.pattern is None else " by a regular expression"
    return f"of parts of {', '.join(sorted(wrong))}{how}, each one module to PEFT"


def _packs_experts(arch: Architecture) -> bool:
    return arch.family is not None and FAMILIES[arch.family].packed_experts


def load_adapters(
    model: Transformer,
    path: str | Path,
    *,
    mesh: jax.sharding.Mesh | None = None,
    per_turn: int = 0,
) -> Transformer:
    """The model with the adapters of a folder in PEFT's format, or with those of turns.

    Args:
      path: with `adapter_config.json`, or with folders `adapter_0`, `adapter_1`, ... that have one.
      per_turn: number of turns whose adapters begin as the one of the folder; 0: one for all turns.

    Raises:
      ValueError: a missing or damaged file, a setting that is not supported, or tensors that do not
        fit the model.
    """
    folder = Path(path)
    folders, lora = turn_folders(folder), read_lora(folder)
    if per_turn and not lora.per_turn:
        return stack_adapters([load_adapters(model, folder, mesh=mesh)] * per_turn, mesh)
    if folders:
        models = [load_adapters(model, each, mesh=mesh) for each in folders]
        return stack_adapters(models, mesh)
    network, shapes = with_adapters(model.arch, lora)
    wanted, _ = split_trainable(network, shapes)
    tensors: Tensors = SafetensorsFolder(folder, WEIGHTS_FILE, prefix=PREFIX)
    if network.arch.expert_adapters is not None:
        if _packs_experts(network.arch):
            raise ValueError(
                f"{folder}: got adapters of experts, which {network.arch.family} packs in another"
                " order than PEFT's files here; allowed: adapters of other modules."
            )
        tensors = ExpertAdapterTensors(tensors, network.arch.moe.experts, lora.targets)
    stored = list(stored_parameters(network.arch, wanted))
    if rows := fused_adapters.rows_of_parts(wanted, stored):
        tensors = fused_adapters.FusedAdapterTensors(tensors, lora.rank, rows, str(folder))
    check_tensors(tensors, stored, wanted, folder)
    logical_axes, _ = split_trainable(network, network.logical_axes())
    adapters = load_params(tensors, stored, wanted, logical_axes, mesh, "float32")
    return network.bind(join_params(adapters, _base(model)))


def base_model_path(folder: Path) -> str | None:
    """The path of the model that a folder's adapters belong to; None: it has no adapters.

    Of adapters per turn it is that of the first one.

    Raises:
      ValueError: a damaged file, or one that names no model.
    """
    file = next((each / CONFIG_FILE for each in turn_folders(folder)), folder / CONFIG_FILE)
    if not file.is_file():
        return None
    values = read_json_object(file)
    base, revision = values.get("base_model_name_or_path"), values.get("revision")
    if not isinstance(base, str) or not base:
        raise ValueError(
            f"{file}: base_model_name_or_path is {shown(base)}; allowed: the folder of a model."
        )
    named = is_hub_name(base) and isinstance(revision, str) and revision
    return f"{base}@{revision}" if named else base


def turn_folders(folder: Path) -> list[Path]:
    """The folders of the adapters of turns in a folder; without any: it has none."""
    if (folder / CONFIG_FILE).is_file():
        return []
    found: list[Path] = []
    while (each := folder / TURN_FOLDER.format(len(found)) / CONFIG_FILE).is_file():
        found.append(each.parent)
    return found


def read_lora(folder: Path) -> LoraAdapters:
    """The adapters of an adapter_config.json, or of those of turns.

    Raises:
      ValueError: no such file, an unsupported setting, or a single turn, or turns with a gap or
        whose settings differ.
    """
    folders = turn_folders(folder)
    if not folders:
        return _read_lora(folder / CONFIG_FILE)
    first, *others = [_read_lora(each / CONFIG_FILE) for each in folders]
    if not others:
        raise ValueError(
            f"{folder}: got the adapter of a single turn, {folders[0].name}; allowed: those of"
            " several, without a gap, or the path of that folder itself."
        )
    beyond = [*folder.glob(f"{TURN_FOLDER.format('[0-9]*')}/{CONFIG_FILE}")]
    if len(beyond) > len(folders):
        missing = TURN_FOLDER.format(len(folders))
        raise ValueError(
            f"{folder}: got adapters of turns beyond {missing}, which is missing; allowed: those of"
            " all turns, without a gap."
        )
    for each, lora in zip(folders[1:], others, strict=True):
        if lora != first:
            raise ValueError(
                f"{each / CONFIG_FILE}: got other settings than in {folders[0].name}; allowed: the"
                " same rank, alpha, scale, targets and layers in all turns' adapters."
            )
    return replace(first, per_turn=len(folders))


def _read_lora(file: Path) -> LoraAdapters:
    if not file.is_file():
        raise ValueError(f"no file {file}; a folder of adapters in PEFT's format has one.")
    values = read_json_object(file)
    for key, allowed in _FIXED.items():
        if values.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{file}: {key} is {shown(values[key])}; allowed: {allowed[0]!r}.")
    missing = [key for key in ("r", "lora_alpha", "target_modules") if key not in values]
    if missing:
        raise ValueError(f"{file}: {', '.join(missing)} missing; an adapter config has them.")
    rank, alpha, rslora = values["r"], values["lora_alpha"], values.get("use_rslora")
    most = MODEL_SIZES["width"]
    if type(rank) is not int or not 1 <= rank <= most:
        raise ValueError(f"{file}: r is {shown(rank)}; allowed: a whole number from 1 to {most}.")
    if type(alpha) not in (int, float) or not 0 < alpha <= _LARGEST_ALPHA:
        allowed = f"a number > 0 and <= {_LARGEST_ALPHA}"
        raise ValueError(f"{file}: lora_alpha is {shown(alpha)}; allowed: {allowed}.")
    if rslora not in (False, True, None):
        raise ValueError(f"{file}: use_rslora is {shown(rslora)}; allowed: true or false.")
    targets, layers = _all_targets(file, values), _layers(file, values)
    if values.get("lora_dropout"):
        _LOGGER.warning("%s: lora_dropout is not applied: the sampler has none either", file)
    lora = LoraAdapters(rank, float(alpha), targets, bool(rslora), layers)
    _check_patterns(file, values, lora)
    return lora


def _check_patterns(file: Path, values: Mapping[str, Any], lora: LoraAdapters) -> None:
    """ValueError: ranks or alphas of some modules, but those of several parts' adapters."""
    keys = ("rank_pattern", "alpha_pattern")
    stated = [values.get(key) or {} for key in keys]
    named = stated[0] if isinstance(stated[0], dict) else {}
    wanted = fused_adapters.patterns(lora, fused_adapters.MODULES.keys() & named)
    for key, actual, allowed in zip(keys, stated, wanted, strict=True):
        if not isinstance(actual, dict) or actual.keys() != allowed.keys():
            fits = False
        else:
            numbers = all(type(x) in (int, float) for x in actual.values())
            fits = numbers and all(math.isclose(actual[name], allowed[name]) for name in allowed)
        if not fits:
            got = shown(values.get(key))
            raise ValueError(f"{file}: {key} is {got}; allowed: {allowed or None}.")


def _all_targets(file: Path, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The targets of a file, with those of experts that `target_parameters` names."""
    modules, parameters = values["target_modules"], values.get("target_parameters")
    if parameters in (None, []):
        return _targets(file, modules)
    names = ", ".join(PARAMETERS.values())
    if not isinstance(parameters, list) or any(x not in PARAMETERS.values() for x in parameters):
        raise ValueError(
            f"{file}: target_parameters is {shown(parameters)}; allowed: one or more of {names}."
        )
    named = () if modules in (None, []) else _targets(file, modules)
    if {*named} - {*PROJECTIONS} or {*named} & {*FEED_FORWARD}:
        raise ValueError(
            f"{file}: target_modules is {shown(modules)} with target_parameters; allowed: a list of"
            f" {', '.join(x for x in PROJECTIONS if x not in FEED_FORWARD)}."
        )
    return tuple(x for x in PROJECTIONS if x in {*named, *targets_of(parameters)})


def _targets(file: Path, targets: Any) -> tuple[str, ...]:
    """The `target_modules` of a file as `LoraAdapters` has them."""
    targets = list(TARGETS) if targets == "all-linear" else targets
    if isinstance(targets, str) and is_pattern(targets):
        return (targets,)
    if isinstance(targets, list) and all(isinstance(name, str) for name in targets):
        targets = fused_adapters.parts_of(targets)
    known = [*PROJECTIONS]  # of which a value may be asked that is no text
    if not isinstance(targets, list) or not targets or any(t not in known for t in targets):
        raise ValueError(
            f"{file}: target_modules is {shown(targets)}; allowed: a list of one or more of"
            f" {', '.join(PROJECTIONS)}, or a regular expression of modules' full names."
        )
    return tuple(t for t in PROJECTIONS if t in targets)


def _layers(file: Path, values: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The `layers_to_transform` of a file; None: all."""
    given = values.get("layers_to_transform")
    layers = [given] if type(given) is int else [] if given is None else given
    if not isinstance(layers, list) or any(type(x) is not int or x < 0 for x in layers):
        raise ValueError(
            f"{file}: layers_to_transform is {shown(given)}; allowed: a list of layers' numbers."
        )
    if layers and isinstance(values["target_modules"], str):
        raise ValueError(
            f"{file}: layers_to_transform is {shown(given)} with target_modules"
            f" {shown(values['target_modules'])}; allowed: with a list of names only."
        )
    return tuple(sorted(set(layers))) or None


def with_adapters(arch: Architecture, lora: LoraAdapters) -> tuple[Network, Any]:
    """The network of an architecture with adapters, and the shapes of its parameters.

    Raises:
      ValueError: a target that the model does not have or that cannot be adapted, or layers with
        different ones where layers are stacked.
    """
    got = f"config.lora.targets: got {', '.join(lora.targets)}"
    if lora.layers is not None:
        got += f" in layers {', '.join(map(str, lora.layers))}"
    if arch.moe is not None:
        _check_experts(arch, lora, got)
    if others := _matched(lora, ("model.embed_tokens", "lm_head")):
        raise ValueError(
            f"{got}, which matches {others[0]}; allowed: only projections of layers"
            f" ({', '.join(PROJECTIONS)})."
        )
    has = (*arch.attention_projections, *FEED_FORWARD)
    if lora.pattern is None and (others := [x for x in lora.targets if x not in has]):
        raise ValueError(
            f"{got}, of which the model has no {', '.join(others)}; allowed: {', '.join(has)}."
        )
    whole = replace(arch, lora=lora, scan_layers=False)
    of_experts = whole.expert_adapters is not None
    adapted = [
        set(whole.layer_adapters(layer).targets) | ({"experts"} if of_experts else set())
        for layer in range(arch.layers)
    ]
    if not any(adapted):
        last = f"model.layers.{arch.layers - 1}.{PROJECTIONS['o_proj']}"
        raise ValueError(
            f"{got}, which selects no projection of the model's {arch.layers} layers; allowed: an"
            f" expression that matches full names, such as {last}."
        )
    if arch.scan_layers and any(names != adapted[0] for names in adapted):
        raise ValueError(
            f"{got}, which selects other projections in one layer than in another; allowed with"
            " config.model.scan_layers=True: the same in every layer."
        )
    return abstract_network(replace(arch, lora=lora))


def _check_experts(arch: Architecture, lora: LoraAdapters, got: str) -> None:
    """ValueError: adapters of a model's experts that PEFT's files cannot hold; `got`: its start."""
    of_experts, both = set(lora.targets) & set(FEED_FORWARD), {"gate_proj", "up_proj"}
    if _matched(lora, _feed_forwards(arch)):
        allowed = "an expression of attention's projections, or names without an expression"
    elif of_experts and lora.layers is not None:
        allowed = "experts of all layers or of none"
    elif len(of_experts & both) == 1:
        allowed = "gate_proj and up_proj, or neither, since PEFT has one adapter for the two"
    else:
        return
    raise ValueError(f"{got} for a model of experts; allowed: {allowed}.")


def _feed_forwards(arch: Architecture) -> list[str]:
    """Full names of the matrices of all feed-forwards of a model of experts, of one expert each."""
    parts = ("", "experts.0.", "shared_expert.", "shared_experts.")
    return [
        f"model.layers.{layer}.mlp.{part}{name}"
        for layer in range(arch.layers)
        for part in parts
        for name in FEED_FORWARD
    ]


def _modules(arch: Architecture) -> list[str]:
    """The `target_modules` of a model's adapters, of which experts are none."""
    experts = () if arch.expert_adapters is None else FEED_FORWARD
    return [name for name in arch.lora.targets if name not in experts]


def _with_merged_experts(
    node: dict[Any, Any], scale: float, added: list[tuple[jax.Array, jax.Array]]
) -> dict[Any, Any]:
    """A module's parameters with the adapters of its experts, if any, added into the matrices."""
    pairs = {"gate": "gate_up", "up": "gate_up", "down": "down"}
    for name, a in pairs.items():
        if f"lora_{a}_a" not in node:
            continue
        factors = node[f"lora_{a}_a"], node[f"lora_{name}_b"]
        delta = jnp.matmul(*factors, precision="highest") * scale
        old = node[name].astype(jnp.float32)
        node = node | {name: (old + delta).astype(node[name].dtype)}
        change = node[name].astype(jnp.float32) - old
        added.append((jnp.sum(change * delta), jnp.sum(delta * delta)))
    return node


def _matched(lora: LoraAdapters, modules: Sequence[str]) -> list[str]:
    """Those of the full names that the adapters' regular expression matches."""
    return [x for x in modules if lora.pattern is not None and re.fullmatch(lora.pattern, x)]


def _base(model: Transformer) -> Any:
    """A model's parameters without adapters."""
    network, params = split_model(model)
    return params if network.arch.lora is None else split_trainable(network, params)[1]


def _initial(name: str, leaf: str, shape: tuple[int, ...], seed: int) -> jax.Array:
    if leaf.endswith("_b"):
        return jnp.zeros(shape)
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
    bound = shape[-2] ** -0.5
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)
