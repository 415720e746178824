"""How the worker processes of a task's DataLoader start: Python 3.14's default is no longer fork."""

import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader

from fedtrain.errors import TaskError
from fedtrain.training.examples import examples_of
from fedtrain.training.parallel.reading import read_once
from fedtrain.training.task import load_task

TASK = """
import torch
from torch.utils.data import DataLoader, Dataset
import fedtrain

class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.tensor([float(i)])

class Task(fedtrain.Task):
    def model(self):
        return torch.nn.Linear(1, 1)

    def loss(self, model, batch):
        return model(batch).sum()

    def data(self, site, context=None):
        return DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=context)
"""


@pytest.fixture
def task(tmp_path):
    (tmp_path / "numbered.py").write_text(TASK)
    return load_task("numbered:Task", tmp_path)


@pytest.fixture
def by_default(monkeypatch):
    """Have forkserver be the default that no program chose, as in Python 3.14."""
    default = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing.context._default_context, "_default_context", default)
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_that_would_import_the_task_anew_are_refused(task, method):
    said = f"workers start by {method}, .*numbered anew.*multiprocessing_context"
    with pytest.raises(TaskError, match=said):
        examples_of(task.data("a", method))


def test_a_tasks_own_workers_start_by_fork_where_forkserver_is_default(task, by_default):
    batches = [*examples_of(task.data("a")).batches(0, False, None)]
    assert torch.cat(batches).flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_fedtrains_workers_start_by_fork_where_forkserver_is_default(task, by_default):
    examples = examples_of(task.data("a"))
    batches = [batch for batch, _ in read_once(examples, 2, 1, 0, 1, 1, torch.device("cpu"))]
    assert torch.cat(batches).flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_workers_that_need_nothing_of_a_task_may_start_as_it_says():
    given = DataLoader(torch.ones(2, 1), num_workers=1, multiprocessing_context="forkserver")
    examples_of(given)
    assert given.multiprocessing_context.get_start_method() == "forkserver"
