"""The journal of a run: what is due, what is best, when it is over, and what is said of it."""

import json
from contextlib import closing
from dataclasses import replace

import pytest

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.errors import ConfigError
from fedtrain.events import Best, Evaluated, RoundCommitted, RunFinished, RunStarted
from fedtrain.runtime.journal import Journal, Lap
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import Checkpoint, RunStore
from fedtrain.store.rounds import MadeOf
from fedtrain.tracking.export import export

SCHEMA = Schema((TensorSpec("w", (2,), "float32", True),))


@pytest.fixture
def run(tmp_path):
    """A function that makes the journal of a run with these settings, and the list of its events."""
    stores = []

    def make(rounds=4, **evaluate):
        config = Config.of({"run": {"task": "t:T", "rounds": rounds}, "evaluate": evaluate}, tmp_path)
        stores.append(store := RunStore(config.run_dir))
        store.begin(SCHEMA, {}, task_digest="")
        heard = []
        return Journal(config, store, heard.append), heard

    yield make
    for store in stores:
        store.close()


def test_a_committed_round_is_in_the_store_when_it_is_told_and_both_say_the_same(run):
    journal, heard = run()
    journal.emit = lambda event: heard.append((event, journal.store.rounds()[-1].record))
    journal.commit(Checkpoint(1, Arena.zeros(SCHEMA)), Lap().record({"loss": 0.5}, sites=3))
    ((event, record),) = heard
    assert isinstance(event, RoundCommitted)
    assert record == {"loss": 0.5, "metrics": {"loss": 0.5}, "sites": 3, "seconds": event.seconds}


def test_an_evaluation_is_due_once_after_every_so_many_rounds_and_after_the_last(run):
    journal, _ = run(rounds=5, every=2, metric="loss")
    assert [number for number in range(6) if journal.evaluation_is_due(number)] == [2, 4, 5]
    journal.commit(Checkpoint(2, Arena.zeros(SCHEMA)), {})
    journal.keep_evaluation(2, {"loss": 1.0}, {})
    assert not journal.evaluation_is_due(2)


def test_the_best_is_told_where_it_gets_better_and_the_run_ends_when_it_does_not_for_long(run):
    journal, heard = run(rounds=9, every=1, metric="loss", patience=2)
    for number, loss in enumerate([3.0, 2.0, 2.5, 2.1], start=1):
        assert journal.reason_to_stop(number - 1) is None
        journal.commit(Checkpoint(number, Arena.zeros(SCHEMA)), {})
        journal.keep_evaluation(number, {"loss": loss}, {})
    assert [event.round for event in heard if isinstance(event, Best)] == [1, 2]
    assert sum(isinstance(event, Evaluated) for event in heard) == 4
    assert journal.reason_to_stop(4) == "loss has not improved for 2 evaluations"
    assert journal.result(4, "").best_round == 2


def test_a_peer_that_agreed_before_its_last_round_has_ended_until_the_run_has_other_rounds(run):
    """The others had done all rounds, and it took their model."""
    journal, _ = run(rounds=3, every=0)
    after = Checkpoint(2, Arena.zeros(SCHEMA))
    journal.commit(after, {})
    assert journal.reason_to_stop(2) is None
    of = MadeOf(2, ["north", "west"])
    agreed = journal.agreed(after, Arena.zeros(SCHEMA), ["north", "south"], of, Lap())
    assert journal.have_agreed(agreed) == {"north", "south"}
    assert journal.agreed_of() == of
    assert journal.reason_to_stop(2, agreed) == "all peers ended with this round"
    longer = replace(journal.config, run=replace(journal.config.run, rounds=4))
    assert Journal(longer, None, lambda event: None).reason_to_stop(2, agreed) is None


def test_ranks_without_a_store_decide_by_what_the_first_rank_has(tmp_path):
    evaluate = {"every": 1, "metric": "f1", "patience": 3}
    config = Config.of({"run": {"task": "t:T", "rounds": 9}, "evaluate": evaluate}, tmp_path)
    silent = Journal(config, None, lambda event: None, common=lambda number: 3)
    assert silent.reason_to_stop(1) == "f1 has not improved for 3 evaluations"
    assert not silent.evaluation_is_due(1)
    silent.keep_evaluation(1, {"loss": 1.0}, {})  # f1 is known there
    alone = Journal(config, None, lambda event: None, common=lambda number: 0)
    with pytest.raises(ConfigError, match="gives no 'f1'"):
        alone.keep_evaluation(1, {"loss": 1.0}, {})


def test_a_run_begins_and_ends_with_one_event_each(run):
    journal, heard = run()
    journal.start("peer", sites=3, done=2)
    journal.end(4, "rounds done")
    begun, ended = heard
    assert isinstance(begun, RunStarted)
    assert (begun.mode, begun.sites, begun.resumed_from) == ("peer", 3, 2)
    assert (ended, journal.over) == (RunFinished(round=4, reason="rounds done"), "rounds done")


def test_the_config_that_a_start_tells_is_that_of_the_models_card_and_has_all_that_the_run_was_begun_with(
    tmp_path,
):
    """Of peers also what [gossip] says, of a simulation how it deals its data."""
    config, told = Config.of({"run": {"task": "t:T"}}, tmp_path), []
    for topology in ("ring", "complete"):
        with closing(RunStore(tmp_path / topology)) as store:
            store.begin(SCHEMA, config.agreed() | {"gossip.topology": repr(topology)}, run="r")
            journal = Journal(config, store, told.append)
            journal.start("peer")
            journal.commit(Checkpoint(1, Arena.zeros(SCHEMA)), {})
            about = export(store.folder, tmp_path / "model") / "model.json"
            assert json.loads(about.read_text())["config_digest"] == told[-2].config_digest
    Journal(config, None, told.append).start("site")
    started = [event.config_digest for event in told if isinstance(event, RunStarted)]
    assert len(set(started)) == 3
    assert started[-1] == config.digest()  # a site has no store: it is its aggregator's
