"""One of several processes that write a policy: `RANK COUNT PORT OUT DIRECTORY`."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import jax
import learner_cases
from learner_process import placed

from seeupo_jax.configuration.schema import Config, Mesh
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.policy_io.policy_folder import write_policy

RANK, COUNT, PORT = map(int, sys.argv[1:4])
OUT, DIRECTORY = map(Path, sys.argv[4:6])


def main() -> None:
    jax.distributed.initialize(f"localhost:{PORT}", COUNT, RANK)
    mesh = make_mesh(Mesh(data=1, fsdp=2, tensor=2))
    network, params = learner_cases.policy()
    policy = Policy(network, None, mesh)
    params = placed(mesh, network, params)

    def refusal(folder: Path) -> str:
        try:
            write_policy(Config(), policy, params, folder)
        except Exception as error:  # of the library that writes, or of the system
            return getattr(error, "strerror", None) or str(error)
        return ""

    reported = {"written": refusal(DIRECTORY / "policy")}
    reported["no folder"] = refusal(DIRECTORY / "policy" / "config.json" / "policy")
    if RANK == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    reported["no room"] = refusal(DIRECTORY / "policy")
    if RANK == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    reported["written again"] = refusal(DIRECTORY / "policy")
    OUT.write_text(json.dumps(reported))
    os._exit(0)


main()
