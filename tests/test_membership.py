"""SWIM on a virtual clock: deaths are found, the slow are not killed, views agree."""

import contextlib
import hashlib
import heapq
import itertools
import random

import pytest

from fedtrain.errors import WireError
from fedtrain.transport.membership import Liveness, Membership, News, Probe, Voice, statement
from fedtrain.wire.codec import encode
from fedtrain.wire.gossip import Kind


def signed(name, message):
    return hashlib.sha256(name.encode() + message).digest()  # nobody guesses it here


def voice(name):
    return Voice(lambda message: signed(name, message), lambda peer, message, by: by == signed(peer, message))


def view_of(name, now, **options):
    return Membership(name, voice(name), now=now, draw=random.Random(f"{name}/{now}"), **options)


def news_of(name, status, incarnation, proof=None):
    left = status is Liveness.LEFT
    return News(name, status, incarnation, proof or signed(name, statement(b"", name, incarnation, left)))


class World:
    """n views that send each other messages; some are lost, all take a while."""

    def __init__(self, n, seed, drop=0.0, delay_s=0.05):
        self.now, self.draw, self.drop, self.delay_s = 0.0, random.Random(seed), drop, delay_s
        self.names = [f"p{i}" for i in range(n)]
        self.up, self.due, self.number = {}, [], itertools.count()
        self.cut = lambda a, b: False
        self.deaths, self.linked = [], {}
        for name in self.names:
            self.start(name)
        self.run(5.0)

    def start(self, name, near=None):
        """`near`: with whom it is connected from the start; None: with all."""
        self.up[name] = member = view_of(name, self.now)
        self.linked[name] = set()
        member.add(self.names, self.now)
        for other in self.names:
            if other != name and other in self.up:
                self.up[other].add([name], self.now)
                self.linked[other].discard(name)
                if near is None or other in near:
                    self.meet(name, other)

    def meet(self, one, other):
        for a, b in ((one, other), (other, one)):
            self.linked[a].add(b)
            self.up[a].met(b)

    def run(self, seconds):
        """A member ticks when its time has come, or something for it: in between a tick does nothing."""
        until, wakes = self.now + seconds, {}
        while self.now < until:
            for name, member in list(self.up.items()):
                if wakes.get(name, self.now) <= self.now or member.outbox:
                    before = set(member.alive())
                    member.tick(self.now)
                    self.deaths += [(self.now, name, gone) for gone in before - set(member.alive())]
                    while member.outbox:
                        self.send(name, *member.outbox.popleft())
                    wakes[name] = member.wake_s()
            steps = [wakes[name] for name in self.up if name in wakes] + [at for at, *_ in self.due[:1]]
            self.now = max(self.now, min([until, *steps]))
            while self.due and self.due[0][0] <= self.now:
                _, _, name, to, kind, body = heapq.heappop(self.due)
                if to in self.up:
                    self.up[to].receive(name, kind, body, self.now)
                    wakes.pop(to, None)

    def send(self, name, to, kind, body):
        if to not in self.linked[name]:
            if to in self.up and not self.cut(name, to):
                self.meet(name, to)
        elif self.draw.random() >= self.drop and not self.cut(name, to):
            at = self.now + self.draw.uniform(0, self.delay_s)
            heapq.heappush(self.due, (at, next(self.number), name, to, kind, body))

    def views(self):
        return {name: member.alive() for name, member in self.up.items()}


def agree(world, names):
    assert world.views() == dict.fromkeys(world.up, sorted(names))
    assert len({member.epoch for member in world.up.values()}) == 1


@pytest.mark.parametrize("n", [2, 3, 8, 25])
def test_all_see_all_and_give_their_view_the_same_number(n):
    agree(World(n, 0), [f"p{i}" for i in range(n)])


@pytest.mark.parametrize("seed", range(10))
def test_the_dead_are_found_by_all_within_the_time_of_a_probe_of_everybody_and_a_suspicion(seed):
    world = World(8, seed, drop=0.1)
    for name in ("p2", "p5"):
        del world.up[name]
    world.run(8 * 1.0 + 5.0 + 8.0)
    agree(world, sorted(world.up))


@pytest.mark.parametrize("seed", range(10))
def test_nobody_dies_of_lost_messages(seed):
    world = World(8, seed, drop=0.25)
    world.run(120.0)
    assert world.deaths == []
    agree(world, world.names)


def test_a_peer_that_one_other_cannot_reach_is_kept_alive_by_those_who_can():
    world = World(6, 3)
    world.cut = lambda a, b: {a, b} == {"p0", "p1"}
    world.run(60.0)
    assert world.deaths == []
    agree(world, world.names)


def test_who_comes_back_under_its_name_is_alive_again_for_all():
    world = World(6, 4)
    del world.up["p3"]
    world.run(30.0)
    agree(world, sorted(world.up))
    world.start("p3")
    world.run(15.0)
    agree(world, world.names)
    assert world.up["p3"].incarnation > 0  # it had to refute its death


def test_who_leaves_is_gone_at_once_and_is_not_suspected_first():
    world = World(5, 5)
    world.up["p1"].leave(world.now)
    world.run(0.01)
    del world.up["p1"]
    world.run(1.0)
    agree(world, sorted(world.up))


def test_each_side_of_a_partition_goes_on_the_smaller_one_knows_that_it_is_degraded_and_both_meet_again():
    world = World(7, 6)
    small = {"p0", "p1", "p2"}
    world.cut = lambda a, b: (a in small) != (b in small)
    world.run(40.0)
    for name, view in world.views().items():
        assert set(view) == (small if name in small else set(world.names) - small)
        assert world.up[name].degraded() == (name in small)
    world.cut = lambda a, b: False
    for a, b in itertools.permutations(world.names, 2):  # connections are made again
        world.up[a].met(b)
    world.run(30.0)
    agree(world, world.names)


def test_news_of_somebody_who_is_not_on_the_roster_is_ignored():
    me = view_of("a", 0.0)
    me.add(["b"], 0.0)
    news = [news_of("b", Liveness.ALIVE, 0), news_of("x", Liveness.ALIVE, 3)]
    me.receive("b", Kind.PING, encode(Probe(news)), 0.0)
    assert me.alive() == ["a", "b"]


@pytest.mark.parametrize(
    "body", [b"", b"\x93", encode(Probe([news_of("b", Liveness.ALIVE, 1 << 54)])),
             encode(Probe([news_of("b", Liveness.ALIVE, 1, b"p" * 200)])),
             encode(Probe([news_of("b", Liveness.ALIVE, 1)] * 65))],
)  # fmt: skip
def test_s21_a_malformed_probe_is_refused(body):
    me = view_of("a", 0.0)
    me.add(["b"], 0.0)
    with pytest.raises(WireError):
        me.receive("b", Kind.PING, body, 0.0)


# --- liars


def met(*names):
    """Views that have heard of each other, the first one's to be lied to."""
    world = World(0, 0)
    world.names = list(names)
    for name in names:
        world.start(name)
    world.run(1.0)
    return world


@pytest.mark.parametrize("status", list(Liveness))
@pytest.mark.parametrize("incarnation", [1, 7, (1 << 53) - 1])
def test_s05_nobody_but_a_peer_itself_gives_it_an_incarnation(status, incarnation):
    me = met("a", "b", "c").up["a"]
    for proof in (b"", signed("b", statement(b"", "c", incarnation, left=status is Liveness.LEFT)),
                  signed("c", statement(b"another run", "c", incarnation, left=status is Liveness.LEFT)),
                  signed("c", statement(b"", "c", incarnation, left=status is not Liveness.LEFT)),
                  ):  # fmt: skip
        with pytest.raises(WireError, match="c that it has not signed"):
            me.receive("b", Kind.PING, encode(Probe([News("c", status, incarnation, proof)])), 1.0)
    assert me.alive() == ["a", "b", "c"]


@pytest.mark.parametrize("status", [Liveness.SUSPECT, Liveness.DEAD])
def test_s05_a_peer_that_another_calls_dead_is_pinged_and_refutes_it(status):
    world = met("a", "b", "c")
    for _ in range(20):
        lie = news_of("c", status, world.up["c"].incarnation)
        world.up["a"].receive("b", Kind.PING, encode(Probe([lie])), world.now)
        world.run(1.0)
        assert world.up["a"].alive() == ["a", "b", "c"]
        assert world.up["a"].members["c"].status is Liveness.ALIVE
    assert world.up["c"].incarnation >= 15
    named, what = world.up["a"].reports[0]
    assert named == "b"
    assert "called others dead 8 times who answered" in what


def test_s05_who_repeats_a_refuted_doubt_is_named_and_changes_nothing():
    world = met("a", "b", "c")
    lie = encode(Probe([news_of("c", Liveness.DEAD, 0)]))
    world.up["a"].receive("b", Kind.PING, lie, world.now)
    world.run(3.0)
    assert world.up["a"].members["c"].incarnation == 1
    for _ in range(30):
        world.up["a"].receive("b", Kind.PING, lie, world.now)
        world.run(0.5)
    assert world.up["a"].members["c"].incarnation == 1  # it was not even asked again
    assert [who for who, _ in world.up["a"].reports] == ["b", "b"]  # at 8 times and at 16


def test_s05_what_a_peer_signed_in_a_former_life_puts_nobody_out():
    world = met("a", "b", "c")
    left = encode(Probe([news_of("c", Liveness.LEFT, 40)]))  # c's own, of a process whose clock was ahead
    world.up["a"].receive("b", Kind.PING, left, world.now)
    world.run(3.0)
    assert world.up["c"].incarnation == 41
    agree(world, world.names)


def test_s05_a_flood_of_doubts_makes_a_peer_sign_no_more_than_a_few_times_in_a_period():
    world = met("a", "b", "c")
    for _ in range(500):
        lie = encode(Probe([news_of("c", Liveness.SUSPECT, world.up["c"].incarnation)]))
        world.up["c"].receive("b", Kind.PING, lie, world.now)
        world.now += 0.002
    assert world.up["c"].incarnation <= 9


def lies(world, liar, draw):
    """What one of the roster may say: its own signatures, those it was given, and any word about others."""
    known = world.up[liar].members
    for peer in draw.sample(sorted(known), min(4, len(known))):
        status = draw.choice(list(Liveness))
        incarnation = max(0, known[peer].incarnation) + draw.choice([-1, 0, 0, 0, 1, 1 << 40])
        proof = draw.choice([known[peer].proof, b"", signed(liar, b"anything")])
        yield News(peer, status, max(0, incarnation), proof)


@pytest.mark.parametrize("seed", range(20))
def test_f_liars_cannot_remove_an_honest_pairs_edge(seed):
    draw = random.Random(seed)
    n = draw.randrange(4, 10)
    world = World(n, seed, drop=draw.choice([0.0, 0.1]))
    liars = set(draw.sample(world.names, draw.randrange(1, n - 2)))
    honest = [name for name in world.names if name not in liars]
    world.cut = lambda a, b: a in liars and draw.random() < 0.7  # they help nobody
    for _ in range(300):
        world.run(0.1)
        liar, victim = draw.choice(sorted(liars)), draw.choice(honest)
        probe = Probe(list(lies(world, liar, draw)), draw.choice(["", *honest]))
        with contextlib.suppress(WireError):  # it is counted, and soon cut off, by the thread
            world.up[victim].receive(
                liar, draw.choice([Kind.PING, Kind.PONG, Kind.SUSPECT]), encode(probe), world.now
            )
        for name in honest:
            assert {*honest} <= {*world.up[name].alive()}, (world.now, name, liars)
    world.cut = lambda a, b: False
    world.run(15.0)
    for name in honest:
        assert {*honest} <= {*world.up[name].alive()}
