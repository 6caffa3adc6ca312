"""A Qwen3-style decoder in float64 NumPy with hand-written gradients, to test against.

It imports nothing of the package. Weights are a dict of Hugging Face names; what a key's presence
says (q_norm, bias, lm_head) is not configured again. Every operation returns its value and a
function that takes the value's gradient, adds to `grads` and returns the input's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Weights = dict[str, np.ndarray]
Backward = Callable[[np.ndarray, Weights], np.ndarray]


@dataclass(frozen=True)
class Architecture:
    """What the shapes of the weights do not tell."""

    head_dim: int
    rope_theta: float = 10_000.0
    eps: float = 1e-6


def random_weights(
    seed: int,
    *,
    vocab_size: int,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp_width: int,
    qk_norm: bool = True,
    qkv_bias: bool = False,
    tied: bool = True,
) -> Weights:
    """Weights of a small model, large enough in size for every part to matter."""
    rng = np.random.default_rng(seed)
    matrix = {"model.embed_tokens": (vocab_size, width)}
    if not tied:
        matrix["lm_head"] = (vocab_size, width)
    norm, bias = {"model.norm": width}, {}
    for i in range(layers):
        prefix = f"model.layers.{i}"
        rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        matrix |= {f"{prefix}.self_attn.{p}_proj": (n, width) for p, n in rows.items()}
        matrix[f"{prefix}.self_attn.o_proj"] = (width, heads * head_dim)
        matrix |= {f"{prefix}.mlp.{p}_proj": (mlp_width, width) for p in ("gate", "up")}
        matrix[f"{prefix}.mlp.down_proj"] = (width, mlp_width)
        norm |= {f"{prefix}.{n}_layernorm": width for n in ("input", "post_attention")}
        if qk_norm:
            norm |= {f"{prefix}.self_attn.{p}_norm": head_dim for p in "qk"}
        if qkv_bias:
            bias |= {f"{prefix}.self_attn.{p}_proj": n for p, n in rows.items()}
    weights = {f"{k}.weight": rng.normal(size=s) * s[1] ** -0.5 for k, s in matrix.items()}
    weights |= {f"{k}.weight": 1 + 0.2 * rng.normal(size=n) for k, n in norm.items()}
    return weights | {f"{k}.bias": 0.2 * rng.normal(size=n) for k, n in bias.items()}


def forward(
    weights: Weights, tokens_L: Sequence[int], arch: Architecture
) -> tuple[np.ndarray, Callable[[np.ndarray, Weights], None]]:
    """Logits [L, V], and the function that adds the gradients of all weights to a dict."""
    tokens_L = np.asarray(tokens_L)
    table = "model.embed_tokens.weight"
    x_LD = weights[table][tokens_L]
    backwards = []
    while f"model.layers.{len(backwards)}.input_layernorm.weight" in weights:
        x_LD, back = _layer(weights, f"model.layers.{len(backwards)}", x_LD, arch)
        backwards.append(back)
    x_LD, norm_back = _rms_norm(weights, "model.norm", x_LD, arch)
    head = "lm_head" if "lm_head.weight" in weights else "model.embed_tokens"
    logits_LV, head_back = _linear(weights, head, x_LD)

    def backward(dlogits_LV: np.ndarray, grads: Weights) -> None:
        dx_LD = norm_back(head_back(dlogits_LV, grads), grads)
        for back in reversed(backwards):
            dx_LD = back(dx_LD, grads)
        rows = np.zeros_like(weights[table])
        np.add.at(rows, tokens_L, dx_LD)
        _add(grads, table, rows)

    return logits_LV, backward


def token_logps(
    weights: Weights, tokens_L: Sequence[int], arch: Architecture, temperature: float
) -> tuple[np.ndarray, Callable[[np.ndarray, Weights], None]]:
    """Log-probability of each token after those before it, [L]; the first has none: 0."""
    logits_LV, logits_back = forward(weights, tokens_L, arch)
    scaled_LV = logits_LV / temperature
    scaled_LV = scaled_LV - scaled_LV.max(-1, keepdims=True)
    all_logp_LV = scaled_LV - np.log(np.exp(scaled_LV).sum(-1, keepdims=True))
    logp_L = np.zeros(len(tokens_L))
    for j in range(1, len(tokens_L)):
        logp_L[j] = all_logp_LV[j - 1, tokens_L[j]]

    def backward(dlogp_L: np.ndarray, grads: Weights) -> None:
        dlogits_LV = np.zeros_like(logits_LV)
        for j in range(1, len(tokens_L)):
            dlogits_LV[j - 1] = -np.exp(all_logp_LV[j - 1]) * dlogp_L[j]
            dlogits_LV[j - 1, tokens_L[j]] += dlogp_L[j]
        logits_back(dlogits_LV / temperature, grads)

    return logp_L, backward


def token_entropies(
    weights: Weights, tokens_L: Sequence[int], arch: Architecture, temperature: float
) -> tuple[np.ndarray, Callable[[np.ndarray, Weights], None]]:
    """Entropy in nats of what each token is drawn from, [L]; the first is drawn from nothing: 0."""
    logits_LV, logits_back = forward(weights, tokens_L, arch)
    scaled_LV = np.exp(logits_LV / temperature)
    share_LV = scaled_LV / scaled_LV.sum(-1, keepdims=True)
    entropy_L = -(share_LV * np.log(share_LV)).sum(-1)

    def backward(dentropy_L: np.ndarray, grads: Weights) -> None:
        dlogits_LV = np.zeros_like(logits_LV)
        for j in range(1, len(tokens_L)):
            share_V = share_LV[j - 1]
            slope_V = -share_V * (np.log(share_V) + entropy_L[j - 1])
            dlogits_LV[j - 1] = slope_V * dentropy_L[j] / temperature
        logits_back(dlogits_LV, grads)

    return np.concatenate([[0.0], entropy_L[:-1]]), backward


def token_divergences(
    weights: Weights,
    teacher: Weights,
    tokens_L: Sequence[int],
    arch: Architecture,
    temperature: float,
    count: int,
) -> tuple[np.ndarray, Callable[[np.ndarray, Weights], None]]:
    """KL(teacher || policy) of what each token is drawn from, nats [L]; the first: 0.

    Over the teacher's `count` likeliest tokens and all others as one outcome: whole softmaxes whose
    probabilities are added up.
    """
    logits_LV, logits_back = forward(weights, tokens_L, arch)
    share_LV, taught_LV = (
        np.exp(x / temperature) / np.exp(x / temperature).sum(-1, keepdims=True)
        for x in (logits_LV, forward(teacher, tokens_L, arch)[0])
    )
    outcomes = []
    for taught_V in taught_LV:
        top = np.argsort(-taught_V, kind="stable")[:count]
        outcomes.append([*([i] for i in top), np.setdiff1d(np.arange(len(taught_V)), top)])
    kl_L = np.zeros(len(tokens_L))
    for j in range(1, len(tokens_L)):
        for ids in outcomes[j - 1]:
            taught, own = taught_LV[j - 1, ids].sum(), share_LV[j - 1, ids].sum()
            kl_L[j] += taught * np.log(taught / own)

    def backward(dkl_L: np.ndarray, grads: Weights) -> None:
        dlogits_LV = np.zeros_like(logits_LV)
        for j in range(1, len(tokens_L)):
            for ids in outcomes[j - 1]:
                taught, own_V = taught_LV[j - 1, ids].sum(), share_LV[j - 1, ids]
                dlogits_LV[j - 1, ids] -= taught * own_V / own_V.sum()
            dlogits_LV[j - 1] += share_LV[j - 1]
            dlogits_LV[j - 1] *= dkl_L[j] / temperature
        logits_back(dlogits_LV, grads)

    return kl_L, backward


def token_squares(
    weights: Weights, tokens_L: Sequence[int], arch: Architecture, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """log π of each token, and the sum of the squares of what it is drawn from, [L]; first: 0."""
    logp_L, _ = token_logps(weights, tokens_L, arch, temperature)
    logits_LV, _ = forward(weights, tokens_L, arch)
    scaled_LV = np.exp(logits_LV / temperature)
    squares_L = ((scaled_LV / scaled_LV.sum(-1, keepdims=True)) ** 2).sum(-1)
    return logp_L, np.concatenate([[0.0], squares_L[:-1]])


def _add(grads: Weights, name: str, value: np.ndarray) -> None:
    grads[name] = grads[name] + value if name in grads else value


def _linear(weights: Weights, name: str, x: np.ndarray) -> tuple[np.ndarray, Backward]:
    matrix, bias = f"{name}.weight", f"{name}.bias"
    y = x @ weights[matrix].T
    if bias in weights:
        y = y + weights[bias]

    def backward(dy: np.ndarray, grads: Weights) -> np.ndarray:
        _add(grads, matrix, dy.T @ x)
        if bias in weights:
            _add(grads, bias, dy.sum(0))
        return dy @ weights[matrix]

    return y, backward


def _rms_norm(
    weights: Weights, name: str, x: np.ndarray, arch: Architecture
) -> tuple[np.ndarray, Backward]:
    gain = weights[f"{name}.weight"]
    inverse = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + arch.eps)
    unit = x * inverse

    def backward(dy: np.ndarray, grads: Weights) -> np.ndarray:
        _add(grads, f"{name}.weight", (dy * unit).reshape(-1, len(gain)).sum(0))
        dunit = dy * gain
        return inverse * (dunit - unit * (dunit * unit).mean(-1, keepdims=True))

    return unit * gain, backward


def _layer(
    weights: Weights, prefix: str, x: np.ndarray, arch: Architecture
) -> tuple[np.ndarray, Backward]:
    normed, norm1_back = _rms_norm(weights, f"{prefix}.input_layernorm", x, arch)
    mixed, attention_back = _attention(weights, f"{prefix}.self_attn", normed, arch)
    x = x + mixed
    normed, norm2_back = _rms_norm(weights, f"{prefix}.post_attention_layernorm", x, arch)
    y, mlp_back = _mlp(weights, f"{prefix}.mlp", normed)

    def backward(dy: np.ndarray, grads: Weights) -> np.ndarray:
        dx = dy + norm2_back(mlp_back(dy, grads), grads)
        return dx + norm1_back(attention_back(dx, grads), grads)

    return x + y, backward


def _mlp(weights: Weights, prefix: str, x: np.ndarray) -> tuple[np.ndarray, Backward]:
    gate, gate_back = _linear(weights, f"{prefix}.gate_proj", x)
    up, up_back = _linear(weights, f"{prefix}.up_proj", x)
    sigmoid = 1 / (1 + np.exp(-gate))
    y, down_back = _linear(weights, f"{prefix}.down_proj", gate * sigmoid * up)

    def backward(dy: np.ndarray, grads: Weights) -> np.ndarray:
        dproduct = down_back(dy, grads)
        dgate = dproduct * up * sigmoid * (1 + gate * (1 - sigmoid))
        return gate_back(dgate, grads) + up_back(dproduct * gate * sigmoid, grads)

    return y, backward


def _heads(
    weights: Weights, prefix: str, kind: str, x: np.ndarray, arch: Architecture
) -> tuple[np.ndarray, Backward]:
    """Queries, keys or values [L, heads, head_dim]; queries and keys normed, then rotated."""
    flat, linear_back = _linear(weights, f"{prefix}.{kind}_proj", x)
    y = flat.reshape(len(x), -1, arch.head_dim)
    backwards = []
    if f"{prefix}.{kind}_norm.weight" in weights:
        y, norm_back = _rms_norm(weights, f"{prefix}.{kind}_norm", y, arch)
        backwards.append(norm_back)
    if kind != "v":
        y, rope_back = _rope(y, arch)
        backwards.append(rope_back)

    def backward(dy: np.ndarray, grads: Weights) -> np.ndarray:
        for back in reversed(backwards):
            dy = back(dy, grads)
        return linear_back(dy.reshape(flat.shape), grads)

    return y, backward


def _rope(x: np.ndarray, arch: Architecture) -> tuple[np.ndarray, Backward]:
    """Rotates dimension i with dimension i + head_dim / 2, by position x theta^(-2i / head_dim)."""
    half = arch.head_dim // 2
    angle = np.outer(np.arange(len(x)), arch.rope_theta ** (-np.arange(half) / half))
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]

    def turn(v: np.ndarray, sin: np.ndarray) -> np.ndarray:
        first, second = v[..., :half], v[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    return turn(x, sin), lambda dy, grads: turn(dy, -sin)


def _attention(
    weights: Weights, prefix: str, x: np.ndarray, arch: Architecture
) -> tuple[np.ndarray, Backward]:
    q, q_back = _heads(weights, prefix, "q", x, arch)
    k, k_back = _heads(weights, prefix, "k", x, arch)
    v, v_back = _heads(weights, prefix, "v", x, arch)
    length, heads, scale = len(x), q.shape[1], arch.head_dim**-0.5
    shared = heads // k.shape[1]  # query heads h share key head h // shared
    probability, mixed = np.zeros((heads, length, length)), np.zeros_like(q)
    visible = np.tri(length, dtype=bool)  # every query sees the keys up to its own
    for h in range(heads):
        score = np.where(visible, q[:, h] @ k[:, h // shared].T * scale, -np.inf)
        score = np.exp(score - score.max(-1, keepdims=True))
        probability[h] = score / score.sum(-1, keepdims=True)
        mixed[:, h] = probability[h] @ v[:, h // shared]
    y, out_back = _linear(weights, f"{prefix}.o_proj", mixed.reshape(length, -1))

    def backward(dy: np.ndarray, grads: Weights) -> np.ndarray:
        dmixed = out_back(dy, grads).reshape(q.shape)
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for h in range(heads):
            dp = dmixed[:, h] @ v[:, h // shared].T
            p = probability[h]
            dscore = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
            dq[:, h] = dscore @ k[:, h // shared]
            dk[:, h // shared] += dscore.T @ q[:, h]
            dv[:, h // shared] += p.T @ dmixed[:, h]
        return q_back(dq, grads) + k_back(dk, grads) + v_back(dv, grads)

    return y, backward
