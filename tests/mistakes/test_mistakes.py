"""Mistakes that people make, by real commands in all modes: each ends with a line that names its cause and
what to change, in all at most 24 lines, and an exit code that is not 0."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from fedtrain import pki
from fedtrain.config import Config
from fedtrain.errors import FedtrainError
from tests.allowed import allowed
from tests.limits import WAIT_S
from tests.mistakes.commands import Shell, wait_for
from tests.ports import free_port, serving

LINES = 24
TASK = """
import torch
from pathlib import Path
from torch import nn
import fedtrain


class Tiny(fedtrain.Task):
    def sites(self):
        return ["a", "b", "c"]

    def model(self):
        return nn.Linear(4, 2, bias=not Path("flat").exists())

    def data(self, site):
        if Path(f"without-{site}").exists():
            raise FileNotFoundError("patients.csv")
        x = torch.randn(20, 4, generator=torch.Generator().manual_seed(ord(site[0])))
        return x, (x[:, 0] > 0).long()

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
"""
CONFIG = """
[run]
name = "r"
task = "task:Tiny"
rounds = 2

[train]
batch_size = 10

[strategy]
kind = "fedavg"
min_sites = 3

[simulate]
workers = 1

[network]
listen = "127.0.0.1:PORT"
heartbeat = "1s"
idle = "2s"
"""
DATA = "        return x, (x[:, 0] > 0).long()\n"
MODEL = 'return nn.Linear(4, 2, bias=not Path("flat").exists())'
METRICS = '{"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}'
LOSS = "return nn.functional.cross_entropy(model(batch[0]), batch[1])"


@dataclass(frozen=True)
class Mistake:
    """What is done wrong, the command that tells of it, and what its last lines must say."""

    name: str
    command: str
    says: tuple[str, ...]
    task: tuple[str, str] = ("", "")  # of task.py, what becomes what
    config: tuple[str, str] = ("", "")  # of fedtrain.toml
    make: Callable[[Path], Any] | None = None  # anything else, in the project's folder
    before: tuple[str, ...] = ()  # commands that were run to their end before, without the mistake
    beside: tuple[str, ...] = ()  # commands that run meanwhile; the first one is ready when it listens
    too: tuple[str, ...] = ()  # commands that make the same mistake meanwhile
    waits: bool = False  # it says so and tries again, until it is stopped


def edit(file: Path, change: tuple[str, str]) -> None:
    text = file.read_text()
    assert change[0] in text, change
    file.write_text(text.replace(*change))


def project(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "task.py").write_text(TASK)
    (folder / "fedtrain.toml").write_text(CONFIG.replace("PORT", str(free_port())))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """Of an aggregator and the sites a, b and c."""
    folder = tmp_path_factory.mktemp("authority") / "certs"
    pki.init(folder, "r")
    pki.issue(folder, "aggregator")
    for site in "abc":
        pki.issue(folder, "site", site)
    return folder


def attempt(mistake: Mistake, root: Path, certs: Path) -> tuple[int, list[str]]:
    """Exit code and lines of the command that is made the mistake with."""
    folder = root / "project"
    project(folder)
    shutil.copytree(certs, folder / "certs")
    with contextlib.ExitStack() as stack, Shell(folder) as shell:
        allowed(Config.load(folder / "fedtrain.toml"), masks=False)
        for line in mistake.before:
            command, log = shell.start(line)
            assert command.wait(WAIT_S) == 0, log.read_text()
        for line in mistake.beside:
            command, log = shell.start(line)
            wait_for(log, "listening on" if line.startswith("aggregator") else "run r", command)
        edit(folder / "task.py", mistake.task)
        edit(folder / "fedtrain.toml", mistake.config)
        made = mistake.make(folder) if mistake.make else None
        if isinstance(made, contextlib.AbstractContextManager):
            stack.enter_context(made)
        with contextlib.suppress(FedtrainError):
            allowed(Config.load(folder / "fedtrain.toml"), masks=False)
        for line in mistake.too:
            shell.start(line)
        command, log = shell.start(mistake.command)
        if mistake.waits:
            wait_for(log, mistake.says[0], command)
            command.send_signal(signal.SIGTERM)
        return command.wait(WAIT_S), log.read_text().splitlines()


# --- what people do


def port_in_use(folder: Path) -> Any:
    taken = socket.create_server(("127.0.0.1", 0))
    listens(folder, taken.getsockname()[1])
    return taken


def listens(folder: Path, port: int) -> None:
    """The project's network.listen from now on."""
    file = folder / "fedtrain.toml"
    file.write_text(re.sub(r'"127.0.0.1:\d+"', f'"127.0.0.1:{port}"', file.read_text()))


def web_server(folder: Path) -> Any:
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    listens(folder, server.server_port)
    return serving(server)


def another_authority(folder: Path) -> None:
    pki.init(folder / "other", "r")
    pki.issue(folder / "other", "site", "a")
    shutil.rmtree(folder / "certs" / "sites" / "a")
    shutil.copytree(folder / "other" / "sites" / "a", folder / "certs" / "sites" / "a")


def expired(folder: Path) -> None:
    shutil.rmtree(folder / "certs")
    long_ago = datetime.now(UTC) - timedelta(days=40)
    pki.init(folder / "certs", "r", now=long_ago)
    pki.issue(folder / "certs", "site", "a", now=long_ago)


CONFIGURED = [
    Mistake("a key that is not there", "simulate --set train.lrr=0.1",
            ("train.lrr", "Did you mean train.lr?")),
    Mistake("a section that is not there", "simulate", ("trian", "Did you mean train?"),
            config=("[train]", "[trian]")),
    Mistake("text for a number", "simulate", ("train.batch_size", "'ten'"),
            config=("batch_size = 10", 'batch_size = "ten"')),
    Mistake("a strategy that is not there", "simulate --set strategy.kind=fedavgg",
            ("strategy.kind", "'fedavgg'", "Did you mean 'fedavg'?")),
    Mistake("a rule that is not there", "simulate --set aggregation.rule=medain",
            ("aggregation.rule", "'medain'", "Did you mean 'median'?")),
    Mistake("a topology that is not there", "simulate --mode gossip --set gossip.topology=rign",
            ("topology", "'rign'", "Did you mean 'ring'?")),
    Mistake("an algorithm that is not there", "simulate --mode gossip --set gossip.algorithm=dpsdg",
            ("gossip.algorithm", "'dpsdg'", "dpsgd")),
    Mistake("a metric that is not there", "simulate --set evaluate.metric=acuracy",
            ("evaluate.metric", "acuracy", "accuracy")),
    Mistake("an optimizer that is not there", "datacenter --set train.optimizer=adm",
            ("train.optimizer", "'adm'", "adam")),
    Mistake("a unit that is not there", "simulate --set strategy.round_deadline=10parsecs",
            ("strategy.round_deadline", "10parsecs", "10m")),
    Mistake("no project here", "simulate", ("fedtrain.toml", "fedtrain new NAME"),
            make=lambda folder: (folder / "fedtrain.toml").unlink()),
    Mistake("another config's name mistyped", "simulate --config fedtrian.toml",
            ("fedtrian.toml", "does not exist")),
    Mistake("TOML with a slip", "simulate", ("fedtrain.toml", "line 3"), config=('name = "r"', "name = r")),
    Mistake("an override without a value", "simulate --set train.lr",
            ("--set train.lr", "section.key=value")),
    Mistake("a command mistyped", "simulat", ("'simulat'", "Did you mean 'simulate'?")),
    Mistake("a run to begin with mistyped", "simulate --from heart", ("heart", "fedtrain simulate")),
    Mistake("an address without a port", "aggregator --set network.listen=localhost",
            ("network.listen", "host:port")),
]  # fmt: skip
TASKS = [
    Mistake("a class mistyped", "simulate", ("run.task", "Did you mean Tiny?"),
            config=("task:Tiny", "task:Tini")),
    Mistake("a file mistyped", "simulate", ("run.task", "Did you mean task?"),
            config=("task:Tiny", "tsk:Tiny")),
    Mistake("a syntax error", "simulate", ("SyntaxError in task.py:13",),
            task=(MODEL, "return nn.Linear(4, 2")),
    Mistake("a package that is not installed", "simulate", ("No module named 'pandsa'. Install it",),
            task=("import torch\n", "import torch, pandsa\n")),
    Mistake("no loss", "simulate", ("run.task", "does not define loss()"), task=("def loss(", "def lose(")),
    Mistake("a model that is not returned", "simulate", ("model()", "None"), task=(MODEL, MODEL[7:])),
    Mistake("a loss that is a float", "simulate", ("loss()", "float", "a tensor"),
            task=(LOSS, LOSS + ".item()")),
    Mistake("shapes that do not fit", "simulate", ("loss() at site", "its layer wants 5", "(task.py:22)"),
            task=("(4, 2,", "(5, 2,")),
    Mistake("labels of the wrong type", "simulate", ("got Int", "y.long()", "(task.py:22)"),
            task=(").long()", ").int()")),
    Mistake("no data", "simulate", ("data('a')", "no examples"),
            task=(DATA, "        return x[:0], x[:0, 0].long()\n")),
    Mistake("data with NaN", "simulate", ("not finite", "data", "train.lr"),
            task=(DATA, "        x[0] = float('nan')\n" + DATA)),
    Mistake("examples of no kind", "simulate", ("data()", "Task.collate"),
            task=(DATA, "        return [None] * 20\n")),
    Mistake("a table for data", "simulate", ("data()", "DataFrame"),
            task=(DATA, "        import table\n        return table.DataFrame()\n"),
            make=lambda folder: (folder / "table.py").write_text("class DataFrame:\n    iloc = None\n")),
    Mistake("inputs and labels of different length", "simulate", ("data()", "20", "19"),
            task=("return x, (x[:, 0]", "return x, (x[1:, 0]")),
    Mistake("a file that is not there", "simulate", ("FileNotFoundError", "x.pt", "(task.py:"),
            task=(DATA, "        return torch.load(self.data_dir / 'x.pt')\n")),
    Mistake("metrics as plain means", "simulate", ("evaluate()", "sums and counts"),
            task=(METRICS, '{"accuracy": 1.0}')),
    Mistake("a setting of another mode", "simulate --mode gossip --set aggregation.rule=krum",
            ("aggregation.rule", "gossip.rule")),
    Mistake("lazy layers", "simulate", ("LazyLinear",), task=(MODEL, "return nn.LazyLinear(2)")),
    Mistake("more sites wanted than there are", "simulate --set strategy.min_sites=5",
            ("strategy.min_sites: 5", "3 sites", "Lower it")),
    Mistake("two sites of one name", "simulate", ("sites()", "'b'", "twice"),
            task=('"b", "c"]', '"b", "b"]')),
    Mistake("another task in the same run", "simulate", ("other task code", "--fresh"), before=("simulate",),
            task=(LOSS, LOSS + " * 2")),
    Mistake("other settings in the same run", "simulate --set train.lr=0.5",
            ("train.lr was", "is 0.5", "--fresh"),
            before=("simulate",)),
    Mistake("a site to debug mistyped", "simulate --debug aa", ("--debug aa", "Did you mean a?")),
    Mistake("a GPU that is not there", "simulate --set train.device=cuda",
            ("train.device", "cuda", "auto or cpu")),
    Mistake("an engine of an older version", "simulate --set simulate.engine=vmap", ("vmap", "stacked")),
    Mistake("buffers in a stack", "simulate --set simulate.engine=stacked", ("stacked", "buffers", "loop"),
            task=(MODEL, "return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))")),
    Mistake("a full disk", "simulate", ("No space left on device", "events.jsonl", "Make room"),
            make=lambda folder: ((folder / "runs/r+simulate").mkdir(parents=True),
                                 (folder / "runs/r+simulate/events.jsonl").symlink_to("/dev/full"))),
    Mistake("a folder that cannot be", "simulate", ("runs", "Not a directory"),
            make=lambda folder: (folder / "runs").touch()),
]  # fmt: skip
OVER_TLS = [
    Mistake("no certificates", "site a", ("certs/sites/a", "fedtrain join", "fedtrain certs invite a"),
            make=lambda folder: shutil.rmtree(folder / "certs")),
    Mistake("no certificate for the aggregator", "aggregator", ("certs/aggregator", "fedtrain certs issue"),
            make=lambda folder: shutil.rmtree(folder / "certs" / "aggregator")),
    Mistake("a site's name mistyped", "site aa", ("certs/sites/aa does not exist", "Did you mean a?")),
    Mistake("an expired certificate", "site a",
            ("has expired", "clock is wrong", "fedtrain certs issue a"), make=expired),
    Mistake("a key that all can read", "site a", ("key.pem", "chmod 600"),
            make=lambda folder: (folder / "certs/sites/a/key.pem").chmod(0o644)),
    Mistake("a key of another certificate", "site a", ("key.pem and cert.pem do not belong together",),
            make=lambda folder: shutil.copy(folder / "certs/sites/b/key.pem", folder / "certs/sites/a")),
    Mistake("another authority's certificate", "site a", ("not this federation's aggregator's", "root.pem"),
            make=another_authority, beside=("aggregator",), waits=True),
    Mistake("a port in use", "aggregator", ("cannot listen on", "Change network.listen"), make=port_in_use),
    Mistake("an aggregator not started", "site a",
            ("nothing listens there yet", "Is the aggregator started?"),
            waits=True),
    Mistake("a web server on the port", "site a", ("a web server answers there", "network.address"),
            make=web_server, waits=True),
    Mistake("a host that is not there", "site a --set network.address=no.such.host.invalid:8440",
            ("the host name cannot be resolved", "network.address"), waits=True),
    Mistake("other settings at a site", "site a --set train.lr=0.5",
            ("train.lr", "0.5 at the site", "Use the same fedtrain.toml at both"), beside=("aggregator",)),
    Mistake("another task at a site", "site a", ("different task code", "Copy the same task file to both"),
            beside=("aggregator",), task=(LOSS, LOSS + " * 2")),
    Mistake("another model at a site", "site a", ("different models", "Make model() the same at both"),
            beside=("aggregator",), make=lambda folder: (folder / "flat").touch()),
    Mistake("a loss that is a float, at all sites", "aggregator", ("a, b, c: ", "loss() returned a float"),
            task=(LOSS, LOSS + ".item()"), too=("site a", "site b", "site c")),
    Mistake("two processes of one site", "site a", ("is in use by process", "runs/r@a"),
            beside=("aggregator", "site a")),
]  # fmt: skip
TWO = " --set strategy.min_sites=2"
PEERS = [
    Mistake("a peer's name mistyped", "peer aa", ("certs/sites/aa does not exist", "Did you mean a?")),
    Mistake("a peer's port in use", "peer a", ("cannot listen on", "Change network.listen"),
            make=port_in_use),
    Mistake("two processes of one peer", "peer a", ("is in use by process", "runs/r+gossip@a"),
            beside=("peer a",)),
    Mistake("a compressor that loses too much",
            "simulate --mode gossip --set gossip.algorithm=choco --set gossip.topology=ring "
            "--set gossip.compressor=randomk:0.001",
            ("gossip.compressor", "Let it send more, or use quantize:8")),
    Mistake("an invitation that is damaged", "peer a --invitation abc", ("invitation",)),
    Mistake("a peer without its data", "peer a" + TWO, ("FileNotFoundError in task.py:17",),
            make=lambda folder: (folder / "without-a").touch(),
            beside=("peer b --set network.listen=" + TWO,)),
    Mistake("another task at a peer", "peer a" + TWO,
            ("different task code", "Copy the same task file to both"),
            task=(LOSS, LOSS + " * 2"), beside=("peer b --set network.listen=" + TWO,), waits=True),
    Mistake("a graph file that is not there", "peer a --set gossip.topology=file:graph.txt",
            ("graph.txt", "No such file")),
    Mistake("a graph of unknown peers", "simulate --mode gossip --set gossip.topology=file:graph.txt",
            ("graph.txt", "zug"), make=lambda folder: (folder / "graph.txt").write_text("a b\nb c\nc zug\n")),
    Mistake("an invitation by nobody", "invite d --by aa",
            ("certs/sites/aa does not exist", "Did you mean a?")),
]  # fmt: skip
RANKS = [
    Mistake("torchrun forgotten", "datacenter --set parallel.tp=2", ("parallel", "torchrun")),
    Mistake("a number of ranks that does not fit", "plan --ranks 3 --set parallel.tp=2", ("tp 2", "3 ranks")),
    Mistake("no data, in a datacenter", "datacenter", ("no examples",),
            task=(DATA, "        return x[:0], x[:0, 0].long()\n")),
    Mistake("a loss that is a float, in a datacenter", "datacenter", ("loss()", "float"),
            task=(LOSS, LOSS + ".item()")),
    Mistake("a GPU that is not there, in a datacenter", "datacenter --set train.device=cuda",
            ("train.device", "cpu")),
]  # fmt: skip
ALL = [*CONFIGURED, *TASKS, *OVER_TLS, *PEERS, *RANKS]


@pytest.mark.slow(1)
@pytest.mark.parametrize("mistake", ALL, ids=lambda m: m.name.replace(" ", "-"))
def test_a_mistake_ends_with_a_line_that_names_it(mistake, tmp_path, certificates):
    code, lines = attempt(mistake, tmp_path, certificates)
    last = lines[-2 if mistake.waits else -1]  # "Stopped." is below what waited
    assert code != 0
    assert len(lines) <= LINES, "\n".join(lines)
    assert all(words in last for words in mistake.says), (mistake.says, "\n".join(lines))
