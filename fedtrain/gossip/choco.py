"""CHOCO-SGD: gossip with compressed differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..config.values import Fraction
from ..digest import seed_of
from ..errors import BadUpdate
from .base import Algorithm, CompressorLike, LocalSteps, Parcel, Receive, Send

if TYPE_CHECKING:
    import torch

    from ..exchange import Neighborhood, PeerId
    from .base import Received, Round, State, Vector


@dataclass(frozen=True)
class Choco(Algorithm):
    """q = Q(x − x̂), x̂ ← x̂ + q, x ← x + γ Σⱼ wᵢⱼ(x̂ⱼ − x̂ᵢ) (Koloskova et al. 2019, Algorithm 2).

    Every peer keeps the public copy x̂ of itself and of each neighbour; the part of x that q leaves out stays
    in x − x̂ and is sent later. Both ends of an edge move by opposite amounts, so the mean stays to the last
    rounding while both hold the same copies. A peer that missed a q says so in the next round ("lost/NAME"):
    both ends leave that edge out, and one round later the peer is sent the whole copy.

    The compressor should be a contraction, without an error feedback of its own. γ = 1 suits int8 and sign,
    0.3 the top 10 %, a smaller γ fewer bytes. The paper's bound on γ is 100 to 1000 times too careful.
    """

    compressor: CompressorLike
    gamma: Fraction = 1.0

    static: ClassVar[bool] = True
    optional: ClassVar[frozenset[str]] = frozenset({"q", "copy"})

    def init(self, x: Vector) -> State:
        own = {f"compressor/{name}": value for name, value in self.compressor.init(x.numel()).items()}
        return own | {"copy": x.new_zeros(x.shape), "sent": _number(0)}

    def round(self, x: Vector, state: State, near: Neighborhood, t: int) -> Round:
        held = {j: _held(state, j, t) for j in near.incoming}
        asked = "asked" in state  # whether a neighbour has lost this peer's copy

        trained = yield LocalSteps(x)
        payload, remembered = self._encode(trained - state["copy"], seed_of(near.peer, t), state)
        mine, sent = state["copy"] + self._decode(payload, near.peer, t, x), int(state["sent"]) + 1
        fields = {"sent": float(sent)} | {f"lost/{j}": 1.0 for j, copy in held.items() if copy is None}
        yield Send(Parcel({"q": payload} | ({"copy": mine} if asked else {}), fields))
        received: Received = yield Receive()

        after, mixed = remembered | {"copy": mine, "sent": _number(sent)}, trained.clone()
        for j, copy in held.items():
            if (parcel := received.parcels.get(j)) is None:
                continue  # this q is lost for good, so the copy is no longer valid
            theirs = int(parcel.fields.get("sent", 0))
            vector = self._next(copy, theirs, parcel, j, t, x)
            if vector is not None:
                after |= {f"copy/{j}": vector, f"sent/{j}": _number(theirs)}
            lost_ours = f"lost/{near.peer}" in parcel.fields and not asked  # if asked, this round sent it
            if lost_ours:
                after["asked"] = _number(1)
            if vector is not None and not lost_ours:  # the other end decides alike
                mixed.add_(vector - mine, alpha=self.gamma * near.incoming[j])
        return mixed, after

    def _next(
        self, copy: tuple[Vector, int] | None, sent: int, parcel: Parcel, sender: PeerId, t: int, like: Vector
    ) -> Vector | None:
        """A neighbour's public copy after its parcel; None when it can't be computed."""
        whole, q = parcel.parts.get("copy"), parcel.parts.get("q")
        if whole is not None:
            fits = (whole.dtype, whole.numel()) == (like.dtype, like.numel())
            return whole.clone() if fits else None
        if copy is None or copy[1] != sent - 1 or q is None or q.element_size() != 1:
            return None
        try:
            return copy[0] + self._decode(q, sender, t, like)
        except BadUpdate:
            return None  # as for a parcel that did not arrive

    def _encode(self, difference: Vector, seed: int, state: State) -> tuple[torch.Tensor, State]:
        own = {n.removeprefix("compressor/"): v for n, v in state.items() if n.startswith("compressor/")}
        payload, own = self.compressor.encode(difference.float(), seed, own)
        return payload, {f"compressor/{name}": value for name, value in own.items()}

    def _decode(self, payload: torch.Tensor, sender: PeerId, t: int, like: Vector) -> Vector:
        return self.compressor.decode(payload, seed_of(sender, t), like.numel()).to(like.dtype)


def _held(state: State, peer: PeerId, t: int) -> tuple[Vector, int] | None:
    """(a neighbour's public copy, the number of q in it); None if the neighbour must send the whole copy."""
    if f"copy/{peer}" in state:
        return state[f"copy/{peer}"], int(state[f"sent/{peer}"])
    return (state["copy"].new_zeros(state["copy"].shape), 0) if t == 0 else None


def _number(value: int) -> torch.Tensor:
    import torch

    return torch.tensor(value)
