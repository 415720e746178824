"""A roll-out of five sites, by the commands of docs/start-institution.md, each machine a network namespace.

    python -m tests.rollout      as root; prints each command, and how many a person typed

The authority, the aggregator, five sites and a newcomer have a folder, an address and a key of their own.
They share the kernel and the disk. The commands are forked from a process that has loaded torch (worlds.py),
and so are the trainers, which are therefore not confined.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedtrain import cli
from tests import processes
from tests.limits import WAIT_S
from tests.namespaces import Host, hosts_on_a_bridge
from tests.worlds import Command

SITES = ("north", "south", "east", "west", "mid")
NEWCOMER = "late"
ROUNDS = 10
BEHIND = 1  # rounds that the aggregator lost with its disk
CALLED, INVITED = 8440, 8441  # ports of the aggregator, and of the authority
TASK = """
import time, torch, zlib
from pathlib import Path
from torch import nn
import fedtrain

class Blobs(fedtrain.Task):
    def model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

    def data(self, site):
        g = torch.Generator().manual_seed(zlib.crc32(site.encode()))
        x = torch.randn(60 + len(site), 6, generator=g)
        return x, (x[:, 0] > x[:, 1]).long()

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}

    def optimizer(self, parameters, round):  # holds a round back until the test lets it begin
        while round >= int(Path("rounds").read_text()):
            time.sleep(0.01)
"""


def command(arguments: list[str]) -> None:
    """The command `fedtrain` in a namespace, whose input is a pipe: namespace, pipe, words."""
    namespace, answers, *words = arguments
    os.dup2(os.open(answers, os.O_RDWR), 0)
    sys.stdin = os.fdopen(0)  # multiprocessing has put /dev/null in its place
    main = processes.fedtrain if words[0] == "site" else _plain
    Host(namespace, "").within(main, words)


def _plain(words: list[str]) -> None:
    sys.argv[1:] = words
    cli.main()


class Machine:
    """A role's machine: its namespace, its folder, and the processes that were started on it."""

    def __init__(self, host: Host, folder: Path, say: Callable[[str], None]) -> None:
        self.host, self.folder, self._say = host, folder, say
        self.name = folder.name
        self.typed = 0  # commands and answers
        self.processes = list[Command]()
        folder.mkdir()
        os.mkfifo(folder / "answers")

    def start(self, *words: str) -> Command:
        self.typed += 1
        self._say(f"{self.name}$ fedtrain {' '.join(words)}")
        process = Command(
            command,
            [self.host.namespace, str(self.folder / "answers"), *words],
            folder=self.folder, log=self.log_of(words[0]), env={"FEDTRAIN_DEBUG": "1"},
        )  # fmt: skip
        self.processes.append(process)
        return process

    def run(self, *words: str) -> str:
        """What a command prints, when it has ended well."""
        before = len(self.said(words[0]))
        assert self.start(*words).wait(WAIT_S) == 0, self.said(words[0])
        return self.said(words[0])[before:]

    def answer(self, text: str) -> None:
        self.typed += 1
        with (self.folder / "answers").open("w") as pipe:
            pipe.write(f"{text}\n")

    def copy(self, path: str, to: Machine) -> None:
        """Bring a file or folder to another machine."""
        self.typed += 1
        self._say(f"{self.name}$ scp -r {path} {to.name}:{path}")
        source, goal = self.folder / path, to.folder / path
        if source.is_dir():
            shutil.copytree(source, goal)
        else:
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, goal)

    def log_of(self, word: str) -> Path:
        return self.folder / f"{word}.log"

    def said(self, word: str) -> str:
        path = self.log_of(word)
        return path.read_text(errors="replace") if path.exists() else ""

    def events(self, run: str, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "runs" / run / "events.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = []
        for line in lines:
            with_kind = json.loads(line) if line.endswith(b"}") else {}  # or it is being written
            if with_kind.get("kind") == kind:
                found.append(with_kind)
        return found


class Rollout:
    """The steps, in their order; each is a method."""

    def __init__(self, folder: Path, hosts: dict[str, Host], say: Callable[[str], None]) -> None:
        self.machines = {name: Machine(host, folder / name, say) for name, host in hosts.items()}
        self.authority, self.aggregator = self.machines["authority"], self.machines["aggregator"]
        self.keys = dict[str, str]()  # site -> as `policy show` prints it
        self.seconds_to_cut_off, self.first_lost = 0.0, 0
        for machine in self.machines.values():
            (machine.folder / "task.py").write_text(TASK)
            (machine.folder / "fedtrain.toml").write_text(
                f'[run]\nname = "r"\ntask = "task:Blobs"\nrounds = {ROUNDS}\nseed = 3\n'
                f"[strategy]\nmin_sites = {len(SITES)}\n[train]\nlr = 0.1\n"
                f'[network]\nlisten = "0.0.0.0:{CALLED}"\naddress = '
                f'"{self.aggregator.host.address}:{CALLED}"\nidle = "20s"\n'
            )
        self.let_train(3)

    @property
    def typed(self) -> int:
        return sum(machine.typed for machine in self.machines.values())

    def all(self) -> None:
        self.enrol(*SITES)
        self.authority.copy("certs/aggregator", self.aggregator)
        for name in SITES:
            self.approve(name)
        for name in SITES:
            self.pin(name, *(other for other in SITES if other != name))
        self.begin()
        self.wait_for_round(3)
        self.first_typed = self.typed
        self.newcomer()
        self.revoke("south")
        self.renew("north")
        self.restore()
        self.end()

    def enrol(self, *names: str) -> None:
        """Codes from the authority, and a key made at each site; the words are compared."""
        before = len(self.authority.said("certs"))
        address = f"{self.authority.host.address}:{INVITED}"
        host = self.authority.start(
            "certs", "invite", *names, "--listen", f"0.0.0.0:{INVITED}", "--address", address
        )

        def printed() -> str:
            return self.authority.said("certs")[before:]

        def codes() -> dict[str, list[str]]:
            return {
                name: words.split()
                for name, words in re.findall(r"^(\w+), once.*\n +fedtrain (.+)\n", printed(), re.M)
            }

        self.wait_for(lambda: codes().keys() >= {*names} and "listening" in printed())
        guests = {name: self.machines[name].start(*codes()[name]) for name in names}
        asked = list[tuple[str, str]]
        for number in range(len(names)):

            def questions() -> asked:
                found: asked = re.findall(r"Does (\w+) read out the same words, ([^?]+)\?", printed())
                return found

            self.wait_for(lambda: len(questions()) > number)  # noqa: B023  # it is called here
            name, spoken = questions()[number]
            self.wait_for(lambda: spoken in self.machines[name].said("join"))  # noqa: B023  # it is called here
            self.authority.answer("y")
        for name, guest in guests.items():
            assert guest.wait(WAIT_S) == 0, self.machines[name].said("join")
            assert list(self.authority.folder.glob(f"**/{name}/key.pem")) == []
        assert host.wait(WAIT_S) == 0, printed()

    def approve(self, name: str) -> None:
        """A site's people let the task run there, and read their key to the others."""
        self.machines[name].run("task", "approve")
        shown = self.machines[name].run("policy", "show")
        (key,) = re.findall(rf"^({name}=[0-9a-f]+)", shown, re.M)
        self.keys[name] = key

    def pin(self, name: str, *others: str) -> None:
        self.machines[name].run("policy", "pin", *(self.keys[other] for other in others))

    def begin(self) -> None:
        self.serving = self.aggregator.start("aggregator")
        for name in SITES:
            self.machines[name].start("site", name)

    def newcomer(self) -> None:
        """A sixth site joins the run, when all others have pinned it."""
        self.enrol(NEWCOMER)
        self.approve(NEWCOMER)
        for name in SITES:
            self.pin(name, NEWCOMER)
        self.pin(NEWCOMER, *SITES)
        self.machines[NEWCOMER].start("site", NEWCOMER)
        self.wait_for(lambda: any(e["site"] == NEWCOMER for e in self.events("site_joined")))
        self.wait_for_round(5)
        assert self.events("round_committed")[-1]["sites"] == len(SITES) + 1

    def revoke(self, name: str) -> None:
        """The aggregator cuts a site off while it trains; the others go on."""
        self.authority.run("certs", "revoke", name)
        lost, begun = len(self.losses(name)), time.monotonic()
        self.authority.copy("certs/revoked.pem", self.aggregator)
        self.wait_for(lambda: len(self.losses(name)) > lost)
        self.seconds_to_cut_off = time.monotonic() - begun
        self.wait_for_round(6)
        assert self.events("round_committed")[-1]["sites"] == len(SITES)
        self.machines[name].processes[-1].terminate()

    def renew(self, name: str) -> None:
        """A site joins again with a renewed certificate of the same key, by itself."""
        site, path = self.machines[name], f"certs/sites/{name}/cert.pem"
        old, key = (site.folder / path).read_bytes(), (site.folder / path).with_name("key.pem").read_bytes()
        joined = len(self.joins(name))
        self.authority.run("certs", "issue", name)
        self.authority.copy(path, site)
        assert (site.folder / path).read_bytes() != old
        assert (site.folder / path).with_name("key.pem").read_bytes() == key
        self.wait_for(lambda: len(self.joins(name)) > joined)
        self.wait_for_round(8)

    def restore(self) -> None:
        """The aggregator's disk is lost, and it goes on from a copy of `runs/` that lacks a round."""
        runs, copy = self.aggregator.folder / "runs", self.aggregator.folder / "copy"
        self.wait_for(lambda: any(event["round"] == 9 for event in self.events("round_started")))
        self.wait_for(lambda: any(event["round"] == 8 for event in self.events("evaluated")))
        shutil.copytree(runs, copy)
        self.first_lost = 1 + (copy / "audit/aggregator.jsonl").read_bytes().count(b"\n")
        self.wait_for_round(8 + BEHIND)
        self.serving.kill()
        self.serving.wait(WAIT_S)
        shutil.rmtree(runs)
        shutil.copytree(copy, runs)
        self.aggregator.typed += 2  # the copy, and its way back
        self.serving = self.aggregator.start("aggregator")

    def end(self) -> None:
        """Ten rounds, and each log fits the others."""
        self.let_train(ROUNDS)
        left = [name for name in (*SITES, NEWCOMER) if name != "south"]
        assert self.serving.wait(WAIT_S) == 0, self.aggregator.said("aggregator")
        for name in left:
            assert self.machines[name].processes[-1].wait(WAIT_S) == 0, self.machines[name].said("site")
        assert self.events("round_committed")[-1]["round"] == ROUNDS
        log = "runs/audit/north.jsonl"
        shutil.copy(self.machines["north"].folder / log, self.aggregator.folder / "north.jsonl")
        line = str(self.first_lost)
        self.aggregator.run("audit", "verify", "aggregator", "--against", "north.jsonl", "--restored", line)

    # --- waiting

    def events(self, kind: str) -> list[dict[str, Any]]:
        return self.aggregator.events("r", kind)

    def joins(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events("site_joined") if event["site"] == name]

    def losses(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events("site_lost") if event["site"] == name]

    def let_train(self, rounds: int) -> None:
        for machine in self.machines.values():
            (machine.folder / "rounds.new").write_text(str(rounds))
            (machine.folder / "rounds.new").replace(machine.folder / "rounds")

    def wait_for_round(self, number: int) -> None:
        """Let the run train up to this round, and hold the next one back."""
        self.let_train(number)
        self.wait_for(lambda: any(e["round"] >= number for e in self.events("round_committed")))

    def wait_for(self, what: Callable[[], object]) -> None:
        until = time.monotonic() + WAIT_S
        while not what():
            assert time.monotonic() < until, self.logs()
            time.sleep(0.02)

    def logs(self) -> str:
        paths = sorted(path for machine in self.machines.values() for path in machine.folder.glob("*.log"))
        return "\n".join(f"--- {p.parent.name}/{p.name}\n{p.read_text()[-3000:]}" for p in paths)

    def stop(self) -> None:
        """End what still runs, by its process."""
        running = [each for machine in self.machines.values() for each in machine.processes]
        for process in running:
            if process.poll() is None:
                process.kill()
        for process in running:
            process.wait(30)


@contextmanager
def rollout(folder: Path, say: Callable[[str], None] = lambda line: None) -> Iterator[Rollout]:
    """Machines and their files; their processes and namespaces end with the block."""
    with hosts_on_a_bridge(["authority", "aggregator", *SITES, NEWCOMER]) as hosts:
        made = Rollout(folder, hosts, say)
        try:
            yield made
        finally:
            made.stop()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, rollout(Path(folder), print) as made:
        made.all()
        print(f"{made.first_typed} commands and answers up to the first rounds, {made.typed} in all;")
        print(f"a revoked site was cut off after {made.seconds_to_cut_off:.1f} s")


if __name__ == "__main__":
    main()
