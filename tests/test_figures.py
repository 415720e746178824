"""The pages' bars: what benchmarks/draw.py makes of the lines that are kept, and lines that were printed."""

import importlib
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
KEPT = sorted((ROOT / "benchmarks" / "figures").glob("*.jsonl"))
MACHINE = {"day": "2026-01-02", "cores": 2, "cpu": "<Any> & other", "load": 0.1}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def draw(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("draw")


def figures(found):
    """Lines as a benchmark prints them; found: {case: {metric: value}}."""
    lines = [{"machine": MACHINE}]
    for case, values in found.items():
        lines += [
            {"bench": "b", "case": case, "metric": m, "value": v, "unit": ""} for m, v in values.items()
        ]
    return "\n".join(map(json.dumps, lines))


def bars(svg):
    """[(class, width)] from top to bottom, without the legend's squares."""
    found = [each.attrib for each in ElementTree.fromstring(svg).iter(f"{SVG}rect")]
    return [
        (each["class"], float(each["width"]))
        for each in found if each["class"].startswith("bar") and "height" in each and each["width"] != "10"
    ]  # fmt: skip


def words(svg):
    return [each.text for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_pages_show_what_is_drawn_of_the_lines_that_are_kept(draw):
    shown = {path.name for path in (ROOT / "docs" / "images").glob("bench-*.svg")}
    assert shown == {f"{chart.name}.svg" for chart in draw.CHARTS}
    assert [path.stem for path in KEPT] == sorted(chart.source for chart in draw.CHARTS)
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for chart in draw.CHARTS:
        lines = (draw.FIGURES / f"{chart.source}.jsonl").read_text()
        assert (draw.IMAGES / f"{chart.name}.svg").read_text() == draw.drawn(chart, lines), "run draw.py"
        assert f"](images/{chart.name}.svg)" in pages


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_what_is_kept_is_one_runs_whole_output(path):
    first, *rest = map(json.loads, path.read_text().splitlines())
    assert {"day", "cpu", "cores", "load", "torch"} <= first["machine"].keys()
    found = [each for each in rest if "metric" in each]
    assert all(each.keys() == {"bench", "case", "metric", "value", "unit"} for each in found)
    assert {each["bench"] for each in found} == {path.stem}
    assert not any("machine" in each for each in rest), "two runs are no run"


def test_bars_are_as_long_as_their_figures_and_say_them(draw):
    chart = draw.Chart("bench-x", "x", "A <title>", {"a": "one", "b": "the other"}, "one & all")
    found = {"small & <odd>": {"a": 1.0, "b": 2.5, "c": 9.0}, "large": {"b": 5.0}}
    svg = draw.drawn(chart, figures(found))
    drawn = bars(svg)
    assert [kind for kind, _ in drawn] == ["bar0", "bar1", "bar1"]
    longest = draw.WIDTH - draw.LEFT - draw.RIGHT
    assert [width for _, width in drawn] == pytest.approx([longest / 5, longest / 2, longest], abs=0.1)
    (line,) = ElementTree.fromstring(svg).iter(f"{SVG}line")
    assert float(line.attrib["x1"]) == pytest.approx(draw.LEFT + longest / 5, abs=0.1), "where 1 is"
    said = words(svg)
    assert {"small & <odd>", "large", "one", "the other", "one & all", "1", "2.5", "5"} <= set(said)
    assert "2026-01-02: 2 cores of an <Any> & other, load before it began 0.1" in said[-1]
    assert "9" not in said, "a metric that is not asked for"


def test_a_run_without_the_figures_is_refused(draw):
    with pytest.raises(KeyError, match=r"secagg\.jsonl: no figure of site_over_bound, server_over_bound"):
        draw.drawn(draw.CHARTS[0], figures({"x": {"site_s": 1.0}}))


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("of", ["LIGHT", "DARK"])
def test_words_and_bars_stand_out_from_the_ground_by_as_much_as_wcag_asks(draw, of):
    colours = getattr(draw, of)

    def contrast(colour):
        lighter, darker = sorted((luminance(colour), luminance(colours.ground)), reverse=True)
        return (lighter + 0.05) / (darker + 0.05)

    assert min(contrast(colours.text), contrast(colours.faint)) >= 4.5
    assert min(map(contrast, colours.bars)) >= 3
    assert max(len(chart.metrics) for chart in draw.CHARTS) <= len(colours.bars)


def test_a_picture_asks_the_reader_whether_it_is_dark_and_fetches_nothing(draw):
    for path in (ROOT / "docs" / "images").glob("bench-*.svg"):
        svg = path.read_text()
        assert "@media (prefers-color-scheme: dark)" in svg
        assert not re.search(r"(?:href|src|url\(|@import)", svg)
