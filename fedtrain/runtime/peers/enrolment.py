"""How a peer gets onto the roster of its run, and stays there: its own entry, and invitations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import zmq

from ...config import Config, policy_from
from ...config.policy import FILE as POLICY
from ...errors import CertificateError, ConfigError, JoinRefused, NotPinned, SecAggError
from ...events import Emit, Notice
from ...exchange import Contact, PeerId
from ...pki import Credentials, Revoked
from ...pki.identity import Current
from ...pki.invitation import Guestbook, Invitation
from ...pki.mask_keys import MaskKey, MaskKeys, state
from ...pki.revocation import LIST
from ...pki.roster import Claim, Roster, can_be_called, certificate_of, check, enrol, own_curve, save
from ...pki.signing import Signer, Verifier
from ...secagg.peer_sums import PeerSums
from ...transport.admission import Curve, join
from ...transport.zmq import ZmqNeighbors
from ...wire.gossip import Stamp
from ..threads import while_awaited

T = TypeVar("T")

RELOAD_S = 2.0  # between looks at the roster's folder
JOIN_S = 60.0  # for the peer that has invited this one to answer


def enrolled(
    config: Config,
    name: PeerId,
    credentials: Credentials,
    curve: Curve,
    emit: Emit,
    sums: PeerSums | None = None,
    mask_number: int = 0,
    pinned: Mapping[PeerId, str] | None = None,
) -> Roster:
    """The run's roster, with this peer's own entry as it is today; and with the keys that `sums` need of
    those whom this peer does not meet. `pinned`: the only peers on it (Verifier)."""
    federation = credentials.identity.federation
    revoked = Revoked(config.root / config.network.certs / LIST, credentials.root)
    verifier = Verifier(credentials.root, federation, revoked=revoked, pinned=pinned)
    folder, signer = config.root / config.gossip.roster, Signer.of(credentials)
    enter(config, name, credentials, curve, verifier)
    return Roster(
        folder, verifier, federation, revoked=revoked, signer=signer,
        mask_keys=None if sums is None else carried(
            sums, signer, verifier, federation, config.run.name, mask_number
        ),
        guests=Guestbook(config.root / config.network.certs / "sites" / name),
        refuse=lambda file, why: emit(Notice(text=f"roster: {file} is refused: {why}")),
    )  # fmt: skip


def enter(config: Config, name: str, credentials: Credentials, curve: Curve, verifier: Verifier) -> None:
    """Have this peer's own entry in the roster's folder as it is today: others verify by the certificate in
    it what this peer signs."""
    folder, federation = config.root / config.gossip.roster, credentials.identity.federation
    signer, address, number, have = Signer.of(credentials), called_at(config), 0, None
    with suppress(CertificateError, FileNotFoundError):
        entry = (folder / f"{name}.peer").read_bytes()
        contact, number = check(entry, verifier, federation)
        have = (contact.key, contact.address, certificate_of(entry))
    if have != (curve.public, address, signer.certificate):
        number = max(number + 1, int(time.time()))
        claim = Claim(peer=name, federation=federation, key=curve.public, address=address, number=number)
        save(folder, name, enrol(signer, claim).encode())


async def watch(
    config: Config, name: str, current: Current, curve: Curve, roster: Roster, neighbors: ZmqNeighbors
) -> None:
    """Look at the roster again and again: call who is new, cut off who was struck off; and enter this peer
    anew when its certificate was renewed. CertificateError when its own entry counts no more."""
    entry, begun_as = roster.folder / f"{name}.peer", roster.contact(name)
    chain = current().chain
    while True:
        own_entry(roster, name, begun_as)
        neighbors.revoked()
        neighbors.keep()
        await asyncio.sleep(RELOAD_S)
        if (now := current()).chain != chain and entry.exists():  # else it was struck off
            verifier = Verifier(now.root, now.identity.federation)
            await asyncio.to_thread(enter, config, name, now, curve, verifier)
            chain = now.chain
        with suppress(OSError):  # it may be readable the next time
            await asyncio.to_thread(roster.reload)


async def while_entered(rounds: Coroutine[Any, Any, T], watching: Coroutine[Any, Any, None]) -> T:
    """What the rounds come to, unless the watch ends with an error: then they end with it, too."""
    both = asyncio.ensure_future(rounds), asyncio.ensure_future(watching)
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not both[0].done():
            both[1].result()
        return await both[0]
    finally:
        for task in both:
            task.cancel()
        await asyncio.wait(both)


def carried(
    sums: PeerSums, signer: Signer, verifier: Verifier, federation: str, run: str, number: int
) -> MaskKeys:
    """Where keys come for `sums` that others pass on; with our own."""

    def told(peer: PeerId, key: bytes, number: int) -> None:
        try:
            sums.learn(peer, key, number)
        except SecAggError as e:
            raise CertificateError(str(e)) from None

    keys = MaskKeys(verifier, federation, run, told)
    mine = MaskKey(peer=sums.me, federation=federation, run=run, key=sums.public, number=number)
    keys.add(state(signer, mine))
    return keys


def called_at(config: Config) -> str | None:
    """Where others call this peer; None when they can't: then it calls them."""
    address = config.network.address or config.network.listen
    if address and not can_be_called(address):
        port = address.rpartition(":")[2]
        raise ConfigError(
            f'network.address: nobody can call {address}. Set network.address = "HOST:{port}" as others '
            f'reach this machine; where nobody can, network.listen = "": then this peer calls the others.'
        )
    return address or None


def own_entry(roster: Roster, me: PeerId, begun_as: Contact | None = None) -> bytes:
    """What others are shown of us; CertificateError when it counts no more, or not as it was when we began:
    then the run ends here."""
    now = roster.contact(me)
    if now is not None and begun_as is not None and now != begun_as:
        raise CertificateError(
            f"another process is {me} now, at {now.address or 'no address'}: two have its certificate, and "
            f"the one that was started last counts. Stop one of them, or give each machine a name of its own."
        )
    if now is None:
        raise CertificateError(
            f"{me}'s own entry counts no more: its certificate was revoked or has expired, or its file was "
            f"taken from {roster.folder}. With a new certificate, and without a file {me}.struck there, the "
            f"same command goes on."
        )
    return roster.entry(me)


def to_pin(config: Config, guest: PeerId, host: PeerId) -> str:
    """What the people of `host` have to do beside inviting; "" when the guest is pinned there, or need not
    be."""
    folder = config.root / config.network.certs / "sites" / host
    if not (folder / POLICY).exists() or not (policy := policy_from(folder)).pin_members:
        return ""
    if guest in policy.members:
        return ""
    return (
        f"{host} has not pinned {guest} and refuses it until then, as does each other peer "
        f"(policy.pin_members). `fedtrain policy show` prints NAME=KEY at {guest}; run here, and have the "
        f"others run: fedtrain policy pin {guest}=KEY"
    )


def invite(config: Config, guest: PeerId, host: PeerId, *, days: float) -> Invitation:
    """An invitation to the peer `host`, whose folder is here; its process may run or not."""
    address = called_at(config)
    if address is None:
        raise ConfigError(f"{host} can't be called, so it can't invite. Let a peer with an address do it.")
    folder = config.root / config.network.certs / "sites" / host
    Credentials.load(folder)
    key, _ = own_curve(folder, zmq.curve_keypair)
    return Guestbook(folder).invite(
        guest, host=host, address=address, key=key,
        life=timedelta(days=days), new=zmq.curve_keypair,
    )  # fmt: skip


async def accept(invitation: Invitation, roster: Roster, me: PeerId, stamp: Stamp) -> None:
    """Fetch the roster from the peer that has invited this one; ConnectError says why it can't be."""
    if invitation.guest != me:
        raise JoinRefused(f"this invitation is for {invitation.guest}, not for {me}")
    host = Contact(invitation.host, invitation.key, invitation.address)
    guest = Curve(zmq.curve_public(invitation.secret), invitation.secret)

    unpinned = dict[PeerId, NotPinned]()

    def add(statement: bytes) -> None:
        try:
            roster.add(statement)
        except NotPinned as e:  # who is no host is told of when it is passed on again
            unpinned[e.site] = e
        except CertificateError:  # the host has it; whether it counts here is ours to say
            pass

    await while_awaited(join, host, guest, stamp, own_entry(roster, me), add, JOIN_S)
    found = roster.contact(host.peer)
    if found is None and host.peer in unpinned:
        raise JoinRefused(f"{unpinned[host.peer]}. Then give this command again.")
    if found is None or found.key != host.key:
        raise JoinRefused(f"who answers at {host.address} can't prove to be {host.peer} of this federation")
