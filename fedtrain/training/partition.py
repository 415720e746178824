"""Partition one pool of examples among many simulated sites: iid, skewed by label, or skewed by size.

    iid            equal shares at random
    dirichlet:0.3  each label's examples are dealt in shares from Dirichlet(0.3); smaller is more skewed
    shards:2       examples sorted by label and cut into pieces; each site gets 2 pieces (McMahan et al. 2017)
    quantity:0.5   random examples, in shares from Dirichlet(0.5); smaller is more skewed

Every example goes to exactly one site. A site that is dealt fewer than simulate.min_examples gets the others
from the sites that have most. With simulate.examples sites draw their examples instead (drawn.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import SimulateConfig, one_of
from ..digest import seed_of
from ..errors import ConfigError, TaskError, some
from ..population import Population
from .drawn import Drawn, Indices
from .task import Task, folder_of, test_split, user_code

LABELS = "label", "labels", "target", "y"  # names of a column that may be the labels
CENTRAL = "central"  # in place of a site: evaluates the one pool of data
KINDS = {"iid": None, "dirichlet": 0.3, "shards": 2.0, "quantity": 0.5}  # name -> an example of the number


def parse(spec: str) -> tuple[str, float]:
    """("dirichlet", 0.3) of "dirichlet:0.3"; the number is 0 for a kind without one."""
    kind, colon, number = spec.partition(":")
    one_of("simulate.partition", kind, KINDS)
    example = KINDS[kind]
    if example is None:
        if colon:
            raise ConfigError(f'simulate.partition: {spec!r}: {kind} takes no number, write "{kind}"')
        return kind, 0.0
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf") or (kind == "shards" and value != int(value)):
        sort = "whole number" if kind == "shards" else "number"
        raise ConfigError(f'simulate.partition: {spec!r} needs a positive {sort}, as in "{kind}:{example:g}"')
    return kind, value


def partition(
    labels: Sequence[Any] | Any | int, spec: str, sites: int, seed: int, least: int = 1
) -> list[Indices]:
    """The ascending indices of each site's examples, `least` of them or more. `labels`: a label for each
    example, or the number of examples for kinds that need no labels. ConfigError when there are too few
    examples."""
    return _fill(_dealt(labels, spec, sites, seed, least), least)


def _dealt(labels: Sequence[Any] | Any | int, spec: str, sites: int, seed: int, least: int) -> list[Indices]:
    """The indices of each site's examples as they are dealt, fewer than `least` of some."""
    kind, value = parse(spec)
    by_label = kind in ("dirichlet", "shards")
    if isinstance(labels, int) and by_label:
        raise ConfigError(f"simulate.partition: {spec!r} needs the labels, not only how many there are")
    count = labels if isinstance(labels, int) else len(labels)
    pieces = sites * int(value) if kind == "shards" else sites
    if sites < 1 or count < max(pieces, sites * least):
        fewer = f" or simulate.min_examples = {least}" if count >= pieces else ""
        raise ConfigError(
            f"simulate.partition: {count} examples can't be dealt to {sites} sites as {spec!r}, "
            f"at least {max(pieces, sites * least, 1)} are needed. Lower simulate.sites = {sites}{fewer}, or "
            f"have each site draw its own with simulate.examples."
        )
    # RandomState, because its streams are frozen: a partition is the same with every version of numpy.
    rng = np.random.RandomState(np.random.MT19937(seed))
    if kind == "iid":
        parts = np.array_split(rng.permutation(count), sites)
    elif kind == "quantity":
        parts = _cut(rng.permutation(count), _shares(rng, value, sites))
    elif kind == "shards":
        order = rng.permutation(count)
        order = order[np.argsort(_codes(labels)[order], kind="stable")]
        shards = np.array_split(order, pieces)
        dealt = rng.permutation(pieces).reshape(sites, -1)
        parts = [np.concatenate([shards[i] for i in row]) for row in dealt]
    else:
        parts = _by_label(rng, _codes(labels), sites, lambda label: _shares(rng, value, sites))
    return parts


def _shares(rng: np.random.RandomState, alpha: float, sites: int) -> npt.NDArray[np.float64]:
    """A draw of Dirichlet(alpha), by logarithms of gammas: for a small alpha all gammas would round to 0."""
    logs = np.log(rng.gamma(alpha + 1, size=sites)) + np.log1p(-rng.random_sample(sites)) / alpha
    shares: npt.NDArray[np.float64] = np.exp(logs - logs.max())
    shares /= shares.sum()
    return shares


def _cut(order: Indices, shares: npt.NDArray[np.float64]) -> list[Indices]:
    return np.split(order, np.rint(np.cumsum(shares)[:-1] * len(order)).astype(int))


def _fill(parts: Sequence[Indices], least: int = 1) -> list[Indices]:
    """The parts, ascending, each with `least` or more: a smaller one gets the last of the part that is the
    largest at that moment, one by one. All together must have as many."""
    filled, sizes = [*parts], [(-len(p), i) for i, p in enumerate(parts)]
    heapq.heapify(sizes)
    for i, part in enumerate(parts):
        for _ in range(len(part), least):
            _, largest = heapq.heappop(sizes)
            filled[i] = np.append(filled[i], filled[largest][-1:])
            filled[largest] = filled[largest][:-1]
            heapq.heappush(sizes, (-len(filled[largest]), largest))
    return [np.sort(part).astype(np.int64) for part in filled]


def alike(parts: Sequence[Indices], labels: Any, others: Any, seed: int) -> list[Indices]:
    """Deal other examples as `parts` deal those of `labels`: each site gets the same share of each label, and
    the share that it has of all where a label is new. ConfigError when there are fewer than sites."""
    labels, others = np.asarray(labels), np.asarray(others)
    if len(others) < len(parts):
        raise ConfigError(
            f"evaluate.every: eval_data() has {len(others)} examples, and each of {len(parts)} sites is to "
            f"evaluate its own model on a part of them. Lower simulate.sites, or set evaluate.every = 0."
        )
    rng = np.random.RandomState(np.random.MT19937(seed))

    def shares(label: Any) -> npt.NDArray[np.float64]:
        having = np.array([np.count_nonzero(labels[part] == label) for part in parts], float)
        having = having if having.any() else np.array([len(part) for part in parts], float)
        share: npt.NDArray[np.float64] = having / having.sum()
        return share

    return _fill(_by_label(rng, others, len(parts), shares))


def _by_label(
    rng: np.random.RandomState, labels: Any, sites: int, shares: Callable[[Any], npt.NDArray[np.float64]]
) -> list[Indices]:
    """The indices of each site's examples, of each label in the shares that the sites get of it."""
    mine: list[list[Indices]] = [[] for _ in range(sites)]
    for label in np.unique(labels):
        cut = _cut(rng.permutation(np.flatnonzero(labels == label)), shares(label))
        for have, more in zip(mine, cut, strict=True):
            have.append(more)
    return [np.concatenate(have) for have in mine]


def _codes(labels: Any) -> Indices:
    """Labels as 0, 1, 2, ... in their sorted order."""
    values = np.asarray(labels)
    if values.ndim != 1 or values.dtype.kind == "f":
        raise ConfigError(
            f"simulate.partition: labels of shape {values.shape} and type {values.dtype} are not classes. "
            f'Use "iid" or "quantity:0.5".'
        )
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def labels_of(data: Any) -> Any:
    """Each example's label: from data()'s .targets or last tensor, else read one by one, or ConfigError."""
    from torch.utils.data import Subset

    from .examples import Items, Tensors, examples_of

    for name in ("targets", "labels"):
        if (known := getattr(data, name, None)) is not None:
            return np.asarray(known)
    if isinstance(data, Subset):
        return labels_of(data.dataset)[np.asarray(data.indices)]
    if isinstance(data, dict) and (named := [name for name in LABELS if name in data]):
        return np.asarray(data[named[0]])
    examples = examples_of(data)
    if isinstance(examples, Tensors) and len(examples.columns) > 1:
        return examples.columns[-1].cpu().numpy()
    if isinstance(examples, Items) and examples.count and isinstance(data[0], tuple | list):
        return np.asarray([int(data[i][-1]) for i in range(examples.count)])
    raise ConfigError(
        f"simulate.partition: data() returned a {type(data).__name__} without labels to go by. "
        f'Give it .targets, or use "iid" or "quantity:0.5".'
    )


def _each_once(natural: Sequence[str]) -> list[str]:
    """The names in their order; TaskError for one that is there twice."""
    names = sorted(natural)
    for name, following in itertools.pairwise(names):
        if name == following:
            raise TaskError(f"sites() returned {name!r} twice: return each name once.")
    return names


class SimulatedSites:
    """The data of each simulated site: the task's natural sites, or a partition of its one pool.

    For a task without sites(), data() is called once, for the first site, and its result is the pool.
    """

    def __init__(self, task: Task, simulate: SimulateConfig, seed: int, *, finished: bool = False) -> None:
        """`finished`: the model is, so that it is evaluated on the test data."""
        self.task, self.simulate, self.seed = task, simulate, seed
        own = type(task).eval_data is not Task.eval_data
        self.split = test_split(task) if finished else "eval_data" if own else "data"
        with user_code(folder_of(task), "sites()"):
            natural = task.sites()
        if natural is not None and not natural:
            raise TaskError(
                "sites() returned no name. Return one for each site, or None for one pool of data."
            )
        self.natural = natural is not None
        self._note = ""  # what simulate.min_examples changed
        self.names: list[str] | Population
        if natural is None:
            self.names = Population(simulate.sites)
        else:
            self.names = natural if isinstance(natural, Population) else _each_once(natural)

    def data(self, site: str) -> Any:
        """The site's training examples."""
        if self.natural:
            return read(self.task, "data", site, self.seed)
        from .examples import Stream, examples_of, subset

        if not self.simulate.examples and isinstance(examples_of(self.pool), Stream):
            return self.pool  # of a single site
        return subset(self.pool, self.part(site))

    def eval_data(self, some: Sequence[str] | None = None) -> dict[str, Any]:
        """The data to evaluate on: each natural site's own set, or only those of `some`, or the pool's single
        set as "central"."""
        if not self.natural and self.split == "data":
            return {CENTRAL: self.pool}
        sites = (self.names if some is None else some) if self.natural else self.names[:1]
        found = {site: read(self.task, self.split, site, self.seed) for site in sites}
        return found if self.natural else {CENTRAL: found[sites[0]]}

    def eval_set(self, site: str) -> Any:
        """What is evaluated under this name: a natural site's own set, the pool's as "central", or a site's
        part of the pool's, which has the site's share of each label."""
        if self.natural or site == CENTRAL:
            return self.eval_data([site])[site]
        from .examples import subset

        if self.split == "data":
            part = self.part(site)
        elif self._drawn is not None:
            part = self._drawn.alike(site, self._eval_codes)
        else:
            part = self._eval_parts[self.names.index(site)]
        return subset(self._eval_pool, part)

    @cached_property
    def _eval_pool(self) -> Any:
        return self.eval_data()[CENTRAL]

    @cached_property
    def _eval_parts(self) -> list[Indices]:
        """Each site's indices in the pool's eval_data()."""
        labels, others = self._labels(self.pool), self._labels(self._eval_pool)
        return alike(self._parts, labels, others, seed_of(self.seed, "partition", "eval"))

    @cached_property
    def _eval_codes(self) -> Indices:
        """Labels of the pool's eval_data(): the place of each in the sorted labels of the pool, new ones
        after them."""
        known, others = np.unique(self._labels(self.pool)), np.asarray(self._labels(self._eval_pool))
        new = np.setdiff1d(others, known)
        order = np.argsort(np.concatenate([known, new]), kind="stable")
        values = np.concatenate([known, new])[order]
        return order[np.searchsorted(values, others)].astype(np.int64)

    def part(self, site: str) -> Indices:
        """The site's indices in the pool, for a task without natural sites."""
        if self._drawn is not None:
            return self._drawn.part(site)
        return self._parts[self.names.index(site)]

    @cached_property
    def _parts(self) -> list[Indices]:
        """Each site's indices in the pool that is dealt."""
        labels, spec, least = self._labels(self.pool), self.simulate.partition, self.simulate.min_examples
        dealt = _dealt(labels, spec, len(self.names), seed_of(self.seed, "partition"), least)
        if few := [name for name, part in zip(self.names, dealt, strict=True) if len(part) < least]:
            self._note = (
                f"simulate.min_examples: {spec} gave {len(few):,} sites fewer than {least} examples "
                f"({some(few)}); {sum(max(0, least - len(part)) for part in dealt):,} examples moved to them "
                f"from the largest sites"
            )
        return _fill(dealt, least)

    def note(self) -> str:
        """What simulate.min_examples changed where one pool is dealt, as a line; "" for nothing."""
        alone = self.natural or self.simulate.examples or len(self.names) == 1
        return self._note if not alone and self._parts else ""

    @cached_property
    def _drawn(self) -> Drawn | None:
        """The sites that draw their examples; None where the pool is dealt."""
        if not self.simulate.examples:
            return None
        kind, value = parse(self.simulate.partition)
        codes, seed = _codes(self._labels(self.pool)), seed_of(self.seed, "examples")
        return Drawn(codes, kind, value, self.simulate.examples, seed, self.simulate.min_examples)

    def _labels(self, data: Any) -> Any:
        """Each example's label; all alike for a partition that does not look at labels."""
        from .examples import examples_of

        by_label = parse(self.simulate.partition)[0] in ("dirichlet", "shards")
        return labels_of(data) if by_label else np.zeros(examples_of(data).count, np.int64)

    @cached_property
    def pool(self) -> Any:
        """All examples of a task without natural sites."""
        from .examples import Stream, as_tensors, examples_of

        found, _ = as_tensors(read(self.task, "data", self.names[0], self.seed))
        if len(self.names) > 1 and isinstance(examples_of(found), Stream):
            raise TaskError(
                f"data() gives batches or a stream ({type(found).__name__}), which can't be dealt to "
                f"{len(self.names)} sites. Return a Dataset or tensors, or name the sites in sites()."
            )
        return found


def read(task: Task, split: str, site: str, run_seed: int) -> Any:
    """What data(), eval_data() or test_data() gives for a site. What it draws from the generators of torch,
    numpy or Python depends on the run's seed, the method and the site, and not on what was read before."""
    import torch

    from .devices import seed_all

    inherited = split == "eval_data" and type(task).eval_data is Task.eval_data
    seed_all(seed_of(run_seed, "data" if inherited else split, site), torch.device("cpu"))
    with user_code(folder_of(task), f"{split}({site!r})"):
        return getattr(task, split)(site)


def draw(labels: Any, parts: Mapping[str, Indices], path: Path, of: int = 0) -> None:
    """Draw the number of examples of each class at each site into an image, one bar a site (matplotlib).
    `of`: how many sites there are; 0: these."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("Drawing a partition needs matplotlib: pip install fedtrain[report]") from None
    codes = _codes(labels)
    classes = np.unique(np.asarray(labels))
    counts = np.stack([np.bincount(codes[part], minlength=len(classes)) for part in parts.values()])
    figure = Figure(figsize=(min(24.0, 2.5 + 0.3 * len(parts)), 4), layout="constrained")
    axes = figure.add_subplot()
    bottom = np.zeros(len(parts))
    for label, number in zip(classes, counts.T, strict=True):
        axes.bar(np.arange(len(parts)), number, bottom=bottom, width=0.85, label=str(label))
        bottom += number
    names = list(parts)
    shown = range(0, len(parts), -(-len(parts) // 40))
    axes.set_xticks(shown, [names[i] for i in shown], rotation=90, fontsize=7)
    axes.set_ylabel("examples")
    if of > len(parts):
        axes.set_xlabel(f"{len(parts):,} of {of:,} sites")
    if len(classes) <= 20:
        axes.legend(title="class", fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
