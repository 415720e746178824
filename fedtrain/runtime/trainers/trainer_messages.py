"""What a trainer process is asked and what it answers. A frame is its length (u32), then msgpack."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from ...arena import AnyArena, ArenaFile, Frozen
from ...errors import (
    BadUpdate,
    ConfigError,
    FedtrainError,
    Forgotten,
    StoreError,
    TaskError,
    reason_of,
    story_of,
)
from ...learning import NO_EXTRAS, Extras
from ...messages import Folded, Metrics, SiteId, Update
from ...population import Population
from ...questions import Column, Question
from ...schema import Schema
from ..journal import Averages
from .boundary import Limit, with_advice

T = TypeVar("T")
LENGTH = struct.Struct("<I")  # the bytes of a frame's message
FRAME_BYTES = 1 << 28  # a longer frame is damaged


class ModelFile(msgspec.Struct, array_like=True):
    """Where a model lies; the digest tells one round's model from the next one's in the same file."""

    path: str
    digest: str

    @classmethod
    def of(cls, model: ArenaFile) -> ModelFile:
        return cls(model.file, model.digest)


# --- commands


class Start(msgspec.Struct, tag=True, array_like=True):
    """The first message: load the task."""

    config: dict[str, Any]
    root: str
    data_dir: str | None
    simulated: bool
    metrics_only: bool = False
    machine: str = ""  # of the run directory, where the trainer runs elsewhere; see remote.this_machine
    approved: dict[str, str] | None = None  # at a site: the files of which alone it loads, by their SHA-256


class Initial(msgspec.Struct, tag=True, array_like=True):
    """Write the model before round 0, or the frozen parameters of the task's model(), to `out`."""

    out: str
    frozen: bool = False


class Summed(msgspec.Struct, array_like=True):
    """What a sum of updates has to be read with."""

    round: int
    cohort: int  # sites that were asked
    sites: int  # whose updates are in it
    names: tuple[str, ...]  # of the metrics in it


class Apply(msgspec.Struct, tag=True, array_like=True):
    """Write the model that a patch makes of another, or a sum."""

    base: ModelFile
    patch: ModelFile
    out: str
    summed: Summed | None = None  # of a sum


class Examples(msgspec.Struct, tag=True, array_like=True):
    """Count the site's examples."""

    site: SiteId


class Freeze(msgspec.Struct, tag=True, array_like=True):
    """Train with these frozen parameters, not with those of the task's model()."""

    frozen: ModelFile


class TrainOne(msgspec.Struct, tag=True, array_like=True):
    """Train one site; write its update to `out`."""

    site: SiteId
    round: int
    weights: ModelFile
    out: str
    counted: int  # as in messages.Train


class TrainMany(msgspec.Struct, tag=True, array_like=True):
    """Train several sites; write their updates one after the other into shared memory."""

    sites: list[SiteId]
    round: int
    weights: ModelFile
    slab: str  # the path of the shared memory
    offset: int  # bytes; where the first update begins
    counted: list[int]  # of each site, as in messages.Train


class FoldMany(msgspec.Struct, tag=True, array_like=True):
    """Train several sites, which are whole blocks of the mean, and sum what they found: see
    messages.Folded."""

    sites: list[SiteId]
    round: int
    weights: ModelFile
    counted: list[int]  # of each site, as in messages.Train
    at_once: int  # sites that are trained before their deltas are summed
    summands: int = 0  # as in exchange.Folds
    slab: str = ""  # the path of shared memory for the sums; "": they are sent with the answer
    offset: int = 0  # bytes; where they begin
    places: list[int] = []  # of the sites among all of their blocks; []: no other site is in these blocks
    span: int = 0  # places in these blocks; 0: as many as sites


class EvaluateMany(msgspec.Struct, tag=True, array_like=True):
    """Evaluate a model at several sites."""

    sites: list[SiteId]
    round: int
    weights: ModelFile
    counted: list[int]  # of each site, as in messages.Train


class ColumnsOf(msgspec.Struct, tag=True, array_like=True):
    """Say what the columns of the site's data are; with `form` as sites compare them before a run."""

    site: SiteId
    form: bool = False


class TallyOne(msgspec.Struct, tag=True, array_like=True):
    """Answer a question about the site's data, as in counting.tally."""

    site: SiteId
    question: Question
    least: int


class Choose(msgspec.Struct, tag=True, array_like=True):
    """Choose the engine for so many updates, after trying a stack of these sites."""

    sites: list[SiteId]
    updates: int


class TrainBy(msgspec.Struct, tag=True, array_like=True):
    """Train by this engine from here on."""

    engine: str


class NotePartition(msgspec.Struct, tag=True, array_like=True):
    """Say what simulate.min_examples changed where one pool is dealt."""


class Show(msgspec.Struct, tag=True, array_like=True):
    """Derive the task's metrics() from sums over all sites, and from each site's own."""

    total: Metrics
    by_site: dict[SiteId, Metrics]


# --- replies


class Description(msgspec.Struct, tag=True, array_like=True):
    """What a trainer has loaded; of a simulation also who takes part, and who evaluates."""

    schema: Schema  # of what goes out: the model, and what a strategy sends with it
    task_digest: str
    comes: Schema | None = None  # of an update as it travels, where it is not a delta of the model alone
    extras: Extras = NO_EXTRAS
    sites: list[SiteId] | Population = []
    pooled: bool = False  # all sites share one pool of data
    evaluators: (
        list[SiteId] | Population
    ) = []  # the sites, or "central" where one model is evaluated on the pool
    frozen: Frozen = Frozen()  # of the task's model()
    derives: bool = False  # whether the task has a metrics() of its own
    personal: bool = False  # whether each site has a model of its own
    local: list[str] = []  # names of the model's tensors that stay at their site
    remembers: bool = False  # whether sites keep something from one training to the next
    limits: list[Limit] = []  # what the process can't do, where it was shut in
    on_gpu: bool = False

    @property
    def confined(self) -> str:
        """What the process can't do, in words; "" where it was not shut in."""
        return "; ".join(limit.said for limit in self.limits)

    @property
    def update(self) -> Schema:
        """The schema of an update as it travels."""
        return self.comes or self.schema.model


class Trained(msgspec.Struct, tag=True, array_like=True):
    """An update without its delta, see messages.Update."""

    num_examples: float
    metrics: Metrics
    digest: str = ""  # of the delta, where it lies in a file of its own
    weight: float | None = None
    scalars: dict[str, float] = {}
    clipped: int = 0

    @classmethod
    def of(cls, update: Update, digest: str = "") -> Trained:
        return cls(update.num_examples, update.metrics, digest, update.weight, update.scalars, update.clipped)

    def update(self, delta: AnyArena) -> Update:
        """The update, with its delta."""
        return Update(
            delta=delta, num_examples=self.num_examples, metrics=self.metrics, weight=self.weight,
            scalars=self.scalars, clipped=self.clipped,
        )  # fmt: skip


class Measured(msgspec.Struct, tag=True, array_like=True):
    metrics: Metrics


class Failed(msgspec.Struct, tag=True, array_like=True):
    """A command failed. Only the reason leaves this machine: the traceback may quote data."""

    reason: str
    config: bool = False  # a ConfigError: the user's files are wrong, not the task's code
    store: bool = False  # a StoreError: a full disk, say
    traceback: str = ""  # for the people at this machine
    update: bool = False  # BadUpdate or Forgotten: this site's result can't be used, another site's may
    openly: str = ""  # a TaskError's, for the people at this machine

    @classmethod
    def of(cls, error: Exception) -> Failed:
        config, own = isinstance(error, ConfigError), isinstance(error, BadUpdate | Forgotten)
        store = isinstance(error, StoreError) and not own
        story = with_advice(story_of(error))
        return cls(reason_of(error), config, store, story, own, getattr(error, "openly", ""))

    def error(self) -> FedtrainError:
        if not self.config and not self.store:
            return TaskError(self.reason, self.openly)
        return (ConfigError if self.config else StoreError)(self.reason)


def good(result: T | Failed) -> T:
    """TaskError for one that failed."""
    if isinstance(result, Failed):
        raise result.error()
    return result


class Dying(msgspec.Struct, tag=True, array_like=True):
    """The process ends now, for this reason, and answers no command any more."""

    reason: str


class Done(msgspec.Struct, tag=True, array_like=True):
    """The result of each site, in the order of the command's sites."""

    results: Sequence[Trained | Measured | Failed]


class Counted(msgspec.Struct, tag=True, array_like=True):
    examples: float | None


class Chosen(msgspec.Struct, tag=True, array_like=True):
    engine: str
    reason: str


class Showing(msgspec.Struct, tag=True, array_like=True):
    metrics: Averages
    by_site: dict[SiteId, Averages]


class HasColumns(msgspec.Struct, tag=True, array_like=True):
    columns: tuple[Column, ...]


class Noted(msgspec.Struct, tag=True, array_like=True):
    text: str


class Saved(msgspec.Struct, tag=True, array_like=True):
    digest: str


Command = (
    Initial | Freeze | Apply | Examples | TrainOne | TrainMany | FoldMany | EvaluateMany | Show | ColumnsOf
    | TallyOne | Choose | TrainBy | NotePartition
)  # fmt: skip
Outcome = (
    Description | Failed | Dying | Done | Folded | Counted | Saved | Showing | HasColumns | Chosen | Noted
)


def failures_in(outcome: Outcome) -> list[Failed]:
    """The failures that an outcome tells of, with their tracebacks."""
    if isinstance(outcome, Folded):
        return [Failed(outcome.refused[at], traceback=story) for at, story in outcome.stories.items()]
    found = outcome.results if isinstance(outcome, Done) else [outcome]
    return [each for each in found if isinstance(each, Failed)]


_encoder = msgspec.msgpack.Encoder()
outcomes = msgspec.msgpack.Decoder(Outcome)
commands = msgspec.msgpack.Decoder(Command)
requests = msgspec.msgpack.Decoder(Start | Command)


def encoded(message: Start | Command | Outcome) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def framed(message: Start | Command | Outcome) -> bytes:
    """The bytes of a frame."""
    body = encoded(message)
    return LENGTH.pack(len(body)) + body
