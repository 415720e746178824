"""Draws the README's picture of a terminal, docs/images/terminal.svg, from what a real run prints.

    python benchmarks/terminal.py [FILE]

A project that `fedtrain new` made, three sites as processes of their own over mutual TLS and secure
aggregation, and the aggregator on a terminal of 100 columns, whose last screen is drawn.
"""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

OUT = Path(__file__).parents[1] / "docs" / "images" / "terminal.svg"
COLUMNS, LIMIT_S = 100, 120.0
FEDTRAIN = [sys.executable, "-m", "fedtrain"]
SITES = ("site-1", "site-2", "site-3")
DARK = TerminalTheme(  # its own ground: readable on a light page and on a dark one
    (22, 27, 34), (230, 237, 243),
    [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255),
     (57, 197, 207), (177, 186, 196)],
    [(110, 118, 129), (255, 161, 152), (86, 211, 100), (227, 179, 65), (121, 192, 255), (210, 168, 255),
     (86, 212, 221), (240, 246, 252)],
)  # fmt: skip
MOVES = re.compile(r"\x1b\[(\?\d+)?(\d*)([A-Za-ln-z])|\r|\n")


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        clinic = Path(folder) / "clinic"
        quiet(Path(folder), "new", "clinic")
        quiet(clinic, "task", "approve")
        screen = aggregated(clinic)
    rows = ["[bold]$[/] fedtrain aggregator", *screen]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(rows[0])
    for row in rows[1:]:
        console.print(Text.from_ansi(row))
    from rich._export_format import CONSOLE_SVG_FORMAT

    template = CONSOLE_SVG_FORMAT.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    own_fonts = re.sub(r"@font-face \{\{.*?\}\}\n", "", template, flags=re.S)  # nothing is fetched
    out.write_text(
        console.export_svg(
            title="an aggregator, three sites", theme=DARK, code_format=own_fonts, unique_id="fedtrain"
        )
    )
    print(f"{out}: {len(rows)} lines, {out.stat().st_size / 1e3:.0f} kB")


def quiet(folder: Path, *words: str) -> None:
    subprocess.run([*FEDTRAIN, *words], cwd=folder, check=True, capture_output=True, timeout=LIMIT_S)


def aggregated(clinic: Path) -> list[str]:
    """What stands on the aggregator's terminal when its run is done."""
    ours, theirs = pty.openpty()
    env = os.environ | {"COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color", "COLORTERM": ""}
    env.pop("NO_COLOR", None)
    with contextlib.ExitStack() as running:
        command = [*FEDTRAIN, "aggregator"]
        aggregator = running.enter_context(
            subprocess.Popen(command, cwd=clinic, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        )
        os.close(theirs)
        for site in SITES:
            away = subprocess.DEVNULL
            started = subprocess.Popen([*FEDTRAIN, "site", site], cwd=clinic, stdout=away, stderr=away)
            running.callback(started.wait, LIMIT_S)
            running.callback(started.terminate)
        said, end = b"", time.monotonic() + LIMIT_S
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while (piece := os.read(ours, 1 << 16)) and time.monotonic() < end:
                said += piece
        assert aggregator.wait(LIMIT_S) == 0, said.decode()
    return shown(said.decode().replace(f"{clinic.resolve()}/", ""))


def shown(said: str) -> list[str]:
    """The screen after these bytes, as lines with their colours: what rich's live tables move and clear."""
    lines, row, at = [""], 0, 0
    for move in [*MOVES.finditer(said), None]:
        text = said[at : move.start() if move else None]
        if text:
            lines[row] += text
        if move is None:
            break
        at = move.end()
        count = int(move[2] or 1) if move[3] else 1
        if move[0] == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif move[3] == "A":
            row = max(0, row - count)
        elif move[3] in ("K", "J"):
            lines[row] = ""
    return [line for line in lines if Text.from_ansi(line).plain.strip()]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
