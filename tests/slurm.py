"""A real SLURM of two virtual nodes on loopback: munged, slurmctld, two slurmds, in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.ports import free_port

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/linear
ReturnToService=2
KillWait=20
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def missing() -> str:
    """Why no cluster can be made here; "" when one can."""
    lacking = [name for name in NEEDED if shutil.which(name, path=f"/usr/sbin:{os.environ['PATH']}") is None]
    if lacking:
        return f"{', '.join(lacking)} not here: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "needs root, for slurmd"


class Slurm:
    """`with` starts and ends it; `run` runs one of its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"/usr/sbin:{os.environ['PATH']}",
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        host = socket.gethostname().partition(".")[0]
        port, n1, n2 = (free_port() for _ in range(3))
        for name in ("state", "spool-n1", "spool-n2", "munge"):
            (self.folder / name).mkdir(mode=0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (self.folder / "slurm.conf").write_text(
            CONF.format(folder=self.folder, host=host, port=port, n1=n1, n2=n2)
        )
        munge = self.folder / "munge"
        self._start(
            "munged", "--foreground", "--force", f"--socket={munge}/socket", f"--key-file={key}",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        self._until(lambda: (munge / "socket").exists())
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D", "-N", "n1")
        self._start("slurmd", "-D", "-N", "n2")
        self._until(self.idle)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "--state=RUNNING", check=False)
            self._until(lambda: not self.run("squeue", "-h", "-t", "R,CG", check=False).strip(), 40)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(20)

    def run(self, *command: str, check: bool = True, cwd: Path | None = None, **env: str) -> str:
        done = subprocess.run(
            command, env=self.env | env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def idle(self) -> bool:
        """Whether both nodes are up, and nothing of a job is left on them."""
        return self.run("sinfo", "-h", "-o", "%D %t", check=False).split() == ["2", "idle"]

    def job(self, number: str) -> dict[str, str]:
        """What scontrol shows of a job."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(pair.split("=", 1) for pair in shown if "=" in pair)

    def _start(self, *command: str) -> None:
        log = (self.folder / f"{'-'.join(command[:1] + command[-1:]).replace('/', '_')}.out").open("ab")
        self._daemons.append(
            subprocess.Popen(command, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        )
        log.close()

    def _until(self, condition: object, timeout_s: float = 90) -> None:
        assert callable(condition)
        until = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until, self.log()
            time.sleep(0.1)

    def log(self) -> str:
        return "\n".join(
            f"== {p.name}\n{p.read_text(errors='replace')[-1500:]}"
            for p in sorted(self.folder.glob("*.[lo][ou][gt]"))
        )
