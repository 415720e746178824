"""How a peer parts: LEAVE to all that are connected, until each has read it."""

from __future__ import annotations

import contextlib
import time

from ..errors import WireError
from ..wire.gossip import Header, Kind, unpack
from .links import Links

LAST_WORDS_S = 1.0  # the longest time that the others have to answer a LEAVE


def part(links: Links, boot: bytes) -> None:
    """Say LEAVE of this start of the process, and wait until it was read: a DEALER drops what is unread when
    its connection ends."""
    unanswered = {link for link in links if link.up and link.greeted}
    for link in unanswered:
        links.say(link, Header(Kind.LEAVE), (boot,))
    until_s = time.monotonic() + LAST_WORDS_S
    while (unanswered := {link for link in unanswered if link.up}) and time.monotonic() < until_s:
        links.send()
        for link, message in links.receive(max(until_s - time.monotonic(), 0.0)):
            with contextlib.suppress(WireError):
                kind = unpack(message[0].buffer if message else b"")[0].kind
                if kind is Kind.LEAVE:  # that peer leaves too
                    links.say(link, Header(Kind.LEFT))
                if kind in (Kind.LEAVE, Kind.LEFT):
                    unanswered.discard(link)
    links.send()
