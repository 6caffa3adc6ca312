"""Where the guarantee holds in language: the laboratory's problems in text, recipes side by side.

    python -m seeupo_jax.compare --study --config=configs/study_lab_problem.py \\
        --workdir=runs/study_lab_deceptive --results=docs/convergence/lab_deceptive
    python -m seeupo_jax.compare --study --config=configs/study_lab_problem.py \\
        --config.env.options.problem=lottery --config.rollout.max_turns=3 \\
        --workdir=runs/study_lab_lottery --results=docs/convergence/lab_lottery

Six recipes from the bundled near-uniform policy, by adapters over its frozen parameters: one for
all turns, or one for each turn. Plain gradient ascent, as in the laboratory, with three step
lengths, the largest of which clipping limits, each with its authors' clip range. The exact value of
the policy is recorded after every iteration. What is predicted: docs/convergence/lab_problems.md.
"""

from ml_collections import ConfigDict

TURNS = 4
CLIP = ("algorithm.clip_low", "algorithm.clip_high")
RATE = "optimizer.learning_rate"
STEPS = {RATE: (0.01, 0.03, 0.1), CLIP: ((0.2, 0.2),)}
# One loss for all turns has smaller gradients, and a narrow clip range ends them early.
OWN_STEPS = {
    "grpo": {RATE: (0.03, 0.1, 0.3), CLIP: ((0.2, 0.2),)},
    "gspo": {RATE: (0.3, 1.0, 3.0), CLIP: ((3e-4, 4e-4),)},
}
# Eq. 8 and 9 of the paper: neither M nor the advantages are clipped, and M has whole ratios.
WHOLE = {"algorithm.ratio": "product", "algorithm.advantage_clip": None}
WEIGHTED = {**WHOLE, "algorithm.weight_clip": None}
RECIPES = {
    "seeupo": {"recipe": "seeupo", **WEIGHTED},
    "forward": {"recipe": "seeupo_forward", **WEIGHTED},
    "unweighted": {"recipe": "seeupo_unweighted", **WHOLE},
    "parallel": {"recipe": "parallel", **WHOLE},
    "grpo": {"recipe": "grpo"},
    "gspo": {"recipe": "gspo"},
}
# By the suffix of a recipe's name.
ADAPTERS = {"": {}, "_per_turn": {"lora.per_turn": 8}}


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 20
    config.stop_after_idle = None  # a run that collapses is trained to its end too
    config.env = {"name": "lab_problem", "options": {"problem": "deceptive"}}
    config.model = {"path": "package:lab_problem"}
    config.lora = {"rank": 8}
    config.algorithm = {"inner_epochs": 4, "kl_coef": 0.0}
    config.rollout = {
        "tasks": 8,
        "group_size": 16,
        "max_turns": TURNS,
        "max_action_tokens": 2,
        "max_context": 64,
        "deterministic": True,  # its environments answer at once
    }
    # Adam's steps do not shrink with the gradient: it leaves the letters of a solved problem.
    config.optimizer = {"name": "sgd", "max_grad_norm": None}
    config.evaluation = {"every": 0, "split": "test", "tasks": 1, "k": 16, "exact": True}
    config.checkpoint = {"every": 0, "keep": 1, "keep_best": 0, "export": False}
    config.telemetry = {"trackers": (), "display": "plain", "trajectory_share": 0.0}
    return config


def get_study() -> dict:
    recipes = {
        f"{name}{suffix}": fields | adapters
        for suffix, adapters in ADAPTERS.items()
        for name, fields in RECIPES.items()
    }
    grids = {f"{name}{suffix}": own for name, own in OWN_STEPS.items() for suffix in ADAPTERS}
    authors = {
        "algorithm.weight_clip": 0.2,
        "algorithm.advantage_clip": 3.0,
        "algorithm.ratio": "geometric",
    }
    adam = {
        "optimizer.name": "adam",
        "optimizer.learning_rate": 1e-3,
        "optimizer.max_grad_norm": 1.0,
    }
    return {
        "recipes": recipes,
        "reference": "seeupo_per_turn",
        "choose_by": "area",
        "tuning": {"seeds": (100, 101), "grid": STEPS, "grids": grids},
        "seeds": tuple(range(8)),
        # All step lengths of all recipes, on eight seeds too.
        "stability": {"seeds": tuple(range(100, 108)), "grid": STEPS, "grids": grids},
        # Weights as SeeUPO's authors have them; the optimizer that most use; the largest step, and
        # what clipping does there.
        "ablations": {
            f"{name}{suffix}": {"of": f"seeupo{suffix}", **fields}
            for suffix in ADAPTERS
            for name, fields in (("authors", authors), ("adam", adam))
        }
        | {
            name: {"of": "seeupo_per_turn", RATE: STEPS[RATE][-1], **fields}
            for name, fields in (
                ("large_per_turn", {}),
                ("large_clipped_advantages_per_turn", {"algorithm.advantage_clip": 3.0}),
                ("large_clipped_weights_per_turn", {"algorithm.weight_clip": 0.2}),
            )
        },
    }
