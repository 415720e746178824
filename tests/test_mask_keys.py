"""Keys for masked sums, carried between peers that never meet by one that must not change them."""

import msgspec
import pytest

from fedtrain.errors import CertificateError, SecAggError
from fedtrain.pki import Credentials, init, issue
from fedtrain.pki.mask_keys import CONTEXT, PREFIX, MaskKey, MaskKeys, state
from fedtrain.pki.roster import CONTEXT as ENTRY
from fedtrain.pki.roster import Roster
from fedtrain.pki.signing import Signed, Signer, Verifier
from fedtrain.secagg.keys import KeyPair
from fedtrain.secagg.peer_sums import PeerSums


@pytest.fixture(scope="module")
def signers(tmp_path_factory):
    """Of sites a and b, and of a site a under another root; and who believes the first two."""
    found = []
    for name in ("one", "other"):
        folder = tmp_path_factory.mktemp(name)
        init(folder)
        sites = "ab" if name == "one" else "a"
        found += [Signer.of(Credentials.load(issue(folder, "site", site))) for site in sites]
        if name == "one":
            verifier = Verifier((folder / "ca" / "root.pem").read_bytes(), "fedtrain")
    return (*found, verifier)


def claim(peer="a", **fields):
    plain = {"peer": peer, "federation": "fedtrain", "run": "r", "key": b"k" * 32, "number": 1}
    return MaskKey(**(plain | fields))


def read(statement):
    return msgspec.msgpack.decode(statement.removeprefix(PREFIX), type=Signed)


def keys(verifier, heard):
    return MaskKeys(verifier, "fedtrain", "r", lambda *what: heard.append(what))


def test_what_a_peer_signed_is_believed_from_whoever_carries_it_and_passed_on(signers, tmp_path):
    a, _, _, verifier = signers
    heard = []
    between = keys(verifier, heard)
    roster = Roster(tmp_path, verifier, "fedtrain", mask_keys=between)
    said = state(a, claim())
    assert roster.add(said) is None
    assert heard == [("a", b"k" * 32, 1)]
    assert between.statements(["a", "b"]) == [said]
    assert roster.statements() == []  # not of a peer that is not, or no longer, on the roster


def test_the_newest_start_of_a_peer_counts_and_an_older_statement_is_no_news(signers):
    a, *_, verifier = signers
    heard = []
    found = keys(verifier, heard)
    new, old = state(a, claim(key=b"n" * 32, number=7)), state(a, claim(key=b"o" * 32, number=6))
    for said in (new, old, new):
        found.add(said)
    assert heard == [("a", b"n" * 32, 7)]
    assert found.statements(["a"]) == [new]


def test_s05_whoever_carries_a_key_can_not_put_another_in_its_place(signers):
    a, b, stranger, verifier = signers
    heard = []
    found = keys(verifier, heard)
    honest = read(state(a, claim()))
    mine = msgspec.msgpack.encode(claim(key=b"m" * 32))
    forged = {
        "changed": msgspec.structs.replace(honest, claim=mine),
        "signed by the carrier": msgspec.msgpack.decode(state(b, claim()).removeprefix(PREFIX), type=Signed),
        "by another root": msgspec.msgpack.decode(state(stranger, claim()).removeprefix(PREFIX), type=Signed),
        "signed as a roster entry": msgspec.structs.replace(honest, signature=a.sign(ENTRY + honest.claim)),
    }
    for how, said in forged.items():
        with pytest.raises(CertificateError):
            found.add(PREFIX + msgspec.msgpack.encode(said))
        assert heard == [], how
    assert CONTEXT != ENTRY


@pytest.mark.parametrize("fields", [{"run": "another"}, {"federation": "another"}])
def test_s15_a_key_of_another_run_is_refused(signers, fields):
    a, *_, verifier = signers
    with pytest.raises(CertificateError, match="another run"):
        keys(verifier, []).add(state(a, claim(**fields)))


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04K\x01.", b"\x93\x01\x02\x03", bytes(40_000), b"\x81\xa5claim\xc4\x01x"]
)
def test_s21_what_is_no_statement_is_refused(signers, data):
    with pytest.raises(CertificateError, match="mask key"):
        keys(signers[-1], []).add(PREFIX + data)


def test_a_key_from_its_peer_itself_gives_way_only_to_one_of_a_later_start():
    pairs = [KeyPair(bytes([i]) * 32) for i in (1, 2, 3, 4)]
    sums = PeerSums("me", "r", 0, pairs[0])
    sums.meet("a", pairs[1].public, 5)
    sums.learn("a", pairs[2].public, 5)  # a carrier's older, or equal
    members = ["a", "me", "b"]
    assert sums.knows(members) == ["a", "me"]
    sums.learn("b", pairs[3].public, 1)
    assert sums.session(0, "x", members).keys["a"] == pairs[1].public
    sums.learn("a", pairs[2].public, 6)
    assert sums.session(0, "x", members).keys["a"] == pairs[2].public
    sums.learn("me", pairs[3].public, 9)  # nobody else says what ours is
    assert sums.session(0, "x", members).keys["me"] == pairs[0].public
    with pytest.raises(SecAggError, match="keeps no secret"):
        sums.learn("c", bytes(32), 1)
