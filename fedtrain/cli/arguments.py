"""What commands share: their class, with its errors and exit codes; options; how their work is driven."""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ..errors import (
    FedtrainError,
    JoinRefused,
    NotApproved,
    TaskError,
    not_installed,
    out_of_memory,
    story_of,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

    from ..events import Emit
    from ..runtime.journal import Result

T = TypeVar("T")

OWN_MODEL = 3  # the exit code of a peer that was to agree on one model of all, and ended with its own
GOES_ON = {  # commands without rounds, and how each goes on after it was ended
    "join": "The key stays here. The same command goes on, with the same words.",
    "certs invite": "`fedtrain certs invite` without names waits for the same sites; their codes stay good.",
}
REJECTED = 4  # the exit code of a site that may not take part until people act, there or here
STOP_S = 4.0  # for a site to end in order once it was told to; what still works then is ended with it (S40)


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
        if ctx.params.get("json"):
            from ..tracking.live import reserve_stdout

            reserve_stdout()
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of our output has gone; click ends quietly
            raise
        except Exception as e:
            if traceback or not for_a_user(e):
                raise
            if isinstance(e, TaskError) and e.__cause__ is not None:
                click.echo(story_of(e), nl=False, err=True)
            if not told_by_torchrun(line_of(e)):
                click.secho(f"fedtrain: {line_of(e)}", fg="red", err=True)
            ctx.exit(REJECTED if isinstance(e, JoinRefused | NotApproved) else 1)
        except KeyboardInterrupt:
            click.echo(f"Interrupted. {goes_on(ctx)}", err=True)
            ctx.exit(130)
        except Stopped as stopped:
            with suppress(OSError):  # the terminal may be gone
                click.echo(f"Stopped. {goes_on(ctx)}", err=True)
            ctx.exit(cast(int, stopped.code))


def goes_on(ctx: click.Context) -> str:
    """What is true of a command that was ended."""
    name = ctx.command_path.partition(" ")[2]
    return GOES_ON.get(name, "The same command goes on from the last committed round.")


def told_by_torchrun(line: str) -> bool:
    """Whether this is one of the ranks of a machine whose error stands in torchrun's report, and the first of
    them says it, too: what a command says before it meets the others, it says at each rank."""
    from ..training.rank_log import tell_torchrun

    tell_torchrun(line, int(time.time()))
    return "TORCHELASTIC_ERROR_FILE" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0"


def line_of(error: Exception) -> str:
    """The last line of a command that failed: what happened, and what to change."""
    if out_of_memory(error):
        return (
            f"out of memory ({str(error) or type(error).__name__}). Lower train.batch_size or "
            f"simulate.workers, or end other programs on this machine, then start the same command "
            f"again."
        )
    if isinstance(error, ModuleNotFoundError):
        return str(not_installed(error.name or "a package"))
    room = ". Make room there, then start the same command again."
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{_named(error)}{room if full else ''}"


def for_a_user(error: Exception) -> bool:
    """Whether the error has a line that a user can act on; any other is a mistake in fedtrain."""
    return isinstance(error, FedtrainError | OSError | ModuleNotFoundError) or out_of_memory(error)


def _named(error: Exception) -> str:
    """The error, with stdout named where writing to stdout failed: that OSError names no file."""
    last = [frame.f_globals["__name__"] for frame, _ in walk_tb(error.__traceback__)][-1:]
    printing = (
        isinstance(error, OSError)
        and error.filename is None
        and {*last} & {"click.utils", "fedtrain.tracking.live"}
    )
    return f"stdout: {error.strerror}" if printing and isinstance(error, OSError) else str(error)


class Commands(click.Group):
    """Commands in the order in which they are written below."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class MainCommands(Commands):
    """The same, then those of fedtrain/contrib and of other installed packages: entry points of the group
    "fedtrain.commands"."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *sorted(_contributed().names)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in self.commands or name not in (found := _contributed()).names:
            return self.commands.get(name)
        return cast(click.Command, found[name].load())


def _contributed() -> EntryPoints:
    from importlib.metadata import entry_points  # not for the commands that are here

    return entry_points(group="fedtrain.commands")


def ends() -> list[signal.Signals]:
    """The signals that end a command in order; nohup has it ignore SIGHUP."""
    hears = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGHUP] if hears else [signal.SIGTERM]


def stop(number: int, _: object) -> None:
    raise Stopped(128 + number)


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
        from .. import modes
        from ..config import Config

        config = Config.load(file, sets)
        if names := modes.names_of(command.__name__, config, arguments):
            modes.check(config, *names, notice=lambda text: click.echo(f"fedtrain: {text}", err=True))
        command(config=config, **arguments)

    return read_first


begin_with = click.option(
    "--from", "start", metavar="RUN", help="Start a new run with the last model of this one, or of an export."
)
as_json = click.option("--json", "json", is_flag=True, help="Print JSON, one object a line, for a program.")


with_data = click.option(
    "--data", "data_dir", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
    help="Where the data is.",
)  # fmt: skip


def drive(work: Coroutine[Any, Any, T], within_s: float | None = None) -> T:
    """The result of the work. Ctrl-C, SIGTERM and SIGHUP cancel the work, which cleans up behind itself;
    after so many seconds the process ends whatever still works, threads too."""
    import asyncio

    stopped = 0

    async def until_told_to_stop() -> T:
        task = asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            nonlocal stopped
            if not stopped and within_s is not None:
                last = threading.Timer(within_s, os._exit, [128 + number])
                last.daemon = True
                last.start()
            stopped = stopped or number
            task.cancel()

        numbers = ends()
        if within_s is not None and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            numbers.append(signal.SIGINT)
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        return await work

    try:
        return asyncio.run(until_told_to_stop())
    except asyncio.CancelledError:
        if stopped == signal.SIGINT:
            raise KeyboardInterrupt from None
        if stopped:
            raise Stopped(128 + stopped) from None
        raise


def code_of_peer(result: Result) -> None:
    """End this process with OWN_MODEL where a peer ended with its own model, and one of all was wanted."""
    if result.own_model:
        sys.exit(OWN_MODEL)


def drive_shown(
    work: Callable[[Emit], Coroutine[Any, Any, T]],
    *,
    json: bool,
    plain: bool = False,
    within_s: float | None = None,
) -> T:
    """As `drive`, for work that is given what shows its events: a table, plain lines, or JSON."""
    from ..tracking.live import screen

    with screen(json=json, plain=plain) as show:
        return drive(work(show), within_s)


def which_rounds(_: object, __: object, values: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(which_round(None, None, value) for value in values) or (None,)


def which_round(_: object, __: object, value: str | None) -> Any:
    if value is None or value == "best":
        return value
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a round's number nor best")
    return int(value)
