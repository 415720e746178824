"""The graph seam over real ZeroMQ with CURVE, on loopback."""

import asyncio
import contextlib
import re
import select
import threading

import pytest
import torch
import zmq

from fedtrain.errors import ConnectError
from fedtrain.exchange import Contact
from fedtrain.pki import Credentials, init, issue
from fedtrain.pki.roster import Claim, Roster, enrol
from fedtrain.pki.signing import Signer, Verifier
from fedtrain.transport.admission import Curve
from fedtrain.transport.memory import LocalNetwork
from fedtrain.wire.codec import encode
from fedtrain.wire.gossip import Header, Kind
from tests.gossip import MIB, Party, Sum, party, share, vector
from tests.inprocess import Wire
from tests.limits import WAIT_S, bounded
from tests.ports import free_port
from tests.rosters import FixedRoster, met

NAMES = ["a", "b", "c"]


async def rounds(neighbors, name, names, numel, rounds=2):
    """Average with everybody, twice; the vector and how the exchanges went."""
    x, went = vector(numel, names.index(name)), []
    others = [n for n in names if n != name]
    for r in range(rounds):
        mixer = Sum(x / len(names))
        neighbors.announce(r)
        shares = dict.fromkeys(others, share(x, 1 / len(names)))
        went.append(await neighbors.exchange(r, shares, others, mixer, 30.0))
        x = mixer.acc
    return x, went


async def over_zmq(numel):
    async with party(NAMES) as p:
        got = await asyncio.gather(*(rounds(p.peers[n], n, NAMES, numel) for n in NAMES))
        sent = {n: p.peers[n].bytes_out for n in NAMES}
    return got, sent


async def in_memory(numel):
    network = LocalNetwork(NAMES)

    async def one(name):
        async with network.join(name) as neighbors:
            return await rounds(neighbors, name, NAMES, numel)

    return await asyncio.gather(*map(one, NAMES))


@pytest.mark.parametrize("numel", [1, 1000, 3 * MIB + 5])
def test_in_memory_and_over_zeromq_the_bits_are_the_same(numel):
    (real, sent), local = bounded(over_zmq(numel)), bounded(in_memory(numel))
    for (x, went), (y, _) in zip(real, local, strict=True):
        assert torch.equal(x, y)
        assert all(not w.missing and not w.kept and not w.unsure for w in went)
    assert set(sent.values()) == {2 * 2 * 4 * numel}  # two rounds, two neighbours, no byte twice


def test_all_peers_see_the_same_view_and_one_that_leaves_is_gone_from_it():
    async def until(condition):
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - what changes lies in other threads
                await asyncio.sleep(0.01)

    async def main():
        async with party("abc", heartbeat_s=0.2) as p:
            peers = p.peers
            await until(lambda: all(peer.view().alive == ("a", "b", "c") for peer in peers.values()))
            assert len({peer.view().epoch for peer in peers.values()}) == 1
            await peers["c"].stop()
            await until(lambda: all(peers[n].view().alive == ("a", "b") for n in "ab"))
            assert peers["a"].view() == peers["b"].view()

    bounded(main())


class Spoilt(Wire):
    """A path that flips a bit of what is answered over it next, after the greeting: first CURVE's Welcome."""

    spoilt = False

    async def _copy(self, source, sink):
        answers, at = sink.get_extra_info("sockname")[1] == self._port, 0
        while data := await source.read(1 << 18):
            at += len(data)
            if answers and at > 100 and not self.spoilt:
                self.spoilt, data = True, data[:-1] + bytes([data[-1] ^ 1])
            sink.write(data)
            await sink.drain()
        sink.write_eof()


class Flagged(Wire):
    """A path that changes a flag of one frame, once `left` have passed."""

    FRAME = re.compile(rb"[\x00\x01](?=.\x07MESSAGE)|[\x02\x03](?=.{8}\x07MESSAGE)", re.DOTALL)
    left, flag = -1, 0

    async def _copy(self, source, sink):
        while data := await source.read(1 << 18):
            if self.left >= 0 and (frame := self.FRAME.search(data)):
                at, self.left = frame.start(), self.left - 1
                if self.left < 0:
                    data = data[:at] + bytes([data[at] ^ self.flag]) + data[at + 1 :]
            sink.write(data)
            await sink.drain()
        sink.write_eof()


@contextlib.asynccontextmanager
async def spoilt(names, path=Spoilt, **options):
    """All connected with all, by a path to each of them."""
    p, paths = Party(), []
    async with contextlib.AsyncExitStack() as stack:
        for name in names:
            peer = p.start(name, idle_s=3600, **options)
            stack.push_async_callback(peer.stop)
            paths.append(path(free_port(), peer.port))
            await stack.enter_async_context(paths[-1])
            p.enrol(Contact(name, p.curves[name].public, f"127.0.0.1:{paths[-1]._port}"))
        for name in names:
            others = [other for other in names if other != name]
            assert await met(p.peers[name], others, WAIT_S) == others
        yield p, paths


def test_a_call_whose_handshake_was_damaged_is_made_again():
    """libzmq by itself makes it never again (session_base.cpp, engine_error), where what came is no ZMTP."""

    async def main():
        async with spoilt("ab", heartbeat_s=0.2) as (_, paths):
            assert any(path.spoilt for path in paths)  # who is called first calls back over the other path

    bounded(main())


def test_a_call_on_which_bytes_were_damaged_ends_at_once_and_is_made_again():
    """While its monitor heard of all that libzmq tells, the call stayed, and nothing was read from it."""

    async def main():
        async with spoilt("ab", heartbeat_s=WAIT_S) as (p, paths):  # whose silence is found after three
            calls = [p.peers[n]._links.to(other) for n, other in ("ab", "ba")]
            async with asyncio.timeout(WAIT_S):
                while not all(call.calling for call in calls):  # noqa: ASYNC110 - threads call
                    await asyncio.sleep(0.001)
                before = [call.dealer for call in calls]
                for path in paths:
                    path.spoilt = False
                went = await asyncio.gather(*(rounds(p.peers[n], n, "ab", 10) for n in "ab"))
                assert [each.missing for _, rounds in went for each in rounds] == [{}] * 4
                assert any(path.spoilt for path in paths)
                while all(call.dealer in before for call in calls):  # noqa: ASYNC110 - threads call
                    await asyncio.sleep(0.001)

    bounded(main())


@pytest.mark.parametrize(("left", "flag"), [(6, 4), (0, 1)], ids=["hidden", "joined with the next"])
def test_a_frame_whose_flag_was_changed_on_its_way_costs_no_share(left, flag):
    """CURVE does not cover them: a command is passed over, and `more` joins two messages."""

    async def main():
        async with spoilt("ab", Flagged, heartbeat_s=1.0) as (p, paths):
            for path in paths:
                path.left, path.flag = left, flag
            for _, went in await asyncio.gather(*(rounds(p.peers[n], n, "ab", 10, 6) for n in "ab")):
                assert [each.missing for each in went] == [{}] * 6
            assert any(path.left < 0 for path in paths)

    bounded(main())


@pytest.mark.parametrize("losers", ["a", "ab"])
def test_a_connection_that_one_end_counted_as_gone_and_the_other_did_not_carries_shares_again(losers):
    """A call is ended and made anew before the other end saw the first one end: it greets nobody anew."""

    async def main():
        async with party("ab", heartbeat_s=5.0, idle_s=3600) as p:
            for name in losers:
                peer, link = p.peers[name], p.peers[name]._links.to({"a": "b", "b": "a"}[name])
                forgot = threading.Event()
                peer._submit(lambda link=link, forgot=forgot: (link.went_down(), forgot.set()))
                assert await asyncio.to_thread(forgot.wait, WAIT_S)
            for _, went in await asyncio.gather(*(rounds(p.peers[n], n, "ab", 10) for n in "ab")):
                assert [each.missing for each in went] == [{}, {}]

    bounded(main())


def test_a_call_that_was_cut_while_its_taker_stood_still_is_heard_again():
    """What it said before is read late. By the same routing id libzmq would call in vain, and say nothing."""

    async def main():
        async with party("ab", idle_s=3600) as p:
            a, b = p.peers["a"], p.peers["b"]
            link, call = a._links.to("b"), b._links.to("a")
            async with asyncio.timeout(WAIT_S):
                while not (link.agreed and link.routes and call.calling):  # noqa: ASYNC110 - threads call
                    await asyncio.sleep(0.001)
            busy, said, over = threading.Event(), threading.Event(), threading.Event()

            def stand_still():
                busy.set()
                assert said.wait(WAIT_S)
                arrived, _, _ = select.select([a._links._router.get(zmq.FD)], [], [], WAIT_S)
                assert arrived  # and is not read
                a._links._end_calls(link)
                assert a._links.authenticator.socket.poll(1000 * WAIT_S)  # b calls again
                over.set()

            def say():
                b._links.say(call, Header(Kind.MEMBERS), (encode([]),))
                b._links.send()
                said.set()

            a._submit(stand_still)
            await asyncio.to_thread(busy.wait, WAIT_S)
            b._submit(say)
            assert await asyncio.to_thread(over.wait, WAIT_S)
            async with asyncio.timeout(WAIT_S):
                while not call.calling:  # noqa: ASYNC110 - a's thread lets b in
                    await asyncio.sleep(0.001)
            for _, went in await asyncio.gather(*(rounds(p.peers[n], n, "ab", 10) for n in "ab")):
                assert [each.missing for each in went] == [{}, {}]

    bounded(main())


def test_a_good_bye_counts_that_is_read_after_its_connections_have_ended():
    """A busy machine: b has left before a looks at its sockets again."""

    async def main():
        async with party("ab", idle_s=3600) as p:
            a, b = p.peers["a"], p.peers["b"]
            link = a._links.to("b")
            async with asyncio.timeout(WAIT_S):
                while not (link.agreed and link.calling and link.routes):  # noqa: ASYNC110 - a's thread does
                    await asyncio.sleep(0.001)
            busy, left = threading.Event(), threading.Event()

            def stand_still():
                busy.set()
                assert left.wait(WAIT_S)
                for ended in (link.monitor, a._links._calls):
                    assert ended.poll(1000 * WAIT_S)

            a._submit(stand_still)
            await asyncio.to_thread(busy.wait, WAIT_S)
            await b.stop()
            left.set()
            async with asyncio.timeout(WAIT_S):
                while not p.of("a", "site_lost"):  # noqa: ASYNC110 - a's thread tells it
                    await asyncio.sleep(0.001)
            assert p.of("a", "site_lost") == [{"site": "b", "reason": "has left"}]

    bounded(main())


def test_a_peer_that_leaves_stays_until_its_good_bye_was_read():
    """By a busy one too, which it has not called: what comes over a DEALER ends with its connection."""

    async def main():
        async with party("a", idle_s=3600) as p:
            a, b = p.peers["a"], p.start("b", idle_s=3600)
            p.enrol(Contact("a", p.curves["a"].public, None))  # b can't call it
            assert await met(a, ["b"], WAIT_S) == ["b"]
            assert await met(b, ["a"], WAIT_S) == ["a"]
            busy, free = threading.Event(), threading.Event()

            def stand_still():
                busy.set()
                assert free.wait(WAIT_S)

            a._submit(stand_still)
            await asyncio.to_thread(busy.wait, WAIT_S)
            leaving = asyncio.create_task(b.stop())
            await asyncio.to_thread(b._thread._thread.join, 0.3)  # time enough to go without being heard
            free.set()
            async with asyncio.timeout(WAIT_S):
                while not p.of("a", "site_lost"):  # noqa: ASYNC110 - a's thread tells it
                    await asyncio.sleep(0.001)
            assert p.of("a", "site_lost") == [{"site": "b", "reason": "has left"}]
            await leaving

    bounded(main())


@contextlib.contextmanager
def standing_still(neighbors):
    """Its thread, inside of the with block."""
    busy, free = threading.Event(), threading.Event()

    def stand_still():
        busy.set()
        assert free.wait(2 * WAIT_S)

    neighbors._submit(stand_still)
    assert busy.wait(WAIT_S)
    try:
        yield
    finally:
        free.set()


def test_nobody_waits_for_a_thread_that_stands_still_only_to_give_it_work():
    async def main():
        async with party("a") as p:
            a, done = p.peers["a"], threading.Event()

            def give_work():
                for _ in range(10_000):  # no socket's buffer has room for a byte of each
                    a._submit(lambda: None)
                done.set()

            with standing_still(a):
                threading.Thread(target=give_work, daemon=True).start()
                assert await asyncio.to_thread(done.wait, WAIT_S)

    bounded(main())


@pytest.mark.parametrize("ask", ["exchange", "pull"])
def test_who_asks_a_thread_in_the_instant_in_which_it_dies_is_told_so(ask):
    """The question was taken, and nobody was there any more to read it."""

    async def main():
        async with party("a") as p:
            a = p.peers["a"]
            with standing_still(a):
                a._submit(lambda: 1 // 0)
                ways = {"exchange": (0, {}, ["b"], None, 3600.0), "pull": ("b", 3600.0)}
                asking = asyncio.create_task(getattr(a, ask)(*ways[ask]))
                await asyncio.sleep(0)
            with pytest.raises(ZeroDivisionError):
                async with asyncio.timeout(WAIT_S):
                    await asking

    bounded(main())


def test_to_cancel_is_no_error_where_the_thread_has_died_just_then():
    async def main():
        async with party("a") as p:
            a = p.peers["a"]
            with standing_still(a):
                a._submit(lambda: 1 // 0)
                asking = [asyncio.create_task(a.exchange(0, {}, ["b"], None, 3600.0)),
                          asyncio.create_task(a.pull("b", 3600.0))]  # fmt: skip
                await asyncio.sleep(0)
            a._thread._thread.join(WAIT_S)
            for each in asking:
                each.cancel()
            outcomes = await asyncio.gather(*asking, return_exceptions=True)
            assert [type(each) for each in outcomes] == [asyncio.CancelledError] * 2
            await a.stop()

    bounded(main())


class Passing(FixedRoster):
    """It believes what is passed on: each statement is the name of a peer that was revoked."""

    said: tuple[bytes, ...] = ()

    def statements(self):
        return list(self.said)

    def add(self, statement):
        self.said = (*self.said, statement)
        self.replace([each for each in self.contacts.values() if each.peer != statement.decode()])


def test_a_peer_that_leaves_since_it_was_revoked_passes_that_on_before_its_good_bye():
    """So whoever reads a revocation first, the others tell it as one."""

    async def main():
        p, rosters = Party(), {n: Passing() for n in "ab"}
        try:
            for n, roster in rosters.items():
                p.start(n, roster=roster, idle_s=3600)
            for roster in rosters.values():
                roster.replace(p.roster.contacts.values())
            assert await met(p.peers["a"], ["b"], WAIT_S) == ["b"]
            assert await met(p.peers["b"], ["a"], WAIT_S) == ["a"]
            b = p.peers["b"]
            b._submit(lambda: rosters["b"].add(b"b"))  # it has read that, and told nobody yet
            await b.stop()
            async with asyncio.timeout(WAIT_S):
                while not p.of("a", "site_lost"):  # noqa: ASYNC110 - a's thread tells it
                    await asyncio.sleep(0.001)
            assert p.of("a", "site_lost") == [{"site": "b", "reason": "its key is no longer on the roster"}]
        finally:
            for peer in p.peers.values():
                await peer.stop()

    bounded(main())


def test_a_peer_without_an_address_calls_and_is_served_over_that_call():
    async def main():
        async with party("a") as p:
            p.start("b", listen=None)
            assert await met(p.peers["b"], ["a"], 20) == ["a"]
            x = {n: vector(3 * MIB, i) for i, n in enumerate("ab")}
            mixers = {n: Sum(torch.zeros(3 * MIB)) for n in "ab"}
            a = p.peers["a"].exchange(0, {"b": share(x["a"])}, ["b"], mixers["a"], 20.0)
            b = p.peers["b"].exchange(0, {"a": share(x["b"])}, ["a"], mixers["b"], 20.0)
            for done in await asyncio.gather(a, b):
                assert not done.missing
                assert not done.kept
            assert torch.equal(mixers["a"].acc, x["b"])
            assert torch.equal(mixers["b"].acc, x["a"])

    bounded(main())


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_peers_find_each_other_by_address_by_name_and_over_ipv6(listen):
    async def main():
        p = Party()
        try:
            host = listen.rpartition(":")[0]
            for name in "ab":
                p.start(name, listen=listen)
                p.enrol(Contact(name, p.curves[name].public, f"{host}:{p.peers[name].port}"))
            assert await met(p.peers["a"], ["b"], WAIT_S) == ["b"]
        finally:
            for peer in p.peers.values():
                await peer.stop()

    bounded(main())


def test_where_a_peer_can_not_listen_it_says_so_and_what_to_change():
    async def main():
        async with party("a") as p:
            taken = f"127.0.0.1:{p.peers['a'].port}"
            with pytest.raises(ConnectError, match=f"{taken}: Address already in use. Change network.listen"):
                p.start("b", listen=taken)
            with pytest.raises(ConnectError, match=r"no address of this machine.*network\.address"):
                p.start("c", listen="heart.example:8441")

    bounded(main())


def test_when_an_exchange_is_over_libzmq_reads_the_shares_memory_no_more():
    async def main():
        async with party("ab") as p:
            x, mixers = vector(3 * MIB, 1), {n: Sum(torch.zeros(3 * MIB)) for n in "ab"}
            both = (p.peers[n].exchange(0, {o: share(x)}, [o], mixers[n], WAIT_S) for n, o in ("ab", "ba"))
            for done in await asyncio.gather(*both):
                assert done.given
            links = [link for peer in p.peers.values() for link in peer._links]
            assert any(link.lent for link in links)  # it was read where it lies
            async with asyncio.timeout(WAIT_S):
                while any(link.lends() for link in links):  # noqa: ASYNC110 - libzmq's threads let go of it
                    await asyncio.sleep(0.001)

    bounded(main())


def test_a_late_joiner_pulls_the_state_and_letters_arrive():
    async def main():
        async with party("ab") as p:
            state = vector(2 * MIB + 3, 7)
            assert await p.peers["b"].pull("a", 10.0) is None  # nothing is published yet
            p.peers["a"].publish(5, share(state))
            letter = await p.peers["b"].pull("a", 10.0)
            assert letter.round == 5
            assert torch.equal(torch.frombuffer(letter.share.payload, dtype=torch.float32), state)
            p.peers["a"].post(6, {"b": share(state, 0.5)})
            async with asyncio.timeout(10.0):
                while not (letters := p.peers["b"].take()):  # noqa: ASYNC110 - another thread receives
                    await asyncio.sleep(0.005)
            (letter,) = letters
            assert (letter.peer, letter.round, letter.share.weight) == ("a", 6, 0.5)
            assert torch.equal(torch.frombuffer(letter.share.payload, dtype=torch.float32), state)
            assert p.peers["b"].take() == []

    bounded(main())


def test_from_one_peer_that_it_knows_a_newcomer_meets_all(tmp_path):
    init(tmp_path)
    curves = {n: Curve.new() for n in "abc"}
    signers, verifier = {}, None
    for name in "abc":
        credentials = Credentials.load(issue(tmp_path, "site", name))
        signers[name] = Signer.of(credentials)
        verifier = Verifier(credentials.root, "fedtrain")
    rosters = {n: Roster(tmp_path / f"roster-{n}", verifier, "fedtrain") for n in "abc"}

    async def main():
        p, entries = Party(), {}
        try:
            for n in "abc":
                p.start(n, curve=curves[n], roster=rosters[n])
                claim = Claim(
                    peer=n,
                    federation="fedtrain",
                    key=curves[n].public,
                    address=f"127.0.0.1:{p.peers[n].port}",
                )
                entries[n] = enrol(signers[n], claim).encode()
                rosters[n].add(entries[n])
            rosters["a"].add(entries["b"])
            rosters["b"].add(entries["a"])
            assert await met(p.peers["a"], ["b"], 20) == ["b"]
            rosters["c"].add(entries["a"])  # c knows only a,
            rosters["a"].add(entries["c"])  # and a has been told of c
            assert await met(p.peers["c"], ["a"], 20) == ["a"]
            assert await met(p.peers["b"], ["c"], 20) == ["c"]
            assert await met(p.peers["c"], ["a", "b"], 20) == ["a", "b"]
            assert [r.peers() for r in rosters.values()] == [["a", "b", "c"]] * 3
        finally:
            for peer in p.peers.values():
                await peer.stop()

    bounded(main())
