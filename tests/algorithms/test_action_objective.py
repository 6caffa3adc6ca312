"""Terms of an action's objective against PyTorch's automatic differentiation, one row at a time."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from seeupo_jax.algorithms import action_objective as action_terms
from seeupo_jax.algorithms.surrogate import action_logp, turn_ratio
from seeupo_jax.configuration.entry_points import entry_names, find_entry

OBJECTIVES = entry_names("objective")
RATIOS = ("geometric", "product", "token")
# clip_low, clip_high, clip_dual
CLIPS = (
    (0.2, 0.3, None),
    (0.1, None, None),
    (None, 0.2, None),
    (None, None, None),
    (0.2, 0.3, 1.1),
    (None, None, 1.1),
)
CHOICES = pytest.mark.parametrize(
    "objective, ratio",
    [
        (objective, ratio)
        for objective, ratio in itertools.product(OBJECTIVES, RATIOS)
        if ratio in find_entry("objective", objective).ratios
    ],
)
ROWS, LENGTH = 6, 7


def action_objective(*arrays, objective="clipped", **options):
    """As the package's, by the objective's name."""
    entry = find_entry("objective", objective)
    return action_terms.action_objective(*arrays, objective=entry, **options)


def ragged(seed):
    """Log-probabilities, mask, advantages, factors; the first action is empty, the second full."""
    rng = np.random.default_rng(seed)
    logp_NL = -rng.exponential(1.0, (ROWS, LENGTH))
    old_logp_NL = logp_NL + rng.normal(0, 0.3, (ROWS, LENGTH))
    mask_NL = rng.random((ROWS, LENGTH)) < 0.6
    mask_NL[0], mask_NL[1] = False, True
    return logp_NL, old_logp_NL, mask_NL, rng.normal(size=(ROWS, LENGTH)), rng.uniform(0.5, 2, ROWS)


def importance(seed):
    return np.random.default_rng(seed + 100).uniform(0.1, 1.5, (ROWS, LENGTH))


def row_twin(logp_A, old_logp_A, advantage_A, factor, weigh, objective, ratio, clips):
    """Term and clipped share of one action's own tokens, in float64."""
    difference_A = logp_A - old_logp_A
    if ratio == "token":
        s, logp, weight = difference_A.exp(), logp_A, advantage_A * factor
    else:
        join = torch.mean if ratio == "geometric" else torch.sum
        s, logp = join(difference_A).exp(), join(logp_A)
        weight = advantage_A.mean() * factor
    low, high = (None if c is None else 1 + c for c in (clips[0] and -clips[0], clips[1]))
    near = s if low is high is None else torch.clamp(s, low, high)
    if objective == "clipped":
        # As in verl's `compute_policy_loss_vanilla`, of losses, which are the negative terms.
        loss = torch.maximum(-s * weight, -near * weight)
        if clips[2] is not None:
            loss = torch.where(weight < 0, torch.minimum(loss, -clips[2] * weight), loss)
        term, clipped = -loss, -loss != s * weight
    elif objective == "cispo":
        term, clipped = near.detach() * weight * logp, near != s
    elif objective == "sapo":
        tau = torch.where(weight > 0, 1.0, 1.05)
        term, clipped = torch.sigmoid(tau * (s - 1)) * 4 / tau * weight, torch.zeros_like(s)
    elif objective == "gmpo":
        # Of losses: the larger of each token's two log-ratios with the sign of -M.
        sign = -torch.sign(weight)
        low, high = clips[0] and -clips[0], clips[1]
        side = difference_A if low is high is None else torch.clamp(difference_A, low, high)
        kept_A = sign * torch.maximum(sign * difference_A, sign * side)
        term, clipped = join(kept_A).exp() * weight, (kept_A != difference_A).double()
    elif objective.startswith("dppo"):
        now, before = logp.detach().exp(), old_logp_A.exp()
        away = now - before
        if objective == "dppo_kl":
            others, old_others = ((1 - x).clamp(min=0) for x in (now, before))
            rest = torch.log((old_others + 1e-8) / (others + 1e-8))
            away = torch.sign(away) * (before * (old_logp_A - logp.detach()) + old_others * rest)
        most, least = (torch.inf if c is None else c for c in (clips[1], clips[0]))
        clipped = torch.where(weight > 0, away > most, away < -least)
        held = s if clips[2] is None else torch.clamp(s, max=clips[2])
        term = held.detach() * weight * logp * ~clipped
    else:
        assert objective == "logp", "an objective without a twin"
        term, clipped = weight * logp, torch.zeros_like(s)
    return (term * weigh).mean(), clipped.double().mean()


@pytest.mark.parametrize(
    "objective, ratio", [("clipped", "geometric"), ("clipped", "token"), ("cispo", "product")]
)
def test_a_clip_scale_multiplies_the_bounds_of_its_token_or_of_its_action(objective, ratio):
    *arrays, factor_N = given = ragged(3)
    mask_NL = arrays[2]
    scale_NL = np.random.default_rng(5).uniform(0.2, 1.0, mask_NL.shape)
    terms = partial(action_objective, objective=objective, ratio=ratio)
    bounds = {"clip_low": 0.02, "clip_high": 0.03}
    found = terms(*given, **bounds, clip_scale_NL=np.where(mask_NL, scale_NL, np.nan))
    for n in range(1, ROWS):  # each action by itself, and for `token` each token
        place = np.flatnonzero(mask_NL[n])
        each = []
        for part in place[:, None] if ratio == "token" else [place]:
            alone = (*(x[n : n + 1, part] for x in arrays), factor_N[n : n + 1])
            scale = scale_NL[n, part].mean()
            each.append(terms(*alone, **{name: b * scale for name, b in bounds.items()}))
        wanted = np.mean(np.array(each)[:, :, 0], axis=0)
        np.testing.assert_allclose([x[n] for x in found], wanted, rtol=1e-5, atol=1e-6)
    assert np.asarray(found[1]).any()
    unbounded = {"clip_low": None, "clip_high": None}
    without = terms(*given, **unbounded, clip_scale_NL=scale_NL)
    np.testing.assert_array_equal(without, terms(*given, **unbounded))


def twin(arrays, weigh, objective, ratio, clips):
    """Terms [N], shares [N] and the gradient [N, L] of the sum of the terms."""
    logp_NL, old_logp_NL, mask_NL, advantage_NL, factor_N = arrays
    logp = torch.tensor(logp_NL, requires_grad=True)
    terms, shares = torch.zeros(ROWS).double(), torch.zeros(ROWS).double()
    for n in np.flatnonzero(mask_NL.any(axis=1)):
        own = mask_NL[n]
        rows = logp[n, own], torch.tensor(old_logp_NL[n, own]), torch.tensor(advantage_NL[n, own])
        own_weigh = torch.tensor(weigh[n, own])
        own_weigh = own_weigh if ratio == "token" else own_weigh.mean()
        terms[n], shares[n] = row_twin(*rows, factor_N[n], own_weigh, objective, ratio, clips)
    terms.sum().backward()
    return terms.detach().numpy(), shares.numpy(), logp.grad.numpy()


def terms_and_slopes(arrays, **options):
    """As `twin`, of the package."""

    def total(logp_NL):
        term_N, share_N = action_objective(logp_NL, *arrays[1:], **options)
        return term_N.sum(), (term_N, share_N)

    logp_NL = jnp.asarray(arrays[0], jnp.float32)
    (_, (term_N, share_N)), slope_NL = jax.value_and_grad(total, has_aux=True)(logp_NL)
    return term_N, share_N, slope_NL


@pytest.mark.sampled(4)
@CHOICES
@pytest.mark.parametrize("clips", CLIPS)
def test_terms_shares_and_gradients_agree_with_torch(objective, ratio, clips):
    choices = {"objective": objective, "ratio": ratio}
    if "clip_dual" not in find_entry("objective", objective).bounds:
        clips = (*clips[:2], None)
    names = ("clip_low", "clip_high", "clip_dual")
    options = choices | dict(zip(names, clips, strict=True))
    for seed, weighed in ((0, True), (1, True), (2, False)):
        arrays, weigh = ragged(seed), importance(seed)
        weigh = weigh if weighed else np.ones_like(weigh)
        expected = twin(arrays, weigh, *choices.values(), clips)
        result = terms_and_slopes(arrays, importance_NL=weigh if weighed else None, **options)
        for got, want in zip(result, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_a_hand_worked_action_of_every_kind():
    # Two tokens whose ratios are 2 and 1/2: the action's are 1 (geometric and product).
    logp_NL, old_logp_NL = np.log([[0.5, 0.25]]), np.log([[0.25, 0.5]])
    arrays = (logp_NL, old_logp_NL, np.ones((1, 2)), np.array([[3.0, 1.0]]), np.array([2.0]))
    of = partial(action_objective, *arrays, clip_low=0.2, clip_high=0.2)
    logp = np.log(0.125)
    for ratio, term in (("geometric", 4.0), ("product", 4.0), ("token", (1.2 * 6 + 0.5 * 2) / 2)):
        np.testing.assert_allclose(of(objective="clipped", ratio=ratio)[0], [term], rtol=1e-6)
    np.testing.assert_allclose(of(ratio="token")[1], [0.5])  # the second one's clip would be larger
    for ratio, term in (("geometric", 4 * logp / 2), ("product", 4 * logp)):
        for objective in ("cispo", "logp"):
            np.testing.assert_allclose(of(objective=objective, ratio=ratio)[0], [term], rtol=1e-6)
    cispo = (1.2 * 6 * np.log(0.5) + 0.8 * 2 * np.log(0.25)) / 2
    np.testing.assert_allclose(of(objective="cispo", ratio="token")[0], [cispo], rtol=1e-6)
    np.testing.assert_allclose(of(objective="cispo", ratio="token")[1], [1.0])


@CHOICES
@pytest.mark.parametrize("garbage", [-np.inf, np.nan, 1e30])
def test_nothing_outside_the_mask_reaches_a_term_or_its_gradient(objective, ratio, garbage):
    logp_NL, old_logp_NL, mask_NL, advantage_NL, factor_N = ragged(4)

    def with_fill(fill):
        filled = [jnp.where(mask_NL, x, fill) for x in (logp_NL, old_logp_NL, advantage_NL)]
        arrays = (*filled[:2], mask_NL, filled[2], factor_N)
        return terms_and_slopes(
            arrays, objective=objective, ratio=ratio, clip_low=0.2, clip_high=0.2
        )

    for clean, dirty in zip(with_fill(0.0), with_fill(garbage), strict=True):
        np.testing.assert_array_equal(clean, dirty)
        assert np.isfinite(dirty).all() and not dirty[0].any()


@CHOICES
def test_on_the_old_policy_every_objective_has_the_gradient_of_the_log_probability(
    objective, ratio
):
    logp_NL, _, mask_NL, advantage_NL, factor_N = ragged(5)
    arrays = (logp_NL, logp_NL, mask_NL, advantage_NL, factor_N)
    options = {"ratio": ratio, "clip_low": 0.0, "clip_high": 0.0}
    _, share_N, slope_NL = terms_and_slopes(arrays, objective=objective, **options)
    _, _, expected_NL = terms_and_slopes(arrays, objective="logp", **options)
    np.testing.assert_allclose(slope_NL, expected_NL, rtol=1e-5, atol=1e-7)
    assert slope_NL.any() and not share_N.any()


@CHOICES
def test_only_the_log_probability_now_has_a_gradient(objective, ratio):
    logp_NL, *others = ragged(6)
    mask_NL = others.pop(1)

    def total(old_logp_NL, advantage_NL, factor_N):
        arrays = (logp_NL, old_logp_NL, mask_NL, advantage_NL, factor_N)
        options = {"objective": objective, "ratio": ratio, "clip_low": None, "clip_high": 0.2}
        return action_objective(*arrays, **options)[0].sum()

    slopes = jax.grad(total, argnums=(1, 2))(*map(jnp.asarray, others))
    assert not any(slope.any() for slope in slopes)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_mask_counts_tokens_whatever_its_type(ratio):
    arrays = ragged(7)
    options = {"ratio": ratio, "clip_low": 0.2, "clip_high": 0.2}
    expected = terms_and_slopes(arrays, **options)
    integers = (*arrays[:2], arrays[2].astype(np.int32), *arrays[3:])
    for got, want in zip(terms_and_slopes(integers, **options), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("level", RATIOS)
def test_the_log_of_a_ratio_is_a_difference_of_log_probabilities(level):
    logp_NL, old_logp_NL, mask_NL, _, _ = ragged(8)
    difference = action_logp(logp_NL, mask_NL, level=level) - action_logp(
        old_logp_NL, mask_NL, level=level
    )
    ratio = turn_ratio(logp_NL, old_logp_NL, mask_NL, level=level)
    np.testing.assert_allclose(np.exp(difference), ratio, rtol=1e-5)


def test_log_probabilities_of_a_hand_worked_action():
    logp_NL, mask_NL = np.array([[-1.0, -2.0, -np.inf]]), np.array([[1, 1, 0]])
    for level, value in (("geometric", [-1.5]), ("product", [-3.0]), ("token", [[-1.0, -2.0, 0]])):
        result = action_logp(logp_NL, mask_NL, level=level)
        np.testing.assert_array_equal(result, value)
        np.testing.assert_array_equal(action_logp(logp_NL, mask_NL * 0, level=level), result * 0)


def test_unknown_names_list_the_known_ones():
    zeros, one = np.zeros((1, 1)), np.ones(1)
    of = partial(action_objective, zeros, zeros, zeros, zeros, one, clip_low=None, clip_high=None)
    with pytest.raises(
        ValueError, match="objective: got 'ppo'; allowed: one of .*clipped, dppo_kl,"
    ):
        of(objective="ppo")
    for objective in OBJECTIVES:
        with pytest.raises(ValueError, match="level: got 'mean'; allowed: geometric, product"):
            of(objective=objective, ratio="mean")
    with pytest.raises(ValueError, match="level: got 'mean'; allowed: geometric, product, token"):
        action_logp(zeros, zeros, level="mean")
