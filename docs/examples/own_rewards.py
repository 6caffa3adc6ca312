"""Custom reward functions of the finished episode; one of them has an option."""


def brevity(episode, *, words=40):
    """1 for empty messages, 0 for `words` or more words per message."""
    answers = (m for m in episode.messages if m["role"] == "assistant")
    own = [m["content"] for m in answers if "history" not in m]  # "history": not sampled
    written = sum(len(text.split()) for text in own)
    return max(0.0, 1 - written / (words * max(1, len(own))))


async def early(episode):
    """1 divided by the number of turns if the task is solved, else 0."""
    return float(episode.score == 1) / max(1, episode.turns)
