"""The trainer process, shut in before it loads the task's code: `python -m ... confinement FD BOUNDS`.

The code then has no network but a loopback of its own, sees empty folders where the keys lie, and writes in
its scratch folder alone: by Linux namespaces and Landlock, as far as the kernel gives them. A seccomp filter
refuses sockets of other programs, and the system calls that reach other processes and the kernel
(seccomp.py). Before the task is loaded this process tries to do what it must not, and the parent hears what
it found. Nothing loaded here starts a thread, for only the thread that calls is shut in, and those that it
starts.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from . import seccomp
from .boundary import SHARED_MEMORY, Boundary, Limit

_NEWNS, _NEWUSER, _NEWNET = 0x00020000, 0x10000000, 0x40000000  # sched.h
_MS_PRIVATE, _MS_REC, _MS_BIND, _MS_RDONLY = 1 << 18, 1 << 14, 1 << 12, 1  # mount.h
_MS_NOSUID_NODEV, _MOUNT_SETATTR, _RECURSIVE = 2 | 4, 442, 0x8000
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38  # prctl.h
_SYS_ADMIN, _LAST_CAPABILITY = 21, 40
# What root keeps, who may have to read data that other users own: chown, dac_override, fowner, fsetid, kill.
_KEPT = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1  # sockios.h
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, on all machines
_READ, _WRITE, _REFER, _TRUNCATE = 1 << 2, 1 << 1, 1 << 13, 1 << 14  # landlock.h
_MAKE_OR_REMOVE, _MAKE_DEVICES = 0b1011110110000, 1 << 6 | 1 << 11
_SCOPES = 1 << 0 | 1 << 1  # abstract Unix sockets, signals
# Character devices that may be written: what training needs. Block devices are not even read.
DEVICES = tuple(
    f"/dev/{name}"
    for name in (
        "null",
        "zero",
        "full",
        "random",
        "urandom",
        "nvidia",
        "nvhost",
        "nvmap",
        "kfd",
        "dri",
        "dxg",
        "accel",
        "infiniband",
        "davinci",
    )
)

_libc = ctypes.CDLL(None, use_errno=True)


def shut_in(wanted: Boundary) -> list[Limit]:
    """What this process, and all that it starts, can no longer do, after it was tried."""
    linked = [name for name in wanted.keys if os.path.isfile(name) and os.lstat(name).st_nlink > 1]
    by, several = [], wanted.several
    if spaces := _works_in_a_child(wanted):
        _namespaces(wanted)
        by.append("namespaces")
    with suppress(OSError):
        _landlock([] if spaces else wanted.hidden, wanted.scratch)
        by.append("Landlock")
    internet = seccomp.INTERNET if spaces or several or wanted.how == "keys" else ()
    with suppress(OSError):
        seccomp.restrict((*seccomp.LOCAL, *internet), datagrams=several, fixed_modes=not spaces)
        by.append("seccomp")
    return _tried(wanted, linked, by)


def _tried(wanted: Boundary, linked: Sequence[str], by: Sequence[str]) -> list[Limit]:
    """What this process finds when it tries to do what it must not. `linked`: keys that have a second name,
    which isn't known; `by`: what shuts it in."""
    key = f"cannot read keys and certificates ({len(wanted.keys)} files tried)"
    if found := [name for name in wanted.keys if os.path.isfile(name) and _works(open, name, "rb")]:
        key = f"CAN READ {found[0]} (tried)"
    elif linked:
        key = f"may read {linked[0]}, which has a second name (a hard link)"
    shared = "" if "namespaces" in by and wanted.own_memory else f" and {SHARED_MEMORY}"
    files = f"it writes in {wanted.scratch[0]}{shared} alone"
    if open_to := [place for place in wanted.places if _works(TemporaryFile, dir=place)]:
        files = f"it can write what your account can, as in {open_to[0]} (tried)"
    alone, asked = [name for _, name in socket.if_nameindex()] == ["lo"], wanted.how == "keys"
    network = "it has no network" + " but a loopback of its own" * alone
    if outside := not alone and _works(socket.socket, socket.AF_INET):
        network = "the network is open to it"
    sockets = "it calls no other program" + ", but by datagrams, which NCCL needs" * wanted.several
    if local := _works(socket.socket, socket.AF_UNIX):
        sockets = "it can call other programs of this account by their Unix sockets"
    calls = _libc.unshare(0) == 0
    means = f"by {', '.join(by)}" if by else "this system has no namespaces, Landlock or seccomp for it"
    return [
        Limit("key", not (found or linked), f"the task's code {key}"),
        Limit("files", not open_to, files),
        Limit("network", asked or not outside, network),
        Limit("sockets", not local, sockets),
        Limit("calls", not calls, f"system calls to others are {'open' if calls else 'closed'}; {means}"),
    ]


def _works(opens: Callable[..., Any], *what: object, **how: object) -> bool:
    with suppress(OSError), closing(opens(*what, **how)):
        return True
    return False


def _works_in_a_child(wanted: Boundary) -> bool:
    """Whether namespaces can be had, whole: half of them would be worse than none."""
    if (pid := os.fork()) == 0:
        try:
            _namespaces(wanted)
            os._exit(0)
        except BaseException:  # whatever it is, this child may not go on
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def _namespaces(wanted: Boundary) -> None:
    """A network with loopback alone, every disk read-only but for the scratch folders, and an empty folder
    over the keys, which no process in here can take away again: the right to do so is given up."""
    network = wanted.how == "keys"
    privileged = _capabilities() >> _SYS_ADMIN & 1
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEWNS | (0 if network else _NEWNET) | (0 if privileged else _NEWUSER))
    if not privileged:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if not network:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    _mount("none", "/", _MS_REC | _MS_PRIVATE)
    with suppress(OSError):  # before Linux 5.12: Landlock, if there is one, limits writing
        _set_read_only("/", _RECURSIVE)
    for path in wanted.scratch + [SHARED_MEMORY] * (not wanted.own_memory):
        _mount(path, path, _MS_BIND)
        with suppress(OSError):
            _set_read_only(path, 0, clear=True)
    if wanted.own_memory and os.path.isdir(SHARED_MEMORY):
        _mount("none", SHARED_MEMORY, _MS_NOSUID_NODEV, "tmpfs", b"mode=1777")
    for path in filter(os.path.exists, wanted.hidden):
        if os.path.isdir(path):
            _mount("none", path, _MS_RDONLY, "tmpfs", b"size=4k")
        else:
            _mount("/dev/null", path, _MS_BIND)
    here = os.getcwd()
    os.chdir(wanted.scratch[0])
    with suppress(OSError):  # it lies in a hidden folder
        os.chdir(here)
    _give_up_capabilities(_KEPT if privileged else 0)


def _mount(source: str, at: str, flags: int, kind: str | None = None, options: bytes | None = None) -> None:
    encoded = None if kind is None else kind.encode()
    _call("mount", os.fsencode(source), os.fsencode(at), encoded, ctypes.c_ulong(flags), options)


def _set_read_only(path: str, flags: int, *, clear: bool = False) -> None:
    attributes = struct.pack("QQQQ", not clear, clear, 0, 0)  # mount_setattr(2)
    here, size = ctypes.c_int(-100), ctypes.c_size_t(len(attributes))  # AT_FDCWD
    _call("syscall", _MOUNT_SETATTR, here, os.fsencode(path), ctypes.c_uint(flags), attributes, size)


def _give_up_capabilities(kept: int) -> None:
    for number in range(_LAST_CAPABILITY + 1):
        if not kept >> number & 1:
            with suppress(OSError):  # this kernel has fewer
                _call("prctl", _PR_CAPBSET_DROP, number, 0, 0, 0)
    kept &= _capabilities()
    low = struct.pack("III", kept & 0xFFFFFFFF, kept & 0xFFFFFFFF, 0)  # effective, permitted, inheritable
    _call("capset", struct.pack("Ii", 0x20080522, 0), low + bytes(12))
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _capabilities() -> int:
    """Those in effect, as bits."""
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("CapEff:")).split()[1], 16)


def _landlock(hidden: Collection[str], scratch: Collection[str]) -> None:
    """Allow files to be read but for hidden ones, and written in scratch folders. Files that are made later
    beside a hidden one, or beside a folder that it lies in, can't be read: Landlock knows no exceptions."""
    version = _call("syscall", _CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    to_files = _WRITE | (_TRUNCATE if version >= 3 else 0)
    to_folders = to_files | _MAKE_OR_REMOVE | (_REFER if version >= 2 else 0)
    rules = struct.pack("QQQ", _READ | to_folders | _MAKE_DEVICES, 0, _SCOPES if version >= 6 else 0)
    rules = rules[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _call("syscall", _CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint32(0))
    for path in _shown(hidden):
        _allow(ruleset, path, _READ | (to_files if path.startswith(DEVICES) else 0))
    for path in [*scratch, SHARED_MEMORY]:
        _allow(ruleset, path, _READ | to_folders)
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("syscall", _RESTRICT_SELF, ruleset, ctypes.c_uint32(0))
    os.close(ruleset)


def _shown(hidden: Collection[str]) -> Iterator[str]:
    """What lies beside hidden paths, and beside the folders that they lie in; but no disk itself."""
    above = {"/", "/dev", *(str(folder) for path in hidden for folder in Path(path).parents)}
    for folder in above:
        with suppress(OSError):  # it is gone, or can't be listed
            for at in (entry.path for entry in os.scandir(folder) if not entry.is_symlink()):
                if not (at in hidden or at in above or Path(at).is_block_device()):
                    yield at


def _allow(ruleset: int, path: str, rights: int) -> None:
    with suppress(OSError):  # it is gone, or not to be opened
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            beneath = struct.pack("=Qi", rights, opened)
            _call("syscall", _ADD_RULE, ruleset, 1, beneath, ctypes.c_uint32(0))
        finally:
            os.close(opened)


def _call(name: str, *arguments: object) -> int:
    """The C library's function; OSError where it fails."""
    if (found := getattr(_libc, name)(*arguments)) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return int(found)


def main() -> None:
    descriptor, wanted = sys.argv[1:]
    boundary = Boundary(*json.loads(wanted))
    limits = shut_in(boundary)
    from .trainer_process import serve  # its threads, and torch's, are shut in

    missing = "; ".join(limit.said for limit in limits if not limit.holds)
    refusal = f"policy.confine = require: {missing}." if missing and boundary.how == "require" else ""
    serve(socket.socket(fileno=int(descriptor)), limits, refusal)


if __name__ == "__main__":
    main()
