"""Every example runs as it is: its task loads, learns, and is what its README says."""

import gzip
import json
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtrain import simulate
from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.learning import RoundSums
from fedtrain.store import RunStore
from fedtrain.strategies import Strategy
from fedtrain.training.local import Engine
from fedtrain.training.task import load_task
from tests.limits import WAIT_S
from tests.processes import fedtrain as command
from tests.worlds import Command

EXAMPLES = Path(__file__).parents[1] / "examples"
PROJECTS = sorted(path.parent.name for path in EXAMPLES.glob("*/fedtrain.toml"))
HOSPITALS = {
    "cleveland": (203, 101),
    "hungary": (174, 86),
    "switzerland": (31, 15),
    "va-long-beach": (87, 43),
}

SUMS = {  # what evaluate() counts, of examples whose metric is no accuracy
    "lung": {"loss", "concordance"},
    "credit": {"loss", "cost", "histogram"},
    "shuttle": {"loss", "confusion"},
}


@pytest.fixture
def fashion(tmp_path):
    """A folder with 64 + 32 made-up photographs in the format of Fashion-MNIST."""
    random = np.random.default_rng(0)
    for part, count in (("train", 64), ("t10k", 32)):
        labels = random.integers(0, 10, count, dtype=np.uint8)
        images = (random.integers(0, 60, (count, 28, 28)) + 18 * labels[:, None, None]).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    return tmp_path


def project(name, data_dir=None):
    config = Config.load(EXAMPLES / name / "fedtrain.toml", env={})
    return config, load_task(config.run.task, config.root, data_dir)


def fedtrain(folder, *arguments):
    command = [sys.executable, "-m", "fedtrain", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within peft
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow(3) if n in ("lora", "shakespeare") else ()) for n in PROJECTS],
)
def test_a_task_learns_from_its_own_data(name, fashion):
    config, task = project(name, fashion if name == "fashion_mnist" else None)
    site = (task.sites() or ["one"])[0]
    engine = Engine(task, config.train, config.run.seed)
    weights, delta = engine.initial(), Arena.zeros(engine.schema)
    before = engine.evaluate(task.eval_data(site), weights)
    engine.train(site, task.data(site), 0, weights, delta)
    for tensor, change in zip(weights.views().values(), delta.views().values(), strict=True):
        tensor += change
    after = engine.evaluate(task.eval_data(site), weights)
    assert set(after) == SUMS.get(name, {"loss", "accuracy"})
    assert after["loss"][0] < before["loss"][0]


@pytest.mark.parametrize("name", PROJECTS)
def test_an_example_has_a_readme_and_names_itself(name):
    assert (EXAMPLES / name / "README.md").exists()
    assert project(name)[0].run.name == name.replace("_", "-")


def test_digits_fits_on_a_page():
    assert len((EXAMPLES / "digits" / "task.py").read_text().splitlines()) <= 60


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    _, task = project("digits")
    x, y = load_digits(return_X_y=True)
    assert torch.equal(task.x, torch.tensor(x, dtype=torch.float32) / 16)
    assert torch.equal(task.y, torch.tensor(y))


# --- heart


def test_hospitals_have_the_patients_that_the_readme_counts():
    _, task = project("heart")
    found = {site: (len(task.data(site)[0]), len(task.eval_data(site)[0])) for site in task.sites()}
    assert found == HOSPITALS
    assert sum(map(sum, found.values())) == 740


def test_no_patient_is_both_trained_and_tested_on():
    _, task = project("heart")
    for site in task.sites():
        train, test = ({tuple(x) for x in part(site)[0].tolist()} for part in (task.data, task.eval_data))
        assert len(train & test) <= 1  # Cleveland has two patients with equal findings


def test_a_hospital_with_its_own_file_reads_the_same_patients_as_from_the_common_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "heart")
    import demo

    monkeypatch.setattr(demo, "SITE_DATA", tmp_path)
    demo.split_data()
    _, common = project("heart")
    for site in common.sites():
        assert [p.name for p in (tmp_path / site).iterdir()] == [f"{site}.csv"]
        _, own = project("heart", tmp_path / site)
        for mine, theirs in zip(own.data(site), common.data(site), strict=True):
            assert torch.equal(mine, theirs)


def test_the_picture_and_the_table_show_every_hospital(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES / "heart")
    import demo

    accuracy = demo.Accuracy(*(dict.fromkeys(demo.HOSPITALS, 0.1 * i) for i in range(4)))
    demo.show(accuracy)
    demo.draw(accuracy, tmp_path / "accuracy.png")
    printed = capsys.readouterr().out
    assert all(
        name in printed for name in ("Cleveland", "Hungary", "Switzerland", "VA Long Beach", "average")
    )
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


class Process(Command):
    """As far as the demo looks at subprocess.Popen."""

    @property
    def returncode(self):
        return self.poll()


@contextmanager
def forked(folder, *arguments, **streams):
    """demo.process, less the time that commands and trainers take to load torch; `make demo` has that."""
    running = Process(command, [*arguments], folder=folder, log=folder / f"{arguments[1]}.log", env={})
    try:
        yield running
        assert running.wait(WAIT_S) == 0
    finally:
        running.kill()


@pytest.mark.slow(20)
def test_under_masks_four_hospitals_over_mutual_tls_learn_what_they_learn_in_the_open(tmp_path, monkeypatch):
    """The demo as it is, with secure aggregation as by default, against a simulation without."""
    here = tmp_path / "examples" / "heart"
    shutil.copytree(
        EXAMPLES / "heart", here, ignore=shutil.ignore_patterns("runs", "site-data", "__pycache__")
    )
    monkeypatch.syspath_prepend(here)
    for name in ("demo", "task"):  # another test's task may be there
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    import demo

    monkeypatch.setattr(demo, "HERE", here)
    monkeypatch.setattr(demo, "SITE_DATA", here / "site-data")
    monkeypatch.setattr(demo, "process", partial(forked, here))
    demo.split_data()
    demo.make_certificates()
    demo.federate()
    simulate(here, {"secagg.enabled": False, "simulate.workers": 0}, progress=False)
    config, task = project("heart")
    engine = Engine(task, config.train, config.run.seed)
    assert config.secagg.enabled

    def table(run):
        store = RunStore(here / "runs" / run, read_only=True)
        try:
            weights = store.latest().weights
        finally:
            store.close()
        return {site: engine.evaluate(task.eval_data(site), weights)["accuracy"] for site in HOSPITALS}

    assert table("demo") == table("heart+simulate")


# --- Survival, loans, sensors


def test_institutions_lenders_and_devices_have_what_their_readmes_count():
    _, lung = project("lung")
    parts = [(lung.data(site), lung.eval_data(site)) for site in lung.sites()]
    assert len(parts) == 17
    assert sum(len(train[0]) + len(test[0]) for train, test in parts) == 225
    _, credit = project("credit")
    loans = [(credit.data(site)[1], credit.eval_data(site)[1]) for site in credit.sites()]
    assert sum(len(test) for _, test in loans) == 332
    assert sum(float(train.sum() + test.sum()) for train, test in loans) == 300
    _, shuttle = project("shuttle")
    assert [len(shuttle.data("a")[1]), len(shuttle.eval_data("a")[1])] == [9820, 2455]
    assert f"{float(shuttle.y.float().mean()):.2f}" == "0.07"


@pytest.mark.slow(6)
def test_the_lung_federation_ends_where_the_pooled_study_has_its_maximum(tmp_path):
    """Cox's stratified model, worked by Newton's method on all institutions' patients in one place."""
    _, task = project("lung")
    parts = [task.data(site) for site in task.sites()]

    def pooled(weights):
        found = [task.loss(lambda x: (x @ weights).unsqueeze(1), part) for part in parts]
        return sum(loss for loss, _ in found) / sum(deaths for _, deaths in found)

    weights = torch.zeros(6)
    for _ in range(8):
        slope = torch.autograd.functional.jacobian(pooled, weights)
        weights = weights - torch.linalg.solve(torch.autograd.functional.hessian(pooled, weights), slope)
    settings = {"simulate.workers": 0, "evaluate.every": 0, "run.dir": str(tmp_path)}
    run = simulate(EXAMPLES / "lung", settings, progress=False)
    assert torch.allclose(run.model().weight[0], weights, atol=1e-3)


@pytest.mark.slow(4)
def test_what_sites_gain_by_training_together_is_printed_for_each_way_to_train(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    import beside

    for name, ways in (("lung", 4), ("shuttle", 3)):
        found = beside.main(name, rounds=1)
        assert len(found) == ways
        printed = capsys.readouterr().out
        assert all(f"{value:.3f}" in printed for metrics in found.values() for value in metrics.values())


# --- Fashion-MNIST


def test_fashion_mnist_says_how_to_get_the_data(tmp_path, monkeypatch):
    _, task = project("fashion_mnist", tmp_path)
    monkeypatch.setattr(sys.modules[type(task).__module__], "DEBIAN", tmp_path)
    with pytest.raises(Exception, match="apt-get install dataset-fashion-mnist"):
        task.data("any")


def test_a_cut_idx_file_is_named(fashion):
    path = fashion / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))
    with pytest.raises(Exception, match=r"train-images.*header says \[64, 28, 28\]"):
        project("fashion_mnist", fashion)[1].data("any")


# --- A custom strategy


def test_fedsign_moves_every_coordinate_by_the_same_amount(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "custom_strategy")
    from my_strategy import FedSign

    sign = FedSign(server_lr=0.5, momentum=0.5)
    assert isinstance(sign, Strategy)
    weights, state = torch.zeros(3), sign.init(torch.zeros(3))
    weights, state = sign.step(weights, state, RoundSums(torch.tensor([4.0, -0.1, 0.0])))
    assert weights.tolist() == [0.5, -0.5, 0.0]
    second = RoundSums(torch.tensor([-1.0, -0.1, 0.0]))
    weights, state = sign.step(weights, state, second)  # 0.5·2 - 0.5 > 0: goes on
    assert weights.tolist() == [1.0, -1.0, 0.0]
    assert state["direction"].tolist() == pytest.approx([0.5, -0.075, 0.0])


# --- As a user would


@pytest.mark.slow
def test_fedtrain_simulate_runs_an_example(tmp_path):
    """As a process of its own; tests/first_use/test_typed.py runs each example as its README says."""
    folder = tmp_path / "heart"
    shutil.copytree(EXAMPLES / "heart", folder, ignore=shutil.ignore_patterns("runs", "site-data"))
    done = fedtrain(folder, "simulate", "--json", "--set", "run.rounds=2", "--set", "simulate.workers=1")
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [e["round"] for e in events if e["kind"] == "round_committed"] == [1, 2]


@pytest.mark.slow
def test_digits_finish_their_first_round_in_the_time_of_a_few_starts_of_torch(tmp_path):
    """4 s on an idle machine of two cores, on which torch loads in 1.5 s."""
    folder = shutil.copytree(EXAMPLES / "digits", tmp_path / "digits", ignore=shutil.ignore_patterns("runs"))

    def processor_s(command, *arguments):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = command(*arguments)
        assert done.returncode == 0, done.stderr
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    torch_s = processor_s(subprocess.run, [sys.executable, "-c", "import torch"])
    assert processor_s(fedtrain, folder, "simulate", "--set", "run.rounds=1") < 6 * torch_s


@pytest.mark.slow
def test_without_an_aggregator_each_hospital_ends_within_two_points_of_the_federated_model(tmp_path):
    """Each peer's own model, on the test patients of all four."""
    heart, runs = EXAMPLES / "heart", tmp_path / "runs"
    settings = {"run.dir": str(runs)}
    simulate(heart / "gossip.toml", settings, mode="gossip", progress=False)
    simulate(heart, settings | {"simulate.workers": 0}, progress=False)
    config, task = project("heart")
    engine = Engine(task, config.train, config.run.seed)

    def accuracy(weights):
        counted = [engine.evaluate(task.eval_data(site), weights)["accuracy"] for site in task.sites()]
        return sum(right for right, _ in counted) / sum(patients for _, patients in counted)

    def last(name):
        store = RunStore(runs / name, read_only=True)
        try:
            return store.latest()
        finally:
            store.close()

    federated, peers = accuracy(last("heart+simulate").weights), last("heart+gossip").state
    found = {site: accuracy(Arena(engine.schema, peers[f"{site}/model"])) for site in task.sites()}
    assert all(abs(each - federated) <= 0.02 for each in found.values()), (federated, found)
