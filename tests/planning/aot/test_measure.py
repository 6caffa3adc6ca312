"""What a program takes of a device, against the memory reports that XLA for TPU writes."""

from types import SimpleNamespace

import pytest

from seeupo_jax.parallel.device_memory import GIB
from seeupo_jax.planning.aot.measure import temporary_bytes

MIB = 2**20
# Of programs compiled for v6e: the statistics of `Compiled.memory_analysis()` (arguments, results,
# results in the place of arguments, temporaries, peak, arguments on the host), and `Total bytes` of
# memory space 0 in the `memory-usage-report.txt` that XLA writes with `xla_dump_to`. With a limit
# (`xla_tpu_max_hbm_size_mib`) between that and what the temporaries would come to, the 0.6B turn
# and the layers in a loop compile; below it the latter are refused.
CASES = {
    "a 14B turn": (GIB, (2.62, 2.582, 2.58, 15.611, 14.326, 0), 15_584_519_392),
    "its moments on the host": (GIB, (3.496, 3.442, 3.439, 31.551, 32.623, 6.877), 27_760_861_856),
    "a 0.6B turn": (GIB, (0.509, 0.419, 0.417, 2.147, 2.279, 0), 2_496_268_512),
    "with a limit": (GIB, (0.509, 0.419, 0.417, 2.007, 2.242, 0), 2_421_098_720),
    "layers in a loop": (MIB, (896, 768, 768, 2961.4, 2680.0, 0), 2_810_946_080),
    "much of it in VMEM": (MIB, (24, 16, 16, 8.7, 82.0, 0), 33_927_776),
    "no loop, half of it on the host": (MIB, (256, 256, 256, 385.3, 896, 256), 671_785_024),
}
NAMES = ("argument_size", "output_size", "alias_size", "temp_size", "peak_memory")


@pytest.mark.parametrize("case", CASES)
def test_a_program_takes_what_xla_lays_out(case):
    unit, sizes, total = CASES[case]
    names = [f"{name}_in_bytes" for name in (*NAMES, "host_argument_size")]
    memory = SimpleNamespace(**dict(zip(names, (size * unit for size in sizes), strict=True)))
    arguments, results, in_place = (size * unit for size in sizes[:3])
    taken = arguments + results - in_place + temporary_bytes(memory)
    assert 0.999 < taken / total < 1.035
