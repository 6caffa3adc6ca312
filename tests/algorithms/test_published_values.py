"""Objectives and estimators give the numbers of their authors' functions.

Each expected number was obtained by running the named function, in float64, on the arrays below.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.algorithms.action_objective import action_objective
from seeupo_jax.algorithms.estimators.maxrl import maximum_likelihood_advantage
from seeupo_jax.algorithms.estimators.otb import optimal_token_advantage
from seeupo_jax.algorithms.surrogate import kl_estimate
from seeupo_jax.configuration.entry_points import find_entry

# Four actions of 5, 3, 4 and 1 tokens, log-probabilities in nats.
LOGP = np.array(
    [
        [-0.515, -0.738, -0.418, -0.647, -0.165],
        [-2.389, -0.027, -1.986, -0.423, -0.23],
        [-0.399, -0.6, -0.65, -0.772, -1.339],
        [-0.175, -2.221, -0.535, -0.264, -0.638],
    ]
)
OLD = np.array(
    [
        [-0.379, -0.66, -0.511, -1.905, -0.434],
        [-2.413, -0.01, -2.751, -0.662, -0.719],
        [-0.803, -0.01, -1.054, -0.788, -0.897],
        [-0.467, -2.277, -0.48, -0.232, -1.251],
    ]
)
REFERENCE = np.array(
    [
        [7.485, 0.621, -1.965, 0.212, -0.046],
        [-3.03, 1.973, -1.224, -1.622, -0.155],
        [0.178, -25.6, 0.033, -0.839, -0.672],
        [1.264, -2.897, -0.332, -0.727, -0.511],
    ]
)
MASK = np.arange(5)[None] < np.array([5, 3, 4, 1])[:, None]
ADVANTAGE = np.array([1.5, -0.7, -1.2, 0.4])

# Objective -> options, loss, its gradient by log-probabilities, share of limited tokens or None.
# The authors' losses are means over actions (`sapo`, `gmpo`) or over all tokens (`dppo`).
OBJECTIVES = {
    # volcengine/verl b178a3c, core_algos.py, compute_policy_loss_sapo
    "sapo": (
        {"ratio": "token", "tau_pos": 1.0, "tau_neg": 1.05},
        -0.1198182451033181,
        [
            [-0.06519929, -0.06927478, -0.08211448, -0.07284908, -0.09584814],
            [0.05974055, 0.05734556, 0.08889314, 0.0, 0.0],
            [0.10499886, 0.03937908, 0.10499886, 0.07620419, 0.0],
            [-0.13013328, 0.0, 0.0, 0.0, 0.0],
        ],
        None,
    ),
    # volcengine/verl b178a3c, core_algos.py, compute_policy_loss_geo_mean
    "gmpo": (
        {"ratio": "geometric", "clip_low": 0.4, "clip_high": 0.4},
        0.00755773116836167,
        [
            [-0.08368737, -0.08368737, -0.08368737, 0.0, -0.08368737],
            [0.07545278, 0.07545278, 0.07545278, 0.0, 0.0],
            [0.08338664, 0.0, 0.08338664, 0.08338664, 0.0],
            [-0.1339103, 0.0, 0.0, 0.0, 0.0],
        ],
        None,
    ),
    # sail-sg/Stable-RL c6af1d1, core_algos.py, compute_policy_loss_with_mask(dppo_binary_tv), with
    # clip_ratio_c=1.7 and the sampler's log-probabilities equal to the old ones
    "dppo_tv": (
        {"ratio": "token", "clip_low": 0.15, "clip_high": 0.15, "clip_dual": 1.7},
        -0.34886955961883664,
        [
            [-0.10071261, -0.10672666, -0.1266302, 0.0, 0.0],
            [0.05515409, 0.05293851, 0.09153846, 0.0, 0.0],
            [0.13825883, 0.0, 0.13825883, 0.09379649, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.0],
        ],
        4 / 13,
    ),
    # the same, dppo_binary_kl
    "dppo_kl": (
        {"ratio": "token", "clip_low": 0.125, "clip_high": 0.125, "clip_dual": 1.7},
        -0.32395477904891357,
        [
            [-0.10071261, -0.10672666, -0.1266302, 0.0, -0.15099867],
            [0.05515409, 0.05293851, 0.09153846, 0.0, 0.0],
            [0.13825883, 0.0, 0.13825883, 0.09379649, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.0],
        ],
        3 / 13,
    ),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_has_its_authors_loss_and_gradient(name):
    options, wanted, gradient, limited = OBJECTIVES[name]
    count_N = MASK.sum(axis=1)
    share_N = count_N / count_N.sum() if name.startswith("dppo") else np.full(4, 0.25)

    def loss(logp_NL):
        arrays = (OLD, MASK, np.repeat(ADVANTAGE[:, None], 5, axis=1), np.ones(4))
        terms = action_objective(
            logp_NL, *arrays, objective=find_entry("objective", name), **options
        )
        return -(share_N * terms[0]).sum(), terms[1]

    (found, clipped_N), slope_NL = jax.value_and_grad(loss, has_aux=True)(jnp.float32(LOGP))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(slope_NL, gradient, rtol=1e-5, atol=1e-7)
    if limited is not None:
        np.testing.assert_allclose((clipped_N * count_N).sum() / count_N.sum(), limited, rtol=1e-6)


def test_k3_straight_through_has_the_value_of_k3_and_the_gradient_of_k2():
    # volcengine/verl b178a3c, core_algos.py: kl_penalty_forward of k3, and of k2 as kl_penalty adds
    # it straight through. Its bounds are reached at the first token and at the one 25 nats off.
    wanted = [
        [10.0, 1.53329906, 0.75988567, 0.50179871, 0.00736992],
        [0.1677654, 4.3890561, 0.38055705, 0.50049556, 0.00288415],
        [0.20368834, 10.0, 0.29680826, 0.0021952, 0.28138339],
        [1.77747723, 0.18464752, 0.02207247, 0.09239263, 0.00841702],
    ]
    gradient = [
        [-8.0, -1.359, 1.547, -0.859, -0.119],
        [0.641, -2.0, -0.762, 1.199, -0.075],
        [-0.577, 25.0, -0.683, 0.067, -0.667],
        [-1.439, 0.676, -0.203, 0.463, -0.127],
    ]

    def total(logp_NL, kind):
        kl_NL = kl_estimate(logp_NL, jnp.float32(REFERENCE), kind=kind)
        return kl_NL.sum(), kl_NL

    slope_and_value = jax.grad(total, has_aux=True)
    slope_NL, kl_NL = slope_and_value(jnp.float32(LOGP), "k3+")
    np.testing.assert_allclose(kl_NL, wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(slope_NL, gradient, rtol=1e-4)
    bounded_NL, plain_NL = slope_and_value(jnp.float32(LOGP), "k3")
    np.testing.assert_array_equal(plain_NL, kl_NL)
    assert bounded_NL[0, 0] == bounded_NL[2, 1] == 0


def test_maxrl_divides_by_the_mean_success():
    # tajwarfahim/maxrl c0698eb, core_algos.py, compute_maxrl_outcome_advantage
    rewards, groups = [1.0, 0.0, 0.0, 0.0, 0.5, 0.25, 1.0, 1.0], [0, 0, 0, 0, 3, 3, 3, 3]
    wanted = [2.999987840652466, *[-0.9999959468841553] * 3]
    wanted += [-0.2727268636226654, -0.6363626718521118, 0.4545447826385498, 0.4545447826385498]
    found_N = maximum_likelihood_advantage(np.float32(rewards), np.int32(groups))
    np.testing.assert_allclose(found_N, wanted, rtol=1e-6)
    # Without a success nothing is learned; a failed or lone trajectory counts nowhere.
    valid_N = np.array([True, True, False, True])
    found_N = maximum_likelihood_advantage(
        np.float32([0, 0, np.nan, 1]), np.int32([5, 5, 5, 6]), valid_N=valid_N
    )
    np.testing.assert_array_equal(found_N, np.zeros(4))


# Σ_v π_v² of each token, and the rewards of two turns of three trajectories.
COLLISION = np.array(
    [
        [0.4774, 0.2783, 0.3728, 0.0362, 0.4438],
        [0.0437, 0.9802, 0.0567, 0.3071, 0.2722],
        [0.2087, 0.9802, 0.2017, 0.2605, 0.2063],
        [0.397, 0.0415, 0.4099, 0.6335, 0.1003],
    ]
)
REWARD = np.array(
    [
        [0.0, 0.0, 0.3, 0.0, 1.0],
        [0.0, 0.0, 0.5, 0.0, 0.0],
        [-0.2, 0.0, 0.0, 0.8, 0.0],
        [0.25, 0.0, 0.0, 0.0, 0.0],
    ]
)
ONE_GROUP = [
    [0.7425355, 0.5542059, 0.5877087, 0.0960531, 1.0],
    [-0.0574645, -0.2457941, -0.2122913, 0.0, 0.0],
    [0.0425355, 0.0542059, 0.0877087, -0.1039469, 0.0],
    [-0.3074645, 0.0, 0.0, 0.0, 0.0],
]
TWO_GROUPS = [
    [0.5199325, 0.2349522, 0.3042549, 0.0960531, 1.0],
    [0.0355311, 0.5, 0.5, 0.0, 0.0],
    [-0.1800675, -0.2650478, -0.1957451, -0.1039469, 0.0],
    [-0.2144689, 0.0, 0.0, 0.0, 0.0],
]


@pytest.mark.parametrize(
    "groups, zero_tail, wanted",
    [
        ([4, 4, 4, 4], True, ONE_GROUP),
        ([4, 4, 4, 4], False, [[*ONE_GROUP[0][:4], 0.0], *ONE_GROUP[1:]]),
        ([4, 9, 4, 9], True, TWO_GROUPS),
    ],
)
def test_the_optimal_token_baseline(groups, zero_tail, wanted):
    # volcengine/verl b178a3c, core_algos.py, compute_multi_turn_optimal_token_baseline_advantage
    fill = np.where(MASK, 0.0, np.nan)  # nothing outside the mask is read
    arrays = [np.float32(x + fill) for x in (REWARD, OLD, COLLISION)]
    reward_NL, old_logp_NL, collision_NL = arrays
    found_NL = optimal_token_advantage(
        reward_NL, np.int32(groups), old_logp_NL, collision_NL, MASK, zero_tail=zero_tail
    )
    np.testing.assert_allclose(found_NL, wanted, rtol=1e-5, atol=2e-7)


def test_tokens_of_probability_one_have_no_energy_whatever_their_rounding():
    """1 - 2 π + Σ π² is a square: float32 may leave it below 0, and a baseline then explodes."""
    logp_NL = np.float32([[-1e-7, -0.5], [-2e-7, -0.9]])
    collision_NL = np.float32([[1 - 2.4e-7, 0.4], [1 - 4.2e-7, 0.3]])
    reward_NL, mask_NL = np.float32([[0, 1], [0, 0]]), np.ones((2, 2), bool)
    found_NL = optimal_token_advantage(reward_NL, np.int32([0, 0]), logp_NL, collision_NL, mask_NL)
    assert np.abs(found_NL).max() <= 1.0
