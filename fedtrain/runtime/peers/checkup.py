"""`fedtrain doctor` at a peer: what `fedtrain peer` would not start without, its roster, its neighbours."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ...config import Config
from ...events import silent
from ...exchange import Contact, PeerId
from ...pki import Credentials, Revoked, Verifier
from ...pki.revocation import LIST
from ...pki.roster import Roster
from ..findings import Finding, listening
from ..sites.approval import policy_of
from ..sites.pins import pins_of
from ..sites.start import credentials_of, folder_of
from .enrolment import called_at
from .gossip_setup import algorithm_of, check_policy

WAIT_S = 5.0  # for a neighbour's port
CALLED = 32  # neighbours at most


def is_peer(config: Config, name: PeerId) -> bool:
    """Whether the site of this name is a peer here: on a roster; or the settings say how peers average, and
    there is no aggregator."""
    entry, certs = config.root / config.gossip.roster / f"{name}.peer", config.root / config.network.certs
    averages = any(key.startswith("gossip.") for key in config.given)
    return entry.exists() or (averages and not (certs / "aggregator").exists())


def checks_of(config: Config, name: PeerId) -> list[tuple[str, Callable[[], Iterator[Finding]]]]:
    """The checks of a peer before those of its approval and its data."""
    return [
        ("settings", lambda: _settings(config)),
        ("port", lambda: _port(config, name)),
        ("policy", lambda: _policy(config, name)),
        ("roster", lambda: _roster(config, name)),
    ]


def _settings(config: Config) -> Iterator[Finding]:
    algorithm_of(config)
    yield Finding("settings", "good", f"{config.gossip.algorithm} on {config.gossip.topology}")


def _port(config: Config, name: PeerId) -> Iterator[Finding]:
    if (address := called_at(config)) is None:
        said = 'network.listen = "": it opens no port, and calls the others itself'
        return (yield Finding("port", "good", said))
    yield from listening(config, f"{name} itself")
    yield Finding("address", "good", f"others call {name} at {address}")


def _policy(config: Config, name: PeerId) -> Iterator[Finding]:
    policy = policy_of(folder_of(config, name), credentials_of(config, name)())
    check_policy(config, policy)
    others = len(policy.members.keys() - {name})
    pinned = f"{others} other peers are pinned" if policy.pin_members else "nobody has to be pinned"
    yield Finding("policy", "good", f"a peer may hold to it; {pinned}")


def _roster(config: Config, name: PeerId) -> Iterator[Finding]:
    """Who is on it by the rules of this peer, and whom it could call now. Nothing is written."""
    credentials: Credentials = credentials_of(config, name)()
    folder, federation = folder_of(config, name), credentials.identity.federation
    revoked = Revoked(config.root / config.network.certs / LIST, credentials.root)
    pins = pins_of(folder, policy_of(folder, credentials), credentials, silent)
    refused: list[tuple[str, str]] = []
    roster = Roster(
        config.root / config.gossip.roster,
        Verifier(credentials.root, federation, revoked=revoked, pinned=pins),
        federation,
        revoked=revoked,
        refuse=lambda file, why: refused.append((file, why)),
    )
    for file, why in refused:
        yield Finding("roster", "look", f"{file} is refused", why)
    others = [peer for peer in roster.peers() if peer != name]
    if not others:
        fix = f"Copy another peer's NAME.peer into {roster.folder}; or start with --invitation CODE."
        return (yield Finding("roster", "look", f"nobody but {name} itself is on it", fix))
    yield Finding("roster", "good", f"{', '.join(others)}")
    contacts = [contact for peer in others[:CALLED] if (contact := roster.contact(peer)) is not None]
    with ThreadPoolExecutor(len(contacts)) as pool:
        yield from pool.map(_reached, contacts)


def _reached(contact: Contact) -> Finding:
    if contact.address is None:
        return Finding("neighbour", "good", f"{contact.peer} can't be called; it calls")
    host, _, port = contact.address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), WAIT_S).close()
    except OSError as e:
        fix = f"Is `fedtrain peer {contact.peer}` running there, and its port open to this machine?"
        return Finding("neighbour", "look", f"{contact.peer} at {contact.address}: {e.strerror or e}", fix)
    return Finding("neighbour", "good", f"{contact.peer} answers at {contact.address}")
