"""The trainer process, shut in before it loads the task's code: `python -m ... confinement FD HOW FOLDER N`.

The code then has no network but a loopback of its own, and sees an empty folder where the keys lie: by Linux
namespaces, where the kernel gives them. Where it doesn't (many containers), Landlock hides the keys, and a
seccomp filter refuses sockets. With either, the filter refuses the system calls that reach other processes
and the kernel (seccomp.py). The parent is told what holds. Nothing loaded here starts a thread, for only the
thread that calls is shut in, and those that it starts.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from . import seccomp

_NEWNS, _NEWUSER, _NEWNET = 0x00020000, 0x10000000, 0x40000000  # sched.h
_MS_PRIVATE, _MS_REC, _MS_RDONLY = 1 << 18, 1 << 14, 1  # mount.h
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38  # prctl.h
_SYS_ADMIN, _LAST_CAPABILITY = 21, 40
# What root keeps, who may have to read data that other users own: chown, dac_override, fowner, fsetid, kill.
_KEPT = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1  # sockios.h
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, on all machines
_READ_FILE, _REFER, _TCP = 1 << 2, 1 << 13, 1 << 0 | 1 << 1  # landlock.h; TCP: bind and connect

_libc = ctypes.CDLL(None, use_errno=True)


def shut_in(folder: Path, *, network: bool, loopback: bool) -> tuple[str, bool]:
    """What this process, and all that it starts, can no longer do, in words; and whether that is all that was
    asked for. `folder`: has the keys. `network`: is left open; `loopback` at least, as ranks need it."""
    if _works_in_a_child(folder, network):
        _namespaces(folder, network)
        filtered = _filter(None if network else (*seccomp.LOCAL, *seccomp.INTERNET))
        without = "" if network else "has no network and "
        calls = "; seccomp closes calls to other processes and the kernel" if filtered else _NO_FILTER
        return f"the task's code {without}does not see {folder.name}/{calls}", True
    hidden = tcp = False
    with suppress(OSError):
        tcp = _landlock(folder, close_tcp=not (network or loopback))
        hidden = True
    filtered = _filter(None if network or loopback else seccomp.LOCAL)
    no_sockets = filtered and not (network or loopback)
    closed = (
        "it opens no socket that leaves the machine (seccomp)" if no_sockets
        else "TCP is closed to it, other sockets are open" if tcp else "the network is open to it"
    )  # fmt: skip
    without = f"{'' if filtered else _NO_FILTER}; for {_NO_NAMESPACES}"
    if hidden:
        said = f"the task's code cannot read {folder.name}/ (Landlock); {closed}{without}"
        return said, network or no_sockets
    return (
        f"the task's code is not shut in, for {_NO_NAMESPACES} and has no Landlock: it runs as the user who "
        f"owns {folder.name}/; {closed}{'' if filtered else _NO_FILTER}",
        False,
    )


_NO_FILTER = "; this system has no filter of system calls (seccomp)"
_NO_NAMESPACES = "this system gives it no namespaces of its own"


def _filter(families: Collection[int] | None) -> bool:
    """Whether system calls are filtered from here on."""
    try:
        seccomp.restrict(families)
    except OSError:
        return False
    return True


def _works_in_a_child(folder: Path, network: bool) -> bool:
    """Whether namespaces can be had, whole: half of them would be worse than none."""
    if (pid := os.fork()) == 0:
        try:
            _namespaces(folder, network)
            os._exit(0)
        except BaseException:  # whatever it is, this child may not go on
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def _namespaces(folder: Path, network: bool) -> None:
    """A network with loopback alone, and an empty read-only folder over the keys, which nobody in here can
    take away again: the right to do so is given up."""
    privileged = _capabilities() >> _SYS_ADMIN & 1
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEWNS | (0 if network else _NEWNET) | (0 if privileged else _NEWUSER))
    if not privileged:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    if not network:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    _call("mount", None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    if folder.is_dir():
        _call("mount", b"none", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(_MS_RDONLY), b"size=4k")
    _give_up_capabilities(_KEPT if privileged else 0)


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


def _landlock(folder: Path, *, close_tcp: bool) -> bool:
    """Allow files to be read everywhere but beneath a folder; whether TCP is closed. Files that are made
    later beside the folder, or beside one that it lies in, can't be read: Landlock knows no exceptions."""
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        raise OSError(ctypes.get_errno(), "no Landlock")
    files = _READ_FILE | (_REFER if version >= 2 else 0)
    tcp = _TCP if close_tcp and version >= 4 else 0
    rules = struct.pack("QQ", files, tcp)[: 16 if version >= 4 else 8]
    ruleset = _call("syscall", _CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint32(0))
    try:
        for at in [*folder.parents]:
            for entry in os.scandir(at):
                if entry.is_symlink() or Path(entry.path) in (folder, *folder.parents):
                    continue
                allowed = files if entry.is_dir() else _READ_FILE
                with suppress(OSError):  # it is gone, or not to be opened
                    opened = os.open(entry.path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
                    try:
                        beneath = struct.pack("=Qi", allowed, opened)
                        _call("syscall", _ADD_RULE, ruleset, 1, beneath, ctypes.c_uint32(0))
                    finally:
                        os.close(opened)
        _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("syscall", _RESTRICT_SELF, ruleset, ctypes.c_uint32(0))
    finally:
        os.close(ruleset)
    return bool(tcp)


def _call(name: str, *arguments: object) -> int:
    """The C library's function; OSError where it fails."""
    if (found := getattr(_libc, name)(*arguments)) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return int(found)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def main() -> None:
    descriptor, how, folder, ranks = sys.argv[1:]
    said, whole = shut_in(Path(folder), network=how == "keys", loopback=int(ranks) > 1)
    from .trainer_process import serve  # its threads, and torch's, are shut in

    refusal = f"policy.confine = require: {said}." if how == "require" and not whole else ""
    serve(socket.socket(fileno=int(descriptor)), said, whole, refusal)


if __name__ == "__main__":
    main()
