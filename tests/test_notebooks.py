"""The notebooks of examples/ run from their first cell to their last, and show what they say."""

import os
import shutil
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in (EXAMPLES / "notebooks").glob("*.ipynb"))


def executed(name, folder):
    """The notebook with its outputs, in a copy of what it reads."""
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for example in ("notebooks", "heart"):
        shutil.copytree(EXAMPLES / example, folder / example, ignore=shutil.ignore_patterns("runs", "*.png"))
    book = nbformat.read(folder / "notebooks" / f"{name}.ipynb", as_version=4)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *sys.path])}
    notebook = client.NotebookClient(
        book, timeout=120, resources={"metadata": {"path": folder / "notebooks"}}
    )
    return notebook.execute(env=environment)


def outputs(book, kind):
    """All that cells showed in this form, also where it was shown again."""
    found = [output.get("data", {}) for cell in book.cells for output in cell.get("outputs", [])]
    return [data[kind] for data in found if kind in data]


@pytest.mark.slow(10)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_shows_its_run_as_it_went(name, tmp_path):
    book = executed(name, tmp_path)
    assert not [o for cell in book.cells for o in cell.get("outputs", []) if o.output_type == "error"]
    shown = [html for html in outputs(book, "text/html") if "<progress" in html]
    assert shown
    assert all("finished" in html and "<polyline" in html for html in shown)
    if name in ("simulate", "strategy"):
        assert outputs(book, "image/png"), "no plot was drawn"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_kept_without_outputs(name):
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(EXAMPLES / "notebooks" / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book.cells)


def test_there_are_three_notebooks():
    assert NAMES == ["model", "simulate", "strategy"]
