"""A long log begins anew, keeps what lasts, and is read and followed as one."""

import tracemalloc

import pytest

from fedtrain import events
from fedtrain.tracking import log
from fedtrain.tracking.log import EventLog, events_file, follow, read


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Writes rounds of many sites to a log of at most 4 kB a file; the folder."""
    monkeypatch.setattr(log, "LOG_BYTES", 4000)
    clock = iter(range(1, 10**6))
    made = EventLog(tmp_path, clock=lambda: float(next(clock)))
    made.emit(events.RunStarted(run="r", mode="federated", rounds=9))

    def rounds(*numbers):
        for number in numbers:
            made.emit(events.Waiting(need=20))
            made.emit(events.RoundStarted(round=number, sites=[f"s{site}" for site in range(20)]))
            for site in range(20):
                made.emit(events.UpdateReceived(site=f"s{site}", round=number))
            made.emit(events.RoundCommitted(round=number, sites=20))
        return tmp_path

    yield rounds
    made.close()


def committed(found):
    return [event.round for event in found if isinstance(event, events.RoundCommitted)]


def test_a_long_log_begins_anew_and_what_lasts_of_it_stays(told):
    folder = told(*range(1, 40))
    assert events_file(folder).stat().st_size < 5000
    assert (folder / "events.1.jsonl").stat().st_size < 39 * 200
    assert (folder / "events.1.jsonl").stat().st_mode & 0o077 == 0
    found = [*read(folder)]
    assert isinstance(found[0], events.RunStarted)
    assert committed(found) == [*range(1, 40)]
    started = [event for event in found if isinstance(event, events.RoundStarted)]
    assert [event.round for event in started] == [*range(1, 40)]
    assert started[0].sites == []
    assert len(started[-1].sites) == 20
    assert log.running(folder)


def test_a_log_that_begins_anew_takes_no_more_memory_the_longer_the_run_is(told):
    earlier = told(*range(1, 10)) / "events.1.jsonl"
    earlier.write_bytes(earlier.read_bytes() + events.encode(events.Notice(text="long ago")) * 100_000)
    before = earlier.stat().st_size
    tracemalloc.start()
    try:
        told(*range(10, 20))
        assert tracemalloc.get_traced_memory()[1] < before / 10
    finally:
        tracemalloc.stop()
    assert earlier.stat().st_size > before > 2 << 20


def test_who_follows_a_log_misses_no_round_as_it_begins_anew(told):
    folder, found = told(1), []
    following = follow(folder, sleep=lambda _: None)

    def look():
        for event in following:
            if event is None:
                return
            found.append(event)

    look()
    for number in range(2, 40, 3):
        told(number, number + 1, number + 2)
        look()
    assert committed(found) == [*range(1, 41)]
    assert sum(isinstance(event, events.RunStarted) for event in found) == 1
