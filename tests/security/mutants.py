"""Removes one security check after the other, and says which of them no test misses.

    python -m tests.security.mutants            all checks of checks.toml; exit code 1 when one survives
    python -m tests.security.mutants quorum     those whose name has this word

Each check is taken out of a copy of the package, where only the tests named for it run: one of them must
fail. The copy is in a temporary folder; a process that has loaded what is heavy forks for each check.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.security.checks import CHECKS, Check

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "grpc.aio", "zmq", "cryptography.x509", "msgspec", "click")
FAILED = 1  # pytest's exit code when tests ran, and some failed
LONGEST_S = 240  # a check without which a test hangs is missed by it as well


def main(words: Sequence[str]) -> int:
    chosen = [check for check in CHECKS if all(word in check.name for word in words)]
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copied(copy)
        tests = sorted({check.test for check in chosen})
        if code := run(copy, tests):
            print((copy / "log").read_text()[-3000:])
            print(f"with every check in its place these tests fail already (pytest says {code})")
            return 2
        survivors = [check for check in chosen if not missed(copy, check)]
    for check in survivors:
        print(f"SURVIVES: {check.name} ({check.file}: {check.text}), by {check.test}")
    print(
        f"{len(chosen) - len(survivors)} of {len(chosen)} checks are missed by a test when they are removed"
    )
    return bool(survivors)


def copied(copy: Path) -> None:
    """Put all that tests need into a folder."""
    for name in ("fedtrain", "tests", "docs", "examples", "deployment", "pyproject.toml", "README.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
        else:
            shutil.copy(source, copy / name)


def missed(copy: Path, check: Check) -> bool:
    """Whether its test fails without this check."""
    path = copy / "fedtrain" / check.file
    whole, begun = path.read_text(), time.monotonic()
    path.write_text(check.removed_from(whole))
    try:
        code = run(copy, [check.test])
    finally:
        path.write_text(whole)
    how = {0: "SURVIVES", FAILED: "missed", -1: "missed (hangs)"}.get(code, f"pytest says {code}")
    print(f"{time.monotonic() - begun:5.1f} s  {how:15} {check.name}", flush=True)
    return code in (FAILED, -1)


def run(copy: Path, tests: Sequence[str]) -> int:
    """pytest's exit code; -1 when it did not end."""
    return forked(copy, lambda: int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests])))


def forked(copy: Path, work: Callable[[], int], longest_s: float = LONGEST_S) -> int:
    """The exit code that `work` gives in a process that loads the package of the copy; -1 when it did not
    end in so long."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)  # what it starts ends with it, and writes into no other's log
            _load_from(copy)
            os._exit(work())
        finally:  # nothing of this process goes on in the parent's place
            traceback.print_exc()
            os._exit(70)
    until = time.monotonic() + longest_s
    try:
        while time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, 9)
    os.waitpid(child, 0)
    return -1


def _load_from(copy: Path) -> None:
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *(each for each in sys.path if Path(each or ".").resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "fedtrain")]:
        del sys.modules[name]
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
