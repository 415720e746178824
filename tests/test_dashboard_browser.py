"""The page in a real Chromium: what it draws, how it is used, and what it costs."""

from __future__ import annotations

import math
import shutil
import subprocess
import threading
from contextlib import contextmanager

import pytest

from fedtrain.contrib.dashboard.page import report
from tests.limits import WAIT_S
from tests.logs import SCRIPT, datacenter, federation, rounds, write

pytest.importorskip("uvicorn", reason="the extra dashboard is not installed")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync"
TOKEN = "a-token-of-some-length"
AXE = "axe-core@4.10.3"
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}
FRAME_S = 0.1
SITES = [f"site-{n:02}" for n in range(50)]


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=FLAGS.split())


@pytest.fixture
def tab(browser):
    """Opens an address; the page must have said nothing on its console when the test ends."""
    said, contexts = [], []

    def open_(address, width=1200, height=900, scheme="light"):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.goto(address)
        page.locator("#summary dd").first.wait_for()
        return page

    yield open_
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """The source of axe-core, from the npm registry."""
    folder = tmp_path_factory.mktemp("axe")
    if shutil.which("npm") is None:
        pytest.skip("no npm here, which fetches axe-core")
    fetch = ["npm", "install", "--no-save", "--ignore-scripts", "--prefix", str(folder), AXE]
    if subprocess.run(fetch, cwd=folder, capture_output=True, timeout=120, check=False).returncode:
        pytest.skip("npm can't fetch axe-core here")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


@contextmanager
def serving(*folders):
    """The address of a dashboard of these run directories."""
    from fedtrain.contrib.dashboard import server

    address = threading.Event(), []

    def ready(text):
        address[1].append(text)
        address[0].set()

    served = []
    thread = threading.Thread(
        target=server.serve, args=(lambda: folders, "127.0.0.1", 0, TOKEN, None, ready, served.append)
    )
    thread.start()
    try:
        assert address[0].wait(WAIT_S)
        yield address[1][0]
    finally:  # pages are closed by then: one that is left alone says so
        served[0].should_exit = True
        thread.join()


def serious(page, axe):
    page.evaluate(axe)
    found = page.evaluate("rules => axe.run(document, rules)", RULES)["violations"]
    return [
        (each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.slow(10)
def test_a_live_run_is_drawn_as_it_goes_on_and_beside_another(tmp_path, tab, axe):
    write(tmp_path / "clinic", federation(sites=("north", SCRIPT)))
    write(tmp_path / "gpt", datacenter())
    with serving(tmp_path / "clinic", tmp_path / "gpt") as address:
        page = tab(address)
        page.get_by_role("link", name="clinic").click()
        page.get_by_text("4 of 6").wait_for()
        assert "token" not in page.url
        assert page.get_by_role("cell", name=SCRIPT, exact=True).count() == 1
        assert page.locator("script").count() == 1
        assert page.locator("#rounds rect.uploading").count() == 3, "one is the legend's"
        write(tmp_path / "clinic", rounds(("north", SCRIPT), 5, 5), began=1_700_000_100.0)
        page.get_by_text("5 of 6").wait_for()
        page.get_by_label("words in a line").fill("it is NaN")
        page.get_by_text("1 lines").wait_for()
        sync_api.expect(page.locator("#log p")).to_have_count(1, timeout=1000 * WAIT_S)
        assert serious(page, axe) == []
        page.get_by_label("compare gpt").check()
        page.locator("#compared").get_by_role("columnheader", name="gpt").wait_for()
        page.get_by_role("slider", name="MFU by step").wait_for()
        assert page.locator("#compared tr").filter(has_text="rounds").first.inner_text().split("\t")[1:] == [
            "5 of 6", "2 of 2",
        ]  # fmt: skip
        assert serious(page, axe) == []
        page.context.close()


@pytest.mark.slow(8)
def test_a_report_is_used_on_a_telephone_in_the_dark_and_by_keyboard(tmp_path, tab, axe):
    write(tmp_path / "clinic", federation(sites=("north", SCRIPT)))
    file = tmp_path / "report.html"
    file.write_text(report([tmp_path / "clinic"]))
    page = tab(file.as_uri(), width=400, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert serious(page, axe) == []
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert serious(page, axe) == []
    curve = page.get_by_role("slider", name="training loss by round")
    curve.focus()
    page.keyboard.press("ArrowLeft")
    assert curve.get_attribute("aria-valuetext") == "round 3: 0.33333"
    page.get_by_label("which round").focus()
    page.keyboard.press("Home")
    page.get_by_text("round 1 (").wait_for()
    for _ in range(60):  # every place that takes keys is reached, and left again
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement !== null")


@pytest.mark.parametrize(
    "last", [pytest.param(400, marks=pytest.mark.slow(8)), pytest.param(5000, marks=pytest.mark.soak)]
)
def test_fifty_sites_scroll_without_a_frame_over_a_tenth_of_a_second(tmp_path, tab, last):
    """Frames are counted in the time that the page's thread has worked, and of two passes over the page the
    faster counts for each: others are at work here too, and take the processor's caches."""
    write(tmp_path / "big", federation(sites=SITES, last=last, planned=last), every=0.001)
    with serving(tmp_path / "big") as address:
        page = tab(address)
        page.get_by_text(f"{last} of {last}").first.wait_for(timeout=120_000)
        page.wait_for_function("n => parseInt(document.querySelector('#rounds input').max) === n", arg=last)
        metrics = page.context.new_cdp_session(page)
        metrics.send("Performance.enable", {"timeDomain": "threadTicks"})

        def worked():
            found = {
                each["name"]: each["value"] for each in metrics.send("Performance.getMetrics")["metrics"]
            }
            return found["TaskDuration"]

        frames: dict[tuple[str, int], float] = {}
        for box in ("#log", "#matrix", "#log", "#matrix"):
            page.locator(box).scroll_into_view_if_needed()
            for step in range(25):
                before = worked()
                page.evaluate(
                    """([box, share]) => new Promise(done => { const all = document.querySelector(box);
                       all.scrollTop = share * all.scrollHeight; all.scrollLeft = share * all.scrollWidth;
                       requestAnimationFrame(() => requestAnimationFrame(done)); })""",
                    [box, step / 25],
                )
                frames[box, step] = min(worked() - before, frames.get((box, step), math.inf))
        assert max(frames.values()) < FRAME_S
        page.wait_for_function("document.querySelectorAll('#log p').length > 10")
        page.context.close()
