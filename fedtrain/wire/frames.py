"""The frames between a site and an aggregator.

Each frame is a msgspec struct in MessagePack: typed, checked while it is decoded, and unable to name code.
A model's bytes follow as raw chunks in a stream of their own, unless they are so few that they fit into the
frame that names them:

  Session   Hello, Status..., Answered..., AuditHead..., Leaving
            -> Welcome | Refused, Ask..., Cancel..., Rejected..., AuditHead..., Note..., Revocations...,
               Renewed..., Finished
  Download  Fetch -> chunks                                the model that an Ask names, from any offset
  Upload    Offer, chunks... -> Resume, Stored | Moot | Refused   a reply's header, then the bytes it names

A site Answers in its session when all that the reply names is in the frame, and Uploads it otherwise.
Only the site opens connections. The aggregator reads the site's name from its certificate, never in a frame.
"""

from __future__ import annotations

import msgspec

from ..questions import Column
from ..schema import Schema

PROTOCOL = 9  # the protocol's version, which must be the same at both ends
CHUNK_BYTES = 1 << 20
INLINE_BYTES = 64 << 10  # of all arenas of a message together: so many at most are in its frame
MESSAGE_BYTES = 4 << 20  # no frame or chunk is larger; gRPC refuses it before reading it


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of the frames."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that a site accepts, by its own fedtrain.toml; it refuses all others. A site sends its
    bounds as it joins, so that the aggregator stays within them."""

    trainings: int  # in the whole run: its rounds, or the most turns of a site where there are no rounds
    rounds: int  # run.rounds of the site
    every: int  # evaluate.every of the site
    statistics: bool = False  # stats.allow of the site
    noise: bool = False  # whether the site's privacy.noise_multiplier is above 0
    trainings_by: str = "run.rounds"  # the site's own key that decides trainings
    every_by: str = "evaluate.every"  # the one that decides `every`

    def training(self, round: int) -> str:
        """The reason why the site does not train in this round (0 first); "" when it does."""
        if round < self.trainings:
            return ""
        most = f"at most {self.trainings} times in this run (its own {self.trainings_by[:40]})"
        return f"it trains {most}, and this is time {round + 1}"

    def evaluation(self, number: int) -> str:
        """The reason why the site does not evaluate the model after `number` rounds; "" when it does."""
        if not self.every:
            return f"it never evaluates (its own {self.every_by[:40]} = 0)"
        if self.noise:
            return (
                "it never evaluates, as an evaluation has no noise, and its own privacy.noise_multiplier "
                "promises noise on all that leaves it"
            )
        if number > self.rounds or (number % self.every and number < self.rounds):
            return (
                f"it evaluates every {self.every} rounds and after round {self.rounds} (its own "
                f"{self.every_by[:40]} and run.rounds), not after round {number}"
            )
        return ""


class Hello(Frame, frozen=True, kw_only=True, tag=True):
    """The site's first frame. The aggregator compares it with its own task, schema and settings."""

    protocol: int
    version: str  # of fedtrain
    package: str = ""  # SHA-256 of the site's fedtrain, digest.package_digest
    task_digest: str
    schema: Schema
    agreed: dict[str, str]  # Config.agreed()
    frozen: Schema = Schema(())  # of the parameters that are not trained
    examples: float | None = None  # number of the site's examples, which no later update may exceed
    columns: tuple[Column, ...] = ()  # names, types and shapes of its data; (): one example doesn't tell
    bounds: Bounds | None = None  # None: the site accepts every request
    nonce: bytes = b""  # random, of this session: the aggregator's proof in its Welcome is over it
    process: str = ""  # random, of this start: two processes with the same certificate have different ones


class Status(Frame, frozen=True, kw_only=True, tag=True):
    """What the site is doing at present, for the aggregator's status table."""

    state: str
    trouble: str = ""  # what people must mend at the site, for the aggregator's log


class Leaving(Frame, frozen=True, kw_only=True, tag=True):
    """The site's last frame: it has received Finished, and the aggregator need not send it again."""


class Welcome(Frame, frozen=True, kw_only=True, tag=True):
    """The aggregator's first frame to a site that it accepts."""

    heartbeat_s: float
    frozen: str = ""  # digest of the run's frozen parameters; a site whose model() has others Fetches them
    proof: bytes = b""  # that the aggregator holds its certificate, see pki.proof
    lists: bytes = b""  # of revoked certificates, as their signers signed them
    version: str = ""  # of the aggregator's fedtrain, and its digest as in Hello
    package: str = ""


class Revocations(Frame, frozen=True, kw_only=True, tag=True):
    """New lists of revoked certificates, as their signers signed them."""

    lists: bytes


class Renewed(Frame, frozen=True, kw_only=True, tag=True):
    """The site's new certificate, of the key that it has, as the one it shows is about to end."""

    chain: bytes  # PEM: leaf, then issuing CA


class Refused(Frame, frozen=True, kw_only=True, tag=True):
    """A refusal with its reason in one line; `final` when another attempt can't succeed."""

    reason: str
    final: bool = False


class Ask(Frame, frozen=True, kw_only=True, tag=True):
    """A request to a site, for training or an evaluation."""

    body: bytes  # a Request, encoded by codec.encode
    # The bytes of its arenas, one after the other, or of their newest patches; or they are to be fetched.
    data: bytes = b""


class Answered(Frame, frozen=True, kw_only=True, tag=True):
    """A reply with all the bytes that it names."""

    id: str  # of the request that this reply answers
    body: bytes  # a Reply, encoded by codec.encode
    data: bytes = b""  # the bytes of its arenas, one after the other


class Rejected(Frame, frozen=True, kw_only=True, tag=True):
    """The answer to the request `id` is not used."""

    id: str
    reason: str


class Cancel(Frame, frozen=True, kw_only=True, tag=True):
    """Stop working on the request `id`: its round is over."""

    id: str


class AuditHead(Frame, frozen=True, kw_only=True, tag=True):
    """How the sender's audit log stands. The aggregator states it after each round, and a site answers with
    its own, whose signature covers the one that it answers."""

    signed: bytes  # runtime.auditing
    certificate: bytes = b""  # the signer's, in PEM; b"": as in the head before it in this session
    seen: tuple[int, str] | None = None  # how the addressee's log stood, as far as the sender knows


class Note(Frame, frozen=True, kw_only=True, tag=True):
    """A line for the site's log."""

    line: str


class Finished(Frame, frozen=True, kw_only=True, tag=True):
    """The run is over, and the site need not reconnect."""

    reason: str


class Fetch(Frame, frozen=True, kw_only=True, tag=True):
    """Ask for the bytes with this digest, from this offset on."""

    digest: str
    offset: int


class Offer(Frame, frozen=True, kw_only=True, tag=True):
    """A reply's header, before its bytes."""

    id: str  # of the request that this reply answers
    body: bytes  # a Reply, encoded by codec.encode


class Resume(Frame, frozen=True, kw_only=True, tag=True):
    """Send the bytes with this digest, from this offset on."""

    digest: str
    offset: int


class Stored(Frame, frozen=True, kw_only=True, tag=True):
    """The aggregator has stored the whole reply."""


class Moot(Frame, frozen=True, kw_only=True, tag=True):
    """The reply is no longer needed: enough sites had answered before."""


FromSite = Hello | Status | Answered | AuditHead | Leaving
FromAggregator = (
    Welcome | Refused | Ask | Cancel | Rejected | AuditHead | Note | Revocations | Renewed | Finished
)  # fmt: skip
UploadAnswer = Resume | Stored | Moot | Refused
