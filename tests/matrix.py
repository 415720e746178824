"""The fast tests on other releases of torch and Python: `python -m tests.matrix [--folder DIR] [TORCH ...]`.

Each row has an environment of its own, made by pip on first use. The tests then run with low priority, and
a line of docs/versions.md is printed for each row.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = {"2.10.0": "3.11", "2.11.0": "3.12", "2.13.0": "3.11", "2.15.0": "3.13"}  # torch -> Python
TESTS = ["-m", "pytest", "-n", "2", "-m", "not slow", "-p", "no:cacheprovider"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("torch", nargs="*", default=[*ROWS], help="releases of torch; without any, all")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix", help="of the environments")
    given = parser.parse_args()
    red = 0
    for torch in given.torch:
        interpreter = python_of(ROWS[torch])
        if interpreter is None:
            print(f"| {torch} | {ROWS[torch]} | Python {ROWS[torch]} is not installed here |", flush=True)
            continue
        red += not tested(torch, interpreter, given.folder.resolve() / f"v{torch}")
    return red


def python_of(release: str) -> str | None:
    """The interpreter of a release of Python: on PATH, else the newest of pyenv."""
    if found := shutil.which(f"python{release}"):
        return found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return next((str(each) for each in sorted(pyenv.glob(f"{release}.*/bin/python"))[::-1]), None)


def tested(torch: str, interpreter: str, folder: Path) -> bool:
    """Whether all tests pass. Prints a row, and leaves pytest's output in the folder."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch=={torch}"], check=True)
    # pip keeps the torch that is there, or this row is not what it says.
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--editable", ".[dev]"], cwd=ROOT, check=True)
    found = printed(python, "import torch, platform; print(torch.__version__, platform.python_version())")
    assert found.split("+")[0].split()[0] == torch, f"pip replaced torch {torch} by {found}"
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    with (folder / "tests.log").open("w") as log:
        command = ["nice", "-n", "10", python, *TESTS]
        subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
    last = (folder / "tests.log").read_text()[-400:]
    passed, skipped, failed, errors = (count(last, how) for how in ("passed", "skipped", "failed", "error"))
    cells = *found.split(), passed, skipped, failed + errors, datetime.now(UTC).date()
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return passed > 0 and not failed + errors


def printed(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def count(text: str, how: str) -> int:
    return sum(map(int, re.findall(rf"(\d+) {how}", text)))


if __name__ == "__main__":
    sys.exit(main())
