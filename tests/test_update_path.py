"""How far an update travels: the files of the package that a round under secure aggregation enters, and the
pairs of files that call each other both ways. Counted are calls that happen in every one of three rounds of
the project that `fedtrain new` makes, with its sites and its aggregator in this process. A call through the
standard library counts as one by the file that made it."""

import asyncio
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fedtrain
from fedtrain.runtime.sites import site
from fedtrain.runtime.star import aggregator
from tests.allowed import allowed
from tests.inline import SITES, project

ROOT = f"{Path(fedtrain.__file__).parent}/"
LEFT_OUT = ("config/", "errors.py", "pki/", "tracking/", "events.py")
ROUNDS = 3
FILES = 70  # 33 before sites had memory, limits and compression, and before long files were split;
# 48 before strategies could have sites send more than a delta, 59 before a site's gate, guard and audit,
# 64 before a guard of the model, limits of the port and redo logs, 68 before a round kept what its
# noise cost, 69 before pins counted at once
BOTH_WAYS = 5  # it was 14


class Calls:
    """What calls what, by round."""

    def __init__(self) -> None:
        self.round = 0
        self._names: dict[str, str] = {}
        self._rounds: defaultdict[tuple[str, str], set[int]] = defaultdict(set)

    def trace(self, frame: FrameType, event: str, _: Any) -> None:
        """For sys.setprofile."""
        if event != "call" or not (to := self._file(frame)):
            return
        caller = frame.f_back
        while caller is not None and not self._file(caller):
            caller = caller.f_back
        self._rounds[self._file(caller) if caller else "", to].add(self.round)

    def _file(self, frame: FrameType) -> str:
        """The path inside the package; "" elsewhere."""
        name = frame.f_code.co_filename
        if name not in self._names:
            inside = name.startswith(ROOT) and not name.startswith(f"{ROOT}templates/")
            self._names[name] = name.removeprefix(ROOT) if inside else ""
        return self._names[name]

    def each_round(self) -> set[tuple[str, str]]:
        """(caller, called) of the calls that happen in every round."""
        always = {edge for edge, rounds in self._rounds.items() if rounds >= set(range(1, ROUNDS + 1))}
        return {edge for edge in always if not any(file.startswith(LEFT_OUT) for file in edge)}


@pytest.mark.usefixtures("inline")
def test_a_masked_update_enters_few_files_and_few_of_them_call_each_other_both_ways(tmp_path):
    task = (Path(fedtrain.__file__).parent / "templates/tabular/task.py").read_text()
    config = project(
        tmp_path,
        task,
        run={"task": "task:Task", "rounds": ROUNDS},
        train={"optimizer": "adam"},
        secagg={"verify": False},
    )  # by which a site makes each model itself, in four files more
    calls = Calls()

    def emit(event: Any) -> None:
        if type(event).__name__ == "RoundStarted":
            calls.round = event.round

    async def federation() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(aggregator.serve(config, emit=emit))
            for name in SITES:
                group.create_task(site.run(allowed(config, name), name, emit=lambda event: None))

    threading.setprofile(calls.trace)
    sys.setprofile(calls.trace)
    try:
        asyncio.run(federation())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    edges = calls.each_round()
    files = {file for edge in edges for file in edge if file}
    both_ways = sorted({tuple(sorted(e)) for e in edges if e[0] != e[1] and e[::-1] in edges})
    print(f"{len(files)} files:", *sorted(files), sep="\n  ")
    print(f"{len(both_ways)} pairs call each other:", *(" <-> ".join(pair) for pair in both_ways), sep="\n  ")
    assert config.secagg.enabled
    assert {
        "runtime/sites/secure_site.py",
        "secagg/server.py",
        "runtime/trainers/workbench.py",
        "store/runs.py",
    } <= files
    assert len(files) <= FILES, sorted(files)
    assert len(both_ways) <= BOTH_WAYS, both_ways
