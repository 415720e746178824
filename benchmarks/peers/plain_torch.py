"""A plain loop in torch with one thread, as a careful researcher writes it by hand: nothing but the training.

python -m peers.plain_torch NAME WORK.npz [DEVICE]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from peers.models import MODELS
from peers.work import Work, given, turns
from torch import Tensor
from torch.nn import functional as F

Batches = list[tuple[Tensor, Tensor]]  # of one site in one round


def averaged(work: Work, device: str = "cpu") -> Iterator[list[Tensor]]:
    """The weights after each round, without end."""
    model = MODELS[work.model]().to(device)
    parameters: list[Tensor] = list(model.parameters())
    weights = [torch.from_numpy(w).to(device) for w in work.weights]
    rounds = rounds_of(work, device)
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


def rounds_of(work: Work, device: str) -> list[list[Batches]]:
    """The batches of each site of each round, on the device."""
    return [
        [
            [(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)) for x, y in site]
            for site in sites
        ]
        for sites in work.rounds
    ]


def train_on_device(averaged: Callable[[Work, str], Iterator[list[Tensor]]]) -> None:
    """Do the rounds that are asked for (see peers/work.py) on the device that the command line names."""
    torch.set_num_threads(1)
    name, work = given()
    device = sys.argv[3] if len(sys.argv) > 3 else "cpu"
    for number, weights in zip(turns(), averaged(work, device), strict=False):
        if device != "cpu":
            torch.cuda.synchronize()
        if number == 0:
            work.done(name, [w.cpu().numpy() for w in weights])


if __name__ == "__main__":
    train_on_device(averaged)
