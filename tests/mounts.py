"""A machine's file system for a command of a test: mounts of a unit or container, in a mount namespace."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import fedtrain

USER = 10001
SYSTEM = ("bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr", "dev", "proc", "sys")
PROGRAMS = {Path(sys.prefix), Path(sys.base_prefix), Path(fedtrain.__file__).parents[1]}


@dataclass(frozen=True)
class Mount:
    """A folder or file of the test at `target`, or an empty folder where there is no `source`."""

    target: str
    source: Path | None = None
    writable: bool = False


def start(
    folder: Path, mounts: Sequence[Mount], command: Sequence[str], env: Mapping[str, str], cwd: str, log: Path
) -> subprocess.Popen[bytes]:
    """Run a command as the user USER, without a capability, where all but the writable mounts is read-only;
    the test is skipped where this user may make no mounts. `folder` is empty, of this command alone."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("mounts of another machine need root and setpriv of util-linux")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces can't be made here")
    root = folder / "root"
    lines = ["set -e", f"mkdir -p {root}", f"mount -t tmpfs -o mode=755 tmpfs {root}", f"cp -a /etc {root}"]
    lines.append(f"echo fedtrain:x:{USER}:{USER}::/srv/fedtrain:/bin/sh >> {root}/etc/passwd")
    for name in SYSTEM:
        if Path("/", name).is_symlink():
            lines.append(f"cp -a /{name} {root}")
        elif Path("/", name).exists():
            lines.append(f"mkdir {root}/{name}; mount --rbind /{name} {root}/{name}")
    every = [*(Mount(str(path), path) for path in PROGRAMS), Mount("/tmp", None, True), *mounts]
    every.sort(key=lambda each: each.target.count("/"))
    for mount in every:
        at, source = f"{root}{mount.target}", mount.source
        if source is None:
            lines.append(f"mkdir -p {at}; mount -t tmpfs -o mode=1777 tmpfs {at}")
        else:
            make = f"mkdir -p {at}" if source.is_dir() else f"mkdir -p $(dirname {at}); touch {at}"
            lines.append(f"{make}; mount --bind {source} {at}")
    for mount in reversed(every):
        lines += [f"mount -o remount,bind,ro {root}{mount.target}"] if not mount.writable else []
    drop = f"setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs --bounding-set=-all"
    given = [f"{name}={value}" for name, value in {"PATH": "/usr/bin:/bin", **env}.items()]
    inside = f"cd {cwd} && exec {drop} --inh-caps=-all env -i {shlex.join([*given, *command])}"
    lines.append(f"mount -o remount,bind,ro {root}")
    lines.append(f"exec chroot {root} sh -c {shlex.quote(inside)}")
    with log.open("wb") as out:
        return subprocess.Popen(["unshare", "-m", "sh", "-c", "\n".join(lines)], stdout=out, stderr=out)
