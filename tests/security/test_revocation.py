"""S6: a revoked certificate is refused within seconds, without a restart, and its open streams are cut."""

import asyncio
import contextlib
import re
import shutil
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedtrain import pki
from fedtrain.errors import CertificateError, ConfigError, ConnectError, JoinRefused
from fedtrain.exchange import gather
from fedtrain.messages import Failure, Train, Update
from fedtrain.pki import Credentials, Revoked, Verifier, issue, revocation, revoke, revoke_issuing
from fedtrain.pki.callers import Callers
from fedtrain.pki.identity import USAGE, Current
from fedtrain.pki.proof import AggregatorCheck, prove
from fedtrain.transport.star import SiteEnd
from tests.federation import aggregator, certificates, echo_plus, hello, link, random_arena, tls
from tests.limits import WAIT_S, bounded

MODEL = random_arena(1000, 0)


@pytest.fixture
def certs(tmp_path):
    return certificates(tmp_path / "certs", "a", "b")


@contextlib.asynccontextmanager
async def watched(certs, folder, **options):
    """An aggregator that looks at the list as `fedtrain aggregator` does."""
    who = Callers(Credentials.load(certs / "aggregator"), certs)
    prove_ = lambda site, nonce: (prove(Credentials.load(certs / "aggregator"), site, nonce), who.lists)
    async with aggregator(certs, folder, MODEL.schema, identify=who.identify, prove=prove_, **options) as agg:
        watching = asyncio.create_task(
            who.watch(
                agg.cohort.cut,
                lambda event: agg.events.append((event.kind, event.fields())),
                agg.cohort.pass_on,
            )
        )
        try:
            yield agg
        finally:
            watching.cancel()


def test_s06_a_site_revoked_in_the_middle_of_a_round_is_cut_off_and_the_round_ends_without_it(
    certs, tmp_path, monkeypatch
):
    monkeypatch.setattr(revocation, "RELOAD_S", 0.05)

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
    (notice,) = notices
    assert re.fullmatch("b is cut off: b.site.*its certificate [0-9A-F]+ was revoked.*", notice["text"])


def test_s06_a_revoked_site_that_calls_again_is_told_so_and_never_joins(certs, tmp_path):
    revoke(certs, ["b"])

    async def run():
        async with asyncio.timeout(60), watched(certs, tmp_path) as agg:
            with pytest.raises(JoinRefused, match="was revoked"):  # it calls no more (E7)
                await link(certs, "b", agg.cohort.port, tmp_path).serve(hello(MODEL.schema), echo_plus(1))
            return agg.of("site_joined"), agg.of("join_refused")

    joined, refused = asyncio.run(run())
    assert not joined
    assert "was revoked" in refused[0]["reason"]


def test_s06_a_damaged_list_is_told_and_what_was_known_goes_on_counting(certs, tmp_path, monkeypatch):
    monkeypatch.setattr(revocation, "RELOAD_S", 0.02)
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
            watching = asyncio.create_task(who.watch(lambda site, reason, final: None, emit))
            await heard.wait()
            await asyncio.sleep(0.1)  # and looks again, several times
            watching.cancel()

    asyncio.run(run())
    assert told == ["revoked.pem: not a revocation list of this federation"]
    with pytest.raises(CertificateError, match="was revoked"):
        who.identify(chain)
    with pytest.raises(CertificateError, match="not a revocation list"):
        Callers(Credentials.load(certs / "aggregator"), certs)


# --- the aggregator's certificate


def lists_of(certs):
    return (certs / "revoked.pem").read_bytes()


def check_of(certs, site, folder, emit=lambda event: None):
    """The check of a site that has its lists of revoked certificates in `folder`."""
    folder.mkdir(exist_ok=True)
    return AggregatorCheck(Credentials.load(certs / "sites" / site), folder, emit)


def test_s06_a_site_leaves_an_aggregator_that_was_revoked_and_comes_back_to_a_new_certificate(
    certs, tmp_path, monkeypatch
):
    monkeypatch.setattr(revocation, "RELOAD_S", 0.05)
    monkeypatch.setattr(SiteEnd, "PAUSES", (0.01, 1.0, 0.01))
    here = tmp_path / "at-a"

    async def main():
        lost = asyncio.Queue()

        def emit(event):
            if event.kind == "site_lost":
                lost.put_nowait(event.reason)

        check = check_of(certs, "a", here)
        async with aggregator(certs, tmp_path / "first", MODEL.schema) as first:
            site = link(certs, "a", first.cohort.port, tmp_path, emit=emit, trust=check)
            serving = asyncio.create_task(site.serve(hello(MODEL.schema), echo_plus(1)))
            watching = asyncio.create_task(check.watch(site.cut, Current(certs / "sites" / "a")))
            assert await first.cohort.members(1) == ["a"]
            revoke(certs, ["aggregator"])
            shutil.copy(certs / "revoked.pem", here)
            told = await lost.get()
            while not [f for f in first.of("site_state") if "refuses" in f["state"]]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while not first.of("site_lost"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            port = first.cohort.port
        issue(certs, "aggregator")
        async with aggregator(certs, tmp_path / "second", MODEL.schema, port=port) as second:
            assert await second.cohort.members(1) == ["a"]
            for task in (serving, watching):
                task.cancel()
            await asyncio.gather(serving, watching, return_exceptions=True)
        return told

    told = bounded(main())
    assert "this site refuses the aggregator: aggregator.fedtrain.fedtrain: its certificate" in told
    assert "was revoked" in told


def test_a_site_that_is_told_to_stop_while_it_leaves_its_aggregator_stops(certs, tmp_path):
    async def main():
        async with aggregator(certs, tmp_path, MODEL.schema) as agg:
            site = link(certs, "a", agg.cohort.port, tmp_path)
            serving = asyncio.create_task(site.serve(hello(MODEL.schema), echo_plus(1)))
            assert await agg.cohort.members(1) == ["a"]
            site.cut("its certificate was revoked")
            serving.cancel()
            done, _ = await asyncio.wait([serving], timeout=WAIT_S)
            return serving in done and serving.cancelled()

    assert bounded(main())


def test_s06_an_aggregator_passes_new_lists_on_to_its_sites_which_keep_them(certs, tmp_path, monkeypatch):
    monkeypatch.setattr(revocation, "RELOAD_S", 0.05)

    async def main():
        check = check_of(certs, "a", tmp_path / "at-a")
        async with watched(certs, tmp_path) as agg:
            site = link(certs, "a", agg.cohort.port, tmp_path, trust=check)
            serving = asyncio.create_task(site.serve(hello(MODEL.schema), echo_plus(1)))
            await agg.cohort.members(1)
            (serial,) = revoke(certs, ["b"])
            while not check.revoked([serial]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    bounded(main())
    assert lists_of(tmp_path / "at-a") == lists_of(certs)


def test_s06_a_proof_of_the_aggregator_serves_for_one_hello_of_one_site_alone(certs, tmp_path):
    mine = Credentials.load(certs / "aggregator")
    check = check_of(certs, "a", tmp_path / "at-a")
    nonce = check.nonce()
    check.welcomed(prove(mine, "a", nonce), b"")
    site = Credentials.load(certs / "sites" / "b")
    for proof, why in (
        (prove(mine, "b", nonce), "another Hello"),
        (prove(mine, "a", b"x" * 32), "another Hello"),
        (prove(site, "a", nonce), "is not the aggregator"),
        (b"", "not a proof"),
    ):
        with pytest.raises(ConnectError, match=f"this site refuses the aggregator: .*{why}"):
            check.welcomed(proof, b"")
    check.nonce()
    with pytest.raises(ConnectError, match="another Hello"):  # the proof of the session before
        check.welcomed(prove(mine, "a", nonce), b"")
    revoke(certs, ["aggregator"])
    with pytest.raises(ConnectError, match="was revoked"):  # by the list that comes with it
        check.welcomed(prove(mine, "a", check.nonce()), lists_of(certs))


# --- a stolen key of the issuing CA


def stolen(certs, name, role="site"):
    """Credentials that the thief of the issuing CA's key makes: the register knows nothing of them."""
    authority, key, now = (
        pki.Authority.load(certs),
        ec.generate_private_key(ec.SECP256R1()),
        datetime.now(UTC),
    )
    leaf = pki.sign(
        authority, key.public_key(), name, dns=[pki.dns_name(role, name, "fedtrain")], usages=[USAGE[role]],
        not_before=now - timedelta(hours=1), not_after=now + timedelta(days=300),
    )  # fmt: skip
    return pki.save(certs / "stolen" / name, leaf, authority, key)


def list_by(authority, number, serials=()):
    """A list of revoked certificates with any number."""
    now, pem = datetime.now(UTC), serialization.Encoding.PEM
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.certificate.subject)
    builder = builder.last_update(now).next_update(now + timedelta(days=300))
    builder = builder.add_extension(x509.CRLNumber(number), critical=False)
    for serial in serials:
        one = x509.RevokedCertificateBuilder().serial_number(int(serial, 16)).revocation_date(now).build()
        builder = builder.add_revoked_certificate(one)
    crl = builder.sign(authority.key, hashes.SHA256())
    return crl.public_bytes(pem) + authority.certificate.public_bytes(pem)


def test_s06_nobody_believes_a_certificate_of_an_issuing_ca_that_the_root_has_revoked(certs, tmp_path):
    ghost, sham = stolen(certs, "ghost"), stolen(certs, "aggregator", "aggregator")
    check = check_of(certs, "a", tmp_path / "at-a")
    Callers(Credentials.load(certs / "aggregator"), certs).identify(Credentials.load(ghost).chain)
    old = Credentials.load(certs / "sites" / "b").chain
    serial = revoke_issuing(certs)
    for role, name in (("aggregator", "aggregator"), ("site", "a"), ("site", "b")):
        issue(certs, role, name)
    nonce = check.nonce()
    for lists in (b"", lists_of(certs)):  # as passed on; and as it is here from now on
        if lists:
            with pytest.raises(ConnectError, match=f"issuing CA {serial} that"):
                check.welcomed(prove(Credentials.load(sham), "a", nonce), lists)
    check.welcomed(prove(Credentials.load(certs / "aggregator"), "a", nonce), b"")
    signer = pki.Signer.of(Credentials.load(ghost))
    with pytest.raises(CertificateError, match=r"issuing CA .* was revoked"):
        check.verifier.verify(signer.certificate, b"m", signer.sign(b"m"))

    async def main():
        async with watched(certs, tmp_path) as agg:
            async with asyncio.timeout(30):
                for name, folder in (("ghost", ghost), ("b", tmp_path / "old")):
                    if name == "b":
                        shutil.copytree(certs / "sites" / "b", folder)
                        (folder / "cert.pem").write_bytes(old)
                    site = link(certs, "a", agg.cohort.port, tmp_path / name, tls=tls(folder))
                    with pytest.raises(JoinRefused, match=r"issuing CA [0-9A-F]+ that signed it was revoked"):
                        await site.serve(hello(MODEL.schema), echo_plus(1))
                site = link(certs, "b", agg.cohort.port, tmp_path / "new")
                calling = asyncio.create_task(site.serve(hello(MODEL.schema), echo_plus(1)))
                assert await agg.cohort.members(1) == ["b"]
                calling.cancel()
                await asyncio.gather(calling, return_exceptions=True)

    bounded(main())


def test_s06_a_number_far_ahead_locks_no_later_list_out(certs, tmp_path):
    thief = pki.Authority.load(certs)
    revoked = Revoked(tmp_path / "kept.pem", Credentials.load(certs / "aggregator").root)
    for number in (2**150, int((datetime.now(UTC) + timedelta(days=2)).timestamp())):
        with pytest.raises(CertificateError, match="ahead of this machine's clock"):
            revoked.add(list_by(thief, number))
    all_sites = [Credentials.load(certs / "sites" / name).identity.serial for name in "ab"]
    revoked.add(list_by(thief, int(datetime.now(UTC).timestamp()) + 3600, all_sites))
    assert revoked(all_sites[:1])
    revoke_issuing(certs)
    revoked.add(lists_of(certs))
    assert not revoked(all_sites[:1])  # with its CA the thief's list is gone, and doesn't come back
    revoked.add(list_by(thief, int(datetime.now(UTC).timestamp()) + 7200, all_sites))
    assert not revoked(all_sites[:1])
    assert len(revoked.lists) == 1


def test_s06_an_issuing_cas_list_revokes_no_issuing_ca(certs, tmp_path):
    authority = pki.Authority.load(certs)
    revoked = Revoked(tmp_path / "kept.pem", Credentials.load(certs / "aggregator").root)
    serials = Verifier(Credentials.load(certs / "aggregator").root, "fedtrain").trust(
        Credentials.load(certs / "sites" / "a").chain
    ).serials  # fmt: skip
    revoked.add(list_by(authority, 7, serials[1:]))
    assert revoked(serials) == ""


def test_s06_to_revoke_the_issuing_ca_the_root_must_be_here(certs):
    (certs / "ca" / "root.key.pem").unlink()
    before = (certs / "ca" / "issuing.pem").read_bytes()
    with pytest.raises(ConfigError, match=r"bring root\.key\.pem"):
        revoke_issuing(certs)
    assert (certs / "ca" / "issuing.pem").read_bytes() == before


# --- freshness


def test_s06_past_its_end_a_list_lets_nobody_in_until_there_is_a_new_one(certs, tmp_path):
    clock, root = [datetime.now(UTC)], Credentials.load(certs / "aggregator").root
    issue(certs, "site", "a", days=300)
    revoke(certs, ["b"], days=7)
    revoked = Revoked(certs / "revoked.pem", root, now=lambda: clock[0])
    revoked.reload()
    verifier = Verifier(root, "fedtrain", revoked=revoked, now=lambda: clock[0])
    chain = Credentials.load(certs / "sites" / "a").chain
    verifier.trust(chain)
    clock[0] += timedelta(days=8)
    with pytest.raises(CertificateError, match=r"was good until .*`fedtrain certs revoke` without a name"):
        verifier.trust(chain)
    revoke(certs, [], now=clock[0])
    revoked.reload()
    verifier.trust(chain)


def test_s06_a_list_that_nears_its_end_is_told_once(certs, monkeypatch):
    monkeypatch.setattr(revocation, "RELOAD_S", 0.01)
    revoke(certs, ["b"], days=4)
    told = []

    async def main():
        revoked = Revoked(certs / "revoked.pem", Credentials.load(certs / "aggregator").root)
        looks = revoked.reloads(lambda event: told.append(event.text))
        for _ in range(3):
            await anext(looks)

    bounded(main())
    assert len(told) == 1
    assert "is good until" in told[0]


def test_s06_a_session_ends_when_its_certificate_expires(certs, monkeypatch):
    monkeypatch.setattr(revocation, "RELOAD_S", 0.01)
    clock = [datetime.now(UTC)]
    credentials = Credentials.load(certs / "aggregator")
    who = Callers(credentials, certs)
    who.verifier = Verifier(credentials.root, "fedtrain", revoked=who.revoked, now=lambda: clock[0])
    who.identify(Credentials.load(certs / "sites" / "a").chain)
    clock[0] += timedelta(days=31)

    async def main():
        cut = asyncio.get_running_loop().create_future()
        watching = asyncio.create_task(who.watch(lambda *said: cut.set_result(said), lambda event: None))
        said = await cut
        watching.cancel()
        return said

    site, why, final = bounded(main())
    assert (site, final) == ("a", False)
    assert "is valid from" in why
