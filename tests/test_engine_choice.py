"""The engine of a simulation: named, or chosen once for a run by the size of its model."""

import dataclasses

import pytest

from fedtrain.config import Config
from fedtrain.errors import ConfigError
from fedtrain.runtime.simulations import simulation
from fedtrain.runtime.trainers import engines
from fedtrain.runtime.trainers.trainer_messages import Chosen
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.training.stacked import refusal

from .test_simulation import TASK, by_hand, configured, simulated

MORE = """

class Normed(Pool):
    def model(self):
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

class Dying(Pool):
    def data(self, site):
        if Path("kill").exists():
            Path("kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().data(site)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool_task.py").write_text(TASK + MORE)
    return tmp_path


def auto(folder, **options):
    return configured(folder, engine="auto", **options)


def notices(events):
    return [fields["text"] for kind, fields in events if kind == "notice"]


def never():
    raise AssertionError("nothing is tried")


def refused():
    raise refusal("the model has buffers")


@pytest.mark.parametrize(
    ("nbytes", "updates", "rehearse", "engine", "why"),
    [
        (20_000, 1_999, never, "loop", ""),
        (4_000_000, 10_000, never, "loop", "a model of 4 MB trains as fast alone as in a stack"),
        (20_000, 10_000, refused, "loop", "the model has buffers"),
        (20_000, 10_000, lambda: None, "stacked", "a model of 0.02 MB trains faster in a stack"),
    ],
)
def test_auto_takes_a_stack_for_long_runs_of_small_models(nbytes, updates, rehearse, engine, why):
    found = engines.choose(nbytes, updates, rehearse)
    assert found.engine == engine
    assert why in found.reason


def test_a_short_run_is_the_loops_without_a_trial(folder):
    events, weights = simulated(auto(folder), workers=0)
    assert weights.digest == by_hand(configured(folder)).digest
    assert notices(events) == []


def test_named_sites_are_the_loops_for_a_federation_of_them_has_its_bits(folder, monkeypatch):
    monkeypatch.setattr(engines, "FEW", 0)
    events, weights = simulated(auto(folder, task="Natural"), workers=0)
    assert weights.digest == by_hand(configured(folder, task="Natural")).digest
    assert notices(events) == []


def test_the_choice_is_logged_and_kept_over_a_restart(folder, monkeypatch):
    monkeypatch.setattr(engines, "FEW", 0)
    events, _ = simulated(auto(folder, rounds=1), workers=0)
    (told,) = notices(events)
    assert told.startswith("simulate.engine: stacked, a model of ")
    assert told.endswith("trains faster in a stack; equal to the loop to rounding")
    monkeypatch.setattr(engines, "FEW", 1 << 40)
    events, weights = simulated(auto(folder, rounds=3), workers=0)
    assert notices(events) == []
    _, stacked = simulated(configured(folder, engine="stacked", name="stacked"), workers=0)
    assert weights.digest == stacked.digest


def test_what_cannot_be_stacked_goes_to_the_loop_and_the_reason_is_told(folder, monkeypatch):
    monkeypatch.setattr(engines, "FEW", 0)
    events, weights = simulated(auto(folder, task="Normed"), workers=0)
    assert weights.digest == by_hand(configured(folder, task="Normed")).digest
    (line,) = notices(events)
    assert line.startswith("simulate.engine: loop, ")
    assert "the model has buffers" in line


def test_noise_at_the_sites_is_the_loops(folder, monkeypatch):
    monkeypatch.setattr(engines, "FEW", 0)
    noisy = {"noise_multiplier": 1.0, "clip": 1.0, "unit": "example"}
    table = auto(folder, kind="fedavg").table() | {"privacy": noisy}
    table["train"] |= {"batch_size": 0}
    bench = Workbench(Config.of(table, folder), simulated=True)
    with pytest.raises(ConfigError, match=r"privacy.noise_multiplier.*\"loop\""):
        bench.train_by("stacked")


@pytest.mark.usefixtures("forked")
@pytest.mark.slow(6)
def test_a_worker_that_died_is_told_the_engine_again(folder, monkeypatch):
    async def stacked(*_):
        return "stacked"

    monkeypatch.setattr(simulation, "engine_of", stacked)
    (folder / "kill").touch()
    _, weights = simulated(auto(folder, task="Dying", sites=60), workers=1)
    assert not (folder / "kill").exists()
    _, expected = simulated(configured(folder, sites=60, engine="stacked", name="again"), workers=0)
    assert weights.digest == expected.digest


@pytest.mark.usefixtures("forked")
@pytest.mark.slow(8)
def test_any_number_of_workers_gives_the_bits_of_one_stack_after_the_other(folder):
    found = []
    for workers in (0, 1, 3):
        config = configured(folder, sites=110, rounds=2, engine="stacked", name=f"with-{workers}")
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, local_epochs=3))
        found.append(simulated(config, workers=workers)[1].digest)
    assert len(set(found)) == 1


def test_a_refusal_is_a_reason_without_its_advice():
    assert Chosen("loop", str(refusal("x, y")).partition(". Use ")[0]).reason.endswith("x, y")
