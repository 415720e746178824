"""Slow tests start in the order of what they take, the longest first: so at the end all cores have work."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=seconds, reverse=True)


def seconds(item):
    """What its mark says, as in `slow(30)`; `slow` alone is about 10, and a fast test comes after them."""
    mark = item.get_closest_marker("slow")
    return 0 if mark is None else mark.args[0] if mark.args else 10
