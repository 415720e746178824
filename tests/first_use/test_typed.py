"""The commands of README.md, docs/ and examples/ run as they are printed: each page's lines in their order,
in bash, in a fresh copy of the examples. Lines that wait for others run beside them."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import pytest

from fedtrain.cli import cli
from fedtrain.config import Config
from tests.first_use.shell import Shell, stand_ins, until
from tests.ports import free_port
from tests.test_examples import fashion  # noqa: F401  # a fixture

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.M | re.S)

# What is not typed, each with the reason.
STRATEGY_KEYS = ("mu", "server_lr", "fixed")  # of [strategy], by its kind
UNTYPED = {
    r"make (demo|test)": "hours or a new environment; `make test` runs this file",
    r"pip install .*|apt-get install .*": "the network; what it installs is there",
    r"benchmarks/gpu\.sh.*|((sudo )?\.venv/bin/)?python benchmarks/.*|python3.11 -m venv .*": "hours",
    r"export FEDTRAIN_RANKS_SECRET=.*|TORCH_DISABLE_.* torchrun --nnodes .*": "several machines",
    r".*(?:3c5fe…|70bd1…|5d0c2…).*": "keys of other machines; test_new.py types such",
    r"fedtrain track heart --to (mlflow|opentelemetry)=.*": "a tracker's server",
}
PORTS = ("8440", "8441", "8442", "8443", "8444", "8500", "8501")
BESIDE = re.compile(r"fedtrain (aggregator(?! --stats)|site|peer|dashboard|certs invite)\b")
TRAINS = r"(?:\w+=\S+ )?fedtrain (?:simulate|aggregator|site|peer|datacenter)\b|torchrun|python"
SIMULATES = r"(?:\w+=\S+ )?fedtrain simulate(?! --mode| --debug)"
LISTENS = r"fedtrain (?:aggregator|site|peer|certs|join|invite|doctor)\b"
AFTER = re.compile(  # what reads the runs of other terminals
    r"(torchrun|python|wait)\b|fedtrain "
    r"(runs|watch|export|report|compare|evaluate|audit|verify|track|dashboard|datacenter)\b"
)


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
    last: tuple[str, ...] = ()  # typed after them
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
ALL_FOUR = "--set run.rounds=14 --set strategy.min_sites=4"
FEW = {"FEDTRAIN_RUN__ROUNDS": "2"}
FEWEST = {"FEDTRAIN_RUN__ROUNDS": "1", "FEDTRAIN_TRAIN__LOCAL_STEPS": "2"}

HOSPITALS = ("cleveland", "hungary", "switzerland", "va-long-beach")
WORLDS = {
    "docs/asynchronous.md": World(first=CLINIC),
    "docs/backup.md": World(
        first=FEDERATION,
        changed={"^fedtrain aggregator": "fedtrain aggregator --set network.idle=2s"},
        env=FEW,
    ),
    "docs/checkpoints.md": World(
        first=(*CLINIC, "fedtrain task approve", *SITES),
        before={"fedtrain aggregator --from": tuple(f"{site} --set run.name=heart2" for site in SITES)},
    ),
    "docs/cli.md": World(
        before={
            "fedtrain stats --site": ("fedtrain task approve",),
            "fedtrain certs init": ("rm -r certs",),
            "fedtrain certs sign": (
                "openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=east "
                "-keyout east.key -out {root}/north.csr",
            ),
            "fedtrain certs revoke": ("fedtrain certs issue site-9",),
            "fedtrain policy show": ("fedtrain task approve",),
            "fedtrain policy sign": ("fedtrain policy set min_cohort=3 evaluate_every=1",),
            "fedtrain aggregator": (
                "fedtrain certs issue aggregator site-1 site-2 site-3",
                "&fedtrain site site-2",
                "&fedtrain site site-3",
            ),
            "fedtrain peer": (
                "cd ..",
                "fedtrain new heart-peers --template gossip",
                "cd heart-peers",
                "fedtrain certs issue site-4",
                "fedtrain task approve --rule secure_sums=false",
                "&fedtrain peer site-2 --set network.listen=127.0.0.1:8442",
                "&fedtrain peer site-3 --set network.listen=127.0.0.1:8443",
            ),
            "fedtrain datacenter": ("cd ../heart",),
            "fedtrain doctor": (
                "&fedtrain aggregator --set run.name=again",
                "&fedtrain site site-2 --set run.name=again",
                "&fedtrain site site-3 --set run.name=again",
                "for i in $(seq 600); do (: >/dev/tcp/127.0.0.1/8440) && break; sleep 0.1; done 2>/dev/null",
            ),
            "fedtrain compare": ("&fedtrain site site-1 --set run.name=again",),
            "fedtrain audit": (
                "mkdir from-the-aggregator",
                "cp runs/audit/aggregator.jsonl from-the-aggregator",
            ),
        },
        changed={"pin south=": "pin outside=", "/media/stick": "{root}", "revoke site-3": "revoke site-9"},
    ),
    "docs/configuration.md": World(first=CLINIC),
    "docs/dashboard.md": World(first=FEDERATION),
    "docs/datacenter.md": World(first=CLINIC, env=FEW),
    "docs/federation.md": World(
        first=(*CLINIC, "rm -r certs"), before={"fedtrain task approve": ("fedtrain join",)}
    ),
    "docs/gossip.md": World(
        first=("fedtrain new heart --template gossip", "cd heart", "rm -r certs"),
        before={
            "fedtrain peer site-1": (
                "&fedtrain peer site-2 --set network.listen=127.0.0.1:8442",
                "&fedtrain peer site-3 --set network.listen=127.0.0.1:8443",
            ),
            "fedtrain invite site-4": (
                "wait",
                "fedtrain certs issue site-4",
                "fedtrain task approve --rule secure_sums=false",
            ),
            "fedtrain peer site-4": (
                f"&fedtrain peer site-1 {ALL_FOUR}",
                f"&fedtrain peer site-2 {ALL_FOUR} --set network.listen=127.0.0.1:8442",
                f"&fedtrain peer site-3 {ALL_FOUR} --set network.listen=127.0.0.1:8443",
            ),
        },
        changed={"peer site-4": f"peer site-4 {ALL_FOUR} --set network.listen=127.0.0.1:8444"},
    ),
    "docs/policy.md": World(first=CLINIC, changed={"3c5fe3687d77…": "3c5fe3687d77" + 52 * "0"}),
    "docs/secure-aggregation.md": World(first=CLINIC),
    "docs/simulation.md": World(
        folder="examples/digits", env=FEW, before={"fedtrain simulate --debug": ("cd ../heart",)}
    ),
    "docs/statistics.md": World(
        folder="examples/heart",
        first=(f"fedtrain certs init aggregator {' '.join(HOSPITALS)}", "fedtrain task approve"),
        before={"fedtrain aggregator --stats": tuple(f"&fedtrain site {name}" for name in HOSPITALS)},
        last=("&fedtrain aggregator",),
        env=FEW,
    ),
    "docs/topology.md": World(folder="examples/heart", env=FEW),
    "docs/trackers.md": World(first=(*CLINIC, "fedtrain simulate")),
    "examples/gossip/README.md": World(
        env=FEW,
        changed={
            rf"({name}.*listen=)0\.0\.0\.0:8441": rf"\g<1>127.0.0.1:{port}"
            for name, port in zip(HOSPITALS[1:], (8442, 8443, 8444), strict=True)
        }
        | {
            rf"{name}\.example:8441": f"127.0.0.1:{port}"
            for name, port in zip(HOSPITALS[1:], (8442, 8443, 8444), strict=True)
        },
        before={"fedtrain task": ("cd examples/heart", f"fedtrain certs init {' '.join(HOSPITALS)}")},
    ),
    "examples/shakespeare/README.md": World(folder="examples/shakespeare", env=FEWEST),
    "examples/fashion_mnist/README.md": World(folder="examples/fashion_mnist", env=FEW),
    **{
        f"examples/{name}/README.md": World(folder=f"examples/{name}", env=FEW)
        for name in ("custom_strategy", "digits", "heart", "lora")
    },
    **{f"examples/{name}/README.md": World(env=FEW) for name in ("credit", "lung", "shuttle")},
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with stand_ins(tmp_path_factory.mktemp("programs")) as folder:
        yield folder


@pytest.mark.slow(20)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", TO_TYPE)
def test_a_pages_commands_work_as_printed(page: str, tmp_path: Path, programs: Path, request) -> None:
    world = WORLDS.get(page, World())
    root = tmp_path / "clone"
    left = shutil.ignore_patterns("runs", "certs", "roster", "__pycache__")
    shutil.copytree(ROOT / "examples", root / "examples", ignore=left)
    (root / "data").mkdir()
    if page == "examples/fashion_mnist/README.md":
        photographs = request.getfixturevalue("fashion")
        shutil.copytree(photographs, root / world.folder / "data", ignore=shutil.ignore_patterns("clone"))
    ports = {port: str(free_port()) for port in PORTS}
    own = {
        **{pattern: mine.replace("{root}", str(root)) for pattern, mine in world.changed.items()},
        r"[\w.-]+\.example(?:\.org)?:": "127.0.0.1:",
        r"0\.0\.0\.0:": "127.0.0.1:",
        "/srv/heart": str(root / "data"),
        **ports,
    }
    given = {
        LISTENS: {"FEDTRAIN_NETWORK__LISTEN": f"127.0.0.1:{ports['8440']}"},
        TRAINS: world.env,
        SIMULATES: {"FEDTRAIN_SIMULATE__WORKERS": "0"},
    }

    def put_in(line: str) -> str:
        for pattern, mine in own.items():
            line = re.sub(pattern, mine, line)
        return line

    with Shell(root, programs, given) as shell:
        shell.type(f"cd {world.folder}")
        for line in world.first:
            step(shell, put_in(line))
        for command in typed(page):
            if untyped(command.line):
                continue
            for before in next((v for k, v in world.before.items() if command.line.startswith(k)), ()):
                step(shell, put_in(before.format(root=root)))
            line = put_in(command.line)
            step(shell, f"&{line}" if BESIDE.match(line) else line)
        for line in (*world.last, "wait"):
            step(shell, line)


def step(shell: Shell, line: str) -> None:
    """Type a line, which may wait for a code that another command has printed."""
    if AFTER.match(line.removeprefix("&")):
        shell.wait()
    if "--invitation CODE" in line:
        line = line.replace("CODE", shell.output.split()[0])
    if line.startswith("fedtrain join"):
        names = len(re.findall("(north|south|west)", shell.left[0][0]))
        for code in until(lambda: codes(shell, names)):
            shell.type(code)
    elif line.startswith("&"):
        shell.begin(line[1:], answer="y\n" * 30)
    elif line != "wait":
        print("$", line)
        print(shell.type(line, answer="y\n" * 30))


def codes(shell: Shell, count: int) -> list[str]:
    """The lines that `certs invite` has printed for so many sites."""
    found = re.findall(r"fedtrain join \S+ \S+", shell.logs())
    return found if len(found) >= count else []


@pytest.mark.parametrize("page", sorted({command.page for command in EVERY}))
def test_a_pages_commands_parse_and_their_settings_exist(page: str) -> None:
    table = msgspec.to_builtins(Config.of({"run": {"task": "task:Task"}}).table())
    for command in typed(page):
        words = shlex.split(command.line, comments=True)
        for at in [i for i, word in enumerate(words) if word == "fedtrain"]:
            if at and words[at - 1] not in ("-m", "&&", "|") and "=" not in words[at - 1]:
                continue
            ends = [i for i, word in enumerate(words) if i > at and word in ("&&", "|", ";")]
            own = words[at + 1 : min([*ends, len(words)])]
            parse(own)
            for key in [own[i + 1].partition("=")[0] for i, word in enumerate(own) if word == "--set"]:
                section, _, name = key.partition(".")
                free = section == "strategy" and page.startswith("examples/custom_strategy")
                assert name in table[section] or name in STRATEGY_KEYS or free, (command, key)


def parse(words: list[str]) -> None:
    """As click does, but that no file has to be there."""
    command: click.Command = cli
    context: click.Context | None = None
    while isinstance(command, click.Group):
        with command.make_context(
            "fedtrain", [words[0], *words[1:]], context, resilient_parsing=True
        ) as context:
            _, command, words = command.resolve_command(context, words)
    options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert command is not None
    assert given <= options, (words, given - options)


def test_all_commands_are_typed_but_for_a_few() -> None:
    left = [command for command in EVERY if untyped(command.line)]
    assert len(left) < len(EVERY) / 3
    for pattern in UNTYPED:
        assert any(re.fullmatch(pattern, uncommented(command.line)) for command in left), pattern
