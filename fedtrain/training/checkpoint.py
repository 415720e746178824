"""Checkpoints of a run on a mesh: written by all ranks at once, verified whole before a byte of them is used.

    checkpoints/
      step-000000400/
        5f1c-rank-00000.safetensors    rank 0's tensors and pieces of tensors
        5f1c-rank-00001.safetensors
        manifest.json                  written last: what lies where, and the SHA-256 of each file

torch.distributed.checkpoint plans who writes and who reads which piece, for any mesh and any number of ranks;
this file is its storage and its planner's encoding. Stock DCP storage keeps values and its own metadata as
pickles, which run code when they are read. Here tensors are safetensors, all else is JSON.

A directory without a manifest is an unfinished save and never counts. The manifest has a digest of itself
and one of each file. When the newest checkpoint is damaged, a notice names what is, and the one before it
is used.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future as TorchFuture
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from .. import __version__
from ..errors import StoreError
from .places import BLOCK, Place, Range, place_of

T = TypeVar("T")
Tree = dict[str, Any]  # nested dicts; leaves are tensors, DTensors or plain values
MANIFEST = "manifest.json"
FORMAT = 1
DTYPES = {  # torch's name -> safetensors'
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
MAX_VALUE = 1 << 20  # bytes of one value in the manifest; what is longer should be a tensor


class Checkpoints:
    """The checkpoints of one run. Every rank makes one and calls each method at the same steps.

    `save` returns when the states may change again: after a copy to memory when `background`, after the disk
    otherwise. A save that fails (disk full, bucket away) is a notice, and training goes on with the
    checkpoint before it; `wait` raises when the last one asked for failed, so a run doesn't end without it.
    """

    def __init__(
        self,
        where: Path | str,
        *,
        every: int = 0,
        keep: int = 3,
        background: bool = True,
        format: Literal["sharded", "full"] = "sharded",
        patience_s: float = 120.0,
        process_group: dist.ProcessGroup | None = None,
        notice: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`where`: a folder that all ranks see, or s3://bucket/prefix. `every`: steps between `maybe_save`s
        that save; 0: only `finish` does. `keep`: how many stay. `format` full: rank 0 writes whole tensors
        in one file that any safetensors reader loads. `process_group`: one with a CPU backend that nobody
        else uses; None: a Gloo group of all ranks is made. `notice` is called on rank 0."""
        self.place, self.every, self.keep, self.format = place_of(where, patience_s), every, keep, format
        self.last: int | None = None  # the step of the newest good checkpoint
        self._group = process_group
        if dist.is_initialized() and process_group is None:
            # Its own: a save in the background must not meet training's collectives. Patient: a rank may
            # be waiting for a bucket; a rank that died is noticed at once all the same.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=600 + 2 * patience_s))
        elif not dist.is_initialized():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or unini")
        self._notice = notice if self.rank == 0 else lambda line: None
        self._damaged: set[str] = set()
        self._failure: StoreError | None = None  # of the last save
        self._pending: tuple[int, Future[Any]] | None = None
        self._stager = Stager() if background else None

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group) if dist.is_initialized() else 0

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self._group) if dist.is_initialized() else 1

    # --- Saving

    def save(self, step: int, states: Stateful | Mapping[str, Stateful]) -> None:
        """Checkpoint `step`. Waits first for the save before it. A failure to store is a notice, see above;
        a state that can't be stored (an object that is neither tensor nor plain value) raises at once."""
        self._settle()
        tree = _tree(states)
        if self.format == "full":
            tree = _gathered(tree)
        _check(tree)
        writer = Writer(self.place, step, self.ranks, self.keep, frozenset(self._damaged))
        planner = SavePlanner(dedup_save_to_lowest_rank=self.format == "full")
        try:
            if self._stager is None:
                save(tree, storage_writer=writer, planner=planner, process_group=self._group)
                self._saved(step)
                return
            found = async_save(
                tree, storage_writer=writer, planner=planner, process_group=self._group,
                async_stager=self._stager,
            )  # fmt: skip
            self._pending = step, (found.upload_completion if isinstance(found, AsyncSaveResponse) else found)
        except CheckpointException as e:
            self._failed(step, e)

    def wait(self) -> None:
        """Until what was saved is on the disk; StoreError when that failed."""
        self._settle()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Wait, and free the memory of background saves."""
        try:
            self.wait()
        finally:
            if self._stager is not None:
                self._stager.close()
                self._stager = None

    def _settle(self) -> None:
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            try:
                future.result()
                self._saved(step)
            except CheckpointException as e:
                self._failed(step, e)

    def _saved(self, step: int) -> None:
        self.last, self._failure = step, None
        self._damaged.clear()

    def _failed(self, step: int, error: CheckpointException) -> None:
        causes = [cause for cause, _ in error.failures.values()]
        if not all(isinstance(cause, StoreError) for cause in causes):
            raise error
        self._failure = StoreError(f"The checkpoint of step {step} was not written: {causes[0]}")
        last = "there is none yet" if self.last is None else f"the last good one is of step {self.last}"
        self._notice(f"{self._failure} Training goes on; {last}.")

    # --- Loading

    def load(self, states: Stateful | Mapping[str, Stateful]) -> int | None:
        """The newest whole checkpoint into `states`, whatever mesh it is from; returns its step.

        None when there is no checkpoint; StoreError when there are only damaged ones, or when the newest is
        of another model. Nothing is written to `states` before all files were verified.
        """
        self._settle()
        lines = []
        for name in self._first(lambda: newest(self.place)):
            manifest, damage = self._verified(name)
            if damage or manifest is None:
                self._damaged.add(name)
                lines += damage
                for line in damage:
                    self._notice(f"{line}. Passing over this checkpoint.")
                continue
            self._read(manifest, name, states)
            self.last = manifest.step
            return manifest.step
        if lines:
            raise StoreError(
                f"{self.place} has checkpoints, but no good one: {'; '.join(lines)}. "
                f"Restore one of them, or move them all away to begin anew."
            )
        return None

    def _verified(self, name: str) -> tuple[Manifest | None, list[str]]:
        """The manifest, and a line for each damaged file. Ranks share the work, and all know the result."""

        def look() -> tuple[Manifest | None, list[str]]:
            try:
                return read_manifest(self.place, name), []
            except StoreError as e:
                return None, [str(e).rstrip(".")]

        manifest, damage = self._first(look)
        if manifest is not None:
            mine = sorted(manifest.files)[self.rank :: self.ranks]
            found = [verify(self.place, name, file, manifest.files[file]) for file in mine]
            damage = [line for line in self._all(found) if line]
        return manifest, damage

    def _read(self, manifest: Manifest, name: str, states: Stateful | Mapping[str, Stateful]) -> None:
        tree = _tree(states)
        reader = Reader(self.place, manifest, name)
        try:
            load(tree, storage_reader=reader, planner=LoadPlanner(), process_group=self._group)
        except CheckpointException as e:
            (cause, *_) = [cause for cause, _ in e.failures.values()]
            if isinstance(cause, StoreError):
                raise cause from None
            raise StoreError(
                f"{name} in {self.place} is of another model or optimizer: {cause}. "
                f"Restore the task and [train] as they were, or name another checkpoint.dir."
            ) from e
        if isinstance(states, Stateful):
            states.load_state_dict(tree)
        else:
            for key, state in states.items():
                state.load_state_dict(tree[key])

    def _first(self, ask: Callable[[], T]) -> T:
        """What rank 0 finds, on all ranks; its StoreError too."""
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box[0] = ask()
            except StoreError as e:
                box[0] = e
        if dist.is_initialized():
            first = dist.get_global_rank(self._group, 0) if self._group is not None else 0
            dist.broadcast_object_list(box, first, group=self._group)
        if isinstance(box[0], StoreError):
            raise box[0]
        return cast(T, box[0])

    def _all(self, mine: list[T]) -> list[T]:
        """Every rank's list, one after the other, on all ranks."""
        if not dist.is_initialized():
            return mine
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, mine, group=self._group)
        return [each for part in found for each in part]

    # --- As the training loop calls it

    def restore(self, state: Stateful) -> bool:
        """Load the newest whole checkpoint into `state`; False when there is none."""
        return self.load(state) is not None

    def maybe_save(self, state: Stateful, step: int) -> None:
        """After each optimizer step, counted from 1: save when one is due."""
        if self.every and step % self.every == 0:
            self.save(step, state)

    def finish(self, state: Stateful, step: int | None = None) -> None:
        """After the last step, or before leaving early: the state is on the disk when this returns."""
        self._settle()
        step = int(getattr(state, "step", 0)) if step is None else step
        if self.last != step or self._failure is not None:
            self.save(step, state)
        self.close()


class Stager(DefaultStager):
    """Copies a tree's tensors into memory that is kept from one save to the next: fresh pages cost more than
    the copy. torch's own stager makes it; from then on all tensors are copied at once, which takes half as
    long as one by one in Python."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        super().__init__(StagingOptions(self._cuda, False, False, self._cuda))
        self._shape: TreeSpec | None = None
        self._kept: list[torch.Tensor] = []

    @torch.no_grad()
    def stage(self, state_dict: Tree, **kwargs: Any) -> Any:
        leaves, shape = tree_flatten(state_dict)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or shape != self._shape or not _alike(tensors, self._kept):
            staged = super().stage(state_dict, **kwargs)
            self._shape = shape
            self._kept = [leaf for leaf in tree_leaves(staged) if isinstance(leaf, torch.Tensor)]
            return staged
        torch._foreach_copy_([*map(_local, self._kept)], [*map(_local, tensors)], self._cuda)
        if self._cuda:
            torch.cuda.synchronize()
        kept = iter(self._kept)
        return tree_unflatten([next(kept) if isinstance(x, torch.Tensor) else x for x in leaves], shape)


def _alike(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether one's tensors fit into the other's."""

    def form(t: torch.Tensor) -> object:
        return t.shape, t.dtype, t.placements if isinstance(t, DTensor) else None

    return [*map(form, some)] == [*map(form, others)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- The manifest


class File(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class Piece(msgspec.Struct, frozen=True):
    """A box of a tensor: its corner and its lengths; its bytes are [start, start + ...) of a file."""

    offsets: list[int]
    sizes: list[int]
    file: str
    start: int


class Stored(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    pieces: list[Piece]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All that a checkpoint is, but its tensors' bytes."""

    format: int = FORMAT
    step: int
    ranks: int  # that wrote it
    created: float  # seconds since 1970, for people
    fedtrain: str
    torch: str
    files: dict[str, File]
    tensors: dict[str, Stored]
    values: dict[str, Any]  # as `plain` makes them
    paths: dict[str, list[str | int]]  # a name's keys in the nested dicts


class Sealed(msgspec.Struct, frozen=True):
    sha256: str  # of the manifest's bytes as they stand
    manifest: msgspec.Raw


def seal(manifest: Manifest) -> bytes:
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(Sealed(hashlib.sha256(body).hexdigest(), msgspec.Raw(body)))


def read_manifest(place: Place, name: str) -> Manifest:
    """StoreError when it is damaged, or of a later format."""
    where = f"{place}/{name}/{MANIFEST}"
    try:
        sealed = msgspec.json.decode(b"".join(place.read(f"{name}/{MANIFEST}")), type=Sealed)
        body = bytes(sealed.manifest)
        if hashlib.sha256(body).hexdigest() != sealed.sha256:
            raise StoreError(f"{where} is damaged: its digest is not {sealed.sha256[:12]}…")
        if (found := msgspec.json.decode(body, type=dict)["format"]) != FORMAT:
            raise StoreError(f"{where} has format {found}; this fedtrain reads {FORMAT}")
        return msgspec.json.decode(body, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise StoreError(f"{where} is damaged: {e}") from None
    except FileNotFoundError:
        raise StoreError(f"{where} is gone") from None


def verify(place: Place, name: str, file: str, expected: File) -> str:
    """What is wrong with a file; "" when nothing is."""
    digest, size = hashlib.sha256(), 0
    try:
        for block in place.read(f"{name}/{file}"):
            digest.update(block)
            size += len(block)
    except FileNotFoundError:
        return f"{place}/{name}/{file} is gone"
    except StoreError as e:
        return str(e).rstrip(".")
    if size != expected.bytes:
        return f"{place}/{name}/{file} is damaged: {size:,} bytes, {expected.bytes:,} were written"
    if digest.hexdigest() != expected.sha256:
        return f"{place}/{name}/{file} is damaged: its SHA-256 is not {expected.sha256[:12]}…"
    return ""


def newest(place: Place) -> list[str]:
    """The names of all finished checkpoints, the newest first."""
    return [n for n in reversed(_steps(place)) if MANIFEST in place.files(n)]


def _steps(place: Place) -> list[str]:
    return [n for n in place.names() if n.startswith("step-")]


# --- Storage, as torch.distributed.checkpoint calls it


class Part(msgspec.Struct, frozen=True):
    """Where a rank put an item: a range of its file; or the value itself."""

    file: str = ""
    start: int = 0
    written: File | None = None  # the file, with the first item in it
    value: Any = None


class Writer(StorageWriter):
    """Each rank writes one file; the first, when all have, the manifest."""

    def __init__(self, place: Place, step: int, ranks: int, keep: int, damaged: frozenset[str]) -> None:
        self.place, self.step, self.ranks, self.keep, self.damaged = place, step, ranks, keep, damaged
        self.name = f"step-{step:09d}"

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        # A name of its own for each attempt: a rank of an earlier one that still lives can't write into it.
        attempt = secrets.token_hex(4)
        self.place.remove(f"{self.name}/{MANIFEST}")
        return [
            replace(p, storage_data=f"{attempt}-rank-{i:05d}.safetensors") for i, p in enumerate(all_plans)
        ]

    def write_data(self, plan: SavePlan, planner: plans.SavePlanner) -> TorchFuture[list[WriteResult]]:
        results = [
            WriteResult(item.index, 0, Part(value=planner.resolve_data(item)))
            for item in plan.items
            if item.type == WriteItemType.BYTE_IO
        ]
        items = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        # The widest first, so that each tensor lies at a multiple of its items' width.
        items.sort(key=lambda item: (-_itemsize(item), _key(item)))
        if items:
            file = str(plan.storage_data)
            head, starts = _header(items)
            digest, size = hashlib.sha256(), 0

            def blocks() -> Iterator[memoryview | bytes]:
                nonlocal size
                for block in _bytes_of(head, items, planner):
                    digest.update(block)
                    size += len(block)
                    yield block

            self.place.write(f"{self.name}/{file}", blocks())
            written = File(size, digest.hexdigest())
            results += [
                WriteResult(item.index, _nbytes(item), Part(file, start, None if i else written))
                for i, (item, start) in enumerate(zip(items, starts, strict=True))
            ]
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts = {r.index: cast(Part, r.storage_data) for each in results for r in each}
        tensors, values = {}, {}
        for name, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, BytesStorageMetadata):
                values[name] = parts[MetadataIndex(name)].value
                continue
            pieces = []
            for chunk in stored.chunks:
                part = parts[MetadataIndex(name, chunk.offsets)]
                pieces.append(Piece(list(chunk.offsets), list(chunk.sizes), part.file, part.start))
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = Stored(dtype, list(stored.size), pieces)
        manifest = Manifest(
            step=self.step, ranks=self.ranks, created=time.time(),
            fedtrain=__version__, torch=str(torch.__version__),
            files={p.file: p.written for p in parts.values() if p.written is not None},
            tensors=tensors, values=values, paths={k: list(v) for k, v in metadata.planner_data.items()},
        )  # fmt: skip
        self.place.write(f"{self.name}/{MANIFEST}", [seal(manifest)])
        self._sweep(manifest)

    def _sweep(self, manifest: Manifest) -> None:
        """Remove what is not among the newest `keep`: older ones, damaged ones, unfinished ones."""
        good = [n for n in newest(self.place) if n not in self.damaged or n == self.name][: self.keep]
        for name in _steps(self.place):
            if name not in good:
                self.place.remove(f"{name}/{MANIFEST}")  # first, so that half of one never counts
                self.place.remove(name)
        for file in self.place.files(self.name):
            if file != MANIFEST and file not in manifest.files:
                self.place.remove(f"{self.name}/{file}")

    def storage_meta(self) -> None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


class Reader(StorageReader):
    """Each rank reads the bytes that its pieces need; files were verified before."""

    def __init__(self, place: Place, manifest: Manifest, name: str) -> None:
        self.place, self.manifest, self.name = place, manifest, name

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        found: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(getattr(torch, stored.dtype)),
                torch.Size(stored.shape),
                [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in stored.pieces],
            )
            for name, stored in self.manifest.tensors.items()
        }
        found |= {name: BytesStorageMetadata() for name in self.manifest.values}
        return Metadata(found, {k: tuple(v) for k, v in self.manifest.paths.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, all_plans: list[LoadPlan]) -> list[LoadPlan]:
        return all_plans

    def read_data(self, plan: LoadPlan, planner: plans.LoadPlanner) -> TorchFuture[None]:
        by_file: dict[str, list[tuple[ReadItem, Piece, Range]]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                value = self.manifest.values[item.storage_index.fqn]
                planner.load_bytes(item, io.BytesIO(msgspec.json.encode(value)))
                continue
            stored = self.manifest.tensors[item.storage_index.fqn]
            wanted = list(item.storage_index.offset or [0] * len(stored.shape))
            here = [p for p in stored.pieces if p.offsets == wanted]
            piece = max(here, key=lambda p: math.prod(p.sizes))  # ranks without a share have empty ones
            by_file.setdefault(piece.file, []).append((item, piece, _range(stored, piece, item)))
        for file, reads in by_file.items():
            reads.sort(key=lambda read: read[2])
            blocks = self.place.read(f"{self.name}/{file}", [r for _, _, r in reads])
            for (item, piece, (start, stop)), block in zip(reads, blocks, strict=True):
                dtype = getattr(torch, self.manifest.tensors[item.storage_index.fqn].dtype)
                rows = int(item.lengths[0]) if piece.sizes else 1
                whole = stop - start == math.prod(piece.sizes) * dtype.itemsize
                shape = piece.sizes if whole else [rows, *piece.sizes[1:]]
                box = torch.frombuffer(block, dtype=torch.uint8).view(dtype).view(shape)
                for dim, (at, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    box = box.narrow(dim, at if whole or dim else 0, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(box)
                planner.commit_tensor(item, target)
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


class SavePlanner(DefaultSavePlanner):
    """Values that are no tensors as JSON, where torch would pickle them."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return plain(object) if write_item.type == WriteItemType.BYTE_IO else object


class LoadPlanner(DefaultLoadPlanner):
    """The other half: a value goes into its place in the nested dicts."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        at: Any = self.original_state_dict
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = unplain(msgspec.json.decode(value.getvalue()))


# --- A file's bytes


def _key(item: WriteItem) -> str:
    """The tensor's name; of a piece of one also where it begins, as in "model.weight@128,0"."""
    data = item.tensor_data
    assert data is not None
    if list(data.chunk.sizes) == list(data.size):
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"


def _itemsize(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return int(item.tensor_data.properties.dtype.itemsize)


def _nbytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * _itemsize(item)


def _header(items: list[WriteItem]) -> tuple[bytes, list[int]]:
    """A safetensors header, and where each item begins in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for item in items:
        assert item.tensor_data is not None
        start, stop = ends[-1], ends[-1] + _nbytes(item)
        dtype = DTYPES[str(item.tensor_data.properties.dtype).removeprefix("torch.")]
        entries[_key(item)] = {
            "dtype": dtype, "shape": list(item.tensor_data.chunk.sizes), "data_offsets": [start, stop]
        }  # fmt: skip
        ends.append(stop)
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + start for start in ends[:-1]]


def _bytes_of(
    head: bytes, items: list[WriteItem], planner: plans.SavePlanner
) -> Iterator[memoryview | bytes]:
    yield head
    for item in items:
        tensor = cast(torch.Tensor, planner.resolve_data(item)).detach().cpu().contiguous()
        view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
        for at in range(0, len(view), BLOCK):
            yield view[at : at + BLOCK]


def _range(stored: Stored, piece: Piece, item: ReadItem) -> Range:
    """The bytes of a piece that an item needs: its rows, where it wants whole ones; else all of it."""
    row = math.prod(piece.sizes[1:]) * int(getattr(torch, stored.dtype).itemsize)
    if piece.sizes and list(item.lengths[1:]) == piece.sizes[1:]:
        start = piece.start + int(item.storage_offsets[0]) * row
        return start, start + int(item.lengths[0]) * row
    return piece.start, piece.start + row * (piece.sizes[0] if piece.sizes else 1)


# --- Trees and their values


def _tree(states: Stateful | Mapping[str, Stateful]) -> Tree:
    if isinstance(states, Stateful):
        return dict(states.state_dict())
    return {name: state.state_dict() for name, state in states.items()}


def _gathered(tree: Tree) -> Tree:
    """The same with each DTensor whole, in memory, one after the other, on the first rank of its mesh."""
    found: Tree = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found[key] = _gathered(value)
        elif isinstance(value, DTensor):
            full = value.full_tensor()  # of all ranks of its mesh together
            if not any(value.device_mesh.get_coordinate() or ()):
                found[key] = full.cpu()
        else:
            found[key] = value
    return found


def _check(tree: Any, path: str = "") -> None:
    """StoreError for what can't be stored, before anything is."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            _check(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, torch.Tensor):
        if str(tree.dtype).removeprefix("torch.") not in DTYPES:
            raise StoreError(f"{path} is a tensor of {tree.dtype}, which a checkpoint can't hold.")
    elif isinstance(tree, list) and any(isinstance(v, torch.Tensor | dict | list) for v in tree):
        for i, value in enumerate(tree):
            _check(value, f"{path}.{i}")
    else:
        try:
            size = len(msgspec.json.encode(plain(tree)))
        except TypeError as e:
            raise StoreError(
                f"{path}: {e}. Keep tensors, numbers, text, lists and dicts in states."
            ) from None
        if size > MAX_VALUE:
            raise StoreError(
                f"{path} has {size:,} bytes as text, at most {MAX_VALUE:,} fit. Make it a tensor."
            )


def plain(value: Any) -> Any:
    """A value as JSON can hold it: exactly, tuples and non-finite floats too. TypeError for others."""
    if value is None or isinstance(value, bool | str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else {"int": str(value)}
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [plain(v) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[plain(k), plain(v)] for k, v in value.items()]}
    raise TypeError(f"a {type(value).__name__} can't be stored")


def unplain(value: Any) -> Any:
    """What `plain` was given."""
    if isinstance(value, list):
        return [unplain(v) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    match kind:
        case "int":
            return int(inside)
        case "float":
            return float.fromhex(inside)
        case "bytes":
            return base64.b64decode(inside)
        case "tuple":
            return tuple(unplain(v) for v in inside)
        case _:
            return {unplain(k): unplain(v) for k, v in inside}
