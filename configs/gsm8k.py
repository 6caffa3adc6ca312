"""Word problems in GSM8K's form: {"question": ..., "answer": "... #### 72"}: docs/prompts.md.

    python -m seeupo_jax.train --config=configs/gsm8k.py --workdir=runs/gsm8k \\
        --config.env.options.file=FILE.jsonl --config.model.path=FOLDER

An answer's number after `####` is compared with that of the file. A wrong answer gets one more try,
so an episode has up to two turns. Without the two options, the problems are those of
docs/examples/word_problems.jsonl and the model is SmolLM2-135M-Instruct, for a look at the loop:
it is too small to learn this. The sizes are meant for a model of 0.5 to 3 billion parameters and
an accelerator; they were not run.
"""

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import third_party

INSTRUCTION = (
    "Solve the problem step by step. End with a line that has #### and then the number alone."
)


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 200
    config.env = {
        "name": "prompts",
        "options": {
            "file": "docs/examples/word_problems.jsonl",
            "prompt": "question",
            "answer": "answer",
            "check": "number",
            "system": INSTRUCTION,
            "retries": 1,
        },
    }
    config.model = {
        "path": third_party("models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        "dtype": "bfloat16",
    }
    config.rollout = {
        "tasks": 64,
        "group_size": 8,
        "max_turns": 2,
        "max_action_tokens": 400,
        "max_context": 1280,
    }
    config.optimizer = {"name": "adamw", "learning_rate": 1e-6}
    config.evaluation = {"every": 20, "tasks": 64, "k": 4}
    config.checkpoint = {"every": 20}
    return config
