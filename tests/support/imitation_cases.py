"""Small conversations, their tokenizer and batches of them, shared by tests of imitation."""

from __future__ import annotations

import functools

from seeupo_jax.configuration import schema
from seeupo_jax.envs.base import Demonstration
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.learner.imitation.action_segments import Tokenized
from seeupo_jax.learner.imitation.imitation_batches import Batches
from seeupo_jax.policy.files.tokenizer import train_tokenizer

WORDS = ("red", "green", "blue", "find", "take")
TOOLS = ({"name": "find", "parameters": {"properties": {"colour": {}}, "required": ["colour"]}},)
# Two messages answer the first action; the last one answers the last action and is never read.
MESSAGES = (
    ("system", "find the colour"),
    ("user", "take red"),
    ("assistant", "find red"),
    ("tool", "red blue"),
    ("user", "take blue"),
    ("assistant", "take blue"),
    ("tool", "green"),
    ("assistant", "blue"),
    ("user", "red"),
)


def demonstration(*messages):
    messages = messages if messages else MESSAGES
    return Demonstration(tuple({"role": r, "content": c} for r, c in messages), TOOLS)


@functools.cache
def tokenizer():
    chat = schema.Chat(system=True, tools="signatures")
    texts = [content for _, content in MESSAGES]
    return train_tokenizer(texts, WORDS, vocab_size=276, chat=chat)


@functools.cache
def demonstrations():
    """Forty that differ in their words and in length."""
    made = []
    for i in range(40):
        said = " ".join([WORDS[i % 5]] * (1 + i // 5))
        made.append(demonstration(("user", said), ("assistant", WORDS[i % 3])))
    return made


SHAPES = Shapes((16, 48), action=16, rows=2, trajectories=2)


def tokenized(conversations=None, **choices):
    shown = demonstrations() if conversations is None else conversations
    return Tokenized(shown, tokenizer(), **choices)


def batches(seed=3, shapes=SHAPES, block=1, **choices):
    return Batches(tokenized(**choices), shapes, batch_size=2, seed=seed, block=block)
