"""Each method again, in numpy, as its paper writes it: whole models, no interface, gradients by hand.

`counted` lists, round by round, the sites whose updates were in; nothing else is known of the federation.
Each function returns what it names at the end of the last round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from fedtrain.digest import seed_of
from tests.toy import HIDDEN, INPUTS, LR, SEED, batches_of, data_of, examples_of, initial

Vector = np.ndarray[Any, Any]
Counted = Sequence[Sequence[str]]
Told = dict[tuple[int, str], int]  # (round, site) -> coordinates that were clipped
BODY = np.arange(18) < 12
NORM = (np.arange(18) >= 12) & (np.arange(18) < 15)
HEAD = np.arange(18) >= 15


def loss_and_gradient(w: Vector, x: Vector, y: Vector) -> tuple[float, Vector]:
    body, norm, head = w[:12].reshape(HIDDEN, INPUTS), w[12:15], w[15:]
    z = x @ body.T
    t = np.tanh(z * norm)
    error = t @ head - y
    da = error[:, None] * head / len(y) * (1 - t**2)
    gradient = np.concatenate([((da * norm).T @ x).ravel(), (da * z).sum(0), t.T @ error / len(y)])
    return float((error**2).mean() / 2), gradient


def sgd(
    site: str,
    round: int,
    w: Vector,
    extra: Callable[[Vector, Vector], Any] = lambda g, w: g,
    lr: float = LR,
    trained: Any = 1.0,
    epochs: int = 1,
) -> tuple[Vector, int]:
    """Local training along `extra(gradient, weights)`; the weights after it, and the number of steps."""
    x, y = data_of(site)
    batches = batches_of(site, round, epochs=epochs)
    for rows in batches:
        w = w - lr * trained * extra(loss_and_gradient(w, x[rows], y[rows])[1], w)
    return w, len(batches)


def mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def fedavg(counted: Counted, uniform: bool = False) -> Vector:
    w = initial()
    for round, sites in enumerate(counted):
        n = [1 if uniform else examples_of(s) for s in sites]
        w = mean([sgd(s, round, w)[0] for s in sites], n)
    return w


def clipped(vector: Vector, bound: float, where: tuple[int, str], told: Told) -> Vector:
    """Within ±bound; `told` gets how many coordinates of which round and site were beyond."""
    if beyond := int((abs(vector) > bound).sum()):
        told[where] = beyond
    return np.clip(vector, -bound, bound)


def scaffold(
    counted: Counted, registered: int, clip: float = np.inf, told: Told | None = None
) -> tuple[Vector, Vector, Any]:
    told = {} if told is None else told
    x = initial()
    c, c_i = np.zeros_like(x), defaultdict[str, Any](lambda: np.zeros_like(x))
    for round, sites in enumerate(counted):
        dx, dc = np.zeros_like(x), np.zeros_like(x)
        for s in sites:
            y, steps = sgd(s, round, x, lambda g, w, offset=c - c_i[s]: g + offset)
            change = clipped((x - y) / (steps * LR) - c, clip, (round, s), told)
            dx, dc = dx + y - x, dc + change
            c_i[s] = c_i[s] + change
        x = x + dx / len(sites)
        c = c + dc / registered
    return x, c, c_i


def fednova(counted: Counted) -> Vector:
    x = initial()
    for round, sites in enumerate(counted):
        n = [examples_of(s) for s in sites]
        trained = [sgd(s, round, x) for s in sites]
        tau = mean([steps for _, steps in trained], n)
        x = x - tau * mean([(x - y) / steps for y, steps in trained], n)
    return x


def feddyn(
    counted: Counted, registered: int, alpha: float, clip: float = np.inf, told: Told | None = None
) -> tuple[Vector, Vector, Any]:
    told = {} if told is None else told
    theta = initial()
    h, grad = np.zeros_like(theta), defaultdict[str, Any](lambda: np.zeros_like(theta))
    for round, sites in enumerate(counted):
        models = []
        for s in sites:
            model, _ = sgd(
                s, round, theta, lambda g, w, grad=grad[s], theta=theta: g - grad + alpha * (w - theta)
            )
            delta = clipped(model - theta, clip, (round, s), told)
            grad[s] = grad[s] - alpha * delta
            models.append(theta + delta)
        h = h - alpha / registered * sum(model - theta for model in models)
        theta = sum(models) / len(models) - h / alpha
    return theta, h, grad


def partial(counted: Counted, shared: Vector, local: Vector, head_epochs: int = 0) -> tuple[Vector, Any]:
    """FedAvg of the coordinates in `shared`; those in `local` stay at their site, the rest never changes.
    `head_epochs`: of the local ones alone first, and the shared ones alone afterwards (FedRep)."""
    w, start = initial(), initial()
    own = defaultdict[str, Any](lambda: start.copy())
    for round, sites in enumerate(counted):
        total, n = np.zeros_like(w), 0
        for s in sites:
            at = np.where(shared, w, np.where(local, own[s], start))
            if head_epochs:
                at, _ = sgd(s, round, at, trained=local.astype(float), epochs=head_epochs)
                own[s], _ = sgd(s, round, at, trained=shared.astype(float))
            else:
                own[s], _ = sgd(s, round, at, trained=(shared | local).astype(float))
            total, n = total + examples_of(s) * own[s], n + examples_of(s)
        w = np.where(shared, total / n, w)
    return w, own


def ditto(counted: Counted, penalty: float, personal_lr: float = LR) -> tuple[Vector, Any]:
    w, v = initial(), dict[str, Vector]()
    for round, sites in enumerate(counted):
        for s in sites:
            v[s], _ = sgd(s, round, v.get(s, w), lambda g, at, w=w: g + penalty * (at - w), lr=personal_lr)
        w = mean([sgd(s, round, w)[0] for s in sites], [examples_of(s) for s in sites])
    return w, v


def qfedavg(counted: Counted, q: float) -> Vector:
    w, big_l = initial(), 1 / LR
    for round, sites in enumerate(counted):
        deltas, hs = [], []
        for s in sites:
            f = loss_and_gradient(w, *data_of(s))[0]
            dw = big_l * (w - sgd(s, round, w)[0])
            deltas.append(f**q * dw)
            hs.append(q * f ** (q - 1) * (dw @ dw) + big_l * f**q)
        w = w - sum(deltas) / sum(hs)
    return w


def ifca(counted: Counted, models: list[Vector]) -> tuple[list[Vector], dict[str, int]]:
    models, chosen = [m.copy() for m in models], dict[str, int]()
    for round, sites in enumerate(counted):
        members = defaultdict[int, list[Any]](list)
        for s in sites:
            k = int(np.argmin([loss_and_gradient(m, *data_of(s))[0] for m in models]))
            chosen[s] = k
            members[k].append(sgd(s, round, models[k])[0])
        for k, found in members.items():
            models[k] = sum(found) / len(found)
    return models, chosen


def mimelite(
    counted: Counted, beta: float, clip: float = np.inf, told: Told | None = None
) -> tuple[Vector, Vector]:
    told = {} if told is None else told
    x = initial()
    m = np.zeros_like(x)
    for round, sites in enumerate(counted):
        models = [sgd(s, round, x, lambda g, w, m=m: (1 - beta) * g + beta * m)[0] for s in sites]
        gradients = [clipped(loss_and_gradient(x, *data_of(s))[1], clip, (round, s), told) for s in sites]
        x, m = sum(models) / len(models), (1 - beta) * sum(gradients) / len(gradients) + beta * m
    return x, m


def fedsgd(counted: Counted) -> Vector:
    w = initial()
    for sites in counted:
        gradients = [loss_and_gradient(w, *data_of(s))[1] for s in sites]
        w = w - LR * mean(gradients, [examples_of(s) for s in sites])
    return w


def cyclic(counted: Counted) -> Vector:
    w = initial()
    for round, (site,) in enumerate(counted):
        w, _ = sgd(site, round, w)
    return w


def per_fedavg(counted: Counted, variant: str, alpha: float, delta: float, size: int = 8) -> Vector:
    w = initial()
    for round, sites in enumerate(counted):
        models = []
        for s in sites:
            x, y = data_of(s)

            def gradient(at: Vector, rows: Vector, x: Vector = x, y: Vector = y) -> Vector:
                return loss_and_gradient(at, x[rows], y[rows])[1]

            at, draws = w, [batches_of(s, round, size, draw=draw) for draw in range(3)]
            for d1, d2, d3 in zip(*draws, strict=True):
                v = gradient(at - alpha * gradient(at, d1), d2)
                if variant == "HF":
                    hessian_v = (gradient(at + delta * v, d3) - gradient(at - delta * v, d3)) / (2 * delta)
                    v = v - alpha * hessian_v
                at = at - LR * v
            models.append(at)
        w = sum(models) / len(models)
    return w


def adaptive_fedprox(
    counted: Counted, mu: float, mu_step: float, patience: int
) -> tuple[Vector, list[float]]:
    """Also μ of each round, and of the one after the last."""
    w, losses, mus, since = initial(), list[float](), [mu], 0
    for round, sites in enumerate(counted):
        n = [examples_of(s) for s in sites]
        losses.append(mean([loss_and_gradient(w, *data_of(s))[0] for s in sites], n))
        w = mean([sgd(s, round, w, lambda g, at, w=w: g + mus[-1] * (at - w))[0] for s in sites], n)
        falls = [b < a for a, b in zip(losses[since:-1], losses[since + 1 :], strict=True)]
        mu = mus[-1]
        if len(losses) > 1 and losses[-1] > losses[-2]:
            mu, since = mu + mu_step, len(losses) - 1
        elif len(falls) >= patience and all(falls[-patience:]):
            mu, since = max(mu - mu_step, 0.0), len(losses) - 1
        mus.append(mu)
    return w, mus


def inexact_fedprox(counted: Counted, mu: float, stragglers: float, most: int) -> tuple[Vector, set[int]]:
    """Also the numbers of passes that were made."""
    w, made = initial(), set[int]()
    for round, sites in enumerate(counted):
        models = []
        for s in sites:
            draw = Random(seed_of(SEED, "site", round, s))
            passes = draw.randint(1, most) if draw.random() < stragglers else most
            made.add(passes)
            models.append(sgd(s, round, w, lambda g, at, w=w: g + mu * (at - w), epochs=passes)[0])
        w = mean(models, [examples_of(s) for s in sites])
    return w, made
