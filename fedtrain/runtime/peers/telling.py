"""What a peer says of how it gets on with the others: in words, and each thing once."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from ...events import Emit, Event, Notice, UpdateRefused
from ...exchange import Neighborhood, PeerId
from ...pki.roster import Roster
from ...transport.membership import View
from .consensus import ENDED
from .gossip import RoundReport

STALLED = 3  # rounds one after the other in which nothing was averaged, after which a peer says so
NAMED = 3  # of those of whom nothing came
WENT_ON = re.compile(r"went on to round (\d+)")


def in_words(why: str, rounds: int) -> str:
    """A reason for a person: what follows a run's last round has numbers, too, which nobody else knows."""

    def further(found: re.Match[str]) -> str:
        number = int(found[1])
        if number <= rounds:
            return found[0]
        return "has ended the run" if number > rounds + ENDED else "has done all rounds"

    return WENT_ON.sub(further, why)


def worded(emit: Emit, rounds: int) -> Emit:
    """Refusals after the last round are of the one model of all, and of no round."""

    def tell(event: Event) -> None:
        if isinstance(event, UpdateRefused):
            reason, late = in_words(event.reason, rounds), (event.round or 0) > rounds
            reason = f"at the one model of all: {reason}" if late else reason
            event = msgspec.structs.replace(event, reason=reason, round=None if late else event.round)
        emit(event)

    return tell


def tell_apart(emit: Emit, view: View, roster: Roster, before: str) -> str:
    """Tell once that half of all peers are here, or fewer, or one. `before`: what this returned last."""
    others, apart = len(roster.peers()) - 1, ""
    if len(view.alive) == 1 and others > 0:
        apart = (
            f"alone: none of the {others} others answers, so this peer averages with nobody, and its model "
            f"learns of its own data only. Where the others have ended the run, the model of all is what "
            f"`fedtrain export` writes at any of them."
        )
    elif view.degraded:
        apart = (
            f"only {len(view.alive)} of {others + 1} peers are here: the others may go on without this part"
        )
    if apart and apart.split(" ")[0] != before.split(" ")[0]:  # the number of those who are here may change
        emit(Notice(text=apart))
    return apart


@dataclass
class Stall:
    """Says once that for some rounds nothing was averaged with those who are here, and when it is over."""

    emit: Emit
    masks: bool
    rounds: int = 0  # one after the other in which nothing was averaged
    told_slow: bool = False

    def slow(self, begun: int, now: int) -> None:
        """Others have gone on from a round while this peer trained for it."""
        if not self.told_slow:
            self.told_slow = True
            self.emit(Notice(
                text=f"trained for round {begun + 1} while other peers went on to round {now + 1}: its model "
                f"counts there, and in fewer rounds than theirs. Train less here, or raise "
                f"gossip.round_deadline at all peers."
            ))  # fmt: skip

    def note(
        self, near: Neighborhood, told: RoundReport, differing: Collection[PeerId], struck: Collection[PeerId]
    ) -> None:
        """After a round. `differing`: who counts others as here than this peer does; `struck`: off here."""
        if told.heard:
            if self.rounds >= STALLED:
                self.emit(Notice(text=f"averages again, with {', '.join(sorted(told.heard))}"))
            self.rounds = 0
        elif near.incoming:  # else the graph has nobody for it in this round
            self.rounds += 1
            if self.rounds == STALLED:
                self.emit(Notice(text=self._why(told.missing, differing, struck)))

    def _why(
        self, missing: Mapping[PeerId, str], differing: Collection[PeerId], struck: Collection[PeerId]
    ) -> str:
        whys = [f"{name}: {why}" for name, why in sorted(missing.items())]
        more = f" and {len(whys) - NAMED} more" if len(whys) > NAMED else ""
        text = (
            f"averages with nobody: nothing was averaged in the last {self.rounds} rounds, so this peer's "
            f"model learns of its own data only ({'; '.join(whys[:NAMED])}{more})."
        )
        if not self.masks:
            return f"{text} Look at the network between these peers, and at gossip.round_deadline."
        apart = [f"{name} was struck off here" for name in sorted(struck)]
        if differing:
            count = "counts" if len(differing) == 1 else "count"
            apart.append(f"{', '.join(sorted(differing))} {count} others as here than this peer does")
        because = f" {'; '.join(apart)}." if apart else ""
        return (
            f"{text}{because} A sum under masks is of all its members or of none, so all peers must count "
            f"the same ones: strike a peer off at all of them, or revoke its certificate (fedtrain certs "
            f"revoke NAME); or take it back where it was struck off."
        )
