"""How fast peers agree, by theory: rounds and bytes until 1e-3 of the first disagreement is left.

Mₜ is the product of the first t mixing matrices; with push-sum weights each row of Mₜ is divided by its sum,
as the models are by their mass. After t rounds a disagreement of random models is ‖Mₜ − 11ᵀ/n‖_F / √(n − 1)
of the first one; the worst start has ‖Mₜ − 11ᵀ/n‖₂.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import numpy as np

from ..config import require
from . import Topology
from .coalitions import smallest
from .mixing import Matrix

GOAL = 1e-3
EXACT = 1e-12  # a deviation that counts as 0, given float64's rounding
MOST_ROUNDS = 1 << 24  # rounds searched for a graph that repeats
MOST_DRAWS = 4096  # rounds searched for a graph that never repeats
DRAWS = 9  # seeds tried for a graph that never repeats; the report has their median


@dataclass(frozen=True)
class Report:
    """The figures of a topology for a number of peers."""

    topology: str
    weights: str
    peers: int
    period: int  # rounds until the graph repeats; 0: never
    degree: int  # the most peers to which one peer sends in a round
    sends: float  # models that a peer sends in a round, on average
    sigma: float  # σ₂ of a period's product, a round; of a graph that never repeats, the mean rate to 1e-3
    exact_after: int | None  # rounds after which all models are the mean; None: never
    rounds: int | None  # rounds to 1e-3 from a random start; None: more than were searched
    masks: str = ""  # under masks, which peers together learn a model; "": no masks, or too many peers to try

    @property
    def gap(self) -> float:
        """The spectral gap, 1 − σ₂."""
        return 1 - self.sigma

    @property
    def models(self) -> float | None:
        """The number of models that a peer sends until 1e-3 is reached."""
        return None if self.rounds is None else self.rounds * self.sends

    def lines(self, parameters: int) -> list[str]:
        """The report as text, for a model with this number of float32 parameters."""
        rounds = f"more than {MOST_ROUNDS if self.period else MOST_DRAWS}"
        sent = "unknown"
        if self.rounds is not None and self.models is not None:
            rounds = str(self.rounds)
            if self.exact_after is not None:
                rounds += f" (exact after {self.exact_after})"
            each = 4 * parameters
            sent = f"{_size(self.models * each)} a peer: {self.models:g} models of {_size(each)}"
        period = "the same in every round" if self.period == 1 else f"repeats after {self.period} rounds"
        return [
            f"{self.topology}, {self.peers} peers, {self.weights} weights",
            f"graph           {period if self.period else 'another in every round'}",
            f"degree          {self.degree}, {self.sends:.3g} models sent a round",
            f"spectral gap    {self.gap:.4g} (σ₂ = {self.sigma:.4g} a round)",
            f"rounds to 1e-3  {rounds}",
            f"bytes to 1e-3   {sent}",
            *([f"under masks     {self.masks}"] if self.masks else []),
        ]


def report(topology: Topology, n: int, seed: int = 0) -> Report:
    """The figures of a topology of n peers; ConfigError when the peers could never agree."""
    require(n >= 1, "topology", f"{n} peers: at least 1 is needed")
    topology.check(n, seed)
    period = topology.period(n)
    found = [rounds_to(topology, n, GOAL, seed + draw) for draw in range(1 if period else DRAWS)]
    rounds = None if None in found else median_low(filter(None, found)) if n > 1 else 0
    seen = [topology.round(n, t, seed) for t in range(period or min(rounds or MOST_DRAWS, 64))]
    if period:
        sigma = deviation(product(topology, n, period, seed)) ** (1 / period)
        exact = next(
            (t for t in range(1, period + 1) if deviation(product(topology, n, t, seed)) < EXACT), None
        )
    else:
        sigma, exact = GOAL ** (1 / rounds) if rounds else 1.0, None
    return Report(
        topology=str(topology),
        weights=topology.weights or topology.family.weights,
        peers=n,
        period=period,
        degree=max(mixing.degree for mixing in seen),
        sends=float(np.mean([len(mixing.edges) for mixing in seen])) / n,
        sigma=0.0 if exact is not None else sigma,
        exact_after=exact,
        rounds=rounds,
        masks=smallest(topology, n, seed),
    )


def product(topology: Topology, n: int, t: int, seed: int = 0) -> Matrix:
    """Mₜ, float64 [n, n], before its rows are divided by their sums."""
    m = np.eye(n)
    for number in range(t):
        m = topology.round(n, number, seed).matrix @ m
    return m


def deviation(m: Matrix) -> float:
    """σ₂, the part of the worst disagreement that is left: ‖M − 11ᵀ/n‖₂ with rows divided by their sums."""
    return float(np.linalg.norm(_from_mean(m), 2))


def left(m: Matrix) -> float:
    """The part of a random disagreement that is left, ‖M − 11ᵀ/n‖_F / √(n − 1)."""
    return float(np.linalg.norm(_from_mean(m))) / math.sqrt(max(1, len(m) - 1))


def _from_mean(m: Matrix) -> Matrix:
    rows: Matrix = m / m.sum(1, keepdims=True) - 1 / len(m)
    return rows


def rounds_to(topology: Topology, n: int, goal: float, seed: int = 0) -> int | None:
    """Rounds until the part `goal` of a random disagreement is left; None for more than were searched.

    The product over a period is squared again and again, then a binary search finds the round; so a ring of
    a thousand peers costs no more than a few dozen products.
    """
    if n == 1:
        return 0
    period = topology.period(n)
    if not period:
        return next((t for t, m in enumerate(_products(topology, n, seed), 1) if left(m) <= goal), None)
    powers = [product(topology, n, period, seed)]
    while left(powers[-1]) > goal:
        if period << len(powers) > MOST_ROUNDS:
            return None
        powers.append(powers[-1] @ powers[-1])
    m, periods = np.eye(n), 0
    for exponent in range(len(powers) - 2, -1, -1):  # the most periods that don't reach the goal
        if left(further := powers[exponent] @ m) > goal:
            m, periods = further, periods + (1 << exponent)
    for t in range(period):
        m = topology.round(n, t, seed).matrix @ m
        if left(m) <= goal:
            return periods * period + t + 1
    raise AssertionError((str(topology), n))


def _products(topology: Topology, n: int, seed: int) -> Iterator[Matrix]:
    m = np.eye(n)
    for t in range(MOST_DRAWS):
        m = topology.round(n, t, seed).matrix @ m
        yield m


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def draw(topology: Topology, n: int, path: Path, seed: int = 0) -> None:
    """Draw the graph into an image (matplotlib); for a graph that changes, its first rounds side by side."""
    from matplotlib.figure import Figure

    shown = min(topology.period(n) or 4, 6)
    angles = np.pi / 2 - 2 * np.pi * np.arange(n) / n
    x, y = np.cos(angles), np.sin(angles)
    figure = Figure(figsize=(4 * shown, 4.4), layout="constrained")
    for t in range(shown):
        mixing = topology.round(n, t, seed)
        edges = {(j, i) for j, i, _ in mixing.edges}
        axes = figure.add_subplot(1, shown, t + 1, aspect="equal")
        for j, i in sorted(edges):
            if (i, j) not in edges:
                arrow = {"arrowstyle": "->", "color": "tab:blue", "shrinkA": 6, "shrinkB": 6}
                axes.annotate("", (x[i], y[i]), (x[j], y[j]), arrowprops=arrow)
            elif j < i:
                axes.plot(x[[i, j]], y[[i, j]], color="tab:blue", linewidth=1, zorder=1)
        axes.scatter(x, y, s=max(8, 120 - n), color="black", zorder=2)
        if n <= 40:
            for name, at_x, at_y in zip(mixing.members, 1.13 * x, 1.13 * y, strict=True):
                axes.text(at_x, at_y, name, ha="center", va="center", fontsize=8)
        title = f"{topology}, round {t + 1}" if shown > 1 else str(topology)
        axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), title=title)
        axes.axis("off")
    figure.savefig(path, dpi=110)
