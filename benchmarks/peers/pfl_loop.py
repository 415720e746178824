"""What pfl-research 0.6 does for each user of a round, as a loop, where pfl itself is not installed.

As its SimulatedBackend with FederatedAveraging (pfl/aggregate/simulate.py, pfl/algorithm/base.py,
pfl/model/pytorch.py): one model on the device; for each user a copy of the weights is kept, a new SGD takes
the steps, the difference to the copy is weighted by the number of examples and added, and the weights are put
back. Its metrics, user sampling and postprocessors are left out, so pfl itself is no faster than this.

python -m peers.pfl_loop NAME WORK.npz [DEVICE]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peers.models import MODELS
from peers.plain_torch import rounds_of, train_on_device
from peers.work import Work
from torch import Tensor
from torch.nn import functional as F


def averaged(work: Work, device: str = "cpu") -> Iterator[list[Tensor]]:
    """The weights after each round, without end."""
    model = MODELS[work.model]().to(device)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), work.weights, strict=True):
            parameter.copy_(torch.from_numpy(value))
    named = dict(model.named_parameters())
    central = torch.optim.SGD(model.parameters(), lr=1.0)
    rounds = rounds_of(work, device)
    while True:
        for users in rounds:
            total: dict[str, Tensor] = {}
            weight = 0
            for batches in users:
                before = {name: p.detach().clone() for name, p in named.items()}
                local = torch.optim.SGD(model.parameters(), lr=work.lr)
                for x, y in batches:
                    local.zero_grad()
                    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]  # torch's
                    local.step()
                examples = sum(len(y) for _, y in batches)
                with torch.no_grad():
                    difference = {name: (before[name] - p) * examples for name, p in named.items()}
                    for name, moved in difference.items():
                        total[name] = total[name] + moved if name in total else moved
                    for name, p in named.items():
                        p.copy_(before[name])
                weight += examples
            for name, p in named.items():
                p.grad = total[name] / weight
            central.step()
            yield [p.detach() for p in model.parameters()]


if __name__ == "__main__":
    train_on_device(averaged)
