"""Attacks on a federation: what hostile sites, who know everything, send in place of honest updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
# (the honest sites' updates [h, d], what the hostile sites' own training found [f, d], randomness) -> [f, d]
Forge = Callable[[Array, Array, np.random.Generator], Array]


@dataclass(frozen=True)
class Attack:
    """What hostile sites do."""

    forge: Forge
    flips: bool = False  # they train on flipped labels


def as_found(honest: Array, own: Array, draw: np.random.Generator) -> Array:
    """What they found."""
    return own


def sign(honest: Array, own: Array, draw: np.random.Generator) -> Array:
    """Five times what they found, with the other sign."""
    return -5 * own


def gaussian(honest: Array, own: Array, draw: np.random.Generator) -> Array:
    """White noise, ten times as long as an honest update."""
    noise = draw.standard_normal(own.shape)
    length = 10 * np.linalg.norm(honest, axis=1).mean()
    scaled: Array = noise * length / np.linalg.norm(noise, axis=1, keepdims=True)
    return scaled


def inner_product(epsilon: float) -> Forge:
    """−ε times the honest mean, all alike (Xie et al. 2020, inner product manipulation)."""
    return lambda honest, own, draw: np.tile(-epsilon * honest.mean(axis=0), (len(own), 1))


def a_little(z: float) -> Forge:
    """The honest mean less z standard deviations in each coordinate, all alike (Baruch et al. 2019, ALIE)."""
    return lambda honest, own, draw: np.tile(honest.mean(axis=0) - z * honest.std(axis=0), (len(own), 1))


def scaled(honest: Array, own: Array, draw: np.random.Generator) -> Array:
    """Ten times what they found, to replace the model (Bagdasaryan et al. 2020)."""
    return 10 * own


ATTACKS: dict[str, Attack] = {
    "none": Attack(as_found),
    "sign": Attack(sign),
    "gaussian": Attack(gaussian),
    "ipm 0.6": Attack(inner_product(0.6)),
    "ipm 10": Attack(inner_product(10.0)),
    "alie": Attack(a_little(1.2)),
    "label flip": Attack(as_found, flips=True),
    "scaling": Attack(scaled, flips=True),
}
