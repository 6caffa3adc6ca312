"""A reward for the form of an answer, for a policy that seldom solves a task."""


def command(episode):
    """1 if an answer has a command for shell_agent.py, else 0."""
    said = [m["content"] for m in episode.messages if m["role"] == "assistant"]
    return float(any("```bash" in text for text in said))
