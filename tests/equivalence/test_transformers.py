"""transformers' models on tensor-parallel ranks, by their own plans or ours, train the model of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedtrain.config import Config
from tests.equivalence.ranks import Outcome, Table, launch, run_case
from tests.equivalence.tiny import furthest

EXACT, CLOSE = 1e-12, 1e-6  # float64, float32
TASK = """
import fedtrain
import torch
import transformers
from torch.nn import functional as F

class Text(fedtrain.Task):
    dtype, tied = torch.float64, True

    def data(self, site):
        text = torch.randint(0, 33, (32, 9), generator=torch.Generator().manual_seed(3))
        return text[:, :-1], text[:, 1:]

    def loss(self, model, batch):
        logits = model(batch[0]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()

class Gpt2(Text):
    def model(self):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=33, n_positions=8, n_embd=24, n_layer=2, n_head=4, use_cache=False,
            bos_token_id=0, eos_token_id=0, initializer_range=0.2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )).to(self.dtype)

class OneEnd(Gpt2):
    def parallel_plan(self):
        from torch.distributed.tensor.parallel import ColwiseParallel
        return fedtrain.Plan(tensor={"lm_head": ColwiseParallel()})

class Llama(Text):
    family, kind, special = "Llama", "", {}

    def model(self):
        config = getattr(transformers, self.family + self.kind + "Config")(
            vocab_size=33, max_position_embeddings=8, hidden_size=24, intermediate_size=40,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, use_cache=False,
            tie_word_embeddings=self.tied, initializer_range=0.2, **self.special,
        )
        return getattr(transformers, self.family + "ForCausalLM")(config).to(self.dtype)

class Untied(Llama):
    tied = False

class Mistral(Llama):
    family = "Mistral"

class Qwen2(Llama):
    family = "Qwen2"

class Granite(Llama):
    family = "Granite"

class Phi3(Llama):  # queries, keys and values are one layer, and gate and up another
    family, special = "Phi3", {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}

class Gemma2(Llama):  # an embedding that is scaled, heads of a width of their own, two kinds of attention
    family, special = "Gemma2", {"head_dim": 8, "sliding_window": 4, "attn_implementation": "eager"}

class Qwen3(Llama):  # norms within attention, over the width of a head
    family = "Qwen3"

class Gemma3(Llama):  # the same, of heads along another dimension
    family, kind = "Gemma3", "Text"
    special = {"head_dim": 8, "sliding_window": 4, "attn_implementation": "eager"}

class Mixtral(Llama):
    family, special = "Mixtral", {"num_local_experts": 2}

class Gpt2Single(Gpt2):
    dtype = torch.float32

class LlamaSingle(Llama):
    dtype = torch.float32
"""


def case(task: str, **parallel) -> Table:
    """4 steps; not of Adam, which would make steps of rounding: GPT-2's biases of keys have no gradient."""
    return {
        "run": {"task": f"hf_task:{task}", "rounds": 2, "seed": 5},
        "train": {"batch_size": 8, "lr": 0.2, "momentum": 0.9, "local_steps": 2, "clip_norm": 0.5},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 0, "background": False},
        "parallel": {"timeout": "60s", "tp": 2, **parallel},
    }


TWO = {
    "gpt2": case("Gpt2"),
    "gpt2-float32": case("Gpt2Single"),
    "gpt2-activations-again": case("Gpt2", checkpoint_activations=True),
    "llama": case("Llama"),
    "llama-untied": case("Untied"),
    "llama-float32": case("LlamaSingle"),
    "mistral": case("Mistral"),
    "qwen2": case("Qwen2"),
    "granite": case("Granite"),
    "phi3": case("Phi3"),
    "gemma2": case("Gemma2"),
    "qwen3": case("Qwen3"),
    "gemma3-norms-in-float32": case("Gemma3"),
}
FOUR = {
    "gpt2-dp": case("Gpt2"),
    "gpt2-zero3": case("Gpt2", zero=3),
    "llama-dp": case("Llama"),
    "llama-zero3": case("Llama", zero=3),
    "qwen3-zero3": case("Qwen3", zero=3),
}
HALF = case("Gpt2") | {"run": case("Gpt2")["run"] | {"rounds": 1}}  # to be gone on with alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("transformers")
    (folder / "hf_task.py").write_text(TASK)
    return folder


def alone(folder: Path, name: str, table: Table) -> dict[str, torch.Tensor]:
    table = {**table, "parallel": {}, "run": {**table["run"], "name": f"alone-{name}"}}
    return run_case(Config.of(table, folder), [], torch.device("cpu"))


def check(folder: Path, outcomes: dict[str, Outcome], cases: dict[str, Table]) -> None:
    for name, table in cases.items():
        far = furthest(outcomes[name].model, alone(folder, name, table))
        assert far < (CLOSE if "float32" in name else EXACT), (name, far)


@pytest.mark.slow(45)  # of which most is loading transformers, once a rank
def test_two_tensor_parallel_ranks_train_the_model_of_one(folder):
    outcomes = launch(folder, 2, TWO | {"half": HALF, "one-end": case("OneEnd"), "mixtral": case("Mixtral")})
    check(folder, outcomes, TWO)
    assert "are one parameter, which the plan splits in two ways" in outcomes["one-end"].error
    refused = outcomes["mixtral"].error
    assert "no plan says how a MixtralForCausalLM is split (transformers' own asks for packed_c" in refused
    assert "moe_tp_experts of layers.*.mlp.experts" in refused
    assert "Use zero = 3, which needs none, or give the task a parallel_plan()" in refused
    rest = {**TWO["gpt2"], "parallel": {}, "run": TWO["gpt2"]["run"] | {"name": "half"}}
    events = []
    on = run_case(Config.of(rest, folder), events, torch.device("cpu"))
    assert [event["round"] for event in events if event["kind"] == "round_committed"] == [2]
    assert furthest(on, alone(folder, "whole", TWO["gpt2"])) < EXACT


@pytest.mark.slow(30)
def test_so_do_four_beside_data_parallel_and_fsdp(folder):
    outcomes = launch(folder, 4, FOUR | {"too-many": case("Llama", tp=4)})
    check(folder, outcomes, FOUR)
    assert "2 heads (of keys and values) can't be shared by 4 ranks" in outcomes["too-many"].error
