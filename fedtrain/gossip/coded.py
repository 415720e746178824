"""A vector for a peer's neighbours, as it is or in fewer bytes.

What an encoding leaves out goes into the next round's bytes (error feedback). A peer mixes what all were
told, also its own vector, and adds what it did not tell: x ← x + Σ wⱼ(x̂ⱼ − x̂). Both ends of an edge move by
opposite amounts, so the mean stays, whatever the encoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..digest import seed_of
from ..errors import BadUpdate

if TYPE_CHECKING:
    import torch

    from ..exchange import Neighborhood
    from .base import CompressorLike, Mix, Received, State, Vector


class Coded:
    """One part of a parcel in one round. `told`: the vector as neighbours have it; `kept`: the next state."""

    def __init__(
        self, name: str, own: Vector, near: Neighborhood, t: int, compressor: CompressorLike | None,
        state: State,
    ) -> None:  # fmt: skip
        """`compressor` None: the vector travels as it is."""
        self._name, self._own, self._near, self._t, self._compressor = name, own, near, t, compressor
        self.part: torch.Tensor = own
        self.told, self.kept = own, dict[str, "torch.Tensor"]()
        if compressor is not None:
            before = {n.removeprefix(f"{name}/"): v for n, v in state.items() if n.startswith(f"{name}/")}
            seed = seed_of(near.peer, t, name)
            self.part, after = compressor.encode(own.float(), seed, before)
            self.told = compressor.decode(self.part, seed, len(own)).to(own.dtype)
            self.kept = {f"{name}/{n}": v for n, v in after.items()}

    @staticmethod
    def init(name: str, x: Vector, compressor: CompressorLike | None) -> State:
        """Its state before round 0."""
        first = {} if compressor is None else compressor.init(x.numel())
        return {f"{name}/{n}": v for n, v in first.items()}

    def blends(self, mix: Mix) -> dict[str, Mix]:
        """For Send: what is added as it comes."""
        return {self._name: mix} if self._compressor is None else {}

    def read(self, mix: Mix, received: Received) -> None:
        """Add what came encoded to the mix over `told`; what makes no sense is as if it had not come."""
        if self._compressor is None:
            return
        for peer, parcel in sorted(received.parcels.items()):
            try:
                seed = seed_of(peer, self._t, self._name)
                vector = self._compressor.decode(parcel.parts[self._name], seed, len(self._own))
            except BadUpdate:
                continue
            if vector.isfinite().all():
                mix.begin(peer, parcel.fields)
                mix.add(peer, vector.to(self._own.dtype))

    def whole(self, mixed: Vector) -> Vector:
        """A mix over `told`, and what was not told."""
        return mixed if self._compressor is None else mixed.add_(self._own - self.told)
