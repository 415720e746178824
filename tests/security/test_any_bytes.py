"""S21: whatever bytes come from a peer, a site or a file, a decoder answers or raises its own error."""

import base64
import random
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from cryptography import x509

from fedtrain import events
from fedtrain.arena import Arena
from fedtrain.errors import CertificateError, ConfigError, FedtrainError, StoreError, WireError
from fedtrain.messages import Evaluate, Failure, Train, Update
from fedtrain.pki import Credentials, identity_of, init, issue, revocation, revoke, roster
from fedtrain.pki.invitation import Invitation
from fedtrain.pki.signing import Signer, Verifier
from fedtrain.runtime.peers.parcels import ParcelHeader
from fedtrain.runtime.sites import secure_site
from fedtrain.runtime.star import secure_rounds
from fedtrain.schema import Schema, TensorSpec
from fedtrain.training import manifest, shards
from fedtrain.training.places import Folder
from fedtrain.transport.membership import Probe
from fedtrain.wire import decode, encode, frames
from fedtrain.wire import gossip as wire

NESTED = [b"\x91" * 5000, b"\x81\xa1a" * 5000, b"[" * 5000, b'{"a":' * 5000]
NO_UTF8 = [b"\xff", b"\xc3\x28", b"\xa3\xff\xfe\xfd", b"\xed\xa0\x80"]
WEIGHTS = Arena.zeros(Schema((TensorSpec("w", (3,), "float32", True),)))


def changed(valid: bytes, times: int, seed: int):
    """The bytes with a few of them changed, gone, doubled or new, and some that are nothing at all."""
    yield from (b"", *NESTED, *NO_UTF8)
    draw = random.Random(seed)
    for _ in range(times):
        data = bytearray(valid)
        for _ in range(draw.choice([1, 1, 2, 8])):
            at = draw.randrange(len(data) + 1)
            upto = at + draw.choice([0, 1, 1, 4, 40])
            new = draw.choice([draw.randbytes(draw.randrange(5)), draw.choice(NO_UTF8), data[at:upto] * 2])
            data[at:upto] = draw.choice([new, draw.choice(NESTED)]) if draw.random() < 0.02 else new
        yield bytes(data)
    yield from (valid[:n] for n in range(0, len(valid), max(1, len(valid) // 40)))


def only(error: type[FedtrainError], read, valid: bytes, times: int = 400) -> None:
    read(valid)
    refused = 0
    for data in changed(valid, times, seed=len(valid)):
        try:
            read(data)
        except error:
            refused += 1
    assert refused > 10


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (frames.FromSite, frames.Hello(
            protocol=frames.PROTOCOL, version="1", task_digest="t", schema=WEIGHTS.schema,
            agreed={"train.lr": "0.1"},
        )),
        (frames.FromAggregator, frames.Refused(reason="another task", final=True)),
        (frames.FromSite, frames.Answered(id="r/0/0/train", body=b"header", data=b"bytes")),
        (frames.FromAggregator, frames.Ask(body=b"header", data=b"bytes")),
        (frames.UploadAnswer, frames.Refused(reason="late")),
        (Train | Evaluate, Train(id="r/0/0/train", round=0, weights=WEIGHTS)),
        (Update, Update(delta=WEIGHTS, num_examples=4.0, metrics={"loss": (1.0, 2.0)})),
        (secure_rounds.REPLIES, Failure(reason="no")),
        (wire.Greeting, wire.Greeting(version="1", task_digest="t", schema_digest="s", agreed={})),
    ],
    ids=["site", "aggregator", "answer", "ask", "upload", "request", "update", "masked", "greeting"],
)  # fmt: skip
def test_s21_frames_that_are_none_are_a_wire_error(kind, message):
    only(WireError, lambda data: decode(data, kind), encode(message))


@pytest.mark.parametrize(
    "kind", [secure_site.REQUESTS, secure_rounds.REPLIES, ParcelHeader, Probe, list[bytes]]
)
def test_s21_any_message_in_place_of_another_is_a_wire_error(kind):
    with pytest.raises(WireError):
        decode(encode(frames.Finished(reason="done")), kind)
    for data in (*NESTED, *NO_UTF8):
        with pytest.raises(WireError):
            decode(data, kind)


def test_s21_a_header_and_an_offer_of_any_bytes_are_a_wire_error():
    stamp = wire.Stamp.of("run", "schema", "a")
    only(WireError, wire.unpack, wire.pack(wire.Header(wire.Kind.OFFER, round=3, weight=0.5), stamp))
    header = wire.Header(wire.Kind.OFFER, count=2)
    only(WireError, lambda b: wire.unpack_offer(header, b, 1 << 30), wire.pack_offer(2 << 20, b"note"))


@pytest.fixture(scope="module")
def certs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    init(folder)
    issue(folder, "site", "a")
    issue(folder, "site", "b")
    return folder


def test_s21_certificates_entries_and_lists_of_any_bytes_are_a_certificate_error(certs):
    credentials = Credentials.load(certs / "sites" / "a")
    verifier = Verifier(credentials.root, "fedtrain")
    claim = roster.Claim(peer="a", federation="fedtrain", key=b"k" * 40, address="h:1")
    entry = roster.enrol(Signer.of(credentials), claim)
    only(CertificateError, identity_of, credentials.chain)
    only(CertificateError, lambda data: roster.check(data, verifier, "fedtrain"), entry.encode())
    for part in ("claim", "signature", "certificate"):

        def with_part(data, part=part):
            roster.check(msgspec.structs.replace(entry, **{part: data}).encode(), verifier, "fedtrain")

        only(CertificateError, with_part, getattr(entry, part), times=200)
    revoke(certs, ["b"])
    root = x509.load_pem_x509_certificate(credentials.root)
    revoked = (certs / revocation.LIST).read_bytes()
    only(CertificateError, lambda data: revocation.check(data, root, datetime.now(UTC)), revoked, times=200)


def test_s21_an_invitation_of_any_text_is_a_config_error():
    made = Invitation(guest="b", host="a", address="h:1", key=b"k" * 40, secret=b"s" * 40)
    only(ConfigError, lambda data: Invitation.read(data.decode("latin-1")), made.code.encode())

    def read(data):
        Invitation.read(base64.urlsafe_b64encode(data).decode())

    only(ConfigError, read, msgspec.msgpack.encode(made))


def test_s33_a_manifest_and_an_index_of_any_bytes_are_a_store_error(tmp_path):
    whole = manifest.Manifest(
        step=1, ranks=1, created=0.0, fedtrain="1", torch="2", files={}, tensors={}, values={"a": 1}, paths={}
    )
    place = Folder(tmp_path)
    (tmp_path / "step-1").mkdir()

    def read_manifest(data):
        (tmp_path / "step-1" / manifest.MANIFEST).write_bytes(data)
        manifest.read_manifest(place, "step-1")

    only(StoreError, read_manifest, manifest.seal(whole), times=150)
    only_shard = shards.Shard("0.safetensors", 1, 8, "0" * 64)
    index = shards.Index(kind="tensor", columns=["0"], shards=[only_shard])

    def read_index(data):
        (tmp_path / shards.INDEX).write_bytes(data)
        shards._read_index(place)

    only(StoreError, read_index, msgspec.json.encode(index), times=150)


def test_s21_a_line_of_any_bytes_is_an_event_or_none():
    valid = events.encode(events.Notice(time=1.0, text="hello"))
    assert events.decode(valid) is not None
    for data in changed(valid, 400, seed=1):
        events.decode(data)
