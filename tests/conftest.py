"""Slow tests start in the order of what they take, the longest first: so at the end all cores have work.

And what tests of several files share.
"""

import pytest
from hypothesis import settings

settings.register_profile("machine", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("machine")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=seconds, reverse=True)


def seconds(item):
    """What its mark says, as in `slow(30)`; `slow` alone is about 10, and a fast test comes after them."""
    mark = item.get_closest_marker("slow")
    return 0 if mark is None else mark.args[0] if mark.args else 10


@pytest.fixture
def inline(monkeypatch):
    """Trainers are in this process; the list of them, in the order in which they were started."""
    from functools import partial

    from fedtrain.runtime.trainers.trainer import Trainer
    from tests.inline import start

    started = []
    monkeypatch.setattr(Trainer, "start", partial(start, started))
    return started
