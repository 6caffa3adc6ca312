"""A run whose agent's client forces calls and schemas: what is recorded, and what is trained on."""

import itertools

import numpy as np
import numpy_model
import pytest
from places import ROOT
from safetensors.numpy import load_file

from seeupo_jax import load_config, read_trajectories, train
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.policy.files.weights import read_tokenizer

AGENT = """
SCHEMA = {"enum": ["mug", "red mug", "blue cap"]}
LIGHT = {
    "type": "object",
    "properties": {"at": {"enum": ["home", "work"]}},
    "required": ["at"],
    "additionalProperties": False,
}

def task_ids(split):
    return ["one", "two"]

async def play(task, client):
    ask = client.chat.completions.create
    messages = [{"role": "user", "content": "Where is my order 123456?"}]
    form = {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}
    said = await ask(model="m", messages=messages, response_format=form)
    messages += [said.choices[0].message, {"role": "user", "content": task.task_id}]
    tool = {"type": "function", "function": {"name": "light", "parameters": LIGHT}}
    acted = await ask(
        model="m", messages=messages, tools=[tool],
        tool_choice="required", parallel_tool_calls=False,
    )
    (call,) = acted.choices[0].message.tool_calls
    at_home, cap = "home" in call.function.arguments, "cap" in said.choices[0].message.content
    return float(at_home) + float(cap)
"""
CHOICES = [
    "rollout.tasks=2",
    "rollout.group_size=4",
    "rollout.max_action_tokens=64",
    "rollout.max_context=256",
    "batching.buckets=(256,)",
    "agent.constraints=True",
    "evaluation.tasks=1",
    "evaluation.k=1",
    "iterations=1",
    "checkpoint.export=False",
    "checkpoint.keep_best=0",
    "telemetry.display=plain",
]
ITEMS = ('"mug"', '"red mug"', '"blue cap"')
# The calls of one tool in the format's own words: each space may be missing.
PARTS = (
    ("<tool_call>", "<tool_call>\n"),
    ('{"name":', '{"name": '),
    ('"light",', '"light", '),
    ('"arguments":', '"arguments": '),
    ('{"at":', '{"at": '),
    ('"home"}}', '"work"}}'),
    ("", "\n"),
    ("</tool_call>",),
)
CALLS = tuple(map("".join, itertools.product(*PARTS)))
WITHIN = 1e-5 + 0.5e-5  # float32's, of logits to -25, and that of five digits in records


@pytest.fixture(scope="module")
def run(tmp_path_factory, one_device):
    """The records of the run's trajectories, and the metrics of its iteration."""
    folder = tmp_path_factory.mktemp("constrained")
    agent = folder / "agent.py"
    agent.write_text(AGENT)
    config = load_config(ROOT / "configs/quickstart.py", [*CHOICES, f"agent.name={agent}:play"])
    train(config, folder / "run")
    (metrics,) = [each for each in read_metrics(folder / "run") if "sweep/turns" in each]
    return list(read_trajectories(folder / "run", split="train")), metrics


def policy_logp(tokens, weights):
    """Log-probabilities of all tokens after each, by the NumPy twin in float64: [L, V]."""
    logits_LV, _ = numpy_model.forward(weights, tokens, numpy_model.Architecture(head_dim=32))
    logits_LV = logits_LV - logits_LV.max(-1, keepdims=True)
    return logits_LV - np.log(np.exp(logits_LV).sum(-1, keepdims=True))


def may_follow(said, texts, pieces, end):
    """The tokens after which one of the texts is still possible, and whether one letter is."""
    rest = [text[len(said) :] for text in texts if text.startswith(said)]
    spelled = [
        token
        for token, piece in enumerate(pieces)
        if piece and any(text.startswith(piece) for text in rest)
    ]
    return spelled + [end] * ("" in rest), len({text[:1] for text in rest}) == 1


def test_the_mask_is_in_what_is_recorded_and_forced_tokens_are_left_out(run):
    records, metrics = run
    tokenizer = read_tokenizer("package:order_desk")
    names = (piece.removeprefix(b"\xff") for piece in tokenizer.token_bytes())
    pieces, (end,) = [name.decode(errors="replace") for name in names], tokenizer.end_ids
    weights = load_file(ROOT / "seeupo_jax/assets/order_desk/model.safetensors")
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    gaps, forced, seen = [], 0, set()
    # The second call has tools, so that it begins a segment.
    pairs = itertools.product(records, enumerate((ITEMS, CALLS)))
    for record, (turn, texts) in pairs:
        segment, said = record["segments"][turn], ""
        tokens, logp_LV = segment["tokens"], policy_logp(segment["tokens"], weights)
        for i in [i for i, of in enumerate(segment["turn"]) if of == turn]:
            free, alone = may_follow(said, texts, pieces, end)
            assert tokens[i] in free
            before_V, sampler = logp_LV[i - 1], segment["logp"][i]
            if sampler == 0 and alone:  # only one letter may follow, or the end
                forced += 1
            else:
                mass = np.log(np.exp(before_V[free]).sum())
                assert sampler == pytest.approx(before_V[tokens[i]] - mass, abs=WITHIN)
                trainer = segment["trainer_logp"][i]
                assert trainer == pytest.approx(before_V[tokens[i]], abs=WITHIN)
                gaps.append(-mass)
            said += "" if tokens[i] == end else pieces[tokens[i]]
        assert said in texts
        seen.add(said)
    assert len(records) == 8 and len(seen & set(CALLS)) > 1
    assert any(any(record["weights"]) for record in records)
    assert metrics["sweep/forced_fraction"] == pytest.approx(forced / (forced + len(gaps)))
    assert 0 < forced < forced + len(gaps)
    # The gap is the mass that the forms cut off, and nothing else.
    assert metrics["logp/sampler_trainer_gap_mean"] == pytest.approx(np.mean(gaps), abs=WITHIN)
    assert metrics["logp/sampler_trainer_gap"] == pytest.approx(np.max(gaps), abs=WITHIN)
