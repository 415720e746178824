"""The weighted mean: the same bits from memory and from files, in whatever order updates arrive."""

import asyncio
import resource
import weakref
from fractions import Fraction
from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedtrain import schema as schema_module
from fedtrain.aggregation import Known, Mean, WeightedMean, aggregate, weight_of
from fedtrain.aggregation import mean as mean_module
from fedtrain.aggregation.mean import BLOCK, BlockSum
from fedtrain.arena import Arena, ArenaFile, Slab, narrow_into
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
                    torch.randn(flat.shape, generator=generator, dtype=torch.float64) * 10.0 ** (i % 11 - 2)
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
def test_s34_the_order_of_arrival_changes_no_bit(arrival):
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


def by_definition(updates, places):
    """The mean as its docstring defines it, with lists of tensors, and its weight."""
    sums, weights = {}, {}
    for place, u in zip(places, updates, strict=True):
        number = place // BLOCK
        weights[number] = weights.get(number, 0.0) + u.num_examples
        for section in SCHEMA.moving:
            product = u.delta.flat(section).double() * u.num_examples
            sums[number, section] = sums.get((number, section), 0.0) + product
    weight, mean = 0.0, Arena.zeros(SCHEMA)
    for number in sorted(weights):
        weight += weights[number]
    for section in SCHEMA.moving:
        total = torch.zeros(section.numel, dtype=torch.float64)
        for number in sorted(weights):
            total += sums[number, section]
        narrow_into(mean.flat(section), total / weight)
    return mean, weight


MANY = some_updates(3 * BLOCK + 5)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), used=st.sets(st.integers(0, len(MANY) - 1), min_size=1))
def test_blocks_and_single_updates_in_any_mixture_give_the_mean_as_it_is_defined(data, used):
    """Blocks are summed by others, or update by update; a site that is lost leaves its place empty."""
    places = sorted(used)
    updates = [MANY[place] for place in places]
    rows = Slab(SCHEMA, torch.stack([u.delta.data for u in MANY])).arenas()
    expected, weight = by_definition(updates, places)
    whole = data.draw(st.sets(st.integers(0, len(MANY) // BLOCK)), "blocks that come as sums")
    mean = WeightedMean(SCHEMA)
    for number, block in groupby(places, lambda place: place // BLOCK):
        several = BlockSum(SCHEMA)
        block = list(block)
        for place in block:
            update = replace(MANY[place], delta=rows[place]) if data.draw(st.booleans()) else MANY[place]
            several.add(update) if number in whole else mean.add(update, place)
        if number in whole:
            mean.add_block(number, several.sum, [MANY[place].num_examples for place in block])
    assert mean.result().digest == expected.digest
    assert mean.weight == weight_of(updates, places) == weight
    assert WeightedMean.combine(SCHEMA, updates, places).digest == expected.digest
    assert Mean().combine(SCHEMA, updates, Known(places=places)).digest == expected.digest
    sums = WeightedMean(SCHEMA)
    for update, place in zip(updates, places, strict=True):
        sums.add(update, place)
    for section, total in sums.sums().items():
        again = Arena.zeros(SCHEMA).flat(section)
        narrow_into(again, total / weight)
        assert torch.equal(again, expected.flat(section))


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
