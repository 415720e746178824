"""How Python processes under a trainer that is shut in pass descriptors to each other: as files.

multiprocessing passes them over a Unix socket that it connects to by path, and such sockets are closed there
(seccomp.py). torch passes each large tensor of a DataLoader's worker as a descriptor of shared memory. This
folder is first on PYTHONPATH of these processes, train.command's too, so every Python imports this module as
it starts. It then runs the sitecustomize that it stands in front of.
"""

import multiprocessing.reduction
import os
import sys
import tempfile
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from multiprocessing.context import get_spawning_popen
from typing import Any


class Lent:
    """A descriptor of memory, for another process that it is sent to: a copy of the memory's bytes in a file,
    which has no name any more once the other process has it."""

    def __init__(self, descriptor: int) -> None:
        copy, self._path = tempfile.mkstemp(prefix="sent-")
        at, end = 0, os.fstat(descriptor).st_size
        while at < end:
            at += os.sendfile(copy, descriptor, at, end - at)
        os.close(copy)

    def detach(self) -> int:
        """The descriptor, in the process that was sent it."""
        found = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        os.unlink(self._path)
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
