"""CHOCO-SGD: gossip with compressed differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..config.values import Fraction
from ..digest import digest_of, seed_of
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
    in x − x̂ and is sent later. Copies begin at the run's first model, which all have. Both ends of an edge
    move by opposite amounts, so the mean stays to the last rounding while both hold the same copies: each q
    comes with the number of the copy that it is for ("base"), which is made of all bytes that the copy is
    made of. A peer that missed a q, or meets a sender that went on from older copies after a crash, says so
    in the next round ("lost/NAME"): both ends leave that edge out, and one round later the peer is sent the
    whole copy.

    The compressor should be a contraction, without an error feedback of its own. γ = 1 suits int8 and sign,
    others need a smaller one: tuning.py finds it. The paper's bound on γ is 100 to 1000 times too careful.
    """

    compressor: CompressorLike
    gamma: Fraction = 1.0

    static: ClassVar[bool] = True
    optional: ClassVar[frozenset[str]] = frozenset({"q", "copy"})

    def init(self, x: Vector) -> State:
        own = {f"compressor/{name}": value for name, value in self.compressor.init(x.numel()).items()}
        return own | {"copy": x.clone(), "base": _number(_name(x))}

    def round(self, x: Vector, state: State, near: Neighborhood, t: int) -> Round:
        held = {j: _held(state, j, t) for j in near.incoming}
        asked = "asked" in state  # whether a neighbour has lost this peer's copy

        trained = yield LocalSteps(x)
        payload, remembered = self._encode(trained - state["copy"], seed_of(near.peer, t), state)
        mine, base = state["copy"] + self._decode(payload, near.peer, t, x), int(state.get("base", 0))
        fields = {"base": float(base)} | {f"lost/{j}": 1.0 for j, copy in held.items() if copy is None}
        yield Send(Parcel({"q": payload} | ({"copy": mine} if asked else {}), fields), model=trained)
        received: Received = yield Receive()

        after, mixed = remembered | {"copy": mine, "base": _number(_name(payload, base))}, trained.clone()
        for j, copy in held.items():
            if (parcel := received.parcels.get(j)) is None:
                continue  # this q is lost for good, so the copy is no longer valid
            vector = self._next(copy, parcel, j, t, x)
            if vector is not None:
                name = _name(parcel.parts["q"], int(parcel.fields["base"]))
                after |= {f"copy/{j}": vector, f"base/{j}": _number(name)}
            lost_ours = f"lost/{near.peer}" in parcel.fields and not asked  # if asked, this round sent it
            if lost_ours:
                after["asked"] = _number(1)
            if vector is not None and not lost_ours:  # the other end decides alike
                mixed.add_(vector - mine, alpha=self.gamma * near.incoming[j])
        return mixed, after

    def _next(
        self, copy: tuple[Vector, int] | None, parcel: Parcel, sender: PeerId, t: int, like: Vector
    ) -> Vector | None:
        """A neighbour's public copy after its parcel; None when it can't be computed."""
        whole, q = parcel.parts.get("copy"), parcel.parts.get("q")
        if q is None or q.element_size() != 1 or "base" not in parcel.fields:
            return None
        if whole is not None:
            fits = (whole.dtype, whole.numel()) == (like.dtype, like.numel())
            return whole.clone() if fits else None
        if copy is None or copy[1] != parcel.fields["base"]:
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
    """(a neighbour's public copy, its number); None if the neighbour must send the whole copy."""
    if f"base/{peer}" in state:
        return state[f"copy/{peer}"], int(state[f"base/{peer}"])
    return (state["copy"], int(state["base"])) if t == 0 else None


def _name(values: torch.Tensor, before: int = 0) -> int:
    """The number of a copy after these bytes: 48 bits, which a float64 holds."""
    import torch

    data = digest_of(memoryview(values.contiguous().view(torch.uint8).numpy().data))
    return int(digest_of(f"{before}/{data}".encode())[:12], 16)


def _number(value: int) -> torch.Tensor:
    import torch

    return torch.tensor(value)
