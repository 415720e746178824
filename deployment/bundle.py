"""Puts all that fedtrain needs into a folder, for machines without a network: `make bundle`.

    python deployment/bundle.py [FOLDER]     build/bundle without it

Wheels of torch.lock and requirements.lock, each with the digest that stands there, and fedtrain's own, built
here. On the other machine, with the same Python and platform: sh install.sh VENV. pip asks nobody there, and
takes no file whose SHA-256 is another.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LOCKS = [HERE / "torch.lock", HERE / "requirements.lock"]
INSTALL = """#!/bin/sh
# sh install.sh VENV: fedtrain into a new environment, from the files beside this one alone
set -eu
here=$(cd "$(dirname "$0")" && pwd)
(cd "$here" && sha256sum --check --quiet SHA256SUMS)
"${PYTHON:-python3}" -m venv "$1"
"$1/bin/python" -m pip --isolated install --no-index --find-links "$here/wheels" --no-deps --require-hashes \\
  -r "$here/requirements.txt"
"$1/bin/fedtrain" --version
"""


def main(folder: Path) -> None:
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels.resolve())]
    subprocess.run(build, cwd=HERE.parent, check=True)
    (own,) = wheels.glob("fedtrain-*.whl")
    fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--dest", str(wheels)]
    subprocess.run([*fetch, *(word for lock in LOCKS for word in ("-r", str(lock)))], check=True)
    version = own.name.split("-")[1]
    (folder / "requirements.txt").write_text(
        "".join(lock.read_text() for lock in LOCKS)
        + f"fedtrain=={version} \\\n    --hash=sha256:{digest(own)}\n"
    )
    (folder / "install.sh").write_text(INSTALL)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    (folder / "SHA256SUMS").write_text(
        "".join(f"{digest(path)}  {path.relative_to(folder).as_posix()}\n" for path in files)
    )
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"{folder}: {len(list(wheels.iterdir()))} wheels, {size:.0f} MB. There: sh install.sh VENV")


def digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/bundle"))
