"""Storage for checkpoints and shards: a folder, or a bucket of a server that speaks S3, by the same calls.

Paths are relative, with "/" between the parts. A file is written once, by one process, and never changed. A
set of files is complete when the file that names all of them with their digests is there: it is written last.

The environment has a bucket's AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and, for a server other
than Amazon's, AWS_ENDPOINT_URL. The server may be unreachable for `patience_s` seconds: requests are tried
again, with growing pauses, also where their answer was lost on its way.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import ConfigError, StoreError, Unreadable

if TYPE_CHECKING:
    from obstore.store import S3Store

BLOCK = 8 << 20  # bytes a read, a write and a part of an upload
GATHERED = 64 << 20  # bytes of ranges in one request to a bucket
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
T = TypeVar("T")
Range = tuple[int, int]  # [start, stop) in bytes
Blocks = Callable[[], Iterable[memoryview | bytes]]  # a file's, from its beginning at each call
# In the error where an answer was lost after it had begun: obstore does not ask for it again.
LOST = ("response body", "NoSuchUpload")


class Place(Protocol):
    """A folder or a bucket's prefix. Every failure is a StoreError that says what to change."""

    def write(self, path: str, blocks: Blocks) -> None:
        """Write a file of all blocks, durably before the call returns; after an error there is no file."""

    def read(self, path: str, ranges: Sequence[Range] | None = None) -> Iterator[memoryview]:
        """Each of the ranges, or the whole file in blocks of BLOCK; FileNotFoundError if there is no file."""

    def names(self) -> list[str]:
        """The names of the folders at the top, sorted."""

    def files(self, folder: str) -> list[str]:
        """The names of the files in a folder, without those of folders in it, sorted."""

    def remove(self, path: str) -> None:
        """Delete a file, or a folder with everything in it, if there is one."""

    def __str__(self) -> str:
        """The path or URL, for messages."""


def place_of(where: Path | str, patience_s: float = 120.0) -> Place:
    """A Folder for a path, a S3Bucket for "s3://bucket/prefix"; ConfigError for any other URL."""
    if isinstance(where, str) and "://" in where:
        return S3Bucket(where, patience_s)
    return Folder(Path(where))


def try_to_write(folder: Path) -> None:
    """Make it; StoreError where nothing can be written to it. A full disk is another matter: there may be
    room when there is something to write."""
    file = folder / f".{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
        file.unlink()
    except OSError as e:
        if e.errno not in FULL:
            code = errno.errorcode.get(e.errno or 0, type(e).__name__)
            raise StoreError(
                f"{folder} can't be written: {e.strerror} ({code}). Name another checkpoint.dir."
            ) from None


class Folder:
    """A Place on a disk of this machine, or on a disk that all machines of the run share."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def write(self, path: str, blocks: Blocks) -> None:
        file = self.root / path
        unfinished = file.with_name(f".{file.name}.part")
        written = 0
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb", buffering=0) as f:
                for block in blocks():
                    view, at = memoryview(block), 0
                    while at < len(view):
                        got = f.write(view[at:])
                        at, written = at + got, written + got
                os.fsync(f.fileno())
            unfinished.replace(file)
            fd = os.open(file.parent, os.O_RDONLY)
            try:
                os.fsync(fd)  # makes the file's name durable, too
            finally:
                os.close(fd)
        except OSError as e:
            with suppress(OSError):
                unfinished.unlink()
            if e.errno not in FULL:
                raise StoreError(
                    f"{file} can't be written: {e.strerror} ({errno.errorcode[e.errno or 0]})."
                ) from e
            free = shutil.disk_usage(self.root).free if self.root.exists() else 0
            raise StoreError(
                f"no room for {file}: {e.strerror} after {written:,} bytes, {free:,} are free on its disk. "
                f"Free some, lower checkpoint.keep, or name another checkpoint.dir."
            ) from e

    def read(self, path: str, ranges: Sequence[Range] | None = None) -> Iterator[memoryview]:
        with self._explained(path):
            yield from self._read(path, ranges)

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        """Unreadable where the disk fails; a file that is not there is another matter."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as e:
            code = errno.errorcode.get(e.errno or 0, type(e).__name__)
            raise Unreadable(
                f"{self.root / path} can't be read or removed: {e.strerror} ({code}). See to its disk: the "
                f"same command goes on."
            ) from e

    def _read(self, path: str, ranges: Sequence[Range] | None) -> Iterator[memoryview]:
        with (self.root / path).open("rb", buffering=0) as f:
            if ranges is None:
                while block := f.read(BLOCK):
                    yield memoryview(block)
                return
            for start, stop in ranges:
                buffer = memoryview(bytearray(stop - start))
                at = 0
                while at < len(buffer) and (got := os.preadv(f.fileno(), [buffer[at:]], start + at)):
                    at += got
                if at < len(buffer):
                    raise StoreError(
                        f"{self.root / path} ends at byte {start + at:,}; {stop:,} were expected."
                    )
                yield buffer

    def names(self) -> list[str]:
        with self._explained(""):
            return sorted(p.name for p in self.root.iterdir() if p.is_dir()) if self.root.is_dir() else []

    def files(self, folder: str) -> list[str]:
        here = self.root / folder
        with self._explained(folder):
            return sorted(p.name for p in here.iterdir() if p.is_file()) if here.is_dir() else []

    def remove(self, path: str) -> None:
        target = self.root / path
        if target.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        else:
            with self._explained(path):
                target.unlink(missing_ok=True)


class S3Bucket:
    """A Place at a prefix of a bucket, of Amazon's or another server that speaks S3. An object appears when
    its upload, which goes in parts, is complete."""

    def __init__(self, url: str, patience_s: float = 120.0) -> None:
        scheme, _, rest = url.partition("://")
        bucket, _, self.prefix = rest.strip("/").partition("/")
        if scheme != "s3" or not bucket:
            raise ConfigError(f'{url!r} is no place for files. Write a folder, or "s3://bucket/prefix".')
        try:
            from obstore.store import S3Store
        except ModuleNotFoundError:
            raise ConfigError(f"{url} needs obstore: pip install fedtrain[s3]") from None
        self.url, self.patience_s = url.rstrip("/"), patience_s
        endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
        pause = timedelta(milliseconds=200)
        self._store: S3Store = S3Store(
            bucket,
            client_options={"allow_http": endpoint.startswith("http://"), "timeout": "60s"},
            retry_config={
                "max_retries": 1000,  # so that retry_timeout decides
                "retry_timeout": timedelta(seconds=patience_s),
                "backoff": {"init_backoff": pause, "max_backoff": timedelta(seconds=10), "base": 2},
            },
        )

    def __str__(self) -> str:
        return self.url

    def write(self, path: str, blocks: Blocks) -> None:
        import obstore

        def put() -> None:
            obstore.put(self._store, self._key(path), iter(blocks()), chunk_size=BLOCK, max_concurrency=4)

        self._tried("written", put)

    def read(self, path: str, ranges: Sequence[Range] | None = None) -> Iterator[memoryview]:
        import obstore

        key = self._key(path)
        if ranges is None:
            size = self._tried("read", lambda: obstore.head(self._store, key)["size"])
            ranges = [(at, min(at + BLOCK, size)) for at in range(0, size, BLOCK)]
        for group in _groups(ranges):
            starts, stops = zip(*group, strict=True)
            get = partial(obstore.get_ranges, self._store, key, starts=starts, ends=stops)
            for (start, stop), block in zip(group, self._tried("read", get), strict=True):
                if len(block) != stop - start:
                    raise StoreError(f"{self.url}/{path} ends at byte {start + len(block):,}; "
                                     f"{stop:,} were expected.")  # fmt: skip
                yield memoryview(bytearray(block))

    def names(self) -> list[str]:
        found = self._list("")["common_prefixes"]
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in found)

    def files(self, folder: str) -> list[str]:
        return sorted(o["path"].rpartition("/")[2] for o in self._list(folder)["objects"])

    def remove(self, path: str) -> None:
        import obstore

        own = self._key(path)

        def remove() -> None:
            under = [o["path"] for page in obstore.list(self._store, prefix=own) for o in page]
            if gone := [key for key in under if key == own or key.startswith(own + "/")]:
                obstore.delete(self._store, gone)

        self._tried("removed", remove)

    def _key(self, path: str) -> str:
        return "/".join(part for part in (self.prefix, path) if part)

    def _list(self, folder: str) -> Any:
        import obstore

        return self._tried(
            "listed", lambda: obstore.list_with_delimiter(self._store, self._key(folder) or None)
        )

    def _tried(self, what: str, request: Callable[[], T]) -> T:
        """What the request returns. It is made again, for the time that a bucket may be away, where its
        answer was lost."""
        from obstore.exceptions import BaseError

        until, pause = time.monotonic() + self.patience_s, 0.2
        while True:
            try:
                return request()
            except (BaseError, OSError) as e:
                error, lost = e, any(words in str(e) for words in LOST)
            if not lost or time.monotonic() + pause > until:
                break
            time.sleep(pause)
            pause = min(2 * pause, 10.0)
        if what == "read" and isinstance(error, FileNotFoundError):
            raise error
        line = str(error).partition("\n")[0]
        raise StoreError(
            f"{self.url} can't be {what}, tried for up to {self.patience_s:g} s: {line}. Check the "
            f"bucket, AWS_ENDPOINT_URL and the environment's credentials, or raise checkpoint.patience."
        ) from error


def _groups(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """The ranges in their order, in groups of at most GATHERED bytes."""
    group: list[Range] = []
    held = 0
    for start, stop in ranges:
        if group and held + stop - start > GATHERED:
            yield group
            group, held = [], 0
        group.append((start, stop))
        held += stop - start
    if group:
        yield group
