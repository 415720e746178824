"""A plain loop in torch with one thread, as a careful researcher writes it by hand: nothing but the training.

python -m peers.plain_torch NAME WORK.npz
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peers.models import MODELS
from peers.work import Work, given, turns
from torch import Tensor
from torch.nn import functional as F


def averaged(work: Work) -> Iterator[list[Tensor]]:
    """The weights after each round, without end."""
    model = MODELS[work.model]()
    parameters: list[Tensor] = list(model.parameters())
    weights = [torch.from_numpy(w) for w in work.weights]
    rounds = [
        [[(torch.from_numpy(x), torch.from_numpy(y)) for x, y in batches] for batches in sites]
        for sites in work.rounds
    ]
    while True:
        for sites in rounds:
            sums, examples = [torch.zeros_like(w) for w in weights], 0
            for batches in sites:
                with torch.no_grad():
                    torch._foreach_copy_(parameters, weights)
                for x, y in batches:
                    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
                    with torch.no_grad():
                        torch._foreach_add_(parameters, gradients, alpha=-work.lr)
                size = sum(len(y) for _, y in batches)
                with torch.no_grad():
                    torch._foreach_add_(sums, parameters, alpha=size)
                examples += size
            weights = [total / examples for total in sums]
            yield weights


def main() -> None:
    torch.set_num_threads(1)
    name, work = given()
    for number, weights in zip(turns(), averaged(work), strict=False):
        if number == 0:
            work.done(name, [w.numpy() for w in weights])


if __name__ == "__main__":
    main()
