"""Records of trajectories as `docs/trajectories.md` says, made by hand, and shards of them."""

import gzip
import json
import random
from pathlib import Path

KINDS = ("cancel", "return", "status")
STOPS = ("done", "done", "done", "max_turns", "env_error")
SYSTEM = "You work at an order desk. Look an order up before you change it; reply ends the case."


def call(name, /, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def conversation(kind, order, turns):
    """Messages of one case at the order desk, with `turns` answers of the assistant."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"This is Ada Moss. Please {kind} the order of my {order}."},
    ]
    steps = (
        (call("find_customer", name="Ada Moss"), {"customer_id": "C12"}),
        (call("get_order", order_id=order), {"order_id": order, "status": "packed", "paid": True}),
        (call(f"{kind}_order", order_id=order), {"ok": True, "refund": 12.5, "note": None}),
    )
    for turn in range(turns - 1):
        action, answer = steps[turn % len(steps)]
        thought = f"I need the facts of {order} first.\n" if turn == 0 else ""
        messages.append({"role": "assistant", "content": thought + action})
        messages.append({"role": "tool", "content": json.dumps(answer)})
    messages.append({"role": "assistant", "content": call("reply", outcome="cancelled")})
    return messages


def segment_of(messages, rng):
    """One segment: a token a few characters, as a tokenizer would make them."""
    tokens = {"tokens": [], "turn": [], "text": [], "logp": [], "trainer_logp": [], "entropy": []}
    turn = -1
    for message in messages:
        acts = message["role"] == "assistant"
        turn += acts
        text = message["content"]
        pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
        if not acts:
            pieces = [f"<|{message['role']}|>\n", *pieces, "\n"]
        for piece in pieces:
            logp = round(-rng.expovariate(4), 5)
            tokens["tokens"].append(rng.randrange(2048))
            tokens["turn"].append(turn if acts else -1)
            tokens["text"].append(piece)
            tokens["logp"].append(logp if acts else None)
            tokens["trainer_logp"].append(round(logp + rng.gauss(0, 0.01), 5) if acts else None)
            tokens["entropy"].append(round(rng.expovariate(2), 5) if acts else None)
    return tokens


def record(iteration=0, group=0, member=0, *, split="train", seed=0, **given):
    """One record; `given` replaces any of its keys, and `segments` follow from `messages`."""
    rng = random.Random(f"{seed}/{split}/{iteration}/{group}/{member}")
    kind = KINDS[group % len(KINDS)]
    turns = 2 + (group + member) % 4
    stop = STOPS[(3 * group + member) % len(STOPS)]
    failed = stop == "env_error"
    success = None if failed else rng.random() < 0.6
    advantage = None if failed or split != "train" else round(rng.uniform(-2, 2), 5)
    weights = [None if advantage is None else round(advantage * 0.9**t, 5) for t in range(turns)]
    messages = given.get("messages") or conversation(kind, f"mug-{group}", turns)
    made = {
        "schema": 1,
        "split": split,
        "evaluation": split != "train",
        "iteration": iteration,
        "group": group,
        "member": member,
        "task_id": f"{split}/{kind}/{group:04d}",
        "seed": 1000 * iteration + group,
        "labels": {"kind": kind},
        "stop": stop,
        "failed": failed,
        "failure": "the desk's software did not answer" if failed else None,
        "reward": float(bool(success)),
        "score": None if failed else float(bool(success)),
        "success": success,
        "turns": turns,
        "turn_rewards": [],
        "rewards": {"env": float(bool(success)), "brevity": 0.25},
        "named_turn_rewards": {"brevity": [0.25] * turns},
        "policy_version": iteration,
        "advantage": advantage,
        "weights": weights if split == "train" else [],
        "info": {"calls": turns},
        "messages": messages,
        "segments": [] if "segments" in given else [segment_of(messages, rng)],
    }
    return {**made, **given}


def write_shard(workdir, records, name=None):
    """Writes records of one iteration and split as the recorder does; returns the file."""
    split, iteration = records[0]["split"], records[0]["iteration"]
    stem = name or ("train" if split == "train" else f"eval_{split}")
    file = Path(workdir) / "trajectories" / f"{stem}_{iteration:06d}.jsonl.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(made) + "\n" for made in records)
    file.write_bytes(gzip.compress(lines.encode(), 1, mtime=0))
    return file


def write_run(workdir, iterations=3, groups=8, members=4, *, test=True):
    """A run's shards: `iterations` of training, and an evaluation after the last one."""
    for iteration in range(iterations):
        records = [record(iteration, g, m) for g in range(groups) for m in range(members)]
        write_shard(workdir, records)
    if test:
        records = [
            record(iterations, g, m, split="test") for g in range(groups) for m in range(members)
        ]
        write_shard(workdir, records)
