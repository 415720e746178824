"""Many datacenter runs in one world of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from fedtrain.config import Config
from fedtrain.errors import FedtrainError
from fedtrain.events import silent
from fedtrain.runtime.datacenters.datacenter import Datacenter
from fedtrain.store import RunStore
from fedtrain.training.devices import device_of_rank
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.task import load_task
from tests.worlds import world

Table = dict[str, dict[str, Any]]
ROOT = Path(__file__).parents[2]


def launch(
    folder: Path, ranks: int, cases: dict[str, Table], device: str = "cpu", backend: str = "auto"
) -> dict[str, Outcome]:
    """Run the cases on so many ranks, in a folder that has their task; what became of each."""
    out = folder / "out"
    out.mkdir(exist_ok=True)
    world(ranks, train_all, cases, folder, out, device, backend, device=device, backend=backend)
    return {name: Outcome(out, name) for name in cases}


class Outcome:
    """One case, as rank 0 wrote it down."""

    def __init__(self, folder: Path, name: str) -> None:
        said = json.loads((folder / f"{name}.json").read_text())
        self.error: str | None = said["error"]
        self.events: list[dict[str, Any]] = said["events"]
        self._model = folder / f"{name}.safetensors"

    @property
    def model(self) -> dict[str, torch.Tensor]:
        assert self.error is None, self.error
        return load_file(self._model)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


def run_case(config: Config, events: list[dict[str, Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """The final model, on rank 0. Where the run evaluates, the model is evaluated before its first step, too:
    an event `beforehand`."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = Mesh(Sizes.of(config.parallel, world), device, islands=config.parallel.sync == "local")
    task = load_task(config.run.task, config.root)
    store = RunStore(config.datacenter_dir, durable=False) if mesh.rank == 0 else None
    emit = silent if store is None else lambda event: events.append({"kind": event.kind, **event.fields()})
    room = Datacenter(config, task, mesh, store, emit)
    if store is not None:
        store.begin(room.schema, {}, frozen=room.engine.frozen, run=config.run.name, task_digest="")
    if config.evaluate.every and room.methods is None:
        sets = room.sites.eval_data().values()
        events.append({"kind": "beforehand", "metrics": [room.engine.evaluate(data) for data in sets]})
    room.run(None)
    if store is None:
        return {}
    last, frozen = store.latest(), store.load_frozen()
    store.close()
    assert last is not None
    return {name: view.clone() for name, view in (last.weights.load().views() | frozen.views()).items()}


def train_all(
    rank: int,
    ranks: int,
    cases: dict[str, Table],
    folder: Path,
    out: Path,
    device: str = "cpu",
    backend: str = "auto",
) -> None:
    """On each rank. Of each case rank 0 writes NAME.safetensors, the final model, and NAME.json: its events,
    or the error that it ended with."""
    for name, table in cases.items():
        config = Config.of({**table, "run": {**table["run"], "name": name}}, folder)
        events: list[dict[str, Any]] = []
        error = None
        try:
            model = run_case(config, events, device_of_rank(device, backend))
            if rank == 0:
                save_file(model, out / f"{name}.safetensors")
        except FedtrainError as e:  # raised on all ranks alike
            error = f"{type(e).__name__}: {e}"
        if rank == 0:
            (out / f"{name}.json").write_text(json.dumps({"error": error, "events": events}, default=str))
