"""Who writes and who reads which piece of a checkpoint, agreed among ranks without a pickle.

The plans are those of torch.distributed.checkpoint. Its save() and load() exchange them as pickles; here they
are typed (collectives.py), and so are failures: whatever fails at one rank ends the step at all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as kinds
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.storage import WriteResult

from ..errors import StoreError
from .checkpoint_storage import LoadPlanner, Part, Reader, SavePlanner, Writer
from .collectives import everyones, firsts

T = TypeVar("T")
Group = dist.ProcessGroup | None
Written = list[tuple[kinds.MetadataIndex, int, Part]]


class Said(msgspec.Struct, Generic[T]):
    """What a rank found, or why it did not."""

    found: T | None = None
    failed: str = ""
    stored: bool = False  # whether the disk or bucket failed: a StoreError

    def error(self) -> Exception:
        return StoreError(self.failed) if self.stored else PlanFailed(self.failed)


class PlanFailed(Exception):
    """A rank could not plan, write or read for another reason than its disk."""


def write(tree: dict[str, Any], writer: Writer, planner: SavePlanner, group: Group) -> None:
    """Write a checkpoint, all ranks together. StoreError where a disk failed; PlanFailed otherwise."""
    first = _rank(group) == 0

    def plan() -> plans.SavePlan:
        planner.set_up_planner(tree, is_coordinator=first)
        return planner.create_local_plan()

    # All ranks have all plans, and come to the same global one; only the names of files are drawn.
    together, metadata = planner.create_global_plan(everyone_of(plan, plans.SavePlan, group))
    names = first_of(
        lambda: [str(p.storage_data) for p in writer.prepare_global_plan(together)], list[str], group
    )
    mine = planner.finish_plan(replace(together[_rank(group)], storage_data=names[_rank(group)]))

    def results() -> Written:
        done = writer.write_data(mine, planner).wait()
        return [(r.index, r.size_in_bytes, cast(Part, r.storage_data)) for r in done]

    def finish() -> bool:
        writer.finish(metadata, [[WriteResult(*r) for r in rank] for rank in written])
        return True

    written = everyone_of(results, Written, group)
    first_of(finish, bool, group)


def read(tree: dict[str, Any], reader: Reader, planner: LoadPlanner, group: Group) -> None:
    """Read a checkpoint into a tree, all ranks together; each reads the pieces that it needs."""

    def mine() -> bool:
        planner.set_up_planner(tree, reader.read_metadata(), _rank(group) == 0)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        return True

    everyone_of(mine, bool, group)


def everyone_of(ask: Callable[[], T], kind: Any, group: Group) -> list[T]:
    """What all ranks found; or the error of one that failed, one that is not the disk's before others."""
    everyone: list[Said[T]] = [_said(ask, group)]
    if dist.is_initialized():
        everyone = everyones(everyone[0], Said[kind], group)
    if failed := sorted((s for s in everyone if s.failed), key=lambda s: s.stored):
        raise failed[0].error()
    return [cast(T, s.found) for s in everyone]


def first_of(ask: Callable[[], T], kind: Any, group: Group) -> T:
    """What the first rank found, or its error, on all of them."""
    said: Said[T] = _said(ask, group) if _rank(group) == 0 else Said()
    if dist.is_initialized():
        said = firsts(said, Said[kind], group)
    if said.failed:
        raise said.error()
    return cast(T, said.found)


def _said(ask: Callable[[], T], group: Group) -> Said[T]:
    try:
        return Said(ask())
    except StoreError as e:
        return Said(failed=str(e), stored=True)
    except Exception as e:  # torch's planners and a bucket's client run here, and other ranks wait for a word
        return Said(failed=f"rank {_rank(group)}: {type(e).__name__}: {e}")


def _rank(group: Group) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0
