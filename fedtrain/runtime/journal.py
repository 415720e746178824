"""The journal of a run: from where it goes on, which evaluation is due, which model is best, when it is over.

Every loop that moves a model by rounds keeps one, whoever trains for it: sites, peers or ranks. The events of
a run itself, from run_started to run_finished, are emitted here and nowhere else.
"""

from __future__ import annotations

import difflib
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from .. import events
from ..arena import AnyArena, Arena
from ..config import Config
from ..digest import seed_of, settings_digest
from ..errors import ConfigError
from ..events import Emit, Record
from ..exchange import Traffic
from ..fairness import SERVER, joined, over_sites, split
from ..messages import Metrics, SiteId, averages
from ..store import AGREED, Checkpoint, RoundPlan, RunStore
from ..store.rounds import NOISE, MadeOf
from ..wire.frames import Bounds
from .noise import KnownNoise

HIDDEN = (
    "What is worked out over sites needs two sites or more whose own metrics are known: there are none under "
    "masks, of one pool of data, and at a peer. "
)
NO_SERVER = 'The server evaluates on data of its own, eval_data("server"), with evaluate.server = true. '
AGREED_ROUNDS = "agreed_rounds"  # beside store.AGREED: of the run that peers ended, not of a peer
Averages = dict[str, float]
Evaluators = Callable[[int, Sequence[SiteId]], Sequence[SiteId]]  # who of the members evaluates in a round
# (sums over all sites, each site's own) -> what people are shown of both
Shown = Callable[[Metrics, Mapping[SiteId, Metrics]], Awaitable[tuple[Averages, dict[SiteId, Averages]]]]
AtServer = Callable[[int, AnyArena], Awaitable[Averages]]  # (round, model) -> metrics on the server's data


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    rounds: int
    reason: str  # "rounds done" or why it stopped early
    metrics: dict[str, float]  # of the last round's evaluation, if it had one
    best_round: int | None
    run_dir: Path
    own_model: bool = False  # of a peer that was to agree with others on one model, and ended with its own


class Lap:
    """The time since a round began."""

    def __init__(self, before_s: float = 0.0) -> None:
        """`before_s`: what the round took before the process that goes on with it."""
        self._began_s = time.monotonic() - before_s

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def record(self, metrics: Mapping[str, float], sites: int) -> Record:
        """The round's record: what `sites` found in training, and what it took until now."""
        return Record(loss=metrics.get("loss"), metrics=metrics, sites=sites, seconds=self.seconds)


@dataclass
class Clock:
    """A simulation's own clock."""

    now_s: float = 0.0  # since the run began
    late: Sequence[SiteId] = ()  # of the last round: answered too late, or when it had closed
    away: Sequence[SiteId] = ()  # of the last round: not heard of again

    def reaches(self, moment_s: float) -> None:
        """Go on to a moment, unless it is past."""
        self.now_s = max(self.now_s, moment_s)


class Journal:
    """One run as its store has it and as its log tells it."""

    def __init__(
        self,
        config: Config,
        store: RunStore | None,
        emit: Emit,
        common: Callable[[int], int] = lambda number: number,
        clock: Clock | None = None,
    ) -> None:
        """`store`: None at a site, which commits no round, and at all ranks but the first. `common`: of
        several processes that decide alike, gives each the number that the one with the store has. `clock`:
        of a simulation, the clock that its rounds are told by."""
        self.noise = KnownNoise(config, emit)
        self.config, self.emit, self.clock = config, self.noise.emit, clock
        self.over: str | None = None  # why the run is over, once its model is exported
        self.traffic: Traffic | None = None  # counts the bytes, all from 0 on
        self._counted = 0, 0  # of them: bytes in and out that an event has
        self._store, self._common = store, common

    @property
    def store(self) -> RunStore:
        """The store of a run whose rounds are committed by this process."""
        assert self._store is not None, "only the process that commits asks for the store"
        return self._store

    # --- beginning

    def start(self, mode: str, sites: int = 0, done: int = 0, buffer: int = 0, step: int = 0) -> None:
        """Say that a process begins with the run, or goes on with it after `done` rounds. `buffer`: of an
        asynchronous one. `step`: of a datacenter that goes on within a round."""
        config = self.config
        begun_with = self._store and self._store.meta().get("agreed")  # what a model's card has, too
        digest = settings_digest(begun_with or config.agreed())
        self.emit(events.RunStarted(
            run=config.run.name, mode=mode, rounds=config.run.rounds, sites=sites,
            config_digest=digest, resumed_from=done or None, resumed_step=step or None, buffer=buffer,
        ))  # fmt: skip

    def begin(self, members: Sequence[SiteId]) -> Checkpoint:
        """The last committed round, from which the run goes on; the store holds the initial model at least.
        `members`: the sites that are there already."""
        import torch

        torch.set_num_threads(1)  # folds wait for memory; a second thread would only spin on the sites' cores
        config, store = self.config, self.store
        checkpoint = store.latest()
        assert checkpoint is not None, "the initial model is committed before the first round"
        if self.clock is not None:
            self.clock.reaches(store.clock(checkpoint.round))
        mode = "simulate" if store.folder == config.simulate_dir else "federated"
        buffer = config.asynchronous.buffer if config.asynchronous.enabled else 0
        self.start(mode, store.registered(members), checkpoint.round, buffer)
        return checkpoint

    # --- a round

    def _moved(self) -> dict[str, int]:
        """Bytes in and out since the last event that counts them: each byte is in one event."""
        if (traffic := self.traffic) is None:
            return {}
        before, self._counted = self._counted, (traffic.bytes_in, traffic.bytes_out)
        moved = self._counted[0] - before[0], self._counted[1] - before[1]
        return dict(zip(("bytes_in", "bytes_out"), moved, strict=True))

    def waiting(self, need: int, have: int | None = None) -> None:
        """Say that the next round begins when `need` sites are there."""
        self.emit(events.Waiting(need=need, have=have))

    def round_started(
        self, number: int, sites: Sequence[SiteId] = (), attempt: int = 0, neighbors: Sequence[SiteId] = ()
    ) -> None:
        """Say that a round begins; `number` rounds and `attempt` attempts were made before."""
        self.emit(
            events.RoundStarted(round=number + 1, attempt=attempt + 1, sites=sites, neighbors=neighbors)
        )

    def round_failed(self, number: int, attempt: int, error: Exception) -> None:
        """Say that an attempt came to nothing, and why."""
        if self.clock is not None:
            self.store.set_clock(number, attempt + 1, self.clock.now_s)
        self.emit(events.RoundFailed(round=number + 1, attempt=attempt + 1, reason=str(error)))

    def commit(
        self,
        after: Checkpoint,
        record: Record,
        prepared: tuple[str, Arena | None] | None = None,
        inside: Iterable[SiteId] = (),
        following: RoundPlan | None = None,
        suspects: Any = None,
    ) -> None:
        """Make a round the last one, and say so. The other arguments are RunStore.commit's."""
        record = cast(Record, {**record, **self._moved()})
        if (clock := self.clock) is not None:
            record = Record(**record, clock_s=clock.now_s, late=clock.late, away=clock.away)
        began = time.perf_counter()
        simulated = self.store.folder in (self.config.simulate_dir, self.config.gossip_dir)
        noise = self.noise.after(after.round, simulated=simulated)
        kept = {**record, NOISE: noise} if noise else record
        self.store.commit(after, kept, prepared, inside, following, suspects)
        took = time.perf_counter() - began
        self.emit(events.RoundCommitted(round=after.round, commit_s=took, **record))

    def agreed(
        self, after: Checkpoint, model: Arena, peers: Sequence[SiteId], made_of: MadeOf, lap: Lap
    ) -> Checkpoint:
        """Make the model that peers agreed on the last round's; the state from which peers go on stays. For a
        peer without a round it is the first one's: no round, no model. `lap`: since agreeing began."""
        import torch

        from ..tracking.export import sha256_of_model

        digest = sha256_of_model(model.views() | self.store.load_frozen().views())
        mark = bytearray(bytes.fromhex(digest) + "\n".join(peers).encode())
        rounds = torch.tensor([self.config.run.rounds])
        kept = {AGREED: torch.frombuffer(mark, dtype=torch.uint8), AGREED_ROUNDS: rounds}
        made = Checkpoint(max(1, after.round), model, after.state | kept)
        record = self.store.rounds()[-1].record
        about = {"models": made_of.models, "of": made_of.of}
        self.store.commit(made, record | about | made_of.proof())
        self.emit(events.PeersAgreed(
            round=made.round, digest=digest, peers=peers, models=made_of.models, of=made_of.of,
            seconds=lap.seconds, **self._moved(),
        ))  # fmt: skip
        return made

    def agreed_of(self) -> MadeOf:
        """Of whose models the one is made that peers agreed on after the last round."""
        return MadeOf.of_record(self.store.rounds()[-1].record)

    @staticmethod
    def have_agreed(after: Checkpoint) -> set[SiteId]:
        """Who has the model that peers agreed on, as far as this peer knew then."""
        return {*bytes(after.state[AGREED].tolist())[32:].decode().split("\n")}

    # --- evaluations

    def evaluation_is_due(self, number: int) -> bool:
        """Whether the model after `number` rounds should be evaluated now."""
        run, every = self.config.run, self.config.evaluate.every
        if number == 0 or Bounds(trainings=0, rounds=run.rounds, every=every).evaluation(number):
            return False
        return not self._common(self._store is not None and self._store.evaluation(number) is not None)

    def keep_evaluation(
        self,
        number: int,
        metrics: Averages,
        by_site: Mapping[SiteId, Averages],
        at_server: Mapping[str, float] = MappingProxyType({}),
    ) -> Averages:
        """Write down what a round's model is worth, with what is worked out over sites, and whether it is the
        best so far; returns all of it. ConfigError when evaluate.metric is none of the metrics. An evaluation
        without any is no reason to stop. `at_server`: on the server's own data."""
        metric, store = self.config.evaluate.metric, self._store
        metrics = joined(metrics, {f"{SERVER}/{name}": value for name, value in at_server.items()})
        metrics = joined(metrics, over_sites(by_site, self.config.evaluate.lower))
        best_yet = None if store is None else (store.evaluation(store.best_round) or {}).get(metric)
        check_metric(metric, metrics, known=bool(self._common(best_yet is not None)))
        if store is None:
            return metrics
        value = metrics.get(metric)
        best = value is not None and self.config.evaluate.better(value, best_yet)
        store.evaluated(number, metrics, best=best)
        if not metrics:
            self.emit(events.Notice(text=f"round {number}: nobody evaluated the model"))
            return metrics
        self.emit(events.Evaluated(round=number, metrics=metrics, by_site=by_site, **self._moved()))
        if best:
            better = ("higher", "lower")[bool(self.config.evaluate.lower(metric))]
            self.emit(events.Best(round=number, metric=metric, value=value, better=better))
        return metrics

    # --- the end

    def reason_to_stop(self, number: int, agreed: Checkpoint | None = None) -> str | None:
        """Why the run is over after `number` rounds; None when it goes on. `agreed`: peers ended with it, and
        go on where the run has other rounds now."""
        if number >= self.config.run.rounds:
            return "rounds done"
        patience = self.config.evaluate.patience
        if agreed is not None and (patience or self._ended_this_run(agreed)):
            return "all peers ended with this round"
        if not patience:
            return None
        since_best = self._common(0 if self._store is None else self._store.evaluations_since_best())
        if since_best < patience:
            return None
        return f"{self.config.evaluate.metric} has not improved for {since_best} evaluations"

    def _ended_this_run(self, agreed: Checkpoint) -> bool:
        rounds = agreed.state.get(AGREED_ROUNDS)  # earlier versions have kept none
        return rounds is not None and int(rounds) == self.config.run.rounds

    def goes_on(self, number: int) -> bool:
        """Whether the run was begun by an earlier process, and isn't over after `number` rounds."""
        return (number > 0 or self.store.plan(0) is not None) and self.reason_to_stop(number) is None

    def result(self, number: int, reason: str) -> Result:
        """How the run ended after `number` rounds."""
        store = self.store
        return Result(number, reason, store.evaluation(number) or {}, store.best_round, store.folder)

    def finish(self, result: Result) -> None:
        """Leave the last model in the run directory, as files that need no fedtrain, and say that the run is
        over."""
        from ..tracking.export import export

        model = str(export(result.run_dir, result.run_dir / "model"))
        self.end(result.rounds, result.reason, model, result.own_model)

    def end(self, number: int | None, reason: str, model: str | None = None, own_model: bool = False) -> None:
        """Say that the run is over; `model` names the folder that it was exported to."""
        self.emit(events.RunFinished(round=number, reason=reason, model=model, own_model=own_model))
        self.over = reason


def check_metric(metric: str, metrics: Averages, *, known: bool) -> None:
    """ConfigError when the task gives no such metric. One that is `known` from earlier evaluations may be
    absent from one, as when it counts nothing there."""
    if not metrics or metric in metrics or known:
        return
    near = [name for name in metrics if name.startswith(metric)]
    near = near or difflib.get_close_matches(metric, metrics, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    why = HIDDEN if split(metric)[0] in metrics else NO_SERVER if metric.startswith(f"{SERVER}/") else ""
    raise ConfigError(
        f"evaluate.metric: the task's evaluate() gives no {metric!r}. {why}"
        f"{hint}It gives {', '.join(sorted(metrics))}."
    )


async def plain(total: Metrics, by_site: Mapping[SiteId, Metrics]) -> tuple[Averages, dict[SiteId, Averages]]:
    """What is shown where the task has no metrics() of its own."""
    return averages({"": total}), {site: averages({site: own}) for site, own in by_site.items()}


async def no_data(number: int, weights: AnyArena) -> Averages:
    """AtServer where the server has no data of its own."""
    return {}


def everyone(number: int, members: Sequence[SiteId]) -> Sequence[SiteId]:
    """Evaluators: all members."""
    return members


def some_of(config: Config, evaluators: Evaluators) -> Evaluators:
    """Evaluators: evaluate.sites of these, drawn by (seed, round), or all of them."""
    few, need = config.evaluate.sites if config.evaluate.every else 0, config.strategy.min_sites
    if config.secagg.enabled and 0 < few < need:
        raise ConfigError(
            f"evaluate.sites: {few}, but a sum under masks is over strategy.min_sites = {need} sites at "
            f"least. Raise it."
        )

    def drawn(number: int, members: Sequence[SiteId]) -> Sequence[SiteId]:
        sites = evaluators(number, members)
        if not 0 < few < len(sites):
            return sites
        return sorted(random.Random(seed_of(config.run.seed, "evaluators", number)).sample(sites, few))

    return drawn
