"""A site's half of statistics: what it answers about its data, and what it refuses to answer.

A site answers each question of a run once: asked another one in its place it refuses, also after a restart.
So whoever asks can't go on asking until a single example is left over.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import msgspec

from ...config import Config
from ...errors import BadUpdate, ConfigError, FedtrainError
from ...messages import Failure, Reply, SiteId
from ...questions import Column, Describe, Described, Question, Tally
from ...secagg.messages import AdvertiseTally, hash_of
from ...statistics.survey import most_counts, rounds
from ...store.disk import Kept, Warn, silent
from ..trainers.trainer import Trains
from .secure_site import SecureSite

FILE = "questions"


def check_config(config: Config) -> None:
    """ConfigError for a site that would break its own promise."""
    if config.stats.allow and config.privacy.noise_multiplier:
        raise ConfigError(
            "stats.allow: statistics have no noise, and privacy.noise_multiplier promises it on all that "
            "leaves this site. Set stats.allow = false, or privacy.noise_multiplier = 0."
        )


def hash_of_tally(request: Tally) -> bytes:
    """The hash that binds a secure sum to what was asked, 32 bytes."""
    body = msgspec.msgpack.encode(request.question)
    return hash_of("tally", request.round, request.min_cell, body)


class DataStatistics:
    """What one site tells of its data in one run."""

    def __init__(
        self,
        name: SiteId,
        trainer: Trains,
        config: Config,
        folder: Path,
        secure: SecureSite | None = None,
        warn: Warn = silent,
    ) -> None:
        """`folder` keeps which questions were answered. With `secure`, answers go into secure sums only."""
        self._name, self._trainer, self._config, self._secure = name, trainer, config, secure
        remedy = "Use another run.name: without it this site could answer a question twice."
        self._kept = Kept(folder / FILE, dict[int, str], remedy, warn)
        self._asked: dict[int, str] = max(self._kept.read(), key=len, default={})
        self._columns: tuple[Column, ...] = ()

    async def answer(self, request: Describe | Tally) -> Reply:
        """What the columns are; or what a question asks, which under masks begins a secure sum."""
        try:
            columns = await self._known()
            if isinstance(request, Describe):
                return Described(columns=columns)
            if self._secure is not None and not isinstance(request, AdvertiseTally):
                raise BadUpdate("it gives its statistics into secure sums only (secagg.enabled)")
            self._check(request, columns)
            least = request.min_cell if self._secure is None else 0
            found = await self._trainer.tally(self._name, request.question, least)
        except FedtrainError as e:
            return Failure(reason=str(e))
        if self._secure is None:
            return found
        assert isinstance(request, AdvertiseTally), request
        return await asyncio.to_thread(self._secure.offer, request, hash_of_tally(request), found)

    async def _known(self) -> tuple[Column, ...]:
        self._columns = self._columns or await self._trainer.columns(self._name)
        return self._columns

    def _check(self, request: Tally, columns: tuple[Column, ...]) -> None:
        """BadUpdate unless this site answers the question; it is then written down."""
        if request.min_cell < self._config.stats.min_cell:
            raise BadUpdate(
                f"counts from {request.min_cell} on are to be shown, and its own stats.min_cell is "
                f"{self._config.stats.min_cell}. Raise stats.min_cell at the aggregator to it"
            )
        if not 0 <= request.round < rounds(len(columns)):
            raise BadUpdate(f"it answers {rounds(len(columns))} questions in a run")
        if not fits(request.question, len(columns)):
            raise BadUpdate("the question does not fit its columns")
        openly, asked = self._secure is None, request.question
        for place, column in enumerate(columns):
            counts = sum(len(cells.edges) + 1 for cells in asked.cells if cells.column == place)
            most = most_counts(request.round, column, openly=openly)
            if counts > most or sum(part.column == place for part in asked.powers) > 1 + openly:
                raise BadUpdate(
                    f"question {request.round + 1} asks {counts} counts of column {column.name!r}, and a "
                    f"survey asks {most} at most. Ask with fedtrain aggregator --stats of the same version"
                )
        question = hashlib.sha256(hash_of_tally(request)).hexdigest()
        if self._asked.setdefault(request.round, question) != question:
            raise BadUpdate(
                f"question {request.round + 1} of this run was another one before. Statistics that begin "
                f"again need another run.name"
            )
        self._kept.write(self._asked)


def fits(question: Question, columns: int) -> bool:
    """Whether a question is about so many columns, and its edges ascend."""
    parts = [*(cells.column for cells in question.cells), *(powers.column for powers in question.powers)]
    ascending = all(
        a < b for cells in question.cells for a, b in zip(cells.edges, cells.edges[1:], strict=False)
    )
    return ascending and all(0 <= column < columns for column in parts)
