"""The few things that a directory must be, how bytes get onto it whole, or twice, and where damaged ones are
put."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any

import msgspec

from ..arena import Arena
from ..digest import digest_of
from ..errors import Damaged, StoreError, Unreadable
from ..schema import Schema

Warn = Callable[[str], None]  # one line for a person

# SQLite's locks and its shared-memory WAL index do not work over these: https://www.sqlite.org/faq.html#q5
NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs",
    "ncpfs", "davfs", "9p", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "fuse.ceph",
}  # fmt: skip
LOCK = "lock"  # of a run's folder
COPY = ".copy"  # after the name of a Kept value's other file
FREE = "free"  # a folder's recycled file
WRITE_BYTES = 8 << 20  # per write call, so that a signal or another thread gets its turn
KEPT_BYTES = 4096  # a Kept value's file is filled up with blanks to a multiple of this
QUARANTINE, QUARANTINED = "quarantine", 4  # a run's folder of damaged files, and how many stay there
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def refuse_network_disk(path: Path, mountinfo: str | None = None) -> None:
    """StoreError when `path` lies on a network filesystem. `mountinfo` is /proc/self/mountinfo's text."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return  # no /proc: not Linux, nothing to ask
    here, best, kind = path.resolve(), -1, ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        mount = Path(left.split()[4].replace("\\040", " "))
        if here.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), right.split()[0]
    if kind in NETWORK:
        raise StoreError(
            f"{path} is on {kind}, a network filesystem: the run's database would lock or be damaged there. "
            f"Set run.dir to a folder on a local disk and copy results away with `fedtrain export`."
        )


def silent(line: str) -> None:
    """Nobody is there to hear of damaged files."""


class explained:
    """What goes wrong on the disk when the block works on this file is an Unreadable that names it."""

    __slots__ = ("_path",)

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            raise _unreadable(self._path, error) from error


def _unreadable(path: str | Path, e: OSError) -> Unreadable:
    if e.errno in FULL:
        free = next((shutil.disk_usage(p).free for p in Path(path).parents if p.exists()), 0)
        return Unreadable(
            f"no room for {path}: {e.strerror}; {free:,} bytes are free on its disk. Free some: the same "
            f"command goes on."
        )
    code = errno.errorcode.get(e.errno or 0, type(e).__name__)
    return Unreadable(
        f"{path} can't be read or written: {e.strerror or e} ({code}). See to its folder and its disk: "
        f"the same command goes on."
    )


def set_aside(path: Path, *, stays: bool = False) -> str:
    """Move a damaged file into its run's quarantine, so that nobody believes it and a person may look at it;
    says where it is now. The newest few stay. `stays`: a copy goes there, for what is whole in the file is
    nowhere else for sure until the caller has replaced it."""
    run = next((folder for folder in path.parents if (folder / LOCK).exists()), path.parent)
    room = run / QUARANTINE
    aside = room / "-".join(path.relative_to(run).parts)
    with explained(path):
        private_folder(room)
        if stays:
            copy_whole(path, aside)
        else:
            path.replace(aside)
        os.utime(aside)
        for old in sorted(room.iterdir(), key=lambda p: p.stat().st_mtime_ns)[:-QUARANTINED]:
            old.unlink()
    return f"It is {aside.relative_to(run)} now."


def private_folder(folder: Path) -> None:
    """Make the folder, and let nobody else look into it, whatever the umask; also one that was there."""
    if not os.path.isdir(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.stat(folder).st_mode & 0o077:
        folder.chmod(0o700)


def private(path: str | Path, flags: int) -> int:
    """As the `opener` of open(): a file that it makes is for nobody else, whatever the umask."""
    return os.open(path, flags, 0o600)


def lock(folder: Path) -> IO[str]:
    """Hold the folder for this process until the returned file is closed; a second one is told who has it."""
    with explained(folder):
        private_folder(folder)
        file = open(folder / LOCK, "a+", opener=private)  # noqa: SIM115  # it is held
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise StoreError(
            f"{folder} is in use by process {holder}. Wait for it, stop it, or use another run.name."
        ) from None
    with suppress(OSError):  # a full disk: who has it is only for people
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), str(os.getpid()).encode())
    return file


@contextmanager
def whole_file(path: str | Path, *, durable: bool) -> Iterator[FileIO]:
    """The file appears with all that the with block writes, or not at all, whenever the process dies."""
    partial = f"{os.fspath(path)}.new"
    with explained(path):
        with open_for_writing(partial) as f:
            yield f
            f.truncate()
            if durable:
                os.fdatasync(f.fileno())
        os.replace(partial, path)
        if durable:
            sync_folder(os.path.dirname(path))


def write_whole(path: str | Path, data: memoryview | bytes, *, durable: bool) -> None:
    """The file appears with all of `data` or not at all, whenever the process dies."""
    with whole_file(path, durable=durable) as f:
        view = memoryview(data)
        for begun in range(0, len(view), WRITE_BYTES):
            write_all(f, part := view[begun : begun + WRITE_BYTES])
            if durable:  # the disk begins to write this while the next is copied: half the wait
                os.posix_fadvise(f.fileno(), begun, len(part), os.POSIX_FADV_DONTNEED)


def write_all(file: FileIO, data: memoryview | bytes) -> None:
    """Write all of it; one write may be of a part, on a full disk."""
    view, at = memoryview(data), 0
    while at < len(view):
        at += file.write(view[at:])


def copy_whole(source: Path, path: Path) -> None:
    """The file appears as a copy of another one, on the disk, or not at all."""
    partial = path.with_name(path.name + ".new")
    with explained(path):
        with source.open("rb") as file, open(partial, "wb", opener=private) as to:
            shutil.copyfileobj(file, to, WRITE_BYTES)
            to.flush()
            os.fdatasync(to.fileno())
        partial.replace(path)
        sync_folder(path.parent)


def is_shared(path: str | Path) -> bool:
    """Whether the file has several names, as `cp -al` makes them."""
    return os.path.isfile(path) and os.lstat(path).st_nlink > 1


def unshare(path: str | Path) -> None:
    """Give a file with several names bytes of its own under this name, before they are written over or added
    to where they lie: what has the other name, a backup, stays as it is."""
    if is_shared(path):
        copy_whole(Path(path), Path(path))


def write_over(path: Path, data: bytes) -> None:
    """On the disk when this returns. A file of this length is written over where it is, so that the disk's
    journal is not waited for; a power cut meanwhile may damage it."""
    with explained(path):
        if not path.exists() or path.stat().st_size != len(data):
            return write_whole(path, data, durable=True)
        unshare(path)
        with open(os.open(path, os.O_WRONLY), "wb", buffering=0) as f:
            f.write(data)
            os.fdatasync(f.fileno())


def recycle(path: str | Path) -> None:
    """Remove a file, and leave its blocks for the next one in its folder.

    Writing over pages that the kernel has is several times as fast as writing to fresh ones, and a round
    writes several times its model.
    """
    with suppress(FileNotFoundError):
        os.replace(path, _free_beside(path))


def _free_beside(path: str | Path) -> str:
    return os.path.join(os.path.dirname(path), FREE)


def open_for_writing(path: str | Path) -> FileIO:
    """The file, made of a recycled one where there is one: longer than what is written, until truncated.
    OSError for a link, which a task's code may have left in place of its update."""
    if not os.path.exists(path):
        with suppress(FileNotFoundError):
            os.replace(_free_beside(path), path)
    unshare(path)
    return FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b")


def sync_folder(folder: str | Path) -> None:
    """Make the names in a folder survive a power cut."""
    fd = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- a small value with its digest; and one that must not be lost, in two files


class Sealed(msgspec.Struct, frozen=True):
    digest: str  # of the value's bytes as they stand
    value: msgspec.Raw


def sealed(value: Any) -> bytes:
    """A value as JSON with its digest, as `read_sealed` reads it from a file."""
    body = msgspec.json.encode(value)
    return msgspec.json.encode(Sealed(digest_of(body), msgspec.Raw(body)))


def read_sealed(path: Path, type: Any) -> Any:
    """The value in a file; Damaged unless it is as it was `sealed`."""
    with explained(path):
        text = path.read_bytes()
    return unsealed(text, path, type)


def unsealed(text: bytes, path: Path, type: Any) -> Any:
    """The value in the bytes of a file."""
    try:
        found = msgspec.json.decode(text, type=Sealed)
        if digest_of(bytes(found.value)) != found.digest:
            raise Damaged(f"{path} is damaged: it does not have its digest.")
        return msgspec.json.decode(found.value, type=type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise Damaged(f"{path} is damaged: {e}.") from None


class Kept:
    """The file `path` and its copy, written one after the other. One of them may be lost or damaged."""

    def __init__(self, path: Path, type: Any, remedy: str, warn: Warn = silent) -> None:
        """`type`: of the value, as msgspec reads it from JSON; `remedy`: what to do when both are damaged."""
        self._paths, self._type = (path, path.with_name(path.name + COPY)), type
        self._remedy, self._warn = remedy, warn

    def read(self) -> list[Any]:
        """What the files hold, of two where a process died between writing them; [] where none was written.
        It is on the disk when this returns. Damaged when all that is there is damaged."""
        found, damaged = [], []
        for path in self._paths:
            if not path.exists():
                continue
            try:
                found.append(read_sealed(path, self._type))
            except Damaged as e:
                damaged.append((path, e))
        if damaged and not found:
            raise Damaged(f"{damaged[0][1]} So is its copy. {self._remedy}")
        lines = [f"{wrong} {set_aside(path)}" for path, wrong in damaged]
        lines += [f"{path} is gone." for path in self._paths if found and not damaged and not path.exists()]
        for line in lines:
            self._warn(f"{line} It was made again from the other of the two files.")
            self.write(found[0])
        self._sync()
        return found

    def _sync(self) -> None:
        """A process may have been killed before it had written to the disk what the next one reads."""
        there = [path for path in self._paths if path.exists()]
        for path in there:
            with explained(path), path.open("rb") as file:
                os.fdatasync(file.fileno())
        if there:
            sync_folder(self._paths[0].parent)

    def write(self, value: Any) -> None:
        """On the disk, twice, when this returns."""
        text = sealed(value)
        for path in self._paths:
            write_over(path, text.ljust(-(-len(text) // KEPT_BYTES) * KEPT_BYTES))

    def remove(self) -> None:
        """Forget it."""
        for path in self._paths:
            path.unlink(missing_ok=True)


@contextmanager
def new_file(schema: Schema, path: Path) -> Iterator[Arena]:
    """An arena in a file, to be written in the with block. The file gets its name when the block has ended,
    and is not there at all when the block raises.

    A file of the same size under that name, an older update, is written over: new pages cost more.
    """
    partial = path.with_name(path.name + ".new")
    try:
        with explained(path):
            if path.exists() and path.stat().st_size == schema.nbytes:
                path.replace(partial)
            unshare(partial)
            file = open(private(partial, os.O_RDWR | os.O_CREAT), "r+b")  # noqa: SIM115  # closed in the block
        with file as f:
            with explained(path):
                f.truncate(schema.nbytes)
                if schema.nbytes:  # else a write to the map ends the process when the disk is full
                    os.posix_fallocate(f.fileno(), 0, schema.nbytes)
            nbytes = schema.nbytes
            yield Arena.wrap(schema, mmap.mmap(f.fileno(), nbytes)) if nbytes else Arena.zeros(schema)
        with explained(path):
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
