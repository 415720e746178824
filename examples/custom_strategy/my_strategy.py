"""A strategy of one's own: Signum (Bernstein et al. 2018) as the server's optimizer."""

from dataclasses import dataclass

import torch

from fedtrain.strategies import Strategy


@dataclass(frozen=True)
class FedSign(Strategy):
    """Every coordinate moves by the same amount, the way that the sites on average moved lately.

    Its fields are keys of [strategy]; what lives between rounds is the state, and is part of the checkpoint.
    """

    server_lr: float = 0.02
    momentum: float = 0.5

    def init(self, weights):
        return {"direction": torch.zeros_like(weights)}

    def step(self, weights, state, round):
        direction = self.momentum * state["direction"] + (1 - self.momentum) * round.mean
        return weights.add_(direction.sign(), alpha=self.server_lr), {"direction": direction}
