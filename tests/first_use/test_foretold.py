"""A simulation foretells the federation: with each fault of a site the same outcome, in the same words."""

import asyncio
import errno
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from fedtrain import metrics
from fedtrain.config import Config
from fedtrain.errors import FedtrainError, TaskError, reason_of
from fedtrain.messages import Evaluation
from fedtrain.pki import init, issue
from fedtrain.runtime.simulations import gossip_simulation
from fedtrain.runtime.simulations.shares import Failures
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.runtime.sites import site
from fedtrain.runtime.star import aggregator
from fedtrain.runtime.trainers import trainer
from fedtrain.runtime.trainers.trainer_messages import Failed
from fedtrain.store import RunStore
from fedtrain.transport.endpoints import RemoteCohort
from tests.allowed import allowed
from tests.ports import free_port

SITES = ("a", "b", "c", "d")
TASK = '''
import torch
from torch import nn

import fedtrain


class Wards(fedtrain.Task):
    """Four wards; at those named in `bad` something is wrong."""

    def __init__(self, fault="", bad="c"):
        self.fault, self.bad, self.round = fault, bad, 0

    def sites(self):
        return ["a", "b", "c", "d"]

    def model(self):
        return nn.Linear(4, 2)

    def data(self, site):
        fault = self.fault if site in self.bad else ""
        if fault == "data raises":
            raise KeyError("patients")
        count = 0 if fault == "empty" else 24
        x = torch.randn(count, 4, generator=torch.Generator().manual_seed(ord(site)))
        return x, (x[:, 0] > 0).long(), torch.full((count,), site in self.bad)

    def eval_data(self, site):
        fault = self.fault if site in self.bad else ""
        if fault == "eval_data raises":
            raise KeyError("patients")
        return tuple(column[:0] if fault == "eval_data empty" else column for column in self.data(site))

    def optimizer(self, parameters, round):
        self.round = round

    def loss(self, model, batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if not (model.training and batch[2].any()):
            return loss
        if self.fault == "loss raises" or (self.fault == "round 2" and self.round == 1):
            raise ValueError("no such gene")
        if self.fault == "no memory":
            raise MemoryError
        if self.fault == "no room for a tensor":
            torch.empty(1 << 50)
        return loss * float("nan") if self.fault == "nan" else loss

    def evaluate(self, model, batch):
        if self.fault == "evaluate raises" and batch[2].any():
            raise ValueError("no such gene")
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
'''

# fault -> (rounds of which the site is left out, evaluations likewise, why)
FAULTS = {
    "empty": ("123", "123", r"site c has no examples|c refuses: it has nothing to evaluate on"),
    "data raises": ("123", "123", r"KeyError in wards\.py:\d+, in data, (eval_)?data\('c'\)"),
    "loss raises": ("123", "", r"ValueError in wards\.py:\d+, in loss, site c, round"),
    "nan": ("123", "", r"c refuses: an update with values that are not finite|weight has 8 NaN or Inf"),
    "no memory": ("123", "", r"out of memory in wards\.py:\d+, in loss, site c, round"),
    "no room for a tensor": ("123", "", r"out of memory in wards\.py:\d+, in loss, site c, round"),
    "round 2": ("2", "", r"ValueError in wards\.py:\d+, in loss, site c, round"),
    "eval_data empty": ("", "123", r"c refuses: it has nothing to evaluate on: its eval_data\(\) gave no"),
    "eval_data raises": ("", "123", r"KeyError in wards\.py:\d+, in eval_data, eval_data\('c'\)"),
    "evaluate raises": ("", "123", r"ValueError in wards\.py:\d+, in evaluate, site c, evaluation"),
}


@dataclass
class Outcome:
    """What a run came to, as its people see it."""

    committed: list = field(default_factory=list)  # (round, sites, metrics of the training)
    evaluated: list = field(default_factory=list)  # (round, metrics)
    refused: list = field(default_factory=list)  # (round, site, why), each once
    error: str = ""
    model: str = ""

    def __call__(self, event):
        fields = event.fields()
        if event.kind == "round_committed":
            self.committed.append((fields["round"], fields["sites"], fields["metrics"]))
        elif event.kind == "evaluated":
            self.evaluated.append((fields["round"], fields["metrics"]["loss"], fields["metrics"]["accuracy"]))
        elif event.kind == "update_refused":
            found = (fields["round"], fields["site"], fields["reason"])
            self.refused += [] if found in self.refused else [found]


def project(root, fault, *, masks=True, min_sites=3, bad="c", workers=0, work_of_masks=False):
    root.mkdir(parents=True, exist_ok=True)
    (root / "wards.py").write_text(TASK)
    table = {
        "run": {"name": "r", "task": f"wards:Wards({fault!r}, {bad!r})", "rounds": 3, "seed": 5},
        "train": {"lr": 0.1, "batch_size": 8},
        "strategy": {"min_sites": min_sites},
        "secagg": {"enabled": masks, "max_examples": 1000},
        "simulate": {"workers": workers, "masks": work_of_masks},
        "network": {"listen": f"127.0.0.1:{free_port()}", "idle": "0.3s", "heartbeat": "1s"},
    }
    return Config.of(table, root)


def outcome_of(folder, run):
    outcome = Outcome()
    try:
        asyncio.run(run(outcome))
    except FedtrainError as e:
        outcome.error = str(e)
    store = RunStore(folder, read_only=True)
    outcome.model = store.latest().weights.load().digest
    store.close()
    return outcome


def simulated(config, **options):
    return outcome_of(config.simulate_dir, lambda emit: simulate(config, emit=emit, **options))


def federated(config, monkeypatch):
    """With an aggregator and four sites over mutual TLS; the round begins when all four are there."""
    members = RemoteCohort.members

    async def all_of_them(self, at_least):
        return await members(self, at_least and max(at_least, here))

    monkeypatch.setattr(RemoteCohort, "members", all_of_them)
    init(config.root / "certs")
    issue(config.root / "certs", "aggregator")
    for name in SITES:
        issue(config.root / "certs", "site", name)
    # In the open a site says at joining how many examples it has: one that can't ends there.
    here = 3 if not config.secagg.enabled and config.run.task.split("'")[1] == "data raises" else 4

    async def run(emit):
        sites = [asyncio.create_task(site.run(allowed(config, n), n, emit=lambda _: None)) for n in SITES]
        try:
            async with asyncio.timeout(60):
                await aggregator.serve(config, emit=emit)
        finally:
            for each in sites:
                each.cancel()
            await asyncio.gather(*sites, return_exceptions=True)

    return outcome_of(config.run_dir, run)


def check(outcome, fault, masks):
    """That a run went as the table has it."""
    trained, evaluated, why = FAULTS[fault]
    if fault in ("empty", "eval_data empty") and not masks:
        evaluated = ""  # in the open an evaluation of nothing adds nothing
    assert outcome.error == ""
    assert [(str(n), sites) for n, sites, _ in outcome.committed] == [
        (n, 3 if n in trained else 4) for n in "123"
    ]
    assert [n for n, *_ in outcome.evaluated] == [1, 2, 3]
    assert sorted(str(n) for n, *_ in outcome.refused) == sorted(trained + evaluated)
    for _, name, reason in outcome.refused:
        assert name == "c"
        assert re.match(why, reason), reason


@pytest.mark.parametrize("masks", [True, False], ids=["masks", "open"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_simulation_goes_on_without_a_bad_site_and_names_it(tmp_path, fault, masks):
    check(simulated(project(tmp_path, fault, masks=masks)), fault, masks)


@pytest.mark.slow(30)
@pytest.mark.parametrize("masks", [True, False], ids=["masks", "open"])
def test_with_each_fault_a_federation_comes_to_the_model_foretold(tmp_path, inline, monkeypatch, masks):
    for number, fault in enumerate(FAULTS):
        config = project(tmp_path / str(number), fault, masks=masks)
        with monkeypatch.context() as patched:
            real = federated(config, patched)
        foretold = simulated(config)
        if fault == "data raises" and not masks:  # its site has not joined, and its own people see why
            assert real.refused == []
            foretold.refused = []
        else:
            check(real, fault, masks)
        assert_foretold(real, foretold)


def assert_foretold(real, foretold):
    assert real.model == foretold.model
    assert real.committed == foretold.committed
    assert real.evaluated == foretold.evaluated
    assert len(real.refused) == len(foretold.refused)
    for there, here in zip(sorted(real.refused), sorted(foretold.refused), strict=True):
        assert here[:2] == there[:2]
        assert here[2].startswith(there[2])  # a simulation may say more: no data leaves its machine


FEW = {
    "empty": r"c: site c has no examples: data\('c'\) is empty\. Mend that, or lower strategy\.min_sites",
    "nan": "c: .*(not finite|NaN or Inf).* Mend that, or lower strategy.min_sites",
    "loss raises": r"c: ValueError in wards\.py:\d+, in loss, site c, round",
}


@pytest.mark.parametrize("masks", [True, False], ids=["masks", "open"])
@pytest.mark.parametrize("fault", FEW)
def test_too_few_sites_end_a_simulation_with_the_reason(tmp_path, fault, masks):
    found = simulated(project(tmp_path, fault, masks=masks, min_sites=4))
    assert re.search(rf"3 of 4 sites gave what can be used, 4 are needed\. {FEW[fault]}", found.error)
    assert found.committed == []


@pytest.mark.slow(20)
@pytest.mark.parametrize("masks", [True, False], ids=["masks", "open"])
def test_too_few_sites_end_a_federation_with_the_same_error(tmp_path, inline, monkeypatch, masks):
    for number, fault in enumerate(("empty", "nan")):
        config = project(tmp_path / str(number), fault, masks=masks, min_sites=4)
        with monkeypatch.context() as patched:
            real = federated(config, patched)
        assert real.error == simulated(config).error
        assert "3 of 4 sites gave what can be used" in real.error


ALL = {
    "empty": "site a has no examples",
    "data raises": r"KeyError in wards\.py:\d+, in data, data\('a'\)",
    "loss raises": r"ValueError in wards\.py:\d+, in loss, site a, round",
    "eval_data raises": r"KeyError in wards\.py:\d+, in eval_data, eval_data\('a'\)",
    "evaluate raises": r"ValueError in wards\.py:\d+, in evaluate, site a, evaluation",
}


@pytest.mark.parametrize("fault", ALL)
def test_a_fault_at_all_sites_ends_a_simulation_at_once(tmp_path, capsys, monkeypatch, fault):
    """With the task's own error and one traceback: in a federation each attempt would fail alike."""
    monkeypatch.setattr(trainer, "_printed", set())
    failed = []
    config = project(tmp_path, fault, bad="abcd")
    with pytest.raises(TaskError, match=ALL[fault]):
        asyncio.run(simulate(config, emit=lambda e: failed.append(e) if "fail" in e.kind else None))
    assert failed == []
    assert capsys.readouterr().err.count("Error: ") == (0 if fault == "empty" else 1)


@pytest.mark.usefixtures("forked")
@pytest.mark.slow(8)
def test_real_masks_and_worker_processes_foretell_the_same(tmp_path):
    for fault in ("empty", "loss raises", "nan", "eval_data empty", "evaluate raises"):
        plain = simulated(project(tmp_path / fault, fault))
        masked = simulated(project(tmp_path / fault, fault, work_of_masks=True), fresh=True)
        assert_foretold(masked, plain)
    plain = simulated(project(tmp_path, "loss raises"))
    assert_foretold(simulated(project(tmp_path, "loss raises", workers=2), fresh=True), plain)


def failed(site):
    return (site,), Failed(f"ValueError in task.py:9, in loss, site {site}")


def worked(site):
    return (site,), Evaluation(metrics={})


def told(failures, *results, sites):
    async def each():
        for result in results:
            yield result

    async def listen():
        return [(of[0], type(found).__name__) async for of, found in failures.told(each(), sites)]

    return asyncio.run(listen())


def test_failures_are_told_in_the_order_of_the_sites():
    results = failed("a"), failed("b"), worked("c"), failed("d")
    expected = [("a", "Failure"), ("b", "Failure"), ("c", "Evaluation"), ("d", "Failure")]
    assert told(Failures(), *results, sites=4) == expected


def test_ten_failures_before_a_site_works_end_the_run_of_a_population():
    many = [failed(f"s{i:02}") for i in range(10)]
    assert len(told(Failures(), *many[:9], sites=1000)) == 9
    with pytest.raises(TaskError, match="in loss, site s00"):
        told(Failures(), *many, sites=1000)
    failures = Failures()
    told(failures, worked("a"), sites=1000)
    assert len(told(failures, *many, sites=1000)) == 10  # others may well give what can be used


def test_sites_that_fail_one_by_one_end_the_run_when_all_have():
    """As those of a run without rounds, or of a strategy that asks one at a time."""
    failures = Failures()
    for name in "abc":
        assert told(failures, failed(name), sites=4) == [(name, "Failure")]
    with pytest.raises(TaskError, match="in loss, site d"):
        told(failures, failed("d"), sites=4)


@pytest.mark.parametrize("run", [simulate, gossip_simulation.simulate], ids=["star", "gossip"])
def test_names_that_no_certificate_takes_are_named_at_the_start(tmp_path, run):
    config, notices = project(tmp_path, ""), []
    task = (tmp_path / "wards.py").read_text()

    def tell(event):
        notices.extend([event.text] if event.kind == "notice" else [])

    asyncio.run(run(config, emit=tell))
    assert not any("certs issue" in text for text in notices)
    renamed = task.replace('["a", "b", "c", "d"]', '["St. Mary", "b", "site_1", "Zürich"]')
    (tmp_path / "wards.py").write_text(renamed.replace("ord(site)", "ord(site[0])"))
    asyncio.run(run(config, emit=tell, fresh=True))
    (line,) = [text for text in notices if "certs issue" in text]
    assert line.startswith("St. Mary, Zürich, site_1: `fedtrain certs issue` takes no such name, but 1 to 63")


def no_room():
    torch.empty(1 << 50)


def no_mapping():
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def no_memory():
    raise MemoryError


def no_gpu_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("lacks", [no_room, no_mapping, no_memory, no_gpu_memory])
def test_a_lack_of_memory_is_told_as_that_without_data(lacks):
    with pytest.raises((OSError, MemoryError, RuntimeError)) as error:
        lacks()
    assert reason_of(error.value) == "out of memory"


def test_another_error_is_told_by_its_place():
    with pytest.raises(OSError) as error:
        Path("no such file").read_bytes()
    assert re.fullmatch(r"FileNotFoundError in (pathlib|_local)\.py:\d+", reason_of(error.value))


def test_nan_among_scores_is_told_as_that():
    scores, labels = torch.tensor([0.5, math.nan, 2.0]), torch.tensor([0, 1, 1])
    with pytest.raises(TaskError) as error:
        metrics.binary_histogram(scores, labels)
    assert str(error.value) == (
        "metrics.binary_histogram: NaN among the scores. Look for NaN in the data, or lower train.lr"
    )
    assert "sigmoid" not in str(error.value)


@pytest.mark.parametrize("run", [simulate, gossip_simulation.simulate], ids=["star", "gossip"])
def test_what_evaluate_says_of_its_batch_names_the_site(tmp_path, run):
    """As what loss() raises does."""
    config = project(tmp_path, "", bad="abcd", masks=False)
    nan = "fedtrain.metrics.binary_histogram(torch.full((1,), float('nan')), batch[1][:1])"
    task = TASK.replace('{"accuracy"', f'{nan} | {{"accuracy"').replace(
        "import fedtrain\n", "import fedtrain.metrics\n"
    )
    (tmp_path / "wards.py").write_text(task + "\n    def metrics(self, sums):\n        return {}\n")
    with pytest.raises(TaskError, match=r"^site a: metrics\.binary_histogram: NaN among the scores"):
        asyncio.run(run(config, emit=lambda _: None))
