"""Updates that are summed where they are trained: the bits of single updates, whoever sums which of them."""

import asyncio
import os
import re
import signal
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import fedtrain
from fedtrain.aggregation.mean import BLOCK
from fedtrain.arena import Arena, ArenaFile
from fedtrain.config import Config
from fedtrain.errors import TaskError
from fedtrain.events import silent
from fedtrain.exchange import CohortWrapper
from fedtrain.messages import Train, Update
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.simulations import shares
from fedtrain.runtime.simulations.local_trainer import LocalTrainer
from fedtrain.runtime.simulations.simulation import answers, simulate
from fedtrain.runtime.star import federated
from fedtrain.runtime.trainers import trainer
from fedtrain.runtime.trainers.folding import stacks
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.store import RunStore
from fedtrain.strategies import build
from fedtrain.transport.memory import LocalCohort
from tests.inprocess import Events, begin, pool_of

SITES = [f"site{i:03}" for i in range(3 * BLOCK + 7)]
ROUNDS = 2


class Many(fedtrain.Task):
    """Sites of unequal sizes. `bad` has NaN, and data() raises at those whose names begin with `broken`. A
    process that loads the data of site 20 dies while there is a file `kill`."""

    def __init__(self, bad: str = "", broken: str = "") -> None:
        self.bad, self.broken = bad, broken

    def model(self):
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3))

    def sites(self):
        return SITES

    def data(self, site):
        if self.broken and site.startswith(self.broken):
            raise ValueError("no data here")
        if site == "site020" and (kill := Path("kill")).exists():
            kill.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        number = int(site[4:])
        x = torch.randn(2 + 2 * (number % 3), 5, generator=torch.Generator().manual_seed(number))
        return x * float("nan") if site == self.bad else x, x.sum(1).long() % 3

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Plain(Many):
    """The same for the stacked engine, which wants no buffers."""

    def model(self):
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


class Singly(CohortWrapper):
    """A pool whose sites are only asked for single updates."""

    async def exchange(self, requests, deadline_s):
        async with aclosing(self._inner.exchange(requests, deadline_s)) as replies:
            async for pair in replies:
                yield pair


def config(folder, kind="fedavg", *, task="Many", engine="loop", secagg=False, **strategy):
    folder.mkdir(exist_ok=True)
    (folder / "many_task.py").write_text("from tests.test_folding import Many, Plain\n")
    return Config.of(
        {
            "run": {"task": f"many_task:{task}", "rounds": ROUNDS, "name": "many", "seed": 3},
            "train": {"batch_size": 2, "lr": 0.05},
            "strategy": {"kind": kind, "attempts": 1, **strategy},
            "evaluate": {"every": 0},
            "secagg": {"enabled": secagg},
            "simulate": {"engine": engine},
        },
        folder,
    )


def trained(cfg, workers, wrap=lambda pool: pool):
    """(the model's digest, events, sites and sizes of each round, bytes in and out) with so many workers."""
    begin(cfg, simulated=True)
    events, rounds = Events(), []

    async def go():
        trainers = [LocalTrainer(Workbench(cfg, simulated=True)) for _ in range(workers)]
        pool, store = pool_of(cfg, trainers, cfg.root), RunStore(cfg.run_dir)
        asked = answers(cfg, wrap(pool), events, pool.description.extras)
        train = asked.train

        async def noted(plan, weights):
            found = await train(plan, weights)
            sums = {name: total.tolist() for name, total in found.sums.items()}
            rounds.append((list(found.sites), found.sizes, found.weight, found.scalars, found.metrics, sums))
            return found

        asked.train = noted
        try:
            strategy = build(cfg.strategy.kind, cfg.strategy.options)
            await federated.run(Journal(cfg, store, events), asked, strategy)
            return store.latest().weights.load().digest
        finally:
            store.close()
            await pool.close()

    digest = asyncio.run(go())
    told = [(k, {n: v for n, v in f.items() if n not in ("seconds", "commit_s")}) for k, f in events]
    return digest, told, rounds


CASES = {
    "fedavg": {},
    "a refused site": {"task": "Many(bad='site020')"},
    "the first of a block refused": {"task": "Many(bad='site016')"},
    "scaffold": {"kind": "scaffold"},
    "mimelite": {"kind": "mimelite", "task": "Plain"},
    "qfedavg": {"kind": "qfedavg"},
    "stacked": {"task": "Plain", "engine": "stacked"},
    "stacked, refused": {"task": "Plain(bad='site020')", "engine": "stacked"},
    "a sample": {"fraction": 0.6},
    "masks' arithmetic": {"secagg": True},
    "a refused site, masks' arithmetic": {"task": "Many(bad='site020')", "secagg": True},
    "scaffold, masks' arithmetic": {"kind": "scaffold", "secagg": True},
    "stacked qfedavg, masks' arithmetic": {"kind": "qfedavg", "task": "Plain", "secagg": True},
}


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_workers_and_any_shares_give_what_single_updates_give(case, tmp_path, monkeypatch):
    """The model, events, counted sites, their sizes, the weight, metrics: all, to the last bit."""
    expected = trained(config(tmp_path / "singly", **CASES[case]), 1, Singly)
    assert len(expected[2]) == ROUNDS
    for workers, share_s in (3, 1e-9), (8, 60.0):
        monkeypatch.setattr(shares, "SHARE_S", share_s)  # how finely rounds after the first are shared out
        assert trained(config(tmp_path / f"{workers} {share_s}", **CASES[case]), workers) == expected


def test_a_simulation_gives_the_bits_of_a_federation_of_more_sites_than_a_block(tmp_path):
    """Whose updates lie in files, as they come to an aggregator."""
    cfg = config(tmp_path / "simulated", task="Many(bad='site020')")
    expected = trained(cfg, 2)
    bench, files = Workbench(cfg, simulated=True), tmp_path / "files"
    files.mkdir()

    def handler(site):
        def train(request: Train) -> Update:
            out = Arena.zeros(request.weights.schema)
            update = bench.train(site, request.round, request.weights.load(), out)
            path = files / f"{site} {request.round}"
            path.write_bytes(out.payload)
            return msgspec.structs.replace(update, delta=ArenaFile(out.schema, path))

        return train

    cohort = LocalCohort({site: handler(site) for site in SITES})
    digest, _, rounds = trained(config(tmp_path / "real", task="Many(bad='site020')"), 1, lambda pool: cohort)
    assert digest == expected[0]
    assert [found[0] for found in rounds] == [found[0] for found in expected[2]]


def test_a_site_where_the_task_fails_is_left_out_of_the_sums(tmp_path, capsys, monkeypatch):
    """Of folded ones as of single ones; its traceback is printed once."""
    monkeypatch.setattr(trainer, "_printed", set())
    broken = "Many(broken='site020')"
    singly = trained(config(tmp_path / "singly", task=broken), 2, Singly)
    folded = trained(config(tmp_path / "folded", task=broken), 2)
    assert folded == singly
    refused = [event for kind, event in folded[1] if kind == "update_refused"]
    assert [(event["round"], event["site"]) for event in refused] == [(1, "site020"), (2, "site020")]
    assert re.match(r"ValueError in test_folding\.py:\d+, in data, data\('site020'\)", refused[0]["reason"])
    assert capsys.readouterr().err.count("ValueError: no data here") == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_that_fails_at_every_site_ends_a_folded_round(tmp_path, workers):
    with pytest.raises(TaskError, match=r"ValueError in test_folding\.py:\d+, in data, data\('site000'\)"):
        trained(config(tmp_path, task="Many(broken='site')"), workers)


@pytest.mark.usefixtures("forked")
@pytest.mark.slow(10)
@pytest.mark.parametrize(
    ("secagg", "some"), [(False, (0, 1, 3)), (True, (0, 2))], ids=["open", "fixed point"]
)
def test_a_worker_that_is_killed_in_a_round_changes_nothing(tmp_path, monkeypatch, secagg, some):
    digests = set()
    for workers in some:
        cfg = config(tmp_path / f"{workers}", secagg=secagg)
        monkeypatch.chdir(cfg.root)
        if workers:
            Path("kill").touch()
        asyncio.run(simulate(cfg, emit=silent, workers=workers))
        assert not Path("kill").exists()
        store = RunStore(cfg.simulate_dir, read_only=True)
        digests.add(store.latest().weights.load().digest)
        store.close()
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("sites", "workers", "site_s", "expected"),
    [
        (100, 2, None, [16] * 6 + [1] * 4),  # what is left of even blocks comes singly
        (100, 2, 1.0, [16] * 6 + [1] * 4),
        (100, 2, 1e-5, [48, 52]),  # sites that are done soon: one share for each worker
        (24, 2, None, [4] * 6),  # too few blocks for all workers: as finely as single updates go
        (1000, 3, 1e-5, [336, 336, 328]),
        (1000, 2, 1e-4, [240, 192, 144, 96, 80, 64, 48, 48, 48, 40]),  # smaller and smaller: all end together
        (7, 1, 1e-5, [7]),
    ],
)
def test_shares_keep_all_workers_busy_and_hold_every_site_once_in_order(sites, workers, site_s, expected):
    names = [f"{i}" for i in range(sites)]
    found = shares.folded(names, workers, 16, 1000, 2000, site_s, stacked=False)
    assert [len(share.sites) for share in found] == expected
    assert [site for share in found for site in share.sites] == names
    places = [names.index(share.sites[0]) for share in found if share.folded]
    assert all(place % BLOCK == 0 for place in places)


@pytest.mark.parametrize("sites", [7, 100, 500, 504, 505])
def test_shares_of_stacked_sites_are_whole_stacks(sites):
    names, whole = [f"{i}" for i in range(sites)], stacks(sites, 48)
    assert all(stop - start <= 72 for start, stop in whole)
    for site_s in (None, 1e-5, 1e-3, 1.0):
        found = shares.folded(names, 4, 48, 20_000, 40_000, site_s, stacked=True)
        assert [site for share in found for site in share.sites] == names
        trained = []  # in a worker
        for share in found:
            at = names.index(share.sites[0])
            trained += [(at + start, at + stop) for start, stop in stacks(len(share.sites), 48)]
        assert all(share.folded for share in found)
        assert trained == whole


def test_the_sums_of_a_share_are_bounded_in_bytes():
    names = [f"{i}" for i in range(160)]
    found = shares.folded(names, 1, 1, 2 << 20, 30 << 20, 1e-5, stacked=False)
    assert [len(share.sites) for share in found] == [32] * 5
