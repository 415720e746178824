"""What a round leaves in the memory of who goes through very many of them: nothing."""

import asyncio
import pathlib
import sys
import tracemalloc
from contextlib import closing, contextmanager
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from fedtrain import events
from fedtrain.arena import Arena, ArenaFile
from fedtrain.config import Config
from fedtrain.errors import SecAggError
from fedtrain.messages import Evaluate, Evaluation, Update
from fedtrain.runtime.auditing import audited
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.simulations.clocked_turns import NEWEST, TurnTimes
from fedtrain.runtime.sites.cohorts import SKETCH, Cohorts, Opened
from fedtrain.runtime.star import federated
from fedtrain.runtime.star.answers import InTheOpen
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import Checkpoint, RunStore, redo
from fedtrain.store.spool import is_digest
from fedtrain.strategies import beginning, build
from fedtrain.tracking import audit, log
from fedtrain.tracking.board import Board
from fedtrain.tracking.live import LiveTable, Plain
from fedtrain.transport.memory import LocalCohort

SCHEMA = Schema((TensorSpec("w", (6,), "float32", True),))
SITES = ("a", "b", "c")
LEFT, BESIDE = 100, 30_000  # bytes of memory for each round, and for all: 0.1 MB for 1,000 rounds


def answer(request):
    if isinstance(request, Evaluate):
        return Evaluation(metrics={"loss": (1.0, 1.0)})
    delta = Arena.zeros(SCHEMA)
    delta.flat(SCHEMA.sections[0]).fill_(1 / (1 + request.round))
    return Update(delta=delta, num_examples=1.0, metrics={"loss": (1.0, 1.0)})


@contextmanager
def traced():
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


class Watched:
    """Hears of a run's events; what is in use after some rounds, and the most that was in between."""

    def __init__(self, *rounds):
        self.rounds, self.used, self.most = rounds, [], []

    def __call__(self, event):
        if isinstance(event, events.RoundCommitted) and event.round in self.rounds:
            used, most = tracemalloc.get_traced_memory()
            self.used.append(used)
            self.most.append(most)
            tracemalloc.reset_peak()


@pytest.mark.slow(4)
@pytest.mark.parametrize("durable", [True, False], ids=["federation", "simulation"])
def test_a_round_leaves_nothing_in_memory(tmp_path, monkeypatch, durable):
    monkeypatch.setattr(audit, "REMEMBERED", 64)  # what is bounded by a number is at its bound soon
    monkeypatch.setattr(redo, "SPARE_BYTES", 8 << 10)  # a redo log begins anew again and again
    monkeypatch.setattr(redo, "PART_BYTES", 4 << 10)
    monkeypatch.setattr(log, "LOG_BYTES", 64 << 10)  # and so does the event log
    monkeypatch.setattr("fedtrain.store.redo.os.fdatasync", lambda fd: None)
    first, second, third = 100, 300, 500
    config = Config.of(
        {"run": {"name": "t", "rounds": third}, "strategy": {"min_sites": 3}, "evaluate": {"every": 10}},
        root=tmp_path,
    )
    watched, strategy = Watched(first, second, third), build("fedavg", {})
    with (
        (tmp_path / "screen").open("w") as screen,
        closing(RunStore(config.run_dir, durable=durable)) as store,
        log.EventLog(config.run_dir, Plain(screen), watched) as told,
        traced(),
    ):
        kept = audited(config, "aggregator", told.emit)
        store.begin(SCHEMA, config.agreed(), task_digest="t")
        store.commit(Checkpoint(0, *beginning(strategy, Arena.zeros(SCHEMA))), {})
        cohort = LocalCohort(dict.fromkeys(SITES, answer))
        answers = InTheOpen(config, cohort, kept.emit)
        asyncio.run(federated.run(Journal(config, store, kept.emit), answers, strategy))
        kept.close()
        assert store.db.one("PRAGMA cache_size") == (
            -256,
        )  # KiB, of SQLite's own memory, which nobody traces
    assert watched.used[2] - watched.used[1] < LEFT * (third - second) + BESIDE
    # of all rows at once a redo log that begins anew would hold 1 kB for each round
    assert watched.most[2] - watched.most[1] < LEFT * (third - second) + BESIDE


def test_a_screen_forgets_all_but_the_newest_rounds_and_still_knows_the_last_evaluation(tmp_path):
    with (tmp_path / "screen").open("w") as file:
        for screen in (Plain(file), LiveTable(file)):
            for number in range(1, 200):
                screen(events.RoundCommitted(round=number, loss=1.0))
                if number == 3:
                    screen(events.Evaluated(round=3, metrics={"accuracy": 0.5}))
            assert len(screen._board.history) < 50
            assert screen._board.metrics == {"accuracy": 0.5}
            assert screen._board.last.round == 199
    assert Board.of(events.RoundCommitted(round=n) for n in range(1, 200)).history.keys() == {*range(1, 200)}


def test_a_site_under_masks_keeps_few_bytes_of_each_sum_and_still_knows_every_one(tmp_path, monkeypatch):
    monkeypatch.setattr("fedtrain.store.chain.os.fsync", lambda fd: None)
    rounds = 300

    def opened(number, sites):
        sketch = np.full(SKETCH, 1.0 + number).tobytes()
        return Opened("Advertise", "r", number, number.to_bytes(32), sites, sketch, sketch)

    with traced():
        guard = Cohorts(tmp_path)
        guard.opens(opened(0, SITES))
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, rounds):
            guard.opens(opened(number, SITES))
        assert (tracemalloc.get_traced_memory()[0] - before) / rounds < 300  # a line has 1,900 bytes
    for each in (guard, Cohorts(tmp_path)):
        for number in (0, 1, rounds - 1):
            with pytest.raises(SecAggError, match=f"this model was answered for in round {number + 1} of r"):
                each.check(opened(number, ("a", "b")))
        near = msgspec.structs.replace(opened(rounds - 1, ("a", "b")), model=b"another")
        with pytest.raises(SecAggError, match="a near model was answered for"):
            each.check(near)


def test_a_role_that_is_started_again_reads_a_long_audit_log_a_few_lines_at_a_time(tmp_path):
    made = audit.AuditLog(path := tmp_path / "a.jsonl")
    for number in range(6_000):  # held: all of them are one write
        made.append(events.UpdateReceived(round=number, site="a" * 500, nbytes=4000))
    made.close()
    assert path.stat().st_size > 3 << 20
    with traced():
        again = audit.AuditLog(path)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20  # of which the newest seals have half a megabyte
    assert again.stated() == b""
    again.close()


def test_of_a_simulated_sites_turns_without_rounds_the_newest_are_in_memory_and_the_others_found_again():
    class Usual(dict):
        """Comes after a second, and takes two."""

        there = property(lambda self: self)

        def comes(self, free_s):
            return free_s + 1.0

        def arrives(self, begins, load, until):
            return begins + 2.0

        def drops_out(self, site, number, attempt):
            return False

        def of(self, examples):
            return None

    times = TurnTimes(Usual(a=Usual()), Usual(), {}, 100.0)
    for number in range(1000):
        assert times.of("a", number) == (3.0 * number + 1, 3.0 * number + 3, False)
    assert len(times._known["a"][1]) == NEWEST
    assert times.of("a", 998) == (2995.0, 2997.0, False)
    assert times.of("a", 7) == (22.0, 24.0, False)


def test_files_that_come_and_go_leave_no_names_in_pythons_table_of_them(tmp_path, monkeypatch):
    names = []
    heard = SimpleNamespace(**vars(sys) | {"intern": lambda name: names.append(name) or sys.intern(name)})
    monkeypatch.setattr(pathlib, "sys", heard, raising=False)  # where pathlib puts names into the table
    store = RunStore(tmp_path / "run", durable=False)
    store.begin(SCHEMA, {}, task_digest="t")
    names.clear()
    for number in range(3):
        model = Arena.zeros(SCHEMA)
        model.flat(SCHEMA.sections[0]).fill_(number)
        coming = store.inbox("a").receive(model.digest, SCHEMA.nbytes)
        coming.write(model.payload)
        ArenaFile(SCHEMA, coming.finish(), model.digest).load()
        coming.close()
        store.commit(Checkpoint(number, model, {}), {})
        store.on_disk(Checkpoint(number, model, {})).weights.load()
        store.clear_inbox()
    store.close()
    assert {name for name in names if is_digest(name.partition(".")[0])} == set()
