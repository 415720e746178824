"""The frames between a site and an aggregator, and how they are laid out.

Each frame is a msgspec struct in MessagePack: typed, checked while it is decoded, and unable to name code.
A model's bytes never stand in a frame; they follow as raw chunks in a stream of their own:

  Session   Hello, Status..., Leaving -> Welcome | Refused, Ask..., Cancel..., Note..., Finished
  Download  Fetch -> chunks                                the model that an Ask names, from any offset
  Upload    Offer, chunks... -> Resume, Stored | Moot | Refused   a reply's header, then the bytes it names

Only the site opens connections. Its name is its certificate's: no frame carries one.
"""

from __future__ import annotations

import msgspec

from ..schema import Schema

PROTOCOL = 3  # both ends must say the same
CHUNK_BYTES = 1 << 20
MESSAGE_BYTES = 4 << 20  # no frame or chunk is larger; gRPC refuses it before reading it


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what a session carries."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What a site lets itself be asked, by its own fedtrain.toml. It refuses the rest, whoever asks; told at
    joining, an aggregator asks for less."""

    trainings: int  # in the run: its rounds, or where there are none the turns that they may take
    rounds: int  # run.rounds
    every: int  # evaluate.every

    def training(self, round: int) -> str:
        """Why it does not train in this round (0 first); nothing when it does."""
        if round < self.trainings:
            return ""
        most = f"at most {self.trainings} times in this run (its own run.rounds)"
        return f"it trains {most}, and this is time {round + 1}"

    def evaluation(self, number: int) -> str:
        """Why it does not evaluate the model after so many rounds; nothing when it does."""
        if not self.every:
            return "it never evaluates (its own evaluate.every = 0)"
        if number > self.rounds or (number % self.every and number < self.rounds):
            return (
                f"it evaluates every {self.every} rounds and after round {self.rounds} (its own "
                f"evaluate.every and run.rounds), not after round {number}"
            )
        return ""


class Hello(Frame, frozen=True, kw_only=True, tag=True):
    """The site's first frame: all that both ends must have alike before any data moves."""

    protocol: int
    version: str  # of fedtrain, for the message when protocols differ
    task_digest: str
    schema: Schema
    agreed: dict[str, str]  # Config.agreed()
    frozen: Schema = Schema(())  # of the parameters that training leaves alone
    examples: float | None = None  # of the site's data; later claims may not exceed it
    bounds: Bounds | None = None  # None: it answers whatever is asked
    process: str = (
        ""  # drawn as it starts: one that reconnects is known from another with the same certificate
    )


class Status(Frame, frozen=True, kw_only=True, tag=True):
    """What the site is doing, for the table that people watch."""

    state: str


class Leaving(Frame, frozen=True, kw_only=True, tag=True):
    """The site's last frame: it has heard that the run is over, and needs not be told again."""


class Welcome(Frame, frozen=True, kw_only=True, tag=True):
    heartbeat_s: float
    frozen: str = ""  # digest of the run's frozen parameters; a site whose model() has others Fetches them


class Refused(Frame, frozen=True, kw_only=True, tag=True):
    """No, and why, in one line; `final` when asking again changes nothing."""

    reason: str
    final: bool = False


class Ask(Frame, frozen=True, kw_only=True, tag=True):
    body: bytes  # a Request, encoded by codec.encode


class Cancel(Frame, frozen=True, kw_only=True, tag=True):
    """The round of this request is over; stop working on it."""

    id: str


class Note(Frame, frozen=True, kw_only=True, tag=True):
    line: str


class Finished(Frame, frozen=True, kw_only=True, tag=True):
    """The run is over; there is no need to reconnect."""

    reason: str


class Fetch(Frame, frozen=True, kw_only=True, tag=True):
    digest: str
    offset: int


class Offer(Frame, frozen=True, kw_only=True, tag=True):
    id: str  # of the request that this answers
    body: bytes  # a Reply, encoded by codec.encode


class Resume(Frame, frozen=True, kw_only=True, tag=True):
    """Send the bytes with this digest, from this offset on."""

    digest: str
    offset: int


class Stored(Frame, frozen=True, kw_only=True, tag=True):
    """The reply is whole and kept."""


class Moot(Frame, frozen=True, kw_only=True, tag=True):
    """Enough had answered already; this reply is needed no more."""


FromSite = Hello | Status | Leaving
FromAggregator = Welcome | Refused | Ask | Cancel | Note | Finished
UploadAnswer = Resume | Stored | Moot | Refused
