"""A run as a page: what is folded from its events, the file of `fedtrain report`, and who is let in."""

from __future__ import annotations

import json
import re
import sys

import pytest
from click.testing import CliRunner

from fedtrain import events as e
from fedtrain.cli import cli
from fedtrain.contrib.dashboard import page
from fedtrain.contrib.dashboard.history import History
from fedtrain.tracking.log import read
from tests.logs import SCRIPT, datacenter, federation, rounds, write

LOADED = 150_000  # bytes of the page, without the run


def folded(events):
    history = History("clinic")
    for event in events:
        history.add(event)
    return history


def applied(rows, messages):
    for message in messages:
        kept = rows.setdefault(message["rows"], [])
        del kept[message["from"] :]
        kept += json.loads(json.dumps(message["new"]))
    return rows


@pytest.mark.parametrize("events", [federation, datacenter])
def test_a_page_that_is_told_what_is_new_has_what_a_new_page_has(tmp_path, events):
    history, live = History("clinic"), {}
    for n, event in enumerate(write(tmp_path, events())):
        before = history.tick
        history.add(event)
        if n % 3 == 0:
            applied(live, history.since(getattr(history, "told", 0), most=2))
            history.told = history.tick
        assert history.tick == before + 1
    applied(live, history.since(history.told))
    assert live == applied({}, history.since(0, most=3))


def test_a_rounds_timeline_says_when_each_site_did_what(tmp_path):
    history = folded(write(tmp_path, federation(), every=1.0))
    row = history.rounds.rows[0]
    place = history.sites["south"]
    phases = history.head(0, "running")["phases"]
    marks = row["by"][place]
    assert marks[:2] == [1.01, 100]
    assert [phases[state] for state in marks[2::2]] == ["training", "uploading", "done"]
    assert marks[3::2] == [2.0, 5.0, 8.0]
    assert (row["end"] - row["t"], row["seconds"], row["commit"], row["in"]) == (10.0, 0.5, 0.01, 300)


def test_a_run_that_went_on_drops_the_rounds_that_were_not_committed(tmp_path):
    sites = ("north", "south")
    again = e.RunStarted(run="clinic", mode="federated", rounds=6, resumed_from=3)
    events = [*federation(sites), e.RoundStarted(round=5, sites=sites), again, *rounds(sites, 4, 6)]
    history = folded(write(tmp_path, events))
    assert [row["n"] for row in history.rounds.rows] == [1, 2, 3, 4, 5, 6]
    assert history.head(0, "running")["round"] == 6
    again = applied({"rounds": [0] * 9}, history.since(0))
    assert [row["n"] for row in again["rounds"]] == [1, 2, 3, 4, 5, 6]


def test_the_log_is_found_by_kind_site_and_words(tmp_path):
    log = folded(write(tmp_path, federation())).log
    assert log.page(0, 2)["total"] == len(log.lines)
    found = log.page(1, 2, kind="update_received", site="south")
    assert (found["total"], [line[2] for line in found["lines"]]) == (4, ["south", "south"])
    (refused,) = log.page(0, 9, words="IS NAN")["lines"]
    assert refused[3].endswith("update from north refused: it is NaN")
    assert log.page(0, 9, words="no such words") == {"total": 0, "at": 0, "lines": []}


def test_a_report_is_one_file_in_which_nothing_of_a_run_is_markup(tmp_path):
    write(tmp_path / "runs" / "clinic", federation(sites=("north", SCRIPT)))
    text = page.report([tmp_path / "runs" / "clinic"])
    assert SCRIPT not in text
    assert text.count("<script") == text.count("</script>") == 2
    assert not re.search(r"""(?:src|href)=["']?(?:https?:|/)""", text)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    (head,) = [message["head"] for message in data["messages"] if "head" in message]
    assert SCRIPT in [site["name"] for site in head["sites"]]
    assert head["epsilon"]["north"]["epsilon"] == 2.0


def test_a_long_runs_report_keeps_all_curves_and_some_timelines(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "CELLS_IN_REPORT", 20)
    monkeypatch.setattr(page, "LINES_IN_REPORT", 5)
    write(tmp_path / "clinic", federation(last=30, planned=30))
    messages = [*page._messages([tmp_path / "clinic"])]
    rows = [row for message in messages if message.get("rows") == "rounds" for row in message["new"]]
    assert [row["loss"] for row in rows] == pytest.approx([1 / n for n in range(1, 31)], rel=1e-6)
    drawn = [row["n"] for row in rows if row["by"]]
    assert drawn[-1] == 30
    assert len(drawn) <= 20 / 3
    (log,) = [message for message in messages if "log" in message]
    assert (len(log["log"]), log["left"]) == (5, len([*read(tmp_path / "clinic")]) - 5)


def test_the_command_writes_the_newest_run_or_those_that_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fedtrain.toml").write_text('[run]\ntask = "task:T"\n')
    write(tmp_path / "runs" / "clinic", federation())
    done = CliRunner().invoke(cli, ["report"])
    assert (done.exit_code, done.output) == (0, "clinic.html shows clinic\n")
    assert '"name":"clinic"' in (tmp_path / "clinic.html").read_text()
    done = CliRunner().invoke(cli, ["report", "clinik"])
    assert done.exit_code == 1
    assert "has no run 'clinik'. Did you mean clinic?" in done.output


def test_the_page_is_small_and_asks_nobody_else():
    files = [page.asset(name) for name in ("page.html", "page.css", "page.js")]
    assert sum(len(text.encode()) for text in files) <= LOADED
    for text in files:
        assert set(re.findall(r"https?://[^\s'\"]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", files[2])


def test_without_the_extra_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fedtrain.toml").write_text('[run]\ntask = "task:T"\n')
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    monkeypatch.delitem(sys.modules, "fedtrain.contrib.dashboard.server", raising=False)
    done = CliRunner().invoke(cli, ["dashboard"])
    assert done.exit_code == 1
    assert "pip install 'fedtrain[dashboard]'" in done.output


@pytest.mark.parametrize("listen", ["8500", "host:", ":8500", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_refused(tmp_path, monkeypatch, listen):
    pytest.importorskip("uvicorn")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fedtrain.toml").write_text('[run]\ntask = "task:T"\n')
    done = CliRunner().invoke(cli, ["dashboard", "--listen", listen])
    assert done.exit_code == 2
    assert "is not HOST:PORT" in done.output
