"""A peer's model as it travels: vectors out of an arena and back, parcels as bytes, and their check.

`share_of` makes the bytes of a parcel; an `Inbox` checks bytes that came before they are mixed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from ...arena import Arena, narrow_into, widened
from ...digest import digest_of
from ...errors import BadUpdate, ConfigError, TaskError, WireError
from ...exchange import PeerId, ReceivedShare, Share, ShareHeader
from ...gossip import Blend, Fold, Parcel
from ...pki.identity import LABEL
from ...schema import ALIGN, FLOATS, Schema
from ...store.rounds import MadeOf
from ...wire.codec import decode
from ..star.checks import finite, flaw

if TYPE_CHECKING:
    import torch

    Vector = torch.Tensor

PART_TYPES = (*FLOATS, "uint8", "int32", "int64")  # dtypes that a part may have
MOST_MASS = 1e4  # of one peer in push-sum; all peers together have as much as there are peers
LEAST_MASS = 1e-4  # of which no more is given away
OF_SOME = re.compile(r"(sum|[0-9a-f]{16})/")  # how parts begin that are for some peers only


def trained_part(arena: Arena) -> Vector:
    """All trained coordinates as one vector, float32 or float64; a view where they lie in one piece."""
    parts = [widened(vector) for vector in arena.trained().values()]
    return parts[0] if len(parts) == 1 else _joined(parts)


def other_parts(arena: Arena) -> dict[str, Vector]:
    """The parts that are averaged plainly, by dtype: buffers. Booleans and bytes do not travel."""
    return {f"other/{dtype}": widened(vector) for dtype, vector in arena.others().items()}


def write(arena: Arena, trained: Vector, others: Mapping[str, Vector]) -> Arena:
    """Write both into an arena, each rounded once to its own dtype."""
    at = 0
    for vector in arena.trained().values():
        vector.copy_(trained[at : at + len(vector)])
        at += len(vector)
    for dtype, vector in arena.others().items():
        if (other := others.get(f"other/{dtype}")) is not None:
            narrow_into(vector, other)
    arena.changed()
    return arena


def _joined(parts: list[Vector]) -> Vector:
    import torch

    if not parts:
        raise ConfigError("the task's model has no trained parameters: there is nothing to agree on")
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parts) else torch.float32
    return torch.cat([p.to(dtype) for p in parts])


# --- whole models, as a late joiner is given one


NOTE_BYTES = 3840  # of names and votes that go with a model: its note has 4 KiB at most
Name = Annotated[str, msgspec.Meta(pattern=rf"^{LABEL}\Z")]


class StateNote(msgspec.Struct, array_like=True, frozen=True):
    """What goes with a whole model."""

    digest: bytes
    models: int = 0  # as in MadeOf, of the one that peers agreed on
    of: list[Name] = []
    attempt: int = 0
    votes: dict[Name, bytes] = {}


def state_of(letter: ReceivedShare, schema: Schema) -> Arena:
    """The model that a neighbour gave; BadUpdate unless it is whole, of our kind, and can be trained."""
    data = letter.share.payload
    if len(data) != schema.nbytes or digest_of(data).encode() != _state_note(letter).digest:
        raise BadUpdate("it is not the model that it says")
    model = Arena.wrap(schema, data)
    if problem := flaw(model, {}):
        raise BadUpdate(problem)
    return model


def made_of(letter: ReceivedShare) -> MadeOf:
    """Of whose models the one is made that a peer gave, as that peer says."""
    note = _state_note(letter)
    return MadeOf(max(note.models, len(note.of)), note.of, note.attempt, note.votes)


def share_of_model(model: Arena, made_of: MadeOf = MadeOf()) -> Share:
    """A model and its digest. No peer writes to a model once it is there."""
    room = NOTE_BYTES - sum(1 + len(name) for name in made_of.of)
    of = [*made_of.of] if room > 0 else []
    fit = room >= sum(4 + len(name) + len(vote) for name, vote in made_of.votes.items())
    votes = dict(made_of.votes) if fit else {}
    note = StateNote(model.digest.encode(), made_of.models, of, made_of.attempt, votes)
    return Share(model.payload, note=msgspec.msgpack.encode(note))


def _state_note(letter: ReceivedShare) -> StateNote:
    try:
        found: StateNote = decode(letter.share.note, StateNote)
    except WireError as e:
        raise BadUpdate(f"its note can't be read: {e}") from None
    return found


# --- parcels as bytes


class ParcelHeader(msgspec.Struct, array_like=True):
    """The parts of a parcel, in the order of its bytes, and its numbers."""

    parts: list[tuple[str, str, int]]  # name, dtype, how many
    fields: dict[str, float]


def share_of(parcel: Parcel, weight: float, degree: int) -> Share:
    """The bytes of a parcel; without a copy when it has one part. Each part begins on 64 bytes."""
    import torch

    blocks = [part.contiguous().view(torch.uint8) for part in parcel.parts.values()]
    if len(blocks) > 1:
        data = torch.zeros(sum(map(_padded, map(len, blocks))), dtype=torch.uint8)
        at = 0
        for block in blocks:
            data[at : at + len(block)] = block
            at += _padded(len(block))
    else:
        data = blocks[0] if blocks else torch.empty(0, dtype=torch.uint8)
    note = ParcelHeader(
        [(name, str(p.dtype).removeprefix("torch."), p.numel()) for name, p in parcel.parts.items()],
        dict(parcel.fields),
    )
    return Share(memoryview(data.numpy().data), weight, degree, note=msgspec.msgpack.encode(note))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class Inbox:
    """exchange.Mixer: what neighbours send goes into a round's blends, chunk by chunk, or is kept whole.

    A parcel is checked before it is used: parts that we have too are of our type and size, the others small
    enough to hold, and every number and value is finite (S16, S17).
    """

    def __init__(
        self, blends: Mapping[str, Fold], like: Mapping[str, torch.Tensor], most_bytes: int,
        optional: Collection[str] = (), sums: Collection[str] = (),
        agreed: Mapping[PeerId, float] | None = None, patient: bool = False,
    ) -> None:  # fmt: skip
        """`like`: our own parts; a parcel may lack the `optional` ones, or have them in other sizes.
        Parts that are not blended may have `most_bytes` together. `sums`: parts whose sum over all peers
        must stay: they count by their givers' weights, and nothing of a parcel is blended before all of it is
        here. `agreed`: the weights that givers must have used, where they are in the bytes. `patient`: all
        shares are waited for, those of slow peers too, as none counts without the others."""
        self._agreed, self.patient = agreed, patient
        self.waits = False  # whether this peer has nothing else to do until they are here
        self._blends, self._most, self._sums, self._whole = blends, most_bytes, sums, bool(sums)
        self._weights: dict[PeerId, float] = {}
        self._like = {name: part for name, part in like.items() if name not in optional}
        self._parts: dict[PeerId, list[_Part]] = {}
        self._fields: dict[PeerId, dict[str, float]] = {}

    def begin(self, offer: ShareHeader) -> None:
        import torch

        note = _checked_note(offer.note)
        if self._sums and not 0 < offer.weight <= 1:
            raise BadUpdate(f"a share of weight {offer.weight:g}")
        if self._agreed is not None and offer.weight != (due := self._agreed[offer.peer]):
            raise BadUpdate(f"it counts {offer.weight:g} by its view of who is here, {due:g} by ours")
        self._weights[offer.peer] = offer.weight
        at, parts = 0, []
        for name, dtype_name, numel in note.parts:
            dtype: torch.dtype = getattr(torch, dtype_name)
            mine = self._like.get(name)
            if mine is not None and (mine.dtype, mine.numel()) != (dtype, numel):
                raise BadUpdate(f"{name[:64]} is {dtype_name}[{numel}], ours {mine.dtype}[{mine.numel()}]")
            parts.append(_Part(name, dtype, at, numel * dtype.itemsize))
            at += parts[-1].nbytes if len(note.parts) == 1 else _padded(parts[-1].nbytes)
        if at != offer.nbytes:
            raise BadUpdate(f"{offer.nbytes} bytes, its parts have {at}")
        if missing := self._like.keys() - {part.name for part in parts}:
            raise BadUpdate(_lacks(missing))
        whole = [part for part in parts if part.name not in self._blends]
        if (nbytes := sum(part.nbytes for part in whole)) > self._most:
            raise BadUpdate(f"{nbytes} bytes to be held, at most {self._most} are allowed")
        for part in parts if self._whole else whole:
            part.held = torch.empty(part.nbytes, dtype=torch.uint8)
        self._parts[offer.peer], self._fields[offer.peer] = parts, note.fields
        for blend in () if self._whole else self._blends.values():
            blend.begin(offer.peer, note.fields)

    def mix(self, peer: PeerId, offset: int, chunk: memoryview) -> None:
        import torch

        lent = bytearray(chunk) if chunk.readonly else chunk  # torch takes no read-only memory
        data = torch.frombuffer(lent, dtype=torch.uint8)
        for part in self._parts[peer]:
            start, stop = max(part.start, offset), min(part.start + part.nbytes, offset + len(data))
            if start >= stop:
                continue
            piece = data[start - offset : stop - offset]
            values = piece.view(part.dtype)
            if part.dtype.is_floating_point and not finite(values):
                raise BadUpdate(f"{part.name} has NaN or Inf")
            if isinstance(self._blends.get(part.name), Blend) and not good(values):  # a rule may take them
                raise BadUpdate(f"{part.name} has values whose squares are beyond {values.dtype}")
            if part.held is None:
                self._blends[part.name].add(peer, values)
            else:
                part.held[start - part.start : stop - part.start] = piece

    def end(self, peer: PeerId, nbytes: int) -> None:
        """The exchange knows whose parcel came whole; `whole` ones are blended now."""
        parts = self._parts[peer]
        if self._whole and nbytes >= max(part.start + part.nbytes for part in parts):
            for part in parts:
                if (blend := self._blends.get(part.name)) is not None and part.held is not None:
                    blend.begin(peer, self._fields[peer])
                    if part.name in self._sums and isinstance(blend, Blend):
                        blend.given(peer, self._weights[peer])
                    blend.add(peer, part.held.view(part.dtype))
                    part.held = None

    def parcel(self, peer: PeerId) -> Parcel:
        """The parts of a neighbour's parcel that were not blended. The parcel must have come whole."""
        held = {p.name: p.held.view(p.dtype) for p in self._parts[peer] if p.held is not None}
        return Parcel(held, self._fields[peer])


@dataclass
class _Part:
    name: str
    dtype: torch.dtype
    start: int  # bytes, in the payload
    nbytes: int
    held: torch.Tensor | None = None  # uint8; None where it is blended


def _lacks(missing: Collection[str]) -> str:
    """What a parcel is not that lacks these parts; some bear a mark of the peers that they are for."""
    if any(OF_SOME.match(name) for name in missing):
        return "it is for other peers than those whom this peer counts as here, or for other keys of theirs"
    return f"it has no {', '.join(sorted(missing))}"


def good(values: torch.Tensor) -> bool:
    """Whether the values are finite, and their squares, as in checks.flaw; what is not floats always is."""
    if not values.is_floating_point():
        return True
    wide = widened(values)
    return math.isfinite(float(wide.dot(wide)))


def check_finite(x: Vector, name: PeerId, round: int) -> None:
    """TaskError unless a peer's own model is good; what neighbours gave was looked at as it came."""
    if not good(x):
        raise TaskError(
            f"round {round + 1}: the model of {name} has NaN, Inf or values whose squares are beyond "
            f"their dtype, and is not kept: training diverges. Lower train.lr, or set train.clip_norm."
        )


def _checked_note(note: bytes) -> ParcelHeader:
    try:
        found: ParcelHeader = decode(note, ParcelHeader)
    except WireError as e:
        raise BadUpdate(f"its note can't be read: {e}") from None
    if any(dtype not in PART_TYPES or numel < 0 for _, dtype, numel in found.parts):
        raise BadUpdate(f"its parts are not of {', '.join(PART_TYPES)}")
    if not all(math.isfinite(value) for value in found.fields.values()):
        raise BadUpdate("its numbers are not finite")
    if not 0 < found.fields.get("mass", 1.0) <= MOST_MASS:
        raise BadUpdate(f"its mass is {found.fields['mass']:g}, not between 0 and {MOST_MASS:g}")
    return found
