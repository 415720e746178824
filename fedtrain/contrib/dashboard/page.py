"""The page's files put together: as one file that needs nothing else, and as what the server hands out.

Whatever comes from a run goes in as JSON and is drawn as text (`textContent`), so no name, metric or log
line can become markup; the policy that goes with the page would not run it either.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...tracking.log import read, running
from .about import about
from .history import History

ASSETS = Path(__file__).parent / "assets"
LINES_IN_REPORT = 2_000  # of the log, the newest
CELLS_IN_REPORT = 100_000  # sites times rounds with a timeline of their own
POLICY = "default-src 'none'; script-src {script}; style-src {style}; connect-src {connect}; img-src data:; "
POLICY += "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"


def asset(name: str) -> str:
    """The text of a file of the page."""
    return (ASSETS / name).read_text(encoding="utf-8")


def served() -> str:
    """The page as the server hands it out."""
    return asset("page.html").replace(
        "<!--page-->",
        '<link rel="stylesheet" href="/page.css"><script type="module" src="/page.js"></script>',
    )


def report(folders: Sequence[Path]) -> str:
    """One file that shows these run directories as they are now, and opens without a network."""
    style, script = asset("page.css"), asset("page.js")
    policy = POLICY.format(script=_digest(script), style=_digest(style), connect="'none'")
    data = msgspec.json.encode({"made": time.time(), "messages": [*_messages(folders)]}).decode()
    safe = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    parts = [
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<style>{style}</style>",
        f'<script type="application/json" id="data">{safe}</script>',
        f'<script type="module">{script}</script>',
    ]
    return asset("page.html").replace("<!--page-->", "\n".join(parts))


def _messages(folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for folder in folders:
        alive, history = running(folder), History(folder.name)
        for event in read(folder):
            history.add(event)
        _thin(history)
        yield {"head": history.head(time.time(), state_of(history, alive))}
        yield from history.since(0)
        yield {"about": about(folder, history)}
        lines = history.log.lines[-LINES_IN_REPORT:]
        yield {"run": folder.name, "log": lines, "left": len(history.log.lines) - len(lines)}


def state_of(history: History, alive: bool) -> str:
    """As `Board.state`; `alive`: whether its process was there before its events were read."""
    return history.board.state(alive)


def _thin(history: History) -> None:
    """Leave only every so many rounds the times of their sites, so that the file stays small."""
    rows = history.rounds.rows
    every = 1 + sum(len(row["by"]) for row in rows) // CELLS_IN_REPORT
    for place, row in enumerate(rows):
        if (len(rows) - 1 - place) % every:
            row["by"] = {}
            row.pop("own", None)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
