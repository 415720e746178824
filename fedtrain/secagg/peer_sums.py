"""Sums over a neighbourhood, without an aggregator: one peer learns Σ wⱼxⱼ of its senders, and no xⱼ.

The peers that send to one receiver in one round are the members of a sum, and each pair of them shares a
mask that one adds and the other subtracts. So the receiver's sum over all members has no mask left, and a
sum over fewer is noise: when one is missing, all of that round is lost to the receiver. No peer ever reveals
a mask, so none can be talked into revealing the wrong one.

A pair's mask comes from X25519 between keys that both drew when their processes began, and from the
session's id, in which stand run, round, receiver, and names and keys of the members. A receiver takes only
vectors of its own sum's id. No mask is used twice: a process sends once in a round, and the next process has
another key.

Numbers are those of fixedpoint.py: models with random rounding, the other parts as exact scalars.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SecAggError
from ..exchange import PeerId
from .encoding import rounding_seed
from .fixedpoint import FixedPoint, Floats, held
from .keys import KeyPair, check_public, pair_mask_key, pair_mask_sign
from .masking import Parallel, RingVector, add_masks, serial
from .messages import hash_of

LEAST = 3  # members: in a sum of two either one is the other's secret


class PeerSums:
    """One peer's part in all sums of a run."""

    def __init__(
        self, me: PeerId, run: str, seed: int, pair: KeyPair | None, parallel: Parallel = serial
    ) -> None:
        """`pair` of a secret that this process drew, and no other had; None: the same sums without masks."""
        self.me, self._run, self._seed, self._pair, self._parallel = me, run, seed, pair, parallel
        self._publics: dict[PeerId, bytes] = {me: pair.public if pair else b""}
        self._numbers: dict[PeerId, int] = {}  # which start of its process each key is of
        self._sent: dict[PeerId, int] = {}  # the last round in which each receiver was sent to

    @property
    def public(self) -> bytes:
        return self._publics[self.me]

    def meet(self, peer: PeerId, public: bytes, number: int = 0) -> None:
        """A peer's key as it came from that peer itself, in this start of its process, which has a higher
        number than those before; SecAggError for a key that keeps no secret."""
        if self._pair is not None:
            check_public(peer, public)
        self._publics[peer], self._numbers[peer] = public, number

    def learn(self, peer: PeerId, public: bytes, number: int) -> None:
        """A peer's key as another peer passed it on, signed. It is ignored when a later start's is known."""
        if peer != self.me and number > self._numbers.get(peer, -1):
            self.meet(peer, public, number)

    def knows(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """Those of them whose keys are known, this peer's own too."""
        known = dict(self._publics)
        return [peer for peer in peers if peer in known]

    def session(self, round: int, receiver: PeerId, members: Sequence[PeerId]) -> PeerSum | None:
        """One sum; None while a member's key is not known, or when there are too few to hide in it."""
        known = dict(self._publics)  # as it is now: `meet` may be called from another thread
        names = sorted(members)
        if len(names) < LEAST or (self._pair is not None and not known.keys() >= set(names)):
            return None
        return PeerSum(self._run, round, receiver, {name: known.get(name, b"") for name in names})

    def masked(
        self, layout: Layout, values: Floats, scalars: Floats, weight: float, session: PeerSum
    ) -> tuple[RingVector, int]:
        """What is sent to the receiver: weight·[values | scalars] under masks; and how many were clipped."""
        assert self.me in session.keys, (self.me, session)
        if self._sent.get(session.receiver, -1) >= session.round:
            raise SecAggError(
                f"round {session.round + 1}: {session.receiver} has its part already, and a mask serves once"
            )
        self._sent[session.receiver] = session.round
        seed = rounding_seed("gossip", self._seed, session.round, self.me)
        vector, clipped = layout.encode(values, scalars, weight, seed, self._parallel)
        if self._pair is not None:
            sid = session.id
            masks = [
                (pair_mask_key(self._pair.agree(key), sid, self.me, peer), pair_mask_sign(self.me, peer))
                for peer, key in session.keys.items()
                if peer != self.me
            ]
            add_masks(vector, masks, self._parallel)
        return vector, clipped


@dataclass(frozen=True)
class PeerSum:
    """One sum: what all members must have alike, so that their masks cancel."""

    run: str
    round: int
    receiver: PeerId
    keys: Mapping[PeerId, bytes]  # of all members, by name; empty where there are no masks

    @property
    def id(self) -> bytes:
        """32 bytes."""
        members = [part for name, key in self.keys.items() for part in (name, key)]
        return hash_of("circle", self.run, self.round, self.receiver, len(self.keys), *members)


@dataclass(frozen=True)
class Layout:
    """How a peer's numbers lie in the ring: coordinates of models, then limbs of scalars."""

    point: FixedPoint
    numel: int
    scalars: int

    @classmethod
    def of(cls, members: int, clip: float, values: Floats, scalars: int) -> Layout:
        """For sums over so many; float64 models get a ring of 64 bits, others one of 32."""
        return cls(FixedPoint(members, 64 if values.itemsize == 8 else 32, clip, 1.0), len(values), scalars)

    @property
    def length(self) -> int:
        return self.numel + self.point.limbs * self.scalars

    def encode(
        self, values: Floats, scalars: Floats, weight: float, seed: bytes, parallel: Parallel = serial
    ) -> tuple[RingVector, int]:
        vector = np.empty(self.length, self.point.dtype)
        clipped = self.point.encode_into(held(values), weight, seed, vector[: self.numel], parallel=parallel)
        vector[self.numel :] = self.point.encode_scalars(scalars.astype(np.float64) * weight)
        return vector, clipped

    def decode(self, total: RingVector) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Σ weight·values and Σ weight·scalars; SecAggError for what no sum of the members can be."""
        sites = self.point.sites
        values = self.point.decode(total[: self.numel], sites, 1.0)
        return values, self.point.decode_scalars(total[self.numel :], sites)


class RingSum:
    """A gossip.Fold of ring vectors: added up as they come, of use only when all have come."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.total = np.zeros(layout.length, layout.point.dtype)
        self._came: dict[PeerId, int] = {}

    def begin(self, peer: PeerId, fields: Any) -> None:
        self._came[peer] = 0

    def add(self, peer: PeerId, chunk: Any) -> None:
        """The next elements, a tensor or an array of signed integers of the ring's width."""
        at = self._came[peer]
        self._came[peer] = at + len(chunk)
        self.total[at : self._came[peer]] += np.asarray(chunk).view(self.total.dtype)
