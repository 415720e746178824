"""Slow tests start in the order of what they take, the longest first: so at the end all cores have work.
Tests of GPUs that are not here are skipped. And what tests of several files share.
"""

import pytest
import torch
from hypothesis import settings

import fedtrain.transport  # noqa: F401  before gRPC, which it tells what forks are to find

settings.register_profile("machine", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("machine")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    items.sort(key=seconds, reverse=True)
    for name, least in (("gpu", 1), ("gpu2", 2)):
        for item in items:
            if item.get_closest_marker(name) and (here := torch.cuda.device_count()) < least:
                item.add_marker(pytest.mark.skip(reason=f"needs {least} GPU, {here} are here"))
    if "soak" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


def seconds(item):
    """What its mark says, as in `slow(30)`; `slow` alone is about 10, and a fast test comes after them."""
    mark = item.get_closest_marker("slow")
    return 0 if mark is None else mark.args[0] if mark.args else 10


def pytest_terminal_summary(terminalreporter):
    """What of the long lists `make soak` has tried."""
    for report in terminalreporter.getreports(""):
        for what, told in getattr(report, "user_properties", ()) if report.when == "call" else ():
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
