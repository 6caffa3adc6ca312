"""Builds the policy of a run from its configuration, and the shapes that a sweep of it has."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

import seeupo_jax
from seeupo_jax import envs
from seeupo_jax.configuration import schema
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.schema import Config
from seeupo_jax.learner.optimization.parameter_groups import split_trained
from seeupo_jax.learner.shapes import Shapes, row_lengths
from seeupo_jax.learner.sweep_plan import optimizer_steps
from seeupo_jax.parallel.distributed import place, row_shard_owners
from seeupo_jax.parallel.mesh import (
    ROW_AXES,
    check_lengths,
    make_mesh,
    param_shardings,
    row_shards,
    sampler_mesh,
    samplers_own_mesh,
)
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import SELECTION_BIAS, Architecture, LoraAdapters
from seeupo_jax.policy.files.hub_snapshot import cached_snapshot, is_hub_name, split_revision
from seeupo_jax.policy.files.tokenizer import Tokenizer, train_tokenizer, unassigned_ids
from seeupo_jax.policy.files.weights import (
    PACKAGE,
    is_model,
    load_architecture,
    read_tokenizer,
    resolve_path,
)
from seeupo_jax.policy.kernels.fused import check_kernel, preferred_kernel, row_block
from seeupo_jax.policy.lora import (
    attach_adapters,
    load_adapters,
    read_lora,
    turn_folders,
    with_adapters,
)
from seeupo_jax.policy.network import Network
from seeupo_jax.policy.rope import BY_LENGTH, Rope
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.engine.cache_memory import plan_cache

_LOGGER = logging.getLogger(__name__)
# Parameters: with fewer, a token takes a CPU microseconds, and a program seconds to compile.
SMALL = 2_000_000
# Tokens of a conversation: with so few, a small policy's attention computes all pairs of a row's
# tokens as fast as the visible ones, by a program that compiles in half of the time.
SHORT = 512
# Tokens of a microbatch, at least, by platform. On an H200 0.5B parameters computed 0.8e14 FLOP/s
# in microbatches of 1,024 and 2.2e14 in those of 8,192 (docs/benchmarks_gpu.md).
LEAST_TOKENS = {"gpu": 8192, "cuda": 8192}
ARCHITECTURES = "architectures"  # folder of `assets` with the config.json of published models
TOKENIZER_DEMONSTRATIONS = 4000  # whose text a new tokenizer is trained on


@dataclasses.dataclass(frozen=True)
class Policy:
    """A network, where its parameters lie, its tokenizer, and what of it does not train.

    source: the path that it was loaded from, if it was.
    """

    network: Network
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    frozen: Any = dataclasses.field(default_factory=dict)
    source: str | None = None

    def merged(self, params: Any) -> Any:
        """All parameters, given those that train."""
        return policy.join_params(params, self.frozen)

    def place(self, params: Any) -> Any:
        """Parameters on the mesh, by the table in `parallel/mesh.py`."""
        where = param_shardings(self.mesh, self.network.logical_axes(), params)
        return jax.tree.map(place, params, where)


def check_layout(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Whether rows, lengths, heads and a conversation's KV cache go with a mesh and a model.

    Args:
      mesh: its devices need not be here.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    row_devices, arch = row_shards(mesh), check_network(config, mesh)
    trajectories = config.rollout.trajectories
    if trajectories % row_devices:
        raise ValueError(
            f"config.rollout.tasks x group_size: got {trajectories}; allowed: a multiple of the"
            f" {row_devices} devices that rows are spread over (mesh axes {' x '.join(ROW_AXES)})."
        )
    rollout = config.rollout
    sampler = sampler_mesh(mesh, None if rollout.asynchronous else rollout.mesh)
    _check_sampler(arch, rollout, sampler)
    if jax.process_count() > 1:
        row_shard_owners(sampler)


def check_samplers_layout(config: Config, mesh: jax.sharding.Mesh) -> None:
    """As `check_layout`, for the devices that only sample while those of a mesh train."""
    own = samplers_own_mesh(config, mesh)
    if own is not None:
        arch, rollout = architecture_of(config, own), config.rollout
        _check_sampler(arch, rollout, sampler_mesh(own, rollout.mesh))


def _check_sampler(arch: Architecture, rollout: schema.Rollout, mesh: jax.sharding.Mesh) -> None:
    _check_heads(arch, mesh, "config.rollout.mesh")
    plan_cache(arch, rollout, shards=row_shards(mesh), tensor=mesh.shape["tensor"])


def check_network(config: Config, mesh: jax.sharding.Mesh) -> Architecture:
    """The network's architecture; ValueError where it does not go with the mesh or the lengths."""
    arch = architecture_of(config, mesh)
    check_lengths(mesh, build_shapes(config, mesh, 1).lengths)
    if config.rollout.max_context > arch.max_positions:
        scaling = arch.rope.scaling
        by_length = f", since its {scaling} rope scaling would depend on the length of each text"
        reason = by_length if scaling in BY_LENGTH else ""
        raise ValueError(
            f"config.rollout.max_context: got {config.rollout.max_context}; allowed: at most the"
            f" {arch.max_positions} positions that the model was made for{reason}."
        )
    _check_heads(arch, mesh, "config.mesh")
    return arch


def _check_heads(arch: Architecture, mesh: jax.sharding.Mesh, name: str) -> None:
    parts, kv_heads = mesh.shape["tensor"], arch.kv_heads
    if arch.heads % parts or (kv_heads % parts and parts % kv_heads):
        raise ValueError(
            f"{name}.tensor: got {parts}; allowed: a divisor of the model's {arch.heads} heads that"
            f" is a divisor or a multiple of its {kv_heads} key-value heads."
        )


def total_steps(config: Config) -> int:
    """Optimizer steps that a whole run takes at the most: every iteration uses all its turns."""
    steps = optimizer_steps(config.algorithm, config.rollout.max_turns)
    return max(1, config.iterations * steps)


def check_one_adapter(path: str | None, field: str, allowed: str) -> None:
    """ValueError: the folder of a field has adapters per turn; `allowed`: what it may have."""
    if path is None or not (folders := turn_folders(resolve_path(path))):
        return
    raise ValueError(
        f"{field}: got {path!r}, which has {len(folders)} adapters per turn; allowed: {allowed}."
    )


def check_trainable(config: Config) -> None:
    """ValueError: the model's folder is one of adapters per turn, which it cannot train further."""
    path = config.model.path
    further = f"config.lora.path={path} and config.lora.per_turn, which trains them further"
    check_one_adapter(path, "config.model.path", f"the folder of their model, with {further}")


def check_one_conversation(config: Config) -> None:
    """ValueError: the model's folder is one of adapters per turn, and what plays has no turns of
    one conversation: an agent, or several roles."""
    agent, roles = config.agent, [role.name for role in config.roles]
    for field, value, given in (("agent", agent.label, agent.given), ("roles", roles, roles)):
        if given:
            allowed = f"a model of one policy with config.{field}={value}"
            check_one_adapter(config.model.path, "config.model.path", allowed)


def find_model(config: Config) -> tuple[Config, str]:
    """The configuration with a model folder that is there, and where its architecture is from.

    Raises:
      ValueError: neither the model's folder is there, nor is one of its name in the package.
    """
    path = config.model.path
    if path is None:
        return config, "the sizes in config.model"
    place = Path(path)
    if path.startswith(PACKAGE) or is_model(place) or place.is_file():
        return config, path
    if is_hub_name(path):
        if cached_snapshot(path) is not None:
            return config, path
        place = Path(split_revision(path)[0])
    folder = Path(seeupo_jax.__path__[0]) / "assets" / ARCHITECTURES
    published = sorted(each.name for each in folder.iterdir())
    if place.name not in published:
        raise ValueError(
            f"config.model.path: got {path!r}, which is not here; allowed without its files: a path"
            f" that ends in one of {', '.join(published)}."
        )
    inside = f"{PACKAGE}{ARCHITECTURES}/{place.name}"
    model = dataclasses.replace(config.model, path=inside)
    return dataclasses.replace(config, model=model), f"{inside} ({path} is not here)"


def load_policy(
    config: Config, path: str, mesh: jax.sharding.Mesh | None = None
) -> tuple[Policy, Any]:
    """A policy from a model folder, and those of its parameters that train, on the mesh.

    Args:
      mesh: None: that of `config.mesh`, over all devices.
    """
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    model, tokenizer = from_pretrained(
        path, mesh=mesh, chat=config.chat, **_compute_options(config, mesh)
    )
    if tokenizer is None and config.model.path is not None:
        # A warm start leaves none where transformers would read another one from its folder.
        tokenizer = read_tokenizer(config.model.path, config.chat)
    lora = adapters_of(config)
    if config.lora.path is not None:
        model = load_adapters(model, config.lora.path, mesh=mesh, per_turn=lora.per_turn)
    elif lora is not None:
        model = attach_adapters(model, lora, seed=config.seed, mesh=mesh)
    network, params = policy.split_model(model)
    network = _over_tokens(network, tokenizer)
    if (notice := recurrent_notice(network.arch)) is not None:
        _LOGGER.warning("%s: %s.", path, notice)
    params, frozen = split_trained(config.optimizer.groups, network, params)
    return Policy(network, tokenizer, mesh, frozen, path), params


def _over_tokens(network: Network, tokenizer: Tokenizer | None) -> Network:
    """The network, whose distributions are over the ids that a token of the tokenizer has."""
    unassigned = unassigned_ids(tokenizer, network.arch.vocab_size)
    if unassigned == network.arch.unassigned:
        return network
    return policy.abstract_network(dataclasses.replace(network.arch, unassigned=unassigned))[0]


def _compute_options(config: Config, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """How the network is computed; what it computes, its files say."""
    model, platform = config.model, mesh.devices.flat[0].platform
    attention = model.attention
    if attention == "auto":
        pairs = uses_few_shapes(config, mesh) and config.rollout.max_context <= SHORT
        attention = "all_pairs" if pairs else preferred_kernel(platform)
    check_kernel(attention, platform)
    return {
        "dtype": model.dtype,
        "param_dtype": model.param_dtype,
        "scan_layers": model.scan_layers,
        "remat": "none" if model.remat == "auto" else model.remat,  # auto: see remat.py
        "attention": attention,
        "longest": config.rollout.max_context,
    }


def adapters_of(config: Config) -> LoraAdapters | None:
    """The adapters that the configuration means.

    Raises:
      ValueError: a damaged folder, or one of adapters of another number of turns.
    """
    lora, per_turn = config.lora, config.lora.turn_adapters
    if lora.path is not None:
        found = read_lora(Path(lora.path))
        if found.per_turn not in (0, per_turn):
            raise ValueError(
                f"config.lora.per_turn: got {lora.per_turn} with config.lora.path={lora.path},"
                f" which has adapters of {found.per_turn} turns; allowed: {found.per_turn}."
            )
        return dataclasses.replace(found, per_turn=per_turn)
    if not lora.rank:
        return None
    adapters = LoraAdapters(lora.rank, lora.alpha, lora.targets, rslora=lora.rslora)
    return dataclasses.replace(adapters, per_turn=per_turn)


def architecture_of(config: Config, mesh: jax.sharding.Mesh) -> Architecture:
    """The architecture of the model at `config.model.path`, or of one made from nothing."""
    return _architecture(config, **_compute_options(config, mesh))


def _architecture(config: Config, **compute_options: Any) -> Architecture:
    if config.model.path is not None:
        return load_architecture(config.model.path, **compute_options)
    decided = {"remat", "attention", *compute_options}  # a configuration's may be auto
    names = {field.name for field in dataclasses.fields(Architecture)} - decided
    sizes = {key: value for key, value in vars(config.model).items() if key in names}
    return Architecture(**sizes, **compute_options, rope=Rope(config.model.rope_theta))


def initial_policy(
    config: Config, demonstrations: Sequence[Any], mesh: jax.sharding.Mesh | None = None
) -> tuple[Policy, Any]:
    """A policy from nothing: a tokenizer trained on demonstrations' text, and random weights.

    Args:
      mesh: as of `load_policy`.
    """
    few = range(min(TOKENIZER_DEMONSTRATIONS, len(demonstrations)))
    texts = (
        message["content"]
        for index in few
        for message in demonstrations[index].messages
        if config.chat.system or message["role"] != "system"
    )
    environment = envs.make(config.env.name, **config.env.options)
    words = environment.vocabulary()
    tokenizer = train_tokenizer(texts, words, config.model.vocab_size, config.chat)
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    arch = architecture_of(config, mesh)
    network, params = policy.split_model(Transformer(arch, nnx.Rngs(config.seed)))
    made = Policy(network, tokenizer, mesh)
    return made, made.place(params)


def uses_few_shapes(config: Config, mesh: jax.sharding.Mesh) -> bool:
    """Whether one size of a kind of program does: compiling more takes longer than it saves.

    So it is for a small policy on a CPU, where `config.batching` leaves the lengths of rows open.
    """
    batching = config.batching
    if batching.microbatch_tokens is not None or batching.buckets:
        return False
    return is_small_policy(config) and mesh.devices.flat[0].platform == "cpu"


def is_small_policy(config: Config) -> bool:
    """Whether the policy has at most `SMALL` parameters; no array is made.

    Raises:
      ValueError: a model that cannot be read.
    """
    _, params = policy.abstract_network(_architecture(config))
    return sum(leaf.size for leaf in jax.tree.leaves(params)) <= SMALL


def build_shapes(config: Config, mesh: jax.sharding.Mesh, trajectories: int) -> Shapes:
    """The sweep's shapes for iterations of so many trajectories; a microbatch has a row a shard."""
    rollout, batching = config.rollout, config.batching
    algorithm, turns, tokens = config.algorithm, rollout.max_turns, batching.microbatch_tokens
    few, platform = uses_few_shapes(config, mesh), mesh.devices.flat[0].platform
    if tokens is None:
        least = LEAST_TOKENS.get(platform, 1024)
        tokens = SHORT if few else max(2 * rollout.max_context, least)
    turns = turns if algorithm.order == "parallel" else algorithm.span(turns)
    block = row_block(platform) * mesh.shape["context"]
    lengths = batching.buckets or row_lengths(max(rollout.max_context, tokens), block=block)
    return Shapes(
        lengths=lengths[-1:] if few else lengths,
        refreshed=lengths[-1] // 2 if few else None,
        context=rollout.max_context,
        action=min(rollout.max_action_tokens * turns, rollout.max_context),
        rows=row_shards(mesh),
        trajectories=trajectories,
        turns=rollout.max_turns,
        share=batching.share_prefixes and not _any_recurrent(config),
    )


def _any_recurrent(config: Config) -> bool:
    """Whether a model that computes rows has recurrent layers: the policy, or a teacher."""
    return _architecture(config).recurrent or any(map(_is_recurrent, config.teacher.models))


def _is_recurrent(path: str) -> bool:
    """Whether a teacher has recurrent layers; False: it is not here, and no training is."""
    try:
        return load_architecture(path).recurrent
    except ValueError:
        return False


def sweep_algorithm(config: Config) -> Algorithm:
    """The algorithm of the sweeps: ratios are refreshed by a pass of their own with recurrent
    layers, since a step's own pass can only be continued by attention, and with adapters per turn,
    since a step computes its context under another adapter."""
    if not config.lora.turn_adapters and not _architecture(config).recurrent:
        return config.algorithm
    return dataclasses.replace(config.algorithm, refresh="separate")


def recurrent_notice(arch: Architecture) -> str | None:
    """What a model with recurrent layers does without; None: it has none."""
    if not arch.recurrent:
        return None
    count = sum(map(arch.is_recurrent, range(arch.layers)))
    return (
        f"recurrent layers: {count} of {arch.layers}; training computes what sequences share for"
        " each of them, and refreshes ratios by passes of their own"
    )


def abstract_policy(config: Config, mesh: jax.sharding.Mesh) -> tuple[Policy, Any]:
    """As `load_policy`, with shapes and shardings for parameters: no weights are read.

    The tokenizer is None where the model's folder has none.
    """
    arch, lora, path = architecture_of(config, mesh), adapters_of(config), config.model.path
    tokenizer = None if path is None else read_tokenizer(path, config.chat)
    network, params = policy.abstract_network(arch) if lora is None else with_adapters(arch, lora)
    network = _over_tokens(network, tokenizer)
    where = param_shardings(mesh, network.logical_axes(), params)
    dtype = config.model.param_dtype

    def place(path: Any, leaf: Any, where: Any) -> jax.ShapeDtypeStruct:
        last = str(path[-1].key)
        exact = last.startswith(policy.ADAPTER) or last == SELECTION_BIAS
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if exact else dtype, sharding=where)

    params = jax.tree_util.tree_map_with_path(place, params, where)
    params, frozen = split_trained(config.optimizer.groups, network, params)
    return Policy(network, tokenizer, mesh, frozen), params
