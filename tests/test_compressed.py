"""Updates that travel compressed: over mutual TLS as in a simulation, in as few bytes as was said."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedtrain.arena import Arena, ArenaFile
from fedtrain.compression import COMPRESSORS, DeltaCodec, parse
from fedtrain.config import Config
from fedtrain.errors import BadUpdate, ConfigError
from fedtrain.messages import Train, Update
from fedtrain.runtime.sites import compressed
from fedtrain.runtime.star import checks
from fedtrain.runtime.trainers.trainer_messages import Apply, Saved
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import Checkpoint
from fedtrain.transport.endpoints import RemoteCohort
from tests.inprocess import Events, Wire, federation, final, simulated, with_port
from tests.ports import free_port

SITES = ["a", "b", "c"]
TASK = """
import torch
from torch import nn
import fedtrain

class Toy(fedtrain.Task):
    def sites(self):
        return ["a", "b", "c"]

    def model(self):
        return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 3))

    def data(self, site):
        generator = torch.Generator().manual_seed(ord(site))
        x = torch.randn(48, 20, generator=generator)
        return x, (x @ torch.randn(20, 3, generator=generator)).argmax(1)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
UP = {
    "bfloat16": "bfloat16", "error_feedback": "error_feedback:quantize:2", "float16": "float16",
    "lowrank": "lowrank:2", "powersgd": "powersgd:2", "quantize": "quantize:8", "randomk": "randomk:0.2",
    "sign": "sign:64", "topk": "topk:0.05",
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(folder, up, *, rounds=3, **sections):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.py").write_text(TASK)
    table = {
        "run": {"name": "r", "rounds": rounds, "seed": 7, "task": "task:Toy"},
        "train": {"batch_size": 16, "lr": 0.1, "momentum": 0.5},
        "strategy": {"kind": "fedavg", "min_sites": 3, "round_deadline": "60s"},
        "secagg": {"enabled": False},
        "compression": {"up": up},
        "evaluate": {"every": 0},
        "simulate": {"workers": 1},
    }
    for name, keys in sections.items():
        table[name] = table.get(name, {}) | keys
    return Config.of(with_port(table), folder)


def test_the_cases_are_all_compressors():
    assert UP.keys() == COMPRESSORS.keys()


@pytest.mark.parametrize("compressor", UP.values(), ids=UP)
def test_every_compressor_over_mutual_tls_gives_the_bits_and_the_bytes_of_its_simulation(
    tmp_path, monkeypatch, compressor
):
    """Of updates and of the model's patches."""
    cfg = both_ways(tmp_path, compressor, compressor, evaluate={"every": 1})
    events, alike = federation(cfg, SITES), simulated(cfg, monkeypatch)
    assert final(cfg.run_dir).digest == final(cfg.simulate_dir).digest
    schema = final(cfg.run_dir).schema
    up, patch = compressed.up_codec(cfg, schema).coded.nbytes, compressed.down_codec(cfg, schema).coded.nbytes
    rounds, same = events.of("round_committed"), alike.of("round_committed")
    assert [r["bytes_in"] for r in rounds] == [3 * up] * 3
    assert [(r["bytes_in"], r["bytes_out"]) for r in rounds] == [
        (r["bytes_in"], r["bytes_out"]) for r in same
    ]
    assert {e["nbytes"] for e in events.of("update_received")} == {up}
    sent = sum(r["bytes_out"] for r in rounds)
    assert sent == 0, "the model was there: from model() first, then by the evaluation's patch"
    assert patch < schema.nbytes
    assert not [e for e in events.of("notice") if "whole model" in e["text"]]


@pytest.mark.parametrize("up", ["quantize:8", "topk:0.05"])
def test_compressed_upwards_alone_a_run_has_the_bits_and_the_bytes_of_its_simulation(
    tmp_path, monkeypatch, up
):
    cfg = config(tmp_path, up)
    events, alike = federation(cfg, SITES), simulated(cfg, monkeypatch)
    assert final(cfg.run_dir).digest == final(cfg.simulate_dir).digest
    rounds, same = events.of("round_committed"), alike.of("round_committed")
    assert [(r["bytes_in"], r["bytes_out"]) for r in rounds] == [
        (r["bytes_in"], r["bytes_out"]) for r in same
    ]
    assert all(r["bytes_out"] for r in rounds[1:])


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_both_engines_of_a_simulation_compress(tmp_path, monkeypatch, engine):
    cfg = config(tmp_path, "quantize:8", simulate={"engine": engine}, run={"task": "task:Plain"})
    with (tmp_path / "task.py").open("a") as f:
        f.write("\nclass Plain(Toy):\n    def model(self):\n        return nn.Linear(20, 3)\n")
    events = simulated(cfg, monkeypatch)
    codec = compressed.up_codec(cfg, final(cfg.simulate_dir).schema)
    assert {r["bytes_in"] for r in events.of("round_committed")} == {3 * codec.coded.nbytes}


def test_asynchronous_updates_travel_compressed(tmp_path, monkeypatch):
    cfg = config(tmp_path, "sign:64", asynchronous={"enabled": True, "buffer": 3}, rounds=4)
    events, alike = federation(cfg, SITES), simulated(cfg, monkeypatch)
    codec = compressed.up_codec(cfg, final(cfg.run_dir).schema)
    for log in (events, alike):
        assert {e["nbytes"] for e in log.of("update_received")} == {codec.coded.nbytes}
        assert len(log.of("round_committed")) == 4


# --- What comes off the wire

SCHEMA = Schema(
    (
        TensorSpec("w", (40, 30), "float32", True),
        TensorSpec("b", (7,), "float32", True),
        TensorSpec("mean", (30,), "float32", False),
        TensorSpec("h", (9, 5), "bfloat16", True),
        TensorSpec("d", (11,), "float64", True),
        TensorSpec("seen", (2,), "int64", False),
        TensorSpec("mask", (3,), "bool", False),
    )
)


def drawn(seed=0):
    arena, generator = Arena.zeros(SCHEMA), torch.Generator().manual_seed(seed)
    for name, view in arena.views().items():
        if name == "seen":
            view.fill_(5)
        elif name != "mask":
            view.copy_(torch.randn(view.shape, generator=generator))
    return arena


@pytest.mark.parametrize("up", UP.values(), ids=UP)
def test_a_model_of_many_dtypes_comes_back_with_its_buffers_exact(up):
    codec, delta = DeltaCodec(SCHEMA, parse(up)), drawn()
    coded, _ = codec.encode(delta, 3, codec.init())
    back = codec.decode(coded, 3)
    assert coded.schema == codec.coded
    assert coded.schema.nbytes < SCHEMA.nbytes
    views, expected = back.views(), delta.views()
    for name in ("mean", "seen", "mask"):
        assert torch.equal(views[name], expected[name])
    at = 0
    for section in SCHEMA.sections:  # each dtype by itself, as one vector
        if section.trained:
            shapes = [s.shape for s in SCHEMA.tensors if s.dtype == section.dtype and s.trained]
            alone = codec.compressor.shaped(shapes)
            vector = delta.flat(section)[: section.trained].float()
            payload, _ = alone.encode(vector, 3, alone.init(section.trained))
            there = alone.decode(payload, 3, section.trained).to(delta.flat(section).dtype)
            assert torch.equal(back.flat(section)[: section.trained], there)
            at += 1
    assert at == 3


@pytest.mark.parametrize("up", UP.values(), ids=UP)
def test_s17_bytes_of_an_attacker_are_refused_or_finite_and_never_larger_than_the_model(up):
    codec, limits = DeltaCodec(SCHEMA, parse(up)), checks.LimitsConfig()
    generator = torch.Generator().manual_seed(1)
    for fill in (None, 0xFF, 0x7F, 0):
        data = torch.randint(0, 256, (codec.coded.nbytes,), dtype=torch.uint8, generator=generator)
        coded = Arena(codec.coded, data if fill is None else torch.full_like(data, fill))
        try:
            delta = codec.decode(coded, 3)
            norm = checks.inspect(Update(delta=delta, num_examples=1.0), limits)
        except BadUpdate:
            continue
        assert delta.schema == SCHEMA
        assert norm < float("inf")


def test_s16_a_header_of_another_size_is_refused_before_a_byte_of_it_is_taken(tmp_path):
    cfg = config(tmp_path, "quantize:8")
    codec = compressed.up_codec(cfg, SCHEMA)
    larger = DeltaCodec(SCHEMA, parse("float16")).coded
    request = Train(id="r/0/0/train", round=0, weights=drawn())
    reply = Update(delta=Arena.zeros(larger), num_examples=1.0)
    with pytest.raises(BadUpdate, match="does not fit"):
        checks.admit(request, reply, codec.coded, cfg.limits, None)
    with pytest.raises(BadUpdate, match="does not fit"):
        codec.decode(reply.delta, 0)


def test_a_site_whose_training_ends_in_nan_says_so_and_sends_nothing(tmp_path, monkeypatch):
    cfg = config(tmp_path, "quantize:8", strategy={"min_sites": 2}, rounds=1)
    text = (tmp_path / "task.py").read_text()
    (tmp_path / "task.py").write_text(
        text.replace("x = torch.randn(48", "x = (float('nan') if site == 'b' else 1) * torch.randn(48")
    )
    refused = simulated(cfg, monkeypatch).of("update_refused")
    assert [(e["site"], "NaN" in e["reason"]) for e in refused] == [("b", True)]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"compression": {"up": "quantise:8"}}, r"quantise.*Did you mean 'quantize'"),
        ({"compression": {"up": "topk:0"}}, r"fraction"),
        (
            {"compression": {"up": "topk:0.1"}, "aggregation": {"rule": "median"}},
            r'compression\.up: "topk:0\.1" sends few coordinates.*median',
        ),
        (
            {"compression": {"up": "error_feedback:randomk:0.1"}, "aggregation": {"rule": "median"}},
            r"few coordinates",
        ),
        (
            {"compression": {"up": "sign"}, "secagg": {"enabled": True}},
            r"compression\.up: 'sign' is not linear",
        ),
    ],
)
def test_a_compressor_that_makes_no_sense_is_refused_with_what_to_change(tmp_path, sections, said):
    with pytest.raises(ConfigError, match=said):
        compressed.check_config(config(tmp_path, "", **sections))


# --- Down


def both_ways(tmp_path, up, down, **sections):
    return config(tmp_path, up, compression={"up": up, "down": down}, **sections)


WIDE = """

class Wide(Toy):
    def model(self):
        return nn.Linear(1000, 1000)

    def data(self, site):
        generator = torch.Generator().manual_seed(ord(site))
        return torch.randn(8, 1000, generator=generator), torch.randn(8, 1000, generator=generator)

    def loss(self, model, batch):
        return ((model(batch[0]) - batch[1]) ** 2).mean()
"""


@pytest.mark.parametrize(("compressor", "times"), [("quantize:8", 3.9), ("topk:0.01", 40)])
def test_so_many_times_fewer_bytes_pass_a_wire_of_mutual_tls(tmp_path, compressor, times):
    """All that passes, handshakes and headers too. Without compression the model goes up and down in each
    round; the first one does not travel here, for model() gives it, and is not counted there."""
    rounds, port = 4, free_port()
    cfg = both_ways(tmp_path, compressor, compressor, run={"task": "task:Wide", "rounds": rounds})
    (tmp_path / "task.py").write_text(TASK + WIDE)
    cfg = replace(cfg, network=replace(cfg.network, address=f"127.0.0.1:{port}"))
    wire = Wire(port, int(cfg.network.listen.partition(":")[2]))
    events = federation(cfg, SITES, wire)
    whole = 4 * 1_001_000 * len(SITES) * (rounds + rounds - 1)
    counted = sum(r["bytes_in"] + r["bytes_out"] for r in events.of("round_committed"))
    assert whole / wire.nbytes >= times, f"{whole / wire.nbytes:.2f}"
    assert counted <= wire.nbytes <= 1.03 * counted + 60_000


def test_the_model_and_what_its_steps_left_out_are_together_where_whole_steps_lead():
    """DoubleSqueeze: x + e moves by the step, whatever was sent of it."""
    cfg = Config.of({"compression": {"down": "topk:0.05"}})
    before = Checkpoint(0, drawn())
    true = {s.dtype: before.weights.flat(s)[: s.trained].double() for s in SCHEMA.sections if s.trained}
    for number in range(1, 5):
        after = before.weights.load()
        for section in SCHEMA.sections:
            if section.dtype not in ("bool", "int64"):
                after.flat(section).add_(drawn(number).flat(section), alpha=0.125)
        moved = {d: after.flat(s)[: s.trained] for s in SCHEMA.sections if (d := s.dtype) in true}
        steps = {
            s.dtype: moved[s.dtype] - before.weights.flat(s)[: s.trained]
            for s in SCHEMA.sections
            if s.dtype in true
        }
        true = {dtype: true[dtype] + steps[dtype].double() for dtype in true}
        codec = compressed.down_codec(cfg, SCHEMA)
        committed = compressed.shortened(cfg, before, Checkpoint(number, after))
        again = compressed.patched(cfg, codec, before.weights.load(), committed.patch)
        assert again.digest == committed.weights.digest
        assert torch.equal(committed.weights.views()["mean"], after.views()["mean"])
        for section in SCHEMA.sections:
            if section.trained:
                there = committed.weights.flat(section)[: section.trained].double()
                left = committed.state[f"down/{section.dtype}/residual"].double()
                tolerance = 0.05 if section.dtype == "bfloat16" else 1e-5
                assert torch.allclose(there + left, true[section.dtype], atol=tolerance)
        before = committed


def test_a_site_that_missed_rounds_takes_several_patches_and_a_new_one_the_whole_model(tmp_path, monkeypatch):
    cfg = both_ways(tmp_path, "", "topk:0.05", rounds=8, strategy={"min_sites": 1, "fraction": 0.34})
    members = (
        RemoteCohort.members
    )  # one site a round, drawn from all three: no round begins before they are here
    monkeypatch.setattr(RemoteCohort, "members", lambda cohort, at_least: members(cohort, len(SITES)))
    events = federation(cfg, SITES)
    patch = compressed.down_codec(cfg, final(cfg.run_dir).schema).coded.nbytes
    seen, expected = {}, []
    for event in events.of("round_started"):
        (site,) = event["sites"]
        expected.append((event["round"] - 1 - seen.get(site, 0)) * patch)
        seen[site] = event["round"] - 1
    assert [r["bytes_out"] for r in events.of("round_committed")] == expected
    assert max(expected) > patch
    whole = final(cfg.run_dir).schema.nbytes
    again = replace(cfg, run=replace(cfg.run, rounds=9), strategy=replace(cfg.strategy, min_sites=3))
    for site in SITES:  # new disks: they have the model of model() alone
        shutil.rmtree(cfg.site_dir(site))
    assert 8 * patch > whole
    assert federation(again, SITES).of("round_committed")[0]["bytes_out"] == 3 * whole


def test_a_patch_that_gives_another_model_is_named_and_the_whole_model_is_fetched(tmp_path, monkeypatch):
    cfg = both_ways(tmp_path, "quantize:8", "quantize:8")
    real, logs = Workbench.answer, {site: Events() for site in SITES}

    def wrong(bench, ask):
        if isinstance(ask, Apply):
            base = ArenaFile(bench.description.schema, Path(ask.base.path)).load()
            Path(ask.out).write_bytes(base.payload)
            return Saved(base.digest)
        return real(bench, ask)

    monkeypatch.setattr(Workbench, "answer", wrong)
    events = federation(cfg, SITES, logs=logs)
    monkeypatch.undo()
    told = [e["text"] for e in logs["a"].of("notice") if "the whole model is fetched" in e["text"]]
    assert len(told) == 2
    schema = final(cfg.run_dir).schema
    both = schema.nbytes + compressed.down_codec(cfg, schema).coded.nbytes
    assert [r["bytes_out"] for r in events.of("round_committed")] == [0, 3 * both, 3 * both]
    right = both_ways(tmp_path / "right", "quantize:8", "quantize:8")
    federation(right, SITES)
    assert final(cfg.run_dir).digest == final(right.run_dir).digest


def test_under_masks_the_model_moves_by_patches_too(tmp_path, monkeypatch):
    cfg = both_ways(tmp_path, "randomk:0.5", "sign:64", secagg={"enabled": True, "max_examples": 100})
    events, alike = federation(cfg, SITES), simulated(cfg, monkeypatch)
    assert final(cfg.run_dir).digest == final(cfg.simulate_dir).digest
    patch = compressed.down_codec(cfg, final(cfg.run_dir).schema).coded.nbytes
    assert [r["bytes_out"] for r in events.of("round_committed")] == [0, 3 * patch, 3 * patch]
    assert len(alike.of("round_committed")) == 3


def test_without_rounds_a_site_takes_the_patches_since_its_last_turn(tmp_path):
    cfg = both_ways(
        tmp_path, "quantize:8", "topk:0.05", rounds=9, asynchronous={"enabled": True, "buffer": 1}
    )
    events = federation(cfg, SITES)
    codec = compressed.down_codec(cfg, final(cfg.run_dir).schema)
    out = sum(r["bytes_out"] for r in events.of("round_committed"))
    assert out % codec.coded.nbytes == 0
    assert 0 < out < 9 * final(cfg.run_dir).schema.nbytes


def test_the_plan_tells_what_travels_compressed(tmp_path):
    from fedtrain.runtime.plan import round_plan

    cfg = both_ways(tmp_path, "quantize:8", "topk:0.05")
    plan = round_plan(cfg)
    schema = Workbench(cfg, simulated=False).description.schema
    assert plan.up_bytes == compressed.up_codec(cfg, schema).coded.nbytes
    assert plan.down_bytes == compressed.down_codec(cfg, schema).coded.nbytes < schema.nbytes
