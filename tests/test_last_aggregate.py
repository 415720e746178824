"""Centred clipping around the last aggregate: the paper's algorithm over rounds, resumed to the same bits."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain.aggregation import Known, base, build, kept, last
from fedtrain.arena import Arena
from fedtrain.errors import ConfigError
from fedtrain.messages import Train
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.peers import gossip_setup
from fedtrain.runtime.simulations.plain_sums import FixedPointSums
from fedtrain.runtime.simulations.simulated_masks import SimulatedMasks
from fedtrain.runtime.star import federated
from fedtrain.strategies import build as build_strategy
from fedtrain.transport.memory import LocalCohort

from . import test_asynchronous, test_secure
from .test_aggregation import SCHEMA as MIXED_SCHEMA
from .test_aggregation import in_files, some_updates
from .test_before import nearest_mixed
from .test_federated import SCHEMA, SITES, Shuffled, arena, config, handlers, pull, run
from .test_fltrust import updates_of
from .test_rules import drawn

RULE = {"rule": "centered_clip", "start": "last", "radius": 3.0, "iterations": 2}
OPTIONS = {key: value for key, value in RULE.items() if key != "rule"}


def clipped_around(rows, centre, radius, iterations):
    """Karimireddy et al. 2021, Algorithm 2, from the last aggregate on; radius 0: the distances' median."""
    for _ in range(iterations):
        pull = rows - centre
        far = np.linalg.norm(pull, axis=1)
        tau = radius or np.sort(far)[(len(rows) - 1) // 2]
        scale = [1.0 if length <= tau else tau / length for length in far]
        centre = centre + (pull * np.array(scale)[:, None]).mean(axis=0)
    return centre


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(3, 12), d=st.integers(1, 60), values=st.integers(1, 300))
@pytest.mark.parametrize("before", [[], ["nnm:1"]])
@pytest.mark.parametrize("radius", [0.0, 2.0])
def test_it_is_what_the_paper_says_whatever_the_chunks(radius, before, seed, n, d, values):
    rows, centre = drawn(seed, n, d).numpy(), drawn(seed + 1, 1, d).numpy()
    schema, updates = updates_of(np.concatenate([rows, centre]))
    rule = build("centered_clip", {"start": "last", "radius": radius}, before=before)
    was = base.VALUES
    try:
        base.VALUES = values
        found = rule.combine(schema, updates[:-1], Known(last=updates[-1].delta))
    finally:
        base.VALUES = was
    mixed = nearest_mixed(rows, 1) if before else rows
    expected = clipped_around(mixed, centre[0], radius, 3)
    np.testing.assert_allclose(found.flat(schema.sections[0]).numpy(), expected, rtol=1e-12, atol=1e-12)


def test_after_buckets_too_the_last_aggregate_is_a_row_of_its_own():
    rows, centre = drawn(1, 6, 9).numpy(), drawn(2, 1, 9).numpy()
    schema, updates = updates_of(np.concatenate([rows, centre]))
    rule = build("centered_clip", OPTIONS, before=["bucketing:6", "clip:0.5"])
    mean = rows.mean(axis=0, keepdims=True)
    shortened = mean * min(1, 0.5 / np.linalg.norm(mean))
    found = rule.combine(schema, updates[:-1], Known(last=updates[-1].delta))
    expected = clipped_around(shortened, centre[0], 3.0, 2)
    np.testing.assert_allclose(found.flat(schema.sections[0]).numpy(), expected, rtol=1e-12, atol=1e-12)


def test_without_a_last_aggregate_it_starts_from_zero(tmp_path):
    updates, zero = some_updates(), build("centered_clip", OPTIONS | {"start": "zero"})
    first, expected = (
        build("centered_clip", OPTIONS).combine(MIXED_SCHEMA, in_files(updates, tmp_path)),
        zero.combine(MIXED_SCHEMA, updates),
    )
    assert first.digest == expected.digest
    rows = drawn(0, 5, 7)
    assert torch.equal(build("centered_clip", OPTIONS).of_vectors(rows), zero.of_vectors(rows))


def test_the_state_is_the_aggregates_trained_floats_and_gives_it_back():
    rule, made = build("centered_clip", OPTIONS, before=["nnm:1"]), some_updates()[2].delta
    state = kept(rule, made)
    assert sorted(state) == ["aggregation/bfloat16", "aggregation/float32", "aggregation/float64"]
    again = last(MIXED_SCHEMA, {"float32/momentum": torch.ones(3), **state})
    assert again is not None
    assert all(torch.equal(vector, again.trained()[dtype]) for dtype, vector in made.trained().items())
    assert not any(vector.any() for vector in again.others().values())
    assert last(MIXED_SCHEMA, {"float32/momentum": torch.ones(3)}) is None
    assert kept(build("centered_clip", {}), made) == {}


# --- rounds


def by_hand(rounds):
    """The trained weights of test_federated's sites after so many rounds, by numpy."""
    weights, centre, section = arena(), np.zeros(6), SCHEMA.sections[0]
    for number in range(rounds):
        request = Train(id="", round=number, weights=weights)
        deltas = np.stack([pull(site)(request).delta.flat(section).double().numpy() for site in SITES])
        centre = clipped_around(deltas[:, :6], centre, 3.0, 2).astype(np.float32).astype(np.float64)
        moved = Arena.zeros(SCHEMA)
        moved.flat(section)[:6] = torch.from_numpy(centre).float()
        moved.flat(section)[6:] = torch.from_numpy(np.median(deltas[:, 6:], axis=0)).float()
        weights = Arena(SCHEMA, weights.data.clone())
        weights.flat(section).add_(moved.flat(section))
    return weights.flat(section)


def test_rounds_clip_around_what_the_round_before_gave(tmp_path):
    after = run(config(tmp_path, aggregation=RULE), LocalCohort(handlers()))[1]
    torch.testing.assert_close(
        after.weights.chunk(SCHEMA.sections[0], 0, 8), by_hand(5), rtol=1e-6, atol=1e-6
    )
    fresh = run(config(tmp_path / "0", aggregation=RULE | {"start": "zero"}), LocalCohort(handlers()))[1]
    assert after.weights.digest != fresh.weights.digest


@pytest.mark.parametrize("kind", ["fedavg", "fedadam"])
def test_stopped_after_any_exchange_and_started_again_the_model_is_the_same(tmp_path, kind):
    class Stop(BaseException):
        pass

    def dies_at(count):
        asked = iter(range(10**6))

        def loses(site, request):
            if next(asked) == count:
                raise Stop
            return False

        return loses

    keys = {"strategy": {"kind": kind}, "aggregation": RULE, "compression": {"down": "quantize:8"}}
    whole = run(config(tmp_path / "whole", **keys), LocalCohort(handlers()))[1].weights.digest
    for count in range(0, 45, 7):
        cfg = config(tmp_path / str(count), **keys)
        with pytest.raises(Stop):
            run(cfg, LocalCohort(handlers(), loses=dies_at(count)))
        assert run(cfg, LocalCohort(handlers()))[1].weights.digest == whole


def test_s34_the_order_of_arrival_changes_no_bit(tmp_path):
    digests = {
        run(config(tmp_path / str(seed), aggregation=RULE), Shuffled(handlers(), seed))[1].weights.digest
        for seed in range(3)
    }
    assert len(digests) == 1


def test_groups_under_masks_are_clipped_around_the_last_aggregate_as_their_plain_sums_are(tmp_path):
    sites, digests = [f"site-{c}" for c in "abcdefghi"], []
    for name, answers in (("masks", SimulatedMasks), ("sums", FixedPointSums)):
        cfg = test_secure.config(
            tmp_path / name, run={"rounds": 3}, secagg={"groups": 3}, strategy={"min_sites": 9},
            aggregation=RULE | {"radius": 0.5},
        )  # fmt: skip
        events = test_secure.Events()
        with test_secure.RunStoreOf(cfg) as store:
            made = answers(cfg, test_secure.openly(sites), events)
            asyncio.run(federated.run(Journal(cfg, store, events), made, build_strategy("fedavg", {})))
            checkpoint = store.latest()
            digests.append((checkpoint.weights.digest, checkpoint.state["aggregation/float32"].tolist()))
    assert digests[0] == digests[1]
    assert any(digests[0][1])


def test_versions_without_rounds_keep_the_last_aggregate_too(tmp_path):
    """With all sites in the buffer, equally fast, they are the rounds, bit for bit."""
    cfg = test_asynchronous.config(tmp_path / "a", aggregation=RULE, asynchronous={"buffer": 5})
    _, version = test_asynchronous.run(cfg, LocalCohort(handlers()), clocked=True)
    sync = test_asynchronous.config(tmp_path / "s", aggregation=RULE, asynchronous={"enabled": False})
    assert version.weights.digest == run(sync, LocalCohort(handlers()))[1].weights.digest


def test_a_peer_has_no_last_aggregate_to_start_from(tmp_path):
    cfg = config(tmp_path, gossip={"rule": "centered_clip:start=last"})
    with pytest.raises(ConfigError, match=r'peers don\'t have. Use "centered_clip:start=zero"'):
        gossip_setup.algorithm_of(cfg)
