"""FLTrust: the paper's algorithm in numpy, whatever the others send; and a root site that is always asked."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain.aggregation import Known, aggregate, base, build
from fedtrain.arena import Arena
from fedtrain.errors import ConfigError, RoundError, SiteMissing
from fedtrain.events import silent
from fedtrain.messages import Update
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.runtime.star import asynchronous, federated
from fedtrain.schema import Schema, TensorSpec
from fedtrain.transport.memory import LocalCohort
from tests.inline import federation, final, project, simulation

from .test_aggregation import SCHEMA, in_files, some_updates
from .test_federated import Shuffled, bad, config, handlers, run
from .test_rules import drawn

NAMES = list("abcdefghijkl")
BY_B = {"rule": "fltrust", "root": "b"}
OPEN = {"secagg": {"enabled": False}, "aggregation": BY_B}


def updates_of(rows):
    schema = Schema((TensorSpec("w", (rows.shape[1],), "float64", True),))
    made = []
    for row in rows:
        delta = Arena.zeros(schema)
        delta.flat(schema.sections[0]).copy_(torch.as_tensor(row))
        made.append(Update(delta=delta, num_examples=1.0))
    return schema, made


def combined(rows, root="a"):
    schema, updates = updates_of(rows)
    found = aggregate(build("fltrust", {"root": root}), schema, updates, Known(sites=NAMES[: len(rows)]))
    return found.flat(schema.sections[0]).numpy()


def reference(rows, root):
    """Cao et al. 2021, Algorithm 2, lines 9 to 12."""
    g0, norm0 = rows[root], np.linalg.norm(rows[root])
    total, trust = np.zeros_like(g0), 0.0
    for i, g in enumerate(rows):
        if i != root:
            score = max(0.0, float(g @ g0) / (np.linalg.norm(g) * norm0))
            total, trust = total + score * norm0 / np.linalg.norm(g) * g, trust + score
    return total / trust if trust else total


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(2, 12), d=st.integers(1, 60), values=st.integers(1, 300))
def test_it_is_what_the_paper_says_whatever_the_chunks(seed, n, d, values):
    rows, root, before = drawn(seed, n, d).numpy(), seed % n, base.VALUES
    try:
        base.VALUES = values
        found = combined(rows, NAMES[root])
    finally:
        base.VALUES = before
    np.testing.assert_allclose(found, reference(rows, root), rtol=1e-12, atol=1e-12)


def test_by_hand():
    rows = np.array([[3.0, 4.0], [30.0, 40.0], [-3.0, -4.0], [5.0, 0.0]])  # cosines 1, -1 and 0.6
    assert combined(rows) == pytest.approx(np.array([3 + 0.6 * 5, 4.0]) / 1.6)


def test_any_number_of_hostile_sites_moves_the_model_no_further_than_the_root_does():
    rows = drawn(3, 12, 30).numpy()
    rows[1:] *= 1e30
    assert np.linalg.norm(combined(rows)) <= np.linalg.norm(rows[0]) * (1 + 1e-12)


@pytest.mark.parametrize("others", [[-3.0, -4.0], [0.0, 0.0], [4.0, -3.0]])
def test_where_nobody_is_trusted_the_model_stays(others):
    assert combined(np.array([[3.0, 4.0], others, others])).tolist() == [0.0, 0.0]
    assert combined(np.array([[0.0, 0.0], others, others])).tolist() == [0.0, 0.0]


def test_files_give_the_bits_that_memory_gives_and_what_is_not_trained_moves_as_at_the_root(tmp_path):
    updates, rule = some_updates(), build("fltrust", {"root": "c"})
    whole = aggregate(rule, SCHEMA, updates, Known(sites=NAMES[:5]))
    filed = aggregate(rule, SCHEMA, in_files(updates, tmp_path), Known(sites=NAMES[:5]))
    assert filed.digest == whole.digest
    assert torch.equal(whole.views()["count"], updates[2].delta.views()["count"])


def test_rows_that_are_no_sites_have_no_root():
    with pytest.raises(RoundError, match="compares with the update of 'b', and there is none"):
        build("fltrust", {"root": "b"}).of_vectors(torch.ones(3, 2))


# --- rounds


def test_s34_the_order_of_arrival_changes_no_bit(tmp_path):
    digests = {
        run(config(tmp_path / str(seed), **OPEN), Shuffled(handlers(), seed))[1].weights.digest
        for seed in range(3)
    }
    assert len(digests) == 1


def test_four_hostile_sites_of_five_turn_the_model_no_way_that_the_root_does_not_go(tmp_path):
    """All others pull the other way: the model stays where it is."""
    lies = {site: bad([-100.0] * 8) for site in "acde"}
    cfg = config(tmp_path, run={"rounds": 2}, **OPEN)
    after = run(cfg, LocalCohort(handlers(**lies)))[1].weights.views()["w"]
    assert torch.equal(after, torch.zeros(6))


def test_the_root_is_in_every_draw_of_a_part_of_the_sites(tmp_path):
    cfg = config(tmp_path, strategy={"fraction": 0.3, "min_sites": 3}, **OPEN)
    drawn = [federated.sample(cfg, number, 0, NAMES) for number in range(20)]
    assert all("b" in sites and len(sites) == 4 for sites in drawn)
    assert len({tuple(sites) for sites in drawn}) > 10


def test_a_round_without_the_roots_update_fails_and_says_why(tmp_path):
    cfg = config(tmp_path, **OPEN, strategy={"attempts": 2})
    with pytest.raises(SiteMissing, match="round 1: the rule needs the update of b: w has 1 NaN"):
        run(cfg, LocalCohort(handlers(b=bad([float("nan")]))))
    with pytest.raises(SiteMissing, match="the update of b: no reply in time"):
        run(cfg, LocalCohort(handlers(), loses=lambda site, request: site == "b"))


def test_rounds_wait_for_a_root_that_has_not_joined(tmp_path):
    class Late(LocalCohort):
        there = False

        async def members(self, at_least):
            return [site for site in await super().members(0) if site != "b" or self.there]

        async def newcomer(self, known):
            assert "b" not in known
            self.there = True

    from .test_federated import Events

    events = Events()
    run(config(tmp_path, **OPEN), Late(handlers()), events)
    assert all("b" in e["sites"] for e in events.of("round_started"))
    assert events.of("notice")[0]["text"] == "waiting for b, without which the rule can't decide"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "aggregation.root: is required"),
        ({"root": "b", "before": ["nnm:1"]}, "nnm:1 would change it. Leave aggregation.before out"),
        ({"root": "b", "f": 1}, r"aggregation\.f: fltrust has no such option"),
    ],
)
def test_a_wrong_configuration_is_refused(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        run(config(tmp_path, **OPEN | {"aggregation": {"rule": "fltrust"} | keys}), LocalCohort(handlers()))


def test_without_rounds_there_is_no_update_of_the_root_to_compare_with(tmp_path):
    cfg = config(tmp_path, **OPEN, asynchronous={"enabled": True})
    with pytest.raises(ConfigError, match=r"fltrust compares each site with b.*asynchronous.enabled = false"):
        asynchronous.check_config(cfg)


def test_a_federation_over_mutual_tls_and_its_simulation_have_the_same_bits(tmp_path, inline):
    cfg = project(tmp_path, **OPEN)
    committed = asyncio.run(federation(cfg))
    asyncio.run(simulation(cfg))
    assert len(committed) == 3
    assert final(cfg.run_dir, tmp_path / "1") == final(cfg.simulate_dir, tmp_path / "2")


def test_a_simulation_refuses_a_root_that_is_none_of_its_sites(tmp_path, inline):
    cfg = project(tmp_path, **OPEN | {"aggregation": BY_B | {"root": "hub"}})
    with pytest.raises(ConfigError, match=r"root: 'hub' is no site of the simulation, which has a, b, c\."):
        asyncio.run(simulate(cfg, emit=silent))
