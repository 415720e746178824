"""Which files are pages of the site: the project's Markdown files where they lie, so that links between them
hold, and a reference made of docstrings."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import fedtrain

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "docs/*.md", "certs/*.md", "deployment/*.md", "examples/*/*.md")
LINK = re.compile(r"\]\(([^)\s#]+)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages, what they link to, and the reference of Python, made of the public names of the package."""
    found = [file for file in files if not (ROOT / "docs" / file.src_uri).exists()]  # the theme's own
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    linked = {target for page in pages for target in _targets(page)}
    paths = [*pages, *sorted(linked.difference(pages))]
    found += [_file(path, config) for path in paths]
    return Files([*found, File.generated(config, "docs/api.md", content=reference())])


def reference() -> str:
    """A page of the public names, each with its docstring."""
    names = "\n\n".join(f"::: fedtrain.{name}" for name in (*fedtrain.__all__, "metrics"))
    return f"# fedtrain in Python, name by name\n\n[How they are used](python.md).\n\n{names}\n"


def _file(path: Path, config: MkDocsConfig) -> File:
    return File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, config.use_directory_urls)


def _targets(page: Path) -> set[Path]:
    """The files, no folders, that a page links to."""
    links = LINK.findall(FENCE.sub("", page.read_text()))
    targets = {(page.parent / link).resolve() for link in links if "://" not in link}
    return {target for target in targets if target.is_file()}
