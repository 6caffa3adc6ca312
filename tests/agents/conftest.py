"""An endpoint, and an episode at it, for the tests of each API's own client."""

import jax
import pytest
from agent_cases import make_endpoint, opened


@pytest.fixture(scope="module")
def one_device():
    """Runs in this process take one of the eight devices: their programs compile sooner."""
    with pytest.MonkeyPatch.context() as patch:
        one = jax.devices()[:1]
        patch.setattr(jax, "devices", lambda: one)
        yield


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
