"""Slow tests start in the order of what they take, the longest first: so at the end all cores have work.
Those of a file whose fixtures or imports cost most of their time run in one worker, which has them once.
Tests of GPUs that are not here are skipped. And what tests of several files share.
"""

import functools
import gc
import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import settings

import fedtrain.transport  # noqa: F401  before gRPC, which it tells what forks are to find

# How long an example takes is the machine's affair. A test that wants more examples says so.
settings.register_profile("machine", deadline=None, max_examples=50)
settings.load_profile("machine")
torch.set_num_threads(1)  # on busy cores a second one waits, and spins, most of the time

MEMORY = Path("/dev/shm")
NEEDED = 8 << 30  # bytes: the folders of all tests that run at a time take less than 2 GiB


def pytest_configure(config):
    """The folders of tests are in memory, where there is enough of it: every second a worker makes a hundred
    fsyncs, each of which is milliseconds on a disk. Programs run from them, so not where that is forbidden.
    """
    if "PYTEST_DEBUG_TEMPROOT" in os.environ or not os.access(MEMORY, os.W_OK):
        return
    about = os.statvfs(MEMORY)
    free = min(about.f_bavail * about.f_frsize, psutil.virtual_memory().available)
    if free >= NEEDED and not about.f_flag & os.ST_NOEXEC:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(MEMORY)


TOGETHER = {
    f"tests/{name}.py"
    for name in (
        "equivalence/test_datacenter", "equivalence/test_drawing", "equivalence/test_drawing_of_four",
        "equivalence/test_islands_are_sites", "equivalence/test_site_of_ranks",
        "equivalence/test_transformers", "test_dashboard_browser", "test_pages_site", "test_portable",
    )
}  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of slow tests; xdist's own groups are not seen with pytest 9.2, in which _nodeid is no more."""
    if config.option.markexpr != "slow":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if file in TOGETHER else nodeid

    return Together(config, log)


def pytest_collection(session):
    """Each worker imports its share of the files first, and finds the rest with their asserts rewritten: that
    is ten seconds of work in a fresh clone, which each worker would do otherwise.
    """
    number, workers = (os.environ.get(f"PYTEST_XDIST_WORKER{end}") for end in ("", "_COUNT"))
    if number is None:
        return
    root = session.config.rootpath
    files = sorted((root / "tests").rglob("test_*.py"))
    for file in files[int(number.removeprefix("gw")) :: int(workers)]:
        if not pytest_ignore_collect(file, session.config):
            with suppress(Exception, pytest.skip.Exception):  # collecting the file reports it
                import_module(".".join(file.relative_to(root).with_suffix("").parts))


def pytest_ignore_collect(collection_path, config):
    """A file that has no slow test, when these are asked for: it need not be imported."""
    if config.option.markexpr == "slow" and collection_path.suffix == ".py":
        return "slow" not in text_of(collection_path) or None
    return None


def pytest_itemcollected(item):
    """A slow test in a file that does not say so would be in no part of the tests."""
    if item.get_closest_marker("slow") and "slow" not in text_of(item.path):
        raise pytest.UsageError(f"{item.nodeid} is slow: name the mark in its own file")


@functools.cache
def text_of(path):
    return path.read_text()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    items.sort(key=order, reverse=True)
    for name, least in (("gpu", 1), ("gpu2", 2)):
        for item in items:
            if item.get_closest_marker(name) and (here := torch.cuda.device_count()) < least:
                item.add_marker(pytest.mark.skip(reason=f"needs {least} GPU, {here} are here"))
    if "soak" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


def pytest_collection_finish():
    """What is there stays: the garbage collector need not look through 300,000 objects again and again."""
    gc.collect()
    gc.freeze()


def order(item):
    """The greater, the sooner: last are the long lists, of which `make soak` tries what time is left, the one
    with the largest part of it first."""
    soak = item.get_closest_marker("soak")
    return (False, soak.kwargs["part"]) if soak is not None and soak.kwargs else (True, seconds(item))


def seconds(item):
    """What its mark says, as in `slow(30)`; `slow` alone is about 10, and a fast test comes after them."""
    mark = item.get_closest_marker("slow")
    return 0 if mark is None else mark.args[0] if mark.args else 10


def pytest_terminal_summary(terminalreporter):
    """What of the long lists `make soak` has tried."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for what, told in getattr(report, "user_properties", ()):
            if what == "tried":
                terminalreporter.write_line(f"{told} tried: {report.nodeid}")


@pytest.fixture
def inline(monkeypatch):
    """Trainers are in this process; the list of them, in the order in which they were started."""
    from functools import partial

    from fedtrain.runtime.trainers.trainer import Trainer
    from tests.inline import start

    started = []
    monkeypatch.setattr(Trainer, "start", partial(start, started))
    return started


@pytest.fixture
def forked(monkeypatch):
    """Trainers are processes that are forked from one that has torch loaded."""
    from tests.forked import fork_trainers

    fork_trainers(monkeypatch, most=1)
