"""S21, S33: whatever bytes come from a peer, a site or a file, a decoder answers or raises its own error."""

import random
import resource
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedtrain.errors import WireError
from fedtrain.runtime.peers.parcels import ParcelHeader
from fedtrain.runtime.sites import secure_site
from fedtrain.runtime.star import secure_rounds
from fedtrain.transport.membership import Probe
from fedtrain.wire import decode, encode, frames
from tests.decoders import decoders, seeds_of

NESTED = [b"\x91" * 5000, b"\x81\xa1a" * 5000, b"[" * 5000, b'{"a":' * 5000, b"a = " + b"[" * 5000]
NO_UTF8 = [b"\xff", b"\xc3\x28", b"\xa3\xff\xfe\xfd", b"\xed\xa0\x80"]
NAMES = [
    "hello", "refused", "answered", "ask", "upload", "request", "update", "masked", "greeting",
    "gossip header", "gossip offer", "parcel", "certificates", "roster entry", "roster entry's claim",
    "roster entry's signature", "roster entry's certificate", "revocations", "invitation",
    "invitation inside", "manifest", "index of shards", "value in two files", "chain", "redo log", "memory",
    "chunks", "fedtrain.toml", "policy", "event",
]  # fmt: skip
FORGIVING = {"event", "redo log"}  # a line that is none is passed over
SLOW = ("roster", "certificates", "revocations", "manifest", "index", "value", "chain", "redo", "memory")
REFUSED = object()
MOST_BYTES = 256 << 20  # that all of them together may take beyond what is loaded


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    found = decoders(tmp_path_factory.mktemp("decoders"))
    assert [*found] == NAMES
    return found


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


@pytest.mark.parametrize("name", NAMES)
def test_s21_s33_bytes_that_were_changed_are_refused_by_the_declared_error(table, name):
    decoder, refused = table[name], 0
    decoder.read(decoder.valid)
    for data in changed(decoder.valid, 150 if name.startswith(SLOW) else 400, seed=len(decoder.valid)):
        answer = answered(decoder.read, data, decoder.error)
        refused += answer is REFUSED
        if decoder.bare is not None:
            assert answered(decoder.bare, data, decoder.error) == answer
    assert refused > 10 or name in FORGIVING


@pytest.mark.parametrize("name", NAMES)
def test_s21_s33_what_a_fuzzer_has_found_is_refused_by_the_declared_error_or_read(table, name):
    decoder = table[name]
    for data in seeds_of(name):
        answered(decoder.bare or decoder.read, data, decoder.error)


def answered(read, data, error):
    """What is read, as it prints: an arena has no other equality."""
    try:
        return repr(read(data))
    except error:
        return REFUSED


@st.composite
def spliced(draw, valid):
    """Any bytes, or pieces of valid ones with any bytes between them."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=200))
    at = draw(st.integers(0, len(valid)))
    upto = draw(st.integers(at, len(valid)))
    middle = draw(st.binary(max_size=12) | st.just(valid[at:upto] * 2) | st.sampled_from(NESTED))
    return valid[:at] + middle + valid[upto:]


@pytest.mark.parametrize("name", NAMES)
def test_s21_s33_any_bytes_are_refused_by_the_declared_error_in_bounded_memory(table, name):
    decoder, before = table[name], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(max_examples=60, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(spliced(decoder.valid))
    def reads(data):
        with suppress(decoder.error):
            decoder.read(data)

    reads()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MOST_BYTES


@pytest.mark.parametrize(
    "kind", [secure_site.SECURE_REQUESTS, secure_rounds.REPLIES, ParcelHeader, Probe, list[bytes]]
)
def test_s21_any_message_in_place_of_another_is_a_wire_error(kind):
    with pytest.raises(WireError):
        decode(encode(frames.Finished(reason="done")), kind)
    for data in (*NESTED, *NO_UTF8):
        with pytest.raises(WireError):
            decode(data, kind)
