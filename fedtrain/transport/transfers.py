"""The states of one share, at its giver and at its taker: what may happen in each, and what is said then.

`sender.py` and `receiver.py` say it. CHUNK stands for all chunks that there is credit for; ACK for how far
the share has come, and is a NACK where some of it was lost. What is not in a table can't happen, and is an
error of ours. At the end of every path a share is GIVEN only if its taker has all of it, and KEPT only if its
taker never counts it.
"""

from __future__ import annotations

from enum import Enum, auto

from ..wire.gossip import Kind


class Giving(Enum):
    """A share at its giver."""

    OPEN = auto()  # not all of it has left, so nobody can have it whole
    SENT = auto()  # all of it has left
    ASKED = auto()  # its time is up, and its taker is to say whether it counts
    GIVEN = auto()  # the taker has it
    KEPT = auto()  # the taker does not count it, and never will
    UNSURE = auto()  # the taker may have it; it tells in its accounts

    @property
    def over(self) -> bool:
        return self in (Giving.GIVEN, Giving.KEPT, Giving.UNSURE)


class Heard(Enum):
    """What a giver hears, or what becomes of its time."""

    CREDIT = auto()  # ACK or NACK: more is taken, or some of it again
    DONE = auto()
    REFUSED = auto()
    LEFT = auto()  # the last chunk is on its way
    QUIET = auto()  # nothing was heard for a while
    FOUND = auto()  # the taker is connected again
    LATE = auto()  # the taker's deadline is over, or nearly so
    GONE = auto()  # the taker is dead, or has left
    STOPPED = auto()  # the exchange ends here


GIVING: dict[tuple[Giving, Heard], tuple[Giving, Kind | None]] = {
    (Giving.OPEN, Heard.CREDIT): (Giving.OPEN, Kind.CHUNK),
    (Giving.OPEN, Heard.DONE): (Giving.GIVEN, None),  # an earlier life of ours gave it
    (Giving.OPEN, Heard.REFUSED): (Giving.KEPT, None),
    (Giving.OPEN, Heard.LEFT): (Giving.SENT, None),
    (Giving.OPEN, Heard.QUIET): (Giving.OPEN, Kind.OFFER),
    (Giving.OPEN, Heard.FOUND): (Giving.OPEN, Kind.OFFER),
    (Giving.OPEN, Heard.LATE): (Giving.KEPT, Kind.CANCEL),
    (Giving.OPEN, Heard.GONE): (Giving.KEPT, None),
    (Giving.OPEN, Heard.STOPPED): (Giving.KEPT, Kind.CANCEL),
    (Giving.SENT, Heard.CREDIT): (Giving.SENT, Kind.CHUNK),
    (Giving.SENT, Heard.DONE): (Giving.GIVEN, None),
    (Giving.SENT, Heard.REFUSED): (Giving.KEPT, None),
    (Giving.SENT, Heard.LEFT): (Giving.SENT, None),  # for the second time
    (Giving.SENT, Heard.QUIET): (Giving.SENT, Kind.OFFER),
    (Giving.SENT, Heard.FOUND): (Giving.SENT, Kind.OFFER),
    (Giving.SENT, Heard.LATE): (Giving.ASKED, Kind.CANCEL),
    (Giving.SENT, Heard.GONE): (Giving.UNSURE, None),
    (Giving.SENT, Heard.STOPPED): (Giving.UNSURE, Kind.CANCEL),
    (Giving.ASKED, Heard.CREDIT): (Giving.ASKED, None),
    (Giving.ASKED, Heard.DONE): (Giving.GIVEN, None),
    (Giving.ASKED, Heard.REFUSED): (Giving.KEPT, None),
    (Giving.ASKED, Heard.LATE): (Giving.UNSURE, Kind.CANCEL),
    (Giving.ASKED, Heard.FOUND): (Giving.ASKED, Kind.CANCEL),
    (Giving.ASKED, Heard.GONE): (Giving.UNSURE, None),
    (Giving.ASKED, Heard.STOPPED): (Giving.UNSURE, None),
}


class Taking(Enum):
    """A share at its taker."""

    AWAITED = auto()  # nobody has offered it yet
    COMING = auto()
    WHOLE = auto()  # all of it is here, and waits for its turn to be mixed
    MIXED = auto()
    MISSED = auto()  # it is not counted, and never will be

    @property
    def over(self) -> bool:
        return self in (Taking.MIXED, Taking.MISSED)


class Met(Enum):
    """What happens to a share at its taker."""

    OFFERED = auto()  # for the first time, or again
    REPLACED = auto()  # by another transfer, of a giver that was started again
    ARRIVED = auto()  # the last chunk of it
    TURN = auto()  # the last chunk was mixed
    BAD = auto()  # our mixer refuses it
    CANCELLED = auto()  # its giver takes it back, if it can
    NONE = auto()  # its giver has none for us, or went on to a later round
    LOST = auto()  # its giver is dead, or late, or the exchange ends here


TAKING: dict[tuple[Taking, Met], tuple[Taking, Kind | None]] = {
    (Taking.AWAITED, Met.OFFERED): (Taking.COMING, None),  # credit follows, or DONE
    (Taking.AWAITED, Met.BAD): (Taking.MISSED, Kind.REFUSE),
    (Taking.AWAITED, Met.CANCELLED): (Taking.MISSED, Kind.REFUSE),
    (Taking.AWAITED, Met.NONE): (Taking.MISSED, None),
    (Taking.AWAITED, Met.LOST): (Taking.MISSED, None),
    (Taking.COMING, Met.OFFERED): (Taking.COMING, Kind.ACK),
    (Taking.COMING, Met.REPLACED): (Taking.MISSED, Kind.REFUSE),
    (Taking.COMING, Met.ARRIVED): (Taking.WHOLE, Kind.DONE),
    (Taking.COMING, Met.BAD): (Taking.MISSED, Kind.REFUSE),
    (Taking.COMING, Met.CANCELLED): (Taking.MISSED, Kind.REFUSE),
    (Taking.COMING, Met.NONE): (Taking.COMING, None),  # what was offered comes, if late
    (Taking.COMING, Met.LOST): (Taking.MISSED, None),
    (Taking.WHOLE, Met.OFFERED): (Taking.WHOLE, Kind.DONE),
    (Taking.WHOLE, Met.REPLACED): (Taking.WHOLE, Kind.DONE),
    (Taking.WHOLE, Met.TURN): (Taking.MIXED, None),
    (Taking.WHOLE, Met.BAD): (Taking.MISSED, None),  # DONE was said: the account corrects it
    (Taking.WHOLE, Met.CANCELLED): (Taking.WHOLE, Kind.DONE),
    (Taking.WHOLE, Met.NONE): (Taking.WHOLE, None),
    (Taking.WHOLE, Met.LOST): (Taking.WHOLE, None),
    (Taking.MIXED, Met.OFFERED): (Taking.MIXED, Kind.DONE),
    (Taking.MIXED, Met.REPLACED): (Taking.MIXED, Kind.DONE),
    (Taking.MIXED, Met.CANCELLED): (Taking.MIXED, Kind.DONE),
    (Taking.MIXED, Met.NONE): (Taking.MIXED, None),
    (Taking.MIXED, Met.LOST): (Taking.MIXED, None),
    (Taking.MISSED, Met.OFFERED): (Taking.MISSED, Kind.REFUSE),
    (Taking.MISSED, Met.REPLACED): (Taking.MISSED, Kind.REFUSE),
    (Taking.MISSED, Met.CANCELLED): (Taking.MISSED, Kind.REFUSE),
    (Taking.MISSED, Met.NONE): (Taking.MISSED, None),
    (Taking.MISSED, Met.LOST): (Taking.MISSED, None),
}
