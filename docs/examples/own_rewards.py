"""Rewards of one's own: functions of the finished episode, one of them with an option."""


def brevity(episode, *, words=40):
    """1 for messages of no word, 0 for `words` or more per message."""
    said = (m for m in episode.messages if m["role"] == "assistant")
    own = [m["content"] for m in said if "history" not in m]  # "history": not sampled by the policy
    written = sum(len(text.split()) for text in own)
    return max(0.0, 1 - written / (words * max(1, len(own))))


async def early(episode):
    """A solved task pays 1 divided by its turns."""
    return float(episode.score == 1) / max(1, episode.turns)
