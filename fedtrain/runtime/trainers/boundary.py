"""What a trainer process may reach: its scratch folder, and no private key by any name.

A key may be a link, to a systemd credential or a mounted secret, so the folder of every link on the way is
hidden.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

CREDENTIALS = "CREDENTIALS_DIRECTORY"  # systemd's, of the unit that runs this process
SHARED_MEMORY = "/dev/shm"  # noqa: S108  # Linux's own
SCRATCH = "CONFINED_TO"  # in the environment of a process that is shut in: the folder that it may write
DENIED = ("Read-only file", "Permission denied", "Operation not permitted", "readonly")
MOST_LINKS = 40  # that the kernel follows in one path


class Boundary(NamedTuple):
    """What a trainer process may reach, as its parent tells it."""

    how: str  # policy.confine
    several: bool  # it trains in several processes, which need a loopback, and NCCL's datagrams
    hidden: list[str]  # folders, and files where the folder is needed
    keys: list[str]  # names of files that must not be readable
    scratch: list[str]  # folders that it may write
    places: list[str]  # folders in which it tries whether it can write
    own_memory: bool  # /dev/shm has nothing that it has to read


class Limit(NamedTuple):
    """What a trainer process found when it tried to reach something."""

    what: str
    holds: bool  # as far as the policy asks for it
    said: str


def with_advice(story: str) -> str:
    """The traceback of a task's error, and what to do where this process was not allowed to do something."""
    folder = os.environ.get(SCRATCH)
    if folder is None or not any(words in story for words in DENIED):
        return story
    may = f"policy.confine lets the task write in {folder} ($TMPDIR) alone, and read no keys."
    return f"{story}{may} Write there, or prepare the file before the run.\n"


def needs(folder: str, needed: Collection[str]) -> bool:
    """Whether one of these paths lies in the folder."""
    return any(Path(os.path.realpath(path)).is_relative_to(folder) for path in needed)


def hidden(certs: Path, root: Path, needed: Collection[str]) -> tuple[list[str], list[str]]:
    """(the folders to hide, the names of the files in them). `certs`: network.certs; `root`: of the project.
    `needed`: what the trainer reads; a key that a link leads to beside it is hidden alone."""
    inside = needs(os.path.realpath(certs), [str(root)])  # not the task as well
    tops = [*map(str, [certs / each for each in ("sites", "aggregator", "ca")] if inside else [certs])]
    tops += filter(None, [os.environ.get(CREDENTIALS)])
    paths, names = {os.path.realpath(top) for top in tops}, set[str]()
    for top in tops:
        for folder, _, files in os.walk(top, followlinks=True):
            for name in chain.from_iterable(_links(os.path.join(folder, file)) for file in files):
                beside = os.path.dirname(name)
                alone = beside not in paths and (beside.count(os.sep) < 2 or needs(beside, needed))
                paths.add(name if alone else beside)
                names.add(name)
    return sorted(path for path in paths if paths.isdisjoint(map(str, Path(path).parents))), sorted(names)


def _links(path: str) -> Iterator[str]:
    """The path, with its folder resolved, and that of each link which it leads to."""
    for _ in range(MOST_LINKS):
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        yield path
        if not os.path.islink(path):
            return
        path = os.path.join(os.path.dirname(path), os.readlink(path))
