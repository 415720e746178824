"""What a rank leaves behind: a log of its own, and a line that torchrun shows at the end of its report."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ..errors import story_of

LONGEST = 1 << 20  # bytes of a log that goes on; a longer one begins anew


class RankLog:
    """`with RankLog(folder, rank):` has the error that ends the block, whole, and where all threads stood
    when a fatal signal came (SIGSEGV, SIGABRT, …), as faulthandler writes it."""

    def __init__(self, folder: Path, rank: int) -> None:
        """`folder`: of the run. What a rank wrote in earlier starts stays."""
        self.path = folder / "ranks" / f"rank-{rank:05d}.log"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        goes_on = self.path.exists() and self.path.stat().st_size < LONGEST
        self._file = self.path.open("ab" if goes_on else "wb", buffering=0)
        self._fatal = self._later = False  # whether faulthandler was asked for either

    def __enter__(self) -> RankLog:
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.write(f"begins on {os.uname().nodename}, process {os.getpid()}, restart {restart}")
        self._fatal = not faulthandler.is_enabled()  # else somebody else wants it elsewhere
        if self._fatal:
            faulthandler.enable(self._file, all_threads=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.write("ends" if error is None else story_of(error).rstrip() or f"ends: {error!r}")
        self.write_stacks_after(0)
        if self._fatal:
            faulthandler.disable()
        self._file.close()

    def write(self, text: str) -> None:
        self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())

    def write_stacks(self, text: str) -> None:
        """A line, and where every thread of this process stands."""
        self.write(text)
        faulthandler.dump_traceback(self._file, all_threads=True)

    def write_stacks_after(self, seconds: float) -> None:
        """Do so when so much time has passed without another such call, and end the process with status 1. It
        happens also where a call without end keeps Python from running. 0: no more."""
        if self._later:
            faulthandler.cancel_dump_traceback_later()
        self._later = seconds > 0
        if self._later:
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)


def main_thread_stands() -> str:
    """The line that the main thread is at, with its function."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "nowhere"
    here = traceback.extract_stack(frame, limit=1)[0]
    return f"{Path(here.filename).name}:{here.lineno}, in {here.name}"


def tell_torchrun(line: str, at: int) -> None:
    """torchrun's report shows the line of the rank with the earliest `at`, in seconds since 1970."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        report = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(at)}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": report}))
