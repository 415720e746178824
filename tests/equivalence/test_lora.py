"""LoRA through peft: what travels, where the adapters are all that is trained, and FFA-LoRA's identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.schema import Schema
from fedtrain.tracking.export import MODEL, export
from tests.inprocess import Wire, federation, final, simulated, with_port
from tests.ports import free_port

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers' own, of what peft calls
SITES = ["a", "b", "c"]
TASK = """
import zlib

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

import fedtrain


class Sentences(fedtrain.Task):
    def sites(self):
        return ["a", "b", "c"]

    def model(self):
        config = BertConfig(
            vocab_size=64, hidden_size=256, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=16, num_labels=2, hidden_dropout_prob=0.0,
        )
        lora = LoraConfig(task_type="SEQ_CLS", r=32, lora_alpha=64, target_modules=["query", "value"])
        return get_peft_model(BertForSequenceClassification(config), lora)

    def data(self, site):
        g = torch.Generator().manual_seed(zlib.crc32(site.encode()))
        words = torch.randint(0, 64, (16 + 4 * ord(site) % 3, 8), generator=g)
        return words, (words[:, 0] > 30).long()

    def loss(self, model, batch):
        return F.cross_entropy(model(input_ids=batch[0]).logits, batch[1])
"""


def project(folder: Any, name: str, masks: bool, rounds: int, **strategy: Any) -> Config:
    (folder / "adapters_task.py").write_text(TASK)
    table: dict[str, Any] = {
        "run": {"task": "adapters_task:Sentences", "name": name, "rounds": rounds, "seed": 3},
        "train": {"lr": 0.05, "batch_size": 8},
        "strategy": {"min_sites": 3, **strategy},
        "secagg": {"enabled": masks, "max_examples": 32},
        "evaluate": {"every": 0},
    }
    return Config.of(with_port(table), folder)


def model() -> Any:
    scope: dict[str, Any] = {}
    exec(TASK, scope)
    return scope["Sentences"]().model()


def adapters(**strategy: Any) -> int:
    """Bytes of what is trained: of two layers A and B [32, 256] for query and value, and the last layer."""
    schema = Schema.of(model())
    assert sum(s.numel for s in schema.tensors if s.trained) == 2 * 2 * 2 * 32 * 256 + 2 * 256 + 2
    fixed = strategy.get("fixed", [])
    return sum(4 * s.numel for s in schema.tensors if s.trained and not (fixed and "lora_A" in s.name))


def through(config: Config) -> tuple[Config, Wire]:
    """The same run over a wire that counts."""
    port = free_port()
    listen = config.network.listen
    wire = Wire(port, int(listen.rpartition(":")[2]))
    network = {**config.table()["network"], "address": f"127.0.0.1:{port}"}
    return Config.of({**config.table(), "network": network}, config.root), wire


@pytest.mark.slow(15)
@pytest.mark.parametrize(
    ("masks", "fixed"), [(False, []), (True, ["*lora_A*"])], ids=["open-lora", "masks-ffa-lora"]
)
def test_a_round_over_mutual_tls_costs_its_adapters_and_gives_the_simulations_bits(
    tmp_path, monkeypatch, masks, fixed
):
    strategy: Mapping[str, Any] = {"fixed": fixed} if fixed else {}
    nbytes = {}
    for rounds in (2, 6):
        config, wire = through(project(tmp_path, f"r{rounds}", masks, rounds, **strategy))
        federation(config, SITES, wire)
        nbytes[rounds] = wire.nbytes
    both_ways = (nbytes[6] - nbytes[2]) / 4 / len(SITES) / 2  # a round, a site, a way
    assert both_ways <= 1.05 * adapters(**strategy), both_ways / adapters(**strategy)
    simulated(config, monkeypatch)
    assert final(config.run_dir).load().digest == final(config.simulate_dir).load().digest
    exported = [export(run, tmp_path / run.name) / MODEL for run in (config.run_dir, config.simulate_dir)]
    assert exported[0].read_bytes() == exported[1].read_bytes()
    whole = {spec.name for frozen in (False, True) for spec in Schema.of(model(), frozen=frozen).tensors}
    assert load_file(exported[0]).keys() == whole


@pytest.mark.slow(2)
def test_under_ffa_lora_the_product_of_the_means_is_the_mean_of_the_products(tmp_path, monkeypatch):
    """A is not trained, so B is all that is averaged: mean(B_i A) = mean(B_i) A."""
    config = project(tmp_path, "once", False, 1, fixed=["*lora_A*"])
    simulated(config, monkeypatch)
    bench = Workbench(config, simulated=True)
    weights, counts, models = bench.initial(), [], []
    for site in SITES:
        out = Arena.zeros(weights.schema)
        counts.append(bench.train(site, 0, weights, out).num_examples)
        models.append({name: start + out.views()[name] for name, start in weights.views().items()})
    share = torch.tensor(counts) / sum(counts)
    together, frozen = final(config.simulate_dir).load().views(), bench.initial(frozen=True).views()
    off = 0.0
    for name in (name for name in together if "lora_B" in name):
        other = name.replace("lora_B", "lora_A")
        product = lambda model, name=name, other=other: (
            model[name].double() @ {**frozen, **model}[other].double()
        )
        mean = sum(part * product(model) for part, model in zip(share, models, strict=True))
        off = max(off, float((mean - product(together)).abs().max()))
    assert off <= 1e-6
