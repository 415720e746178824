"""IFCA: several models, of which each site trains the one that fits the site's data best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ..config.values import NotNegative, Positive
from ..learning import Bounded, Contribution, Local, RoundSums, State, Vector
from .base import Strategy


@dataclass(frozen=True)
class Ifca(Strategy):
    """Ghosh et al. 2020, Algorithm 1, option II. One model is the global weights, the others are the server's
    state. A site adds zeros to the sums of the models that it did not choose, so nobody learns which one the
    site chose; it evaluates the one that it trained last."""

    models: Annotated[int, Meta(ge=2)] = 2  # the paper's k; each costs its bytes
    spread: NotNegative = 0.1  # standard deviation of the further models around the first
    clip: Positive = 1.0  # bound on a coordinate of a further model's delta
    max_weight, weighs = 1.0, ("equal",)

    @property
    def down(self) -> tuple[str, ...]:
        return tuple(f"model{i}" for i in range(1, self.models))

    @property
    def up(self) -> tuple[Bounded, ...]:
        return tuple(Bounded(name, self.clip) for name in self.down)

    @property
    def scalars(self) -> tuple[Bounded, ...]:
        return tuple(Bounded(name, 1.0) for name in self.down)

    def init(self, weights: Vector) -> State:
        import torch

        draw = torch.Generator().manual_seed(0)
        noise = torch.randn(len(self.down), len(weights), dtype=torch.float64, generator=draw)
        return dict(zip(self.down, weights + (self.spread * noise).to(weights.dtype), strict=True))

    def site_init(self, start: Vector) -> State:
        return {"chosen": start.new_zeros(1)}

    def train(self, local: Local) -> Contribution:
        models = [local.start, *(local.down[name] for name in self.down)]
        losses = [local.loss(model) for model in models]
        chosen = losses.index(min(losses))
        delta = local.train(models[chosen]).delta
        ones = [float(i == chosen) for i in range(self.models)]
        others = dict(zip(self.down, ones[1:], strict=True))
        memory = {"chosen": local.memory["chosen"].new_full((1,), chosen)}
        return Contribution(delta, ones[0], {n: delta * one for n, one in others.items()}, others, memory)

    def personal(self, local: Local) -> Vector:
        chosen = int(local.memory["chosen"])
        return local.down[f"model{chosen}"] if chosen else local.start

    def step(self, weights: Vector, state: State, round: RoundSums) -> tuple[Vector, State]:
        moved = {
            name: state[name] + (round.sums[name] / max(round.scalars[name], 1.0)).to(weights.dtype)
            for name in self.down
        }
        return weights.add_(round.mean), moved
