"""Metrics that are no averages: counts of sites, and what scikit-learn says of the pooled data."""

import asyncio
import math
import sys
from itertools import pairwise

import psutil
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from torch import nn
from torch.nn import functional as F

import fedtrain
from fedtrain import Task, metrics
from fedtrain.arena import Arena
from fedtrain.config import Config, LimitsConfig, TrainConfig
from fedtrain.errors import BadUpdate, SecAggError, TaskError
from fedtrain.messages import MAX_SUMS, Evaluate, Evaluation, averages, misfits, sized_names, summed
from fedtrain.runtime.simulations.plain_sums import exact_sums
from fedtrain.runtime.star import aggregator, checks
from fedtrain.runtime.trainers.workbench import source_digest
from fedtrain.schema import Schema
from fedtrain.secagg.encoding import Encoding
from fedtrain.secagg.fixedpoint import FixedPoint
from fedtrain.secagg.roster import check_names
from fedtrain.store import RunStore
from fedtrain.training.local import Engine
from fedtrain.training.task import measured, shown

BINS = 101
EXACT = 1e-12


def pooled(n=400, classes=4, seed=0):
    """(labels, predictions, binary labels, scores on the grid of a histogram)."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes - 1, (n,), generator=draw)  # one class occurs nowhere
    wrong = torch.randint(0, classes - 1, (n,), generator=draw)
    predictions = torch.where(torch.rand(n, generator=draw) < 0.6, labels, wrong)
    scores = torch.randint(0, BINS, (n,), generator=draw).double() / (BINS - 1)
    return labels, predictions, (torch.rand(n, generator=draw) < scores).long(), scores


def counted(seed=0, pieces=(0, 7, 120, 400)):
    """The counts of unequal sites, added up as sites are."""
    labels, predictions, binary, scores = pooled(seed=seed)
    sites = {}
    for i, (low, high) in enumerate(pairwise(pieces)):
        part = slice(low, high)
        counts = metrics.confusion(predictions[part], labels[part], 4)
        counts |= metrics.binary_histogram(scores[part], binary[part], BINS)
        sites[f"s{i}"] = {name: (total.flatten().double().tolist(), n) for name, (total, n) in counts.items()}
    return summed(sites)


@pytest.mark.parametrize("seed", range(5))
def test_counts_of_sites_give_scikit_learns_metrics_of_the_pooled_data(seed):
    labels, predictions, binary, scores = pooled(seed=seed)
    sums = counted(seed)
    assert metrics.macro_f1(sums) == pytest.approx(f1_score(labels, predictions, average="macro"), abs=EXACT)
    assert metrics.accuracy(sums) == pytest.approx(accuracy_score(labels, predictions), abs=EXACT)
    assert metrics.auroc(sums) == pytest.approx(roc_auc_score(binary, scores), abs=EXACT)


def test_the_helpers_are_there_without_an_import_of_their_own(monkeypatch):
    monkeypatch.delattr(fedtrain, "metrics")
    assert fedtrain.metrics is metrics


def test_metrics_of_nothing_are_nan():
    none = {"confusion": (torch.zeros(4), 0.0), "histogram": (torch.tensor([1.0, 2.0, 0.0, 0.0]), 3.0)}
    assert all(math.isnan(value) for value in (metrics.macro_f1(none), metrics.accuracy(none)))
    assert math.isnan(metrics.auroc(none))  # of one class


@pytest.mark.parametrize(
    ("count", "says"),
    [
        (lambda: metrics.confusion(torch.tensor([3]), torch.tensor([0]), 3), "is not in 0..2"),
        (lambda: metrics.binary_histogram(torch.tensor([1.5]), torch.tensor([0])), "scores must lie in 0..1"),
        (lambda: metrics.binary_histogram(torch.tensor([math.nan]), torch.tensor([0])), "NaN among the"),
        (lambda: metrics.binary_histogram(torch.tensor([0.5]), torch.tensor([2])), "labels must be 0 or 1"),
        (lambda: metrics.macro_f1({"loss": (1.0, 1.0)}), "evaluate\\(\\) gives no 'confusion', only loss"),
    ],
)
def test_what_can_not_be_counted_is_refused_in_one_line(count, says):
    with pytest.raises(TaskError, match=says):
        count()


# --- A task that derives its metrics


class Derived(Task):
    def model(self):
        return nn.Linear(3, 4)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        return metrics.confusion(model(batch[0]), batch[1], 4)

    def metrics(self, sums):
        return {"f1": metrics.macro_f1(sums)}


def rows(n, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=draw), torch.randint(0, 4, (n,), generator=draw)


def test_people_are_shown_what_metrics_returns_and_the_loss():
    engine = Engine(Derived(), TrainConfig(eval_batch_size=7), run_seed=1)
    data = {"a": rows(20, 1), "b": rows(50, 2)}
    found = {site: engine.evaluate(part, engine.initial()) for site, part in data.items()}
    total, by_site = shown(engine.task, summed(found), found)
    assert total.keys() == by_site["a"].keys() == {"loss", "f1"}
    x, y = (torch.cat(both) for both in zip(*data.values(), strict=True))
    with torch.no_grad():
        assert total["f1"] == pytest.approx(
            f1_score(y, engine.model(x).argmax(1), average="macro"), abs=EXACT
        )
    assert total["loss"] == averages(found)["loss"]


def test_a_site_for_which_metrics_fails_shows_its_loss_and_the_whole_its_error():
    class Brittle(Derived):
        def metrics(self, sums):
            return {"share": 1 / float(sums["confusion"][0][0])}

    good, bad = (
        {"confusion": ([2.0, 0.0], 2.0), "loss": (3.0, 2.0)},
        {"confusion": ([0.0, 1.0], 1.0), "loss": (1.0, 1.0)},
    )
    both = {"a": good, "b": bad}
    assert shown(Brittle(), summed(both), both) == ({"loss": 4 / 3, "share": 0.5}, {
        "a": {"loss": 1.5, "share": 0.5}, "b": {"loss": 1.0},
    })  # fmt: skip
    with pytest.raises(TaskError, match=r"ZeroDivisionError in .*, in metrics, metrics\(\)"):
        shown(Brittle(), bad, {})


def test_metrics_that_gives_no_numbers_is_told_the_right_form():
    class Wrong(Derived):
        def metrics(self, sums):
            return {"f1": "high"}

    with pytest.raises(TaskError, match=r'metrics\(\) must return \{"name": number\}'):
        shown(Wrong(), {"loss": (1.0, 1.0)}, {})


def test_an_evaluation_of_no_examples_shows_nothing():
    assert shown(Derived(), {"loss": (0.0, 0.0)}, {}) == ({}, {})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"tp": (torch.ones(3), 1)},
            r"several numbers for tp, and nothing says what to show.*metrics\(sums\)",
        ),
        ({"tp[3]": (1, 1)}, "a metric's name doesn't end with a number in brackets"),
    ],
)
def test_what_evaluate_gives_without_metrics_is_checked(given, says):
    class Plain(Derived):
        metrics = Task.metrics

        def evaluate(self, model, batch):
            return given

    with pytest.raises(TaskError, match=says):
        measured(Plain(), nn.Linear(3, 4), rows(2, 1))


def test_more_numbers_than_travel_are_refused_at_the_site():
    class Many(Derived):
        def evaluate(self, model, batch):
            return {"scores": (torch.zeros(MAX_SUMS), 1)}

    with pytest.raises(TaskError, match="gives 65,537 numbers, at most 65,536 travel"):
        measured(Many(), nn.Linear(3, 4), rows(2, 1))


def test_counts_of_different_sizes_in_one_evaluation_are_refused():
    class Ragged(Derived):
        def evaluate(self, model, batch):
            return {"counts": (torch.zeros(len(batch[1])), 1)}

    engine = Engine(Ragged(), TrainConfig(eval_batch_size=4), run_seed=1)
    with pytest.raises(TaskError, match="counts in different sizes: 4 numbers, then 2 numbers"):
        engine.evaluate(rows(6, 1), engine.initial())


# --- On the way


FOUND = {"loss": (1.5, 3.0), "confusion": ([float(2**40 + i) for i in range(9)], 3.0)}


def test_counts_are_exact_under_masks():
    encoding = Encoding(FixedPoint(sites=3, ring_bits=32, clip=4.0, max_weight=100.0), None)
    names = sized_names(FOUND)
    assert names == ("confusion[9]", "loss")
    total = 0
    for _ in range(3):
        vector = encoding.point.dtype.type(0).repeat(encoding.numel(names))
        encoding.encode_metrics(FOUND, names, vector)
        total = total + vector
    sums = encoding.decode(total, 3, names).metrics
    assert sums == summed(dict.fromkeys("abc", FOUND)) == exact_sums([FOUND] * 3)


def test_a_site_without_a_metric_adds_nothing_to_it():
    encoding = Encoding(FixedPoint(sites=3, ring_bits=32, clip=4.0, max_weight=100.0), None)
    vector = encoding.point.dtype.type(0).repeat(encoding.numel(("confusion[9]", "loss")))
    encoding.encode_metrics({"loss": (1.5, 3.0)}, ("confusion[9]", "loss"), vector)
    assert encoding.decode(vector, 3, ("confusion[9]", "loss")).metrics == {
        "confusion": ([0.0] * 9, 0.0), "loss": (1.5, 3.0),
    }  # fmt: skip


def test_sizes_that_most_sites_do_not_have_are_named():
    names = {"a": ["tp[3]"], "b": ["loss", "tp"], "c": ["loss", "tp[3]"], "d": ["tp[4]"]}
    assert misfits(names) == {
        "b": "it evaluates tp, most sites tp[3]",
        "d": "it evaluates tp[4], most sites tp[3]",
    }


@pytest.mark.parametrize("names", [("a[70000]",), ("a[40000]", "b[40000]"), ("a[9999999]",)])
def test_names_of_hostile_sizes_are_refused_before_any_room_is_made(names):
    with pytest.raises(SecAggError, match=r"metrics of \d+ numbers, at most 65536 are allowed"):
        check_names("mallory", names)


def test_an_open_evaluation_of_a_hostile_size_is_refused():
    schema = Schema(())
    request = Evaluate(id="r/1/0/evaluate", round=1, weights=Arena.zeros(schema))
    reply = Evaluation(metrics={"a": ([0.0] * 40_000, 1.0), "b": ([0.0] * 40_000, 1.0)})
    with pytest.raises(BadUpdate, match="metrics of 80000 numbers, at most 65536"):
        checks.admit(request, reply, schema, LimitsConfig(), None)


def test_replaced_counts_do_not_change_what_was_given():
    """Sums are not added in place into what a caller still has."""
    mine = {"a": {"tp": ([1.0, 2.0], 1.0)}, "b": {"tp": ([1.0, 1.0], 1.0)}}
    summed(mine)
    assert mine["a"] == {"tp": ([1.0, 2.0], 1.0)}


# --- At the aggregator

SCORED = """
import fedtrain

class Scored(fedtrain.Task):
    def model(self): ...
    def data(self, site): ...
    def loss(self, model, batch): ...
    def metrics(self, sums):
        return {"recall": sums["hits"][0][1] / sums["hits"][1]}
"""


@pytest.mark.slow(3)
def test_an_aggregator_never_runs_metrics_itself_but_asks_a_process_from_the_first_evaluation_on(tmp_path):
    def trainers():
        children = psutil.Process().children()
        return [c for c in children if "-m fedtrain.runtime.trainers." in " ".join(c.cmdline())]

    async def main():
        async with aggregator.shown_by_task(config, store, source_digest(config)) as shown_there:
            assert await shown_there({}, {}) == ({}, {})  # nobody evaluated
            assert trainers() == []
            sums = {"hits": ([1.0, 3.0], 4.0), "loss": (1.0, 2.0)}
            assert await shown_there(sums, {"a": sums}) == (
                {"loss": 0.5, "recall": 0.75}, {"a": {"loss": 0.5, "recall": 0.75}},
            )  # fmt: skip
            assert len(trainers()) == 1
        assert trainers() == []

    (tmp_path / "scored_task.py").write_text(SCORED)
    config = Config.of({"run": {"task": "scored_task:Scored"}}, tmp_path)
    store = RunStore(tmp_path / "run")  # of a run that is gone on with: no process has loaded the task yet
    store.begin(Schema(()), {}, run="r", task_digest=source_digest(config), derives=True)
    try:
        asyncio.run(main())
    finally:
        store.close()
    assert "scored_task" not in sys.modules
