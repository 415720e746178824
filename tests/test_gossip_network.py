"""The graph seam in memory: shares arrive whole, once, in order; under seeded faults nothing hangs."""

import asyncio
import random
import struct

import pytest
import torch

from fedtrain.errors import BadUpdate
from fedtrain.exchange import Share
from fedtrain.transport import courier, receiver
from fedtrain.transport.memory import Crashed, Faults, LocalNetwork
from fedtrain.transport.shares import Limits
from fedtrain.wire.gossip import Header, Kind
from tests.gossip import MIB, Sum, share, vector
from tests.limits import bounded


async def one_round(network, name, x, others, round=0, deadline_s=60.0, late_s=0.0):
    async with network.join(name) as neighbors:
        if late_s:
            await neighbors.sleep(late_s)
        mixer = Sum(x * 0.5)
        shares = {peer: share(x, 0.25) for peer in others}
        done = await neighbors.exchange(round, shares, others, mixer, deadline_s)
        await neighbors.sleep(1000.0)  # stay, to answer those who are slower
        return mixer, done


async def all_to_all(network, numel, **late):
    names = network.names
    xs = {name: vector(numel, i) for i, name in enumerate(names)}
    rounds = [
        one_round(network, n, xs[n], [o for o in names if o != n], late_s=late.get(n, 0.0)) for n in names
    ]
    return xs, dict(zip(names, await asyncio.gather(*rounds), strict=True))


@pytest.mark.parametrize("numel", [0, 1, 7, MIB // 4, MIB // 4 + 1, 3 * MIB])
def test_shares_of_any_size_arrive_whole_and_are_mixed_with_their_weight(numel):
    xs, got = bounded(all_to_all(LocalNetwork("abc"), numel))
    for name, (mixer, done) in got.items():
        expected = xs[name] * 0.5
        for other in sorted(set("abc") - {name}):
            expected += 0.25 * xs[other]
        assert torch.equal(mixer.acc, expected)
        assert done.arrived == done.given == set("abc") - {name}
        assert not done.missing
        assert not done.kept


@pytest.mark.parametrize("seed", range(5))
def test_whoever_comes_first_chunks_are_mixed_in_the_peers_order(seed):
    late = dict(zip("abcd", random.Random(seed).sample([0.0, 1.0, 2.0, 3.0], 4), strict=True))
    network = LocalNetwork("abcd", faults=Faults(delay_s=0.5), seed=seed, limits=Limits(window=3))
    _, calm = bounded(all_to_all(LocalNetwork("abcd"), 5 * MIB // 4 + 3))
    _, got = bounded(all_to_all(network, 5 * MIB // 4 + 3, **late))
    for name, (mixer, _) in got.items():
        for c in range(6):
            assert [p for i, p in mixer.order if i == c] == sorted(set("abcd") - {name})
        assert torch.equal(mixer.acc, calm[name][0].acc)


def test_a_share_of_the_wrong_size_is_refused_before_a_byte_of_it_is_mixed():
    network = LocalNetwork("ab")

    async def main():
        a = one_round(network, "a", vector(10, 1), ["b"])
        b = one_round(network, "b", vector(5 * MIB, 1), ["a"])
        return await asyncio.gather(a, b)

    (mixer, a), (_, b) = bounded(main())
    assert a.missing == {"b": "refused: 20971520 bytes, 40 are due"}
    assert "40 bytes, 20971520 are due" in a.kept["b"]
    assert b.missing.keys() == b.kept.keys() == {"a"}
    assert mixer.ended == {}


def test_a_share_of_a_few_chunks_is_one_message_and_one_answer():
    giver, taker, mixer = courier.Courier(), courier.Courier(), Sum(torch.zeros(MIB))
    giver.begin(0, {"b": share(vector(MIB, 0))}, [], mixer, 60.0, 0.0)
    taker.begin(0, {}, ["a"], mixer, 60.0, 0.0)
    ((_, header, parts),) = giver.outbox
    taker.receive("a", header, parts, 0.0)
    ((_, answer, _),) = taker.outbox
    assert (header.kind, answer.kind) == (Kind.OFFER, Kind.DONE)
    assert torch.equal(mixer.acc, vector(MIB, 0))


def test_a_giver_that_was_started_again_believes_that_its_share_was_had_before():
    giver = courier.Courier()
    giver.begin(0, {"b": share(vector(5 * MIB // 4, 0))}, [], Sum(torch.zeros(1)), 60.0, 0.0)
    ((_, header, _),) = giver.outbox
    giver.receive("b", Header(Kind.DONE, 0, header.transfer), (), 0.0)
    assert giver.finished.given == {"b"}


def test_first_chunks_that_come_too_early_and_find_no_room_are_asked_for_again(monkeypatch):
    _, calm = bounded(all_to_all(LocalNetwork("abc"), 5 * MIB // 4))
    monkeypatch.setattr(receiver, "EARLY_BYTES", 5 << 20)  # for the chunks of one, and not of two
    network = LocalNetwork("abc")
    _, got = bounded(all_to_all(network, 5 * MIB // 4, c=3.0))
    for name, (mixer, done) in got.items():
        assert done.arrived == done.given == set("abc") - {name}
        assert torch.equal(mixer.acc, calm[name][0].acc)


# --- push-sum, in exact numbers, under everything that can go wrong

PEERS, ROUNDS, SIZE, DEADLINE_S = 5, 6, 24, 30.0
TINY = Limits(chunk_bytes=64, window=2)  # 24 float64 make three chunks


class Staged:
    """Whole shares, by peer."""

    def __init__(self):
        self.coming, self.counted = {}, {}

    def begin(self, offer):
        if offer.nbytes != 8 * SIZE:
            raise BadUpdate(f"{offer.nbytes} bytes")
        self.coming[offer.peer] = (bytearray(offer.nbytes), offer)

    def mix(self, peer, offset, chunk):
        self.coming[peer][0][offset : offset + len(chunk)] = chunk

    def end(self, peer, nbytes):
        data, offer = self.coming.pop(peer)
        if nbytes == 8 * SIZE:
            assert peer not in self.counted
            (mass,) = struct.unpack("<d", offer.note)
            self.counted[peer] = (
                torch.frombuffer(data, dtype=torch.float64) * offer.weight,
                mass * offer.weight,
            )


class PushSum:
    """The reference: x and mass move together, a quarter to each of at most three out-neighbours. All numbers
    are sums of few powers of two, so that nothing is ever rounded."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.names = [f"p{i}" for i in range(PEERS)]
        self.state = {
            n: (torch.full((SIZE,), float(2**i), dtype=torch.float64), 1.0) for i, n in enumerate(self.names)
        }
        self.total = sum(x for x, _ in self.state.values())
        self.mass_unsure, self.waits, self.outcomes, self.counts = 0.0, [], {}, set()
        self.seed = seed

    def out(self, name, t):
        draw = random.Random(f"{self.seed}/{t}/{name}")
        others = [n for n in self.names if n != name]
        return draw.sample(others, draw.randint(1, 3))

    async def peer(self, network, name):
        async with network.join(name) as neighbors:
            for t in range(ROUNDS):
                neighbors.announce(t)
                await neighbors.sleep(self.draw.uniform(0, 3))
                await self.round(neighbors, name, t)
            await neighbors.sleep(300.0)

    async def round(self, neighbors, name, t):
        x, mass = self.state[name]
        out, mixer = self.out(name, t), Staged()
        expected = [n for n in self.names if n != name and name in self.out(n, t)]
        payload = memoryview(x.numpy().data).cast("B")
        given = Share(payload, 0.25, note=struct.pack("<d", mass))
        try:
            done = await neighbors.exchange(t, dict.fromkeys(out, given), expected, mixer, DEADLINE_S)
        except Crashed:
            self.taken(name, t, mixer)
            raise
        self.taken(name, t, mixer)
        self.waits.append(done.waited_s)
        assert set(mixer.counted) == done.arrived
        assert done.arrived | done.missing.keys() == set(expected)
        for outcome, peers in (("given", done.given), ("kept", done.kept), ("unsure", done.unsure)):
            self.outcomes |= {(name, peer, t): outcome for peer in peers}
        keep = 1 - 0.25 * (len(done.given) + len(done.unsure))
        got = mixer.counted.values()
        self.state[name] = (x * keep + sum(v for v, _ in got), mass * keep + sum(m for _, m in got))

    def taken(self, name, t, mixer):
        self.counts |= {(peer, name, t) for peer in mixer.counted}

    def check(self, faults, network):
        """No share counts twice, or against its giver's knowledge; nothing is lost but what is said to be."""
        crashed = set(faults.crash_s)
        for (giver, taker, t), outcome in self.outcomes.items():
            counted = (giver, taker, t) in self.counts
            if outcome == "kept":
                assert not counted, (giver, taker, t)
            if outcome == "given" and taker not in crashed:
                assert counted, (giver, taker, t)
        assert len(self.outcomes) <= PEERS * ROUNDS * 3
        lost = {k for k, o in self.outcomes.items() if o == "unsure" and k not in self.counts}
        if not crashed and not lost:
            assert torch.equal(sum(x for x, _ in self.state.values()), self.total)
            assert sum(m for _, m in self.state.values()) == PEERS
        return lost


def one_run(seed, faults):
    work, network = PushSum(seed), None

    async def main():
        nonlocal network
        network = LocalNetwork(work.names, faults=faults, seed=seed, limits=TINY)
        done = await asyncio.gather(*(work.peer(network, n) for n in work.names), return_exceptions=True)
        for name, error in zip(work.names, done, strict=True):
            assert error is None or (isinstance(error, Crashed) and name in faults.crash_s), repr(error)

    bounded(main())
    return work, network


QUARTERS = (60, 295, 530, 765)  # of the seeds up to 1000


def faults_of(seed):
    draw = random.Random(seed)
    crash = {f"p{i}": draw.uniform(0, 25) for i in draw.sample(range(PEERS), draw.choice([0, 0, 1, 2]))}
    return Faults(
        drop=draw.uniform(0, 0.2), duplicate=draw.uniform(0, 0.3), delay_s=draw.uniform(0, 1.0), crash_s=crash
    )


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    "seeds",
    [[*range(60), 95], *(pytest.param(range(at, at + 235), marks=pytest.mark.soak) for at in QUARTERS)],
    ids=["some", *(f"from-{at}" for at in QUARTERS)],
)
def test_seeded_runs_with_drop_duplicate_reorder_delay_and_crash_conserve_mass_and_never_hang(seeds):
    hit, lost = dict.fromkeys(("drop", "duplicate", "crash"), 0), 0
    for seed in seeds:  # 95: a whole share waits behind another past its deadline
        faults = faults_of(seed)
        work, network = one_run(seed, faults)
        lost += len(work.check(faults, network))
        assert max(work.waits) <= 2 * DEADLINE_S + 1
        assert network.refused == []
        hit["drop"] += network.lost
        hit["duplicate"] += network.doubled
        hit["crash"] += len(faults.crash_s)
    assert min(hit.values()) >= len(seeds) // 2, hit  # the faults did happen
    assert lost < len(seeds)  # a few a run: those that were given in the moment of a crash


def test_a_partition_costs_one_deadline_and_is_forgotten_when_it_is_over():
    def cut(giver, taker, now):
        return 5 < now < 18 and (giver in "ab") != (taker in "ab")

    async def one(network, name):
        others, went = [n for n in "abcd" if n != name], []
        async with network.join(name) as neighbors:
            for t in range(8):
                neighbors.announce(t)
                await neighbors.sleep(2.0)
                mixer = Sum(torch.zeros(100))
                shares = dict.fromkeys(others, share(vector(100, t)))
                went.append((t, await neighbors.exchange(t, shares, others, mixer, 10.0)))
            await neighbors.sleep(100.0)
        return went

    async def main():
        network = LocalNetwork("abcd", faults=Faults(delay_s=0.01, cut=cut))
        return await asyncio.gather(*(one(network, n) for n in "abcd"))

    for name, went in zip("abcd", bounded(main()), strict=True):
        near = next(side for side in ("ab", "cd") if name in side)
        assert any(done.arrived == set(near) - {name} for _, done in went)
        assert sum(done.waited_s for _, done in went) <= 11
        assert went[-1][1].arrived == went[-1][1].given == set("abcd") - {name}


def test_who_has_waited_for_a_slow_peer_is_not_late_for_its_other_neighbour():
    """In a line a, b, c: a trains 9 s of the 10 that it has, b waits for it and then trains 5 s, and c is
    a round ahead. Its deadline counts from when b announced the round: it waits longer and misses nobody."""
    near = {"a": ["b"], "b": ["a", "c"], "c": ["b"]}
    train_s = {("a", 0): 9.0, ("b", 1): 5.0}

    async def one(network, name):
        went = []
        async with network.join(name) as neighbors:
            for t in range(4):
                neighbors.announce(t)
                await neighbors.sleep(train_s.get((name, t), 0.0))
                shares = dict.fromkeys(near[name], share(vector(100, t)))
                mixer = Sum(torch.zeros(100))
                went.append(await neighbors.exchange(t, shares, near[name], mixer, 10.0))
            await neighbors.sleep(1000.0)
        return went

    async def main():
        network = LocalNetwork("abc")
        return await asyncio.gather(*(one(network, n) for n in "abc"))

    for name, went in zip("abc", bounded(main()), strict=True):
        assert [done.missing for done in went] == [{}] * 4, name
        assert all(done.given == set(near[name]) for done in went)
    assert went[1].waited_s > 10.0  # of c


def test_a_peer_that_comes_back_pulls_the_state_and_goes_on_with_the_others():
    async def stays(network, name):
        async with network.join(name) as neighbors:
            for t in range(10):
                neighbors.announce(t)
                neighbors.publish(t, share(vector(100, t)))
                await neighbors.sleep(2.0)
                other = "b" if name == "a" else "a"
                shares = dict.fromkeys((other, "c"), share(vector(100, t)))
                done = await neighbors.exchange(t, shares, [other, "c"], Sum(torch.zeros(100)), 5.0)
            await neighbors.sleep(100.0)
        return done

    async def returns(network):
        with pytest.raises(Crashed):
            async with network.join("c") as neighbors:
                await neighbors.sleep(100.0)
        async with network.join("a-clock") as clock:
            await clock.sleep(8.0)
        async with network.join("c") as neighbors:
            letter = await neighbors.pull("a", 10.0)
            assert letter.round > 0
            got = torch.frombuffer(letter.share.payload, dtype=torch.float32)
            assert torch.equal(got, vector(100, letter.round))
            for t in range(letter.round + 1, 10):
                await neighbors.sleep(2.0)
                shares = dict.fromkeys("ab", share(got))
                done = await neighbors.exchange(t, shares, ["a", "b"], Sum(torch.zeros(100)), 5.0)
            await neighbors.sleep(50.0)
        return done

    async def main():
        network = LocalNetwork(["a", "b", "c", "a-clock"], faults=Faults(crash_s={"c": 3.0}, delay_s=0.01))
        return await asyncio.gather(stays(network, "a"), stays(network, "b"), returns(network))

    a, b, c = bounded(main())
    assert c.arrived == {"a", "b"}
    assert "c" in a.arrived
    assert "c" in b.arrived


def test_letters_do_not_wait_and_the_latest_wins():
    async def writes(network):
        async with network.join("a") as neighbors:
            for t in range(20):
                neighbors.post(t, {"b": share(vector(100, t))})
                await neighbors.sleep(1.0)
            await neighbors.sleep(60.0)

    async def reads(network):
        rounds = []
        async with network.join("b") as neighbors:
            while not rounds or rounds[-1] < 19:
                while not (letters := neighbors.take()):
                    await neighbors.sleep(0.1)
                (letter,) = letters
                got = torch.frombuffer(letter.share.payload, dtype=torch.float32)
                assert torch.equal(got, vector(100, letter.round))
                rounds.append(letter.round)
        return rounds

    async def main():
        network = LocalNetwork("ab", faults=Faults(delay_s=0.3, duplicate=0.3, drop=0.1), seed=3, limits=TINY)
        return (await asyncio.gather(writes(network), reads(network)))[1]

    rounds = bounded(main())
    assert rounds == sorted(set(rounds))
    assert len(rounds) > 3
