"""The numbers of a network and of a sweep on the device: against PyTorch, and against our own."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.benchmarks import comparison, torch_runner
from seeupo_jax.benchmarks.comparison import TOLERANCES
from seeupo_jax.benchmarks.jax_runner import ABLATIONS, JaxSweeps, by_file_name
from seeupo_jax.benchmarks.machine import scans_layers
from seeupo_jax.benchmarks.rollout import converse, make_engine
from seeupo_jax.benchmarks.settings import BenchSettings, architecture, write_model
from seeupo_jax.benchmarks.torch_runner import TorchSweeps
from seeupo_jax.benchmarks.workloads import Inputs, prepared, trajectory_lines
from seeupo_jax.instruments.bench.accelerator.runner import NotHere, Record
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.kernels.fused import preferred_kernel
from seeupo_jax.policy.network import split_model, token_logp

BOUNDS = {"logits": 1e-4, "gradient": 1e-3}  # of float32, relative; on CPU they are 1e-5 and less
AS_PYTORCH = 1.5  # times PyTorch's own distance from the exact numbers, in bfloat16
# Of log-probabilities, in nats. Between prefill and decode 2e-6 and 1e-2 were seen on CPU.
GAPS = {"float32": 1e-4, "bfloat16": 0.1}
GAPS_MEAN = {"float32": 1e-5, "bfloat16": 1e-2}
_OF_STEPS = ("loss", "kl", "weights")
ROWS, LENGTH = 2, 256  # of the tokens that logits are compared for

Numbers = tuple[np.ndarray, dict[str, np.ndarray]]  # logits, gradients by their names in files


def parity(record: Record, settings: BenchSettings, rehearse: bool) -> None:
    """Logits, and gradients of the mean log-likelihood, of one folder in both libraries.

    Raises:
      NotHere: PyTorch is missing.
    """
    platform = jax.devices()[0].platform
    missing = torch_runner.no_torch("cpu" if platform == "tpu" else platform)
    if missing is not None:
        raise NotHere(missing)
    arch, length = architecture(settings.model, "float32"), 16 if rehearse else LENGTH
    ids = np.random.default_rng(0).integers(0, arch.vocab_size, (ROWS, length))
    shape = f"{settings.model}, {ROWS} rows of {length}"
    with tempfile.TemporaryDirectory() as folder:
        write_model(arch, Path(folder), seed=settings.seed)
        exact = _of_torch(folder, ids, "float32")
        differences = _differences(_of_jax(folder, ids, "float32"), exact)
        record.check(
            "logits and gradients against PyTorch",
            {name: (off, BOUNDS[name]) for name, off in differences.items()},
            dtype="float32",
            shape=shape,
        )
        differences = _differences(_of_jax(folder, ids, "bfloat16"), exact)
        usual = _differences(_of_torch(folder, ids, "bfloat16"), exact)
    record.check(
        "logits and gradients in bfloat16 against PyTorch in float32",
        {name: (off, AS_PYTORCH * usual[name]) for name, off in differences.items()},
        dtype="bfloat16",
        shape=shape,
    )


def _differences(numbers: Numbers, exact: Numbers) -> dict[str, float]:
    """Distances by the Euclidean norm, relative; of all gradients together."""
    squares = [
        (np.sum((numbers[1][name] - wanted) ** 2), np.sum(wanted**2))
        for name, wanted in exact[1].items()
    ]
    off, size = np.sum(squares, axis=0)
    logits = np.linalg.norm(numbers[0] - exact[0]) / np.linalg.norm(exact[0])
    return {"logits": float(logits), "gradient": float(np.sqrt(off / size))}


def _of_torch(folder: str, ids: np.ndarray, dtype: str) -> Numbers:
    torch, on = torch_runner.torch(), torch_runner.torch_device()
    torch.set_float32_matmul_precision("highest")
    model = torch_runner.load("generate").load(folder, on, dtype)
    tokens = torch.tensor(ids, device=on)
    logits = model(tokens).logits.float()
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    torch.nn.functional.cross_entropy(flat, tokens[:, 1:].reshape(-1)).backward()
    gradients = {name: p.grad.float().cpu().numpy() for name, p in model.named_parameters()}
    return logits.detach().cpu().numpy(), gradients


def _of_jax(folder: str, ids: np.ndarray, dtype: str) -> Numbers:
    device = jax.devices()[0]
    compute_options = {
        "attention": preferred_kernel(device.platform),
        "scan_layers": scans_layers(device),
    }
    model, _ = from_pretrained(folder, dtype=dtype, **compute_options)  # as in training
    network, params = split_model(model)

    def loss(params: Any) -> jax.Array:
        hidden, _ = network.bind(params).hidden(ids[:, :-1])
        return -token_logp(network, params, hidden, ids[:, 1:], temperature=1.0).mean()

    with _precision(dtype):
        logits = np.asarray(jax.jit(lambda params: network.bind(params)(jnp.asarray(ids)))(params))
        return logits, by_file_name(network.arch, jax.jit(jax.grad(loss))(params))


@contextlib.contextmanager
def _precision(dtype: str) -> Iterator[None]:
    """Computes float32 matrix products in float32, in all threads; a GPU does not by default."""
    precision = jax.config.jax_default_matmul_precision
    jax.config.update(
        "jax_default_matmul_precision", "highest" if dtype == "float32" else precision
    )
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", precision)


def sweeps(record: Record, settings: BenchSettings, rehearse: bool) -> None:
    """A sweep from the same weights in other ways; the sampler's log-probabilities."""
    missing = torch_runner.no_torch(jax.devices()[0].platform)
    if missing is not None:
        record.note(f"Sweeps were not compared with PyTorch's: {missing}.")
    for dtype in ("float32",) if rehearse else ("float32", "bfloat16"):
        with prepared(settings, dtype) as inputs, _precision(dtype):
            work = inputs.work
            shape = f"{settings.model}, {work.name}, {work.tokens} tokens"
            sweeps = JaxSweeps(inputs)
            start = sweeps.tensors()
            sweeps.run()
            fused, others = sweeps.outcome(), {}
            allowed = comparison.bounds(comparison.moved(start, fused), dtype)
            separate = JaxSweeps(inputs, ABLATIONS["fused_refresh"])
            others["a sweep, fused against separate refresh"] = separate
            if missing is None:
                others["a sweep against PyTorch"] = TorchSweeps(inputs, "eager")
            for name, other in others.items():
                other.run()
                differences = comparison.differences(fused, other.outcome())
                bounded = {of: (off, allowed[of]) for of, off in differences.items()}
                record.check(name, bounded, dtype=dtype, shape=shape)
            greatest, mean = _sampler_gap(sweeps, inputs)
            record.check(
                "log-probabilities of the sampler against the trainer's",
                {"greatest": (greatest, GAPS[dtype]), "mean": (mean, GAPS_MEAN[dtype])},
                dtype=dtype,
                shape=shape,
            )


def long_sweep(record: Record, settings: BenchSettings, rehearse: bool) -> None:
    """A sweep over whole conversations in float32, and its distance from one in bfloat16.

    Rounding grows from turn to turn, as steps depend on earlier ones. The bound for bfloat16 is the
    distance of PyTorch's own sweeps over all parameters, with the residual stream in bfloat16 as in
    JAX; autocast alone keeps it in float32.

    Raises:
      NotHere: PyTorch is missing.
    """
    missing = torch_runner.no_torch(jax.devices()[0].platform)
    if missing is not None:
        raise NotHere(missing)
    outcomes: dict[tuple[str, str], comparison.SweepOutcome] = {}
    for dtype in ("float32", "bfloat16"):
        with prepared(settings, dtype) as inputs, _precision(dtype):
            # PyTorch first: it can return its memory to the device, XLA does not.
            for side, make in (("torch", _eager_sweeps), ("jax", JaxSweeps)):
                sweeps = make(inputs)
                sweeps.run()
                outcomes[side, dtype] = sweeps.outcome()
                del sweeps
                torch_runner.release_memory()
            shape = f"{settings.model}, {inputs.work.name}, {inputs.work.tokens} tokens"
    jax_side, exact = outcomes["jax", "float32"], outcomes["torch", "float32"]
    bounded = {
        of: (off, TOLERANCES["float32"])
        for of, off in comparison.differences(jax_side, exact).items()
    }
    record.check(
        "a sweep over complete conversations against PyTorch", bounded, dtype="float32", shape=shape
    )
    off, usual = (_distances(outcomes[side, "bfloat16"], exact) for side in ("jax", "torch"))
    # Of the steps there are few numbers, whose rounding may be greater by chance.
    bounded = {of: (off[of], AS_PYTORCH * usual[of]) for of in off}
    for of in _OF_STEPS:
        numbers = np.asarray([step[of] for step in exact.steps], np.float64)
        least = TOLERANCES["bfloat16"] * float(np.sqrt(np.nansum(numbers**2)))
        bounded[of] = off[of], max(bounded[of][1], least)
    record.check(
        "a sweep over complete conversations in bfloat16 against PyTorch in float32",
        bounded,
        dtype="bfloat16",
        shape=shape,
    )


def _eager_sweeps(inputs: Inputs) -> TorchSweeps:
    torch_runner.torch().set_float32_matmul_precision("highest")
    sweeps = TorchSweeps(inputs, "eager")
    sweeps.set_residual_type(inputs.arch.dtype)
    return sweeps


def _distances(one: comparison.SweepOutcome, exact: comparison.SweepOutcome) -> dict[str, float]:
    """The distances by the Euclidean norm: of all parameters, and of each of the steps' numbers."""
    steps = list(zip(one.steps, exact.steps, strict=True))
    pairs = {name: [(a[name], b[name]) for a, b in steps] for name in _OF_STEPS}
    pairs["parameters"] = [(one.tensors[name], exact.tensors[name]) for name in exact.tensors]
    return {
        name: float(np.sqrt(sum(_square(*pair) for pair in each))) for name, each in pairs.items()
    }


def _square(one: Any, exact: Any) -> float:
    """The squared distance; NaN is the same as NaN, and infinitely far from a number."""
    one, exact = np.asarray(one, np.float64), np.asarray(exact, np.float64)
    off = np.where(np.isnan(one) & np.isnan(exact), 0, one - exact)
    return float(np.sum(np.where(np.isnan(off), np.inf, off) ** 2))


def _sampler_gap(sweeps: JaxSweeps, inputs: Inputs) -> tuple[float, float]:
    """The greatest and the mean difference, in nats."""
    engine = make_engine(sweeps.policy.network, inputs.work, inputs.settings)
    params, seed = sweeps.params(), inputs.settings.seed
    engine.compile(params)
    played = converse(engine, params, inputs.work, seed)
    lines = trajectory_lines(inputs.work, played.actions, seed=seed, logp=played.logp)
    inputs.lines.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sweeps.run(inputs.lines)
    gap = "logp/sampler_trainer_gap"
    return sweeps.metrics[gap], sweeps.metrics[f"{gap}_mean"]
