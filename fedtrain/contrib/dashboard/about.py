"""What a page says of a run beside its events: its settings, its graph, its model's card, its machine."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import FedtrainError
from ...messages import SiteId
from ...topology import own_in, parse
from ...tracking.runs import settings_of
from .history import History

MOST_PEERS = 200  # whose graph is drawn
CARD_BYTES = 64 * 1024  # of a model's card that is shown
GPU_FIELDS = "utilization.gpu,memory.used,memory.total"


def about(folder: Path, history: History) -> dict[str, Any]:
    """Of a run directory; without what can't be read just now."""
    settings = _settings(folder)
    return {
        "run": history.name,
        "settings": settings,
        "card": _card(folder),
        "members": list(history.members) if len(history.members) <= MOST_PEERS else [],
        "edges": _edges(settings, history.members, history.board),
    }


def _settings(folder: Path) -> Mapping[str, str]:
    try:
        return settings_of(folder)
    except (FedtrainError, OSError):  # the run is being made anew
        return {}


def _card(folder: Path) -> str:
    try:
        with (folder / "model" / "MODEL_CARD.md").open("rb") as f:
            return f.read(CARD_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _edges(settings: Mapping[str, str], members: Sequence[SiteId], board: Any) -> list[tuple[int, int]]:
    """Who hears whom in the newest round, by places in `members`; [] of a run that is no gossip."""
    if "gossip.topology" not in settings or not 2 <= len(members) <= MOST_PEERS:
        return []
    try:
        kind, weights, seed = (
            ast.literal_eval(settings.get(key, default))
            for key, default in (("gossip.topology", ""), ("gossip.weights", "''"), ("run.seed", "0"))
        )
        if own_in(kind):  # a run's settings have no code loaded here
            return []
        ordered = sorted(members)
        graph = parse(kind, weights).near(ordered, seed)[0]
        mixing = graph.round(ordered, max(0, (board.under_way or board.round) - 1), seed)
    except (FedtrainError, OSError, ValueError, SyntaxError):  # a graph whose file is elsewhere
        return []
    place = {name: i for i, name in enumerate(members)}
    return [(place[ordered[j]], place[ordered[i]]) for j, i, _ in mixing.edges if i != j]


class Machine:
    """How busy this machine is: that of a run that goes on, as run directories lie on a local disk."""

    def __init__(self) -> None:
        self._before = self._ticks()
        self._smi = shutil.which("nvidia-smi")
        self._gpus: list[dict[str, float]] = []
        self._asked = 0.0

    def now(self) -> dict[str, Any]:
        """Shares of 0 to 1, and bytes, since the last call."""
        before, self._before = self._before, self._ticks()
        busy, total = (b - a for a, b in zip(before, self._before, strict=True))
        memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        used, whole = (int(memory[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
        return {
            "cpu": round(busy / total, 3) if total > 0 else 0.0, "cores": os.cpu_count(),
            "memory": whole - used, "memoryTotal": whole, "gpus": self._of_gpus(),
        }  # fmt: skip

    def _of_gpus(self) -> list[dict[str, float]]:
        if self._smi is not None and time.monotonic() > self._asked + 5:
            self._asked = time.monotonic()
            asked = [self._smi, f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]
            try:
                said = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True).stdout
                rows = [[float(cell) for cell in row.split(",")] for row in said.splitlines()]
            except (OSError, ValueError, subprocess.SubprocessError):
                self._smi, rows = None, []
            mib = 1024**2
            self._gpus = [{"use": u / 100, "memory": m * mib, "memoryTotal": t * mib} for u, m, t in rows]
        return self._gpus

    @staticmethod
    def _ticks() -> tuple[int, int]:
        """(busy, all) of all cores since the machine started."""
        words = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(words) - words[3] - words[4], sum(words)
