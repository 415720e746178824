"""One run of a federation, drawn from a seed: who takes part, by which settings, and what goes wrong when.

Until `faults_s` links are blocked and broken, processes killed, machines without power, disks slow, trainers
dying. Then all is well, and the run must end."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

from fedtrain.config import Config
from fedtrain.errors import Damaged, FedtrainError
from fedtrain.events import Emit, Event
from fedtrain.pki import init, issue
from fedtrain.runtime import threads
from fedtrain.runtime.sites import site, start
from fedtrain.runtime.star import aggregator
from fedtrain.runtime.trainers.trainer import Trainer, Trains
from fedtrain.store import spool
from fedtrain.tracking import audit
from fedtrain.tracking.audit import AuditLog
from fedtrain.transport import endpoints, streams
from tests.allowed import allowed
from tests.vsim.chance import BEGAN, Change, certified, drawn, standing
from tests.vsim.claims import Claims
from tests.vsim.clock import CURRENT, Process, Stuck, VirtualLoop
from tests.vsim.disk import Disk, remove
from tests.vsim.known import KNOWN, agreed
from tests.vsim.network import DOWN, UP, Network, SimTransport
from tests.vsim.trainer import Numbers

SITES = ("a", "b", "c", "d", "e")
TASK = "import fedtrain\n\n\nclass Numbers(fedtrain.Task):\n    pass\n"
PID = 4711  # of every process
END_S = 900.0  # on the run's own clock
AGGREGATOR = "aggregator"
KINDS = ("open", "open", "open", "open", "open", "masks", "noise")


@dataclass
class Plan:
    """What a seed says."""

    seed: int
    kind: str
    sites: tuple[str, ...]
    table: dict[str, Any]
    inline: int  # bytes of arenas that travel in the frame that names them
    chunk: int  # bytes
    fsync_s: float  # that a slow disk takes, on average
    train_s: float  # that training takes, on average
    dies: float  # probability of a trainer to die over a request
    faults_s: float  # until when anything may go wrong
    faults: int

    @property
    def real(self) -> bool:
        """Whether signatures are ECDSA's."""
        return self.seed % 20 == 0

    def slow_s(self, site: str) -> float:
        """How much longer one site trains than others."""
        return 0.0

    @property
    def ground(self) -> str:
        return "masks" if self.kind == "masks" else "open"

    @property
    def roles(self) -> tuple[str, ...]:
        return (AGGREGATOR, *self.sites)

    @classmethod
    def of(cls, seed: int) -> Self:
        draw = random.Random(f"plan {seed}")
        kind = draw.choice(KINDS)
        sites = SITES[: draw.choice([3, 3, 4, 5] if kind == "masks" else [2, 2, 3, 3, 4])]
        least = draw.randint(3 if kind == "masks" else 1, len(sites))
        table = {
            "run": {"name": "r", "task": "vsim_task:Numbers", "rounds": draw.choice([2, 2, 3]),
                    "seed": seed % 97},
            "strategy": {
                "min_sites": least, "round_deadline": draw.choice([5.0, 30.0]),
                "fraction": draw.choice([1.0, 1.0, 0.7]), "enough": draw.choice([1.0, 1.0, 0.5]),
            },
            "secagg": {"enabled": kind == "masks", "value_bits": 16, "max_examples": 100, "verify": False},
            "evaluate": {"every": 0 if kind == "noise" else draw.choice([0, 0, 0, 1])},
            "network": {"heartbeat": 1, "idle": draw.choice([2.0, 10.0])},
            "privacy": {"noise_multiplier": 1.0} if kind == "noise" else {},
            "limits": {"max_ratio": 0.0},
        }  # fmt: skip
        small = draw.random() < 0.4
        return cls(
            seed, kind, sites, table,
            inline=0 if small else 64 << 10, chunk=16 if small else 1 << 20,
            fsync_s=draw.choice([0, 0, 0.01, 0.5]), train_s=draw.choice([0.0, 0.2, 3.0]),
            dies=draw.choice([0, 0, 0.2]), faults_s=draw.choice([5.0, 20.0, 60.0]), faults=draw.randint(0, 5),
        )  # fmt: skip


GROUNDS: list[tempfile.TemporaryDirectory[str]] = []


@cache
def ground(kind: str) -> Path:
    """A folder with the task, and with certificates of all; its sites allow what runs of this kind need:
    "masks", "open" or "gossip"."""
    GROUNDS.append(tempfile.TemporaryDirectory(prefix="vsim-", dir=memory()))
    root = Path(GROUNDS[-1].name)
    (root / "vsim_task.py").write_text(TASK)
    config = Config.of(Plan.of(0).table, root)
    with certified(random.Random(f"certificates {kind}")):
        init(root / "certs")
        issue(root / "certs", "aggregator")
        for name in SITES:
            issue(root / "certs", "site", name)
        allowed(config, *SITES, masks=kind == "masks")
    return root


def memory() -> str | None:
    """A folder of a file system in memory, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass
class Machine:
    """Where one role runs, again and again."""

    name: str
    disk: Disk
    process: Process | None = None
    starts: int = 0
    boots: int = 0  # of the machine itself: one more after each power cut
    reason: str = ""  # why its run is over
    errors: list[str] = field(default_factory=list)  # that ended its processes after the faults


StartTrainer = Callable[[Path], Awaitable[Trains]]


class World:
    """One seed, run once."""

    plans: type[Plan] = Plan

    @classmethod
    def grounds(cls) -> None:
        """Make what all seeds share, once for all processes."""
        for kind in ("open", "masks"):
            ground(kind)

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.plan, self.draw = self.plans.of(seed), random.Random(f"world {seed}")
        self._trace = trace
        root = ground(self.plan.ground)
        self.folder = Path(tempfile.mkdtemp(prefix="run-", dir=root))
        for records in root.glob("certs/sites/*/records"):  # of the seed before
            records.unlink()
        self.loop: VirtualLoop = VirtualLoop(lambda: self.draw.choice([0.0, 0.0, 0.002]))
        self.machines = {n: Machine(n, Disk(self.folder / n)) for n in self.plan.roles}
        self.configs: dict[str, Config] = {}
        config = Config.of(self.plan.table, root)
        known = agreed(config)
        for name, machine in self.machines.items():
            machine.disk.folder.mkdir(0o700)
            own = replace(config, run=replace(config.run, dir=str(machine.disk.folder)))
            self.configs[name] = self._own(name, own)
            vars(self.configs[name])["known"] = known
        self._between(random.Random(f"network {seed}"))
        self.trainings, self.counts = 0, dict.fromkeys(("kill", "power", "stop", "trainer", "steps"), 0)
        self._processes: list[Process] = []  # the dead ones too: see hunt.py

    def _between(self, draw: random.Random) -> None:
        """The network, and who looks on."""
        self.network: Any = Network(self.loop, draw)
        self.claims: Any = Claims(self)

    def _own(self, name: str, config: Config) -> Config:
        """What of the settings is one machine's own."""
        return config

    @property
    def faulty(self) -> bool:
        return self.loop.now < self.plan.faults_s

    def tell(self, text: str) -> None:
        if self._trace is not None:
            process = CURRENT.get()
            self._trace(f"{self.loop.now:10.4f} {process.name if process else '-':10} {text}")

    # --- a run

    def run(self) -> Self:
        with self._own_world():
            try:
                self.loop.run_until_complete(self._main())
                self.claims.at_the_end()
            finally:
                self.counts["steps"] = self.loop.steps
                remove(str(self.folder))
        return self

    async def _main(self) -> None:
        self._plan_faults()
        lives = [asyncio.ensure_future(self._live(machine)) for machine in self.machines.values()]
        try:
            async with asyncio.timeout(END_S):
                await self._over(lives)
        except TimeoutError:
            raise Stuck(f"the run is not over after {END_S:g} s: {self._states()}") from None
        finally:
            for life in lives:
                life.cancel()

    async def _over(self, lives: list[asyncio.Future[None]]) -> None:
        """Until the aggregator has ended, at whatever place it stands."""
        first = lives[0]
        while not first.done():
            for life in (await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED))[0]:
                lives.remove(life)
                life.result()
        if lives:  # a site that was away then never hears of the end
            for life in (await asyncio.wait(lives, timeout=1.0))[0]:
                life.result()

    def _states(self) -> dict[str, str]:
        return {m.name: m.reason or f"start {m.starts} {m.errors[-1:]}" for m in self.machines.values()}

    async def _live(self, machine: Machine) -> None:
        """Start its process until the run is over there."""
        await asyncio.sleep(self.draw.choice([0.0, 0.0, 3.0]) * self.draw.random())
        while not machine.reason:
            machine.starts += 1
            process = machine.process = Process(machine.name, *self._when_it_dies())
            process.boot = f"{machine.name}, start {machine.boots}"
            cut = random.Random(self.draw.random()) if (power := self.draw.random() < 0.5) else None
            process.on_kill = partial(machine.disk.dies, cut)
            self._processes.append(process)
            task = process.start(self.loop, self._role(machine))
            assert process.killed is not None
            await asyncio.wait([task, process.killed], return_when=asyncio.FIRST_COMPLETED)
            if process.killed.done():
                self.counts["power" if power else "kill"] += 1
                machine.boots += power
                self.network.died(process, power)
                how = machine.disk.restart()
                where = f"step {process.steps}, write {process.writes}"
                self.tell(f"{machine.name} was killed at its {where} ({how})")
                await asyncio.sleep(self.draw.choice([0.0, 0.5, 8.0]) * self.draw.random())
                continue
            process.alive = False  # all that it left undone ends with it
            self.network.died(process, power=False)
            error = task.exception()
            if error is None:
                machine.reason = task.result()
                return
            machine.disk.dies(None)
            machine.disk.restart()
            if isinstance(error, FedtrainError):
                self.tell(f"{machine.name} ended: {type(error).__name__}: {error}")
                self.claims.ended(machine, error)
                if isinstance(error, Damaged) and "Move it and its .head away" in str(
                    error
                ):  # of a torn audit log
                    shutil.rmtree(machine.disk.folder / "audit")
                await asyncio.sleep(1.0)
            else:
                raise error

    def _when_it_dies(self) -> tuple[int | None, int | None]:
        """Before which of its steps, or of its writes, a process is killed, if at all."""
        if not self.faulty or self.draw.random() > 0.2 * self.plan.faults:
            return None, None
        if self.draw.random() < 0.5:
            return int(self.draw.expovariate(1 / 300)) + 1, None
        return None, int(self.draw.expovariate(1 / 25)) + 1

    async def _role(self, machine: Machine) -> str:
        def emit(event: Event) -> None:
            self.claims.told(machine, event)
            if self._trace is not None:
                self.tell(f"{event.kind} {event.fields()}")

        async def start(scratch: Path) -> Numbers:
            return Numbers(self, config)

        config = self.configs[machine.name]
        return await self._run(machine.name, config, emit, start)

    async def _run(self, name: str, config: Config, emit: Emit, start: StartTrainer) -> str:
        """A role as users run it; why it ended."""
        if name == AGGREGATOR:
            return (await aggregator.serve(config, emit=emit)).reason
        return await site.run(config, name, emit=emit, start_trainer=start)

    # --- what goes wrong

    def _plan_faults(self) -> None:
        for _ in range(self.plan.faults):
            self.network.later(self.draw.random() * self.plan.faults_s, self._fault)
        self.network.later(self.plan.faults_s, self.network.heal)

    def _fault(self) -> None:
        name = self.draw.choice([*self.machines])
        site, process = self.draw.choice(self.plan.sites), self.machines[name].process
        seconds = self.draw.choice([0.5, 4.0, 20.0]) * self.draw.random()
        match self.draw.choice(["block", "half", "reset", "kill", "stop", "flap"]):
            case "block":
                self.tell(f"{site} is cut off for {seconds:.2f} s")
                self.network.block(site, (UP, DOWN), seconds)
            case "half":
                way = self.draw.choice((UP, DOWN))
                self.tell(f"{site} {way} is cut off for {seconds:.2f} s")
                self.network.block(site, (way,), seconds)
            case "reset":
                self.tell(f"connections of {site} break")
                self.network.reset(site)
            case "flap":
                for i in range(6):
                    self.network.later(i * seconds / 3, self.network.reset, site)
            case "kill" if process is not None and process.alive and process.killed is not None:
                process.kill()
            case "stop" if process is not None and process.alive and process._loop is not None:
                self.counts["stop"] += 1
                self.tell(f"{name} stands still for {seconds:.2f} s")
                process.busy(seconds)

    # --- the world as a process sees it

    def _replaced(self) -> list[Change]:
        """What of the transport is another: where, its name, what stands there."""
        transports = {"grpc": lambda tls, heartbeat_s: SimTransport(self.network, tls, heartbeat_s)}
        return [(endpoints, "TRANSPORTS", transports), (aggregator, "TRANSPORTS", transports),
                (start, "TRANSPORTS", transports)]  # fmt: skip

    @contextmanager
    def _own_world(self) -> Iterator[None]:
        """Time, disks, threads and the network are this world's."""
        replace = os.replace

        def replaced(*arguments: Any, **named: Any) -> None:
            if (process := CURRENT.get()) is not None:
                process.writing()
            replace(*arguments, **named)

        def synced(fd: int) -> None:
            if (process := CURRENT.get()) is None:
                return
            process.writing()
            self.machines[process.name].disk.synced(fd)
            if self.faulty and self.plan.fsync_s:
                process.busy(self.draw.expovariate(1 / self.plan.fsync_s))

        def booted() -> str:
            process = CURRENT.get()
            return "" if process is None else process.boot

        async def start(config: Config, **_: Any) -> Numbers:
            return Numbers(self, config)

        def now() -> float:
            return BEGAN + self.loop.time()

        defaults: Any = AuditLog.__init__.__defaults__
        clocked = tuple(now if default is time.time else default for default in defaults)
        assert clocked != defaults, "an audit log takes its clock as its module is loaded"
        random.seed(self.plan.seed)
        threads.all_cores.cache_clear()
        own: tuple[Change, ...] = (
            (os, "fsync", synced), (os, "fdatasync", synced), (os, "replace", replaced),
            (secrets, "token_bytes", self.draw.randbytes),
            (secrets, "randbits", self.draw.getrandbits), (os, "sched_getaffinity", lambda _: {0}),
            (time, "monotonic", self.loop.time), (time, "perf_counter", self.loop.time),
            (time, "time", now), (AuditLog.__init__, "__defaults__", clocked), (Trainer, "start", start),
            (time, "time_ns", lambda: int(1e9 * (BEGAN + self.loop.time()))),
            (os, "urandom", self.draw.randbytes), (spool, "NOTE_BYTES", self.plan.chunk),
            (streams, "INLINE_BYTES", self.plan.inline), (streams, "CHUNK_BYTES", self.plan.chunk),
            (audit, "boot", booted), (os, "getpid", lambda: PID),
        )  # fmt: skip
        with (
            standing(*own, *KNOWN, *self._replaced()),
            drawn(self.draw, self.plan.real),
            self.claims.watching(),
        ):
            try:
                yield
            finally:
                threads.all_cores.cache_clear()
