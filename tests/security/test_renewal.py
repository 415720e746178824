"""S7: certificates are renewed while a run goes on; no process is started again."""

import asyncio
import socket
import ssl

import pytest
from cryptography import x509

from fedtrain.pki import Credentials, issue, revocation
from fedtrain.pki.callers import Callers
from fedtrain.pki.identity import Current
from fedtrain.pki.proof import AggregatorCheck
from fedtrain.transport.star import SiteEnd
from fedtrain.transport.tls import Tls
from tests.federation import aggregator, certificates, echo_plus, hello, link, random_arena
from tests.limits import bounded

MODEL = random_arena(1000, 0)


@pytest.fixture
def certs(tmp_path, monkeypatch):
    monkeypatch.setattr(revocation, "RELOAD_S", 0.05)
    monkeypatch.setattr(SiteEnd, "PAUSES", (0.01, 1.0, 0.01))
    return certificates(tmp_path / "certs", "a", "b")


def fresh(folder):
    """What GrpcTransport asks at each connection."""
    current = Current(folder)
    return lambda: Tls(*current.parts())


def shown(certs, port):
    """The serial of the certificate that the aggregator shows to a new connection of site b."""
    context = ssl.create_default_context(cafile=certs / "sites/b/root.pem")
    context.load_cert_chain(certs / "sites/b/cert.pem", certs / "sites/b/key.pem")
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="aggregator.fedtrain.fedtrain") as tls,
    ):
        return x509.load_der_x509_certificate(tls.getpeercert(binary_form=True)).serial_number


def test_s07_an_aggregator_shows_its_renewed_certificate_and_no_session_ends(certs, tmp_path):
    async def main():
        async with aggregator(certs, tmp_path, MODEL.schema, tls=fresh(certs / "aggregator")) as agg:
            site = link(certs, "a", agg.cohort.port, tmp_path)
            serving = asyncio.create_task(site.serve(hello(MODEL.schema), echo_plus(1)))
            await agg.cohort.members(1)
            before = await asyncio.to_thread(shown, certs, agg.cohort.port)
            issue(certs, "aggregator")
            after = await asyncio.to_thread(shown, certs, agg.cohort.port)
            lost = agg.of("site_lost")
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            return before, after, lost

    before, after, lost = bounded(main())
    now = Credentials.load(certs / "aggregator").identity.serial
    assert before != after == int(now, 16)
    assert lost == []


def test_s07_a_site_joins_again_with_its_renewed_certificate_by_itself(certs, tmp_path):
    who = Callers(Credentials.load(certs / "aggregator"), certs)

    async def main():
        own, check = Current(certs / "sites/a"), AggregatorCheck(
            Credentials.load(certs / "sites/a"), tmp_path / "none", lambda event: None
        )  # fmt: skip
        async with aggregator(certs, tmp_path, MODEL.schema, identify=who.identify) as agg:
            site = link(certs, "a", agg.cohort.port, tmp_path, tls=fresh(certs / "sites/a"), trust=check)
            tasks = [
                asyncio.create_task(site.serve(hello(MODEL.schema), echo_plus(1))),
                asyncio.create_task(check.watch(site.cut, own)),
            ]
            await agg.cohort.members(1)
            issue(certs, "site", "a")
            new = (certs / "sites/a/cert.pem").read_bytes()
            while who._seen["a"][0] != new:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await agg.cohort.members(1) == ["a"]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    bounded(main())


def test_s07_files_that_are_no_good_are_told_and_the_last_good_ones_count(certs):
    current = Current(certs / "sites/a")
    before, path = current(), certs / "sites/a/cert.pem"
    path.write_bytes(b"half a cert")
    assert current() == before
    assert "not a PEM certificate" in current.trouble
    other = Credentials.load(certs / "sites/b")
    path.write_bytes(other.chain)
    assert current() == before
    assert "do not belong together" in current.trouble
    path.write_bytes(before.chain)
    issue(certs, "site", "a")
    assert current().identity.serial != before.identity.serial
    assert current.trouble == ""
