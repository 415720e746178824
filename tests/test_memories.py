"""What simulated sites keep, in two files for all of them: as files of their own would have it."""

import os
import random
import signal

import pytest
import torch

from fedtrain.arena import Arena
from fedtrain.errors import Forgotten, StoreError
from fedtrain.store.memories import INDEX, STATES, Memories
from fedtrain.store.memory import NEVER, SiteMemory

SITES = [f"site-{i}" for i in range(6)]


def state(value, size=5):
    return Arena.pack({"c": torch.full((size,), float(value)), "n": torch.tensor(value)})


def held(memory, rounds):
    found = {}
    for number in rounds:
        try:
            found[number] = memory.load(number).digest
        except StoreError:
            continue
    return found


@pytest.mark.parametrize("seed", range(6))
def test_sites_have_the_states_that_files_of_their_own_would_have(tmp_path, seed):
    draw, memories = random.Random(seed), Memories(tmp_path / "all")
    files = {site: SiteMemory(tmp_path / "each" / site, durable=False) for site in SITES}
    counted, before = dict.fromkeys(SITES, NEVER), dict.fromkeys(SITES, NEVER)
    for number in range(30):
        if draw.random() < 0.2:
            memories = Memories(tmp_path / "all")
        asked = draw.sample(SITES, 3)
        with memories.together():
            for _attempt in range(draw.choice([1, 1, 2])):
                for site in asked:
                    kept = state(draw.randrange(1000), draw.choice([5, 5, 40]))
                    memories.of(site).keep(number, counted[site], kept)
                    files[site].keep(number, counted[site], kept)
        for site in SITES:
            assert held(memories.of(site), range(30)) == held(files[site], range(30)), site
        for site in draw.sample(asked, 2):
            before[site], counted[site] = counted[site], number
        if draw.random() < 0.1:  # the store goes back a round
            counted = {site: before[site] if at == number else at for site, at in counted.items()}
    assert {path.name for path in (tmp_path / "all").iterdir()} <= {
        INDEX,
        f"{INDEX}-wal",
        f"{INDEX}-shm",
        STATES,
    }


@pytest.mark.slow(2)
def test_ten_thousand_sites_take_two_files_and_no_more_room_than_three_states_each(tmp_path):
    memories, sites = Memories(tmp_path), [f"site-{i:05}" for i in range(10_000)]
    draw, counted = random.Random(0), {}
    for number in range(60):
        with memories.together():
            for site in draw.sample(sites[:300], 100):
                memories.of(site).keep(number, counted.get(site, NEVER), state(number, 250))
                counted[site] = number
    assert len(list(tmp_path.iterdir())) <= 4  # with SQLite's log and its index
    assert (tmp_path / STATES).stat().st_size <= 300 * 3 * 1300
    with memories.together():
        for site in sites:
            memories.of(site).keep(60, counted.get(site, NEVER), state(1, 250))
    assert all(memories.of(site).load(60).views()["n"] == 1 for site in sites[::97])


def test_what_is_kept_together_is_written_before_it_is_much(tmp_path, monkeypatch):
    monkeypatch.setattr("fedtrain.store.memories.TOGETHER_BYTES", 4000)
    memories, others = Memories(tmp_path), Memories(tmp_path)
    with memories.together():
        memories.of("a").keep(0, NEVER, state(0))
        with pytest.raises(Forgotten):
            others.of("a").load(0)
        memories.of("b").keep(0, NEVER, state(1, 1000))
        assert others.of("a").load(0).views()["n"] == 0
        memories.of("c").keep(0, NEVER, state(2))
    assert [int(others.of(site).load(0).views()["n"]) for site in "abc"] == [0, 1, 2]


def test_several_processes_keep_states_at_once(tmp_path):
    def work(worker):
        memories = Memories(tmp_path)
        for number in range(20):
            with memories.together():
                for i in range(8):
                    memories.of(f"{worker}-{i}").keep(number, number - 1, state(100 * worker + number, 400))

    children = []
    for worker in range(3):
        if (pid := os.fork()) == 0:
            try:
                work(worker)
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    memories = Memories(tmp_path)
    for worker in range(3):
        for i in range(8):
            for number in (18, 19):
                assert memories.of(f"{worker}-{i}").load(number).views()["n"] == 100 * worker + number


@pytest.mark.parametrize("call", [3, 7, 12])
@pytest.mark.parametrize("when", ["_place", "pwrite"])
def test_killed_as_a_state_is_written_what_counted_is_still_there(tmp_path, when, call):
    memories = Memories(tmp_path)
    for number in range(4):
        for site in SITES:
            memories.of(site).keep(number, number - 1, state(number, 100))

    def victim():
        mine, calls = Memories(tmp_path), iter(range(1, 100))
        place, real = mine._place, os.pwrite

        def killed(of, *given):
            if next(calls) == call:
                if when == "pwrite":
                    real(given[0], given[1][:50], *given[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return of(*given)

        if when == "pwrite":
            os.pwrite = lambda *given: killed(real, *given)
        else:
            mine._place = lambda *given: killed(place, *given)
        with mine.together():
            for site in SITES * 3:
                mine.of(site).keep(4, 3, state(4, 100))

    if (pid := os.fork()) == 0:
        try:
            victim()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    memories = Memories(tmp_path)
    for site in SITES:
        for number in (2, 3):  # the one that counted, and the one before
            assert memories.of(site).load(number).views()["n"] == number
        memories.of(site).keep(4, 3, state(4, 100))
        assert held(memories.of(site), range(5)).keys() == {2, 3, 4}


@pytest.mark.parametrize("damage", ["flip", "cut", "removed", "older", "index removed", "other site"])
def test_a_damaged_state_is_never_used_and_its_file_is_named(tmp_path, damage):
    memories = Memories(tmp_path)
    for number in range(4):
        older = (tmp_path / STATES).read_bytes()
        for site in SITES:
            memories.of(site).keep(number, number - 1, state(number, 100))
    data, file = (tmp_path / STATES).read_bytes(), tmp_path / STATES
    if damage == "flip":
        file.write_bytes(bytes(byte ^ 1 for byte in data))
    elif damage == "cut":
        file.write_bytes(data[:100])
    elif damage == "removed":
        file.unlink()
    elif damage == "older":
        file.write_bytes(older)
    elif damage == "index removed":
        for path in tmp_path.glob(f"{INDEX}*"):
            path.unlink()
    else:
        memories._db.update("states", {"site": "x"}, "site = ?", (SITES[0],))
        memories._db.update("states", {"site": SITES[0]}, "site = ?", (SITES[-1],))
    named = INDEX if damage == "index removed" else STATES
    with pytest.raises(Forgotten, match=rf"memory/{named}.*Restore the folder"):
        Memories(tmp_path).of(SITES[0]).load(3)
