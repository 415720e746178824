"""Processes that belong together: how each ends, and that none outlives what it was started for."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

_PR_SET_PDEATHSIG = 1  # prctl.h


def signalled_when_parent_ends(number: int) -> None:
    """From here on the kernel sends this process a signal as soon as the thread that started it has ended:
    SIGKILL ends it, and SIGCONT lets it see for itself, where it is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def is_stopped(pid: int) -> bool:
    """Whether a child of ours is stopped (SIGSTOP) at the moment."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def ending(status: int) -> str:
    """A process's exit status, or minus the number of the signal that ended it, in words."""
    if status >= 0:
        return f"ended with exit status {status}"
    oom = ", often for want of memory" if -status == signal.SIGKILL else ""
    return f"was ended by signal {-status} ({signal.Signals(-status).name}{oom})"


def end_tree(pid: int) -> None:
    """Kill a process that is ours, and all that it started and that it started in turn."""
    found = {pid}
    while more := {child for child, parent in _parents() if parent in found and child not in found}:
        found |= more
    for each in found:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _parents() -> list[tuple[int, int]]:
    """(process, its parent) of all that there are."""
    pairs = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError), open(f"/proc/{entry.name}/stat") as file:
                pairs.append((int(entry.name), int(file.read().rpartition(")")[2].split()[1])))
    return pairs
