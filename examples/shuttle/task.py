"""Odd readings of a space shuttle's sensors, on two hundred small devices that each hold sixty."""

import csv
import gzip

import torch
from torch import nn
from torch.nn import functional as F

import fedtrain
from fedtrain import metrics

SENSORS = [f"f{n}" for n in range(2, 10)]  # f1, the time, gives the answer away
SPREAD = (4, 90, 4, 30, 25, 40, 45, 30)  # of each, roughly
HIDDEN = 16


class Shuttle(fedtrain.Task):
    def __init__(self):
        with gzip.open(self.data_dir / "shuttle.csv.gz", "rt", newline="") as f:
            rows = list(csv.DictReader(f))
        readings = torch.tensor([[float(row[name]) for name in SENSORS] for row in rows])
        self.x = torch.asinh(readings / torch.tensor(SPREAD))  # a few are a thousand times the usual
        self.y = torch.tensor([int(row["anomaly"]) for row in rows])
        self.held_out = torch.arange(len(rows)) % 5 == 4  # every fifth is for testing

    def model(self):
        return nn.Sequential(nn.Linear(len(SENSORS), HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2))

    def data(self, site):
        return self.x[~self.held_out], self.y[~self.held_out]

    def eval_data(self, site):
        return self.x[self.held_out], self.y[self.held_out]

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        logits, y = model(batch[0]), batch[1]
        loss = F.cross_entropy(logits, y, reduction="sum")
        return {"loss": (loss, len(y)), **metrics.confusion(logits, y, classes=2)}

    def metrics(self, sums):
        return {"accuracy": metrics.accuracy(sums), "macro F1": metrics.macro_f1(sums)}
