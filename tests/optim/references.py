"""Each optimizer in a few lines, from its paper: one weight, a list of gradients, the final weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(matrix: Tensor) -> Tensor:
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    a, b, c = COEFFICIENTS
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def adamw(w, grads, lr, weight_decay, betas, eps):
    m = n = torch.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m, n = betas[0] * m + (1 - betas[0]) * g, betas[1] * n + (1 - betas[1]) * g * g
        hat_m, hat_n = m / (1 - betas[0] ** t), n / (1 - betas[1] ** t)
        w = w - lr * weight_decay * w - lr * hat_m / (hat_n.sqrt() + eps)
    return w


def adamw_capped(w, grads, lr, weight_decay, betas, eps, cap, basis):
    """AdamW whose step has no singular value above cap sqrt(max(rows, columns)); of vectors, AdamW."""
    if w.ndim < 2:
        return adamw(w, grads, lr, weight_decay, betas, eps)
    m = n = torch.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m, n = betas[0] * m + (1 - betas[0]) * g, betas[1] * n + (1 - betas[1]) * g * g
        u, s, v = torch.linalg.svd(
            (m / (1 - betas[0] ** t)) / ((n / (1 - betas[1] ** t)).sqrt() + eps), full_matrices=False
        )
        bounded = (u * s.clamp(max=cap * max(w.shape[-2:]) ** 0.5).unsqueeze(-2)) @ v
        w = w - lr * weight_decay * w - lr * bounded
    return w


def nadamw(w, grads, lr, weight_decay, betas, eps, momentum_decay):
    """Dozat 2016: the momentum that the next step will have, with mu_t = beta1 (1 - 0.96^(t psi) / 2)."""
    m = n = torch.zeros_like(w)
    product = 1.0
    for t, g in enumerate(grads, 1):
        mu, mu_next = (betas[0] * (1 - 0.5 * 0.96 ** (s * momentum_decay)) for s in (t, t + 1))
        product *= mu
        m, n = betas[0] * m + (1 - betas[0]) * g, betas[1] * n + (1 - betas[1]) * g * g
        ahead = mu_next * m / (1 - product * mu_next) + (1 - mu) * g / (1 - product)
        w = w - lr * weight_decay * w - lr * ahead / ((n / (1 - betas[1] ** t)).sqrt() + eps)
    return w


def sgd(w, grads, lr, weight_decay, momentum, dampening, nesterov):
    v = None
    for g in grads:
        g = g + weight_decay * w
        v = g if v is None else momentum * v + (1 - dampening) * g
        w = w - lr * (g + momentum * v if nesterov else v)
    return w


def muon(w, grads, lr, weight_decay, momentum, lookahead, scale, row_beta=None):
    rows, columns = w.shape
    factor = {
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
        "original": math.sqrt(max(1, rows / columns)),
        "spectral": math.sqrt(rows / columns),
    }[scale]
    m, second = torch.zeros_like(w), torch.zeros(rows, 1, dtype=w.dtype)
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        u = m
        for _ in range(lookahead):
            u = (1 - momentum) * g + momentum * u
        o = orthogonal(u)
        if row_beta is not None:
            second = row_beta * second + (1 - row_beta) * (o * o).mean(dim=1, keepdim=True)
            even = o / second.sqrt()
            o = even * o.norm() / even.norm()
        w = (1 - lr * weight_decay) * w - lr * factor * o
    return w


def adan(w, grads, lr, weight_decay, betas, eps):
    """Xie et al. 2022, algorithm 1, with bias correction; betas are decay rates."""
    m = d = n = torch.zeros_like(w)
    previous = grads[0]
    for t, g in enumerate(grads, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        d = betas[1] * d + (1 - betas[1]) * (g - previous)
        n = betas[2] * n + (1 - betas[2]) * (g + betas[1] * (g - previous)) ** 2
        step = m / (1 - betas[0] ** t) + betas[1] * d / (1 - betas[1] ** t)
        w = (w - lr * step / ((n / (1 - betas[2] ** t)).sqrt() + eps)) / (1 + lr * weight_decay)
        previous = g
    return w


def lion(w, grads, lr, weight_decay, betas):
    m = torch.zeros_like(w)
    for g in grads:
        w = (1 - lr * weight_decay) * w - lr * (betas[0] * m + (1 - betas[0]) * g).sign()
        m = betas[1] * m + (1 - betas[1]) * g
    return w


def ademamix(w, grads, lr, weight_decay, betas, eps, alpha):
    fast = slow = n = torch.zeros_like(w)
    for t, g in enumerate(grads, 1):
        fast = betas[0] * fast + (1 - betas[0]) * g
        slow = betas[2] * slow + (1 - betas[2]) * g
        n = betas[1] * n + (1 - betas[1]) * g * g
        step = fast / (1 - betas[0] ** t) + alpha * slow
        w = (1 - lr * weight_decay) * w - lr * step / ((n / (1 - betas[1] ** t)).sqrt() + eps)
    return w


def mars(w, grads, lr, weight_decay, betas, eps, gamma):
    """Yuan et al. 2024: AdamW on g + gamma beta1 / (1 - beta1) (g - last g), clipped to norm 1."""
    m = n = last = torch.zeros_like(w)
    for t, g in enumerate(grads, 1):
        c = g + gamma * betas[0] / (1 - betas[0]) * (g - last)
        c = c / max(1.0, float(c.norm()))
        m, n, last = betas[0] * m + (1 - betas[0]) * c, betas[1] * n + (1 - betas[1]) * c * c, g
        step = (m / (1 - betas[0] ** t)) / ((n.sqrt() + eps) / math.sqrt(1 - betas[1] ** t))
        w = (1 - lr * weight_decay) * w - lr * step
    return w


def soap(w, grads, lr, weight_decay, betas, eps, precondition_frequency):
    """Vyas et al. 2024: Adam in the eigenbases of running G Gᵀ and Gᵀ G, which the first gradient sets."""
    beta = betas[1]
    left, right = (1 - beta) * grads[0] @ grads[0].T, (1 - beta) * grads[0].T @ grads[0]
    bases = [torch.linalg.eigh(side)[1].flip(1) for side in (left, right)]
    m = n = torch.zeros_like(w)
    for t, g in enumerate(grads[1:], 1):
        m = betas[0] * m + (1 - betas[0]) * g
        n = betas[1] * n + (1 - betas[1]) * (bases[0].T @ g @ bases[1]) ** 2
        rotated = (bases[0].T @ m @ bases[1]) / (n.sqrt() + eps)
        rate = lr * math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t)
        w = (w - rate * bases[0] @ rotated @ bases[1].T) * (1 - lr * weight_decay)
        left, right = beta * left + (1 - beta) * g @ g.T, beta * right + (1 - beta) * g.T @ g
        if t % precondition_frequency == 0:
            for side, matrix in enumerate((left, right)):
                product = matrix @ bases[side]
                order = (bases[side] * product).sum(dim=0).argsort(descending=True)
                n = n.index_select(side, order)
                bases[side] = torch.linalg.qr(product[:, order])[0]
    return w
