"""S1, S2, S5, S6, S15-S17, S20, S21 of the security checklist against a real peer's port."""

import asyncio
import contextlib
import os
import resource
import socket

import pytest
import torch
import zmq

from fedtrain.exchange import Contact
from fedtrain.transport.admission import Curve
from fedtrain.transport.peer_thread import BAN_S, PATIENCE
from fedtrain.transport.shares import Limits
from fedtrain.wire.codec import encode
from fedtrain.wire.gossip import Header, Kind, Stamp, pack, pack_offer, unpack
from tests.gossip import GREETING, MIB, Sum, party, share, vector
from tests.limits import WAIT_S, bounded
from tests.rosters import met

HELLO = [Header(Kind.HELLO), encode(GREETING)]
STAMP = Stamp.of("r", "s", "mallory")
PICKLE = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x05false\x94\x85\x94R\x94."


class Caller:
    """A DEALER in other hands."""

    def __init__(self, party, to, curve=None, routing_id=None):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        if curve is not None:
            self.socket.curve_serverkey = party.curves[to].public
            self.socket.curve_publickey, self.socket.curve_secretkey = curve.public, curve.secret
        if routing_id is not None:
            self.socket.routing_id = routing_id
        self.socket.connect(f"tcp://127.0.0.1:{party.peers[to].port}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close(0)
        self.context.term()

    def say(self, header, *parts, stamp=STAMP):
        self.socket.send_multipart([pack(header, stamp) if isinstance(header, Header) else header, *parts])

    async def hear(self, *kinds, seconds=WAIT_S):
        """The next message of these kinds, or None."""
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            if await asyncio.to_thread(self.socket.poll, 50):
                frames = self.socket.recv_multipart()
                header, _ = unpack(frames[0])
                if header.kind in kinds:
                    return header, frames[1] if len(frames) > 1 else b""
        return None


@contextlib.asynccontextmanager
async def with_mallory(**options):
    """a and b as they should be, and mallory, who is on the roster and does what she wants."""
    async with party("ab", **options) as p:
        curve = Curve.new()
        p.enrol(Contact("mallory", curve.public))
        with Caller(p, "a", curve) as mallory:
            mallory.say(*HELLO)
            assert await mallory.hear(Kind.WELCOME)
            mallory.say(Header(Kind.WELCOME))
            yield p, mallory


async def until(condition, seconds=WAIT_S):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition is a list of events, set by nobody here
            await asyncio.sleep(0.01)


def exchange_of(p, round=0, numel=1000, deadline_s=20.0, mallory=True):
    """a expects b and mallory, b only a; both exchanges, and a's mixer."""
    expected = ["b", "mallory"] if mallory else ["b"]
    x, mixer = vector(numel, 1), Sum(torch.zeros(numel))
    a = p.peers["a"].exchange(round, {"b": share(x)}, expected, mixer, deadline_s)
    b = p.peers["b"].exchange(round, {"a": share(x)}, ["a"], Sum(torch.zeros(numel)), deadline_s)
    return x, mixer, asyncio.gather(a, b)


def offer(round=0, nbytes=4000, transfer=7):
    count = -(-nbytes // MIB)
    return Header(Kind.OFFER, round, transfer, count=count, weight=1.0), pack_offer(nbytes, b"")


# --- who may speak


def test_s01_a_caller_without_a_key_is_refused_at_the_handshake():
    async def main():
        async with party("a") as p:
            with Caller(p, "a") as caller:
                caller.say(*HELLO)
                assert await caller.hear(*Kind, seconds=1.0) is None
            assert p.peers["a"].connected() == []

    bounded(main())


def test_s02_a_strangers_key_is_refused_at_the_handshake_and_logged():
    async def main():
        async with party("a") as p:
            with Caller(p, "a", Curve.new()) as caller:
                caller.say(*HELLO)
                assert await caller.hear(*Kind, seconds=1.0) is None
                await until(lambda: p.of("a", "join_refused"))
        assert p.of("a", "join_refused")[0]["site"] == "?"
        assert "key is not on the roster" in p.of("a", "join_refused")[0]["reason"]

    bounded(main())


def test_s02_without_an_authenticator_nobody_comes_in():
    async def main():
        async with party("a") as p:
            done = asyncio.Event()
            loop = asyncio.get_running_loop()

            def deaf():
                p.peers["a"]._links._poller.unregister(p.peers["a"]._links.authenticator.socket)
                p.peers["a"]._links.authenticator.socket.close(0)
                loop.call_soon_threadsafe(done.set)

            p.peers["a"]._submit(deaf)
            await done.wait()
            curve = Curve.new()
            p.enrol(Contact("mallory", curve.public))
            with Caller(p, "a", curve) as caller:
                caller.say(*HELLO)
                assert await caller.hear(*Kind, seconds=1.0) is None

    bounded(main())


def test_s02_a_peer_refuses_a_neighbour_that_answers_with_another_key():
    async def main():
        async with party("ab") as p:
            impostor = Contact("c", Curve.new().public, f"127.0.0.1:{p.peers['b'].port}")
            p.enrol(impostor)  # b's address, but not the key that c's entry has
            assert await met(p.peers["a"], ["c"], 1.0) == []

    bounded(main())


def test_s05_a_peer_cannot_speak_in_the_name_of_another():
    async def main():
        async with with_mallory() as (p, mallory):
            _, mixer, both = exchange_of(p, mallory=False)
            mallory.say(*offer(), stamp=Stamp.of("r", "s", "b"))
            await both
            assert [each.peer for each in mixer.begun] == ["b"]
            await until(lambda: p.of("a", "update_refused"))
            assert p.of("a", "update_refused")[0]["site"] == "mallory"
            assert "another peer than its key's" in p.of("a", "update_refused")[0]["reason"]

    bounded(main())


def test_s05_with_anothers_routing_id_a_peer_is_still_itself():
    async def main():
        async with party("ab") as p:
            await until(lambda: p.peers["a"]._links.get("b").routes)
            route = next(iter(p.peers["a"]._links.get("b").routes.values()))[0]
            curve = Curve.new()
            p.enrol(Contact("thief", curve.public))
            with Caller(p, "a", curve, route) as thief:
                thief.say(*HELLO, stamp=Stamp.of("r", "s", "b"))
                thief.say(*offer(), stamp=Stamp.of("r", "s", "b"))
                x, mixer, both = exchange_of(p, mallory=False)
                done, other = await both
            assert done.arrived == done.given == {"b"}
            assert other.arrived == other.given == {"a"}
            assert torch.equal(mixer.acc, x)

    bounded(main())


def test_s06_a_peer_struck_off_the_roster_is_cut_off_at_once_and_not_let_in_again():
    async def main():
        async with party("ab") as p:
            everyone = p.roster.contacts.values()
            p.roster.replace([c for c in everyone if c.peer != "b"])
            p.peers["a"].revoked()
            await until(lambda: p.of("a", "site_lost"))
            assert "no longer on the roster" in p.of("a", "site_lost")[0]["reason"]
            await until(lambda: p.peers["a"].connected() == [])
            mixer = Sum(torch.zeros(10))
            done = await p.peers["a"].exchange(0, {"b": share(vector(10, 1))}, ["b"], mixer, 20.0)
            assert done.missing.keys() == done.kept.keys() == {"b"}
            await asyncio.sleep(0.5)  # b calls again meanwhile
            assert p.peers["a"].connected() == []

    bounded(main())


# --- what may be said


def test_s15_a_share_sent_again_or_of_an_old_round_or_another_run_does_not_count():
    async def main():
        async with with_mallory() as (p, mallory):
            x, mixer, both = exchange_of(p)
            mallory.say(*offer())
            assert (await mallory.hear(Kind.NACK))[0].count == 1
            chunk = Header(Kind.CHUNK, 0, 7, 0, 1)
            for _ in range(3):
                mallory.say(chunk, torch.ones(1000).numpy().tobytes())
            assert await mallory.hear(Kind.DONE)
            done, _ = await both
            assert done.arrived == {"b", "mallory"}
            assert torch.equal(mixer.acc, x + 1)
            mallory.say(*offer())  # the same again: it has it, and asks for no byte
            assert (await mallory.hear(Kind.DONE, Kind.NACK))[0].kind is Kind.DONE
            _, _, both = exchange_of(p, round=5, mallory=False)
            await both
            mallory.say(*offer(round=3))
            assert b"is over" in (await mallory.hear(Kind.REFUSE, Kind.NACK))[1]
            mallory.say(*offer(round=6), stamp=Stamp.of("another", "s", "mallory"))
            await until(lambda: p.of("a", "update_refused"))
            assert "another run" in p.of("a", "update_refused")[-1]["reason"]

    bounded(main())


def test_s16_a_share_with_nan_is_refused_and_named_and_the_round_completes_with_the_others():
    async def main():
        async with with_mallory() as (p, mallory):
            x, mixer, both = exchange_of(p)
            mallory.say(*offer())
            assert await mallory.hear(Kind.NACK)
            mallory.say(Header(Kind.CHUNK, 0, 7, 0, 1), torch.full((1000,), torch.nan).numpy().tobytes())
            done, _ = await both
            assert done.arrived == {"b"}
            assert done.missing == {"mallory": "refused: a value is not finite"}
            assert torch.equal(mixer.acc, x)
            assert {"site": "mallory", "round": 1, "reason": "a value is not finite"} in p.of(
                "a", "update_refused"
            )

    bounded(main())


def test_s17_a_share_of_another_size_is_refused_before_a_byte_of_it():
    async def main():
        async with with_mallory() as (p, mallory):
            _, _, both = exchange_of(p)
            mallory.say(*offer(nbytes=4004))
            _, reason = await mallory.hear(Kind.REFUSE, Kind.NACK)
            assert reason == b"4004 bytes, 4000 are due"
            assert (await both)[0].missing == {"mallory": "refused: 4004 bytes, 4000 are due"}

    bounded(main())


def bad_messages():
    good = pack(*[Header(Kind.PING), STAMP])
    return {
        "empty": (b"", b""),
        "short": (good[:63], b""),
        "noise": (os.urandom(64), b""),
        "huge-header": (os.urandom(1 << 20), b""),
        "version": (good[:4] + b"\x63" + good[5:], b""),
        "kind": (good[:5] + b"\xff" + good[6:], b""),
        "nan-weight": (pack(Header(Kind.OFFER, weight=float("nan")), STAMP), pack_offer(1, b"")),
        "pickle": (Header(Kind.HELLO), PICKLE),
        "deep": (Header(Kind.HELLO), b"\x91" * 60_000),
        "10GB": (Header(Kind.OFFER, 0, 7, count=10240, weight=1.0), pack_offer(10 << 30, b"")),
        "count": (Header(Kind.OFFER, 0, 7, count=9, weight=1.0), pack_offer(4000, b"")),
        "letter-10GB": (Header(Kind.POST, 0, 7, count=10240, weight=1.0), pack_offer(10 << 30, b"")),
        "offer-body": (Header(Kind.OFFER, 0, 7, count=1), b"\xff" * 7000),
    }


@pytest.mark.parametrize("name", bad_messages())
def test_s21_a_malformed_message_is_refused_and_logged_and_the_round_goes_on(name):
    async def main():
        async with with_mallory(limits=Limits(payload_bytes=1 << 20)) as (p, mallory):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            mallory.say(*bad_messages()[name])
            await until(lambda: p.of("a", "update_refused"))
            assert p.of("a", "update_refused")[0]["site"] == "mallory"
            x, mixer, both = exchange_of(p, mallory=False)
            await both
            assert torch.equal(mixer.acc, x)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10

    bounded(main())


def test_s20_a_pickle_payload_is_bytes_to_be_mixed_and_runs_nothing(tmp_path):
    bomb = PICKLE.replace(b"false", b"touch")  # would run a command, were it loaded

    async def main():
        async with with_mallory() as (p, mallory):
            _, mixer, both = exchange_of(p)
            mallory.say(*offer())
            assert await mallory.hear(Kind.NACK)
            mallory.say(Header(Kind.CHUNK, 0, 7, 0, 1), bomb.ljust(4000, b"\0"))
            done, _ = await both
            assert done.arrived == {"b", "mallory"}
            assert mixer.acc.numel() == 1000

    bounded(main())


@pytest.mark.slow(3)
@pytest.mark.parametrize("what", ["too-long", "too-short", "without-credit"])
def test_s21_chunks_that_are_not_as_agreed_are_refused(what):
    async def main():
        async with with_mallory() as (p, mallory):
            x, mixer, both = exchange_of(p, deadline_s=3.0)
            mallory.say(*offer())
            assert await mallory.hear(Kind.NACK)
            index = 5 if what == "without-credit" else 0
            mallory.say(Header(Kind.CHUNK, 0, 7, index, 1), bytes(4001 if what == "too-long" else 3999))
            await until(lambda: p.of("a", "update_refused"))
            done, _ = await both
            assert "did not finish within 3 s" in done.missing["mallory"]
            assert torch.equal(mixer.acc, x)

    bounded(main())


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ([bytes(3999)], "chunk 0 has 3999 bytes, 4000 are due"),
        ([bytes(4000), b""], "chunk 1 has 0 bytes"),
        ([b""] * 1000, "an offer with 1000 chunks, 4 at most are taken"),
    ],
    ids=["too-short", "too-many", "far-too-many"],
)
def test_s21_bad_chunks_with_the_offer_of_a_round_to_come_are_refused_at_once(chunks, why):
    async def main():
        async with with_mallory() as (p, mallory):
            mallory.say(*offer(round=3), *chunks)
            await until(lambda: p.of("a", "update_refused"))
            assert why in p.of("a", "update_refused")[0]["reason"]
            x, mixer, both = exchange_of(p, round=3, deadline_s=1.0)
            assert (await both)[0].arrived == {"b"}
            assert torch.equal(mixer.acc, x)

    bounded(main())


def test_s21_a_frame_over_the_limit_is_never_read():
    async def main():
        async with with_mallory() as (p, mallory):
            mallory.say(Header(Kind.POST), bytes(8 << 20))
            x, mixer, both = exchange_of(p, mallory=False)
            await both
            assert torch.equal(mixer.acc, x)
            await until(lambda: "mallory" not in p.peers["a"].connected())

    bounded(main())


@pytest.mark.slow(2)
@pytest.mark.parametrize("kind", [Kind.PING, Kind.CHUNK, Kind.OFFER, 99], ids=str)
def test_s21_a_flood_is_cut_off_and_memory_stays_bounded(kind):
    head = pack(Header(Kind.PING), STAMP)
    header = head[:5] + bytes([kind]) + head[6:]
    body = bytes(MIB) if kind is Kind.CHUNK else b""

    async def main():
        async with with_mallory() as (p, mallory):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

            def flood():
                mallory.socket.sndtimeo = 3000
                with contextlib.suppress(zmq.Again):  # nobody reads any more
                    for _ in range(400 if body else 100_000):
                        mallory.socket.send_multipart([header, body])

            flooding = asyncio.create_task(asyncio.to_thread(flood))
            x, mixer, both = exchange_of(p, mallory=False)
            await both
            assert torch.equal(mixer.acc, x)
            await flooding
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # KiB
            if kind is not Kind.CHUNK:
                await until(lambda: p.of("a", "site_lost"))
                why = p.of("a", "site_lost")[0]["reason"]
                assert why.startswith(f"cut off for {BAN_S:g} s after {PATIENCE} breaches") or (
                    kind is Kind.PING and why == "it does not read what it is sent"
                )

    bounded(main())


def test_s21_garbage_on_the_port_leaves_the_peer_alive():
    def throw(port, data):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as s, contextlib.suppress(OSError):
            s.sendall(data)
            s.settimeout(0.2)
            s.recv(100)

    async def main():
        async with party("ab") as p:
            for data in (
                b"GET / HTTP/1.1\r\n\r\n",
                os.urandom(100_000),
                b"\xff" + b"\0" * 8 + b"\x7f\x03",
                b"",
            ):
                await asyncio.to_thread(throw, p.peers["a"].port, data)
            x, mixer, both = exchange_of(p, mallory=False)
            await both
            assert torch.equal(mixer.acc, x)

    bounded(main())


@pytest.mark.slow(3)
def test_a_peer_that_trains_something_else_is_told_so_and_no_data_moves():
    async def main():
        async with party("a") as p:
            p.start("b", run="another")
            assert await met(p.peers["a"], ["b"], 1.0) == []
            await until(lambda: p.of("b", "site_lost"))
            assert "different runs" in p.of("b", "site_lost")[0]["reason"]
            assert p.peers["a"].bytes_out == p.peers["b"].bytes_out == 0
            await until(lambda: all(p.of(name, "join_refused") for name in "ab"))
            await asyncio.sleep(1.5)  # nobody says it again and again
            assert [len(p.of(name, "join_refused")) for name in "ab"] == [1, 1]

    bounded(main())
