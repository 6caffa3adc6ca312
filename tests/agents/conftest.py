"""An endpoint, and an episode at it, for the tests of each API's own client."""

import pytest
from agent_cases import make_endpoint, opened


@pytest.fixture(scope="module")
def endpoint():
    endpoint = make_endpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture
def episode(endpoint):
    with opened(endpoint) as episode:
        yield episode


@pytest.fixture
def session(episode):
    return episode[0]
