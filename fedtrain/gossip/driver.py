"""A driver that runs all peers of a round in one process without a network, for tests and simulations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..exchange import Neighborhood, PeerId
from .adpsgd import partner
from .base import LocalSteps, Mailbox, Meet, Parcel, Receive, Received, Request, Send

if TYPE_CHECKING:
    from .base import Algorithm, State, Vector

    Post = dict[PeerId, dict[PeerId, tuple[int, Parcel]]]  # receiver -> sender -> (round, newest parcel)


def step(
    algorithm: Algorithm,
    xs: Mapping[PeerId, Vector],
    states: Mapping[PeerId, State],
    graph: Mapping[PeerId, Neighborhood],
    t: int,
    train: Callable[[PeerId, Vector], Vector],
    lost: Callable[[PeerId, PeerId], bool] = lambda sender, receiver: False,
    post: Post | None = None,
) -> tuple[dict[PeerId, Vector], dict[PeerId, State]]:
    """Round t of every peer; returns their new models and states.

    `lost(sender, receiver)`: whether a parcel is lost. A push-sum sender learns of a loss; for a symmetric
    algorithm lose both directions of an edge. `post` keeps the parcels in mailboxes between rounds.
    """
    peers = {p: algorithm.round(xs[p], states[p], graph[p], t) for p in sorted(graph)}
    post = {} if post is None else post
    answers: dict[PeerId, Any] = dict.fromkeys(peers)
    done: dict[PeerId, tuple[Vector, State]] = {}
    while len(done) < len(peers):
        sends: dict[PeerId, Send] = {}
        waiting: dict[PeerId, Receive | Mailbox] = {}
        met: dict[PeerId, Vector] = {}
        for peer, party in peers.items():  # each runs until it waits for others
            while not (peer in done or peer in waiting or peer in met):
                try:
                    request: Request = party.send(answers[peer])
                except StopIteration as end:
                    done[peer] = end.value
                    continue
                answers[peer] = None
                if isinstance(request, LocalSteps):
                    answers[peer] = train(peer, request.x)
                elif isinstance(request, Send):
                    sends[peer] = request
                elif isinstance(request, Receive | Mailbox):
                    waiting[peer] = request
                elif isinstance(request, Meet):
                    met[peer] = xs[peer] + request.moved
        for peer in met:  # one average after the other
            other = partner(graph[peer], t)
            if other in met and not lost(peer, other) and not lost(other, peer):
                met[peer] = met[other] = (met[peer] + met[other]) / 2
        answers |= met
        for sender, send in sends.items():
            for receiver in graph[sender].outgoing:
                if not lost(sender, receiver):
                    post.setdefault(receiver, {})[sender] = (t, send.parcel)
        for peer, request in waiting.items():
            here = post.get(peer, {})
            if isinstance(request, Mailbox):
                fresh = {j: parcel for j, (sent, parcel) in here.items() if t - sent <= request.staleness}
                answers[peer] = Received(fresh)
            else:
                parcels = {
                    j: _deliver(j, here[j][1], sends[peer])
                    for j in sorted(graph[peer].incoming)
                    if j in sends and not lost(j, peer)
                }
                answers[peer] = Received(parcels, {k for k in graph[peer].outgoing if lost(peer, k)})
    return {p: x for p, (x, _) in done.items()}, {p: state for p, (_, state) in done.items()}


def _deliver(sender: PeerId, parcel: Parcel, send: Send) -> Parcel:
    """Add the parts that the receiver blends to its mixes; returns the parcel with the other parts."""
    for part, blend in send.blends.items():
        blend.begin(sender, parcel.fields)
        blend.add(sender, parcel.parts[part])
    return Parcel({n: v for n, v in parcel.parts.items() if n not in send.blends}, parcel.fields)
