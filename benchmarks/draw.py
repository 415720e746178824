"""Draws bars for the pages, docs/images/bench-*.svg, of what the benchmarks printed.

    .venv/bin/python benchmarks/secagg.py --case 1Mx10 --json >benchmarks/figures/secagg.jsonl
    .venv/bin/python benchmarks/draw.py

Each file in benchmarks/figures is one run's output with --json as it was printed; a chart never mixes runs.
The same lines give the same bytes, and a test holds the pages' pictures against them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURES, IMAGES = ROOT / "benchmarks" / "figures", ROOT / "docs" / "images"
WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 800, 190, 70, 66, 14, 10  # pixels


@dataclass(frozen=True)
class Palette:
    ground: str
    text: str
    faint: str
    bars: tuple[str, ...]


LIGHT = Palette("#ffffff", "#1f2328", "#59636e", ("#0969da", "#bc4c00"))
DARK = Palette("#161b22", "#e6edf3", "#9198a1", ("#58a6ff", "#ff8f57"))


@dataclass(frozen=True)
class Chart:
    """Bars of one run: a group for each case, in it a bar for each metric."""

    name: str
    source: str  # of the figures: benchmarks/figures/SOURCE.jsonl
    title: str
    metrics: dict[str, str]  # metric -> what it is
    mark: str  # what a bar of length 1 is, where a line stands


CHARTS = [
    Chart(
        "bench-secagg", "secagg", "A secure sum, in multiples of what its ciphers take alone: less is better",
        {"site_over_bound": "at a site", "server_over_bound": "at the aggregator"}, "the bound",
    ),
    Chart(
        "bench-compression", "compression", "CPU time of 10M values, in copies of them: less is better",
        {"encode_ratio": "to encode", "decode_ratio": "to decode"}, "one copy",
    ),
]  # fmt: skip


def main() -> None:
    for chart in CHARTS:
        out = IMAGES / f"{chart.name}.svg"
        out.write_text(drawn(chart, (FIGURES / f"{chart.source}.jsonl").read_text()))
        print(f"{out.relative_to(ROOT)}: {out.stat().st_size / 1e3:.0f} kB")


def drawn(chart: Chart, lines: str) -> str:
    """The chart as SVG, of one run's lines; KeyError where the run has no machine or none of the metrics."""
    said = [json.loads(line) for line in lines.splitlines()]
    machine = next(each["machine"] for each in said if "machine" in each)
    cases: dict[str, dict[str, float]] = {}
    for each in said:
        if each.get("metric") in chart.metrics:
            cases.setdefault(each["case"], {})[each["metric"]] = each["value"]
    if not cases:
        raise KeyError(f"benchmarks/figures/{chart.source}.jsonl: no figure of {', '.join(chart.metrics)}")
    longest = max(value for found in cases.values() for value in found.values())
    scale = (WIDTH - LEFT - RIGHT) / max(longest, 1.0)  # the line is in the picture
    body, y = [*_legend(chart)], TOP
    for case, found in cases.items():
        middle = y + len(found) * BAR / 2 + 4
        body.append(f'<text x="{LEFT - 8}" y="{middle:g}" text-anchor="end">{escape(case)}</text>')
        for number, metric in enumerate(chart.metrics):
            if metric in found:
                body += _bar(y, scale, number, found[metric])
                y += BAR
        y += GAP
    x = f"{LEFT + scale:.1f}"
    body.append(f'<line x1="{x}" x2="{x}" y1="{TOP - 4}" y2="{y - GAP + 4}"/>')
    body.append(f'<text class="faint" x="{x}" y="{y + 6}" text-anchor="middle">{escape(chart.mark)}</text>')
    y += 16
    where = (
        f"benchmarks/{chart.source}.py, {machine['day']}: {machine['cores']} cores of an {machine['cpu']}, "
        f"load before it began {machine['load']:g}"
    )
    body.append(f'<text class="faint" x="16" y="{y + 14}">{escape(where)}</text>')
    body.sort(key=lambda each: each.startswith("<text"))  # words lie over the line, and that over the bars
    return _page(chart.title, y + 26, body)


def _legend(chart: Chart) -> Iterator[str]:
    yield f'<text class="title" x="16" y="24">{escape(chart.title)}</text>'
    x = 16
    for number, what in enumerate(chart.metrics.values()):
        yield f'<rect class="bar{number}" x="{x}" y="37" width="10" height="10"/>'
        yield f'<text x="{x + 15}" y="46">{escape(what)}</text>'
        x += 40 + 7 * len(what)


def _bar(y: int, scale: float, number: int, value: float) -> Iterator[str]:
    width = scale * value
    yield f'<rect class="bar{number}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}"/>'
    yield f'<text x="{LEFT + width + 5:.1f}" y="{y + BAR - 4}">{value:.3g}</text>'


def _page(title: str, height: int, body: list[str]) -> str:
    """With a ground of its own, as a page's colours need not be those that the reader's system asks for."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img">'
    )
    style = f"<style>{_style(LIGHT)}@media (prefers-color-scheme: dark) {{{_style(DARK)}}}</style>"
    ground = f'<rect class="ground" width="{WIDTH}" height="{height}" rx="6"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", style, ground, *body, "</svg>", ""])


def _style(of: Palette) -> str:
    bars = "".join(f".bar{number}{{fill:{colour}}}" for number, colour in enumerate(of.bars))
    return (
        f"text{{font:12px system-ui,sans-serif;fill:{of.text}}}.title{{font-size:15px;font-weight:600}}"
        f".faint{{fill:{of.faint}}}.ground{{fill:{of.ground}}}"
        f"line{{stroke:{of.text};stroke-dasharray:3 3}}{bars}"
    )


if __name__ == "__main__":
    main()
