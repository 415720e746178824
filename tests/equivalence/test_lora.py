"""LoRA on a small BERT: a round is as large as its adapters, and a federation gives a simulation's model."""

from __future__ import annotations

import asyncio

import pytest
from safetensors.torch import load_file

from fedtrain.schema import Schema
from tests.inline import federation, final, project, simulation

SITES = 3
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
            vocab_size=648, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=64, num_labels=2,
        )
        lora = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["query", "value"])
        return get_peft_model(BertForSequenceClassification(config), lora)

    def data(self, site):
        g = torch.Generator().manual_seed(zlib.crc32(site.encode()))
        words = torch.randint(0, 648, (48, 12), generator=g)
        return words, (words[:, 0] > 300).long()

    def loss(self, model, batch):
        return F.cross_entropy(model(input_ids=batch[0]).logits, batch[1])
"""


@pytest.mark.slow(20)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers' own, of what peft calls
def test_lora_on_a_small_bert_sends_its_adapters_alone_and_both_modes_give_the_same_model(tmp_path, inline):
    config = project(tmp_path, task=TASK, run={"task": "lora_task:Sentences"})
    committed = asyncio.run(federation(config))
    asyncio.run(simulation(config))
    model = inline[0].bench._engine.model
    trained, frozen = Schema.of(model), Schema.of(model, frozen=True)
    assert (trained.numel, trained.numel + frozen.numel) == (1_090, 42_212)
    sent = [(record["bytes_in"] / SITES, record["bytes_out"] / SITES) for record in committed]
    assert all(max(both_ways) <= 15_000 for both_ways in sent), sent
    assert final(config.run_dir, tmp_path / "f") == final(config.simulate_dir, tmp_path / "s")
    exported = load_file(tmp_path / "f" / "model.safetensors")
    assert exported.keys() == {spec.name for spec in (*trained.tensors, *frozen.tensors)}
