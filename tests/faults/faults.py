"""Faults at seeded places of a real federation: an aggregator and three sites over mutual TLS, in this
process, with the trainer processes that they always have. A fault happens in the task's own code, once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtrain.config import Config
from fedtrain.errors import FedtrainError
from fedtrain.events import Event
from fedtrain.pki import init, issue
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.runtime.sites import site
from fedtrain.runtime.star import aggregator
from fedtrain.store import RunStore
from tests.allowed import allowed
from tests.ports import free_port

SITES = ("a", "b", "c")
HOWS = ("kill", "stop", "memory", "cuda", "exception")

# A fault lies in a file, faults/SITE-WORK-RANK: "HOW BATCHES", how many batches of that work go well before.
# Whoever it is for takes it away as it happens.
TASK = """
import os, signal, zlib
from pathlib import Path
import torch
from torch import nn
import fedtrain

HERE = Path(__file__).parent / "faults"

class Faulty(fedtrain.Task):
    def __init__(self):
        self.site, self.batches = "", {}

    def sites(self):
        return ["a", "b", "c"]

    def model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def data(self, site):
        self.site = site
        g = torch.Generator().manual_seed(zlib.crc32(site.encode()))
        x = torch.randn(64, 6, generator=g)
        return x, (x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0).long()

    def loss(self, model, batch):
        self.fault("train")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        self.fault("evaluate")
        logits = model(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1], reduction="sum")
        right = (logits.argmax(1) == batch[1]).sum()
        return {"loss": (loss, len(batch[1])), "accuracy": (right, len(batch[1]))}

    def fault(self, work):
        file = HERE / f"{self.site}-{work}-{os.environ.get('LOCAL_RANK', 0)}"
        try:
            how, batches = file.read_text().split()
        except FileNotFoundError:
            return
        self.batches[file] = self.batches.get(file, 0) + 1
        if self.batches[file] <= int(batches):
            return
        del self.batches[file]
        file.unlink()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "memory":
            raise MemoryError("Unable to allocate 4.0 GiB")
        elif how == "cuda":
            raise RuntimeError("CUDA out of memory. Tried to allocate 4.0 GiB")
        elif how == "exception":
            raise OSError(5, "Input/output error", "/data/patients.csv")
        else:
            raise AssertionError(how)
"""


@dataclass(frozen=True)
class Fault:
    """`how` goes wrong what in one rank of a site's trainer, when `batches` of the work have gone well."""

    site: str
    work: str  # train | evaluate
    how: str  # one of HOWS
    batches: int = 0  # of the four of a training; an evaluation has one
    rank: int = 0

    @property
    def file(self) -> str:
        return f"{self.site}-{self.work}-{self.rank}"


def drawn(
    seed: int, hows: Sequence[str] = HOWS, *, each: int = 1, ranks: int = 1, site: str = ""
) -> list[Fault]:
    """Each of `hows` in a training and in an evaluation, `each` times, in random order at random places; at
    `site` alone where it is named."""
    draw = random.Random(seed)
    found = [
        Fault(
            site or draw.choice(SITES),
            work,
            how,
            draw.randrange(4) if work == "train" else 0,
            draw.randrange(ranks),
        )
        for how in hows
        for work in ("train", "evaluate")
        for _ in range(each)
    ]
    draw.shuffle(found)
    return found


@dataclass
class Outcome:
    """How a federation's run ended."""

    config: Config
    error: FedtrainError | None = None  # of the aggregator
    ended: list[str] = field(default_factory=list)  # why each site's run ended
    weights: str = ""  # the final model's digest
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # the aggregator's

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for k, fields in self.events if k == kind]


def project(folder: Path, rounds: int, *, secagg: bool = False, **sections: dict[str, Any]) -> Config:
    """A federation's files in an empty folder."""
    (folder / "faults").mkdir(parents=True)
    (folder / "faulty_task.py").write_text(TASK)
    init(folder / "certs")
    issue(folder / "certs", "aggregator")
    for name in SITES:
        issue(folder / "certs", "site", name)
    table: dict[str, dict[str, Any]] = {
        "run": {"name": "r", "task": "faulty_task:Faulty", "rounds": rounds, "seed": 3},
        "train": {"batch_size": 16, "lr": 0.05, "momentum": 0.9},
        "strategy": {"min_sites": 3, "round_deadline": "120s"},
        "secagg": {"enabled": secagg},
        "network": {"listen": f"127.0.0.1:{free_port()}", "idle": "60s"},
    }
    for name, keys in sections.items():
        table[name] = {**table.get(name, {}), **keys}
    return Config.of(table, folder)


async def run(
    folder: Path,
    faults: Sequence[Fault | Sequence[Fault]],
    *,
    secagg: bool = False,
    at: Mapping[str, dict[str, Any]] = {},  # never written to
    **sections: dict[str, Any],
) -> Outcome:
    """As many rounds as there are faults, the n-th of which happens in the n-th round or its evaluation; or
    the n-th of which all happen there.

    `sections` are of everybody's fedtrain.toml; those `at` a site are its own: {"c": {"parallel": {…}}}.
    """
    config = project(folder, len(faults), secagg=secagg, **sections)
    outcome = Outcome(config)

    def emit(event: Event) -> None:
        kind, fields = event.kind, event.fields()
        outcome.events.append((kind, fields))
        due = {"round_started": "train", "round_committed": "evaluate"}.get(kind)
        if due and fields.get("attempt", 1) == 1 and (number := fields["round"]) <= len(faults):
            happen = faults[number - 1]
            for fault in [happen] if isinstance(happen, Fault) else happen:
                if fault.work == due:
                    (folder / "faults" / fault.file).write_text(f"{fault.how} {fault.batches}")

    def of(name: str) -> Config:
        table = {section: dict(keys) for section, keys in config.table().items()}
        for section, keys in at.get(name, {}).items():
            table[section] = {**table.get(section, {}), **keys}
        return Config.of(table, folder)

    sites = [
        asyncio.create_task(site.run(allowed(of(name), name), name, emit=lambda *_, **__: None))
        for name in SITES
    ]
    try:
        await aggregator.serve(config, emit=emit)
        outcome.ended = await asyncio.gather(*sites)
    except FedtrainError as e:
        outcome.error = e
    finally:
        for task in sites:
            task.cancel()
        await asyncio.gather(*sites, return_exceptions=True)
    if (config.run_dir / "run.db").exists():
        outcome.weights = final(config.run_dir)
    return outcome


def final(run_dir: Path) -> str:
    store = RunStore(run_dir, read_only=True)
    try:
        last = store.latest()
        assert last is not None
        return last.weights.digest
    finally:
        store.close()


async def undisturbed(outcome: Outcome) -> Outcome:
    """The same run without a fault, by simulation, which gives the same bits."""
    whole = Outcome(outcome.config)
    await simulate(
        outcome.config, emit=lambda event: whole.events.append((event.kind, event.fields())), workers=1
    )
    whole.weights = final(outcome.config.simulate_dir)
    return whole


def check(outcome: Outcome, faults: Sequence[Fault | Sequence[Fault]]) -> None:
    """Every fault fired, every round was committed with all sites in it, and all ended well."""
    assert outcome.error is None, outcome.error
    assert not list((outcome.config.root / "faults").iterdir()), "every fault fired"
    assert outcome.ended == ["rounds done"] * len(SITES)
    assert [e["sites"] for e in outcome.of("round_committed")] == [len(SITES)] * len(faults)
