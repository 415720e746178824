"""The exchange of one round of a peer: what it gives and takes, and what of that is averaged.

`Averaging` takes the neighbours' parcels one by one, `Summing` their sum under masks: of all or of none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import SecAggError
from ...exchange import Exchanged, Neighborhood, PeerId
from ...gossip import Blend, Parcel, Received, Send
from ...secagg.peer_sums import LEAST, Layout, PeerSum, RingSum
from .parcels import LEAST_MASS, Inbox, share_of

if TYPE_CHECKING:
    import torch

    from .gossip import Peer

    Vector = torch.Tensor
    Floats = np.ndarray[Any, Any]


class Averaging:
    """The exchange of one round, from Send to the mix of the parts that are averaged plainly."""

    def __init__(
        self, peer: Peer, near: Neighborhood, send: Send, sides: Mapping[str, Vector], deadline_s: float
    ) -> None:
        self._near, self._directed = near, peer.algorithm.directed
        self._mass = send.parcel.fields.get("mass", 1.0)
        self._blends = {name: peer.algorithm.mix_extras(v, near, self._mass) for name, v in sides.items()}
        self._returned, self.missing, self.clipped, self.late = 0.0, dict[PeerId, str](), 0, False
        self._before = {*near.outgoing} if peer.pledges and peer.pledges.again else set[PeerId]()
        self.given: Mapping[PeerId, float] = {}  # takers that have our share, or may have it -> its weight
        self.counted: Collection[PeerId] = ()  # the givers whose share is in the sum
        self.heard: Collection[PeerId] = ()  # those whose model is in what this peer has after the round
        self.parcel = Parcel({**send.parcel.parts, **sides}, send.parcel.fields)
        self.model = send.parcel.parts.get("x") if send.model is None else send.model
        self._under_way: asyncio.Future[Exchanged] | None = None
        self._begin(peer, near, send, deadline_s)

    def _begin(self, peer: Peer, near: Neighborhood, send: Send, deadline_s: float) -> None:
        parcel = self.parcel
        share = share_of(parcel, 1.0, len(near.outgoing))  # the bytes are the same for all
        held: Collection[PeerId] = near.outgoing if self._mass < LEAST_MASS else ()
        if peer.pledges is not None:
            held = held or peer.pledges.withheld(peer.round)
            self._before -= {*held}
        shares = {k: replace(share, weight=w) for k, w in near.outgoing.items() if k not in held}
        if not peer.algorithm.waits:
            peer.neighbors.post(peer.round, shares)
            return
        most_bytes, optional = 2 * peer.model.schema.nbytes + (1 << 16), peer.algorithm.optional
        mixes, kept = {**send.blends, **self._blends}, peer.algorithm.conserved()
        sums = mixes if kept and self._directed else {kept} - {""}  # push-sum divides all parts by one mass
        self._inbox = Inbox(mixes, parcel.parts, most_bytes, optional, sums)
        self._under_way = asyncio.ensure_future(
            peer.neighbors.exchange(peer.round, shares, list(near.incoming), self._inbox, deadline_s)
        )

    def give_up(self) -> None:
        """Cancel: the round failed while bytes were moving."""
        if self._under_way is not None:
            self._under_way.cancel()

    async def received(self) -> Received:
        """The parcels that came. A neighbour that did not get ours is left out, unless its own is mixed."""
        assert self._under_way is not None, "who doesn't wait asks for a Mailbox"
        self._inbox.waits = True
        exchanged = await self._under_way
        self.missing, self.counted = dict(exchanged.missing), exchanged.arrived
        self.late = bool(exchanged.kept) and not exchanged.given and not exchanged.unsure
        undelivered = self._undelivered(exchanged)
        self._returned = self._mass * sum(self._near.outgoing[peer] for peer in sorted(undelivered))
        self.heard = sorted(exchanged.arrived - (set() if self._directed else undelivered))
        return Received({peer: self._inbox.parcel(peer) for peer in self.heard}, undelivered)

    def _undelivered(self, exchanged: Exchanged) -> set[PeerId]:
        may = exchanged.given | exchanged.unsure.keys() | self._before  # or an earlier life of ours gave it
        self.given = {peer: self._near.outgoing[peer] for peer in sorted(may)}
        return self._near.outgoing.keys() - may

    def read(self, heard: Received) -> None:
        """Blend the plainly averaged parts of parcels that came outside of an exchange."""
        self.heard = sorted(heard.parcels.keys() & self._near.incoming.keys())
        for peer in self.heard:
            parcel = heard.parcels[peer]
            for name, blend in self._blends.items():
                blend.begin(peer, parcel.fields)
                blend.add(peer, parcel.parts[name])

    def mixed(self) -> dict[str, Vector]:
        return {
            name: blend.by_mass(self._returned)[0]
            if self._directed and isinstance(blend, Blend)
            else blend.to_self()
            for name, blend in self._blends.items()
        }


class Summing(Averaging):
    """The same where peers send sums only: of all a peer's senders, or of none."""

    def _begin(self, peer: Peer, near: Neighborhood, send: Send, deadline_s: float) -> None:
        import torch

        assert peer.sums is not None
        self._mixes = {**send.blends, **self._blends}
        self._parts = {name: self.parcel.parts[name] for name in self._mixes}
        self._models = len(send.blends)  # of the parts, the first; the others are exact
        vectors = [part.numpy() for part in self._parts.values()]
        values = np.concatenate(vectors[: self._models])
        scalars = np.concatenate([part.astype(np.float64) for part in vectors[self._models :]])
        shares = {}
        for taker, weight in near.outgoing.items():
            members = near.fellows[taker]
            if (session := peer.sums.session(peer.round, taker, members)) is None:
                continue
            layout = Layout.of(len(members), peer.clip, values, len(scalars))
            ring, clipped = peer.sums.masked(layout, values, scalars, weight, session)
            self.clipped = max(self.clipped, clipped)
            told = torch.from_numpy(ring.view(f"i{ring.itemsize}"))
            shares[taker] = share_of(Parcel({sum_name(session): told}), weight, len(near.outgoing))
        own = peer.sums.session(peer.round, peer.name, list(near.incoming))
        expected = list(near.incoming) if own is not None else []
        self._sum = RingSum(Layout.of(max(len(expected), 1), peer.clip, values, len(scalars)))
        part = "" if own is None else sum_name(own)
        like = {part: torch.from_numpy(self._sum.total.view(f"i{self._sum.total.itemsize}"))}
        self._inbox = Inbox({part: self._sum}, like, 0, agreed=near.incoming, patient=True)
        self._under_way = asyncio.ensure_future(
            peer.neighbors.exchange(peer.round, shares, expected, self._inbox, deadline_s)
        )

    async def received(self) -> Received:
        """No single parcel. When a sender is missing, all shares return to this peer."""
        assert self._under_way is not None
        self._inbox.waits = True
        exchanged = await self._under_way
        self.missing = dict(exchanged.missing)
        self.late = bool(exchanged.kept) and not exchanged.given and not exchanged.unsure
        if exchanged.arrived == self._near.incoming.keys():
            try:
                self._fold(*self._sum.layout.decode(self._sum.total))
                self.counted = self.heard = exchanged.arrived
            except SecAggError as e:
                self.missing = dict.fromkeys(self._near.incoming, str(e))
        elif not self.missing:
            why = f"fewer than {LEAST} tell this peer, or not all of them have met"
            self.missing = dict.fromkeys(self._near.incoming, why)
        return Received({}, self._undelivered(exchanged))

    def _fold(self, values: Floats, scalars: Floats) -> None:
        import torch

        at = {True: 0, False: 0}
        for i, (name, part) in enumerate(self._parts.items()):
            model = i < self._models
            source = values if model else scalars
            piece = source[at[model] : at[model] + part.numel()]
            at[model] += part.numel()
            mix = self._mixes[name]
            assert isinstance(mix, Blend), mix
            mix.add_sum(torch.from_numpy(piece).to(part.dtype))


def sum_name(session: PeerSum) -> str:
    """The name of the one part of a parcel: a part of another sum is refused before its bytes (OF_SOME)."""
    return f"sum/{session.id.hex()}"
