"""Shares that belong to no round: how a peer reads them, and the newest model of each neighbour."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ...errors import BadUpdate
from ...exchange import Neighbors, PeerId, ReceivedShare, ShareHeader
from ...gossip import Parcel, Received
from .parcels import Inbox, good

if TYPE_CHECKING:
    import torch

    Like = Mapping[str, torch.Tensor]  # a parcel's parts, each of our own type and size


def opened(
    posted: ReceivedShare, like: Like, optional: Collection[str] = (), *, any_size: bool = False
) -> Parcel:
    """The parcel in a share; BadUpdate where it is none, or its parts are not as ours. `any_size`: values
    whose squares are not finite are for a robust rule to see."""
    share, most = posted.share, 2 * sum(part.nbytes for part in like.values()) + (1 << 16)
    inbox, nbytes = Inbox({}, like, most, optional), len(share.payload)
    inbox.begin(
        ShareHeader(posted.peer, posted.round, nbytes, share.weight, share.degree, share.codec, share.note)
    )
    inbox.mix(posted.peer, 0, share.payload)
    parcel = inbox.parcel(posted.peer)
    if not any_size and not all(map(good, parcel.parts.values())):
        raise BadUpdate("it has values whose squares are not finite")
    return parcel


class Letters:
    """The newest model of each neighbour, for algorithms whose peers never wait."""

    def __init__(self, neighbors: Neighbors, robust: bool) -> None:
        self._neighbors, self._robust = neighbors, robust
        self._newest: dict[PeerId, tuple[int, Parcel]] = {}  # of each, and in which round it came

    def newest(self, round: int, staleness: int, like: Like) -> Received:
        """The parcels that came in the last `staleness` rounds. One that can't be read is as if it had not
        come: what is stale returns to self."""
        for posted in self._neighbors.take():
            try:
                self._newest[posted.peer] = round, opened(posted, like, any_size=self._robust)
            except BadUpdate:
                continue
        return Received({p: parcel for p, (at, parcel) in self._newest.items() if round - at <= staleness})
