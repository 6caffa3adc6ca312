"""What a client of a pool says about a file of servers that it cannot use."""

import pytest

from seeupo_jax.envs.appworld.server import PoolServer, ServerError


@pytest.mark.parametrize(
    "text, reason",
    [
        ('{"token": "x", "ports": []}', "no server of .* took the task: it lists none"),
        ('{"token": "x", "po', "servers: got JSONDecodeError: .*; allowed: a file of servers"),
        ('{"token": "x"}', "servers: got KeyError: 'ports'; allowed"),
        ("[]", "servers: got TypeError: .*; allowed"),
        (None, "servers: got FileNotFoundError: .*; allowed"),
    ],
)
def test_a_pool_file_without_usable_servers_is_a_sentence(text, reason, tmp_path):
    file = tmp_path / "servers"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ServerError, match=reason):
        PoolServer(file, start_s=0.0, request_s=1.0).begin()
