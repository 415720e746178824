"""The commands, in the order in which a user meets them.

Each command imports what it needs when it runs, so that `fedtrain --help` waits for nothing. An error that
is the user's to act on is one line on stderr; --traceback, or FEDTRAIN_DEBUG=1, shows where it came from.
Exit codes are in docs/cli.md.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import __version__
from ..errors import writing
from .arguments import (
    STOP_S,
    MainCommands,
    as_json,
    begin_with,
    code_of_peer,
    drive_shown,
    ends,
    for_a_user,
    line_of,
    stop,
    which_round,
    which_rounds,
    with_config,
    with_data,
)
from .audit import audit, verify
from .certificates import certs, join
from .output import (
    columns,
    print_evaluation,
    print_json,
    print_matrix,
    print_plan,
    print_runs,
    print_statistics,
    row_of_the_table,
    short,
)
from .policies import policy, task
from .projects import doctor, new

if TYPE_CHECKING:
    from ..config import Config

QUICK_START = """\b
Quick start:
  fedtrain new heart && cd heart       a project that runs as it is
  fedtrain simulate                    all its sites on this machine
  fedtrain task approve                what may run at the sites here
  fedtrain aggregator                  beside it: fedtrain site site-1, …
  fedtrain certs invite north          a code by which a site elsewhere joins
"""


@click.group(
    cls=MainCommands, invoke_without_command=True, epilog=QUICK_START,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
@click.version_option(__version__, message="fedtrain %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train one model on data that stays where it is: simulated here, or at real sites over mutual TLS."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """The `fedtrain` command."""
    for number in ends():
        signal.signal(number, stop)
    cli(prog_name="fedtrain", color=False if os.environ.get("NO_COLOR") else None)


# --- a project, on one machine


cli.add_command(new)


@cli.command()
@with_config
@as_json
@click.option("--mode", type=click.Choice(["federated", "gossip"]), default="federated", show_default=True,
              help="Around an aggregator, or each with its neighbours.")  # fmt: skip
@click.option("--debug", metavar="SITE", help="Train this site in this process, so that breakpoint() works.")
@click.option("--fresh", is_flag=True, help="Forget the earlier rounds of this simulation and start over.")
@begin_with
@click.option(
    "--partition-png", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="First draw to FILE which site has how much of which label.",
)  # fmt: skip
def simulate(
    config: Config,
    json: bool,
    mode: str,
    debug: str | None,
    fresh: bool,
    start: str | None,
    partition_png: Path | None,
) -> None:
    """Train with all sites simulated on this machine."""
    from .. import api
    from ..runtime.simulations import simulation

    if partition_png is not None:
        with writing(partition_png):
            simulation.draw_partition(config, partition_png)
    drive_shown(
        lambda show: api.simulation(config, mode=mode, debug=debug, fresh=fresh, start=start, on_event=show),
        json=json, plain=debug is not None,
    )  # fmt: skip


@cli.command()
@with_config
@as_json
@click.option("--site", "name", metavar="NAME", help="Of the data of this site; without it, of all sites.")
@with_data
def stats(config: Config, json: bool, name: str | None, data_dir: Path | None) -> None:
    """Tell statistics of the data that is here, without training."""
    from .. import api

    found = api.stats(config, site=name, data_dir=data_dir)
    print_statistics(found, config.simulate_dir if name is None else config.site_dir(name), json=json)


@cli.command()
@click.argument("kind", metavar="KIND")
@click.option("-n", "peers", type=click.IntRange(min=1), required=True, help="How many peers.")
@click.option("--weights", default="", metavar="NAME",
              help="metropolis, uniform or push-sum; without it, what suits the graph.")  # fmt: skip
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Draw the graph to FILE.")  # fmt: skip
@click.option("--parameters", type=click.IntRange(min=1), default=1_000_000, show_default=True,
              help="Of the model whose bytes are told, float32.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of a drawn graph.")
@as_json
def topology(
    kind: str, peers: int, weights: str, png: Path | None, parameters: int, seed: int, json: bool
) -> None:
    """Tell how fast peers agree on a graph, and what it costs."""
    from ..topology import analysis, parse

    graph = parse(kind, weights, Path.cwd())
    report = analysis.report(graph, peers, seed)
    if png is not None:
        with writing(png):
            analysis.draw(graph, peers, png, seed)
    if json:
        print_json(report)
    else:
        click.echo("\n".join(report.lines(parameters)))


# --- across machines


for each in (certs, join, task, policy):
    cli.add_command(each)


@cli.command()
@with_config
@as_json
@begin_with
@click.option("--stats", is_flag=True, help="Only ask the sites for statistics of their data, then end.")
@with_data
def aggregator(config: Config, json: bool, start: str | None, stats: bool, data_dir: Path | None) -> None:
    """Wait for the sites and train with them, round by round."""
    from .. import api

    if stats and (start is not None or data_dir is not None):
        raise click.UsageError("--stats trains nothing: leave --from and --data out.")
    if stats:
        found = drive_shown(lambda show: api.aggregate_stats(config, on_event=show), json=json)
        return print_statistics(found, config.run_dir, json=json)
    drive_shown(lambda show: api.aggregate(config, start=start, data_dir=data_dir, on_event=show), json=json)


@cli.command()
@click.argument("name")
@with_config
@as_json
@with_data
def site(config: Config, name: str, json: bool, data_dir: Path | None) -> None:
    """Join the aggregator as NAME; train on the data here."""
    from .. import api

    drive_shown(
        lambda show: api.site(name, config, data_dir=data_dir, on_event=show), json=json, within_s=STOP_S
    )


@cli.command()
@click.argument("name")
@with_config
@as_json
@with_data
@click.option("--invitation", "code", metavar="CODE", help="What `fedtrain invite NAME` printed elsewhere.")
def peer(config: Config, name: str, json: bool, data_dir: Path | None, code: str | None) -> None:
    """Train as NAME with neighbours, without an aggregator."""
    from .. import api

    code_of_peer(drive_shown(lambda show: api.as_peer(name, config, code, data_dir, show), json=json))


@cli.command()
@click.argument("guest", metavar="NAME")
@with_config
@click.option("--by", "host", metavar="PEER", required=True, help="Who lets it in: a peer that lives here.")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), default=7, show_default=True,
              help="How long it is good for.")  # fmt: skip
def invite(config: Config, guest: str, host: str, days: float) -> None:
    """Print a code by which NAME joins the peers, once."""
    from ..runtime.peers.enrolment import invite, to_pin

    click.echo(invite(config, guest, host, days=days).code)
    if lacks := to_pin(config, guest, host):
        click.echo(lacks, err=True)


@cli.command()
@with_config
@as_json
@with_data
@begin_with
@click.option("--profile", metavar="STEPS", type=click.IntRange(min=1), default=None,
              help="Record so many steps of each rank, as traces for ui.perfetto.dev.")  # fmt: skip
def datacenter(
    config: Config, json: bool, data_dir: Path | None, start: str | None, profile: int | None
) -> None:
    """Train with all ranks that torchrun started, as [parallel] says."""
    from .. import api, events
    from ..runtime.datacenters import datacenter
    from ..tracking.live import screen
    from ..training.elastic import fail

    first = os.environ.get("RANK", "0") == "0"
    source = None if start is None else api.source_of(config, start)
    try:
        with screen(json=json) if first else nullcontext(None) as show:
            log = api.logged(config.datacenter_dir, show) if show else nullcontext(events.silent)
            with log as emit:
                datacenter.run(config, emit=emit, data_dir=data_dir, start=source, profile=profile or 0)
    except Exception as e:
        if "RANK" not in os.environ:
            raise
        fail(e, line_of(e) if for_a_user(e) else f"{type(e).__name__}: {e}")


@cli.command()
@with_config
@as_json
@click.option("--sites", type=click.IntRange(min=1), help="In a round; without it, those of a simulation.")
@click.option("--ranks", type=click.IntRange(min=1), help="Of a datacenter run, instead of a federation.")
@with_data
def plan(config: Config, json: bool, sites: int | None, ranks: int | None, data_dir: Path | None) -> None:
    """Estimate what a round, or a rank, will cost."""
    from .. import modes

    if ranks is not None:
        from ..tracking.live import size
        from ..training.parallel.estimate import planned

        mesh, memory = planned(config, ranks, data_dir)
        if json:
            print_json({"ranks": ranks, "mesh": mesh, "memory_bytes": memory})
        else:
            click.echo(f"{ranks} ranks, mesh {mesh}; memory of the rank that has most:")
            columns([(f"  {name}", size(nbytes)) for name, nbytes in memory.items()])
            row_of_the_table(config, *modes.names_of("datacenter", config, {}))
        return
    from ..runtime.plan import round_plan

    found, compared = round_plan(config, sites, data_dir), []
    if config.simulate.timed:
        from ..runtime.simulations.policies import policies

        compared = policies(config, sites, data_dir)
    if json:
        sums = {"aggregator_bytes": found.aggregator_bytes, "run_bytes": found.run_bytes}
        return print_json({**asdict(found), **sums, "policies": [asdict(each) for each in compared]})
    print_plan(config, found, compared)


# --- looking at runs


@cli.command()
@click.argument("run", required=False)
@with_config
@as_json
def watch(config: Config, run: str | None, json: bool) -> None:
    """Follow a run (without RUN, the newest) until it finishes."""
    from .. import events
    from ..api import run_dir
    from ..tracking import log
    from ..tracking.live import screen

    folder = run_dir(config, run)
    with screen(json=json) as show:
        finished, idle, told = False, 0, False
        for event in log.follow(folder):
            if event is not None:
                show(event)
                finished = isinstance(event, events.RunFinished) or (
                    finished and not isinstance(event, events.RunStarted)
                )
                idle, told = 0, False
            elif finished:
                return
            elif not log.running(folder):
                idle += 1  # once may be the instant before its last line
                if idle > 1 and not told and not json:
                    text = "no process works on this run; waiting for it to go on"
                    show(events.Notice(time=time.time(), text=text))
                    told = True


@cli.command()
@with_config
@as_json
def runs(config: Config, json: bool) -> None:
    """List the runs of this project, the newest last."""
    from ..tracking.runs import summaries

    found = summaries(config.root / config.run.dir)
    if json:
        for summary in found:
            print_json(summary)
    elif found:
        print_runs(found)
    else:
        click.echo(f"No run in {short(config.root / config.run.dir)} yet. Start one: fedtrain simulate")


cli.add_command(doctor)


@cli.command()
@click.argument("run", required=False)
@with_config
@as_json
@click.option("-o", "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="The folder to write to; without it, RUN-model.")  # fmt: skip
@click.option("--round", "round_", metavar="N|best", callback=which_round,
              help="Which round; without it, the last.")  # fmt: skip
@click.option("--site", "name", metavar="NAME",
              help="This site's own model, where the strategy gives each site one.")  # fmt: skip
@click.option("--format", "formats", multiple=True,
              type=click.Choice(["safetensors", "onnx", "torch-export"]),
              help="Also as a graph that runs without the task; may be repeated.")  # fmt: skip
@with_data
def export(
    config: Config, run: str | None, json: bool, out: Path | None, round_: Any, name: str | None,
    formats: tuple[Any, ...], data_dir: Path | None,
) -> None:  # fmt: skip
    """Write a run's model as files that need no fedtrain."""
    import msgspec

    from ..api import run_dir
    from ..runtime import lineage
    from ..tracking.export import export, staying

    source, graphs = run_dir(config, run), sorted(set(formats) - {"safetensors"})
    if name is None and data_dir is not None and not graphs:
        raise click.UsageError("--data is for --format, or a site's own model: name the site with --site.")
    if name is None:
        folder = export(source, out or Path(f"{source.name}-model"), round_)
    else:
        from ..runtime import personal

        personal.only_the_newest(round_)
        whose = source.name if source.name.endswith(f"@{name}") else f"{source.name}-{name}"
        folder = personal.export(config, source, name, out or Path(f"{whose}-model"), data_dir=data_dir)
    about = (folder / "model.json").read_bytes()
    for file in (lineage.FILE, *lineage.GRAPHS):  # of another round
        (folder / file).unlink(missing_ok=True)
    if ours := name is None and source.resolve() == config.run_dir.resolve():
        lineage.sign(config, folder)
    if graphs:
        from ..runtime import portable

        sites = msgspec.json.decode(about)["sites"]
        for each in graphs:
            apart = portable.add(
                config, source, folder, each, round=round_, site=name, data_dir=data_dir, sites=sites
            )
            if ours:
                lineage.sign(config, folder, graphs=True)
            click.echo(f"{portable.FILES[each]}: outputs within {apart:.0e} of the model's", err=True)
    if local := msgspec.json.decode(about).get("local"):
        click.echo(staying(source, local), err=True)
    if json:
        print_json(msgspec.json.decode(about))
    else:
        click.echo(f"{folder} holds " + ", ".join(sorted(path.name for path in folder.iterdir())))


@cli.command()
@click.argument("run", metavar="[RUN]...", nargs=-1)
@with_config
@as_json
@click.option("--site", "name", metavar="NAME", help="On the data of this site; without it, of all sites.")
@with_data
@click.option("--round", "rounds", metavar="N|best", multiple=True, callback=which_rounds,
              help="Which round of a run; without it, the last.")  # fmt: skip
@click.option("--matrix", is_flag=True, help="Each model, of several runs or rounds, on each site's data.")
def evaluate(
    config: Config, run: tuple[str, ...], json: bool, name: str | None, data_dir: Path | None,
    rounds: tuple[Any, ...], matrix: bool,
) -> None:  # fmt: skip
    """Measure finished models on the test data that is here."""
    from .. import api

    if not matrix and (len(run) > 1 or len(rounds) > 1):
        raise click.UsageError("one run, and one round of it, is measured; several are with --matrix.")
    sources = [api.source_of(config, each) for each in run] or [api.run_dir(config, None)]
    if matrix:
        table = api.evaluate(sources, config, site=name, data_dir=data_dir, round=rounds, matrix=True)
        return print_json(table) if json else print_matrix(table)
    found = api.evaluate(sources[0], config, site=name, data_dir=data_dir, round=rounds[0])
    return print_json(found) if json else print_evaluation(found, sources[0])


cli.add_command(audit)
cli.add_command(verify)
