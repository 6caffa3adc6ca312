"""The configuration: frozen dataclasses from an `ml_collections` file and the command line.

Every field declares what it allows; an unknown key, a wrong type or an impossible value raises one
sentence with the key's full name, what was got and what is allowed. The text below a field is its
description, which `--help` and the reference of the documentation show (`describe_fields`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.algorithms.expert_options import ExpertBalance
from seeupo_jax.configuration.agent_schema import Agent
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.fields import build, is_url, path_field
from seeupo_jax.configuration.layers import given_options, layered
from seeupo_jax.configuration.model_schema import Chat, Lora, Mesh, Model, Offload
from seeupo_jax.configuration.optimizer_schema import Optimizer
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.configuration.reward import Judge, Reward, reward_weights
from seeupo_jax.configuration.role_schema import Role
from seeupo_jax.configuration.sandbox_schema import TASK_FOLDERS, Sandbox
from seeupo_jax.configuration.supervised_schema import Sft, WarmStart
from seeupo_jax.configuration.teacher_schema import Teacher
from seeupo_jax.configuration.user_code import cached_by_name, describe, import_attribute, shown
from seeupo_jax.options import above, at_least, checked, choice, within


@dataclass(frozen=True)
class Env:
    """The environment, and how its calls are run."""

    name: str = "order_desk"
    """One that ships with the package, or a user's own module:attribute."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Arguments of the environment."""
    workers: int = at_least(1, 8)
    """Threads that step environments."""
    timeout_s: float = above(0, 60.0, most=1_000_000)
    """Time limit of one environment call, in seconds."""
    timeout_as: str = choice("failure", "zero_reward")
    """After an action on which the environment hung: the episode is left out (failure), or counts
    with reward 0 for that turn and score 0 (zero_reward)."""
    retries: int = within(0, 20, 2)
    """Retries of a failed reset, or of a call that had no effect."""
    retry_wait_s: float = within(0, 3600, 0.5)
    """Seconds before the first retry; doubles with each."""
    isolation: str = choice("thread", "process")
    """Where environments run; process: one for each environment."""
    memory_mib: int | None = at_least(1, None)
    """Address space of such a process; none: no limit."""
    max_reward: float = above(0, 1e6)
    """Largest reward in magnitude, of a step or an episode; more is an error of the environment."""


def _are_addresses(urls: tuple[str, ...]) -> bool:
    return all(is_url(url) for url in urls) and len({*urls}) == len(urls)


@dataclass(frozen=True)
class Rollout:
    """Sampling of trajectories."""

    tasks: int = at_least(1, 16)
    """B, tasks per iteration."""
    group_size: int = at_least(1, 8)
    """G, trajectories per task; 1 with advantages that compare no rewards within a group."""
    max_turns: int = at_least(1, 6)
    """K, turns of a trajectory at most."""
    max_action_tokens: int = at_least(1, 32)
    """Tokens of a turn's action at most; below max_context."""
    max_context: int = at_least(2, 256)
    """Tokens that a conversation may reach."""
    # Above, sampling is uniform; below, logits divided by it overflow float32.
    temperature: float = within(0.01, 100, 1.0)
    """Sampling temperature; log-probabilities are of the same distribution."""
    top_k: int | None = at_least(1, None)
    """Sample from this many of the likeliest tokens; none: from all."""
    top_p: float | None = above(0, None, most=1)
    """Sample from the likeliest tokens of this total probability; none: from all."""
    deterministic: bool = False
    """Wait for all environments between dispatches: equal to the bit."""
    grammar: str | None = path_field("tool_calls or a path")
    """Grammar of actions: tool_calls, or a .json, .regex or .lark file; none: free text."""
    concurrency: int | None = at_least(1, None)
    """Open episodes, each with a conversation for every role; none: all."""
    slots: int | None = at_least(1, None)
    """Conversations decoded together; none: all open ones."""
    cache_gib: float | None = above(0, None)
    """KV cache per device; none: enough for all open conversations."""
    cached_states: int | None = at_least(0, None)
    """States of recurrent layers kept for later turns, beside those of slots; none: one for each
    open conversation."""
    page_size: int = at_least(1, 16)
    """Tokens of a page of the KV cache."""
    decode_steps: int = at_least(1, 8)
    """Tokens that a dispatch decodes at most."""
    prefill_tokens: int = at_least(16, 1024)
    """Tokens that a dispatch prefills at most, or those of one row (128 where rows are long)."""
    reset_ahead_s: float = within(0, 1_000_000, 300.0)
    """Seconds of the previous sweep to prefetch environments in; then once more; 0: off."""
    mesh: Mesh | None = None
    """The sampler's layout of the same devices; none: the trainer's, within each TPU slice."""
    quantize: str = choice("none", "int8")
    """int8: the sampler's copy of the layers' matrices has 8 bits, a scale for each output."""
    max_lag: int = within(0, 64, 0)
    """Sweeps by which an iteration's sampling may begin before the policy that it trains is there;
    0: the data are on-policy."""
    devices: int = at_least(0, 0)
    """So many of this process's devices, the last ones, sample while the others train; 0: all do
    both in turn."""
    port: int | None = within(0, 65_535, None)
    """Where process 0 listens for the processes with --role=rollout that sample, while this one
    trains; 0: a free port; none: there are none."""
    host: str = "127.0.0.1"
    """Address that it listens on; another than the loopback lets workers on other machines in."""
    on_swap: str = choice("keep", "prefill")
    """Conversations under way when a sampler takes a newer policy: keep, their keys and values
    stay; prefill, their contexts are prefilled again."""
    engine: str = choice("built_in", "openai")
    """What samples in training: built_in, the devices of the run; openai, servers that are given
    each version of the policy."""
    servers: tuple[str, ...] = checked(
        (), "addresses such as http://HOST:PORT, each once", _are_addresses
    )
    """Addresses of the servers of engine=openai."""
    server_model: str | None = None
    """What the servers call the policy; none: the only model that each lists."""
    server_dialect: str = choice("auto", "vllm", "sglang")
    """Whose requests the servers take; auto: by who says that it owns the model, else vllm."""
    server_timeout_s: float = within(1, 1_000_000, 600.0)
    """Seconds after which a request to a server, or an update of its weights, has failed."""
    server_folder: str | None = path_field()
    """WORKDIR/served_weights as the servers see it; none: by the same path."""

    @property
    def trajectories(self) -> int:
        """N, trajectories of an iteration; the most of them where they fork."""
        return self.tasks * self.group_size

    @property
    def open_at_once(self) -> int:
        """Episodes that are open at a time, at most."""
        return self.trajectories if self.concurrency is None else self.concurrency

    @property
    def asynchronous(self) -> bool:
        """Whether others than the devices that train sample, beside training."""
        lagging_servers = self.engine == "openai" and self.max_lag > 0
        return self.devices > 0 or self.port is not None or lagging_servers

    @property
    def truncated(self) -> bool:
        """Whether actions are drawn from less than the policy's whole softmax."""
        return not (self.top_k is None and self.top_p in (None, 1) and self.grammar is None)


@dataclass(frozen=True)
class Curriculum:
    """Which training tasks are drawn, by their success so far."""

    by: str = choice("none", "variance", "band")
    """Weight of a task of success rate p: none, all in turn, in epochs; variance, 4p(1-p); band, 1
    where low <= p <= high, else 0. A task that was never drawn has weight 1."""
    floor: float = within(0.001, 1, 0.1)
    """The least weight."""
    memory: float = within(0, 1, 0.5)
    """Weight of a task's earlier trajectories in p each time that it is drawn again."""
    low: float = within(0, 1, 0.2)
    """Lower end of the band."""
    high: float = within(0, 1, 0.8)
    """Upper end of the band."""


@dataclass(frozen=True)
class Batching:
    """Shapes of the sweep's programs."""

    microbatch_tokens: int | None = at_least(1, None)
    """Tokens per device, if no conversation is longer; none: twice the longest, at least 1024 (on a
    GPU 8192), or for a small policy on a CPU the longest, at least 512, and few shapes of
    programs."""
    share_prefixes: bool = True
    """Common prefixes of a group are computed once."""
    buckets: tuple[int, ...] = ()
    """Row lengths to pad to, instead of eighths of the longest and, above its half, sixteenths: a
    microbatch is one row on each device (or on the devices that share a row)."""


@dataclass(frozen=True)
class Evaluation:
    """Evaluation during training, and the defaults of the command."""

    every: int = at_least(0, 10)
    """Iterations between evaluations; 0: only before and after (`tasks`=0: none)."""
    split: str = "test"
    """Split of the environment's tasks that is evaluated."""
    tasks: int = at_least(0, 64)
    """Tasks of the split at most; 0: nothing is evaluated, neither before, during nor after
    training, and checkpoint.keep_best has nothing to compare."""
    k: int = at_least(1, 4)
    """Episodes per task."""
    temperature: float | None = within(0.01, 100, None)
    """Sampling temperature; none: the training temperature."""
    extra_splits: tuple[str, ...] = ()
    """Splits that are also evaluated before and after; none is played twice."""
    select_on: str | None = None
    """Split that checkpoint.keep_best compares; none: validation where the environment has it, else
    the split above."""
    exact: bool = False
    """After every iteration, and before the first, also compute the expected reward of the policy
    on these tasks over all episodes; only for environments that list them."""
    patience: int | None = at_least(0, None)
    """Evaluations in a row, of those by which checkpoint.keep_best compares, without a success
    higher than all before, after which a run ends; none or 0: it does not."""


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints to resume from, and the export of the policy."""

    every: int = at_least(0, 10)
    """Iterations between checkpoints; 0: only the last."""
    keep: int = at_least(1, 2)
    """How many of the newest are kept."""
    keep_best: int = at_least(0, 1)
    """How many of the others are kept: those with the best evaluations."""
    directory: str | None = path_field(
        "a path or gs://BUCKET/PATH",
        lambda v: bool(v) and (v.startswith("gs://") or not is_url(v)),
    )
    """A folder that all hosts see, or gs://...; none: in the workdir."""
    export: bool = True
    """After the last iteration, write WORKDIR/policy in Hugging Face's format."""


@dataclass(frozen=True)
class Profile:
    """Traces of the devices."""

    steps: tuple[int, ...] = checked(
        (),
        "iterations from 1 on, each once",
        lambda v: min(v, default=1) > 0 and len(set(v)) == len(v),
    )
    """Iterations whose trace is written to WORKDIR/profile."""


@dataclass(frozen=True)
class Telemetry:
    """Display and records of a run."""

    trackers: tuple[str, ...] = ("tensorboard",)
    """Trackers in addition to metrics.jsonl: tensorboard, wandb."""
    display: str = choice("auto", "rich", "plain")
    """Display of progress; auto: rich on a terminal, else plain."""
    trajectory_share: float = within(0, 1, 1.0)
    """Share of groups whose trajectories are written."""
    trajectory_mib: float | None = above(0, 512.0)
    """Trajectories on disk, at most, in MiB; none: no limit."""
    entropy: bool = True
    """Log the entropy of every action token, from the pass that begins a sweep."""


@dataclass(frozen=True)
class Config:
    """A whole run.

    `recipe`, of `configuration/recipes/` or a user's `module:attribute`, gives the fields that
    `algorithm` does not set. An `Algorithm` object must agree with it, since it does not tell which
    of its fields were set.

    Raises:
      ValueError: an unknown recipe, or an algorithm that another recipe has made.
    """

    iterations: int = at_least(0, 60)
    """How many iterations of rollout and sweep to run."""
    seed: int = within(0, 2**32 - 1, 0)
    """Seed of tasks, sampling and initialisation."""
    recipe: str = "seeupo"
    """A named algorithm, or a user's own module:attribute; sets fields of config.algorithm."""
    log_checksum: bool = False
    """Log state/checksum, an exact fingerprint of parameters and optimizer state."""
    stop_after_idle: int | None = at_least(1, 10)
    """Iterations in a row in which no reward moves a parameter, which end a run; none: none do."""
    tasks: str | None = path_field(
        f"{TASK_FOLDERS}FOLDER",
        lambda v: v.startswith(TASK_FOLDERS) and v != TASK_FOLDERS,
    )
    """Tasks as folders in Harbor's form, which an agent's program plays in sandboxes; none: those
    of config.agent or config.env."""
    rewards: tuple[Reward, ...] = ()
    """Functions that pay besides the environment, and what each named reward weighs."""
    roles: tuple[Role, ...] = ()
    """The roles of an episode besides the policy's own; who plays each, and which are trained."""
    # Those that hold a dict are made for each configuration.
    judge: Judge = dataclasses.field(default_factory=Judge)
    teacher: Teacher = dataclasses.field(default_factory=Teacher)
    model: Model = Model()
    lora: Lora = Lora()
    chat: Chat = dataclasses.field(default_factory=Chat)
    env: Env = dataclasses.field(default_factory=Env)
    agent: Agent = dataclasses.field(default_factory=Agent)
    sandbox: Sandbox = Sandbox()
    mesh: Mesh = Mesh()
    offload: Offload = Offload()
    algorithm: Algorithm = None  # type: ignore[assignment]  # default: the recipe's
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    experts: ExpertBalance = ExpertBalance()
    rollout: Rollout = Rollout()
    curriculum: Curriculum = Curriculum()
    batching: Batching = Batching()
    warm_start: WarmStart = WarmStart()
    sft: Sft = dataclasses.field(default_factory=Sft)
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

    @property
    def compared_weights(self) -> dict[str, float] | None:
        """Weights of named rewards if each is compared by itself; None: their sum is compared."""
        return reward_weights(self.rewards) if self.algorithm.by_name else None


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


@cached_by_name
def _own_recipe(recipe: str) -> dict[str, Any]:
    imported = import_attribute(recipe, "config.recipe", "recipe", _may_be_a_recipe)
    try:
        fields = imported() if callable(imported) else imported
    except (Exception, SystemExit) as error:  # of a user's code
        raise ValueError(f"config.recipe: {recipe} failed: {describe(error)}.") from error
    if not isinstance(fields, Mapping):
        raise ValueError(
            f"config.recipe: {recipe} returned {shown(fields)} ({type(fields).__name__}); allowed:"
            " a dict of fields of config.algorithm."
        )
    build(Algorithm, fields, f"config.recipe: {recipe}")
    return layered(RECIPES["seeupo"], fields)


def _may_be_a_recipe(value: Any) -> bool:
    return callable(value) or isinstance(value, Mapping)


def _check_agrees(
    recipe: str, fields: Mapping[str, Any], algorithm: Algorithm, made_of: str | None
) -> None:
    """Checks an algorithm against the fields that its recipe sets."""
    if made_of is None and recipe == Config.recipe:
        return  # its fields are the defaults: any other value was meant
    made = Algorithm(**fields)
    for name in given_options(fields):
        got, wanted = algorithm, made
        for part in name.split("."):
            got, wanted = (vars(each).get(part) if each else None for each in (got, wanted))
        if got != wanted:
            raise ValueError(
                f"config.recipe: got {recipe!r} with an algorithm whose {name} is {got!r}; allowed:"
                f" {wanted!r}, or from_dict with 'recipe' and only those fields of 'algorithm' that"
                " are to differ from it."
            )
