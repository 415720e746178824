"""The guard of the model: no single site ends an open run, or leads it to a model that is of no use."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from fedtrain.config import Config, LimitsConfig
from fedtrain.errors import BadUpdate
from fedtrain.messages import Evaluate, Evaluation, Train, Update
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.simulations import plain_sums
from fedtrain.runtime.simulations.simulated_masks import SimulatedMasks
from fedtrain.runtime.star import checks, federated, guard
from fedtrain.runtime.star.blame import Spoiled, Suspects
from fedtrain.store import RoundPlan, RunStore
from fedtrain.strategies import build
from fedtrain.transport.memory import LocalCohort
from tests import test_asynchronous, test_blame, test_folding
from tests.test_federated import Events, arena, pull, run
from tests.test_secure import RunStoreOf, found, openly
from tests.test_secure import config as masked

FOUR = ["a", "b", "c", "d"]
EIGHT = [[math.nan] * 8, [math.inf] * 8, [1e5] * 8, [1e15] * 8, [1e30] * 8, [-1e38] * 8, [3.4e38] * 8]
KINDS = {
    **{f"{values[0]:g}": {"delta": values} for values in EIGHT},
    "one value": {"delta": [0.0] * 7 + [1e20]},
    "weightless": {"delta": [1.0] * 8, "num_examples": 0.0},
    "NaN examples": {"num_examples": math.nan},
    "a weight of its own": {"weight": 1e300},
    "huge count": {"delta": [1e8] * 8, "num_examples": 1e9},
    "huge count, plain": {"num_examples": 1e9},
    "NaN loss": {"metrics": {"loss": (math.nan, 1.0)}},
    "absurd loss": {"metrics": {"loss": (math.inf, 1e300)}},
    "a loss of all": {"metrics": {"loss": (3e38, 1e300)}},
}


def config(folder, rounds=12, **sections):
    """A run by default, but for its length."""
    table = {"run": {"name": "t", "rounds": rounds, "seed": 3}, "secagg": {"enabled": False}}
    return Config.of(table | sections, root=folder)


def hostile(kind, begins=0, every=1):
    """A site that is honest in some rounds, and in the others sends what no honest one sends."""

    def answer(request):
        reply, change = pull("d")(request), dict(KINDS[kind])
        if request.round < begins or request.round % every:
            return reply
        if isinstance(request, Evaluate):
            return structs.replace(reply, metrics=change.get("metrics", reply.metrics))
        if "delta" in change:
            change["delta"] = arena(*change["delta"])
        return structs.replace(reply, **change)

    return answer


def three_and(handler):
    return LocalCohort({site: pull(site) for site in "abc"} | {"d": handler})


@pytest.mark.slow(6)
@settings(
    max_examples=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    kind=st.sampled_from(sorted(KINDS)), begins=st.integers(0, 5), every=st.integers(1, 4),
    strategy=st.sampled_from(["fedavg", "fedavgm", "fedadam"]),
)  # fmt: skip
def test_one_hostile_site_of_four_never_ends_a_default_open_run(
    tmp_path_factory, kind, begins, every, strategy
):
    """Nor is the model lost: it stays as near to the honest optima as these are to each other."""
    cfg, events = config(tmp_path_factory.mktemp("run"), strategy={"kind": strategy}), Events()
    result, last = run(cfg, three_and(hostile(kind, begins, every)), events)
    assert (result.reason, last.round) == ("rounds done", 12)
    optima = torch.stack([torch.arange(8.0) * (1 + number) for number in range(4)])
    assert (last.weights.flat(last.weights.schema.sections[0]) - optima.mean(0)).norm() < 100
    told = [e["loss"] for e in events.of("round_committed")]
    told += [e["metrics"]["loss"] for e in events.of("evaluated")]
    assert all(map(math.isfinite, told))
    assert {e["site"] for e in events.of("update_refused")} <= {"d"}


def test_the_culprit_is_named_left_out_and_asked_again_after_ten_rounds_restarts_or_not(tmp_path):
    asked, events = [], Events()

    def answer(request):
        if isinstance(request, Train):
            asked.append(request.round)
        return hostile("1e+15")(request)

    for rounds in (1, 2, 14):
        run(config(tmp_path, rounds), three_and(answer), events)
    assert asked == [0, 11]
    refused = events.of("update_refused")
    assert [(e["round"], e["site"]) for e in refused] == [(1, "d"), (12, "d")]
    assert "d's update is" in refused[0]["reason"]
    assert "It is asked again after round 11" in refused[0]["reason"]
    honest = LocalCohort({site: pull(site) for site in "abc"})
    same = run(config(tmp_path / "honest", 14), honest)[1]
    assert run(config(tmp_path, 14), three_and(answer))[1].weights.digest == same.weights.digest


def test_a_step_beyond_the_limit_passes_where_it_is_switched_off(tmp_path):
    cfg = config(tmp_path, 1, limits={"max_ratio": 0})
    _, last = run(cfg, three_and(hostile("1e+15")))
    assert last.weights.flat(last.weights.schema.sections[0]).abs().max() > 1e14


@pytest.mark.parametrize(
    ("norms", "earlier", "named"),
    [
        ({"a": 1.0, "b": 2.0, "c": 1e3}, [], ["c"]),
        ({"a": 1.0, "b": 2.0, "c": 90.0}, [], []),  # unequal sites
        ({"a": 1e-6, "b": 1e-6, "c": 1e-6}, [], []),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, [1e-6] * 8, []),  # a learning rate that rose
        ({"a": 0.0, "b": 0.0, "c": 1.0}, [], []),  # two had nothing to learn
        ({"a": 0.0, "b": 0.0, "c": 1e3}, [1.0], ["c"]),
        ({"a": 1e3, "b": 1e3, "c": 1e3, "d": 1e9}, [1.0] * 3, []),  # it rose, and whose fault is the rest?
        ({"a": 1.0, "b": 1e9}, [], []),  # one of two: which?
        ({"a": 1e9}, [1.0, 1.0], []),
        ({"a": 1e9}, [1.0, 1.0, 1.0], ["a"]),  # sites in turns
    ],
)
def test_what_is_far_beyond_the_usual(norms, earlier, named):
    assert guard.outliers(norms, earlier, LimitsConfig()) == named


@pytest.mark.parametrize("buffer", [1, 3])
def test_without_rounds_a_step_beyond_the_usual_is_taken_back_and_its_site_named(tmp_path, buffer):
    cfg = test_asynchronous.config(tmp_path, run={"rounds": 20}, asynchronous={"buffer": buffer})
    events, turns = Events(), []

    def answer(request):
        turns.append(request.round)
        return hostile("1e+15")(request) if len(turns) > 3 else pull("d")(request)

    result, last = test_asynchronous.run(cfg, three_and(answer), events, clocked=True)
    assert (result.reason, last.round) == ("rounds done", 20)
    assert last.weights.flat(last.weights.schema.sections[0]).abs().max() < 100
    refused = [(e["site"], e["reason"]) for e in events.of("update_refused")]
    assert {site for site, _ in refused} == {"d"}, refused


class Far(test_folding.Plain):
    """One site's numbers are of another unit."""

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(5, 3))

    def data(self, site):
        x, y = super().data(site)
        return (x * 1e8 if site == "site021" else x), y


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_workers_that_fold_name_the_same_culprit_and_give_the_same_bits(tmp_path, engine):
    def cfg(name):
        made = test_folding.config(tmp_path / name, task="Far", engine=engine, attempts=2)
        (made.root / "many_task.py").write_text("from tests.security.test_guard import Far\n")
        return made

    expected = test_folding.trained(cfg("singly"), 1, test_folding.Singly)
    refused = [fields for kind, fields in expected[1] if kind == "update_refused"]
    assert [e["site"] for e in refused] == ["site021"]
    for workers in (1, 3):
        assert test_folding.trained(cfg(str(workers)), workers) == expected


def spoiled(folder, answers_of, sites, rounds=9):
    """A run under masks' arithmetic in which s05 sends what is absurd from round 4 on."""
    events, cfg = Events(), masked(folder, sites=sites, run={"rounds": rounds})

    def answer(request):
        return found("5s05", request.round, 1e5 if request.round > 3 else 0.1)

    answers = answers_of(cfg, openly(sites, s05=answer), events)
    with RunStoreOf(cfg) as store:
        asyncio.run(federated.run(Journal(cfg, store, events), answers, build("fedavg", {})))
        return events, store.suspects(Suspects), store.latest()


@pytest.mark.parametrize("answers_of", [plain_sums.FixedPointSums, SimulatedMasks])
def test_under_masks_an_absurd_sum_is_spoiled_and_who_spoils_it_is_found(tmp_path, answers_of):
    events, suspects, last = spoiled(tmp_path, answers_of, test_blame.SITES)
    assert suspects.named == ["s05"]
    assert [e["round"] for e in events.of("round_failed")] == [5]
    assert "limits.max_ratio = 100" in events.of("round_failed")[0]["reason"]
    assert max(last.weights.views()[name].abs().max() for name in ("w", "mean")) < 100


def test_a_sum_that_cannot_be_read_is_suspected_too_when_all_others_are_absurd():
    plan = RoundPlan(5, 0, [*"abcd"], earlier=[1.0, 1.0, 1.0])
    far = arena()
    far.flat(far.schema.sections[0]).fill_(1e6)
    sums = [(SimpleNamespace(delta=far), ["c", "d"])]
    with pytest.raises(Spoiled) as found:
        guard.sound(sums, arena(), plan, LimitsConfig(), [["a", "b"]])
    assert found.value.groups == [["a", "b"], ["c", "d"]]
    near = [(SimpleNamespace(delta=arena()), ["e", "f"])]
    assert guard.sound([*near, *sums], arena(), plan, LimitsConfig(), [["a", "b"]]) == (
        near, [["a", "b"], ["c", "d"]],
    )  # fmt: skip


def test_a_simulation_without_masks_gives_what_masks_give_when_a_sum_is_spoiled(tmp_path):
    digests = [
        spoiled(tmp_path / str(i), kind, test_blame.SITES[:8])[2].weights.load().digest
        for i, kind in enumerate((plain_sums.FixedPointSums, SimulatedMasks))
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("metric", [(math.inf, 1e300), (1e308, 1e300), (0.0, 1e300), (0.0, math.nan)])
def test_a_metric_over_more_than_can_be_counted_is_refused(metric):
    reply = Evaluation(metrics={"loss": metric})
    with pytest.raises(BadUpdate, match="counts"):
        checks.answers(Evaluate(id="", round=0, weights=arena()), reply, LimitsConfig())
    update = Update(delta=arena(), num_examples=1.0, metrics={"loss": metric})
    with pytest.raises(BadUpdate, match="counts"):
        checks.answers(Train(id="", round=0, weights=arena()), update, LimitsConfig())


def test_what_is_usual_is_remembered_over_restarts(tmp_path):
    cfg = config(tmp_path, 3)
    run(cfg, three_and(pull("d")))
    store = RunStore(cfg.run_dir, read_only=True)
    norms = store.norms(guard.REMEMBERED)
    store.close()
    assert len(norms) == 3
    assert max(norms) == norms[-1]  # the newest first
