"""A site loads what its people approved: source files, and no compiled ones that may lie beside them."""

from __future__ import annotations

import sys
from importlib.abc import PathEntryFinder
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path
from typing import NoReturn

OURS = Path(__file__).resolve().parents[1]


class SourceOnly(SourceFileLoader):
    """Loads a module from its source: Python would believe a compiled file that claims to be of it."""

    def path_stats(self, path: object) -> NoReturn:
        """Without the source's time no compiled file is looked for, nor written."""
        raise OSError("compiled files are not read")


def load_sources_only(root: Path) -> None:
    """Have this process find modules in the folder `root` by their source alone; not those of an environment
    that lies in it."""
    root, finder = root.resolve(), FileFinder.path_hook((SourceOnly, SOURCE_SUFFIXES))

    def hook(entry: str) -> PathEntryFinder:
        path = Path(entry).resolve()
        environment = {"site-packages", "dist-packages"}.intersection(path.parts)
        if environment or not path.is_relative_to(root) or path.is_relative_to(OURS):
            raise ImportError(f"{path} is not in the project")
        return finder(entry)

    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()
