"""The federations of benchmarks/simulate.py, one a line of CASES, and what peers are given of each."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.models import MODELS
from peers.work import Array, Work
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fedtrain.config import Config
from fedtrain.digest import seed_of
from fedtrain.runtime.star.federated import sample
from fedtrain.training.building import build_model
from fedtrain.training.partition import SimulatedSites
from fedtrain.training.task import load_task

HERE = Path(__file__).parent
SEED = 1
GIVEN_ROUNDS = 20  # to peers, where rounds differ; after them they begin with the first again


@dataclass(frozen=True)
class Case:
    """A federation, and how we simulate it."""

    name: str
    model: str  # of peers/models.py
    sites: int
    engine: str = "auto"
    rounds: int = 1000  # of the run, as `auto` is told; a turn does some of them
    examples: int = 18  # of a site; all sites are dealt equal shares of one pool
    batch: int = 32
    spread: float | None = None  # of log-normal sizes around 20, of sites of the task's own
    drawn: int | None = None  # sites a round; None: all
    draw: bool = False  # sites draw their examples from a pool that has enough for `drawn` of them
    secure: bool = False  # with [secagg] as it is by default; else in the open
    peers: tuple[str, ...] = ("pfl1", "pfl2", "flwr", "jax")
    launchers: tuple[str, ...] = ()  # simulate.on, beside 2 workers of this machine's own pool

    def settings(self, folder: Path, workers: int) -> dict[str, Any]:
        """The table of its fedtrain.toml."""
        return {
            "run": {
                "task": f"simulation_task:Pictures(model={self.model!r})",
                "rounds": self.rounds, "seed": SEED, "dir": str(folder / f"runs-{workers}"),
            },
            "train": {"batch_size": self.batch, "lr": 0.1},
            "evaluate": {"every": 0},
            "secagg": {"enabled": self.secure},
            "strategy": {"fraction": (self.drawn or self.sites) / self.sites},
            "simulate": {
                "workers": workers, "engine": self.engine,
                "examples": self.examples if self.draw else 0,
                **({"sites": self.sites} if self.spread is None else {}),  # else they are the task's own
            },
        }  # fmt: skip

    def pictures(self) -> dict[str, Array]:
        """x and y of all sites, and `sizes` of the sites where they are the task's own."""
        draw, sizes = np.random.default_rng(0), np.zeros(0, np.int64)
        if self.name.startswith("digits"):
            rows = digits()
            return {"x": rows[:, :64] / 16, "y": rows[:, 64].astype(np.int64), "sizes": sizes}
        if self.spread is not None:
            drawn = np.exp(draw.normal(np.log(20), self.spread, self.sites))
            sizes = drawn.round().clip(1).astype(np.int64)
        dealt_to = self.drawn if self.draw and self.drawn else self.sites
        count = int(sizes.sum()) or dealt_to * self.examples
        width = {"cnn46k": 784, "cifar10": 3072}.get(self.model, 64)
        y, kinds = draw.integers(10, size=count), draw.standard_normal((10, width))
        x = 0.5 * kinds[y] + draw.standard_normal((count, width))
        return {"x": x.astype(np.float32), "y": y, "sizes": sizes}


def digits() -> Array:
    """scikit-learn's handwritten digits: 64 pixels from 0 to 16, and which digit, float32 [1797, 65]."""
    found = find_spec("sklearn")
    assert found is not None, "digits are scikit-learn's: pip install fedtrain[examples]"
    path = Path(str(found.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    return np.loadtxt(path, delimiter=",", dtype=np.float32)


MLP5K = Case("mlp5k-100", "mlp5k", sites=100)
CNN46K = Case("cnn-46k-loop", "cnn46k", sites=24, engine="loop", examples=128, peers=())
LAUNCHERS = Case("launchers", "mlp5k", sites=1000, engine="stacked", peers=(), launchers=("ray", "torchrun"))
CASES = (
    MLP5K,
    replace(MLP5K, name="mlp5k-100-secagg", secure=True),
    replace(MLP5K, name="mlp5k-1000", sites=1000),
    replace(MLP5K, name="mlp5k-ragged", sites=1000, spread=1.0, drawn=100, engine="stacked"),
    replace(MLP5K, name="population", sites=1_000_000, drawn=1000, draw=True, engine="stacked", peers=()),
    replace(MLP5K, name="mlp50k", model="mlp50k"),
    replace(MLP5K, name="mlp500k", model="mlp500k", rounds=300),
    replace(MLP5K, name="cnn6k", model="cnn6k"),
    replace(MLP5K, name="lstm12k", model="lstm12k"),
    replace(MLP5K, name="transformer", model="transformer"),
    LAUNCHERS,
    replace(LAUNCHERS, name="launchers-50k", model="mlp50k"),
    replace(LAUNCHERS, name="launchers-500k", model="mlp500k", sites=100, engine="loop", rounds=300),
    replace(MLP5K, name="digits-mlp5k", peers=(), engine="stacked"),
    replace(MLP5K, name="digits-mlp5k-secure", peers=(), engine="stacked", secure=True),
    replace(MLP5K, name="digits-mlp5k-loop", peers=(), engine="loop"),
    replace(MLP5K, name="digits-mlp5k-loop-secure", peers=(), engine="loop", secure=True),
    CNN46K,
    replace(CNN46K, name="cnn-46k-loop-secure", secure=True),
)

GPU_CASES = (  # of benchmarks/gpu.py
    Case("cifar10-cnn", "cifar10", sites=1000, drawn=50, draw=True, examples=50, batch=10),
    Case("mlp5k-1000", "mlp5k", sites=1000),
    Case("mlp50k-1000", "mlp50k", sites=1000),
    Case("mlp500k-100", "mlp500k", sites=100),
)


def work_of(case: Case, folder: Path) -> Work:
    """What peers are given: sites, orders and initial weights as they are in our own first rounds."""
    np.savez(folder / "pictures.npz", **case.pictures())  # type: ignore[arg-type]  # numpy's stubs
    config = Config.of(case.settings(folder, 2), HERE)
    task = load_task(config.run.task, HERE, folder)
    sites = SimulatedSites(task, config.simulate, SEED)
    x, y, places, begin = [], [], dict[str, tuple[int, int]](), 0
    sizes, order = [], []
    for number in range(GIVEN_ROUNDS if case.drawn or case.spread is not None else 1):
        for site in sample(config, number, 0, sites.names):
            if site not in places:
                inputs, targets = sites.data(site)
                x.append(inputs.numpy())
                y.append(targets.numpy())
                places[site] = begin, len(targets)
                begin += len(targets)
            first, size = places[site]
            sizes.append(size)
            order.append(first + in_order(number, site, size, config.train.batch_size))
    weights = [p.detach().numpy() for p in build_model(task, SEED, torch.device("cpu")).parameters()]
    work = Work(
        folder / "work.npz", case.model, config.train.lr, config.train.batch_size, weights,
        np.concatenate(x), np.concatenate(y), np.reshape(sizes, (-1, case.drawn or case.sites)),
        np.concatenate(order),
    )  # fmt: skip
    work.save()
    return work


def in_order(number: int, site: str, size: int, batch_size: int) -> Array:
    """The order in which a site takes its examples in a round: as stored where they are one batch."""
    if size <= batch_size:
        return np.arange(size)
    draw = torch.Generator().manual_seed(seed_of(SEED, number, site))
    return torch.randperm(size, generator=draw).numpy()


def flops(work: Work) -> float:
    """Of an update, on average: the matrix products and convolutions of its forward and backward passes."""
    x, y = torch.from_numpy(work.x[:16]), torch.from_numpy(work.y[:16])
    counter: Any = FlopCounterMode(display=False)
    ignore = warnings.catch_warnings(action="ignore")  # of Intel's GPUs
    with ignore, torch.backends.mkldnn.flags(enabled=False), counter:  # for an LSTM by products
        loss: Any = F.cross_entropy(MODELS[work.model]()(x), y)
        loss.backward()
    return float(counter.get_total_flops() / len(y) * work.sizes.mean())
