"""What episodes cost whose every turn is a segment of its own, and why they are."""

import chat_cases as cases
import numpy as np
from training_template_cases import THANKS, family, make, play

from seeupo_jax.policy.files.rewritten import RewrittenEpisodes
from seeupo_jax.types import CONTEXT, Segment


def segment(*parts):
    """Of pairs: the turn, or None for context, and its tokens."""
    turn = [CONTEXT if turn is None else turn for turn, tokens in parts for _ in tokens]
    tokens = [token for _, tokens in parts for token in tokens]
    return Segment(np.array(tokens), np.array(turn), np.zeros(len(tokens)))


PROMPT, REPLY, END = [1, 2, 3], [7, 8], 9
THOUGHT, ANSWER = [20, 21, 22, 23], [30, 31, END]
# The thought of turn 0, of 4 tokens, is not in the context of turn 1; nor are both in that of 2.
EPISODE = (
    segment((None, PROMPT), (0, THOUGHT + ANSWER)),
    segment((None, PROMPT + ANSWER + REPLY), (1, THOUGHT + ANSWER)),
    segment((None, PROMPT + ANSWER + REPLY + ANSWER + REPLY), (2, THOUGHT + ANSWER)),
)


def counts_of(*episodes):
    counts = RewrittenEpisodes()
    for episode in episodes:
        counts.add(episode)
    return counts


def test_the_cost_in_tokens_by_hand():
    counts = counts_of(EPISODE)
    assert (counts.several, counts.rewritten) == (1, 1)
    assert counts.tokens == (3 + 7) + (3 + 3 + 2 + 7) + (3 + 3 + 2 + 3 + 2 + 7)
    assert counts.kept == 3 + 3 * (4 + 3) + 2 * 2  # the prompt, three actions, two replies


def test_a_warning_is_due_where_most_episodes_of_several_turns_are_rewritten():
    whole = (segment((None, PROMPT), (0, ANSWER), (None, REPLY), (1, ANSWER)),)
    single = (segment((None, PROMPT), (0, ANSWER)),)
    partly = (whole[0], segment((None, PROMPT), (2, ANSWER)))  # two of three turns in one
    unread = (segment(),)
    counts = counts_of(EPISODE, EPISODE, whole, single, single, partly, EPISODE, unread)
    assert (counts.several, counts.rewritten) == (5, 3)
    assert counts.warning("episodes", lambda: "Do this.") == (
        "warning: in 3 of 5 episodes of several turns every turn is a segment of its own: they have"
        " 45 tokens on average, where one segment would have about 28. Do this."
    )
    for few in ((EPISODE, whole), (single,), (partly, whole)):
        assert counts_of(*few).warning("episodes", lambda: "") is None


def test_the_estimate_is_what_a_training_template_makes():
    text = "<think>\nWhy?\n</think>\n\nYes."
    counts, kept = RewrittenEpisodes(), 0
    for number in (2, 3, 5):
        own, ours = (family("qwen3", name) for name in (None, "keep_thoughts"))
        action = own.action(text)
        actions, replies = [action] * number, [THANKS] * number
        counts.add(play(own, actions, replies)[0])
        (segment,) = play(ours, actions, replies)[0]
        kept += len(segment.tokens_L)
    assert (counts.several, counts.rewritten, counts.kept) == (3, 3, kept)


def test_the_reason_and_the_remedy():
    assert family("qwen3", None).why_rewritten() == (
        "The chat template removes earlier thoughts; config.chat.template=keep_thoughts keeps them."
    )
    assert "keeps earlier thoughts, but writes" in family("qwen3").why_rewritten()
    other = make(cases.FORGETS_THOUGHTS, None).why_rewritten()
    assert other.startswith("There is no training template for this model, whose chat template")
    assert "as none of Qwen3, Qwen3.5, GLM-4.5 does" in other
