"""A pytest plugin for benchmarks/gpu.py: one line of JSON for each test, to the file descriptor GPU_TESTS_FD.

It stands in for hypothesis where that is not installed: tests/gpu takes helpers from files whose other tests
need it.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class Anything(ModuleType):
    """A module whose functions take anything and return a decorator that leaves a function as it is."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Whatever()


class Whatever:
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        return self

    def __or__(self, other: object) -> Any:
        return self


if find_spec("hypothesis") is None:
    sys.modules["hypothesis"] = Anything("hypothesis")
    sys.modules["hypothesis.strategies"] = Anything("hypothesis.strategies")


def pytest_runtest_logreport(report: Any) -> None:
    """One line when a test's call has ended, and for what failed or was skipped before it."""
    if report.when == "call" or report.outcome != "passed":
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.outcome == "failed":
            line["said"] = str(report.longrepr)[-1500:]
        elif report.outcome == "skipped":
            line["said"] = str(report.longrepr)[-200:]
        fd = os.environ.get("GPU_TESTS_FD")
        if fd and "PYTEST_XDIST_WORKER" not in os.environ:  # the first process hears of all tests
            os.write(int(fd), f"{json.dumps(line)}\n".encode())
