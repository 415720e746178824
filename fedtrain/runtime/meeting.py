"""How the ranks that torchrun, SLURM, Ray or Kubernetes has started become a process group.

They meet in a store that only holders of the ranks' secret can enter (rank_store.py); ranks of one machine
talk over loopback. What Gloo and NCCL exchange is theirs: neither encrypted nor authenticated.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

from ..config import Config
from ..errors import ConfigError
from ..training.collectives import refuse_pickles
from ..training.devices import record_collectives, refuse_gathers, refuse_shared
from .rank_store import RankStore

VARIABLE = "FEDTRAIN_RANKS_SECRET"  # has the ranks' secret
LEAST = 32  # characters of it
FILE = ".ranks-secret"  # of one machine's ranks, where they were given none
LOOPBACK = "127.0.0.1"
ADVICE = (
    "Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it, ranks may not find each other "
    "again after a machine has come or gone."
)

OPEN = (
    "torchrun's own store listens on all interfaces of this machine and loads pickles: whoever reaches its "
    "port runs code as you. On one machine, `torchrun --master-port PORT --nproc-per-node N` has one that "
    "loads none; on several, start it only in a network that no other machine reaches."
)

_met: list[RankStore] = []  # torch's groups ask it, and don't keep it alive


def meet(config: Config, backend: str, device: torch.device | None = None, *, timeout_s: float = 0.0) -> None:
    """init_process_group for ranks that were started or restarted together. `timeout_s`: instead of
    parallel.timeout.

    Raises:
        ConfigError: Ranks of several machines were given no secret, or a weak one.
        ConnectError: Rank 0 holds another secret, can't listen, or did not answer within that time.
    """
    timeout_s = timeout_s or config.parallel.timeout
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == ranks
    refuse_gathers(config.parallel, ranks, device or torch.device("cpu"), backend)
    address = LOOPBACK if one_machine else os.environ["MASTER_ADDR"]
    refuse_pickles()
    if one_machine:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    store = _store(secret_of(config.root / config.run.dir, one_machine), rank, ranks, address, timeout_s)
    _met.append(store)
    record_collectives(backend, config.datacenter_dir / "hangs")
    if device is not None:
        refuse_shared(store, device, backend)
    # Without device_id: torch would split other groups off, and for that clone the store. A store in Python
    # can't be: Gloo's half of a split holds the lock that rank 0's own answers wait for.
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s)
    )


def _store(secret: str, rank: int, ranks: int, address: str, timeout_s: float) -> RankStore:
    """Rank 0's, at MASTER_PORT; where torchrun's own store listens there, at a free port, which that one is
    told. The port is no secret: whoever forges it gets no rank's word."""
    port, shared = int(os.environ["MASTER_PORT"]), None
    if shares_store():
        timeout = timedelta(seconds=timeout_s)
        shared = TCPStore(os.environ["MASTER_ADDR"], port, ranks, False, timeout=timeout)
    # Of each restart its own, for torchrun's store still has what ranks that were killed have said.
    key = f"port of restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} of {ranks} ranks"
    if rank == 0:
        store = RankStore.hosted(secret, address, 0 if shared else port, timeout_s)
        if shared is not None:
            shared.set(key, str(store.port))
        return store
    return RankStore.joined(
        secret, lambda: (address, int(shared.get(key)) if shared is not None else port), timeout_s
    )


def shares_store() -> bool:
    """Whether torchrun's ranks use torchrun's own store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def advice() -> list[str]:
    """What people should know of how torchrun has started this rank. Its c10d rendezvous, --standalone too,
    gives a run an id, and loads pickles from a store that torch binds to all interfaces."""
    found = []
    if shares_store() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        found.append(ADVICE)
    if os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none":
        found.append(OPEN)
    return found


def secret_of(runs: Path, one_machine: bool) -> str:
    """What the ranks were given; or what those of one machine keep in a file that no other user reads, in the
    folder of all runs."""
    if given := os.environ.get(VARIABLE):
        if len(given) < LEAST:
            raise ConfigError(
                f"{VARIABLE} has {len(given)} characters, {LEAST} are needed: openssl rand -hex 32 makes 64."
            )
        return given
    if not one_machine:
        raise ConfigError(
            f"ranks on several machines know each other by a secret, and {VARIABLE} is not set. Give all of "
            f"them the same: export {VARIABLE}=$(openssl rand -hex 32)."
        )
    runs.mkdir(parents=True, exist_ok=True)
    path, new = runs / FILE, runs / f"{FILE}.{secrets.token_hex(4)}"
    if not path.exists():
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # another rank was first
            os.link(new, path)
        new.unlink()
    found = path.stat()
    if found.st_mode & 0o077 or found.st_uid != os.getuid():
        raise ConfigError(
            f"{path} can be read by others, or is another user's. Remove it: ranks make a new one."
        )
    return path.read_text()
