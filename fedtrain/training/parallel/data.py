"""A set of examples dealt to the data-parallel ranks, batch by batch.

train.batch_size is what all ranks take together, so the batches, and the place in them, are the same in
any world: a rank's share of one is a slice of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import ConcatDataset

from ...config import TrainConfig
from ...digest import seed_of
from ...errors import ConfigError, TaskError
from ..batches import Batch, cut, examples_in
from ..examples import Collate, Items, Stream, Tensors, examples_of
from ..sampler import Order, Sampler, drawing, in_order, share_of

Share = tuple[Batch | None, int]  # a rank's part of a batch, and how many examples the whole batch has


class Dealt:
    """state.Data over whatever Task.data returned: tensors and datasets by a Sampler, which resumes anywhere;
    streams in their own order, of which the batches already taken are read again and passed over."""

    def __init__(
        self,
        data: Any,
        train: TrainConfig,
        run_seed: int,
        name: str,
        rank: int = 0,
        ranks: int = 1,
        collate: Collate | None = None,
    ) -> None:
        """`name`: whose data it is; a part of the seed of its order. `collate`: as of examples_of."""
        self.examples = examples_of(data, collate)
        self.train, self.run_seed, self.name, self.rank, self.ranks = train, run_seed, name, rank, ranks
        self._feed: Sampled | Streamed
        if isinstance(self.examples, Stream):
            self._feed = Streamed(self.examples, train, seed_of(run_seed, name), rank, ranks)
            return
        if not self.examples.count:
            raise TaskError(f"{name} has no examples: data() is empty")
        size = min(train.batch_size or self.examples.count, self.examples.count)
        if size < ranks:
            raise ConfigError(
                f"train.batch_size: {size} examples can't be shared by {ranks} data-parallel ranks. "
                f"It is what they take together: raise it to a multiple of {ranks}."
            )
        self._feed = Sampled(self.examples, self._sampler(self._order_of_run))

    @property
    def epoch(self) -> int:
        """Whole passes taken; where rounds begin afresh, in this round."""
        return self._feed.epoch

    @property
    def steps_an_epoch(self) -> int | None:
        """None of a stream, which ends when it ends."""
        return self._feed.sampler.steps if isinstance(self._feed, Sampled) else None

    def example(self) -> Batch | None:
        """Some examples, for whoever must see a batch beforehand; None of a stream."""
        if isinstance(self.examples, Stream):
            return None
        size = min(self.train.batch_size or self.examples.count, self.examples.count)
        return self.examples.take(torch.arange(max(1, size // self.ranks)))

    def begin(self, round: int) -> None:
        """From here on in the order that a site of this name has in this round of a federation."""
        if isinstance(self.examples, Stream):
            seed = seed_of(self.run_seed, round, self.name)
            self._feed = Streamed(self.examples, self.train, seed, self.rank, self.ranks)
            return
        generator = torch.Generator().manual_seed(seed_of(self.run_seed, round, self.name))
        count = self.examples.count

        def order(_: int) -> torch.Tensor:
            return torch.randperm(count, generator=generator)

        self._feed = Sampled(self.examples, self._sampler(order))

    def take(self) -> list[Share]:
        return self._feed.take()

    def state_dict(self) -> dict[str, Any]:
        return self._feed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._feed.load_state_dict(state)

    def _sampler(self, order: Order) -> Sampler:
        count, train = self.examples.count, self.train
        whole = train.batch_size == 0 or train.batch_size >= count  # one batch: its order is nobody's concern
        return Sampler(
            count, train.batch_size, seed=seed_of(self.run_seed, self.name), rank=self.rank, ranks=self.ranks,
            accumulate=train.accumulate, drop_last=train.drop_last, order=in_order(count) if whole else order,
        )  # fmt: skip

    def _order_of_run(self, seed: int) -> torch.Tensor:
        """The dataset's own, where it has one (of shards, say); else all examples shuffled."""
        own = getattr(self.examples.dataset, "order", None) if isinstance(self.examples, Items) else None
        if own is not None:
            return torch.as_tensor(own(seed))
        return torch.randperm(self.examples.count, generator=torch.Generator().manual_seed(seed))


class Sampled:
    """Tensors or a dataset, by index."""

    def __init__(self, examples: Tensors | Items, sampler: Sampler) -> None:
        self.examples, self.sampler = examples, sampler

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    def take(self) -> list[Share]:
        return [
            (self.examples.take(share.mine) if len(share.mine) else None, share.total)
            for share in self.sampler.take()
        ]

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)


class Streamed:
    """The user's own batches: every rank reads all of them and keeps its slice of each.

    What a loader draws (its shuffling, an augmentation) comes from the seed, the pass and the batch: so all
    ranks read the same batches, and a resumed run those of one that never stopped.
    """

    def __init__(self, examples: Stream, train: TrainConfig, seed: int, rank: int, ranks: int) -> None:
        self.examples, self.train, self.seed, self.rank, self.ranks = examples, train, seed, rank, ranks
        self.epoch = self._taken = 0  # _taken: batches of the present pass
        self._pass: Iterator[Batch] | None = None
        self._next: list[Batch] = []  # read ahead, so that the end of a pass is seen with its last batch

    def take(self) -> list[Share]:
        if self._pass is None:
            self._pass = islice(passed(self.examples, self.train, self.seed, self.epoch), self._taken, None)
            self._next = list(islice(self._pass, 1))
            if not self._next:
                raise TaskError("data() gave its batches only once: return a list or a DataLoader")
        step = [*self._next, *islice(self._pass, self.train.accumulate - 1)]
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


def passed(examples: Stream, train: TrainConfig, seed: int, epoch: int) -> Iterator[Batch]:
    """Every batch of a pass. Nothing here knows who takes them: so a loader's workers end as soon as nobody
    does, and not when Python comes to look for garbage, which may be in one of them."""
    batches = examples.batches(train.batch_size, train.drop_last, None)
    for number in count():
        with drawing(seed_of(seed, epoch, number)):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def pooled(sets: list[Any]) -> Any:
    """The data of several sites as one set."""
    if len(sets) == 1:
        return sets[0]
    examples = [examples_of(data) for data in sets]
    if all(isinstance(e, Tensors) for e in examples):
        columns = zip(*(e.columns for e in examples if isinstance(e, Tensors)), strict=True)
        first = examples[0]
        assert isinstance(first, Tensors)
        return first.build([torch.cat(pieces) for pieces in columns])
    if all(isinstance(e, Items) for e in examples):
        return ConcatDataset(sets)
    raise TaskError(
        "data() gives batches or streams, and those of several sites can't be pooled. Return a Dataset, with "
        "collate() where its batches want one; or let sites() return one name."
    )
