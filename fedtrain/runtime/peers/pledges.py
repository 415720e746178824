"""Shares of which none may be lost or count twice: what a peer gave that may come back, and what it counted.

In push-sum and gradient tracking the sum over all peers stays only if each share is either counted by its
taker or back with its giver. The taker decides. It counts a share in the commit of its round, or never, and
says so with all that it announces (exchange.Account). Until then the giver keeps the share, in its commits
too. So whatever was lost, late, cut off or killed, the sum is exact once the two have heard of each other:

- A peer that is killed in the middle of a round does that round over with the same neighbours, from the
  file `exchange.json`: a taker that has counted the share says so, and counts none twice.
- A taker that never comes back keeps its share open until it is struck off the roster, and so is no part of
  the sum any more: then the share is its giver's again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...exchange import Account, Neighborhood, PeerId
from ...gossip import Algorithm, Parcel
from ...store.disk import Kept

if TYPE_CHECKING:
    import torch

    from ...gossip.base import State

    Vector = torch.Tensor

BOOK = "pledges/book"
OPEN_ROUNDS = 8  # after so many, a taker that has said nothing about a share gets no other; an account has 32


class Book(msgspec.Struct):
    """What stands beside the parcels in a commit."""

    counted: dict[PeerId, tuple[int, int]]  # giver -> its account
    given: list[tuple[PeerId, int, float]]  # taker, round, weight
    fields: dict[int, dict[str, float]]  # round -> those of its parcel


class Pledges:
    """One peer's. What it says of shares is for the commit of the round that has just been done."""

    def __init__(self, folder: Path, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self.counted: dict[PeerId, Account] = {}
        self._given: dict[tuple[PeerId, int], float] = {}  # taker, round -> weight
        self._parcels: dict[int, Parcel] = {}  # by round
        self._members: Collection[PeerId] | None = None
        self._file = Kept(
            folder / "exchange.json",
            tuple[int, Neighborhood],
            "Remove both: one round's shares may count twice.",
        )
        self._begun: tuple[int, Neighborhood] | None = next(iter(self._file.read()), None)
        # the round was begun before a restart: each of its shares may have been given before
        self.again = self._begun is not None

    def begin(self, round: int, near: Neighborhood, members: Collection[PeerId]) -> Neighborhood:
        """The neighbours of a round, before a byte is sent: those it was begun with, where it is done over.
        `members`: the roster; what was given to others is not counted."""
        self._members = members
        if self._begun is None or not self.began(round):
            self._file.write((round, near))
            self._begun, self.again = (round, near), False
        return self._begun[1]

    @property
    def begun(self) -> int:
        """The round that was begun last; -1: none was."""
        return -1 if self._begun is None else self._begun[0]

    def began(self, round: int) -> bool:
        """Whether a round was begun before a restart: what was given in it may count already."""
        return self.again and self.begun == round

    def withheld(self, round: int) -> set[PeerId]:
        """The takers that get no share in a round, because they have said nothing about earlier ones."""
        return {taker for taker, given in self._given if given <= round - OPEN_ROUNDS}

    def takers(self) -> set[PeerId]:
        """The peers that have yet to say what became of a share."""
        return {taker for taker, _ in self._given}

    def note(
        self, round: int, parcel: Parcel, given: Mapping[PeerId, float], counted: Collection[PeerId]
    ) -> None:
        """A round is done: so much of the parcel went, or may have gone, to each taker; the shares of those
        givers are in the sum."""
        if given:
            parts = {name: parcel.parts[name] for name in (self._algorithm.conserved(), "gauge")}
            self._parcels[round] = Parcel(parts, parcel.fields)
            self._given |= {(taker, round): weight for taker, weight in given.items()}
        self.counted |= {peer: self.counted.get(peer, Account()).counted(round) for peer in sorted(counted)}

    def returned(self, accounts: Mapping[PeerId, tuple[int, Account]]) -> list[tuple[float, Parcel]]:
        """The shares that were not counted and never will be, with their weights: this peer's again."""
        back = []
        for (taker, round), weight in sorted(self._given.items()):
            before, account = accounts.get(taker, (0, Account()))
            struck = self._members is not None and taker not in self._members
            if struck or round < before:
                del self._given[taker, round]
                if struck or round not in account:
                    back.append((weight, self._parcels[round]))
        still = {round for _, round in self._given}
        self._parcels = {round: parcel for round, parcel in self._parcels.items() if round in still}
        return back

    def settle(
        self, accounts: Mapping[PeerId, tuple[int, Account]], x: Vector, state: State, gauge: Vector
    ) -> tuple[Vector, State, Vector]:
        """(x, state, gauge) with the shares that are this peer's again."""
        for weight, parcel in self.returned(accounts):
            before = state.get("mass")
            x, state = self._algorithm.take_back(x, state, weight, parcel)
            if before is not None:
                gauge = gauge.lerp(parcel.parts["gauge"], 1 - float(before / state["mass"]))
        return x, state, gauge

    def abandon(self, round: int, x: Vector, state: State, gauge: Vector) -> State:
        """The state of a peer that leaves a round which it may have begun, before a restart, and not ended:
        all that it may have given is out of its hands."""
        if self._begun is None or not self.began(round) or not state:
            return state
        given, fields = self._begun[1].outgoing, {n: float(v) for n, v in state.items() if n == "mass"}
        parcel = Parcel({"x": x, "gauge": gauge} | state, fields)
        self.note(round, parcel, given, ())
        return self._algorithm.take_back(x, state, -sum(given.values()), parcel)[1]

    # --- in a commit

    def kept(self) -> dict[str, torch.Tensor]:
        """All of it but the file."""
        import torch

        book = Book(
            {peer: (account.last, account.mask) for peer, account in self.counted.items()},
            [(taker, round, weight) for (taker, round), weight in self._given.items()],
            {round: dict(parcel.fields) for round, parcel in self._parcels.items()},
        )
        kept = {BOOK: torch.frombuffer(bytearray(msgspec.json.encode(book)), dtype=torch.uint8)}
        for round, parcel in self._parcels.items():
            kept |= {f"pledges/{round}/{name}": part for name, part in parcel.parts.items()}
        return kept

    def go_on(self, kept: Mapping[str, torch.Tensor]) -> None:
        """From what `kept` was, among other things."""
        book = msgspec.json.decode(bytes(kept[BOOK].numpy()), type=Book)
        self.counted = {peer: Account(*account) for peer, account in book.counted.items()}
        self._given = {(taker, round): weight for taker, round, weight in book.given}
        for round, fields in book.fields.items():
            start = f"pledges/{round}/"
            parts = {n.removeprefix(start): part for n, part in kept.items() if n.startswith(start)}
            self._parcels[round] = Parcel(parts, fields)
