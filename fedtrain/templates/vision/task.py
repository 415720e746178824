"""Which of three shapes a picture has. This file runs in simulations and at sites: replace data() first."""

import zlib

import torch
from torch import nn
from torch.nn import functional as F

import fedtrain


class Task(fedtrain.Task):
    def sites(self):
        return ["site-1", "site-2", "site-3"]  # who has data; without this, simulate.partition splits a pool

    def model(self):
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(64, 3),
        )  # fmt: skip

    def data(self, site):
        return pictures(site, 300)  # here: read this site's pictures, from self.data_dir

    def eval_data(self, site):
        return pictures(f"{site} held out", 150)

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model, batch):  # each metric as (sum, count): averages over sites are exact
        images, labels = batch
        logits = model(images)
        wrong = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": (wrong, len(labels)), "accuracy": ((logits.argmax(1) == labels).sum(), len(labels))}


def pictures(name, count):
    """Made-up pictures of a bar, a beam or a block in noise: float32 [count, 1, 12, 12], int64 [count]."""
    seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    images = 0.5 * torch.randn(count, 1, 12, 12, generator=seeded)
    labels = torch.randint(3, (count,), generator=seeded)
    corners = torch.randint(8, (count, 2), generator=seeded).tolist()
    for image, label, (y, x) in zip(images, labels.tolist(), corners, strict=True):
        height, width = ((4, 1), (1, 4), (2, 2))[label]
        image[0, y : y + height, x : x + width] += 2.0
    return images, labels
