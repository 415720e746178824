"""Handwritten digits, 8×8 pixels: one pool of data, which [simulate] in fedtrain.toml splits among sites."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import fedtrain


class Digits(fedtrain.Task):
    def __init__(self):
        # The file that sklearn.datasets.load_digits reads, without the second that importing sklearn takes.
        path = Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"
        rows = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32))
        self.x, self.y = rows[:, :64] / 16, rows[:, 64].long()
        self.held_out = torch.arange(len(rows)) % 5 == 4  # every fifth is for testing

    def model(self):
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def data(self, site):
        return self.x[~self.held_out], self.y[~self.held_out]

    def eval_data(self, site):
        return self.x[self.held_out], self.y[self.held_out]

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    def evaluate(self, model, batch):
        x, y = batch
        logits = model(x)
        loss = F.cross_entropy(logits, y, reduction="sum")
        return {"loss": (loss, len(y)), "accuracy": ((logits.argmax(1) == y).sum(), len(y))}
