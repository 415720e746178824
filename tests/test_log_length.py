"""A long log begins anew, keeps what lasts, and is read and followed as one."""

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
    assert (folder / "events.1.jsonl").stat().st_size < 39 * 120
    assert (folder / "events.1.jsonl").stat().st_mode & 0o077 == 0
    found = [*read(folder)]
    assert isinstance(found[0], events.RunStarted)
    assert committed(found) == [*range(1, 40)]
    assert log.running(folder)


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
