"""What README.md, docs/ and examples/ print to be typed is typed: each page's lines in their order, in bash, in a
fresh copy of the examples. Lines that wait for others run beside them, as in other terminals."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import pytest

from fedtrain.cli import cli
from fedtrain.config import Config
from tests.first_use.shell import Shell, stand_ins
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.M | re.S)

# What is not typed, each with the reason.
UNTYPED = {
    r"make (demo|test)": "hours or a new environment; `make test` runs this file",
    r"pip install .*|apt-get install .*": "the network; what it installs is there",
    r"python benchmarks/.*|(sudo )?\.venv/bin/python benchmarks/.*|python3.11 -m venv .*": "hours",
    r"export FEDTRAIN_RANKS_SECRET=.*|TORCH_DISABLE_.* torchrun --nnodes .*": "several machines",
    r"fedtrain track heart --to (mlflow|opentelemetry)=.*": "a tracker's server",
}
BESIDE = re.compile(r"fedtrain (aggregator|site|peer|dashboard|certs invite)\b")
TRAINS = r"(?:\w+=\S+ )?fedtrain (?:simulate|aggregator|site|peer|datacenter)\b|torchrun|python"
SIMULATES = r"(?:\w+=\S+ )?fedtrain simulate(?! --mode| --debug)"
LISTENS = r"fedtrain (?:aggregator|site|peer|certs|join|invite|doctor)\b"
NOT_AFTER = re.compile(r"fedtrain (aggregator|site|peer|dashboard|certs|task|policy|invite|join)\b")


class Typed(NamedTuple):
    """A command of a page."""

    page: str
    number: int  # of the line
    line: str


@dataclass(frozen=True)
class World:
    """What the text around a page's lines speaks of. Lines that begin with & run in another terminal."""

    folder: str = "."  # in which the page begins
    first: tuple[str, ...] = ()  # typed before the page's lines
    before: dict[str, tuple[str, ...]] = field(default_factory=dict)  # before the line that begins so
    changed: dict[str, str] = field(default_factory=dict)  # what a reader puts in: pattern -> own
    env: dict[str, str] = field(default_factory=dict)  # fewer rounds, where they are all alike


def pages() -> list[str]:
    listed = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    return sorted(str(path.relative_to(ROOT)) for path in listed)


def typed(page: str) -> Iterator[Typed]:
    """The commands of a page: the lines of blocks in bash, and those after a $."""
    text = (ROOT / page).read_text()
    for block in FENCE.finditer(text):
        language, _, lines = block.groups()
        first = text[: block.start()].count("\n") + 2
        if language not in ("bash", "console"):
            continue
        joined = lines.replace("\\\n", " \0")
        for number, line in enumerate(joined.splitlines(), first):
            number += joined.splitlines()[: number - first].count("\0")
            if language == "console" and not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ").replace("\0", "")
            if line.strip() and not line.startswith("#"):
                yield Typed(page, number, line)


def untyped(line: str) -> bool:
    return any(re.fullmatch(pattern, uncommented(line)) for pattern in UNTYPED)


def uncommented(line: str) -> str:
    return re.sub(r"\s+#.*$", "", line)


EVERY = [command for page in pages() for command in typed(page)]
TO_TYPE = sorted({c.page for c in EVERY if not untyped(c.line)})
CLINIC = ("fedtrain new heart", "cd heart")
SITES = tuple(f"&fedtrain site site-{i}" for i in (1, 2, 3))
FEDERATION = (*CLINIC, "fedtrain task approve", "&fedtrain aggregator", *SITES, "wait")
FEW = {"FEDTRAIN_RUN__ROUNDS": "2"}

WORLDS = {
    "README.md": World(),
    "docs/asynchronous.md": World(first=CLINIC),
    "docs/configuration.md": World(first=CLINIC),
    "docs/dashboard.md": World(first=FEDERATION),
    "docs/datacenter.md": World(first=CLINIC, env=FEW),
    "docs/secure-aggregation.md": World(first=CLINIC),
    "docs/topology.md": World(folder="examples/heart", env=FEW),
    "docs/trackers.md": World(first=(*CLINIC, "fedtrain simulate")),
    "docs/training.md": World(),
    "docs/simulation.md": World(folder="examples/digits", env=FEW, before={"fedtrain simulate --debug": ("cd ../heart",)}),
    "docs/statistics.md": World(folder="examples/heart", first=("fedtrain certs init aggregator cleveland hungary switzerland va-long-beach", "fedtrain task approve"),
        before={"fedtrain aggregator --stats": ("&fedtrain site cleveland", "&fedtrain site hungary", "&fedtrain site switzerland", "&fedtrain site va-long-beach")}),
    **{f"examples/{name}/README.md": World(folder=f"examples/{name}", env=FEW) for name in ("custom_strategy", "digits", "heart", "lora", "shakespeare")},
    **{f"examples/{name}/README.md": World(env=FEW) for name in ("credit", "lung", "shuttle")},
    "examples/gossip/README.md": World(env=FEW, changed={r"0\.0\.0\.0:8441": "", r"\w+\.example:8441": ""}, before={"fedtrain task": ("cd examples/heart", "fedtrain certs init cleveland hungary switzerland va-long-beach")}),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with stand_ins(tmp_path_factory.mktemp("programs")) as folder:
        yield folder


@pytest.mark.slow(20)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", TO_TYPE)
def test_a_pages_commands_work_as_printed(page: str, tmp_path: Path, programs: Path) -> None:
    world = WORLDS.get(page, World())
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "examples", root / "examples", ignore=shutil.ignore_patterns("runs", "certs", "roster", "__pycache__"))
    ports = {port: str(free_port()) for port in ("8440", "8441", "8442", "8443", "8444", "8500", "8501")}
    own = {re.escape(port): free for port, free in ports.items()} | world.changed
    given = {LISTENS: {"FEDTRAIN_NETWORK__LISTEN": f"127.0.0.1:{ports['8440']}"}, TRAINS: world.env, SIMULATES: {"FEDTRAIN_SIMULATE__WORKERS": "0"}}
    with Shell(root, programs, given) as shell:
        shell.type(f"cd {world.folder}")
        for line in world.first:
            step(shell, line)
        for command in typed(page):
            if untyped(command.line):
                continue
            line = command.line
            for before in next((v for k, v in world.before.items() if line.startswith(k)), ()):
                step(shell, before)
            for pattern, mine in own.items():
                line = re.sub(pattern, mine, line)
            step(shell, f"&{line}" if BESIDE.match(line) else line)
        step(shell, "wait")


def step(shell: Shell, line: str) -> None:
    if line == "wait" or not (line.startswith(("&", "cd ")) or NOT_AFTER.match(line)):
        shell.wait()
    if line.startswith("&"):
        shell.begin(line[1:])
    elif line != "wait":
        print("$", line)
        print(shell.type(line))
