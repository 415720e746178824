"""Sites that a simulation's trainer trains, checks and sums, so that one answer is that of many."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from ...aggregation.mean import BLOCK, blocks_of
from ...arena import Arena, Slab
from ...config import Config
from ...messages import Folded, SiteId, Update
from ..simulations.partial_sums import bytes_of, sums_of
from ..simulations.shared_memory import Mapped
from . import trainer_messages as msg

if TYPE_CHECKING:
    import torch

STACKED_SITES = 48  # that the stacked engine trains at once: whole blocks; see sites_at_once
STACKED_BYTES = 16 << 20  # of their deltas
GPU_SITES, GPU_BYTES = 1024, 512 << 20  # the same on a GPU, whose kernels take as long for a few sites
CACHED_BYTES = 1 << 20  # of deltas that are summed while they are still in a core's cache

# (sites, round, weights, deltas, counted) -> each site's update, its delta in a row of `deltas`
TrainSites = Callable[[list[SiteId], int, Arena, Slab, list[int]], list[Update | msg.Failed]]


def sites_at_once(stacked: bool, nbytes: int, *, on_gpu: bool) -> int:
    """How many sites are trained before their deltas, each of so many bytes, are summed: a part of a block,
    or whole blocks. The stacked engine's last bits depend on it, so that it depends on nothing else."""
    sites, room = (GPU_SITES, GPU_BYTES) if on_gpu else (STACKED_SITES, STACKED_BYTES)
    most = (room if stacked else CACHED_BYTES) // max(1, nbytes)
    if stacked and most >= STACKED_SITES:
        return min(most, sites) // BLOCK * BLOCK
    return 1 << (max(1, min(most, BLOCK)).bit_length() - 1)


def stacks(sites: int, at_once: int) -> list[tuple[int, int]]:
    """[start, stop) of those that are trained at once, `at_once` or, in the end, up to half as many more."""
    starts = range(0, max(1, sites - at_once // 2), at_once)
    return list(pairwise([*starts, sites]))


class Folding:
    """Trains sites and sums what they found. Make it once: its memory stays warm."""

    def __init__(self, config: Config, about: msg.Description, train_sites: TrainSites) -> None:
        self._config, self._about, self._train_sites = config, about, train_sites
        self._rows: torch.Tensor | None = None

    def fold(self, command: msg.FoldMany, weights: Arena, mapped: Mapped) -> Folded | msg.Failed:
        """The sums are written to the room in `mapped` that the command names, or sent. Failed when the task
        failed at each site, or a disk did."""
        import torch

        about, count, room = self._about, len(command.sites), command.slab
        places = command.places or range(count)
        nbytes = bytes_of(self._config, about, len(blocks_of(places)), command.summands)
        sums = mapped.bytes_at(room, command.offset, nbytes) if room else memoryview(bytearray(nbytes))
        at_once = command.at_once
        most = min(count, at_once + at_once // 2)
        if self._rows is None or len(self._rows) < most:
            self._rows = torch.empty(most, about.update.nbytes, dtype=torch.uint8)
        into = sums_of(self._config, about.extras, command, weights, sums)
        found: list[Update | None] = []
        norms, refused, given, stories = [0.0] * count, dict[int, str](), 0, dict[int, str]()
        for ends in stacks(command.span or count, at_once):
            start, stop = (bisect_left(places, end) for end in ends)
            if start == stop:
                continue
            some, slab = slice(start, stop), Slab(about.update, self._rows[: stop - start])
            results = self._train_sites(
                command.sites[some], command.round, weights, slab, command.counted[some]
            )
            updates = [result if isinstance(result, Update) else None for result in results]
            for at, result in enumerate(results, start):
                if isinstance(result, msg.Failed):
                    refused[at] = result.reason
                    if not result.update:
                        stories[at] = result.traceback
                        if result.store or len(stories) == count:
                            return result
            norms[some], bad = into.add(start, command.sites[some], updates)
            refused |= bad
            given += sum(update is not None for update in updates)
            found += [None if at in refused else u for at, u in enumerate(updates, start)]
        into.finish()
        return Folded.of(found, given, refused, norms, memoryview(b"") if command.slab else sums, stories)
