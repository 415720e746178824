"""What makes two simulations the same run: settings, a command, data; and not the run's name."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fedtrain
from fedtrain.errors import ConfigError, StoreError
from fedtrain.store.memory import DataNotes
from fedtrain.tracking import log
from fedtrain.training.examples import data_digest

HERE = {"simulate.workers": 0, "evaluate.every": 0, "train.lr": 0.1, "run.rounds": 2}
PEERS = {key: value for key, value in HERE.items() if key != "simulate.workers"}
DATA = {}  # site -> its column x


class Natural(fedtrain.Task):
    def sites(self):
        return ["a", "b", "c"]

    def model(self):
        torch.manual_seed(1)
        return nn.Linear(3, 2)

    def data(self, site):
        x = DATA[site]
        return x, (x[:, 0] > 0).long()

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Four(Natural):
    def sites(self):
        return [*"abcd"]


class Pooled(Natural):
    def sites(self):
        return None

    def data(self, site):
        x = torch.cat([*DATA.values()])
        return x, (x[:, 0] > 0).long()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for at, site in enumerate("abcd"):
        DATA[site] = torch.randn(40, 3, generator=torch.Generator().manual_seed(at))


def simulate(task=Natural, **settings):
    return fedtrain.simulate(task(), HERE | {key.replace("__", "."): v for key, v in settings.items()})


def notices(run):
    return [event.text for event in log.read(run.path) if event.kind == "notice"]


def weights(run):
    return torch.cat([view.flatten() for view in run.model().state_dict().values()])


# --- the name


@pytest.mark.parametrize("kind", ["fedavg", "scaffold", "mimelite"])
def test_under_masks_a_runs_name_decides_no_bit_of_the_model(kind):
    found = [weights(simulate(run__name=name, strategy__kind=kind)) for name in ("x", "y", "Natural-2")]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], weights(simulate(run__name="z", strategy__kind=kind, run__seed=1)))


def test_masks_between_peers_round_alike_whatever_the_run_is_called():
    settings = PEERS | {"gossip.masks": True, "gossip.topology": "complete"}
    found = [
        weights(fedtrain.simulate(Four(), settings | {"run.name": name}, mode="gossip"))
        for name in ("x", "y")
    ]
    assert torch.equal(*found)


# --- the command


@pytest.mark.slow
def test_a_simulation_that_a_command_trained_is_another_run(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text("raise SystemExit(1)")
    simulate(run__name="r")
    with pytest.raises(StoreError, match=r"train.command was None, is 'python slow.py \{request\}'"):
        simulate(run__name="r", train__command="python slow.py {request}")
    with pytest.raises(StoreError, match=r"train\.command"):
        simulate(run__name="r", train__command="python slow.py {request}", run__rounds=3)


# --- the partition

IDLE = [{"partition": "dirichlet:0.1"}, {"partition": "mine:Part"}, {"sites": 50}, {"examples": 9}]


@pytest.mark.parametrize("keys", [*IDLE, {"sites": 10}, {"partition": "iid"}], ids=str)
def test_a_key_that_deals_a_pool_is_refused_where_the_task_names_sites(keys):
    (key,) = keys
    with pytest.raises(ConfigError, match=rf"^simulate.{key} = .*in settings.* does nothing: .*sites\(\)"):
        simulate(**{f"simulate__{key}": keys[key]})


@pytest.mark.parametrize("keys", IDLE, ids=str)
def test_gossip_and_stats_refuse_a_key_that_deals_no_pool(keys):
    (key,) = keys
    settings = {f"simulate.{key}": keys[key]}
    words = rf"^simulate.{key} = .* does nothing"
    with pytest.raises(ConfigError, match=words):
        fedtrain.simulate(Natural(), settings, mode="gossip")
    with pytest.raises(ConfigError, match=words):
        fedtrain.stats(Natural(), settings)


def test_the_pool_of_a_task_without_sites_is_dealt_as_before():
    run = simulate(Pooled, simulate__sites=4, simulate__partition="dirichlet:1.0")
    assert run.history[0]["sites"] == 4
    with pytest.raises(ConfigError, match=r"simulate\.partition"):
        simulate(Pooled, run__name="other", simulate__partition="mine:Part")


# --- the data


@pytest.mark.parametrize("task", [Natural, Pooled])
def test_a_run_that_goes_on_with_other_data_says_so_once(task):
    assert not notices(simulate(task, run__name="r"))
    assert not notices(simulate(task, run__name="r", run__rounds=3))
    DATA["b"][7] = 5.0
    told = notices(simulate(task, run__name="r", run__rounds=5))
    whose = "b" if task is Natural else "the pool"
    assert [text.partition(" (")[0] for text in told] == [
        f"round 4: the data of {whose} are not those of the rounds before"
    ]
    assert "--fresh" in told[0]
    assert told == notices(simulate(task, run__name="r", run__rounds=6))
    assert not notices(fedtrain.simulate(task(), HERE | {"run.name": "r"}, fresh=True))


def test_peers_that_go_on_with_other_data_say_so():
    fedtrain.simulate(Natural(), PEERS | {"run.name": "r"}, mode="gossip")
    DATA["c"] = DATA["c"][:30]
    run = fedtrain.simulate(Natural(), PEERS | {"run.name": "r", "run.rounds": 3}, mode="gossip")
    assert [text.partition(" (")[0] for text in notices(run) if "data of" in text] == [
        "round 3: the data of c are not those of the rounds before"
    ]


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
OTHERS = {
    "a value": (X + (X == 3), Y), "fewer": (X[:5], Y[:5]), "a shape": (X.reshape(6, 2, 1), Y),
    "a type": (X.double(), Y), "another order": (X.flip(0), Y), "labels turned": (X, 5 - Y),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_data_have_another_digest(other):
    assert data_digest((X, Y)) == data_digest((X.clone(), Y.clone()))
    assert data_digest(other) != data_digest((X, Y))


def test_a_digest_takes_datasets_big_tensors_and_streams():
    big = torch.zeros(1 << 22, 2)
    assert data_digest((big,)) == data_digest((big.clone(),))
    assert data_digest((big + 1,)) != data_digest((big,))
    assert data_digest([X, X, Y, Y]) != ""
    assert data_digest(DataLoader([(1, 2)])) == ""  # which is not read
    assert data_digest((torch.zeros(3, 0), torch.zeros(3, 2, dtype=torch.bool))) != ""
    assert data_digest((torch.ones(3, 2, requires_grad=True), torch.ones(3, dtype=torch.bfloat16))) != ""


def test_damaged_notes_about_data_stop_no_run(tmp_path):
    run = simulate(run__name="r")
    file = run.path / "data.txt"
    file.write_bytes(b"\xff\x00 \n\n" + file.read_bytes()[:-3])
    simulate(run__name="r", run__rounds=3)
    DataNotes(tmp_path / "nowhere").note("a", lambda: "1")  # where there is no folder, nothing is kept
    assert not (tmp_path / "nowhere").exists()
