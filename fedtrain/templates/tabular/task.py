"""What to train. The same file runs in `fedtrain simulate` and at every site: replace data() first."""

import zlib

import torch
from torch import nn
from torch.nn import functional as F

import fedtrain


class Task(fedtrain.Task):
    def sites(self):
        return ["site-1", "site-2", "site-3"]  # who has data; without this, simulate.partition splits a pool

    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def data(self, site):
        return examples(site, 400)  # here: read this site's files, from self.data_dir

    def eval_data(self, site):
        return examples(f"{site} held out", 200)

    def loss(self, model, batch):
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    def evaluate(self, model, batch):  # each metric as (sum, count): averages over sites are exact
        inputs, labels = batch
        logits = model(inputs)
        wrong = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": (wrong, len(labels)), "accuracy": ((logits.argmax(1) == labels).sum(), len(labels))}


def examples(name, count):
    """Made-up patients: 8 measurements each, ill or well. Each site sees others, so delete this."""
    seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    inputs = torch.randn(count, 8, generator=seeded) + (0.5 if "1" in name else -0.5)
    return inputs, (inputs[:, 0] * inputs[:, 1] + inputs[:, 2] > 0).long()
