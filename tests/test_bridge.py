"""Federate, fine-tune in a datacenter, federate again: each run begins where the one before ended."""

import asyncio
import contextlib

import pytest

from fedtrain.config import Config
from fedtrain.events import silent
from fedtrain.runtime.datacenters import datacenter
from fedtrain.runtime.simulations import simulation
from fedtrain.store import RunStore
from fedtrain.tracking.export import export
from tests.waves import Waves


def weights(folder, number):
    with contextlib.closing(RunStore(folder, read_only=True)) as store:
        return store.load(number).weights.digest


@pytest.mark.slow(4)
def test_a_model_goes_from_a_federation_to_a_datacenter_and_back(tmp_path):
    Waves(tmp_path, pace=0.0)

    def config(name):
        sets = [f"run.name={name}", "run.rounds=1", "train.local_steps=2", "simulate.sites=3"]
        return Config.load(tmp_path / "fedtrain.toml", sets)

    first, second, third = config("first"), config("second"), config("third")
    with contextlib.chdir(tmp_path):
        asyncio.run(simulation.simulate(first, emit=silent, workers=1))
        datacenter.run(second, emit=silent, start=first.simulate_dir)
        model = export(second.datacenter_dir, tmp_path / "model")
        asyncio.run(simulation.simulate(third, emit=silent, workers=1, start=model))
    moved = weights(second.datacenter_dir, 1)
    assert moved != weights(first.simulate_dir, 1)
    assert weights(third.simulate_dir, 0) == moved


@pytest.mark.slow(2)
def test_what_begins_where_another_ended_is_not_begun_twice(tmp_path):
    Waves(tmp_path, pace=0.0)
    sets = ["run.rounds=1", "train.local_steps=2", "simulate.sites=3", "run.name=a"]
    source = Config.load(tmp_path / "fedtrain.toml", sets)
    with contextlib.chdir(tmp_path):
        asyncio.run(simulation.simulate(source, emit=silent, workers=1))
        for rounds in (1, 2):  # the same command again, with more rounds, goes on
            more = Config.load(tmp_path / "fedtrain.toml", [*sets[1:3], "run.name=b", f"run.rounds={rounds}"])
            datacenter.run(more, emit=silent, start=source.simulate_dir)
    with contextlib.closing(RunStore(more.datacenter_dir, read_only=True)) as store:
        assert [row.round for row in store.rounds()] == [1, 2]
