"""The last line after a mistake in a task: what happened, where, and what to change."""

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F

import fedtrain
from fedtrain import Task
from fedtrain.cli import cli
from fedtrain.config.own import HINTS
from fedtrain.errors import TaskError
from fedtrain.runtime.trainers.trainer_messages import Failed
from fedtrain.training.task import user_code

X, Y = torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)
SETTINGS = {"run.rounds": 1, "simulate.workers": 0, "train.batch_size": 8}


class Base(Task):
    def sites(self):
        return ["a", "b", "c"]

    def model(self):
        return nn.Linear(4, 2)

    def data(self, site):
        return X, Y

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])


class Wide(Base):
    def model(self):
        return nn.Linear(9, 16)


class Doubles(Base):
    def data(self, site):
        return X.double(), Y


class Floats(Base):
    def data(self, site):
        return X, Y.float()


class Beyond(Base):
    def data(self, site):
        return X, Y + 2


class Rows(Base):
    def data(self, site):
        return X, Y[:, None]


class Normed(Base):
    def model(self):
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))

    def data(self, site):
        return X[:1], Y[:1]


class Binary(Base):
    def model(self):
        return nn.Linear(4, 1)

    def loss(self, model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1].float())


class Integers(Binary):
    def loss(self, model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0]).view(-1), batch[1])


class Flat(Base):
    def model(self):
        return nn.Conv2d(1, 2, 3)


class Words(Base):
    def model(self):
        return nn.Embedding(4, 2)

    def data(self, site):
        return Y + 7, Y


class Huge(Base):
    def loss(self, model, batch):
        return model(batch[0]).sum() + torch.empty(1 << 50).sum()


class Three(Base):
    def loss(self, model, batch):
        x, y, weights = batch
        return (F.cross_entropy(model(x), y, reduction="none") * weights).mean()


class Arrays(Base):
    def loss(self, model, batch):
        return F.mse_loss(model(batch[0].numpy()), batch[1])


class Missing(Base):
    def data(self, site):
        return torch.tensor(json.loads(Path(f"{site}.json").read_text())), Y


class Unknown(Base):
    def data(self, site):
        return {"site-a": X}[site], Y


class Misspelt(Base):
    def loss(self, model, batch):
        return F.cross_entropy(modle(batch[0]), batch[1])  # noqa: F821


class Scored(Base):
    def evaluate(self, model, batch):
        return {"accuracy": (model(batch[0]).argmax(1) == batch[2], 1)}


class Layered(Base):
    def model(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 2)

            def forward(self, x):
                return self.layer(x) + torch.ones(3)

        return Net()


class Kept(Base):
    def loss(self, model, batch):
        self.sum = getattr(self, "sum", 0) + super().loss(model, batch)
        return self.sum


AT = "loss() at site a, round 1: "
LINES = {
    Wide: AT + "mat1 and mat2 shapes cannot be multiplied (8x4 and 9x16). The model gets "
    "4 features an example and its layer wants 9. (PLACE)",
    Doubles: AT + "mat1 and mat2 must have the same dtype, but got Double and Float. "
    "Return x.float() from data(), or model.double() from model(). (PLACE)",
    Floats: AT + "expected target dtype to be Long or Byte, but got Float. Labels of "
    "classes are integers: return y.long() from data(). (PLACE)",
    Beyond: AT + "IndexError: Target 2 is out of bounds. Labels count from 0, and the "
    "model's last layer has an output for each of them. (PLACE)",
    Rows: AT + "0D or 1D target tensor expected, multi-target not supported. Labels of "
    "classes have no second dimension: return y.squeeze(1), or y.argmax(1) of one-hot rows. (PLACE)",
    Normed: AT + "Expected more than 1 value per channel when training, got input size "
    "torch.Size([1, 4]). BatchNorm wants two examples or more in a batch: set train.drop_last = true or "
    "another train.batch_size; a site with one example wants GroupNorm. (PLACE)",
    Binary: AT + "Target size (torch.Size([8])) must be the same as input size "
    "(torch.Size([8, 1])). Compare the shapes of what is combined there; an output of one column wants "
    "model(x).squeeze(1). (PLACE)",
    Integers: AT + "result type Float can't be cast to the desired output type Long. "
    "This loss wants numbers: return y.float() from data(). (PLACE)",
    Flat: AT + "Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input "
    "of size: [8, 4]. Convolutions want [examples, channels, height, width], as in x.view(-1, 1, 28, 28). "
    "(PLACE)",
    Words: AT + "IndexError: index out of range in self. An index into an Embedding must "
    "be smaller than its num_embeddings. (PLACE)",
    Three: AT + "not enough values to unpack (expected 3, got 2). A batch has the parts "
    "that data() returns, in their order. (PLACE)",
    Arrays: AT + "TypeError: linear(): argument 'input' (position 1) must be Tensor, not "
    "numpy.ndarray. Let data() or collate() return tensors there. (PLACE)",
    Missing: "data('a'): FileNotFoundError: [Errno 2] No such file or directory: 'a.json'. Paths begin in "
    "the current folder: use self.data_dir. (PLACE)",
    Unknown: "data('a'): KeyError: 'a'. (PLACE)",
    Misspelt: AT + "NameError: name 'modle' is not defined. (PLACE)",
    Layered: "forward()" + AT[6:] + "The size of tensor a (2) must match the size of tensor b (3) at "
    "non-singleton dimension 1. Compare the shapes of what is combined there; an output of one column wants "
    "model(x).squeeze(1). (PLACE)",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def last_line(task, **settings):
    with pytest.raises(TaskError) as caught:
        fedtrain.simulate(task(), SETTINGS | settings, progress=False)
    return str(caught.value)


@pytest.mark.parametrize("task", LINES)
def test_the_last_line_says_what_happened_and_what_to_change(task, here):
    found = last_line(task).replace("addmm: ", "")  # torch 2.15 names its operation
    assert re.sub(r"\(test_task_mistakes\.py:\d+\)$", "(PLACE)", found) == LINES[task]


def test_the_last_line_of_too_little_memory_says_what_to_lower(here):
    assert re.search(r"can't allocate memory: .* Lower train\.batch_size; train\.accumulate", last_line(Huge))


def test_the_last_line_of_a_kept_graph_speaks_of_detach(here):
    found = last_line(Kept, **{"train.batch_size": 4})
    assert found.startswith("site a, round 1: Trying to backward through the graph a second time")
    assert "used again: detach() it. (" in found


def test_the_last_line_of_a_bad_evaluate_has_the_message(here):
    assert "evaluation: IndexError: tuple index out of range. (test_task_" in last_line(Scored)


def test_peers_in_a_simulation_say_as_much(here):
    with pytest.raises(TaskError, match=r"round 1: .* gets 4 features an example and its layer wants 9\."):
        fedtrain.simulate(Wide(), {"run.rounds": 1}, mode="gossip", progress=False)


WIDE = """
import torch, fedtrain

class Wide(fedtrain.Task):
    def sites(self):
        return ["a", "b", "c"]
    def model(self):
        return torch.nn.Linear(9, 16)
    def data(self, site):
        return torch.ones(8, 4), torch.ones(8)
    def loss(self, model, batch):
        return model(batch[0]).sum()
"""
TOO_WIDE = (
    "mat1 and mat2 shapes cannot be multiplied (8x4 and 9x16). The model gets 4 features an example and its"
)


@pytest.mark.usefixtures("forked")
@pytest.mark.slow(6)
def test_worker_processes_and_a_datacenter_say_as_much_as_the_last_line(here, tmp_path):
    (tmp_path / "wide.py").write_text(WIDE)
    (tmp_path / "fedtrain.toml").write_text('[run]\ntask = "wide:Wide"\nrounds = 1\n')
    with pytest.raises(TaskError) as caught:
        fedtrain.simulate(".", {"simulate.workers": 1}, progress=False)
    assert str(caught.value).startswith(f"{AT}{TOO_WIDE}")
    told = CliRunner().invoke(cli, ["datacenter"]).output.splitlines()[-1]
    wide = TOO_WIDE.replace("8x4", "24x4")  # the data of all sites
    assert told == f"fedtrain: loss(), step 1: {wide} layer wants 9. (wide.py:12)"


def test_what_leaves_a_site_has_the_place_and_not_the_message():
    with pytest.raises(TaskError) as caught, user_code(Path(__file__).parent, "site a, round 1"):
        raise ValueError("patient 17")
    failed = Failed.of(caught.value)
    assert "patient 17" not in f"{caught.value}{failed.reason}"
    assert failed.reason.startswith("ValueError in test_task_mistakes.py:")
    assert failed.error().openly.startswith("test_what_leaves_a_site")
    assert ": patient 17. (test_task_mistakes.py:" in failed.error().openly


def test_each_hint_is_a_sentence_on_a_line():
    assert all(hint.endswith(".") and "\n" not in hint for hint in HINTS.values())
