"""Four hospitals train one model without showing each other a patient: `make demo`.

Gives each hospital a folder with its own patients, makes certificates, starts an aggregator and four sites as
processes of their own over mutual TLS, and then compares, on patients that nobody trained on: what each
hospital can do alone, what they do together, and what one could do if all data lay in one place.
"""

import contextlib
import csv
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_model
from task import HOSPITALS

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.training.local import Engine
from fedtrain.training.task import load_task

HERE = Path(__file__).parent
SITE_DATA = HERE / "site-data"  # one folder a hospital, as if each were on its own machine
RUN = "demo"
LIMIT_S = 300  # a demo that takes longer is stuck
NAMES = {"va-long-beach": "VA Long Beach"} | {
    site: site.capitalize() for site in HOSPITALS if "-" not in site
}

console = Console(highlight=False)
commands: list[str] = []  # what was run, to be shown at the end


class Accuracy(NamedTuple):
    """Of one way to train: hospital -> fraction of its test patients that are classified correctly."""

    alone: Mapping[str, float]
    elsewhere: Mapping[str, float]  # a hospital's own model, at the other three
    federated: Mapping[str, float]
    pooled: Mapping[str, float]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started is ended too
    split_data()
    make_certificates()
    federate()
    accuracy = compare(Config.load(HERE / "fedtrain.toml"))
    show(accuracy)
    draw(accuracy, HERE / "accuracy.png")
    console.print("\n[bold]The commands that did it[/], in examples/heart:")
    for command in commands:
        console.print(f"  {command}", style="cyan", soft_wrap=True)


# --- A federation, as its people would start it


def split_data() -> None:
    """Each hospital's rows into a folder of its own: a site process is given that folder and no other."""
    with (HERE / "data" / "heart_disease_uci.csv").open(newline="") as f:
        reader = csv.DictReader(f)
        rows, columns = list(reader), reader.fieldnames or []
    for site, hospital in HOSPITALS.items():
        folder = SITE_DATA / site
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{site}.csv").open("w", newline="") as f:
            writer = csv.DictWriter(f, columns)
            writer.writeheader()
            writer.writerows(row for row in rows if row["dataset"] == hospital)


def make_certificates() -> None:
    """A throw-away authority in examples/heart/certs; one that is there already is used."""
    certs = HERE / Config.load(HERE / "fedtrain.toml").network.certs
    if not (certs / "ca" / "issuing.pem").exists():
        fedtrain("certs", "init", quiet=True)
    fedtrain("certs", "issue", "aggregator", *HOSPITALS)
    fedtrain("task", "approve", quiet=True)  # at each hospital, by its people; here all are on this machine


def federate() -> None:
    """An aggregator and four sites until the run is done; then the model, in site-data/model."""
    for old in (HERE / "runs").glob(f"{RUN}*"):
        shutil.rmtree(old)  # the demo begins anew; without this the same command would go on
    sets = ["--set", f"run.name={RUN}", "--set", f"network.listen=127.0.0.1:{free_port()}"]
    with contextlib.ExitStack() as running:
        aggregator = running.enter_context(process("aggregator", *sets))
        sites = {}
        for site in HOSPITALS:
            log = running.enter_context((SITE_DATA / site / "site.log").open("w"))
            command = ("site", site, "--data", f"site-data/{site}", *sets)
            sites[site] = running.enter_context(process(*command, stdout=log, stderr=log))
        wait(aggregator, sites)
    fedtrain("export", RUN, "--out", "site-data/model", quiet=True)


def wait(aggregator: subprocess.Popen[bytes], sites: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Until the aggregator is done; a process that fails, or LIMIT_S, ends the demo with what it said."""
    end = time.monotonic() + LIMIT_S
    while aggregator.poll() is None:
        for site, running in sites.items():
            if running.poll():
                sys.exit(f"The site {site} failed:\n{(SITE_DATA / site / 'site.log').read_text()[-2000:]}")
        if time.monotonic() > end:
            sys.exit(f"Not done after {LIMIT_S} s. What the sites said is in {SITE_DATA}/*/site.log")
        time.sleep(0.1)
    if aggregator.returncode:
        sys.exit(f"The aggregator failed (exit code {aggregator.returncode}); what it said is above.")


@contextlib.contextmanager
def process(*arguments: str, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`fedtrain ...` in the background, ended when the block ends."""
    commands.append(f"fedtrain {' '.join(arguments)} &")
    running = subprocess.Popen([sys.executable, "-m", "fedtrain", *arguments], cwd=HERE, **streams)
    try:
        yield running
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(5)  # a site ends by itself when the aggregator says that the run is done
        running.terminate()
        try:
            running.wait(10)
        except subprocess.TimeoutExpired:
            running.kill()


def fedtrain(*arguments: str, quiet: bool = False) -> None:
    """`fedtrain ...` to its end."""
    commands.append(f"fedtrain {' '.join(arguments)}")
    stdout = subprocess.DEVNULL if quiet else None
    if subprocess.run([sys.executable, "-m", "fedtrain", *arguments], cwd=HERE, stdout=stdout).returncode:
        sys.exit(f"This failed: {commands[-1]}")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# --- What it was good for


def compare(config: Config) -> Accuracy:
    """The federated model, and two that need no federation, trained by the same engine for as many epochs."""
    task = load_task(config.run.task, config.root)
    engine = Engine(task, config.train, config.run.seed)
    tests = {site: task.eval_data(site) for site in HOSPITALS}

    def train(name: str, dataset: Any) -> Arena:
        weights, delta = engine.initial(), Arena.zeros(engine.schema)
        for round_ in range(config.run.rounds):
            engine.train(name, dataset, round_, weights, delta)
            for tensor, change in zip(weights.views().values(), delta.views().values(), strict=True):
                tensor += change
        return weights

    def correct(weights: Arena, *sites: str) -> float:
        counted = [engine.evaluate(tests[site], weights)["accuracy"] for site in sites]
        return sum(right for right, _ in counted) / sum(patients for _, patients in counted)

    own = {site: task.data(site) for site in HOSPITALS}
    local = {site: train(site, own[site]) for site in HOSPITALS}
    pooled = train("pooled", tuple(map(torch.cat, zip(*own.values(), strict=True))))
    model = task.model()
    load_model(model, SITE_DATA / "model" / "model.safetensors")
    federated = Arena.of(model)
    return Accuracy(
        alone={site: correct(local[site], site) for site in HOSPITALS},
        elsewhere={site: correct(local[site], *(HOSPITALS.keys() - {site})) for site in HOSPITALS},
        federated={site: correct(federated, site) for site in HOSPITALS},
        pooled={site: correct(pooled, site) for site in HOSPITALS},
    )


def mean(of: Mapping[str, float]) -> float:
    return sum(of.values()) / len(of)


def show(accuracy: Accuracy) -> None:
    table = Table(title="\nPatients classified correctly, of those that no model was trained on")
    table.add_column("hospital")
    for heading in ("alone", "alone, at the others", "federated", "pooled"):
        table.add_column(heading, justify="right")
    for site in HOSPITALS:
        table.add_row(NAMES[site], *(f"{of[site]:.1%}" for of in accuracy))
    table.add_section()
    table.add_row("average", *(f"{mean(of):.1%}" for of in accuracy), style="bold")
    console.print(table)
    console.print(
        "alone: trained on this hospital's patients only; at the others: that model, at the other three\n"
        "federated: trained by all four, and no patient left a hospital\n"
        "pooled: trained on all patients in one place, which is not allowed",
        style="dim",
        soft_wrap=True,
    )


def draw(accuracy: Accuracy, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    groups = [*(NAMES[site] for site in HOSPITALS), "average"]
    bars = {  # heading -> (accuracies, colour, colour of its edge)
        "alone": (accuracy.alone, "#c9ccd3", "#c9ccd3"),
        "alone, at the others": (accuracy.elsewhere, "white", "#b4b8c2"),
        "federated": (accuracy.federated, "#1f6feb", "#1f6feb"),
        "pooled (not allowed)": (accuracy.pooled, "#8b93a3", "#8b93a3"),
    }
    width = 0.8 / len(bars)
    figure, axes = plt.subplots(figsize=(9, 4.5), dpi=150)
    for i, (label, (of, colour, edge)) in enumerate(bars.items()):
        left = [x + (i - (len(bars) - 1) / 2) * width for x in range(len(groups))]
        heights = [100 * value for value in (*(of[site] for site in HOSPITALS), mean(of))]
        drawn = axes.bar(left, heights, width * 0.88, label=label, color=colour, edgecolor=edge)
        axes.bar_label(drawn, fmt="%.0f", padding=2, fontsize=8, color="#30343c")
    axes.axvline(len(groups) - 1.5, color="#d9dce2", linewidth=1)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, 108)
    axes.set_ylabel("test patients classified correctly, %")
    axes.set_title("One model for four hospitals, and no patient left any of them", loc="left", pad=28)
    axes.legend(ncols=len(bars), frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 1.0))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    axes.yaxis.grid(color="#eceef2")
    axes.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(path)
    console.print(f"Drawn in {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
