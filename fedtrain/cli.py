"""The commands, in the order in which a user meets them.

Each command imports what it needs when it runs, so that `fedtrain --help` waits for nothing. An error that
is the user's to act on is one line on stderr; --traceback, or FEDTRAIN_DEBUG=1, shows where it came from.
Exit codes: 0 done, 1 failed, 2 wrong usage, 75 a datacenter's rank that was told to leave and checkpointed,
129 the terminal was closed, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from . import __version__
from .errors import ConfigError, FedtrainError, TaskError, story_of, writing

if TYPE_CHECKING:
    from .config import Config
    from .events import Emit
    from .runtime.plan import RoundTraffic
    from .tracking.runs import Summary

QUICK_START = """\b
Quick start:
  fedtrain new heart && cd heart       a project that runs as it is
  fedtrain simulate                    all its sites on this machine
  fedtrain certs init aggregator site-1 site-2 site-3
  fedtrain aggregator                  in one terminal
  fedtrain site site-1                 in a second; site-2, site-3 in two more
"""


CERTIFICATE_DAYS = 30
RUN_COLUMNS = ("RUN", "STATE", "ROUND", "LOSS", "EVALUATED", "BEST", "UPDATED")
GAP, LEAST = "  ", 12  # between columns; characters that a column which makes way keeps, unless it goes


class Stopped(SystemExit):
    """SIGTERM, or SIGHUP of a closed terminal; its code is 128 + the signal's number."""


class Command(click.Command):
    """A command whose errors are one readable line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--traceback"], is_flag=True, envvar="FEDTRAIN_DEBUG", help="Show where an error came from."
            )
        )

    def invoke(self, ctx: click.Context) -> Any:
        traceback = ctx.params.pop("traceback")
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of our output has gone; click ends quietly
            raise
        except (FedtrainError, OSError) as e:
            if traceback:
                raise
            if isinstance(e, TaskError) and e.__cause__ is not None:
                click.echo(story_of(e), nl=False, err=True)
            click.secho(f"fedtrain: {_line(e)}", fg="red", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("Interrupted. The same command goes on from the last committed round.", err=True)
            ctx.exit(130)
        except Stopped as stopped:
            with suppress(OSError):  # the terminal may be gone
                click.echo("Stopped. The same command goes on from the last committed round.", err=True)
            ctx.exit(cast(int, stopped.code))


def _line(error: Exception) -> str:
    room = ". Make room there, then start the same command again."
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{error}{room if full else ''}"


class Commands(click.Group):
    """Commands in the order in which they are written below."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=Commands, invoke_without_command=True, epilog=QUICK_START,
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
    for number in _ends():
        signal.signal(number, _stop)
    cli(prog_name="fedtrain", color=False if os.environ.get("NO_COLOR") else None)


def _ends() -> list[signal.Signals]:
    """The signals that end a command in order; nohup has it ignore SIGHUP."""
    hears = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGHUP] if hears else [signal.SIGTERM]


def _stop(number: int, _: object) -> None:
    raise Stopped(128 + number)


# --- what commands share


def with_config(command: Callable[..., None]) -> Callable[..., None]:
    """--config and --set, read into the command's `config`."""

    @click.option(
        "--config",
        "file",
        type=click.Path(path_type=Path),
        default="fedtrain.toml",
        show_default=True,
        metavar="FILE",
        help="The project's settings.",
    )
    @click.option(
        "--set", "sets", multiple=True, metavar="KEY=VALUE",
        help="Override a setting, as in --set train.lr=0.01; may be repeated.",
    )  # fmt: skip
    @functools.wraps(command)
    def read_first(file: Path, sets: tuple[str, ...], **arguments: Any) -> None:
        from . import modes
        from .config import Config

        config = Config.load(file, sets)
        if names := modes.names_of(command.__name__, config, arguments):
            modes.check(config, *names)
        command(config=config, **arguments)

    return read_first


begin_with = click.option(
    "--from", "start", metavar="RUN", help="Start a new run with the last model of this one, or of an export."
)
as_json = click.option("--json", "json", is_flag=True, help="Print JSON, one object a line, for a program.")


@contextmanager
def shown(run_dir: Path, *, json: bool, plain: bool = False) -> Iterator[Emit]:
    """An emit() whose events go to the run directory and to the screen."""
    from .tracking import EventLog
    from .tracking.live import screen

    with EventLog(run_dir) as log, screen(json=json, plain=plain) as show:
        log.subscribe(show)
        yield log.emit


def drive(work: Coroutine[Any, Any, Any]) -> None:
    """Run to the end. Ctrl-C, SIGTERM and SIGHUP cancel the work, which then cleans up behind itself."""
    import asyncio

    stopped = 0

    async def until_told_to_stop() -> None:
        task = asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            nonlocal stopped
            stopped = stopped or number
            task.cancel()

        for number in _ends():
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await work

    try:
        asyncio.run(until_told_to_stop())
    except asyncio.CancelledError:
        if stopped:
            raise Stopped(128 + stopped) from None
        raise


# --- a project, on one machine


@cli.command()
@click.argument("folder", metavar="NAME", type=click.Path(path_type=Path))
def new(folder: Path) -> None:
    """Make a folder with a small project that runs as it is."""
    name = folder.resolve().name
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is None:
        raise ConfigError(f"{name!r} cannot name a project: use 1 to 64 letters, digits, '.', '_' or '-'.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty. Choose another name, or empty it first.")
    folder.mkdir(parents=True, exist_ok=True)
    for template in sorted((Path(__file__).parent / "templates" / "project").iterdir()):
        if template.is_file():
            text = template.read_text(encoding="utf-8").replace("PROJECT", name)
            to = folder / {"gitignore": ".gitignore"}.get(template.name, template.name)
            with writing(to):
                to.write_text(text, encoding="utf-8")
    click.echo(f"{folder} is ready. Next: cd {folder} && fedtrain simulate")


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
    from .runtime import simulation

    if partition_png is not None:
        with writing(partition_png):
            simulation.draw_partition(config, partition_png)
    if mode == "gossip":
        from .runtime import gossip_simulation

        if start is not None:
            raise ConfigError(
                "--from: peers begin with the task's own model. Leave --from out, or simulate without "
                "--mode gossip."
            )
        with shown(config.gossip_dir, json=json, plain=debug is not None) as emit:
            drive(gossip_simulation.simulate(config, emit=emit, fresh=fresh))
        return
    source = _source(config, start)
    with shown(config.simulate_dir, json=json, plain=debug is not None) as emit:
        drive(simulation.simulate(config, emit=emit, debug=debug, fresh=fresh, start=source))


@cli.command()
@click.argument("kind", metavar="KIND")
@click.option("-n", "peers", type=click.IntRange(min=1), required=True, help="How many peers.")
@click.option("--weights", default="", metavar="NAME",
              help="metropolis, uniform or push-sum; without it, what suits the graph.")  # fmt: skip
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Draw the graph to FILE.")  # fmt: skip
@click.option("--parameters", type=click.IntRange(min=1), default=1_000_000, show_default=True,
              help="Of the model whose bytes are told, float32.")  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of a graph that is drawn."
)
@as_json
def topology(
    kind: str, peers: int, weights: str, png: Path | None, parameters: int, seed: int, json: bool
) -> None:
    """Tell how fast peers agree on a graph, and what it costs."""
    from .topology import analysis, parse

    graph = parse(kind, weights)
    report = analysis.report(graph, peers, seed)
    if png is not None:
        with writing(png):
            analysis.draw(graph, peers, png, seed)
    if json:
        import msgspec

        click.echo(msgspec.json.encode(report))
    else:
        click.echo("\n".join(report.lines(parameters)))


# --- across machines


@cli.group(cls=Commands)
def certs() -> None:
    """Make the certificates of the aggregator and the sites."""


@certs.command("init")
@with_config
@click.argument("names", metavar="[aggregator] [SITE]...", nargs=-1)
@click.option("--federation", metavar="NAME", help="Who belongs together; without it, the run's name.")
def certs_init(config: Config, names: tuple[str, ...], federation: str | None) -> None:
    """Make the federation's certificate authority, once; and certificates, where names are given."""
    from . import pki

    label = re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")
    folder = pki.init(config.root / config.network.certs, federation or label)
    click.echo(f"{_short(folder)} holds the authority of {federation or label}; it stays here, and secret.")
    for name in names:
        _issue(config, name, days=CERTIFICATE_DAYS, request=None)
    if not names:
        click.echo("Next: fedtrain certs issue aggregator site-1 site-2 site-3")


@certs.command("issue")
@with_config
@click.argument("names", metavar="[aggregator] [SITE]...", nargs=-1, required=True)
@click.option("--days", type=click.FloatRange(min=0, min_open=True), default=CERTIFICATE_DAYS,
              show_default=True, help="How long they are valid.")  # fmt: skip
@click.option("--csr", type=click.File("rb"), metavar="FILE",
              help="Sign this request (PEM) of one site, whose key then never leaves it.")  # fmt: skip
def certs_issue(config: Config, names: tuple[str, ...], days: float, csr: Any) -> None:
    """Make, or renew, certificates: "aggregator" is the aggregator's, any other name a site's."""
    if csr is not None and len(names) > 1:
        raise click.UsageError("--csr is one site's: name just that site.")
    request = None if csr is None else csr.read()
    for name in names:
        _issue(config, name, days=days, request=request)


@certs.command("revoke")
@with_config
@click.argument("names", metavar="SITE...", nargs=-1, required=True)
def certs_revoke(config: Config, names: tuple[str, ...]) -> None:
    """Strike all certificates of these sites off, for good: no peer that has the list lets them in."""
    from . import pki

    certs_dir = config.root / config.network.certs
    serials = pki.revoke(certs_dir, names)
    click.echo(f"{_short(certs_dir / 'revoked.pem')} lists {', '.join(names)} ({len(serials)} certificates).")
    click.echo("Copy it into the certs folder of one running peer: it passes it on. Nothing is restarted.")


def _issue(config: Config, name: str, *, days: float, request: bytes | None) -> None:
    from . import pki

    role = "aggregator" if name == "aggregator" else "site"
    folder = pki.issue(config.root / config.network.certs, role, name, days=days, csr=request)
    what = "holds the certificate" if request else "holds key and certificate"
    click.echo(f"{_short(folder)} {what} of {name}")


@cli.command()
@with_config
@as_json
@begin_with
def aggregator(config: Config, json: bool, start: str | None) -> None:
    """Wait for the sites and train with them, round by round."""
    from .runtime import federated

    source = _source(config, start)
    with shown(config.run_dir, json=json) as emit:
        drive(federated.serve(config, emit=emit, start=source))


@cli.command()
@click.argument("name")
@with_config
@as_json
@click.option("--data", "data_dir", type=click.Path(path_type=Path, exists=True, file_okay=False),
              metavar="DIR", help="Where this site's data is.")  # fmt: skip
def site(config: Config, name: str, json: bool, data_dir: Path | None) -> None:
    """Join the aggregator as NAME; train on the data here."""
    from .runtime import site

    with shown(config.site_dir(name), json=json) as emit:
        drive(site.run(config, name, data_dir=data_dir, emit=emit))


@cli.command()
@click.argument("name")
@with_config
@as_json
@click.option("--data", "data_dir", type=click.Path(path_type=Path, exists=True, file_okay=False),
              metavar="DIR", help="Where this peer's data is.")  # fmt: skip
@click.option(
    "--invitation", "code", metavar="CODE", help="What `fedtrain invite NAME` printed, at another peer."
)
def peer(config: Config, name: str, json: bool, data_dir: Path | None, code: str | None) -> None:
    """Train as NAME with neighbours, without an aggregator."""
    from .pki.invitation import Invitation
    from .runtime import peer

    invitation = None if code is None else Invitation.read(code)
    with shown(config.peer_dir(name), json=json) as emit:
        drive(peer.run(config, name, data_dir=data_dir, invitation=invitation, emit=emit))


@cli.command()
@click.argument("guest", metavar="NAME")
@with_config
@click.option("--by", "host", metavar="PEER", required=True, help="Who lets it in: a peer that lives here.")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), default=7, show_default=True,
              help="How long it is good for.")  # fmt: skip
def invite(config: Config, guest: str, host: str, days: float) -> None:
    """Print a code by which NAME joins the peers, once."""
    from .runtime import peer

    click.echo(peer.invite(config, guest, host, days=days).code)


@cli.command()
@with_config
@as_json
@click.option("--data", "data_dir", type=click.Path(path_type=Path, exists=True, file_okay=False),
              metavar="DIR", help="Where the data is.")  # fmt: skip
@begin_with
def datacenter(config: Config, json: bool, data_dir: Path | None, start: str | None) -> None:
    """Train with all ranks that torchrun started, as [parallel] says."""
    from . import events
    from .runtime import datacenter
    from .training.elastic import fail

    source = _source(config, start)
    first = os.environ.get("RANK", "0") == "0"
    try:
        with shown(config.datacenter_dir, json=json) if first else nullcontext(events.silent) as emit:
            datacenter.run(config, emit=emit, data_dir=data_dir, start=source)
    except Exception as e:
        if "RANK" not in os.environ:
            raise
        fail(e, _line(e) if isinstance(e, FedtrainError | OSError) else f"{type(e).__name__}: {e}")


@cli.command()
@with_config
@as_json
@click.option("--sites", type=click.IntRange(min=1), help="In a round; without it, those of a simulation.")
@click.option("--ranks", type=click.IntRange(min=1), help="Of a datacenter run, instead of a federation.")
@click.option("--data", "data_dir", type=click.Path(path_type=Path, exists=True, file_okay=False),
              metavar="DIR", help="Where the data is.")  # fmt: skip
def plan(config: Config, json: bool, sites: int | None, ranks: int | None, data_dir: Path | None) -> None:
    """Estimate what a round, or a rank, will cost."""
    import msgspec

    from . import modes

    if ranks is not None:
        from .runtime import datacenter
        from .tracking.live import size

        mesh, memory = datacenter.plan(config, ranks, data_dir)
        if json:
            click.echo(msgspec.json.encode({"ranks": ranks, "mesh": mesh, "memory_bytes": memory}))
        else:
            click.echo(f"{ranks} ranks, mesh {mesh}; memory of the rank that has most:")
            _columns([(f"  {name}", size(nbytes)) for name, nbytes in memory.items()])
            _row_of_the_table(config, *modes.names_of("datacenter", config, {}))
        return
    from .runtime.plan import round_plan

    found = round_plan(config, sites, data_dir)
    if json:
        sums = {"aggregator_bytes": found.aggregator_bytes, "run_bytes": found.run_bytes}
        click.echo(msgspec.json.encode({**asdict(found), **sums}))
        return
    how = "under masks" if found.masks else "in the open (secagg.enabled = false)"
    noun, each = "round", f"A round of {found.sites} sites"
    if config.asynchronous.enabled:
        noun, each = "version", f"A version, which is {found.updates} updates of any of {found.sites} sites"
    frozen = f", {found.frozen:,} of them frozen" if found.frozen else ""
    click.echo(f"{each}, {how}; {found.parameters:,} parameters{frozen}:")
    _columns([(f"  {name}", value) for name, value in _plan_lines(found, noun)])
    _row_of_the_table(config, "simulate")


def _row_of_the_table(config: Config, mode: str) -> None:
    from . import modes

    click.echo(f"{modes.MODES[mode].command} reads {modes.row(config, mode)}.")
    if idle := modes.idle(config, mode):
        click.echo(f"set for other modes: {', '.join(idle)}")


def _plan_lines(found: RoundTraffic, noun: str) -> Iterator[tuple[str, str]]:
    from .tracking.live import size

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


# --- looking at runs


@cli.command()
@click.argument("run", required=False)
@with_config
@as_json
def watch(config: Config, run: str | None, json: bool) -> None:
    """Follow a run (without RUN, the newest) until it finishes."""
    from . import events
    from .tracking import log
    from .tracking.live import screen

    run_dir = _run_dir(config, run)
    with screen(json=json) as show:
        finished, idle, told = False, 0, False
        for event in log.follow(run_dir):
            if event is not None:
                show(event)
                finished = isinstance(event, events.RunFinished) or (
                    finished and not isinstance(event, events.RunStarted)
                )
                idle, told = 0, False
            elif finished:
                return
            elif not log.running(run_dir):
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
    import msgspec

    from .tracking.runs import summaries

    found = summaries(config.root / config.run.dir)
    if json:
        for summary in found:
            click.echo(msgspec.json.encode(summary))
    elif found:
        _columns(fitted([RUN_COLUMNS, *map(_row, found)], _room()))
    else:
        click.echo(f"No run in {_short(config.root / config.run.dir)} yet. Start one: fedtrain simulate")


def which_round(_: object, __: object, value: str | None) -> Any:
    if value is None or value == "best":
        return value
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a round's number nor best")
    return int(value)


@cli.command()
@click.argument("run", required=False)
@with_config
@as_json
@click.option("-o", "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="The folder to write to; without it, RUN-model.")  # fmt: skip
@click.option("--round", "round_", metavar="N|best", callback=which_round,
              help="Which round; without it, the last.")  # fmt: skip
def export(config: Config, run: str | None, json: bool, out: Path | None, round_: Any) -> None:
    """Write a run's model as safetensors, with a model card."""
    from .tracking.export import export

    run_dir = _run_dir(config, run)
    folder = export(run_dir, out or Path(f"{run_dir.name}-model"), round_)
    if json:
        import msgspec

        click.echo(msgspec.json.format((folder / "model.json").read_bytes(), indent=-1))
    else:
        click.echo(f"{folder} holds " + ", ".join(sorted(path.name for path in folder.iterdir())))


@cli.command()
@click.argument("run", required=False)
@with_config
@as_json
@click.option("--site", "name", metavar="NAME", help="On the data of this site; without it, of all sites.")
@click.option("--data", "data_dir", type=click.Path(path_type=Path, exists=True, file_okay=False),
              metavar="DIR", help="Where the data is.")  # fmt: skip
@click.option("--round", "round_", metavar="N|best", callback=which_round,
              help="Which round of a run; without it, the last.")  # fmt: skip
def evaluate(
    config: Config, run: str | None, json: bool, name: str | None, data_dir: Path | None, round_: Any
) -> None:
    """Measure a finished model on the test data that is here."""
    from .runtime import evaluation
    from .tracking.export import EVALUATION, SPLITS
    from .tracking.live import number

    source = _source(config, run) or _run_dir(config, None)
    found = evaluation.evaluate(config, source, site=name, data_dir=data_dir, round=round_)
    if json:
        import msgspec

        click.echo(msgspec.json.encode(found))
        return
    if found.data != "test_data":
        click.echo(f"The task has no test_data(): this is its {found.data}(), {SPLITS[found.data]} data.")
    names = [*found.metrics]
    rows = [(site, *(number(own.get(each)) for each in names)) for site, own in found.by_site.items()]
    if len(rows) > 1:
        rows.append(("all", *(number(found.metrics[each]) for each in names)))
    _columns([("SITE", *(each.upper() for each in names)), *rows])
    folder = source if source.is_dir() else source.parent
    click.echo(f"written to {_short(folder / EVALUATION)}")


def _run_dir(config: Config, run: str | None) -> Path:
    from .tracking.runs import find, newest

    folder = config.root / config.run.dir
    return newest(folder) if run is None else find(folder, run)


def _source(config: Config, start: str | None) -> Path | None:
    """What --from names: a run, or a file or folder that `fedtrain export` wrote."""
    if start is None:
        return None
    exported = Path(start)
    if exported.is_file() or (exported / "model.safetensors").exists():
        return exported
    return _run_dir(config, start)


def _row(s: Summary) -> tuple[str, ...]:
    from .tracking.live import averages, number

    best = "" if s.best_round is None else f"{number(s.best_value)} in round {s.best_round}"
    when = time.localtime(s.updated)
    this_year = when.tm_year == time.localtime().tm_year
    updated = "" if s.updated is None else time.strftime("%m-%d %H:%M" if this_year else "%Y-%m-%d", when)
    loss = "" if s.loss is None else number(s.loss)
    rounds = f"{s.round}/{s.rounds}" if s.rounds else ""
    return (s.run, s.state, rounds, loss, averages(s.metrics), best, updated)


def fitted(rows: list[tuple[str, ...]], room: int) -> list[tuple[str, ...]]:
    """The rows of RUN_COLUMNS where there is room for so many characters: first the metrics make way, then
    the middle of the names."""
    at = RUN_COLUMNS.index("EVALUATED")
    over = _width(rows) - room
    if over > 0:
        left = max(len(row[at]) for row in rows) - over
        rows = [
            (*row[:at], *([_cut(row[at], left)] if left >= LEAST else []), *row[at + 1 :]) for row in rows
        ]
    if (over := _width(rows) - room) > 0:
        left = max(LEAST, max(len(row[0]) for row in rows) - over)
        rows = [(_cut(row[0], left, tail=left // 2), *row[1:]) for row in rows]
    return rows


def _width(rows: list[tuple[str, ...]]) -> int:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _cut(cell: str, width: int, tail: int = 0) -> str:
    return cell if len(cell) <= width else cell[: width - tail - 1] + "…" + cell[len(cell) - tail :]


def _room() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def _columns(rows: list[tuple[str, ...]]) -> None:
    widths, room = [max(map(len, column)) for column in zip(*rows, strict=True)], _room()
    for row in rows:
        text = GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        click.echo(text if len(text) <= room else text[: room - 1] + "…")


def _short(path: Path) -> str:
    """Relative to where the user is, when it lies there."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
