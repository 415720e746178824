"""The trainer process, `python -m fedtrain.runtime.trainers.trainer_process FD`: its start and its work.

A child whose parent is gone, for whatever reason, ends itself and its process group, in which is all that
it started; the parent ends what a dead child leaves behind. So `kill -9` of either leaves no process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ... import malloc
from ...config import Config
from ...config.project import close_paths
from ...store.disk import private, private_folder
from ..processes import signalled_when_parent_ends
from . import trainer_messages as msg
from .boundary import CREDENTIALS, SCRATCH, SHARED_MEMORY, Boundary, Limit, hidden, needs
from .metrics_only import MetricsOnly
from .rank_monitor import GiveUp, nobody
from .workbench import Workbench

# In the environment: ways to other programs of this account, and to systemd's keys.
PROGRAMS = {
    "SSH_AUTH_SOCK",
    "SSH_AGENT_PID",
    "GPG_AGENT_INFO",
    "DBUS_SESSION_BUS_ADDRESS",
    "XDG_RUNTIME_DIR",
    "DOCKER_HOST",
    "CONTAINER_HOST",
    "NOTIFY_SOCKET",
    "DISPLAY",
    "WAYLAND_DISPLAY",
    CREDENTIALS,
}
# What libraries would write in the home folder; what they read there (HF_HOME, TORCH_HOME) stays.
CACHES = {
    "MPLCONFIGDIR": "matplotlib",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
    "HF_DATASETS_CACHE": "datasets",
}
# The sections of fedtrain.toml that a trainer needs. None of them says where keys lie.
SECTIONS = ("run", "train", "strategy", "secagg", "compression", "privacy", "limits", "simulate", "parallel")


def start_message(config: Config, data_dir: Path | None, *, simulated: bool, metrics_only: bool) -> msg.Start:
    """What a new process is told first."""
    table = {name: keys for name, keys in config.table().items() if name in SECTIONS}
    folder = None if data_dir is None else str(data_dir)
    return msg.Start(table, str(config.root), folder, simulated, metrics_only)


async def spawn(
    config: Config,
    scratch: Path,
    log: Path | None,
    pass_fds: Sequence[int],
    gpu: str | None = None,
    confine: str = "off",
    data_dir: Path | None = None,
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """A new process and the socket to it; see Trainer.start."""
    private_folder(scratch)
    ours, theirs = socket.socketpair()
    output = None if log is None else private(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", *_main(config, theirs.fileno(), confine, scratch, data_dir),
            stdin=subprocess.DEVNULL, stdout=output or 2, stderr=output or 2,
            pass_fds=(theirs.fileno(), *pass_fds), env=environment(config, scratch, gpu, confine),
            start_new_session=True,  # Ctrl-C is the parent's to handle, and stop() ends the whole group
        )  # fmt: skip
    finally:
        theirs.close()
        if output is not None:
            os.close(output)
    return process, ours


def _main(config: Config, channel: int, confine: str, scratch: Path, data_dir: Path | None) -> list[str]:
    """The child's module and arguments: it shuts itself in first, unless that is off."""
    if confine == "off":
        return [__name__, str(channel)]
    # Who speak with each other. A command's may have to do without: most are one, and `require` means it.
    several = config.parallel.ranks > 1 or bool(config.train.command and confine != "require")
    scratch, home, library = scratch.resolve(), os.path.expanduser("~"), sysconfig.get_path("purelib")
    here = [str(path) for path in (config.root, data_dir, scratch) if path is not None]
    needed = [*here, home, library, *filter(None, sys.path), sys.prefix, sys.base_prefix]
    keys, names = hidden(config.root / config.network.certs, config.root, needed)
    folders = [str(each) for each in (scratch, scratch.with_name("memory")) if each.is_dir()]
    places = [str(config.root), str(scratch.parent), home, library]
    own_memory = not needs(SHARED_MEMORY, needed)
    tells = Boundary(confine, several, keys, names, folders, places, own_memory)
    return [f"{__package__}.confinement", str(channel), msgspec.json.encode(tells).decode()]


def environment(
    config: Config, scratch: Path, gpu: str | None = None, confine: str = "off"
) -> dict[str, str]:
    """The child's environment: this one, without what names keys, and with this very fedtrain on its path.
    Where it is shut in: also without what names other programs, and with its caches in the scratch folder."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("FEDTRAIN_", "GRPC_", "SSLKEYLOGFILE"))}
    folder, here = str(scratch.resolve()), Path(__file__).resolve()
    root, given = config.root.resolve(), filter(None, ours.get("PYTHONPATH", "").split(os.pathsep))
    outside = [entry for entry in given if not Path(entry).resolve().is_relative_to(root)]
    paths = [str(here.parents[3]), *outside]
    if confine != "off":
        ours = {k: v for k, v in ours.items() if k not in PROGRAMS}
        ours |= {SCRATCH: folder} | {name: ours.get(name, f"{folder}/{at}") for name, at in CACHES.items()}
        paths.insert(0, str(here.with_name("startup")))
    path = os.pathsep.join(paths)
    threads = str(config.train.threads)
    return ours | {
        "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TMPDIR": folder,
        "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
        **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
        **malloc.ENVIRONMENT,  # new pages for every batch would cost a tenth of the training
    }  # fmt: skip


def serve(channel: socket.socket, limits: Sequence[Limit] = (), refusal: str = "") -> None:
    """Load the task that Start names, then answer commands until the parent is gone. `limits`: how this
    process is shut in, for the parent; see confinement.shut_in. `refusal`: why it loads nothing."""
    if hasattr(os, "SCHED_BATCH"):  # else an arriving command takes the core from the process that sent it
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    signalled_when_parent_ends(signal.SIGCONT)  # else the thread above might stay stopped
    stream = channel.makefile("rwb")

    def frames() -> Iterator[bytes]:
        with suppress(ConnectionResetError):  # the parent was killed
            while head := stream.read(msg.LENGTH.size):
                yield stream.read(*msg.LENGTH.unpack(head))

    writing = threading.Lock()

    def send(outcome: msg.Outcome) -> None:
        with (
            writing,
            suppress(BrokenPipeError, ConnectionResetError),
        ):  # the parent is gone, and this process ends
            stream.write(msg.framed(outcome))
            stream.flush()

    def give_up(reason: str, answer: bool, config: bool) -> None:
        writing.acquire()  # and never released: the process ends, and this is the last message
        stream.write(msg.framed(msg.Failed(reason, config) if answer else msg.Dying(reason)))
        stream.flush()

    incoming = frames()
    if not (first := next(incoming, b"")):
        return
    start = msgspec.msgpack.decode(first, type=msg.Start)
    if refusal:
        return send(msg.Failed(refusal, True))
    gc.disable()  # the modules loaded here stay, and looking for garbage in them takes a seventh of the time
    try:
        bench = bench_of(start, give_up)
    except Exception as e:  # the user's imports and constructors run in this block
        return send(msg.Failed.of(e))
    gc.freeze()
    gc.enable()
    send(msgspec.structs.replace(bench.description, limits=[*limits]))
    for body in incoming:
        try:
            answer = bench.answer(msg.commands.decode(body))
        except Exception as e:  # torch and the user's code run in this block, and the process must go on
            answer = msg.Failed.of(e)
        send(answer)


def bench_of(start: msg.Start, give_up: GiveUp = nobody) -> Workbench | MetricsOnly:
    """What a new trainer answers by."""
    config = Config.of(start.config, start.root)
    close_paths(config.root, start.approved)
    if start.metrics_only:
        return MetricsOnly(config)
    data_dir = Path(start.data_dir) if start.data_dir is not None else None
    return Workbench(config, data_dir, simulated=start.simulated, give_up=give_up)


def _end_with(channel: socket.socket) -> None:
    """End this process, and all that it started, as soon as the parent is gone."""
    poll = select.poll()
    poll.register(channel, 0)  # hang-up is reported without being asked for
    poll.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
