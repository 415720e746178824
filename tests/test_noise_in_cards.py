"""A model's card tells the noise in the model and its price, as far as whoever writes it knows them."""

import asyncio
import json
import math

import pytest

import fedtrain
from fedtrain.privacy import Release, epsilon
from fedtrain.tracking import log
from fedtrain.tracking.export import export
from tests import inline as federations
from tests.peers import village
from tests.wards import WARDS

TOML = """[run]
name = "r"
task = "ward_task:Wards"
rounds = 3
[simulate]
workers = 0
[gossip]
topology = "complete"
"""
PLAIN = federations.TASK.replace("nn.BatchNorm1d(8), ", "")  # noise would spoil moving buffers
SITE = {"privacy.noise_multiplier": 8.0, "privacy.clip": 0.5}
SUM = SITE | {"privacy.where": "sum"}
EXAMPLE = {"privacy.unit": "example", "privacy.noise_multiplier": 4.0, "privacy.clip": 0.25,
           "train.batch_size": 0}  # fmt: skip
SERVER = {"strategy.kind": "dp_fedavg", "strategy.noise_multiplier": 6.0}


def noise_of(folder):
    """What model.json and the card in a folder say of noise."""
    card = (folder / "MODEL_CARD.md").read_text()
    _, _, told = card.partition("## Noise\n\n")
    return json.loads((folder / "model.json").read_text()).get("noise"), told.partition("\n\n##")[0]


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "ward_task.py").write_text(WARDS)
    (tmp_path / "fedtrain.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "mode", "words"),
    [
        (SITE, "federated", ("norm 0.5", "Gaussian noise of 8 times", "at its site", "all data of one site")),
        (SITE, "gossip", ("norm 0.5", "Gaussian noise of 8 times", "at its site", "all data of one site")),
        (SUM, "federated", ("norm 0.5", "discrete Gaussian noise of 8 times", "sums under masks")),
        pytest.param(EXAMPLE, "federated", ("norm 0.25", "Gaussian noise of 4 times", "DP-SGD",
                                            "any single example"), marks=pytest.mark.slow(4)),
        (SERVER, "federated", ("at the server", "3 times what one site can change")),
    ],
)  # fmt: skip
def test_a_simulations_card_has_the_mechanism_the_noise_and_the_epsilon_of_its_log(
    project, settings, mode, words
):
    run = fedtrain.simulate(project, settings, mode=mode)
    spent = [event for event in log.read(run.path) if event.kind == "privacy_spent"]
    noise, told = noise_of(run.path / "model")
    assert (noise["epsilon"], noise["delta"]) == (spent[-1].epsilon, spent[-1].delta)
    for each in (*words, f"epsilon = {spent[-1].epsilon:.4g} at delta = 1e-05", "protects nobody"):
        assert each in told
    earlier = noise_of(export(run.path, project / "earlier", 2))[0]
    assert earlier["epsilon"] == max(event.epsilon for event in spent if event.round == 2) < noise["epsilon"]


def test_a_card_of_a_run_without_noise_says_nothing_of_noise(project):
    run = fedtrain.simulate(project)
    assert noise_of(run.path / "model") == (None, "")


def test_evaluating_a_model_leaves_what_its_card_says_of_noise(project):
    run = fedtrain.simulate(project, SITE)
    before = noise_of(run.path / "model")
    fedtrain.evaluate(run)
    assert noise_of(run.path / "model") == before


@pytest.mark.slow(5)
def test_an_aggregators_card_names_the_sites_that_said_that_they_add_noise_of_their_own(tmp_path, inline):
    own = {"noise_multiplier": 2.0, "clip": 0.5}
    config = federations.project(tmp_path, PLAIN, privacy=own)
    asyncio.run(federations.federation(config))
    noise, told = noise_of(config.run_dir / "model")
    assert noise == {"where": "site", "sites": ["a", "b", "c"], "others": []}
    assert "add noise of their own to all that leaves them: a, b, c." in told


@pytest.mark.slow(5)
def test_an_aggregator_knows_the_price_of_noise_in_sums_of_a_site_that_was_in_each(tmp_path, inline):
    own = {"where": "sum", "noise_multiplier": 8.0, "clip": 0.5}
    config = federations.project(tmp_path, PLAIN, privacy=own)
    asyncio.run(federations.federation(config))
    noise, told = noise_of(config.run_dir / "model")
    assert noise["epsilon"] == epsilon([Release("discrete_gaussian", 4.0, steps=3)], 1e-5)
    assert "in each site's own log" in told


@pytest.mark.slow(5)
def test_a_peers_card_has_the_peers_own_noise_and_price(tmp_path):
    async def run():
        async with village(tmp_path, "ab", rounds=3) as peers:
            own = {"noise_multiplier": 8.0, "clip": 0.5}
            await asyncio.gather(peers.start("a", privacy=own), peers.start("b"))
        return peers.config()

    config = asyncio.run(run())
    noise, told = noise_of(config.peer_dir("a") / "model")
    assert math.isclose(noise["epsilon"], epsilon([Release("gaussian", 4.0, steps=3)], 1e-5))
    assert "of the peer that wrote this" in told
    assert noise_of(config.peer_dir("b") / "model") == (None, "")
