"""A project small enough to train in every mesh: a GPT of the example in float64, and what it must become."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from fedtrain.training.task import Task, load_task
from tests.equivalence.ranks import ROOT, Table

TASK = """
import torch
from gpt import GPT, plan
from torch import nn
from torch.nn import functional as F
import fedtrain
from fedtrain import metrics

class Text(fedtrain.Task):
    dtype, layers = torch.float64, 2

    def model(self):
        return GPT(vocabulary=32, length=16, width=16, heads=4, layers=self.layers).to(self.dtype)

    def data(self, site):
        text = torch.randint(0, 32, (80, 17), generator=torch.Generator().manual_seed(3))
        return text[:, :-1], text[:, 1:]

    def loss(self, model, batch):
        logits = model(batch[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()

    def evaluate(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(-1) == batch[1]).sum(), batch[1].numel())}

    def parallel_plan(self):
        return plan()

class Single(Text):
    dtype = torch.float32

class Deep(Text):
    layers = 4

class Padded(Text):  # batches whose tokens do not all count: the mean is over those that do
    def loss(self, model, batch):
        wanted = torch.where(batch[1] < 20, batch[1], -100)
        logits = model(batch[0])
        total = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum", ignore_index=-100)
        return total, (wanted >= 0).sum()

class Rows(fedtrain.Task):
    def model(self):
        return nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
        ).double()

    def data(self, site):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(96, 6, generator=generator, dtype=torch.float64)
        return x, (x @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

class Phrases(fedtrain.Task):  # of different lengths, at two sites, padded where batches are made
    def sites(self):
        return ["a", "b"]

    def model(self):
        return nn.ModuleDict({"words": nn.Embedding(20, 8), "head": nn.Linear(8, 3)}).double()

    def data(self, site):
        draw = torch.Generator().manual_seed(7 + ord(site))
        lengths = torch.randint(1, 9, (48,), generator=draw).tolist()
        texts = [torch.randint(1, 20, (length,), generator=draw) for length in lengths]
        return [(text, int(text[0]) % 3) for text in texts]

    def collate(self, examples):
        texts, labels = zip(*examples)
        return {"text": nn.utils.rnn.pad_sequence(texts, batch_first=True), "label": torch.tensor(labels)}

    def logits(self, model, batch):
        there = (batch["text"] > 0).double().unsqueeze(-1)
        return model["head"]((model["words"](batch["text"]) * there).sum(1) / there.sum(1))

    def loss(self, model, batch):
        return F.cross_entropy(self.logits(model, batch), batch["label"])

    def scores(self, logits):  # of class 1, on the grid of a histogram of 101 bins
        return (logits.softmax(1)[:, 1] * 100).round() / 100

    def evaluate(self, model, batch):
        logits, labels = self.logits(model, batch), batch["label"]
        found = metrics.confusion(logits, labels, 3)
        return found | metrics.binary_histogram(self.scores(logits), (labels == 1).long(), 101)

    def metrics(self, sums):
        return {"f1": metrics.macro_f1(sums), "auroc": metrics.auroc(sums)}

class Phrases3(Phrases):  # at as many sites as a masked sum needs
    def sites(self):
        return ["a", "b", "c"]

class Adapted(Text):  # the last block alone is trained
    def model(self):
        model = super().model().requires_grad_(False)
        model.blocks["1"].requires_grad_(True)
        return model

class Natural(Rows):
    def sites(self):
        return ["a", "b"]

    def data(self, site):
        x, y = super().data(site)
        part = slice(0, 40) if site == "a" else slice(40, 96)
        return x[part], y[part]

class Head(Natural):  # is trained alone
    def model(self):
        model = super().model().requires_grad_(False)
        model[-1].requires_grad_(True)
        return model
"""

MIXED = """
from mesh_task import Rows
from torch import nn

class Mixed(Rows):  # layers that see more than one example, or draw random numbers
    def model(self):
        first, _, _, _, last = super().model()
        return nn.Sequential(first, nn.BatchNorm1d(16).double(), nn.Tanh(), nn.Dropout(0.2), last)
"""


def project(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mesh_task.py").write_text(TASK)  # kept runs know it: other tasks go into other files
    (folder / "mixed_task.py").write_text(MIXED)
    shutil.copy(ROOT / "examples" / "shakespeare" / "gpt.py", folder / "gpt.py")
    return folder


def case(task: str = "Text", *, steps: int = 4, train: dict[str, Any] | None = None, strategy: Any = None,
         rounds: int = 2, **parallel: Any) -> Table:  # fmt: skip
    """So many steps of AdamW in all, as one table of a fedtrain.toml."""
    return {
        "run": {"task": task if ":" in task else f"mesh_task:{task}", "rounds": rounds, "seed": 5},
        "train": {"batch_size": 16, "optimizer": "adamw", "lr": 0.01, "local_steps": steps // rounds}
        | (train or {}),
        "strategy": strategy or {},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 0, "background": False},
        "parallel": {"timeout": "30s", **parallel},
    }


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of any coordinate."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def by_scikit_learn(
    folder: Path, model: dict[str, torch.Tensor], spec: str = "mesh_task:Phrases"
) -> dict[str, float]:
    """What Phrases.metrics() should say of this model: on the pooled data, without a count or a sum."""
    from sklearn.metrics import f1_score, roc_auc_score

    task = load_task(spec, folder)
    assert isinstance(task, Task)
    made = task.model()
    made.load_state_dict(model)
    pooled = task.collate([each for site in task.sites() or () for each in task.data(site)])
    with torch.no_grad():
        logits = task.logits(made, pooled)  # type: ignore[attr-defined]  # the class above
    labels = pooled["label"]
    return {
        "f1": f1_score(labels, logits.argmax(1), average="macro"),
        "auroc": roc_auc_score(labels == 1, task.scores(logits)),  # type: ignore[attr-defined]
    }
