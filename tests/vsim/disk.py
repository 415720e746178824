"""A machine's disk: files in memory (a tmpfs where there is one), and what of them a power cut leaves.

A file counts as it was at its last fsync or fdatasync, also under another name, and a name as it was at the
last fsync of its folder. Of what was done since a cut may lose all, keep all, or keep any part: names without
bytes, bytes in sectors.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SECTOR = 512
HOWS = ("lost", "kept", "names", "data", "torn", "torn")
Names = dict[str, int]  # of a folder: name -> inode


@dataclass
class Left:
    """What the next process finds."""

    how: str
    folders: list[str] = field(default_factory=list)
    # path -> bytes, those of them that the disk has for sure, whether it has the name for sure
    files: dict[str, tuple[bytes, bytes | None, bool]] = field(default_factory=dict)


@dataclass
class Disk:
    """The folder of one machine."""

    folder: Path
    files: dict[int, bytes] = field(default_factory=dict)  # inode -> what the disk has for sure
    names: dict[str, Names] = field(default_factory=dict)  # folder -> what the disk has for sure
    lives: int = 0
    left: Left = field(default_factory=lambda: Left("nothing"))

    def synced(self, fd: int) -> None:
        """A file, or a folder, is on the disk now."""
        link, found = f"/proc/self/fd/{fd}", os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            path = os.readlink(link)
            if path.startswith(str(self.folder)):
                self.names[path] = _names(path)
        elif found.st_nlink:  # not one that was removed while it was open
            try:
                self.files[found.st_ino] = os.pread(fd, found.st_size, 0)
            except OSError:  # it is open for writing only
                self.files[found.st_ino] = _bytes(link)

    def durable(self, path: Path) -> bytes:
        """What of a file no power cut takes away."""
        try:
            return self.files.get(path.stat().st_ino, b"")
        except FileNotFoundError:
            return b""

    def dies(self, cut: random.Random | None) -> None:
        """Keep what a kill leaves now, or (`cut`) a power cut, for the next process."""
        self.left = found = Left("kill" if cut is None else cut.choice(HOWS))
        folders = [*_folders(str(self.folder))]
        paths = {inode: f"{path}/{name}" for path, now in folders for name, inode in now.items()}
        there = set[int]()
        for path, now in folders:
            before = self.names.get(path, {})
            found.folders.append(path)
            for name, inode in (now if cut is None else _chosen(before, now, found.how, cut)).items():
                found.files[f"{path}/{name}"] = self._content(inode, paths, name in before, cut)
                there.add(inode)
        named = {inode for names in self.names.values() for inode in names.values()}
        for inode, full in paths.items():
            if inode in named - there:  # moved to another folder: no cut takes both its names
                found.files[full] = self._content(inode, paths, True, cut)

    def _content(
        self, inode: int, paths: dict[int, str], named: bool, cut: random.Random | None
    ) -> tuple[bytes, bytes | None, bool]:
        """What the next process finds in a file, of those that have a path now: as in Left."""
        sure = self.files.get(inode)
        data = _bytes(paths[inode]) if inode in paths else sure or b""
        if cut is not None:
            data = sure = _content(sure or b"", data, self.left.how, cut)
        return data, sure, cut is not None or named

    def restart(self) -> str:
        """Give the machine's next process the files that were left; says how. They are other files: whatever
        the dead process still holds open or locked is no longer its own."""
        self.lives += 1
        self.folder.rename(self.folder.with_name(f"{self.folder.name}.{self.lives}"))
        self.files, self.names = {}, {}
        for path in self.left.folders:
            os.makedirs(path, 0o700, exist_ok=True)
        for full, (data, sure, named) in self.left.files.items():
            fd = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.write(fd, data)
            inode = os.fstat(fd).st_ino
            os.close(fd)
            if sure is not None:
                self.files[inode] = sure
            if named:
                path, _, name = full.rpartition("/")
                self.names.setdefault(path, {})[name] = inode
        return self.left.how


def _names(folder: str) -> Names:
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries if not entry.is_dir(follow_symlinks=False)}


def _folders(folder: str) -> Iterator[tuple[str, Names]]:
    """A folder and all in it, each with its files."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in entries]
    yield folder, {name: inode for name, inode, is_dir in found if not is_dir}
    for name, _, is_dir in found:
        if is_dir:
            yield from _folders(f"{folder}/{name}")


def remove(folder: str) -> None:
    """As shutil.rmtree, of a folder that is nobody else's."""
    for path, names in reversed([*_folders(folder)]):
        for name in names:
            os.unlink(f"{path}/{name}")
        os.rmdir(path)


def _bytes(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _chosen(before: Names, now: Names, how: str, cut: random.Random) -> Names:
    """Which names a folder has after a cut. A file that was renamed has one of its names at least."""
    new = {"kept": 1.0, "names": 1.0, "lost": 0.0, "data": 0.0}.get(how, 0.5)
    found = {}
    for name in sorted({*before, *now}):
        inode = (
            before.get(name) if before.get(name) == now.get(name) or cut.random() >= new else now.get(name)
        )
        if inode is not None:
            found[name] = inode
    for name, inode in now.items():
        if inode in before.values() and inode not in found.values():
            found[name] = inode
    return found


def _content(sure: bytes, data: bytes, how: str, cut: random.Random) -> bytes:
    if data == sure or how in ("kept", "data"):
        return data
    if how == "lost":
        return sure
    long = sure.ljust(len(data), b"\0")  # the length is there, and the bytes are not
    if how == "names":
        return long
    sectors = range(0, len(long), SECTOR)
    return b"".join((data if cut.random() < 0.6 else long)[at : at + SECTOR] for at in sectors)
