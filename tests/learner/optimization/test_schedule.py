"""The learning rate goes by iterations, whatever steps they take, and lies in the state."""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import learner_cases as cases
import numpy as np
import optax
import pytest

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.configuration.optimizer_schema import Optimizer, ParameterGroup
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.optimization.optimizer import apply_update, make_optimizer
from seeupo_jax.learner.optimization.schedule import Schedule, Scheduled, at_share
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_control import SweepStopped, stopped_arrays
from seeupo_jax.training.checks import check_config
from seeupo_jax.types import CriticState, TrainState

# Learning rate 1 and SGD: a gradient of 1 moves a parameter by the learning rate.
PLAIN = {"name": "sgd", "learning_rate": 1.0, "max_grad_norm": None}
EMA = 0.75  # decay of the average of the parameters


def optimizer_of(**fields):
    return make_optimizer(Optimizer(**PLAIN | fields), total_steps=100)


def state_of(optimizer, **critic):
    params = {"scale": jnp.zeros(1)}
    return TrainState(params, optimizer.init(params), jnp.int32(0), jnp.int32(0), **critic)


def rates_of(optimizer, schedule, iterations):
    """How far each step goes, of iterations with so many steps; and of how many programs."""
    step, state, rates = jax.jit(functools.partial(apply_update, optimizer)), None, []
    state = state_of(optimizer)
    for iteration, steps in enumerate(iterations, 1):
        state = at_share(state, schedule.share(iteration), jnp.asarray)
        for _ in range(steps):
            before = float(state.params["scale"][0])
            state, _ = step({"scale": jnp.ones(1)}, state)
            rates.append(before - float(state.params["scale"][0]))
    return rates, step._cache_size()


@pytest.mark.parametrize(
    "schedule, rates",
    [
        ("constant", {1: 0.25, 2: 0.5, 4: 1.0, 5: 1.0, 13: 1.0, 21: 1.0}),
        ("linear", {1: 0.25, 4: 1.0, 5: 1.0, 9: 0.75, 13: 0.5, 21: 0.0, 26: 0.0}),
        ("cosine", {1: 0.25, 4: 1.0, 5: 1.0, 9: (1 + 2**-0.5) / 2, 13: 0.5, 21: 0.0, 26: 0.0}),
    ],
)
def test_schedules_rise_over_the_warm_up_and_end_after_the_last_iteration(schedule, rates):
    config = Optimizer(learning_rate=2.0, schedule=schedule, warmup_iterations=4)
    made = Schedule(config, iterations=20)
    for iteration, share in rates.items():
        assert made.share(iteration) == pytest.approx(share, abs=1e-12)
        assert made.rate(iteration, 99) == pytest.approx(2 * share, abs=1e-12)


def test_warmup_stable_decay_rises_stays_and_falls_over_the_last_iterations():
    fields = {"warmup_iterations": 2, "decay_iterations": 3}
    made = Schedule(Optimizer(schedule="warmup_stable_decay", **fields), iterations=10)
    shares = [made.share(iteration) for iteration in range(1, 12)]
    assert shares == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


def test_a_users_schedule_is_a_function_of_the_iteration(tmp_path, monkeypatch):
    (tmp_path / "my_schedules.py").write_text(
        "def halves(iteration, iterations):\n"
        "    return 0.5 ** (iteration - 1) if iterations == 4 else 3.0\n"
        "def fails(iteration, iterations):\n"
        "    return 1 / (3 - iteration)\n"
        "def negative(iteration, iterations):\n"
        "    return 2 - iteration\n"
        "def text(iteration, iterations):\n"
        "    return 'much'\n"
        "def exits(iteration, iterations):\n"
        "    raise SystemExit(2)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def made(name, **fields):
        return Schedule(Optimizer(schedule=f"my_schedules:{name}", **PLAIN | fields), 4)

    shares = [made("halves").share(iteration) for iteration in (1, 2, 4)]
    assert shares == [1.0, 0.5, 0.125]
    assert made("halves", warmup_iterations=2).share(1) == 0.5  # a warm-up multiplies it
    rates, programs = rates_of(optimizer_of(schedule="my_schedules:halves"), made("halves"), [1, 2])
    assert (rates, programs) == ([1.0, 0.5, 0.5], 1)
    prefix = "^config.optimizer.schedule: my_schedules:"
    with pytest.raises(
        ValueError,
        match=rf"{prefix}fails\(3, 4\) failed: Zero.* \(fails, my_schedules.py:4\)\.$",
    ):
        made("fails")
    with pytest.raises(
        ValueError, match=rf"{prefix}negative\(3, 4\) returned -1; allowed: a finite"
    ):
        made("negative")
    with pytest.raises(ValueError, match=rf"{prefix}text\(1, 4\) returned 'much'; allowed"):
        made("text")
    with pytest.raises(ValueError, match=rf"{prefix}exits\(1, 4\) failed: SystemExit: 2 "):
        made("exits")
    with pytest.raises(
        ValueError, match="no function 'half'; it has halves, fails, negative, text"
    ):
        made("half")


@pytest.mark.parametrize("name", ["contrib.dadapt_adamw", "contrib.prodigy"])
def test_a_share_of_0_is_refused_for_an_optimizer_that_divides_by_it(name, tmp_path, monkeypatch):
    (tmp_path / "from_zero.py").write_text("def rises(iteration, iterations): return iteration - 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    function = getattr(optax.contrib, name.removeprefix("contrib."))(learning_rate=0.0)
    params = {"scale": jnp.ones(2)}
    _, state = function.update(params, function.init(params), params)
    assert np.isnan(state.estim_lr)  # else optax has mended it, and 0 can be allowed
    schedule = "from_zero:rises"
    Schedule(Optimizer(schedule=schedule), 4)
    sentence = rf"rises returned 0 for iteration 1; allowed with {name}: numbers > 0"
    for fields in ({"name": name}, {"groups": (ParameterGroup(pattern="a", name=name),)}):
        with pytest.raises(ValueError, match=sentence):
            Schedule(Optimizer(schedule=schedule, **fields), 4)


def test_ragged_iterations_all_end_at_the_same_rate():
    """By optimizer steps, counted as if all took 6, this cosine ended at 0.69."""
    fields = {"schedule": "cosine"}
    optimizer, schedule = optimizer_of(**fields), Schedule(Optimizer(**PLAIN | fields), 5)
    ragged, programs = rates_of(optimizer, schedule, [1, 6, 2, 0, 3])
    wanted = [0.5 * (1 + np.cos(np.pi * done / 5)) for done in (0, *6 * (1,), 2, 2, 4, 4, 4)]
    np.testing.assert_allclose(ragged, wanted, rtol=1e-5)
    assert programs == 1  # the share is an array, not a constant of the program


def test_a_warm_up_of_steps_multiplies_the_schedule():
    fields = {"schedule": "linear", "warmup_steps": 4}
    config = Optimizer(**PLAIN | fields)
    schedule = Schedule(config, 2)
    rates, _ = rates_of(optimizer_of(**fields), schedule, [3, 3])
    np.testing.assert_allclose(rates, [0.25, 0.5, 0.75, 0.5, 0.5, 0.5], rtol=1e-6)
    assert [schedule.rate(*at) for at in ((1, 0), (1, 2), (2, 3))] == [0.25, 0.75, 0.5]


def test_a_constant_rate_leaves_the_state_as_it_was():
    plain = jax.eval_shape(optax.sgd(1.0, momentum=0.9).init, jnp.ones(2))
    made = jax.eval_shape(optimizer_of(kwargs={"momentum": 0.9}).init, jnp.ones(2))
    assert jax.tree.structure(made[1]) == jax.tree.structure(plain)
    optimizer = optimizer_of(warmup_steps=3)
    state = state_of(optimizer)
    assert jax.tree.structure(at_share(state, 0.5, jnp.asarray)) == jax.tree.structure(state)
    assert not [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.dtype == jnp.float32]


def test_the_value_function_has_the_policys_share_of_its_own_rate_in_a_buffer_of_its_own():
    optimizer, of_critic = (
        optimizer_of(schedule="linear"),
        optimizer_of(schedule="linear", learning_rate=10.0),
    )
    own = {"scale": jnp.zeros(1)}
    state = state_of(optimizer, critic=CriticState(own, of_critic.init(own)))
    state = at_share(state, 0.25, jnp.asarray)
    ones = {"scale": jnp.ones(1)}
    step = jax.jit(functools.partial(apply_update, optimizer), static_argnums=2, donate_argnums=1)
    state, _ = step(ones, state, of_critic, ones)
    assert float(state.params["scale"][0]) == -0.25
    assert float(state.critic.params["scale"][0]) == -2.5


def test_a_users_function_gets_a_schedule_of_its_steps(tmp_path, monkeypatch):
    (tmp_path / "my_scheduled.py").write_text(
        "import optax\n"
        "def slower(learning_rate, *, total_steps):\n"
        "    decay = optax.linear_schedule(1.0, 0.0, total_steps)\n"
        "    return optax.sgd(lambda step: learning_rate(step) * decay(step))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    fields = {
        "name": "my_scheduled:slower",
        "schedule": "linear",
        "kwargs": {"total_steps": 4},
    }
    schedule = Schedule(Optimizer(**PLAIN | fields), 2)
    rates, _ = rates_of(optimizer_of(**fields), schedule, [2, 2])
    np.testing.assert_allclose(rates, [1.0, 0.75, 0.25, 0.125], rtol=1e-6)


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"warmup_iterations": 4}, "warmup_iterations: got 4; allowed: fewer than the run's 4"),
        (
            {"warmup_iterations": 2, "warmup_steps": 3},
            "warmup_steps: got 3 with warmup_iterations=2; allowed: one of the two",
        ),
        ({"decay_iterations": 2}, "decay_iterations: got 2 with schedule=constant; allowed: 0 unl"),
        (
            {"schedule": "warmup_stable_decay"},
            "decay_iterations: got 0 with .*_decay; allowed: a number from 1 to 4, the iterations",
        ),
        (
            {"schedule": "warmup_stable_decay", "warmup_iterations": 1, "decay_iterations": 4},
            "decay_iterations: got 4 with .*; allowed: a number from 1 to 3, .* after the 1 of the",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_before_the_run(fields, sentence):
    config = from_dict({"iterations": 4, "optimizer": fields})
    with pytest.raises(ValueError, match=f"^config.optimizer.{sentence}"):
        check_config(config)


@functools.cache
def learner_of(**fields):
    """A learner whose optimizer has these fields, and the run 5 iterations."""
    options = Optimizer(**PLAIN | fields)
    optimizer = make_optimizer(options, total_steps=1)
    algorithm = cases.learner().algorithm
    schedule = Schedule(options, 5)
    return Learner(
        cases.policy()[0], optimizer, algorithm, cases.SHAPES, 1.0, schedule=schedule, ema=EMA
    )


def fresh(learner):
    """A new state, whose average of the parameters is not yet what they are."""
    state = cases.new_state(learner.optimizer)
    return state._replace(ema=jax.tree.map(lambda leaf: leaf + 1, state.params))


def run(learner, state=None, **rest):
    state = fresh(learner) if state is None else state
    reference = jax.device_put(cases.policy()[1])
    return sweep(learner, state, reference, cases.ragged(), iteration=3, **rest)


def test_a_sweep_steps_at_its_iterations_rate_and_moves_the_average_once():
    ends, rates = [], []
    for fields in ({"schedule": "linear", "learning_rate": 0.05}, {"learning_rate": 0.03}):
        state, metrics, *_ = run(learner_of(**fields))
        average = jax.tree.map(
            lambda before, after: EMA * (before + 1) + (1 - EMA) * np.asarray(after),
            cases.policy()[1],
            state.params,
        )
        cases.assert_trees_close(state.ema, average, 1e-6)
        ends.append(cases.host(state.params))
        rates.append(metrics["sweep/learning_rate"])
    assert rates == pytest.approx([0.03, 0.03])  # two of five iterations are over
    cases.assert_trees_close(*ends, 1e-6)
    # With the same programs: the last of the sweep's four steps is the fourth of eight.
    rising = Schedule(Optimizer(**PLAIN | {"learning_rate": 0.03, "warmup_steps": 8}), 5)
    _, metrics, *_ = run(dataclasses.replace(learner_of(learning_rate=0.03), schedule=rising))
    assert metrics["sweep/steps"] == 4
    assert metrics["sweep/learning_rate"] == pytest.approx(0.03 * 4 / 8)


def test_a_stopped_sweep_goes_on_from_files_at_the_same_rate(tmp_path):
    learner = learner_of(schedule="linear", learning_rate=0.05)
    state, metrics, *_ = run(learner)
    asked = iter([False, False])
    with pytest.raises(SweepStopped) as stopped:
        run(learner, stop=lambda: next(asked, True))
    files = Checkpoints(tmp_path, 1)
    files.save(3, stopped.value.arrays, json.loads(json.dumps(stopped.value.notes)))
    example = stopped_arrays(learner, fresh(learner), cases.ragged())
    _, arrays, notes = files.restore(example)
    files.close()
    arrays = cases.reread(arrays)
    (share,) = (x.share for x in arrays["state"].opt_state if isinstance(x, Scheduled))
    assert share == np.float32(0.6)
    resumed, again, *_ = run(learner, arrays["state"], resume=(arrays, notes))
    cases.assert_trees_equal(resumed, state)
    assert again == metrics
