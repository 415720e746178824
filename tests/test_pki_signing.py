"""A statement is a site's when its certificate leads to the root, and not when anything about it is off."""

import base64
import hashlib
import re
import shutil
import ssl
import subprocess
import textwrap
import warnings
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain import pki
from fedtrain.errors import CertificateError, ConfigError
from fedtrain.pki.authority import requested_key
from fedtrain.pki.enrolment import request
from fedtrain.pki.signing import fingerprint

NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    """Two federations, "ward" and "isle", each with an aggregator and the site "north"."""
    folder = tmp_path_factory.mktemp("pki")
    for federation in ("ward", "isle"):
        pki.init(folder / federation, federation, now=NOW)
        pki.issue(folder / federation, "aggregator", now=NOW)
        pki.issue(folder / federation, "site", "north", now=NOW)
    return folder


@pytest.fixture(scope="module")
def chain(certs):
    return verifier(certs), pki.Signer.of(credentials(certs))


def credentials(certs, who="sites/north", federation="ward"):
    return pki.Credentials.load(certs / federation / who)


def verifier(certs, **changes):
    return pki.Verifier((certs / "ward/ca/root.pem").read_bytes(), "ward", **changes)


def odd(certs, **changes):
    """A signer with a certificate by ward's authority that is not as `issue` would make it."""
    says = {
        "dns": ["north.site.ward.fedtrain"],
        "usages": [ExtendedKeyUsageOID.CLIENT_AUTH],
        "not_before": NOW - timedelta(hours=1),
        "not_after": NOW + timedelta(days=1),
    }
    key = changes.pop("key", None) or ec.generate_private_key(ec.SECP256R1())
    authority = pki.Authority.load(certs / "ward")
    leaf = pki.sign(authority, key.public_key(), "north", **says | changes)
    pem = serialization.Encoding.PEM
    return pki.Signer(leaf.public_bytes(pem) + authority.certificate.public_bytes(pem), key)


def test_a_signature_names_its_site_and_certificate(certs):
    signer = pki.Signer.of(credentials(certs))
    found = verifier(certs).verify(signer.certificate, b"17 sites", signer.sign(b"17 sites"))
    assert found == ("north", pki.fingerprint(signer.certificate))


def test_a_fingerprint_is_that_of_the_leafs_key_as_openssl_prints_it(certs):
    chain = credentials(certs).chain
    leaf = x509.load_pem_x509_certificates(chain)[0].public_bytes(serialization.Encoding.PEM)
    assert pki.fingerprint(leaf) == pki.fingerprint(chain)
    key = subprocess.run(
        ["openssl", "x509", "-noout", "-pubkey"], input=leaf, capture_output=True, check=True
    ).stdout
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-outform", "der"], input=key, capture_output=True, check=True
    ).stdout
    assert hashlib.sha256(der).digest() == pki.fingerprint(chain)


@pytest.mark.parametrize("changed", ["message", "signature", "key"])
def test_nothing_about_a_signature_can_be_changed(certs, changed):
    signer = pki.Signer.of(credentials(certs))
    message, signature = b"17 sites", signer.sign(b"17 sites")
    if changed == "message":
        message = b"18 sites"
    elif changed == "signature":
        signature = signature[:-1] + bytes([signature[-1] ^ 1])
    else:
        signature = odd(certs).sign(message)
    with pytest.raises(CertificateError, match="signature is not by its key"):
        verifier(certs).verify(signer.certificate, message, signature)


@pytest.mark.parametrize("junk", [b"", b"\x30", b"no DER"])
def test_a_signature_that_is_none_is_refused(certs, junk):
    with pytest.raises(CertificateError, match="signature"):
        verifier(certs).verify(credentials(certs).chain, b"m", junk)


def refused(certs, signer, match, **changes):
    with pytest.raises(CertificateError, match=match):
        verifier(certs, **changes).verify(signer.certificate, b"m", signer.sign(b"m"))


def test_another_federations_site_is_refused(certs):
    refused(certs, pki.Signer.of(credentials(certs, federation="isle")), "not a site of ward")


def test_another_authority_under_our_names_is_refused(certs, tmp_path):
    pki.init(tmp_path, "ward")
    signer = pki.Signer.of(pki.Credentials.load(pki.issue(tmp_path, "site", "north")))
    refused(certs, signer, "does not lead to the root")


def test_the_aggregator_cannot_sign_as_a_site(certs):
    refused(certs, pki.Signer.of(credentials(certs, "aggregator")), "not a site of ward")


def test_a_name_outside_the_issuers_constraint_is_refused(certs):
    root = (certs / "ward/ca/root.pem").read_bytes()
    signer = odd(certs, dns=["north.site.isle.fedtrain"])
    with pytest.raises(CertificateError, match="does not lead to the root"):
        pki.Verifier(root, "isle").verify(signer.certificate, b"m", signer.sign(b"m"))


def test_a_leaf_issues_no_other_leaf(certs):
    north = credentials(certs)
    key = ec.generate_private_key(ec.SECP256R1())
    own = serialization.load_pem_private_key(north.key, None)
    leaf = x509.load_pem_x509_certificates(north.chain)[0]
    forged = pki.sign(
        pki.Authority(leaf, own, leaf), key.public_key(), "south", dns=["south.site.ward.fedtrain"],
        usages=[ExtendedKeyUsageOID.CLIENT_AUTH], not_before=NOW - timedelta(hours=1),
        not_after=NOW + timedelta(days=1),
    ).public_bytes(serialization.Encoding.PEM)  # fmt: skip
    refused(certs, pki.Signer(forged + north.chain, key), "does not lead to the root")


def test_a_chain_without_its_issuer_is_refused(certs):
    signer = odd(certs)
    leaf = x509.load_pem_x509_certificates(signer.certificate)[0].public_bytes(serialization.Encoding.PEM)
    with pytest.raises(CertificateError, match="does not lead to the root"):
        verifier(certs).verify(leaf, b"m", signer.sign(b"m"))


def test_dates_count_on_every_use_of_a_chain_that_is_known(certs):
    clock = [NOW]
    signer = odd(certs)
    check = verifier(certs, now=lambda: clock[0])
    check.verify(signer.certificate, b"m", signer.sign(b"m"))
    clock[0] = NOW + timedelta(days=2)
    with pytest.raises(CertificateError, match=r"valid from .* Renew it with `fedtrain certs issue north`"):
        check.verify(signer.certificate, b"m", signer.sign(b"m"))
    refused(certs, signer, "does not lead to the root", now=lambda: clock[0])


def test_revocation_counts_on_every_use_of_a_chain_that_is_known(certs):
    gone: list[str] = []
    signer = pki.Signer.of(credentials(certs))
    check = verifier(certs, revoked=lambda chain: "was revoked" if chain[0] in gone else "")
    check.verify(signer.certificate, b"m", signer.sign(b"m"))
    gone.append(credentials(certs).identity.serial)
    with pytest.raises(CertificateError, match="was revoked"):
        check.verify(signer.certificate, b"m", signer.sign(b"m"))


def test_only_p256_signs(certs):
    refused(certs, odd(certs, key=ec.generate_private_key(ec.SECP384R1())), "no P-256 key")


@settings(max_examples=200, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_chain_with_any_byte_changed_proves_nothing_else(chain, place, flip):
    """It is refused in our own words, or (as in a line's end) it still says what it said."""
    check, signer = chain
    changed = bytearray(signer.certificate)
    changed[int(place * len(changed))] ^= flip
    try:
        found = check.verify(bytes(changed), b"m", signer.sign(b"m"))
    except CertificateError:
        return
    assert found == ("north", pki.fingerprint(signer.certificate))


@pytest.mark.parametrize("junk", [b"", b"-----BEGIN CERTIFICATE-----\n", b"x" * 100_000])
def test_bytes_that_are_no_certificate_are_refused(certs, junk):
    with pytest.raises(CertificateError):
        verifier(certs).verify(junk, b"m", b"")


def test_a_chain_with_bytes_between_its_certificates_is_refused(certs):
    """A cache of chains must not have a second spelling of the same chain."""
    signer = pki.Signer.of(credentials(certs))
    leaf, issuing = signer.certificate.split(b"-----END CERTIFICATE-----\n")[:2]
    end = b"-----END CERTIFICATE-----\n"
    for spelt in (b"\n" + signer.certificate, leaf + end + b"a remark\n" + issuing + end):
        with pytest.raises(CertificateError, match="is not in plain PEM"):
            verifier(certs).verify(spelt, b"m", signer.sign(b"m"))


def test_a_signer_shows_no_key(certs):
    signer = pki.Signer.of(credentials(certs))
    assert repr(signer) == f"Signer(certificate={signer.certificate!r})"


def test_a_name_of_a_kind_that_cannot_be_read_is_refused(certs):
    """GeneralName's x400Address, for which `cryptography` has an error of its own."""
    leaf = x509.load_pem_x509_certificates(credentials(certs).chain)[0].public_bytes(
        serialization.Encoding.DER
    )
    name = b"north.site.ward.fedtrain"
    damaged = leaf.replace(b"\x82" + bytes([len(name)]) + name, b"\xa3" + bytes([len(name)]) + name)
    with pytest.raises(CertificateError, match="x400Address"):
        pki.identity_of(ssl.DER_cert_to_PEM_cert(damaged).encode())


def with_serial_below_one(chain):
    """The chain, its first certificate's serial number negative: what damage makes of some of them."""
    leaf, *above = x509.load_pem_x509_certificates(chain)
    number = leaf.serial_number.to_bytes((leaf.serial_number.bit_length() + 8) // 8)
    der = leaf.public_bytes(serialization.Encoding.DER)
    damaged = ssl.DER_cert_to_PEM_cert(der.replace(number, bytes([number[0] | 0x80]) + number[1:], 1))
    return damaged.encode() + b"".join(c.public_bytes(serialization.Encoding.PEM) for c in above)


def test_a_certificate_that_cryptography_only_warns_of_is_refused_without_a_warning(certs):
    """In a process whose warnings are errors as in one where they are not."""
    chain = with_serial_below_one(credentials(certs).chain)
    for filters in ("error", "default"):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter(filters)
            for read in (pki.identity_of, pki.fingerprint, lambda pem: verifier(certs).verify(pem, b"", b"")):
                with pytest.raises(CertificateError, match="not a PEM certificate"):
                    read(chain)
        assert told == []


def test_certificates_that_are_asked_for_in_turns_are_checked_once_each_unless_they_are_very_long(
    certs, chain, monkeypatch
):
    """5,000 sites: their aggregator asks for all again and again (pki.callers), and a cache of fewer would
    have forgotten each one when its turn comes."""
    known, signer = chain
    checked, trusted = [], known.trust(signer.certificate)
    monkeypatch.setattr(pki.Verifier, "_trust", lambda self, pem, role: checked.append(pem) or trusted)
    many, long = verifier(certs), bytes(pki.signing.USUAL_BYTES + 1)
    for _ in range(2):
        for number in range(5000):
            many.trust(b"certificate %d" % number)
        many.trust(long)
    assert len(checked) == 5000 + 2  # what a stranger fills the memory with has a bound


def armoured(block, kind="CERTIFICATE"):
    """The PEM of DER bytes, in lines as they are written here."""
    lines = textwrap.wrap(base64.b64encode(block).decode(), 64)
    return "\n".join([f"-----BEGIN {kind}-----", *lines, f"-----END {kind}-----\n"]).encode()


def blocks_of(pem):
    """The DER bytes in PEM."""
    return [base64.b64decode(each) for each in re.findall(rb"-----\n([^-]+)-----END", pem)]


def damaged(pem, kind="CERTIFICATE"):
    """PEM in which a bit is flipped, each bit of each block."""
    for number, block in enumerate(blocks := blocks_of(pem)):
        for bit in range(8 * len(block)):
            changed = bytearray(block)
            changed[bit // 8] ^= 1 << bit % 8
            parts = [*blocks[:number], bytes(changed), *blocks[number + 1 :]]
            yield b"".join(armoured(part, kind) for part in parts)


@pytest.mark.parametrize("reads", ["trust", "identity", "fingerprint"])
def test_s21_a_flipped_bit_of_a_certificate_is_a_certificate_error_whatever_it_hits(certs, chain, reads):
    found = {"trust": chain[0].trust, "identity": pki.identity_of, "fingerprint": fingerprint}[reads]
    refused = 0
    for pem in islice(damaged(credentials(certs).chain), 0, None, 13):
        try:
            found(pem)
        except CertificateError:
            refused += 1
    assert refused > 20  # most bits are of the signature, or of the key


def test_s21_a_flipped_bit_of_a_folders_own_files_is_an_error_or_nothing_signed(certs, tmp_path):
    """The number of unused bits before a signature is not signed, and may leave it as it was."""
    folder = shutil.copytree(certs / "ward/sites/north", tmp_path / "north")
    sound, refused = signed_parts((folder / "cert.pem").read_bytes()), 0
    for pem in islice(damaged((folder / "cert.pem").read_bytes()), 0, None, 71):
        (folder / "cert.pem").write_bytes(pem)
        try:
            pki.Credentials.load(folder)
            assert signed_parts(pem) == sound
        except CertificateError:
            refused += 1
    assert refused > 90


def signed_parts(pem):
    """What each certificate says, and its signature."""
    return [(each.tbs_certificate_bytes, each.signature) for each in x509.load_pem_x509_certificates(pem)]


def test_s21_a_flipped_bit_of_a_signing_request_is_a_config_error_or_nothing_that_is_signed(tmp_path):
    sound, key = request(tmp_path)
    for pem in damaged(sound, "CERTIFICATE REQUEST"):
        with suppress(ConfigError):
            assert requested_key(pem) == key
