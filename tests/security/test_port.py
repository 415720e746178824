"""The aggregator's port under attack: joined sites train on, and whoever it is is named once a second."""

import asyncio
import contextlib
import resource
import socket
import ssl
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from fedtrain.errors import ConnectError
from fedtrain.events import Notice, SiteJoined, SiteRefused
from fedtrain.schema import Schema, TensorSpec
from fedtrain.tracking.audit import AuditLog, lines_of
from fedtrain.transport import endpoints, port
from fedtrain.transport.barred import FIRST_S, Barred
from fedtrain.transport.star import AggregatorEnd
from fedtrain.wire.codec import decode, encode
from fedtrain.wire.frames import FromAggregator, Offer, Refused, Welcome
from tests.federation import aggregator, certificates, connected, hello, random_arena
from tests.limits import WAIT_S, bounded

SCHEMA = random_arena(10, 1).schema
CALLS = 12  # of a stranger


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("certs"), "a", "b")


def test_a_callers_rate_is_so_many_at_once_and_then_one_in_a_while():
    rate = port.Rate(3, 2.0)
    assert [rate.wait_s("a", 10.0) for _ in range(4)] == [0, 0, 0, 2.0]
    assert rate.wait_s("b", 10.0) == 0
    assert rate.wait_s("a", 12.0) == 0
    assert rate.wait_s("a", 12.5) == 1.5


def test_refusals_of_one_caller_are_told_once_a_second_with_their_number_and_others_at_once(monkeypatch):
    monkeypatch.setattr(port, "LINE_S", 0.05)
    told = []

    async def main():
        tell = port.Sparing(told.append)
        for i in range(900):
            tell(SiteRefused(site="m", reason=f"no {i}"))
        tell(SiteRefused(site="a", reason="other"))
        tell(SiteJoined(site="m"))
        assert [e.reason for e in told[:2]] == ["no 0", "other"]
        await asyncio.sleep(0.2)
        tell(SiteRefused(site="m", reason="last"))
        tell.close()

    bounded(main())
    assert [e.reason for e in told if isinstance(e, SiteRefused) and e.site == "m"] == [
        "no 0", "no 899 (and 898 more like it)", "last",
    ]  # fmt: skip


@pytest.mark.parametrize("hard", [1024, 4096, 1 << 20])
def test_open_files_are_raised_to_the_hard_limit_and_some_are_kept_for_the_store(monkeypatch, hard):
    limits = [256, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(2), new))
    assert port.connections() == hard - port.OWN_FILES
    assert limits == [hard, hard]


def test_a_contested_name_stays_with_the_process_that_is_there_and_people_are_told():
    told = []
    end = AggregatorEnd(Welcome(heartbeat_s=1), 30.0, told.append, None)
    for at, process in enumerate(["1", "2", "1"]):
        assert end.contested("a", process, float(at)) == ""
        end.join("a", process, lambda frame: None, now=float(at))
    assert "another process has joined as a" in end.contested("a", "4", 3.0)
    assert "revoke its certificate" in end.contested("a", "4", 3.0)
    assert end.contested("a", "1", 3.0) == "", "it comes back itself"
    assert end.contested("a", "4", 100.0) == "", "long after"
    assert end.contested("b", "4", 3.0) == ""
    end.lose(end.sessions["a"], 4.0)
    assert end.contested("a", "4", 5.0) == "", "it is gone"
    assert [e.text for e in told if isinstance(e, Notice) and "two processes" in e.text]


@pytest.mark.slow(3)
@pytest.mark.parametrize("stranger", ["without a certificate", "of another authority", "silent"])
def test_s28_who_is_refused_in_the_handshake_is_in_the_audit_log_by_address_and_number(
    certs, tmp_path, monkeypatch, stranger
):
    """Of a site that comes and goes beside it, nothing is said."""
    monkeypatch.setattr(port, "WATCH_S", 3600)  # a refused connection is gone long before
    client = ssl.create_default_context(cafile=certs / "aggregator/root.pem")
    client.check_hostname = False
    client.set_alpn_protocols(["h2"])
    if stranger == "of another authority":
        other = certificates(tmp_path / "other", "a") / "sites/a"
        client.load_cert_chain(other / "cert.pem", other / "key.pem")

    async def call(to):
        reader, writer = await asyncio.open_connection("127.0.0.1", to, ssl=stranger != "silent" and client)
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert stranger == "silent" or await reader.read() == b""
        writer.transport.abort()

    async def main():
        log = AuditLog(tmp_path / "aggregator.jsonl")
        async with aggregator(certs, tmp_path, SCHEMA, emit=log.append) as agg:
            async with connected(certs, agg.cohort.port) as site, site("Session") as stream:
                await stream.write(encode(hello(SCHEMA, process="1")))
                assert isinstance(decode(await stream.read(), FromAggregator), Welcome)
            for _ in range(CALLS):
                with contextlib.suppress(ssl.SSLError, ConnectionError):
                    await call(agg.cohort.port)
                await asyncio.sleep(0.05)  # so that each is looked at
        log.close()
        return counted(log)

    assert 3 <= bounded(main()) <= CALLS


def counted(log):
    """Connections that a log says were refused."""
    entries = [line.entry for line in lines_of(log.path)]
    reasons = [e.reason.split() for e in entries if isinstance(e, SiteRefused) and e.site == "?"]
    assert all(words[1:4] == ["connections", "from", "127.0.0.1:"] for words in reasons), reasons
    return sum(int(words[0]) for words in reasons)


def test_a_hello_of_another_size_is_refused_before_it_is_read_and_joins_have_a_rate(certs, tmp_path):
    large = Schema(tuple(TensorSpec(f"layer.{i:06}", (1, 2), "float32", True) for i in range(20_000)))

    async def main():
        async with aggregator(certs, tmp_path, SCHEMA) as agg, connected(certs, agg.cohort.port) as call:
            reasons = []
            for schema in (*[large] * 10, *[SCHEMA] * 40):
                with contextlib.suppress(ConnectError):  # it may be refused while it still sends
                    async with call("Session") as stream:
                        await stream.write(encode(hello(schema, protocol=0, process="1")))
                        answer = decode(await stream.read(), FromAggregator)
                        reasons.append(answer.reason if isinstance(answer, Refused) else "")
        return reasons, agg.of("join_refused")

    reasons, refused = bounded(main())
    assert "sent a Hello of" in reasons[0]
    assert "joins too often: at most 30 times at once" in reasons[-1]
    assert {e["site"] for e in refused} == {"a"}
    assert len(refused) < len([reason for reason in reasons if reason])


def test_a_site_that_calls_too_often_is_named_and_its_connection_ended(certs, tmp_path, monkeypatch):
    ended, end = [], port.Watch.end
    monkeypatch.setattr(endpoints, "CALLS", 20)
    monkeypatch.setattr(endpoints, "CALL_S", 60.0)
    monkeypatch.setattr(port.Watch, "end", lambda watch, peer: (ended.append(peer), end(watch, peer)))

    async def main():
        async with aggregator(certs, tmp_path, SCHEMA) as agg, connected(certs, agg.cohort.port) as call:
            for i in range(30):
                with contextlib.suppress(ConnectError):
                    async with call("Upload") as stream:
                        await stream.write(encode(Offer(id=str(i), body=b"")))
                        await stream.read()
                if ended:
                    return agg.of("join_refused")

    (told,) = bounded(main())
    assert told["site"] == "a"
    assert "makes over 20 calls" in told["reason"]
    assert len(ended) == 1


def test_silent_connections_are_told_of_by_their_address(certs, tmp_path, monkeypatch):
    monkeypatch.setattr(port, "WATCH_S", 0.02)

    async def main():
        async with aggregator(certs, tmp_path, SCHEMA) as agg:
            silent = [await asyncio.open_connection("127.0.0.1", agg.cohort.port) for _ in range(80)]
            while not (told := agg.of("notice")):  # noqa: ASYNC110  # the watch has its own clock
                await asyncio.sleep(0.01)
            for _, writer in silent:
                writer.close()
            return told

    (told,) = bounded(main())
    assert "connections make no call" in told["text"]
    assert "of them from 127.0.0.1" in told["text"]


def test_a_connection_may_send_what_its_messages_need_and_no_megabytes_beside_them():
    honest, flood = port.Caller(), port.Caller()
    for at in range(1, 100):
        honest.heard += 50 << 20  # with headers and what TCP has that nobody has read yet
        assert not honest.owes(at * (50 << 20) * 129 // 128 + (4 << 20), float(at), 1.0)
    assert [flood.owes(at * (2 << 20), float(at), 1.0) for at in range(1, 5)] == [False, False, True, True]
    uploads = port.Caller(transfers=True)
    assert not uploads.owes(30 << 20, 1.0, 1.0)


ADDRESSES = ["10.1.2.3", "127.0.0.2", "2001:db8:1:2::5"]


def connects(to, source, stays_s=0.0):
    with socket.socket() as one:
        one.settimeout(1.0)
        one.bind((source, 0))
        try:
            one.connect(to)
        except TimeoutError:
            return False
        time.sleep(stays_s)
        return True


def test_the_kernel_drops_who_is_barred_and_nobody_else_until_the_time_is_over():
    barred = Barred()
    with socket.create_server(("127.0.0.1", 0)) as server:
        to = server.getsockname()
        assert [barred.bar(address, 100.0) for address in ADDRESSES] == [FIRST_S] * 3
        barred.apply([server], 100.0)
        assert [connects(to, source) for source in ("127.0.0.1", "127.0.0.2", "127.0.0.3")] == [1, 0, 1]
        barred.apply([server], 100.0 + FIRST_S)
        assert connects(to, "127.0.0.2")
        assert barred.bar("127.0.0.2", 200.0) == 2 * FIRST_S


def test_strangers_that_connect_again_and_again_without_a_call_are_barred_and_a_site_beside_them_stays(
    certs, tmp_path, monkeypatch
):
    for name, value in {"WATCH_S": 0.02, "COSTS": 1, "SILENT": 4, "TOLD_S": 60.0}.items():
        monkeypatch.setattr(port, name, value)

    async def main():
        async with (
            aggregator(certs, tmp_path, SCHEMA) as agg,
            connected(certs, agg.cohort.port) as call,
            call("Session") as stream,
        ):
            await stream.write(encode(hello(SCHEMA, process="1")))
            assert isinstance(decode(await stream.read(), FromAggregator), Welcome)
            to, there = ("127.0.0.1", agg.cohort.port), True
            while there:  # from the site's own address, and from a stranger's
                assert await asyncio.to_thread(connects, to, "127.0.0.1", 0.05)
                there = await asyncio.to_thread(connects, to, "127.0.0.2", 0.05)
            return [each["text"] for each in agg.of("notice") if "may not connect" in each["text"]]

    (told,) = bounded(main())
    assert told.startswith("the port: 127.0.0.2 made ")


def test_a_site_that_floods_its_connection_is_told_of_and_its_address_barred(certs, tmp_path, monkeypatch):
    monkeypatch.setattr(port, "WATCH_S", 0.02)
    attacks = Path(__file__).parents[2] / "benchmarks/port_attacks.py"

    async def main():
        async with (
            aggregator(certs, tmp_path, SCHEMA) as agg,
            connected(certs, agg.cohort.port) as call,
            call("Session") as stream,
        ):
            await stream.write(encode(hello(SCHEMA, process="1")))
            assert isinstance(decode(await stream.read(), FromAggregator), Welcome)
            what = "pings", "127.0.0.1", str(agg.cohort.port), str(certs / "sites/b"), "60"
            flood = await asyncio.create_subprocess_exec(sys.executable, str(attacks), *what)
            try:
                while not (told := agg.of("notice")):  # noqa: ASYNC110  # the watch has its own clock
                    await asyncio.sleep(0.01)
            finally:
                flood.kill()
                await flood.wait()
            return told[0]["text"], agg.of("site_lost")

    told, lost = bounded(main())
    assert told.startswith("the port: a connection from 127.0.0.2 sends megabytes that are no messages")
    assert lost == []


def steady(made, seconds):
    """Rounds a second over so long and at least 20 rounds, but for the longest pause: the machine's."""
    began, gaps = time.monotonic(), []
    last, seen = began, made.rounds.value
    while len(gaps) < 20 or time.monotonic() < began + seconds:
        assert time.monotonic() < began + WAIT_S, f"{len(gaps)} rounds"
        time.sleep(0.002)
        if (reached := made.rounds.value) > seen:
            now = time.monotonic()
            gaps += [(now - last) / (reached - seen)] * (reached - seen)
            last, seen = now, reached
    return (len(gaps) - 1) / (sum(gaps) - max(gaps))


@pytest.mark.slow(20)
def test_attacks_leave_joined_sites_at_work(tmp_path, monkeypatch):
    """With 1,024 descriptors, and compared with an attacker that only takes a core of the same machine."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from port import federation

    with federation(1024) as made:
        made.rate = partial(steady, made)
        _, busy, _, _ = made.attacked("a busy core", 1.0)
        for name in ("1,000 silent connections", "refused joins", "large Hellos"):
            before, during, more, lines = made.attacked(name, 1.0)
            assert during > 0.1 * min(before, busy), (name, before, busy, during)
            assert more < 400, (name, more)
            assert len(lines) < 60, lines[:5]
            if "silent" in name:
                assert any("127.0.0.2" in line.get("text", "") for line in lines), lines
