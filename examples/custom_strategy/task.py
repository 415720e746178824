"""Breast cancer (Wisconsin): 569 tumours, 30 measurements each, benign or malignant."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import fedtrain


class Tumours(fedtrain.Task):
    def __init__(self):
        path = Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "breast_cancer.csv"
        rows = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32))
        self.x, self.y = rows[:, :30].clamp(min=1e-3).log(), rows[:, 30]
        self.held_out = torch.arange(len(rows)) % 4 == 3

    def model(self):
        return nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 1))

    def data(self, site):
        return self.x[~self.held_out], self.y[~self.held_out]

    def eval_data(self, site):
        return self.x[self.held_out], self.y[self.held_out]

    def loss(self, model, batch):
        x, benign = batch
        return F.binary_cross_entropy_with_logits(model(x).squeeze(1), benign)

    def evaluate(self, model, batch):
        x, benign = batch
        logits = model(x).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, benign, reduction="sum")
        return {"loss": (loss, len(x)), "accuracy": (((logits > 0) == (benign > 0.5)).sum(), len(x))}
