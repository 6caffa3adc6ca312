"""jax keeps off an accelerator for a while, and may use it afterwards."""

import subprocess
import sys

from process_cases import environment


def test_jax_that_kept_off_the_accelerator_has_not_started_and_may_use_all_devices():
    program = (
        "import jax\n"
        "from seeupo_jax.parallel.platform import cpu_only\n"
        "jax.config.update('jax_platforms', None)\n"
        "with cpu_only():\n"
        "    assert jax.config.jax_platforms == 'cpu' and len(jax.devices()) == 2\n"
        "assert jax.config.jax_platforms is None\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # which a backend that has started refuses\n"
        "assert len(jax.devices('cpu')) == 3\n"
        "before = jax.devices()\n"
        "with cpu_only():\n"
        "    assert jax.config.jax_platforms is None\n"
        "assert jax.devices() == before\n"
    )
    own = environment() | {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "2"}
    subprocess.run([sys.executable, "-c", program], env=own, check=True)
