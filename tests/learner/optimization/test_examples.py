"""Every example of docs/optimizers.md, against plain optax on the same gradients."""

import re
import sys

import jax
import jax.numpy as jnp
import learner_cases as cases
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict
from places import ROOT

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.optimization.parameter_groups import path_name, split_frozen
from seeupo_jax.learner.optimization.schedule import Schedule, at_share
from seeupo_jax.learner.state_layout import average
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy_io.build import build_shapes

PAGE = (ROOT / "docs" / "optimizers.md").read_text()
BLOCK = r"<!-- {}: (\S+) -->\n```python\n(.*?)```"
EXAMPLES = dict(re.findall(BLOCK.format("example"), PAGE, re.DOTALL))
FILES = dict(re.findall(BLOCK.format("file"), PAGE, re.DOTALL))
ITERATION = 4


@pytest.fixture(autouse=True)
def own_files(tmp_path, monkeypatch):
    """The page's own modules, in the working directory."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    _forget()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    _forget()


def _forget():
    """Other tests have modules of these names, too."""
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def config_of(name):
    config = ConfigDict({"model": {"path": "package:order_desk"}})
    exec(EXAMPLES[name], {"config": config})
    return from_dict(config.to_dict())


def policy_params():
    _, params = cases.policy()
    return params


def adapter_params():
    rng = np.random.default_rng(1)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return {"layers": {0: {"q": {"lora_a": draw(16, 8), "lora_b": draw(8, 16)}}}}


def flat(tree):
    return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def is_matrix(name):
    return name.startswith("layers") and name.endswith("kernel")


def clipped_adamw(rate):
    """The page's own chain in other words."""

    def matrices(params):
        return {name: leaf.ndim > 1 for name, leaf in params.items()}

    adamw = optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip(0.1), adamw)


def by_group(name):
    if name.endswith("norm/scale"):
        return optax.adamw(1e-5, weight_decay=0.0)
    return optax.adamw(2e-6 if name.startswith("layers/0/") else 1e-5, weight_decay=0.1)


ADAM = optax.adamw(1e-5, weight_decay=0.0)  # of what is no matrix to Muon
PLAIN = {
    "adamw": lambda name: optax.adamw(1e-5, weight_decay=0.01),
    "lion": lambda name: optax.lion(1e-6, weight_decay=0.1),
    "adafactor": lambda name: optax.adafactor(
        1e-5, multiply_by_parameter_scale=False, min_dim_size_to_factor=16
    ),
    "muon": lambda name: optax.contrib.muon(2e-4, consistent_rms=0.2) if is_matrix(name) else ADAM,
    "groups": by_group,
    "lora": lambda name: optax.adam(1.6e-4 if name.endswith("lora_b") else 1e-5),
    # `linear` over the 60 iterations of the default.
    "own": lambda name: clipped_adamw(1e-5 * (1 - (ITERATION - 1) / 60)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_an_example_takes_the_steps_of_plain_optax_on_each_parameter(name):
    options = config_of(name).optimizer
    whole = adapter_params() if name == "lora" else policy_params()
    params, frozen = split_frozen(options.groups, whole)
    assert set(flat(frozen)) == ({"embedding"} if name == "groups" else set())
    optimizer = make_optimizer(options, total_steps=9)
    grads = jax.tree.map(lambda x: np.float32(0.1) * x - np.float32(0.05), params)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in jax.tree.leaves(grads)))
    share = Schedule(options, 60).share(ITERATION)

    def ours(params):
        state = at_share(optimizer.init(params), share, jnp.asarray)
        for _ in range(2):
            updates, state = optimizer.update(grads, state, params)
        return updates

    def plain(path, leaf, grad):
        name_of = path_name(path)
        one, own = PLAIN[name](name_of), {name_of: leaf}
        state = one.init(own)
        for _ in range(2):
            updates, state = one.update({name_of: grad / max(1.0, norm)}, state, own)
        return updates[name_of]

    got = jax.jit(ours)(params)
    wanted = jax.jit(lambda p: jax.tree_util.tree_map_with_path(plain, p, grads))(params)
    for path, update in flat(wanted).items():
        size = float(jnp.abs(update).max())
        assert size > 0
        np.testing.assert_allclose(flat(got)[path], update, rtol=1e-4, atol=1e-4 * size)


def test_the_schedules_are_as_the_page_says():
    schedule = Schedule(config_of("wsd").optimizer, config_of("wsd").iterations)
    printed = re.search(r"^This gives (.*?) of the learning rate", PAGE, re.MULTILINE)[1]
    numbers = [float(number) for number in re.findall(r"[\d.]+", printed)]
    assert [schedule.share(i) for i in range(1, 11)] == pytest.approx(numbers)
    restarts = config_of("restarts")
    schedule = Schedule(restarts.optimizer, restarts.iterations)
    shares = [schedule.share(iteration) for iteration in (1, 5, 6, 10)]
    low = 0.5 * (1 + np.cos(0.8 * np.pi))
    assert shares == pytest.approx([1, low, 1, low])


def test_more_trajectories_than_fit_are_accumulated_over_microbatches():
    config = config_of("accumulation")
    shapes = build_shapes(config, make_mesh(config.mesh, jax.devices()[:1]), 512)
    longest = max(shapes.lengths)
    assert longest == 4096
    tokens = 512 * config.rollout.max_context
    assert shapes.microbatches(longest) * longest * shapes.rows >= tokens / 2 > longest


def test_the_average_moves_as_the_page_says_and_in_float32():
    decay = config_of("ema").optimizer.ema
    assert f"`ema = {decay} * ema + {round(1 - decay, 9)} * params`" in PAGE
    ema, params = {"scale": jnp.ones(2)}, {"scale": jnp.full(2, 1.0078125, jnp.bfloat16)}
    moved = average(params, ema, decay)["scale"]
    assert moved.dtype == jnp.float32
    np.testing.assert_allclose(moved, decay + (1 - decay) * 1.0078125, rtol=1e-6)


def test_every_example_of_the_page_is_tested():
    tested = {*PLAIN, "wsd", "restarts", "accumulation", "ema"}
    assert set(EXAMPLES) == tested and len(FILES) == 2
    assert PAGE.count("```python") == len(EXAMPLES) + len(FILES)
