"""What a peer is given to do, and how it is asked to do it; without torch, for an environment that has none.

The work is a file that benchmarks/simulate.py writes: the initial weights, and for a few rounds each drawn
site's batches in the order in which the site takes them. So every peer trains on the same examples, and draws
and shuffles nothing itself.

A peer takes turns with others: a line on its standard input asks for rounds for so many seconds, and a line
of JSON on its standard output says how many were done in how many. Its first turn is one round.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Batch = tuple[Array, Array]  # x [examples, ...], y [examples]


@dataclass(frozen=True)
class Work:
    """Rounds of federated averaging: a site takes a step of SGD for each of its batches, and the mean of the
    sites' models, weighted by examples, is the next model."""

    path: Path
    model: str  # of models.MODELS
    lr: float
    batch_size: int
    weights: list[Array]  # the initial ones, in the order of torch's parameters()
    x: Array
    y: Array
    sizes: Array  # [rounds, sites]: examples of each site of each round
    order: Array  # [sum of sizes]: where these examples are in x and y

    @classmethod
    def load(cls, path: Path) -> Work:
        with np.load(path) as file:
            found = dict(file)
        named = {name: found[name] for name in ("x", "y", "sizes", "order")}
        weights = [found[f"weights_{i}"] for i in range(len(found) - 7)]
        numbers: Any = {"lr": float(found["lr"]), "batch_size": int(found["batch_size"])}
        return cls(path, str(found["model"]), weights=weights, **named, **numbers)

    def save(self) -> None:
        """Write it to its path."""
        weights: Any = {f"weights_{i}": value for i, value in enumerate(self.weights)}
        np.savez(
            self.path, model=self.model, lr=self.lr, batch_size=self.batch_size, x=self.x, y=self.y,
            sizes=self.sizes, order=self.order, **weights,
        )  # fmt: skip

    @cached_property
    def rounds(self) -> list[list[list[Batch]]]:
        """The batches of each site of each round. A run that goes on begins with the first round again."""
        found, at = [], 0
        for sizes in self.sizes.tolist():
            sites = []
            for size in sizes:
                taken = self.order[at : at + size]
                spans = [taken[i : i + self.batch_size] for i in range(0, size, self.batch_size)]
                sites.append([(self.x[span], self.y[span]) for span in spans])
                at += size
            found.append(sites)
        return found

    def done(self, name: str, weights: Sequence[Array]) -> None:
        """Keep the model that a peer of this name has after its first round, to be compared."""
        np.save(self.path.parent / f"{name}.npy", np.concatenate([np.ravel(w) for w in weights]))


def turns() -> Iterator[int]:
    """The numbers of the rounds to do, from 0 on, as they are asked for; asking for one ends the last."""
    number = 0
    for line in sys.stdin:
        asked_s, first, began = float(line), number, time.perf_counter()
        lasted = -1.0
        while lasted < asked_s:
            yield number
            number += 1
            lasted = time.perf_counter() - began
        print(json.dumps({"rounds": number - first, "seconds": lasted}), flush=True)


def given() -> tuple[str, Work]:
    """The name of this peer and its work, from the command line."""
    return sys.argv[1], Work.load(Path(sys.argv[2]))
