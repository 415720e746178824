"""What attacks on an aggregator's port cost three honest sites: rounds a second, and memory.

    python benchmarks/port.py [--attack NAME]... [--seconds 10] [--files 1024] [--json]

The aggregator is a process with its own store and log, and so many descriptors; the sites are another one.
Rounds are counted before each attack, and while it goes on: from its second second on, and longer than the
kernel keeps silent connections to itself.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import arguments, begin, emit, say
from port_attacks import ATTACKS, SIZE

HONEST, HOSTILE = ("a", "b", "c"), "m"
SETTLE_S = 1.0


def certificates(folder: Path) -> Path:
    from fedtrain.pki import init, issue

    init(folder)
    issue(folder, "aggregator")
    for site in (*HONEST, HOSTILE):
        issue(folder, "site", site)
    return folder


def tls(folder: Path) -> Any:
    """What gives a role's TLS, as the role itself has it: read once, and looked at in each handshake."""
    from fedtrain.pki.identity import Current
    from fedtrain.transport.tls import Tls

    current = Current(folder)
    return lambda: Tls(*current.parts())


def first() -> Any:
    from fedtrain.arena import Arena
    from fedtrain.schema import Schema, TensorSpec

    return Arena.zeros(Schema((TensorSpec("w", (SIZE,), "float32", True),)))


def aggregate(folder: Path, certs: Path, files: int, port: Any, rounds: Any) -> None:
    """The aggregator, for ever."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    from fedtrain.config import Config
    from fedtrain.errors import JoinRefused
    from fedtrain.pki import Credentials, identity_of
    from fedtrain.pki.proof import prove
    from fedtrain.runtime.journal import Journal
    from fedtrain.runtime.star import checks, federated
    from fedtrain.runtime.star.answers import InTheOpen
    from fedtrain.store import Checkpoint, RunStore
    from fedtrain.strategies import beginning, build
    from fedtrain.tracking import EventLog
    from fedtrain.transport.endpoints import TRANSPORTS, RemoteCohort
    from fedtrain.wire.frames import PROTOCOL

    model, own = first(), Credentials.load(certs / "aggregator")
    config = Config.of(
        {
            "run": {"name": "r", "rounds": 10**9}, "strategy": {"round_deadline": "6s"},
            "evaluate": {"every": 0}, "secagg": {"enabled": False},
        },
        root=folder,
    )  # fmt: skip
    store, log = RunStore(config.run_dir), EventLog(config.run_dir)

    def tell(event: Any) -> None:
        log.emit(event)
        if event.kind == "round_committed":
            rounds.value += 1

    def welcome(site: str, hello: Any) -> None:
        if hello.protocol != PROTOCOL or hello.schema.digest != model.schema.digest:
            raise JoinRefused(f"{site} has another protocol or model")

    async def serve() -> None:
        cohort = RemoteCohort(
            TRANSPORTS["grpc"](tls(certs / "aggregator"), 5.0),
            listen="127.0.0.1:0", identify=lambda pem: identity_of(pem).name, welcome=welcome,
            admit=lambda site, request, reply: checks.admit(
                request, reply, model.schema, config.limits, None
            ),
            schemas=[model.schema], inbox=store.inbox,
            prove=lambda site, nonce: (prove(own, site, nonce), b""),
            emit=tell,
        )  # fmt: skip
        await cohort.start()
        port.value = cohort.port
        strategy = build("fedavg", {})
        store.begin(model.schema, config.agreed(), task_digest="t")
        store.commit(Checkpoint(0, *beginning(strategy, model)), {})
        await federated.run(Journal(config, store, tell), InTheOpen(config, cohort, tell), strategy)

    asyncio.run(serve())


def train(folder: Path, certs: Path, port: Any) -> None:
    """The honest sites, for ever."""
    from fedtrain.events import silent
    from fedtrain.messages import Evaluate, Request, Train, Update
    from fedtrain.pki import Credentials, aggregator_target
    from fedtrain.pki.proof import AggregatorCheck
    from fedtrain.store import Spool
    from fedtrain.transport.grpc import GrpcTransport
    from fedtrain.transport.site_link import SiteLink
    from fedtrain.wire.frames import PROTOCOL, Hello

    model = first()

    async def answer(request: Request) -> Update:
        return Update(delta=model, num_examples=1.0)

    async def site(name: str) -> None:
        own = certs / "sites" / name
        link = SiteLink(
            GrpcTransport(tls(own), 5.0), address=f"127.0.0.1:{port.value}",
            target=aggregator_target("fedtrain"), inbox=Spool(folder / name), requests=Train | Evaluate,
            trust=AggregatorCheck(Credentials.load(own), own, silent), emit=silent,
        )  # fmt: skip
        hello = Hello(protocol=PROTOCOL, version="0", task_digest="t", schema=model.schema, agreed={})
        await link.serve(hello, answer, schemas=[model.schema])

    async def all_of_them() -> None:
        await asyncio.gather(*map(site, HONEST))

    asyncio.run(all_of_them())


class Federation:
    """An aggregator and its honest sites at work."""

    def __init__(self, folder: Path, files: int) -> None:
        self.folder, self.certs = folder, certificates(folder / "certs")
        spawn = multiprocessing.get_context("spawn")
        self.port, self.rounds = spawn.Value("i", 0), spawn.Value("q", 0)
        self.processes = [
            spawn.Process(target=aggregate, args=(folder, self.certs, files, self.port, self.rounds)),
            spawn.Process(target=train, args=(folder, self.certs, self.port)),
        ]

    def begin(self) -> None:
        self.processes[0].start()
        while not self.port.value:
            assert self.processes[0].is_alive(), "the aggregator ended"
            time.sleep(0.05)
        self.processes[1].start()
        while self.rounds.value < 20:
            assert self.processes[0].is_alive(), "the aggregator ended"
            time.sleep(0.05)

    def end(self) -> None:
        for process in self.processes:
            process.kill()

    def rate(self, seconds: float) -> float:
        """Rounds a second from now on."""
        before, began = int(self.rounds.value), time.monotonic()
        time.sleep(seconds)
        return (int(self.rounds.value) - before) / (time.monotonic() - began)

    def megabytes(self) -> float:
        """Resident, of the aggregator."""
        status = Path(f"/proc/{self.processes[0].pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1e3

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "runs/r/events.jsonl").read_text().splitlines()]

    def attacked(self, name: str, seconds: float) -> tuple[float, float, float, list[dict[str, Any]]]:
        """(rounds/s before, rounds/s in an attack, megabytes that it took, what was told beside rounds)."""
        told, before, memory = len(self.events()), self.rate(seconds), self.megabytes()
        attacker = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("port_attacks.py")), name, "127.0.0.1",
             str(self.port.value), str(self.certs / "sites" / HOSTILE), str(3 * seconds + 20)],
        )  # fmt: skip
        time.sleep(SETTLE_S + 2.0 * ("Hello" in name or "join" in name))
        during, most = self.rate(seconds), self.megabytes()
        attacker.kill()
        attacker.wait()
        usual = ("waiting", "round_started", "update_received", "round_committed", "site_state")
        lines = [event for event in self.events()[told:] if event["kind"] not in usual]
        return before, during, most - memory, lines


@contextmanager
def federation(files: int) -> Iterator[Federation]:
    with tempfile.TemporaryDirectory() as folder:
        made = Federation(Path(folder), files)
        try:
            made.begin()
            yield made
        finally:
            made.end()


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--attack", action="append", choices=sorted(ATTACKS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--files", type=int, default=1024)
    args = parser.parse_args()
    begin(args)
    for name in args.attack or ATTACKS:
        with federation(args.files) as made:
            before, during, more, lines = made.attacked(name, args.seconds)
        emit("port", name, "before", before, "rounds/s")
        emit("port", name, "under attack", during, "rounds/s")
        emit("port", name, "memory", more, "MB")
        emit("port", name, "lines told", len(lines), "lines")
        for line in lines[:3]:
            say({"told": str(line)[:300]})


if __name__ == "__main__":
    main()
