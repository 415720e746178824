"""A task whose model has tensors of every kind, over data of every form; and strategies of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fedtrain
from fedtrain.learning import Bounded, Contribution, Local
from fedtrain.strategies import Strategy
from fedtrain.strategies.fedavg import FedAvg

INPUTS, HIDDEN, BATCH, EXAMPLES = 3, 4, 4, {"a": 10, "b": 8, "c": 6}
FORMS = ("tensors", "loader", "batches", "dataset")
HEAD = {"head.weight", "head.bias"}


class Net(nn.Module):
    """Frozen parameters, tied weights, a norm that may have buffers, and a head of two tensors."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.lift = nn.Linear(INPUTS, HIDDEN).requires_grad_(False)
        self.mix, self.again = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.again.weight = self.mix.weight
        self.norm = nn.BatchNorm1d(HIDDEN) if norm == "batch" else nn.GroupNorm(1, HIDDEN)
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.again(torch.tanh(self.mix(self.lift(x))))))
        return found


class Rows(Dataset[tuple[torch.Tensor, ...]]):
    """A map-style dataset."""

    def __init__(self, *columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, i: int) -> tuple[torch.Tensor, ...]:
        return tuple(column[i] for column in self.columns)


class Batches:
    """Ready batches, which can be read any number of times."""

    def __init__(self, *columns: torch.Tensor) -> None:
        self.columns = columns

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return zip(*(column.split(BATCH) for column in self.columns), strict=True)


class Crossed(fedtrain.Task):
    def __init__(self, form: str = "tensors", norm: str = "batch") -> None:
        self.form, self.norm = form, norm

    def sites(self) -> list[str]:
        return [*EXAMPLES]

    def model(self) -> nn.Module:
        return Net(self.norm)

    def data(self, site: str) -> Any:
        columns = columns_of(site)
        if self.form == "loader":
            return DataLoader(TensorDataset(*columns), batch_size=BATCH, shuffle=True)
        return {"tensors": tuple, "dataset": lambda c: Rows(*c), "batches": lambda c: Batches(*c)}[self.form](
            columns
        )

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}


def columns_of(site: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(ord(site))
    x = torch.randn(EXAMPLES[site], INPUTS, generator=generator)
    return [x, (x[:, 0] > 0).long()]


@dataclass(frozen=True)
class FedSAM(FedAvg):
    """Steps of its own along local.batches(), at perturbed weights."""

    rho: float = 0.05

    def train(self, local: Local) -> Contribution:
        w = local.start.clone()
        for batches in local.batches():
            slope = local.gradient(w, batches)
            w -= local.lr * local.gradient(w + self.rho * slope / (slope.norm() + 1e-12), batches)
        return Contribution(w - local.start)


@dataclass(frozen=True)
class Twice(Strategy):
    """A vector of `up` beside the delta, and a weight of its own."""

    max_weight: ClassVar[float] = 1.0
    up: ClassVar[tuple[Bounded, ...]] = (Bounded("slope", 10.0),)

    def train(self, local: Local) -> Contribution:
        slope = local.gradient(local.start)
        return Contribution(local.train().delta, 1.0, up={"slope": slope})

    def step(self, weights: Any, state: Any, round: Any) -> Any:
        return weights + round.mean - 0.01 * round.sums["slope"] / round.sites, state
