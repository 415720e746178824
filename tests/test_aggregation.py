"""The weighted mean: the same bits from memory and from files, in whatever order updates arrive."""

import asyncio
import resource
import weakref
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain import schema as schema_module
from fedtrain.aggregation import Mean, WeightedMean, aggregate
from fedtrain.aggregation import mean as mean_module
from fedtrain.arena import Arena, ArenaFile, Slab
from fedtrain.errors import RoundError
from fedtrain.exchange import in_order
from fedtrain.messages import Update
from fedtrain.schema import Schema, TensorSpec

SCHEMA = Schema(
    (
        TensorSpec("w", (37, 11), "float32", True),
        TensorSpec("double", (5,), "float64", True),
        TensorSpec("half", (9,), "bfloat16", True),
        TensorSpec("count", (3,), "int64", False),
        TensorSpec("mask", (4,), "bool", False),
    )
)
WEIGHTS = [3.0, 17.0, 0.1, 250.0, 1e-3]


def some_updates(count=5, schema=SCHEMA):
    made = []
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        delta = Arena.zeros(schema)
        for section in schema.sections:
            flat = delta.flat(section)
            if section.dtype == "int64":
                flat.copy_(torch.randint(-9, 9, flat.shape, generator=generator))
            elif section.dtype != "bool":
                flat.copy_(
                    torch.randn(flat.shape, generator=generator, dtype=torch.float64) * 10.0 ** (i - 2)
                )
        made.append(Update(delta=delta, num_examples=WEIGHTS[i % len(WEIGHTS)]))
    return made


def in_files(updates, folder):
    filed = []
    for i, u in enumerate(updates):
        (folder / str(i)).write_bytes(u.delta.payload)
        filed.append(Update(delta=ArenaFile(u.delta.schema, folder / str(i)), num_examples=u.num_examples))
    return filed


def folded(updates):
    mean = WeightedMean(updates[0].delta.schema)
    for u in updates:
        mean.add(u)
    return mean.result()


def test_the_mean_is_the_exact_one_rounded():
    updates = some_updates()
    mean, weights = folded(updates), [Fraction(u.num_examples) for u in updates]
    for section, rtol in zip(SCHEMA.sections[:2], (1e-7, 1e-12), strict=True):
        columns = zip(*(u.delta.flat(section).tolist() for u in updates), strict=True)
        exact = [
            float(sum(w * Fraction(x) for w, x in zip(weights, column, strict=True)) / sum(weights))
            for column in columns
        ]
        assert mean.flat(section).tolist() == pytest.approx(exact, rel=rtol, abs=0)


@settings(max_examples=25, deadline=None)
@given(arrival=st.permutations(range(5)))
def test_the_order_of_arrival_changes_no_bit(arrival):
    sites, updates = [f"site-{i}" for i in range(5)], some_updates()

    async def arrive():
        for i in arrival:
            yield sites[i], updates[i]

    async def fold():
        mean = WeightedMean(SCHEMA)
        async for _, reply in in_order(arrive(), sites):
            mean.add(reply)
        return mean.result()

    assert asyncio.run(fold()).digest == folded(updates).digest


@pytest.mark.parametrize("size", [7, 64, 1 << 18])
def test_files_give_the_bits_that_memory_gives_whatever_the_chunks(size, tmp_path, monkeypatch):
    updates = some_updates()
    expected = folded(updates)
    monkeypatch.setattr(mean_module, "chunks", lambda section: schema_module.chunks(section, size))
    assert aggregate(Mean(), SCHEMA, in_files(updates, tmp_path)).digest == expected.digest
    assert folded(updates).digest == expected.digest


@pytest.mark.parametrize("products", [1, 1000, 1 << 17])
@pytest.mark.parametrize("missing", [[], [0], [4], [1, 2], [0, 1, 2, 3, 4]])
def test_rows_of_slabs_give_the_bits_of_separate_arenas_whichever_are_missing(missing, products, monkeypatch):
    monkeypatch.setattr(mean_module, "PRODUCTS", products)
    alone = [u for i, u in enumerate(some_updates(11)) if i not in missing]
    data = torch.stack([u.delta.data for u in some_updates(11)])
    slabs = [*Slab(SCHEMA, data[:5]).arenas(), *Slab(SCHEMA, data[5:10]).arenas(), Arena(SCHEMA, data[10])]
    rows = [
        Update(delta=delta, num_examples=WEIGHTS[i % len(WEIGHTS)])
        for i, delta in enumerate(slabs)
        if i not in missing
    ]
    assert folded(rows).digest == folded(alone).digest
    assert folded(rows[:-1]).digest == folded(alone[:-1]).digest
    assert folded(rows[:-2]).digest == folded(alone[:-2]).digest  # the last row never comes


def test_a_slab_is_let_go_when_its_last_row_is_folded():
    slab = Slab(SCHEMA, torch.ones(3, SCHEMA.nbytes, dtype=torch.uint8))
    gone, mean = weakref.ref(slab), WeightedMean(SCHEMA)
    rows = slab.arenas()
    del slab
    while rows:
        assert gone() is not None
        mean.add(Update(delta=rows.pop(0), num_examples=1.0))
    assert gone() is None


def test_one_update_is_its_own_mean():
    (only,) = some_updates(1, Schema(tuple(s for s in SCHEMA.tensors if s.dtype != "float64")))
    assert folded([only]).digest == only.delta.digest


def test_more_files_than_a_process_may_open_can_be_folded(tmp_path):
    updates = some_updates(120)
    filed, expected = in_files(updates, tmp_path), folded(updates).digest
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(96, hard), hard))
    try:
        assert aggregate(Mean(), SCHEMA, filed).digest == expected
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_integers_are_rounded_to_the_nearest_and_halves_to_even():
    schema = Schema((TensorSpec("n", (4,), "int64", False),))
    updates = []
    for values in ([1, 3, 2, -1], [0, 0, 0, -2]):
        delta = Arena.zeros(schema)
        delta.views()["n"].copy_(torch.tensor(values))
        updates.append(Update(delta=delta, num_examples=1))
    assert folded(updates).views()["n"].tolist() == [0, 2, 1, -2]


def test_booleans_never_move():
    updates = some_updates()
    for u in updates:
        u.delta.views()["mask"].fill_(True)
    assert not folded(updates).views()["mask"].any()


@pytest.mark.parametrize("combine", [folded, lambda updates: aggregate(Mean(), SCHEMA, updates)])
def test_updates_without_weight_have_no_mean(combine):
    nothing = [Update(delta=u.delta, num_examples=0.0) for u in some_updates(2)]
    with pytest.raises(RoundError, match="2 updates weigh 0 examples together"):
        combine(nothing)
