"""jax by hand: one jitted call a round; vmap over the sites, scan over their steps. Sites of unequal sizes
are padded to the longest of the round, and batches to the largest; a padded example has no weight in a loss.

python -m peers.jax_vmap NAME WORK.npz
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from peers.work import Batch, given, turns

Weights = list[Any]


def mlp(weights: Weights, x: Any) -> Any:
    layers = list(zip(weights[::2], weights[1::2], strict=True))
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight.T + bias)
    return x @ layers[-1][0].T + layers[-1][1]


def convolved(x: Any, weight: Any, bias: Any, around: int) -> Any:
    """As nn.Conv2d, by a product with patches: XLA is slow on the CPU at convolutions that vmap groups."""
    height, width = x.shape[2:]
    size = weight.shape[-1]
    tall, wide = height + 2 * around - size + 1, width + 2 * around - size + 1
    x = jnp.pad(x, ((0, 0), (0, 0), (around, around), (around, around)))
    patches = [x[:, :, i : i + tall, j : j + wide] for i in range(size) for j in range(size)]
    return (
        jnp.einsum("kncij,ock->noij", jnp.stack(patches), weight.reshape(*weight.shape[:2], -1))
        + (bias[:, None, None])
    )


def pooled(x: Any) -> Any:
    n, channels, height, width = x.shape
    return jax.nn.relu(x).reshape(n, channels, height // 2, 2, width // 2, 2).max((3, 5))


def cnn6k(weights: Weights, x: Any) -> Any:
    x = pooled(convolved(x.reshape(-1, 1, 8, 8), weights[0], weights[1], 1))
    x = pooled(convolved(x, weights[2], weights[3], 1))
    return mlp(weights[4:], x.reshape(len(x), -1))


def lstm12k(weights: Weights, x: Any) -> Any:
    of_input, of_hidden, bias1, bias2, *head = weights
    rows = jnp.swapaxes(x.reshape(-1, 8, 8), 0, 1) @ of_input.T + bias1 + bias2

    def step(carry: Any, row: Any) -> Any:
        hidden, cell = carry
        i, f, g, o = jnp.split(row + hidden @ of_hidden.T, 4, -1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(cell), cell), None

    zero = jnp.zeros((len(x), 48))
    return mlp(head, lax.scan(step, (zero, zero), rows)[0][0])


def block(weights: Weights, x: Any) -> Any:
    def normed(x: Any, scale: Any, shift: Any) -> Any:
        spread = jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return (x - x.mean(-1, keepdims=True)) / spread * scale + shift

    scale1, shift1, qkv, qkv_bias, out, out_bias, scale2, shift2, *rest = weights
    n, length, _ = x.shape
    seen = normed(x, scale1, shift1) @ qkv.T + qkv_bias
    q, k, v = seen.reshape(n, length, 3, 2, 16).transpose(2, 0, 3, 1, 4)
    seen = jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / 4) @ v
    x = x + jnp.swapaxes(seen, 1, 2).reshape(n, length, 32) @ out.T + out_bias
    return x + mlp(rest, normed(x, scale2, shift2))


def transformer(weights: Weights, x: Any) -> Any:
    place, token, bias, *rest = weights
    x = block(rest[12:24], block(rest[:12], x.reshape(-1, 16, 4) @ token.T + bias + place))
    return mlp(rest[24:], x.mean(1))


FORWARD = {
    "mlp5k": mlp, "mlp50k": mlp, "mlp500k": mlp, "cnn6k": cnn6k, "lstm12k": lstm12k,
    "transformer": transformer,
}  # fmt: skip


def padded(sites: list[list[Batch]]) -> tuple[Any, Any, Any]:
    """x [sites, steps, batch, ...], y and the examples' weights, 1 or 0 [sites, steps, batch]."""
    steps = max(len(batches) for batches in sites)
    most = max(len(y) for batches in sites for _, y in batches)
    x = np.zeros((len(sites), steps, most, *sites[0][0][0].shape[1:]), np.float32)
    y, there = np.zeros(x.shape[:3], np.int32), np.zeros(x.shape[:3], np.float32)
    for i, batches in enumerate(sites):
        for j, (inputs, targets) in enumerate(batches):
            x[i, j, : len(targets)], y[i, j, : len(targets)] = inputs, targets
            there[i, j, : len(targets)] = 1
    return jnp.asarray(x), jnp.asarray(y), jnp.asarray(there)


def main() -> None:
    name, work = given()
    forward = FORWARD[work.model]

    def loss(weights: Weights, x: Any, y: Any, there: Any) -> Any:
        scores = jax.nn.log_softmax(forward(weights, x))
        of_each = -jnp.take_along_axis(scores, y[:, None], 1)[:, 0]
        return (of_each * there).sum() / jnp.maximum(there.sum(), 1)

    def trained(weights: Weights, x: Any, y: Any, there: Any) -> Weights:
        def step(weights: Weights, batch: Any) -> Any:
            gradients = jax.grad(loss)(weights, *batch)
            return [w - work.lr * g for w, g in zip(weights, gradients, strict=True)], None

        return list(lax.scan(step, weights, (x, y, there))[0])

    @jax.jit
    def averaged(weights: Weights, x: Any, y: Any, there: Any) -> Weights:
        found = jax.vmap(trained, (None, 0, 0, 0))(weights, x, y, there)
        share = there.sum((1, 2)) / there.sum()
        return [jnp.tensordot(share, each, 1) for each in found]

    weights, rounds = [jnp.asarray(w) for w in work.weights], [padded(sites) for sites in work.rounds]
    for shapes in {batch[0].shape: batch for batch in rounds}.values():
        jax.block_until_ready(averaged(weights, *shapes))  # each shape is compiled once, outside of the clock
    for number in turns():
        weights = jax.block_until_ready(averaged(weights, *rounds[number % len(rounds)]))
        if number == 0:
            work.done(name, [np.asarray(w) for w in weights])


if __name__ == "__main__":
    main()
