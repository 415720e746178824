"""strategy.weights: how sites count in the mean, as in plain torch in float64; and where it is refused."""

import pytest
import torch

import fedtrain
from fedtrain import strategies
from fedtrain.config import Config
from fedtrain.errors import ConfigError
from fedtrain.transport.endpoints import RemoteCohort
from tests import toy
from tests.inprocess import certify, federation, final, with_port
from tests.inprocess import simulated as simulate_it
from tests.toy import LR, SITES, Toy, batches_of, examples_of

COUNTS = torch.tensor([float(examples_of(site)) for site in SITES], dtype=torch.float64)
WEIGHTS = {"examples": COUNTS / COUNTS.sum(), "equal": torch.full_like(COUNTS, 1 / len(SITES))}
ROUNDS = 4
HERE = {
    "run.rounds": ROUNDS, "run.seed": 5, "train.lr": LR, "train.batch_size": 8, "simulate.workers": 0,
    "evaluate.every": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def simulated(kind, weights="auto", *, task=Toy, **more):
    settings = {key.replace("__", "."): value for key, value in more.items()}
    name = "-".join((kind, weights, *(str(value).replace(":", "") for value in more.values())))
    chosen = {"strategy.weights": weights} if weights != "auto" else {}
    run = fedtrain.simulate(task(), HERE | {"run.name": name, "strategy.kind": kind} | chosen | settings)
    return vector(run.model())


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(weights, *, variates=False):
    """FedAvg, or SCAFFOLD (Algorithm 1, option II, c = Σ pᵢcᵢ) by plain SGD, all sites in each round."""
    model, task, p = Toy().model(), Toy(), WEIGHTS[weights]
    w = vector(model)
    c = torch.zeros(len(SITES), len(w), dtype=torch.float64)
    for round in range(ROUNDS):
        deltas, after = torch.zeros_like(c), torch.zeros_like(c)
        for at, site in enumerate(SITES):
            (x, y), batches = task.data(site), batches_of(site, round)
            v = w.clone()
            for rows in batches:
                torch.nn.utils.vector_to_parameters(v, model.parameters())
                slopes = torch.autograd.grad(task.loss(model, (x[rows], y[rows])), [*model.parameters()])
                v = v - LR * (torch.cat([g.flatten() for g in slopes]) + variates * (p @ c - c[at]))
            deltas[at] = v - w
            after[at] = c[at] - p @ c - deltas[at] / (len(batches) * LR)
        w, c = w + p @ deltas, after
    return w


OPEN = {"secagg__enabled": False}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", ["fedavg", "scaffold"])
def test_sites_count_as_the_setting_says(kind, weights):
    found = simulated(kind, weights, **OPEN)
    assert torch.allclose(found, by_hand(weights, variates=kind == "scaffold"), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("kind", "own"), [("fedavg", "examples"), ("scaffold", "equal")])
def test_without_the_setting_sites_count_as_in_the_paper(kind, own):
    assert torch.equal(simulated(kind, **OPEN), simulated(kind, own, **OPEN))


@pytest.mark.parametrize("kind", ["fedavg", "fedadam", "scaffold"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_under_masks_sites_count_as_in_the_open(kind, weights):
    bounds = {"secagg__max_examples": 64} | ({"strategy__max_examples": 64} if kind == "scaffold" else {})
    masked = simulated(kind, weights, **bounds)
    assert torch.allclose(masked, simulated(kind, weights, **OPEN), rtol=0, atol=1e-4)
    assert torch.equal(masked, simulated(kind, weights, **bounds, simulate__masks=True))


@pytest.mark.parametrize("kind", ["fedavg", "scaffold"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_stacks_of_sites_count_as_in_the_loop(kind, weights):
    stacked = simulated(kind, weights, **OPEN, simulate__engine="stacked")
    assert torch.allclose(stacked, simulated(kind, weights, **OPEN), rtol=0, atol=1e-10)


def test_a_site_that_never_trained_counts_as_one_of_average_size():
    """SCAFFOLD's c = Σ nᵢcᵢ / Σ nᵢ over all registered sites, of which one has trained."""
    strategy = strategies.build("scaffold", {"weights": "examples", "max_examples": 100.0})
    weights = torch.zeros(2, dtype=torch.float64)
    sums = fedtrain.learning.RoundSums(
        weights, registered=4, weight=20.0, sums={"dc": torch.tensor([0.2, 0.4], dtype=torch.float64)},
        scalars={"examples": 20.0, "sites": 1.0},
    )  # fmt: skip
    _, state = strategy.step(weights, strategy.init(weights), sums)
    assert torch.allclose(state["c"], torch.tensor([0.25, 0.5], dtype=torch.float64))


# --- modes


@pytest.mark.slow(2)
@pytest.mark.parametrize(("kind", "weights"), [("fedavg", "equal"), ("scaffold", "examples")])
@pytest.mark.parametrize("masks", [True, False], ids=["masks", "open"])
def test_a_federation_counts_its_sites_as_the_simulation_does(tmp_path, monkeypatch, kind, weights, masks):
    some = SITES[:4]
    monkeypatch.setattr(toy, "SITES", some)
    members = RemoteCohort.members
    monkeypatch.setattr(RemoteCohort, "members", lambda cohort, at_least: members(cohort, len(some)))
    options = {"weights": weights, "min_sites": 3, "fraction": 0.75, "attempts": 1}
    found = toy.config(tmp_path, kind, options, run={"rounds": 3, "name": "r"}, secagg={"enabled": masks})
    config = Config.of(with_port(found.table()), tmp_path)
    certify(config, some)
    federation(config, some)
    simulate_it(config, monkeypatch)
    assert final(config.run_dir).digest == final(config.simulate_dir).digest


# --- refused

OTHERS = {
    "feddyn": "examples", "mimelite": "examples", "ifca": "examples", "dp_fedavg": "examples",
    "fednova": "equal", "adaptive_fedprox": "equal", "qfedavg": "equal", "cyclic": "equal",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "weights"), OTHERS.items())
def test_weights_that_a_formula_does_not_allow_are_refused(kind, weights):
    with pytest.raises(ConfigError, match=rf"^strategy.weights: {kind} has weights by a formula of its own"):
        strategies.build(kind, {"weights": weights})


def test_a_value_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"strategy.weights: 'uniform' is not one of auto, examples, equal"):
        strategies.build("fedavg", {"weights": "uniform"})


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"aggregation__rule": "median", **OPEN}, 'aggregation.rule = "median" counts all sites alike'),
        ({"privacy__where": "sum", "privacy__noise_multiplier": 1.0}, 'privacy.where = "sum" counts all'),
    ],
)
def test_weights_are_refused_where_all_sites_count_alike(more, says):
    with pytest.raises(ConfigError, match=f"^strategy.weights: {says}"):
        simulated("fedavg", "examples", **more)


def test_gossip_refuses_weights_of_a_server():
    peers = {key: value for key, value in HERE.items() if key != "simulate.workers"}
    with pytest.raises(ConfigError, match=r"strategy.weights, and peers exchange whole models alone"):
        fedtrain.simulate(Toy(), peers | {"strategy.weights": "equal"}, mode="gossip")


def test_another_choice_of_weights_is_another_run():
    simulated("fedavg", "equal", run__name="r", **OPEN)
    with pytest.raises(fedtrain.errors.StoreError, match=r"strategy.weights was 'equal', is 'examples'"):
        simulated("fedavg", "examples", run__name="r", **OPEN)


BY_EXAMPLES = {"fednova", "adaptive_fedprox"}  # alone
ALIKE = {"feddyn", "mimelite", "ifca", "dp_fedavg"}  # alone
NEITHER = {"qfedavg", "cyclic"}


def test_each_strategys_first_choice_is_that_of_its_paper():
    for kind, cls in strategies.STRATEGIES.items():
        both = cls.weighs[::-1] if kind in ("scaffold", "per_fedavg") else cls.weighs
        alone = "examples" if kind in BY_EXAMPLES else "equal"
        wanted = () if kind in NEITHER else (alone,) if kind in BY_EXAMPLES | ALIKE else ("examples", "equal")
        assert both == wanted, kind
