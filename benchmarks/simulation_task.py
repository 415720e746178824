"""The task of benchmarks/simulate.py: a model of peers/models.py on the examples in its data folder."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from peers.models import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

import fedtrain
from fedtrain.population import Population

Examples = tuple[Tensor, Tensor]


class Pictures(fedtrain.Task):
    """`pictures.npz` holds x and y, and the sites' sizes where the task has sites of its own."""

    def __init__(self, model: str) -> None:
        self.name = model

    @cached_property
    def pool(self) -> Examples:
        with np.load(self.data_dir / "pictures.npz") as file:
            return torch.from_numpy(file["x"]), torch.from_numpy(file["y"])

    @cached_property
    def own(self) -> dict[str, Examples]:
        """The examples of each of the task's own sites."""
        with np.load(self.data_dir / "pictures.npz") as file:
            ends = np.cumsum(file["sizes"]).tolist()
        x, y = self.pool
        spans = zip(Population(len(ends)) if ends else (), [0, *ends], ends, strict=False)
        return {site: (x[begin:end], y[begin:end]) for site, begin, end in spans}

    def sites(self) -> list[str] | None:
        return list(self.own) or None

    def model(self) -> nn.Module:
        return MODELS[self.name]()

    def data(self, site: str) -> Examples:
        return self.own.get(site, self.pool)

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])
