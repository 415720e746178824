"""A committed round, the one under way, and all that the next one starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..arena import AnyArena, Arena
from ..messages import SiteId

if TYPE_CHECKING:
    import torch

NOISE = "noise"  # in a round's record: what noise is in its model, where any is known
AGREED = "agreed"  # in a checkpoint's state, where peers agreed: SHA-256 of the model, and who has it


@dataclass(frozen=True)
class MadeOf:
    """Of how many peers' models one model is made, and of whose; 0 and none where that isn't known."""

    models: int = 0
    of: Sequence[SiteId] = ()
    attempt: int = 0  # at one model of peers: the number that `votes` are signed with
    votes: Mapping[SiteId, bytes] = field(
        default_factory=dict
    )  # peer -> its signature that it made this model

    def proof(self) -> dict[str, Any]:
        """The votes, for a round's record."""
        votes = {peer: vote.hex() for peer, vote in self.votes.items()}
        return {"attempt": self.attempt, "votes": votes} if votes else {}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> MadeOf:
        """As a round's record has it."""
        votes = {peer: bytes.fromhex(vote) for peer, vote in record.get("votes", {}).items()}
        return cls(record.get("models", 0), record.get("of", ()), record.get("attempt", 0), votes)


@dataclass(frozen=True)
class Checkpoint:
    """All that the next round starts from."""

    round: int  # rounds done
    weights: AnyArena
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    patch: AnyArena | None = None  # what made the weights of those of the round before, if anything did


@dataclass(frozen=True)
class Round:
    """A committed round, without its tensors."""

    round: int
    weights: str  # digest
    committed_at: float  # seconds since 1970, for people
    record: dict[str, Any]  # loss, sites, seconds, ...
    metrics: dict[str, float] | None  # of its evaluation, when there was one
    best: bool


@dataclass(frozen=True)
class RoundPlan:
    """Who was asked for the round under way: fixed before the first request goes out."""

    round: int
    attempt: int
    sites: list[SiteId]
    counted: Mapping[SiteId, int] = field(default_factory=dict)  # RunStore.counted, when it begins
    last: Arena | None = None  # what the rule made of the round before, if it needs that
    registered: int = 0  # sites that had joined
    groups: Sequence[Sequence[SiteId]] = ()  # under masks, the sums of a round that looks for who spoils them
    earlier: Sequence[float] = ()  # RunStore.norms, when it begins
