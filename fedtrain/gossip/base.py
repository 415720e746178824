"""The base class of gossip algorithms: a frozen dataclass, a state, and a generator that is one peer's round.

The generator does no I/O. It yields requests, and its driver (`driver.py`, or a peer over ZeroMQ) owns the
sockets, clocks, threads and the training engine:

    yielded          sent back      when
    LocalSteps(x)    a new vector   H local steps from x are done; x itself stays as it is
    Send(parcel)     None           at once; the bytes move while the peer goes on
    Receive()        Received       every in-neighbour is done, dead, or past the deadline
    Mailbox(k)       Received       at once: the newest parcel of each neighbour, at most k rounds old
    Meet(Δ, k)       a new vector   at once: the model as averages with neighbours have made it by now, plus Δ
    Judged(shares)   None           at once; the shares are for the log

It returns (x, state), which commit together. To abandon a round, a driver closes the generator.

Missing peers: in symmetric modes the driver leaves an edge out at both its ends, and the weight of a silent
neighbour returns to self, so W stays doubly stochastic. Where a sum over all peers must stay (`conserved`), a
peer takes back the shares that it knows to be undelivered (`Received.undelivered`), and those of which it
learns later by `take_back`.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..config.own import wrong_pair
from ..config.values import Settings
from ..exchange import Neighborhood, PeerId

if TYPE_CHECKING:
    import torch

    Vector = torch.Tensor  # 1-D, float32 or float64: every trained coordinate of a model, in arena order
    State = dict[str, torch.Tensor]  # kept between rounds; {} for an algorithm without state

PIECE = 1 << 18  # coordinates folded at a time, so that a product stays in a core's cache


@dataclass(frozen=True)
class Parcel:
    """The message that a peer sends to all its neighbours in a round.

    The vectors are 1-D, contiguous, of any dtype (uint8 for a compressor's bytes) and usually views: they
    must not change before the round is over. Their order is the order in which they are sent.
    """

    parts: Mapping[str, torch.Tensor]
    fields: Mapping[str, float] = field(default_factory=dict)  # numbers for the header, such as "mass"

    @property
    def nbytes(self) -> int:
        """The bytes of all parts, without the parcel's header."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())


@dataclass(frozen=True)
class LocalSteps:
    """Train from x on the peer's own data. The driver sends back a new Vector."""

    x: Vector


@dataclass(frozen=True)
class Send:
    """Send the parcel to the out-neighbours of this round. The driver adds the parts of the in-neighbours'
    parcels that `blends` names to those mixes as they arrive. `model`: the peer's own before the average,
    where the parcel has no whole "x"."""

    parcel: Parcel
    blends: Mapping[str, Mix] = field(default_factory=dict)
    model: Vector | None = None


@dataclass(frozen=True)
class Receive:
    """Wait for the in-neighbours of this round. The driver sends back a Received."""


@dataclass(frozen=True)
class Mailbox:
    """Don't wait. The driver sends back a Received of the neighbours whose newest parcel is at most
    `staleness` of the peer's own rounds old."""

    staleness: int


@dataclass(frozen=True)
class Meet:
    """Add what local steps found to the model, which neighbours may have averaged with theirs since the
    round began. The driver sends back the sum; when the round is over it asks one neighbour for an average.
    It waits only where an earlier question is `staleness` of the peer's own rounds old, and not answered."""

    moved: Vector
    staleness: int


@dataclass(frozen=True)
class Received:
    """The parcels of the neighbours that sent the whole one, without the parts that went into a blend."""

    parcels: Mapping[PeerId, Parcel]
    undelivered: Collection[PeerId] = ()  # out-neighbours that certainly did not get this peer's parcel


@dataclass(frozen=True)
class Judged:
    """For the log: the part of each neighbour's model that a robust rule used, from 0 (none) to 1 (all)."""

    shares: Mapping[PeerId, float]


Request = LocalSteps | Send | Receive | Mailbox | Meet | Judged
if TYPE_CHECKING:
    Round = Generator[Request, Any, tuple[Vector, State]]


class Algorithm(Settings):
    """How peers average. The fields of an algorithm are its configuration; only x and the state change.

    A custom algorithm is a frozen dataclass that defines `round`, a generator of the requests at the top of
    this file, and `init` where it keeps something between rounds. A field `compressor: CompressorLike` is
    given gossip.compressor, as its contraction. Derived from Ruled (gossip.rules.base) it is given
    gossip.rule. gossip.algorithm = "module:Class" names it, and its other fields are keys of [gossip].

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class AverageThenTrain(Algorithm):
    ...     def round(self, x, state, near, t):
    ...         mean = Blend(x, near)
    ...         yield Send(Parcel({"x": x}), {"x": mean})
    ...         yield Receive()
    ...         return (yield LocalSteps(mean.to_self())), state
    >>> import torch
    >>> from fedtrain.gossip import step
    >>> from fedtrain.topology import Topology
    >>> graph = Topology("complete").round(["a", "b"], 0).graph
    >>> xs = {"a": torch.tensor([0.0]), "b": torch.tensor([2.0])}
    >>> step(AverageThenTrain(), xs, {"a": {}, "b": {}}, graph, 0, train=lambda peer, x: x + 1)[0]
    {'a': tensor([2.]), 'b': tensor([2.])}
    """

    section: ClassVar[str] = "gossip"
    directed: ClassVar[bool] = False  # whether W may be push-sum weights; else W must be doubly stochastic
    waits: ClassVar[bool] = True  # whether a peer waits for its in-neighbours; else it yields a Mailbox
    static: ClassVar[bool] = False  # whether the graph must be the same in every round
    sums: ClassVar[bool] = False  # whether the weighted sum over the neighbours suffices
    optional: ClassVar[frozenset[str]] = frozenset()  # parts that may be absent; the algorithm checks them

    def init(self, x: Vector) -> State:
        """The state before round 0."""
        return {}

    def round(self, x: Vector, state: State, near: Neighborhood, t: int) -> Round:
        """One peer's round t; returns (the new x, the new state). It must not change `x` and `state`."""
        raise NotImplementedError("an algorithm says what a round is")

    def wrong(self, method: str, given: Sequence[Any], found: Any) -> Iterator[str]:
        """What is wrong with what a method of the user's own returned; what is "" is in order."""
        if method == "round":
            yield wrong_pair(found, given[0], "(x, state)")

    def conserved(self) -> str:
        """The part of a parcel whose sum over all peers must stay: each share of it is counted by its taker,
        whole and once, or comes back. "": there is none."""
        return ""

    def take_back(self, x: Vector, state: State, weight: float, parcel: Parcel) -> tuple[Vector, State]:
        """(x, state) after a round, with `weight` times a parcel of an earlier round that nobody counted."""
        raise NotImplementedError("an algorithm that conserves a sum says how")

    def everyone(self, t: int) -> bool:
        """Whether round t goes over the complete graph, whatever the topology."""
        return False

    def mix_extras(self, own: Vector, near: Neighborhood, mass: float) -> Mix:
        """The mix for buffers and estimates, which are sent together with the algorithm's own parts."""
        return Blend(own, near, mass)


class CompressorLike(Protocol):
    """The methods that CHOCO calls on a compressor; all classes of fedtrain.compression have them."""

    def init(self, n: int) -> State:
        """The state before the first call."""

    def encode(self, vector: Vector, seed: int, state: State) -> tuple[torch.Tensor, State]:
        """The payload (uint8), and the state for the next call."""

    def decode(self, payload: torch.Tensor, seed: int, n: int) -> Vector:
        """An approximation of the vector."""


class Fold(Protocol):
    """Takes one part of the neighbours' parcels, chunk by chunk.

    A driver calls `begin` when a neighbour's parcel is announced, and `add` for each of its chunks in order.
    It calls neither again for a neighbour that is lost half way.
    """

    def begin(self, peer: PeerId, fields: Mapping[str, float]) -> None:
        """A neighbour's parcel is announced, with these header fields."""

    def add(self, peer: PeerId, chunk: Vector) -> None:
        """The next coordinates of a neighbour's vector; the chunk is valid during this call only."""


class Mix(Fold, Protocol):
    """A Fold whose result is one vector."""

    @property
    def shares(self) -> Mapping[PeerId, float]:
        """The part of each neighbour's model that was used, as in Judged; {} for a rule that judges none."""

    def to_self(self) -> Vector:
        """The mix. In a mean, the weight of a model that did not arrive returns to the peer's own."""


class Blend:
    """The Mix kept·own + Σ weight_j·x_j over the neighbours whose models arrive, added chunk by chunk.

    At each coordinate neighbours are added in the order of the calls (drivers call by name), each product
    and each sum rounded once. So the bits depend neither on timing nor on where chunks end.
    """

    def __init__(self, own: Vector, near: Neighborhood, mass: float = 1.0) -> None:
        """`mass`: the mass of `own` in push-sum; 1 in symmetric modes."""
        self._own, self._near, self._mass = own, near, mass
        self.shares: Mapping[PeerId, float] = {}
        self._sum = own * (near.own * mass)
        self._scratch = own.new_empty(min(PIECE, own.numel()))
        self._weight: dict[PeerId, float] = {}
        self._came = dict.fromkeys(near.incoming, 0)  # coordinates received, from the first on

    def begin(self, peer: PeerId, fields: Mapping[str, float]) -> None:
        self._weight[peer] = self._near.incoming[peer] * fields.get("mass", 1.0)

    def given(self, peer: PeerId, weight: float) -> None:
        """After `begin`: its giver parted with so much of it, by a view that may differ from ours for a
        moment. Where a sum must stay, that counts."""
        self._weight[peer] *= weight / self._near.incoming[peer]

    def add(self, peer: PeerId, chunk: Vector) -> None:
        at, weight = self._came[peer], self._weight[peer]
        self._came[peer] = at + chunk.numel()
        total = self._sum[at : self._came[peer]]
        assert len(total) == len(chunk), (peer, at, len(chunk), self._own.numel())
        for start in range(0, len(chunk), PIECE):
            piece = chunk[start : start + PIECE]
            total[start : start + PIECE].add_(self._scratch[: len(piece)].copy_(piece).mul_(weight))

    def add_sum(self, total: Vector) -> None:
        """Add Σ weight_j·x_j of all neighbours at once, where only that sum is known."""
        self._sum.add_(total)
        self._came = dict.fromkeys(self._came, self._own.numel())

    def to_self(self) -> Vector:
        """Mix.to_self; the weights of the result sum to 1."""
        for peer, came in self._came.items():
            if came < self._own.numel():
                self._sum[came:].add_(self._own[came:], alpha=self._near.incoming[peer])
        return self._sum

    def as_given(self, returned: float = 0.0) -> Vector:
        """The sum of what this peer keeps and what came. Nothing takes the place of what did not come, as it
        would in a mean: its giver has it. `returned`: the weight of what was not delivered."""
        return self._sum.add_(self._own, alpha=returned) if returned else self._sum

    def by_mass(self, returned: float = 0.0) -> tuple[Vector, float]:
        """(the average by mass of own and received models, its mass). `returned`: the undelivered mass.

        The mass of a vector that arrived in part does not count, because its sender has taken it back. The
        coordinates that did arrive are averaged in, so every coordinate is an average of models.
        """
        if returned:
            self._sum.add_(self._own, alpha=returned)
        numel = self._own.numel()
        came = [(self._came[peer], weight) for peer, weight in sorted(self._weight.items())]
        mass = self._near.own * self._mass + returned + sum(weight for n, weight in came if n == numel)
        cuts = sorted({0, numel, *(n for n, _ in came)})
        for start, stop in pairwise(cuts):
            there = mass + sum(weight for n, weight in came if stop <= n < numel)
            self._sum[start:stop].div_(there)
        return self._sum, mass
