"""Every decoder of bytes that somebody else wrote, or a disk may have damaged: what it reads, and the one
error that it may raise. tests/security/test_any_bytes.py and tests/fuzz.py give each of them any bytes."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import msgspec
from cryptography import x509

from fedtrain import events
from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.config.load import build, table_of
from fedtrain.config.policy import SitePolicy, policy_from
from fedtrain.digest import digest_of
from fedtrain.errors import (
    CertificateError,
    ConfigError,
    Damaged,
    FedtrainError,
    Forgotten,
    StoreError,
    WireError,
)
from fedtrain.messages import Evaluate, Failure, Train, Update
from fedtrain.pki import Credentials, identity_of, init, issue, revocation, revoke, roster
from fedtrain.pki.invitation import Invitation
from fedtrain.pki.signing import Signer, Verifier
from fedtrain.runtime.peers.parcels import ParcelHeader
from fedtrain.runtime.star import secure_rounds
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import Spool
from fedtrain.store import chain as chains
from fedtrain.store.chain import Chain
from fedtrain.store.disk import Kept, unsealed
from fedtrain.store.memory import SiteMemory, checked
from fedtrain.store.redo import EMPTY, Redo, recovered
from fedtrain.training import manifest, shards
from fedtrain.training.places import Folder, Place
from fedtrain.wire import decode, encode, frames
from fedtrain.wire import gossip as wire

SEEDS = Path(__file__).parent / "seeds.zip"  # what tests/fuzz.py has found
WEIGHTS = Arena.zeros(Schema((TensorSpec("w", (3,), "float32", True),)))
STAMP = wire.Stamp.of("run", "schema", "a")
FRAMES: dict[str, tuple[Any, Any]] = {
    "hello": (frames.FromSite, frames.Hello(
        protocol=frames.PROTOCOL, version="1", task_digest="t", schema=WEIGHTS.schema,
        agreed={"train.lr": "0.1"},
    )),
    "refused": (frames.FromAggregator, frames.Refused(reason="another task", final=True)),
    "answered": (frames.FromSite, frames.Answered(id="r/0/0/train", body=b"header", data=b"bytes")),
    "ask": (frames.FromAggregator, frames.Ask(body=b"header", data=b"bytes")),
    "upload": (frames.UploadAnswer, frames.Refused(reason="late")),
    "request": (Train | Evaluate, Train(id="r/0/0/train", round=0, weights=WEIGHTS)),
    "update": (Update, Update(delta=WEIGHTS, num_examples=4.0, metrics={"loss": (1.0, 2.0)})),
    "masked": (secure_rounds.REPLIES, Failure(reason="no")),
    "greeting": (wire.Greeting, wire.Greeting(
        version="1", task_digest="t", schema_digest="s", agreed={},
    )),
}  # fmt: skip


@dataclass(frozen=True)
class Decoder:
    """`read` takes any bytes, and raises nothing but `error`. `valid`: some that it takes. `bare`: the same
    answers without a file, for bytes by the million. `words`: what is likely to be in them."""

    read: Callable[[bytes], object]
    valid: bytes
    error: type[FedtrainError] | tuple[type[FedtrainError], ...]
    bare: Callable[[bytes], object] | None = None
    words: Sequence[str] = ()


class Held(Place):
    """A place where each file has the same bytes."""

    data = b""

    def __str__(self) -> str:
        return "memory"

    def read(self, path: str, ranges: object = None) -> Iterator[memoryview]:
        yield memoryview(self.data)


def names_of_seeds() -> list[str]:
    """The decoders that have seeds."""
    with ZipFile(SEEDS) as file:
        return file.namelist()


def seeds_of(name: str) -> list[bytes]:
    """Bytes that reach something in a decoder which no shorter ones reach, or were once read wrongly."""
    with ZipFile(SEEDS) as file:
        return msgspec.msgpack.decode(file.read(name), type=list[bytes]) if name in file.namelist() else []


def decoders(folder: Path) -> dict[str, Decoder]:
    """By name; `folder` is theirs."""
    return {**_frames(), **_gossip(), **_certificates(folder / "certs"), **_files(folder)}


def _frames() -> dict[str, Decoder]:
    def of(kind: Any) -> Callable[[bytes], object]:
        return lambda data: decode(data, kind)

    return {name: Decoder(of(kind), encode(each), WireError) for name, (kind, each) in FRAMES.items()}


def _gossip() -> dict[str, Decoder]:
    offer = wire.Header(wire.Kind.OFFER, round=3, weight=0.5, count=2)
    parcel = ParcelHeader([("trained", "float32", 3)], {"mass": 1.0})
    return {
        "gossip header": Decoder(wire.unpack, wire.pack(offer, STAMP), WireError),
        "gossip offer": Decoder(
            lambda data: wire.unpack_offer(offer, data, 1 << 30), wire.pack_offer(2 << 20, b"note"), WireError
        ),
        "parcel": Decoder(lambda data: decode(data, ParcelHeader), msgspec.msgpack.encode(parcel), WireError),
    }


def _certificates(folder: Path) -> dict[str, Decoder]:
    init(folder)
    for name in "ab":
        issue(folder, "site", name)
    revoke(folder, ["b"])
    credentials = Credentials.load(folder / "sites" / "a")
    verifier = Verifier(credentials.root, "fedtrain")
    root = x509.load_pem_x509_certificate(credentials.root)
    claim = roster.Claim(peer="a", federation="fedtrain", key=b"k" * 40, address="h:1")
    entry = roster.enrol(Signer.of(credentials), claim)

    def with_part(part: str) -> Decoder:
        def read(data: bytes) -> object:
            return roster.check(msgspec.structs.replace(entry, **{part: data}).encode(), verifier, "fedtrain")

        return Decoder(read, getattr(entry, part), CertificateError)

    made = Invitation(guest="b", host="a", address="h:1", key=b"k" * 40, secret=b"s" * 40)
    return {
        "certificates": Decoder(identity_of, credentials.chain, CertificateError),
        "roster entry": Decoder(
            lambda data: roster.check(data, verifier, "fedtrain"), entry.encode(), CertificateError
        ),
        **{f"roster entry's {part}": with_part(part) for part in ("claim", "signature", "certificate")},
        "revocations": Decoder(
            lambda data: revocation.check(data, root, datetime.now(UTC)),
            (folder / revocation.LIST).read_bytes(),
            CertificateError,
        ),
        "invitation": Decoder(
            lambda data: Invitation.read(data.decode("latin-1")), made.code.encode(), ConfigError
        ),
        "invitation inside": Decoder(
            lambda data: Invitation.read(base64.urlsafe_b64encode(data).decode()),
            msgspec.msgpack.encode(made),
            ConfigError,
        ),
    }


def _files(folder: Path) -> dict[str, Decoder]:
    place = Folder(folder)
    for name in ("step-1", "chain", "redo", "memory", "spool"):
        (folder / name).mkdir(parents=True)
    kept, made = Kept(folder / "kept.json", dict[str, int], "Use another run.name."), {"a": 1}
    kept.write(made)
    chain = Chain(folder / "chain" / "c.jsonl", int, "Restore it.")
    chain.append(1)
    redo = Redo(folder / "redo" / "run.redo", durable=False)
    redo.begin(0, EMPTY, 0, ())
    state = Arena.pack({"residual": WEIGHTS.flat(WEIGHTS.schema.sections[0])})
    memory = SiteMemory(folder / "memory", durable=False)
    memory.keep(0, -1, state)
    (kept_state,) = (folder / "memory").iterdir()
    valid_state = kept_state.read_bytes()
    policy = SitePolicy()
    (folder / "policy").mkdir(mode=0o700)
    whole = manifest.Manifest(
        run={},
        step=1,
        ranks=1,
        created=0.0,
        fedtrain="1",
        torch="2",
        files={},
        tensors={},
        values={"a": 1},
        paths={},
    )
    shard = shards.Shard("0.safetensors", 1, 8, "0" * 64)

    def written(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
        def reads(data: bytes) -> object:
            path.write_bytes(data)
            return read()

        return reads

    def held(read: Callable[[Place], object]) -> Callable[[bytes], object]:
        here = Held()

        def reads(data: bytes) -> object:
            here.data = data
            return read(here)

        return reads

    def both(data: bytes) -> Any:
        for end in ("", ".copy"):
            (folder / f"kept.json{end}").write_bytes(data)
        return kept.read()

    def chained(data: bytes) -> object:
        for end in ("", ".copy"):
            (folder / "chain" / f"c.jsonl{end}").write_bytes(data)
        return Chain(folder / "chain" / "c.jsonl", int, "Restore it.").values

    def values_of(data: bytes) -> object:
        try:
            return list(chains.values(data.split(b"\n")[:-1], int))
        except chains.UNREADABLE as e:
            raise Damaged(str(e)) from None

    def state_of(data: bytes) -> object:
        kept_state.write_bytes(data)
        return memory.load(0).digest

    def bare_state(data: bytes) -> object:
        if (found := checked(bytearray(data), kept_state.name.partition("-")[2])) is None:
            raise Forgotten
        return found.digest

    def chunks(data: bytes) -> object:
        spool = Spool(folder / "spool")
        spool.keep_only(())
        with closing(spool.receive(digest_of(b"x" * 40), 40)) as arriving:
            for at in range(0, len(data), 16):
                arriving.write(data[at : at + 16])
            return arriving.finish()

    def policy_of(data: bytes) -> object:
        path = folder / "policy" / "policy.toml"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        return policy_from(folder / "policy")

    def bare_config(data: bytes) -> object:
        return Config.of(table_of(data, folder / "fedtrain.toml"), folder)

    def bare_policy(data: bytes) -> object:
        return build(SitePolicy, table_of(data, folder / "policy.toml"), "policy")

    sections = Config().sections()
    toml = b'[run]\nname = "r"\nrounds = 3\n[train]\nlr = 0.1\n[strategy]\nkind = "fedavg"\n'
    return {
        "manifest": Decoder(
            written(folder / "step-1" / manifest.MANIFEST, lambda: manifest.read_manifest(place, "step-1")),
            manifest.seal(whole),
            StoreError,
            held(lambda place: manifest.read_manifest(place, "step-1")),
        ),
        "index of shards": Decoder(
            written(folder / shards.INDEX, lambda: shards._read_index(place)),
            msgspec.json.encode(shards.Index(kind="tensor", columns=["0"], shards=[shard])),
            StoreError,
            held(shards._read_index),
        ),
        "value in two files": Decoder(
            lambda data: both(data)[0],
            (folder / "kept.json").read_bytes(),
            Damaged,
            lambda data: unsealed(data, folder / "kept.json", dict[str, int]),
        ),
        "chain": Decoder(chained, (folder / "chain" / "c.jsonl").read_bytes(), Damaged, values_of),
        "redo log": Decoder(
            written(redo.path, lambda: Redo(redo.path, durable=False).read()),
            redo.path.read_bytes(),
            StoreError,
            recovered,
        ),
        "memory": Decoder(state_of, valid_state, Forgotten, bare_state),
        "chunks": Decoder(chunks, b"x" * 40, WireError),
        "fedtrain.toml": Decoder(
            written(folder / "fedtrain.toml", lambda: Config.load(folder / "fedtrain.toml", env={})),
            toml,
            ConfigError,
            bare_config,
            words=[*(f"\n[{name}]\n" for name in sections), *_keys(*sections.values())],
        ),
        "policy": Decoder(policy_of, policy.text().encode(), ConfigError, bare_policy, _keys(policy)),
        "event": Decoder(events.decode, events.encode(events.Notice(time=1.0, text="hello")), StoreError),
    }


def _keys(*settings: Any) -> list[str]:
    """As they are set in a file, each to nothing yet."""
    return [f"\n{f.name} = " for each in settings for f in fields(each)]
