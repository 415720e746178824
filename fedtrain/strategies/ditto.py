"""Ditto: beside the global model each site has a personal one, which is held near the global one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config.values import NotNegative
from ..learning import Context, Contribution, Local, State, Vector
from .fedavg import FedAvg


@dataclass(frozen=True)
class Ditto(FedAvg):
    """Li et al. 2021, Algorithm 1; the global model is FedAvg's. The paper's λ is `penalty`: explicit steps
    need personal_lr · penalty < 2. A site's model begins as the global one of the first round that the site
    counts in."""

    penalty: NotNegative = 0.1
    personal_lr: NotNegative = 0.0  # 0: train.lr

    def site_init(self, start: Vector) -> State:
        return {"v": start.clone()}

    def pull(self, gradient: Vector, weights: Vector, context: Context) -> None:
        """∇F(v) + λ (v − w), w being the global weights."""
        gradient.add_(weights - context.start, alpha=self.penalty)

    def train(self, local: Local) -> Contribution:
        v = local.memory["v"]
        v = v + local.train(v, self.pull, lr=self.personal_lr).delta
        return replace(super().train(local), memory={"v": v})

    def personal(self, local: Local) -> Vector:
        return local.memory["v"]
