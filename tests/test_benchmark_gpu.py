"""benchmarks/gpu.py: a section that fails or is cut keeps its lines, and a GPT step of ours runs."""

import importlib
import json
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAYS = "import sys; print('{\"value\": 1}', flush=True); "
ENDS = {
    "gpt": "import time; time.sleep(600)",
    "versions": "pass",
    "tests": "sys.exit('no such device')",
}


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.mark.parametrize("name", ENDS)
def test_a_section_keeps_its_lines_however_it_ends(module, tmp_path, name):
    gpu, file = module("gpu"), tmp_path / "lines.jsonl"
    command = [sys.executable, "-I", "-c", SAYS + ENDS[name]]
    began = time.monotonic()
    with gpu.Lines(file) as lines:
        ended = gpu.run_section(name, command, lines, 2.0 if name == "gpt" else 60.0)
    assert json.loads(file.read_text())["value"] == 1
    assert ended.startswith({"gpt": "cut: 2 s", "versions": "done", "tests": "failed: no such"}[name])
    assert time.monotonic() - began < 60


def test_every_section_of_the_gpu_script_has_a_limit_and_a_function(module):
    gpu, sections = module("gpu"), module("gpu_sections")
    assert list(gpu.LIMITS) == list(sections.SECTIONS)
    assert sum(gpu.LIMITS.values()) <= gpu.TOTAL_S


def test_our_step_launches_at_most_eight_operations_beyond_bare_torch(module):
    sections = module("gpu_sections")
    bare, ours = (make(sections.SMALL, 2) for make in (sections.bare, sections.ours))
    ours()
    assert sections.launches(ours) <= sections.launches(bare) + 8


def test_the_loop_that_stands_in_for_pfl_learns_what_the_plain_loop_does(module, tmp_path):
    np, cases = module("numpy"), module("simulation_cases")
    work = cases.work_of(cases.Case("small", "mlp5k", sites=5), tmp_path)
    loops = [module(f"peers.{name}").averaged(work) for name in ("plain_torch", "pfl_loop")]
    for _ in range(2):
        plain, pfl = (np.concatenate([w.numpy().ravel() for w in next(each)]) for each in loops)
        np.testing.assert_allclose(pfl, plain, rtol=0, atol=1e-6)
