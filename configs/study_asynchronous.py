"""Does training on stale data learn as well? The order desk with slow environments, five seeds.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m seeupo_jax.compare --study \\
        --config=configs/study_asynchronous.py --workdir=runs/asynchronous \\
        --results=docs/convergence/asynchronous

All runs take the same steps on as many trajectories. `synchronous` samples with both devices and
then trains with them; in the others one samples while the other trains, up to `rollout.max_lag`
sweeps ahead, with importance weights or without. Episodes wait up to a third of a second, one in
twenty four times as long, which is to a sweep of this policy what half a minute is to one of a
large model. Synchronous runs do not wait, which changes nothing that they train on.
"""

from ml_collections import ConfigDict

TRUNCATED = {"method": "truncate", "per": "token", "clip": 2.0}


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 30
    config.stop_after_idle = None  # a run that collapses is trained to its end too
    config.env = {
        "name": "seeupo_jax.instruments.bench.asynchronous.slow_desk:SlowDesk",
        "options": {"seconds": 0.33},
        "workers": 640,
    }
    config.model = {"path": "package:order_desk"}
    config.rollout = {
        "tasks": 16,
        "group_size": 8,
        "max_turns": 6,
        "max_action_tokens": 16,
        "max_context": 128,
        "temperature": 1.0,
    }
    config.batching = {"microbatch_tokens": 512}
    config.optimizer = {"name": "adam", "learning_rate": 2e-4}
    config.evaluation = {"every": 0, "split": "test", "tasks": 64, "k": 4}
    config.checkpoint = {"every": 10, "keep": 1, "keep_best": 0, "export": False}
    config.telemetry = {"trackers": (), "display": "plain", "trajectory_share": 0.0}
    return config


def _stale(lag: int, importance: dict | None) -> dict:
    """Fields of a run that samples so many sweeps ahead."""
    return {
        "rollout.devices": 1,
        "rollout.max_lag": lag,
        "rollout.concurrency": 128 * (1 + lag),
        "algorithm.importance": importance,
    }


def get_study() -> dict:
    return {
        "recipes": {
            "synchronous": {"env.options.seconds": 0.0},
            "lag_1": _stale(1, TRUNCATED),
            "lag_4": _stale(4, TRUNCATED),
            "lag_1_uncorrected": _stale(1, None),
            "lag_4_uncorrected": _stale(4, None),
        },
        "reference": "synchronous",
        "choose_by": "area",
        "tuning": {"seeds": (100,), "grid": {"optimizer.learning_rate": (2e-4,)}},
        "exploring": {"iterations": 2},  # one point only: there is nothing to choose
        "seeds": tuple(range(5)),
    }
