"""Writes requirements.lock, torch.lock and sbom.cdx.json: what fedtrain is tested with, by SHA-256.

    python deployment/lock.py               asks pip what it would install now, here
    python deployment/lock.py REPORT.json   of what `pip install --dry-run --report REPORT.json` wrote

The lock is for one platform, which its head names: another one's wheels have other digests. torch has a lock
of its own, since its builds for CPUs and for CUDA come from different places. No host stands in any of the
files: pip asks the one that is set up where it runs, and the digests say whether to believe it.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LOCK, TORCH, SBOM = HERE / "requirements.lock", HERE / "torch.lock", HERE / "sbom.cdx.json"


def report() -> dict[str, Any]:
    """What pip would install of the project and torch's build that is installed here."""
    torch = f"torch=={version('torch')}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    done = subprocess.run(
        [*command, "--report", "-", torch, str(HERE.parent)], stdout=subprocess.PIPE, check=True
    )
    return dict(json.loads(done.stdout))


def packages(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Name, version, digest, licence and requirements of each, by name; without fedtrain itself."""
    rows = []
    for each in found["install"]:
        about = each["metadata"]
        name = about["name"].lower().replace("_", "-")
        if name != "fedtrain":
            digest = each["download_info"]["archive_info"]["hashes"]["sha256"]
            licence = about.get("license_expression") or about.get("license", "").split("\n")[0]
            needs = [need for need in about.get("requires_dist", []) if "extra ==" not in need]
            rows.append({
                "name": name, "version": about["version"], "sha256": digest, "licence": licence[:60],
                "needs": sorted({need_name(need) for need in needs}),
            })  # fmt: skip
    return sorted(rows, key=lambda row: row["name"])


def need_name(need: str) -> str:
    """The name in a requirement such as "rich>=13.7 ; python_version > '3'"."""
    return "".join(c if c.isalnum() or c in "-_." else " " for c in need).split()[0].lower().replace("_", "-")


def line(row: dict[str, Any]) -> str:
    return f"{row['name']}=={row['version']} \\\n    --hash=sha256:{row['sha256']}\n"


def bom(rows: list[dict[str, Any]], fedtrain: str, direct: list[str]) -> dict[str, Any]:
    """CycloneDX 1.5. It has no time and no serial number: the same set gives the same bytes."""
    refs = {row["name"]: f"pkg:pypi/{row['name']}@{row['version']}" for row in rows}
    own = f"pkg:pypi/fedtrain@{fedtrain}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {
            "type": "library", "bom-ref": own, "name": "fedtrain", "version": fedtrain, "purl": own,
            "licenses": [{"license": {"id": "Apache-2.0"}}],
        }},
        "components": [
            {
                "type": "library", "bom-ref": refs[row["name"]], "name": row["name"],
                "version": row["version"], "purl": refs[row["name"]],
                "hashes": [{"alg": "SHA-256", "content": row["sha256"]}],
                **({"licenses": [{"license": {"name": row["licence"]}}]} if row["licence"] else {}),
            }
            for row in rows
        ],
        "dependencies": [
            {"ref": own, "dependsOn": [refs[name] for name in direct if name in refs]},
            *(
                {"ref": refs[row["name"]], "dependsOn": [refs[n] for n in row["needs"] if n in refs]}
                for row in rows
            ),
        ],
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    found = json.loads(Path(arguments[0]).read_text()) if arguments else report()
    rows = packages(found)
    own = next(e["metadata"] for e in found["install"] if e["metadata"]["name"] == "fedtrain")
    direct = sorted(need_name(need) for need in own["requires_dist"] if "extra ==" not in need)
    where = (
        f"{platform.system()} {platform.machine()}, CPython {platform.python_version().rpartition('.')[0]}"
    )
    head = f"# What fedtrain is tested with on {where}; written by deployment/lock.py.\n"
    TORCH.write_text(head + "".join(line(row) for row in rows if row["name"] == "torch"))
    LOCK.write_text(
        head
        + "# First torch: pip install --no-deps --require-hashes -r torch.lock, or the build of your GPU.\n"
        "# Then: pip install --no-deps --require-hashes -r requirements.lock\n"
        + "".join(line(row) for row in rows if row["name"] != "torch")
    )
    SBOM.write_text(json.dumps(bom(rows, own["version"], direct), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
