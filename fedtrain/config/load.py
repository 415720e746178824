"""A file, the environment and --set as one table, and a table as frozen dataclasses."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from ..errors import ConfigError
from .values import Seconds

T = TypeVar("T")
MISMATCH = re.compile(r"Expected `([^`]+)`, got `[^`]+`( - at `[^`]*`)?")  # msgspec's words
WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list in [ ]",
    "object": "a table",
    "null": "nothing",
}
BITS, DEEP = 64, 16  # of an integer; of tables and lists in one another: what a file may hold


class Source(IntEnum):
    """Who sets a key; the stronger is the larger."""

    FILE = 0
    ENVIRONMENT = 1
    SET = 2
    CALL = 3

    def __str__(self) -> str:
        return ("in the file", "in the environment", "--set", "in settings")[self]


def read(
    path: Path | Literal[""] | None, sets: Iterable[str], env: Mapping[str, str], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Source]]:
    """What the file, if any, says, overridden by the environment, by `sets` and by `settings`; and the keys
    that they override."""
    try:
        table = table_of(path.read_bytes(), path) if path else {}
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist. `fedtrain new NAME` makes a project; --config FILE names another."
        ) from None
    stronger: dict[str, Source] = {}
    for name, value in env.items():
        if name.startswith("FEDTRAIN_") and "__" in name:
            key = name.removeprefix("FEDTRAIN_").lower().replace("__", ".")
            put(table, key, parsed(value), name)
            stronger[key] = Source.ENVIRONMENT
    for item in sets:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: write --set section.key=value, as in --set train.lr=0.01")
        put(table, key.strip(), parsed(value.strip()), f"--set {item}")
        stronger[key.strip()] = Source.SET
    for key, given in settings.items():
        put(table, key, given, f"settings: {key!r}")
        stronger[key] = Source.CALL
    return table, stronger


def table_of(data: bytes, path: Path) -> dict[str, Any]:
    """What a TOML file holds; ConfigError that names the file where the bytes are something else."""
    try:
        # Editors on Windows may begin a file with a byte order mark. UTF-16 has null bytes.
        text = data.decode("utf-8-sig", "surrogateescape")
        if bad := re.search("[\0\udc80-\udcff]", text):
            at = len(text[: bad.start()].encode())
            byte = f"byte {ord(bad[0]) & 0xFF:#04x} at position {at}"
            raise ConfigError(f"{path} is not UTF-8 ({byte}): save it as UTF-8.")
        table = tomllib.loads(text)
        _refuse_beyond(table)
    except (ValueError, RecursionError) as e:  # ValueError: of tomllib, of UTF-8, of int() for 4,300 digits
        raise ConfigError(f"{path}: {e}") from None
    return table


def _refuse_beyond(value: object, deep: int = DEEP) -> None:
    """ValueError where a value can't be printed or converted: TOML has integers of 64 bits."""
    if isinstance(value, int) and value.bit_length() > BITS:
        raise ValueError(f"an integer of {value.bit_length()} bits: at most {BITS}")
    if isinstance(value, dict | list):
        if not deep:
            raise ValueError(f"tables or lists that are more than {DEEP} deep")
        for each in value.values() if isinstance(value, dict) else value:
            _refuse_beyond(each, deep - 1)


def build(cls: type[T], table: object, where: str) -> T:
    """A frozen dataclass from the table of a section; every mistake is a ConfigError that says what to
    change."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: expected a table [{where}], got {table!r}")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]  # cls is always a dataclass
    types = types_of(cls)
    for key in table:
        refuse_unknown(key, known, "key", f"{where}.")
    for name, f in known.items():
        if name not in table and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{where}.{name}: is required")
    return cls(**{key: _convert(value, types[key], f"{where}.{key}") for key, value in table.items()})


# A class -> its fields with their types, kept: a round builds its rule anew.
types_of: Callable[[type], dict[str, Any]] = cache(get_type_hints)


def refuse_unknown(name: str, known: Iterable[str], what: str, where: str = "") -> None:
    """ConfigError for a name that is not known; it names the nearest one that is."""
    known = tuple(known)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"Did you mean {where}{near[0]}?" if near else f"Known here: {', '.join(known)}."
        raise ConfigError(f"{where}{name}: unknown {what}. {hint}")


def _convert(value: object, kind: Any, path: str) -> Any:
    """A TOML value as a field's type; whether it is one of the allowed values is left to the dataclass."""
    if get_origin(kind) is Literal:
        kind = type(get_args(kind)[0])

    def hook(kind: type, value: object) -> object:
        return Seconds.parse(value) if kind is Seconds else kind(value)

    try:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        return msgspec.convert(value, kind, dec_hook=hook)
    except (msgspec.ValidationError, ValueError) as e:
        if (found := MISMATCH.fullmatch(str(e))) is None:
            raise ConfigError(f"{path} = {value!r}: {e}") from None
        kinds, at = found[1].split(" | "), ", in one of its items" * bool(found[2])
        bare = type(parsed(value)).__name__ if isinstance(value, str) else ""
        fits = bare in kinds or (bare == "int" and "float" in kinds)
        hint = f"{' (text)' * bool(bare)}{f': write {value} without quotes' * fits}"
        if isinstance(value, int | float) and "str" in kinds:
            hint = f'. As text it stands in quotes: {path} = "{value}" (\'{path}="{value}"\' in a shell)'
        wanted = " or ".join(WORDS.get(each, each) for each in kinds)
        raise ConfigError(f"{path} must be {wanted}{at}, got {value!r}{hint}") from None


def parsed(text: str) -> Any:
    """Text as a TOML value where it is one, as a plain string where it is not."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        _refuse_beyond(value)
    except (ValueError, RecursionError):
        return text
    return value


def put(table: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Override one key of a file's table; ConfigError names the `source` of a key that has no section."""
    section, dot, name = key.partition(".")
    if not dot:
        raise ConfigError(f"{source}: name a key as section.key, as in train.lr")
    target = table.setdefault(section, {})
    if not isinstance(target, dict):
        raise ConfigError(f"{source}: {section} is not a section")
    target[name] = value
