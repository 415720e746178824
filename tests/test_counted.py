"""The last round that each site counted in, written as what each round adds."""

import random

import msgspec
import pytest
import torch

from fedtrain.arena import Arena
from fedtrain.population import Population
from fedtrain.store import Checkpoint, RunStore


def weights(value):
    return Arena.pack({"w": torch.full((3,), float(value))})


def begun(folder):
    store = RunStore(folder, durable=False)
    store.begin(weights(0).schema, {}, task_digest="t")
    if store.latest() is None:
        store.commit(Checkpoint(0, weights(0)), {})
    return store


@pytest.mark.parametrize("seed", range(4))
def test_what_rounds_added_is_what_a_list_of_all_would_have_through_restarts_and_lost_rounds(tmp_path, seed):
    draw, names = random.Random(seed), Population(40)
    store, expected, before = begun(tmp_path), {}, {}
    for number in range(1, 60):
        sites = draw.sample(names, draw.choice([0, 1, 5, 40]))
        before, expected = expected, expected | dict.fromkeys(sites, number - 1)
        store.commit(Checkpoint(number, weights(number)), {}, sites=sites)
        if draw.random() < 0.3:
            store.close()
            store = begun(tmp_path)
        if draw.random() < 0.1:  # the newest weights are damaged, and the round is made again
            (store.blobs / weights(number).digest).unlink()
            assert store.latest().round == number - 1
            assert store.counted() == before
            store.commit(Checkpoint(number, weights(number)), {}, sites=sites)
        asked = draw.sample(names, 7)
        assert store.counted() == expected
        assert store.counted(asked) == {site: expected[site] for site in asked if site in expected}
        reader = RunStore(tmp_path, read_only=True)
        assert reader.counted() == expected
        reader.close()
        assert len(store.db.all("SELECT 1 FROM counted")) < 45
    store.close()


def test_a_commit_that_fails_leaves_what_counted_as_it_was(tmp_path, monkeypatch):
    store = begun(tmp_path)
    store.commit(Checkpoint(1, weights(1)), {}, sites=["a", "b"])
    real = store.db.delete

    def fails(table, *where):
        if table == "buffer":
            raise OSError("no space")
        return real(table, *where)

    monkeypatch.setattr(store.db, "delete", fails)
    with pytest.raises(OSError, match="no space"):
        store.commit(Checkpoint(2, weights(2)), {}, sites=["b", "c"])
    monkeypatch.undo()
    assert store.counted() == {"a": 0, "b": 0}
    store.commit(Checkpoint(2, weights(2)), {}, sites=["c"])
    assert store.counted() == {"a": 0, "b": 0, "c": 1}
    store.close()


def test_a_round_writes_as_much_as_its_sites_are_however_many_counted_before(tmp_path):
    store, names, written = begun(tmp_path), Population(1_000_000), 0
    for number in range(1, 41):
        sites = names[number * 1000 : (number + 1) * 1000]
        store.commit(Checkpoint(number, weights(number)), {}, sites=sites)
        (row,) = store.db.all("SELECT length(sites) FROM counted WHERE round = ?", (number,))
        written += row[0]
    once = len(msgspec.msgpack.encode(store.counted()))
    assert len(store.counted()) == 40_000
    assert written < 3 * once
    store.close()


def test_a_run_that_kept_all_sites_in_each_row_goes_on(tmp_path):
    store = begun(tmp_path)
    for number, sites in ((1, {"a": 0}), (2, {"a": 0, "b": 1})):
        store.commit(Checkpoint(number, weights(number)), {})
        store.db.put("counted", number, msgspec.msgpack.encode(sites))
    store.close()
    store = begun(tmp_path)
    store.commit(Checkpoint(3, weights(3)), {}, sites=["a"])
    assert store.counted() == {"a": 2, "b": 1}
    store.close()
