"""Arenas: a whole model in one block of bytes, and back."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedtrain.arena import Arena, ArenaFile, narrow_into, subtract, widened
from fedtrain.digest import PiecewiseDigest, digest_of, seed_of
from fedtrain.errors import BadUpdate, ConfigError
from fedtrain.messages import averages
from fedtrain.schema import ALIGN, FLOATS, ITEM_BYTES, Schema, TensorSpec, chunks

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.lists(
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES, st.booleans(), st.booleans()), max_size=8
)


class Bag(nn.Module):
    """Parameters and buffers of any dtype and shape, with seeded values."""

    def __init__(self, tensors, seed):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        for i, (dtype, shape, parameter, trained) in enumerate(tensors):
            value = torch.randint(0, 100, shape, generator=g).to(getattr(torch, dtype))
            if dtype in FLOATS and parameter:
                setattr(self, f"t{i}", nn.Parameter(value / 7, requires_grad=trained))
            else:
                self.register_buffer(f"t{i}", value)


@settings(max_examples=80, deadline=None)
@given(TENSORS, st.integers(0, 1000))
def test_every_dtype_and_shape_survives_the_arena_bit_by_bit(tensors, seed):
    model = Bag(tensors, seed)
    views = {}
    for arena in (Arena.of(model), Arena.of(model, frozen=True)):
        views |= Arena.wrap(arena.schema, bytearray(arena.payload)).views()
    state = model.state_dict()
    assert set(views) == set(state)
    for name, tensor in state.items():
        assert views[name].dtype == tensor.dtype
        assert views[name].shape == tensor.shape
        assert torch.equal(views[name], tensor)


@settings(max_examples=40, deadline=None)
@given(TENSORS)
def test_trained_coordinates_come_first_in_their_section_and_sections_are_aligned(tensors):
    arena = Arena.of(Bag(tensors, 0))
    for section in arena.schema.sections:
        assert section.offset % ALIGN == 0
        specs = [s for s in arena.schema.tensors if s.dtype == section.dtype]
        assert [s.trained for s in specs] == sorted((s.trained for s in specs), reverse=True)
        assert section.trained == sum(s.numel for s in specs if s.trained)
        assert arena.flat(section).numel() == section.numel == sum(s.numel for s in specs)


@settings(max_examples=40, deadline=None)
@given(TENSORS)
def test_what_is_trained_and_what_else_moves_are_all_that_a_round_can_change(tensors):
    arena = Arena.of(Bag(tensors, 0))
    for vector in (*arena.trained().values(), *arena.others().values()):
        vector.fill_(3)  # they are views
    for spec in arena.schema.tensors:
        moves = spec.dtype not in {"bool", "uint8"}
        assert bool((arena.views()[spec.name] == 3).all()) or (not moves) or not spec.numel
        assert spec.trained or spec.dtype in arena.others() or not moves or not spec.numel
    assert all(widened(vector).dtype in {torch.float32, torch.float64} for vector in arena.others().values())


def test_what_is_subtracted_and_written_back_is_exact_or_the_nearest_integer():
    start, local = (
        {"w": torch.ones(2), "n": torch.tensor([7, n]), "on": torch.tensor(n > 8)} for n in (8, 9)
    )
    packed, out = Arena.pack(start), Arena.pack(local)
    subtract(Arena.pack(local), packed, out)
    assert {k: v.tolist() for k, v in out.views().items()} == {"w": [0, 0], "n": [0, 1], "on": False}
    narrow_into(counts := torch.zeros(3, dtype=torch.int64), torch.tensor([0.5, 1.5, -0.6]))
    assert counts.tolist() == [0, 2, -1]


@settings(max_examples=20, deadline=None)
@given(TENSORS)
def test_a_file_reads_as_the_arena_that_was_written(tmp_path_factory, tensors):
    arena = Arena.of(Bag(tensors, 0))
    path = tmp_path_factory.mktemp("arena") / "weights"
    path.write_bytes(arena.payload)
    file = ArenaFile(arena.schema, path)
    assert file.digest == arena.digest == file.load().digest
    for section in arena.schema.sections:
        read = [file.chunk(section, start, stop).clone() for start, stop in chunks(section, 5)]
        assert torch.equal(torch.cat(read) if read else arena.flat(section)[:0], arena.flat(section))


def test_threads_read_a_file_at_once_each_into_its_own_room(tmp_path):
    schema = Schema((TensorSpec("v", (1 << 16,), "int32", False),))
    arena = Arena(schema, torch.arange(1 << 16, dtype=torch.int32).view(torch.uint8))
    (tmp_path / "weights").write_bytes(arena.payload)
    file, (section,) = ArenaFile(schema, tmp_path / "weights"), schema.sections

    def read(piece):
        room = bytearray(4 << 10)
        return [bytes(a.span(section, *piece, memoryview(room))) for a in (file, arena)]

    with ThreadPoolExecutor(4) as pool:
        for found, expected in pool.map(read, chunks(section, 1 << 10)):
            assert found == expected


@settings(max_examples=40, deadline=None)
@given(TENSORS)
def test_an_arena_that_is_written_whole_has_no_trace_of_what_was_in_its_memory(tensors):
    arena, empty = Arena.of(Bag(tensors, 3)), torch.empty
    with pytest.MonkeyPatch.context() as patch:
        # fresh memory is mostly zero by itself
        patch.setattr(torch, "empty", lambda *shape, **kw: empty(*shape, **kw).fill_(0xAB))
        written = Arena.empty(arena.schema)
    for section in arena.schema.sections:
        assert (written.flat(section).view(torch.uint8) == 0xAB).all()
        written.flat(section).copy_(arena.flat(section))
    assert torch.equal(written.data, arena.data)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_digest_of_pieces_is_that_of_the_whole_in_whatever_order_they_are_written(threads):
    draw = random.Random(threads)
    for _ in range(50):
        data = bytearray(draw.randbytes(draw.randrange(5000)))
        cuts = sorted({0, len(data), *(draw.randrange(len(data) + 1) for _ in range(20))})
        pieces = list(pairwise(cuts))
        told = draw.sample(pieces, draw.randrange(len(pieces) + 1))  # the rest is digested at the end
        digest = PiecewiseDigest(memoryview(data))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda piece, digest=digest: digest.wrote(*piece), told))
        assert digest.hexdigest() == digest_of(data)


def test_a_digest_of_pieces_is_taken_as_they_are_written():
    data = bytearray(b"first second third")
    digest = PiecewiseDigest(memoryview(data))
    digest.wrote(6, 13)
    digest.wrote(0, 6)
    expected = digest_of(data)
    data[:13] = b"changed after"  # which nobody does; it shows that these were read before
    assert digest.hexdigest() == expected


def test_a_file_that_ends_early_is_refused(tmp_path: Path):
    arena = Arena.of(nn.Linear(40, 40))
    (tmp_path / "short").write_bytes(bytes(arena.payload)[:100])
    with pytest.raises(BadUpdate, match="100 bytes, expected"):
        ArenaFile(arena.schema, tmp_path / "short").load()


def test_a_bound_model_and_its_arena_are_one_memory():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    parameters = list(model.parameters())
    arena = Arena.of(model)
    before = arena.data.clone()
    arena.bind(model)
    assert torch.equal(arena.data, before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    first, last = arena.data.data_ptr(), arena.data.data_ptr() + arena.schema.nbytes
    assert all(first <= t.data_ptr() < last for t in model.state_dict().values())
    with torch.no_grad():
        model[0].bias.fill_(5)
    model(torch.randn(4, 3))
    assert (arena.views()["0.bias"] == 5).all()
    assert arena.views()["1.num_batches_tracked"] == 1


def test_looking_at_foreign_bytes_copies_nothing():
    schema = Schema.of(nn.Linear(3, 2))
    memory = bytearray(schema.nbytes)
    Arena.wrap(schema, memory).views()["bias"].fill_(1.0)
    assert any(memory)


def test_tied_weights_are_in_the_arena_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert [s.name for s in Schema.of(model).tensors] == ["0.weight"]


def test_a_copy_shares_no_memory_and_equal_bytes_have_equal_digests():
    arena = Arena.of(nn.Linear(3, 2))
    copy = arena.load()
    assert copy.digest == arena.digest
    copy.copy_(Arena.zeros(arena.schema))
    assert copy.digest != arena.digest


def test_schemas_agree_by_digest_and_the_first_difference_is_told():
    a, b, c = (Schema.of(m) for m in (nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 4)))
    assert a.difference(b) is None
    assert a.difference(c) == "weight float32[2, 3] here is weight float32[4, 3] there"
    assert a.difference(Schema.of(nn.Linear(3, 2, bias=False))) == "bias float32[2] is missing there"
    assert Schema.of(nn.Linear(3, 2, bias=False)).difference(a) == "bias float32[2] is not in the model here"
    swapped = Schema(a.tensors[::-1])
    assert a.difference(swapped) == "the same tensors stand in another order"


def test_a_dtype_that_cannot_travel_is_refused_by_name():
    model = nn.Module()
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="phase has dtype complex64"):
        Schema.of(model)


@pytest.mark.parametrize(
    "spec", [("w", (2,), "object"), ("w", (-1,), "float32"), ("w", (1,) * 17, "float32")]
)
def test_an_impossible_schema_off_the_wire_is_refused(spec):
    with pytest.raises(BadUpdate):
        Schema((TensorSpec(*spec, True),)).check()


def test_seeds_differ_by_what_they_are_for_and_never_by_the_process():
    assert seed_of(7, 0, "a") == 3353591913381053800
    assert len({seed_of(7, r, s) for r in range(20) for s in "abc"} | {seed_of(7, "1", "2a")}) == 61
    assert 0 <= seed_of() < 2**63


def test_averages_over_sites_weigh_every_example_alike():
    metrics = {
        "b": {"loss": (6.0, 3.0), "auc": (1.0, 1.0)},
        "a": {"loss": (1.0, 1.0)},
        "c": {"loss": (0.0, 0.0)},
    }
    assert averages(metrics) == {"loss": 7 / 4, "auc": 1.0}
