"""`fedtrain doctor`: what would keep a run from working on this machine, each with what to do about it.

The checks of the network are those of a site: its proxy, its certificate, its aggregator. Nothing is sent
but a call without a word, and one optimizer step is taken on the data that is here; at a site only after the
checks of its own start, for none of its task runs before its people approved it (S22), and shut in as its
trainer is (S10). The step has a folder of its own, so that it touches nothing of a run that is under way.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

from ..config import Config
from ..config.policy import FILE as POLICY
from ..config.policy import policy_from
from ..errors import ConnectError, FedtrainError, TaskError
from ..events import silent
from ..pki.identity import Credentials, Current, Identity, aggregator_target
from ..pki.proof import AggregatorCheck
from ..store.disk import private_folder, refuse_network_disk
from ..transport.grpc import GrpcTransport
from ..transport.streams import SESSION
from ..transport.tls import Tls, explain
from .findings import Finding, listening
from .peers.checkup import checks_of, is_peer
from .sites.approval import Approvals
from .sites.start import checked_policy, credentials_of, folder_of
from .sites.statistics import check_config as check_statistics
from .trainers.boundary import Limit
from .trainers.trainer import Trainer

WAIT_S = 5.0  # for an answer from the network
LEAST_FREE, SLOW_DISK_S = 2 << 30, 0.1
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # in the order in which gRPC looks


def examined(config: Config, site: str | None, data_dir: Path | None) -> Iterator[Finding]:
    """Every check, one after the other; `site`: as that site, or as that peer, else as the aggregator or a
    simulation. Where the site would not start, its task is not loaded here either."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("versions", _machine), ("GPU", _gpu), ("disk", lambda: _disk(config)), ("clock", _clock),
    ]  # fmt: skip
    if site is None:
        checks += [
            ("certificate", lambda: _certificate(config)),
            ("port", lambda: listening(config, "the aggregator")),
        ]
    elif is_peer(config, site):
        checks += [
            ("certificate", lambda: _own_certificate(config, site)), *checks_of(config, site),
            ("approval", lambda: _approval(config, site)),
        ]  # fmt: skip
    else:
        checks += [
            ("connection", lambda: _network(config, site)),
            ("certificate", lambda: _own_certificate(config, site)),
            ("policy", lambda: _policy(config, site)),
            ("approval", lambda: _approval(config, site)),
        ]
    for name, check in [*checks, ("training", lambda: _training(config, site, data_dir))]:
        try:
            yield from check()
        except (FedtrainError, OSError) as e:
            yield Finding(name, "bad", str(e))
            if site is not None and name in ("certificate", "policy", "approval"):
                return


def _machine() -> Iterator[Finding]:
    import torch

    yield Finding("versions", "good", f"Python {sys.version.split()[0]}, torch {torch.__version__}")
    mine, all_ = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    fix = (
        "This process may use a part of them: see taskset, or the container's cpuset." if mine < all_ else ""
    )
    yield Finding("cores", "look" if fix else "good", f"{mine} of {all_} cores", fix)


def _gpu() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return (yield Finding("GPU", "good", names))
    if shutil.which("nvidia-smi") is None:
        return (yield Finding("GPU", "good", "none here; training is on the CPU"))
    why = (
        "torch is a CPU build"
        if torch.version.cuda is None
        else f"torch's CUDA {torch.version.cuda} finds no driver"
    )
    fix = "Install torch's CUDA build, from the index that its Get Started page names; see `nvidia-smi`."
    yield Finding("GPU", "look", f"nvidia-smi is here, but {why}", fix)


def _disk(config: Config) -> Iterator[Finding]:
    runs, there = config.root / config.run.dir, _disk_of(config)
    try:
        refuse_network_disk(there)
    except FedtrainError as e:
        return (yield Finding("disk", "bad", str(e)))
    free = shutil.disk_usage(there).free
    fix = (
        f"Make room, or set run.dir to a folder with {LEAST_FREE >> 30} GiB or more."
        if free < LEAST_FREE
        else ""
    )
    yield Finding("disk", "look" if fix else "good", f"{free / 2**30:,.1f} GiB free under {runs}", fix)
    probe = there / f".fedtrain-doctor-{os.getpid()}"
    try:
        began = time.perf_counter()
        with probe.open("wb") as f:
            f.write(bytes(1 << 20))
            os.fsync(f.fileno())
        took = time.perf_counter() - began
    except OSError as e:
        return (
            yield Finding(
                "writing", "bad", f"{there}: {e.strerror}", "Give this user the folder, or set run.dir."
            )
        )
    finally:
        probe.unlink(missing_ok=True)
    slow = took > SLOW_DISK_S
    fix = "Each round waits for the disk: choose a faster one for run.dir." if slow else ""
    yield Finding("writing", "look" if slow else "good", f"1 MiB is on the disk in {took * 1e3:.0f} ms", fix)


def _disk_of(config: Config) -> Path:
    """The folder of runs, or where it will be made."""
    runs = config.root / config.run.dir
    return next(path for path in (runs, *runs.parents) if path.exists())


def _clock() -> Iterator[Finding]:
    if shutil.which("timedatectl") is None:
        return
    ask = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
    said = subprocess.run(ask, capture_output=True, text=True, timeout=WAIT_S, check=False).stdout.strip()
    if said == "yes":
        yield Finding("clock", "good", "kept by NTP")
    elif said == "no":
        fix = "timedatectl set-ntp true. Certificates are refused where a clock is wrong."
        yield Finding(
            "clock", "look", f"not kept by NTP: {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}", fix
        )


# --- the certificate, and what a site's people allow


def _certificate(config: Config) -> Iterator[Finding]:
    folder = config.root / config.network.certs / "aggregator"
    if not folder.exists():
        return (yield Finding("certificate", "good", "none here: enough for a simulation"))
    yield _lasts(Credentials.load(folder).identity)


def _own_certificate(config: Config, site: str) -> Iterator[Finding]:
    credentials = credentials_of(config, site)()
    AggregatorCheck(credentials, config.root / config.network.certs, silent)  # whether it was revoked
    yield _lasts(credentials.identity)


def _lasts(identity: Identity) -> Finding:
    left = (identity.not_after.timestamp() - time.time()) / 86400
    fix = f"Renew it: fedtrain certs issue {identity.name}, where the authority is." if left < 7 else ""
    return Finding("certificate", "look" if fix else "good", f"{identity}, good for {left:.0f} days", fix)


def _policy(config: Config, site: str) -> Iterator[Finding]:
    check_statistics(config)
    checked_policy(config, site, credentials_of(config, site)())
    yield Finding("policy", "good", f"{folder_of(config, site) / POLICY}")


def _approval(config: Config, site: str) -> Iterator[Finding]:
    found = Approvals(folder_of(config, site)).check(config)
    yield Finding("approval", "good", f"{found.task}, by {found.by}, {found.at}")


# --- the way to the aggregator


def _network(config: Config, site: str) -> Iterator[Finding]:
    address = config.network.address or config.network.listen
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    proxy = _proxy(host)
    if proxy is not None:
        yield Finding("proxy", "good", f"{proxy[0]} names {proxy[1]}:{proxy[2]}, which is asked to CONNECT")
    asked, at = (host, int(port)) if proxy is None else proxy[1:]
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(asked, at, type=socket.SOCK_STREAM)}
    except socket.gaierror as e:
        where = "network.address" if proxy is None else proxy[0]
        fix = f"Check {where}, and this machine's DNS (/etc/resolv.conf)."
        return (yield Finding("DNS", "bad", f"{asked} can't be resolved: {e.strerror}", fix))
    yield Finding("DNS", "good", f"{asked} is {', '.join(sorted(found))}")
    yield asyncio.run(_call(config, site, address))


async def _call(config: Config, site: str, address: str) -> Finding:
    """Make the call that a site makes, and leave without a word: an aggregator takes who only shakes hands
    for somebody that it refused."""
    current = Current(folder_of(config, site))
    transport = GrpcTransport(Tls(*current.parts()), config.network.heartbeat)
    target = aggregator_target(current().identity.federation)
    try:
        async with asyncio.timeout(WAIT_S), transport.connect(address, target) as call:
            async with call(SESSION) as stream:
                pass
            await stream.read()
    except (ConnectError, TimeoutError) as e:
        return Finding("connection", "bad", str(e) or explain("timeout", address))
    return Finding("connection", "good", f"{address} is {target}; it takes our certificate")


def _proxy(host: str) -> tuple[str, str, int] | None:
    """The variable, host and port of the proxy that gRPC would use for this host."""
    variable = next((name for name in PROXIES if os.environ.get(name)), None)
    if variable is None or proxy_bypass(host):
        return None
    parts = urlsplit(os.environ[variable])
    return variable, parts.hostname or "", parts.port or 80


# --- the data


def _training(config: Config, site: str | None, data_dir: Path | None) -> Iterator[Finding]:
    """One optimizer step. Data that can't be dealt to a simulation's sites may be a datacenter's, which deals
    it to none."""
    try:
        return (yield from _step(config, site, data_dir))
    except TaskError as e:
        undealt = e
    if site is not None or config.simulate.sites == 1:
        raise undealt
    pooled = replace(config, simulate=replace(config.simulate, sites=1, examples=0))
    try:
        found = [*_step(pooled, site, data_dir)]
    except FedtrainError:
        raise undealt from None
    fix = "`fedtrain datacenter` trains on it as it is, and so does a real site."
    yield from [*found, Finding("simulation", "look", str(undealt), fix)]


def _step(config: Config, site: str | None, data_dir: Path | None) -> Iterator[Finding]:
    """One optimizer step, from the data to an update, in a trainer as a run's; at a site it is shut in as the
    site's own."""
    confine, approved = "off", None
    if site is not None:
        confine = policy_from(folder_of(config, site)).confine
        approved = Approvals(folder_of(config, site)).check(config).files
    with (
        TemporaryDirectory(prefix=".fedtrain-doctor-", dir=_disk_of(config)) as folder,
        asyncio.Runner() as runner,
    ):
        small = replace(
            config, train=replace(config.train, local_steps=1), run=replace(config.run, dir=folder)
        )
        simulated = site is None
        own = Path(folder) if site is None else small.site_dir(site)
        for each in (scratch := own / "trainer", own / "memory"):
            private_folder(each)
        trainer = runner.run(
            Trainer.start(
                small,
                data_dir=data_dir,
                scratch=scratch,
                simulated=simulated,
                confine=confine,
                approved=approved,
            )
        )
        try:
            about = trainer.description
            if site is not None:
                yield from _shut_in(about.limits)
            yield Finding("task", "good", f"{config.run.task}, {about.schema.numel:,} parameters")
            name, began = site or next(iter(about.sites), ""), time.perf_counter()
            weights = runner.run(trainer.initial(scratch / "initial"))
            update = runner.run(trainer.train(name, 0, weights, scratch / "delta"))
        finally:
            runner.run(trainer.close())
    took, (loss, weight) = time.perf_counter() - began, update.metrics.get("loss", (0.0, 0.0))
    told = f", loss {loss / weight:.4g}" if isinstance(loss, float) and weight else ""
    yield Finding("data", "good", f"one step at {name} in {took:.2f} s{told}")


def _shut_in(limits: Sequence[Limit]) -> Iterator[Finding]:
    """What the task's code can't do, as its process found; without limits: as the policy says, anything."""
    if not limits:
        said = "policy.confine = off: the task's code runs as you, and can read this site's key"
        yield Finding("confinement", "look", said, "fedtrain policy set confine=auto")
    for what, holds, said in limits:
        fix = (
            ""
            if holds
            else "Where that is too little: fedtrain policy set confine=require, and it does not run."
        )
        state = "good" if holds else "bad" if what == "key" else "look"
        yield Finding(f"confinement: {what}", state, said, fix)  # type: ignore[arg-type]  # one of the three
