"""Names and seeds made of bytes: a model's digest, and the seed that belongs to a purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec


class Digest:
    """The name of a model's bytes: 128 bits of AES-GCM's authenticator under a key that everybody knows.

    It finds truncated, mixed and damaged bytes at 6.5 GB/s, where SHA-256 takes the time of the transfer
    itself (1.5 GB/s). It is no commitment: whoever wants to can make two contents with one digest. On the
    way TLS guards the bytes, at rest each site has an inbox of its own; what must bind (a task's code, an
    exported model) has a SHA-256.
    """

    def __init__(self) -> None:
        self._mac: Any = _cipher().encryptor()

    def update(self, data: bytes | memoryview) -> None:
        """The next bytes; releases the GIL."""
        for at in range(0, len(data), 1 << 30):
            self._mac.authenticate_additional_data(data[at : at + (1 << 30)])

    def hexdigest(self) -> str:
        """32 hex digits; ends the digest."""
        self._mac.finalize()
        tag: bytes = self._mac.tag
        return tag.hex()


@cache
def _cipher() -> Any:
    """Made once: checking its parameters takes twice as long as the digest of a small model."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(bytes(16)), modes.GCM(bytes(12)))


@cache
def package_digest() -> str:
    """SHA-256 in hex of the names and bytes of this package's Python files, worked out once a process: the
    same for a wheel and for the sources that it was built from."""
    root, whole = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        whole.update(f"{path.relative_to(root).as_posix()} {sha256_of(path)}\n".encode())
    return whole.hexdigest()


class PiecewiseDigest:
    """A Digest of bytes that threads write piece by piece, taken of those that are there already."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._end = data, 0  # of what is digested
        self._pieces: dict[int, int] = {}  # start -> stop of written ones beyond that
        self._idle = [Digest()]  # empty while somebody is at it; a list's pop and append are atomic

    def wrote(self, start: int, stop: int) -> None:
        """Bytes that will not change any more. Whoever brings the next one in line digests all that follow;
        nobody waits for that."""
        self._pieces[start] = stop
        while self._end in self._pieces:
            try:
                digest = self._idle.pop()
            except IndexError:
                return  # who has it looks again when it is done
            while (end := self._pieces.pop(self._end, 0)) > self._end:
                digest.update(self._data[self._end : end])
                self._end = end
            self._idle.append(digest)

    def hexdigest(self) -> str:
        """Of all bytes, when nobody writes any more; ends the digest."""
        digest = self._idle.pop()
        digest.update(self._data[self._end :])
        return digest.hexdigest()


def digest_of(data: bytes | memoryview) -> str:
    """The Digest of these bytes, 32 hex digits."""
    digest = Digest()
    digest.update(data)
    return digest.hexdigest()


def seed_of(*parts: object) -> int:
    """A 63-bit seed from what it is for, as in seed_of(run_seed, round, site): the same on every machine,
    whatever ran before it."""
    text = "\x1f".join(str(p) for p in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def settings_digest(agreed: Mapping[str, str]) -> str:
    """SHA-256 over the settings that all ends of a run share: what its start tells, and a model's card."""
    return hashlib.sha256(msgspec.json.encode(dict(sorted(agreed.items())))).hexdigest()
