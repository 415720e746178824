"""What a site keeps from one training to the next, such as what a compressor left out.

    memory/cleveland/
      <round>-<digest>     the state after the training of that round

Only the aggregator knows whether an update counted: it may come late, be refused, or belong to a round that
fails. So a state is never written over by the next one. `Train.counted` names the last round in which this
site's update is in the model, and training begins with the state after that one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from ..arena import Arena
from ..digest import digest_of
from ..errors import Forgotten, some
from ..events import Emit, Event, Notice, RoundCommitted
from ..messages import SiteId
from ..schema import Schema
from .disk import explained, private_folder, write_whole

NEVER = -1  # in place of a round: no update of this site counted yet
OTHER_DATA = (
    "round {}: the data of {} are not those of the rounds before (their number, shapes, types or values). "
    "The run goes on with them; --fresh begins it anew. If you changed nothing, data() gives other values "
    "each time: seed what it draws"
)
TAIL = struct.Struct("<I")  # after an arena and its schema: the schema's length


class SiteMemory:
    """One site's states: after the last round that counted, the one before it, and the newest."""

    def __init__(self, folder: Path, *, durable: bool, needed: bool = False) -> None:
        """`durable` waits for the disk, so that a power cut loses nothing either. `needed`: a site can't do
        without its state."""
        self._folder, self._durable, self._needed = folder, durable, needed

    @property
    def empty(self) -> bool:
        return not self._states()

    def load(self, counted: int) -> Arena:
        """The state after that round. Forgotten when it is not here, or not as it was written."""
        path, name = self._states().get(counted), f"memory/{self._folder.name}"
        if path is None:
            raise Forgotten(
                f"{name} has no state after round {counted + 1}, the last one in which this site counted. "
                f"{advice(self._needed)}"
            )
        if (state := checked(bytearray(path.read_bytes()), path.name.partition("-")[2])) is None:
            raise Forgotten(f"{name}/{path.name} is damaged. {advice(self._needed)}")
        return state

    def keep(self, round: int, counted: int, state: Arena) -> None:
        """Write down the state after a round that began with the one after `counted`."""
        data = packed(state)
        path = self._folder / f"{round}-{digest_of(data)}"
        states = self._states()
        for number in needless(states, counted):
            if states[number] != path:
                states[number].unlink()
        if not path.exists():
            with explained(self._folder):
                private_folder(self._folder.parent)
                private_folder(self._folder)
            write_whole(path, data, durable=self._durable)

    def _states(self) -> dict[int, Path]:
        """Round -> file."""
        names = (path.name for path in self._folder.glob("*-*") if path.suffix != ".new")
        return {int(name.partition("-")[0]): self._folder / name for name in names}


def packed(state: Arena) -> bytes:
    """A state as it is kept: its bytes, its schema and the schema's length."""
    schema = msgspec.msgpack.encode(state.schema)
    return b"".join((state.payload, schema, TAIL.pack(len(schema))))


def checked(data: bytearray, digest: str) -> Arena | None:
    """The state in these very bytes; None unless they have the digest."""
    return unpacked(data) if digest_of(memoryview(data)) == digest else None


def unpacked(data: bytearray) -> Arena:
    """The state that was `packed`, in these very bytes."""
    (length,) = TAIL.unpack_from(data, len(data) - TAIL.size)
    schema = msgspec.msgpack.decode(data[-TAIL.size - length : -TAIL.size], type=Schema)
    return Arena.wrap(schema, data)


def needless(rounds: Collection[int], counted: int) -> list[int]:
    """The rounds whose states may go when one is written that began with the state after `counted`. That of
    the round before stays too, for the aggregator's store may go back a round."""
    before = max((number for number in rounds if number < counted), default=NEVER)
    return [number for number in rounds if number not in (counted, before)]


def advice(needed: bool) -> str:
    """What to do where a state is lost. `needed`: as in SiteMemory."""
    if needed:
        return (
            "Restore the folder from a copy. Without it this site can only join as a new one, under another "
            "name, or in another run."
        )
    return "Restore the folder, or remove it to begin without a state."


class DataNotes:
    """Digests of sites' training data in a run's folder. Several processes may note the same site."""

    def __init__(self, folder: Path) -> None:
        self._file, self._read = folder / "data.txt", 0  # lines "digest site"; a later one of a site counts
        self._last: dict[SiteId, str] = {}
        self._noted = set[SiteId]()
        self._changed()

    def note(self, site: SiteId, digest: Callable[[], str]) -> None:
        """Note what a site has, once in a process; nothing where the digest is ""."""
        if site not in self._noted and self._file.parent.is_dir():
            self._noted.add(site)
            if (found := digest()) not in ("", self._last.get(site)):
                with self._file.open("a") as file:
                    file.write(f"{found} {site}\n")

    def telling(self, emit: Emit) -> Emit:
        """`emit`, with a notice after a round that was trained on other data than the rounds before it."""

        def tell(event: Event) -> None:
            emit(event)
            if isinstance(event, RoundCommitted) and (sites := self._changed()):
                emit(Notice(text=OTHER_DATA.format(event.round, some(sites))))

        return tell

    def _changed(self) -> list[SiteId]:
        """The sites with other data than before, by what was noted since the last call."""
        text = self._file.read_text(errors="replace") if self._file.exists() else ""
        pairs = [line.partition(" ")[::2] for line in text.split("\n")[self._read : -1]]
        changed = sorted({site for digest, site in pairs if self._last.get(site, digest) != digest})
        self._read += len(pairs)
        self._last |= {site: digest for digest, site in pairs}
        return changed
