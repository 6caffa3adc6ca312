"""The numbers of a network and of a sweep on the device: against PyTorch, and against our own."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.bench import swept_fields, synthetic, workloads
from seeupo_jax.bench.accelerator import device
from seeupo_jax.bench.accelerator.record import NotHere, Record
from seeupo_jax.bench.runners import bench_models, same_update, torch_imports
from seeupo_jax.bench.runners.ablations import ABLATIONS
from seeupo_jax.bench.runners.jax_runner import OurSweeps
from seeupo_jax.bench.runners.sampling_runner import converse, make_engine
from seeupo_jax.bench.runners.torch_runner import TorchSweeps
from seeupo_jax.bench.settings import Settings
from seeupo_jax.bench.workload import Workload
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.files.parameter_names import at, stored_tensors
from seeupo_jax.policy.kernels.fused import preferred_kernel
from seeupo_jax.policy.network import split, token_logp
from seeupo_jax.trajectories.stored import read_trajectories

LOGITS, GRADIENT = 1e-4, 1e-3  # of float32, relative; on CPU they are 1e-5 and less
AS_PYTORCH = 1.5  # times PyTorch's own distance from the exact numbers, in bfloat16
# Of log-probabilities, in nats. Between prefill and decode 2e-6 and 1e-2 were seen on CPU.
GAPS = {"float32": 1e-4, "bfloat16": 0.1}
GAPS_MEAN = {"float32": 1e-5, "bfloat16": 1e-2}
ROWS, LENGTH = 2, 256  # of the tokens that logits are compared for

Numbers = tuple[np.ndarray, dict[str, np.ndarray]]  # logits, gradients by their names in files


def parity(record: Record, settings: Settings, rehearse: bool) -> None:
    """Logits, and gradients of the mean log-likelihood, of one folder in both libraries.

    Raises:
      NotHere: PyTorch is missing.
    """
    platform = jax.devices()[0].platform
    missing = device.no_torch("cpu" if platform == "tpu" else platform)
    if missing is not None:
        raise NotHere(missing)
    arch = bench_models.architecture(settings.model, "float32")
    length = 16 if rehearse else LENGTH
    ids = np.random.default_rng(0).integers(0, arch.vocab_size, (ROWS, length))
    about = {"shape": f"{settings.model}, {ROWS} rows of {length}"}
    with tempfile.TemporaryDirectory() as folder:
        bench_models.write(arch, Path(folder), seed=settings.seed)
        on = bench_models.torch_device(platform)
        exact = _of_torch(folder, ids, "float32", on)
        ours = _of_ours(folder, ids, "float32")
        found = _apart(ours, exact)
        bounds = {"logits": LOGITS, "gradient": GRADIENT}
        record.check(
            "logits and gradients against PyTorch",
            {name: (off, bounds[name]) for name, off in found.items()},
            dtype="float32",
            **about,
        )
        ours = _apart(_of_ours(folder, ids, "bfloat16"), exact)
        theirs = _apart(_of_torch(folder, ids, "bfloat16", on), exact)
        record.check(
            "logits and gradients, as near to PyTorch's in float32 as PyTorch's own",
            {name: (off, AS_PYTORCH * theirs[name]) for name, off in ours.items()},
            dtype="bfloat16",
            **about,
        )


def _apart(numbers: Numbers, exact: Numbers) -> dict[str, float]:
    """Distances by the Euclidean norm, relative; of all gradients together."""
    squares = [
        (np.sum((numbers[1][name] - wanted) ** 2), np.sum(wanted**2))
        for name, wanted in exact[1].items()
    ]
    off, size = np.sum(squares, axis=0)
    logits = np.linalg.norm(numbers[0] - exact[0]) / np.linalg.norm(exact[0])
    return {"logits": float(logits), "gradient": float(np.sqrt(off / size))}


def _of_torch(folder: str, ids: np.ndarray, dtype: str, on: str) -> Numbers:
    torch = torch_imports.torch()
    torch.set_float32_matmul_precision("highest")
    model = torch_imports.load("generate").load(folder, on, dtype)
    tokens = torch.tensor(ids, device=on)
    logits = model(tokens).logits.float()
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    torch.nn.functional.cross_entropy(flat, tokens[:, 1:].reshape(-1)).backward()
    gradients = {name: p.grad.float().cpu().numpy() for name, p in model.named_parameters()}
    return logits.detach().cpu().numpy(), gradients


def _of_ours(folder: str, ids: np.ndarray, dtype: str) -> Numbers:
    kernel = preferred_kernel(jax.devices()[0].platform)  # as in training
    model, _ = from_pretrained(folder, dtype=dtype, attention=kernel)
    network, params = split(model)

    def loss(params: Any) -> jax.Array:
        hidden, _ = network.bind(params).hidden(ids[:, :-1])
        return -token_logp(network, params, hidden, ids[:, 1:], temperature=1.0).mean()

    with _precision(dtype):
        logits = np.asarray(jax.jit(lambda params: network.bind(params)(jnp.asarray(ids)))(params))
        found = jax.device_get(jax.jit(jax.grad(loss))(params))
    gradients = {}
    for stored in stored_tensors(network.arch, params):
        part = np.asarray(at(found, stored.path), np.float32)
        gradients[stored.names[0]] = part.T if stored.transposed else part
    return logits, gradients


@contextlib.contextmanager
def _precision(dtype: str) -> Iterator[None]:
    """Matrix products of float32 are of float32, in all threads; a GPU's are not by default."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest" if dtype == "float32" else before)
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def sweeps(record: Record, settings: Settings, rehearse: bool) -> None:
    """A sweep from the same weights by other ways, and what the sampler thought of its tokens."""
    missing = device.no_torch(jax.devices()[0].platform)
    if missing is not None:
        record.note(f"Sweeps were not compared with PyTorch's: {missing}.")
    for dtype in ("float32",) if rehearse else ("float32", "bfloat16"):
        arch = bench_models.architecture(settings.model, dtype)
        work = workloads.make(settings, arch.vocab_size)
        about = {"dtype": dtype, "shape": f"{settings.model}, {work.name}, {work.tokens} tokens"}
        values = swept_fields.values(settings, turns=work.turns, dtype=dtype)
        with tempfile.TemporaryDirectory() as folder, _precision(dtype):
            model, lines = Path(folder, "model"), Path(folder, "trajectories.jsonl")
            bench_models.write(arch, model, seed=settings.seed)
            acted = synthetic.random_actions(work, settings.seed)
            synthetic.write(synthetic.records(work, acted, seed=settings.seed), lines)
            ours = OurSweeps(model, lines, values)
            _check_sweeps(record, ours, (model, lines), values, settings, about, missing is None)
            _check_gap(record, ours, work, settings, about, Path(folder, "sampled.jsonl"))


def _check_sweeps(
    record: Record,
    ours: OurSweeps,
    folder: tuple[Path, Path],
    values: Mapping[str, Any],
    settings: Settings,
    about: Mapping[str, Any],
    torch: bool,
) -> None:
    fused, _ = ours.recorded()
    separate, _ = OurSweeps(*folder, values, ABLATIONS["fused_refresh"]).recorded()
    bound = same_update.TOLERANCES[about["dtype"]]

    def differences(other: same_update.Outcome) -> dict[str, tuple[float, float]]:
        found = same_update.differences(fused, other)
        return {name: (off, bound) for name, off in found.items()}

    record.check("a sweep, fused against separate refresh", differences(separate), **about)
    if torch:
        on = bench_models.torch_device(jax.devices()[0].platform)
        theirs = TorchSweeps(*folder, values, settings, device=on, way="eager")
        theirs.run()
        record.check("a sweep against PyTorch", differences(theirs.outcome()), **about)


def _check_gap(
    record: Record,
    ours: OurSweeps,
    work: Workload,
    settings: Settings,
    about: Mapping[str, Any],
    file: Path,
) -> None:
    platform, dtype = jax.devices()[0].platform, about["dtype"]
    params = ours.policy.merged(ours.state.params)
    engine = make_engine(ours.policy.network, work, settings, platform)
    engine.compile(params)
    played = converse(engine, params, work, settings.seed)
    lines = synthetic.records(work, played.actions, seed=settings.seed, logp=played.logp)
    synthetic.write(lines, file)
    ours.run(read_trajectories(file))
    gap = ours.metrics["logp/sampler_trainer_gap"]
    mean = ours.metrics["logp/sampler_trainer_gap_mean"]
    record.check(
        "log-probabilities of the sampler against the trainer's",
        {"greatest": (gap, GAPS[dtype]), "mean": (mean, GAPS_MEAN[dtype])},
        **about,
    )
