"""Apple's pfl-research, as its documentation has it: FedAvg in a SimulatedBackend, weighted by examples. For
two ranks it is started by torchrun, and unequal sites are shared out by their sizes.

python [-m torch.distributed.run --nproc-per-node 2] -m peers.apple_pfl NAME WORK.npz
"""

from __future__ import annotations

from itertools import chain, cycle
from typing import Any

import numpy as np
import torch
from peers.models import MODELS
from peers.work import Work, given, turns
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor
from torch.nn import functional as F


class Learner(torch.nn.Module):
    """What pfl trains: a module with a loss and metrics."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.model = MODELS[work.model]()
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), work.weights, strict=True):
                parameter.copy_(torch.from_numpy(value))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        with torch.no_grad():
            return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class Turns(TrainingProcessCallback):
    """Begins a round when rank 0 is asked for it."""

    def __init__(self, name: str, work: Work) -> None:
        self.name, self.work, self.ranks = name, work, get_framework_module().distributed
        self.asked = turns() if self.ranks.global_rank == 0 else None
        self.go_on()

    def go_on(self) -> bool:
        number = torch.tensor(next(self.asked, -1) if self.asked else -1)
        if self.ranks.world_size > 1:
            torch.distributed.broadcast(number, 0)
        return number.item() >= 0

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        if central_iteration == 0 and self.asked:
            self.work.done(self.name, [p.detach().numpy() for p in model.pytorch_model.parameters()])
        return not self.go_on(), Metrics()


def main() -> None:
    torch.set_num_threads(1)
    name, work = given()
    np.random.seed(0)  # pfl's own draws
    sites = list(chain.from_iterable(work.rounds))  # those of one round after those of another
    users = [
        Dataset(tuple(torch.from_numpy(np.concatenate(part)) for part in zip(*batches, strict=True)))
        for batches in sites
    ]
    following, sizes = cycle(range(len(users))), {i: len(user) for i, user in enumerate(users)}
    uneven = len({*sizes.values()}) > 1
    data = FederatedDataset(users.__getitem__, lambda: next(following), sizes if uneven else None)
    model = PyTorchModel(
        learner := Learner(work), torch.optim.SGD, torch.optim.SGD(learner.parameters(), lr=1.0)
    )
    options: dict[str, Any] = {"evaluation_frequency": 10**9, "val_cohort_size": None}
    FederatedAveraging().run(
        NNAlgorithmParams(central_num_iterations=10**9, train_cohort_size=work.sizes.shape[1], **options),
        SimulatedBackend(data, data, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch_size),
        callbacks=[Turns(name, work)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
