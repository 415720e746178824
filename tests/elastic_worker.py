"""A small DDP run of the datacenter's parts: what torchrun starts in tests/faults/test_elastic.py.

python elastic_worker.py FOLDER STEPS. FOLDER/pace holds the seconds that a step lasts. Each rank writes a
line to FOLDER/log-PID.jsonl for each step, with the examples that it took.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fedtrain.training.checkpoint import Checkpoints
from fedtrain.training.elastic import LEFT, Leave, meet
from fedtrain.training.sampler import Sampler

EXAMPLES, BATCH = 96, 12


class State:
    def __init__(self, model, optimizer, sampler):
        self.model, self.optimizer, self.sampler, self.step = model, optimizer, sampler, 0

    def state_dict(self):
        slots = {
            name: self.optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            for name, p in self.model.named_parameters()
        }
        place = self.sampler.state_dict()
        return {"model": self.model.state_dict(), "slots": slots, "data": place, "step": self.step}

    def load_state_dict(self, state):
        self.sampler.load_state_dict(state["data"])
        self.step = state["step"]


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    meet("gloo", 60)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    ddp = DistributedDataParallel(model)
    x = torch.randn(EXAMPLES, 5, generator=torch.Generator().manual_seed(2)).double()
    y = (x[:, 0] > 0).long()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = State(model, optimizer, Sampler(EXAMPLES, BATCH, seed=3, rank=rank, ranks=ranks))
    checkpoints = Checkpoints(folder / "checkpoints", every=2, keep=3, background=True)
    checkpoints.restore(state)
    log = (folder / f"log-{os.getpid()}.jsonl").open("a")
    with Leave() as leave:
        while state.step < steps:
            (share,) = state.sampler.take()
            time.sleep(float((folder / "pace").read_text()))
            loss = nn.functional.cross_entropy(ddp(x[share.mine]), y[share.mine], reduction="sum")
            optimizer.zero_grad()
            (loss * ranks / share.total).backward()  # DDP averages over ranks
            optimizer.step()
            state.step += 1
            line = {"step": state.step, "rank": rank, "ranks": ranks, "took": share.mine.tolist()}
            print(json.dumps(line), file=log, flush=True)
            checkpoints.maybe_save(state, state.step)
            if leave.asked():
                checkpoints.finish(state)
                os._exit(LEFT)
    checkpoints.finish(state)
    if rank == 0:
        torch.save(model.state_dict(), folder / "model.pt")
    dist.barrier()
    os._exit(0)  # a normal end after destroy_process_group() aborts now and then


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
