"""Encode messages and frames as bytes, and decode them; bytes of any other type raise WireError."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from ..arena import PATCHES, AnyArena, ArenaFile, Patch
from ..errors import BadUpdate, WireError
from ..schema import Schema
from .frames import MESSAGE_BYTES

UNFETCHED = Path()
Known = Mapping[str, Schema]  # digest -> schema: those that both ends have, which a header need not spell out
NOTHING: Known = MappingProxyType({})


def known(schemas: Iterable[Schema]) -> Known:
    """What both ends know when both have these schemas."""
    return {schema.digest: schema for schema in schemas}


class Named(msgspec.Struct, frozen=True, array_like=True):
    """An arena in a message's header: its name, while its bytes travel separately."""

    digest: str
    schema: Schema | str  # a str: the digest of one that both ends know
    ways: tuple[tuple[str, str], ...] = ()  # for each patch: the digest of its base, and its own digest
    patch: Schema | None = None  # the schema of the patches, the same for all of them


def encode(message: msgspec.Struct, known: Known = NOTHING) -> bytes:
    """A message's header. It names arenas by digest and schema, a `known` one by its digest too; their bytes
    travel separately. WireError when the header is over 4 MiB."""
    body = msgspec.msgpack.encode(message, enc_hook=partial(_name_arena, known))
    if len(body) > MESSAGE_BYTES:
        raise WireError(f"a header of {len(body)} bytes is over the limit of {MESSAGE_BYTES}")
    return body


def decode(body: bytes, kind: Any, known: Known = NOTHING) -> Any:
    """The message, checked against the type `kind`. Its arenas are ArenaFiles with bytes still to be fetched.
    WireError when the body is over 4 MiB or is no such message, or names a schema that is not `known`."""
    if len(body) > MESSAGE_BYTES:
        raise WireError(f"a frame of {len(body)} bytes is over the limit of {MESSAGE_BYTES}")
    try:
        if known is NOTHING:
            return _decoder(kind).decode(body)
        return msgspec.msgpack.decode(body, type=kind, dec_hook=partial(_see_arena, known))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, BadUpdate) as e:
        raise WireError(f"not a valid frame: {str(e)[:200]}") from None


def fetch_list(message: msgspec.Struct) -> list[ArenaFile]:
    """The arenas that a decoded message names; the transport fetches them and sets their paths."""
    return [arena for arena in arenas(message) if isinstance(arena, ArenaFile)]


def arenas(message: msgspec.Struct) -> list[AnyArena]:
    """The arenas of a message, in the order of its fields."""
    values = (getattr(message, name) for name in message.__struct_fields__)
    return [value for value in values if isinstance(value, AnyArena)]


def _name_arena(known: Known, value: object) -> object:
    if isinstance(value, AnyArena):
        schema = value.schema.digest if value.schema.digest in known else value.schema
        ways = tuple((patch.base, patch.arena.digest) for patch in value.patches)
        return Named(value.digest, schema, ways, value.patches[0].arena.schema if ways else None)
    raise TypeError(f"{type(value).__name__} cannot travel")


def _see_arena(known: Known, kind: type, value: Any) -> object:
    if kind is not AnyArena:
        raise TypeError(f"{kind.__name__} cannot travel")
    named = msgspec.convert(value, Named)
    arena = ArenaFile(_schema_of(known, named.schema), UNFETCHED, named.digest)
    if named.patch is not None:
        named.patch.check()
        arena.patches = tuple(
            Patch(base, ArenaFile(named.patch, UNFETCHED, digest)) for base, digest in named.ways[-PATCHES:]
        )
    return arena


_decoder = cache(partial(msgspec.msgpack.Decoder, dec_hook=partial(_see_arena, NOTHING)))  # slow to make


def _schema_of(known: Known, named: Schema | str) -> Schema:
    if isinstance(named, Schema):
        named.check()
        return named
    if named not in known:
        raise BadUpdate(f"schema {named[:12]}… is none that both ends have")
    return known[named]
