"""Two recipes of Tinker's cookbook, unchanged, one after the other on a small policy.

The first one teaches the form of answers, so that for some samples of the second one, which begins
with its weights, the form is right: groups differ in reward, and there is a gradient.
"""

import json
import random

import pytest
from chat_cases import small_library
from flax import nnx
from tinker_cases import Server, needs_sdk, run_client

from seeupo_jax.configuration.schema import Chat
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer
from seeupo_jax.policy.transformer import Transformer

# As the cookbook's renderer role_colon writes conversations.
TEMPLATE = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
SHARED = ("renderer_name=role_colon", "lora_rank=8", "save_every=0", "eval_every=0")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a random policy and a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    library = small_library(TEMPLATE, ("<|endoftext|>",))
    arch = Architecture(
        vocab_size=len(library),
        width=64,
        layers=2,
        heads=2,
        kv_heads=2,
        head_dim=32,
        mlp_width=128,
    )
    tokenizer = HuggingFaceTokenizer(library, Chat(), generation={}, where="a test")
    save_pretrained(Transformer(arch, nnx.Rngs(0)), folder, tokenizer)
    return folder


def write_conversations(file):
    """Sums, asked for as the environment of the second recipe asks."""
    rng = random.Random(0)
    lines = []
    for _ in range(48):
        x, y = rng.randrange(101), rng.randrange(101)
        said = ("What is 4 + 5?", "9", f"What is {x} + {y}?", str(x + y))
        roles = ("user", "assistant") * 2
        messages = [{"role": r, "content": c} for r, c in zip(roles, said, strict=True)]
        lines.append(json.dumps({"messages": messages}) + "\n")
    file.write_text("".join(lines))


def play(server, model, folder, name, *settings):
    """The metrics that a recipe logs, a step each, and its last checkpoint."""
    command = ("-m", f"tinker_cookbook.recipes.{name}.train", f"model_name={model}", *SHARED)
    run_client(server, *command, f"log_path={folder}", *settings)
    steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    (last,) = map(json.loads, (folder / "checkpoints.jsonl").read_text().splitlines())
    return [step for step in steps if "update_skipped" in step], last


@needs_sdk
def test_recipes_of_conversations_and_of_mathematics_train_a_policy(model, tmp_path):
    write_conversations(tmp_path / "sums.jsonl")
    server = Server(tmp_path / "saved", f"--model={model}")
    try:
        taught, last = play(
            server,
            model,
            tmp_path / "chat_sl",
            "chat_sl",
            f"dataset={tmp_path / 'sums.jsonl'}",
            *("batch_size=16", "num_epochs=20", "learning_rate=1e-2", "max_length=128"),
        )
        rewarded, _ = play(
            server,
            model,
            tmp_path / "math_rl",
            "math_rl",
            f"load_checkpoint_path={last['state_path']}",
            *("env=arithmetic", "loss_fn=importance_sampling", "learning_rate=1e-3"),
            *("group_size=16", "groups_per_batch=4", "max_tokens=14", "max_steps=2"),
        )
    finally:
        server.kill()
    assert (len(taught), len(rewarded)) == (60, 2)
    assert not any(step["update_skipped"] for step in (*taught, *rewarded))
    losses = [step["train_mean_nll"] for step in taught]
    assert max(losses[-5:]) < losses[0] / 3
    # The sampler has the weights of each step, not those of the step before.
    assert max(step["optim/kl_sample_train_v2"] for step in rewarded) < 1e-6
    assert any(0 < step["env/all/format"] < 1 for step in rewarded)
    assert max(step["grad_norm"] for step in rewarded) > 1
