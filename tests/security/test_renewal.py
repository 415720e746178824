"""S7: certificates are renewed while a run goes on; no process is started again."""

import asyncio
import shutil
import socket
import ssl
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner
from cryptography import x509

from fedtrain.cli import cli
from fedtrain.config import Config
from fedtrain.errors import CertificateError
from fedtrain.events import silent
from fedtrain.pki import Authority, Credentials, init, issue, renewal, revocation, revoke, sign
from fedtrain.pki.authority import pem
from fedtrain.pki.callers import Callers
from fedtrain.pki.enrolment import Codes, commitment, number_of, request
from fedtrain.pki.identity import USAGE, Current
from fedtrain.pki.proof import AggregatorCheck
from fedtrain.pki.roster import certificate_of
from fedtrain.runtime.auditing import audited
from fedtrain.runtime.peers import enrolment
from fedtrain.transport.star import SiteEnd
from fedtrain.transport.tls import Tls
from tests.federation import aggregator, certificates, echo_plus, hello, link, random_arena
from tests.limits import bounded
from tests.peers import village

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


# --- with nobody there


def old(certs, role, name="aggregator", days=30, **life):
    """A certificate of which less than a third is left."""
    issue(certs, role, name, days=days, now=datetime.now(UTC) - timedelta(days=days * 0.7), **life)
    return (certs / ("aggregator" if role == "aggregator" else f"sites/{name}") / "cert.pem").read_bytes()


def test_s07_with_the_issuing_key_an_aggregator_renews_its_own_and_its_sites_certificates(
    certs, tmp_path, monkeypatch
):
    """Nobody types anything, no process is started again, and no key moves."""
    monkeypatch.setattr(renewal, "LOOK_S", 0.05)
    mine, before = old(certs, "aggregator"), old(certs, "site", "a")
    keys = [(certs / folder / "key.pem").read_bytes() for folder in ("aggregator", "sites/a")]
    who, current = Callers(Credentials.load(certs / "aggregator"), certs), Current(certs / "aggregator")
    told = []

    async def main():
        own, check = Current(certs / "sites/a"), AggregatorCheck(
            Credentials.load(certs / "sites/a"), certs, told.append
        )  # fmt: skip
        async with aggregator(certs, tmp_path, MODEL.schema, identify=who.identify) as agg:
            site = link(certs, "a", agg.cohort.port, tmp_path, tls=fresh(certs / "sites/a"), trust=check)
            renewing = renewal.watch(
                certs, certs / "aggregator", current, told.append, who.that_count, agg.cohort.renew
            )
            tasks = [
                asyncio.create_task(site.serve(hello(MODEL.schema), echo_plus(1))),
                asyncio.create_task(check.watch(site.cut, own)),
                asyncio.create_task(renewing),
            ]
            while "a" not in who._seen or who._seen["a"][0] == before or current().chain == mine:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await agg.cohort.members(1) == ["a"]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    bounded(main())
    for folder in ("aggregator", "sites/a"):
        assert not renewal.due((certs / folder / "cert.pem").read_bytes(), datetime.now(UTC))
    assert [(certs / folder / "key.pem").read_bytes() for folder in ("aggregator", "sites/a")] == keys
    texts = [event.text for event in told if hasattr(event, "text")]
    assert sorted(t for t in texts if "was renewed" in t) == [
        "the certificate of a was renewed", "the certificate of aggregator was renewed",
    ]  # fmt: skip


def test_s07_a_site_keeps_no_certificate_of_another_name_key_root_or_that_ends_sooner(certs, tmp_path):
    folder, now = certs / "sites/a", datetime.now(UTC)
    old(certs, "site", "a")
    before = (folder / "cert.pem").read_bytes()
    good = renewal.renewed(certs, before, now)
    init(tmp_path / "other", "fedtrain")
    foreign = renewal.renewed(tmp_path / "other", before, now)
    other_name = (certs / "sites/b/cert.pem").read_bytes()
    copy = issue(certs, "site", "c")
    another_key = sign_for(certs, copy, "a")
    for chain in (foreign, other_name, another_key, before, b"", good + b" " * (1 << 16)):
        with pytest.raises(CertificateError):
            renewal.keep(folder, chain)
    assert (folder / "cert.pem").read_bytes() == before
    renewal.keep(folder, good)
    assert Credentials.load(folder).chain == good


def sign_for(certs, folder, name):
    """A certificate in another's name, of the key in this folder."""
    authority = Authority.load(certs)
    public = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes()).public_key()
    made = sign(
        authority, public, name, dns=[f"{name}.site.fedtrain.fedtrain"], usages=[USAGE["site"]],
        not_before=datetime.now(UTC) - timedelta(hours=1), not_after=datetime.now(UTC) + timedelta(days=60),
    )  # fmt: skip
    return pem(made) + pem(authority.certificate)


def test_s07_where_the_issuing_key_is_not_here_or_its_ca_ends_people_are_told_once(certs, monkeypatch):
    monkeypatch.setattr(renewal, "LOOK_S", 0.01)
    issue(certs, "aggregator", days=1000)  # as long as the issuing CA itself
    with pytest.raises(CertificateError, match="the issuing CA ends on"):
        renewal.renewed(certs, (certs / "aggregator/cert.pem").read_bytes(), datetime.now(UTC))
    before, told = old(certs, "aggregator"), []
    (certs / "ca/issuing.key.pem").rename(certs / "away")

    async def main():
        task = asyncio.create_task(
            renewal.watch(certs, certs / "aggregator", Current(certs / "aggregator"), told.append)
        )
        while not told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # and looks again, several times
        task.cancel()

    bounded(main())
    assert len(told) == 1
    assert "ends soon and can't be renewed: the issuing key is not in" in told[0].text
    assert (certs / "aggregator/cert.pem").read_bytes() == before


def test_s07_a_revoked_site_is_given_no_new_certificate(certs):
    chain = old(certs, "site", "a")
    who = Callers(Credentials.load(certs / "aggregator"), certs)
    assert who.identify(chain) == "a"
    assert who.that_count() == [("a", chain)]
    revoke(certs, ["a"])
    who.revoked.reload()
    assert who.that_count() == []


def test_s07_an_audit_log_is_signed_with_the_renewed_certificate(certs, tmp_path):
    """With the one of the start, the other end would dispute every head once that has ended."""
    config = Config.of({"run": {"name": "r"}}, tmp_path)
    log = audited(config, "a", silent, Current(certs / "sites/a"))
    first = log.statement().certificate
    issue(certs, "site", "a")
    second = log.statement().certificate
    log.close()
    assert first != second == (certs / "sites/a/cert.pem").read_bytes()


def test_s07_a_running_peer_enters_its_renewed_certificate_and_its_neighbours_have_it(tmp_path, monkeypatch):
    monkeypatch.setattr(enrolment, "RELOAD_S", 0.05)

    async def main():
        async with village(tmp_path / "v", "ab") as v:
            for name in "ab":
                v.start(name)
            entry = v.root / "roster/a.peer"
            await v.until(lambda: v.rounds_of("a") > 2 and v.rounds_of("b") > 2)
            lost = len(v.of("b", "site_lost"))  # of the start, when each is not yet on the other's roster
            issue(v.root / "certs", "site", "a")
            new = (v.root / "certs/sites/a/cert.pem").read_bytes()
            await v.until(lambda: certificate_of(entry.read_bytes()) == new)
            since = v.rounds_of("b")
            await v.until(lambda: v.rounds_of("b") > since + 2 and v.are_with("ab", "ab"))
            assert len(v.of("b", "site_lost")) == lost

    bounded(main())


# --- by hand, where a site made its key itself


def test_d3_a_renewal_of_a_site_that_enrolled_by_a_code_as_it_is_typed(tmp_path, monkeypatch):
    """`certs issue north` at the authority, and the copy of one file: no key moves, and none is made."""
    here, there = tmp_path / "authority", tmp_path / "north"
    for folder in (here, there):
        folder.mkdir()
        (folder / "fedtrain.toml").write_text('[run]\nname = "ward"\ntask = "task:T"\n')
    init(here / "certs", "ward")
    codes = Codes(here / "certs")
    code = codes.invite("north", timedelta(days=7))
    own = there / "certs/sites/north"
    csr, public = request(own)
    number = number_of(own, code)
    codes.commit(code, commitment(number, public))
    codes.ask(code, csr, number)
    type_ = CliRunner().invoke

    monkeypatch.chdir(here)
    unsigned = type_(cli, ["certs", "sign", "certs/requests/north.csr"])
    assert unsigned.exit_code == 1
    assert "not signed: certs/requests/north.csr" in unsigned.output
    refused = type_(cli, ["certs", "issue", "north"])  # the request alone is there
    assert refused.exit_code == 1
    assert "north made its key itself" in refused.output
    assert not (here / "certs/sites").exists()
    signed = type_(cli, ["certs", "sign", "certs/requests/north.csr", "--days", "1"], input="y\n")
    assert signed.exit_code == 0, signed.output
    for name in ("cert.pem", "root.pem"):
        shutil.copy(here / "certs/sites/north" / name, own)
    before = Credentials.load(own)

    again = type_(cli, ["certs", "issue", "north"])
    assert again.exit_code == 0, again.output
    assert "cert.pem is the certificate of north; copy it to north, whose key stays there" in again.output
    shutil.copy(here / "certs/sites/north/cert.pem", own)  # as the page says: this file alone
    now = Credentials.load(own)
    assert now.key == before.key
    assert now.identity.not_after > before.identity.not_after
    assert [path.name for path in (here / "certs/sites/north").iterdir() if "key" in path.name] == []

    # a revoked key is not let in again by a renewal; nor is a certificate that another made
    type_(cli, ["certs", "revoke", "north"])
    revoked = type_(cli, ["certs", "issue", "north"])
    assert revoked.exit_code == 1
    assert "was revoked, and a new one would be for the same key" in revoked.output
    init(tmp_path / "other", "ward")
    foreign = issue(tmp_path / "other", "site", "south")
    (here / "certs/sites/south").mkdir()
    shutil.copy(foreign / "cert.pem", here / "certs/sites/south")
    planted = type_(cli, ["certs", "issue", "south"])
    assert planted.exit_code == 1
    assert "is not a certificate that this authority gave" in planted.output
