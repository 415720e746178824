"""What the commands do, as functions: the same rounds, the same checks, the same run directories.

A *project* is a folder with a fedtrain.toml, such a file, or a Task, whose runs/ and data/ lie in the current
folder. *Settings* are keys of the file with their values, as in {"train.lr": 0.1}; they are stronger than the
file and checked like it. Whatever goes wrong is a FedtrainError. No function takes a signal handler.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, overload

from . import modes, training
from .config import Config, one_of
from .config.project import load_only
from .errors import ConfigError, FedtrainError, StoreError, openly
from .events import Emit, Event, silent
from .results import Run
from .tracking import EventLog
from .tracking.runs import find, newest
from .training.extract import check_sendable, named
from .training.task import Task, arguments_of

if TYPE_CHECKING:
    from torch import nn

    from .runtime.cross_site import MatrixReport
    from .runtime.journal import Result
    from .statistics import Statistics
    from .tracking.export import EvaluationReport

Project = Config | Task | type[Task] | Path | str
Source = Run | Path | str  # a run, its folder or its name in the project; or what `fedtrain export` wrote
Settings = Mapping[str, Any]
Round = int | Literal["best"] | None  # of a run; None: the last
# Of a run that goes on; but for the name of its module, which has a digest, all is as it was.
CLASS_CHANGED = re.compile(
    r"(?:run\.task|strategy\.kind) was '__fedtrain__\.\w+:((\w+).*?)', is '__fedtrain__\.\w+:\1'"
)
NONE: Settings = MappingProxyType({})


def simulate(
    project: Project = ".",
    settings: Settings = NONE,
    *,
    mode: str = "federated",
    fresh: bool = False,
    start: Source | None = None,
    data_dir: Path | str | None = None,
    progress: bool | None = None,
) -> Run:
    """Train with all sites simulated on this machine, also where an event loop runs, as in notebooks.
    Ctrl-C ends it cleanly, and the same call goes on from the last committed round.

    `mode`: "federated" or "gossip". `fresh`: forget the earlier rounds of this run. `start`: whose model a
    new run begins with. `progress`: show it as it happens; None: in a notebook only.
    """
    from .training.devices import generators_kept

    config, task = resolved(project, settings, "gossip" if mode == "gossip" else "simulate")

    def work(on_event: Emit) -> Coroutine[Any, Any, Run]:
        return simulation(
            config, mode=mode, fresh=fresh, start=start, data_dir=data_dir, task=task, on_event=on_event
        )

    with generators_kept(), _screen(progress) as show:
        try:
            return _in_a_thread(work, show)
        except StoreError as e:
            text = re.sub(r"(\(a simulation\) )?start it with --fresh", "pass fresh=True", str(e))
            raise type(e)(CLASS_CHANGED.sub(r"your class \2, or what it uses, has changed", text)) from None


async def simulation(
    config: Config,
    *,
    mode: str = "federated",
    debug: str | None = None,
    fresh: bool = False,
    start: Source | None = None,
    data_dir: Path | str | None = None,
    task: Task | None = None,
    on_event: Emit = silent,
) -> Run:
    """`simulate` on the caller's event loop. `debug`: a site that is trained in this process anyway."""
    one_of("mode", mode, ("federated", "gossip"))
    load_only(config.root, None)  # whatever a site of this process was held to
    run_dir = config.gossip_dir if mode == "gossip" else config.simulate_dir
    source, data = None if start is None else source_of(config, start), _data(task, data_dir)
    if mode == "gossip" and start is not None:
        raise ConfigError(
            "--from: peers begin with the task's own model. Leave --from out, or simulate without "
            "--mode gossip."
        )
    if mode != "gossip" and config.simulate.on == "torchrun":
        from .runtime.simulations import on_ranks

        if on_ranks.rank():
            await asyncio.to_thread(on_ranks.work, config)
            return Run(run_dir, config, task)
    with openly(), logged(run_dir, on_event) as emit:
        if mode == "gossip":
            from .runtime.simulations import gossip_simulation

            await gossip_simulation.simulate(config, emit=emit, fresh=fresh, data_dir=data, task=task)
        else:
            from .runtime.simulations import simulation

            await simulation.simulate(
                config, emit=emit, debug=debug, fresh=fresh, start=source, data_dir=data, task=task
            )
    return Run(run_dir, config, task)


async def aggregate(
    project: Project = ".",
    settings: Settings = NONE,
    *,
    start: Source | None = None,
    data_dir: Path | str | None = None,
    on_event: Emit = silent,
) -> Run:
    """Wait for the sites and train with them, as `fedtrain aggregator`. To cancel it is a clean stop: called
    again, it goes on. `start`: as in `simulate`. `data_dir`: where the server's own data is, for
    evaluate.server. `on_event` is called with each event, on the loop."""
    from .runtime.star.aggregator import serve

    config, task = resolved(project, settings, "aggregator")
    source = None if start is None else source_of(config, start)
    data = _data(task, data_dir) if config.evaluate.server or data_dir is not None else None
    with logged(config.run_dir, on_event) as emit:
        await serve(config, emit=emit, start=source, data_dir=data)
    return Run(config.run_dir, config, task)


async def site(
    name: str,
    project: Project = ".",
    settings: Settings = NONE,
    *,
    data_dir: Path | str | None = None,
    on_event: Emit = silent,
) -> str:
    """Join the aggregator as the site of this name, as `fedtrain site`; returns why the run ended. To cancel
    it is a clean stop: called again, it goes on."""
    from .runtime.sites import site

    config, task = resolved(project, settings, "site")
    with logged(config.site_dir(name), on_event) as emit:
        return await site.run(config, name, data_dir=_data(task, data_dir), emit=emit)


async def peer(
    name: str,
    project: Project = ".",
    settings: Settings = NONE,
    *,
    invitation: str | None = None,
    data_dir: Path | str | None = None,
    on_event: Emit = silent,
) -> Run:
    """Train with neighbours as the peer of this name, as `fedtrain peer`. To cancel it is a clean stop:
    called again, it goes on. `invitation`: the code that `fedtrain invite` printed elsewhere."""
    config, task = resolved(project, settings, "peer")
    await as_peer(name, config, invitation, _data(task, data_dir), on_event)
    return Run(config.peer_dir(name), config, task)


async def as_peer(
    name: str, config: Config, invitation: str | None, data_dir: Path | None, on_event: Emit
) -> Result:
    """How a peer's run ended."""
    from .pki.invitation import Invitation
    from .runtime.peers import peer

    invited = None if invitation is None else Invitation.read(invitation)
    with logged(config.peer_dir(name), on_event) as emit:
        return await peer.run(config, name, data_dir=data_dir, invitation=invited, emit=emit)


@overload
def evaluate(
    source: Source,
    project: Project | None = None,
    *,
    site: str | None = None,
    data_dir: Path | str | None = None,
    round: Round = None,
    matrix: Literal[False] = False,
) -> EvaluationReport: ...
@overload
def evaluate(
    source: Source | Sequence[Source], project: Project | None = None, *, site: str | None = None,
    data_dir: Path | str | None = None, round: Round | Sequence[Round] = None, matrix: Literal[True],
) -> MatrixReport: ...  # fmt: skip
def evaluate(
    source: Source | Sequence[Source],
    project: Project | None = None,
    *,
    site: str | None = None,
    data_dir: Path | str | None = None,
    round: Round | Sequence[Round] = None,
    matrix: bool = False,
) -> EvaluationReport | MatrixReport:
    """Measure a finished model on the test data that is here, and write down what is found beside it.

    `project`: None is the run's own, or the current folder. `site`: on the data of this one; None: of all.
    `matrix`: each model of one or more sources and rounds on each site's data; nothing is written.
    """
    from .runtime import cross_site, evaluation
    from .training.devices import generators_kept

    sources = [source] if isinstance(source, Run | Path | str) else [*source]
    rounds = [round] if round is None or isinstance(round, int | str) else [*round]
    if not sources or not rounds or (not matrix and len(sources) + len(rounds) > 2):
        raise ConfigError("evaluate: name one run and one round; or at least one, with matrix=True.")
    first = _of(sources[0], project)
    compared = []
    for each in sources:
        own = project is None and isinstance(each, Run)
        config, task = _of(each, None) if own else first
        compared.append(cross_site.Compared(source_of(config, each), config, task, _data(task, data_dir)))
    path, config, task, data = compared[0]
    with generators_kept(), openly():
        if matrix:
            return cross_site.matrix(compared, site=site, rounds=rounds)
        return evaluation.evaluate(config, path, site=site, data_dir=data, round=rounds[0], task=task)


def stats(
    project: Project = ".",
    settings: Settings = NONE,
    *,
    site: str | None = None,
    data_dir: Path | str | None = None,
) -> Statistics:
    """Statistics of the data that is here, without training: of all sites, or of `site`. They are written to
    statistics.json of the simulation's run directory, or of the site's."""
    from .runtime import statistics
    from .training.devices import generators_kept

    config, task = resolved(project, settings, "stats")
    with generators_kept(), openly():
        return statistics.stats(config, site=site, data_dir=_data(task, data_dir), task=task)


async def aggregate_stats(
    project: Project = ".", settings: Settings = NONE, *, on_event: Emit = silent
) -> Statistics:
    """Wait for the sites and ask them for statistics of their data, as `fedtrain aggregator --stats`. The
    same sites train next, when `aggregate` is called."""
    from .runtime.star.aggregator import survey

    config, _ = resolved(project, settings, "statistics")
    with logged(config.run_dir, on_event) as emit:
        return await survey(config, emit=emit)


def load_model(source: Source, project: Project | None = None, *, round: Round = None) -> nn.Module:
    """The model() of a task with the weights of a run, or of an export, in evaluation mode on the CPU.
    `project`: None is the run's own, or the current folder."""
    config, task = _of(source, project)
    return Run(source_of(config, source), config, task).model(round)


def load_task(project: Project = ".") -> Task:
    """The Task of a project, as a run would make it: for its data() and model()."""
    config, task = resolved(project)
    return task or training.task.load_task(config.run.task, config.root)


def open_run(name: Path | str, project: Project = ".") -> Run:
    """A run to look at, by its name in the project, or by its folder."""
    config, task = resolved(project)
    return Run(run_dir(config, str(name)), config, task)


# --- what commands and functions share


def resolved(project: Project, settings: Settings = NONE, mode: str = "") -> tuple[Config, Task | None]:
    """The settings of a project, and its Task where that is what was given. ConfigError for a key that nobody
    reads, or that this mode would ignore. A Config is taken as it is: it was checked before."""
    if isinstance(project, Config):
        return project, None
    settings, here, task = dict(settings), Path.cwd(), None
    if isinstance(project, Path | str):
        file = Path(project) / "fedtrain.toml" if Path(project).is_dir() else Path(project)
        config = Config.load(file, settings=_strategy_named(settings, file.resolve().parent))
    else:
        task = project() if isinstance(project, type) else project
        root, name, lacks = named(type(task))
        own = {"run.task": name + (arguments_of(task) or ""), "run.name": type(task).__name__.lower()}
        config = Config.load(None, settings=own | _strategy_named(settings, root), root=root)
        run, network = config.run, config.network
        run, network = (
            replace(run, dir=str(here / run.dir)),
            replace(network, certs=str(here / network.certs)),
        )
        config = replace(config, run=run, network=network)
        if mode not in ("", "gossip", "stats") and (mode != "simulate" or config.simulate.workers):
            check_sendable(task, lacks)
    if mode:
        modes.check(config, mode)
    return config, task


def _strategy_named(settings: dict[str, Any], root: Path) -> dict[str, Any]:
    """Settings with "module:Class" where they have a strategy's class. ConfigError where it can't be imported
    from `root`."""
    if isinstance(kind := settings.get("strategy.kind"), type):
        _, settings["strategy.kind"], lacks = named(kind, root)
        for name, what in lacks.items():
            raise ConfigError(f"{kind.__name__} uses {name}, {what}. Make it in the class's __init__().")
    return settings


def source_of(config: Config, source: Source) -> Path:
    """Where a model is: a run directory, or an export."""
    if isinstance(source, Run):
        return source.path
    if Path(source).is_file() or (Path(source) / "model.safetensors").exists():
        return Path(source)
    return run_dir(config, str(source))


def run_dir(config: Config, name: str | None) -> Path:
    """A run of the project by its name; the newest without one."""
    folder = config.root / config.run.dir
    return newest(folder) if name is None else find(folder, name)


@contextmanager
def logged(run_dir: Path, on_event: Emit) -> Iterator[Emit]:
    """An emit() whose events go to the run directory and to a listener."""
    with EventLog(run_dir, on_event) as log:
        yield log.emit


def _of(source: Source, project: Project | None) -> tuple[Config, Task | None]:
    if project is None and isinstance(source, Run):
        return source.config, source.task
    return resolved("." if project is None else project)


def _data(task: Task | None, data_dir: Path | str | None) -> Path | None:
    """Where the data is; a task that a program made finds it from the current folder."""
    if task is None:
        return None if data_dir is None else Path(data_dir)
    if data_dir is not None:
        object.__setattr__(task, "data_dir", Path(data_dir))  # of a frozen dataclass too
    return Path.cwd() / task.data_dir


def _screen(progress: bool | None) -> AbstractContextManager[Emit]:
    from .tracking import live, notebook

    if progress is not False and notebook.in_notebook():
        return notebook.Notebook()
    return live.screen() if progress else nullcontext(silent)


def _in_a_thread(work: Callable[[Emit], Coroutine[Any, Any, Run]], show: Emit) -> Run:
    """Await work on an event loop of its own, in a thread of its own; its events are shown in this one.
    Ctrl-C, which this thread hears, cancels the work, which then cleans up behind itself."""
    events = SimpleQueue[Event | None]()
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()
    done: Future[Run] = Future()

    async def main() -> Run:
        under_way = asyncio.ensure_future(work(events.put))
        begun.set_result((asyncio.get_running_loop(), under_way))
        return await under_way

    def run() -> None:
        try:
            done.set_result(asyncio.run(main()))
        except BaseException as e:  # it is raised in the other thread
            plain = isinstance(e, FedtrainError) and not os.environ.get("FEDTRAIN_DEBUG")
            done.set_exception(e.with_traceback(None) if plain else e)  # its line says all that a user needs
        finally:
            begun.cancel()  # it failed before there was a loop
            events.put(None)

    thread = threading.Thread(target=run, name="fedtrain")
    thread.start()
    try:
        while (event := events.get()) is not None:
            show(event)
    except BaseException:
        with suppress(RuntimeError, CancelledError):  # the loop may have ended by itself, or never begun
            loop, under_way = begun.result()
            loop.call_soon_threadsafe(under_way.cancel)
        raise
    finally:
        thread.join()
    return done.result()
