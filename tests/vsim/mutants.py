"""Plants the faults of mutants.toml in a copy of the package, one after the other, and says by which seed
each is found: one of the first SEEDS must find it.

    python -m tests.vsim.mutants            all; exit code 1 when one survives
    python -m tests.vsim.mutants fsync      those whose name has this word
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.security.mutants import FAILED, HEAVY, copied, forked

SEEDS = 500
LONGEST_S = 1800  # a world ends after so many steps, so only a busy machine takes as long


@dataclass(frozen=True)
class Mutant:
    """A fault: `text`, which stands once in each of its files, becomes another one."""

    name: str
    changes: tuple[tuple[str, str, str], ...]  # (file of the package, text, what it becomes)

    def plant(self, package: Path) -> dict[Path, str]:
        """Change the files; what they were."""
        before = {package / file: (package / file).read_text() for file, _, _ in self.changes}
        after = dict(before)
        for file, text, becomes in self.changes:
            count = after[package / file].count(text)
            assert count == 1, f"{self.name}: its text stands {count} times in {file}"
            after[package / file] = after[package / file].replace(text, becomes)
        for path, changed in after.items():
            path.write_text(changed)
        return before


def mutants() -> list[Mutant]:
    table = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
    return [
        Mutant(name, tuple(map(tuple, changes)))  # type: ignore[misc]
        for name, changes in table.items()
    ]


def main(words: Sequence[str]) -> int:
    chosen = [mutant for mutant in mutants() if all(word in mutant.name for word in words)]
    for name in (*HEAVY, "torch._meta_registrations"):
        importlib.import_module(name)
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copied(copy)
        for mutant in chosen:
            begun, before = time.monotonic(), mutant.plant(copy / "fedtrain")
            code = forked(copy, partial(_hunted, mutant.name.startswith("gossip")), LONGEST_S)
            for path, text in before.items():
                path.write_text(text)
            log = (copy / "log").read_text().strip()
            how = {0: "SURVIVES", FAILED: log[:150], -1: "NOT FOUND: it hangs"}.get(
                code, f"{code}: {log[-300:]}"
            )
            print(f"{time.monotonic() - begun:5.1f} s  {mutant.name}: {how}", flush=True)
            if code != FAILED:
                survivors.append(mutant.name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults are found within {SEEDS} seeds")
    return bool(survivors)


def _hunted(gossip: bool) -> int:
    from tests.vsim.hunt import hunt
    from tests.vsim.village import Village
    from tests.vsim.world import World

    failed = hunt(range(SEEDS), world=Village if gossip else World).failed
    if failed:
        print("; ".join(f"seed {seed}: {why[:200]}" for seed, why in sorted(failed.items())[:1]), flush=True)
    return FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
