"""S10: what the task's code can reach from the trainer process of a site."""

import asyncio
import json
from pathlib import Path

import pytest

from fedtrain.config import Config
from fedtrain.runtime.trainers import confinement
from fedtrain.runtime.trainers.trainer import Trainer

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


def test_s10_the_tasks_code_reaches_neither_the_sites_key_nor_the_network_and_the_site_says_so(project):
    said, found = found_by(project, "auto")
    assert found["data"] == "data"
    if "not shut in" in said:
        pytest.skip(said)
    assert "the secret" not in [found["key"], found["by the parent"], found["unmounted"]]
    assert found["by the parent"] == found["parent's memory"] == "PermissionError"
    assert (project.root / "certs" / "sites" / "a" / "key.pem").read_text() == "the secret"
    if "no network" in said or "TCP is closed" in said:
        assert found["tcp"] in ("ConnectionRefusedError", "PermissionError")


def test_s10_without_it_the_same_code_reads_the_key(project):
    said, found = found_by(project, "off")
    assert (said, found["key"]) == ("", "the secret")


def test_s10_a_policy_may_leave_the_network_open_and_hides_the_keys(project):
    said, found = found_by(project, "keys")
    if "not shut in" in said:
        pytest.skip(said)
    assert "the secret" not in [found["key"], found["by the parent"]]
    assert "socket" in found["tcp"]


def test_s10_where_a_system_cannot_shut_it_in_it_says_so_and_a_policy_that_requires_it_refuses(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(confinement, "_works_in_a_child", lambda *_: False)

    def none(folder: Path, *, close_tcp: bool) -> bool:
        raise OSError("no Landlock")

    monkeypatch.setattr(confinement, "_landlock", none)
    said, whole = confinement.shut_in(tmp_path / "certs", network=False, loopback=False)
    assert not whole
    assert said.startswith("the task's code is not shut in, for this system gives it no namespaces")
