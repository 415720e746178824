"""Datasets as a few large files (shards) on a disk or in a bucket, read by many ranks in any order.

    data/
      00000.safetensors    a tensor for each column, [examples, ...]
      00001.safetensors
      index.json           written last: the number of examples and the SHA-256 of each shard

`write_shards` writes any dataset. `ShardedDataset` is a map-style torch Dataset, for a DataLoader and for
Task.data in every mode. Shards of a bucket are fetched on first use into a cache folder on this machine's
disk, which has a size limit and is shared by all ranks and runs on the machine.
"""

from __future__ import annotations

import bisect
import fcntl
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch.utils.data import Dataset

from ..errors import ConfigError, StoreError, TaskError
from .examples import Stream, examples_of
from .places import BLOCK, Folder, Place, place_of

INDEX = "index.json"
FORMAT = 1
WAIT_S = 0.01  # seconds between checks for space in a full cache
Kind = Literal["tuple", "dict", "tensor"]  # of an example
Columns = dict[str, torch.Tensor]  # name ("0", "1", ... of a tuple) -> [examples, ...]


class Shard(msgspec.Struct, frozen=True):
    file: str
    count: int  # examples
    bytes: int
    sha256: str


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of index.json."""

    format: int = FORMAT
    kind: Kind
    columns: list[str]
    shards: list[Shard]


# --- Writing


def write_shards(data: Any, where: Path | str, *, shard_bytes: int = 64 << 20) -> Index:
    """Write a dataset as shards of about `shard_bytes` into a folder or to s3://bucket/prefix.

    `data`: a Dataset, tensors, or an iterable of ready batches, as for Task.data. All examples must have the
    same shapes, else ConfigError. The index is written last: a reader accepts no dataset without it.
    """
    place = place_of(where)
    shards: list[Shard] = []
    what: tuple[Kind, list[str]] | None = None
    for number, (kind, columns) in enumerate(_packed(data, shard_bytes)):
        what = kind, list(columns)
        content = save({name: t.contiguous() for name, t in columns.items()})
        file = f"{number:05d}.safetensors"
        place.write(file, partial(_blocks, content))
        count = len(next(iter(columns.values())))
        shards.append(Shard(file, count, len(content), hashlib.sha256(content).hexdigest()))
    if what is None:
        raise ConfigError("the data has no examples: there is nothing to write")
    index = Index(kind=what[0], columns=what[1], shards=shards)
    place.write(INDEX, lambda: [msgspec.json.format(msgspec.json.encode(index), indent=1)])
    return index


def _blocks(content: bytes) -> list[memoryview | bytes]:
    view = memoryview(content)
    return [view[at : at + BLOCK] for at in range(0, len(view), BLOCK)]


def _packed(data: Any, shard_bytes: int) -> Iterator[tuple[Kind, Columns]]:
    """The columns of each shard, about `shard_bytes`, one shard after the other."""
    held: list[tuple[Kind, Columns]] = []
    size = 0
    for kind, columns in map(_columns, _batches(data)):
        row = sum(t[0].nbytes for t in columns.values())
        rows = len(next(iter(columns.values())))
        at = 0
        while at < rows:
            step = max(1, min(rows - at, (shard_bytes - size) // max(1, row)))
            held.append((kind, {name: t[at : at + step] for name, t in columns.items()}))
            at, size = at + step, size + step * row
            if size + row > shard_bytes:
                yield _joined(held)
                held, size = [], 0
    if held:
        yield _joined(held)


def _batches(data: Any) -> Iterator[Any]:
    examples = examples_of(data)
    size = 256 if isinstance(examples, Stream) else min(256, examples.count)
    try:
        yield from examples.batches(size, False, None)
    except TaskError as e:  # examples of different shapes can't be collated
        raise ConfigError(f"examples differ: {e.__cause__}. Pad or cut them to the same shapes.") from e


def _columns(batch: Any) -> tuple[Kind, Columns]:
    if isinstance(batch, torch.Tensor):
        return "tensor", {"0": batch}
    if isinstance(batch, dict) and all(isinstance(t, torch.Tensor) for t in batch.values()):
        return "dict", dict(batch)
    if isinstance(batch, tuple | list) and all(isinstance(t, torch.Tensor) for t in batch):
        return "tuple", {str(i): t for i, t in enumerate(batch)}
    raise ConfigError(
        f"an example is a {type(batch).__name__} that doesn't become tensors. Shards hold a tensor, "
        f"a tuple of tensors, or a dict of them, of the same shapes in each example."
    )


def _joined(parts: list[tuple[Kind, Columns]]) -> tuple[Kind, Columns]:
    try:
        return parts[0][0], {name: torch.cat([c[name] for _, c in parts]) for name in parts[0][1]}
    except (RuntimeError, KeyError) as e:
        raise ConfigError(f"examples differ: {e}. Pad or cut them to the same shapes.") from None


# --- Reading


class ShardedDataset(Dataset[Any]):
    """The examples of a folder or bucket of shards, by index.

    `cache`: the folder for a bucket's shards, of at most `cache_bytes`; a folder of shards is read in place.
    A shard's SHA-256 is checked at its first use by this process, or StoreError. `window`: see `order`.
    """

    def __init__(
        self,
        where: Path | str,
        *,
        cache: Path | str | None = None,
        cache_bytes: int = 16 << 30,
        window: int = 8,
    ) -> None:
        self.where, self.window = where, window
        place = place_of(where)
        self.index = _read_index(place)
        self._ends = list(accumulate(shard.count for shard in self.index.shards))
        if isinstance(place, Folder):
            self._cache: Cache | None = None
        else:
            own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedtrain" / "shards"
            self._cache = Cache(Path(cache) if cache else own, cache_bytes)
        self._open: OrderedDict[int, Columns] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Any:
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        shard, row = self._at(number % len(self))
        return self._example({name: t[row] for name, t in self._columns_of(shard).items()})

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """The examples with these indices; each shard is opened once."""
        found: list[Any] = [None] * len(numbers)
        for i in sorted(range(len(numbers)), key=numbers.__getitem__):
            found[i] = self[numbers[i]]
        return found

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict()}  # a DataLoader's worker opens its own files

    def order(self, seed: int) -> torch.Tensor:
        """A permutation of all examples, int64 [len(self)], that reads each shard about once an epoch.

        Shards are shuffled, then the examples of each `window` shards together, so the cache must hold
        `window` shards at a time. A `window` of 0 is one window of all shards.
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.index.shards), generator=generator).tolist()
        size = self.window or len(order)
        pieces = []
        for at in range(0, len(order), size):
            chosen = order[at : at + size]
            rows = torch.cat(
                [torch.arange(self._ends[s] - self.index.shards[s].count, self._ends[s]) for s in chosen]
            )
            pieces.append(rows[torch.randperm(len(rows), generator=generator)])
        return torch.cat(pieces)

    def _at(self, number: int) -> tuple[int, int]:
        """(shard, row in the shard) of an example."""
        shard = bisect.bisect_right(self._ends, number)
        return shard, number - (self._ends[shard] - self.index.shards[shard].count)

    def _columns_of(self, number: int) -> Columns:
        """A shard's columns, mapped from its file: the system reads pages on first access."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = self.index.shards[number]
        with self._file_of(shard) as path:
            with safe_open(path, framework="pt") as file:
                columns = {name: file.get_tensor(name) for name in self.index.columns}
            if any(len(t) != shard.count for t in columns.values()):
                raise StoreError(f"{path} doesn't have the {shard.count} examples that {INDEX} says.")
        while len(self._open) >= max(2, self.window or len(self.index.shards)):
            self._open.popitem(last=False)
        self._open[number] = columns
        return columns

    @contextmanager
    def _file_of(self, shard: Shard) -> Iterator[Path]:
        if self._cache is not None:
            with self._cache.get(shard, place_of(self.where)) as path:
                yield path
            return
        path = Path(self.where) / shard.file
        if sha256(path) != shard.sha256:
            raise StoreError(f"{path} is damaged: its SHA-256 is not {shard.sha256[:12]}…")
        yield path

    def _example(self, row: Columns) -> Any:
        match self.index.kind:
            case "dict":
                return row
            case "tuple":
                return tuple(row.values())
            case _:
                return next(iter(row.values()))


def _read_index(place: Place) -> Index:
    try:
        index = msgspec.json.decode(b"".join(place.read(INDEX)), type=Index)
    except FileNotFoundError:
        raise StoreError(f"{place} has no {INDEX}: write_shards makes it, last of all.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise StoreError(f"{place}/{INDEX} is damaged: {e}") from None
    if index.format != FORMAT:
        raise StoreError(f"{place}/{INDEX} has format {index.format}; this fedtrain reads {FORMAT}.")
    if any("/" in s.file or s.file.startswith(".") for s in index.shards):
        raise StoreError(f"{place}/{INDEX} names a file that is not beside it.")
    return index


# --- The cache


class Cache:
    """Files named by their SHA-256 in a folder on a local disk, at most `limit` bytes in total.

    Any number of processes share the folder. One process fetches a file while others that need the file wait;
    the file appears once its digest is checked. The least recently used files are removed first, never one
    that a process is about to open; a process that has mapped a removed file can still read it.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._known: set[str] = set()  # digests of the files that this process has checked

    @contextmanager
    def get(self, shard: Shard, source: Place) -> Iterator[Path]:
        """The file, fetched if the folder lacks it; it is not removed before the block ends. ConfigError for
        a file over the limit, StoreError for a wrong digest."""
        if shard.bytes > self.limit:
            raise ConfigError(
                f"{source}/{shard.file} has {shard.bytes:,} bytes, the cache in {self.folder} may have "
                f"{self.limit:,}. Raise cache_bytes, or write smaller shards."
            )
        path = self.folder / shard.sha256
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(self._lock_of(shard.sha256)):
            if path.exists() and (shard.sha256 in self._known or sha256(path) == shard.sha256):
                os.utime(path)
            else:
                path.unlink(missing_ok=True)
                self._fetch(shard, source, path)
            self._known.add(shard.sha256)
            yield path

    def _fetch(self, shard: Shard, source: Place, path: Path) -> None:
        partial = self._partial(shard.sha256)
        partial.unlink(missing_ok=True)
        while not self._reserve(shard, partial):
            time.sleep(WAIT_S)  # ends, because holders of a lock have their space and release it on opening
        digest = hashlib.sha256()
        try:
            with partial.open("r+b") as f:
                for block in source.read(shard.file):
                    digest.update(block)
                    f.write(block)
            if digest.hexdigest() != shard.sha256:
                raise StoreError(f"{source}/{shard.file} is damaged: its SHA-256 is not {shard.sha256[:12]}…")
            with _locked(self.folder / "lock"):  # so that _reserve counts the file exactly once
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _reserve(self, shard: Shard, partial: Path) -> bool:
        """Remove least recently used files until the shard fits, and reserve its space; whether it fits."""
        with _locked(self.folder / "lock"):
            files = []
            for file in self.folder.iterdir():
                if file.suffix == ".part" and self._remove(file):  # left by a process that died
                    continue
                if file.suffix in ("", ".part") and file.name != "lock":
                    with suppress(FileNotFoundError):
                        files.append((file.stat().st_mtime_ns, file.stat().st_size, file))
            used = sum(size for _, size, _ in files)
            for _, size, file in sorted(files):
                if used + shard.bytes > self.limit and file.suffix == "" and self._remove(file):
                    used -= size
            if used + shard.bytes > self.limit:
                return False
            with partial.open("wb") as f:
                f.truncate(shard.bytes)  # counts as used from now on
            return True

    def _partial(self, digest: str) -> Path:
        return self.folder / f"{digest}.part"

    def _lock_of(self, digest: str) -> Path:
        return self.folder / f"{digest}.lock"

    def _remove(self, file: Path) -> bool:
        """Remove a file; False while another process, which holds the file's lock, fetches or opens it."""
        with self._lock_of(file.stem).open("a") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            file.unlink(missing_ok=True)
            return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock among all processes of this machine, until the block or the process ends."""
    with path.open("a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def sha256(path: Path) -> str:
    """The SHA-256 of a file as hex digits; StoreError when the file is gone."""
    try:
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except FileNotFoundError:
        raise StoreError(f"{path} is gone") from None
