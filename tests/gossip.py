"""Small real peers for tests: keys, sockets on loopback, a mixer that adds up what comes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch

from fedtrain.errors import BadUpdate
from fedtrain.exchange import Contact, Share, ShareHeader
from fedtrain.transport.admission import Curve
from fedtrain.transport.link import LinkSettings
from fedtrain.transport.zmq import ZmqNeighbors
from fedtrain.wire.gossip import Greeting
from tests.limits import WAIT_S
from tests.rosters import FixedRoster, met, signs

MIB = 1 << 20


def vector(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def share(x: torch.Tensor, weight: float = 1.0) -> Share:
    return Share(memoryview(x.view(torch.uint8).numpy().data), weight)


class Sum:
    """acc += weight · share, chunk by chunk; keeps what it was told."""

    def __init__(self, acc: torch.Tensor) -> None:
        self.acc, self.weight = acc, dict[str, float]()
        self.begun, self.order, self.ended = list[ShareHeader](), list[tuple[int, str]](), dict[str, int]()

    def begin(self, offer: ShareHeader) -> None:
        if offer.nbytes != self.acc.nbytes:
            raise BadUpdate(f"{offer.nbytes} bytes, {self.acc.nbytes} are due")
        self.weight[offer.peer] = offer.weight
        self.begun.append(offer)

    def mix(self, peer: str, offset: int, chunk: memoryview) -> None:
        piece = torch.frombuffer(chunk, dtype=self.acc.dtype)
        if not torch.isfinite(piece).all():
            raise BadUpdate("a value is not finite")
        at = offset // self.acc.itemsize
        self.acc[at : at + len(piece)].add_(piece, alpha=self.weight[peer])
        self.order.append((offset // MIB, peer))

    def end(self, peer: str, nbytes: int) -> None:
        self.ended[peer] = nbytes


GREETING = Greeting(version="test", task_digest="t", schema_digest="s", agreed={})


class Party:
    """Peers of one network in this process, each with sockets and a thread of its own."""

    def __init__(self) -> None:
        self.roster = FixedRoster()
        self.curves: dict[str, Curve] = {}
        self.peers: dict[str, ZmqNeighbors] = {}
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def start(self, name: str, **options: Any) -> ZmqNeighbors:
        curve = self.curves.setdefault(name, Curve.new())
        settings = {key: options.pop(key) for key in ("heartbeat_s", "idle_s", "limits") if key in options}
        options = {"curve": curve, "sign": signs(name), "roster": self.roster, "run": "r",
                   "greeting": GREETING} | options  # fmt: skip
        options["settings"] = LinkSettings(**settings)
        peer = ZmqNeighbors(
            me=name, emit=lambda event: self.events.append((name, event.kind, event.fields())), **options
        )
        peer.start()
        self.peers[name] = peer
        address = f"127.0.0.1:{peer.port}" if peer.port else None
        self.enrol(Contact(name, curve.public, address))
        return peer

    def enrol(self, contact: Contact) -> None:
        self.roster.replace([*self.roster.contacts.values(), contact])

    def of(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [fields for n, k, fields in self.events if (n, k) == (name, kind)]


@contextlib.asynccontextmanager
async def party(names: Iterable[str], **options: Any) -> AsyncIterator[Party]:
    """All connected with all."""
    made = Party()
    try:
        for name in names:
            made.start(name, **options)
        for name, peer in made.peers.items():
            others = set(made.peers) - {name}
            assert await met(peer, others, WAIT_S) == sorted(others), (name, made.events)
        yield made
    finally:
        for peer in made.peers.values():
            await peer.stop()
