"""Circles: few connections each, the same at both ends, and whole with many gone; views agree over them."""

import random

import pytest

from fedtrain.errors import WireError
from fedtrain.topology import names
from fedtrain.transport.membership import News, Probe
from fedtrain.transport.overlay import FEW, TURN, Overlay, in_turn, turns_of
from fedtrain.wire.codec import encode
from fedtrain.wire.gossip import Kind
from tests.test_membership import World, agree


def reached(overlay, start, here):
    seen, todo = {start}, [start]
    while todo:
        new = overlay.circle(todo.pop()) & here - seen
        seen |= new
        todo += new
    return seen


@pytest.mark.parametrize("n", [1, 2, 3, FEW, FEW + 1, 40, 64, 256, 1024])
def test_a_circle_is_everybody_among_few_and_a_few_among_many(n):
    overlay, peers = Overlay(names(n)), set(names(n))
    for peer in peers:
        circle = overlay.circle(peer)
        assert peer not in circle
        assert all(peer in overlay.circle(other) for other in circle)
        assert circle == peers - {peer} if n <= FEW else 2 <= len(circle) <= 10
    assert overlay.circle("who") == (peers if n <= FEW else set())


@pytest.mark.parametrize("seed", range(20))
def test_with_a_third_gone_the_others_still_reach_each_other(seed):
    here = set(random.Random(seed).sample(names(256), 170))
    assert reached(Overlay(names(256)), min(here), here) == here


def test_a_newcomer_changes_the_circles_of_its_neighbours_alone():
    before, after = Overlay(names(200)), Overlay([*names(200), "new"])
    moved = [peer for peer in names(200) if before.circle(peer) != after.circle(peer)]
    assert set(moved) == after.circle("new")


class Sparse(World):
    """Views whose peers are connected with their circles, and dial others when there is something to say."""

    def start(self, name):
        super().start(name, near=Overlay(self.names).circle(name))


def test_views_over_circles_agree_find_the_dead_and_learn_who_left():
    world = Sparse(24, 1)
    world.run(10.0)
    agree(world, world.names)
    for gone in ("p5", "p6", "p13"):
        del world.up[gone]
    world.run(25.0)
    agree(world, sorted(world.up))
    world.up["p7"].leave(world.now)
    world.run(0.01)
    del world.up["p7"]
    world.run(8.0)
    agree(world, sorted(world.up))
    world.start("p13")
    world.run(20.0)
    agree(world, sorted(world.up))
    assert max(len(linked) for linked in world.linked.values()) <= 20


@pytest.mark.parametrize("n", [2, 3, 5, FEW, FEW + 1, 18, 64, 65, 1024])
def test_in_turns_each_meets_all_others_once_a_few_at_a_time_and_both_in_the_same_turn(n):
    peers, turns = names(n), turns_of(n)
    order = {peer: in_turn(peer, peers, turns) for peer in peers[:70]}
    for peer, parts in order.items():
        assert len(parts) == turns == (1 if n <= FEW else len(parts))
        assert sorted(other for part in parts for other in part) == [
            other for other in peers if other != peer
        ]
        assert all(len(part) <= max(FEW - 1, TURN) for part in parts)
        for turn, part in enumerate(parts):
            assert all(peer in order[other][turn] for other in part & order.keys())


def test_a_peer_whose_circle_has_left_is_connected_with_others_who_are_here():
    world = Sparse(20, 7)
    world.run(3.0)
    agree(world, world.names)
    circle = Overlay(world.names).circle("p3")
    for gone in circle:
        world.up[gone].leave(world.now)
    world.run(0.01)
    for gone in circle:
        del world.up[gone]
    world.run(8.0)
    agree(world, sorted(world.up))
    assert len(world.up["p3"].near & world.up.keys()) >= 3


def test_when_peers_would_end_all_learn_it_and_nobody_can_say_it_for_another():
    world = Sparse(18, 3)
    world.run(3.0)
    world.up["p4"].end_after(7)
    world.up["p9"].end_after(9)
    world.run(3.0)
    assert all(member.ends() == {"p4": 7, "p9": 9} for member in world.up.values())
    told = world.up["p1"].members["p4"]
    forged = News("p4", told.status, told.incarnation + 1, told.proof, 1)
    with pytest.raises(WireError, match="that it has not signed"):
        world.up["p2"].receive("p1", Kind.PING, encode(Probe([forged])), world.now)
    assert world.up["p2"].ends()["p4"] == 7
    world.start("p9")  # it begins anew, and has not said so yet
    world.run(4.0)
    assert world.up["p9"].ends() == {"p4": 7}
