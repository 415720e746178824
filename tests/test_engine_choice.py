"""The engine of a simulation: named, or chosen once for a run by a timed probe of its own task."""

import dataclasses

import pytest

from fedtrain.config import Config
from fedtrain.errors import ConfigError
from fedtrain.runtime.simulations import simulation
from fedtrain.runtime.trainers import engines
from fedtrain.runtime.trainers.engines import EngineTrial
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


MISSING = ConfigError("there is no g++. Use another")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool_task.py").write_text(TASK + MORE)
    return tmp_path


def auto(folder, **options):
    return configured(folder, engine="auto", **options)


def notices(events):
    return [fields["text"] for kind, fields in events if kind == "notice"]


def probing(monkeypatch, *, loop, stacked, compiled=None, ready=0.0):
    """Probes that are told how many µs an update takes by each engine, the first one `ready` s more."""
    monkeypatch.setattr(engines, "FEW", 0)
    monkeypatch.setattr(EngineTrial, "_loop", lambda self, sites=0: loop * 1e-6)
    first = set()

    def timed(self, engine):
        us = compiled if engine._compiled else stacked
        if isinstance(us, Exception):
            raise us
        if engine not in first:
            first.add(engine)
            return us * 1e-6 + ready / len(self._pairs)
        return us * 1e-6

    monkeypatch.setattr(EngineTrial, "_stacked", timed)


def chosen(folder, updates, **options):
    bench = Workbench(auto(folder, **options), simulated=True)
    pairs = [(site, bench._load("data", site)) for site in bench.description.sites]
    return EngineTrial(bench._config, bench._learner, bench._stack, pairs, bench.initial()).choose(updates)


@pytest.mark.parametrize(
    ("times", "updates", "engine", "why"),
    [
        ({"loop": 100, "stacked": 20}, 10_000, "stacked", "20 µs an update, the loop 100, on 7 sites"),
        ({"loop": 100, "stacked": 95}, 10_000, "loop", "stacked takes 95 µs an update, the loop 100"),
        ({"loop": 100, "stacked": 20, "ready": 1.0}, 10_000, "loop", "the loop 100"),
        ({"loop": 100, "stacked": 20, "ready": 1.0}, 20_000, "stacked", "the loop 100"),
        ({"loop": 100, "stacked": 20, "compiled": 10}, 10_000_000, "compiled", "10 µs an update, stacked 20"),
        ({"loop": 100, "stacked": 20, "compiled": 19}, 10_000_000, "stacked", "compiled 19"),
        ({"loop": 100, "stacked": 20, "compiled": MISSING}, 10_000_000, "stacked", "no g++"),
    ],
)  # fmt: skip
def test_a_probe_takes_the_engine_that_is_done_first(folder, monkeypatch, times, updates, engine, why):
    probing(monkeypatch, **times)
    found = chosen(folder, updates)
    assert found.engine == engine
    assert why in found.reason


def test_a_probe_times_the_task_itself_and_leaves_no_trace(folder, monkeypatch):
    monkeypatch.setattr(engines, "FEW", 0)
    bench = Workbench(auto(folder), simulated=True)
    pairs = [(site, bench._load("data", site)) for site in bench.description.sites]
    probe = EngineTrial(bench._config, bench._learner, bench._stack, pairs, bench.initial())
    assert probe._loop() > 0
    assert probe._stacked(bench._stack("stacked")) > 0
    assert probe.choose(10_000).engine in ("loop", "stacked")
    assert not [path for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"]


def test_a_short_run_is_the_loops_without_a_probe(folder):
    events, weights = simulated(auto(folder), workers=0)
    assert weights.digest == by_hand(configured(folder)).digest
    assert notices(events) == []


def test_named_sites_are_the_loops_for_a_federation_of_them_has_its_bits(folder, monkeypatch):
    probing(monkeypatch, loop=100, stacked=1)
    events, weights = simulated(auto(folder, task="Natural"), workers=0)
    assert weights.digest == by_hand(configured(folder, task="Natural")).digest
    assert notices(events) == []


def test_the_choice_is_told_and_kept_over_a_restart(folder, monkeypatch):
    monkeypatch.setattr(engines, "FEW", 0)
    monkeypatch.setattr(engines, "CHUNK_BYTES", 1 << 30)
    probing(monkeypatch, loop=100, stacked=20)
    events, _ = simulated(auto(folder, rounds=1), workers=0)
    told = (
        "simulate.engine: stacked, 20 µs an update, the loop 100, on 7 sites; equal to the loop to rounding"
    )
    assert notices(events) == [told]
    probing(monkeypatch, loop=20, stacked=100)
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
