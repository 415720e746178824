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
