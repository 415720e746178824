"""What commands print: tables that fit the terminal, and paths as short as can be."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..config import Config
    from ..runtime.cross_site import MatrixReport
    from ..runtime.plan import RoundTraffic
    from ..runtime.simulations.policies import PolicyPlan
    from ..statistics import Statistics
    from ..tracking.export import EvaluationReport
    from ..tracking.runs import Summary

RUN_COLUMNS = ("RUN", "STATE", "ROUND", "LOSS", "EVALUATED", "BEST", "UPDATED")
PRICED_SITES = 5  # of whose epsilon `fedtrain plan` prints a line, those that spend most
GAP, LEAST = "  ", 12  # between columns; characters that a column which makes way keeps, unless it goes


def run_row(s: Summary) -> tuple[str, ...]:
    """A run as a row of RUN_COLUMNS."""
    from ..tracking.live import averages, duration, number

    best = "" if s.best_round is None else f"{number(s.best_value)} in round {s.best_round}"
    when = time.localtime(s.updated)
    this_year = when.tm_year == time.localtime().tm_year
    updated = "" if s.updated is None else time.strftime("%m-%d %H:%M" if this_year else "%Y-%m-%d", when)
    loss = "" if s.loss is None else number(s.loss)
    rounds = f"{s.round}/{s.rounds}" if s.rounds else f"{s.round or ''}"
    rounds += f" at {duration(s.clock_s)}" if s.clock_s is not None else ""
    state = f"{s.state}, own model" if s.own_model else s.state
    return (s.run, state, rounds, loss, averages(s.metrics), best, updated)


def print_runs(found: list[Summary]) -> None:
    """Print runs as a table that fits the terminal."""
    columns(fitted([RUN_COLUMNS, *map(run_row, found)], room()))


def fitted(rows: list[tuple[str, ...]], room: int) -> list[tuple[str, ...]]:
    """The rows of RUN_COLUMNS where there is room for so many characters: first the metrics make way, then
    the middle of the names."""
    at = RUN_COLUMNS.index("EVALUATED")
    over = width_of(rows) - room
    if over > 0:
        left = max(len(row[at]) for row in rows) - over
        rows = [(*row[:at], *([cut(row[at], left)] if left >= LEAST else []), *row[at + 1 :]) for row in rows]
    if (over := width_of(rows) - room) > 0:
        left = max(LEAST, max(len(row[0]) for row in rows) - over)
        rows = [(cut(row[0], left, tail=left // 2), *row[1:]) for row in rows]
    return rows


def width_of(rows: list[tuple[str, ...]]) -> int:
    """Characters of a whole row, as `columns` prints it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return sum(widths) + len(GAP) * (len(widths) - 1)


def cut(cell: str, width: int, tail: int = 0) -> str:
    return cell if len(cell) <= width else cell[: width - tail - 1] + "…" + cell[len(cell) - tail :]


def room() -> int:
    """Characters in a line of the terminal; elsewhere as many as one likes."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def print_json(value: Any) -> None:
    """One line for a program."""
    import msgspec

    from ..tracking import live

    click.echo(msgspec.json.encode(value), file=live.for_programs)


def columns(rows: list[tuple[str, ...]]) -> None:
    """Print rows of cells, one under the other; a line too long for the terminal is cut."""
    widths, most = [max(map(len, column)) for column in zip(*rows, strict=True)], room()
    for row in rows:
        text = GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        click.echo(text if len(text) <= most else text[: most - 1] + "…")


def print_statistics(found: Statistics, folder: Path, *, json: bool) -> None:
    """Print statistics of the sites' data, which were written to the folder."""
    if json:
        return print_json(found)
    most = room()
    for line in found.lines():
        click.echo(line if len(line) <= most else line[: most - 1] + "…")
    click.echo(f"written to {short(folder / 'statistics.json')}")


def short(path: Path) -> str:
    """Relative to where the user is, when it lies there."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def print_evaluation(found: EvaluationReport, source: Path) -> None:
    """Print a model's metrics at each site, and over all of them where there are several."""
    from ..fairness import SUFFIXES, averaged
    from ..tracking.export import EVALUATION
    from ..tracking.live import number

    tell_split(found.data)
    if found.own_models:
        click.echo("each site's own model, on the site's own data:")
    names = averaged(found.metrics)
    rows = [(site, *(number(own.get(each)) for each in names)) for site, own in found.by_site.items()]
    if len(rows) > 1:
        rows.append(("all", *(number(found.metrics[each]) for each in names)))
        rows += [(how, *(number(found.metrics.get(f"{each}/{how}")) for each in names)) for how in SUFFIXES]
    columns([("SITE", *(each.upper() for each in names)), *rows])
    folder = source if source.is_dir() else source.parent
    if os.access(folder, os.W_OK):
        click.echo(f"written to {short(folder / EVALUATION)}")


def print_matrix(found: MatrixReport) -> None:
    """Print a table for each metric: models by sites, and over all of these where there are several."""
    from ..fairness import SUFFIXES, averaged
    from ..tracking.live import number

    tell_split(found.data)
    sites = next(iter(found.by_model.values())).keys()
    for i, name in enumerate(dict.fromkeys(n for own in found.metrics.values() for n in averaged(own))):
        over = {"all": name, **{how: f"{name}/{how}" for how in SUFFIXES}} if len(sites) > 1 else {}
        rows = [
            (model, *(number(found.by_model[model][site].get(name)) for site in sites),
             *(number(own.get(each)) for each in over.values()))
            for model, own in found.metrics.items()
        ]  # fmt: skip
        click.echo("\n" * (i > 0), nl=False)
        columns([(name.upper(), *sites, *over), *rows])


def tell_split(data: str) -> None:
    """Print which data it was, where it is not test data."""
    from ..tracking.export import SPLITS

    if data != "test_data":
        click.echo(f"The task has no test_data(): this is its {data}(), {SPLITS[data]} data.")


def print_plan(config: Config, found: RoundTraffic, compared: Sequence[PolicyPlan] = ()) -> None:
    """Print what a round, or a version, of these settings costs, and what simulated sites make of others."""
    how = "under masks" if found.masks else "in the open (secagg.enabled = false)"
    noun, each = "round", f"A round of {found.sites} sites"
    if config.asynchronous.enabled:
        noun, each = "version", f"A version, which is {found.updates} updates of any of {found.sites} sites"
    frozen = f", {found.frozen:,} of them frozen" if found.frozen else ""
    click.echo(f"{each}, {how}; {found.parameters:,} parameters{frozen}:")
    columns([(f"  {name}", value) for name, value in plan_lines(found, noun)])
    if compared:
        print_policies(compared)
    row_of_the_table(config, "simulate")


def print_policies(compared: Sequence[PolicyPlan]) -> None:
    """Print what rounds and versions take and lose on the simulated sites' clock."""
    from ..tracking.live import duration, size

    click.echo("By the clock of the simulated sites, without training:")
    rows = [
        (f"  {p.policy}", duration(p.round_s), f"{p.updates:.3g}", f"{p.updates_per_hour:,.0f}",
         f"{p.lost:.0%}", size(p.nbytes))
        for p in compared
    ]  # fmt: skip
    columns([("  POLICY", "A ROUND", "UPDATES", "AN HOUR", "LOST", "BYTES"), *rows])


def plan_lines(found: RoundTraffic, noun: str) -> Iterator[tuple[str, str]]:
    """What `fedtrain plan` says of a round, and how much it is."""
    from ..tracking.live import size

    whom = "each site" if noun == "round" else "a site for each update"
    yield f"to {whom}", size(found.down_bytes)
    yield f"from {whom}", size(found.up_bytes)
    yield "through the aggregator", size(found.aggregator_bytes)
    yield f"in all {found.rounds} {noun}s", size(found.run_bytes)
    if masks := found.masks:
        yield "a site masks with", f"{masks.neighbours} others"
        yield "may drop out", f"{masks.may_drop} sites"
        yield "masks cost a site", f"{masks.site_s * 1e3:,.1f} ms on this machine"
        yield "the aggregator", f"{masks.aggregator_s * 1e3:,.1f} ms"
        yield "if so many drop out", f"{masks.aggregator_worst_s * 1e3:,.1f} ms"
    if private := found.privacy:
        whose = "any example" if private.unit == "example" else "all data"
        yield (
            f"epsilon of {whose} of a site",
            (f"{private.epsilon:.3g} at delta = {private.delta:g}, after {private.updates:,} updates"),
        )
        dearest = sorted(private.by_site, key=private.by_site.__getitem__, reverse=True)
        for site in dearest[:PRICED_SITES]:
            yield f"  at {site}", f"{private.by_site[site]:.3g}"
        if left := dearest[PRICED_SITES:]:
            yield f"  at the other {len(left)}", f"down to {private.by_site[left[-1]]:.3g}"


def row_of_the_table(config: Config, mode: str) -> None:
    """Print which keys a mode reads, and which of those that are set are for others."""
    from .. import modes

    click.echo(f"{modes.MODES[mode].command} reads {modes.row(config, mode)}.")
    if idle := modes.idle(config, mode):
        click.echo(f"set for other modes: {', '.join(idle)}")
