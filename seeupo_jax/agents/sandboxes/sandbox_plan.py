"""The plan of an episode in a sandbox, which the trainer makes and the episode's driver reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "SEEUPO_SANDBOX"  # by which the driver gets its plan, as JSON
PRIVATE = "/.seeupo"  # where a sandbox has the task, the first program and the relay's socket

LOGS = ("agent", "artifacts", "verifier")  # folders of /logs, as in Harbor
ENTRY = Path(__file__).with_name("sandbox_entry.py")  # the first program in a sandbox
PORT = 7411  # of the endpoint in a sandbox, the same in every run


@dataclass(frozen=True)
class SandboxPlan:
    """All that the driver of an episode needs; JSON values only.

    runtime: local | docker | podman. endpoint: host and port.
    variables, verifier_variables: environments of the agent and of the verifier. passed: names of
      the driver's variables that the agent gets too.
    harness: of the agent, as in `config.agent`; max_context, max_answer: tokens of a conversation
      and of an answer, which it is told.
    workdir: where both begin; "": the image's.
    copies: of the local runtime: sources, and destinations in the sandbox.
    image: of a container; None: `build`, a folder with a Dockerfile, is made into `tag`.
    tests, solution: folders of the task; solution None: the agent does not see it.
    storage_bytes: of each file. processes: of the episode, threads included.
    address_bytes: address space of each process; None: no limit.
    visible: paths of this machine that the sandbox has too, read-only. hidden: folders in them that
      are empty there: the tasks, with their verifiers and solutions.
    """

    runtime: str
    endpoint: tuple[str, int]
    variables: Mapping[str, str]
    verifier_variables: Mapping[str, str]
    passed: Sequence[str]
    harness: str | None
    max_context: int
    max_answer: int
    workdir: str
    copies: Sequence[tuple[str, str]]
    image: str | None
    build: str
    tag: str
    tests: str
    solution: str | None
    agent_timeout_s: float
    verifier_timeout_s: float
    build_timeout_s: float
    cpus: float
    memory_mib: int
    storage_bytes: int
    processes: int
    address_bytes: int | None
    visible: Sequence[str]
    hidden: Sequence[str]

    def as_json(self) -> dict[str, object]:
        """The plan's fields."""
        return dataclasses.asdict(self)

    def limits(self) -> dict[str, int]:
        """Limits of each process, by their names in Python's module `resource`."""
        found = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": self.storage_bytes}
        found["RLIMIT_NPROC"] = self.processes  # Linux exempts processes of the machine's root
        if self.address_bytes is not None:
            found["RLIMIT_AS"] = self.address_bytes
        return found


class SandboxError(Exception):
    """A sandbox cannot be made; one sentence."""
