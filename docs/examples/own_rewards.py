"""Your own rewards: functions of the finished episode, one of them with an option."""


def brevity(episode, *, words=40):
    """1 for messages without words, 0 for `words` or more words per message."""
    # A message with the key "history" was not sampled by the policy.
    own = [m for m in episode.messages if m["role"] == "assistant" and "history" not in m]
    written = sum(len(m["content"].split()) for m in own)
    return max(0.0, 1 - written / (words * max(1, len(own))))


async def early(episode):
    """1 divided by the number of turns for a solved task, else 0."""
    return float(episode.score == 1) / max(1, episode.turns)
