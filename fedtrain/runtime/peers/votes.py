"""The votes of peers for the one model at the end: what is signed, and which votes count.

Each peer signs the digest of the model that it made, its vote, and tells it to all; and all tell each other
which votes they got, so that a peer that votes for two models is found out. A model counts that most of the
roster have voted for. It comes with these votes: a peer that was away takes it from any one other.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ...arena import Arena
from ...errors import BadUpdate
from ...exchange import PeerId
from ...store.rounds import MadeOf

NAMED = 32  # peers that a message names
Votes = dict[PeerId, tuple[str, bytes]]  # peer -> what it voted for, and its signature
VOTES: msgspec.msgpack.Decoder[tuple[Votes, list[PeerId]]] = msgspec.msgpack.Decoder(
    tuple[Votes, list[PeerId]]
)


@dataclass(frozen=True)
class Voters:
    """The roster, and how its peers sign."""

    names: Collection[PeerId]
    sign: Callable[[bytes], bytes] = lambda message: b""
    proves: Callable[[PeerId, bytes, bytes], bool] = lambda peer, message, signature: not signature
    is_called: Callable[[PeerId], bool] = lambda peer: True  # whether all can reach it
    run: str = ""

    @property
    def need(self) -> int:
        """Votes that are most of the roster."""
        return len(self.names) // 2 + 1

    def made(self, digest: str, made_of: MadeOf) -> str:
        """What peers vote for: the digest of a model, and the peers that it is made of."""
        return hashlib.sha256("\n".join([digest, *made_of.of]).encode()).hexdigest()

    def message(self, number: int, made: str) -> bytes:
        """What they sign in the attempt that begins with the exchange `number`."""
        return f"fedtrain one model\n{self.run}\n{number}\n{made}".encode()

    def voted(self, peer: PeerId, number: int, made: str, vote: bytes) -> bool:
        return peer in self.names and self.proves(peer, self.message(number, made), vote)

    def for_it(self, made: str, made_of: MadeOf) -> int:
        """How many peers voted for a model, by the votes that came with it."""
        return sum(self.voted(peer, made_of.attempt, made, vote) for peer, vote in made_of.votes.items())

    def check(self, made_of: MadeOf) -> None:
        """BadUpdate where a model is said to be made of more than the roster has."""
        if not {*made_of.of} <= {*self.names} or made_of.models > len(self.names):
            raise BadUpdate(
                f"it is said to be of {made_of.models} models, of {', '.join(made_of.of[:NAMED])}"
            )

    def checked(self, number: int, told: Sequence[Votes]) -> tuple[Votes, list[PeerId]]:
        """The votes of this attempt that bear a peer's signature; and the peers that voted for two models, of
        which none counts."""
        found: dict[PeerId, dict[str, bytes]] = defaultdict(dict)
        for votes in told:
            for name, (made, vote) in votes.items():
                if made not in found[name] and self.voted(name, number, made, vote):
                    found[name][made] = vote
        twice = [name for name, theirs in found.items() if len(theirs) > 1]
        return {n: next(iter(t.items())) for n, t in found.items() if t and n not in twice}, twice


def parties(votes: Votes) -> Mapping[str, list[PeerId]]:
    """By what it is: which peers made each model."""
    found: dict[str, list[PeerId]] = defaultdict(list)
    for name, (made, _) in sorted(votes.items()):
        found[made].append(name)
    return found


@dataclass(frozen=True)
class OneModel:
    """The one model."""

    model: Arena
    digest: str  # SHA-256 of the arena's bytes, by which peers compare
    peers: Sequence[PeerId]  # who has it, as far as this peer knows
    made_of: MadeOf
