"""The graph seam over ZeroMQ, as its caller sees it on an event loop; the sockets are a `PeerThread`'s."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from ..errors import ConnectError, FedtrainError
from ..events import Emit, silent
from ..exchange import Account, Exchanged, Mixer, PeerId, ReceivedShare, Share
from ..malloc import keep_freed
from ..wire.codec import encode
from ..wire.frames import AuditHead
from ..wire.gossip import Greeting, Header, Kind, Stamp
from .admission import Curve, LocalPeer, PeerDirectory
from .link import LinkSettings
from .membership import View
from .peer_thread import PeerThread, Welcome


class ZmqNeighbors:
    """One peer on the network. Implements exchange.Neighbors."""

    def __init__(
        self,
        *,
        me: PeerId,
        curve: Curve,
        sign: Callable[[bytes], bytes],
        roster: PeerDirectory,
        run: str,
        greeting: Greeting,
        welcome: Welcome = lambda peer, greeting: None,
        listen: str | None = "127.0.0.1:0",
        settings: LinkSettings = LinkSettings(),
        emit: Emit = silent,
        witness: Callable[[PeerId, AuditHead], object] = lambda peer, head: None,
    ) -> None:
        """`sign`: as PeerDirectory.proves verifies. `welcome` raises JoinRefused when a peer does not fit.
        `listen` None: only call others. `witness` is told how others' audit logs stand."""
        stamp = Stamp.of(run, greeting.schema_digest, me)
        local = LocalPeer(me, curve, sign, roster, stamp)
        self._make = functools.partial(PeerThread, local, settings, greeting, welcome, self._guarded(emit))
        self._witness = witness
        self.me, self._listen, self.port, self.sign = me, listen, 0, sign
        self._posted: dict[tuple[PeerId, Kind], ReceivedShare] = {}
        self._heard: Callable[[ReceivedShare], None] | None = None
        self._lost: Callable[[PeerId], None] = lambda peer: None
        self._told = asyncio.Event()

    def start(self) -> None:
        """Bind and begin; ConnectError when the port is in use. Call it on the event loop."""
        keep_freed()  # libzmq makes a buffer for each message that it encrypts or decrypts
        self._thread = self._make()
        self._thread.heard, self._thread.lost = self._hear, self._lose
        self._links, self._courier = self._thread.links, self._thread.courier
        self._submit = self._thread.submit
        self._thread.witness = self._guarded(self._witness)
        self.port = self._thread.start(self._listen)

    def _guarded(self, tell: Callable[..., object]) -> Callable[..., None]:
        """What cannot be written down, on a full disk say, ends the thread; who waits for it is told."""

        def told(*what: object) -> None:
            try:
                tell(*what)
            except (FedtrainError, OSError) as e:
                error = e

                def fail() -> None:
                    raise error

                with suppress(ConnectError):  # it has ended already
                    self._submit(fail)

        return told

    async def stop(self) -> None:
        """Say good-bye and close."""
        await asyncio.to_thread(self._thread.stop)

    @property
    def bytes_in(self) -> int:
        return self._courier.receiver.bytes_in

    @property
    def bytes_out(self) -> int:
        return self._courier.sender.bytes_out

    def connected(self) -> list[PeerId]:
        """The peers with whom we agree and are connected, sorted."""
        return sorted(link.peer for link in self._links if link.agreed)

    def trouble(self, peer: PeerId) -> str:
        """Why there is no connection with this peer, and where it was called."""
        link = self._links.get(peer)
        if link is None or link.contact is None or link.contact.address is None:
            if self._listen is None:
                return f"neither {peer} nor {self.me} accepts calls: set network.listen at one of them"
            return f"{peer} has to call us"
        return f"{peer} ({link.contact.address}: {link.trouble or 'no answer yet'})"

    def refusal(self, peer: PeerId) -> str:
        """Why one of both refuses the other, though they are connected; "" where neither does."""
        link = self._links.get(peer)
        return "" if link is None else link.refused or link.rejected

    def view(self) -> View:
        """The peers that are alive, by SWIM: the same for all peers, but for moments in which it changes."""
        return self._thread.view

    def differing(self) -> list[PeerId]:
        """Peers near this one that are alive, and whose last word was of another view than this peer has."""
        view, told = self.view(), dict(self._courier.state.epochs)
        here = self.near & {*view.alive}
        return sorted(peer for peer in here if told.get(peer, view.epoch) != view.epoch)

    def connect(self, peers: Iterable[PeerId]) -> None:
        """Call these peers now, rather than when there is first something to say."""
        self._call(peers, lambda: None)

    def keep(self, peers: Iterable[PeerId] | None = None) -> None:
        """Be connected with this peer's circle of the overlay and with these, and soon with no others;
        None: with those of the last call."""
        kept = None if peers is None else frozenset(peers)
        self._submit(lambda: self._thread.keep(kept))

    @property
    def near(self) -> frozenset[PeerId]:
        """Whom this peer is to be connected with: all others where they are few."""
        return self._thread.near

    def end_after(self, round: int) -> None:
        """Tell all peers that this one would end the run after that round."""
        self._submit(lambda: self._thread.membership.end_after(round))

    def ends(self) -> Mapping[PeerId, int]:
        """After which round each peer would end the run, this one too, of those that have said so."""
        return self._thread.ends

    def state_head(self, head: AuditHead) -> None:
        """Tell those that are connected how this peer's audit log stands."""
        what = Header(Kind.HEAD), (encode(head),)
        say = self._courier.outbox.extend
        self._submit(lambda: say((link.peer, *what) for link in self._links if link.agreed))

    def announce(self, round: int, to: Iterable[PeerId] | None = None) -> None:
        self._submit(lambda: self._thread.announce(round))  # to all that are connected, for `progress`

    def account(self, counted: Mapping[PeerId, Account]) -> None:
        snapshot = dict(counted)
        self._submit(lambda: setattr(self._courier.state, "counted", snapshot))

    def accounts(self) -> Mapping[PeerId, tuple[int, Account]]:
        return dict(self._courier.state.told)

    def progress(self) -> dict[PeerId, int]:
        return {peer: round for peer, round in self._courier.progress.items() if peer in self.near}

    def reached(self) -> dict[PeerId, int]:
        """The round that each peer near this one announced last, those too that have left."""
        return {peer: round for peer, round in self._courier.reached.items() if peer in self.near}

    async def exchange(
        self, round: int, shares: Mapping[PeerId, Share], expected: Sequence[PeerId], mixer: Mixer,
        deadline_s: float,
    ) -> Exchanged:  # fmt: skip
        done: asyncio.Future[Exchanged] = self._thread.promises.new()
        begin = lambda: self._thread.begin(done, round, shares, expected, mixer, deadline_s)
        self._call({*shares, *expected}, begin)
        try:
            return await done
        except asyncio.CancelledError:
            with suppress(ConnectError):  # it is closed
                self._submit(lambda: self._courier.abandon(time.monotonic()))
            raise

    def post(self, round: int, shares: Mapping[PeerId, Share], *, answers: bool = False) -> None:
        self._call(shares, lambda: self._thread.post(round, shares, answers))

    def take(self) -> list[ReceivedShare]:
        posted, self._posted = self._posted, {}
        return [posted[key] for key in sorted(posted)]

    def listen(self, heard: Callable[[ReceivedShare], None], lost: Callable[[PeerId], None]) -> None:
        self._heard, self._lost = heard, lost

    async def until(self, over: Callable[[], bool], timeout_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not over():
                    self._told.clear()
                    await self._told.wait()
        return over()

    def publish(self, round: int, share: Share) -> None:
        self._submit(lambda: self._courier.publish(round, share))

    async def pull(self, peer: PeerId, timeout_s: float) -> ReceivedShare | None:
        answer: asyncio.Future[ReceivedShare | None] = self._thread.promises.new()
        self._call([peer], lambda: self._thread.pull(peer, answer))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            with suppress(ConnectError):
                self._submit(lambda: self._thread.forget_pull(peer))

    def revoked(self) -> None:
        """The roster has changed: cut off at once the peers that are no longer on it, or have another key."""
        self._submit(self._thread.refresh_roster)

    def _hear(self, posted: Mapping[tuple[PeerId, Kind], ReceivedShare]) -> None:
        if self._heard is None:
            self._posted |= posted
        else:
            for key in sorted(posted):
                self._heard(posted[key])
        self._told.set()

    def _lose(self, peer: PeerId) -> None:
        self._lost(peer)
        self._told.set()

    def _call(self, peers: Iterable[PeerId], then: Callable[[], object]) -> None:
        """Have the thread call these peers, where they are not connected, and then do something."""

        def command() -> None:
            for peer in peers:
                self._links.to(peer)
            then()

        self._submit(command)
