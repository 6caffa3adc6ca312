"""A recipe of your own: one step per iteration, a ratio per token, credit per turn, no KL."""


def soft_turns():
    return {
        "turns_per_update": None,
        "cumulative_ratio": False,
        "advantage": "docs.examples.turn_baseline:ESTIMATOR",
        "objective": "docs.examples.soft_gate:OBJECTIVE",
        "ratio": "token",
        "loss_aggregation": "token",
        "kl_coef": 0.0,
    }
