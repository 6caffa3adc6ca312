"""Generated tasks of `bfcl_worlds`, and the official checker on answers to them."""

import itertools

from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

from seeupo_jax.instruments.bfcl_worlds.composition import CLASSES
from seeupo_jax.instruments.bfcl_worlds.generator import VARIANTS, GenerationOptions, generate

ALL = GenerationOptions(tuple(VARIANTS), (1, 4), CLASSES, seed=0)
_NUMBER = itertools.count()


def tasks(count, split="train", options=ALL):
    return [generate(options, split, index) for index in range(count)]


def entry_of(task):
    """A task as the official checker wants it, which reads the category from the id."""
    category = "multi_turn_long_context" if task.long_context else "multi_turn_base"
    classes = list(task.classes)
    return {"initial_config": task.scenario, "involved_classes": classes, "id": f"{category}_0"}


def official_verdict(entry, truth, turns):
    """Whether the official checker finds answers valid, in simulators that it just made."""
    tag = f"worlds{next(_NUMBER)}x"
    decoded = [[list(turn)] if turn else [] for turn in turns]
    wanted = [list(turn) for turn in truth]
    result = multi_turn_checker(decoded, wanted, entry, "multi_turn_base", tag)
    for key in [key for key in vars(multi_turn_utils) if key.startswith(tag)]:
        delattr(multi_turn_utils, key)
    return result["valid"]
