"""S6: a revoked certificate is refused within seconds, without a restart, and its open streams are cut."""

import asyncio
import contextlib

import pytest

from fedtrain.errors import CertificateError, JoinRefused
from fedtrain.exchange import gather
from fedtrain.messages import Failure, Train, Update
from fedtrain.pki import Credentials, callers, issue, revoke
from fedtrain.pki.callers import Callers
from tests.federation import aggregator, certificates, echo_plus, hello, link, random_arena

MODEL = random_arena(1000, 0)


@pytest.fixture
def certs(tmp_path):
    return certificates(tmp_path / "certs", "a", "b")


@contextlib.asynccontextmanager
async def watched(certs, folder):
    """An aggregator that looks at the list as `fedtrain aggregator` does."""
    who = Callers(Credentials.load(certs / "aggregator"), certs)
    async with aggregator(certs, folder, MODEL.schema, identify=who.identify) as agg:
        watching = asyncio.create_task(
            who.watch(agg.cohort.cut, lambda event: agg.events.append((event.kind, event.fields())))
        )
        try:
            yield agg
        finally:
            watching.cancel()


def test_s06_a_site_revoked_in_the_middle_of_a_round_is_cut_off_and_the_round_ends_without_it(
    certs, tmp_path, monkeypatch
):
    monkeypatch.setattr(callers, "RELOAD_S", 0.05)

    async def run():
        training = asyncio.Event()

        async def never(request):
            training.set()
            await asyncio.Event().wait()

        async with asyncio.timeout(60), watched(certs, tmp_path) as agg:
            port = agg.cohort.port
            schema, links = MODEL.schema, {name: link(certs, name, port, tmp_path) for name in "ab"}
            a = asyncio.create_task(links["a"].serve(hello(schema), echo_plus(1), schemas=[schema]))
            b = asyncio.create_task(links["b"].serve(hello(schema), never, schemas=[schema]))
            assert await agg.cohort.members(2) == ["a", "b"]
            request = Train(id="r/0/0/train", round=0, weights=MODEL)
            round_ = asyncio.create_task(gather(agg.cohort, dict.fromkeys("ab", request), 3600.0))
            await training.wait()
            revoke(certs, ["b"])
            replies = await round_
            with pytest.raises(JoinRefused, match="was revoked"):
                await b
            with pytest.raises(CertificateError, match="was revoked"):  # its old certificate, once more
                Callers(Credentials.load(certs / "aggregator"), certs).identify(
                    Credentials.load(certs / "sites/b").chain
                )
            issue(certs, "site", "b")
            back = asyncio.create_task(
                link(certs, "b", port, tmp_path / "again").serve(hello(MODEL.schema), echo_plus(2))
            )
            assert await agg.cohort.members(2) == ["a", "b"]
            for task in (a, back):
                task.cancel()
            await asyncio.gather(a, back, return_exceptions=True)
            return replies, agg.of("notice")

    replies, notices = asyncio.run(run())
    assert isinstance(replies["a"], Update)
    assert isinstance(replies["b"], Failure)
    assert "was revoked" in replies["b"].reason
    assert [n["text"] for n in notices] == ["b is cut off: its certificate was revoked"]


def test_s06_a_revoked_site_that_calls_again_is_told_so_and_never_joins(certs, tmp_path):
    revoke(certs, ["b"])

    async def run():
        told = asyncio.Event()
        lost = []

        def emit(event):
            kind, fields = event.kind, event.fields()
            if kind == "site_lost":
                lost.append(fields["reason"])
                told.set()

        async with asyncio.timeout(60), watched(certs, tmp_path) as agg:
            calling = asyncio.create_task(
                link(certs, "b", agg.cohort.port, tmp_path, emit=emit).serve(
                    hello(MODEL.schema), echo_plus(1)
                )
            )
            await told.wait()
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            return lost, agg.of("site_joined"), agg.of("join_refused")

    lost, joined, refused = asyncio.run(run())
    assert not joined
    assert "was revoked" in lost[0]
    assert "was revoked" in refused[0]["reason"]


def test_s06_a_damaged_list_is_told_and_what_was_known_goes_on_counting(certs, tmp_path, monkeypatch):
    monkeypatch.setattr(callers, "RELOAD_S", 0.02)
    revoke(certs, ["b"])
    who = Callers(Credentials.load(certs / "aggregator"), certs)
    chain = Credentials.load(certs / "sites/b").chain
    (certs / "revoked.pem").write_bytes(b"garbage")
    told = []

    async def run():
        heard = asyncio.Event()

        def emit(event):
            told.append(event.text)
            heard.set()

        async with asyncio.timeout(30):
            watching = asyncio.create_task(who.watch(lambda site, reason: None, emit))
            await heard.wait()
            await asyncio.sleep(0.1)  # and looks again, several times
            watching.cancel()

    asyncio.run(run())
    assert told == ["revoked.pem: not a revocation list of this federation"]
    with pytest.raises(CertificateError, match="was revoked"):
        who.identify(chain)
    with pytest.raises(CertificateError, match="not a revocation list"):
        Callers(Credentials.load(certs / "aggregator"), certs)
