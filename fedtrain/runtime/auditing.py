"""Who signs an audit log, who keeps the signed heads of whom, and what a log is checked against.

After each round the aggregator sends all sites its log's signed head, and each site answers with its own,
which says whose head it had before it: so each signature of one end stands in the log of the other one, and
neither can rewrite the past. Peers, who are equals, each state one head to those that they are connected
with, and keep the others' in their logs, which their next heads cover. With a head goes the newest one that
its sender has of the addressee: an addressee whose log does not have it says so in its log, and to people.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

import msgspec

from ..config import Config
from ..errors import CertificateError, ConnectError, FedtrainError, Unreadable
from ..events import Emit, Event, HeadWitnessed, LogDisputed, Notice, RoundCommitted
from ..messages import SiteId
from ..pki import Credentials
from ..pki.identity import Current, certificates, identity_of
from ..pki.signing import Signed, Signer, Verifier, signed_claim
from ..tracking.audit import AuditLog, LogHead, audit_file, head_file, lines_of, signed_head
from ..wire.frames import AuditHead

CONTEXT = b"fedtrain audit head;"

ROLES = {"aggregator": "aggregator"}  # of a log's name; any other name is a site's
DATACENTER = "datacenter"  # whose log nobody signs, where it has no certificate
UNSIGNED = b"unsigned"  # in the place of a certificate


def audited(config: Config, name: str, emit: Emit, credentials: Credentials | Current | None = None) -> Audit:
    """The open audit log of this role, and `emit` as what it does not keep; without `credentials` nobody
    signs it. Current ones sign with the renewed certificate from then on."""
    path = audit_file(config, name)
    if credentials is None:
        known, _ = _signed_head(path, None)
        return Audit(AuditLog(path, unsigned, known=known), emit, None)

    def now() -> Credentials:
        return credentials if isinstance(credentials, Credentials) else credentials()

    known, _ = _signed_head(path, now().root)
    return Audit(AuditLog(path, lambda head: signing(now())(head), known=known), emit, now().root)


def datacenter_credentials(config: Config) -> Credentials | None:
    """Who signs the log of a datacenter: the holder of the certificate that the authority issued to that
    name; None where there is none."""
    folder = config.root / config.network.certs / "sites" / DATACENTER
    return Credentials.load(folder) if (folder / "cert.pem").exists() else None


def unsigned(head: LogHead) -> bytes:
    """The bytes of a head that nobody signs."""
    return Signed(claim=msgspec.msgpack.encode(head), signature=b"", certificate=UNSIGNED).encode()


@cache
def signing(credentials: Credentials) -> Callable[[LogHead], bytes]:
    """What signs heads with these credentials."""
    signer = Signer.of(credentials)
    return lambda head: Signed.by(signer, CONTEXT, head).encode()


def framed(signed: bytes) -> AuditHead:
    """A signed head as it travels."""
    whole = msgspec.msgpack.decode(signed, type=Signed)
    bare = msgspec.structs.replace(whole, certificate=b"")
    return AuditHead(signed=bare.encode(), certificate=whole.certificate)


@dataclass
class Audit:
    """An open audit log, and the other ends' heads in it."""

    log: AuditLog
    emit_on: Emit
    root: bytes | None  # the federation's, in PEM
    after_round: Callable[[], None] = lambda: None  # called when a round is committed
    _stating: set[asyncio.Task[None]] = field(default_factory=set)
    _heard: set[SiteId] = field(default_factory=set)  # whose heads came since the last own round
    _known: set[tuple[SiteId, bytes]] = field(default_factory=set)  # certificates that the log has
    _shown: dict[SiteId, bytes] = field(default_factory=dict)  # the newest certificate that each has sent

    def emit(self, event: Event) -> None:
        """Add an event to the log, if it is of a kind that is kept, and tell whoever hears of events."""
        self.log.append(event)
        self.emit_on(event)
        if isinstance(event, RoundCommitted):
            self.after_round()

    def close(self) -> None:
        self.log.close()

    def statement(self) -> AuditHead:
        """This log's signed head, for all."""
        return framed(self.log.stated())

    def state_after_rounds(self, state: Callable[[AuditHead], object], every_s: float = 0.0) -> None:
        """Have the head stated after each round, when the disk has the log: no round waits for that. Rounds
        that follow in less than `every_s` have one head."""
        next_s = 0.0

        async def work() -> None:
            # Whoever would be told is gone; or the disk is full, which the next line of the log tells.
            with suppress(ConnectError, Unreadable):
                state(await asyncio.to_thread(self.statement))

        def begin() -> None:
            nonlocal next_s
            self._heard.clear()
            if (now := time.monotonic()) < next_s:
                return
            next_s = now + every_s
            self._stating.add(task := asyncio.create_task(work()))
            task.add_done_callback(self._stating.discard)

        self.after_round = begin

    async def stated(self) -> None:
        """What is being stated is."""
        await asyncio.gather(*self._stating, return_exceptions=True)

    def overheard(self, who: SiteId, frame: AuditHead) -> None:
        """`witness`, of an equal that nobody asked: of each one head for each own round, so that none fills
        this log."""
        if who not in self._heard:
            self._heard.add(who)
            self.witness(who, frame)

    def place_of(self, who: SiteId) -> tuple[int, str] | None:
        """The newest head of another log that is kept here: its lines, and the last one's seal."""
        kept = self.log.witnessed.get(who)
        return None if kept is None else _claim(b64decode(kept.claim)).place

    def answer(self, frame: AuditHead, who: SiteId = "aggregator") -> AuditHead:
        """Keep the head that another end states; this log's own, which countersigns that one."""
        self.witness(who, frame)
        return framed(self.log.stated(self.place_of(who)))

    def witness(self, who: SiteId, frame: AuditHead) -> None:
        """Keep the head that another end states. What is no head, or denies an earlier one, is told."""
        try:
            shown = self._shown[who] = frame.certificate or self._shown.get(who, b"")
            bare = msgspec.msgpack.decode(frame.signed, type=Signed)
            signed = msgspec.structs.replace(bare, certificate=shown)
            head = self._checked(who, signed.encode())
        except (FedtrainError, msgspec.MsgspecError, ValueError) as e:
            self._dispute(who, f"no head of the audit log of {who}: {e}")
            return
        for place in (frame.seen, head.seen):
            if place is not None and not self.log.holds(place):
                self._dispute(who, f"{who} has seen a line {place[0]} of this log that is not in it")
        last = self.place_of(who)
        if last is not None and head.lines < last[0]:
            text = f"the log of {who} had {last[0]} lines, and has {head.lines} now"
            self._dispute(who, f"{text}: lines were cut off, or the log begun anew")
        if last != head.place:
            new = "" if (who, signed.certificate) in self._known else signed.certificate.decode()
            self._known.add((who, signed.certificate))
            claim, signature = b64encode(signed.claim).decode(), b64encode(signed.signature).decode()
            self.log.append(HeadWitnessed(of=who, claim=claim, signature=signature, certificate=new))

    def _checked(self, who: SiteId, signed: bytes) -> LogHead:
        assert self.root is not None, "only who has a root can check what others sign"
        return checked(self.root, who, signed)

    def _dispute(self, who: SiteId, reason: str) -> None:
        self.log.append(LogDisputed(of=who, reason=reason))
        self.emit_on(Notice(text=f"audit: {reason} (fedtrain audit verify)"))


def checked(root: bytes, who: SiteId, signed: bytes, *, then: bool = False) -> LogHead:
    """The head that `who` has signed; CertificateError unless it is of its own log, and its certificate leads
    to the root and is valid, or was (`then`)."""
    certificate = msgspec.msgpack.decode(signed, type=Signed).certificate
    federation, role = _federation(certificate), ROLES.get(who, "site")
    verifier = _verifier(root, federation)
    if then:
        issued = certificates(certificate)[0].not_valid_before_utc
        verifier = Verifier(root, federation, now=lambda: issued)
    signer, head, _ = signed_claim(signed, LogHead, CONTEXT, "head of an audit log", verifier, role)
    if signer != who or head.log != who:
        raise CertificateError(f"{signer} has signed a head of {head.log}'s log, not {who}")
    return head


@cache
def _verifier(root: bytes, federation: str) -> Verifier:
    return Verifier(root, federation)


@lru_cache(maxsize=1024)
def _federation(certificate: bytes) -> str:
    return identity_of(certificate).federation


def _claim(data: bytes) -> LogHead:
    return msgspec.msgpack.decode(data, type=LogHead)


# --- `fedtrain audit verify`


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a log was found to be; with --json as it stands here."""

    log: str
    lines: int
    since: float | None  # seconds since 1970
    until: float | None
    signed: int  # lines that the signed head covers; 0: nobody has signed it
    witnessed: dict[str, int]  # whose signed heads are in it, and how many
    torn_bytes: int  # of a last line that was not finished
    disputes: list[str]  # what the log itself says that other ends hold against it, or it against them
    problems: list[str]
    lost: list[str] = []  # what is missing because the log was restored from a copy


def verify(path: Path, root: bytes | None, others: Sequence[Path] = (), restored: int = 0) -> Verdict:
    """Check a log by itself, and against the heads of it that are in `others`, the other ends' logs. `root`:
    the federation's, in PEM; None: signatures are not checked. `restored`: the line from which on the log was
    lost, once, as it was restored from a copy; 0: it was not."""
    lines, heads = list(lines_of(path)), list(_heads_in(path, root))
    seals = [line.seal for line in lines]
    problems = [
        f"line {line.number} was changed, or one before it is missing" for line in lines if not line.good
    ]

    def missing(place: tuple[int, str] | None) -> bool:
        return place is not None and place[0] > 0 and seals[place[0] - 1 : place[0]] != [place[1]]

    signed, why = _signed_head(path, root)
    problems += why
    if signed is not None and missing(signed.place):
        cut = signed.lines - len(lines)
        what = f"{cut} lines were cut off at its end" if cut > 0 else "what it was signed over was rewritten"
        problems.append(f"the signed head is of {signed.lines} lines, the log has {len(lines)}: {what}")
    found: dict[str, int] = {}
    for who, head, fault in heads:
        found[who] = found.get(who, 0) + 1
        if fault or head is None:
            problems.append(f"a head of {who}: {fault}")
        elif missing(head.seen):
            problems.append(f"{who} has signed that it saw a line {head.seen and head.seen[0]}, not this one")
    lost: list[str] = []
    for other in others:
        of_this = [(head, fault) for who, head, fault in _heads_in(other, root) if who == path.stem]
        problems += [f"{other.stem} has a head of this log: {fault}" for _, fault in of_this if fault]
        places = [head.place for head, _ in of_this if head is not None]
        gone = [place[0] for place in places if missing(place)]
        if gone:
            first, at_once = min(gone), [missing(place) for place in places].index(True)
            what = f"{other.stem} keeps {len(gone)} signed heads of this log that are not in it, the first of"
            once = all(map(missing, places[at_once : at_once + len(gone)]))
            if 0 < restored <= first and once:
                lost.append(f"{what} line {first}. All heads after them are in it")
            else:
                mend = f"Was the log restored from a copy then? fedtrain audit verify --restored {first}"
                problems.append(f"{what} line {first}: the log was rewritten, or cut. {mend * once}".rstrip())
        if not of_this:
            problems.append(f"{other.stem} keeps no head of this log: nothing was checked against it")
    disputes = [line.entry.reason for line in lines if isinstance(line.entry, LogDisputed)]
    times = [line.entry.time for line in lines if line.entry is not None]
    size = sum(len(text) for text in path.read_bytes().rpartition(b"\n")[2:])
    return Verdict(
        log=path.stem, lines=len(lines), since=min(times, default=None), until=max(times, default=None),
        signed=signed.lines if signed is not None and _has_signer(path) else 0, witnessed=found,
        torn_bytes=size, disputes=disputes, problems=problems, lost=lost,
    )  # fmt: skip


def _has_signer(path: Path) -> bool:
    """Whether a log's head, which can be read, was signed with a key."""
    signed = msgspec.msgpack.decode(signed_head(path) or b"", type=Signed)
    return signed.certificate != UNSIGNED


def _signed_head(path: Path, root: bytes | None) -> tuple[LogHead | None, list[str]]:
    """The signed head of a log, and what is wrong with it."""
    file, data = head_file(path), signed_head(path)
    if data is None:
        return None, [f"{file.name} is missing: nothing says how long the log must be"]
    try:
        signed = msgspec.msgpack.decode(data, type=Signed)
        head = _claim(signed.claim)
        if root is not None and (signed.certificate != UNSIGNED or path.stem != DATACENTER):
            head = checked(root, path.stem, data, then=True)  # whether it has expired since is no matter
    except (FedtrainError, msgspec.MsgspecError, ValueError) as e:
        return None, [f"{file.name} is not signed by {path.stem}: {e}"]
    return head, []


def _heads_in(path: Path, root: bytes | None) -> Iterator[tuple[str, LogHead | None, str]]:
    """The other ends' heads in a log: whose, the head, and what is wrong with it."""
    shown: dict[str, bytes] = {}
    for line in lines_of(path):
        if isinstance(entry := line.entry, HeadWitnessed):
            try:
                shown[entry.of] = entry.certificate.encode() or shown[entry.of]
                claim = b64decode(entry.claim, validate=True)
                signature = b64decode(entry.signature, validate=True)
                head = _claim(claim)
                if root is not None:
                    signed = Signed(claim=claim, signature=signature, certificate=shown[entry.of]).encode()
                    head = checked(root, entry.of, signed, then=True)
                yield entry.of, head, ""
            except (FedtrainError, msgspec.MsgspecError, ValueError, KeyError) as e:
                yield entry.of, None, f"it can't be checked: {e}"


def root_of(config: Config) -> bytes | None:
    """The federation's root certificate, in PEM, where there is one in the project's certs folder."""
    certs = config.root / config.network.certs
    found = [certs / "ca", certs / "aggregator", *sorted((certs / "sites").glob("*"))]
    return next((path.read_bytes() for each in found if (path := each / "root.pem").exists()), None)
