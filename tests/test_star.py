"""The star's protocol without I/O: both ends in one process, time as a number, every loss on purpose."""

import itertools
import math
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedtrain.arena import ArenaFile, Patch
from fedtrain.errors import ConnectError, JoinRefused, StoreError
from fedtrain.events import Notice, SiteJoined, SiteLost, UpdateRefused
from fedtrain.messages import Evaluate, Evaluation, Failure, Train
from fedtrain.schema import Schema, TensorSpec
from fedtrain.transport.star import LEAVE_S, AggregatorEnd, Pending, SiteEnd, backoff
from fedtrain.wire.codec import UNFETCHED, encode
from fedtrain.wire.frames import (
    Ask,
    Cancel,
    Finished,
    Leaving,
    Moot,
    Note,
    Refused,
    Rejected,
    Status,
    Stored,
    Welcome,
)

IDLE_S = 30.0
SCHEMA = Schema((TensorSpec("w", (1,), "float32", True),))
WELCOME = Welcome(heartbeat_s=5.0)
REPLY = Evaluation(metrics={"loss": (1.0, 1.0)})


def file(digest, **fields):
    return ArenaFile(SCHEMA, UNFETCHED, digest * 32, **fields)


def request(round=0, attempt=0, weights="a"):
    return Evaluate(id=f"r/{round}/{attempt}/evaluate", round=round, weights=file(weights))


class Log(list):
    __call__ = list.append

    def of(self, kind):
        return [event for event in self if isinstance(event, kind)]


class Aggregator(AggregatorEnd):
    """With what it wrote into each session, and who was woken."""

    def __init__(self, frozen=None):
        self.log, self.woken, self.stopped = Log(), 0, []
        super().__init__(WELCOME, IDLE_S, self.log, frozen)

    def joined(self, site, process="p"):
        out = []
        session = self.join(site, process, out.append)
        session.out = out
        return session

    def asked(self, requests, until_s=100.0, now=0.0):
        def wake():
            self.woken += 1

        exchange = self.begin(requests, until_s, wake)
        for site, each in requests.items():
            self.ask(exchange, site, Ask(body=encode(each)), now)
        return exchange

    def upload(self, site, each):
        """An upload that has begun, or why it has not; its `stop` notes that it was called."""

        def stop():
            self.stopped.append(stop)

        return self.offered(site, each.id, stop), stop


def ask(each):
    return Ask(body=encode(each))


# --- requests and their replies


def test_a_site_is_asked_and_its_reply_ends_the_exchange():
    end, one = Aggregator(), request()
    session = end.joined("a")
    exchange = end.asked({"a": one})
    assert session.out == [WELCOME, ask(one)]
    pending, stop = end.upload("a", one)
    assert not exchange.over
    assert end.uploaded(pending, REPLY) == Stored()
    end.broke_off(pending, stop)
    assert (list(exchange.replies), exchange.over, end.woken) == ([("a", REPLY)], True, 1)
    end.end(exchange)
    assert session.out == [WELCOME, ask(one)], "it has answered: there is nothing to cancel"
    assert end.wake_s() == math.inf


STEPS = ["join", "ask", "offer", "store"]


@pytest.mark.parametrize("lost", [*itertools.product([False, True], repeat=len(STEPS))])
def test_a_session_lost_at_any_steps_costs_no_reply(lost):
    """After each step the site's connections may break, with all that was under way; it joins and is asked
    again, offers again, and its reply counts once."""
    end, one, now = Aggregator(), request(), 0.0
    exchange, session, upload = None, None, None
    for step, breaks in zip(STEPS, lost, strict=True):
        if step == "ask":
            exchange = end.asked({"a": one}, now=now)
        if session is None:
            session = end.joined("a")
        if exchange is not None and not exchange.over:
            assert session.out[-1] == ask(one)
        if step in ("offer", "store") and upload is None:
            upload, stop = end.upload("a", one)
            assert isinstance(upload, Pending)
        if step == "store":
            assert end.uploaded(upload, REPLY) == Stored()
        if breaks:
            now += IDLE_S - 1  # shorter than what it is waited for
            end.tick(now)
            if upload is not None:
                end.broke_off(upload, stop)
            end.lose(session, now)
            session = upload = None
    assert list(exchange.replies) == [("a", REPLY)]
    assert exchange.over
    assert not exchange.late
    assert len(end.log.of(SiteLost)) == sum(lost)


def test_the_same_reply_once_more_is_refused_and_counts_once():
    end, one = Aggregator(), request()
    end.joined("a")
    exchange = end.asked({"a": one})
    end.uploaded(end.upload("a", one)[0], REPLY)
    for _ in range(2):
        answer, _ = end.upload("a", one)
        assert isinstance(answer, Refused)
        assert "late, answered already, or another's" in answer.reason
    assert list(exchange.replies) == [("a", REPLY)]
    assert len(end.log.of(UpdateRefused)) == 2


def test_an_upload_over_a_new_connection_stops_the_one_before_and_either_may_be_first():
    for first in (0, 1):
        end, one = Aggregator(), request()
        end.joined("a")
        exchange = end.asked({"a": one})
        uploads = [end.upload("a", one), end.upload("a", one)]
        assert end.stopped == [uploads[0][1]]
        end.broke_off(*uploads[0])  # the second one is still known, and stopped by a third
        uploads.append(end.upload("a", one))
        assert end.stopped == [uploads[0][1], uploads[1][1]]
        for pending, _ in uploads[first:] + uploads[:first]:
            assert end.uploaded(pending, REPLY) == Stored()
        assert list(exchange.replies) == [("a", REPLY)]


def test_a_reply_after_the_deadline_is_refused_and_one_after_an_early_end_is_moot():
    for late in (True, False):
        end, one = Aggregator(), request()
        sessions = {site: end.joined(site) for site in "ab"}
        exchange = end.asked(dict.fromkeys("ab", one), until_s=100.0)
        end.uploaded(end.upload("a", one)[0], REPLY)
        if late:
            end.tick(99.9)
            assert not exchange.over
            end.tick(end.wake_s())
        assert exchange.late is late
        end.end(exchange)
        assert sessions["b"].out[-1] == Cancel(id=one.id)
        assert sessions["a"].out[-1] == ask(one)
        answer, _ = end.upload("b", one)
        assert isinstance(answer, Refused) if late else answer == Moot()


def test_an_upload_under_way_at_the_end_of_its_exchange_is_stopped_and_counts_no_more():
    end, one = Aggregator(), request()
    end.joined("a")
    exchange = end.asked({"a": one})
    pending, stop = end.upload("a", one)
    end.end(exchange)
    assert end.stopped == [stop]
    end.uploaded(pending, REPLY)
    assert not exchange.replies


def test_a_reply_to_an_earlier_attempt_of_the_same_id_is_not_taken_for_the_new_one():
    end, one = Aggregator(), request()
    end.joined("a")
    before = end.asked({"a": one})
    pending, _ = end.upload("a", one)
    end.end(before)
    after = end.asked({"a": one})
    end.uploaded(pending, REPLY)
    assert not after.replies
    assert isinstance(end.upload("a", one)[0], Pending)


def test_a_reply_that_cannot_be_used_is_a_failure_of_its_site():
    end, one = Aggregator(), request()
    end.joined("a")
    exchange = end.asked({"a": one})
    assert end.unusable(end.upload("a", one)[0], "too long") == Refused(reason="too long")
    assert list(exchange.replies) == [("a", Failure(reason="too long"))]


def test_a_full_disk_ends_the_exchange():
    end, one = Aggregator(), request()
    end.joined("a")
    exchange = end.asked(dict.fromkeys("ab", one))
    woken = []
    exchange.wake = lambda: woken.append(end.error)
    end.upload("a", one)
    end.broken(error := StoreError("no room"))
    assert woken == [error]


# --- sites that are away


def test_a_site_that_stays_away_is_given_up_from_its_last_loss_on_and_may_come_back_after_all():
    end, one = Aggregator(), request()
    exchange = end.asked({"a": one}, until_s=1000.0)
    for now in (10.0, 20.0):
        end.lose(end.joined("a"), now)
        end.tick(now + IDLE_S - 1)
        assert not exchange.over
    assert end.wake_s() == 20.0 + IDLE_S
    end.joined("a")
    assert end.wake_s() == 1000.0, "it is there"
    end.lose(end.sessions["a"], 30.0)
    end.tick(30.0 + IDLE_S)
    assert exchange.over
    assert not exchange.late
    assert end.joined("a").out == [WELCOME, ask(one)], "until the exchange has ended"
    end.uploaded(end.upload("a", one)[0], REPLY)
    assert list(exchange.replies) == [("a", REPLY)]


def test_a_site_that_is_asked_while_away_is_waited_for_anew_and_keeps_no_other_from_being_given_up():
    end, one, two = Aggregator(), request(1), request(2)
    end.asked({"a": one}, 1000.0, now=0.0)
    of_b = end.asked({"b": one}, 1000.0, now=5.0)
    of_a = end.asked({"a": two}, 1000.0, now=10.0)
    assert end.wake_s() == 5.0 + IDLE_S
    end.tick(5.0 + IDLE_S)
    assert of_b.over
    assert not of_a.over
    end.tick(10.0 + IDLE_S)
    assert of_a.over


def test_only_sites_of_an_exchange_may_fetch_what_it_names_and_the_frozen_only_those_that_joined():
    end = Aggregator(frozen=file("f"))
    weights = file("a")
    weights.patches = (Patch("b" * 32, file("c")),)
    exchange = end.asked({"a": Train(id="r/0/0/train", round=0, weights=weights)})
    may = lambda site: [d for d in "abcdf" if (found := end.named(site, d * 32)) and found.digest == d * 32]
    assert (may("a"), may("b")) == (["a", "c"], [])
    end.joined("b")
    assert may("b") == ["f"]
    end.end(exchange)
    assert may("a") == []


def test_who_is_cut_off_is_told_why_and_all_it_has_open_ends():
    end, one = Aggregator(), request()
    session = end.joined("a")
    exchange = end.asked(dict.fromkeys("ab", one))
    _, stop = end.upload("a", one)
    end.cut("a", "revoked", True)
    assert session.out[-2:] == [Refused(reason="revoked", final=True), None]
    assert end.stopped == [stop]
    assert list(exchange.replies) == [("a", Failure(reason="revoked"))]
    assert exchange.waiting == {"b"}
    end.cut("c", "nobody knows it", True)


# --- two processes of one site


def test_processes_that_take_each_others_place_are_reported_once_and_a_restarted_one_never():
    end = Aggregator()
    for process in ("one", "one", "two", "three"):  # it reconnected, then was started again, twice
        before = end.sessions.get("a")
        session = end.joined("a", process)
        if before:
            assert before.out[-1] is None
            assert any(isinstance(f, Refused) for f in before.out) is (before.process != process)
            end.lose(before, 0.0)
        assert end.sessions["a"] is session
    assert end.log.of(Notice) == []
    assert end.log.of(SiteLost) == []
    for process in ("two", "three", "two"):
        end.joined("a", process)
    (notice,) = end.log.of(Notice)
    assert notice.text.startswith("a: two processes join with one certificate")


# --- the end of the run


@pytest.mark.parametrize(
    "heard", [*itertools.product(["stays", "was away", "breaks off", "refused"], repeat=2)]
)
def test_it_is_deserted_when_every_site_has_heard_that_the_run_is_over(heard):
    end = Aggregator()
    here = {site: end.joined(site) for site, how in zip("ab", heard, strict=True) if "away" not in how}
    assert end.finish("rounds done", ["a", "b"]) == IDLE_S
    for site, how in zip("ab", heard, strict=True):
        assert not end.deserted
        session = here.get(site)
        if how == "breaks off":
            end.lose(session, 0.0)
        if how == "refused":  # its key was revoked meanwhile, say
            end.lose(session, 0.0)
            assert end.refuse(site, "another model", final=True) == Refused(
                reason="another model", final=True
            )
            continue
        if how != "stays":
            session = end.joined(site)
        assert session.out[-1] == Finished(reason="rounds done")
        end.receive(session, Status(state="x" * 100))
        end.receive(session, Leaving())
        assert session.out[-1] is None
        end.lose(session, 0.0)
    assert end.deserted


def test_a_site_that_joins_as_the_run_ends_is_waited_for_until_it_knows():
    """One that had never joined before; seen where the last of the others left in the same instant."""
    end = Aggregator()
    session = end.joined("a")
    end.finish("rounds done", ["a"])
    end.greets["d"] += 1  # its call is here, and its Hello is being read
    end.receive(session, Leaving())
    end.lose(session, 0.0)
    assert not end.deserted
    late = end.joined("d")
    end.greets["d"] -= 1
    assert late.out[-1] == Finished(reason="rounds done")
    end.lose(late, 0.0)  # its stream broke before it had read that
    assert not end.deserted
    late = end.joined("d")
    assert late.out[-1] == Finished(reason="rounds done")
    end.receive(late, Leaving())
    end.lose(late, 0.0)
    assert end.deserted


def test_without_a_reason_sessions_just_close():
    end = Aggregator()
    session = end.joined("a")
    assert end.finish(None, []) == LEAVE_S
    assert session.out[-1] is None
    end.lose(session, 0.0)
    assert end.deserted


# --- everything at once, in any order


class Star(RuleBasedStateMachine):
    """An aggregator whose sites come, go, answer, answer again and break off as they like."""

    SITES = st.sampled_from("abc")

    @initialize()
    def begin(self):
        self.end, self.now, self.number = Aggregator(), 0.0, 0
        self.exchanges, self.uploads, self.ended, self.old = [], [], {}, deque(maxlen=20)

    @rule(site=SITES, process=st.sampled_from(["p", "q"]))
    def join(self, site, process):
        before = self.end.sessions.get(site)
        session = self.end.joined(site, process)
        due = [ask(e.requests[site]) for e in self.exchanges if self.unanswered(e, site)]
        assert session.out == [WELCOME, *due]
        if before:
            assert before.out[-1] is None
            self.end.lose(before, self.now)
            assert self.end.sessions[site] is session

    @rule(site=SITES)
    def lose(self, site):
        if session := self.end.sessions.get(site):
            self.end.lose(session, self.now)
            assert site not in self.end.sessions

    @rule(sites=st.sets(SITES, min_size=1), lasts_s=st.floats(1.0, 100.0))
    def ask(self, sites, lasts_s):
        self.number += 1
        requests = {site: request(self.number) for site in sorted(sites)}
        self.exchanges.append(self.end.asked(requests, self.now + lasts_s, self.now))
        for site in sites & self.end.sessions.keys():
            assert self.end.sessions[site].out[-1] == ask(requests[site])

    @precondition(lambda self: self.exchanges)
    @rule(data=st.data(), site=SITES)
    def offer(self, data, site):
        exchange = data.draw(st.sampled_from(self.exchanges))
        if site in exchange.requests:
            before = [each for each in self.uploads if each[:2] == (exchange, site)]
            pending, stop = self.end.upload(site, exchange.requests[site])
            assert isinstance(pending, Pending) is self.unanswered(exchange, site)
            if isinstance(pending, Pending):
                assert all(each[3] in self.end.stopped for each in before[-1:])
                self.uploads.append((exchange, site, pending, stop))

    @precondition(lambda self: self.uploads)
    @rule(data=st.data(), how=st.sampled_from(["stored", "unusable", "broke off"]))
    def upload(self, data, how):
        upload = data.draw(st.sampled_from(self.uploads))
        exchange, site, pending, stop = upload
        counts = self.unanswered(exchange, site) and exchange in self.exchanges
        before = len(exchange.replies)
        if how == "stored":
            self.end.uploaded(pending, REPLY)
        elif how == "unusable":
            self.end.unusable(pending, "no")
        self.end.broke_off(pending, stop)
        self.uploads.remove(upload)
        assert len(exchange.replies) - before == (counts and how != "broke off")

    @precondition(lambda self: self.exchanges)
    @rule(data=st.data())
    def end_of_exchange(self, data):
        exchange = data.draw(st.sampled_from(self.exchanges))
        open_to = {s: len(self.end.sessions[s].out) for s in exchange.requests if s in self.end.sessions}
        waiting = set(exchange.waiting)
        unanswered = {site for site in exchange.requests if self.unanswered(exchange, site)}
        self.end.end(exchange)
        self.exchanges.remove(exchange)
        for site, had in open_to.items():
            cancelled = [Cancel(id=exchange.requests[site].id)] if site in waiting else []
            assert self.end.sessions[site].out[had:] == cancelled
        for site in unanswered:
            answer, _ = self.end.upload(site, exchange.requests[site])
            assert isinstance(answer, Refused if exchange.late else Moot)

    @rule(after_s=st.floats(0.0, 50.0))
    def wait(self, after_s):
        self.now = max(self.now, min(self.now + after_s, self.end.wake_s()))
        self.end.tick(self.now)

    def unanswered(self, exchange, site):
        return exchange in self.exchanges and site in exchange.requests and site not in dict(exchange.replies)

    @invariant()
    def every_exchange_is_what_its_sites_make_of_it(self):
        assert self.end.wake_s() > self.now, "what was due has been done"
        for exchange in self.exchanges:
            sites = [site for site, _ in exchange.replies]
            assert len(sites) == len(set(sites))
            assert not exchange.waiting & set(sites)
            assert exchange.waiting | set(sites) <= exchange.requests.keys()
            assert exchange.over == (exchange.late or not exchange.waiting)
            if exchange.late:
                assert self.now >= exchange.until_s
            here = {s for s in exchange.requests if s in self.end.sessions}
            for site in here & exchange.waiting:
                assert ask(exchange.requests[site]) in self.end.sessions[site].out


TestStar = Star.TestCase
TestStar.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- the site's end


def site_end():
    log = Log()
    return SiteEnd(Evaluate, log), log


def test_a_site_works_on_what_it_was_asked_last_until_it_has_answered_or_is_told_to_stop():
    end, _ = site_end()
    one, two = request(0), request(1)
    end.receive(ask(one))
    first = end.request
    assert first.id == one.id
    end.receive(ask(one))
    assert end.request is first, "it is under way"
    end.receive(ask(two))
    assert end.request.id == two.id, "what came before is moot"
    end.receive(Cancel(id=one.id))
    assert end.request.id == two.id
    end.receive(Cancel(id=two.id))
    assert end.request is None
    end.receive(ask(two))
    end.answered(end.request)
    assert end.request is None
    end.receive(ask(two))
    again = end.request
    assert again.id == two.id, "asked again, it is answered again"
    end.answered(first)
    assert end.request is again, "work that was dropped ends later"
    end.receive(Finished(reason="rounds done"))
    assert (end.request, end.finished) == (None, "rounds done")


def test_a_site_that_lost_its_session_drops_its_work_and_is_asked_anew():
    end, log = site_end()
    end.receive(WELCOME)
    end.receive(Note(line="hello"))
    end.receive(ask(request()))
    end.lose(ConnectError("the connection broke"), 0.5)
    assert end.request is None
    assert not end.joined
    assert log == [
        SiteJoined(site="aggregator"),
        Notice(text="hello"),
        SiteLost(site="aggregator", reason="the connection broke"),
    ]


def test_a_site_pauses_ever_longer_until_a_session_went_well_and_reports_each_trouble_once():
    end, log = site_end()
    pauses = [end.lose(ConnectError("refused"), 0.5) for _ in range(12)]
    assert pauses == pytest.approx([min(0.2 * 1.7**i, 15.0) for i in range(12)])
    assert end.lose(ConnectError("refused"), 0.0) == 7.5
    assert len(log) == 1
    end.receive(WELCOME)
    assert end.lose(ConnectError("refused"), 0.5) == 0.2
    assert len(log.of(SiteLost)) == 2


def test_a_site_has_the_bytes_that_came_with_the_request_it_works_on_and_hears_why_its_answer_is_not_used():
    end, log = site_end()
    one, two = request(0), request(1)
    end.receive(Ask(body=encode(one), data=b"1234"))
    end.receive(Ask(body=encode(one), data=b"5678"))
    assert end.data == b"1234", "the first is under way"
    end.receive(Ask(body=encode(two)))
    assert end.data == b""
    end.receive(Rejected(id=one.id, reason="late"))
    assert log == [UpdateRefused(site="here", reason="late")]
    assert end.request.id == two.id


def test_another_process_of_its_name_slows_a_site_down_though_it_had_joined():
    end, log = site_end()
    for i in range(4):
        end.receive(WELCOME)
        with pytest.raises(ConnectError, match="another process") as e:
            end.receive(Refused(reason="another process has joined"))
        assert not isinstance(e.value, JoinRefused)
        assert end.lose(e.value, 0.5) == pytest.approx(0.2 * 1.7**i)
    assert len(log.of(SiteLost)) == 1
    with pytest.raises(JoinRefused, match="another model"):
        end.receive(Refused(reason="another model", final=True))


def test_pauses_grow_to_the_longest():
    assert list(itertools.islice(backoff(0.1, 2.0, 0.5), 5)) == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])
