"""What a setting may be (durations, bounds, choices, a kind's own options), and how a mistake is told."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta

from ..errors import ConfigError

UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}  # seconds


class Seconds(float):
    """A duration; in files "500ms", "30s", "10m", "2h" or a plain number of seconds."""

    @classmethod
    def parse(cls, value: object) -> Seconds:
        """ValueError for what is no duration."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return cls(value)
        match = re.fullmatch(r"\s*([\d.]+)\s*(ms|s|m|h|d)\s*", str(value))
        if match is None:
            raise ValueError(f'{value!r} is not a duration; write "500ms", "30s", "10m", "2h" or seconds')
        return cls(float(match[1]) * UNITS[match[2]])


class Amount(str):
    """A number of each site, or what it is drawn from; in files also as a plain number."""

    __slots__ = ()


def changes(was: Mapping[str, str], now: Mapping[str, str], most: int = 3) -> str:
    """The first few settings that are not what they were, as text; "" where all are."""
    found = [key for key in sorted({*was, *now}) if was.get(key) != now.get(key)]
    return ", ".join(f"{key} was {was.get(key)}, is {now.get(key)}" for key in found[:most])


def plain(value: Any) -> Any:
    """A setting's value as MessagePack and JSON know it."""
    return float(value) if isinstance(value, Seconds) else str(value) if isinstance(value, Amount) else value


FINITE = Meta(description="a finite number")
Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Number = Annotated[float, FINITE]
NotNegative = Annotated[float, FINITE, Meta(ge=0)]
Positive = Annotated[float, FINITE, Meta(gt=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Inner = Annotated[float, Meta(gt=0, lt=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
Duration = Annotated[Seconds, Meta(gt=0)]


class Settings:
    """Base of frozen dataclasses whose fields are keys of fedtrain.toml.

    The type of a field says what its key may be: Literal names the choices, Meta the bounds or the pattern.
    ConfigError where a value is something else.
    """

    section: ClassVar[str]  # of fedtrain.toml, in which the fields are keys; unless said, the class's name

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "section"):
            cls.section = cls.__name__.removesuffix("Config").lower()

    def __post_init__(self) -> None:
        bounds = _bounds(type(self))  # type: ignore[arg-type]  # mypy takes instances' __hash__ for the class's
        for name, choices, metas in bounds:
            value = getattr(self, name)
            if choices and value not in choices:
                one_of(f"{self.section}.{name}", value, choices)
            for meta in metas:
                if not _allows(meta, value):
                    raise ConfigError(f"{self.section}.{name}: {value!r} must be {_in_words(meta)}")


@cache
def _bounds(cls: Hashable) -> list[tuple[str, tuple[Any, ...], tuple[Meta, ...]]]:
    """Of each field that has any: what it may be (none: anything), and within which bounds."""
    found, hints = [], get_type_hints(cls, include_extras=True)
    for f in fields(cls):  # type: ignore[arg-type]  # a dataclass
        kind = hints[f.name]
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        if choices or hasattr(kind, "__metadata__"):
            found.append((f.name, choices, getattr(kind, "__metadata__", ())))
    return found


def _allows(meta: Meta, value: Any) -> bool:
    if meta is FINITE:
        return math.isfinite(value)
    if meta.pattern is not None:
        return re.fullmatch(meta.pattern, value) is not None
    above = (meta.ge is None or value >= meta.ge) and (meta.gt is None or value > meta.gt)
    return bool(above and (meta.le is None or value <= meta.le) and (meta.lt is None or value < meta.lt))


def _in_words(meta: Meta) -> str:
    """What a value must be: "1 or more", "positive", "in (0, 1]", or as the pattern is described."""
    if meta.description is not None:
        return meta.description
    if meta.le is None and meta.lt is None:
        return "positive" if meta.ge is None else f"{meta.ge} or more"
    low = f"({meta.gt}" if meta.ge is None else f"[{meta.ge}"
    return f"in {low}, {meta.lt})" if meta.le is None else f"in {low}, {meta.le}]"


def require(condition: object, key: str, message: str) -> None:
    """ConfigError about a key, unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key}: {message}")


def one_of(key: str, value: object, choices: Iterable[object]) -> None:
    """ConfigError that names the choices, and the nearest of them, unless the value is one."""
    choices = tuple(choices)
    if value not in choices:
        near = difflib.get_close_matches(str(value), [c for c in choices if isinstance(c, str)], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(map(str, choices))}.{hint}")


def value_of(text: str) -> bool | int | float | str:
    """An option's value where it stands in a word, as in "topk:fraction=0.01"."""
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def options_in(section: str, kind: str, rest: str | None, known: Sequence[str]) -> dict[str, Any]:
    """The options that stand after a kind and its colon, as in "quantize:4,block=128": each has a name, or
    stands in the order of those `known`. ConfigError for more than are known."""
    items = [] if rest is None else rest.split(",")
    if len(items) > len(known):
        has = ", ".join(known) or "none"
        raise ConfigError(f"{section}: '{kind}:{rest}' has more options than {kind}, which has {has}.")
    options: dict[str, Any] = {}
    for name, item in zip(known, items, strict=False):
        key, equals, value = item.partition("=")
        options[key.strip() if equals else name] = value_of(value if equals else key)
    return options


def options_of(cls: type, parts: Collection[str] = ()) -> list[str]:
    """The fields of a dataclass that a user sets: not its `parts`, which whoever builds it has."""
    return [f.name for f in fields(cls) if f.name not in parts]


def check_options(
    key: str,
    kind: str,
    options: Iterable[str],
    kinds: Mapping[str, type],
    *,
    parts: Collection[str] = (),
    also: Iterable[str] = (),
) -> None:
    """Refuse an option that `kind` doesn't have, and say what was meant: one of its own, a key that the
    section has `also`, or another kind's. `kinds` has all that `key` may be, each with its dataclass."""
    own = options_of(kinds[kind], parts)
    for name in options:
        if name in own:
            continue
        having = [other for other, cls in kinds.items() if name in options_of(cls, parts)]
        if near := difflib.get_close_matches(name, [*own, *also], n=1):
            hint = f"Did you mean {near[0]}?"
        elif having:
            hint = f'{key} = "{having[0]}" has it.'
        else:
            hint = f"It has {', '.join(own) or 'none of its own'}."
        raise ConfigError(f"{key.partition('.')[0]}.{name}: {kind} has no such option. {hint}")
