"""Sharded datasets: the examples that went in, each byte checked, a cache that keeps its bound."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedtrain.errors import ConfigError, StoreError
from fedtrain.training.places import place_of
from fedtrain.training.sampler import Sampler
from fedtrain.training.shards import INDEX, Cache, ShardedDataset, write_shards
from tests.bucket import bucket
from tests.worlds import FORKED


def pair(count=50):
    return torch.arange(count * 3.0).view(count, 3), torch.arange(count)


class Items(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):
        x, y = pair()
        return {"x": x[i], "y": y[i]}


@pytest.mark.parametrize("shard_bytes", [1, 200, 1 << 20])
def test_what_went_in_comes_out_in_its_place(tmp_path, shard_bytes):
    x, y = pair()
    index = write_shards((x, y), tmp_path, shard_bytes=shard_bytes)
    assert len(index.shards) == {1: 50, 200: 5, 1 << 20: 1}[shard_bytes]
    data = ShardedDataset(tmp_path, window=2)
    assert len(data) == 50
    for i in (0, 49, 17, -1, 18):
        assert torch.equal(data[i][0], x[i])
        assert torch.equal(data[i][1], y[i])
    with pytest.raises(IndexError):
        data[50]


def test_examples_are_of_the_kind_that_they_were(tmp_path):
    write_shards(Items(), tmp_path / "dict", shard_bytes=300)
    assert set(ShardedDataset(tmp_path / "dict")[3]) == {"x", "y"}
    write_shards(pair()[0], tmp_path / "tensor")
    assert torch.equal(ShardedDataset(tmp_path / "tensor")[3], pair()[0][3])
    write_shards(TensorDataset(*pair()), tmp_path / "set")
    assert isinstance(ShardedDataset(tmp_path / "set")[3], tuple)
    write_shards(DataLoader(TensorDataset(*pair()), batch_size=7), tmp_path / "batches")
    assert torch.equal(ShardedDataset(tmp_path / "batches")[31][0], pair()[0][31])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_reads_it(tmp_path, workers):
    write_shards(pair(), tmp_path, shard_bytes=100)
    loader = DataLoader(ShardedDataset(tmp_path), batch_size=8, num_workers=workers)
    assert torch.equal(torch.cat([y for _, y in loader]), pair()[1])


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 60), st.integers(40, 400), st.integers(0, 5), st.integers(0, 2**62))
def test_its_order_is_a_permutation_within_windows_of_shards(
    tmp_path_factory, count, shard_bytes, window, seed
):
    folder = tmp_path_factory.mktemp("order")
    index = write_shards(pair(count), folder, shard_bytes=shard_bytes)
    data = ShardedDataset(folder, window=window)
    order = data.order(seed)
    assert sorted(order.tolist()) == list(range(count))
    assert torch.equal(order, data.order(seed))
    shards = [data._at(i)[0] for i in order.tolist()]
    changes = len({(shard, at) for at, shard in enumerate(shards) if at == 0 or shards[at - 1] != shard})
    if window == 1:
        assert changes == len(index.shards), "each shard is read once, in one go"


def test_its_order_is_resumable_in_the_middle_of_an_epoch_in_another_world(tmp_path):
    write_shards(pair(), tmp_path, shard_bytes=100)
    data = ShardedDataset(tmp_path, window=2)
    seen, state = [], None
    for ranks, steps in ((2, 3), (3, 2), (1, 3)):
        samplers = [Sampler(50, 7, seed=1, rank=r, ranks=ranks, order=data.order) for r in range(ranks)]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        for _ in range(steps):
            for sampler in samplers:
                (share,) = sampler.take()
                seen += [int(y) for _, y in data.__getitems__(share.mine.tolist())]
        state = samplers[0].state_dict()
    assert sorted(seen) == list(range(50))


def test_a_damaged_shard_is_named_when_it_is_opened(tmp_path):
    write_shards(pair(), tmp_path, shard_bytes=200)
    file = tmp_path / "00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    data = ShardedDataset(tmp_path)
    assert torch.equal(data[0][1], torch.tensor(0))
    with pytest.raises(StoreError, match=r"00002\.safetensors is damaged"):
        data[25]


def test_without_its_index_it_is_no_dataset(tmp_path):
    write_shards(pair(), tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(StoreError, match=r"has no index\.json"):
        ShardedDataset(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', ""])
def test_a_damaged_index_is_said_to_be(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(StoreError, match="damaged"):
        ShardedDataset(tmp_path)


def test_an_index_cannot_name_a_file_elsewhere(tmp_path):
    index = write_shards(pair(), tmp_path)
    text = (tmp_path / INDEX).read_text().replace(index.shards[0].file, "../../etc/passwd")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(StoreError, match="not beside it"):
        ShardedDataset(tmp_path)


def test_examples_of_other_shapes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="Pad or cut"):
        write_shards([(torch.zeros(3), 1), (torch.zeros(4), 2)], tmp_path)
    with pytest.raises(ConfigError, match="no examples"):
        write_shards([], tmp_path)
    with pytest.raises(ConfigError, match="a tuple of tensors"):
        write_shards([{"text": "a", "x": torch.zeros(2)}], tmp_path)


# --- A bucket, and the cache


@pytest.fixture(scope="module")
def s3():
    with pytest.MonkeyPatch.context() as patch, bucket(patch) as (url, wire):
        write_shards(pair(), f"{url}/pair", shard_bytes=200)  # five of them
        yield f"{url}/pair", wire


def sizes(folder):
    return {p.name: p.stat().st_size for p in folder.iterdir() if p.suffix == "" and p.name != "lock"}


@pytest.mark.slow(4)
def test_a_bucket_is_read_through_a_cache_that_keeps_its_bound(s3, tmp_path):
    url, _ = s3
    largest = max(s.bytes for s in ShardedDataset(url, cache=tmp_path).index.shards)
    limit = 2 * largest
    data = ShardedDataset(url, cache=tmp_path, cache_bytes=limit, window=1)
    order = list(range(50)) * 2
    random.Random(0).shuffle(order)
    for i in order:
        assert int(data[i][1]) == i
        assert sum(sizes(tmp_path).values()) <= limit
    assert len(sizes(tmp_path)) == 2


def test_what_is_cached_needs_no_bucket(s3, tmp_path):
    url, wire = s3
    data = ShardedDataset(url, cache=tmp_path)
    for i in range(50):
        data[i]
    again = ShardedDataset(url, cache=tmp_path)
    wire.cut()
    try:
        assert [int(again[i][1]) for i in range(50)] == list(range(50))
    finally:
        wire.mend()


def test_a_damaged_file_in_the_cache_is_fetched_again(s3, tmp_path):
    url, _ = s3
    data = ShardedDataset(url, cache=tmp_path)
    data[0]
    (name,) = sizes(tmp_path)
    (tmp_path / name).write_bytes(b"x" * sizes(tmp_path)[name])
    assert int(ShardedDataset(url, cache=tmp_path)[0][1]) == 0


def test_a_shard_damaged_in_the_bucket_is_named_and_not_kept(s3, tmp_path):
    url, _ = s3
    data = ShardedDataset(url, cache=tmp_path)
    shard = data.index.shards[0]
    wrong = type(shard)(shard.file, shard.count, shard.bytes, "0" * 64)
    data.index.shards[0] = wrong
    with pytest.raises(StoreError, match=r"00000\.safetensors is damaged"):
        data[0]
    assert sizes(tmp_path) == {}


def test_a_shard_larger_than_the_cache_says_both_numbers(s3, tmp_path):
    url, _ = s3
    with pytest.raises(ConfigError, match=r"may have 100\. Raise cache_bytes"):
        ShardedDataset(url, cache=tmp_path, cache_bytes=100)[0]


def test_what_a_dead_process_left_half_fetched_is_cleared(s3, tmp_path):
    url, _ = s3
    shard = ShardedDataset(url, cache=tmp_path).index.shards[0]
    (tmp_path / ("f" * 64 + ".part")).write_bytes(b"x" * 1000)
    (tmp_path / f"{shard.sha256}.part").write_bytes(b"x")
    data = ShardedDataset(url, cache=tmp_path, cache_bytes=shard.bytes + 10)
    assert int(data[0][1]) == 0
    assert list(tmp_path.glob("*.part")) == []


def read_all(env, url, cache, seed, wrong):
    """In a process of its own: every example, in an order of its own."""
    os.environ.update(env)
    torch.set_num_threads(1)
    data = ShardedDataset(url, cache=cache, cache_bytes=1400, window=1)
    order = list(range(50))
    random.Random(seed).shuffle(order)
    for i in order:
        if int(data[i][1]) != i or sum(sizes_if_there(cache)) > 1400:
            wrong.value += 1


def sizes_if_there(folder):
    for p in folder.iterdir():
        if p.suffix in ("", ".part") and p.name != "lock":
            try:
                yield p.stat().st_size
            except FileNotFoundError:
                continue


@pytest.mark.slow(7)
def test_several_ranks_share_the_cache_and_its_bound(s3, tmp_path):
    url, _ = s3
    wrong, env = FORKED.Value("i", 0), dict(os.environ)
    ranks = [FORKED.Process(target=read_all, args=(env, url, tmp_path, seed, wrong)) for seed in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    assert wrong.value == 0


def test_the_cache_takes_out_what_was_not_used_for_longest(tmp_path, s3):
    url, _ = s3
    data = ShardedDataset(url, cache=tmp_path, window=1)
    a, b, c, *_ = data.index.shards
    cache, place = Cache(tmp_path, a.bytes + b.bytes + 10), place_of(url)
    for at, shard in enumerate((a, b, a)):
        with cache.get(shard, place) as path:
            os.utime(path, ns=(at, at))
    with cache.get(c, place):
        assert set(sizes(tmp_path)) == {a.sha256, c.sha256}


def test_a_file_that_a_rank_is_about_to_open_stays_and_who_needs_its_room_waits(tmp_path, s3):
    url, _ = s3
    a, b, c, *_ = ShardedDataset(url, cache=tmp_path).index.shards
    place, limit = place_of(url), a.bytes + b.bytes + 10
    mine, other, come = Cache(tmp_path, limit), Cache(tmp_path, limit), threading.Event()

    def take():
        with other.get(c, place) as path:
            come.set()
            return path.exists()

    with ThreadPoolExecutor(1) as pool, mine.get(a, place) as first:
        with mine.get(b, place) as second:
            waiting = pool.submit(take)
            assert not come.wait(0.3)
            assert first.exists()
            assert second.exists()
        assert waiting.result(30)
        assert first.exists()
        assert not second.exists()  # used last, but nobody has it now
