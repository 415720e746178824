"""D0: a site starts, and its certificate is renewed, with the mounts of the unit and of the compose file."""

import asyncio
import os
import re
import shlex
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedtrain.config import Config
from fedtrain.pki import Credentials, issue, renewal
from fedtrain.pki.callers import Callers
from fedtrain.pki.identity import Current
from tests.allowed import allowed
from tests.federation import aggregator, certificates, random_arena
from tests.limits import bounded
from tests.mounts import USER, Mount, start
from tests.ports import free_port
from tests.test_deployment import FOLDER, compose, unit

DOCKERFILE = (FOLDER / "Dockerfile").read_text()
MODEL = random_arena(10, 0)
TASK = """
import torch, fedtrain

class Blobs(fedtrain.Task):
    def model(self):
        return torch.nn.Linear(2, 2)

    def data(self, site):
        return torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
SITE = "site-1"


class Rollout:
    """A project and a site's key, of which a third of the certificate's life is left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.project, self.state = folder / "project", folder / "state"
        for path in (self.project / "data", self.state):
            path.mkdir(parents=True)
        (self.project / "task.py").write_text(TASK)
        (self.project / "fedtrain.toml").write_text('[run]\nname = "r"\ntask = "task:Blobs"\n')
        self.ca = certificates(folder / "ca")
        issue(self.ca, "site", SITE, days=30, now=datetime.now(UTC) - timedelta(days=21))
        self.certs = folder / "certs"
        (self.certs / "sites").mkdir(parents=True)
        (self.ca / "sites" / SITE).rename(self.own)
        config = Config.load(self.project / "fedtrain.toml", [f"network.certs={self.certs}"])
        allowed(config, SITE, masks=True)
        for path in (self.certs, self.state):
            for each in (path, *path.rglob("*")):
                os.chown(each, USER, USER)
        for path in (folder, *folder.parents):
            if path.stat().st_mode & 0o001 == 0 and path.owner() == "root" and path.name:
                path.chmod(path.stat().st_mode | 0o011)

    @property
    def own(self) -> Path:
        return self.certs / "sites" / SITE

    def by_unit(self, writable: bool) -> tuple[list[Mount], list[str], dict[str, str], str]:
        """The mounts, command, environment and folder of the unit; not `writable`: without its own
        ReadWritePaths, as where an operator hardened it further."""
        service = unit(FOLDER / "fedtrain-site@.service")["Service"]
        env = dict(each.split("=", 1) for each in service["Environment"])
        env["FEDTRAIN_NETWORK__ADDRESS"] = f"127.0.0.1:{self.port}"
        words = shlex.split(service["ExecStart"][0].replace("%i", SITE))
        command = [env[word[2:-1]] if re.fullmatch(r"\$\{\w+\}", word) else word for word in words]
        open_ = service["ReadWritePaths"] if writable else []
        mounts = [
            Mount("/opt/fedtrain", Path(sys.prefix)),
            Mount("/srv/fedtrain", self.project),
            Mount("/etc/fedtrain/certs", self.certs, "/etc/fedtrain/certs" in open_),
            Mount(f"/var/lib/{service['StateDirectory'][0]}", self.state, True),
        ]
        assert service["ProtectSystem"] == ["strict"]
        return mounts, command, env, service["WorkingDirectory"][0]

    def by_compose(self) -> tuple[list[Mount], list[str], dict[str, str], str]:
        """Of the compose file's first site, with the image's own paths."""
        service = compose()["services"][SITE]
        places = {
            "${FEDTRAIN_PROJECT}": self.project,
            "${FEDTRAIN_CERTS}": self.certs,
            "${FEDTRAIN_SITE_1_DATA:-./data/site-1}": self.project / "data",
        }
        mounts = [Mount("/opt/fedtrain", Path(sys.prefix)), Mount("/project", None)]
        for text in service["volumes"]:
            source, target, *mode = re.split(r":(?=/|ro$)", text)
            for name, path in places.items():
                source = source.replace(name, str(path))
            if not source.startswith("/"):  # a volume, which begins as the image's folder of that name
                source = str(self.folder / source)
                Path(source).mkdir(exist_ok=True)
                os.chown(source, USER, USER)
            mounts.append(Mount(target, Path(source), mode != ["ro"]))
        assert service["read_only"]
        env = dict(re.findall(r"(FEDTRAIN_\w+)=(\S+)", DOCKERFILE))
        env |= {"FEDTRAIN_NETWORK__ADDRESS": f"127.0.0.1:{self.port}"}
        return mounts, ["/opt/fedtrain/bin/fedtrain", *service["command"]], env, "/project"

    async def until(self, begun, what) -> list[str]:
        """Run the site and an aggregator that renews its certificate until `what(log)` is true of the
        aggregator's log, which is returned."""
        mounts, command, env, cwd = begun
        who = Callers(Credentials.load(self.ca / "aggregator"), self.ca)
        told: list[str] = []
        emit = lambda event: told.append(getattr(event, "text", ""))
        log, here = self.folder / "site.log", self.ca / "aggregator"
        async with aggregator(
            self.ca, self.folder, MODEL.schema, port=self.port, identify=who.identify, emit=emit
        ) as agg:
            watching = asyncio.create_task(
                renewal.watch(self.ca, here, Current(here), emit, who.that_count, agg.cohort.renew)
            )
            (self.folder / "machine").mkdir()
            process = start(self.folder / "machine", mounts, command, env, cwd, log)
            try:
                while not what(told):
                    assert process.poll() is None, log.read_text()
                    await asyncio.sleep(0.05)
            finally:
                watching.cancel()
                process.terminate()
                await asyncio.to_thread(process.wait, 60)
        return told


@pytest.mark.slow(12)
@pytest.mark.parametrize("by", ["unit", "compose"])
def test_d0_as_shipped_a_site_starts_and_keeps_its_renewed_certificate(by, tmp_path, monkeypatch):
    monkeypatch.setattr(renewal, "LOOK_S", 0.05)
    site = Rollout(tmp_path)
    before = (site.own / "cert.pem").read_bytes()
    begun = site.by_unit(True) if by == "unit" else site.by_compose()
    bounded(site.until(begun, lambda told: (site.own / "cert.pem").read_bytes() != before))
    assert not renewal.due((site.own / "cert.pem").read_bytes(), datetime.now(UTC))
    assert (site.own / "records").exists()


@pytest.mark.slow(8)
def test_d0_on_a_read_only_folder_a_site_starts_and_the_aggregator_hears(tmp_path, monkeypatch):
    """That the renewed certificate is not kept: at its end the site would be out."""
    monkeypatch.setattr(renewal, "LOOK_S", 0.05)
    site = Rollout(tmp_path)
    before = (site.own / "cert.pem").read_bytes()
    hears = lambda told: any("can't be kept in the folder of its key" in line for line in told)
    told = bounded(site.until(site.by_unit(False), hears))
    (line,) = [line for line in told if "can't be kept" in line]
    assert line.startswith(f"{SITE}: the renewed certificate")
    assert "Read-only file system" in line
    assert f"copy a renewed cert.pem to {SITE} yourself" in line
    assert (site.own / "cert.pem").read_bytes() == before
    assert "what bounds this site over all its runs holds as long" in (tmp_path / "site.log").read_text()
