"""Measures the lengths of real BFCL conversations, the table behind the workload `bfcl`.

    python third_party/bfcl/lengths.py --tokenizer=third_party/models/qwen3 --output=FILE.json

The conversations are the reference solutions of the multi-turn base tasks of the training split,
played in the environment and rendered by the tokenizer's chat template, up to ten model calls each.
It needs the official data (third_party/bfcl) and a tokenizer (third_party/models); its output ships
with the package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from seeupo_jax.benchmarks.workloads import cut
from seeupo_jax.configuration.flags import Flags, path
from seeupo_jax.envs.base import Demonstration
from seeupo_jax.envs.bfcl.environment import Bfcl
from seeupo_jax.errors import sentence_errors
from seeupo_jax.learner.imitation.action_segments import to_segments
from seeupo_jax.policy.files.tokenizer import Tokenizer, load_tokenizer

MAX_TURNS = 10  # model calls, as in the paper's runs
_ALL_CALLS = 1000  # per episode: no conversation is omitted; they are truncated here


def lengths_of(tokenizer: Tokenizer, demonstration: Demonstration) -> list[Any]:
    """The lengths of prompt, actions and observations in tokens; at most `MAX_TURNS` actions.

    Raises:
      ValueError: the template rewrites earlier messages, so that there is no single length.
    """
    segments = to_segments(demonstration, tokenizer)
    if len(segments) != 1:
        raise ValueError(
            f"--tokenizer: got a template that rewrites a conversation {len(segments) - 1} times;"
            " allowed: one that only appends."
        )
    played = cut(segments[0])
    actions = played.lengths[:MAX_TURNS]
    observations = [len(tokens) for tokens in played.observations[: len(actions) - 1]]
    return [len(played.prompt), list(actions), observations]


def main(argv: Sequence[str]) -> None:
    """The command."""
    flags = Flags("", __doc__)
    flags.prog = argv[0]
    flags.flag("tokenizer", "a folder", path, required=True)
    flags.flag("output", "the file to write", path, required=True)
    with sentence_errors():
        given = flags.read(argv[1:])
        tokenizer = load_tokenizer(given.tokenizer)
        if tokenizer is None:
            raise ValueError(f"--tokenizer: got {given.tokenizer}; allowed: one's folder.")
        demonstrations = Bfcl(max_calls=_ALL_CALLS).demonstrations("train")
        found = [lengths_of(tokenizer, each) for each in demonstrations]
    about = {
        "source": "BFCL v4 multi_turn_base, tasks 0 to 99, reference solutions (Apache-2.0)",
        "tokenizer": given.tokenizer.name,
        "columns": ["prompt", "actions", "observations"],
    }
    lines = ",\n    ".join(json.dumps(row, separators=(",", ":")) for row in found)
    head = json.dumps(about, indent=2).removesuffix("\n}")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(f'{head},\n  "conversations": [\n    {lines}\n  ]\n}}\n')
    print(f"wrote {given.output}: {len(found)} conversations")


if __name__ == "__main__":
    main(sys.argv)
