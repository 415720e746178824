"""Commands as people type them, less the time that loading torch takes: trainers are forked from them too."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from fedtrain import cli
from fedtrain.runtime.trainers import trainer_process
from tests.limits import WAIT_S
from tests.worlds import Command

started = asyncio.create_subprocess_exec


class Forked:
    """A trainer's process, as its parent sees it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    async def wait(self) -> int:
        status = await asyncio.to_thread(os.waitpid, self.pid, 0)
        return os.waitstatus_to_exitcode(status[1])


async def fork(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """The process of a command; where it is a trainer, forked: nothing of a network runs when one starts."""
    if trainer_process.__name__ not in command:
        return await started(*command, **options)
    sys.stdout.flush()
    if pid := os.fork():
        return cast(asyncio.subprocess.Process, Forked(pid))
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(options["env"])
        if options["stdout"] != 2:
            os.dup2(options["stdout"].fileno(), 1)
            os.dup2(options["stderr"].fileno(), 2)
        kept = {0, 1, 2, *options["pass_fds"]}
        for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
            if fd not in kept:
                with suppress(OSError):
                    os.close(fd)
        trainer_process.serve(socket.socket(fileno=int(command[-1])))
    finally:
        os._exit(0)


def fedtrain(arguments: list[str]) -> None:
    asyncio.create_subprocess_exec = fork
    sys.argv[1:] = arguments
    cli.main()


class Shell:
    """Commands in one folder; `with` ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._running, self._logs = folder, list[Command](), list[Path]()

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        for command in self._running:
            if command.poll() is None:
                command.terminate()
        for command in self._running:
            try:
                command.wait(10)
            except TimeoutError:
                command.kill()
                command.wait(10)

    def start(self, line: str, **env: str) -> tuple[Command, Path]:
        """`fedtrain LINE`, and where it writes."""
        log = self.folder / f"{len(self._running)}.log"
        log.touch()
        threads = {"OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        command = Command(fedtrain, line.split(), folder=self.folder, log=log, env=threads | env)
        self._running.append(command)
        return command, log


def wait_for(log: Path, words: str, command: Command) -> None:
    """Until a line says so, while the command runs."""
    until = time.monotonic() + WAIT_S
    while words not in (text := log.read_text()):
        going = command.poll() is None and time.monotonic() < until
        assert going, f"{words!r} is not in:\n{text}"
        time.sleep(0.01)
