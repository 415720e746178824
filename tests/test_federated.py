"""The round loop over cohorts in memory: who is asked, what is refused, what survives."""

import asyncio
import contextlib
import math
import random

import pytest
import torch
from msgspec import structs

from fedtrain.arena import Arena, Slab
from fedtrain.config import Config, LimitsConfig
from fedtrain.digest import seed_of
from fedtrain.errors import BadUpdate, ConfigError, Diverged, StoreError, TooFewSites
from fedtrain.messages import Evaluate, Evaluation, Failure, Train, Update
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.star import aggregator, checks, federated
from fedtrain.runtime.star.answers import InTheOpen
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import Checkpoint, RunStore
from fedtrain.strategies import beginning, build
from fedtrain.transport.memory import LocalCohort

SCHEMA = Schema((TensorSpec("w", (6,), "float32", True), TensorSpec("seen", (2,), "float32", False)))
SITES = ["a", "b", "c", "d", "e"]


def arena(*values):
    made = Arena.zeros(SCHEMA)
    made.flat(SCHEMA.sections[0]).copy_(torch.tensor(values or [0.0] * 8))
    return made


def pull(site, seen=None):
    """A site that moves halfway to its own optimum, with a little noise that depends on round and site."""
    target = torch.arange(8.0) * (1 + SITES.index(site))

    def handle(request):
        if seen is not None:
            seen.append((request.id, site))
        weights = request.weights.chunk(SCHEMA.sections[0], 0, 8)
        loss = float(((weights - target) ** 2).sum())
        if isinstance(request, Evaluate):
            return Evaluation(metrics={"loss": (loss, 1.0)})
        noise = torch.Generator().manual_seed(seed_of("noise", request.round, site))
        delta = arena(*((target - weights) / 2 + 0.01 * torch.randn(8, generator=noise)).tolist())
        return Update(delta=delta, num_examples=1.0 + SITES.index(site), metrics={"loss": (loss, 1.0)})

    return handle


def config(tmp_path, **sections):
    table = {
        "run": {"name": "t", "rounds": 5, "seed": 3},
        "strategy": {"kind": "fedavg", "min_sites": 3, "round_deadline": "5s"},
    }
    for name, keys in sections.items():
        table[name] = {**table.get(name, {}), **keys}
    return Config.of(table, root=tmp_path)


class Events(list):
    def __call__(self, event):
        self.append((event.kind, event.fields()))

    def of(self, kind):
        return [fields for k, fields in self if k == kind]


def run(cfg, cohort, events=None, store=None):
    own, events = store is None, Events() if events is None else events
    store = store or RunStore(cfg.run_dir)
    strategy = build(cfg.strategy.kind, cfg.strategy.options)
    try:
        store.begin(SCHEMA, cfg.agreed(), task_digest="t")
        if store.latest() is None:
            store.commit(Checkpoint(0, *beginning(strategy, arena())), {})
        result = asyncio.run(
            federated.run(Journal(cfg, store, events), InTheOpen(cfg, cohort, events), strategy)
        )
        return result, store.latest()
    finally:
        if own:
            store.close()


def handlers(**changed):
    return {site: pull(site) for site in SITES} | changed


class Shuffled(LocalCohort):
    """Replies in a seeded random order."""

    def __init__(self, handlers, seed):
        super().__init__(handlers)
        self._random = random.Random(seed)

    async def exchange(self, requests, deadline_s):
        replies = [pair async for pair in super().exchange(requests, deadline_s)]
        self._random.shuffle(replies)
        for pair in replies:
            yield pair


@pytest.mark.parametrize("kind", ["fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_s34_the_order_of_arrival_changes_no_bit(tmp_path, kind):
    digests = set()
    for seed in range(3):
        cfg = config(tmp_path / str(seed), strategy={"kind": kind})
        digests.add(run(cfg, Shuffled(handlers(), seed))[1].weights.digest)
    assert len(digests) == 1


def test_a_round_is_the_weighted_mean_by_hand(tmp_path):
    cfg = config(tmp_path, run={"rounds": 1})
    after = run(cfg, LocalCohort(handlers()))[1].weights
    deltas = [
        pull(s)(Train(id="", round=0, weights=arena())).delta.flat(SCHEMA.sections[0]).double() for s in SITES
    ]
    mean = sum(w * d for w, d in zip((1, 2, 3, 4, 5), deltas, strict=True)) / 15
    assert torch.equal(after.flat(SCHEMA.sections[0]), mean.float())


def bad(values=None, schema=SCHEMA, examples=5.0):
    def handle(request):
        if isinstance(request, Evaluate):
            return Evaluation(metrics={"loss": (1.0, 1.0)})
        delta = Arena.zeros(schema)
        if values is not None:
            delta.flat(schema.sections[0])[: len(values)] = torch.tensor(values)
        return Update(delta=delta, num_examples=examples)

    return handle


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.0, 1e30])
def test_a_row_of_a_slab_is_refused_as_it_would_be_alone_and_its_neighbours_are_not(value):
    """1e30 is finite, but its square is not in float32."""
    data = torch.ones(4, SCHEMA.nbytes // 4)
    data[2, 0] = value
    limits = LimitsConfig(max_norm=math.sqrt(SCHEMA.numel) * 1.0001)

    def verdicts(deltas):
        found = []
        for delta in deltas:
            try:
                found.append(checks.inspect(Update(delta=delta, num_examples=1.0), limits))
            except BadUpdate as e:
                found.append(str(e))
        return found

    rows = verdicts(Slab(SCHEMA, data.view(torch.uint8)).arenas())
    assert rows == pytest.approx(verdicts(Arena(SCHEMA, row) for row in data.view(torch.uint8)))
    assert [type(verdict) for verdict in rows] == [float, float, str, float]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_s16_an_update_with_nan_or_inf_is_refused_and_named_and_the_round_completes(tmp_path, value):
    events, cohort = Events(), LocalCohort(handlers(c=bad([0.0, value])))
    _, after = run(config(tmp_path, run={"rounds": 1}), cohort, events)
    without = run(
        config(tmp_path / "x", run={"rounds": 1}),
        LocalCohort({k: v for k, v in handlers().items() if k != "c"}),
    )
    assert after.weights.digest == without[1].weights.digest
    assert events.of("update_refused") == [
        {"round": 1, "site": "c", "reason": "w has 1 NaN or Inf of 6 values"}
    ]
    assert cohort.lines == [("c", "round 1: the update was refused: w has 1 NaN or Inf of 6 values")]


@pytest.mark.parametrize("kind", ["fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad"])
@pytest.mark.parametrize("value", [3e38, 1e30])
def test_a_finite_update_that_no_model_survives_is_named_and_the_round_is_had_without_it(
    tmp_path, kind, value
):
    """Its values are finite, but the next loss's squares of the weights would not be."""
    keys = {"kind": kind, "min_sites": 4}
    events, cohort = Events(), LocalCohort(handlers(c=bad([value] * 6)))
    result, after = run(config(tmp_path, strategy=keys), cohort, events)
    others = LocalCohort({k: v for k, v in handlers().items() if k != "c"})
    assert result.reason == "rounds done"
    assert after.weights.digest == run(config(tmp_path / "x", strategy=keys), others)[1].weights.digest
    refused = events.of("update_refused")
    assert {e["site"] for e in refused} == {"c"}
    assert all("c's update is" in e["reason"] and "all others together" in e["reason"] for e in refused)
    assert [site for site, _ in cohort.lines] == ["c"] * len(refused)
    assert len(refused) == 1, "for ten rounds it is not asked again"


def test_without_the_site_that_spoils_it_too_few_are_left_and_the_error_names_it(tmp_path):
    cfg = config(tmp_path, run={"rounds": 1}, strategy={"min_sites": 5})
    with pytest.raises(Diverged, match=r"not committed: .*; c's update is .* times as large"):
        run(cfg, LocalCohort(handlers(c=bad([3e38] * 6))))
    store = RunStore(cfg.run_dir)
    assert store.latest().round == 0
    store.close()


def test_training_that_diverges_at_all_sites_alike_blames_none_and_says_what_to_lower(tmp_path):
    cohort, events = LocalCohort(dict.fromkeys(SITES, bad([1e19] * 6))), Events()
    with pytest.raises(Diverged, match=r"no site's update outweighs .*: lower train\.lr"):
        run(config(tmp_path, run={"rounds": 9}, strategy={"kind": "fedavgm"}), cohort, events)
    assert events.of("update_refused") == []
    assert len(events.of("round_failed")) == 1, "the same would come of it again"


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("where", ["weights", "frozen", "state"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_a_value_that_is_not_finite_anywhere_in_a_new_model_or_its_state_is_seen(dtype, where, value):
    schema = Schema((TensorSpec("w", (1000,), dtype, True), TensorSpec("f", (10,), dtype, False)))
    weights, state = Arena.zeros(schema), {f"{dtype}/m": torch.ones(1000)}
    largest = min(torch.finfo(weights.views()["w"].dtype).max, 1e17)  # whose squares there are in float32
    weights.views()["w"].fill_(largest)
    if value is None:
        assert checks.flaw(weights, state) is None
        return
    {"weights": weights.views()["w"], "frozen": weights.views()["f"], "state": state[f"{dtype}/m"]}[where][
        7
    ] = value
    assert "1 NaN or Inf of" in checks.flaw(weights, state) or where == "state"
    assert checks.flaw(weights, state) is not None


def test_integers_and_a_strategys_counts_are_no_reason_for_a_flaw():
    schema = Schema((TensorSpec("w", (2,), "float32", True), TensorSpec("n", (1,), "int64", False)))
    weights = Arena.zeros(schema)
    weights.views()["n"].fill_(2**62)
    assert checks.flaw(weights, {"float32/steps": torch.tensor([2**62])}) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
@pytest.mark.parametrize("work", [Train, Evaluate])
def test_a_metric_that_is_no_number_or_an_absurd_one_is_refused_and_named(tmp_path, work, value):
    """A hostile site's NaN would stand in the log for the loss of all, and none would ever be the best."""

    def handle(request):
        reply = pull("c")(request)
        if isinstance(request, work):
            reply = structs.replace(reply, metrics={"loss": (value, 10.0)})
        return reply

    events = Events()
    result, _ = run(config(tmp_path), LocalCohort(handlers(c=handle)), events)
    refused = {e["site"]: e["reason"] for e in events.of("update_refused")}
    assert list(refused) == ["c"]
    assert refused["c"] == f"metric loss is {value / 10:g}; did its training diverge?"
    told = [e["loss"] for e in events.of("round_committed")] + [
        e["metrics"]["loss"] for e in events.of("evaluated")
    ]
    assert all(map(math.isfinite, told))
    assert result.best_round is not None


def test_a_loss_as_large_as_float32_can_say_is_believed(tmp_path):
    metrics = {"loss": (3.4e38 * 70, 70.0)}
    checks.answers(Evaluate(id="", round=0, weights=arena()), Evaluation(metrics=metrics), LimitsConfig())


def test_s19_an_update_over_the_norm_bound_is_refused(tmp_path):
    events = Events()
    cfg = config(tmp_path, run={"rounds": 1}, limits={"max_norm": 1000.0})
    run(cfg, LocalCohort(handlers(d=bad([1e4]))), events)
    assert events.of("update_refused")[0]["reason"] == "its norm 1e+04 is over limits.max_norm = 1000"


ROBUST = {
    "median": {},
    "trimmed_mean": {"f": 1},
    "krum": {"f": 1},
    "multi_krum": {"f": 1},
    "geometric_median": {},
    "centered_clip": {},
}


@pytest.mark.parametrize("values", [[1e30] * 8, [-1e30] * 8, [0.0] * 5 + [1e30] * 3, [-40.0] * 8])
@pytest.mark.parametrize("rule", ROBUST)
def test_s19_one_hostile_site_of_five_cannot_move_the_model_past_the_bound(tmp_path, rule, values):
    """After five rounds the model is no further from the honest optima than these are from each other."""
    cfg = config(tmp_path, strategy={"min_sites": 5}, aggregation={"rule": rule, **ROBUST[rule]})
    _, after = run(cfg, LocalCohort(handlers(c=bad(values, examples=1e6))))
    optima = torch.stack([torch.arange(8.0) * (1 + SITES.index(site)) for site in "abde"])
    middle = optima.mean(0)
    bound = 1.5 * (optima - middle).norm(dim=1).max()
    assert (after.weights.flat(SCHEMA.sections[0]) - middle).norm() <= bound


def test_s19_the_mean_without_a_bound_is_moved_by_one_site(tmp_path):
    """What the robust rules, and the guard, are for."""
    cfg = config(tmp_path, limits={"max_ratio": 0})
    _, after = run(cfg, LocalCohort(handlers(c=bad([1e15] * 8))))
    assert after.weights.flat(SCHEMA.sections[0]).abs().max() > 1e14


@pytest.mark.parametrize("rule", ROBUST)
def test_a_robust_rule_gives_the_same_bits_whatever_the_order_of_arrival(tmp_path, rule):
    digests = set()
    for seed in range(3):
        cfg = config(tmp_path / str(seed), strategy={"min_sites": 5}, aggregation={"rule": rule})
        digests.add(run(cfg, Shuffled(handlers(), seed))[1].weights.digest)
    assert len(digests) == 1


class OneSlab(LocalCohort):
    """Updates that lie in the same shared memory, one after the other, as a pool's do."""

    async def exchange(self, requests, deadline_s):
        memory = torch.zeros(1, SCHEMA.nbytes, dtype=torch.uint8)
        async for site, reply in super().exchange(requests, deadline_s):
            if isinstance(reply, Update):
                memory[0] = reply.delta.data
                (row,) = Slab(SCHEMA, memory).arenas()
                reply = Update(delta=row, num_examples=reply.num_examples, metrics=reply.metrics)
            yield site, reply


@pytest.mark.parametrize("rule", ["mean", *ROBUST])
def test_updates_in_memory_that_is_used_again_are_aggregated_as_if_they_had_stayed(tmp_path, rule):
    digests = []
    for i, kind in enumerate((LocalCohort, OneSlab)):
        cfg = config(tmp_path / str(i), strategy={"min_sites": 5}, aggregation={"rule": rule})
        digests.append(run(cfg, kind(handlers()))[1].weights.digest)
    assert digests[0] == digests[1]


def test_a_rule_that_needs_more_updates_than_a_round_may_have_refuses_to_start(tmp_path):
    seen = []
    cfg = config(tmp_path, aggregation={"rule": "krum", "f": 1})
    with pytest.raises(
        ConfigError, match="krum with f = 1 needs 5 updates a round, but 3 may be all that come"
    ):
        run(cfg, LocalCohort(handlers(a=pull("a", seen))))
    assert seen == []


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (
            bad(schema=Schema((TensorSpec("w", (1,), "float32", True), SCHEMA.tensors[1]))),
            "does not fit the model",
        ),
        (bad(examples=1e12), "claims 1e+12 examples"),
        (lambda request: Failure(reason="TaskError: disk full"), "disk full"),
        (lambda request: Evaluation(metrics={}), "Evaluation does not answer Train"),
    ],
    ids=["shape-1", "examples", "failure", "other-reply"],
)
def test_what_the_wire_would_refuse_a_cohort_in_memory_refuses_too(tmp_path, handler, reason):
    events = Events()
    run(config(tmp_path, run={"rounds": 1}, evaluate={"every": 0}), LocalCohort(handlers(b=handler)), events)
    (refused,) = events.of("update_refused")
    assert refused["site"] == "b"
    assert reason in refused["reason"]


def test_too_few_sites_try_again_with_another_draw_and_then_change_nothing(tmp_path):
    cfg, events = config(tmp_path, strategy={"min_sites": 4}), Events()
    cohort = LocalCohort(handlers(), loses=lambda site, request: site in "ab" and "/2/" in request.id)
    store = RunStore(cfg.run_dir)
    with pytest.raises(TooFewSites, match=r"round 3: 3 sites replied, 4 are needed"):
        run(cfg, cohort, events, store)
    assert [e["attempt"] for e in events.of("round_failed")] == [1, 2, 3]
    assert store.latest().round == 2
    result, after = run(
        cfg, LocalCohort(handlers()), store=store
    )  # the sites are back: the same command goes on
    store.close()
    whole = run(config(tmp_path / "x", strategy={"min_sites": 4}), LocalCohort(handlers()))[1]
    assert result.rounds == 5
    assert after.weights.digest == whole.weights.digest


def test_a_fraction_of_the_sites_is_drawn_by_seed_round_and_attempt_alone(tmp_path):
    cfg = config(tmp_path, strategy={"fraction": 0.5, "min_sites": 1})
    many = [f"s{i:03}" for i in range(100)]
    drawn = [federated.sample(cfg, r, 0, many) for r in range(20)]
    assert all(len(d) == 50 and d == sorted(d) for d in drawn)
    assert len({tuple(d) for d in drawn}) == 20
    assert drawn[3] == federated.sample(cfg, 3, 0, list(reversed(many)))
    assert drawn[3] != federated.sample(cfg, 3, 1, many)


def test_the_best_model_is_kept_and_a_run_without_progress_stops_early(tmp_path):
    def worse_after_two(request):
        if isinstance(request, Evaluate):
            return Evaluation(metrics={"loss": (abs(request.round - 2.0), 1.0)})
        return pull("a")(request)

    cfg = config(tmp_path, run={"rounds": 50}, strategy={"min_sites": 1}, evaluate={"patience": 3})
    store = RunStore(cfg.run_dir)
    result, after = run(cfg, LocalCohort({"a": worse_after_two}), store=store)
    assert (result.best_round, result.rounds) == (2, 5)
    assert "loss has not improved for 3 evaluations" in result.reason
    assert store.load(2).round == 2  # still whole, though three rounds came after it
    with pytest.raises(StoreError, match="not kept"):
        store.load(1)
    again, same = run(
        cfg, LocalCohort({"a": worse_after_two}), store=store
    )  # the same command: nothing to do
    assert same.weights.digest == after.weights.digest
    assert again.rounds == 5
    store.close()


@pytest.mark.parametrize("every", [0, 1, 2])
def test_a_round_is_planned_by_the_commit_before_it_unless_an_evaluation_is_between(tmp_path, every):
    cfg = config(tmp_path, run={"rounds": 5}, evaluate={"every": every})
    store, plans = RunStore(cfg.run_dir), []
    keep = store.set_plan

    def noted(plan):
        plans.append((plan.round, store.db._db.in_transaction))
        assert (plan.sites, plan.registered) == (list(SITES), len(SITES))
        keep(plan)

    store.set_plan = noted
    run(cfg, LocalCohort(handlers()), store=store)
    assert plans == [(n, n > 0 and (every == 0 or n % every > 0)) for n in range(5)]
    store.close()


@pytest.mark.slow(5)
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

    whole = run(config(tmp_path / "whole", strategy={"kind": kind}), LocalCohort(handlers()))[
        1
    ].weights.digest
    for count in range(0, 45, 4):
        cfg = config(tmp_path / str(count), strategy={"kind": kind})
        with pytest.raises(Stop):
            run(cfg, LocalCohort(handlers(), loses=dies_at(count)))
        assert run(cfg, LocalCohort(handlers()))[1].weights.digest == whole


def test_another_configuration_does_not_go_on_with_an_old_run(tmp_path):
    run(config(tmp_path), LocalCohort(handlers()))
    with pytest.raises(StoreError, match=r"train.lr was 0.01, is 0.5.*own run.name"):
        run(config(tmp_path, train={"lr": 0.5}), LocalCohort(handlers()))


@pytest.mark.slow(3)
def test_a_run_that_goes_on_with_the_same_code_starts_no_process_to_load_it(tmp_path, monkeypatch):
    task = tmp_path / "begun_task.py"
    task.write_text(
        "import torch, fedtrain\n\nclass Task(fedtrain.Task):\n"
        "    def model(self):\n        return torch.nn.Linear(3, 2)\n"
        "    def data(self, site):\n        raise NotImplementedError\n"
        "    def loss(self, model, batch):\n        raise NotImplementedError\n"
    )
    cfg = config(tmp_path, run={"task": "begun_task:Task"})
    strategy, store = build("fedavg", {}), RunStore(cfg.run_dir)
    begun = asyncio.run(aggregator._begin(cfg, store, strategy, None, True))

    async def never(*_, **__):
        raise ChildProcessError("a process")

    monkeypatch.setattr("fedtrain.runtime.trainers.trainer.Trainer.start", never)
    assert asyncio.run(aggregator._begin(cfg, store, strategy, None, True)) == begun
    assert store.latest().round == 0
    task.write_text(task.read_text().replace("3, 2", "3, 1"))
    with pytest.raises(ChildProcessError):
        asyncio.run(aggregator._begin(cfg, store, strategy, None, True))
    store.close()


def test_a_site_that_fails_once_in_an_evaluation_is_asked_again_for_it(tmp_path):
    cfg, events, asked = config(tmp_path, run={"rounds": 2}), Events(), []

    def once(request):
        if isinstance(request, Evaluate):
            asked.append(request.id)
            if len(asked) % 2:
                return Failure(reason="OutOfMemoryError in task.py:7, in loss")
        return pull("c")(request)

    run(cfg, LocalCohort(handlers(c=once)), events)
    assert [list(e["by_site"]) for e in events.of("evaluated")] == [SITES] * 2
    assert asked == ["t/1/0/evaluate", "t/1/1/evaluate", "t/2/0/evaluate", "t/2/1/evaluate"]


class Joins(LocalCohort):
    """The last of the sites is there once it was waited for."""

    def __init__(self, handlers):
        super().__init__(handlers)
        self.waited_for = []  # each time beside whom

    async def members(self, at_least):
        return (await super().members(at_least))[: None if self.waited_for else -1]

    async def newcomer(self, known):
        self.waited_for.append([*known])


def test_an_attempt_that_could_only_fail_like_the_two_before_waits_for_another_site(tmp_path):
    """Once is no proof: a trainer that died is replaced."""
    events = Events()
    cohort = Joins(handlers(a=lambda request: Failure(reason="its policy denies it")))
    cfg = config(tmp_path, run={"rounds": 1}, strategy={"min_sites": 4}, network={"idle": "1h"})
    assert run(cfg, cohort, events)[0].rounds == 1
    assert cohort.waited_for == [["a", "b", "c", "d"]]
    assert [len(e["sites"]) for e in events.of("round_started")] == [4, 4, 5]
    assert (
        "the same sites failed alike twice: the next attempt is in 3600 s" in events.of("notice")[0]["text"]
    )


def test_an_attempt_after_another_failure_or_after_silence_or_in_a_simulation_does_not_wait(tmp_path):
    """Who is silent was waited for in the attempt itself, and a simulation's sites are all there."""
    said = iter(f"{i} bytes of memory are left" for i in range(10))
    alike = lambda request: Failure(reason="its policy denies it")
    varied = lambda request: Failure(reason=next(said))
    cfg = config(tmp_path, run={"rounds": 1}, strategy={"min_sites": 5}, network={"idle": "1h"})
    with pytest.raises(TooFewSites, match="2 bytes of memory"):
        run(cfg, LocalCohort(handlers(a=varied)))
    simulated = contextlib.closing(RunStore(tmp_path / "simulated", durable=False))
    with simulated as store, pytest.raises(TooFewSites, match="its policy denies it"):
        run(cfg, LocalCohort(handlers(a=alike)), store=store)
    with pytest.raises(TooFewSites, match="4 sites replied, 5 are needed"):
        run(cfg, LocalCohort(handlers(), loses=lambda site, request: site == "a"))
