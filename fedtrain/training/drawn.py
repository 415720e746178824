"""Draw each simulated site's examples from the pool for itself: for more sites than the pool has examples.

A site's examples depend on (seed, site) alone, so nothing is kept of a site that takes no part. No example is
twice at a site; two sites may have the same one. A site has simulate.min_examples at least. Sizes and labels
of the others have the law that `partition` gives them when there are many sites, with `examples` on average:

    iid            `examples` at random
    dirichlet:a    of each label examples * (the label's part of the pool) * Gamma(a) / a, rounded at random:
                   shares from Dirichlet(a) are gammas divided by their sum, which is n * a for n sites
    shards:k       k pieces of examples / k, of the pool sorted by label
    quantity:a     examples * Gamma(a) / a at random
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..digest import seed_of
from ..errors import ConfigError

Indices = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Drawn:
    """Sites whose examples are drawn from one pool."""

    labels: Indices  # of each example, from 0; all 0 for a kind that does not look at labels
    kind: str  # of partition.KINDS
    value: float  # its number
    examples: int  # at a site, on average
    seed: int
    least: int = 1  # at a site

    def __post_init__(self) -> None:
        fewest = max(self.least, int(self.value) if self.kind == "shards" else 1)
        if not fewest <= self.examples <= len(self.labels):
            raise ConfigError(
                f"simulate.examples: {self.examples} examples can't be drawn for a site as {self.kind!r} "
                f"from a pool of {len(self.labels)}: use {fewest} to {len(self.labels)}, with "
                f"simulate.min_examples = {self.least}."
            )

    def part(self, site: str) -> Indices:
        """The ascending indices of the site's examples."""
        rng = self._generator(site)
        if self.kind == "shards":
            return self._pieces(rng)
        expected = self._by_label.counts * (self.examples / len(self.labels))
        if self.kind == "iid":
            return self._by_label.draw(rng, np.log(expected), self.least)
        # Gamma(a) by logarithms, as for a small a nearly all gammas would round to 0.
        size, a = len(expected), self.value
        logs = np.log(rng.gamma(a + 1, size=size)) + np.log1p(-rng.random_sample(size)) / a - np.log(a)
        return self._by_label.draw(rng, np.log(expected) + logs, self.least)

    def alike(self, site: str, others: Indices) -> Indices:
        """The site's indices among other examples with these labels, from the same labels' numbers: of each
        label as large a part as of the pool's, and of a new one as the site has of all."""
        own = np.bincount(self.labels[self.part(site)], minlength=len(self._by_label.counts)).astype(float)
        pool = self._by_label.counts.astype(float)
        new = max(0, int(others.max()) + 1 - len(pool))
        share = own.sum() / pool.sum()
        having = np.append(np.divide(own, pool, out=np.full_like(own, share), where=pool > 0), [share] * new)
        by_label = _ByLabel.of(others, len(having))
        with np.errstate(divide="ignore"):
            return by_label.draw(self._generator("others", site), np.log(having * by_label.counts))

    def _generator(self, *what: object) -> np.random.RandomState:
        """Seeded anew, which is ten times as fast as a new one. A RandomState, because its streams are
        frozen: a draw is the same with every version of numpy."""
        seed = seed_of(self.seed, *what)
        self._random.seed([seed & 0xFFFFFFFF, seed >> 32])
        return self._random

    @cached_property
    def _random(self) -> np.random.RandomState:
        return np.random.RandomState(0)

    @cached_property
    def _by_label(self) -> _ByLabel:
        return _ByLabel.of(self.labels, int(self.labels.max()) + 1)

    @cached_property
    def _shuffled(self) -> Indices:
        """The pool sorted by label, at random within each."""
        order = self._generator().permutation(len(self.labels))
        return order[np.argsort(self.labels[order], kind="stable")]

    def _pieces(self, rng: np.random.RandomState) -> Indices:
        each, count = int(self.value), len(self.labels)
        most = count // -(-self.least // each)  # pieces of which so many have enough examples
        pieces = max(each, min(most, count * each // self.examples))
        chosen = _chosen(rng, pieces, each)
        return np.sort(np.concatenate([
            self._shuffled[i * count // pieces : (i + 1) * count // pieces] for i in chosen
        ]))  # fmt: skip


@dataclass(frozen=True)
class _ByLabel:
    """Examples sorted by label."""

    order: Indices  # [examples]
    starts: Indices  # [labels], where each label begins
    counts: Indices  # [labels]

    @classmethod
    def of(cls, labels: Indices, size: int) -> _ByLabel:
        counts = np.bincount(labels, minlength=size)
        return cls(np.argsort(labels, kind="stable"), np.cumsum(counts) - counts, counts)

    def draw(self, rng: np.random.RandomState, logs: Numbers, least: int = 1) -> Indices:
        """Of each label exp(logs) examples, rounded at random and no more than there are; where that is less
        than `least` in all, more of the labels that have most."""
        wanted = np.exp(np.minimum(logs, np.log(self.counts.max()) + 1))
        sizes = np.minimum(np.floor(wanted + rng.random_sample(len(logs))), self.counts).astype(np.int64)
        if sizes.sum() < least:
            for label in np.argsort(-logs, kind="stable"):
                sizes[label] += min(least - sizes.sum(), self.counts[label] - sizes[label])
        parts = [
            self.order[self.starts[label] + _chosen(rng, int(self.counts[label]), int(sizes[label]))]
            for label in np.flatnonzero(sizes)
        ]
        return np.sort(np.concatenate(parts))


def _chosen(rng: np.random.RandomState, count: int, size: int) -> Indices:
    """So many different numbers below `count`, each set of them as likely as any other."""
    if 2 * size > count:
        return rng.permutation(count)[:size]
    found = np.sort(rng.randint(count, size=size))
    while (found[1:] == found[:-1]).any():
        found = np.unique(found)
        found = np.sort(np.append(found, rng.randint(count, size=size - len(found))))
    return found
