"""A set of examples dealt to the data-parallel ranks, batch by batch.

train.batch_size is what all ranks take together, so the batches, and the place in them, are the same in
any world: a rank's share of one is a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import ConcatDataset

from ...config import Config, TrainConfig
from ...digest import seed_of
from ...errors import ConfigError, TaskError
from ...messages import SiteId
from ..batches import Batch, cut, examples_in
from ..engine import over
from ..examples import Collate, Items, Stream, Tensors, examples_of
from ..mesh import Mesh
from ..partition import SimulatedSites
from ..sampler import Draws, Order, Sampler, in_order, share_of
from ..task import Task
from .alike import Check
from .reading import (
    CPU,
    Choice,
    LoaderChoice,
    ReadAhead,
    Share,
    ShareReader,
    can_be_read_apart,
    too_few,
    too_few_in_loader,
)


class Dealt:
    """Whatever Task.data returned: tensors and datasets by a Sampler, a DataLoader by its own one, so that
    each rank reads its share alone; other streams in their own order, of which the batches already taken are
    read again and passed over."""

    def __init__(
        self, data: Any, train: TrainConfig, run_seed: int, name: str, rank: int = 0, ranks: int = 1,
        collate: Collate | None = None, readers: int = 0, device: torch.device = CPU,
    ) -> None:  # fmt: skip
        """`name`: whose data it is; a part of the seed of its order. `collate`: as of examples_of. `readers`:
        processes that read ahead; `device`: where what they read is to be."""
        self.examples = examples_of(data, collate)
        self.first: Check | None = None  # compares a stream's first batch among ranks
        self.train, self.run_seed, self.name, self.rank, self.ranks = train, run_seed, name, rank, ranks
        self._readers, self._device = readers, device
        # The dataset's own order, where it has one (of shards, say); else all examples shuffled.
        own = getattr(self.examples.dataset, "order", None) if isinstance(self.examples, Items) else None
        order = None if own is None else lambda seed: torch.as_tensor(own(seed))
        self._feed = self._deal(seed_of(run_seed, name), order, resumes=True)

    @property
    def epoch(self) -> int:
        """Whole passes taken; where rounds begin afresh, in this round."""
        return self._feed.epoch

    def example(self) -> Batch | None:
        """Some examples, for whoever must see a batch beforehand; None of a stream."""
        if isinstance(self.examples, Stream):
            loader: Any = self.examples.source
            if not can_be_read_apart(loader) or loader.batch_size is None:
                return None
            most = min(loader.batch_size, len(loader.dataset))
            if most < self.ranks:
                raise too_few_in_loader(most, self.ranks)
            with Draws(0):
                rows = [*range(most // self.ranks)]
                return ShareReader(loader.dataset, loader.collate_fn)[self.run_seed, rows]
        size = min(self.train.batch_size or self.examples.count, self.examples.count)
        return self.examples.take(torch.arange(size // self.ranks))

    def begin(self, round: int, draw: int = 0) -> None:
        """From here on in the order that a site of this name has in this round, in this `draw` of it (see
        learning.Local), whether of one process or of several."""
        first = seed_of(self.run_seed, round, self.name)
        seed = seed_of(first, draw) if draw else first
        generator, count = torch.Generator().manual_seed(seed), self.examples.count
        self._feed = self._deal(seed, lambda _: torch.randperm(count, generator=generator), resumes=False)

    def round(self) -> Iterator[list[Share]]:
        """All steps of the round that was begun."""
        for steps in count():
            if over(self.train, steps, self.epoch):
                return
            yield self.take()

    def take(self) -> list[Share]:
        """The batches of the next optimizer step: this rank's share of each, None where it has none, and how
        many examples all ranks' shares hold together. The last step of an epoch may have fewer."""
        if isinstance(self._feed, Streamed):
            check, self.first = self.first, None
            return self._feed.take(check)
        if not isinstance(self._feed, Sampler):
            return self._feed.take()
        assert not isinstance(self.examples, Stream), "a stream has no sampler"
        take = self.examples.take
        return [(take(share.mine) if len(share.mine) else None, share.total) for share in self._feed.take()]

    def state_dict(self) -> dict[str, Any]:
        """Where the next take() begins: plain numbers."""
        return self._feed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, whatever was taken before."""
        self._feed.load_state_dict(state)

    def _deal(self, seed: int, order: Order | None, *, resumes: bool) -> Sampler | ReadAhead | Streamed:
        """From the first batch on. `order`: of examples that are no stream; `resumes`: see Streamed."""
        train, rank, ranks = self.train, self.rank, self.ranks
        if isinstance(self.examples, Stream):
            loader: Any = self.examples.source
            if not can_be_read_apart(loader):
                return Streamed(self.examples, train, seed, rank, ranks, resumes=resumes)
            apart = LoaderChoice(self.examples, train.accumulate, seed, rank, ranks, resumes=resumes)
            return self._ahead(loader.dataset, loader.collate_fn, apart, loader.num_workers)
        if not (count := self.examples.count):
            raise TaskError(f"{self.name} has no examples: data() is empty")
        size = min(train.batch_size or count, count)
        if count < ranks:
            raise too_few(f"data() gives {count} example{'s' * (count > 1)} in all", ranks)
        if size < ranks:
            raise ConfigError(
                f"train.batch_size: {size} examples can't be shared by {ranks} data-parallel ranks. "
                f"It is what they take together: raise it to a multiple of {ranks}."
            )
        whole = size == count  # one batch: its order is nobody's concern
        sampler = Sampler(
            count, size, seed=seed, rank=rank, ranks=ranks, accumulate=train.accumulate,
            drop_last=train.drop_last, order=in_order(count) if whole else order,
        )  # fmt: skip
        if not isinstance(self.examples, Items):
            return sampler
        return self._ahead(self.examples.dataset, self.examples.collate, sampler, self._readers)

    def _ahead(
        self, dataset: Any, collate: Callable[[list[Any]], Batch], choice: Choice, processes: int
    ) -> ReadAhead:
        return ReadAhead(dataset, collate, choice, processes, self._device)


class Streamed:
    """Batches that only their own iterator has: every rank reads all of them and keeps its slice of each.

    What a loader draws (its shuffling, an augmentation) comes from the seed, so all ranks read the same
    batches: in a run that resumes anew for each batch of each pass, so that it reads those of one that never
    stopped; in a round of a site once, so that it reads those of a site of one process.
    """

    def __init__(
        self, examples: Stream, train: TrainConfig, seed: int, rank: int, ranks: int, *, resumes: bool
    ) -> None:
        self.examples, self.train, self.seed, self.rank, self.ranks = examples, train, seed, rank, ranks
        self._draws = None if resumes else Draws(seed)
        self.epoch = self._taken = 0  # _taken: batches of the present pass
        self._pass: Iterator[Batch] | None = None
        self._next: list[Batch] = []  # read ahead, so that the end of a pass is seen with its last batch

    def take(self, check: Check | None = None) -> list[Share]:
        """The batches of the next step. `check`: of the first one."""
        if self._pass is None:
            own, seed, epoch = self._draws, self.seed, self.epoch
            draws = (own or Draws(seed_of(seed, epoch, number)) for number in count())
            self._pass = islice(passed(self.examples, self.train, draws), self._taken, None)
            self._next = list(islice(self._pass, 1))
            if not self._next:
                raise TaskError("data() gave its batches only once: return a list or a DataLoader")
        step = [*self._next, *islice(self._pass, self.train.accumulate - 1)]
        if check is not None:
            check.batch(step[0])
        self._next = list(islice(self._pass, 1))
        self._taken += len(step)
        if not self._next:
            self.epoch, self._taken, self._pass = self.epoch + 1, 0, None
        return [self._share(batch) for batch in step]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "taken": self._taken, "count": -1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._taken, self._pass = int(state["epoch"]), int(state["taken"]), None

    def _share(self, batch: Batch) -> Share:
        total = examples_in(batch)
        low, high = share_of(total, self.rank, self.ranks)
        return (cut(batch, low, high) if high > low else None), total


def passed(examples: Stream, train: TrainConfig, draws: Iterable[Draws]) -> Iterator[Batch]:
    """Every batch of a pass. Nothing here knows who takes them: so a loader's workers end as soon as nobody
    does, and not when Python comes to look for garbage, which may be in one of them."""
    batches = examples.batches(train.batch_size, train.drop_last, None)
    for own in draws:
        with own:
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def pooled(sets: list[Any]) -> Any:
    """The data of several sites as one set."""
    if len(sets) == 1:
        return sets[0]
    examples = [examples_of(data) for data in sets]
    tensors = [e for e in examples if isinstance(e, Tensors)]
    if len(tensors) == len(sets):
        columns = zip(*(e.columns for e in tensors), strict=True)
        return tensors[0].build([torch.cat(pieces) for pieces in columns])
    if all(isinstance(e, Items) for e in examples):
        return ConcatDataset(sets)
    raise TaskError(
        "data() gives batches or streams, and those of several sites can't be pooled. Return a Dataset, with "
        "collate() where its batches want one; or let sites() return one name."
    )


# --- whose data


def sites_of(task: Task, config: Config, islands: int) -> SimulatedSites:
    """The task's natural sites, or its pool; with islands, dealt to them as [simulate] deals it to sites."""
    return SimulatedSites(task, replace(config.simulate, sites=islands, examples=0), config.run.seed)


def data_of(sites: SimulatedSites, mesh: Mesh) -> tuple[SiteId, Any]:
    """An island's name and examples. Where there are more natural sites than islands, they are dealt out."""
    if len(sites.names) < mesh.islands:
        raise ConfigError(
            f"parallel.sync = local: {mesh.islands} islands, but the task has {len(sites.names)} sites. "
            f"Use parallel.replicate = {len(sites.names)} or fewer."
        )
    names = sites.names[mesh.island :: mesh.islands]
    return names[0], pooled([sites.data(name) for name in names])


def pool_of(sites: SimulatedSites) -> Any:
    """The data of all sites."""
    return pooled([sites.data(name) for name in sites.names]) if sites.natural else sites.pool
