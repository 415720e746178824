"""A whole project with real processes: an aggregator and its sites, by the commands that users type, less the
time that those and their trainers take to load torch (worlds.Command, forked)."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedtrain import cli
from fedtrain.config import Config
from fedtrain.pki import init, issue
from fedtrain.store import RunStore
from fedtrain.transport.star import SiteEnd
from tests.allowed import allowed
from tests.forked import fork_trainers_of_command
from tests.ports import free_port
from tests.worlds import Command

TASK = """
import time, torch, zlib
from pathlib import Path
from torch import nn
import fedtrain
from fedtrain import metrics

class Blobs(fedtrain.Task):
    def sites(self):
        return ["a", "b", "c"]

    def model(self):
        body = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)]
        return nn.Sequential(*body, nn.Linear(16, 3))

    def data(self, site):
        g = torch.Generator().manual_seed(zlib.crc32(site.encode()))
        x = torch.randn(70 + 10 * (ord(site[0]) % 3), 6, generator=g)
        return x, (x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0).long()

    def loss(self, model, batch):
        time.sleep(float(Path("pace").read_text()))  # it may change meanwhile
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}

class Phrases(Blobs):  # sequences of different lengths, and metrics that are no averages
    def model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def data(self, site):
        rows, labels = super().data(site)
        lengths = [1 + i % 4 for i in range(len(rows))]
        return [(row * torch.ones(n, 1), label) for row, label, n in zip(rows, labels, lengths)]

    def collate(self, examples):
        found, labels = zip(*examples)
        lengths = torch.tensor([len(each) for each in found])
        return nn.utils.rnn.pad_sequence(found, batch_first=True), lengths, torch.stack(labels)

    def logits(self, model, batch):
        return model(batch[0].sum(1) / batch[1][:, None])

    def loss(self, model, batch):
        return nn.functional.cross_entropy(self.logits(model, batch), batch[2])

    def scores(self, logits):  # of class 1, on the grid of a histogram
        return (logits.softmax(1)[:, 1].double() * 100).round() / 100

    def evaluate(self, model, batch):
        logits, labels = self.logits(model, batch), batch[2]
        found = metrics.confusion(logits, labels, 3)
        return found | metrics.binary_histogram(self.scores(logits), (labels == 1).long(), 101)

    def metrics(self, sums):
        return {"f1": metrics.macro_f1(sums), "auroc": metrics.auroc(sums)}

class Held(Blobs):  # trains the first rounds, as many as the file says, and then waits until it says more
    def optimizer(self, parameters, round):
        while round >= int(Path("rounds").read_text()):
            time.sleep(0.005)
"""
SITES = ("a", "b", "c")


def fedtrain(arguments: list[str]) -> None:
    """The command. A site whose aggregator was killed looks for it again soon."""
    SiteEnd.PAUSES = 0.02, 1.5, 0.2
    fork_trainers_of_command(most=2 if "parallel.ranks=2" in arguments else 1)
    sys.argv[1:] = arguments
    cli.main()


class Project:
    """Files of one federation in a folder, and the processes started in it; `with` ends them."""

    def __init__(
        self,
        root: Path,
        *,
        rounds: int = 4,
        slow: float = 0.0,
        strategy: str = 'kind = "fedavg"',
        secagg: bool = False,
        task: str = "Blobs",
    ) -> None:
        self.root, self.processes = root, list[Command]()
        root.mkdir(parents=True, exist_ok=True)
        (root / "task.py").write_text(TASK)
        self.set_pace(slow)
        self.let_train(rounds)
        (root / "fedtrain.toml").write_text(
            f'[run]\nname = "r"\ntask = "task:{task}"\nrounds = {rounds}\nseed = 11\n'
            f"[train]\nbatch_size = 16\nlr = 0.05\nmomentum = 0.9\n"
            f'[strategy]\n{strategy}\nmin_sites = 3\nround_deadline = "120s"\n'
            f"[secagg]\nenabled = {str(secagg).lower()}\n"
            f'[network]\nlisten = "127.0.0.1:{free_port()}"\nidle = "60s"\n'
        )
        if not (root / "certs").exists():
            init(root / "certs")
            issue(root / "certs", "aggregator")
            for site in SITES:
                issue(root / "certs", "site", site)

    def __enter__(self) -> Project:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait(30)

    def set_pace(self, seconds: float) -> None:
        """How long a batch takes beside its computing, from now on."""
        self._say("pace", seconds)

    def let_train(self, rounds: int) -> None:
        """Have the task Held train the first `rounds` rounds, and hold the next one back."""
        self._say("rounds", rounds)

    def _say(self, file: str, number: float) -> None:
        (self.root / f"{file}.new").write_text(str(number))
        (self.root / f"{file}.new").replace(self.root / file)

    def start(self, *arguments: str) -> Command:
        if arguments[0] in ("site", "peer"):
            self.allow(*arguments)
        log = self.root / f"{'-'.join(a for a in arguments if a.isalnum())}.log"
        process = Command(fedtrain, [*arguments], folder=self.root, log=log, env={"FEDTRAIN_DEBUG": "1"})
        self.processes.append(process)
        return process

    def allow(self, command: str, name: str, *options: str) -> None:
        """Have the people of a site approve the task, and what the command with these options asks."""
        sets = [value for option, value in pairwise(options) if option == "--set"]
        config = Config.load(self.root / "fedtrain.toml", sets)
        masks = config.secagg.enabled if command == "site" else config.gossip.masks
        allowed(config, name, masks=masks, pin_members=command == "site")

    def start_all(self) -> Command:
        aggregator = self.start("aggregator")
        for site in SITES:
            self.start("site", site)
        return aggregator

    def simulate(self) -> str:
        """The final model's digest by simulation."""
        process = self.start("simulate", "--set", "simulate.workers=1")
        assert process.wait(120) == 0, self.log("simulate")
        return self.final("r+simulate")

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text()

    def final(self, run: str = "r") -> str:
        store = RunStore(self.root / "runs" / run, read_only=True)
        try:
            last = store.latest()
            assert last is not None
            return last.weights.digest
        finally:
            store.close()

    def events(self, run: str = "r") -> list[dict[str, Any]]:
        path = self.root / "runs" / run / "events.jsonl"
        if not path.exists():
            return []
        found = []
        for line in path.read_bytes().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # torn by a kill
                continue
        return found

    def wait_for(self, what: Callable[[], object], seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, "\n".join(
                f"{p.name}: {self.log(p.stem)}" for p in self.root.glob("*.log")
            )
            time.sleep(0.01)

    def count(self, kind: str, run: str = "r") -> int:
        return sum(e["kind"] == kind for e in self.events(run))


ROUNDS_OF_A_KILL = 5


def kill_at_seeded_moments(
    project: Project,
    restart: Callable[[], Command],
    victim: Command,
    kills: int,
    seed: int,
    alive: Callable[[], int],
) -> None:
    """kill -9 and start again, each a random instant after `alive()` has grown. The
    task is Held, from the first round on: it gets some rounds more for each, so no run ends before."""
    draw = random.Random(seed)
    for number in range(1, kills + 1):
        before = alive()
        project.let_train(number * ROUNDS_OF_A_KILL)
        project.wait_for(lambda before=before: alive() > before)
        time.sleep(draw.uniform(0.0, 0.25))
        victim.send_signal(signal.SIGKILL)
        victim.wait(30)
        victim = restart()
    project.let_train(10**9)
