"""The table of a share's states, walked: alone, at both its ends at once, and by whole peers."""

import itertools

import pytest

from fedtrain.runtime.peers import pledges
from fedtrain.transport import receiver, sender
from fedtrain.transport.transfers import GIVING, TAKING, Giving, Heard, Met, Taking
from fedtrain.wire.gossip import Kind
from tests.mass_walk import Disk, Walk

HERE = (Taking.WHOLE, Taking.MIXED)  # the share is counted, or will be


def reachable(first, follow):
    seen, todo = {first}, [first]
    while todo:
        for after in follow(todo.pop()):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return seen


@pytest.mark.parametrize(("table", "first"), [(GIVING, Giving.OPEN), (TAKING, Taking.AWAITED)])
def test_every_state_is_reached_and_what_is_over_stays_so(table, first):
    def follow(state):
        return [after for (before, _), (after, _) in table.items() if before is state]

    assert reachable(first, follow) == set(type(first))
    for (before, what), (after, _) in table.items():
        assert not before.over or after is before, (before, what)


def test_who_has_asked_and_hears_nothing_does_not_wait_for_ever():
    for state in Giving:
        if not state.over:
            for what in (Heard.GONE, Heard.STOPPED):
                assert GIVING[state, what][0].over
    assert GIVING[Giving.ASKED, Heard.LATE][0].over


def giver_steps(giver, taker, network):
    """What may happen at the giver next: a message arrives, or time passes."""
    events = [{"DONE": Heard.DONE, "REFUSE": Heard.REFUSED, "CREDIT": Heard.CREDIT}.get(m) for m in network]
    for what in {*filter(None, events), Heard.QUIET, Heard.FOUND, Heard.LATE, Heard.GONE, Heard.STOPPED}:
        if (giver, what) in GIVING:
            after, says = GIVING[giver, what]
            said = {
                Kind.CHUNK: {"CHUNKS"},
                Kind.OFFER: {"OFFER"},
                Kind.CANCEL: {"CANCEL"},
            }.get(says, set())
            if says is Kind.CHUNK:
                after = GIVING[after, Heard.LEFT][0]
            yield after, taker, network | said


MEETS = {
    "OFFER": [Met.OFFERED],
    "ALL": [Met.OFFERED, Met.ARRIVED],
    "CHUNKS": [Met.ARRIVED],
    "CANCEL": [Met.CANCELLED],
}
ANSWERS = {Kind.DONE: {"DONE"}, Kind.REFUSE: {"REFUSE"}, Kind.ACK: {"CREDIT"}}


def taker_steps(giver, taker, network):
    """What may happen at the taker. A message may come many times, or never; any one may overtake another."""
    for what in [[Met.LOST], [Met.NONE], [Met.TURN], [Met.BAD], *(MEETS.get(m, []) for m in network)]:
        now, said = taker, set(network)
        for step in what:
            if (now, step) in TAKING:
                before, (now, answer) = now, TAKING[now, step]
                said |= ANSWERS.get(answer, set())
                if before is Taking.AWAITED and now is Taking.COMING:
                    said.add("CREDIT")
                yield giver, now, frozenset(said)


@pytest.mark.parametrize("first", ["OFFER", "ALL"])
def test_whatever_is_lost_doubled_or_overtaken_nobody_keeps_what_counts_elsewhere(first):
    begun = Giving.SENT if first == "ALL" else Giving.OPEN

    def follow(state):
        for after in itertools.chain(giver_steps(*state), taker_steps(*state)):
            corrected = (state[1], after[1]) == (Taking.WHOLE, Taking.MISSED)  # by the account: DONE was said
            if not corrected:
                yield after

    states = reachable((begun, Taking.AWAITED, frozenset({first})), follow)
    assert {giver for giver, _, _ in states} >= {Giving.GIVEN, Giving.KEPT, Giving.UNSURE, Giving.ASKED}
    for giver, taker, _ in states:
        assert giver is not Giving.KEPT or taker not in HERE
        assert giver is not Giving.GIVEN or taker in HERE


class Walked(dict):
    """A table that notes which of its rows are used."""

    def __init__(self, table):
        super().__init__(table)
        self.used = set()

    def __getitem__(self, row):
        self.used.add(row)
        return super().__getitem__(row)


@pytest.mark.slow(3)
def test_peers_that_walk_at_random_use_the_rows_of_both_tables_and_miss_none(monkeypatch):
    giving, taking = Walked(GIVING), Walked(TAKING)
    monkeypatch.setattr(sender, "GIVING", giving)
    monkeypatch.setattr(receiver, "TAKING", taking)
    monkeypatch.setattr(pledges, "Kept", Disk)
    for seed in range(200):
        Walk(seed).run()  # a row that is missing is a KeyError
    unused = {*giving} - giving.used | {*taking} - taking.used
    assert {what for _, what in unused} <= {Heard.STOPPED, Met.BAD}  # nobody stops there, or sends NaN
