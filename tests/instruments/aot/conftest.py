"""What is told of programs ahead is of those that users compile."""

import pytest


@pytest.fixture(autouse=True)
def as_users_compile(optimized):
    pass
