"""SWIM on a virtual clock: deaths are found, the slow are not killed, views agree."""

import heapq
import itertools
import random

import pytest

from fedtrain.errors import WireError
from fedtrain.transport.membership import Liveness, Membership, News, Probe
from fedtrain.wire.codec import encode
from fedtrain.wire.gossip import Kind


class World:
    """n views that send each other messages; some are lost, all take a while."""

    def __init__(self, n, seed, drop=0.0, delay_s=0.05):
        self.now, self.draw, self.drop, self.delay_s = 0.0, random.Random(seed), drop, delay_s
        self.names = [f"p{i}" for i in range(n)]
        self.up, self.due, self.number = {}, [], itertools.count()
        self.cut = lambda a, b: False
        self.deaths = []
        for name in self.names:
            self.start(name)
        self.run(5.0)

    def start(self, name):
        self.up[name] = member = Membership(name, now=self.now, draw=random.Random(f"{name}/{self.now}"))
        member.add(self.names, self.now)
        for other in self.names:
            if other != name and other in self.up:
                member.confirm(other, self.now)
                self.up[other].confirm(name, self.now)

    def run(self, seconds):
        until = self.now + seconds
        while self.now < until:
            for name, member in list(self.up.items()):
                before = set(member.alive())
                member.tick(self.now)
                self.deaths += [(self.now, name, gone) for gone in before - set(member.alive())]
                while member.outbox:
                    to, kind, body = member.outbox.popleft()
                    if self.draw.random() >= self.drop and not self.cut(name, to):
                        at = self.now + self.draw.uniform(0, self.delay_s)
                        heapq.heappush(self.due, (at, next(self.number), name, to, kind, body))
            steps = [m.wake_s() for m in self.up.values()] + [at for at, *_ in self.due[:1]]
            self.now = max(self.now, min([until, *steps]))
            while self.due and self.due[0][0] <= self.now:
                _, _, name, to, kind, body = heapq.heappop(self.due)
                if to in self.up:
                    self.up[to].receive(name, kind, body, self.now)

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
    world.up["p1"].leave()
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
        world.up[a].confirm(b, world.now)
    world.run(30.0)
    agree(world, world.names)


def test_news_of_somebody_who_is_not_on_the_roster_is_ignored():
    me = Membership("a", now=0.0, draw=random.Random(0))
    me.add(["b"], 0.0)
    me.receive("b", Kind.PING, encode(Probe([News("x", Liveness.ALIVE, 3)])), 0.0)
    assert me.alive() == ["a", "b"]


@pytest.mark.parametrize(
    "body", [b"", b"\x93", encode(Probe([News("b", Liveness.ALIVE, 1 << 50)])),
             encode(Probe([News("b", Liveness.ALIVE, 1)] * 65))],
)  # fmt: skip
def test_s21_a_malformed_probe_is_refused(body):
    me = Membership("a", now=0.0, draw=random.Random(0))
    me.add(["b"], 0.0)
    with pytest.raises(WireError):
        me.receive("b", Kind.PING, body, 0.0)
