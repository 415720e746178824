"""A run's model as ONNX and as an archive of torch.export: what answers from the file alone."""

import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import fedtrain
from fedtrain.cli import cli

TASK = """
import torch
from torch import nn
import fedtrain

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(9, 3))

    def forward(self, words, age=None):
        known = (words > 0).float().unsqueeze(2)
        mean = (self.embed(words) * known).sum(1) / known.sum(1)
        return {"logits": self.head(torch.cat([self.norm(mean), age], 1)), "words": known.sum(1).long()}

class Odd(Words):
    def forward(self, words, age=None):
        return torch.rand(words.shape[0]) + age

class Fixed(Words):
    def forward(self, words, age=None):
        return age.reshape(len(age), 1)

class Clinic(fedtrain.Task):
    def __init__(self, model="Words", calls=True):
        self.kind, self.calls = globals()[model], calls
    def model(self):
        return self.kind()
    def data(self, site):
        random = torch.Generator().manual_seed(7)
        return [
            (torch.randint(1, 50, (3 + i % 5,), generator=random), torch.tensor([0.123456789 + i]), i % 3)
            for i in range(24)
        ]
    def collate(self, examples):
        words, age, y = zip(*examples)
        return nn.utils.rnn.pad_sequence(words, batch_first=True), torch.stack(age), torch.tensor(y)
    def loss(self, model, batch):
        words, age, y = batch
        out = model(words, age=age)["logits"] if self.calls else model.head(torch.ones(len(y), 9))
        return nn.functional.cross_entropy(out, y)
    def evaluate(self, model, batch):
        if self.kind is Words:
            return super().evaluate(model, batch)
        return {"loss": (model(*batch[:2]).sum(), 1)}
"""
PATIENTS = torch.tensor([[4, 9, 2, 0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8, 9]])
AGES = torch.tensor([[0.5], [-1.5]])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clinic")
    (folder / "task.py").write_text(TASK)
    (folder / "fedtrain.toml").write_text(
        '[run]\nname = "clinic"\ntask = "task:Clinic"\nrounds = 1\n[simulate]\nsites = 3\nworkers = 0\n'
    )
    fedtrain.simulate(folder, progress=False)
    return folder


def export(folder, *arguments):
    return CliRunner().invoke(cli, ["export", "--config", str(folder / "fedtrain.toml"), *arguments])


def answers(file, words, age):
    """What a program without fedtrain gets from the file."""
    if file.suffix == ".pt2":
        found = torch.export.load(file).module()(words, age=age)
        return found["logits"], found["words"]
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert [each.shape[0] for each in session.get_inputs()] == ["batch", "batch"]
    return [
        torch.from_numpy(np.asarray(each))
        for each in session.run(None, {"words": words.numpy(), "age": age.numpy()})
    ]


@pytest.mark.slow(8)
@pytest.mark.parametrize(("kind", "name"), [("onnx", "model.onnx"), ("torch-export", "model.pt2")])
def test_the_file_answers_as_the_model_does_for_a_batch_and_a_length_of_any_size(
    run_dir, tmp_path, kind, name
):
    if kind == "onnx":
        pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
        pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    done = export(run_dir, "--format", kind, "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert f"{name}: outputs within " in done.stderr
    model = fedtrain.load_model("clinic+simulate", run_dir)
    for rows in (slice(0, 2), slice(0, 1), [0, 1] * 20):
        expected = model(PATIENTS[rows], age=AGES[rows])
        found = answers(tmp_path / "out" / name, PATIENTS[rows], AGES[rows])
        for a, b in zip(expected.values(), found, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-5)
    raw = (tmp_path / "out" / name).read_bytes()
    patients = fedtrain.load_task(run_dir).data("central")
    assert all(part.numpy().tobytes() not in raw for patient in patients for part in patient[:2])
    assert str(run_dir).encode() not in raw


def test_a_model_whose_file_answers_otherwise_is_not_written(run_dir, tmp_path):
    odd = ["--set", "run.task=task:Clinic('Odd')", "--format", "torch-export"]
    done = export(run_dir, *odd, "-o", str(tmp_path / "out"))
    assert done.exit_code == 1
    assert "model.pt2 was not written: its outputs are " in done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "MODEL_CARD.md", "model.json", "model.safetensors",
    ]  # fmt: skip


def test_a_model_that_torch_cannot_follow_is_told_in_one_line_with_the_reason(run_dir, tmp_path):
    fixed = ["--set", "run.task=task:Clinic('Fixed')", "--format", "torch-export"]
    error = export(run_dir, *fixed, "-o", str(tmp_path)).stderr.splitlines()[-1]
    assert error.startswith("fedtrain: --format: torch.export can't follow the model: ")
    assert "age" in error


def test_an_export_of_another_round_takes_the_old_graph_away(run_dir, tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"of another round")
    assert export(run_dir, "-o", str(tmp_path)).exit_code == 0
    assert not (tmp_path / "model.onnx").exists()


def test_what_onnx_needs_is_named_where_it_is_missing(run_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = export(run_dir, "--format", "onnx", "-o", str(tmp_path))
    assert (done.exit_code, done.stderr) == (
        1, "fedtrain: --format onnx needs onnxruntime: pip install 'fedtrain[onnx]'.\n",
    )  # fmt: skip


def test_a_task_that_never_calls_its_model_is_told_so(run_dir, tmp_path):
    quiet = ["--set", "run.task=task:Clinic(calls=False)", "--format", "torch-export"]
    done = export(run_dir, *quiet, "-o", str(tmp_path))
    assert done.exit_code == 1
    assert "evaluate() never calls model(...)" in done.stderr
