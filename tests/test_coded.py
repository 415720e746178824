"""Outer steps of DiLoCo and NoLoCo in 8 bits with error feedback."""

from __future__ import annotations

import asyncio
from functools import cache

import pytest
import torch

from fedtrain import compression
from fedtrain.errors import ConfigError
from fedtrain.gossip import build, tuning
from fedtrain.runtime.peers.gossip import Peer
from fedtrain.runtime.peers.gossip_setup import algorithm_of, as_begun, begun_with, compressor_of
from fedtrain.store import RunStore
from fedtrain.topology import parse

from .limits import bounded
from .peers import village
from .test_gossip import Peers, both_ways
from .test_gossip_peers import committed, config, models, of_speed, simulated

OUTER = ["diloco", "noloco"]
FINE = ["quantize:8", "quantize:4", "float16", "bfloat16"]
TORUS, NUMEL = parse("torus").round(tuning.PEERS, 0).graph, 400


def outer(kind, text="quantize:8"):
    return build(kind, {}, compression.ErrorFeedback(compression.parse(text)) if text else None)


@cache
def plain(kind):
    """How far peers end that send whole models."""
    return tuning.distance(outer(kind, ""), TORUS, NUMEL)


@pytest.mark.parametrize("kind", OUTER)
def test_the_mean_stays_whatever_an_encoding_leaves_out_and_which_parcels_are_lost(kind):
    peers = Peers(outer(kind, "quantize:4"), "matching", 8, d=40)
    assert peers.run(30, both_ways(0.3)).drift < 1e-12
    assert peers.run(60).disagreement < 0.1 * peers.first


@pytest.mark.parametrize("kind", OUTER)
def test_what_travels_is_0_26_of_whole_models_at_most(kind):
    sent = {}
    for text in ("quantize:8", ""):
        xs = {p: torch.randn(20_000, generator=torch.Generator().manual_seed(int(p))) for p in "01"}
        peers = Peers(outer(kind, text), "ring", 2, xs=xs).run(2)
        sent[text] = sum(parcel.nbytes for box in peers.post.values() for _, parcel in box.values())
    assert sent["quantize:8"] <= 0.26 * sent[""]


@pytest.mark.parametrize("kind", OUTER)
@pytest.mark.parametrize("text", FINE)
def test_what_is_accepted_brings_peers_far_closer_than_no_communication(tmp_path, kind, text):
    algorithm, _ = algorithm_of(config(tmp_path, algorithm=kind, compressor=text))
    assert tuning.distance(algorithm, TORUS, NUMEL) < plain(kind) + 0.1 < 0.6


@pytest.mark.parametrize("kind", OUTER)
@pytest.mark.parametrize("text", ["quantize:2", "sign", "topk:0.1", "randomk:0.1", "powersgd:4"])
def test_what_leaves_so_much_out_that_peers_drift_apart_is_refused(tmp_path, kind, text):
    with pytest.raises(ConfigError, match=f"{kind} sends whole models, and .* leaves out so much"):
        algorithm_of(config(tmp_path, algorithm=kind, compressor=text))
    if (kind, text) in (
        ("diloco", "quantize:2"),
        ("diloco", "sign"),
        ("noloco", "sign"),
    ):  # one stands for all
        assert tuning.distance(outer(kind, text), TORUS, NUMEL) > plain(kind) + 0.5


def test_outer_steps_are_of_8_bits_unless_a_run_says_otherwise_or_masks_are_on(tmp_path):
    for kind in OUTER:
        assert algorithm_of(config(tmp_path, algorithm=kind))[0].compressor is not None
        assert algorithm_of(config(tmp_path, algorithm=kind, compressor=""))[0].compressor is None
    masked = config(tmp_path, algorithm="diloco", topology="regular:4", masks=True)
    assert compressor_of(masked) is None


def test_a_run_from_before_goes_on_with_whole_models(tmp_path):
    settings = config(tmp_path, algorithm="diloco")
    algorithm, graph = algorithm_of(settings)
    assert as_begun(settings, algorithm, graph, 21, {}) is algorithm
    assert as_begun(settings, algorithm, graph, 21, begun_with(algorithm)) is algorithm
    assert as_begun(settings, algorithm, graph, 21, {"version": 3}).compressor is None


@pytest.mark.parametrize("kind", OUTER)
def test_a_run_in_two_parts_has_the_bits_of_one_and_keeps_its_residuals(tmp_path, kind):
    keys = {"algorithm": kind, "topology": "ring"}
    whole = of_speed(tmp_path, "whole", "equal", rounds=6, **keys)
    simulated(whole)
    simulated(of_speed(tmp_path, "parts", "equal", rounds=3, **keys))
    parts = of_speed(tmp_path, "parts", "equal", rounds=6, **keys)
    residual = committed(parts.gossip_dir).state["site-1/state/x/residual"]
    assert float(residual.norm()) > 0
    simulated(parts)
    assert models(parts) == models(whole)


def test_a_real_peers_residual_is_in_each_commit_and_a_peer_that_was_killed_goes_on_from_it(
    tmp_path, monkeypatch
):
    taken, go_on = [], Peer.go_on

    def noted(self, checkpoint):
        go_on(self, checkpoint)
        taken.append(self.kept()["state/x/residual"])

    monkeypatch.setattr(Peer, "go_on", noted)

    async def main():
        async with village(
            tmp_path, "ab", rounds=8, algorithm="diloco", compressor="bfloat16", agree=False
        ) as v:
            for name in "ab":
                v.start(name, pace_s=0.05)
            await v.until(lambda: v.rounds_of("a") >= 3)
            await v.stop("a")  # which writes nothing any more, as kill -9
            store = RunStore(v.config().peer_dir("a"), read_only=True)
            on_disk = store.latest()
            store.close()
            residual = on_disk.state["a/state/x/residual"]
            assert float(residual.norm()) > 0
            v.start("a", pace_s=0.05)
            await v.until(lambda: taken)
            assert torch.equal(taken[0], residual)
            await asyncio.gather(*v.running.values())

    bounded(main())
