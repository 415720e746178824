"""What a site keeps between rounds: it advances with updates that counted, and with no others."""

import asyncio
import signal
import time

import pytest
import torch

from fedtrain.arena import Arena
from fedtrain.compression import parse
from fedtrain.compression.codec import DeltaCodec
from fedtrain.config import Config
from fedtrain.digest import seed_of
from fedtrain.errors import StoreError, TooFewSites
from fedtrain.exchange import CohortWrapper
from fedtrain.messages import Train
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.sites import compressed
from fedtrain.runtime.star import federated
from fedtrain.runtime.star.answers import InTheOpen
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.store import Checkpoint, RoundPlan, RunStore
from fedtrain.store.memory import NEVER, SiteMemory
from fedtrain.strategies import build
from tests.inprocess import Events, InProcess, begin, pool_of
from tests.processes import Project
from tests.test_compressed import SITES, config, one_thread  # noqa: F401  # a fixture


def state(value):
    return Arena.pack({"float32/residual": torch.full((5,), float(value)), "n": torch.tensor(value)})


def test_a_state_is_kept_until_the_update_it_belongs_to_counted_or_did_not(tmp_path):
    memory = SiteMemory(tmp_path / "a", durable=True)
    assert memory.empty
    counted = NEVER
    for round, counts in enumerate([True, True, False, False, True, True]):
        memory.keep(round, counted, state(round))
        if counts:
            counted = round
        assert memory.load(round).views()["n"] == round
        assert memory.load(counted).views()["n"] == counted
    assert memory.load(4).views()["n"] == 4  # the one before: an aggregator's store may go back a round
    memory.keep(6, 5, state(6))
    memory.keep(6, 5, state(7))  # trained again from elsewhere
    assert memory.load(6).views()["n"] == 7
    assert len(list((tmp_path / "a").iterdir())) == 3
    with pytest.raises(StoreError, match="has no state after round 2"):
        memory.load(1)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap"])
def test_a_damaged_state_is_named_and_never_used(tmp_path, damage):
    memory = SiteMemory(tmp_path, durable=False)
    memory.keep(0, NEVER, state(0))
    memory.keep(1, 0, state(1))
    path, other = (next(tmp_path.glob(f"{n}-*")) for n in (1, 0))
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[3] ^= 1
    path.write_bytes({"flip": data, "cut": data[:7], "empty": b"", "swap": other.read_bytes()}[damage])
    with pytest.raises(StoreError, match=rf"{path.name} is damaged"):
        memory.load(1)


# --- In rounds


class Losing(CohortWrapper):
    """Sites whose replies are lost, by (site, round)."""

    def __init__(self, others, lost):
        super().__init__(others)
        self.lost = lost

    async def exchange(self, requests, deadline_s):
        async for site, reply in self._inner.exchange(requests, deadline_s):
            if (site, requests[site].id) not in self.lost:
                yield site, reply


def lost(*pairs):
    """(site, round, attempt) -> by (site, request)."""
    return {(site, f"r/{round}/{attempt}/train") for site, round, attempt in pairs}


def run(cfg, losing, rounds, scratch):
    """Rounds over simulated sites, with a new store and new trainers each `rounds`, as after a kill."""
    begin(cfg)
    for until in rounds:
        store, trainer = RunStore(cfg.run_dir), InProcess(cfg, scratch, simulated=True)
        table = cfg.table() | {"run": cfg.table()["run"] | {"rounds": until}}
        mine = Config.of(table, cfg.root)

        async def go(mine=mine, store=store, trainer=trainer):
            pool = pool_of(mine, [trainer], scratch)
            events = Events()
            cohort = compressed.decompressing(mine, trainer.description.schema, Losing(pool, losing))
            await federated.run(
                Journal(mine, store, events), InTheOpen(mine, cohort, events), build("fedavg", {})
            )

        try:
            asyncio.run(go())
            weights = store.latest().weights
        finally:
            store.close()
    return weights


def by_hand(cfg, lost, rounds):
    """The same with lists and no stores: error feedback as Karimireddy et al. 2019 write it, Algorithm 2."""
    plain = Config.of(cfg.table() | {"compression": {"up": ""}}, cfg.root)
    bench, compressor = Workbench(plain, simulated=True), parse(cfg.compression.up)
    weights = bench.initial()
    codec = DeltaCodec(weights.schema, compressor)
    (section,) = (s for s in weights.schema.sections if s.trained)
    residual = {site: torch.zeros(section.trained) for site in SITES}
    for number in range(rounds):
        total, examples = torch.zeros(section.trained, dtype=torch.float64), 0.0
        rest = torch.zeros(section.numel - section.trained, dtype=torch.float64)
        for site in SITES:
            update = bench.train(site, number, weights, Arena.zeros(weights.schema))
            if (site, f"r/{number}/0/train") in lost:
                continue
            wanted = update.delta.flat(section)[: section.trained] + residual[site]
            seed = seed_of(cfg.run.seed, "compression", number, site)
            sent = compressor.decode(compressor.encode(wanted, seed, {})[0], seed, section.trained)
            residual[site] = wanted - sent
            total += update.num_examples * sent.double()
            rest += update.num_examples * update.delta.flat(section)[section.trained :].double()
            examples += update.num_examples
        new = weights.load()
        new.flat(section)[: section.trained] += (total / examples).float()
        new.flat(section)[section.trained :] += (rest / examples).float()
        weights = new
    assert codec.schema == weights.schema
    return weights


def test_what_a_site_left_out_comes_back_only_when_its_update_counted(tmp_path):
    cfg = config(tmp_path, "topk:0.1", strategy={"min_sites": 2})
    losing = lost(("a", 1, 0), ("b", 2, 0), ("a", 3, 0), ("a", 4, 0))
    found, expected = run(cfg, losing, [6], tmp_path), by_hand(cfg, losing, 6)
    for name, values in expected.views().items():
        if name.endswith("num_batches_tracked"):
            continue
        assert torch.allclose(found.views()[name].double(), values.double(), atol=1e-6), name


def test_a_run_stopped_anywhere_and_rounds_tried_again_give_the_bits_of_the_undisturbed_one(tmp_path):
    undisturbed = run(config(tmp_path / "1", "topk:0.1"), set(), [5], tmp_path)
    again = lost(("a", 1, 0), ("b", 3, 0), ("c", 3, 1))  # those rounds fail, and are tried again
    assert run(config(tmp_path / "2", "topk:0.1"), again, [5], tmp_path).digest == undisturbed.digest
    assert run(config(tmp_path / "3", "topk:0.1"), set(), [1, 2, 4, 5], tmp_path).digest == undisturbed.digest
    without = config(tmp_path / "4", "topk:0.1", compression={"error_feedback": False})
    assert run(without, set(), [5], tmp_path).digest != undisturbed.digest


def test_a_round_that_nobody_counted_in_moves_no_state(tmp_path):
    cfg = config(tmp_path, "sign:64", strategy={"attempts": 1})
    with pytest.raises(TooFewSites):
        run(cfg, lost(("a", 1, 0), ("b", 1, 0)), [3], tmp_path)
    store = RunStore(cfg.run_dir)
    assert store.counted() == dict.fromkeys(SITES, 0)
    store.close()
    undisturbed = run(config(tmp_path / "2", "sign:64"), set(), [3], tmp_path)
    assert run(cfg, set(), [3], tmp_path).digest == undisturbed.digest


def test_what_counted_goes_back_with_the_round_that_is_lost(tmp_path):
    store, weights = RunStore(tmp_path / "run"), state(1)
    store.begin(weights.schema, {}, task_digest="t")
    store.commit(Checkpoint(0, weights), {})
    store.commit(Checkpoint(1, state(2)), {}, sites=["a", "b"])
    store.commit(Checkpoint(2, state(3)), {}, sites=["a"])
    assert store.counted() == {"a": 1, "b": 0}
    (store.blobs / state(3).digest).unlink()
    assert store.latest().round == 1
    assert store.counted() == {"a": 0, "b": 0}
    store.close()


def test_a_site_that_lost_its_memory_says_so_and_goes_on_as_a_new_one(tmp_path, capsys):
    cfg = config(tmp_path, "topk:0.1")
    bench, weights = Workbench(cfg, simulated=False), Workbench(cfg, simulated=False).initial()
    out = Arena.zeros(bench.description.update)
    bench.train("a", 4, weights, out, counted=3)
    assert "a has kept nothing of round 4" in capsys.readouterr().err
    bench.train("a", 5, weights, out, counted=4)
    assert not capsys.readouterr().err
    with pytest.raises(StoreError, match="has no state after round 10"):
        bench.train("a", 10, weights, out, counted=9)


def test_each_site_is_told_the_last_round_it_counted_in(tmp_path):
    from fedtrain.runtime.star.answers import train_requests

    plan = RoundPlan(7, 0, ["a", "b", "c"], {"a": 6, "b": 2, "gone": 1})
    requests = train_requests(config(tmp_path, ""), plan, state(0))
    assert all(isinstance(request, Train) for request in requests.values())
    assert {site: request.counted for site, request in requests.items()} == {"a": 6, "b": 2, "c": NEVER}


# --- Over processes


@pytest.mark.slow(20)
@pytest.mark.timeout(300)
def test_kill_9_of_the_aggregator_a_site_and_a_simulation_changes_no_bit_with_error_feedback(tmp_path):
    def project(name, slow=0.0):
        p = Project(tmp_path / name, rounds=14, slow=slow, task="Held")
        toml = p.root / "fedtrain.toml"
        toml.write_text(toml.read_text() + '[compression]\nup = "topk:0.1"\ndown = "sign"\n')
        return p

    with project("whole") as p:
        whole = p.simulate()
    with project("simulated", slow=0.005) as p:
        p.let_train(5)
        simulation = p.start("simulate", "--set", "simulate.workers=1")
        p.wait_for(lambda: p.count("round_committed", "r+simulate") >= 3)
        simulation.send_signal(signal.SIGKILL)
        simulation.wait(30)
        p.let_train(14)
        assert p.simulate() == whole
    with project("killed", slow=0.005) as p:
        p.let_train(0)
        aggregator, victims = p.start("aggregator"), [p.start("site", name) for name in SITES]
        for at, victim in ((2, victims[1]), (5, aggregator), (8, victims[2])):
            p.let_train(at + 2)  # so that it does not end before
            p.wait_for(lambda at=at: p.count("round_committed") >= at)
            time.sleep(0.02 * at)  # anywhere in a round
            victim.send_signal(signal.SIGKILL)
            victim.wait(30)
            if victim is aggregator:
                aggregator = p.start("aggregator")
            else:
                p.start("site", SITES[victims.index(victim)])
        p.let_train(14)
        assert aggregator.wait(120) == 0, p.log("aggregator")
        assert p.final() == whole
