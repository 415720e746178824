"""What data() may return: each row of the table in docs/training.md trains y = 3x + 1 to w = 3, b = 1."""

from collections import namedtuple
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fedtrain
from fedtrain import Task
from fedtrain.errors import ConfigError, TaskError
from fedtrain.training.batches import columns_of, cut, examples_in, move, parts_of
from fedtrain.training.examples import collated, examples_of, subset
from fedtrain.training.parallel.data import pooled
from fedtrain.training.parallel.reading import by_bytes
from fedtrain.training.partition import labels_of
from tests.equivalence.ranks import launch

XS = [i / 10 - 1 for i in range(20)]
YS = [3 * x + 1 for x in XS]
X, Y = torch.tensor(XS), torch.tensor(YS)
Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Item:
    x: torch.Tensor
    y: torch.Tensor
    note: torch.Tensor | None = None


@dataclass(frozen=True)
class Moving(Item):
    def to(self, device):
        return replace(self, x=self.x.to(device), y=self.y.to(device))


class Points(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return X[i], Y[i]


class Shifted(TensorDataset):
    """A TensorDataset that changes its examples as they are read."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x, y + 1


class Flow(IterableDataset):
    def __iter__(self):
        return zip(X, Y, strict=True)


def read_only(values):
    found = np.array(values, dtype=np.float32)
    found.flags.writeable = False
    return found


ROWS = {
    "a tuple of tensors": lambda: (X, Y),
    "a tuple of arrays": lambda: (np.array(XS), np.array(YS)),
    "a tuple of arrays that pandas shares": lambda: (read_only(XS), read_only(YS)),
    "a tuple of two lists": lambda: (XS, YS),
    "a tuple of a tensor and a list": lambda: (X, YS),
    "a tuple of two tuples of numbers, as of zip": lambda: tuple(zip(*zip(XS, YS, strict=True), strict=True)),
    "a tuple of lists of tensors and of arrays": lambda: ([*X], [np.float32(y) for y in YS]),
    "a tuple of a dict and a tensor": lambda: ({"x": X}, Y),
    "a named tuple": lambda: Pair(X, Y),
    "a dict of lists": lambda: {"x": XS, "y": YS},
    "a dict in a dict": lambda: {"x": X, "meta": {"y": Y}},
    "a dataclass": lambda: Item(X, Y),
    "a frozen dataclass with .to()": lambda: Moving(XS, Y),
    "one array": lambda: np.stack([XS, YS], 1),
    "one tensor": lambda: torch.stack([X, Y], 1),
    "a TensorDataset": lambda: TensorDataset(X, Y),
    "a TensorDataset with its own []": lambda: Shifted(X, Y - 1),
    "a Dataset": Points,
    "a list of tuples": lambda: [*zip(XS, YS, strict=True)],
    "a list of dicts": lambda: [{"x": x, "meta": {"y": y}} for x, y in zip(XS, YS, strict=True)],
    "a list of dataclasses": lambda: [Item(x, y) for x, y in zip(X, Y, strict=True)],
    "a list of dataclasses in tuples": lambda: [(Item(x, y), 0) for x, y in zip(X, Y, strict=True)],
    "an IterableDataset": Flow,
    "a DataLoader": lambda: DataLoader(TensorDataset(X, Y), batch_size=20),
    "a list of ready batches, as an iterable": lambda: DataLoader([Item(X, Y)], batch_size=None),
}
FEW = ["a tuple of two lists", "a dict in a dict", "a dataclass", "a list of dataclasses"]


def columns(batch):
    """x and y of a batch of any form."""
    if isinstance(batch, torch.Tensor):
        return batch.float().unbind(1)
    parts = [*parts_of(batch).values()]
    parts = [value for part in parts for value in (parts_of(part).values() or [part])]
    return parts[0].float(), parts[1].float()


class Line(Task):
    row = ""

    def __init__(self, row):
        self.row = row

    def sites(self):
        return ["a", "b", "c"]

    def model(self):
        return nn.Linear(1, 1)

    def data(self, site):
        return ROWS[self.row]()

    def loss(self, model, batch):
        x, y = columns(batch)
        return nn.functional.mse_loss(model(x.view(-1, 1)).view(-1), y)


SETTINGS = {
    "run.rounds": 2, "evaluate.every": 0, "secagg.enabled": False, "simulate.workers": 0,
    "train.lr": 0.75, "train.local_steps": 10, "train.batch_size": 0,
}  # fmt: skip


def line_of(model):
    return model.weight.item(), model.bias.item()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("row", ROWS)
def test_each_form_of_data_trains_the_line_that_its_numbers_are_on(row, here):
    run = fedtrain.simulate(Line(row), SETTINGS, progress=False)
    assert line_of(run.model()) == pytest.approx((3, 1), abs=1e-3)


@pytest.mark.parametrize("row", FEW)
def test_peers_train_the_same_line_of_any_form_of_data(row, here):
    settings = {name: value for name, value in SETTINGS.items() if name[:3] in ("run", "tra", "eva")}
    run = fedtrain.simulate(Line(row), settings | {"run.rounds": 4}, mode="gossip", progress=False)
    assert line_of(run.model()) == pytest.approx((3, 1), abs=1e-3)


@pytest.mark.slow(6)
def test_two_ranks_train_the_same_line_of_any_form_of_data(tmp_path):
    (tmp_path / "lines.py").write_text("from tests.first_use.test_data import Line as Line\n")
    train = {"lr": 0.75, "local_steps": 20, "batch_size": 0}
    cases = {
        str(i): {
            "run": {"task": f"lines:Line({row!r})", "name": str(i), "rounds": 1},
            "train": train,
            "evaluate": {"every": 0},
        }
        for i, row in enumerate(FEW)
    }
    for outcome in launch(tmp_path, 2, cases).values():
        found = outcome.model["weight"].item(), outcome.model["bias"].item()
        assert found == pytest.approx((3, 1), abs=1e-3)


def test_a_task_defined_in_a_function_trains_where_nothing_is_sent(here):
    class Local(Line):
        def data(self, site):
            return X, Y

    assert line_of(fedtrain.simulate(Local(""), SETTINGS, progress=False).model()) == pytest.approx(
        (3, 1), abs=1e-3
    )
    with pytest.raises(ConfigError, match=r"worker processes can't make it: it is defined inside a function"):
        fedtrain.simulate(Local(""), SETTINGS | {"simulate.workers": 1}, progress=False)


# --- forms that are refused

REFUSED = {
    "a list of two tensors": ([X, Y], r"of 2 items of one length .* make a tuple of them: return x, y"),
    "a list of two lists": ([XS, YS], r"a list of 2 items of one length .*make a tuple"),
    "a list of a tensor and a list": ([X, YS], "make a tuple of them"),
    "a list of three arrays": ([np.ones(3)] * 3, r"a list of 3 items of one length .*return torch.stack"),
    "columns of two lengths": ((torch.ones(8, 3), XS), r"different lengths: x has 8, y has 20\. Give each"),
    "nested ones of two lengths": ({"x": X, "meta": {"age": [1, 2]}}, r"x has 20, meta\.age has 2"),
    "lists of two lengths": (([[1, 2], [3]], [0, 1]), r"data\(\)\[0\] is a list of list, which is no column"),
    "names": ({"x": X, "names": ["a"] * 20}, r"data\(\)\['names'\] is a list of str, which is no column"),
    "a nested text": (Item(X, {"y": "abc"}), r"data\(\)\['y'\]\['y'\] is a str"),
    "a number": ((X, 3), r"data\(\)\[1\] is a int, which is no column\. The parts of a tuple, dict or"),
    "a tensor without dimensions": ((X, torch.tensor(3.0)), r"data\(\)\[1\] is a Tensor, which is no column"),
    "None": ((X, None), r"data\(\)\[1\] is a NoneType"),
    "two data sets": ((Points(), Points()), r"data\(\)\[0\] is a Points, which is no column"),
    "a tuple of examples": (tuple(Points()), r"data\(\)\[0\]\[0\] is a Tensor, .*return a list of them"),
    "an array of objects": (np.array([None, X[:2]], dtype=object), r"data\(\) is a ndarray, which is no"),
    "nothing": (None, "returned a NoneType: expected a Dataset, a tuple or dict of tensors, a list"),
    "a number alone": (3, "returned a int: expected a Dataset"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_data_that_may_mean_two_things_or_nothing_is_refused(form):
    data, says = REFUSED[form]
    with pytest.raises(TaskError, match=says) as caught:
        examples_of(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        [(X, 0), (X, 1)],
        [torch.ones(3), torch.ones(4)],
        [torch.tensor(0), torch.tensor(1)],
        [{"x": X}, {"x": X}],
        [Item(X, Y), Item(X, Y)],
        [X] * 4,
        [[1, 2], [3]],
        [],
    ],
)
def test_a_list_that_can_only_be_examples_is_examples(data):
    assert examples_of(data).count == len(data)


def test_a_list_has_the_dtype_that_torch_tensor_gives_it():
    found = examples_of(([1.5, 2], [1, 2], [True, False], [[1, 2], [3, 4]])).columns
    assert [column.dtype for column in found] == [torch.float32, torch.int64, torch.bool, torch.int64]
    assert found[3].tolist() == [[1, 2], [3, 4]]


def test_a_tensor_is_not_copied_and_an_array_neither():
    array = np.ones((3, 2))
    found = examples_of((X[:3], array)).columns
    assert found[0].data_ptr() == X.data_ptr()
    assert found[1].data_ptr() == array.ctypes.data


# --- what is done with them

NESTED = {"x": torch.arange(12.0).view(6, 2), "meta": Item(torch.arange(6), torch.arange(6) * 2)}


@pytest.mark.parametrize("data", [NESTED, Moving(NESTED["x"], NESTED["meta"].x), (NESTED, XS[:6])])
def test_nested_columns_are_dealt_cut_moved_and_sent_in_their_containers(data):
    found = examples_of(data)
    batch = next(found.batches(0, False, None))
    assert type(batch) is type(data)
    assert examples_in(batch) == found.count == 6
    chosen = [examples_of(part).columns for part in (subset(data, [2, 3]), cut(batch, 2, 4))]
    for part in (*chosen, examples_of(found.take(torch.tensor([2, 3]))).columns):
        assert [c.tolist() for c in part] == [c[2:4].tolist() for c in found.columns]
    there = move(batch, torch.device("meta"))
    assert all(column.is_meta for column in examples_of(there).columns)
    assert [*map(type, parts_of(by_bytes(NESTED)["meta"]).values())] == [by_bytes(X).__class__] * 2
    assert examples_of(pooled([data, data])).count == 12


def test_columns_of_nested_data_have_the_names_of_their_places():
    assert [*columns_of(NESTED)] == ["x[0]", "x[1]", "meta.x", "meta.y"]
    assert [*columns_of((Item(X, Y), Y))] == ["x.x", "x.y", "y"]


def test_labels_of_a_partition_are_the_last_column():
    assert labels_of(NESTED).tolist() == [0, 2, 4, 6, 8, 10]
    assert labels_of({"x": XS, "y": [1] * 20}).tolist() == [1] * 20


def test_dataclasses_are_collated_field_by_field_and_keep_what_is_none():
    batch = collated([Item(X, Y), Item(X + 1, Y)])
    assert isinstance(batch, Item)
    assert batch.x.shape == (2, 20)
    assert batch.note is None
    assert collated([(Item(X, Y), 1), (Item(X, Y), 2)])[1].tolist() == [1, 2]


def test_a_batch_that_counts_itself_is_not_cut_by_its_fields():
    @dataclass
    class Graph:
        x: torch.Tensor
        batch_size: int

    with pytest.raises(TaskError, match="a Graph can't be cut into the shares of several ranks"):
        cut(Graph(X, 4), 0, 2)


def test_a_tensor_that_has_no_entry_for_each_example_is_not_cut():
    with pytest.raises(TaskError, match=r"of shape \[3\] in a batch of 20 examples can't be cut"):
        cut((X, torch.ones(3)), 0, 10)
