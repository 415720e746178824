"""torchrun's agents, one a virtual machine, and the ranks under them."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import run

from tests.namespaces import DEVICE, Host
from tests.ports import free_port
from tests.worlds import Command

QUICK = "last_call_timeout=1,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3"
ROOT = Path(__file__).parents[1]


class Cluster:
    """Machines on loopback that meet by torchrun's rendezvous; the first one holds it. `with` ends all."""

    def __init__(
        self, folder: Path, *command: str, nodes: str = "1", ranks: int = 1, restarts: int = 5,
        hosts: Sequence[Host] = (),
    ) -> None:  # fmt: skip
        """`command`: what torchrun starts, `ranks` of them a machine; `nodes`: MIN:MAX machines. `hosts`: on
        which each machine is that is added; (): on loopback."""
        self.hosts = hosts
        self.folder, self.command, self.nodes, self.ranks, self.restarts = (
            folder,
            command,
            nodes,
            ranks,
            restarts,
        )
        self.agents: list[Command] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            self.lose(agent)

    def add(self, *also: str, **env: str) -> Command:
        """Start one more machine."""
        host = self.hosts[len(self.agents)] if self.hosts else None
        first = self.hosts[0].address if self.hosts else "127.0.0.1"
        meeting = QUICK
        if host is not None:  # torchrun does not know itself by an address that it can't look up
            env |= {"GLOO_SOCKET_IFNAME": DEVICE}
            meeting += f",is_host={int(not self.agents)}"
        agent = Command(
            partial(host.within, run.main) if host is not None else run.main,
            [
                "--nnodes", self.nodes, "--nproc-per-node", str(self.ranks),
                "--max-restarts", str(self.restarts), "--monitor-interval", "0.1",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{self.port}",
                "--rdzv-id", "test", "--rdzv-conf", meeting, "--local-addr", host.address if host else first,
                *self.command, *also,
            ],
            folder=self.folder,
            log=self.folder / f"agent-{len(self.agents)}.log",
            env={
                "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "FEDTRAIN_RANKS_SECRET": "secret" * 8, **env,
            },
        )  # fmt: skip
        self.agents.append(agent)
        if len(self.agents) == 1:  # whoever is first on the port holds the rendezvous
            self.wait_for(self._listening)
        return agent

    def _listening(self) -> bool:
        """Whether the first machine listens on the port, as its own kernel tells."""
        sockets = "".join(Path(f"/proc/{self.agents[0].pid}/net/{n}").read_text() for n in ("tcp", "tcp6"))
        return re.search(rf":{self.port:04X} [0-9A-F:]+ 0A ", sockets) is not None

    def lose(self, agent: Command) -> None:
        """The machine is gone: its agent and its ranks at once, without a word."""
        if agent.poll() is None:
            for process in [psutil.Process(agent.pid), *self.children(agent)]:
                kill(process)
        agent.wait(30)

    def children(self, agent: Command) -> list[psutil.Process]:
        try:
            return psutil.Process(agent.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def rank(self, number: int) -> psutil.Process | None:
        """The process of a rank, where there is one now."""
        for agent in self.agents:
            for child in self.children(agent):
                try:
                    if child.environ().get("RANK") == str(number):
                        return child
                except psutil.Error:
                    continue
        return None

    def log(self) -> str:
        """All that the agents and ranks wrote."""
        return "\n".join(p.read_text(errors="replace") for p in sorted(self.folder.glob("agent-*.log")))

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 200) -> Any:
        """Until `condition()` is true, for a bounded time."""
        until = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < until, self.log()
            time.sleep(0.02)
        return found


def kill(process: psutil.Process, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
