"""Frames that a third peer forwards: it reads, alters, repeats and turns around nothing of them."""

import pytest

from fedtrain.errors import WireError
from fedtrain.transport.admission import Curve
from fedtrain.transport.sealing import DATA, URGENT, Sealer

CURVES = {name: Curve.new() for name in "abm"}


def sealer(me, peer, run=b"run", curve=None):
    return Sealer(run, me, CURVES[me].secret, peer, (curve or CURVES[peer]).public)


def meet(one, other):
    """One opens; they answer each other as long as either wants it. Returns all that was said."""
    said, turn = [one.open()], [other, one]
    while turn[0].opened(said[-1]):
        said.append(turn[0].open())
        turn.reverse()
        assert len(said) < 8
    return said


def test_two_peers_seal_for_each_other_in_both_directions_and_lanes():
    a, b = sealer("a", "b"), sealer("b", "a")
    meet(a, b)
    for giver, taker, lane in ((a, b, DATA), (b, a, DATA), (a, b, URGENT), (a, b, DATA)):
        frames = [b"header", b"", bytes(1 << 16)]
        sealed = giver.seal(frames, lane)
        assert not any(b"header" in each for each in sealed)
        assert taker.unseal(sealed) == frames


def test_both_may_open_at_once_and_an_opening_may_be_lost():
    a, b = sealer("a", "b"), sealer("b", "a")
    crossing = a.open(), b.open()
    assert a.opened(crossing[1])
    assert b.opened(crossing[0])
    answers = a.open(), b.open()  # a's is lost
    assert a.opened(answers[1])
    assert not b.opened(a.open())
    assert b.unseal(a.seal([b"x"], DATA)) == [b"x"]
    assert a.unseal(b.seal([b"y"], DATA)) == [b"y"]


@pytest.mark.parametrize("what", ["altered", "again", "back", "mixed", "cut", "another's"])
def test_what_a_relay_does_to_sealed_frames_is_noticed(what):
    a, b = sealer("a", "b"), sealer("b", "a")
    meet(a, b)
    first, second = a.seal([b"one", b"two"], DATA), a.seal([b"three", b"four"], DATA)
    taker = b
    match what:
        case "altered":
            bad = [first[0], first[1][:-1] + bytes([first[1][-1] ^ 1]), first[2]]
        case "again":
            assert b.unseal(first) == [b"one", b"two"]
            bad = first
        case "back":
            bad, taker = first, a
        case "mixed":
            bad = [first[0], first[1], second[2]]
        case "cut":
            bad = first[:2]
        case _:
            m = sealer("a", "m"), sealer("m", "a")
            meet(*m)
            bad = m[1].seal([b"one"], DATA)
    with pytest.raises(WireError):
        taker.unseal(bad)
    if what != "again":
        assert b.unseal(first) == [b"one", b"two"]  # no harm was done


def test_openings_that_are_repeated_open_nothing_and_leave_the_session_as_it_is():
    a, b = sealer("a", "b"), sealer("b", "a")
    said = meet(a, b)
    kept = a.seal([b"first"], DATA)
    assert b.unseal(kept) == [b"first"]
    for opening in said:
        for one in (a, b):
            try:
                one.opened(opening)
            except WireError:
                continue  # its own
    with pytest.raises(WireError):
        b.unseal(kept)
    assert b.unseal(a.seal([b"second"], DATA)) == [b"second"]


def test_a_peer_that_was_started_again_opens_a_session_of_its_own_and_nothing_of_the_former_is_read():
    a, b = sealer("a", "b"), sealer("b", "a")
    meet(a, b)
    before = a.seal([b"of before"], DATA)
    a = sealer("a", "b")
    meet(a, b)
    with pytest.raises(WireError):
        b.unseal(before)
    assert b.unseal(a.seal([b"now"], DATA)) == [b"now"]


def test_who_has_not_the_rosters_key_or_is_of_another_run_opens_nothing():
    a = sealer("a", "b")
    for stranger in (sealer("b", "a", curve=CURVES["m"]), sealer("b", "a", run=b"other"), sealer("m", "a")):
        with pytest.raises(WireError, match="has not sealed"):
            a.opened(stranger.open())
    assert a.session is None
