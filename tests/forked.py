"""Trainer processes, and the ranks that they start, forked from a process that has torch loaded: in a test
from that of tests.worlds, in a command from a helper that is forked before the command begins. Each is a
process of its own and the child of whoever started it, as it would be if it was executed: only the import of
torch, which is most of the time that a trainer takes to start, is left out.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from fedtrain.runtime.trainers import confinement, ranks, trainer_process
from tests.worlds import FORKED

if TYPE_CHECKING:
    import pytest

_PR_SET_CHILD_SUBREAPER = 36  # prctl.h


class Forked:
    """What asyncio.create_subprocess_exec would give, as far as fedtrain uses it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    async def wait(self) -> int:
        ended, process = asyncio.Event(), os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(process, ended.set)
        try:
            await ended.wait()
        finally:
            asyncio.get_running_loop().remove_reader(process)
            os.close(process)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])  # noqa: ASYNC222  # it has ended


Fork = Callable[[list[Connection], tuple[int, ...], dict[str, str], int], None]


def fork_trainers(monkeypatch: pytest.MonkeyPatch, most: int = 2) -> None:
    """Have this process fork its trainers, which may have `most` ranks each."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", _forking(_ask_worlds, most))


def fork_trainers_of_command(most: int = 1) -> None:
    """The same for this process, a command that has loaded torch and has no thread yet."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        _help(theirs)
    theirs.close()
    asyncio.create_subprocess_exec = _forking(partial(_ask_helper, ours), most)


def _forking(fork: Fork, most: int) -> Any:
    async def create(*command: str, pass_fds: tuple[int, ...] = (), **options: Any) -> Any:
        known = trainer_process.__name__, confinement.__name__  # forked, it is not shut in
        assert command[1:3] == ("-P", "-m"), command
        assert command[3] in known, command
        return Forked(_start_trainer(fork, pass_fds, options["stdout"], options["env"], most))

    return create


def _start_trainer(
    fork: Fork, pass_fds: tuple[int, ...], output: Any, env: Mapping[str, str], most: int
) -> int:
    """Its pid. The kernel gives a process whose parent has ended to the nearest ancestor that asks for them:
    so the trainer, whose parent ends at once, becomes our child."""
    output = output if isinstance(output, int) else output.fileno()
    ours, theirs = FORKED.Pipe()
    passed = [theirs, *(Connection(os.dup(each)) for each in (pass_fds[0], output, *pass_fds[1:]))]
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        fork(passed, pass_fds[1:], dict(env), most)
        for connection in passed:
            connection.close()
        with ours:
            pid: int = ours.recv()
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
    return pid


def _ask_worlds(passed: list[Connection], numbers: tuple[int, ...], env: dict[str, str], most: int) -> None:
    parent = FORKED.Process(target=_fork, args=(passed, numbers, env, most))
    parent.start()
    parent.join()


def _ask_helper(
    helper: socket.socket, passed: list[Connection], numbers: tuple[int, ...], env: dict[str, str], most: int
) -> None:
    socket.send_fds(helper, [json.dumps([numbers, env, most]).encode()], [each.fileno() for each in passed])


def _help(commands: socket.socket) -> NoReturn:
    """Fork the parent of each trainer that the command asks for, until the command is gone."""
    while True:
        text, files, *_ = socket.recv_fds(commands, 1 << 20, 8)
        if not text:
            os._exit(0)
        passed = [Connection(file) for file in files]
        if not (parent := os.fork()):
            commands.close()
            _fork(passed, *json.loads(text))
            os._exit(0)
        for connection in passed:
            connection.close()
        os.waitpid(parent, 0)


def _fork(passed: list[Connection], numbers: tuple[int, ...], env: dict[str, str], most: int) -> None:
    """`passed`: where the pid is sent, the trainer's channel, its output, and the files of its `numbers`."""
    parent = os.pidfd_open(os.getpid())
    if os.fork():
        return
    select.select([parent], [], [])  # it has ended, and this process is given to its grandparent
    os.close(parent)
    # Above the numbers that the trainer's files have.
    passed = [Connection(fcntl.fcntl(each.fileno(), fcntl.F_DUPFD, 512)) for each in passed]
    ready, channel, output, *files = passed
    for file, number in zip(files, numbers, strict=True):
        os.dup2(file.fileno(), number)
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    ready.send(os.getpid())
    ready.close()
    for _ in range(1, most):
        _fork_rank(channel)
    try:
        trainer_process.serve(socket.socket(fileno=os.dup(channel.fileno())))
    finally:
        os._exit(0)


def _fork_rank(channel: Connection) -> None:
    """Have another rank ready before this process begins a thread or runs a line of the task."""
    ours, theirs = socket.socketpair()
    if not (pid := os.fork()):
        for _, other in [*Rank.ready, (0, ours)]:
            other.close()
        channel.close()
        _become_rank(theirs)
    theirs.close()
    Rank.ready.append((pid, ours))
    ranks.subprocess = SimpleNamespace(Popen=Rank, PIPE=subprocess.PIPE)  # type: ignore[assignment]


class Rank(subprocess.Popen[bytes]):
    """The process that is ready, in place of a new one."""

    ready: ClassVar[list[tuple[int, socket.socket]]] = []

    def _execute_child(self, command: list[str], *others: Any) -> None:
        assert command[1:] == ["-P", "-m", ranks.__name__], command
        report, stdin = others[3][0], others[9]
        self.pid, channel = self.ready.pop()
        with channel:
            socket.send_fds(channel, [str(report).encode()], [stdin, report])
        os.close(stdin)
        self._child_created = True


def _become_rank(channel: socket.socket) -> NoReturn:
    try:
        number, (stdin, report), *_ = socket.recv_fds(channel, 100, 2)
        channel.close()
        sys.stdin = None  # which may close 0, and is not to close the new one
        os.dup2(stdin, 0)
        os.close(stdin)
        if report != int(number):  # that is what rank 0 says it is
            os.dup2(report, int(number))
            os.close(report)
        sys.stdin = open(0)  # noqa: SIM115
        ranks.main()
    finally:
        os._exit(0)
