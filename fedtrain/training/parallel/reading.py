"""Examples read ahead of their step, by processes of their own: each rank reads its share of a batch alone.

What an example draws while it is read, an augmentation say, is seeded by the run, the pass and the example.
So it is the same in any world, with any number of processes, and after a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from io import BytesIO
from itertools import count, repeat
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ...digest import seed_of
from ...errors import ConfigError
from ..batches import Batch, cut, examples_in, move, rebuilt
from ..devices import seed_all
from ..examples import Examples, Items, Stream
from ..sampler import BatchShare, Draws, share_of
from .alike import Check

AHEAD = 2  # shares that each process has ready
SMALL = 1 << 18  # bytes; from here on shared memory costs less than two copies through a pipe
CPU = torch.device("cpu")
Share = tuple[Batch | None, int]  # a rank's part of a batch, and how many examples the whole batch has
Asked = tuple[int, list[int]]  # the seed of a pass, and examples


class Choice(Protocol):
    """Who says which examples come next: a Sampler, or that of a loader."""

    seed: int
    epoch: int

    def take(self) -> list[BatchShare]:
        """This rank's part of the next optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        """The position of the next take()."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""


class LoaderChoice:
    """The batches that a DataLoader's own sampler chooses; their order is that of the loader itself."""

    def __init__(
        self, examples: Stream, accumulate: int, seed: int, rank: int, ranks: int, *, resumes: bool
    ) -> None:  # fmt: skip
        """`resumes`: as of Streamed."""
        self.examples, self.accumulate = examples, accumulate
        self._draws = None if resumes else Draws(seed)
        self.seed, self.rank, self.ranks = seed, rank, ranks
        self.epoch = self._taken = 0  # _taken: batches of the present pass
        self._pass: list[list[int]] = []

    def take(self) -> list[BatchShare]:
        self._pass = self._pass or self._chosen()
        step = self._pass[self._taken : self._taken + self.accumulate]
        self._taken += len(step)
        if self._taken >= len(self._pass):
            self.epoch, self._taken, self._pass = self.epoch + 1, 0, []
        shares = [(rows, *share_of(len(rows), self.rank, self.ranks)) for rows in step]
        return [BatchShare(torch.tensor(rows[low:high]), len(rows)) for rows, low, high in shares]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "taken": self._taken, "count": -1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._taken, self._pass = int(state["epoch"]), int(state["taken"]), []

    def _chosen(self) -> list[list[int]]:
        """All batches of the present pass."""
        draws = (self._draws or Draws(seed_of(self.seed, self.epoch, number)) for number in count())
        found = chosen_by(self.examples.source, draws)
        self.examples.count = sum(map(len, found))
        if (most := max(map(len, found), default=0)) < self.ranks:  # some rank would read on for ever
            raise too_few_in_loader(most, self.ranks)
        return found


def too_few(what: str, ranks: int) -> ConfigError:
    """Each rank wants an example of a batch."""
    return ConfigError(
        f"{what}, and examples of a batch are shared by {ranks} data-parallel rank{'s' * (ranks > 1)}. Make "
        f"the batches or the data larger (a DataLoader's drop_last leaves out what fills no batch), or start "
        f"fewer ranks."
    )


def too_few_in_loader(most: int, ranks: int) -> ConfigError:
    what = f"data() gives a DataLoader whose batches have {most} example{'s' * (most != 1)} at most"
    return too_few(what, ranks)


def chosen_by(loader: Any, draws: Iterable[Draws]) -> list[list[int]]:
    """All batches of a pass of a DataLoader, as indices; what chooses one draws from the next of `draws`."""
    batches: Iterator[list[int]] | None = None
    found: list[list[int]] = []
    for own in draws:
        with own:
            if batches is None:  # a loader first draws the seed of its workers
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
                batches = iter(loader.batch_sampler)
            rows = next(batches, None)
        if rows is None:
            break
        found.append(list(rows))
    return found


class ReadAhead:
    """A rank's shares of all steps from a position on, read before they are asked for."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Batch], choice: Choice, processes: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`processes`: 0: this one reads, as each share is asked for. `device`: where batches are to be."""
        self._shares, self._choice = ShareReader(dataset, collate), choice
        self._processes, self._device = processes, device
        self._at = choice.state_dict()
        self._batches: Iterator[Batch] | None = None  # its processes end with it
        self._steps: deque[tuple[list[BatchShare], dict[str, Any]]] = deque()  # asked for, and not taken
        self._held: deque[Batch] = deque()  # read before their step was known

    @property
    def epoch(self) -> int:
        return int(self._at["epoch"])

    def take(self) -> list[Share]:
        """The batches of the next optimizer step."""
        if self._batches is None:
            self._batches = self._read()
        if not self._steps:
            self._held.append(self._next())
        step, self._at = self._steps.popleft()
        return [(self._next() if len(share.mine) else None, share.total) for share in step]

    def state_dict(self) -> dict[str, Any]:
        """Where the next take() begins, however far ahead was read."""
        return dict(self._at)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._choice.load_state_dict(state)
        self._at, self._batches = self._choice.state_dict(), None
        self._steps.clear()
        self._held.clear()

    def _next(self) -> Batch:
        if self._held:
            return self._held.popleft()
        assert self._batches is not None, "take() begins to read"
        with Draws(0):  # what is read in this process
            return next(self._batches)

    def _read(self) -> Iterator[Batch]:
        return read(self._shares, asked(self._choice, self._steps), self._processes, self._device)


def read(
    shares: ShareReader, asked: Iterable[Asked], processes: int, device: torch.device
) -> Iterator[Batch]:
    """The shares that are asked for, each read ahead by one of the processes; without any as it is taken."""
    loader: DataLoader[Batch] = DataLoader(
        shares, batch_size=None, sampler=asked, collate_fn=as_it_is, num_workers=processes,
        prefetch_factor=AHEAD if processes else None,
        pin_memory=device.type == "cuda" and processes > 0,  # what this process reads may be on the GPU
        multiprocessing_context="fork" if processes else None,  # Python 3.14's default is another
    )  # fmt: skip
    with Draws(0):  # the seed of its processes, which set their own for each example
        batches = iter(loader)
    return batches if device.type == "cpu" else copied(batches, device)


def read_once(
    examples: Examples, size: int, seed: int, rank: int, ranks: int, readers: int, device: torch.device,
    first: Check | None = None,
) -> Iterator[tuple[Batch, bool]]:  # fmt: skip
    """All examples once, as far as they are this rank's: (batch, whether it counts).

    There are as many batches on every rank, for a forward pass may be a collective. `size`: of a rank's
    batch, where the data has none of its own. `first`: see Dealt.
    """
    loader: Any = examples.source if isinstance(examples, Stream) else None
    if isinstance(examples, Stream) and not can_be_read_apart(loader):
        for number, batch in enumerate(examples.batches(size, False, None)):
            if first is not None and number == 0:
                first.batch(batch)
            low, high = share_of(examples_in(batch), rank, ranks)
            yield (cut(batch, low, high) if high > low else cut(batch, 0, 1)), high > low
        return
    whole: Sequence[Sequence[int]]
    if loader is not None:
        whole = chosen_by(loader, repeat(Draws(seed)))
    else:
        starts = range(0, examples.count, size * ranks)
        whole = [range(start, min(start + size * ranks, examples.count)) for start in starts]
    spans = [share_of(len(rows), rank, ranks) for rows in whole]
    mine = [rows[low:high] or rows[:1] for rows, (low, high) in zip(whole, spans, strict=True)]
    counts = (high > low for low, high in spans)
    if not isinstance(examples, Stream | Items):
        yield from zip(map(examples.take, map(torch.tensor, mine)), counts, strict=True)
        return
    data = loader if isinstance(examples, Stream) else examples
    collate = loader.collate_fn if isinstance(examples, Stream) else examples.collate
    processes = loader.num_workers if isinstance(examples, Stream) else readers
    batches = read(ShareReader(data.dataset, collate), [(seed, [*r]) for r in mine], processes, device)
    for each in counts:
        with Draws(0):  # what is read in this process
            batch = next(batches)
        yield batch, each


class ShareReader(Dataset[Batch]):
    """A dataset by the share: in the process that reads it, which may be another than the one that trains."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Batch]) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitem__(self, asked: Asked) -> Batch:
        batch = self._read(*asked)
        return batch if get_worker_info() is None else sendable(batch)

    def _read(self, seed: int, rows: list[int]) -> Batch:
        if (several := getattr(self.dataset, "__getitems__", None)) is not None:
            seed_all(seed_of(seed, rows[0]), CPU)
            return self.collate(several(rows))
        return self.collate([self._one(seed, row) for row in rows])

    def _one(self, seed: int, row: int) -> Any:
        seed_all(seed_of(seed, row), CPU)
        return self.dataset[row]


def asked(choice: Choice, steps: deque[tuple[list[BatchShare], dict[str, Any]]]) -> Iterator[Asked]:
    """What is to be read, without an end. Each step that it is of goes to `steps`, and the position after."""
    while True:
        seed = seed_of(choice.seed, "read", choice.epoch)
        step = choice.take()
        steps.append((step, choice.state_dict()))
        for share in step:
            if len(share.mine):
                yield seed, share.mine.tolist()


def copied(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Batches on a GPU, each copied while the one before is computed with."""
    side, ahead = side_stream(device), None
    for batch in batches:
        # A copy may get the memory of a batch that was let go: what was asked of that one comes first.
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            coming = move(batch, device), side.record_event()
        if ahead is not None:
            yield arrived(*ahead)
        ahead = coming
    if ahead is not None:
        yield arrived(*ahead)


@cache
def side_stream(device: torch.device) -> Any:
    """The one for all copies: torch's memory is kept for each stream apart."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's


def arrived(batch: Batch, event: Any) -> Batch:
    """A batch that the present stream may read."""
    torch.cuda.current_stream().wait_event(event)
    return batch


def as_it_is(batch: Batch) -> Batch:
    return batch


def can_be_read_apart(data: Any) -> bool:
    """Whether it is a loader whose batches any rank can read a share of, without running code of its own."""
    return (
        type(data) is DataLoader
        and data.batch_sampler is not None
        and data.worker_init_fn is None
        and not isinstance(data.dataset, IterableDataset)
    )


def sendable(batch: Batch) -> Batch:
    """The batch, whose small tensors are sent by their bytes. An error says why it can't be sent.

    torch sends each tensor as a file descriptor, by a connection of its own with a handshake: 1.8 ms of both
    processes' time for two small tensors, where their bytes take 0.45 ms. And what can't be sent it drops, in
    the thread behind the queue, so that whoever waits for the batch would wait for ever.
    """
    DryPickler(BytesIO()).dump(batch)
    return by_bytes(batch)


def by_bytes(batch: Batch) -> Batch:
    """Small tensors as TensorBytes; larger ones, and those that are not plain, as they are."""
    if type(batch) is not torch.Tensor:
        # What moves itself, such as a PackedSequence, need not take anything else for its tensors.
        moves = callable(getattr(batch, "to", None)) and not isinstance(batch, Mapping)
        return batch if moves else rebuilt(batch, by_bytes)
    if batch.layout is not torch.strided or batch.device.type != "cpu":
        return batch
    whole = batch.resolve_conj().resolve_neg()  # torch would send what is yet to be conjugated or negated
    if whole.requires_grad or whole.is_quantized or not whole.is_contiguous():
        return whole
    return TensorBytes(whole) if 0 < whole.numel() * whole.element_size() <= SMALL else whole


class TensorBytes:
    """A tensor's bytes in place of it; where they are unpickled, they are the tensor again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._parts = bytes(tensor.view(-1).view(torch.uint8).numpy()), tensor.dtype, tuple(tensor.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return tensor_of, self._parts


def tensor_of(held: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of these bytes, in memory of torch's own alignment."""
    return torch.frombuffer(bytearray(held), dtype=dtype).clone().view(shape)


class DryPickler(ForkingPickler):
    """Sees whether something can be pickled, and leaves its tensors alone."""

    def reducer_override(self, part: Any) -> Any:
        return (bool, ()) if isinstance(part, torch.Tensor) else NotImplemented
