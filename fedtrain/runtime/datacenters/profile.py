"""What a rank's steps spend their time on, as a trace that ui.perfetto.dev and chrome://tracing show.

On a GPU also what has its memory, as a snapshot for pytorch.org/memory_viz.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from torch.profiler import profile, schedule

from ...training import compat
from ...training.mesh import Mesh

ALLOCATIONS = 100_000  # the newest, and frees, that a snapshot has
WARM_UP = 3  # steps that are not recorded, in which memory is taken and kernels are chosen


class Profile:
    """`with Profile(...) as found: ... found.step()` after each step; the file is there after the last one
    that is recorded, or at the end of a run that takes fewer."""

    def __init__(self, steps: int, folder: Path, mesh: Mesh) -> None:
        """`folder`: of the run. `steps`: that are recorded, after WARM_UP others of this process."""
        self._gpu = mesh.device.type == "cuda"
        self.file = folder / "profile" / f"rank-{mesh.rank:05d}.json.gz"
        plan = schedule(wait=0, warmup=WARM_UP, active=steps, repeat=1)
        self._profiler: Any = profile(schedule=plan, on_trace_ready=self._write, profile_memory=True)

    def __enter__(self) -> Profile:
        self._profiler.start()
        if self._gpu:  # of all steps, for what has the memory was mostly taken by the first
            compat.record_memory_history(max_entries=ALLOCATIONS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profiler.stop()

    def step(self) -> None:
        """A step has ended."""
        self._profiler.step()

    def _write(self, found: Any) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(self.file))
        if self._gpu:
            snapshot = self.file.with_name(
                self.file.name.replace("rank", "memory").replace("json.gz", "pickle")
            )
            compat.dump_snapshot(str(snapshot))
            compat.record_memory_history(enabled=None)
