"""A model whose large tensors are described first and made later has the bits of one that is made at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedtrain
from fedtrain.config import Config
from fedtrain.errors import ConfigError
from fedtrain.training.building import build_model
from fedtrain.training.deferred import Deferred
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel.engine import MeshEngine
from fedtrain.training.parallel.streamed import StreamedModel
from fedtrain.training.task import load_task
from tests.worlds import world

MIB = 1 << 20
CPU = torch.device("cpu")


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.LSTM(300, 200), nn.Conv2d(64, 128, 3))


def copies() -> nn.Module:  # deepcopy makes the second layer of the first
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, batch_first=True), 2).to(torch.float64)


def own_ways() -> nn.Module:
    """Numbers that are looked at, tied weights, buffers that are not saved, torch.nn.init's special ones."""
    m = nn.Module()
    m.embedding = nn.Embedding(1000, 256, padding_idx=3)
    nn.init.trunc_normal_(m.embedding.weight)
    m.head = nn.Linear(256, 1000, bias=False)
    m.head.weight = m.embedding.weight
    m.square = nn.Parameter(nn.init.orthogonal_(torch.empty(300, 300)))
    positions, table = torch.arange(500)[:, None], torch.zeros(500, 256)
    rates = torch.exp(torch.arange(0, 256, 2) * -0.01)
    table[:, 0::2], table[:, 1::2] = torch.sin(positions * rates), torch.cos(positions * rates)
    m.register_buffer("table", table, persistent=False)
    m.scaled = nn.Parameter(torch.randn(300, 300) * 0.02)
    with torch.no_grad():
        m.scaled.div_(m.scaled.norm())
    m.after = nn.Parameter(torch.randn(3) * float(m.scaled.detach().sum()))
    m.mask = nn.Buffer(torch.tril(torch.ones(300, 300)).bool())
    m.loaded = nn.Linear(256, 256)
    m.loaded.load_state_dict({"weight": torch.rand(256, 256), "bias": torch.rand(256)})
    m.normed = nn.utils.parametrizations.weight_norm(nn.Linear(256, 256))
    return m


@pytest.mark.parametrize("model", [layers, copies, own_ways])
def test_a_deferred_model_has_the_bits_and_draws_of_one_made_at_once(model):
    torch.manual_seed(3)
    whole, state = model(), torch.get_rng_state()
    torch.manual_seed(3)
    with Deferred() as deferred:
        described = model()
    assert torch.equal(torch.get_rng_state(), state)
    found = dict(described.named_parameters()) | dict(described.named_buffers())
    for name, tensor in (dict(whole.named_parameters()) | dict(whole.named_buffers())).items():
        place = deferred.place(found[name])
        assert (place is not None) == (found[name].is_meta), name
        assert torch.equal(found[name] if place is None else deferred.make(place), tensor), name
    assert torch.equal(torch.get_rng_state(), state)  # making draws nothing of the present generator


def test_what_is_made_from_a_tensor_that_changed_since_is_refused():
    source = torch.ones(300, 300)
    with Deferred() as deferred:
        copied = torch.empty(300, 300).copy_(source)
    source.zero_()
    with pytest.raises(RuntimeError, match="changed a tensor"):
        deferred.make(deferred.place(copied))


TASK = """
import fedtrain, torch
from torch import nn

class Small(fedtrain.Task):
    layers = 1

    def model(self):
        return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(self.layers)))

    def data(self, site):
        return torch.zeros(4, 2048), torch.zeros(4, 2048)

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

class Large(Small):
    layers = 12  # of 16 MiB

class Looking(Large):  # model() wants numbers that only a tensor in memory has
    def model(self):
        made = super().model()
        made[0].weight.detach().numpy()
        return made
"""


def kib(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0])


def build(rank: int, ranks: int, folder: Path) -> None:
    found = {}
    for task in ("Small", "Large", "Looking"):  # the first loads what is loaded late
        table = {
            "run": {"task": f"wide:{task}", "seed": 5},
            "parallel": {"zero": 3},
            "train": {"device": "cpu"},
        }
        config = Config.of(table, folder)
        mesh = Mesh(Sizes.of(config.parallel, ranks), CPU)
        before = kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        engine = MeshEngine(load_task(config.run.task, folder), config, mesh)
        found[task] = (kib("VmHWM") - before) * 1024 / MIB
        digest = sum(int(p.to_local().view(torch.int32).sum(dtype=torch.int64)) for p in engine.trained)
        found[f"{task} sum"] = digest
        del engine
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow(8)
def test_a_sharded_model_is_built_within_its_shard_and_a_tensor(tmp_path):
    (tmp_path / "wide.py").write_text(TASK)
    world(2, build, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        shard, largest = 96, 16
        assert found["Large"] <= 1.2 * shard + largest, found
        assert found["Looking sum"] == found["Large sum"], "a model that is built whole has the same shards"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_models_weights_are_those_of_the_files_that_the_task_names(tmp_path, capsys, streamed):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=600, n_embd=48, n_layer=1, n_head=2, n_positions=64,
                                     bos_token_id=0, eos_token_id=0)  # fmt: skip
    torch.manual_seed(1)
    saved = transformers.GPT2LMHeadModel(config)
    saved.transformer.save_pretrained(tmp_path / "gpt2")  # names without the "transformer." of the model
    capsys.readouterr()

    class Text(fedtrain.Task):
        def model(self):
            return transformers.GPT2LMHeadModel(config)

        def weights(self):
            return tmp_path / "gpt2"

    if streamed:
        found = StreamedModel.of(Text(), 5, CPU)
        assert found.model.lm_head.weight.is_meta
        found.fill(CPU, offloaded=False)
        model = found.model
    else:
        model = build_model(Text(), 5, CPU)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert all(torch.equal(t, saved.state_dict()[name]) for name, t in model.state_dict().items())
    assert capsys.readouterr().err == ""


def test_files_that_do_not_fit_the_model_are_refused_by_name(tmp_path, capsys):
    class Line(fedtrain.Task):
        def model(self):
            return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))

        def weights(self):
            return tmp_path / "line.safetensors"

    for tensors, match in (({"0.weight": torch.zeros(4, 2)}, r"0.weight .* is \[4, 2\], .* \[3, 2\]"),
                           ({"other": torch.zeros(1)}, "no tensor of the model: other")):  # fmt: skip
        save_file(tensors, tmp_path / "line.safetensors")
        with pytest.raises(ConfigError, match=match):
            build_model(Line(), 5, CPU)
    (tmp_path / "line.safetensors").write_bytes(b"none")
    with pytest.raises(ConfigError, match="can't be read as safetensors"):
        build_model(Line(), 5, CPU)
    save_file({"0.weight": torch.ones(3, 2)}, tmp_path / "line.safetensors")
    assert build_model(Line(), 5, CPU)[0].weight.sum() == 6
    assert "lacks 3 of the model's tensors" in capsys.readouterr().err
