"""A run in a notebook, as it happens: a bar, the newest numbers, and a curve for each metric."""

from __future__ import annotations

import sys
import time
from html import escape
from importlib import import_module
from typing import Any

from ..events import Event
from ..fairness import averaged
from .board import Board
from .live import Screen, number

WIDTH, HEIGHT = 260, 90  # of a curve, in pixels
REFRESH_S = 0.25  # between two pictures of a run that goes on


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows HTML."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class Notebook(Screen):
    """The output of a cell, drawn again as events come."""

    def __init__(self) -> None:
        display: Any = import_module("IPython.display").display
        self._board, self._drawn = Board(), 0.0
        self._cell = display(self, display_id=True)

    def __call__(self, event: Event) -> None:
        self._board.add(event)
        if time.monotonic() >= self._drawn + REFRESH_S:
            self._draw()

    def __exit__(self, *_: object) -> None:
        self._draw()

    def _draw(self) -> None:
        self._cell.update(self)
        self._drawn = time.monotonic()

    def _repr_html_(self) -> str:
        return picture(self._board)

    def __repr__(self) -> str:
        return f"{self._board.run} {progress(self._board)}".strip()


def progress(board: Board) -> str:
    """How far a run is, and its newest metrics, as one line."""
    if not board.run:
        return "starting"
    numbers = "".join(f" · {name} {number(board.metrics[name])}" for name in averaged(board.metrics))
    return f"{board.noun} {board.round} of {board.rounds}{numbers}{' · finished' if board.finished else ''}"


def picture(board: Board) -> str:
    """HTML: how far a run is, and how its metrics went."""
    if not board.run:
        return "<p>starting</p>"
    names = averaged(board.metrics)
    rounds = [row for row in board.history.values() if row.metrics]
    curves = "".join(
        curve(name, [(row.round, value) for row in rounds if (value := row.metrics.get(name)) is not None])
        for name in names
    )
    return (
        f"<p><b>{escape(board.run)}</b> <progress value='{board.round}' max='{board.rounds}'></progress> "
        f"{escape(progress(board))}</p>{curves}"
    )


def curve(name: str, points: list[tuple[int, float]]) -> str:
    """A metric by round, as SVG; nothing of one point."""
    if len(points) < 2:
        return ""
    rounds, values = zip(*points, strict=True)
    low, span = min(values), (max(values) - min(values)) or 1.0
    first, long = rounds[0], rounds[-1] - rounds[0]
    line = " ".join(
        f"{(r - first) / long * WIDTH:.1f},{HEIGHT - (v - low) / span * HEIGHT:.1f}" for r, v in points
    )
    return (
        f"<svg width='{WIDTH + 20}' height='{HEIGHT + 40}' viewBox='-10 -20 {WIDTH + 20} {HEIGHT + 40}'>"
        f"<text y='-6' font-size='11' fill='currentColor'>{escape(name)} {number(values[-1])} "
        f"(from {number(low)} to {number(max(values))})</text>"
        f"<polyline points='{line}' fill='none' stroke='#1f77b4' stroke-width='1.5'/></svg>"
    )
