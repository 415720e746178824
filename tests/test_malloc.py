"""The memory of models that were freed comes again, and never while something still looks at it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from fedtrain import arena, malloc
from fedtrain.arena import Arena, ArenaFile
from fedtrain.malloc import MMAP_BYTES, Blocks
from fedtrain.schema import Schema, TensorSpec

PAGES = Path("/sys/kernel/mm/transparent_hugepage")


@pytest.fixture
def blocks():
    made = Blocks()
    made.most = 2
    return made


def test_a_freed_block_is_the_next_one_of_its_size(blocks):
    first = blocks.tensor(MMAP_BYTES)
    where = first.data_ptr()
    first.fill_(7)
    del first
    assert blocks.tensor(MMAP_BYTES + 4096).data_ptr() != where
    again = blocks.tensor(MMAP_BYTES)
    assert (again.data_ptr(), again.numel(), again.dtype) == (where, MMAP_BYTES, torch.uint8)


@pytest.mark.parametrize(
    "look",
    [lambda t: t[10:20], lambda t: t.view(torch.float32), lambda t: t.numpy(), lambda t: t.numpy().data[5:]],
    ids=["slice", "dtype", "numpy", "memoryview"],
)
def test_a_block_is_not_given_again_while_anything_looks_at_it(blocks, look):
    first = blocks.tensor(MMAP_BYTES).fill_(7)
    where, view = first.data_ptr(), look(first)
    del first
    other = blocks.tensor(MMAP_BYTES).fill_(9)
    assert other.data_ptr() != where
    seven = look(torch.full((MMAP_BYTES,), 7, dtype=torch.uint8))
    assert view[0] == seven[0]
    assert view[-1] == seven[-1]
    del view
    assert blocks.tensor(MMAP_BYTES).data_ptr() == where


def test_no_more_blocks_are_kept_than_said_and_small_ones_are_none(blocks):
    held = [blocks.tensor(MMAP_BYTES) for _ in range(5)]
    del held
    assert len(blocks._free) == 2
    small = blocks.tensor(MMAP_BYTES - 1)
    del small
    assert len(blocks._free) == 2
    blocks.most = 0
    assert blocks.tensor(MMAP_BYTES).numel() == MMAP_BYTES
    assert len(blocks._free) == 2, "nobody asked for one"


def test_threads_never_get_the_same_block(blocks):
    wrong = []

    def work(value):
        for _ in range(50):
            mine = blocks.tensor(MMAP_BYTES)
            mine[::65536] = value
            if not bool((mine[::65536] == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_arenas_in_recycled_memory_are_as_in_new(tmp_path, monkeypatch, blocks):
    monkeypatch.setattr(arena, "blocks", blocks)
    schema = Schema((TensorSpec("w", (MMAP_BYTES,), "float32", True), TensorSpec("n", (3,), "int64", False)))
    for made in (Arena.zeros, Arena.empty):
        blocks.tensor(schema.nbytes).fill_(255)
        fresh = made(schema)
        fresh.flat(schema.sections[0]).fill_(1.0)
        fresh.flat(schema.sections[1]).fill_(2)
        (tmp_path / "model").write_bytes(fresh.payload)
        digest = fresh.digest
        del fresh
        loaded = ArenaFile(schema, tmp_path / "model").load()
        assert loaded.digest == digest
        del loaded
    blocks.tensor(schema.nbytes).fill_(255)
    assert not bool(Arena.zeros(schema).data.any())


def test_who_keeps_less_takes_nothing_from_who_keeps_more(monkeypatch):
    monkeypatch.setattr(malloc, "blocks", made := Blocks())
    for models, most in ((0, 0), (2, 2), (0, 2)):
        malloc.keep_freed(models)
        assert made.most == most


LARGE = """
import torch
from fedtrain.runtime.datacenters import datacenter
from fedtrain.training.mesh import joined

with joined(None, "cpu"):
    kept = torch.ones(16 << 20)
with open("/proc/self/smaps") as lines:
    print(any("VmFlags" in line and " hg" in line for line in lines))
"""


@pytest.mark.slow(3)
@pytest.mark.skipif(not PAGES.exists(), reason="this system has no large pages")
def test_a_ranks_large_tensors_lie_in_large_pages():
    environment = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
    found = subprocess.run(
        [sys.executable, "-c", LARGE], env=environment, capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    assert found.stdout.strip() == "True", "the kernel was asked (MADV_HUGEPAGE) for the tensor's memory"
