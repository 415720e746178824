"""What Task.data returned, dealt to ranks: the user's own loader and dataset, resumable in any world."""

import pickle
import time
from multiprocessing.reduction import ForkingPickler
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedtrain.config import TrainConfig
from fedtrain.digest import seed_of
from fedtrain.training.devices import seed_all
from fedtrain.training.examples import examples_of
from fedtrain.training.parallel.data import Dealt
from fedtrain.training.parallel.reading import SMALL, read_once, sendable
from fedtrain.training.shards import ShardedDataset, write_shards


class Noisy(Dataset):
    """Examples with an augmentation that draws from torch."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return torch.tensor([float(i), torch.rand(()).item()])


class Counting(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(20.0).view(20, 1))


def loader(**kwargs):
    return DataLoader(Noisy(), batch_size=6, shuffle=True, **kwargs)


def sharded(folder):
    write_shards(torch.arange(20.0).view(20, 1), folder, shard_bytes=16)
    return ShardedDataset(folder, window=2)


def read_ahead(data):
    data.readers = 2
    return data


SOURCES = {
    "a loader that shuffles": lambda folder: loader(),
    "a loader with workers": lambda folder: loader(num_workers=2),
    "an iterable dataset": lambda folder: Counting(),
    "a dataset": lambda folder: TensorDataset(torch.arange(20.0).view(20, 1)),
    "shards": sharded,
    "examples read ahead": lambda folder: read_ahead(Noisy()),
    "shards read ahead": lambda folder: read_ahead(sharded(folder)),
}


def steps(data, counts, ranks_of):
    """Each step's batches as a world sees them: for each entry of `counts` another world of so many ranks,
    that goes on from where the one before was."""
    state, taken = None, []
    for world, steps in zip(ranks_of, counts, strict=True):
        train = TrainConfig(batch_size=6, accumulate=2)
        given = {"readers": getattr(data, "readers", 0)}
        ranks = [Dealt(data, train, 5, "site", r, world, **given) for r in range(world)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        for step in range(steps):
            torch.manual_seed(1000 * world + step)  # what training draws in between is nobody's concern
            shares = [rank.take() for rank in ranks]
            for parts in zip(*shares, strict=True):
                batch = [p[0] if torch.is_tensor(p[0]) or p[0] is None else p[0][0] for p in parts]
                whole = torch.cat([b for b in batch if b is not None])
                assert {p[1] for p in parts} == {len(whole)}
                taken.append(whole)
        state = ranks[0].state_dict()
        assert all(rank.state_dict() == state for rank in ranks)
    return taken


@pytest.mark.parametrize("source", SOURCES)
def test_worlds_that_change_take_the_batches_of_one_that_never_stopped(tmp_path, source):
    data = SOURCES[source](tmp_path)
    alone = steps(data, [6], [1])
    changing = steps(data, [2, 3, 1], [2, 3, 1])
    assert len(alone) == len(changing) > 8
    assert all(torch.equal(a, b) for a, b in zip(alone, changing, strict=True))


@pytest.mark.parametrize("source", SOURCES)
def test_each_pass_has_every_example_once(tmp_path, source):
    one_pass = torch.cat(
        steps(SOURCES[source](tmp_path), [2], [2])
    )  # 20 examples are two steps of two batches
    assert sorted(one_pass[:, 0].tolist()) == list(range(20))


def test_what_a_loader_draws_disturbs_no_other_draw():
    torch.manual_seed(7)
    plain = torch.rand(3)
    torch.manual_seed(7)
    Dealt(loader(), TrainConfig(), 5, "site").take()
    assert torch.equal(torch.rand(3), plain)


class Counted(Noisy):
    """Counts who reads what, in whatever process."""

    def __init__(self, count=4000):
        self.reads = torch.zeros(count, dtype=torch.int64).share_memory_()

    def __len__(self):
        return len(self.reads)

    def __getitem__(self, i):
        self.reads[i] += 1
        return torch.tensor([float(i)])


@pytest.mark.parametrize("source", ["loader", "loader with workers", "dataset", "dataset read ahead"])
def test_each_rank_reads_its_share_of_the_examples_alone(source):
    for rank in range(4):
        data = Counted()
        workers = 1 if "with" in source else 0
        given = DataLoader(data, 40, shuffle=True, num_workers=workers) if "loader" in source else data
        dealt = Dealt(given, TrainConfig(batch_size=40), 5, "site", rank, 4, readers="ahead" in source)
        seen = 0
        while dealt.epoch < 1:
            seen += sum(len(batch) for batch, _ in dealt.take())
        assert seen == 1000
        assert 1000 <= int(data.reads.sum()) <= 1050


@pytest.mark.parametrize("source", ["loader", "loader with workers", "dataset", "dataset read ahead"])
def test_each_rank_reads_its_share_alone_in_an_evaluation_and_in_a_round_of_a_site(source):
    evaluated = []
    for rank in range(4):
        data, readers = Counted(), int("ahead" in source)
        workers = 1 if "with" in source else 0
        given = DataLoader(data, 40, shuffle=True, num_workers=workers) if "loader" in source else data
        dealt = Dealt(given, TrainConfig(batch_size=40), 5, "site", rank, 4, readers=readers)
        dealt.begin(3)
        assert sum(len(batch) for step in dealt.round() for batch, _ in step) == 1000
        assert 1000 <= int(data.reads.sum()) <= 1050
        del dealt
        data = Counted()
        given = DataLoader(data, 40, shuffle=True, num_workers=workers) if "loader" in source else data
        shares = read_once(examples_of(given), 10, 7, rank, 4, readers, torch.device("cpu"))
        mine = [batch[:, 0] for batch, counts in shares if counts]
        assert int(data.reads.sum()) == 1000
        evaluated += torch.cat(mine).tolist()
    assert sorted(evaluated) == list(range(4000))


def test_a_site_of_ranks_takes_the_batches_that_a_loader_gives_a_site_of_one_process():
    data = TensorDataset(torch.arange(20.0).view(20, 1))
    given = DataLoader(data, batch_size=6, shuffle=True)
    seed_all(seed_of(5, 3, "site"), torch.device("cpu"))
    alone = [batch[0] for _ in range(2) for batch in given]
    ranks = [Dealt(given, TrainConfig(local_epochs=2), 5, "site", rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.begin(3)
    steps = zip(*(rank.round() for rank in ranks), strict=True)
    whole = [torch.cat([share[0][0][0] for share in step]) for step in steps]
    assert all(torch.equal(a, b) for a, b in zip(alone, whole, strict=True))


def test_the_next_steps_are_read_while_one_is_computed():
    data = Counted()
    dealt = Dealt(data, TrainConfig(batch_size=40), 5, "site", readers=1)
    dealt.take()
    for _ in range(2000):
        if int(data.reads.sum()) >= 120:
            return
        time.sleep(0.005)
    pytest.fail("nobody read ahead")


def test_an_example_draws_the_same_in_any_world_with_any_number_of_readers():
    def pass_of(data, ranks, readers):
        batches, found = [Dealt(data, TrainConfig(batch_size=6), 5, "site", r, ranks, readers=readers)
                          for r in range(ranks)], {}  # fmt: skip
        while batches[0].epoch < 1:
            for rank in batches:
                for batch, _ in rank.take():
                    found |= {} if batch is None else {int(i): float(drawn) for i, drawn in batch}
        return found

    expected = pass_of(Noisy(), 1, 1)
    assert len({*expected.values()}) == 20
    for ranks, readers in ((3, 2), (2, 1), (1, 0), (2, 0)):
        assert pass_of(Noisy(), ranks, readers) == expected


def test_what_fails_in_a_reader_is_raised_where_its_step_is():
    class Torn(Noisy):
        def __getitem__(self, i):
            if i == 7:
                raise KeyError("no such patient")
            return super().__getitem__(i)

    dealt = Dealt(Torn(), TrainConfig(batch_size=6), 5, "site", readers=1)
    with pytest.raises(KeyError):
        [dealt.take() for _ in range(4)]


class Part(NamedTuple):
    pixels: torch.Tensor
    names: list


TENSORS = {
    "plain": torch.arange(6.0).view(2, 3),
    "a number": torch.tensor(3),
    "bfloat16": torch.randn(4, dtype=torch.bfloat16),
    "booleans": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "a conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "a large conjugate": torch.randn(SMALL, dtype=torch.complex64).conj(),
    "a negated one": torch.randn(3, dtype=torch.complex64).conj().imag,
    "every second": torch.arange(10)[::2],
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "empty": torch.empty(0, 4),
    "sparse": torch.eye(3).to_sparse(),
    "large": torch.randn(SMALL),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", TENSORS)
def test_a_batch_arrives_from_its_reader_as_it_was(name):
    tensor = TENSORS[name]
    sent = {"x": Part(tensor, ["ä", b"\0"]), "y": [1.5, None, tensor]}
    got = pickle.loads(ForkingPickler.dumps(sendable(sent)))
    arrived = got["y"].pop()
    assert torch.equal(got["x"].pixels.to_dense(), arrived.to_dense())
    assert got == {"x": Part(got["x"].pixels, ["ä", b"\0"]), "y": [1.5, None]}
    assert type(got["x"]) is Part
    assert (arrived.dtype, arrived.shape, arrived.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    if name not in ("sparse", "a negated one"):
        assert arrived.stride() == tensor.stride()
    assert torch.equal(arrived.to_dense(), tensor.to_dense())


def test_a_packed_sequence_arrives_from_its_reader_as_it_was():
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    got = pickle.loads(ForkingPickler.dumps(sendable({"x": packed})))["x"]
    assert type(got) is type(packed)
    assert torch.equal(got.data, packed.data)


def test_small_tensors_arrive_by_their_bytes_and_large_ones_in_shared_memory():
    class Sized(Noisy):
        def __getitem__(self, i):
            return torch.zeros(8), torch.zeros(SMALL)

    dealt = Dealt(Sized(), TrainConfig(batch_size=6), 5, "site", readers=1)
    ((small, large), _), *_ = dealt.take()
    assert (small.is_shared(), large.is_shared()) == (False, True)
    small += 1  # and who trains may write into both
    large += 1


def test_a_batch_that_no_process_can_hand_over_is_an_error_and_no_endless_wait():
    class Bound(Noisy):
        def collate(self, rows):
            return torch.stack(rows), lambda: rows

    data = Bound()
    dealt = Dealt(data, TrainConfig(batch_size=6), 5, "site", readers=1, collate=data.collate)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        dealt.take()


def test_an_evaluation_draws_the_same_on_any_number_of_ranks_with_any_number_of_readers():
    def drawn(ranks, readers):
        parts = [
            batch
            for rank in range(ranks)
            for batch, counts in read_once(
                examples_of(Noisy()), 6, 5, rank, ranks, readers, torch.device("cpu")
            )
            if counts
        ]
        return {int(i): float(each) for i, each in torch.cat(parts)}

    expected = drawn(1, 0)
    assert len(expected) == 20
    for ranks, readers in ((2, 0), (3, 0), (1, 1), (2, 1)):
        assert drawn(ranks, readers) == expected
