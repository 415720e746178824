"""The models that benchmarks/simulate.py trains, by name. Inputs are float32 [n, 64], pictures of 8 × 8
(`cnn46k`: [n, 784]; `cifar10`: [n, 3072]); outputs are the scores of ten classes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def cifar_cnn() -> nn.Module:
    """`simple_cnn` of pfl-research's CIFAR-10 benchmark (benchmarks/model/pytorch/cnn.py)."""
    return nn.Sequential(
        nn.Unflatten(1, (3, 32, 32)), nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), nn.Linear(14 * 14 * 64, 128), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


class Lstm(nn.Module):
    """Reads a picture row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        read: Tensor = self.lstm(x.view(-1, 8, 8))[0]
        scores: Tensor = self.head(read[:, -1])
        return scores


class Block(nn.Module):
    """Attention with two heads of 16, then an MLP, each with a norm before it and a way past it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm2, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, 2, 16).permute(2, 0, 3, 1, 4)
        seen = torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, 32))
        moved: Tensor = x + self.down(torch.relu(self.up(self.norm2(x))))
        return moved


class Transformer(nn.Module):
    """Two blocks over sixteen tokens, each four pixels of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Linear(4, 32), nn.Parameter(0.1 * torch.randn(16, 32))
        self.first, self.second, self.head = Block(), Block(), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.second(self.first(self.token(x.view(-1, 16, 4)) + self.place))
        scores: Tensor = self.head(seen.mean(1))
        return scores


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp5k": lambda: mlp(64, 64, 10),  # 4,810 parameters
    "mlp50k": lambda: mlp(64, 256, 128, 10),  # 50,826
    "mlp500k": lambda: mlp(64, 672, 672, 10),  # 502,666
    "cnn6k": small_cnn,  # 6,058
    "cnn46k": cnn,  # 46,730
    "cifar10": cifar_cnn,  # 1,626,442
    "lstm12k": Lstm,  # 11,626
    "transformer": Transformer,  # 18,090
}
