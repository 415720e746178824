"""Events, the board they fold into, and what a person or a program sees of them."""

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtrain import events
from fedtrain.cli.output import run_row
from fedtrain.errors import ConfigError, TooFewSites
from fedtrain.tracking import Board, EventLog, live, runs
from fedtrain.tracking.board import SiteRow
from fedtrain.tracking.log import TEXT_CHARS, follow, read, running

STORY = [
    ("run_started", {"run": "heart", "mode": "federated", "rounds": 4, "config_digest": "ab" * 32}),
    ("waiting", {"need": 2}),
    ("site_joined", {"site": "basel"}),
    ("site_joined", {"site": "bern"}),
    ("round_started", {"round": 1, "attempt": 1, "sites": ["basel", "bern"]}),
    ("update_received", {"round": 1, "site": "basel", "num_examples": 120, "loss": 0.7, "nbytes": 4000}),
    ("update_received", {"round": 1, "site": "bern", "num_examples": 80, "loss": 0.5, "nbytes": 4000}),
    ("round_committed", {"round": 1, "loss": 0.62, "metrics": {"loss": 0.62}, "seconds": 1.5, "sites": 2}),
    ("evaluated", {"round": 1, "metrics": {"loss": 0.6, "accuracy": 0.75}, "by_site": {}}),
    ("best", {"round": 1, "metric": "accuracy", "value": 0.75}),
    ("round_started", {"round": 2, "attempt": 1, "sites": ["basel", "bern"]}),
    ("site_lost", {"site": "bern", "reason": "disconnected"}),
    ("round_failed", {"round": 2, "attempt": 1, "reason": "1 sites replied, 2 are needed"}),
]


class Ticks:
    """A clock that moves by one second each time that it is asked."""

    def __init__(self, start=1000.0):
        self.now = start

    def __call__(self):
        self.now += 1
        return self.now


def write(run_dir, story=STORY, *subscribers, clock=None):
    with EventLog(run_dir, *subscribers, clock=clock or Ticks()) as log:
        for kind, fields in story:
            log.emit(events.KINDS[kind](**fields))


def told(story=STORY):
    """The board after a story, without a file between."""
    board, clock = Board(), Ticks()
    for kind, fields in story:
        board.add(events.KINDS[kind](time=clock(), **fields))
    return board


# --- the file


def test_what_is_emitted_is_what_is_read(tmp_path):
    heard = []
    write(tmp_path, STORY, heard.append)
    assert list(read(tmp_path)) == heard
    assert [type(e).__struct_config__.tag for e in heard] == [kind for kind, _ in STORY]


def test_each_line_is_a_json_object_with_time_and_kind(tmp_path):
    write(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == [kind for kind, _ in STORY]
    assert lines[5] | {"time": 0} == {"time": 0, "kind": "update_received", **STORY[5][1]}


def test_every_kind_says_what_it_means():
    assert all(kind.__doc__ and "\n" not in kind.__doc__ for kind in events.KINDS.values())


def test_an_event_with_an_unknown_kind_or_field_is_our_own_bug(tmp_path):
    with EventLog(tmp_path) as log, pytest.raises(TypeError, match="patient"):
        log.emit(events.Notice(text="hello", patient="x"))


def test_no_file_is_made_before_the_first_event(tmp_path):
    with EventLog(tmp_path / "run") as log:
        assert not (tmp_path / "run").exists()
        log.emit(events.Notice(text="now"))
    assert (tmp_path / "run" / "events.jsonl").exists()


def test_a_run_begun_anew_in_a_new_folder_gets_a_new_file(tmp_path):
    with EventLog(tmp_path / "run") as log:
        log.emit(events.Notice(text="of the old run"))
        (tmp_path / "run" / "events.jsonl").unlink()  # simulate --fresh
        log.emit(events.RunStarted(run="heart", mode="simulate", rounds=1))
    assert [type(e) for e in read(tmp_path / "run")] == [events.RunStarted]


@given(cut=st.integers(1, 60))
def test_a_torn_last_line_is_passed_over_and_healed_by_the_next_writer(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("torn")
    write(folder)
    path = folder / "events.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    kept = list(read(folder))
    assert len(kept) == len(STORY) - 1
    write(folder, [("notice", {"text": "again"})])
    assert list(read(folder))[:-1] == kept
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_torn_line_longer_than_one_look_back_is_healed(tmp_path):
    write(tmp_path)
    whole = (tmp_path / "events.jsonl").read_bytes()
    (tmp_path / "events.jsonl").write_bytes(whole + b"x" * 200_000)
    write(tmp_path, [])
    with EventLog(tmp_path, clock=Ticks()) as log:
        log.emit(events.Notice(text="again"))
    assert (tmp_path / "events.jsonl").read_bytes().startswith(whole + b'{"kind":"notice"')


def test_kill_9_loses_no_event_that_was_emitted(tmp_path):
    code = f"""
        from pathlib import Path
        from fedtrain.events import Notice
        from fedtrain.tracking import EventLog
        log = EventLog(Path({str(tmp_path)!r}))
        for i in range(10**9):
            log.emit(Notice(text=str(i)))
            print(i, flush=True)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    printed = list(islice(child.stdout, 50))
    assert running(tmp_path)
    child.send_signal(signal.SIGKILL)
    printed += child.stdout
    child.wait()
    child.stdout.close()
    kept = [e.text for e in read(tmp_path)]
    printed = [line.strip() for line in printed if line.endswith("\n")]
    assert kept[: len(printed)] == printed
    assert not running(tmp_path)


def test_lines_of_a_newer_fedtrain_are_passed_over(tmp_path):
    write(tmp_path)
    with (tmp_path / "events.jsonl").open("a") as f:
        f.write('{"time": 1, "kind": "from_the_future", "x": 1}\n')
        f.write('{"time": 2, "kind": "notice", "text": "known", "colour": "blue"}\n')
    *_, last = read(tmp_path)
    assert len(list(read(tmp_path))) == len(STORY) + 1
    assert last == events.Notice(time=2, text="known")


def test_a_number_that_json_does_not_have_is_read_as_none(tmp_path):
    write(tmp_path, [("round_committed", {"round": 1, "loss": float("nan"), "metrics": {"a": float("inf")}})])
    (event,) = read(tmp_path)
    assert (event.loss, event.metrics) == (None, {"a": None})


def test_text_from_elsewhere_is_one_bounded_line_that_cannot_steer_a_terminal(tmp_path):
    write(tmp_path, [("site_lost", {"site": "bern", "reason": "a\x1b[2J\nb" + "x" * 10_000})])
    (event,) = read(tmp_path)
    assert event.reason.startswith("a [2J b")
    assert len(event.reason) == TEXT_CHARS
    assert event.reason.isprintable()


def test_a_run_that_ends_by_an_error_tells_those_who_follow_but_not_its_own_screen(tmp_path):
    def fail_after_an_event(heard):
        with EventLog(tmp_path, heard.append) as log:
            log.emit(events.Notice(text="begin"))
            raise TooFewSites("round 1", 1, 2)

    heard = []
    with pytest.raises(TooFewSites):
        fail_after_an_event(heard)
    assert [e.text for e in read(tmp_path)][1].startswith("stopped: round 1: 1 sites replied")
    assert len(heard) == 1


# --- following


def following(run_dir):
    """A follower that never sleeps, and its next event."""
    return follow(run_dir, sleep=lambda s: None)


def until_idle(follower):
    found = []
    for event in follower:
        if event is None:
            return found
        found.append(event)


def test_a_follower_reads_each_event_once_as_it_is_written(tmp_path):
    follower = following(tmp_path)
    assert until_idle(follower) == []  # before there is a file
    write(tmp_path, STORY[:3])
    assert len(until_idle(follower)) == 3
    assert until_idle(follower) == []
    write(tmp_path, STORY[3:])
    assert len(until_idle(follower)) == len(STORY) - 3


def test_a_follower_waits_for_a_line_to_be_whole(tmp_path):
    write(tmp_path)
    path, follower = tmp_path / "events.jsonl", following(tmp_path)
    until_idle(follower)
    with path.open("ab", buffering=0) as f:
        f.write(b'{"time": 5, "kind": "no')
        assert until_idle(follower) == []
        f.write(b'tice", "text": "whole"}\n')
    assert until_idle(follower) == [events.Notice(time=5, text="whole")]


def test_a_follower_goes_on_over_a_torn_line_that_was_healed(tmp_path):
    write(tmp_path)
    follower = following(tmp_path)
    until_idle(follower)
    with (tmp_path / "events.jsonl").open("ab") as f:
        f.write(b'{"time": 5, "ki')
    assert until_idle(follower) == []
    write(tmp_path, [("notice", {"text": "again"})])
    assert [e.text for e in until_idle(follower)] == ["again"]


def test_a_follower_starts_over_with_a_file_made_anew(tmp_path):
    write(tmp_path)
    follower = following(tmp_path)
    until_idle(follower)
    (tmp_path / "events.jsonl").unlink()
    write(tmp_path, [*STORY, *STORY], clock=Ticks(5000))  # longer than what was read
    assert len(until_idle(follower)) == 2 * len(STORY)


# --- the board


def test_the_board_shows_where_a_run_is():
    board = told(STORY[:8])
    assert (board.run, board.mode, board.round, board.rounds) == ("heart", "federated", 1, 4)
    assert board.last.loss == 0.62
    assert board.sites["basel"] == SiteRow("done", 1, 120, 0.7)


def test_the_board_shows_who_is_missing_and_why():
    board = told()
    assert board.sites["bern"].state == "lost"
    assert board.sites["bern"].reason == "disconnected"
    assert board.under_way is None
    assert board.notices[-1].startswith("round 2, attempt 1 failed")


def test_waiting_counts_the_sites_that_are_here():
    assert told(STORY[:2]).waiting == (0, 2)
    assert told(STORY[:3]).waiting == (1, 2)
    assert told(STORY[:4]).waiting is None
    assert told([*STORY, ("waiting", {"need": 2})]).waiting == (1, 2)


def test_metrics_are_the_newest_evaluations_and_loss_is_of_training():
    board = told([*STORY, ("round_committed", {"round": 2, "loss": 0.4})])
    assert board.metrics == {"loss": 0.6, "accuracy": 0.75}
    assert board.last.loss == 0.4


def test_a_restart_takes_back_what_was_not_committed():
    again = ("run_started", {"run": "heart", "mode": "federated", "rounds": 4, "resumed_from": 1})
    board = told(
        [*STORY, ("round_committed", {"round": 2}), ("best", {"round": 2, "metric": "a", "value": 1}), again]
    )
    assert board.round == 1
    assert list(board.history) == [1]
    assert board.best is None
    assert board.finished is None


def test_a_run_begun_anew_starts_from_an_empty_board():
    board = told([*STORY, STORY[0]])
    assert (board.round, board.history, board.sites) == (0, {}, {})


def test_a_refused_site_is_shown_until_it_takes_part_again():
    refused = ("update_refused", {"round": 2, "site": "bern", "reason": "NaN in fc.weight"})
    board = told([*STORY, refused])
    assert (board.sites["bern"].state, board.sites["bern"].reason) == ("refused", "NaN in fc.weight")
    board.add(events.RoundStarted(time=0, round=3, attempt=1, sites=["bern"]))
    assert (board.sites["bern"].state, board.sites["bern"].reason) == ("training", "")


def test_eta_is_the_pace_of_the_last_rounds_times_the_rounds_left():
    board = Board()
    board.add(events.RunStarted(time=0, run="r", mode="simulate", rounds=10))
    assert board.eta_s(0) is None
    for n in (1, 2, 3):
        board.add(events.RoundStarted(time=n * 10 - 10, round=n, attempt=1, sites=["a"]))
        board.add(events.RoundCommitted(time=n * 10, round=n))
    assert board.eta_s(30) == 70
    assert board.eta_s(34) == 66
    assert board.eta_s(1000) == 60  # a round that takes longer than the others is not yet a trend
    board.add(events.RunFinished(time=1000, round=10))
    assert board.eta_s(1000) is None


def test_a_first_round_that_took_twenty_times_as_long_as_the_others_makes_the_eta_jump_nowhere():
    board, found, now = Board(), [], 0.0
    board.add(events.RunStarted(time=0, run="r", mode="peer", rounds=60))
    for n in range(1, 13):
        board.add(events.RoundStarted(time=now, round=n, attempt=1, sites=["a"]))
        now += 6.0 if n == 1 else 0.3
        board.add(events.RoundCommitted(time=now, round=n))
        found.append(board.eta_s(now))
    assert found[9] == pytest.approx(50 * (9 * 0.3 + 0.9) / 10)
    assert found[10] == pytest.approx(49 * 0.3)


def test_the_time_spent_waiting_for_sites_is_no_part_of_the_pace():
    board = Board()
    board.add(events.RunStarted(time=0, run="r", mode="federated", rounds=3))
    board.add(events.Waiting(time=0, need=1))
    board.add(events.SiteJoined(time=1000, site="a"))
    board.add(events.RoundStarted(time=1000, round=1, attempt=1, sites=["a"]))
    board.add(events.RoundCommitted(time=1010, round=1))
    assert board.eta_s(1010) == 20


counts, averages = st.integers(0, 2**40), st.dictionaries(st.text(), st.none() | st.floats())
BY_TYPE = {
    bool: st.booleans(), int: counts, int | None: st.none() | counts,
    float: st.floats(0, 4e9), float | None: st.none() | st.floats(),
    str: st.text(), str | None: st.none() | st.text(), Sequence[str]: st.lists(st.text()),
    Mapping[str, float]: st.dictionaries(st.text(), st.floats(0, 1)),
    Mapping[str, str]: st.dictionaries(st.text(), st.text(), max_size=3),
    events.Averages: averages,
    Mapping[str, events.Averages]: st.dictionaries(st.text(), averages, max_size=2),
}  # fmt: skip
any_event = st.one_of(
    *(
        st.builds(
            kind,
            **{
                name: BY_TYPE[hint]
                for name, hint in get_type_hints(kind).items()
                if name in kind.__struct_fields__
            },
        )
        for kind in events.KINDS.values()
    )
)


@given(st.lists(any_event, max_size=12))
def test_no_sequence_of_events_breaks_board_line_or_file(story):
    board = Board()
    for event in story:
        board.add(event)
        live.line(event, board)
        assert events.decode(events.encode(event)) is not None
    board.eta_s(0.0)


def test_sites_that_leave_a_finished_run_are_not_lost():
    board = told([*STORY[:9], ("run_finished", {"round": 4})])
    gone = events.SiteLost(time=0, site="basel", reason="disconnected")
    board.add(gone)
    assert board.sites["basel"].state == "done"
    assert live.line(gone, board) is None


# --- screens


def text_of(story=STORY, **kinds):
    out = io.StringIO()
    with live.screen(out=out, **kinds) as show:
        for kind, fields in story:
            show(events.KINDS[kind](**fields))
    return out.getvalue()


def test_plain_text_has_one_readable_line_an_event():
    lines = [line[10:] for line in text_of().splitlines()]
    assert lines == [
        "run heart (federated): 4 rounds, config abababababab",
        "waiting for sites: 0 of 2",
        "basel joined; waiting for sites: 1 of 2",
        "bern joined",
        "round 1/4: started: 2 sites",
        "round 1/4: update from basel: 120 examples, loss 0.7000, 4.0 kB",
        "round 1/4: update from bern: 80 examples, loss 0.5000, 4.0 kB",
        "round 1/4: done: 2 sites  loss 0.6200  1.5 s",
        "round 1/4: evaluated: loss 0.6000  accuracy 0.7500",
        "round 1/4: is the best so far: accuracy 0.7500",
        "round 2/4: started: 2 sites",
        "bern lost: disconnected",
        "round 2/4: failed, attempt 1: 1 sites replied, 2 are needed",
    ]


def test_a_site_tells_of_its_aggregator_and_its_own_work():
    story = [
        ("site_lost", {"site": "aggregator", "reason": "connection refused"}),
        ("site_joined", {"site": "aggregator"}),
        ("site_state", {"site": "bern", "state": "training", "round": 1}),
        ("site_state", {"site": "bern", "state": "done", "round": 1}),
        ("run_finished", {"reason": "rounds done"}),
    ]
    assert [line[10:] for line in text_of(story).splitlines()] == [
        "no connection to the aggregator: connection refused",
        "connected to the aggregator",
        "round 1: training",
        "run is finished: rounds done",
    ]


TURNS = [
    ("run_started", {"run": "heart", "mode": "site", "rounds": 5, "buffer": 2}),
    ("site_state", {"site": "bern", "state": "training", "round": 6}),
    ("site_state", {"site": "bern", "state": "evaluating", "round": 4}),
    ("site_state", {"site": "bern", "state": "evaluating", "round": 7}),
    ("run_finished", {"reason": "rounds done"}),
]


def test_a_site_of_an_asynchronous_run_counts_its_turns_of_which_nobody_knows_the_number(tmp_path):
    assert [line[10:] for line in text_of(TURNS).splitlines()[:3]] == [
        "run heart (site): 5 versions",
        "turn 6: training",
        "version 4: evaluating",
    ]
    with EventLog(tmp_path / "heart@bern") as log:
        for kind, fields in TURNS:
            log.emit(events.KINDS[kind](**fields))
    (summary,) = runs.summaries(tmp_path)
    assert run_row(summary)[:3] == ("heart@bern", "finished", "6")


def test_plain_text_tells_a_refusal_once_a_round_however_often_it_is_tried():
    refused = ("update_refused", {"round": 1, "site": "bern", "reason": "NaN"})
    later = ("update_refused", {"round": 2, "site": "bern", "reason": "NaN"})
    other = ("update_refused", {"round": 2, "site": "bern", "reason": "too large"})
    assert len(text_of([STORY[0], refused, refused, later, later, other]).splitlines()) == 1 + 3


def test_plain_text_counts_updates_instead_of_listing_a_hundred():
    sites = [f"site-{i}" for i in range(100)]
    story = [STORY[0], ("round_started", {"round": 1, "sites": sites})]
    story += [("update_received", {"round": 1, "site": site}) for site in sites]
    assert len(text_of(story).splitlines()) == 2


def test_json_lines_are_those_of_the_file(tmp_path):
    out = io.StringIO()
    write(tmp_path, STORY, live.screen(json=True, out=out))
    assert out.getvalue() == (tmp_path / "events.jsonl").read_text()


def test_where_there_is_no_terminal_rich_is_never_loaded():
    code = (
        "import sys, io; from fedtrain.tracking import live; from fedtrain import events;"
        "s = live.screen(out=io.StringIO()); s(events.Notice(text='x')); print('rich' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def drawn(board, width=100, height=24, now=2000.0):
    from rich.console import Console

    console = Console(width=width, height=height, file=io.StringIO())
    console.print(live.table(board, now, width, height))
    return console.file.getvalue()


def test_the_live_table_shows_round_loss_metrics_best_and_each_site():
    text = drawn(told())
    for words in ("heart", "round 1/4", "loss 0.6200", "accuracy 0.7500", "best accuracy 0.7500 in round 1"):
        assert words in text
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("b")] == [
        ["basel", "training"], ["bern", "lost"]]  # fmt: skip


PEERS = [
    ("run_started", {"run": "heart", "mode": "peer", "rounds": 4}),
    *[("site_joined", {"site": site}) for site in ("bern", "chur", "davos")],
    ("round_started", {"round": 1, "sites": ["basel", "bern", "chur", "davos"],
                       "neighbors": ["bern", "chur"]}),
    ("site_state", {"site": "bern", "state": "done", "round": 1}),
    ("update_refused", {"site": "chur", "round": 1, "reason": "did not finish within 6 s"}),
    ("site_lost", {"site": "davos", "reason": "no connection for 5 s"}),
    ("round_committed", {"round": 1, "loss": 0.62, "metrics": {"loss": 0.62, "disagreement": 0.031},
                         "sites": 2, "bytes_in": 4_000_000, "bytes_out": 8_000_000}),
]  # fmt: skip
DOUBTED = {"bern": 0.25, "chur": 0.0, "davos": 0.5, "basel": 0.75}


def test_a_peer_shows_its_neighbours_and_their_state_consensus_distance_and_bytes():
    text = drawn(told(PEERS))
    assert "loss 0.6200  disagreement 0.0310   in 4.0 MB, out 8.0 MB" in text
    rows = {line.split()[0]: line.split(maxsplit=3)[1:] for line in text.splitlines() if line[:1] in "bcd"}
    assert rows["bern"][:2] == ["done", "1"]
    assert [cell.strip() for cell in rows["chur"]] == ["refused", "1", "did not finish within 6 s"]
    assert rows["davos"][0] == "lost"
    assert rows["basel"][0] == "waiting"
    lines = [line[10:] for line in text_of(PEERS).splitlines()]
    assert "round 1/4: started: 4 sites, hears bern, chur" in lines
    assert lines[-1].endswith("loss 0.6200  disagreement 0.0310  in 4.0 MB, out 8.0 MB")


def test_a_peer_shows_whose_models_its_rule_doubted_until_the_next_round_is_done():
    (kind, fields), after = PEERS[-1], ("round_committed", {"round": 2})
    story = [*PEERS[:-1], (kind, {**fields, "doubted": DOUBTED})]
    assert "chur left out, bern clipped to 25%, davos clipped to 50% and 1 more" in text_of(story)
    rows = {line.split()[0]: line.rstrip() for line in drawn(told(story)).splitlines() if line[:1] in "bcd"}
    assert rows["bern"].endswith("clipped to 25%")
    assert "did not finish within 6 s" in rows["chur"]  # what went wrong comes first
    assert "clipped" not in drawn(told([*story, after]))


@pytest.mark.parametrize("height", [10, 24, 60])
def test_the_live_table_fits_the_screen_and_shows_trouble_first(height):
    sites = [f"site-{i:03}" for i in range(300)]
    story = [STORY[0], ("round_started", {"round": 1, "sites": sites})]
    story += [("site_lost", {"site": "site-250", "reason": "idle"}), *[("notice", {"text": "x" * 500})] * 5]
    text = drawn(told(story), height=height).splitlines()
    assert len(text) <= height
    assert max(map(len, text)) <= 100
    assert "site-250" in text[3]
    assert any(line.startswith("and ") and "training" in line for line in text)


def test_the_live_table_leaves_the_terminal_in_order():
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24)
    with live.LiveTable(out, console, clock=lambda: 2000.0) as show:
        for kind, fields in STORY:
            show(events.KINDS[kind](**fields))
        show(events.RunFinished(time=9.0, round=4, reason="rounds done", model="runs/heart/model"))
    assert out.getvalue().rpartition("\x1b[?25")[2].startswith("h")  # the cursor is back
    assert "rounds done" in out.getvalue()
    assert "runs/heart/model" in out.getvalue()


def test_the_live_table_prints_where_the_model_is_on_a_whole_line_however_narrow_the_terminal():
    from rich.console import Console

    out, model = io.StringIO(), "/home/ana/" + "a-long-folder/" * 10 + "runs/heart/model"
    with live.LiveTable(out, Console(file=out, force_terminal=True, width=80, height=24)) as show:
        show(events.RunStarted(time=0.0, run="heart", mode="federated", rounds=4))
        show(events.RunFinished(time=9.0, round=4, reason="rounds done", model=model))
    assert out.getvalue().splitlines()[-1].endswith(f"model in {model}")


SITE = [
    ("run_started", {"run": "heart", "mode": "site", "rounds": 4}),
    ("site_lost", {"site": "aggregator", "reason": "connection refused"}),
    ("site_joined", {"site": "aggregator"}),
    ("site_state", {"site": "bern", "state": "training", "round": 2}),
    ("site_state", {"site": "bern", "state": "evaluating", "round": 2}),
]


def test_a_sites_table_shows_the_round_it_works_on_and_that_it_is_connected():
    board = told(SITE)
    assert "round 2/4" in drawn(board)
    assert (board.sites["aggregator"].state, board.sites["bern"].state) == ("connected", "evaluating")


def test_when_a_run_is_finished_no_site_is_at_work_but_those_lost_or_refused_stay_so():
    story = [*SITE, ("site_lost", {"site": "basel", "reason": "idle"}), ("run_finished", {"round": 4})]
    states = {site: row.state for site, row in told(story).sites.items()}
    assert states == {"aggregator": "done", "bern": "done", "basel": "lost"}
    evaluating = ("site_state", {"site": "basel", "state": "evaluating", "round": 1})
    after = [*STORY[:8], evaluating, ("evaluated", {"round": 1, "metrics": {}})]
    assert told(after).sites["basel"].state == "done"


def test_before_the_run_has_begun_the_table_says_so_and_shows_no_round_of_none():
    assert drawn(Board()).split() == ["starting"]


def test_a_column_that_nobody_has_a_value_for_is_left_out():
    masked = [(kind, {k: v for k, v in fields.items() if k not in ("num_examples", "loss")})
              for kind, fields in STORY]  # fmt: skip
    heads = [next(line for line in drawn(told(s)).splitlines() if line.startswith("site")).split()
             for s in (STORY, masked)]  # fmt: skip
    assert heads == [["site", "state", "round", "examples", "loss"], ["site", "state", "round"]]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.05, "50 ms"), (2.04, "2.0 s"), (100, "1m 40s"), (3725, "1h 02m"), (200_000, "2d 7h")],
)
def test_durations_read_well(value, text):
    assert live.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.2 kB"), (250e6, "250 MB"), (4e12, "4000 GB")]
)
def test_sizes_read_well(value, text):
    assert live.size(int(value)) == text


def test_a_sparkline_falls_with_the_loss():
    assert live.sparkline([1.0, None, 0.5, float("nan"), 0.0]) == "█▅▁"
    assert live.sparkline([1.0]) == ""


# --- lists of runs


def test_runs_are_listed_as_running_finished_or_stopped(tmp_path):
    write(tmp_path / "heart", clock=Ticks(10))
    write(tmp_path / "heart+simulate", [*STORY[:9], ("run_finished", {"round": 4})], clock=Ticks(100))
    with EventLog(tmp_path / "digits", clock=Ticks(1000)) as log:
        log.emit(events.RunStarted(**STORY[0][1]))
        found = runs.summaries(tmp_path)
    assert [(s.run, s.state, s.round) for s in found] == [
        ("heart", "stopped", 1), ("heart+simulate", "finished", 1), ("digits", "running", 0)]  # fmt: skip
    assert found[0].metrics == {"loss": 0.6, "accuracy": 0.75}
    assert (found[0].best_round, found[0].best_value) == (1, 0.75)


def test_asking_whether_a_run_is_alive_never_hinders_it(tmp_path):
    write(tmp_path)
    held = os.open(tmp_path / "events.jsonl", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)  # as a running process does
    try:
        assert running(tmp_path)
        write(tmp_path, [("notice", {"text": "still writing"})])
    finally:
        os.close(held)
    assert not running(tmp_path)


def test_a_run_is_found_by_its_name_and_a_misspelt_one_is_named(tmp_path):
    write(tmp_path / "heart+simulate")
    assert runs.find(tmp_path, "heart") == tmp_path / "heart+simulate"
    assert runs.find(Path("elsewhere"), str(tmp_path / "heart+simulate")) == tmp_path / "heart+simulate"
    with pytest.raises(ConfigError, match=r"no run 'hart\+simulate'. Did you mean heart\+simulate\?"):
        runs.find(tmp_path, "hart+simulate")


def test_the_newest_run_is_the_one_written_to_last(tmp_path):
    with pytest.raises(ConfigError, match="Start one: fedtrain simulate"):
        runs.newest(tmp_path)
    write(tmp_path / "a")
    write(tmp_path / "b")
    os.utime(tmp_path / "b" / "events.jsonl", (1, 1))
    assert runs.newest(tmp_path) == tmp_path / "a"


def test_a_summary_is_json_for_a_program(tmp_path):
    import msgspec

    write(tmp_path / "heart")
    (summary,) = runs.summaries(tmp_path)
    assert json.loads(msgspec.json.encode(summary))["state"] == "stopped"
    assert summary.updated <= time.time()


def test_what_stands_in_no_log_is_told_with_the_time_of_its_telling():
    out, before = io.StringIO(), time.strftime("%H:%M")
    live.screen(plain=True, out=out)(events.Notice(text="east asks for its certificate"))
    assert out.getvalue()[:5] in (before, time.strftime("%H:%M"))
    assert out.getvalue().endswith("east asks for its certificate\n")


@pytest.mark.parametrize(
    ("there", "found"),
    [
        (["clinic", "clinic@east"], "clinic"),
        (["clinic@east"], "clinic@east"),  # on the site's own machine
        (["clinic", "other@east"], "other@east"),
        (["clinic+gossip@a", "clinic+gossip@b"], "clinic+gossip@b"),
    ],
)
def test_the_newest_run_is_not_what_a_site_of_it_wrote_beside_it(tmp_path, there, found):
    for at, name in enumerate(there):  # each is written later than the one before
        (tmp_path / name).mkdir()
        file = tmp_path / name / "events.jsonl"
        file.write_text("")
        os.utime(file, (at, at))
    assert runs.newest(tmp_path).name == found
