"""S10: what the task's code can reach from the trainer process of a site."""

import asyncio
import ctypes
import errno
import json
import os
import socket
import struct
from pathlib import Path

import pytest

from fedtrain.config import Config
from fedtrain.errors import ConfigError
from fedtrain.runtime.trainers import confinement, seccomp
from fedtrain.runtime.trainers.trainer import Trainer
from tests.worlds import Command

TASK = """
import json, os, socket, subprocess
from pathlib import Path
import torch
from torch import nn
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
    "by the parent": tried(Path(f"/proc/{os.getppid()}/root{key}").read_text),
    "parent's memory": tried(lambda: open(f"/proc/{os.getppid()}/mem", "rb").close()),
    "moved": tried(lambda: os.rename(key, HERE / "stolen")),
    "unmounted": subprocess.run(inside, capture_output=True, text=True).stdout,
    "tcp": tried(lambda: socket.create_connection(("127.0.0.1", int((HERE / "port").read_text())), 5)),
    "data": (HERE / "data.txt").read_text(),
}
(HERE / "runs" / "found.json").write_text(json.dumps(found))

class Line(fedtrain.Task):
    def model(self):
        return nn.Linear(1, 1)

    def data(self, site):
        return torch.zeros(4, 1), torch.zeros(4, 1)

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


@pytest.fixture
def project(tmp_path: Path) -> Config:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "data.txt").write_text("data")
    (tmp_path / "runs").mkdir()
    key = tmp_path / "certs" / "sites" / "a" / "key.pem"
    key.parent.mkdir(parents=True)
    key.write_text("the secret")
    return Config.of({"run": {"name": "r", "task": "task:Line"}, "train": {"device": "cpu"}}, tmp_path)


def found_by(config: Config, confine: str) -> tuple[str, dict[str, str]]:
    """What the trainer says of itself, and what the task's code could reach."""

    async def run() -> str:
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        (config.root / "port").write_text(str(server.sockets[0].getsockname()[1]))
        async with server:
            trainer = await Trainer.start(config, scratch=config.root / "runs", confine=confine)
            await trainer.close()
        return trainer.description.confined

    said = asyncio.run(run())
    return said, json.loads((config.root / "runs" / "found.json").read_text())


@pytest.mark.slow(3)
def test_s10_the_tasks_code_reaches_neither_the_sites_key_nor_the_network_and_the_site_says_so(project):
    said, found = found_by(project, "auto")
    assert found["data"] == "data"
    if "not shut in" in said:
        pytest.skip(said)
    assert "the secret" not in [found["key"], found["by the parent"], found["unmounted"]]
    assert found["by the parent"] == found["parent's memory"] == "PermissionError"
    assert (project.root / "certs" / "sites" / "a" / "key.pem").read_text() == "the secret"
    if "no network" in said or "no socket" in said or "TCP is closed" in said:
        assert found["tcp"] in ("ConnectionRefusedError", "PermissionError")


@pytest.mark.slow(3)
def test_s10_without_it_the_same_code_reads_the_key(project):
    said, found = found_by(project, "off")
    assert (said, found["key"]) == ("", "the secret")


@pytest.mark.slow(3)
def test_s10_a_policy_may_leave_the_network_open_and_hides_the_keys(project):
    said, found = found_by(project, "keys")
    if "not shut in" in said:
        pytest.skip(said)
    assert "the secret" not in [found["key"], found["by the parent"]]
    assert "socket" in found["tcp"]


COMMAND = """
import json, socket, sys
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
Path("runs/by-command.json").write_text(json.dumps(found))
Path(sys.argv[1]).write_text(json.dumps({"examples": 4}))
"""


def train_by_command(arguments: list[str]) -> None:
    """In a process of its own; with an argument in one that can make no namespaces, nor can its trainer."""
    folder = Path.cwd()
    table = {"run": {"name": "r", "task": "task:Line"}, "train": {"device": "cpu", "command": (
        "cp {weights} {out} && python own.py {report}")}}  # fmt: skip
    if arguments:
        seccomp.restrict(None)

    async def run() -> None:
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        (folder / "port").write_text(str(server.sockets[0].getsockname()[1]))
        config = Config.of(table, folder)
        async with server, await Trainer.start(config, scratch=folder / "runs", confine="require") as trainer:
            initial = await trainer.initial(folder / "runs" / "initial")
            update = await trainer.train("a", 0, initial, folder / "runs" / "delta")
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
        assert refused.read_text().startswith("policy.confine = require: the task's code")
        pytest.skip(refused.read_text())
    found = json.loads((project.root / "runs" / "by-command.json").read_text())
    assert found.pop("data") == "data"
    assert found["key"] in ("FileNotFoundError", "PermissionError")
    assert found["tcp"] in ("ConnectionRefusedError", "PermissionError")


def test_s10_where_a_system_cannot_shut_it_in_it_says_so_and_a_policy_that_requires_it_refuses(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(confinement, "_works_in_a_child", lambda *_: False)

    def none(folder: Path, *, close_tcp: bool) -> bool:
        raise OSError("no Landlock")

    monkeypatch.setattr(confinement, "_landlock", none)
    monkeypatch.setattr(confinement, "_filter", lambda _: False)  # it would be on this process for good
    said, whole = confinement.shut_in(tmp_path / "certs", network=False, loopback=False)
    assert not whole
    assert "no filter of system calls" in said
    assert said.startswith("the task's code is not shut in, for this system gives it no namespaces")


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

    local = in_a_child(opened, seccomp.LOCAL)
    assert local.pop("AF_UNIX") == 0
    assert set(local.values()) == {errno.EPERM}
    assert in_a_child(opened)["AF_INET"] == 0


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter_of_each_machine_refuses_what_its_table_names(machine, column):
    """Walked through by hand: each instruction is code, two jumps and a value."""
    of_the_machine, arch = seccomp.MACHINES[machine]
    assert of_the_machine == column
    code = list(struct.iter_unpack("HBBI", seccomp.program(column, arch, seccomp.LOCAL)))

    def verdict(number, argument=0, arch=arch):
        data, at, word = {0: number, 4: arch, 16: argument}, 0, 0
        tests = {0x15: lambda a, k: a == k, 0x35: lambda a, k: a >= k, 0x45: lambda a, k: bool(a & k)}
        while True:
            kind, yes, no, value = code[at]
            if kind == 0x06:
                return value
            if kind == 0x20:
                word, step = data[value], 0
            else:
                step = yes if tests[kind](word, value) else no
            at += 1 + step

    refuse, allow = 0x00050000 | errno.EPERM, 0x7FFF0000
    for numbers in seccomp.CLOSED.values():
        if numbers[column] is not None:
            assert verdict(numbers[column]) == refuse
            assert verdict(numbers[column], arch=0x40000003) == refuse  # as of i386
    assert verdict(seccomp.SOCKET[column], socket.AF_UNIX) == allow
    assert verdict(seccomp.SOCKET[column], socket.AF_INET) == refuse
    assert verdict(seccomp.CLONE[column], 0x10000000) == refuse
    assert verdict(seccomp.CLONE[column], 0x3D0F00) == allow  # a thread, as the C library starts one
    assert verdict(seccomp.CLONE3) == 0x00050000 | errno.ENOSYS
    assert verdict(0 if column == 0 else 63) == allow  # read
    if column == 0:
        assert verdict(0x40000000 + 101) == refuse
