"""Batches of every kind, in every engine; and models of a kind that no arena holds."""

from collections import UserDict, namedtuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from fedtrain import Arena, Task
from fedtrain.config import Config, ParallelConfig, TrainConfig
from fedtrain.errors import ConfigError, TaskError
from fedtrain.schema import Schema
from fedtrain.training.batches import cut, examples_in, move
from fedtrain.training.examples import examples_of
from fedtrain.training.local import Engine
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel.data import Dealt
from fedtrain.training.parallel.engine import MeshEngine
from fedtrain.training.stacked import Stacked
from fedtrain.training.task import collate_of

CPU, META = torch.device("cpu"), torch.device("meta")
Pair = namedtuple("Pair", "x y")


class Graph:
    """As graph libraries have them: tensors in an object that says how many examples it is."""

    def __init__(self, x, y):
        self.x, self.y, self.batch_size = x, y, len(y)

    def to(self, device):
        return Graph(self.x.to(device), self.y.to(device))


def texts(n=6):
    draw = torch.Generator().manual_seed(1)
    return [torch.rand(1 + i % 4, 3, generator=draw) for i in range(n)]


def encoding(**parts):
    transformers = pytest.importorskip("transformers")
    return transformers.BatchEncoding(parts)


def x_and_y(n=6):
    return torch.rand(n, 3, generator=torch.Generator().manual_seed(1)), torch.arange(n) % 2


def named(n=6):
    return dict(zip("xy", x_and_y(n), strict=True))


BATCHES = {
    "a tuple": lambda: x_and_y(),
    "a named tuple": lambda: Pair(*x_and_y()),
    "a dict": lambda: named(),
    "a dict of one's own": lambda: UserDict(named()),
    "transformers' BatchEncoding": lambda: encoding(**named()),
    "a PackedSequence and labels": lambda: (pack_sequence(texts(), enforce_sorted=False), x_and_y()[1]),
    "an object": lambda: Graph(*x_and_y()),
    "containers in containers": lambda: {"names": list("abcdef"), "xy": [Pair(*x_and_y()), (None, 3)]},
}  # fmt: skip


def leaves(batch):
    """Every tensor, wherever it is."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Graph):
        return [batch.x, batch.y]
    if isinstance(batch, PackedSequence):
        return [batch.data]  # batch_sizes stay on the CPU, as torch wants them
    if hasattr(batch, "values"):
        batch = list(batch.values())
    return [t for part in batch for t in leaves(part)] if isinstance(batch, list | tuple) else []


@pytest.mark.slow(3)
@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_any_kind_moves_to_the_device_and_keeps_its_type(kind):
    batch = BATCHES[kind]()
    moved = move(batch, META)
    assert type(moved) is type(batch)
    assert {t.device for t in leaves(moved)} == {META}
    assert {t.device for t in leaves(batch)} == {CPU}
    assert len(leaves(moved)) == len(leaves(batch)) > 0


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_any_kind_says_how_many_examples_it_holds(kind):
    assert examples_in(BATCHES[kind]()) == 6


def test_a_batch_that_does_not_say_so_is_refused_with_what_to_change():
    with pytest.raises(TaskError, match="is a object that doesn't say how many examples it holds"):
        examples_in(object())


def test_ranks_cut_a_batch_alike_in_all_its_parts():
    part = cut(BATCHES["containers in containers"](), 2, 4)
    x, y = x_and_y()
    assert part["names"] == ["c", "d"]
    assert torch.equal(part["xy"][0].x, x[2:4])
    assert torch.equal(part["xy"][0].y, y[2:4])
    assert part["xy"][1] == (None, 3)


@pytest.mark.parametrize("kind", ["a PackedSequence and labels", "an object"])
def test_what_can_not_be_cut_is_refused_but_one_rank_takes_it_whole(kind):
    batch = BATCHES[kind]()
    with pytest.raises(TaskError, match="can't be cut into the shares of several ranks"):
        cut(batch, 0, 3)
    assert cut(batch, 0, 6) is batch


class Reader(Task):
    """Means of padded or packed texts."""

    def model(self):
        return nn.GRU(3, 2, batch_first=True).double()

    def loss(self, model, batch):
        _, last = model(batch[0].double() if torch.is_tensor(batch[0]) else batch[0].to(torch.float64))
        return nn.functional.cross_entropy(last[0], batch[1])


class Packing(Reader):
    def collate(self, examples):
        found, labels = zip(*examples, strict=True)
        return pack_sequence(found, enforce_sorted=False), torch.tensor(labels)


class Padding(Reader):
    def collate(self, examples):
        found, labels = zip(*examples, strict=True)
        lengths = torch.tensor([len(text) for text in found])
        padded = pad_sequence(found, batch_first=True)
        return pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False), torch.tensor(
            labels
        )


PHRASES = [(text, i % 2) for i, text in enumerate(texts(20))]


def by_loop(task, data, **train):
    engine = Engine(task, TrainConfig(lr=0.1, batch_size=4, **train), run_seed=3)
    out = Arena.zeros(engine.schema)
    update = engine.train("a", data, 0, engine.initial(), out)
    assert update.num_examples == 20
    return out


def by_mesh(task, data):
    config = Config(train=TrainConfig(lr=0.1, batch_size=4), parallel=ParallelConfig())
    engine = MeshEngine(task, config, Mesh(Sizes(), CPU))
    start = engine.gather()
    dealt = Dealt(data, config.train, 3, "a", collate=collate_of(task))
    while dealt.epoch < 1:
        engine.steps.take(dealt.take(), "a step")
    return engine, engine.gather().data.view(torch.float64) - start.data.view(torch.float64)


@pytest.mark.parametrize("task", [Packing, Padding])
def test_texts_of_different_lengths_train_by_the_tasks_collate(task):
    assert by_loop(task(), PHRASES).data.any()
    engine, moved = by_mesh(task(), PHRASES)
    assert moved.abs().max() > 0
    with torch.no_grad():
        whole = engine.task.loss(engine.parts[0], task().collate(PHRASES))
    total, count = engine.evaluate(PHRASES)["loss"]
    assert total / count == pytest.approx(float(whole), rel=1e-12)


def test_ready_batches_of_packed_texts_are_taken_as_they_come():
    loader = DataLoader(PHRASES, batch_size=4, collate_fn=Packing().collate)
    assert torch.equal(by_loop(Packing(), loader).data, by_loop(Reader(), loader).data)
    _, moved = by_mesh(Reader(), loader)
    assert moved.abs().max() > 0


def test_packed_and_padded_texts_train_to_the_same_bits():
    assert torch.equal(by_loop(Packing(), PHRASES).data, by_loop(Padding(), PHRASES).data)


def test_a_task_with_collate_is_given_examples_of_tensors_too():
    class Listed(Task):
        def model(self):
            return nn.Linear(3, 2)

        def collate(self, examples):
            assert isinstance(examples, list)
            assert len(examples[0]) == 2
            return Pair(torch.stack([x for x, _ in examples]), torch.stack([y for _, y in examples]))

        def loss(self, model, batch):
            return nn.functional.cross_entropy(model(batch.x), batch.y)

    class Plain(Listed):
        collate = Task.collate

        def loss(self, model, batch):
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

    plain = by_loop(Plain(), x_and_y(20))
    assert torch.equal(by_loop(Listed(), x_and_y(20)).data, plain.data)
    assert torch.equal(by_loop(Listed(), TensorDataset(*x_and_y(20))).data, plain.data)


@pytest.mark.parametrize("kind", ["a named tuple", "transformers' BatchEncoding"])
def test_data_in_a_container_of_its_own_gives_batches_of_that_type(kind):
    class Named(Task):
        def model(self):
            return nn.Linear(3, 2)

        def loss(self, model, batch):
            return nn.functional.cross_entropy(model(batch.x), batch.y)

    data = Pair(*x_and_y(20)) if kind == "a named tuple" else encoding(**named(20))
    assert by_loop(Named(), data).data.any()


def test_a_mapping_without_tensors_is_refused():
    with pytest.raises(TaskError, match=r"data\(\)\['x'\] is a str, which is no column"):
        by_loop(Reader(), {"x": "ab"})


@pytest.mark.parametrize(
    ("task", "data", "says"),
    [
        (Packing(), PHRASES, "the task has its own collate"),
        (Reader(), PHRASES, "only tensors can be stacked"),
    ],
)
def test_engines_that_stack_sites_refuse_what_does_not_stack(task, data, says):
    def train():
        stack = Stacked(Engine(task, TrainConfig(), run_seed=3))
        stack.train(
            [("a", data)],
            0,
            stack.engine.initial(),
            torch.empty(1, stack.engine.schema.nbytes, dtype=torch.uint8),
        )

    with pytest.raises(ConfigError, match=says):
        train()


class Stateful(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        """Nothing."""


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Sequential(nn.LazyLinear(2)), "0.weight has no shape yet, as in nn.LazyLinear"),
        (nn.Sequential(nn.LazyBatchNorm1d()), "0.weight has no shape yet"),
        (nn.Sequential(Stateful(2, 2)), "0._extra_state comes of get_extra_state"),
    ],
)
def test_a_model_whose_state_can_not_travel_is_refused_in_one_line(model, says):
    class Odd(Task):
        def model(self):
            return model

    for begin in (
        lambda: Schema.of(model),
        lambda: Engine(Odd(), TrainConfig(), run_seed=1),
        lambda: MeshEngine(Odd(), Config(), Mesh(Sizes(), CPU)),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            begin()
        assert "\n" not in str(caught.value)


def test_a_lazy_model_that_has_seen_an_example_trains():
    class Warm(Task):
        def model(self):
            model = nn.LazyLinear(2)
            model(torch.zeros(1, 3))
            return model

        def loss(self, model, batch):
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

    assert by_loop(Warm(), x_and_y(20)).data.any()


class DataFrame:
    iloc = None

    def __len__(self) -> int:
        return 3

    def __getitem__(self, column: str) -> None: ...


@pytest.mark.parametrize("data", [DataFrame(), (torch.ones(3), DataFrame()), {"x": DataFrame()}])
def test_a_table_is_refused_with_how_to_make_a_tensor_of_it(data):
    with pytest.raises(TaskError, match=r"returned a DataFrame. Make a tensor of it: torch.tensor"):
        examples_of(data)


@pytest.mark.parametrize("examples", [[None, None], [torch.ones(2), torch.ones(3)]])
def test_examples_that_no_batch_can_be_made_of_are_named(examples):
    with pytest.raises(TaskError, match=rf"each a {type(examples[0]).__name__}: .* define Task.collate"):
        list(examples_of(examples).batches(2, False, None))
