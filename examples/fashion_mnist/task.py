"""Fashion-MNIST: 70,000 photographs of ten kinds of clothing, 28×28 pixels; a CNN, and a smaller model."""

import gzip
import math
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import fedtrain

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where the package dataset-fashion-mnist puts it


class FashionMNIST(fedtrain.Task):
    def model(self):
        return nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def data(self, site):
        return self.read("train")

    def eval_data(self, site):
        return self.read("t10k")

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(pixels(x)), y)

    def evaluate(self, model, batch):
        x, y = batch
        logits = model(pixels(x))
        loss = F.cross_entropy(logits, y, reduction="sum")
        return {"loss": (loss, len(y)), "accuracy": ((logits.argmax(1) == y).sum(), len(y))}

    def read(self, part):
        folder = self.data_dir if any(self.data_dir.glob("*-ubyte.gz")) else DEBIAN
        images, labels = (folder / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
        if not images.exists():
            raise fedtrain.FedtrainError(
                f"Fashion-MNIST is neither in {self.data_dir} nor in {DEBIAN}. On Debian: "
                f"apt-get install dataset-fashion-mnist. Elsewhere: put its four *-ubyte.gz files there."
            )
        return idx(images), idx(labels).long()


class Small(FashionMNIST):
    """The same with 50,890 parameters and no convolution: a step takes a twentieth of the time."""

    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10))


def pixels(x):
    """[batch, 28, 28] bytes, kept so to save memory, as [batch, 1, 28, 28] around zero."""
    return (x.unsqueeze(1).float() - 73) / 90


@cache
def idx(path):
    """A tensor from an IDX file: two zero bytes, the type (8: bytes), the rank, big-endian sizes, data."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise fedtrain.FedtrainError(f"{path} is not an IDX file of bytes")
    start = 4 + 4 * raw[3]
    shape = np.frombuffer(raw[4:start], ">u4").tolist()
    if len(raw) - start != math.prod(shape):
        raise fedtrain.FedtrainError(f"{path}: {len(raw) - start} bytes of data, its header says {shape}")
    return torch.tensor(np.frombuffer(raw, np.uint8, offset=start)).view(shape)
