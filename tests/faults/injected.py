"""Roles of which calls of libc fail at a chosen place, as a full or broken disk has them fail, or a process
that has too many files open.

Each is forked from a process that was started with tests/faults/inject.c before it, and has done all imports:
`python -m tests.faults.injected` reads a JSON object a line.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SITES = ("a", "b", "c")


@dataclass(frozen=True)
class Fault:
    """`many` calls (-1: all) about a path under `prefix` that has this `part` fail, after so many others.
    With the call "*" none fails, and all are noted in the file `mark`."""

    error: int
    call: str
    after: int = 0
    many: int = -1
    prefix: str = ""
    part: str = ""
    mark: str = ""  # a file that is made as the first one fails


class Injector:
    """The process that roles are forked from."""

    def __init__(self, folder: Path) -> None:
        library = folder / "inject.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "inject.c", "-ldl"], check=True
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=HERE.parents[1], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env=os.environ | {"LD_PRELOAD": str(library)},
        )  # fmt: skip

    def run(self, role: str, root: Path, log: Path, fault: Fault | None, timeout_s: float) -> tuple[Any, ...]:
        """(exit code or None when it was killed for going on so long, when it ended) of this role there."""
        started = self._ask(start=[role, str(root), str(log), None if fault is None else astuple(fault)])
        return tuple(self._ask(wait=[started, timeout_s]))

    def close(self) -> None:
        with self._process:  # its pipes are closed, and it ends
            pass

    def _ask(self, **what: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


def possible() -> bool:
    """Whether a compiler is here."""
    return shutil.which("cc") is not None


def serve() -> None:
    import torch

    import fedtrain.runtime.datacenters.datacenter
    import fedtrain.runtime.peers.peer
    import fedtrain.runtime.simulations.simulation  # noqa: F401
    import tests.inprocess
    import tests.peers  # noqa: F401
    from tests.signals import hear_ctrl_c

    torch.set_num_threads(1)
    inject = ctypes.CDLL(None).inject
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            print(json.dumps(ended(*asked["wait"])), flush=True)
            continue
        role, root, log, fault = asked["start"]
        if process := os.fork():
            print(process, flush=True)
            continue
        try:
            hear_ctrl_c()
            os.chdir(root)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
            if fault is not None:
                inject(*(each.encode() if isinstance(each, str) else each for each in fault))
            command(role)
        except SystemExit as e:
            os._exit(e.code if isinstance(e.code, int) else 1)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(99)
        os._exit(0)


def ended(process: int, timeout_s: float) -> tuple[int | None, float]:
    until = time.monotonic() + timeout_s
    while not (found := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None, time.time()
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(found[1]), time.time()


# --- What is forked


def command(role: str) -> None:
    """A role of the project in this folder, as its command; a federation's and a village's are in this one
    process, and whichever of them fails ends them all."""
    from fedtrain.cli.arguments import Command
    from fedtrain.cli.commands import cli

    if role in WORLDS:
        Command("world", callback=lambda: alone(WORLDS[role]())).main([], standalone_mode=True)
    else:
        cli([*role.split()], prog_name="fedtrain")


def alone(work: Coroutine[Any, Any, Any]) -> None:
    try:
        asyncio.run(work)
    except BaseExceptionGroup as e:
        raise next(each for each in e.exceptions if isinstance(each, Exception)) from None


async def federation(*, masks: bool) -> None:
    """An aggregator and its sites over mutual TLS, with their logs."""
    from fedtrain import api
    from fedtrain.config import Config
    from fedtrain.events import silent
    from fedtrain.runtime.sites import site
    from fedtrain.runtime.star import aggregator
    from tests.allowed import allowed
    from tests.inprocess import InProcess, begin

    config = Config.load(Path("fedtrain.toml"), [f"secagg.enabled={str(masks).lower()}"])

    async def aggregate() -> None:
        with api.logged(config.run_dir, silent) as emit:
            begin(config)
            await aggregator.serve(config, emit=emit)

    async def take_part(name: str) -> None:
        async def start(scratch: Path) -> InProcess:
            return InProcess(config, scratch, simulated=False)

        with api.logged(config.site_dir(name), silent) as emit:
            await site.run(allowed(config, name), name, emit=emit, start_trainer=start)

    async with asyncio.TaskGroup() as group:
        group.create_task(aggregate())
        for name in SITES:
            group.create_task(take_part(name))


async def peers() -> None:
    """Gossip over ZeroMQ, with the peers' logs."""
    from fedtrain import api
    from fedtrain.config import Config
    from fedtrain.events import silent
    from fedtrain.runtime.peers import peer
    from tests.allowed import allowed
    from tests.peers import Toy

    ports = json.loads(Path("ports").read_text())  # noqa: ASYNC240

    async def take_part(name: str) -> None:
        listen = ports[name]
        config = Config.load(Path("fedtrain.toml"), [f"network.listen={listen}", "gossip.topology=complete"])

        async def start(scratch: Path) -> Toy:
            return Toy(float(ord(name) - ord("a")), 0.0)

        allowed(config, name, masks=False, pin_members=False)
        with api.logged(config.peer_dir(name), silent) as emit:
            await peer.run(config, name, emit=emit, start_trainer=start)

    async with asyncio.TaskGroup() as group:
        for name in SITES:
            group.create_task(take_part(name))


WORLDS: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
    "federation": lambda: federation(masks=False),
    "masks": lambda: federation(masks=True),
    "peers": peers,
}

if __name__ == "__main__":
    serve()
