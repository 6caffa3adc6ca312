"""What a user reads where something is refused."""

import pytest


def refusal(make):
    """The text of the ValueError that a call raises: one sentence, and no long one."""
    with pytest.raises(ValueError) as error:
        make()
    text = str(error.value)
    assert "\n" not in text and len(text) < 1000
    return text
