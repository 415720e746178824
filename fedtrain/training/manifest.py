"""The manifest of a checkpoint: what lies where, the SHA-256 of each file, and values that are no tensors.

A directory without a manifest is an unfinished save and never counts: the manifest is written last.
"""

from __future__ import annotations

import base64
import hashlib
import math
from typing import Any

import msgspec
import torch

from ..errors import StoreError, Unreadable
from .places import Place

MANIFEST = "manifest.json"
FORMAT = 2
WITHOUT_RUN = 1  # the format of before, whose run nobody knows but by the folder where it lies
DTYPES = {  # torch's name -> safetensors'
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
MAX_VALUE = 1 << 20  # bytes of one value in the manifest; what is longer should be a tensor


class File(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class Piece(msgspec.Struct, frozen=True):
    """A box of a tensor: its corner and its lengths; its bytes are [start, start + ...) of a file."""

    offsets: list[int]
    sizes: list[int]
    file: str
    start: int


class StoredTensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    pieces: list[Piece]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All that a checkpoint is, but its tensors' bytes."""

    format: int = FORMAT
    run: dict[str, str] = {}  # the settings that make a run what it is; {} of a program that has none
    step: int
    ranks: int  # that wrote it
    created: float  # seconds since 1970, for people
    fedtrain: str
    torch: str
    files: dict[str, File]
    tensors: dict[str, StoredTensor]
    values: dict[str, Any]  # as `plain` makes them
    paths: dict[str, list[str | int]]  # a name's keys in the nested dicts


class SealedManifest(msgspec.Struct, frozen=True):
    sha256: str  # of the manifest's bytes as they stand
    manifest: msgspec.Raw


def seal(manifest: Manifest) -> bytes:
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(SealedManifest(hashlib.sha256(body).hexdigest(), msgspec.Raw(body)))


def read_manifest(place: Place, name: str) -> Manifest:
    """StoreError when it is damaged, or of a later format."""
    where = f"{place}/{name}/{MANIFEST}"
    try:
        sealed = msgspec.json.decode(b"".join(place.read(f"{name}/{MANIFEST}")), type=SealedManifest)
        body = bytes(sealed.manifest)
        if hashlib.sha256(body).hexdigest() != sealed.sha256:
            raise StoreError(f"{where} is damaged: its digest is not {sealed.sha256[:12]}…")
        if (found := msgspec.json.decode(body, type=dict).get("format")) not in (WITHOUT_RUN, FORMAT):
            raise StoreError(f"{where} has format {found}; this fedtrain reads {WITHOUT_RUN} and {FORMAT}")
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
    except Unreadable:
        raise
    except StoreError as e:
        return str(e).rstrip(".")
    if size != expected.bytes:
        return f"{place}/{name}/{file} is damaged: {size:,} bytes, {expected.bytes:,} were written"
    if digest.hexdigest() != expected.sha256:
        return f"{place}/{name}/{file} is damaged: its SHA-256 is not {expected.sha256[:12]}…"
    return ""


def newest(place: Place) -> list[str]:
    """The names of all finished checkpoints, the newest first."""
    return [n for n in reversed(steps(place)) if MANIFEST in place.files(n)]


def steps(place: Place) -> list[str]:
    return [n for n in place.names() if n.startswith("step-")]


# --- Values


def check(tree: Any, path: str = "") -> None:
    """StoreError for what can't be stored, before anything is."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            check(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, torch.Tensor):
        if str(tree.dtype).removeprefix("torch.") not in DTYPES:
            raise StoreError(f"{path} is a tensor of {tree.dtype}, which a checkpoint can't hold.")
    elif isinstance(tree, list) and any(isinstance(v, torch.Tensor | dict | list) for v in tree):
        for i, value in enumerate(tree):
            check(value, f"{path}.{i}")
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
