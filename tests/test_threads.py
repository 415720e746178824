"""Work over threads: each item once, done when the with block ends, and an error reaches the caller."""

import asyncio
import os
import threading
import time

import pytest

from fedtrain.runtime.threads import ThreadPool, while_awaited
from fedtrain.secagg.masking import exhaust
from tests.limits import WAIT_S, bounded


def run(pool, work, items):
    with pool(work, items) as mine:
        exhaust(mine)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("items", [0, 1, 2, 3, 1000])
def test_each_item_is_worked_on_once(threads, items):
    done = []
    run(ThreadPool(threads), done.append, range(items))
    assert sorted(done) == list(range(items))


def test_helpers_work_beside_the_caller():
    """Each item waits for the other, so one thread alone would never end it."""
    both = threading.Barrier(2, timeout=30)
    run(ThreadPool(2), lambda item: both.wait(), range(2))


def test_each_works_on_a_core_of_its_own_and_the_caller_is_free_again():
    cores, both, found = os.sched_getaffinity(0), threading.Barrier(2, timeout=30), []

    def work(item):
        both.wait()
        found.append(os.sched_getaffinity(0))

    run(ThreadPool(2), work, range(2))
    assert os.sched_getaffinity(0) == cores
    assert [len(each) for each in found] == [1, 1]
    assert len(set.union(*found)) == min(2, len(cores))


def test_a_helper_that_does_not_come_is_not_waited_for():
    pool, busy, over = ThreadPool(2), threading.Event(), threading.Event()

    def hold(item):
        busy.set()
        over.wait(30)

    pool._pool.submit(hold, 0)
    assert busy.wait(30)
    done = []
    run(pool, done.append, range(3))
    assert done == [0, 1, 2]
    over.set()


def test_work_may_itself_be_parallel():
    pool, done = ThreadPool(3), []
    run(pool, lambda i: run(pool, lambda j: done.append((i, j)), range(4)), range(4))
    assert sorted(done) == [(i, j) for i in range(4) for j in range(4)]


@pytest.mark.parametrize("wrong", [0, 1, 7])
def test_an_error_is_raised_when_all_is_done(wrong):
    def work(item):
        if item == wrong:
            raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match=f"item {wrong}"):
        run(ThreadPool(3), work, range(8))


def test_work_that_nobody_awaits_any_more_is_told_so():
    begun, ended = threading.Event(), threading.Event()

    def work(tick_s, over):
        begun.set()
        until = time.monotonic() + WAIT_S
        while not over() and time.monotonic() < until:
            time.sleep(tick_s)
        if over():
            ended.set()

    async def main():
        working = asyncio.create_task(while_awaited(work, 0.001))
        await asyncio.to_thread(begun.wait, WAIT_S)
        working.cancel()
        assert await asyncio.to_thread(ended.wait, WAIT_S)

    bounded(main())
    assert bounded(while_awaited(lambda n, over: (n, over()), 3)) == (3, False)
