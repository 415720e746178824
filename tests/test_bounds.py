"""What a site's own file says holds at the site, and the aggregator makes do with the others."""

import asyncio

import pytest
from msgspec import structs

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.errors import ConfigError, JoinRefused, RoundError, TooFewSites
from fedtrain.messages import Evaluate, Failure, Train
from fedtrain.privacy import Release, epsilon
from fedtrain.runtime.peers import peer
from fedtrain.runtime.sites import site
from fedtrain.runtime.sites.gate import Gate, bounded
from fedtrain.runtime.star import aggregator
from fedtrain.runtime.star.agreement import agreed_data, bounds_of, differences
from fedtrain.secagg.messages import Advertise, AdvertiseEvaluation
from fedtrain.store import Ledger
from fedtrain.training.columns import ColumnSource
from fedtrain.training.task import load_task
from fedtrain.wire.frames import Bounds
from tests.allowed import allowed
from tests.ports import free_port
from tests.test_federated import SCHEMA, Events
from tests.test_modes import TASK, certified, inline


def own(**bounds):
    return Bounds(**{"trainings": 4, "rounds": 4, "every": 1} | bounds)


@pytest.mark.parametrize(
    ("every", "allowed"), [(0, set()), (1, {1, 2, 3, 4, 5, 6, 7}), (3, {3, 6, 7}), (10, {7})]
)
def test_a_site_evaluates_the_rounds_of_its_own_file(every, allowed):
    config = Config.of({"run": {"rounds": 7}, "evaluate": {"every": every}})
    assert {n for n in range(1, 12) if not bounds_of(config).evaluation(n)} == allowed


def test_without_rounds_a_site_trains_as_often_as_its_runs_versions_can_take():
    """One site alone may fill every buffer, and be refused once for each version."""
    config = Config.of(
        {"run": {"rounds": 5}, "asynchronous": {"enabled": True, "buffer": 3}, "secagg": {"enabled": False}}
    )
    assert bounds_of(config).trainings == 20


class Idle:
    """A trainer that nobody may ask."""

    async def close(self):
        """Nothing runs."""


@pytest.mark.parametrize(
    ("kind", "round", "bounds", "why"),
    [
        (Evaluate, 1, own(every=0), "it never evaluates .its own evaluate.every = 0"),
        (AdvertiseEvaluation, 1, own(every=0), "never evaluates"),
        (Evaluate, 1, own(noise=True), "an evaluation has no noise"),
        (AdvertiseEvaluation, 1, own(noise=True), "an evaluation has no noise"),
        (Evaluate, 3, own(every=2), "it evaluates every 2 rounds and after round 4 .*, not after round 3"),
        (Evaluate, 5, own(), "not after round 5"),
        (Train, 4, own(), "it trains at most 4 times in this run .its own run.rounds., and this is time 5"),
        (Advertise, 10**9, own(), "this is time 1000000001"),
    ],
)
def test_a_site_refuses_what_its_own_file_does_not_allow_before_any_work(tmp_path, kind, round, bounds, why):
    ledger = Ledger(tmp_path / "ledger")
    gate = Gate()
    bounded(gate, bounds)
    worker = site.Site("a", SCHEMA, ledger, Idle(), gate=gate)
    fields = {"terms": None} if kind in (Advertise, AdvertiseEvaluation) else {}
    request = kind(id="x", round=round, weights=Arena.zeros(SCHEMA), **fields)
    reply = asyncio.run(worker.answer(request))
    assert isinstance(reply, Failure)
    assert reply.reason.startswith("a refuses: ")
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(reply.reason)
    ledger.close()


def federation(root, names, changes, rules=None, joins=False, **common):
    """(the aggregator's events, what it ended with): real sites over mutual TLS, each with its own file, and
    with its own `rules` where it has some. `joins`: it ends when the last site does."""
    certified(root, "aggregator", *names)
    (root / "task.py").write_text(TASK)
    table = {"run": {"rounds": 2}, "network": {"listen": f"127.0.0.1:{free_port()}", "heartbeat": "1s"}}
    for name, keys in common.items():
        table[name] = table.get(name, {}) | keys
    events = Events()

    def config_of(name):
        return Config.of({s: table.get(s, {}) | changes.get(name, {}).get(s, {})
                          for s in {*table, *changes.get(name, {})}}, root)  # fmt: skip

    async def main():
        serving = asyncio.create_task(aggregator.serve(config_of("aggregator"), emit=events))
        ends = [serving]
        try:
            async with asyncio.timeout(60):
                for name in names:  # the first is there before the others
                    config = allowed(config_of(name), name, **(rules or {}).get(name, {}))
                    ends.append(asyncio.create_task(site.run(config, name, emit=Events())))
                    while not (events.of("site_joined") or serving.done()):  # noqa: ASYNC110  # no event tells it
                        await asyncio.sleep(0.01)
                return await (ends[-1] if joins else serving)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    try:
        return events, asyncio.run(main())
    except RoundError as e:
        return events, e


NEVER = {"evaluate": {"every": 0}}
OPEN = {"secagg": {"enabled": False}}


def notices(events):
    return [e["text"] for e in events.of("notice")]


NOISE = {"privacy": {"noise_multiplier": 1.0}}


@pytest.mark.parametrize(
    ("masks", "keys", "why"),
    [
        (False, NEVER, "a: it never evaluates (its own evaluate.every = 0)"),
        (False, NOISE, "a: it never evaluates, as an evaluation has no noise, and its own privacy.noise"),
        (True, NOISE, "a: it never evaluates, as an evaluation has no noise, and its own privacy.noise"),
    ],
)
def test_a_site_that_never_evaluates_is_told_of_at_joining_and_the_others_are_asked(
    tmp_path, monkeypatch, masks, keys, why
):
    """Noise and no evaluation: nothing of its data leaves it in the clear."""
    with inline(monkeypatch):
        events, result = federation(tmp_path, "abcd", {"a": keys}, secagg={"enabled": masks})
    assert result.rounds == 2
    assert [e["round"] for e in events.of("evaluated")] == [1, 2]
    if not masks:
        assert all(set(e["by_site"]) == {"b", "c", "d"} for e in events.of("evaluated"))
    assert [line for line in notices(events) if line.startswith(why)]
    assert events.of("update_refused") == []
    assert {"site": "a"} in [{"site": e["site"]} for e in events.of("update_received")]


@pytest.mark.parametrize(
    ("site", "why"),
    [
        (
            {"rounds": 5, "trainings": 5, "every": 1},
            ["run.rounds is 5 there, and 9 here", "run.rounds is 5 there"],
        ),
        (
            {"every": 2},
            ["evaluate.every is 2 there, and 1 here: where its people agree, they set 1 in its f"],
        ),
        (
            {"trainings": 5, "trainings_by": "policy.rounds"},
            ["policy.rounds is 5 there, and 9 here: where its p"],
        ),
        ({"every": 3, "every_by": "policy.evaluate_every"}, ["they set 1 in its policy, and start it again"]),
        ({"rounds": 12, "trainings": 12, "every": 1}, []),
    ],
)
def test_each_setting_by_which_a_site_is_asked_less_is_told_with_both_values(site, why):
    run = Bounds(trainings=9, rounds=9, every=1)
    told = differences(structs.replace(run, **site), run)
    assert [words in line for words, line in zip(why, told, strict=True)] == [True] * len(why)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_where_no_site_evaluates_the_run_goes_on_without(tmp_path, monkeypatch, asynchronous):
    changes = dict.fromkeys("abc", NEVER)
    with inline(monkeypatch):
        events, result = federation(
            tmp_path, "abc", changes, asynchronous={"enabled": asynchronous}, **OPEN, evaluate={"patience": 1}
        )
    assert (result.rounds, result.reason) == (2, "rounds done")
    assert events.of("evaluated") == []
    assert "round 1: nobody evaluated the model" in notices(events)


def test_a_site_trains_in_no_more_rounds_than_its_own_file_says(tmp_path, monkeypatch):
    with inline(monkeypatch):
        events, result = federation(
            tmp_path, "abc", {"a": {"run": {"rounds": 1}}}, **OPEN, strategy={"attempts": 1}
        )
    assert isinstance(result, TooFewSites)
    why = "it trains at most 1 times in this run (its own run.rounds), and this is time 2"
    alike = "run.rounds is 1 there, and 2 here: where its people agree, they set 2 in its fedtrain.toml"
    assert f"a: {why}. {alike}, and start it again" in notices(events)
    assert "Change run.rounds at these sites, and start them again, or lower strategy.min_sites" in str(
        result
    )
    assert [e["sites"] for e in events.of("round_committed")] == [3]
    assert [e["reason"] for e in events.of("update_refused")] == [f"a refuses: {why}"]


def test_s24_over_its_budget_a_site_is_left_out_and_the_aggregator_reads_why(tmp_path, monkeypatch):
    """The site's people set epsilon; noise that the run's file has at the site costs it in each round."""
    noise = {"privacy": {"noise_multiplier": 4.0}}
    two = epsilon([Release("gaussian", 2.0, steps=2)], 1e-5)
    with inline(monkeypatch):
        events, result = federation(
            tmp_path, "abc", {"a": noise}, {"a": {"epsilon": two + 0.01}}, **OPEN, **NEVER,
            run={"rounds": 3}, strategy={"min_sites": 2, "attempts": 1},
            limits={"max_ratio": 0},  # noise of one site alone may be any length
        )  # fmt: skip
    assert result.rounds == 3
    assert [e["round"] for e in events.of("update_received") if e["site"] == "a"] == [1, 2]
    (refused,) = events.of("update_refused")
    assert (refused["site"], refused["round"]) == ("a", 3)
    assert refused["reason"].startswith("policy.epsilon: with one more release this site's data would have")


@pytest.mark.parametrize(
    ("rules", "keys", "why"),
    [
        ({"noise": "example"}, {}, r"policy\.noise: nothing leaves this site without noise"),
        ({"noise": "site"}, {}, r"policy\.noise: nothing leaves this site without noise"),
        ({"epsilon": 3.0}, {}, r"policy\.epsilon: nothing leaves this site without noise"),
        (
            {"noise": "site"},
            {"privacy": {"noise_multiplier": 1.0, "unit": "example"}},
            r"policy\.noise: .site.: noise must protect all data of this site, not single examples",
        ),
    ],
)
def test_s24_a_site_whose_policy_wants_noise_does_not_begin_with_less(tmp_path, rules, keys, why):
    certified(tmp_path, "a")
    (tmp_path / "task.py").write_text(TASK)
    config = allowed(Config.of(OPEN | keys, tmp_path), "a", **rules)
    with pytest.raises(ConfigError, match=why):
        asyncio.run(site.run(config, "a", emit=Events()))
    network = {"network": {"listen": f"127.0.0.1:{free_port()}"}}
    with pytest.raises(ConfigError, match=why):
        asyncio.run(peer.run(Config.of(keys | network, tmp_path), "a", emit=Events()))


SHAPES = """
import torch
import fedtrain


class Task(fedtrain.Task):
    def model(self):
        return torch.nn.Linear(4, 2)

    def data(self, site):
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
        {change}
        return x, (x.sum(1) > 0).long()

    def columns(self, site):
        {columns}

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.mark.parametrize(
    ("masks", "change", "columns", "why"),
    [
        (True, "x = x[:, :3] if site == 'b' else x", "return None", r"float32 \[3\] and float32 \[4\] \(b"),
        (True, "x = x.double() if site == 'b' else x", "return None", r"'x' is float64 \[4\] and float32"),
        (
            False,
            "pass",
            "return {'age' if site == 'a' else 'alter': [63.5]}",
            r"a column is 'alter' and 'age' \(b first",
        ),
        (
            False,
            "pass",
            "return {'sex': ([0], ['f', 'm'] if site == 'a' else ['m', 'Secret'])}",
            r"the labels of column 'sex' are \('[0-9a-f]{12}',\) and",
        ),
    ],
)
def test_s38_a_site_whose_data_has_another_form_is_refused_before_the_first_round(
    tmp_path, monkeypatch, masks, change, columns, why
):
    """The message says what differs, and has no value of the data, nor a label. In the open a model that the
    data does not fit fails at its site before that."""
    (tmp_path / "shapes.py").write_text(SHAPES.format(change=change, columns=columns))
    with inline(monkeypatch), pytest.raises(JoinRefused, match=why) as refused:
        federation(tmp_path, "ab", {}, run={"task": "shapes:Task"}, secagg={"enabled": masks}, joins=True)
    assert "63.5" not in str(refused.value)
    assert "Secret" not in str(refused.value)
    assert str(refused.value).startswith("the data of b is not like that of a, which joined first")


@pytest.mark.parametrize(
    ("change", "columns"),
    [
        ("return [(x[i, :], i % 2) for i in range(40 if site == 'a' else 30)]", "return None"),
        (
            "return [(x[i, : 2 + (site == 'a')], 1) for i in range(40)]",
            "return None",
        ),  # evened out by a collate()
        ("return iter([(x[:, :3], x[:, 0].long())] if site == 'a' else [])", "return None"),
        ("x = x[: 20 if site == 'b' else 40]", "return None"),
        ("x = x[:0] if site == 'b' else x", "return None"),
        ("x = x[:, :3] if site == 'b' else x", "return {'age': [1.0] if site == 'a' else [2.0, 3.0]}"),
    ],
)
def test_data_of_one_form_and_data_of_which_one_example_does_not_tell_are_agreed_on(
    tmp_path, change, columns
):
    (tmp_path / "shapes.py").write_text(SHAPES.format(change=change, columns=columns))
    task = load_task("shapes:Task", tmp_path)
    forms = {s: ColumnSource.at(task, s, lambda s=s: task.data(s)).form() for s in "ab"}
    agreed_data("b", forms["b"], "a", forms["a"])
