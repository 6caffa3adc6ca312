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
OF_SEEUPO, OF_GSPO = ((0.2, 0.2),), ((3e-4, 4e-4),)
# Eq. 8 and 9 of the paper: neither M nor the advantages are clipped, and M has whole ratios.
THEORY = {
    "algorithm.weight_clip": None,
    "algorithm.advantage_clip": None,
    "algorithm.ratio": "product",
}
RECIPES = {
    "seeupo": {"recipe": "seeupo", **THEORY},
    "forward": {"recipe": "seeupo_forward", **THEORY},
    "unweighted": {"recipe": "seeupo_unweighted", "algorithm.ratio": "product"},
    "parallel": {"recipe": "parallel", "algorithm.ratio": "product"},
    "grpo": {"recipe": "grpo"},
    "gspo": {"recipe": "gspo"},
}
# By the suffix of a recipe's name.
ADAPTERS = {"": {}, "_per_turn": {"lora.per_turn": 8}}
RATES = (0.01, 0.03, 0.1)


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
    clips = {name: OF_GSPO if name.startswith("gspo") else OF_SEEUPO for name in recipes}
    steps = {name: {"optimizer.learning_rate": RATES, CLIP: clips[name]} for name in recipes}
    grid = {"optimizer.learning_rate": RATES, CLIP: OF_SEEUPO}
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
        "tuning": {"seeds": (100, 101), "grid": grid, "grids": steps},
        "seeds": tuple(range(8)),
        # All step lengths of all recipes, on eight seeds too.
        "stability": {"seeds": tuple(range(100, 108)), "grid": grid, "grids": steps},
        # Weights as SeeUPO's authors have them; and the optimizer that most use.
        "ablations": {
            f"{name}{suffix}": {"of": f"seeupo{suffix}", **fields}
            for suffix in ADAPTERS
            for name, fields in (("authors", authors), ("adam", adam))
        },
    }
