"""What each strategy learns on uneven sites: accuracy after a fixed number of rounds, and rounds to a target.

Twenty sites, of which ten are drawn in a round: Fashion-MNIST dealt by Dirichlet(0.1) and Dirichlet(1.0),
and next characters of twenty of Shakespeare's roles (learning_tasks.py). All strategies have the same data,
initial weights, draws of sites and local work. Each has a learning rate of its own, found by climbing a
ladder from its middle on seed 0, in a third of the rounds, and then the best of a few values of its own
options; seeds from 1 on are measured. A seed decides the deal, the weights and who is drawn.

    accuracy             mean of the last 3 rounds, over all test examples; "±" is half of the 95 % interval
    against_fedavg       the difference, by pairs of equal seeds; noise where its interval holds 0
    worst_decile         mean accuracy of the two worst sites, over the same rounds
    rounds_to_target     mean of the first rounds whose accuracy is the target's; `reached` says by how many

fedbn, fedper, fedrep, per_fedavg, ditto and ifca are judged by each site's own model on the site's own test
data, and so is `alone`: a site's training without the others. fedavg's figures mean the same, with one model
for all. A round of cyclic is ten sites, one after the other; one of fedsgd is one step on all data of ten
sites.

Every finished run is a line of --out; a run that is there is not repeated, so a stopped benchmark goes on,
and several at once may write one file.

    python benchmarks/learning.py [--json] [--out FILE] [--full | --small] [--case NAME] [--method NAME]
                                  [--seeds 5] [--markdown FILE] [--png FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import torch
from learning_tasks import Clothing, Roles

import fedtrain

LADDER = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # learning rates
TUNING_SEED = 0
DRAWN = 10  # sites a round
MARGIN = 0.01  # of accuracy, for which another rate is taken
LAST = 3  # rounds whose accuracy is averaged
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 % of t, 1 to 9 degrees
Options = dict[str, Any]

# The first options of each are the paper's or fedtrain's own, the others were tried on seed 0.
GLOBAL: dict[str, list[Options]] = {
    "fedavg": [{}],
    "fedprox": [{"mu": 0.01}, {"mu": 0.1}],
    "adaptive_fedprox": [{"mu": 0.0}, {"mu": 1.0}],
    "inexact_fedprox": [{"mu": 0.01}, {"mu": 0.1}],
    "fedavgm": [{"momentum": 0.9}, {"momentum": 0.9, "server_lr": 0.3}],
    "diloco": [{"server_lr": 0.7}, {"server_lr": 0.3}],
    "fedadagrad": [{"server_lr": 0.1}, {"server_lr": 0.03}],
    "fedadam": [{"server_lr": 0.1}, {"server_lr": 0.01}],
    "fedyogi": [{"server_lr": 0.1}, {"server_lr": 0.01}],
    "scaffold": [{}],
    "fednova": [{}],
    "feddyn": [{"alpha": 0.01}, {"alpha": 0.1}],
    "mimelite": [{"momentum": 0.9}, {"momentum": 0.5}],
    "qfedavg": [{"q": 1.0, "max_h": 1e6}, {"q": 0.1, "max_h": 1e6}],
    "cyclic": [{}],
    "fedsgd": [{}],
}
PERSONAL: dict[str, list[Options]] = {
    "fedbn": [{}],
    "fedper": [{"local": ["head.*"]}],
    "fedrep": [{"local": ["head.*"], "head_epochs": 2}],
    "per_fedavg": [{"alpha": 0.01}, {"alpha": 0.1}],
    "ditto": [{"penalty": 0.1}, {"penalty": 1.0}],
    "ifca": [{"spread": 0.1}, {"spread": 0.02}],
    "alone": [{"penalty": 0.0}],  # Ditto's own models without a pull
}
METHODS = GLOBAL | PERSONAL
KIND = {"alone": "ditto"}  # the others are called as their strategy


@dataclass(frozen=True)
class Case:
    """What all methods are tried on."""

    name: str
    task: Callable[[int], fedtrain.Task]  # of a seed
    target: float
    rate: float = 0.1  # of LADDER, where the search begins
    rounds: int = 15
    batch_size: int = 32
    local_epochs: int = 2
    scale: str = "reduced"

    def settings(self, method: str, rate: float, options: Options, seed: int) -> dict[str, Any]:
        """All that a run depends on besides the task."""
        settings = {
            "run.rounds": self.rounds, "run.seed": seed, "secagg.enabled": False, "simulate.workers": 0,
            "train.lr": rate, "train.batch_size": self.batch_size, "train.local_epochs": self.local_epochs,
            "strategy.kind": KIND.get(method, method), "strategy.fraction": DRAWN / 20,
            **{f"strategy.{key}": value for key, value in options.items()},
        }  # fmt: skip
        if method == "fedsgd":
            settings |= {"train.batch_size": 0, "train.local_epochs": 1}
        if method == "inexact_fedprox":  # half of the sites make one pass or two
            settings |= {"train.local_epochs": 2}
        if method == "cyclic":
            settings |= {"run.rounds": DRAWN * self.rounds, "evaluate.every": DRAWN, "strategy.min_sites": 1}
        return settings


def clothing(alpha: float, target: float, full: bool) -> Case:
    size = (60_000, 10_000, True) if full else (4_000, 2_000)
    return Case(f"fashion-mnist {alpha}", lambda seed: Clothing(alpha, seed, *size), target)


def cases(full: bool) -> dict[str, Case]:
    """The cases of a reduced run or of a full one, which has all data, a CNN and 50 rounds."""
    roles = Case(
        "shakespeare", lambda seed: Roles() if full else Roles(4_000), 0.45 if full else 0.33,
        rate=1.0, batch_size=8, local_epochs=1,
    )  # fmt: skip
    targets = (0.85, 0.88) if full else (0.70, 0.78)
    found = [clothing(0.1, targets[0], full), clothing(1.0, targets[1], full), roles]
    if full:
        found = [replace(case, rounds=50, scale="full") for case in found]
    return {case.name: case for case in found}


# Seconds of all methods, to see that they run; its figures say nothing.
SMALL = Case(
    "roles", lambda seed: Roles(400), 0.1, rate=1.0, rounds=2, batch_size=8, local_epochs=1, scale="small"
)


@dataclass(frozen=True)
class Course:
    """A run, round by round. One that failed has no rounds."""

    accuracy: list[float]
    worst: list[float]
    error: str = ""

    def last(self, values: list[float]) -> float:
        return statistics.fmean(values[-LAST:]) if values else 0.0

    def reaches(self, target: float) -> int | None:
        return next((i for i, value in enumerate(self.accuracy, 1) if value >= target), None)


class Bench:
    """Runs, each of which is made once and kept."""

    def __init__(self, out: Path, folder: Path) -> None:
        self._out, self._folder = out, folder
        self._kept = dict(kept(out)) if out.exists() else {}

    def run(self, case: Case, method: str, rate: float, options: Options, seed: int) -> Course:
        settings = case.settings(method, rate, options, seed)
        key = json.dumps({"case": case.name, "scale": case.scale, "method": method} | settings)
        if key not in self._kept:
            self._kept[key] = train(case.task(seed), settings | {"run.dir": str(self._folder)})
            with self._out.open("a") as file:
                file.write("\n" + json.dumps({"key": key, **vars(self._kept[key])}))
        return self._kept[key]

    def tuned(self, case: Case, method: str) -> tuple[float, Options]:
        """The learning rate and the options that are best on the tuning seed, in a third of the rounds."""
        short = replace(case, rounds=max(1, case.rounds // 3))

        def found(rate: float, options: Options) -> float:
            course = self.run(short, method, rate, options, TUNING_SEED)
            return course.last(course.accuracy)

        first, *others = METHODS[method]
        rate = climbed(lambda rate: found(rate, first), case.rate)
        return rate, max([first, *others], key=lambda options: found(rate, options))


def kept(out: Path) -> list[tuple[str, Course]]:
    """The runs of a file. A line that a killed benchmark left unfinished is no run, nor is an empty one."""
    found = []
    for line in out.read_text().splitlines():
        try:
            run = json.loads(line)
        except json.JSONDecodeError:
            continue
        found.append((run.pop("key"), Course(**run)))
    return found


def climbed(worth: Callable[[float], float], start: float) -> float:
    """The rate of LADDER from which neither neighbour is better by a point of accuracy: a rate that is best
    by less than that on one seed may diverge on the next."""
    first = LADDER.index(start)
    for way in (1, -1):
        at = first
        while 0 <= at + way < len(LADDER) and worth(LADDER[at + way]) > worth(LADDER[at]) + MARGIN:
            at += way
        if at != first:
            return LADDER[at]
    return start


def train(task: fedtrain.Task, settings: dict[str, Any]) -> Course:
    """One simulation."""
    try:
        history = fedtrain.simulate(task, settings, fresh=True, progress=False).history
    except fedtrain.FedtrainError as e:  # a rate at which the method diverges
        return Course([], [], str(e))
    rows = [row for row in history if row.get("accuracy") is not None]
    return Course([r["accuracy"] for r in rows], [r["accuracy/worst_decile"] for r in rows])


# --- what the runs say


def interval(values: list[float]) -> float:
    """Half of the 95 % interval of the mean, by Student's t; infinite for one value."""
    if len(values) < 2:
        return float("inf")
    return STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Finding:
    """What a method reached on a case, over seeds."""

    rate: float
    options: Options
    courses: list[Course]
    target: float

    @property
    def accuracies(self) -> list[float]:
        return [course.last(course.accuracy) for course in self.courses]

    @property
    def worst(self) -> float:
        return statistics.fmean(course.last(course.worst) for course in self.courses)

    @property
    def rounds(self) -> list[int]:
        """To the target, of the seeds that reached it."""
        return [n for course in self.courses if (n := course.reaches(self.target)) is not None]

    def against(self, other: Finding) -> tuple[float, float]:
        """The mean difference from another method by pairs of equal seeds, and half of its interval."""
        pairs = [a - b for a, b in zip(self.accuracies, other.accuracies, strict=True)]
        return statistics.fmean(pairs), interval(pairs)


def verdict(difference: float, half: float) -> str:
    return "noise" if abs(difference) <= half else "better" if difference > 0 else "worse"


Findings = dict[str, dict[str, Finding]]  # case -> method -> finding


def measure(bench: Bench, chosen: list[Case], methods: list[str], seeds: int) -> Findings:
    """All methods are tuned, then all have their first seed, then their second, and so on."""
    tuned = {(c.name, m): bench.tuned(c, m) for c in chosen for m in methods}
    courses: dict[tuple[str, str], list[Course]] = {at: [] for at in tuned}
    for seed in range(TUNING_SEED + 1, TUNING_SEED + 1 + seeds):
        for case in chosen:
            for method in methods:
                run = bench.run(case, method, *tuned[case.name, method], seed)
                courses[case.name, method].append(run)
    return {
        case.name: {m: Finding(*tuned[case.name, m], courses[case.name, m], case.target) for m in methods}
        for case in chosen
    }


def tell(findings: Findings) -> None:
    for case, found in findings.items():
        for method, finding in found.items():
            figures: dict[str, tuple[float, str]] = {
                "learning_rate": (finding.rate, ""),
                "accuracy": (statistics.fmean(finding.accuracies), ""),
                "worst_decile": (finding.worst, ""),
                "reached": (len(finding.rounds), "seeds"),
            }
            if finding.rounds:
                figures["rounds_to_target"] = (statistics.fmean(finding.rounds), "rounds")
            if len(finding.rounds) > 1:
                figures["rounds_to_target_±"] = (interval([float(n) for n in finding.rounds]), "rounds")
            if len(finding.courses) > 1:
                figures["accuracy_±"] = (interval(finding.accuracies), "")
                if method != "fedavg" and "fedavg" in found:
                    difference, half = finding.against(found["fedavg"])
                    figures |= {"against_fedavg": (difference, ""), "against_fedavg_±": (half, "")}
            for metric, (value, unit) in figures.items():
                common.emit("learning", f"{case}: {method}", metric, value, unit)


def table(findings: Findings, path: Path) -> None:
    """The findings as the tables of docs/learning.md."""
    lines: list[str] = []
    for case, found in findings.items():
        target = next(iter(found.values())).target
        lines += [
            f"### {case}\n",
            f"| method | rate, options | accuracy % | against fedavg, points | | worst 2 sites % "
            f"| rounds to {100 * target:.0f} % |",
            "|---|---|---|---|---|---|---|",
        ]
        for method in sorted(found, key=lambda m: (m in PERSONAL, -statistics.fmean(found[m].accuracies))):
            lines.append(_row(method, found[method], found.get("fedavg")))
        lines.append("")
    path.write_text("\n".join(lines))


def _row(method: str, finding: Finding, fedavg: Finding | None) -> str:
    against, word = "", ""
    if fedavg is not None and fedavg is not finding:
        difference, half = finding.against(fedavg)
        against, word = f"{100 * difference:+.1f} ± {100 * half:.1f}", verdict(difference, half)
    rounds, seeds = finding.rounds, len(finding.courses)
    reached = "not reached"
    if len(rounds) == seeds:
        reached = f"{statistics.fmean(rounds):.1f} ± {interval([float(n) for n in rounds]):.1f}"
    elif rounds:
        reached = f"{len(rounds)} of {seeds} seeds"
    own = ", ".join(f"{k} {v:g}" for k, v in finding.options.items() if k not in ("max_h", "local"))
    mean, half = statistics.fmean(finding.accuracies), interval(finding.accuracies)
    return (
        f"| `{method}` | {finding.rate:g}{', ' if own else ''}{own} | {100 * mean:.1f} ± {100 * half:.1f} "
        f"| {against} | {word} | {100 * finding.worst:.1f} | {reached} |"
    )


def draw(findings: Findings, path: Path) -> None:
    """Accuracy and its interval of every method, a panel a case; personal models below the line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(findings), 6), layout="constrained")
    panels = figure.subplots(1, len(findings), squeeze=False)[0]
    for panel, (case, found) in zip(panels, findings.items(), strict=True):
        order = sorted(found, key=lambda m: (m in PERSONAL, -statistics.fmean(found[m].accuracies)))
        for row, method in enumerate(order):
            values = found[method].accuracies
            colour = "C1" if method in PERSONAL else "black" if method == "fedavg" else "C0"
            half = interval(values) if len(values) > 1 else 0.0
            panel.errorbar(statistics.fmean(values), row, xerr=half, fmt="o", color=colour, capsize=3)
            panel.plot(values, [row] * len(values), "|", color=colour, alpha=0.6)
        if "fedavg" in found:
            panel.axvline(statistics.fmean(found["fedavg"].accuracies), color="black", linewidth=0.8, ls="--")
        if own := sum(method in PERSONAL for method in order):
            panel.axhline(len(order) - own - 0.5, color="grey", linewidth=0.8)
        panel.set_yticks(range(len(order)), order)
        panel.invert_yaxis()
        panel.set(title=case, xlabel="accuracy, mean and 95 % interval")
        panel.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="finished runs, a line each; what is there is not repeated")
    parser.add_argument("--full", action="store_true", help="all data, a CNN, 50 rounds, 5 seeds: days")
    parser.add_argument("--small", action="store_true", help="to see that all methods run: seconds")
    parser.add_argument("--case", action="append", choices=cases(False), help="may be repeated")
    parser.add_argument("--method", action="append", choices=METHODS, help="may be repeated")
    parser.add_argument("--seeds", type=_seeds, help="5, or 1 of --small")
    parser.add_argument("--rounds", type=int, help="15, 50 of --full, 2 of --small")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args(arguments)
    common.begin(args)
    torch.set_num_threads(1)
    known = {SMALL.name: SMALL} if args.small else cases(args.full)
    chosen = [case for name, case in known.items() if name in (args.case or [name])]
    if args.rounds:
        chosen = [replace(case, rounds=args.rounds) for case in chosen]
    seeds = args.seeds or (1 if args.small else 5)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.out or Path(folder) / "runs.jsonl", Path(folder) / "runs")
        findings = measure(bench, chosen, args.method or list(METHODS), seeds)
    tell(findings)
    if args.markdown:
        table(findings, args.markdown)
    if args.png:
        draw(findings, args.png)


def _seeds(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= len(STUDENT) + 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 to {len(STUDENT) + 1}")
    return int(text)


if __name__ == "__main__":
    main()
