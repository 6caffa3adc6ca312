"""What memory devices have."""

import jax

from seeupo_jax.parallel import device_memory
from seeupo_jax.parallel.device_memory import GIB, free_memory, total_memory


class Chip:
    platform = "gpu"

    def __init__(self, stats):
        self._stats = stats

    def memory_stats(self):
        return self._stats


def test_memory_is_counted_whole_whatever_is_in_use(tmp_path, monkeypatch):
    assert total_memory(Chip({"bytes_limit": 80 * GIB, "bytes_in_use": 79 * GIB})) == (80 * GIB)
    assert total_memory(Chip(None)) is None and total_memory(Chip({})) is None
    host, limit = total_memory(jax.devices()[0]), tmp_path / "memory.max"
    assert host * jax.local_device_count() > GIB // 4
    monkeypatch.setattr(device_memory, "_LIMITS", (str(limit), str(tmp_path / "absent")))
    limit.write_text("max\n")
    assert total_memory(jax.devices()[0]) >= host
    limit.write_text(f"{8 * 2**20}\n")  # a container's, of which each of the devices has a part
    assert total_memory(jax.devices()[0]) == 8 * 2**20 // jax.local_device_count()


def test_what_is_free_is_what_the_container_has_left(tmp_path, monkeypatch):
    device, count = jax.devices()[0], jax.local_device_count()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(device_memory, "_LIMITS", (str(limit),))
    limit.write_text("max\n")
    assert free_memory(device) > 2**20
    limit.write_text(f"{8 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{6 * 2**20}\n")
    assert free_memory(device) == 2 * 2**20 // count
    (tmp_path / "memory.stat").write_text(f"anon {2**20}\ninactive_file {5 * 2**20}\n")
    assert free_memory(device) == 7 * 2**20 // count
