"""A filter of system calls for the trainer process: what no training needs, and an attacker does.

The kernel refuses, with EPERM, the calls that read another process's memory or descriptors, load code into
the kernel, mount, enter or make namespaces, keep keys in the kernel, set the clock, or go round filters
(io_uring), and sockets of other families than are named. Of Unix sockets only connected pairs are left, which
reach no other program: those of type stream and seqpacket, for the kernel lets no such pair connect again.
A filter can't be taken off again, and all that the process starts has it. The source is seccomp(2) of Linux;
numbers are those of its tables for each machine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Collection

LOCAL = (socket.AF_NETLINK,)  # how the C library lists network interfaces
INTERNET = (socket.AF_INET, socket.AF_INET6)

# name: its number on x86-64, on 64-bit ARM (None: it has none)
CLOSED: dict[str, tuple[int, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "perf_event_open": (298, 241), "bpf": (321, 280), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "setns": (308, 268),
    "unshare": (272, 97), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "iopl": (172, None), "ioperm": (173, None), "swapon": (167, 224),
    "swapoff": (168, 225), "reboot": (169, 142), "acct": (163, 89), "quotactl": (179, 60),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
}  # fmt: skip
# What changes owners, modes and attributes of files, which Landlock doesn't limit.
MODES: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
SOCKET, SOCKETPAIR, CLONE, CLONE3 = (41, 198), (53, 199), (56, 220), 435
NEW_NAMESPACES = 0x7E020000  # flags of clone, sched.h
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # (column above, AUDIT_ARCH of audit.h)
X32 = 0x40000000  # on x86-64, numbers from here on are the calls of another table

# linux/filter.h: load a word, jump if equal / not below / any bit, keep bits, return; linux/seccomp.h
_LOAD, _EQUAL, _NOT_BELOW, _ANY_BIT, _KEEP, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT, _SECOND = 0, 4, 16, 24  # where they lie in struct seccomp_data
_TYPE = 0xF  # the type of a socket, without flags
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2

_libc = ctypes.CDLL(None, use_errno=True)


def restrict(families: Collection[int] | None, *, datagrams: bool = False, fixed_modes: bool = False) -> None:
    """Put the filter on this thread and on all that it starts. `families`: of sockets that may be opened;
    None: all. `datagrams`: Unix sockets of this type may be opened. `fixed_modes`: a call that would change a
    file's mode, owner or attributes changes nothing and returns 0, for programs that copy files expect it.
    OSError where this kernel, or this machine, has no filters."""
    if platform.machine() not in MACHINES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {platform.machine()}")
    code = program(*MACHINES[platform.machine()], families, datagrams, fixed_modes)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _FILTER, head, 0, 0)):
        if _libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def program(
    column: int,
    arch: int,
    families: Collection[int] | None,
    datagrams: bool = False,
    fixed_modes: bool = False,
) -> bytes:
    """The filter, in the kernel's classic BPF; arguments as of `restrict`."""
    rules: list[tuple[int, int, str, str]] = [(_EQUAL, arch, "", "refuse")]  # test, value, if so, if not
    rules += [(_LOAD, _NUMBER, "", "")]
    rules += [(_NOT_BELOW, X32, "refuse", "")] if column == 0 else []
    rules += [(_EQUAL, n, "refuse", "") for each in CLOSED.values() if (n := each[column]) is not None]
    modes = MODES.values() if fixed_modes else ()
    rules += [(_EQUAL, n, "succeed", "") for each in modes if (n := each[column]) is not None]
    rules += [(_EQUAL, CLONE3, "absent", ""), (_EQUAL, CLONE[column], "clone", "")]
    if families is not None:
        rules += [(_EQUAL, SOCKET[column], "socket", ""), (_EQUAL, SOCKETPAIR[column], "pair", "")]
    rules += [(_NOT_BELOW, 0, "allow", "")]
    ends = {"clone": len(rules) + 1}
    rules += [(_LOAD, _FIRST_ARGUMENT, "", ""), (_ANY_BIT, NEW_NAMESPACES, "refuse", "allow")]
    ends["socket"] = len(rules) + 1
    rules += [(_LOAD, _FIRST_ARGUMENT, "", "")]
    rules += [(_EQUAL, family, "allow", "") for family in sorted(families or ())]
    rules += [(_EQUAL, socket.AF_UNIX, "datagram" if datagrams else "refuse", "refuse")]
    types = [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, *[socket.SOCK_DGRAM] * datagrams]
    for name, allowed in {"datagram": [socket.SOCK_DGRAM], "pair": types}.items():
        ends[name] = len(rules) + 1
        rules += [(_LOAD, _SECOND, "", ""), (_KEEP, _TYPE, "", "")]
        rules += [(_EQUAL, kind, "allow", "") for kind in allowed] + [(_NOT_BELOW, 0, "refuse", "")]
    # clone3 hides its flags in memory: as if this kernel had none, the C library uses clone
    verdicts = {
        "refuse": _ERRNO | errno.EPERM,
        "absent": _ERRNO | errno.ENOSYS,
        "succeed": _ERRNO,
        "allow": _ALLOW,
    }
    ends |= {name: len(rules) + 1 + i for i, name in enumerate(verdicts)}
    words = [struct.pack("HBBI", _LOAD, 0, 0, _ARCH)]
    for at, (test, value, yes, no) in enumerate(rules, 1):
        jumps = [ends[name] - at - 1 if name else 0 for name in (yes, no)]
        words.append(struct.pack("HBBI", test, *jumps, value))
    return b"".join([*words, *(struct.pack("HBBI", _RETURN, 0, 0, verdict) for verdict in verdicts.values())])
