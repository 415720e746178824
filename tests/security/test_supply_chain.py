"""What is installed is what was tested: by digest, with a bill of materials; a wheel has the same bytes."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOYMENT = ROOT / "deployment"
LOCKED = re.compile(r"^([a-z0-9.-]+)==(\S+) \\\n    --hash=sha256:([0-9a-f]{64})$", re.M)


def locked(name):
    text = (DEPLOYMENT / name).read_text()
    return {found[1]: (found[2], found[3]) for found in LOCKED.finditer(text)}


def closure(name, found):
    """Every distribution that `name` needs, itself left out."""
    for need in metadata.requires(name) or []:
        wanted = re.match(r"[A-Za-z0-9._-]+", need)[0].lower().replace("_", "-")
        marker = need.partition(";")[2]
        if "extra ==" in marker or wanted in found or not _applies(marker):
            continue
        found.add(wanted)
        closure(wanted, found)
    return found


def _applies(marker):
    from packaging.markers import Marker

    return not marker.strip() or Marker(marker).evaluate()


def test_the_lock_has_all_that_fedtrain_needs_by_digest_and_names_no_host():
    rows = locked("requirements.lock")
    if metadata.version("torch") != locked("torch.lock")["torch"][0]:
        pytest.skip("this environment has another torch than the lock, see tests/matrix.py")
    assert rows.keys() | locked("torch.lock").keys() == closure("fedtrain", set())
    for name in ("requirements.lock", "torch.lock", "sbom.cdx.json"):
        assert not re.search(r"https?:|file:|index-url|find-links", (DEPLOYMENT / name).read_text())


def test_the_bill_of_materials_is_of_what_is_locked():
    bom = json.loads((DEPLOYMENT / "sbom.cdx.json").read_text())
    rows = locked("requirements.lock") | locked("torch.lock")
    assert {c["name"]: (c["version"], c["hashes"][0]["content"]) for c in bom["components"]} == rows
    refs = {c["bom-ref"] for c in bom["components"]} | {bom["metadata"]["component"]["bom-ref"]}
    assert {each["ref"] for each in bom["dependencies"]} == refs
    assert all(refs.issuperset(each["dependsOn"]) for each in bom["dependencies"])
    own = next(each for each in bom["dependencies"] if "/fedtrain@" in each["ref"])
    assert len(own["dependsOn"]) == 9  # those of pyproject.toml


def test_two_builds_of_the_wheel_have_the_same_bytes(tmp_path):
    """At another place, at another time, under another umask."""
    digests = set()
    for number, (umask, moment) in enumerate([(0o022, 1_700_000_000), (0o077, 1_800_000_000)]):
        source = tmp_path / f"source-{number}"
        source.mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        shutil.copytree(ROOT / "fedtrain", source / "fedtrain", ignore=shutil.ignore_patterns("__pycache__"))
        for path in source.rglob("*"):
            os.utime(path, (moment, moment))
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(source / "out")],
            cwd=source, check=True, umask=umask, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        (wheel,) = (source / "out").glob("*.whl")
        digests.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert len(digests) == 1


def make(*arguments, check=False):
    """`make` as a person calls it, though `make` may have started the tests."""
    command = ["make", "--no-print-directory", "--old-file", ".venv/installed", *arguments]
    own = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=check)


@pytest.mark.parametrize("base", ["", "python:3.11-slim", "python@sha256:12ab", f"python@sha256:{'0' * 63}g"])
def test_a_release_names_its_base_image_by_a_digest_and_refuses_a_tag(base):
    said = make("release", "SIGN=none", f"BASE={base}")
    assert said.returncode == 2
    assert "BASE must name the base image by the digest" in said.stderr
    assert said.stdout == ""  # nothing was begun


def test_the_base_image_of_a_release_is_among_what_is_signed():
    base = f"python:3.11-slim@sha256:{'0' * 64}"
    steps = make("--dry-run", "release", "SIGN=none", f"BASE={base}", check=True).stdout
    assert f"PYTHON={base}" in steps
    assert (
        steps.index("dist/IMAGE") < steps.index("sha256sum * >SHA256SUMS") < steps.index("ssh-keygen -Y sign")
    )


@pytest.mark.parametrize("found", [0, 1])
def test_all_that_is_locked_is_looked_up_and_what_cannot_be_is_no_pass(tmp_path, found):
    """A build (torch's +cpu) is looked up by its version. Without --strict pip-audit says that there are no
    known faults also where its database, a mirror's say, knows none of the packages."""
    for name, does in (("python", ""), ("pip-audit", f'echo "$@"; cat; exit {found}')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    done = make(f"BIN={tmp_path}", "advisories")
    options, _, looked_up = done.stdout.partition("\n--strict")[2].partition("\n")
    locks = [(ROOT / "deployment" / f"{name}.lock").read_text() for name in ("torch", "requirements")]
    versions = [line.split("+")[0].split()[0] for line in "".join(locks).splitlines() if "==" in line]
    assert "--requirement /dev/stdin" in options
    assert [line.split()[0] for line in looked_up.splitlines() if "==" in line] == versions
    assert "torch" in versions[0]
    assert (done.returncode == 0) == (found == 0)
