"""What a simulation says a training brings over the wire, held to a federation's bytes over mutual TLS."""

import asyncio

import msgspec
import pytest

from fedtrain.config import Config
from fedtrain.events import silent
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.runtime.simulations.training_bytes import TrainingBytes
from fedtrain.runtime.sites import site
from fedtrain.runtime.star import aggregator
from fedtrain.schema import Schema
from fedtrain.training.task import load_task
from fedtrain.transport.grpc import SiteStream
from fedtrain.wire import frames
from tests.allowed import allowed
from tests.ports import free_port
from tests.test_federated import Events
from tests.test_modes import SITES, certified, inline

TASK = """
import torch
import fedtrain

class Task(fedtrain.Task):
    def __init__(self, width=4):
        self.width = width

    def model(self):
        return torch.nn.Linear(self.width, 50)

    def data(self, site):
        x = torch.randn(40, self.width, generator=torch.Generator().manual_seed(1))
        return x, (x.sum(1) > 0).long()

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

class Sites(Task):
    def sites(self):
        return ["a", "b", "c"]
"""
ASIDE = (
    frames.Hello | frames.Status | frames.Leaving | frames.Welcome | frames.Finished | frames.Note
    | frames.AuditHead
)  # fmt: skip


def belongs(message):
    """Whether a message is of a training, and not of the session around it."""
    try:
        msgspec.msgpack.decode(message, type=ASIDE)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
    return False


def counting(monkeypatch):
    """[bytes to the sites, bytes from them] of the trainings that go over gRPC from now on."""
    found, read, write = [0, 0], SiteStream.read, SiteStream.write

    async def counted_read(self):
        message = await read(self)
        found[0] += len(message) if message is not None and belongs(message) else 0
        return message

    async def counted_write(self, message):
        found[1] += len(message) if belongs(message) else 0
        await write(self, message)

    monkeypatch.setattr(SiteStream, "read", counted_read)
    monkeypatch.setattr(SiteStream, "write", counted_write)
    return found


def configured(root, width, **sections):
    (root / "task.py").write_text(TASK)
    table = {
        "run": {"rounds": 1, "name": "eightlet", "task": f"task:Sites(width={width})"},
        "evaluate": {"every": 0},
        "strategy": {"min_sites": 3},
        "simulate": {"workers": 0, "engine": "loop"},
        "network": {"listen": f"127.0.0.1:{free_port()}", "heartbeat": "1s"},
    }
    return Config.of(table | sections, root)


def federation(config, monkeypatch):
    """(bytes to the sites, bytes from them, the round's record)"""
    certified(config.root, "aggregator", *SITES)
    found, events = counting(monkeypatch), Events()

    async def main():
        ends = [asyncio.create_task(aggregator.serve(config, emit=events))]
        ends += [asyncio.create_task(site.run(allowed(config, name), name, emit=silent)) for name in SITES]
        await asyncio.wait_for(asyncio.gather(*ends), 60)

    with inline(monkeypatch):
        asyncio.run(main())
    return *found, events.of("round_committed")[0]


OPEN = {"secagg": {"enabled": False}}


@pytest.mark.parametrize("width", [4, 400], ids=["in-frames", "in-streams"])
@pytest.mark.parametrize(
    "sections",
    [OPEN, OPEN | {"compression": {"up": "quantize:8"}}, {}, {"secagg": {"ring_bits": 64}}],
    ids=["open", "compressed", "masks", "masks-64"],
)
def test_a_training_brings_the_bytes_over_the_wire_that_a_simulation_says(
    tmp_path, monkeypatch, width, sections
):
    config = configured(tmp_path, width, **sections)
    down, up, record = federation(config, monkeypatch)
    told = Events()
    asyncio.run(simulate(config, emit=told))
    simulated = told.of("round_committed")[0]
    assert (simulated["bytes_in"], simulated["bytes_out"]) == (record["bytes_in"], record["bytes_out"])
    schema = Schema.of(load_task(config.run.task, config.root).model())
    load = TrainingBytes(config, schema, update_of(config, schema)).load(0, -1, SITES)
    off = 0.02 if config.secagg.enabled else 0.0  # certificates and signatures differ in length
    assert load.down_bytes == pytest.approx(down / 3, rel=off, abs=4)
    assert load.up_bytes == pytest.approx(up / 3, rel=off, abs=4)


def update_of(config, schema):
    from fedtrain.runtime.sites import compressed

    codec = compressed.up_codec(config, schema)
    return codec.coded if codec else schema
