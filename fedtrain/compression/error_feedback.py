"""Error feedback: the part of a vector that a compressor leaves out is added to the next vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from .base import Compressor

if TYPE_CHECKING:
    from .base import Payload, State, Vector


@dataclass(frozen=True)
class ErrorFeedback(Compressor):
    """Send C(x + e), then e ← x + e − C(x + e) (Karimireddy et al. 2019, Algorithm 2).

    So the sent vectors and the residual e add up to the sum of all inputs: every value is sent in the end.
    C is the inner compressor's `contraction`. The residual is one vector at the sender.
    """

    inner: Compressor

    def init(self, n: int) -> State:
        import torch

        return {"residual": torch.zeros(n), **_named(self.inner.contraction().init(n))}

    def encode(self, vector: Vector, seed: int, state: State) -> tuple[Payload, State]:
        inner, wanted = self.inner.contraction(), vector + state["residual"]
        own = {name.removeprefix("inner/"): t for name, t in state.items() if name.startswith("inner/")}
        payload, own = inner.encode(wanted, seed, own)
        residual = wanted.sub_(inner.decode(payload, seed, len(vector)))
        return payload, {"residual": residual, **_named(own)}

    def decode(self, payload: Payload, seed: int, n: int, out: Vector | None = None) -> Vector:
        return self.inner.contraction().decode(payload, seed, n, out)

    def bytes_for(self, n: int) -> int:
        return self.inner.contraction().bytes_for(n)

    def shaped(self, shapes: Sequence[tuple[int, ...]]) -> Self:
        return replace(self, inner=self.inner.shaped(shapes))


def _named(state: State) -> State:
    return {f"inner/{name}": t for name, t in state.items()}
