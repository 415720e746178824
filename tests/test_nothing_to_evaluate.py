"""A site whose eval_data() is empty: nothing of it counts in any mode, and no sum under masks is over two."""

import asyncio

import pytest

from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.runtime.sites import site
from fedtrain.runtime.star import aggregator
from tests import inline as federations
from tests.allowed import allowed

TASK = (
    federations.TASK
    + """
    def eval_data(self, site):
        x, y = self.data(site)
        return (x[:0], y[:0]) if site == "b" else (x, y)


class Five(Blobs):
    def sites(self):
        return ["a", "b", "c", "d", "e"]
"""
)
OPEN = {"secagg": {"enabled": False}}
MASKS = {"simulate": {"workers": 1, "masks": True}}
PLAIN = {"simulate": {"workers": 1, "masks": False}}  # the masks' bits, without masks
WHY = "it has nothing to evaluate on: its eval_data() gave no examples"


class Heard(list):
    def __call__(self, event):
        self.append(event)

    def of(self, kind):
        return [event for event in self if event.kind == kind]


def simulated(root, task="blobs_task:Blobs", **sections):
    heard = Heard()
    run = {"run": {"name": "r", "task": task, "rounds": 1, "seed": 5}}
    config = federations.project(root, TASK, **run, **sections)
    return asyncio.run(simulate(config, emit=heard)), heard


def federated(root, **sections):
    """With three real sites; what the aggregator heard, and what site b did."""
    run = {"run": {"name": "r", "task": "blobs_task:Blobs", "rounds": 1, "seed": 5}}
    config = federations.project(root, TASK, **run, **sections)
    heard, at_b = Heard(), Heard()

    async def run_all():
        emits = {"a": lambda event: None, "b": at_b, "c": lambda event: None}
        tasks = [asyncio.create_task(site.run(allowed(config, n), n, emit=emits[n])) for n in emits]
        try:
            async with asyncio.timeout(60):
                return await aggregator.serve(config, emit=heard)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run_all()), heard, at_b


def said(heard):
    return " ".join([event.text for event in heard.of("notice")]
                    + [event.reason for event in heard.of("update_refused")])  # fmt: skip


def test_in_the_open_it_counts_for_nothing_at_real_sites_as_in_a_simulation(tmp_path, inline):
    found, heard = simulated(tmp_path / "simulated", **OPEN)
    real, told, at_b = federated(tmp_path / "real", **OPEN)
    assert real.metrics == found.metrics
    assert "accuracy" in real.metrics
    for each in (heard, told):
        (evaluated,) = each.of("evaluated")
        assert evaluated.by_site["b"] == {}
        assert each.of("update_refused") == []
    assert at_b.of("denied") == []


def test_of_three_real_sites_under_masks_it_is_named_and_no_sum_is_over_the_other_two(tmp_path, inline):
    found, heard, at_b = federated(tmp_path)
    assert found.metrics == {}
    assert f"b refuses: {WHY}" in said(heard)
    assert "evaluate.every = 0" in said(heard)
    assert "min_examples" not in said(heard)
    assert {event.rule for event in at_b.of("denied")} == {"eval_data"}


@pytest.mark.parametrize("how", [MASKS, PLAIN], ids=["masks", "plain"])
def test_a_simulation_of_three_sites_under_masks_evaluates_as_little_and_names_it_too(tmp_path, inline, how):
    found, heard = simulated(tmp_path, **how)
    assert found.metrics == {}
    assert "b" in said(heard)
    assert WHY in said(heard)


def test_where_enough_others_evaluate_all_modes_give_the_same(tmp_path, inline):
    openly, _ = simulated(tmp_path / "open", "blobs_task:Five", **OPEN)
    masked, heard = simulated(tmp_path / "masks", "blobs_task:Five", **MASKS)
    plain, plainly = simulated(tmp_path / "plain", "blobs_task:Five", **PLAIN)
    assert {name: masked.metrics[name] for name in ("accuracy", "loss")} == {
        name: plain.metrics[name] for name in ("accuracy", "loss")
    }
    assert masked.metrics["accuracy"] == openly.metrics["accuracy"]
    assert masked.metrics["loss"] == pytest.approx(openly.metrics["loss"], abs=1e-5)
    assert WHY in said(heard)
    assert WHY in said(plainly)
