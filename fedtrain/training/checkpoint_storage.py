"""How torch.distributed.checkpoint stores a checkpoint: tensors as safetensors, all else as JSON.

torch's own storage keeps values and its metadata as pickles, which run code when they are read. Its
HuggingFaceStorageWriter keeps no values, and makes each file whole in memory, without a digest.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
import torch
from torch.distributed.checkpoint import metadata as kinds
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from .. import __version__
from .manifest import (
    DTYPES,
    MANIFEST,
    File,
    Manifest,
    Piece,
    StoredTensor,
    newest,
    plain,
    seal,
    steps,
    unplain,
)  # fmt: skip
from .places import BLOCK, Place, Range


class Part(msgspec.Struct, frozen=True):
    """Where a rank put an item: a range of its file; or the value itself."""

    file: str = ""
    start: int = 0
    written: File | None = None  # the file, with the first item in it
    value: Any = None


class _Steps:
    """The steps of torch's protocol in which this storage has nothing to do."""

    def reset(self, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True

    set_up_storage_writer = set_up_storage_reader = storage_meta = reset
    prepare_global_plan = prepare_local_plan


class Writer(_Steps, StorageWriter):
    """Each rank writes one file; the first, when all have, the manifest."""

    def __init__(
        self, place: Place, run: Mapping[str, str], step: int, ranks: int, keep: int, damaged: frozenset[str]
    ) -> None:
        self.place, self.run, self.step, self.ranks = place, dict(run), step, ranks
        self.keep, self.damaged = keep, damaged
        self.name = f"step-{step:09d}"

    def prepare_global_plan(self, all_plans: list[plans.SavePlan]) -> list[plans.SavePlan]:
        # A name of its own for each attempt: a rank of an earlier one that still lives can't write into it.
        attempt = secrets.token_hex(4)
        self.place.remove(f"{self.name}/{MANIFEST}")
        return [
            replace(p, storage_data=f"{attempt}-rank-{i:05d}.safetensors") for i, p in enumerate(all_plans)
        ]

    def write_data(self, plan: plans.SavePlan, planner: plans.SavePlanner) -> TorchFuture[list[WriteResult]]:
        results = [
            WriteResult(item.index, 0, Part(value=planner.resolve_data(item)))
            for item in plan.items
            if item.type == plans.WriteItemType.BYTE_IO
        ]
        items = [item for item in plan.items if item.type != plans.WriteItemType.BYTE_IO]
        # The widest first, so that each tensor lies at a multiple of its items' width.
        items.sort(key=lambda item: (-_itemsize(item), _key(item)))
        if items:
            file = str(plan.storage_data)
            head, starts = _header(items)
            digest, size = hashlib.sha256(), 0

            def blocks() -> Iterator[memoryview | bytes]:
                nonlocal digest, size
                digest, size = hashlib.sha256(), 0
                for block in _bytes_of(head, items, planner):
                    digest.update(block)
                    size += len(block)
                    yield block

            self.place.write(f"{self.name}/{file}", blocks)
            written = File(size, digest.hexdigest())
            results += [
                WriteResult(item.index, _nbytes(item), Part(file, start, None if i else written))
                for i, (item, start) in enumerate(zip(items, starts, strict=True))
            ]
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(results)
        return done

    def finish(self, metadata: kinds.Metadata, results: list[list[WriteResult]]) -> None:
        parts = {r.index: cast(Part, r.storage_data) for each in results for r in each}
        tensors, values = {}, {}
        for name, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, kinds.BytesStorageMetadata):
                values[name] = parts[kinds.MetadataIndex(name)].value
                continue
            pieces = []
            for chunk in stored.chunks:
                part = parts[kinds.MetadataIndex(name, chunk.offsets)]
                pieces.append(Piece(list(chunk.offsets), list(chunk.sizes), part.file, part.start))
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = StoredTensor(dtype, list(stored.size), pieces)
        manifest = Manifest(
            run=self.run, step=self.step, ranks=self.ranks, created=time.time(),
            fedtrain=__version__, torch=str(torch.__version__),
            files={p.file: p.written for p in parts.values() if p.written is not None},
            tensors=tensors, values=values, paths={k: list(v) for k, v in metadata.planner_data.items()},
        )  # fmt: skip
        self.place.write(f"{self.name}/{MANIFEST}", lambda: [seal(manifest)])
        self._sweep(manifest)

    def _sweep(self, manifest: Manifest) -> None:
        """Remove what is not among the newest `keep`: older ones, damaged ones, unfinished ones."""
        good = [n for n in newest(self.place) if n not in self.damaged or n == self.name][: self.keep]
        for name in steps(self.place):
            if name not in good:
                self.place.remove(f"{name}/{MANIFEST}")  # first, so that half of one never counts
                self.place.remove(name)
        for file in self.place.files(self.name):
            if file != MANIFEST and file not in manifest.files:
                self.place.remove(f"{self.name}/{file}")


class Reader(_Steps, StorageReader):
    """Each rank reads the bytes that its pieces need; files were verified before."""

    def __init__(self, place: Place, manifest: Manifest, name: str) -> None:
        self.place, self.manifest, self.name = place, manifest, name

    def read_metadata(self, *args: object, **kwargs: object) -> kinds.Metadata:
        found: dict[str, Any] = {
            name: kinds.TensorStorageMetadata(
                kinds.TensorProperties(getattr(torch, stored.dtype)),
                torch.Size(stored.shape),
                [
                    kinds.ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes))
                    for p in stored.pieces
                ],
            )
            for name, stored in self.manifest.tensors.items()
        }
        found |= {name: kinds.BytesStorageMetadata() for name in self.manifest.values}
        return kinds.Metadata(found, {k: tuple(v) for k, v in self.manifest.paths.items()})

    def read_data(self, plan: plans.LoadPlan, planner: plans.LoadPlanner) -> TorchFuture[None]:
        by_file: dict[str, list[tuple[Range, plans.ReadItem, StoredTensor, Piece]]] = {}
        for item in plan.items:
            if item.type == plans.LoadItemType.BYTE_IO:
                planner.load_bytes(item, self.manifest.values[item.storage_index.fqn])
                continue
            stored = self.manifest.tensors[item.storage_index.fqn]
            wanted = list(item.storage_index.offset or [0] * len(stored.shape))
            here = [p for p in stored.pieces if p.offsets == wanted]
            piece = max(here, key=lambda p: math.prod(p.sizes))  # ranks without a share have empty ones
            reach, *_ = _needed(stored, piece, item)
            by_file.setdefault(piece.file, []).append((reach, item, stored, piece))
        for file, reads in by_file.items():
            reads.sort(key=lambda read: read[0])
            blocks = self.place.read(f"{self.name}/{file}", [reach for reach, *_ in reads])
            for (_, item, stored, piece), block in zip(reads, blocks, strict=True):
                _, shape, offsets = _needed(stored, piece, item)
                box = (
                    torch.frombuffer(block, dtype=torch.uint8).view(getattr(torch, stored.dtype)).view(shape)
                )
                for dim, (at, length) in enumerate(zip(offsets, item.lengths, strict=True)):
                    box = box.narrow(dim, at, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(box)
                planner.commit_tensor(item, target)
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done


class SavePlanner(DefaultSavePlanner):
    """Values that are no tensors as JSON, where torch would pickle them."""

    def transform_object(self, write_item: plans.WriteItem, object: Any) -> Any:
        return plain(object) if write_item.type == plans.WriteItemType.BYTE_IO else object


class LoadPlanner(DefaultLoadPlanner):
    """The other half: a value goes into its place in the nested dicts."""

    def load_bytes(self, read_item: plans.ReadItem, value: Any) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        at: Any = self.original_state_dict
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = unplain(value)


# --- A file's bytes


def _data(item: plans.WriteItem) -> plans.TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _key(item: plans.WriteItem) -> str:
    """The tensor's name; of a piece of one also where it begins, as in "model.weight@128,0"."""
    data = _data(item)
    if list(data.chunk.sizes) == list(data.size):
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"


def _itemsize(item: plans.WriteItem) -> int:
    return int(_data(item).properties.dtype.itemsize)


def _nbytes(item: plans.WriteItem) -> int:
    return math.prod(_data(item).chunk.sizes) * _itemsize(item)


def _header(items: list[plans.WriteItem]) -> tuple[bytes, list[int]]:
    """A safetensors header, and where each item begins in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for item in items:
        start, stop = ends[-1], ends[-1] + _nbytes(item)
        dtype, shape = str(_data(item).properties.dtype).removeprefix("torch."), list(_data(item).chunk.sizes)
        entries[_key(item)] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, stop]}
        ends.append(stop)
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + start for start in ends[:-1]]


def _bytes_of(
    head: bytes, items: list[plans.WriteItem], planner: plans.SavePlanner
) -> Iterator[memoryview | bytes]:
    yield head
    for item in items:
        tensor = cast(torch.Tensor, planner.resolve_data(item)).detach().cpu().contiguous()
        view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
        for at in range(0, len(view), BLOCK):
            yield view[at : at + BLOCK]


def _needed(stored: StoredTensor, piece: Piece, item: plans.ReadItem) -> tuple[Range, list[int], list[int]]:
    """The bytes of a piece that are to be read for an item, their shape, and where the item begins in them:
    the item's rows where it wants whole rows, otherwise all of the piece."""
    start, shape, offsets = piece.start, list(piece.sizes), list(map(int, item.storage_offsets))
    width = int(getattr(torch, stored.dtype).itemsize)
    if shape and list(item.lengths[1:]) == shape[1:]:
        start += offsets[0] * math.prod(shape[1:]) * width
        shape[0], offsets[0] = int(item.lengths[0]), 0
    return (start, start + math.prod(shape) * width), shape, offsets
