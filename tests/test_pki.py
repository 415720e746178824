"""Certificates say one thing each, and files that don't fit together are told apart before a handshake."""

import os
import re
import shutil
import ssl
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedtrain import pki
from fedtrain.errors import CertificateError, ConfigError

NOW = datetime.now(UTC)
openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is not here: apt-get install openssl"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A federation "ward" with an aggregator and two sites. Tests that write copy it first."""
    certs = tmp_path_factory.mktemp("pki") / "certs"
    pki.init(certs, "ward", now=NOW)
    pki.issue(certs, "aggregator", now=NOW)
    for name in ("north", "south"):
        pki.issue(certs, "site", name, now=NOW)
    return certs


@pytest.fixture
def certs(made, tmp_path):
    return shutil.copytree(made, tmp_path / "certs")


def odd_leaf(certs, **changes):
    """A site's leaf with something wrong about it, signed by the real authority."""
    says = {
        "dns": ["north.site.ward.fedtrain"],
        "usages": [ExtendedKeyUsageOID.CLIENT_AUTH],
        "not_before": NOW,
        "not_after": NOW + timedelta(days=1),
    }
    authority = pki.Authority.load(certs)
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    return pki.sign(authority, public, "north", **says | changes).public_bytes(serialization.Encoding.PEM)


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- What is made


def test_a_site_folder_holds_all_that_the_site_needs_and_only_its_key_is_secret(made):
    folder = made / "sites" / "north"
    assert {p.name: p.stat().st_mode & 0o777 for p in folder.iterdir()} == {
        "key.pem": 0o600, "cert.pem": 0o644, "root.pem": 0o644,
    }  # fmt: skip
    assert (folder / "key.pem").read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")  # PKCS8
    assert (folder / "cert.pem").read_bytes().count(b"BEGIN CERTIFICATE") == 2
    assert (folder / "root.pem").read_bytes() == (made / "ca" / "root.pem").read_bytes()


def test_key_modes_do_not_depend_on_the_umask(tmp_path):
    old = os.umask(0)
    try:
        pki.init(tmp_path)
        pki.issue(tmp_path, "aggregator")
    finally:
        os.umask(old)
    assert {p.stat().st_mode & 0o777 for p in tmp_path.rglob("*key.pem")} == {0o600}


def test_leaves_name_role_and_site_and_may_do_only_their_own_half(made):
    for folder, dns, usage in (
        ("aggregator", "aggregator.ward.fedtrain", ExtendedKeyUsageOID.SERVER_AUTH),
        ("sites/north", "north.site.ward.fedtrain", ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        leaf = x509.load_pem_x509_certificate((made / folder / "cert.pem").read_bytes())
        extension = leaf.extensions.get_extension_for_class
        assert list(extension(x509.SubjectAlternativeName).value) == [x509.DNSName(dns)]
        assert list(extension(x509.ExtendedKeyUsage).value) == [usage]
        assert extension(x509.BasicConstraints).value.ca is False
        assert leaf.subject.rfc4514_string() == f"CN={folder.split('/')[-1]}"
        assert leaf.not_valid_before_utc < datetime.now(UTC) - timedelta(minutes=4)


def test_the_issuing_ca_lives_a_year_at_most_and_signs_only_leaves_of_its_federation(made):
    issuing = x509.load_pem_x509_certificate((made / "ca" / "issuing.pem").read_bytes())
    extension = issuing.extensions.get_extension_for_class
    assert issuing.not_valid_after_utc <= datetime.now(UTC) + timedelta(days=365)
    assert extension(x509.BasicConstraints).value.path_length == 0
    assert extension(x509.NameConstraints).value.permitted_subtrees == [x509.DNSName("ward.fedtrain")]


def test_a_second_init_changes_nothing_and_says_what_to_do(certs):
    before = files(certs)
    with pytest.raises(ConfigError, match=r"never overwritten.*certs issue NAME.*To renew"):
        pki.init(certs, "ward", now=NOW)
    assert files(certs) == before


def test_the_issuing_ca_is_renewed_under_the_same_root_and_old_leaves_stay_good(certs):
    (certs / "ca" / "issuing.pem").unlink()
    (certs / "ca" / "issuing.key.pem").unlink()
    root = (certs / "ca" / "root.pem").read_bytes()
    pki.init(certs, "ward", now=NOW)
    pki.issue(certs, "site", "north")
    assert (certs / "ca" / "root.pem").read_bytes() == root
    for name in ("north", "south"):
        pki.Credentials.load(certs / "sites" / name)


def test_an_offline_root_is_asked_for_only_to_renew_the_issuing_ca(certs):
    (certs / "ca" / "root.key.pem").unlink()
    pki.issue(certs, "site", "north")
    (certs / "ca" / "issuing.pem").unlink()
    with pytest.raises(ConfigError, match=r"bring root\.key\.pem back"):
        pki.init(certs, "ward", now=NOW)


def test_s7_renewing_one_site_touches_no_other_file_and_gives_a_new_serial(certs):
    before, old = files(certs), pki.Credentials.load(certs / "sites" / "north")
    pki.issue(certs, "site", "north", days=60)
    new = pki.Credentials.load(certs / "sites" / "north")
    changed = {path for path, data in files(certs).items() if before.get(path) != data}
    assert {str(p) for p in changed} == {"sites/north/cert.pem", "ca/issued"}
    assert new.identity.serial != old.identity.serial
    assert new.identity.not_after > old.identity.not_after


def test_a_leaf_never_outlives_the_authority_that_signed_it(certs):
    pki.issue(certs, "site", "north", days=5000)
    end = pki.Authority.load(certs).certificate.not_valid_after_utc
    assert pki.Credentials.load(certs / "sites" / "north").identity.not_after == end


def test_an_expired_authority_says_how_to_renew_it(tmp_path):
    pki.init(tmp_path, now=NOW - timedelta(days=400))
    with pytest.raises(CertificateError, match=r"issuing CA.*expired on.*fedtrain certs init"):
        pki.issue(tmp_path, "site", "north")


def test_s8_with_a_signing_request_the_key_never_leaves_the_site(certs):
    key = ec.generate_private_key(ec.SECP256R1())
    wish = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "aggregator")])  # not granted
    request = x509.CertificateSigningRequestBuilder().subject_name(wish).sign(key, hashes.SHA256())
    folder = pki.issue(certs, "site", "west", csr=request.public_bytes(serialization.Encoding.PEM))
    assert sorted(p.name for p in folder.iterdir()) == ["cert.pem", "root.pem"]
    leaf = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
    assert leaf.public_key() == key.public_key()
    assert pki.identity_of((folder / "cert.pem").read_bytes()).name == "west"


def test_a_request_that_is_none_or_is_not_signed_by_its_own_key_is_refused(certs):
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    der = bytearray(request.public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    forged = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)
    for csr, why in ((b"hello", "not a PEM"), (forged, "sign the request")):
        with pytest.raises(ConfigError, match=why):
            pki.issue(certs, "site", "west", csr=csr)
    assert not (certs / "sites" / "west").exists()


@pytest.mark.parametrize(
    "name", ["", "North", "a.b", "-a", "a-", "a_b", "ä", "a" * 64, "../x", "a\n", "aggregator"]
)
def test_a_name_that_is_no_dns_label_is_refused_before_anything_is_written(certs, name):
    before = files(certs)
    with pytest.raises(ConfigError, match=r"use 1 to 63|own name"):
        pki.issue(certs, "site", name, now=NOW)
    assert files(certs) == before


def test_issuing_without_an_authority_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match="fedtrain certs init"):
        pki.issue(tmp_path, "site", "north")


# --- What is read


def test_identity_is_what_was_issued(made):
    folder = made / "sites" / "north"
    identity = pki.Credentials.load(folder).identity
    assert identity == pki.identity_of((folder / "cert.pem").read_bytes())
    assert (identity.role, identity.name, identity.federation) == ("site", "north", "ward")
    assert str(identity) == "north.site.ward.fedtrain"
    aggregator = pki.Credentials.load(made / "aggregator").identity
    assert str(aggregator) == pki.aggregator_target("ward")
    assert replace(aggregator, serial="", not_after=NOW) == pki.Identity(
        "aggregator", "aggregator", "ward", "", NOW
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dns": ["north.site.ward.fedtrain", "south.site.ward.fedtrain"]}, "2 names"),
        ({"dns": []}, "0 names"),
        ({"dns": ["example.org"]}, "neither"),
        ({"dns": ["north.site.ward.fedtrain.example.org"]}, "neither"),
        ({"dns": ["a.north.site.ward.fedtrain"]}, "neither"),
        ({"dns": ["site.ward.fedtrain"]}, "neither"),
        ({"usages": [ExtendedKeyUsageOID.SERVER_AUTH]}, "clientAuth only"),
        ({"usages": [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]}, "clientAuth only"),
        ({"dns": ["aggregator.ward.fedtrain"]}, "serverAuth only"),
    ],
)
def test_a_certificate_with_more_or_other_than_one_name_of_its_role_has_no_identity(made, changes, why):
    with pytest.raises(CertificateError, match=why):
        pki.identity_of(odd_leaf(made, **changes))


@pytest.mark.parametrize(
    "pem", [b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_bytes_that_are_no_certificate_have_no_identity(pem):
    with pytest.raises(CertificateError, match="not a PEM certificate"):
        pki.identity_of(pem)


def test_the_authority_has_no_identity_of_its_own(made):
    with pytest.raises(CertificateError, match="not a fedtrain certificate"):
        pki.identity_of((made / "ca" / "issuing.pem").read_bytes())


def test_s8_a_key_that_others_can_read_is_refused_with_the_command_that_helps(certs):
    key = certs / "sites" / "north" / "key.pem"
    key.chmod(0o640)
    with pytest.raises(CertificateError, match=r"mode 0640\): chmod 600 .*key\.pem"):
        pki.Credentials.load(key.parent)


def test_a_misspelt_site_is_told_the_nearest_or_which_there_are(tmp_path):
    pki.init(tmp_path)
    for name in ("basel", "bern", "chur"):
        pki.issue(tmp_path, "site", name)
    for misspelt, says in (("berne", "Did you mean bern?"), ("zug", "Found here: basel, bern, chur.")):
        with pytest.raises(
            CertificateError, match=rf"sites/{misspelt} does not exist. {re.escape(says)} `fed"
        ):
            pki.Credentials.load(tmp_path / "sites" / misspelt)
    with pytest.raises(ConfigError, match=r"is this site's. Did you mean basel\?"):
        pki.revoke(tmp_path, ["bassel"])


@pytest.mark.parametrize("name", ["key.pem", "cert.pem", "root.pem"])
def test_a_missing_file_is_named(certs, name):
    (certs / "aggregator" / name).unlink()
    with pytest.raises(CertificateError, match=rf"{name} does not exist.*certs issue aggregator"):
        pki.Credentials.load(certs / "aggregator")


def test_a_key_of_another_site_is_refused(certs):
    shutil.copy(certs / "sites" / "south" / "key.pem", certs / "sites" / "north" / "key.pem")
    with pytest.raises(CertificateError, match="do not belong together"):
        pki.Credentials.load(certs / "sites" / "north")


def test_a_key_that_is_no_key_is_refused(certs):
    (certs / "sites" / "north" / "key.pem").write_text("secret")
    with pytest.raises(CertificateError, match="not an unencrypted PEM private key"):
        pki.Credentials.load(certs / "sites" / "north")


def test_a_root_of_another_authority_of_the_same_name_is_refused(certs, tmp_path):
    pki.init(tmp_path / "other", "ward")
    shutil.copy(tmp_path / "other" / "ca" / "root.pem", certs / "sites" / "north" / "root.pem")
    with pytest.raises(CertificateError, match=r"not signed under root\.pem"):
        pki.Credentials.load(certs / "sites" / "north")


def test_s3_an_expired_certificate_names_its_dates_and_the_command_that_renews_it(certs):
    pki.issue(certs, "site", "north", days=10, now=NOW - timedelta(days=20))
    end = NOW - timedelta(days=10)
    with pytest.raises(CertificateError, match=rf"has expired.*{end:%Y-%m-%d}.*`fedtrain certs issue north`"):
        pki.Credentials.load(certs / "sites" / "north")


def test_s3_a_certificate_of_the_future_blames_the_clock(certs):
    pki.issue(certs, "site", "north", now=NOW + timedelta(days=2))
    with pytest.raises(CertificateError, match=r"not valid yet.*clock"):
        pki.Credentials.load(certs / "sites" / "north")


def test_a_ca_key_of_a_foreign_kind_is_named(certs):
    pem = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (certs / "ca" / "issuing.key.pem").write_bytes(pem)
    with pytest.raises(CertificateError, match=r"issuing\.key\.pem: not an elliptic-curve key"):
        pki.issue(certs, "site", "north")


# --- What others make of it


def verdict(certs, folder, purpose, root=None):
    """What `openssl verify` says of a folder's chain."""
    command = ["openssl", "verify", "-x509_strict", "-purpose", purpose]
    command += ["-CAfile", str(root or certs / "ca" / "root.pem")]
    command += ["-untrusted", str(certs / "ca" / "issuing.pem"), str(certs / folder / "cert.pem")]
    return subprocess.run(command, capture_output=True, text=True).stderr


@openssl
def test_openssl_accepts_each_leaf_for_its_own_purpose_only(made):
    assert verdict(made, "aggregator", "sslserver") == ""
    assert verdict(made, "sites/north", "sslclient") == ""
    assert "purpose" in verdict(made, "aggregator", "sslclient")
    assert "purpose" in verdict(made, "sites/north", "sslserver")


@openssl
def test_s2_openssl_refuses_a_leaf_of_another_root_of_the_same_name(made, tmp_path):
    pki.init(tmp_path, "ward")
    assert "error" in verdict(made, "sites/north", "sslclient", root=tmp_path / "ca" / "root.pem")


@openssl
def test_openssl_refuses_a_name_outside_the_federation(certs):
    (certs / "sites" / "north" / "cert.pem").write_bytes(odd_leaf(certs, dns=["north.site.other.fedtrain"]))
    assert "permitted subtree violation" in verdict(certs, "sites/north", "sslclient")


def handshake(server, client, target):
    """A TLS handshake in memory; (what the server knows of the client, the version) or an SSLError."""
    contexts = []
    for folder, protocol in ((server, ssl.PROTOCOL_TLS_SERVER), (client, ssl.PROTOCOL_TLS_CLIENT)):
        context = ssl.SSLContext(protocol)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        context.load_verify_locations(folder / "root.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        contexts.append(context)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        contexts[0].wrap_bio(up, down, server_side=True),
        contexts[1].wrap_bio(down, up, server_hostname=target),
    ]
    waiting = list(ends)
    for end in ends[::-1] * 6:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        waiting = [w for w in waiting if w is not end]
    assert waiting == []
    return ssl.DER_cert_to_PEM_cert(ends[0].getpeercert(binary_form=True)).encode(), ends[0].version()


def test_a_handshake_tells_each_end_who_the_other_is(made):
    pem, version = handshake(made / "aggregator", made / "sites" / "north", pki.aggregator_target("ward"))
    assert pki.identity_of(pem).name == "north"
    assert version == "TLSv1.3"


def test_s4_another_site_cannot_play_the_aggregator(made):
    with pytest.raises(ssl.SSLCertVerificationError, match="unsuitable certificate purpose"):
        handshake(made / "sites" / "south", made / "sites" / "north", pki.aggregator_target("ward"))


def test_s4_the_aggregator_of_another_name_is_refused(made):
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(made / "aggregator", made / "sites" / "north", pki.aggregator_target("clinic"))
