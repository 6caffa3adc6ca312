"""The configuration: frozen dataclasses from an `ml_collections` file and the command line.

Every field declares what it allows; an unknown key, a wrong type or an impossible value raises one
sentence with the key's full name, what was got and what is allowed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.fields import (
    above,
    at_least,
    build,
    checked,
    choice,
    within,
)
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.configuration.user_code import describe, import_attribute, shown

# Upper bounds, several times those of the largest published models (Llama 3.1 405B: 126 layers of
# width 16,384; Gemma 3: 262,144 tokens): more is a mistake or a damaged file.
MODEL_SIZES = {
    "vocab_size": 2**24,
    "width": 2**18,
    "layers": 2**10,
    "heads": 2**12,
    "head_dim": 2**12,
    "mlp_width": 2**21,
    "max_positions": 2**31 - 1,  # positions are int32
}


@dataclass(frozen=True)
class Model:
    """The policy network: loaded from `path`, or randomly initialised in the sizes below."""

    path: str | None = None  # a Hugging Face folder, a .gguf file, or package:NAME
    vocab_size: int = within(1, MODEL_SIZES["vocab_size"], 512)
    width: int = within(1, MODEL_SIZES["width"], 128)
    layers: int = within(1, MODEL_SIZES["layers"], 4)
    heads: int = within(1, MODEL_SIZES["heads"], 4)
    kv_heads: int = within(1, MODEL_SIZES["heads"], 4)
    head_dim: int = checked(
        32,
        f"an even number from 2 to {MODEL_SIZES['head_dim']}",
        lambda v: 2 <= v <= MODEL_SIZES["head_dim"] and v % 2 == 0,
    )
    mlp_width: int = within(1, MODEL_SIZES["mlp_width"], 384)
    rope_theta: float = above(0, 10_000.0)
    max_positions: int = within(2, MODEL_SIZES["max_positions"], 32_768)
    qk_norm: bool = True
    qkv_bias: bool = False
    tied: bool = True
    dtype: str = choice("float32", "bfloat16")  # of activations
    param_dtype: str = choice("float32", "bfloat16")  # of frozen parameters, with lora.rank > 0
    scan_layers: bool = False
    # rematerialisation in the backward pass; auto: as little as memory allows
    remat: str = choice("auto", "none", "dots", "full")
    # Kernel of whole-row passes; all_pairs: of token trees too, for comparison.
    attention: str = choice("auto", "xla", "all_pairs", "splash", "cudnn")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters, trained while the model is frozen."""

    rank: int = at_least(0, 0)  # 0: no adapters, every parameter trains
    alpha: float = above(0, 32.0)
    targets: tuple[str, ...] = checked(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "projections by Hugging Face's names, at least one",
        lambda v: bool(v) and set(v) <= set(Lora.targets) and len(set(v)) == len(v),
    )
    path: str | None = None  # start from these adapters, in PEFT's format; sets all the above
    merge: bool = False  # export the merged model instead of the adapters


@dataclass(frozen=True)
class Chat:
    """How conversations become tokens; with these defaults a model folder's chat.json decides."""

    system: bool = True  # keep the environment's system message
    # auto: as the chat template lists them, else hermes; the others: in a system message
    tools: str = choice("auto", "none", "signatures", "json", "hermes")
    template: str | None = None  # a Jinja file in place of the model's own chat template
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Env:
    name: str = "order_desk"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    workers: int = at_least(1, 8)  # threads that step environments
    timeout_s: float = above(0, 60.0, most=1_000_000)  # of one environment call
    # after an action on which the environment hung. zero_reward: the episode counts, with reward 0
    # for that turn and score 0; failure: it is left out
    timeout_as: str = choice("failure", "zero_reward")
    retries: int = within(0, 20, 2)  # of a failed reset, or of a call that had no effect
    retry_wait_s: float = within(0, 3600, 0.5)  # before the first retry; doubles with each
    isolation: str = choice("thread", "process")  # process: one for each environment
    memory_mib: int | None = at_least(1, None)  # of address space of such a process; none: no limit
    max_reward: float = above(0, 1e6)  # in magnitude, of a step and of an episode; more: env_error


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh axes; -1: the remaining devices."""

    data: int = checked(-1, "-1 or a number >= 1", lambda v: v == -1 or v >= 1)
    fsdp: int = checked(1, "-1 or a number >= 1", lambda v: v == -1 or v >= 1)
    expert: int = checked(1, "-1 or a number >= 1", lambda v: v == -1 or v >= 1)
    context: int = checked(1, "-1 or a number >= 1", lambda v: v == -1 or v >= 1)
    tensor: int = checked(1, "-1 or a number >= 1", lambda v: v == -1 or v >= 1)


@dataclass(frozen=True)
class Offload:
    """What is moved to the host's memory while the devices do not need it."""

    optimizer: bool = False  # the optimizer's state, between steps
    reference: bool = False  # the reference policy of the KL penalty, between sweeps


@dataclass(frozen=True)
class Optimizer:
    """An optax optimizer: `adamw`, `contrib.muon`, or a user's own `module:function`."""

    name: str = "adam"
    learning_rate: float = above(0, 3e-4, most=100)
    schedule: str = choice("constant", "linear", "cosine")
    warmup_iterations: int = at_least(0, 0)
    warmup_steps: int = at_least(0, 0)  # optimizer steps, instead of iterations
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_grad_norm: float | None = above(0, 1.0)


@dataclass(frozen=True)
class Rollout:
    tasks: int = at_least(1, 16)  # B, tasks an iteration
    group_size: int = at_least(2, 8)  # G, trajectories a task
    max_turns: int = at_least(1, 6)
    max_action_tokens: int = at_least(1, 32)
    max_context: int = at_least(2, 256)  # tokens a conversation may reach
    # Above, sampling is uniform; below, logits divided by it overflow float32.
    temperature: float = within(0.01, 100, 1.0)
    top_k: int | None = at_least(1, None)
    top_p: float | None = above(0, None, most=1)
    deterministic: bool = False  # wait for all environments between dispatches: equal to the bit
    grammar: str | None = None  # of actions: tool_calls, or a .json, .regex or .lark file
    concurrency: int | None = at_least(1, None)  # open conversations; none: all
    slots: int | None = at_least(1, None)  # decoded together; none: all open ones
    cache_gib: float | None = above(0, None)  # KV cache per device; none: enough for all open ones
    page_size: int = at_least(1, 16)  # tokens of a page of the KV cache
    decode_steps: int = at_least(1, 8)  # tokens a dispatch decodes at most
    prefill_tokens: int = at_least(16, 1024)  # tokens a dispatch prefills at most
    # environments are prefetched during the previous sweep, for so long; then once more; 0: off
    reset_ahead_s: float = within(0, 1_000_000, 300.0)
    mesh: Mesh | None = None  # the sampler's layout of the same devices; none: the trainer's

    @property
    def truncated(self) -> bool:
        """Whether actions are drawn from less than the policy's whole softmax."""
        return not (self.top_k is None and self.top_p in (None, 1) and self.grammar is None)


@dataclass(frozen=True)
class Batching:
    """Shapes of the sweep's programs."""

    # Per device, if no conversation is longer; none: twice the longest one, at least 1024.
    microbatch_tokens: int | None = at_least(1, None)
    share_prefixes: bool = True  # common prefixes of a group are computed once
    # Row lengths to pad to, instead of eighths of the longest and, above its half, sixteenths: a
    # microbatch is one row on each device (or on the devices that share a row).
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True)
class WarmStartStage:
    steps: int = at_least(1, 1000)
    learning_rate: float = above(0, 3e-3, most=100)
    demonstrations: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class WarmStart:
    """Supervised training on demonstrations, action tokens only, before the first iteration."""

    stages: tuple[WarmStartStage, ...] = ()
    batch_size: int = at_least(1, 64)
    output: str | None = None  # also write the warm policy into this folder, if it has none


@dataclass(frozen=True)
class Evaluation:
    every: int = at_least(0, 10)  # iterations between evaluations; 0: only before and after
    split: str = "test"
    tasks: int = at_least(1, 64)
    k: int = at_least(1, 4)  # episodes a task
    temperature: float | None = within(0.01, 100, None)  # none: the training temperature
    extra_splits: tuple[str, ...] = ()  # also evaluated before and after
    # split that checkpoint.keep_best compares; none: validation where the environment has it, else
    # the split above
    select_on: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    every: int = at_least(0, 10)  # iterations between checkpoints; 0: only the last
    keep: int = at_least(1, 2)  # the newest
    keep_best: int = at_least(0, 1)  # of the others, those with the best evaluations
    directory: str | None = None  # a folder that all hosts see, or gs://...; none: in the workdir
    export: bool = True  # after the last iteration, write WORKDIR/policy in Hugging Face's format


@dataclass(frozen=True)
class Profile:
    steps: tuple[int, ...] = checked(
        (),
        "iterations from 1 on, each once",
        lambda v: min(v, default=1) > 0 and len(set(v)) == len(v),
    )  # iterations whose trace is written to WORKDIR/profile


@dataclass(frozen=True)
class Telemetry:
    trackers: tuple[str, ...] = ("tensorboard",)  # tensorboard, wandb
    display: str = choice("auto", "rich", "plain")
    trajectory_share: float = within(0, 1, 1.0)  # of groups whose trajectories are written
    trajectory_mib: float | None = above(0, 512.0)  # on disk, at most; none: no limit
    entropy: bool = True  # of every action token, from the pass that begins a sweep


@dataclass(frozen=True)
class Config:
    """A whole run.

    `recipe`, of `configuration/recipes.py` or a user's `module:attribute`, gives the fields that
    `algorithm` does not set. An `Algorithm` object must agree with it, since it does not tell which
    of its fields were set.

    Raises:
      ValueError: an unknown recipe, or an algorithm that another recipe has made.
    """

    iterations: int = at_least(0, 60)
    seed: int = within(0, 2**32 - 1, 0)
    recipe: str = "seeupo"
    log_checksum: bool = False
    # iterations in a row that move no parameter, after which a run ends; none: it does not
    stop_after_idle: int | None = at_least(1, 10)
    rollout_ahead: int = within(0, 1, 0)  # 1: sample the next iteration while one is swept
    model: Model = Model()
    lora: Lora = Lora()
    chat: Chat = Chat()
    env: Env = Env()
    mesh: Mesh = Mesh()
    offload: Offload = Offload()
    algorithm: Algorithm = None  # type: ignore[assignment]  # default: the recipe's
    optimizer: Optimizer = Optimizer()
    rollout: Rollout = Rollout()
    batching: Batching = Batching()
    warm_start: WarmStart = WarmStart()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    profile: Profile = Profile()
    telemetry: Telemetry = Telemetry()
    # The recipe that `algorithm` was made of; None: by hand.
    _made_of: str | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        recipe = recipe_fields(self.recipe)
        if self.algorithm is None:
            object.__setattr__(self, "algorithm", Algorithm(**recipe))
        elif self._made_of != self.recipe:
            _check_agrees(self.recipe, recipe, self.algorithm, self._made_of)
        object.__setattr__(self, "_made_of", self.recipe)


def recipe_fields(recipe: str) -> dict[str, Any]:
    """The fields of `config.algorithm` that a recipe sets.

    Args:
      recipe: a name in `RECIPES`, or `module:attribute` of a user's dict of fields or of a function
        without arguments that returns one; other fields are SeeUPO's.

    Raises:
      ValueError: an unknown recipe, or one that fails or returns unknown fields.
    """
    if isinstance(recipe, str) and ":" in recipe:
        return _own_recipe(recipe)
    if not isinstance(recipe, str) or recipe not in RECIPES:
        names = ", ".join(RECIPES)
        raise ValueError(
            f"config.recipe: got {shown(recipe)}; allowed: {names}, or module:attribute."
        )
    return RECIPES[recipe]


@functools.cache
def _own_recipe(recipe: str) -> dict[str, Any]:
    found = import_attribute(recipe, "config.recipe", "recipe", _may_be_a_recipe)
    try:
        fields = found() if callable(found) else found
    except (Exception, SystemExit) as error:  # of a user's code
        raise ValueError(f"config.recipe: {recipe} failed: {describe(error)}.") from error
    if not isinstance(fields, Mapping):
        raise ValueError(
            f"config.recipe: {recipe} returned {shown(fields)} ({type(fields).__name__}); allowed:"
            " a dict of fields of config.algorithm."
        )
    algorithm = build(Algorithm, fields, f"config.recipe: {recipe}")
    return RECIPES["seeupo"] | {name: vars(algorithm)[name] for name in fields}


def _may_be_a_recipe(value: Any) -> bool:
    return callable(value) or isinstance(value, Mapping)


def _check_agrees(
    recipe: str, fields: Mapping[str, Any], algorithm: Algorithm, made_of: str | None
) -> None:
    """Checks an algorithm against the fields that its recipe sets."""
    if made_of is None and recipe == Config.recipe:
        return  # its fields are the defaults: any other value was meant
    for name, value in fields.items():
        if (got := getattr(algorithm, name)) != value:
            raise ValueError(
                f"config.recipe: got {recipe!r} with an algorithm whose {name} is {got!r}; allowed:"
                f" {value!r}, or from_dict with 'recipe' and only those fields of 'algorithm' that"
                " are to differ from it."
            )
