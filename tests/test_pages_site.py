"""The pages as a site: built without a network, whole, and with nothing fetched by who reads it."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fedtrain

ROOT = Path(__file__).parents[1]
SLOW = pytest.mark.slow(10)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site; a link that leads nowhere, or a page in no menu, is an error of the build."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    blocked = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"} | blocked, check=True, timeout=120)
    return folder


class Fetched(HTMLParser):
    """The addresses that a browser fetches to show a page."""

    def __init__(self, text):
        super().__init__()
        self.found = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag in ("script", "img", "iframe"):
            self.found.add(given.get("src") or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.found.add(given.get("href") or "")


@SLOW
def test_every_public_name_has_its_place_in_the_reference(site):
    page = (site / "docs" / "api.html").read_text()
    shown = set(re.findall(r'id="fedtrain\.([\w.]+)"', page))
    assert {*fedtrain.__all__, "metrics"} <= shown
    assert {"Task.loss", "Run.model", "Strategy.step", "metrics.auroc"} <= shown


def test_every_page_of_the_project_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md"), ROOT / "README.md"]
    missing = [p.name for p in pages if f": {p.relative_to(ROOT).as_posix()}" not in menu]
    assert missing == ["README.md"]  # of docs/, a list of the pages as the menu is


@SLOW
def test_a_reader_fetches_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    elsewhere = {(page.name, to) for page in pages for to in Fetched(page.read_text()).found if "//" in to}
    assert elsewhere == set()
