"""Processes that belong together: how each ends, and that none outlives what it was started for."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

_PR_SET_PDEATHSIG = 1  # prctl.h


def die_with_parent(parent: int) -> None:
    """From here on the kernel kills this process as soon as the thread that started it, in process `parent`,
    has ended: also when this one is stopped, or in a call that doesn't return."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was too late
        os._exit(1)


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
