"""Every metric of `WORKDIR/metrics.jsonl`: its unit, its reduction, and where it is shown.

The learner reduces, the display shows and the report charts a metric as it is declared here;
docs/metrics.md has a row for each, which says what it means. Capitals stand for something: `turn=T`
a turn counted from 1, `turns=N` a number of turns, `LABEL=VALUE` a label of the task, `STOP` a stop
reason, `TEXT` a text, `NAME` a reward, a role or an environment, `CAUSE` a class of errors or of
failures, `@K` episodes per task. Other splits have `eval_SPLIT/` for `eval/`.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """One number of an iteration or of an evaluation.

    unit: as the axis of a chart has it.
    over: the reduction. Of what a sweep's steps count one of `sum / actions`, `sum / replayed`,
      `sum / taught`, `mean of steps`, `sum` and `max`: microbatches and devices are summed, for
      `max` their maximum is taken.
    counted: what each step counts for it; empty: it is not reduced from steps.
    """

    name: str
    unit: str
    over: str
    counted: str = ""


# Reduced from the totals of a sweep's steps; those that are declared as `NAME/turn=T` too also over
# the steps on that turn alone.
STEPS = (
    Metric("sweep/loss", "negative objective", "mean of steps", "loss"),
    Metric("sweep/grad_norm", "norm before clipping", "mean of steps", "grad_norm"),
    Metric("sweep/clip_fraction", "share clipped", "sum / actions", "clipped"),
    Metric("sweep/kl", "nats per token", "sum / actions", "kl"),
    Metric("sweep/weight_max", "largest |M|", "max", "weight_max"),
    Metric("sweep/updates_skipped", "steps", "sum", "update_skipped"),
    Metric("sweep/entropy", "nats per token", "sum / actions", "entropy"),
    Metric("sweep/teacher_forward_kl", "nats per token", "sum / taught", "forward_kl"),
    Metric("sweep/covariance", "nats x advantage", "mean of steps", "covariance"),
    Metric("sweep/covariance_tokens", "tokens", "sum", "covariance_tokens"),
    Metric("sweep/value_loss", "squared reward", "sum / actions", "value_loss"),
    Metric("sweep/value_clip_fraction", "share of tokens", "sum / actions", "value_clipped"),
    Metric("sweep/critic_grad_norm", "norm before clipping", "mean of steps", "critic_grad_norm"),
    Metric("sweep/router_mismatch", "share of routings", "sum / replayed", "router_mismatched"),
    Metric("sweep/balance_loss", "experts of a token if even", "mean of steps", "balance_loss"),
    Metric("sweep/router_z_loss", "squared nats", "mean of steps", "router_z_loss"),
)
SWEEP = (
    Metric("sweep/turns", "turns", "count"),
    Metric("sweep/steps", "steps", "count"),
    Metric("sweep/updates", "steps", "count"),
    Metric("sweep/weight_mean/turn=T", "mean of M", "mean of trajectories"),
    Metric("sweep/weight_max/turn=T", "largest |M|", "max of trajectories"),
    Metric("sweep/clip_fraction/turn=T", "share clipped", "sum / actions"),
    Metric("sweep/kl/turn=T", "nats per token", "sum / actions"),
    Metric("sweep/reward_share/NAME", "share of the advantages", "sum / sum"),
    Metric("sweep/learning_rate", "learning rate", "last step"),
    Metric("sweep/explained_variance", "share of variance", "action tokens"),
    Metric("sweep/gain_mean", "probability", "mean of turns"),
    Metric("sweep/gain_scored", "share of turns", "mean of turns"),
    Metric("sweep/pairs", "pairs", "count"),
    Metric("sweep/pair_loss", "nats", "mean of pairs"),
    Metric("sweep/pair_accuracy", "share of pairs", "mean of pairs"),
    Metric("sweep/progress_loss", "squared reward", "mean of trajectories"),
    Metric("sweep/progress_error", "reward", "mean of trajectories"),
    Metric("sweep/scorer_grad_norm", "norm before clipping", "mean of steps"),
    Metric("sweep/scorer_skipped", "steps", "sum"),
    Metric("sweep/forced_fraction", "share of sampled tokens", "sum / sum"),
    Metric("sweep/tis_weight_mean", "importance weight", "mean of actions"),
    Metric("sweep/tis_truncated", "share of actions", "mean of actions"),
    Metric("sweep/importance_rejected", "share of sampled tokens", "sum / sum"),
    Metric("sweep/importance_ess", "share of the sample", "weights of a sweep"),
    Metric("sweep/expert_load_max", "largest share x experts", "max of layers"),
    Metric("sweep/expert_load_entropy", "share of an even spread's", "mean of layers"),
    Metric("sweep/dead_experts", "experts", "sum of layers"),
    Metric("sweep/kl_coef", "coefficient", "none"),
    Metric("sweep/teacher_kl", "nats per token", "mean of action tokens"),
    Metric("sweep/kl_sampled", "nats per token", "mean of action tokens"),
    Metric("sweep/masked_trajectories", "trajectories", "count"),
    Metric("sweep/overlong_penalty", "reward", "mean of trajectories"),
    Metric("sweep/overlong_fraction", "share of trajectories", "mean of trajectories"),
    Metric("sweep/masked_fraction", "share of sampled tokens", "sum / sum"),
    Metric("sweep/tokens", "tokens", "sum of steps"),
    Metric("sweep/tokens_per_second", "tokens/s", "sum / time"),
    Metric("sweep/shared_fraction", "share of tokens", "sum / sum"),
    Metric("sweep/padding_fraction", "share of tokens", "sum / sum"),
    Metric("sweep/programs_compiled", "programs", "count"),
    Metric("logp/sampler_trainer_gap", "largest difference", "max of action tokens"),
    Metric("logp/sampler_trainer_gap_mean", "nats", "mean of action tokens"),
    Metric("logp/router_mismatch", "share of routings", "sum / sum"),
)
# Of the steps of supervised fine-tuning, which count as iterations.
SFT = (
    Metric("sft/loss", "nats per token", "mean of assistant tokens"),
    Metric("sft/grad_norm", "norm before clipping", "none"),
    Metric("sft/balance_loss", "experts of a token if even", "none"),
    Metric("sft/router_z_loss", "squared nats", "none"),
    Metric("sft/updates_skipped", "0 or 1", "none"),
    Metric("sft/learning_rate", "learning rate", "none"),
    Metric("sft/epoch", "epochs", "none"),
    Metric("sft/trained_tokens", "tokens", "sum of conversations"),
    Metric("sft/tokens", "tokens", "sum of conversations"),
    Metric("sft/tokens_per_second", "tokens/s", "sum / time"),
    Metric("sft/shared_fraction", "share of tokens", "sum / sum"),
    Metric("sft/padding_fraction", "share of tokens", "sum / sum"),
    Metric("sft/skipped_conversations", "conversations", "count of the whole run"),
    Metric("sft/cut_conversations", "conversations", "count of the whole run"),
    Metric("sft/programs_compiled", "programs", "count"),
)
# Of the trajectories of all rounds, without those whose environment failed where it says mean.
ROLLOUT = (
    Metric("rollout/success_rate", "success rate", "mean of trajectories"),
    Metric("rollout/success_rate/turns=N", "success rate", "mean of trajectories"),
    Metric("rollout/success_rate/LABEL=VALUE", "success rate", "mean of trajectories"),
    Metric("rollout/trajectories/turns=N", "trajectories", "count"),
    Metric("rollout/trajectories/env=NAME", "trajectories", "count"),
    Metric("rollout/reward_mean", "mean reward", "mean of trajectories"),
    Metric("rollout/reward_mean/env=NAME", "mean reward", "mean of trajectories"),
    Metric("rollout/reward/NAME", "mean reward", "mean of trajectories"),
    Metric("rollout/reward_std/NAME", "standard deviation of reward", "over trajectories"),
    Metric("rollout/reward_failed/NAME=CAUSE", "trajectories", "count"),
    Metric("rollout/role_reward/NAME", "mean reward", "mean of trajectories"),
    Metric("rollout/role_turns/NAME", "turns", "sum of trajectories"),
    Metric("rollout/turns_mean", "mean of turns", "mean of trajectories"),
    Metric("rollout/segments_mean", "segments", "mean of trajectories"),
    Metric("rollout/entropy", "nats per token", "mean of action tokens"),
    Metric("rollout/stop_STOP", "trajectories", "count"),
    Metric("rollout/failed", "trajectories", "count"),
    Metric("rollout/failed/cause=TEXT", "trajectories", "count"),
    Metric("rollout/timeouts", "trajectories", "count"),
    Metric("rollout/timeouts_counted", "trajectories", "count"),
    Metric("rollout/retries", "calls", "sum of trajectories"),
    Metric("rollout/executed_fraction", "share of turns", "mean of turns"),
    Metric("rollout/agent_failed/CAUSE", "trajectories", "count"),
    Metric("rollout/ignored_sampling", "parameters", "sum of trajectories"),
    Metric("rollout/refused_calls", "calls", "sum of trajectories"),
    Metric("rollout/lineages_mean", "conversations", "mean of trajectories"),
    Metric("rollout/groups_dropped", "groups", "count"),
    Metric("rollout/no_signal_fraction", "share of groups", "mean of groups"),
    Metric("rollout/repeated_tasks", "groups", "count"),
    Metric("rollout/rounds", "rounds", "count"),
    Metric("rollout/policy_lag", "sweeps", "max of action tokens"),
    Metric("rollout/policy_lag_mean", "sweeps", "mean of action tokens"),
    Metric("rollout/policy_lag_steps", "optimizer steps", "max of action tokens"),
    Metric("rollout/policy_lag_steps_mean", "optimizer steps", "mean of action tokens"),
    Metric("rollout/mixed_versions", "share of trajectories", "mean of trajectories"),
    Metric("rollout/workers", "samplers", "count"),
    Metric("rollout/groups_ahead", "groups", "count"),
    Metric("rollout/reissued", "conversations", "count"),
    Metric("rollout/idle_fraction", "share of time", "sum / sum"),
    Metric("rollout/forks", "trajectories", "count"),
    Metric("rollout/forks_failed", "trajectories", "count"),
    Metric("rollout/replayed_turns", "turns", "sum of trajectories"),
    Metric("rollout/reused_tokens", "tokens", "sum of trajectories"),
    Metric("rollout/unused_trajectories", "trajectories", "sum of groups"),
    Metric("rollout/unused_tokens", "tokens", "sum of groups"),
)
# Where tasks are drawn by their success so far; before the iteration's own trajectories count.
CURRICULUM = (
    Metric("curriculum/known_tasks", "tasks", "count"),
    Metric("curriculum/new_fraction", "share of tasks", "mean of tasks"),
    Metric("curriculum/weight_mean", "weight", "mean of tasks"),
    Metric("curriculum/success_rate", "success rate", "mean of tasks"),
)
# Counts of the engine are summed over its shards, rounds and processes.
TOKENS = (
    Metric("rollout/action_tokens", "tokens", "sum of trajectories"),
    Metric("rollout/context_tokens", "tokens", "sum of trajectories"),
    Metric("rollout/frozen_turns", "turns", "sum"),
    Metric("rollout/frozen_tokens", "tokens", "sum"),
    Metric("rollout/server_retries", "requests", "sum"),
    Metric("rollout/server_failures", "requests", "sum"),
    Metric("rollout/server_dropped", "requests", "sum"),
    Metric("rollout/servers_left_out", "servers", "sum"),
    Metric("rollout/action_tokens_mean", "tokens per trajectory", "mean of trajectories"),
    Metric("rollout/action_tokens_p90", "tokens per trajectory", "90th percentile"),
    Metric("rollout/context_tokens_mean", "tokens per trajectory", "mean of trajectories"),
    Metric("rollout/context_tokens_p90", "tokens per trajectory", "90th percentile"),
    Metric("rollout/tokens_per_second", "tokens/s", "sum / time"),
    Metric("rollout/prefilled_tokens", "tokens", "sum"),
    Metric("rollout/decoded_tokens", "tokens", "sum"),
    Metric("rollout/adapter_prefill_tokens", "tokens", "sum"),
    Metric("rollout/prefill_positions", "positions", "sum"),
    Metric("rollout/decode_positions", "positions", "sum"),
    Metric("rollout/cached_tokens", "tokens", "sum"),
    Metric("rollout/evicted_pages", "pages", "sum"),
    Metric("rollout/evicted_states", "states", "sum"),
    Metric("rollout/memory_waits", "engine steps", "sum"),
    Metric("rollout/reshard_bytes", "bytes", "sum"),
    Metric("rollout/swaps", "swaps", "sum"),
    Metric("rollout/programs_compiled", "programs", "count"),
)
# Of process 0, unless it says otherwise.
TIMES = (
    Metric("time/rollout_s", "seconds", "wall time"),
    Metric("time/sweep_s", "seconds", "wall time"),
    Metric("time/sft_s", "seconds", "wall time"),
    Metric("time/environment_s", "seconds", "sum of rounds, max of processes"),
    Metric("time/reset_s", "seconds", "sum of rounds, max of processes"),
    Metric("time/reward_s", "seconds", "sum of rounds, max of processes"),
    Metric("time/prefill_s", "seconds", "sum of rounds"),
    Metric("time/decode_s", "seconds", "sum of rounds"),
    Metric("time/swap_s", "seconds", "sum"),
    Metric("time/compile_s", "seconds", "wall time"),
    Metric("time/checkpoint_s", "seconds", "wall time"),
    Metric("time/evaluation_s", "seconds", "wall time"),
    Metric("evaluation/programs_compiled", "programs", "count"),
)
# All but the last three also for each `LABEL=VALUE`, behind the name.
EVALUATION = (
    Metric("eval/avg@K", "success rate", "mean of tasks"),
    Metric("eval/avg@K_low", "success rate", "2.5th percentile"),
    Metric("eval/avg@K_high", "success rate", "97.5th percentile"),
    Metric("eval/pass@K", "success rate", "mean of tasks"),
    Metric("eval/pass@K_low", "success rate", "2.5th percentile"),
    Metric("eval/pass@K_high", "success rate", "97.5th percentile"),
    Metric("eval/tasks", "tasks", "count"),
    Metric("eval/failed", "episodes", "count"),
    Metric("eval/timeouts", "episodes", "count"),
    Metric("eval/selected_on", "0 or 1", "none"),
    Metric("eval/loss", "nats per token", "mean of assistant tokens"),
    Metric("eval/tokens", "tokens", "sum of conversations"),
    Metric("eval/worse", "evaluations", "count in a row"),
    Metric("eval/ema", "0 or 1", "none"),
    Metric("state/checksum", "SHA-256", "none"),
)
# Over all episodes of the evaluated tasks, by their probabilities.
EXACT = (
    Metric("exact/value", "reward", "expectation, mean of tasks"),
    Metric("exact/optimum", "reward", "maximum, mean of tasks"),
    Metric("exact/outside", "probability", "mean of tasks"),
)
OTHER = (Metric("telemetry/shards_removed", "files", "count since the start"),)

METRICS = {
    metric.name: metric
    for part in (ROLLOUT, CURRICULUM, TOKENS, STEPS, SWEEP, SFT, TIMES, EVALUATION, EXACT, OTHER)
    for metric in part
}

MAXIMA = {metric.counted for metric in STEPS if metric.over == "max"}
# Also reported per turn; `sweep/weight_max/turn=T` is computed from trajectories' final weights.
OF_TURNS = tuple(m for m in STEPS if f"{m.name}/turn=T" in METRICS and m.counted not in MAXIMA)

# The report's charts of one metric each, by section: its title; the unit is the axis. With NAME it
# has a line for each. Only some runs have those of `rewards` and `parts`.
CHARTS = {
    "rewards": {
        "rollout/reward/NAME": "Rewards by name",
        "rollout/reward_std/NAME": "Standard deviation of rewards by name",
        "sweep/reward_share/NAME": "Share of the gradient by reward",
    },
    "optimization": {
        "sweep/loss": "Loss",
        "sweep/grad_norm": "Gradient norm",
        "sweep/clip_fraction": "Clip fraction, all turns",
        "sweep/kl": "KL to the reference, all turns",
        "rollout/entropy": "Entropy of the policy",
        "logp/sampler_trainer_gap": "Sampler–trainer gap of log-probabilities",
        "rollout/no_signal_fraction": "Zero-advantage groups",
    },
    "supervised": {
        "sft/grad_norm": "Gradient norm of steps",
        "sft/learning_rate": "Learning rate of steps",
    },
    "turns": {
        "sweep/weight_mean/turn=T": "Mean weight M",
        "sweep/weight_max/turn=T": "Largest weight |M|",
        "sweep/clip_fraction/turn=T": "Clip fraction",
        "sweep/kl/turn=T": "KL to the reference",
    },
    "parts": {
        "exact/value": "Exact value: expected reward of the policy",
        "exact/outside": "Episodes that end with a text that is no action, exact",
        "rollout/reward_mean/env=NAME": "Reward by environment",
        "rollout/trajectories/env=NAME": "Trajectories by environment",
        "curriculum/success_rate": "Success so far of the tasks drawn",
        "curriculum/new_fraction": "Tasks that were never drawn before",
        "curriculum/weight_mean": "Weight of the tasks drawn",
        "rollout/workers": "Samplers beside training",
        "rollout/groups_ahead": "Groups that were finished before the trainer came for them",
        "rollout/idle_fraction": "Samplers' time with nothing to play",
        "rollout/forks": "Branches of conversations",
        "rollout/forks_failed": "Branches that failed to begin",
        "rollout/reused_tokens": "Tokens that branches share with others",
        "sweep/masked_fraction": "Sampled tokens too likely to learn from",
        "sweep/entropy": "Entropy, where it has a bonus",
        "sweep/kl_coef": "Coefficient of the KL penalty",
        "sweep/explained_variance": "Variance of returns that values explain",
        "sweep/expert_load_max": "Largest load of an expert",
        "sweep/expert_load_entropy": "Evenness of the experts' load",
        "sweep/dead_experts": "Experts without a token",
        "sweep/balance_loss": "Load-balancing loss of the routers",
        "sweep/router_z_loss": "Z-loss of the routers",
        "sweep/router_mismatch": "Routers of the steps that would choose other experts",
        "logp/router_mismatch": "Routers of the trainer that would choose other experts",
    },
}
# What the display shows, by part: the label, and a format specification or `tok/s`.
DISPLAY = {
    "success": {"rollout/success_rate": ("success", ".2f")},
    "outcome": {
        "rollout/reward_mean": ("reward", ".2f"),
        "rollout/turns_mean": ("turns", ".1f"),
        "exact/value": ("exact", ".3f"),
    },
    "speed": {
        "rollout/tokens_per_second": ("rollout", "tok/s"),
        "sweep/tokens_per_second": ("sweep", "tok/s"),
    },
    "update": {"sweep/kl": ("kl", ".2g")},
    "trouble": {  # of environments; shown where there was any
        "rollout/retries": ("retries", ".0f"),
        "rollout/failed": ("failed", ".0f"),
        "rollout/groups_dropped": ("groups dropped", ".0f"),
    },
}
