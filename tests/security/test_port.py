"""The aggregator's port under attack: joined sites train on, and whoever it is is named once a second."""

import asyncio
import contextlib
import resource
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import grpc as core
import psutil
import pytest

from fedtrain.errors import ConnectError
from fedtrain.events import Notice, SiteJoined, SiteRefused
from fedtrain.schema import Schema, TensorSpec
from fedtrain.tracking.audit import AuditLog, lines_of
from fedtrain.transport import endpoints, grpc, port
from fedtrain.transport.star import AggregatorEnd
from fedtrain.wire.codec import decode, encode
from fedtrain.wire.frames import FromAggregator, Offer, Refused, Welcome
from tests.federation import aggregator, certificates, connected, hello, random_arena
from tests.limits import WAIT_S, bounded
from tests.ports import free_port

SCHEMA = random_arena(10, 1).schema
CALLS = 12  # of a stranger
BEGINS = b"\x16"  # the first byte of a TLS handshake


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
@pytest.mark.parametrize("stranger", ["without a certificate", "of another authority", "of one byte"])
def test_s28_who_is_refused_in_the_handshake_is_in_the_audit_log_by_address_and_number(
    certs, tmp_path, monkeypatch, stranger
):
    """Of a site that comes and goes beside it, nothing is said."""
    monkeypatch.setattr(port, "WATCH_S", 3600)  # a refused connection is gone long before
    monkeypatch.setattr(port, "COSTS", 0)  # each handshake is looked at
    looks, arrived = [], port.Watch.arrived
    monkeypatch.setattr(port.Watch, "arrived", lambda watch: (arrived(watch), looks.append(watch)))
    client = ssl.create_default_context(cafile=certs / "aggregator/root.pem")
    client.check_hostname = False
    client.set_alpn_protocols(["h2"])
    if stranger == "of another authority":
        other = certificates(tmp_path / "other", "a") / "sites/a"
        client.load_cert_chain(other / "cert.pem", other / "key.pem")

    async def call(to):
        before = len(looks)
        tls = client if stranger != "of one byte" else None
        reader, writer = await asyncio.open_connection("127.0.0.1", to, ssl=tls)
        if tls is None:
            writer.write(BEGINS)
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert tls is None or await reader.read() == b""
        while len(looks) == before:  # noqa: ASYNC110  # gRPC's threads look
            await asyncio.sleep(0.005)
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
        log.close()
        return counted(log)

    assert 3 <= bounded(main()) <= CALLS


def test_a_channel_that_was_given_up_does_not_call_again_when_somebody_listens_at_last(certs):
    """A channel of gRPC's own defaults does, while anyone holds a call of it; such a call is refused nothing,
    and says nothing, and the port would count it with those that are refused."""

    async def main():
        ports, came = [free_port(), free_port()], [asyncio.Event(), asyncio.Event()]
        options = [("grpc.initial_reconnect_backoff_ms", 1500)]  # later than by default, for the other one
        theirs = core.aio.insecure_channel(f"127.0.0.1:{ports[0]}", options=options)
        held = theirs.stream_stream("/a/b")()
        with pytest.raises(core.RpcError):
            await held.read()
        async with connected(certs, ports[1]) as call:
            with pytest.raises(ConnectError, match="nothing listens there yet"):
                async with call("Session") as stream:
                    await stream.read()
        await theirs.close()
        async with contextlib.AsyncExitStack() as stack:
            for at, event in zip(ports, came, strict=True):
                await stack.enter_async_context(listening(at, event))
            await came[0].wait()
        return held, stream, came[1].is_set()

    assert not bounded(main())[2]


@contextlib.asynccontextmanager
async def listening(at, came):
    """Sets the event when somebody connects, and hangs up."""

    async def hang_up(_, writer):
        came.set()
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", at):
        yield


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
    monkeypatch.setattr(port.Watch, "end", lambda watch, *of: (ended.append(of), end(watch, *of)))

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


def test_connections_without_a_call_are_told_of_by_their_address(certs, tmp_path, monkeypatch):
    monkeypatch.setattr(port, "WATCH_S", 0.02)

    async def main():
        async with aggregator(certs, tmp_path, SCHEMA) as agg:
            for _, writer in (there := [await opened(agg.cohort.port) for _ in range(80)]):
                writer.write(BEGINS)
            while not (told := agg.of("notice")):  # noqa: ASYNC110  # the watch has its own clock
                await asyncio.sleep(0.01)
            for _, writer in there:
                writer.close()
            return told

    (told,) = bounded(main())
    assert "connections make no call" in told["text"]
    assert "of them from 127.0.0.1" in told["text"]


async def opened(to, source="127.0.0.1"):
    return await asyncio.open_connection("127.0.0.1", to, local_addr=(source, 0))


def test_an_aggregator_waits_for_a_handshake_as_long_as_a_site_does():
    """At a thundering start thousands of handshakes share its cores; who is cut off calls anew."""
    options = dict(grpc.server_options(1))
    assert options["grpc.server_handshake_timeout_ms"] >= 20_000  # core's own, of who connects


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel keeps them")
def test_a_silent_connection_is_not_taken_before_it_speaks(certs, tmp_path):
    async def main():
        async with aggregator(certs, tmp_path, SCHEMA) as agg:
            silent = [await opened(agg.cohort.port) for _ in range(20)]
            async with connected(certs, agg.cohort.port) as call, call("Session") as stream:
                await stream.write(encode(hello(SCHEMA, process="1")))
                assert isinstance(decode(await stream.read(), FromAggregator), Welcome)
                taken = [len(port._connected(agg.cohort.port))]
                silent[0][1].write(BEGINS)
                while len(port._connected(agg.cohort.port)) == taken[0]:  # noqa: ASYNC110  # gRPC's threads
                    await asyncio.sleep(0.005)
                taken.append(len(port._connected(agg.cohort.port)))
            for _, writer in silent:
                writer.close()
            return taken

    assert bounded(main()) == [1, 2]


@contextlib.asynccontextmanager
async def with_a_site(certs, tmp_path):
    """An aggregator that a site of this address has joined."""
    async with (
        aggregator(certs, tmp_path, SCHEMA) as agg,
        connected(certs, agg.cohort.port) as call,
        call("Session") as stream,
    ):
        await stream.write(encode(hello(SCHEMA, process="1")))
        assert isinstance(decode(await stream.read(), FromAggregator), Welcome)
        yield agg


def attacked(certs, tmp_path, attack, kind):
    """The first line of a kind that an aggregator tells while b makes an attack; and the sites it lost."""

    async def main():
        attacks = Path(__file__).parents[2] / "benchmarks/port_attacks.py"
        async with with_a_site(certs, tmp_path) as agg:
            what = attack, "127.0.0.1", str(agg.cohort.port), str(certs / "sites/b"), "60"
            flood = await asyncio.create_subprocess_exec(sys.executable, str(attacks), *what)
            try:
                while not (told := agg.of(kind)):  # noqa: ASYNC110  # the watch has its own clock
                    await asyncio.sleep(0.01)
            finally:
                flood.kill()
                await flood.wait()
            return told[0], agg.of("site_lost")

    return bounded(main())


def test_a_look_at_the_connections_ends_when_its_time_is_over():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        there, _ = server.accept()
        with there:
            assert len(port._connected(server.getsockname()[1])) == 1
            assert port._connected(server.getsockname()[1], -1.0) == {}


def test_a_site_whose_call_brings_too_much_metadata_is_named_and_cut_off(certs, tmp_path):
    told, lost = attacked(certs, tmp_path, "metadata", "join_refused")
    assert told["site"] == "b"
    assert "from 127.0.0.2 makes a call with" in told["reason"]
    assert "bytes of metadata" in told["reason"]
    assert "fedtrain certs revoke b" in told["reason"]
    assert lost == []


REFUSES = lambda line: line["kind"] == "join_refused"
ATTACKS = {  # and the line by which it is seen
    "1,000 handshakes of a byte": lambda line: "make no call" in line.get("text", ""),
    "refused joins": REFUSES,
    "large Hellos": REFUSES,
}
USUAL = ("waiting", "round_started", "update_received", "round_committed", "site_state", "site_joined")


@pytest.mark.slow(20)
def test_attacks_leave_joined_sites_at_work(monkeypatch):
    """With 1,024 descriptors. Rounds are counted in the seconds that the aggregator works: others do, too."""
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks)
    from port import HOSTILE, federation

    with federation(1024) as made:
        works = psutil.Process(made.processes[0].pid)

        def told():
            return [event for event in made.events() if event["kind"] not in USUAL]

        def wait_for(condition):
            until = time.monotonic() + 2 * WAIT_S
            while not condition():
                assert time.monotonic() < until, told()[-5:]
                time.sleep(0.05)

        def rounds_a_second():
            """Of the aggregator's processor."""
            rounds, began = made.rounds.value, sum(works.cpu_times()[:2])
            wait_for(lambda: made.rounds.value >= rounds + 60)
            return (made.rounds.value - rounds) / (sum(works.cpu_times()[:2]) - began)

        for name, shows in ATTACKS.items():
            before, memory, said = rounds_a_second(), made.megabytes(), len(told())
            hostile = "127.0.0.1", str(made.port.value), str(made.certs / "sites" / HOSTILE), "1000"
            began = time.monotonic()
            attacker = subprocess.Popen([sys.executable, str(benchmarks / "port_attacks.py"), name, *hostile])
            try:
                wait_for(lambda shows=shows, said=said: any(map(shows, told()[said:])))
                during, more = rounds_a_second(), made.megabytes() - memory
            finally:
                attacker.kill()
                attacker.wait()
            lines = told()[said:]
            assert during > 0.1 * before, (name, before, during)
            assert more < 400, (name, more)
            assert len(lines) < 30 + 3 * (time.monotonic() - began), lines[:5]
            assert "site_lost" not in {line["kind"] for line in lines}, name


def test_who_comes_while_the_port_is_looked_at_is_not_told_as_refused(monkeypatch):
    peer, told, here = ("127.0.0.1", 5), [], []
    watch = port.Watch(10, told.append)
    watch._port = 1

    def connected(*_):
        found = dict.fromkeys(here, 0)
        if not here:  # it comes now, and a handshake begins
            here.append(peer)
            watch._arrived.append(dict.fromkeys(here, 0))
        return found

    monkeypatch.setattr(port, "_connected", connected)
    for second in (100.0, 101.0):
        watch._look(second)
    assert [event for event in told if isinstance(event, SiteRefused)] == []


def test_an_aggregator_that_was_stopped_does_not_count_what_its_own_sites_gave_up(monkeypatch):
    """F: it was stopped for 100 s, in which its sites called again and again, and a stranger once."""
    site, told, here = ("10.0.0.1", 5), [], {}
    watch = port.Watch(10, told.append)
    watch._port = 1
    monkeypatch.setattr(port, "_connected", lambda *_: dict(here))
    watch.called("ipv4:10.0.0.1:5", "a")
    here[site] = 0
    watch._look(100.0)
    gone = {("10.0.0.1", number): 0 for number in range(6, 30)} | {("10.0.0.9", 7): 0}
    watch._arrived.append(gone)
    watch._look(200.0)
    watch._arrived.append({("10.0.0.1", 31): 0})
    watch._look(200.5)
    refused = [event.reason for event in told if isinstance(event, SiteRefused)]
    assert [reason.partition(":")[0] for reason in refused] == ["1 connections from 10.0.0.9"]
    watch._arrived.append({("10.0.0.1", 32): 0})
    watch._look(208.0)
    watch._arrived.append({("10.0.0.1", 33): 0})
    watch._look(215.0)
    watch._arrived.append({("10.0.0.1", 34): 0})
    watch._look(220.0)
    assert "connections from 10.0.0.1" in told[-1].reason, "later its refusals are counted again"
