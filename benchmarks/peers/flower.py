"""Flower's simulation on Ray, with an actor a core: FedAvg over a client that trains as its tutorial's does.
Flower draws the sites of a round itself, where not all take part.

python -m peers.flower NAME WORK.npz
"""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

import ray
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peers.models import MODELS
from peers.work import Work, given, turns
from torch.nn import functional as F

client, server = ClientApp(), ServerApp()


@cache
def at_hand() -> tuple[Any, float, list[Any]]:
    """The model, the learning rate and all sites' batches, once in each of Ray's processes."""
    torch.set_num_threads(1)
    work = Work.load(Path(os.environ["WORK"]))
    sites = [
        [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in batches]
        for sites in work.rounds
        for batches in sites
    ]
    return MODELS[work.model](), work.lr, sites


@client.train()
def train(message: Message, context: Context) -> Message:
    model, lr, sites = at_hand()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer, batches = torch.optim.SGD(model.parameters(), lr), sites[context.node_config["partition-id"]]
    for x, y in batches:
        optimizer.zero_grad()
        loss: Any = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    examples = MetricRecord({"num-examples": sum(len(y) for _, y in batches)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": examples}), reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    name, work = given()
    model, asked = MODELS[work.model](), turns()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), work.weights, strict=True):
            parameter.copy_(torch.from_numpy(value))

    def between(number: int, arrays: ArrayRecord) -> None:
        if number == 1:
            model.load_state_dict(arrays.to_torch_state_dict())
            work.done(name, [p.detach().numpy() for p in model.parameters()])
        if next(asked, None) is None:
            ray.shutdown()
            os._exit(0)

    strategy = FedAvg(
        fraction_train=1 / len(work.sizes), fraction_evaluate=0.0, min_available_nodes=work.sizes.size,
        min_train_nodes=work.sizes.shape[1],
    )  # fmt: skip
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=10**9, evaluate_fn=between)


def main() -> None:
    from peers import flower  # this file by its own name, by which Ray's processes can import it

    logging.getLogger("flwr").setLevel(logging.ERROR)
    work = given()[1]
    os.environ |= {"WORK": str(work.path), "RAY_DEDUP_LOGS": "0", "FLWR_TELEMETRY_ENABLED": "0"}
    resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(flower.server, flower.client, work.sizes.size, backend_config=resources)


if __name__ == "__main__":
    main()
