"""A linear task of three natural sites whose data differ, small enough to measure by plain torch."""

import numpy as np
import torch
from torch.nn import functional as F

WARDS = """
import torch
import fedtrain

class Wards(fedtrain.Task):
    def model(self):
        return torch.nn.Linear(3, 2, dtype=torch.float64)

    def sites(self):
        return ["a", "b", "c"]

    def data(self, site):
        draw = torch.Generator().manual_seed(ord(site[0]))
        x = torch.randn(30 + ord(site[0]) % 7, 3, generator=draw, dtype=torch.float64)
        return x, (x.sum(1) + 0.4 * (ord(site[0]) - 98) > 0).long()

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
"""
SITES = ["a", "b", "c"]


def measured(model, x, y):
    """What a model is worth on these examples, by plain torch and numpy."""
    with torch.no_grad():
        scores = model(x)
    right = np.asarray(scores.argmax(1)) == np.asarray(y)
    return {"accuracy": float(right.mean()), "loss": float(F.cross_entropy(scores, y))}
