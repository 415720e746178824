"""The roster: a CURVE key counts because a certificate of the federation vouches for it."""

import os
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import zmq

from fedtrain.errors import CertificateError, NotPinned
from fedtrain.pki import Credentials, fingerprint, init, issue
from fedtrain.pki import roster as roster_module
from fedtrain.pki.roster import CONTEXT, Claim, Roster, check, enrol, own_curve, save
from fedtrain.pki.signing import Signed, Signer, Verifier


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certs")
    init(folder)
    for name in ("a", "b"):
        issue(folder, "site", name)
    issue(folder, "aggregator")
    other = tmp_path_factory.mktemp("other")
    init(other)
    issue(other, "site", "a")
    return folder, other


def signer(folder, name):
    return Signer.of(Credentials.load(folder / ("aggregator" if name == "aggregator" else f"sites/{name}")))


def verifier(folder, **options):
    return Verifier((folder / "ca" / "root.pem").read_bytes(), "fedtrain", **options)


def claim(peer="a", **fields):
    key = zmq.curve_keypair()[0]
    return Claim(**({"peer": peer, "federation": "fedtrain", "key": key, "address": "h:1"} | fields))


def test_an_entry_is_believed_when_its_certificate_leads_to_the_root(certs):
    mine = claim()
    contact, _ = check(enrol(signer(certs[0], "a"), mine).encode(), verifier(certs[0]), "fedtrain")
    assert (contact.peer, contact.key, contact.address) == ("a", mine.key, "h:1")


def test_s02_an_entry_signed_under_another_root_is_refused(certs):
    with pytest.raises(CertificateError, match="does not lead to the root"):
        check(enrol(signer(certs[1], "a"), claim()).encode(), verifier(certs[0]), "fedtrain")


def test_s05_a_site_cannot_enter_a_key_for_another(certs):
    with pytest.raises(CertificateError, match="b signed an entry for 'a'"):
        check(enrol(signer(certs[0], "b"), claim("a")).encode(), verifier(certs[0]), "fedtrain")


def test_an_aggregators_certificate_makes_no_peer(certs):
    with pytest.raises(CertificateError, match="is not a site"):
        check(enrol(signer(certs[0], "aggregator"), claim("a")).encode(), verifier(certs[0]), "fedtrain")


def test_an_entry_of_another_federation_is_refused(certs):
    entry = enrol(signer(certs[0], "a"), claim(federation="elsewhere"))
    with pytest.raises(CertificateError, match="is for the federation 'elsewhere'"):
        check(entry.encode(), verifier(certs[0]), "fedtrain")


def test_a_changed_byte_anywhere_is_refused(certs):
    data = enrol(signer(certs[0], "a"), claim()).encode()
    for at in range(len(data)):
        bad = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(CertificateError):
            check(bad, verifier(certs[0]), "fedtrain")
    with pytest.raises(CertificateError, match="not a roster entry"):
        check(os.urandom(2000), verifier(certs[0]), "fedtrain")
    with pytest.raises(CertificateError, match="at most"):
        check(bytes(10**6), verifier(certs[0]), "fedtrain")


def test_a_signature_over_something_else_is_no_entry(certs):
    a, mine = signer(certs[0], "a"), enrol(signer(certs[0], "a"), claim())
    for signed in (mine.claim, CONTEXT, b"secure aggregation" + mine.claim):
        entry = Signed(claim=mine.claim, signature=a.sign(signed), certificate=a.certificate)
        with pytest.raises(CertificateError, match="a signature"):
            check(entry.encode(), verifier(certs[0]), "fedtrain")


def test_a_file_lets_a_peer_in_and_its_removal_strikes_it_off(certs, tmp_path):
    roster = Roster(tmp_path, verifier(certs[0]), "fedtrain")
    assert roster.peers() == []
    mine = claim()
    path = save(tmp_path, "a", enrol(signer(certs[0], "a"), mine).encode())
    assert roster.reload()
    assert roster.peer_of(mine.key) == "a"
    assert not roster.reload()
    path.unlink()
    assert roster.reload()
    assert roster.peer_of(mine.key) is None
    assert roster.contact("a") is None


def test_s06_a_revoked_or_expired_certificate_strikes_its_peer_off_at_the_next_look(certs, tmp_path):
    revoked, now = set(), [datetime.now(UTC)]
    save(tmp_path, "a", enrol(signer(certs[0], "a"), claim()).encode())
    check_ = verifier(
        certs[0], revoked=lambda chain: "revoked" if chain[0] in revoked else "", now=lambda: now[0]
    )
    told = []
    roster = Roster(tmp_path, check_, "fedtrain", refuse=lambda file, why: told.append((file, why)))
    assert roster.peers() == ["a"]
    revoked.add(Credentials.load(certs[0] / "sites" / "a").identity.serial)
    assert roster.reload()
    assert roster.peers() == []
    roster.reload()
    assert [file for file, why in told] == ["a.peer"]
    assert "revoked" in told[0][1]
    revoked.clear()
    assert roster.reload()
    now[0] += timedelta(days=60)
    assert roster.reload()
    assert roster.peers() == []


def test_a_key_of_two_peers_or_a_file_of_another_name_is_refused(certs, tmp_path):
    key = zmq.curve_keypair()[0]
    for name in ("a", "b"):
        save(tmp_path, name, enrol(signer(certs[0], name), claim(name, key=key)).encode())
    save(tmp_path, "c", enrol(signer(certs[0], "b"), claim("b")).encode())
    told = {}
    roster = Roster(tmp_path, verifier(certs[0]), "fedtrain", refuse=told.__setitem__)
    assert roster.peers() == ["a"]
    assert told == {"b.peer": "a has the same CURVE key", "c.peer": "it is the entry of b"}


@pytest.mark.parametrize(
    "fields",
    [
        *({"address": a} for a in ["", "host", "host:", ":8440", "h:0", "h:65536", "h:+8", "x y:1", "a;b:1",
                                   "tcp://h:1", "[zz]:1", "[::1:1", "[::1%lo]:1", "-h:1", "h\n:1", "h:1\n"]),
        *({"key": k} for k in [b"", b"a" * 39, b"#" * 40, b"~" * 40, b"\xff" * 40, b"\0" * 40]),
    ],
)  # fmt: skip
def test_s21_an_entry_that_zeromq_could_not_call_is_refused(certs, tmp_path, fields):
    """In a thread that owns all sockets its error would end all of them."""
    told = []
    save(tmp_path, "a", enrol(signer(certs[0], "a"), claim(**fields)).encode())
    roster = Roster(tmp_path, verifier(certs[0]), "fedtrain", refuse=lambda *what: told.append(what))
    assert roster.peers() == []
    assert "no CURVE key" in told[0][1] or 'must be "host:port"' in told[0][1]


@pytest.mark.parametrize(
    "address",
    [None, "h:1", "10.0.0.7:8440", "heart-1.example.org:65535", "a_b:5", "[::1]:8440", "[fe80::1:2]:1"],
)
def test_what_is_believed_zeromq_can_call(certs, address):
    entry = enrol(signer(certs[0], "a"), claim(address=address)).encode()
    contact, _ = check(entry, verifier(certs[0]), "fedtrain")
    assert contact.address == address
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.curve_serverkey = 0, contact.key
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.ipv6 = True
        if address is not None:
            dealer.connect(f"tcp://{address}")


def test_an_entry_passed_on_replaces_an_older_one_and_no_newer_one(certs, tmp_path):
    roster, a = Roster(tmp_path, verifier(certs[0]), "fedtrain"), signer(certs[0], "a")
    old, new = claim(number=1), claim(number=2)
    roster.add(enrol(a, old).encode())
    roster.add(enrol(a, new).encode())
    with pytest.raises(CertificateError, match="number 1, the one here has 2"):
        roster.add(enrol(a, old).encode())
    assert roster.contact("a").key == new.key


def test_what_can_not_be_read_or_kept_is_told_and_the_others_stay(certs, tmp_path):
    told = []
    save(tmp_path, "b", enrol(signer(certs[0], "b"), claim("b")).encode())
    (tmp_path / "x.peer").mkdir()
    (tmp_path / "gone.peer").symlink_to(tmp_path / "nowhere")
    roster = Roster(tmp_path, verifier(certs[0]), "fedtrain", refuse=lambda *what: told.append(what))
    assert roster.peers() == ["b"]
    assert told == [("x.peer", "it can't be read: Is a directory")]
    roster.folder = tmp_path / "b.peer"  # no folder: as on a disk that is full, nothing can be written
    with pytest.raises(
        CertificateError, match=r"a: its entry can't be kept in .*: (File exists|Not a directory)"
    ):
        roster.add(enrol(signer(certs[0], "a"), claim("a")).encode())


def test_s08_the_secret_key_is_made_at_the_site_with_mode_0600_and_kept(tmp_path):
    public, secret = own_curve(tmp_path, zmq.curve_keypair)
    assert (tmp_path / "curve.key").stat().st_mode & 0o777 == 0o600
    assert own_curve(tmp_path, zmq.curve_keypair) == (public, secret)
    assert zmq.curve_public(secret) == public
    (tmp_path / "curve.key").chmod(0o644)
    with pytest.raises(CertificateError, match="can be read by others"):
        own_curve(tmp_path, zmq.curve_keypair)
    (tmp_path / "curve.key").write_text("nonsense")
    (tmp_path / "curve.key").chmod(0o600)
    with pytest.raises(CertificateError, match="no CURVE key pair"):
        own_curve(tmp_path, zmq.curve_keypair)


def test_what_a_neighbour_passed_on_counts_as_soon_as_it_is_pinned_and_nothing_that_its_peer_did_not_sign(
    certs, tmp_path, monkeypatch
):
    """Nobody sends it again. Whose signature is false is not kept in the place of who signed."""
    monkeypatch.setattr(roster_module, "UNPINNED", 1)
    key, pins = fingerprint(signer(certs[0], "b").certificate).hex(), {}
    roster = Roster(tmp_path / "roster", verifier(certs[0], pinned=pins), "fedtrain")
    entry = enrol(signer(certs[0], "b"), claim("b"))
    with pytest.raises(NotPinned, match=f"policy pin b={key}, which counts within seconds"):
        roster.add(entry.encode())
    forged = Signed(
        claim=msgspec.msgpack.encode(claim("b", address="evil:1")), signature=entry.signature,
        certificate=entry.certificate,
    )  # fmt: skip
    with pytest.raises(CertificateError, match="not by its key, or over something else"):
        roster.add(forged.encode())
    with pytest.raises(NotPinned):  # there is no more room
        roster.add(enrol(signer(certs[0], "a"), claim("a")).encode())
    assert not roster.reload()
    assert (roster.peers(), [*(tmp_path / "roster").glob("*")]) == ([], [])
    pins |= {"b": key, "a": fingerprint(signer(certs[0], "a").certificate).hex()}
    assert roster.reload()
    assert roster.peers() == ["b"]
    assert roster.contact("b").address == "h:1"
    pins.clear()
    assert roster.reload()
    assert roster.peers() == []
