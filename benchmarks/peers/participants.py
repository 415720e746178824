"""Those who take turns in benchmarks/simulate.py: their environments, their processes, their turns."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parents[1]  # where `peers` is found
START_S = 300.0  # until a process has done its first round, at most
PATIENCE_S = 120.0  # for a turn, over the time that was asked for
TORCH = "torch==2.13.0"


class Absent(Exception):
    """Why a peer can't take part."""


@dataclass(frozen=True)
class Peer:
    """Another framework."""

    module: str
    requirements: tuple[str, ...] = ()  # of its environment; none: ours
    ranks: int = 1
    imports: str = ""  # must work there

    def command(self, cache: Path) -> list[str]:
        """What starts it; its environment is made where it is not there yet. Raises Absent."""
        python = environment(cache, self.requirements, self.imports) if self.requirements else sys.executable
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [python, *(launch if self.ranks > 1 else []), "-m", self.module]


PFL = ("pfl[pytorch]==0.6.0", TORCH)
PEERS = {
    "pfl1": Peer("peers.apple_pfl", PFL, imports="pfl.model.pytorch"),
    "pfl2": Peer("peers.apple_pfl", PFL, imports="pfl.model.pytorch", ranks=2),
    "flwr": Peer("peers.flower", ("flwr[simulation]==1.41.0", TORCH), imports="flwr.simulation"),
    "jax": Peer("peers.jax_vmap", ("jax==0.10.2",), imports="jax"),
}


def environment(cache: Path, requirements: tuple[str, ...], imports: str) -> str:
    """The interpreter of a virtual environment with these packages. Raises Absent."""
    folder = cache / hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:12]
    python, log = str(folder / "bin" / "python"), folder / "install.log"
    if not (folder / "installed").exists():
        steps = [[sys.executable, "-m", "venv", "--clear", str(folder)]]
        steps += [[python, "-m", "pip", "install", "--quiet", each] for each in reversed(requirements)]
        steps += [[python, "-c", f"import {imports}"]]
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, check=False)
            if folder.exists():
                log.write_text(done.stdout + done.stderr)
            if done.returncode:
                raise Absent(f"{' '.join(requirements)}: {last_line(done.stderr or done.stdout)}")
        (folder / "installed").touch()
    return python


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


class Participant:
    """A process that does rounds when it is asked to, or several processes that do the same side by side."""

    def __init__(self, command: list[str], beside: int = 1) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by close()
        self._processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0,
                start_new_session=True, cwd=HERE, env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
            for _ in range(beside)
        ]  # fmt: skip

    def first_round(self) -> float:
        """Seconds until the first round was done, from the start on where this is asked at once."""
        began = time.perf_counter()
        self._rounds(0.0, START_S)
        return time.perf_counter() - began

    def turn(self, seconds: float) -> float:
        """Rounds a second, of a turn of so many seconds or of one round, if that takes longer."""
        return self._rounds(seconds, PATIENCE_S + seconds)

    def _rounds(self, seconds: float, limit_s: float) -> float:
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(f"{seconds}\n".encode())
        deadline = time.monotonic() + limit_s
        found = [self._answer(process, deadline) for process in self._processes]
        return sum(each["rounds"] / each["seconds"] for each in found)

    def _answer(self, process: subprocess.Popen[bytes], deadline: float) -> dict[str, float]:
        """Its next line that is an answer. Raises Absent where none comes."""
        assert process.stdout is not None
        text = b""
        while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (more := os.read(process.stdout.fileno(), 65536)):
                raise Absent(f"it ended: {last_line(self.errors())}")
            text += more
            for line in text.splitlines(keepends=True):
                if line.startswith(b'{"rounds"') and line.endswith(b"\n"):
                    answer: dict[str, float] = json.loads(line)
                    return answer
        raise Absent(f"no answer in time: {last_line(self.errors())}")

    def errors(self) -> str:
        """What it has written to its standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its ranks, which are in sessions of their own
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
            with suppress(ProcessLookupError):  # and whatever it has left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._errors.close()
