"""The effect of each configuration field when a run resumes with another value of it.

`DECISIONS` is the only table of this. The check of a resumed run, the identity of stored rollouts,
the fields that a comparison may change and the table of `docs/checkpoints.md` follow from it; a
test fails for a field without a decision. Every change is recorded in `run.json`, of any kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any


class Decision(Enum):
    """The effect of a changed field when a run resumes; the value is the documentation's text."""

    COMPUTED = "only where and how it is computed changes: the results are the same up to rounding"
    APPLIES = "the new value applies from where the run resumes"
    CONTENT = "the content behind the value is compared, not the value itself"
    REFUSED = "refused: another value is another run and needs a new workdir"


C, A, T, R = Decision.COMPUTED, Decision.APPLIES, Decision.CONTENT, Decision.REFUSED

# Sections of `algorithm` are one field each, whatever options their classes have.
# Group, as of `describe_groups` -> decision -> its fields. Of `rewards` and the like, which are
# lists, the entries are compared without the fields of theirs that are COMPUTED.
DECISIONS: Mapping[str, Mapping[Decision, str]] = {
    "": {
        C: "log_checksum",
        A: "iterations recipe stop_after_idle",
        R: "seed tasks rewards roles",
    },
    "rewards[]": {C: "concurrency timeout_s", R: "function weight name options"},
    "judge": {C: "concurrency timeout_s", R: "function options"},
    "teacher": {A: "coef discount top_k", T: "path by_task server", R: "hint dtype"},
    "roles[]": {R: "name path server model"},
    "model": {
        C: "remat attention",
        T: "path",
        # The sampler and the trainer compute other numbers, or other parameters.
        R: "dtype param_dtype scan_layers vocab_size width layers heads kv_heads head_dim mlp_width"
        " rope_theta max_positions qk_norm qkv_bias tied",
    },
    "lora": {A: "merge", T: "path rank alpha rslora targets per_turn"},
    "chat": {T: "system tools roles template template_kwargs"},
    "env": {
        C: "workers timeout_s retries retry_wait_s isolation memory_mib",
        R: "name options timeout_as max_reward",
    },
    "agent": {
        C: "memory_mib output_kib request_kib host port",
        R: "name command harness options tasks tool_format thoughts timeout_s ignore_sampling"
        " constraints",
    },
    "sandbox": {C: "runtime processes visible", R: "memory_mib timeout_scale solution"},
    "mesh": {C: "data fsdp expert context tensor"},
    "offload": {C: "optimizer reference teacher"},
    "algorithm": {
        A: "objective ratio loss_aggregation weight_clip clip_low clip_high clip_dual tau_pos"
        " tau_neg kl_coef kl_estimate kl_in entropy_coef covariance importance router_replay order"
        " custom_order turns_per_update cumulative_ratio advantage estimator scale advantage_clip"
        " old_policy normalize_by critic inner_epochs mask_above minibatches_per_turn refresh"
        " dynamic_sampling moments kl_control reference truncated overlong forks",
    },
    "optimizer": {
        A: "name learning_rate schedule warmup_iterations warmup_steps decay_iterations kwargs"
        " max_grad_norm groups ema",
    },
    "experts": {A: "balance_coef z_coef bias_rate"},
    "optimizer.groups[]": {A: "pattern frozen name learning_rate kwargs"},
    "rollout": {
        C: "mesh concurrency slots cache_gib cached_states page_size decode_steps prefill_tokens"
        " deterministic reset_ahead_s devices port host server_timeout_s"
        " server_folder",
        A: "max_lag on_swap engine servers server_model server_dialect",
        R: "tasks group_size max_turns max_action_tokens max_context temperature top_k top_p"
        " grammar quantize",
    },
    "curriculum": {R: "by floor memory low high"},
    "batching": {C: "microbatch_tokens share_prefixes buckets"},
    "warm_start": {A: "output", R: "stages batch_size"},
    "warm_start.stages[]": {R: "steps learning_rate demonstrations"},
    "sft": {
        A: "epochs steps eval_every patience",
        T: "data split options train_on too_long held_out_data held_out_split",
        R: "held_out batch_size",
    },
    # All metrics named `eval/` of a run are of one split.
    "evaluation": {
        A: "every tasks k temperature extra_splits select_on patience exact",
        R: "split",
    },
    "checkpoint": {A: "every keep keep_best directory export"},
    "profile": {A: "steps"},
    "telemetry": {A: "trackers display trajectory_share trajectory_mib entropy"},
}
# Which trajectories are sampled, but for the policy.
SAMPLING = ("seed", "tasks", "rollout", "env", "rewards", "roles", "agent", "sandbox")
SAMPLING += ("curriculum", "judge")
# Parts of the configuration that a kind of run reads, and that have fields which may not change.
TRAINING_PARTS = (*SAMPLING, "teacher", "model", "warm_start", "evaluation")
SUPERVISED_PARTS = ("seed", "model", "sft")


# By full name, as `FieldDescription` has it.
DECISION_OF: Mapping[str, Decision] = {
    f"{group}.{name}".removeprefix("."): decision
    for group, kinds in DECISIONS.items()
    for decision, names in kinds.items()
    for name in names.split()
}


def refused_fields(values: Mapping[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """The fields that may not change, of some parts of a configuration as `to_dict` has it."""
    found = {name: values[name] for name in parts if name in values}
    return _select(found, lambda decision: decision is Decision.REFUSED)


def without_computed(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as `to_dict` has it, without what says where and how it is computed."""
    return _select(values, _decides)


def _decides(decision: Decision | None) -> bool:
    return decision is not Decision.COMPUTED


def _select(
    values: Mapping[str, Any], keeps: Callable[[Decision | None], bool], group: str = ""
) -> dict[str, Any]:
    """The fields whose decision is kept; None is that of a field that another version has."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{group}.{name}".removeprefix(".")
        if full in DECISIONS and isinstance(value, Mapping):
            found[name] = _select(value, keeps, full)
        elif keeps(DECISION_OF.get(full)):
            found[name] = value
            if (entries := f"{full}[]") in DECISIONS:
                found[name] = [_select(each, _decides, entries) for each in value]
    return found
