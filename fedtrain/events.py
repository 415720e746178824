"""What happens in a run, one typed event each; whoever has something to say calls an `Emit` with one.

An event holds names, counts and averages: never data values, never keys. Rounds and attempts count from 1, as
people do: round 3 is the third. tracking/ writes events to the run directory, folds them and shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, get_args

import msgspec

from .messages import SiteId

Averages = Mapping[str, float | None]  # JSON has no NaN: a metric that was NaN or Inf is read back as None


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Something that happened, at `time` seconds since 1970, which the log puts in."""

    time: float = 0.0

    @property
    def kind(self) -> str:
        """The name of this kind of event in events.jsonl."""
        return str(self.__struct_config__.tag)

    def fields(self) -> dict[str, Any]:
        """All that the event says, without its time."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name != "time"}


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    """A process began, or went on with, a run; `resumed_from` is the number of rounds already committed."""

    run: str
    mode: str  # simulate | gossip | federated | site | datacenter
    rounds: int
    sites: int = 0  # known so far
    config_digest: str = ""
    resumed_from: int | None = None
    resumed_step: int | None = None  # of a datacenter that goes on within a round: optimizer steps taken
    buffer: int = 0  # of an asynchronous run, updates that make a version of its model; 0: it goes by rounds


class Waiting(Event, frozen=True, kw_only=True, tag="waiting"):
    """The next round begins when `need` sites have joined."""

    need: int
    have: int | None = None


class SiteJoined(Event, frozen=True, kw_only=True, tag="site_joined"):
    """A site connected and agreed on task, model and config."""

    site: SiteId
    version: str = ""  # of the other end's fedtrain
    package: str = ""  # SHA-256 of the other end's fedtrain, digest.package_digest


class SiteLost(Event, frozen=True, kw_only=True, tag="site_lost"):
    """A site's connection broke or fell silent; it may come back. At a site, the site is "aggregator"."""

    site: SiteId
    reason: str = ""


class SiteRefused(Event, frozen=True, kw_only=True, tag="join_refused"):
    """A site connected but trains something else, or may not take part."""

    site: SiteId
    reason: str = ""


class Admitted(Event, frozen=True, kw_only=True, tag="admitted"):
    """Both ends agreed on the task of this digest. At the aggregator: the certificate that a site showed."""

    site: SiteId
    task_digest: str
    serial: str = ""
    fingerprint: str = ""  # SHA-256 of the certificate, in hex
    version: str = ""  # of the other end's fedtrain
    package: str = ""  # SHA-256 of the other end's fedtrain, digest.package_digest


class ActionApproved(Event, frozen=True, kw_only=True, tag="approved"):
    """A person allowed something, of this digest where it has one; `who` is the user's name here."""

    who: str
    what: str
    digest: str = ""


class ReplySent(Event, frozen=True, kw_only=True, tag="reply_sent"):
    """At a site: a reply of so many bytes leaves."""

    request: str
    what: str
    nbytes: int


class HeadWitnessed(Event, frozen=True, kw_only=True, tag="witnessed"):
    """The other end's signed word of how its audit log stands: it cannot be another one later."""

    of: SiteId
    claim: str  # audit.LogHead in MessagePack, base64
    signature: str  # of the claim, base64
    certificate: str = ""  # PEM, the first time that it is seen


class LogDisputed(Event, frozen=True, kw_only=True, tag="disputed"):
    """An audit log is not what it was: lines that one end has signed, or the other seen, are not in it."""

    of: SiteId
    reason: str


class LineTorn(Event, frozen=True, kw_only=True, tag="torn"):
    """The audit log goes on after lines that a kill, or a power cut, left unfinished or off the disk."""

    nbytes: int
    lines: int = 0  # that the log's head named and a power cut took


class RoundStarted(Event, frozen=True, kw_only=True, tag="round_started"):
    """The sites of a round are being asked; a higher attempt repeats a failed round."""

    round: int
    attempt: int = 1
    sites: Sequence[SiteId] = []
    neighbors: Sequence[SiteId] = []  # at a peer: those of the sites with which it exchanges in this round


class SiteState(Event, frozen=True, kw_only=True, tag="site_state"):
    """What a site is doing: training, masking (in a secure sum), uploading, evaluating, done, lost …"""

    site: SiteId
    state: str
    round: int | None = None


class UpdateReceived(Event, frozen=True, kw_only=True, tag="update_received"):
    """A site's update arrived whole and passed every check."""

    round: int
    site: SiteId
    num_examples: float | None = None
    loss: float | None = None
    nbytes: int = 0
    staleness: int | None = None  # of an asynchronous run: versions since the one that it was trained from


class UpdateRefused(Event, frozen=True, kw_only=True, tag="update_refused"):
    """A site's update was quarantined; the round goes on with the others."""

    site: SiteId
    round: int | None = None
    reason: str = ""


class CohortAsked(Event, frozen=True, kw_only=True, tag="cohort"):
    """At a site: the sites among which it was asked for a secure sum, and agreed to take part."""

    round: int
    what: str  # train | evaluate | tell (statistics)
    cohort: Mapping[SiteId, str]  # name -> SHA-256 of its public key, in hex


class Denied(Event, frozen=True, kw_only=True, tag="denied"):
    """At a site: a rule of its own refused what was asked of it, or kept a result back."""

    rule: str  # the key that says so, as in policy.min_cohort
    what: str  # the kind of the request
    reason: str
    round: int | None = None


class SumForged(Event, frozen=True, kw_only=True, tag="sum_forged"):
    """What the aggregator shows a site is not the sum of what the sites sent in a round; the site stops."""

    round: int
    aggregator: str
    reason: str


class PrivacySpent(Event, frozen=True, kw_only=True, tag="privacy_spent"):
    """A site gave away one more noised update: what all of them, over its runs, tell of its data at most."""

    site: SiteId
    round: int
    releases: int
    epsilon: float
    delta: float
    unit: str = "site"  # what epsilon is for: all data of a site, or any single example


class RoundFailed(Event, frozen=True, kw_only=True, tag="round_failed"):
    """An attempt at a round ended without a result; the global weights are unchanged."""

    round: int
    attempt: int = 1
    reason: str = ""


class RoundCommitted(Event, frozen=True, kw_only=True, tag="round_committed"):
    """A round's model is on disk: from here on a crash goes on after it."""

    round: int
    loss: float | None = None  # training loss, the exact mean over the sites
    metrics: Averages = {}
    seconds: float | None = None
    sites: int = 0  # whose updates are in it
    bytes_in: int = 0
    bytes_out: int = 0
    staleness: float | None = None  # of an asynchronous run: the mean over the updates in it
    norm: float | None = None  # L2, the median of the updates'; of a sum under masks: of the mean
    doubted: Mapping[
        SiteId, float
    ] = {}  # the part that counted of models that a robust rule clipped; 0: none
    clock_s: float | None = None  # of a simulation with a clock of its own: seconds since the run began
    late: Sequence[SiteId] = []  # by that clock: answered too late, or when the round had closed
    away: Sequence[SiteId] = []  # by that clock: were asked and not heard of again
    skipped: int = 0  # of a datacenter: steps left out because their gradient was not finite
    commit_s: float | None = None  # of `seconds` or after them: what writing it to the disk took


class Record(TypedDict, total=False):
    """What a committed round's row in the store says: the fields of RoundCommitted that its mode has."""

    loss: float | None
    metrics: Mapping[str, float]
    seconds: float
    sites: int
    bytes_in: int
    bytes_out: int
    staleness: float
    norm: float
    doubted: Mapping[SiteId, float]
    clock_s: float
    late: Sequence[SiteId]
    away: Sequence[SiteId]
    skipped: int


class Stepped(Event, frozen=True, kw_only=True, tag="step"):
    """Of a datacenter: its optimizer steps since the last such event of the round; times are per step."""

    step: int
    round: int
    loss: float | None = None
    lr: float | None = None
    seconds: float | None = None
    examples_per_s: float | None = None
    items_per_s: float | None = None  # in units of the loss's weight: tokens, say
    mfu: float | None = None  # share of the devices' peak that the model's arithmetic used
    comm_share: float | None = None  # of a step's time, in which gradients were under way
    memory_bytes: int | None = None  # rank 0's most so far
    skipped: int = 0  # steps left out because their gradient was not finite


class Evaluated(Event, frozen=True, kw_only=True, tag="evaluated"):
    """A round's model was evaluated at the sites: exact averages, and each site's own."""

    round: int
    metrics: Averages = {}
    by_site: Mapping[SiteId, Averages] = {}
    bytes_in: int = 0  # since the last event that counts bytes: a round's, an evaluation's, an agreement's
    bytes_out: int = 0


class PeersAgreed(Event, frozen=True, kw_only=True, tag="agreed"):
    """After the last round peers have one model, the same to the bit: the run's."""

    round: int
    digest: str  # SHA-256 of model.safetensors, as each of them exports it
    peers: Sequence[SiteId]  # who has it, as far as this peer knows
    models: int = 0  # of how many peers' models it is made; 0: who gave it didn't say
    of: Sequence[SiteId] = []  # whose; [] where they are too many for a message
    seconds: float | None = None  # that agreeing took this peer; so many bytes moved meanwhile
    bytes_in: int = 0
    bytes_out: int = 0


class Best(Event, frozen=True, kw_only=True, tag="best"):
    """An evaluation was better than all before it; that round's weights are kept."""

    round: int
    metric: str
    value: float | None
    better: str = ""  # which value of the metric is: "lower" or "higher"; "" in an older version's log


class Notice(Event, frozen=True, kw_only=True, tag="notice"):
    """One line for a person that no other kind says."""

    text: str


class RunFinished(Event, frozen=True, kw_only=True, tag="run_finished"):
    """The run is over: all rounds done, or stopped early for `reason`."""

    round: int | None = None
    reason: str = ""
    model: str | None = None  # where it was exported to
    own_model: bool = False  # of a peer that was to agree with others on one model, and ended with its own


AnyEvent = (
    RunStarted | Waiting | SiteJoined | SiteLost | SiteRefused | Admitted | ActionApproved | ReplySent
    | HeadWitnessed | LogDisputed | LineTorn | RoundStarted | SiteState | UpdateReceived | UpdateRefused
    | CohortAsked | Denied | PrivacySpent | RoundFailed | RoundCommitted | Stepped | Evaluated
    | Best | Notice | PeersAgreed | RunFinished | SumForged
)  # fmt: skip
KINDS: dict[str, type[Event]] = {str(c.__struct_config__.tag): c for c in get_args(AnyEvent)}

Emit = Callable[[Event], None]  # what is told of each event


def silent(event: Event) -> None:
    """An Emit that nobody hears."""


@dataclass(frozen=True)
class Muted:
    """An Emit that nobody hears of events of these kinds."""

    emit: Emit
    kinds: tuple[type[Event], ...]

    def __call__(self, event: Event) -> None:
        if not isinstance(event, self.kinds):
            self.emit(event)


def heard(emit: Emit, kind: type[Event]) -> bool:
    """Whether somebody may hear of events of this kind: ten thousand a second would cost as much as the
    training that they tell of."""
    return not (isinstance(emit, Muted) and issubclass(kind, emit.kinds))


def noticed(emit: Emit) -> Callable[[str], None]:
    """What takes one line for a person, of a damaged file say, and emits it."""
    return lambda line: emit(Notice(text=line))


_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(event: Event) -> bytes:
    """One line of events.jsonl, without its line end."""
    return msgspec.json.encode(event)


def decode(line: bytes) -> AnyEvent | None:
    """The event of a line; None for a torn line, or a kind that only a newer fedtrain knows."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
