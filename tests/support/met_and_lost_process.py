"""One of several processes, of which one is killed: `met_and_lost_process.py RANK COUNT PORT LOST`.

Process 0 waits for its bytes, the last one in a collective of the devices.
"""

import os
import signal
import sys

import numpy as np
from jax.experimental import multihost_utils

from seeupo_jax.parallel import cluster
from seeupo_jax.parallel.distributed import gather

rank, count, port, lost = map(int, sys.argv[1:])
with cluster.exit_on_error():
    cluster.join(cluster.ProcessPlace(f"localhost:{port}", rank, count), {}, timeout_s=60)
    assert gather(rank) == [0, 1, 2]
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank:
        multihost_utils.process_allgather(np.arange(3))
    else:
        gather(rank)
