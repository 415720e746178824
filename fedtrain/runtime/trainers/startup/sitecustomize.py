"""How Python processes under a trainer that is shut in pass descriptors to each other: by /proc.

multiprocessing passes them over a Unix socket that it connects to by path, and such sockets are closed there
(seccomp.py). torch passes each large tensor of a DataLoader's worker as a descriptor of shared memory. This
folder is first on PYTHONPATH of these processes, train.command's too, so every Python imports this module as
it starts. It then runs the sitecustomize that it stands in front of.
"""

import multiprocessing.reduction
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar


class Lent:
    """A descriptor of memory, for another process that it is sent to: that of a copy, opened by /proc. Its
    time says that it has arrived, and then this process closes its own."""

    held: ClassVar[list[int]] = []

    def __init__(self, descriptor: int) -> None:
        for arrived in [each for each in self.held if os.fstat(each).st_mtime == 0]:
            self.held.remove(arrived)
            os.close(arrived)
        copy, at, end = os.memfd_create("sent"), 0, os.fstat(descriptor).st_size
        while at < end:
            at += os.sendfile(copy, descriptor, at, end - at)
        self.held.append(copy)
        self._path = f"/proc/{os.getpid()}/fd/{copy}"

    def detach(self) -> int:
        """The descriptor, in the process that was sent it."""
        found = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        os.utime(found, (0, 0))
        return found


def lend(descriptor: int) -> Any:
    """In place of multiprocessing.reduction.DupFd."""
    if (starting := get_spawning_popen()) is not None:
        return starting.DupFd(starting.duplicate_for_child(descriptor))
    return Lent(descriptor)


multiprocessing.reduction.DupFd = lend  # type: ignore[assignment]  # what torch calls it by
behind = [folder for folder in sys.path if folder != os.path.dirname(__file__)]
if (found := PathFinder.find_spec("sitecustomize", behind)) and found.loader:
    found.loader.exec_module(module_from_spec(found))
