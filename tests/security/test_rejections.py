"""E1 and E7: each end knows which fedtrain the other runs, and a site that may not take part says so."""

import asyncio

import msgspec
import pytest
from click.testing import CliRunner

from fedtrain import __version__, events
from fedtrain.cli import cli
from fedtrain.config import Config
from fedtrain.digest import package_digest
from fedtrain.errors import ConnectError, JoinRefused, NotApproved
from fedtrain.messages import Failure, Train
from fedtrain.runtime.sites.approval import Approvals
from fedtrain.runtime.sites.gate import Gate
from fedtrain.runtime.sites.site import Site
from fedtrain.store import Ledger
from fedtrain.tracking.log import EventLog
from fedtrain.tracking.runs import summary_of
from fedtrain.transport.star import SiteEnd
from tests.allowed import allowed
from tests.federation import aggregator, certificates, echo_plus, hello, link, random_arena
from tests.limits import bounded
from tests.test_site import ABOUT, SCHEMA, Scripted, requests

MODEL = random_arena(1000, 0)


@pytest.fixture
def certs(tmp_path, monkeypatch):
    monkeypatch.setattr(SiteEnd, "PAUSES", (0.01, 1.0, 0.01))
    return certificates(tmp_path / "certs", "a")


def notices(found):
    return [each.text for each in found if isinstance(each, events.Notice)]


def test_e1_a_difference_between_both_ends_fedtrains_is_told_once_at_each(certs, tmp_path):
    """Both are in site_joined and in what the audit log keeps, with the version and the SHA-256."""
    there, here = [], []

    async def main():
        async with aggregator(certs, tmp_path, MODEL.schema, emit=there.append) as agg:
            for says in ({"version": "0.0.9", "package": "f" * 64}, {}):
                site = link(certs, "a", agg.cohort.port, tmp_path, emit=here.append)
                serving = asyncio.create_task(site.serve(hello(MODEL.schema, **says), echo_plus(1)))
                joins = len([each for each in here if isinstance(each, events.Admitted)])
                while len([each for each in here if isinstance(each, events.Admitted)]) == joins:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                for again in range(2 if says else 0):  # and joins again
                    site.cut(f"test {again}")
                    joins = len([each for each in here if isinstance(each, events.Admitted)])
                    while len([each for each in here if isinstance(each, events.Admitted)]) == joins:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

    bounded(main())
    own = f"fedtrain {__version__} (SHA-256 {package_digest()[:12]})"
    (line,) = [text for text in notices(there) if "runs fedtrain" in text]
    assert line.startswith(
        "a runs fedtrain 0.0.9 (SHA-256 ffffffffffff), this end " + own.removeprefix("fedtrain ")
    )
    (line,) = [text for text in notices(here) if "runs fedtrain" in text]
    assert line.startswith(f"the aggregator runs {own}, this end 0.0.9")
    joined = [each for each in there if isinstance(each, events.SiteJoined)]
    assert {(each.version, each.package) for each in joined} == {
        ("0.0.9", "f" * 64), (__version__, package_digest()),
    }  # fmt: skip
    admitted = [each for each in here if isinstance(each, events.Admitted)]
    assert {each.package for each in admitted} == {package_digest()}


def test_e7_a_site_whose_task_changed_says_so_and_leaves_instead_of_calling_for_ever(certs, tmp_path):
    """The aggregator has its reply first, so that no round waits for the site."""
    (tmp_path / "task.py").write_text("# approved\n")
    config = Config.of({"run": {"name": "r", "task": "task:T"}}, tmp_path)
    allowed(config, "a")
    (tmp_path / "task.py").write_text("changed = 1\n")
    with pytest.raises(NotApproved, match=r"task\.py changed since") as changed:
        Approvals(certs / "sites" / "a").check(config)
    (tmp_path / "site").mkdir()
    ledger = Ledger(tmp_path / "site")
    site = Site("a", SCHEMA, ledger, Scripted(changed.value, about=ABOUT))
    (request, *_) = requests(Train, tmp_path, config)
    replies, told = [], []

    async def main():
        async with aggregator(certs, tmp_path, SCHEMA, emit=told.append) as agg:
            mine = link(certs, "a", agg.cohort.port, tmp_path)
            serving = asyncio.create_task(
                mine.serve(hello(SCHEMA), site.fulfil, over=lambda: site.over, schemas=[SCHEMA])
            )
            await agg.cohort.members(1)
            async for name, reply in agg.cohort.exchange({"a": request}, 60):
                replies.append((name, reply))
            with pytest.raises(JoinRefused, match=r"task\.py changed since"):
                await serving

    bounded(main())
    ledger.close()
    ((name, reply),) = replies
    assert (name, isinstance(reply, Failure)) == ("a", True)
    assert "task.py changed since" in reply.reason


@pytest.mark.parametrize(
    ("why", "state"),
    [(None, "stopped"), (JoinRefused("other settings"), "rejected"), (NotApproved("changed"), "rejected")],
    ids=["lost", "refused", "changed"],
)
def test_e7_runs_and_the_exit_code_tell_a_rejected_site_from_a_stopped_one(why, state, tmp_path):
    log = EventLog(tmp_path / "r@a")
    log.emit(events.RunStarted(run="r", mode="site", rounds=3))
    log.emit(events.SiteLost(site="aggregator", reason="unreachable"))
    if why is not None:
        log.emit(events.SiteRefused(site="a", reason=str(why)))
    log.close()
    assert summary_of(tmp_path / "r@a").state == state
    log = EventLog(tmp_path / "r@a")
    log.emit(events.RunStarted(run="r", mode="site", rounds=3))  # started again
    log.close()
    assert summary_of(tmp_path / "r@a").state == "stopped"


@pytest.mark.parametrize(
    ("error", "code"), [(JoinRefused("no"), 4), (NotApproved("no"), 4), (ConnectError("no"), 1)],
    ids=["refused", "unapproved", "unreachable"],
)  # fmt: skip
def test_e7_a_rejected_site_ends_with_an_exit_code_of_its_own(error, code, tmp_path, monkeypatch):
    def rejected(*_, **__):
        raise error

    monkeypatch.setattr("fedtrain.api.site", rejected)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fedtrain.toml").write_text('[run]\nname = "r"\ntask = "task:T"\n')
    assert CliRunner().invoke(cli, ["site", "a"]).exit_code == code


def test_e7_a_reason_is_told_once_and_again_after_an_answer(tmp_path):
    found, config = [], Config.of({"run": {"name": "r"}}, tmp_path)
    gate, why = Gate(found.append), ["not pinned"]
    gate.asked["policy.pin_members"] = lambda request: why[0]
    (request, second, third, *_) = requests(Train, tmp_path, config)
    for attempt in (request, second, third):
        assert gate.refusal(attempt) == "not pinned"
    assert len(found) == 1
    why[0] = ""
    assert gate.refusal(request) == ""
    gate.withheld(request, msgspec.structs.replace(request), leaving=True)
    why[0] = "not pinned"
    gate.refusal(request)
    assert [each.reason for each in found] == ["not pinned", "not pinned"]
