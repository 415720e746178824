"""S10: what the task's code can reach from the trainer process of a site."""

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import pytest
import torch

from fedtrain.arena import ArenaFile
from fedtrain.config import Config
from fedtrain.errors import BadUpdate, ConfigError, TaskError
from fedtrain.runtime.trainers import confinement, seccomp
from fedtrain.runtime.trainers.boundary import Boundary, Limit, hidden
from fedtrain.runtime.trainers.trainer import Trainer
from fedtrain.schema import Schema
from fedtrain.store.disk import open_for_writing
from fedtrain.transport.streams import read_chunk
from tests.folders import on_disk
from tests.worlds import Command

tmp_path = on_disk

TASK = """
import json, os, socket, subprocess
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader
import fedtrain

HERE = Path(__file__).parent

def tried(work):
    try:
        return str(work())
    except OSError as e:
        return type(e).__name__

key = HERE / "certs" / "sites" / "a" / "key.pem"
inside = ["unshare", "-Urm", "sh", "-c", f"umount {HERE / 'certs'}; cat {key}"]
found = {
    "key": tried(key.read_text),
    "its target": tried((HERE / "credentials" / "key.pem").read_text),
    "by the parent": tried(Path(f"/proc/{os.getppid()}/root{key}").read_text),
    "parent's memory": tried(lambda: open(f"/proc/{os.getppid()}/mem", "rb").close()),
    "moved": tried(lambda: os.rename(key, HERE / "stolen")),
    "unmounted": subprocess.run(inside, capture_output=True, text=True).stdout,
    "tcp": tried(lambda: socket.create_connection(("127.0.0.1", int((HERE / "port").read_text())), 5)),
    "daemon": tried(lambda: socket.socket(socket.AF_UNIX).connect(str(HERE / "daemon"))),
    "agent": os.environ.get("SSH_AUTH_SOCK", "not named"),
    "pth": tried(lambda: (HERE / "zz.pth").write_text("import os")),
    "data": (HERE / "data.txt").read_text(),
}
if "CONFINED_TO" in os.environ:
    large = DataLoader([torch.ones(1 << 18)] * 4, batch_size=2, num_workers=1)
    found["sum by a worker"] = int(sum(batch.sum() for batch in large))
Path(os.environ["TMPDIR"], "found.json").write_text(json.dumps(found))

class Line(fedtrain.Task):
    def model(self):
        return nn.Linear(1, 1)

    def data(self, site):
        if site == "writes":
            (HERE / "unpacked").mkdir()
        return torch.zeros(4, 1), torch.zeros(4, 1)

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


@pytest.fixture
def project(tmp_path: Path) -> Config:
    """Its key is a link, as where systemd keeps it as a credential."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "data.txt").write_text("data")
    for folder in ("runs/trainer", "credentials", "certs/sites/a"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "credentials" / "key.pem").write_text("the secret")
    (tmp_path / "certs" / "sites" / "a" / "key.pem").symlink_to(tmp_path / "credentials" / "key.pem")
    return Config.of({"run": {"name": "r", "task": "task:Line"}, "train": {"device": "cpu"}}, tmp_path)


def without_namespaces(*others: str) -> None:
    """Have this process, and what it starts, make none, as under RestrictNamespaces=yes of systemd."""
    numbers = {"Landlock": (confinement._CREATE_RULESET,) * 2}
    seccomp.CLOSED.update({name: numbers[name] for name in others})
    seccomp.restrict(None)


def start(arguments: list[str]) -> None:
    """A trainer in the folder of its project: what it says, and what its task found and could not do."""
    how, *lacks = arguments
    folder = Path.cwd()
    if lacks:
        without_namespaces(*lacks[1:])
    table = {"run": {"name": "r", "task": "task:Line"}, "train": {"device": "cpu"}}
    scratch, output = folder / "runs" / "trainer", folder / "output"

    async def run() -> list[list[object]]:
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        daemon = await asyncio.start_unix_server(lambda r, w: w.close(), folder / "daemon")
        (folder / "port").write_text(str(server.sockets[0].getsockname()[1]))
        async with server, daemon:
            trainer = await Trainer.start(Config.of(table, folder), scratch=scratch, confine=how, log=output)
            try:
                initial = await trainer.initial(scratch / "initial")
                with contextlib.suppress(TaskError):
                    await trainer.train("writes", 0, initial, scratch / "delta")
            finally:
                await trainer.close()
        return [list(limit) for limit in trainer.description.limits]

    try:
        (folder / "limits").write_text(json.dumps(asyncio.run(run())))
    except ConfigError as e:
        (folder / "refused").write_text(str(e))


def found_by(project: Config, *arguments: str) -> tuple[dict[str, tuple[bool, str]], dict[str, Any]]:
    """What the trainer says of itself, and what the task's code could reach."""
    log, agent = project.root / "log", str(project.root / "agent")
    env = {"SSH_AUTH_SOCK": agent}
    process = Command(start, [*arguments], folder=project.root, log=log, env=env)
    assert process.wait(60) == 0, log.read_text()
    if (refused := project.root / "refused").exists():
        return {"refused": (False, refused.read_text())}, {}
    limits = json.loads((project.root / "limits").read_text())
    found = json.loads((project.root / "runs" / "trainer" / "found.json").read_text())
    return {what: (holds, said) for what, holds, said in limits}, found


@pytest.mark.slow(4)  # a trainer that is executed loads torch
@pytest.mark.parametrize("without", [[], ["namespaces"]], ids=["as-it-is", "without-namespaces"])
def test_s10_c1_c2_c3_a_trainer_reads_no_key_writes_nothing_calls_nothing(project, without):
    said, found = found_by(project, "auto", *without)
    if not said["key"][0]:
        pytest.skip(said["key"][1])
    assert all(holds for holds, _ in said.values()), said
    assert said["key"][1] == "the task's code cannot read keys and certificates (2 files tried)"
    assert found["data"] == "data"
    refused = {"FileNotFoundError", "PermissionError"}
    assert {found["key"], found["its target"], found["moved"]} <= refused | {"OSError"}
    assert found["unmounted"] == ""
    assert found["by the parent"] == found["parent's memory"] == found["daemon"] == "PermissionError"
    assert found["tcp"] in ("ConnectionRefusedError", "PermissionError")
    assert found["agent"] == "not named"
    assert found["pth"] in ("OSError", "PermissionError")  # read-only, or Landlock
    assert found["sum by a worker"] == 1 << 20
    last = (project.root / "output").read_text().splitlines()[-1]
    assert last.startswith("policy.confine lets the task write in ")
    assert "runs/trainer ($TMPDIR) alone" in last
    assert not (project.root / "unpacked").exists()


@pytest.mark.slow(3)
def test_s10_c1_where_nothing_hides_the_key_the_site_says_so(project):
    said, found = found_by(project, "auto", "namespaces", "Landlock")
    assert found["key"] == found["its target"] == "the secret"
    assert said["key"][0] is said["files"][0] is False
    assert "CAN READ " in said["key"][1]
    assert "key.pem (tried)" in said["key"][1]


@pytest.mark.slow(3)
def test_s10_c1_confine_require_loads_no_task_where_the_key_can_be_read(project):
    said, found = found_by(project, "require", "namespaces", "Landlock")
    assert said["refused"][1].startswith("policy.confine = require: the task's code CAN READ ")
    assert found == {}
    assert not (project.root / "runs" / "trainer" / "found.json").exists()


@pytest.mark.slow(3)
def test_s10_without_it_the_same_code_reads_the_key(project):
    said, found = found_by(project, "off")
    assert (said, found["key"]) == ({}, "the secret")


@pytest.mark.slow(3)
def test_s10_a_policy_may_leave_the_network_open_and_hides_the_keys(project):
    said, found = found_by(project, "keys")
    if not said["key"][0]:
        pytest.skip(said["key"][1])
    assert "the secret" not in [found["key"], found["by the parent"]]
    assert "socket" in found["tcp"]
    assert found["daemon"] == "PermissionError"
    assert "the network is open to it" in said["network"][1]


COMMAND = """
import json, os, socket, sys
from pathlib import Path

def tried(work):
    try:
        return str(work())
    except OSError as e:
        return type(e).__name__

outside = int(Path("port").read_text())
found = {"key": tried(Path("certs/sites/a/key.pem").read_text),
         "tcp": tried(lambda: socket.create_connection(("127.0.0.1", outside), 5)),
         "data": Path("data.txt").read_text()}
Path(os.environ["TMPDIR"], "by-command.json").write_text(json.dumps(found))
Path(sys.argv[1]).write_text(json.dumps({"examples": 4}))
"""


def train_by_command(arguments: list[str]) -> None:
    """In a process of its own; with an argument in one that can make no namespaces, nor can its trainer."""
    folder = Path.cwd()
    table = {"run": {"name": "r", "task": "task:Line"}, "train": {"device": "cpu", "command": (
        "cp {weights} {out} && python own.py {report}")}}  # fmt: skip
    if arguments:
        without_namespaces()
    scratch = folder / "runs" / "trainer"

    async def run() -> None:
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        (folder / "port").write_text(str(server.sockets[0].getsockname()[1]))
        config = Config.of(table, folder)
        async with server, await Trainer.start(config, scratch=scratch, confine="require") as trainer:
            initial = await trainer.initial(scratch / "initial")
            update = await trainer.train("a", 0, initial, scratch / "delta")
            assert update.num_examples == 4

    try:
        asyncio.run(run())
    except ConfigError as e:
        (folder / "refused").write_text(str(e))


@pytest.mark.slow(3)  # a trainer that is executed loads torch
@pytest.mark.parametrize("without", [[], ["namespaces"]], ids=["as-it-is", "without-namespaces"])
def test_s10_a_command_of_ones_own_trains_where_the_policy_requires_to_be_shut_in(project, without):
    (project.root / "task.py").write_text(TASK.partition("HERE =")[0] + "class" + TASK.partition("class")[2])
    (project.root / "own.py").write_text(COMMAND)
    log = project.root / "log"
    process = Command(train_by_command, without, folder=project.root, log=log, env={})
    assert process.wait(60) == 0, log.read_text()
    if (refused := project.root / "refused").exists():
        assert refused.read_text().startswith("policy.confine = require: ")
        pytest.skip(refused.read_text())
    found = json.loads((project.root / "runs" / "trainer" / "by-command.json").read_text())
    assert found.pop("data") == "data"
    assert found["key"] in ("FileNotFoundError", "PermissionError")
    assert found["tcp"] in ("ConnectionRefusedError", "PermissionError")


RANKS = """
import sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset
import fedtrain

class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, at):
        return torch.full((1 << 17,), float(at)), torch.ones(1)

class Line(fedtrain.Task):
    def model(self):
        return nn.Linear(1 << 17, 1)

    def data(self, site):
        try:
            print("key", (Path(__file__).parent / "certs/sites/a/key.pem").read_text(), file=sys.stderr)
        except OSError:
            print("no key", file=sys.stderr)
        return Rows()

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


@pytest.mark.slow(12)
def test_s10_ranks_with_readers_train_under_confine_require(project):
    """Their batches go from process to process by /proc: no Unix socket is opened."""
    (project.root / "task.py").write_text(RANKS)
    table = {"run": {"name": "r", "task": "task:Line"}, "train": {"device": "cpu", "batch_size": 4},
             "parallel": {"ranks": 2, "readers": 1}}  # fmt: skip
    scratch, log = project.root / "runs" / "trainer", project.root / "output"
    config = Config.of(table, project.root)

    async def train() -> float:
        async with await Trainer.start(config, scratch=scratch, confine="require", log=log) as trainer:
            initial = await trainer.initial(scratch / "initial")
            return (await trainer.train("a", 0, initial, scratch / "delta")).num_examples

    try:
        assert asyncio.run(train()) == 8
    except ConfigError as e:
        pytest.skip(str(e))
    assert log.read_text().count("no key") == 2


SENDS = """
import os
from multiprocessing.reduction import DupFd

memory = os.memfd_create("tensor")
os.write(memory, b"a tensor's bytes")
lent = [DupFd(memory) for _ in range(3)]
for _ in range(40):
    for each in lent:
        got = each.detach()
        assert os.pread(got, 20, 0) == b"a tensor's bytes"
        os.close(got)
    lent = [DupFd(memory) for _ in range(3)]
print(len(os.listdir("/proc/self/fd")) < 12)
"""


def test_descriptors_that_are_sent_without_a_socket_do_not_pile_up(tmp_path):
    startup = str(Path(confinement.__file__).with_name("startup"))
    (tmp_path / "sitecustomize.py").write_text("print('the one behind')")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([startup, str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", SENDS], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("the one behind\nTrue\n", "")


# --- attacks, each in a process that shuts itself in as a trainer does


class World:
    """A machine's account: its home with a project, keys, logs and daemons; and a user to run as."""

    def __init__(self, home: Path, user: int) -> None:
        self.home, self.user = home, user
        for folder in ("site-packages", ".ssh", "certs/sites/a", "credentials", "run/trainer", "run/memory"):
            (home / folder).mkdir(parents=True)
        self.key = home / "certs" / "sites" / "a" / "key.pem"
        (home / "credentials" / "key.pem").write_text("the secret")
        self.key.symlink_to("../../../credentials/key.pem")
        self.kept = [home / name for name in (
            ".ssh/authorized_keys", ".bashrc", "task.py", "audit.jsonl", "cohorts.jsonl",
            "cohorts.jsonl.copy", "released.json", "run/ledger.db",
        )]  # fmt: skip
        for path in self.kept:
            path.write_text("as it was")
        self.scratch = home / "run" / "trainer"
        for path in [home, *home.rglob("*")]:
            os.chown(path, user, user, follow_symlinks=False)

    @property
    def boundary(self) -> Boundary:
        folders, keys = hidden(self.home / "certs", self.home, [str(self.home)])
        places = [str(self.home), str(self.home / "site-packages"), str(self.home / "run")]
        scratch = [str(self.scratch), str(self.home / "run" / "memory")]
        return Boundary("auto", False, folders, keys, scratch, places, True)

    def attack(
        self, mode: str, attacks: dict[str, Callable[[], object]], at: Path | None = None, **changes: Any
    ) -> tuple[dict[str, Limit], dict[str, str]]:
        """(what the process says of itself, what came of each attack), with namespaces or without."""
        inside, outside = os.pipe()
        if (pid := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                os.setgid(self.user)
                os.setuid(self.user)
                LIBC.prctl(4, 1, 0, 0, 0)  # dumpable, as a program that is executed
                os.chdir(at or self.home)
                boundary = self.boundary._replace(**changes)
                if mode != "namespaces":
                    without_namespaces()
                if mode == "neither":
                    confinement._CREATE_RULESET = 1 << 20  # the kernel has no such call
                limits = confinement.shut_in(boundary)
                found = {name: outcome(work) for name, work in attacks.items()}
                os.write(outside, json.dumps([limits, found]).encode())
            os._exit(0)
        os.close(outside)
        with open(inside) as file:
            text = file.read()
        os.waitpid(pid, 0)
        limits, found = json.loads(text)
        said = {limit[0]: Limit(*limit) for limit in limits}
        if mode.lower() not in f"{said['calls'].said} neither".lower():
            pytest.skip(f"this system gives no {mode} to such a process: {said['calls'].said}")
        return said, found


def outcome(work: Callable[[], object]) -> str:
    try:
        return f"did it: {work()!r}"
    except OSError as e:
        return errno.errorcode[e.errno or 0]


@pytest.fixture(params=["namespaces", "landlock"])
def mode(request) -> str:
    return str(request.param)


@pytest.fixture
def world() -> Iterator[World]:
    with TemporaryDirectory(prefix="fedtrain-world-") as folder:
        yield World(Path(folder), os.getuid() or 61234)


def test_s10_c1_a_key_that_is_a_link_cannot_be_read_by_any_name(world, mode):
    real, hop = world.home / "credentials" / "key.pem", world.home / "hop"
    new = world.scratch / "new"
    world.key.unlink()
    hop.symlink_to(real)
    world.key.symlink_to(hop)
    (world.key.parent / "cert.pem").write_text("the secret")
    said, found = world.attack(mode, {
        "its name": world.key.read_text,
        "its target": real.read_text,
        "a link between": hop.read_text,
        "a link of the task's": lambda: (new.symlink_to(real), new.read_text()),
        "from its own folder": Path("cert.pem").read_text,
        "a hard link": lambda: os.link(real, world.scratch / "hard"),
        "renamed": lambda: os.rename(world.key, world.scratch / "key"),
        "its folder renamed": lambda: os.rename(real.parent, world.scratch / "folder"),
        "by a copy of cat in memory": lambda: by_memory(real),
    }, at=world.key.parent)  # fmt: skip
    assert [name for name, what in found.items() if what.startswith("did it")] == [], found
    assert said["key"] == (
        "key", True, "the task's code cannot read keys and certificates (4 files tried)"
    )  # fmt: skip


def by_memory(file: Path) -> bytes:
    """What a program finds that is executed from memory, where no rule names its file."""
    number = os.memfd_create("cat", 0)
    os.write(number, Path("/bin/cat").read_bytes())
    run = subprocess.run([f"/proc/self/fd/{number}", file], pass_fds=[number], capture_output=True)
    if run.returncode:
        raise PermissionError(errno.EACCES, run.stderr)
    return run.stdout


def test_s10_c1_root_reads_the_key_from_no_disk(mode):
    disks = [str(each) for each in Path("/dev").iterdir() if each.is_block_device()]
    if os.getuid() or not disks:
        pytest.skip("root alone can read disks, and there is none here for this user")
    with TemporaryDirectory(prefix="fedtrain-world-") as folder:
        _, found = World(Path(folder), 0).attack(
            mode, {disk: lambda disk=disk: os.read(os.open(disk, os.O_RDONLY), 1) for disk in disks}
        )
    assert [name for name, what in found.items() if what.startswith("did it")] == []


def test_s10_c1_a_systemd_credential_is_hidden_as_the_keys_are(world, mode, monkeypatch):
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(world.home / "systemd"))
    (world.home / "systemd").mkdir()
    credential = world.home / "systemd" / "site-a.key"
    credential.write_text("the secret")
    os.chown(world.home / "systemd", world.user, world.user)
    _, found = world.attack(mode, {"credential": credential.read_text})
    assert found["credential"] in ("ENOENT", "EACCES")


def test_s10_c1_a_key_beside_what_the_task_needs_is_hidden_alone(world, mode):
    beside = world.home / "beside.pem"
    beside.write_text("the secret")
    os.chown(beside, world.user, world.user)
    world.key.unlink()
    world.key.symlink_to(beside)
    said, found = world.attack(mode, {"key": beside.read_text, "task": (world.home / "task.py").read_text})
    assert "secret" not in found["key"]
    assert found["task"] == "did it: 'as it was'"
    assert said["key"].holds


def test_s10_c1_a_key_with_a_second_name_is_not_said_to_be_hidden(world, mode):
    os.link(world.home / "credentials" / "key.pem", world.home / "backup.pem")
    said, found = world.attack(mode, {"backup": (world.home / "backup.pem").read_text})
    assert found["backup"] == "did it: 'the secret'"
    assert not said["key"].holds
    assert any(words in said["key"].said for words in ("CAN READ /", "/key.pem, which has a second name"))


def test_s10_where_a_system_cannot_shut_it_in_it_says_so(world):
    said, found = world.attack("neither", {"key": world.key.read_text})
    assert found["key"] == "did it: 'the secret'"
    assert {what: limit.holds for what, limit in said.items()} == {
        "key": False, "files": False, "network": True, "sockets": True, "calls": True,
    }  # fmt: skip
    assert said["key"].said == f"the task's code CAN READ {world.home}/certs/sites/a/key.pem (tried)"
    assert said["files"].said.startswith("it can write what your account can, as in /")


def test_s10_c2_the_task_writes_in_its_scratch_folder_alone(world, mode):
    home, scratch = world.home, world.scratch
    attacks = {
        "zz.pth": lambda: (home / "site-packages" / "zz.pth").write_text("import os"),
        "a folder": lambda: (home / "new").mkdir(),
        "a link": lambda: (home / "link").symlink_to("task.py"),
        "a socket": lambda: os.mknod(home / "socket", 0o600 | stat.S_IFSOCK),
        "a file without a name": lambda: nameless(home),
        "a folder renamed": lambda: os.rename(home / ".ssh", scratch / "ssh"),
        "a folder of its own put there": lambda: (
            (scratch / "ssh").mkdir(), os.rename(scratch / "ssh", home / "ssh")),
        "a hard link out": lambda: ((scratch / "f").write_text("f"), os.link(scratch / "f", home / "f")),
        "a hard link in": lambda: (
            os.link(home / ".bashrc", scratch / "b"), (scratch / "b").write_text("it was I")),
        "mounted over": lambda: mount(scratch, home / ".ssh"),
        "its own log": lambda: open("/proc/self/fd/2", "w").close() if os.path.isfile("/dev/stderr") else
            (home / "audit.jsonl").write_text(""),
        "a path reopened": lambda: reopened(home / ".bashrc"),
    }  # fmt: skip
    for path in world.kept:
        attacks |= {
            f"append to {path.name}": lambda path=path: path.open("a"),
            f"truncate {path.name}": lambda path=path: os.truncate(path, 0),
            f"empty {path.name}": lambda path=path: os.open(path, os.O_RDONLY | os.O_TRUNC),
            f"remove {path.name}": lambda path=path: path.unlink(),
            f"replace {path.name}": lambda path=path: (
                (scratch / "e").write_text("e"), os.replace(scratch / "e", path)),
        }  # fmt: skip
    allowed = {
        "scratch": lambda: (scratch / "checkpoint").write_text("c"),
        "memory": lambda: (home / "run" / "memory" / "state").write_text("s"),
        "a tree": lambda: ((scratch / "a").mkdir(), os.rename(scratch / "a", scratch / "b2")),
        "a copy": lambda: shutil.copy2(home / "task.py", scratch / "copy"),
        "nothing": lambda: Path("/dev/null").write_text("n"),
        "shared memory": lambda: Path("/dev/shm", f"fedtrain-{os.getpid()}").touch(),
    }  # fmt: skip
    said, found = world.attack(mode, attacks | allowed)
    assert [name for name in attacks if found[name].startswith("did it")] == []
    assert [name for name in allowed if not found[name].startswith("did it")] == []
    assert {path.read_text() for path in world.kept} == {"as it was"}
    assert said["files"].holds
    assert f"it writes in {scratch}" in said["files"].said
    for left in Path("/dev/shm").glob("fedtrain-*"):
        left.unlink()


def nameless(folder: Path) -> None:
    number = os.open(folder, os.O_TMPFILE | os.O_WRONLY)
    os.link(f"/proc/self/fd/{number}", folder / "named", follow_symlinks=True)


def mount(source: Path, at: Path) -> None:
    confinement._call("mount", os.fsencode(source), os.fsencode(at), None, ctypes.c_ulong(1 << 12), None)


def reopened(path: Path) -> None:
    number = os.open(path, os.O_PATH)
    os.close(os.open(f"/proc/self/fd/{number}", os.O_WRONLY))


def test_s10_c2_the_task_changes_no_mode_of_a_file_outside(world, mode):
    """Landlock has no rule for it: there the call returns and changes nothing."""
    before = {path: os.stat(path).st_mode for path in [*world.kept, world.home / ".ssh"]}
    attacks = {path.name: lambda path=path: os.chmod(path, 0o777) for path in before}
    world.attack(mode, attacks | {"an attribute": lambda: os.setxattr(world.kept[0], "user.a", b"b")})
    assert {path: os.stat(path).st_mode for path in before} == before
    assert os.listxattr(world.kept[0]) == []


def test_s10_c2_namespaces_hide_the_shared_memory_of_another_process(world):
    with NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(b"as it was")
        file.flush()
        os.chown(file.name, world.user, world.user)
        _, found = world.attack("namespaces", {"written": lambda: Path(file.name).read_text()})
        assert found["written"] == "ENOENT"


def test_s10_c3_no_daemon_of_this_account_is_reached_by_a_unix_socket(world, mode):
    path, abstract = str(world.home / "daemon"), f"\0fedtrain-{os.getpid()}"
    unix = socket.AF_UNIX

    def pair_again(kind: int, address: str = path) -> None:
        one, other = socket.socketpair(unix, kind)
        other.close()
        one.connect(address)

    kinds = {"stream": socket.SOCK_STREAM, "datagram": socket.SOCK_DGRAM, "packet": socket.SOCK_SEQPACKET,
             "raw": socket.SOCK_RAW}  # fmt: skip
    attacks = {f"{name} to {at!r}": lambda kind=kind, at=at: socket.socket(unix, kind).connect(at)
               for name, kind in kinds.items() for at in (path, abstract)}  # fmt: skip
    attacks |= {f"a pair of {name} again": lambda kind=kind: pair_again(kind) for name, kind in kinds.items()}
    attacks["sent to"] = lambda: socket.socketpair(unix, socket.SOCK_STREAM)[0].sendto(b"b", path)
    with socket.socket(unix) as here, socket.socket(unix) as there:
        for daemon, at in ((here, path), (there, abstract)):
            daemon.bind(at)
            daemon.listen()
        os.chown(path, world.user, world.user)
        said, found = world.attack(mode, attacks | {"a pair": lambda: socket.socketpair()})
        assert found.pop("a pair").startswith("did it")
        assert [name for name, what in found.items() if what.startswith("did it")] == []
        assert said["sockets"] == ("sockets", True, "it calls no other program")
        assert "did it" in world.attack(mode, {"a pair": lambda: socket.socketpair()})[1]["a pair"]


def test_s10_c3_processes_that_train_together_have_datagrams_alone(world, mode):
    """NCCL passes descriptors by them; what answers, an agent or a bus, listens on streams."""
    path = str(world.home / "daemon")
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(path)
        daemon.listen()
        os.chown(path, world.user, world.user)
        said, found = world.attack(mode, {
            "datagram": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).bind("\0own"),
            "by a datagram": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).connect(path),
            "stream": lambda: socket.socket(socket.AF_UNIX).connect(path),
            "loopback": lambda: socket.socket().bind(("127.0.0.1", 0)),
        }, several=True)  # fmt: skip
    assert found == {
        "datagram": "did it: None", "by a datagram": "EPROTOTYPE", "stream": "EPERM",
        "loopback": "did it: None",
    }  # fmt: skip
    assert said["sockets"].said.endswith("but by datagrams, which NCCL needs")
    assert said["network"].holds is (mode == "namespaces")


def test_s10_the_task_touches_no_other_process(world, mode):
    with subprocess.Popen(["sleep", "60"], user=world.user, group=world.user) as other:
        its = f"/proc/{other.pid}"
        said, found = world.attack(mode, {
            "memory": lambda: os.open(f"{its}/mem", os.O_RDONLY),
            "environment": lambda: Path(f"{its}/environ").read_bytes(),
            "folder": lambda: os.listdir(f"{its}/root"),
            "its descriptors": lambda: os.listdir(f"{its}/fd") and os.readlink(f"{its}/fd/0"),
            "namespace": lambda: os.open(f"{its}/ns/mnt", os.O_RDONLY),
            "signal": lambda: os.kill(other.pid, 0),
            "a new namespace": lambda: confinement._call("unshare", confinement._NEWUSER),
            "folders that it has open": lambda: folders_open() or missing(),
        })  # fmt: skip
        other.kill()
    if confinement._call("syscall", confinement._CREATE_RULESET, None, 0, 1) < 6:
        found.pop("signal")  # before Linux 6.12
    assert [name for name, what in found.items() if what.startswith("did it")] == [], found
    assert said["calls"].holds


def folders_open() -> list[str]:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.isdir(link)]


def missing() -> None:
    raise FileNotFoundError(errno.ENOENT, "none")


# --- what a task leaves for the process that has the key


def test_s10_a_link_in_place_of_an_update_is_not_followed(tmp_path):
    """The supervisor reads what the trainer wrote: by a link the task would send the key in its update."""
    schema = Schema.of_tensors({"w": torch.zeros(4)})
    (tmp_path / "key.pem").write_bytes(bytes(schema.nbytes))
    (tmp_path / "delta").symlink_to(tmp_path / "key.pem")
    left = ArenaFile(schema, tmp_path / "delta", "")
    section = schema.sections[0]
    for reads in (
        left.load,
        lambda: left.digest,
        lambda: left.span(section, 0, 4),
        lambda: read_chunk(left, 0),
    ):
        with pytest.raises(OSError, match="symbolic link"):
            reads()


def test_s10_a_pipe_in_place_of_an_update_stops_no_one(tmp_path):
    schema = Schema.of_tensors({"w": torch.zeros(4)})
    os.mkfifo(tmp_path / "delta")
    with pytest.raises(BadUpdate):
        ArenaFile(schema, tmp_path / "delta", "").load()


def test_s10_what_arrives_is_not_written_through_a_link_that_was_recycled(tmp_path):
    (tmp_path / "policy.toml").write_text("as it was")
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "free").symlink_to(tmp_path / "policy.toml")
    with pytest.raises(OSError, match="symbolic link"):
        open_for_writing(tmp_path / "spool" / "new.part")
    assert (tmp_path / "policy.toml").read_text() == "as it was"


LIBC = ctypes.CDLL(None, use_errno=True)


def called(number, *arguments):
    """errno of a system call; 0 where it went through."""
    return ctypes.get_errno() if LIBC.syscall(number, *map(ctypes.c_long, arguments)) < 0 else 0


def in_a_child(work, families=None):
    """What `work()` finds in a process under the filter, as JSON."""
    inside, outside = os.pipe()
    if (pid := os.fork()) == 0:
        seccomp.restrict(families)
        os.write(outside, json.dumps(work()).encode())
        os._exit(0)
    os.close(outside)
    with open(inside) as file:
        found = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(found)


@pytest.fixture
def column():
    try:
        in_a_child(lambda: 0)
        return seccomp.MACHINES[os.uname().machine][0]
    except (ValueError, KeyError):
        pytest.skip("this system has no filter of system calls")


def test_s10_each_call_that_the_filter_names_is_refused_and_a_process_can_still_be_started(column):
    """Of a root user, whom nothing else would stop."""

    def tries():
        calls = {name: numbers[column] for name, numbers in seccomp.CLOSED.items()}
        found = {name: called(n, 0, 0, 0, 0, 0) for name, n in calls.items() if n is not None}
        found["clone"] = called(seccomp.CLONE[column], 0x10000000, 0, 0, 0, 0)  # a user namespace
        found["clone3"] = called(seccomp.CLONE3, 0, 0)
        return [found, os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1]]

    found, started = in_a_child(tries)
    assert found.pop("clone3") == errno.ENOSYS
    assert set(found.values()) == {errno.EPERM}, found
    assert started == 0


def test_s10_under_the_filter_only_the_named_families_have_sockets(column):
    def opened(families=(socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_PACKET)):
        found = {}
        for family in families:
            try:
                socket.socket(family, socket.SOCK_DGRAM).close()
                found[family.name] = 0
            except OSError as e:
                found[family.name] = e.errno
        return found

    assert set(in_a_child(opened, seccomp.LOCAL).values()) == {errno.EPERM}
    assert in_a_child(opened)["AF_INET"] == 0


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter_of_each_machine_refuses_what_its_table_names(machine, column):
    """Walked through by hand: each instruction is code, two jumps and a value."""
    of_the_machine, arch = seccomp.MACHINES[machine]
    assert of_the_machine == column
    code = list(struct.iter_unpack("HBBI", seccomp.program(column, arch, seccomp.LOCAL, False, True)))

    def verdict(number, argument=0, arch=arch, second=0):
        data, at, word = {0: number, 4: arch, 16: argument, 24: second}, 0, 0
        tests = {0x15: lambda a, k: a == k, 0x35: lambda a, k: a >= k, 0x45: lambda a, k: bool(a & k)}
        while True:
            kind, yes, no, value = code[at]
            if kind == 0x06:
                return value
            if kind == 0x20:
                word, step = data[value], 0
            elif kind == 0x54:
                word, step = word & value, 0
            else:
                step = yes if tests[kind](word, value) else no
            at += 1 + step

    refuse, allow = 0x00050000 | errno.EPERM, 0x7FFF0000
    for numbers in seccomp.CLOSED.values():
        if numbers[column] is not None:
            assert verdict(numbers[column]) == refuse
            assert verdict(numbers[column], arch=0x40000003) == refuse  # as of i386
    for numbers in seccomp.MODES.values():
        if numbers[column] is not None:
            assert verdict(numbers[column]) == 0x00050000  # 0, and nothing is done
    assert verdict(seccomp.SOCKET[column], socket.AF_UNIX, second=socket.SOCK_DGRAM) == refuse
    assert verdict(seccomp.SOCKET[column], socket.AF_NETLINK) == allow
    close = socket.SOCK_CLOEXEC
    assert verdict(seccomp.SOCKETPAIR[column], socket.AF_UNIX, second=socket.SOCK_STREAM | close) == allow
    assert verdict(seccomp.SOCKETPAIR[column], socket.AF_UNIX, second=socket.SOCK_DGRAM | close) == refuse
    assert verdict(seccomp.SOCKETPAIR[column], socket.AF_UNIX, second=socket.SOCK_RAW) == refuse
    assert verdict(seccomp.SOCKET[column], socket.AF_INET) == refuse
    assert verdict(seccomp.CLONE[column], 0x10000000) == refuse
    assert verdict(seccomp.CLONE[column], 0x3D0F00) == allow  # a thread, as the C library starts one
    assert verdict(seccomp.CLONE3) == 0x00050000 | errno.ENOSYS
    assert verdict(0 if column == 0 else 63) == allow  # read
    if column == 0:
        assert verdict(0x40000000 + 101) == refuse
