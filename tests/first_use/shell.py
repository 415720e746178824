"""A shell in which `fedtrain`, `torchrun` and `python` cost no start of torch: each is forked from one
process that has torch loaded, with the arguments, folder, environment and files of its line."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tests.forked import fork_trainers_of_command
from tests.limits import WAIT_S
from tests.signals import hear_ctrl_c
from tests.worlds import FORKED

ENDLESS = r"fedtrain dashboard\b"
PATIENCE_S = 60
NAMES = ("fedtrain", "torchrun", "python")
STAND_IN = """#!{python} -IS
import array, json, os, signal, socket, sys
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
rest = arguments[1:] if arguments[:1] == ["-u"] else arguments
ours = rest[:1] == ["-m"] and rest[1].startswith("fedtrain")
if name == "python" and not (ours or rest and rest[0].endswith(".py")):
    os.execv({python!r}, [{python!r}, *arguments])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: server.send(b"%d" % number))
    what = json.dumps([name, rest, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [what], [0, 1, 2])
    code = int(server.recv(16) or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class Shell:
    """Lines, one after the other, in one folder after the other; `with` ends what they left behind."""

    def __init__(self, root: Path, bin_dir: Path, given: Mapping[str, Mapping[str, str]]) -> None:
        """`given`: pattern -> what is in the environment of the lines that begin so."""
        self._given = given
        self.root, self.output, self.left = root, "", list[tuple[str, subprocess.Popen[str], Path]]()
        self._kept = root / ".shell"
        self._kept.mkdir()
        (self._kept / "folder").write_text(str(root))
        path = f"{bin_dir}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._env = {"PATH": path, "HOME": str(root), "NO_COLOR": "1", "TERM": "dumb"}

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        for _line, process, _log in self.left:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(WAIT_S)

    @property
    def folder(self) -> Path:
        return Path((self._kept / "folder").read_text().strip())

    def type(self, line: str, answer: str = "") -> str:
        """Run a line to its end, which must be good; its output. Folder and exports stay for the next.
        `answer`: typed where the line asks."""
        keep = f"{{ {line}\n}} || exit $?\npwd >{self._kept}/folder"
        keep += f"; export -p >{self._kept}/exports" if line.startswith("export ") else ""
        done = subprocess.run(
            ["bash", "-ec", f"{self._before()}\n{keep}"], cwd=self.folder, env=self._of(line), text=True,
            input=answer, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_S,
        )  # fmt: skip
        self.output = done.stdout
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{self.logs()}"
        return done.stdout

    def begin(self, line: str, answer: str = "") -> None:
        """Run a line in a terminal of its own, at which `answer` is typed."""
        log = self._kept / f"{len(list(self._kept.glob('*.log')))}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-ec", f"{self._before()}\n{line}"], cwd=self.folder, env=self._of(line), text=True,
                stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(answer)
        process.stdin.close()
        self.left.append((line, process, log))

    def wait(self) -> None:
        """Until all that runs in other terminals has ended well; what would run for ever is ended."""
        for line, process, log in self.left:
            if re.match(ENDLESS, line):
                until(lambda process=process, log=log: log.stat().st_size or process.poll() is not None)
                os.killpg(process.pid, signal.SIGTERM)
                assert process.wait(PATIENCE_S) in (-signal.SIGTERM, 128 + signal.SIGTERM), (
                    f"{line}\n{self.logs()}"
                )
        others = [process for line, process, _ in self.left if not re.match(ENDLESS, line)]
        try:
            until(lambda: any(each.poll() for each in others) or None not in [each.poll() for each in others])
        except AssertionError:
            raise AssertionError(f"these go on:\n{self.logs()}") from None
        assert not any(each.poll() for each in others), self.logs()
        self.left = []

    def logs(self) -> str:
        return "\n".join(f"--- {line}\n{log.read_text()}" for line, _, log in self.left)

    def _of(self, line: str) -> dict[str, str]:
        own = [env for pattern, env in self._given.items() if re.match(pattern, line)]
        return {**self._env, **{key: value for env in own for key, value in env.items()}}

    def _before(self) -> str:
        exports = self._kept / "exports"
        return f"source {exports}" if exports.exists() else ":"


def until(there: Callable[[], Any]) -> Any:
    """What is there, once it is."""
    end = time.monotonic() + PATIENCE_S
    while not (found := there()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@contextmanager
def stand_ins(folder: Path) -> Iterator[Path]:
    """A folder for PATH, with programs of these names, and the process that does their work."""
    address = str(folder / "server")
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(address)
    door.listen(64)
    server = FORKED.Process(target=_serve, args=(door, str(folder / "python")))
    text = STAND_IN.format(python=sys.executable, address=address)
    for name in NAMES:
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    with door:
        server.start()
    try:
        yield folder
    finally:
        server.terminate()
        server.join(WAIT_S)


def _serve(door: socket.socket, python: str) -> None:
    with selectors.DefaultSelector() as events, door:
        events.register(door, selectors.EVENT_READ, None)
        while True:
            for key, _ in events.select():
                if key.data is None:
                    _start(events, door, python)
                elif key.fd in events.get_map():
                    _hear(events, key)


def _start(events: Any, door: socket.socket, python: str) -> None:
    caller, _ = door.accept()
    message, files, *_ = socket.recv_fds(caller, 1 << 20, 3)
    if not message:
        return
    if not (pid := os.fork()):
        door.close()
        caller.close()
        _run(files, python, *json.loads(message))
    for file in files:
        os.close(file)
    ended = os.pidfd_open(pid)
    events.register(ended, selectors.EVENT_READ, (pid, caller))
    events.register(caller, selectors.EVENT_READ, (pid, None))


def _hear(events: Any, key: selectors.SelectorKey) -> None:
    pid, caller = key.data
    if caller is None:  # it passes a signal on, or is gone
        try:
            os.kill(pid, int(key.fileobj.recv(16) or signal.SIGKILL))  # type: ignore[union-attr]
        except (ProcessLookupError, ConnectionResetError):
            return
        return
    events.unregister(key.fileobj)
    os.close(key.fd)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    events.unregister(caller)
    with caller:
        try:
            caller.send(b"%d" % code)
        except OSError:
            return


def _run(
    files: list[int], python: str, name: str, arguments: list[str], folder: str, env: dict[str, str]
) -> NoReturn:
    code: Any = 1
    try:
        os.setsid()
        hear_ctrl_c()
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin, sys.executable = open(0), python  # noqa: SIM115
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        _main(name, arguments)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) or e.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def _main(name: str, arguments: list[str]) -> None:
    if name == "torchrun":
        from torch.distributed.run import main

        main(arguments)
        return
    if name == "python" and arguments[0] != "-m":
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).parent.resolve())
        runpy.run_path(arguments[0], run_name="__main__")
        return
    if name == "fedtrain" or arguments[1] == "fedtrain":
        from fedtrain import cli

        sys.argv = ["fedtrain", *arguments[0 if name == "fedtrain" else 2 :]]
        fork_trainers_of_command(most=2 if "parallel.ranks=2" in arguments else 1)
        cli.main()
        return
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
