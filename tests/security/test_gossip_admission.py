"""S6 and S9 between peers: who comes in by an invitation, and how one that is revoked is put out."""

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta

import pytest
import zmq

from fedtrain import pki
from fedtrain.errors import CertificateError, ConfigError, ConnectError, JoinRefused
from fedtrain.exchange import Contact
from fedtrain.pki import Credentials, Revoked, revocation
from fedtrain.pki.invitation import Guestbook, Invitation
from fedtrain.pki.roster import Claim, Roster, enrol
from fedtrain.pki.signing import Signer, Verifier
from fedtrain.runtime.peers import enrolment as runtime
from fedtrain.transport.admission import Curve, join
from fedtrain.wire.gossip import Stamp
from tests.gossip import Party
from tests.limits import WAIT_S, bounded
from tests.rosters import met

WEEK = timedelta(days=7)
CALM_S = 5.0  # between heartbeats: a busy machine must not end connections


class Members:
    """Peers of one federation over ZeroMQ, each with its own roster, revocation list and guestbook."""

    def __init__(self, folder):
        self.folder, self.party, self.rosters = folder, Party(), {}
        pki.init(folder / "certs")

    def roster(self, name, *, certs=None, **options):
        folder = pki.issue(certs or self.folder / "certs", "site", name)
        credentials = Credentials.load(folder)
        revoked = Revoked(self.folder / name / "revoked.pem", credentials.root)
        (self.folder / name).mkdir(exist_ok=True)
        self.rosters[name] = roster = Roster(
            self.folder / name / "roster",
            Verifier(credentials.root, "fedtrain", revoked=revoked),
            "fedtrain",
            revoked=revoked,
            guests=Guestbook(folder, **options),
            signer=Signer.of(credentials),
        )
        return roster, Signer.of(credentials)

    def enter(self, name, curve, address=None, **options):
        """Its roster, with its own entry."""
        roster, signer = self.roster(name, **options)
        claim = Claim(peer=name, federation="fedtrain", key=curve.public, address=address)
        roster.add(enrol(signer, claim).encode())
        return roster

    def start(self, name, **options):
        curve = self.party.curves[name] = Curve.new()
        roster, signer = self.roster(name, **options)
        peer = self.party.start(name, roster=roster, sign=signer.sign, heartbeat_s=CALM_S)
        claim = Claim(peer=name, federation="fedtrain", key=curve.public, address=f"127.0.0.1:{peer.port}")
        roster.add(enrol(signer, claim).encode())
        return roster

    def restart(self, name, address, **options):
        """With nothing but its files."""
        roster, signer = self.roster(name, **options)
        self.party.start(name, roster=roster, sign=signer.sign, listen=address, heartbeat_s=CALM_S)
        return roster

    def invite(self, host, guest, life=WEEK):
        address = f"127.0.0.1:{self.party.peers[host].port}"
        return self.rosters[host]._guests.invite(
            guest, host=host, address=address, key=self.party.curves[host].public, life=life,
            new=zmq.curve_keypair,
        )  # fmt: skip

    async def accept(self, invitation, name, run="r"):
        stamp = Stamp.of(run, "s", name)
        await runtime.accept(invitation, self.rosters[name], name, stamp)


@contextlib.asynccontextmanager
async def members(folder, names, **options):
    made = Members(folder)
    try:
        for name in names:
            made.start(name, **options)
        for name in names:  # all know all
            for other in names:
                made.rosters[name].add(made.rosters[other].entry(other))
        for name in names:
            others = set(names) - {name}
            assert await met(made.party.peers[name], others, WAIT_S) == sorted(others)
        yield made
    finally:
        for peer in made.party.peers.values():
            await peer.stop()


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  # what changes lies in other threads
            await asyncio.sleep(0.01)


# --- invitations


def test_a_newcomer_with_an_invitation_and_no_roster_has_all_entries_and_all_have_its_own(tmp_path):
    async def main():
        async with members(tmp_path, "ab") as m:
            guest = m.start("d")
            invitation = Invitation.read(m.invite("a", "d").code)
            assert guest.peers() == ["d"]
            await m.accept(invitation, "d")
            assert guest.peers() == ["a", "b", "d"]
            assert await met(m.party.peers["d"], ["a", "b"], WAIT_S) == ["a", "b"]
            await until(lambda: m.rosters["b"].peers() == ["a", "b", "d"])  # b was told by a

    bounded(main())


@pytest.mark.slow(2)
def test_s09_an_invitation_lets_one_peer_in_once_and_still_after_a_restart_of_who_made_it(tmp_path):
    async def main():
        async with members(tmp_path, "a") as m:
            invitation = m.invite("a", "d")
            m.enter("d", Curve.new())
            await m.accept(invitation, "d")
            await m.accept(invitation, "d")  # the answer may have been lost: the same peer hears it again
            for computer in ("second", "third"):  # with d's name, certificate and the old code
                m.folder = tmp_path / computer
                m.folder.mkdir()
                m.enter("d", Curve.new(), certs=tmp_path / "certs")
                with pytest.raises(JoinRefused, match=r"a at 127.*the invitation for d was used on 20"):
                    await m.accept(invitation, "d")
                await m.party.peers["a"].stop()
                m.restart("a", invitation.address, certs=tmp_path / "certs")
            await until(lambda: m.party.of("a", "join_refused"))
            assert "was used on" in m.party.of("a", "join_refused")[0]["reason"]

    bounded(main())


def test_s09_a_struck_off_peer_does_not_come_back_by_its_old_invitation(tmp_path):
    async def main():
        async with members(tmp_path, "a") as m:
            invitation = m.invite("a", "d")
            m.enter("d", Curve.new())
            await m.accept(invitation, "d")
            (tmp_path / "a" / "roster" / "d.peer").unlink()
            m.rosters["a"].reload()
            with pytest.raises(JoinRefused, match="was used on"):
                await m.accept(invitation, "d")
            assert m.rosters["a"].contact("d") is None

    bounded(main())


def test_s09_a_stolen_invitation_is_refused_without_being_used_up(tmp_path):
    async def main():
        async with members(tmp_path, "a") as m:
            invitation = m.invite("a", "d")
            m.enter("e", Curve.new())
            stamp, host = Stamp.of("r", "s", "e"), Contact("a", invitation.key, invitation.address)
            thief = Curve(zmq.curve_public(invitation.secret), invitation.secret)
            entry = m.rosters["e"].entry("e")
            with pytest.raises(JoinRefused, match="the invitation is for d, and e showed it"):
                await asyncio.to_thread(join, host, thief, stamp, entry, m.rosters["e"].add, WAIT_S)
            assert m.rosters["e"].peers() == ["e"]
            assert m.rosters["a"].contact("e") is None
            m.enter("d", Curve.new())
            with pytest.raises(JoinRefused, match="this invitation is for d, not for e"):
                await m.accept(invitation, "e")
            await m.accept(invitation, "d")

    bounded(main())


def test_s09_an_expired_invitation_and_one_that_nobody_made_are_refused(tmp_path):
    now = [datetime.now(UTC)]

    async def main():
        async with members(tmp_path, "a", now=lambda: now[0]) as m:
            invitation = m.invite("a", "d", timedelta(hours=1))
            m.enter("d", Curve.new())
            now[0] += timedelta(hours=2)
            with pytest.raises(JoinRefused, match=r"the invitation for d expired on 20.*Ask for another"):
                await m.accept(invitation, "d")
            forged = Invitation(guest="d", host="a", address=invitation.address, key=invitation.key,
                                secret=zmq.curve_keypair()[1])  # fmt: skip
            with pytest.raises(JoinRefused, match="made no such invitation"):
                await m.accept(forged, "d")
            now[0] += timedelta(days=40)
            m.invite("a", "d")  # what ended long ago is forgotten
            assert len(list((tmp_path / "certs" / "sites" / "a" / "invited").iterdir())) == 1

    bounded(main())


def test_an_invitation_of_another_run_is_refused_and_still_good(tmp_path):
    async def main():
        async with members(tmp_path, "a") as m:
            invitation = m.invite("a", "d")
            m.enter("d", Curve.new())
            with pytest.raises(JoinRefused, match="a is in another run"):
                await m.accept(invitation, "d", run="another")
            await m.accept(invitation, "d")

    bounded(main())


def test_s02_whoever_answers_an_invitation_must_prove_to_be_the_peer_it_names(tmp_path):
    async def main():
        async with members(tmp_path, "a") as m:
            elsewhere = Members(tmp_path / "other")  # another federation, with a peer of the same name
            try:
                elsewhere.start("a")
                lure = elsewhere.invite("a", "d")
                elsewhere.rosters["a"].admit = lambda key, entry: Contact("d", key)  # lets anybody in
                m.enter("d", Curve.new())
                with pytest.raises(JoinRefused, match="can't prove to be a of this federation"):
                    await m.accept(lure, "d")
                assert m.rosters["d"].peers() == ["d"]
            finally:
                await elsewhere.party.peers["a"].stop()

    bounded(main())


def test_a_host_that_is_not_there_is_named(tmp_path):
    stamp, mine = Stamp.of("r", "s", "d"), Curve.new()
    with pytest.raises(ConnectError, match=r"a does not answer at 127.0.0.1:9 within 0.3 s"):
        join(Contact("a", Curve.new().public, "127.0.0.1:9"), mine, stamp, b"", lambda _: None, 0.3)


@pytest.mark.parametrize("code", ["", "hello", "AAAA", "gaE"])
def test_a_damaged_code_is_a_readable_error(code):
    with pytest.raises(ConfigError, match="Paste the whole line"):
        Invitation.read(code)


# --- revocation


@pytest.fixture
def certs(tmp_path):
    folder = tmp_path / "certs"
    pki.init(folder)
    for name in "ab":
        pki.issue(folder, "site", name)
    return folder


def root(folder):
    return (folder / "ca" / "root.pem").read_bytes()


def test_s06_all_certificates_of_a_site_are_revoked_the_renewed_ones_too(certs):
    first = Credentials.load(certs / "sites" / "a").identity.serial
    second = Credentials.load(pki.issue(certs, "site", "a")).identity.serial
    assert set(pki.revoke(certs, ["a"])) == {first, second}
    revoked = Revoked(certs / "revoked.pem", root(certs))
    revoked.reload()
    assert revoked([first])
    assert revoked([second])
    assert not revoked([Credentials.load(certs / "sites" / "b").identity.serial])
    again = Credentials.load(pki.issue(certs, "site", "a")).identity.serial
    assert not revoked([again])  # a new certificate lets it back in


def test_s06_a_list_that_is_not_the_authoritys_or_has_a_changed_byte_is_refused(certs, tmp_path):
    pki.revoke(certs, ["a"])
    data = (certs / "revoked.pem").read_bytes()
    other = tmp_path / "other"
    pki.init(other)
    pki.issue(other, "site", "a")
    pki.revoke(other, ["a"])
    revoked = Revoked(tmp_path / "kept.pem", root(certs))
    body = data.index(b"\n") + 1
    changed = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(body, len(data), 7)]
    for bad in [(other / "revoked.pem").read_bytes(), b"", data[:100], bytes(1 << 20), *changed]:
        with pytest.raises(CertificateError, match="revocation list"):
            revoked.add(bad)
    assert not (tmp_path / "kept.pem").exists()
    revoked.add(data)
    assert (tmp_path / "kept.pem").read_bytes() == data


def test_s06_an_older_list_never_takes_the_place_of_a_newer_one(certs, tmp_path):
    serials = {n: Credentials.load(certs / "sites" / n).identity.serial for n in "ab"}
    lists = []
    for name in "ab":
        pki.revoke(certs, [name])
        lists.append((certs / "revoked.pem").read_bytes())
    revoked = Revoked(tmp_path / "kept.pem", root(certs))
    revoked.add(lists[1])
    revoked.add(lists[0])
    assert (tmp_path / "kept.pem").read_bytes() == lists[1]
    assert all(revoked([serial]) for serial in serials.values())


def test_expired_certificates_leave_the_list_and_an_unknown_name_is_an_error(certs):
    pki.revoke(certs, ["a"])
    in_two_months = datetime.now(UTC) + timedelta(days=60)
    pki.issue(certs, "site", "c", days=90)
    c = pki.revoke(certs, ["c"], now=in_two_months)
    authority = pki.Authority.load(certs)
    found = revocation.check((certs / "revoked.pem").read_bytes(), authority.root, in_two_months)
    assert (found.number, found.serials) == (int(in_two_months.timestamp()), frozenset(c))
    with pytest.raises(ConfigError, match=r"nobody: no certificate of .* is this site's"):
        pki.revoke(certs, ["nobody"])


def test_s06_a_revoked_peer_is_cut_off_by_all_when_one_of_them_has_the_list(tmp_path):
    async def main():
        async with members(tmp_path, "abc") as m:
            pki.revoke(tmp_path / "certs", ["c"])
            (tmp_path / "a" / "revoked.pem").write_bytes((tmp_path / "certs" / "revoked.pem").read_bytes())
            m.rosters["a"].reload()
            m.party.peers["a"].revoked()
            await until(lambda: all(m.party.peers[n].connected() == [o] for n, o in ("ab", "ba")))
            await until(lambda: all(m.party.peers[n].view().alive == ("a", "b") for n in "ab"))
            assert m.rosters["b"].peers() == ["a", "b"]
            await until(lambda: m.party.of("b", "site_lost"))
            assert (tmp_path / "b" / "revoked.pem").exists()  # and b knows it after a restart
            assert "no longer on the roster" in m.party.of("b", "site_lost")[0]["reason"]
            c = m.party.peers["c"]
            await until(lambda: c.connected() == [] and "c" not in m.rosters["c"].peers())  # it is told, too
            await asyncio.sleep(0.5)  # c calls again meanwhile
            assert c.connected() == []

    bounded(main())


# --- struck off here


@pytest.mark.parametrize("running", [True, False])
def test_s06_a_peer_whose_entry_was_deleted_does_not_come_back_with_a_neighbours_greeting(tmp_path, running):
    async def main():
        async with members(tmp_path, "abc") as m:
            entry = tmp_path / "a" / "roster" / "c.peer"
            if running:
                entry.unlink()
                m.rosters["a"].reload()
                m.party.peers["a"].revoked()
                await until(lambda: m.party.peers["a"].connected() == ["b"])
            m.rosters["b"].add(m.enter("d", Curve.new()).entry("d"))
            address = f"127.0.0.1:{m.party.peers['a'].port}"
            await m.party.peers["a"].stop()
            if not running:
                entry.unlink()
            again = m.restart("a", address)  # b will greet it, and pass all entries on
            await until(lambda: "d" in again.peers())
            assert again.peers() == ["a", "b", "d"]
            assert "c" not in m.party.peers["a"].connected()
            assert m.rosters["b"].peers() == ["a", "b", "c", "d"]  # a decides for itself alone
            key = zmq.curve_public(
                m.rosters["a"]
                ._guests.invite(
                    "c", host="a", address=address, key=b"k" * 40, life=WEEK, new=zmq.curve_keypair
                )
                .secret
            )
            with pytest.raises(CertificateError, match="c was struck off by a"):
                again.admit(key, m.rosters["c"].entry("c"))
            (tmp_path / "a" / "roster" / "c.struck").unlink()  # taken back
            again.reload()
            again.add(m.rosters["b"].entry("c"))
            assert again.peers() == ["a", "b", "c", "d"]

    bounded(main())


def test_s06_a_peer_struck_off_since_the_last_look_does_not_come_back_by_a_newer_entry(tmp_path):
    m = Members(tmp_path)
    ours = m.enter("a", Curve.new())
    ours.add(m.enter("c", Curve.new()).entry("c"))
    (tmp_path / "a" / "roster" / "c.peer").unlink()
    _, signer = m.roster("c")
    newer = Claim(peer="c", federation="fedtrain", key=Curve.new().public, number=2)
    assert ours.add(enrol(signer, newer).encode()) is None  # before the folder was looked at again
    assert ours.peers() == ["a"]
    assert not (tmp_path / "a" / "roster" / "c.peer").exists()
    assert (tmp_path / "a" / "roster" / "c.struck").exists()


def test_s06_a_damaged_tombstone_counts_and_says_that_nobody_known_signed_it(tmp_path):
    told = []
    m = Members(tmp_path)
    roster = m.enter("a", Curve.new())
    roster.add(m.enter("c", Curve.new()).entry("c"))
    (tmp_path / "a" / "roster" / "c.struck").write_bytes(b"garbage")
    roster._refuse = lambda file, why: told.append(f"{file}: {why}")
    assert roster.reload()
    assert roster.peers() == ["a"]
    assert "c.peer: c was struck off by an unknown hand" in told[0]
