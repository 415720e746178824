"""Gossip: a peer that trains and averages with its neighbours, without a server.

`Peer.step` is the page: it drives an algorithm of gossip/ between the training engine and a peer's end of
the graph seam, over ZeroMQ (peer.py) or in memory (gossip_simulation.py), and can't tell which.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arena import Arena
from ...exchange import Neighborhood, Neighbors, PeerId
from ...gossip import Algorithm, Judged, LocalSteps, Receive, Received, Ruled, Send, rules
from ...gossip.adpsgd import ADPSGD
from ...messages import Metrics, Update, averages
from ...secagg.peer_sums import PeerSums
from ...store import Checkpoint
from .averaging import Averaging, Summing
from .mailbox import Letters
from .pairs import Pairs
from .parcels import check_finite, other_parts, trained_part, write
from .pledges import Pledges

if TYPE_CHECKING:
    import torch

    Vector = torch.Tensor
    Floats = np.ndarray[Any, Any]

Train = Callable[[int, Arena, Arena], Awaitable[Update]]  # round, from these weights; delta into the last
GoOn = Callable[[], Awaitable[Neighborhood | None]]


@dataclass(frozen=True)
class RoundReport:
    """How one round of a peer went."""

    metrics: Metrics  # of its own training
    missing: Mapping[PeerId, str]  # in-neighbour whose share did not come -> why
    loss: float  # this peer's estimate of the mean training loss over all peers
    moved: float  # its estimate of how far averaging moved the models: root mean square, relative to a model
    heard: Collection[PeerId] = ()  # in-neighbours whose model is in what this peer has now
    clipped: int = 0  # coordinates beyond gossip.clip, under masks
    judged: Mapping[PeerId, float] = field(default_factory=dict)  # as in gossip.Judged, by a robust rule

    @property
    def estimates(self) -> dict[str, float]:
        """For the log; without the loss when training gives none (see [privacy])."""
        loss = {"mean_loss": self.loss} if "loss" in self.metrics else {}
        clipped = {"clipped": float(self.clipped)} if self.clipped else {}
        return loss | clipped | {"moved": self.moved}

    @property
    def doubted(self) -> dict[PeerId, float]:
        """The neighbours whose models counted in part or not at all."""
        return {peer: share for peer, share in self.judged.items() if share < 1}


class Peer:
    """One peer: a model, an algorithm's state, and how both change in a round.

    What lives between rounds is `kept()`; a peer that is given it back goes on as if nothing had happened.
    """

    def __init__(
        self,
        name: PeerId,
        algorithm: Algorithm,
        model: Arena,
        train: Train,
        neighbors: Neighbors,
        sums: PeerSums | None = None,
        clip: float = 16.0,
        pledges: Pledges | None = None,
    ) -> None:
        """With `sums` it gives models into sums only; `clip`: see [gossip]; `pledges`: if a sum must stay."""
        import torch

        self.name, self.algorithm, self.model, self.round = name, algorithm, model, 0
        self.state = algorithm.init(trained_part(model))
        self._robust = isinstance(algorithm, Ruled) and not isinstance(algorithm.rule, rules.GraphMean)
        self._train, self.neighbors = train, neighbors
        self.sums, self.clip, self.pledges = sums, clip, pledges
        if pledges is not None:
            self.round = max(0, pledges.begun)  # where it was killed in one
        self._gauge = torch.zeros(2, dtype=torch.float64)  # estimates of the means over all: loss, moves²
        self._own = torch.zeros(2, dtype=torch.float64)  # what this peer measured, as it sent it last
        self._now = torch.zeros(2, dtype=torch.float64)  # what this peer measures now
        self._metrics: Metrics = {}
        self.unheard: Vector | None = None  # what it found, and no neighbour has heard of yet
        self._mailbox = Letters(neighbors, self._robust)
        self.pairs = Pairs(self, algorithm.staleness) if isinstance(algorithm, ADPSGD) else None

    @property
    def bytes_out(self) -> int:
        return self.neighbors.bytes_out

    def kept(self) -> dict[str, torch.Tensor]:
        """All that the next round starts from, but for its number."""
        own = {"model": self.model.data, "gauge": self._gauge, "told": self._own, "now": self._now}
        if self.pledges is not None:
            own |= self.pledges.kept()
        if self.pairs is not None and self.pairs.began is not None:
            own["began"] = self.pairs.began
        return own | {f"state/{name}": value for name, value in self.state.items()}

    def go_on(self, checkpoint: Checkpoint) -> None:
        """From what `kept` was, under "NAME/" in a checkpoint's state."""
        prefix = f"{self.name}/"
        kept = {n.removeprefix(prefix): v for n, v in checkpoint.state.items() if n.startswith(prefix)}
        self.model = Arena(self.model.schema, kept.pop("model"))
        self._gauge, self._own, self._now = kept.pop("gauge"), kept.pop("told"), kept.pop("now").clone()
        self.round = checkpoint.round
        if self.pledges is not None:
            self.pledges.go_on(kept)
            self.round = max(self.round, self.pledges.begun)  # it had gone on to that one
        if self.pairs is not None:
            self.pairs.began = kept.get("began")
        self.state = {n.removeprefix("state/"): v for n, v in kept.items() if n.startswith("state/")}

    def tell_account(self) -> None:
        """Say with the next announcements what is committed of others' shares."""
        if self.pledges is not None:
            self.neighbors.account(self.pledges.counted)

    async def step(self, near: Neighborhood, deadline_s: float, go_on: GoOn | None = None) -> RoundReport:
        """The next round: do what the algorithm asks for; then model and state change together. `go_on`,
        after training, returns this peer's part of a later round, where its neighbours are by then."""
        if self.pairs is not None:
            missing = await self.pairs.round(near, deadline_s)
            return self._report(missing, near.incoming.keys() - missing.keys())
        t, others, own = self.round, other_parts(self.model), self._own
        self.neighbors.announce(t, near.incoming.keys() | near.outgoing.keys())
        party = self.algorithm.round(trained_part(self.model), self.state, near, t)
        answer: Vector | Received | None = None
        exchange: Averaging | None = None
        found: Vector | None = None  # by this round's training
        done, early = False, False  # it was found for an earlier round, or after this peer's share had left
        judged: Mapping[PeerId, float] = {}
        while True:
            try:
                request = party.send(answer)
            except StopIteration as end:
                x, state = end.value
                break
            answer = None
            if isinstance(request, LocalSteps):
                if done and found is not None:
                    answer, done = request.x + found, False
                    continue
                try:
                    answer, moved = await self.local_steps(request.x, others)
                except BaseException:
                    if exchange is not None:
                        exchange.give_up()
                    raise
                found, early = answer - request.x, exchange is not None
                if exchange is None and go_on is not None and (later := await go_on()) is not None:
                    near, t, done, answer = later, self.round, True, None
                    moved |= {n: v + (moved[n] - others[n]) for n, v in other_parts(self.model).items()}
                    party.close()
                    party = self.algorithm.round(trained_part(self.model), self.state, near, t)
                others = moved
            elif isinstance(request, Send):
                own = self._now.clone()
                # Parts that are averaged plainly, whatever the algorithm. By the gauge each peer follows
                # the means over all peers, as gradient tracking follows the mean gradient.
                sides = {**others, "gauge": self._gauge + (own - self._own)}
                kind = Averaging if self.sums is None else Summing
                exchange = kind(self, near, request, sides, deadline_s)
            elif isinstance(request, Receive):
                assert exchange is not None, "an algorithm sends before it receives"
                answer = await exchange.received()
            elif isinstance(request, Judged):
                judged = request.shares
            else:
                assert exchange is not None, "an algorithm sends before it looks into its mailbox"
                answer = heard = self._mailbox.newest(t, request.staleness, exchange.parcel.parts)
                stale = f"sent no model in the last {request.staleness} rounds"
                exchange.missing = dict.fromkeys(near.incoming.keys() - heard.parcels.keys(), stale)
                exchange.read(heard)
        assert exchange is not None, "every algorithm tells its neighbours something"
        check_finite(x, self.name, t)
        mixed = exchange.mixed()
        self._gauge, self._own = mixed.pop("gauge"), own
        others = {name: mixed[name] + (others[name] - sides[name]) for name in others}
        if (told := exchange.model) is not None:
            self._now[1] = float((x - told).norm() / x.norm().clamp(min=1e-30)) ** 2
        before = self.unheard if exchange.late else None
        self.unheard = found if exchange.late or (early and not self.algorithm.conserved()) else None
        if before is not None and self.unheard is not None:
            self.unheard = before + self.unheard
        if self.pledges is not None:
            self.pledges.note(t, exchange.parcel, exchange.given, exchange.counted)
            accounts = self.neighbors.accounts()
            x, state, self._gauge = self.pledges.settle(accounts, x, state, self._gauge)
        self.model, self.state, self.round = write(self.model.load(), x, others), state, t + 1
        return self._report(exchange.missing, exchange.heard, exchange.clipped, judged)

    def _report(self, missing: Mapping[PeerId, str], *how: Any) -> RoundReport:
        loss, moved = self._gauge.tolist()
        return RoundReport(self._metrics, missing, loss, math.sqrt(max(0.0, moved)), *how)

    async def local_steps(self, start: Vector, others: dict[str, Vector]) -> tuple[Vector, dict[str, Vector]]:
        weights, delta = write(self.model.load(), start, others), Arena.zeros(self.model.schema)
        update = await self._train(self.round, weights, delta)
        self._metrics, self._now[0] = update.metrics, averages({"": update.metrics}).get("loss", 0.0)
        moved = other_parts(delta)
        return start + trained_part(delta), {name: v + moved[name] for name, v in others.items()}
