"""CHOCO's γ for a compressor, copies that begin at the first model, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedtrain import compression
from fedtrain.config import Config
from fedtrain.errors import ConfigError
from fedtrain.gossip import build, tuning
from fedtrain.runtime.peers.gossip_setup import algorithm_of, as_begun
from fedtrain.store import RunStore
from fedtrain.topology import parse

from .test_gossip import Peers
from .test_gossip_peers import config, simulated

NUMEL = 2000
TORUS = parse("torus").round(tuning.PEERS, 0).graph
COMPRESSORS = [
    "quantize:8",
    "quantize:4",
    "quantize:2",
    "sign",
    "topk:0.1",
    "randomk:0.1",
    "powersgd:4",
    "bfloat16",
]


def choco(text, **keys):
    return build("choco", keys, compression.parse(text).contraction())


@pytest.mark.slow(4)
@pytest.mark.parametrize("text", COMPRESSORS)
def test_with_the_gamma_that_is_found_every_compressor_beats_no_communication(text):
    found = tuning.tuned(choco(text), TORUS, NUMEL)
    assert tuning.distance(found, TORUS, NUMEL) < tuning.WORTH
    alone = {peer: replace(near, own=1.0, incoming={}, outgoing={}) for peer, near in TORUS.items()}
    assert tuning.distance(found, alone, NUMEL) == pytest.approx(1.0, abs=0.01)


@pytest.mark.slow(3)
def test_what_costs_nothing_keeps_gamma_1_and_what_leaves_much_out_gets_less():
    gammas = {text: tuning.tuned(choco(text), TORUS, NUMEL).gamma for text in ("quantize:8", "topk:0.1")}
    assert gammas["quantize:8"] == 1.0
    assert gammas["topk:0.1"] < 1.0


@pytest.mark.slow(3)
def test_a_gamma_with_which_peers_drift_apart_is_refused_and_a_good_one_named():
    with pytest.raises(ConfigError, match=r"gossip.gamma: with 1 and .* Set gossip.gamma = 0\.\d+"):
        tuning.check(choco("randomk:0.1"), TORUS, NUMEL)
    tuning.check(choco("quantize:8"), TORUS, NUMEL)


@pytest.mark.slow(4)
def test_a_compressor_that_is_worth_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"gossip.compressor: .* loses so much"):
        tuning.tuned(choco("randomk:0.001"), TORUS, NUMEL)


def test_copies_begin_at_the_first_model_so_that_nobody_has_to_learn_it_first():
    """From a common start and without training nobody moves, whatever the compressor leaves out."""
    start = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    algorithm = choco("sign")
    peers = Peers(algorithm, "ring", 8, xs={str(i): start.clone() for i in range(8)})
    peers.states = {p: algorithm.init(x) for p, x in peers.xs.items()}
    peers.run(5)
    assert all(torch.equal(x, start) for x in peers.xs.values())


def test_a_sender_that_went_on_from_older_copies_is_noticed_and_sends_its_copy_whole():
    """As after kill -9: it sent q, did not commit, and makes another q of the same number."""
    peers = Peers(choco("quantize:8"), "ring", 4)
    peers.run(3)
    before, model = dict(peers.states["0"]), peers.xs["0"].clone()
    peers.run(1)
    peers.states["0"], peers.xs["0"] = before, model + 1.0
    peers.run(8)
    for p, state in peers.states.items():
        for q, near in peers.graph.round(4, 0).graph.items():
            if p in near.incoming:
                assert torch.equal(state["copy"], peers.states[q][f"copy/{p}"])


def test_a_run_keeps_the_gamma_that_it_found(tmp_path, monkeypatch):
    settings = config(tmp_path, algorithm="choco", topology="ring", compressor="topk:0.1")
    simulated(settings)
    store = RunStore(settings.gossip_dir, read_only=True)
    kept = store.meta()["gamma"]
    store.close()
    assert kept in tuning.GAMMAS
    monkeypatch.setattr(tuning, "tuned", None)  # it is not looked for again
    simulated(settings)
    algorithm, graph = algorithm_of(settings)
    assert as_begun(settings, algorithm, graph, 21, {"gamma": kept}).gamma == kept


# --- on data

DIGITS = Path(__file__).parents[1] / "examples" / "digits"


def accuracy(folder, **gossip_keys):
    """Of the mean model of 16 peers that share the digits by Dirichlet(0.1), after 12 rounds."""
    table = Config.load(DIGITS / "fedtrain.toml").table()
    table["run"] |= {"dir": str(folder), "task": "task:Digits", "rounds": 12}
    table["simulate"] |= {"sites": 16, "partition": "dirichlet:0.1", "workers": 1}
    table["secagg"] |= {"enabled": False}
    table["evaluate"] |= {"every": 12}
    table["gossip"] |= {"topology": "torus"} | gossip_keys
    return simulated(Config.of(table, DIGITS), fresh=True)[0].metrics["accuracy"]


@pytest.mark.slow(45)
def test_on_uneven_digits_every_accepted_compressor_beats_no_communication(tmp_path):
    alone = accuracy(tmp_path, rule="balance:gamma=0.000000001", agree=False)  # which counts nobody
    found = {}
    for text in [*COMPRESSORS, "topk:0.01", "lowrank:4", "float16"]:
        try:
            found[text] = accuracy(tmp_path, algorithm="choco", compressor=text)
        except ConfigError as refused:
            found[text] = f"refused: {refused}"
    assert min(one for one in found.values() if isinstance(one, float)) > alone
    assert {"quantize:8", "sign", "topk:0.1"} <= {t for t, one in found.items() if isinstance(one, float)}
