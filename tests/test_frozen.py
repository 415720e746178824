"""Frozen parameters: what is not trained is no part of a round, and gets to each site once or never."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedtrain.arena import Arena
from fedtrain.config import TrainConfig
from fedtrain.errors import ConfigError, JoinRefused, StoreError, TaskError
from fedtrain.events import silent
from fedtrain.runtime.datacenters import datacenter
from fedtrain.runtime.peers import peer
from fedtrain.runtime.plan import round_plan
from fedtrain.runtime.simulations import gossip_simulation
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.runtime.star import agreement
from fedtrain.runtime.star.secure_terms import hash_of
from fedtrain.runtime.trainers.supervised import Supervised
from fedtrain.runtime.trainers.trainer_messages import Freeze
from fedtrain.schema import Schema
from fedtrain.store import RunStore
from fedtrain.tracking.export import export
from fedtrain.training.building import build_model
from fedtrain.training.local import Engine
from fedtrain.training.task import Task, load_task
from fedtrain.wire.gossip import Greeting
from tests.allowed import allowed
from tests.inline import SITES, TASK, federation, final, project, simulation
from tests.ports import free_port

FROZEN_BYTES = 4 * (6 * 400 + 400 + 400 * 8 + 8)


def any_beginning(config):
    """The settings, at sites that let a run begin with any model."""
    return allowed(config, *SITES, initial="any")


def own_model(config):
    """What the task's model() gives, by names."""
    task = load_task(config.run.task, config.root)
    return build_model(task, config.run.seed, torch.device("cpu")).state_dict()


@pytest.mark.parametrize("masks", [True, False], ids=["masks", "open"])
def test_frozen_parameters_of_the_tasks_own_model_never_travel_and_both_modes_give_the_same_model(
    tmp_path, inline, masks
):
    config = project(tmp_path, secagg={"enabled": masks})
    committed = asyncio.run(federation(config))
    asyncio.run(simulation(config))
    assert not any(isinstance(ask, Freeze) for trainer in inline for ask in trainer.asked)
    for record in committed:
        assert record["bytes_out"] < len(SITES) * FROZEN_BYTES / 10
        assert record["bytes_in"] < len(SITES) * FROZEN_BYTES / 10
    both = final(config.run_dir, tmp_path / "f"), final(config.simulate_dir, tmp_path / "s")
    assert both[0] == both[1]
    tensors = load_file(tmp_path / "f" / "model.safetensors")
    assert tensors.keys() == inline[0].bench._engine.model.state_dict().keys()
    assert tensors["1.running_mean"].any(), "buffers travel"
    about = json.loads((tmp_path / "f" / "model.json").read_text())
    assert about["frozen"] == FROZEN_BYTES // 4
    assert about["parameters"] == sum(t.numel() for t in tensors.values())


@pytest.mark.parametrize("masks", [True, False], ids=["masks", "open"])
def test_frozen_parameters_of_another_model_travel_once_to_each_site(tmp_path, inline, masks):
    config = project(tmp_path, secagg={"enabled": masks})
    base = own_model(config)
    base["0.2.weight"] += 0.25
    save_file(base, tmp_path / "base.safetensors")
    committed = asyncio.run(federation(any_beginning(config), start=tmp_path / "base.safetensors"))
    sent = [record["bytes_out"] for record in committed]
    assert len(SITES) * FROZEN_BYTES <= sent[0] - sent[1] < 1.1 * len(SITES) * FROZEN_BYTES
    assert sent[1] == sent[2] < len(SITES) * FROZEN_BYTES / 10
    asyncio.run(simulation(config, start=tmp_path / "base.safetensors"))
    both = final(config.run_dir, tmp_path / "f"), final(config.simulate_dir, tmp_path / "s")
    assert both[0] == both[1]
    after = load_file(tmp_path / "f" / "model.safetensors")
    assert torch.equal(after["0.2.weight"], base["0.2.weight"])
    assert not torch.equal(after["2.weight"], base["2.weight"])


def test_whoever_was_killed_does_not_fetch_frozen_parameters_again(tmp_path, inline):
    config = project(tmp_path)
    base = own_model(config)
    base["0.2.weight"] += 0.25
    save_file(base, tmp_path / "base.safetensors")
    two = replace(config, run=replace(config.run, rounds=2))
    asyncio.run(federation(any_beginning(two), start=tmp_path / "base.safetensors"))
    committed = asyncio.run(federation(config))  # other processes for all that they know
    assert [record["round"] for record in committed] == [3]
    assert committed[0]["bytes_out"] < len(SITES) * FROZEN_BYTES / 10
    asyncio.run(simulation(config, start=tmp_path / "base.safetensors"))
    assert final(config.run_dir, tmp_path / "f") == final(config.simulate_dir, tmp_path / "s")


@pytest.mark.parametrize("masks", [True, False], ids=["masks", "open"])
def test_frozen_parameters_that_are_damaged_at_a_site_while_it_runs_are_fetched_again(
    tmp_path, inline, masks, monkeypatch
):
    config = project(tmp_path, secagg={"enabled": masks}, run={"rounds": 2})
    base = own_model(config)
    base["0.2.weight"] += 0.25
    save_file(base, tmp_path / "base.safetensors")
    freeze, damaged = Supervised.freeze, []

    async def flip(trainer, frozen):
        if not damaged:
            damaged.append(frozen.path)
            whole = bytearray(frozen.path.read_bytes())
            whole[99] ^= 1
            frozen.path.write_bytes(whole)
        await freeze(trainer, frozen)

    monkeypatch.setattr(Supervised, "freeze", flip)
    committed = asyncio.run(federation(any_beginning(config), start=tmp_path / "base.safetensors"))
    assert damaged
    assert len(committed) == 2
    asyncio.run(simulation(config, start=tmp_path / "base.safetensors"))
    assert final(config.run_dir, tmp_path / "f") == final(config.simulate_dir, tmp_path / "s")


def test_a_site_does_not_answer_for_other_frozen_parameters_what_it_found_for_its_own(tmp_path, inline):
    """The first model that is trained may be the same to the last bit: only the frozen ones differ."""
    # It evaluates nothing: it would refuse to, as after a round it knows one model of a run.
    config = project(tmp_path, secagg={"enabled": False}, run={"rounds": 1}, evaluate={"every": 0})
    asyncio.run(federation(config))
    own = final(config.run_dir, tmp_path / "own")
    start = RunStore(config.run_dir, read_only=True)
    base = start.load(0).weights.views() | start.load_frozen().views()
    start.close()
    base["0.2.weight"] = base["0.2.weight"] + 0.25
    save_file(base, tmp_path / "base.safetensors")
    shutil.rmtree(config.run_dir)  # the sites' ledgers stay
    asyncio.run(federation(any_beginning(config), start=tmp_path / "base.safetensors"))
    asyncio.run(simulation(config, start=tmp_path / "base.safetensors"))
    found = final(config.run_dir, tmp_path / "f")
    assert found == final(config.simulate_dir, tmp_path / "s") != own


CONSTANT = """

class Constant(Blobs):
    def model(self):
        model = super().model()
        for layer in (model[0][0], model[0][2]):
            for name, parameter in list(layer.named_parameters()):
                delattr(layer, name)
                layer.register_buffer(name, parameter.data, persistent=False)
        return model
"""
MODES = {
    "secure sums": {},
    "masks": {"simulate": {"workers": 1, "masks": True}},
    "median": {"secagg": {"enabled": False}, "aggregation": {"rule": "median"}},
    "asynchronous": {"secagg": {"enabled": False}, "asynchronous": {"enabled": True, "buffer": 2}},
    "gossip": {"gossip": {"topology": "ring"}},
    "gossip-masks": {"gossip": {"topology": "complete", "masks": True}, "simulate": {"masks": True}},
    "gossip-rule": {"gossip": {"topology": "complete", "rule": "median"}},
}


@pytest.mark.parametrize("mode", MODES)
def test_in_every_mode_frozen_parameters_are_constants_to_the_last_bit(tmp_path, inline, mode):
    def exported(task):
        four = (TASK + CONSTANT).replace('"c"]', '"c", "d"]')
        config = project(tmp_path / task, four, **({"run": {"task": f"blobs_task:{task}"}} | MODES[mode]))
        run = gossip_simulation.simulate if mode.startswith("gossip") else simulate
        result = asyncio.run(run(config, emit=silent))
        return load_file(export(result.run_dir, tmp_path / task / "out") / "model.safetensors")

    found, constant = exported("Blobs"), exported("Constant")
    body = {name for name in found if name.startswith("0.")}
    assert len(body) == 4
    assert constant.keys() == found.keys() - body
    assert all(torch.equal(constant[name], found[name]) for name in constant)
    assert found["1.running_mean"].any(), "buffers move"


@pytest.mark.slow(3)
def test_peers_keep_frozen_parameters_and_tell_each_other_only_their_digest(tmp_path, inline):
    config = project(tmp_path, gossip={"topology": "complete"}, evaluate={"every": 0})
    committed = []

    def emit(event):
        kind, fields = event.kind, event.fields()
        if kind == "round_committed":
            committed.append(fields)

    async def all_of_them():
        ports = {name: {"listen": f"127.0.0.1:{free_port()}", "idle": "20s"} for name in SITES}
        each = [project(tmp_path, gossip={"topology": "complete"}, network=ports[name]) for name in SITES]
        async with asyncio.timeout(60):
            await asyncio.gather(
                *(
                    peer.run(allowed(c, n, masks=c.gossip.masks), n, emit=emit)
                    for c, n in zip(each, SITES, strict=True)
                )
            )

    asyncio.run(all_of_them())
    assert len(committed) == len(SITES) * config.run.rounds
    assert max(record["bytes_out"] for record in committed) < 2 * FROZEN_BYTES / 3
    simulated = asyncio.run(gossip_simulation.simulate(config, emit=silent)).run_dir
    one = load_file(export(simulated, tmp_path / "s") / "model.safetensors")
    for name in SITES:
        other = load_file(export(config.peer_dir(name), tmp_path / name) / "model.safetensors")
        assert one.keys() == other.keys()
        assert all(torch.allclose(one[key].double(), other[key].double(), atol=1e-6) for key in one)
        assert torch.equal(one["0.2.weight"], other["0.2.weight"])


def test_peers_with_different_frozen_parameters_do_not_average():
    mine = Greeting(version="1", task_digest="t", schema_digest="s", agreed={}, frozen_digest="aa" * 16)
    agreement.agree_as_peers("b", mine, "a", mine)
    theirs = msgspec.structs.replace(mine, frozen_digest="bb" * 16)
    with pytest.raises(JoinRefused, match="a and b have different frozen parameters: bbbbbbbbbbbb at a"):
        agreement.agree_as_peers("b", mine, "a", theirs)


def test_sites_with_different_frozen_parameters_are_in_no_secure_sum_together():
    """An aggregator could else look at one site's update by giving the others dead layers."""
    weights = Arena.of(Frozen().model())
    hashes = {hash_of(weights, frozen=frozen) for frozen in ("", "aa" * 32, "bb" * 32)}
    assert len(hashes) == 3


@pytest.mark.parametrize("start", [False, True], ids=["own", "another model's"])
def test_a_datacenter_keeps_frozen_parameters_once_and_exports_the_whole_model(tmp_path, start):
    config = project(tmp_path, run={"rounds": 2}, train={"local_steps": 2}, parallel={"timeout": "30s"})
    base = own_model(config)
    if start:
        base["0.2.weight"] = base["0.2.weight"] + 0.25
    save_file(base, tmp_path / "base.safetensors")
    result = datacenter.run(config, emit=silent, start=tmp_path / "base.safetensors" if start else None)
    found = load_file(export(result.run_dir, tmp_path / "out") / "model.safetensors")
    assert found.keys() == base.keys()
    assert all(torch.equal(found[name], base[name]) for name in base if name.startswith("0."))
    assert not torch.equal(found["2.weight"], base["2.weight"])


class Frozen(Task):
    """A layer that is not trained, and what the task does to it."""

    def model(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        return model

    def loss(self, model, batch):
        self.meddle(model[0].weight)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def meddle(self, weight):
        """Nothing."""


MEDDLED = """
        model[0][0].weight.data.mul_(0.5)"""


class InPlace(Frozen):
    def meddle(self, weight):
        weight.data.mul_(0.5)


class Replaced(Frozen):
    def meddle(self, weight):
        weight.data = weight.data * 0.5


class AllFrozen(Frozen):
    def model(self):
        return super().model().requires_grad_(False)


def trained(task):
    engine = Engine(task, TrainConfig(lr=0.1), 1)
    start = engine.initial()
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    return engine.train("a", data, 0, start, Arena.zeros(engine.schema))


def test_a_datacenter_tells_of_a_frozen_parameter_that_changed(tmp_path):
    loss = "    def loss(self, model, batch):"
    task = TASK.replace(loss, loss + MEDDLED)
    config = project(tmp_path, task, train={"local_steps": 2}, parallel={"timeout": "30s"})
    with pytest.raises(TaskError, match=r"whose requires_grad is False.*register_buffer"):
        datacenter.run(config, emit=silent)


@pytest.mark.parametrize("task", [InPlace(), Replaced()], ids=["in place", "replaced"])
def test_a_task_that_changes_a_frozen_parameter_is_told_to_make_it_a_buffer(task):
    assert trained(Frozen()).delta.digest
    with pytest.raises(TaskError, match=r"whose requires_grad is False.*register_buffer"):
        trained(task)


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="nothing to train: requires_grad is False of all its 4 parameters"):
        trained(AllFrozen())


def test_the_plan_counts_what_travels(tmp_path):
    config = project(tmp_path)
    plan = round_plan(config, sites=3)
    assert plan.frozen == FROZEN_BYTES // 4
    assert plan.down_bytes < FROZEN_BYTES / 10
    assert plan.up_bytes < FROZEN_BYTES / 10


def test_a_models_two_arenas_are_all_of_it_and_without_frozen_parameters_there_is_one():
    model = Frozen().model()
    schemas = Schema.of(model), Schema.of(model, frozen=True)
    assert [[t.name for t in s.tensors] for s in schemas] == [
        ["1.weight", "1.bias"],
        ["0.weight", "0.bias"],
    ]
    assert Schema.of(model.requires_grad_(True), frozen=True).nbytes == 0


def test_damaged_frozen_parameters_of_a_run_are_made_again_or_named(tmp_path, inline):
    config = project(tmp_path, run={"rounds": 1})
    asyncio.run(simulation(config))
    first = final(config.simulate_dir, tmp_path / "first")
    store = RunStore(config.simulate_dir, read_only=True)
    blob = store.frozen_file().path
    store.close()
    whole = blob.read_bytes()
    blob.write_bytes(whole[:99] + bytes([whole[99] ^ 1]) + whole[100:])
    with pytest.raises(StoreError, match=r"frozen parameters of .* is damaged \(its digest is not"):
        export(config.simulate_dir, tmp_path / "none")
    asyncio.run(simulate(config, emit=silent))
    assert blob.read_bytes() == whole
    assert final(config.simulate_dir, tmp_path / "again") == first


def test_frozen_parameters_that_are_gone_and_that_the_task_does_not_give_end_the_run(tmp_path, inline):
    config = project(tmp_path, run={"rounds": 1})
    base = own_model(config)
    base["0.2.weight"] += 0.25
    save_file(base, tmp_path / "base.safetensors")
    asyncio.run(simulation(config, start=tmp_path / "base.safetensors"))
    store = RunStore(config.simulate_dir, read_only=True)
    store.frozen_file().path.unlink()
    store.close()
    with pytest.raises(StoreError, match=r"is gone, and the task's model\(\) gives others"):
        asyncio.run(simulate(config, emit=silent))
