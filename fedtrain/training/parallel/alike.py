"""Whether all ranks were given the same data. Each takes its own share of it: a script that deals it to ranks
by itself, as for DDP, would have each take a share of a share.

Little is looked at, and compared as numbers are that two kinds of CPU computed: the number of examples, and
a few values of the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from ...digest import seed_of
from ...errors import TaskError
from ..batches import Batch, examples_in
from ..collectives import everyones
from ..examples import Examples, Stream, Tensors, examples_of
from ..mesh import Mesh
from ..partition import SimulatedSites
from ..sampler import Draws
from ..task import Task, collate_of, folder_of, user_code

if TYPE_CHECKING:
    from .data import Dealt

FEW = 64  # values of a tensor, or parts of a list, that are looked at
INSTEAD = (
    "Each rank takes its own share of them, so give all ranks the same, in the same order: without a "
    "DistributedSampler, parts by rank, or draws from generators of your own."
)


class Look(msgspec.Struct, frozen=True):
    """What is seen of an example, a batch, or all data."""

    kind: str
    count: int  # of examples, or batches; -1: nobody knows
    words: list[str] = []  # whole numbers, texts, shapes: equal at all ranks
    numbers: list[float] = []  # close to each other

    def like(self, other: Look) -> bool:
        """Whether they have the same values."""
        close = partial(math.isclose, rel_tol=1e-3, abs_tol=1e-5)
        return (
            self.words == other.words
            and len(self.numbers) == len(other.numbers)
            and all(close(a, b) or a != a or a == b for a, b in zip(self.numbers, other.numbers, strict=True))
        )


def check_training(task: Task, sites: SimulatedSites, data: Dealt, mesh: Mesh) -> None:
    """TaskError on all ranks where those that share examples were given different ones; of a stream as soon
    as its first batch is read."""
    if mesh.islands > 1 and not sites.natural:  # it is dealt to the islands: each works that out for itself
        check(task, examples_of(sites.pool, collate_of(task)), mesh, "data()", everywhere=True)
    data.first = check(task, data.examples, mesh, "data()")


def check(task: Task, examples: Examples, mesh: Mesh, what: str, *, everywhere: bool = False) -> Check | None:
    """TaskError on all ranks where the ranks of an island, or of all islands (`everywhere`), have different
    `examples`. Of a stream that isn't known yet: what is returned compares its first batch."""
    if isinstance(examples, Stream):
        refuse_split(examples.source, what)
    group = dist.group.WORLD if everywhere and dist.is_initialized() else mesh.group(mesh.axes())
    if group is None or dist.get_world_size(group) == 1:
        return None
    check = Check(group, mesh.device, what)
    with user_code(folder_of(task), what):
        mine = look_at(examples)
    check(mine)
    return check


class Check:
    """What ranks of a group see, compared; all call it alike."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, what: str) -> None:
        self.group, self.device, self.what = group, device, what

    def __call__(self, mine: Look) -> None:
        first, *others = everyones(mine, Look, self.group, self.device)
        zero = dist.get_global_rank(self.group, 0)
        for rank, other in enumerate(others, 1):
            where = dist.get_global_rank(self.group, rank)
            for one, two in ((first.kind, other.kind), (told(first.count), told(other.count))):
                if one != two:
                    raise TaskError(f"{self.what} gives rank {zero} {one}, and rank {where} {two}. {INSTEAD}")
            if not first.like(other):
                raise TaskError(
                    f"{self.what} gives rank {where} other examples than rank {zero}, as the first ones "
                    f"show. {INSTEAD}"
                )

    def batch(self, batch: Batch) -> None:
        """The first one of a stream."""
        self(looked(batch, "a batch", examples_in(batch)))


def told(count: int) -> str:
    return "a stream" if count < 0 else f"{count:,} example{'' if count == 1 else 's'}"


def refuse_split(source: Any, what: str) -> None:
    """TaskError for a loader whose sampler gives each rank its own part."""
    if not isinstance(source, DataLoader):
        return
    by = source.batch_sampler
    for sampler in (source.sampler, by, getattr(by, "sampler", None)):
        if getattr(sampler, "num_replicas", 1) not in (None, 1):
            raise TaskError(f"{what} gives a DataLoader with a {type(sampler).__name__}. {INSTEAD}")


# --- what is looked at


def look_at(examples: Examples) -> Look:
    """How many, and some of the first: nothing of a stream is read. Draws stay as they were."""
    if isinstance(examples, Tensors):
        rows = torch.tensor([0, examples.count // 2, examples.count - 1]) if examples.count else None
        values = [] if rows is None else [c[rows.to(c.device)] for c in examples.columns]
        return looked(values, "tensors", examples.count)
    dataset: Any = examples.source if isinstance(examples, Stream) else examples.dataset
    kind = f"a {type(dataset).__name__}"
    if isinstance(dataset, DataLoader):
        kind += f" of batches of {dataset.batch_size} by a {type(dataset.sampler).__name__}"
        dataset = dataset.dataset
    known = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not known:
        return Look(kind, -1)
    count = len(dataset)
    # One that says in which order it is to be read has its examples elsewhere, in shards say.
    if not count or isinstance(dataset, Mapping) or hasattr(dataset, "order"):
        return Look(kind, count)
    several, seen = getattr(dataset, "__getitems__", None), []
    for _ in range(2):
        with Draws(0):
            seen.append(looked(several([0]) if several else dataset[0], kind, count))
    return seen[0] if seen[0].like(seen[1]) else Look(kind, count)  # it draws for itself


def looked(value: Any, kind: str, count: int) -> Look:
    words: list[str] = []
    numbers: list[float] = []
    _look(value, words, numbers)
    return Look(kind, count, words, numbers)


def _look(value: Any, words: list[str], numbers: list[float]) -> None:
    words.append(type(value).__name__)
    if hasattr(value, "__array__") and getattr(getattr(value, "dtype", None), "kind", "") in [*"biufc"]:
        value = torch.as_tensor(value)
    if isinstance(value, torch.Tensor):
        words.append(f"{value.dtype} {list(value.shape)}")
        if value.layout is torch.strided and value.numel():
            flat = value.detach().flatten()
            some = flat[torch.linspace(0, len(flat) - 1, min(FEW, len(flat))).long().to(flat.device)].cpu()
            if some.is_complex():
                some = torch.view_as_real(some).flatten()
            if some.is_floating_point():
                numbers += some.double().tolist()
            else:
                words += map(str, some.tolist())
    elif isinstance(value, float):
        numbers.append(value)
    elif isinstance(value, str | bytes | int | None):
        words.append(str(seed_of(repr(value))))
    elif isinstance(value, Mapping):
        for name in [*value][:FEW]:
            words.append(str(name))
            _look(value[name], words, numbers)
    elif isinstance(value, tuple | list):
        words.append(str(len(value)))
        for part in value[:FEW]:
            _look(part, words, numbers)
