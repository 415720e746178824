"""A vector in fewer bytes, one file a compressor. A new one is its file and its line in COMPRESSORS."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .. import config
from ..errors import ConfigError
from .base import Compressor, Linear
from .bfloat16 import BFloat16
from .error_feedback import ErrorFeedback
from .float16 import Float16
from .lowrank import LowRank
from .powersgd import PowerSGD
from .quantize import Quantize
from .randomk import RandomK
from .sign import Sign
from .topk import TopK

COMPRESSORS: dict[str, type[Compressor]] = {
    "bfloat16": BFloat16,
    "error_feedback": ErrorFeedback,
    "float16": Float16,
    "lowrank": LowRank,
    "powersgd": PowerSGD,
    "quantize": Quantize,
    "randomk": RandomK,
    "sign": Sign,
    "topk": TopK,
}

__all__ = ["COMPRESSORS", "Compressor", "Linear", "build", "parse"]


def parse(text: str) -> Compressor:
    """A compressor in one line: "float16", "topk:0.01", "quantize:4,block=128", "error_feedback:sign".

    After the colon stand options by name, or in the order of the fields; for error_feedback what it wraps.
    """
    kind, colon, rest = text.strip().partition(":")
    config.one_of("compression", kind, COMPRESSORS)
    if COMPRESSORS[kind] is ErrorFeedback:
        return build(kind, {"inner": rest} if colon else {})
    options: dict[str, Any] = {}
    for name, item in zip(_options(kind), rest.split(",") if colon else (), strict=False):
        key, equals, value = item.partition("=")
        options[key.strip() if equals else name] = _value(value if equals else key)
    if colon and rest.count(",") >= len(_options(kind)):
        raise ConfigError(f"compression: {text!r} has more options than {kind}, which has {_known(kind)}.")
    return build(kind, options)


def build(kind: str, options: Mapping[str, Any]) -> Compressor:
    """The compressor of that name; every mistake is a ConfigError that says what to change."""
    config.one_of("compression", kind, COMPRESSORS)
    for name in options:
        if name not in _options(kind):
            near = difflib.get_close_matches(name, _options(kind), n=1)
            hint = f"Did you mean {near[0]}?" if near else f"It has {_known(kind)}."
            raise ConfigError(f"compression.{name}: {kind} has no such option. {hint}")
    if COMPRESSORS[kind] is ErrorFeedback:
        inner = options.get("inner")
        config.require(inner, "compression", 'error_feedback wraps another: "error_feedback:topk:0.01"')
        return ErrorFeedback(inner if isinstance(inner, Compressor) else parse(str(inner)))
    return config.build(COMPRESSORS[kind], dict(options), "compression")


def _options(kind: str) -> list[str]:
    """What a user may set: the shapes are the model's."""
    return [f.name for f in fields(COMPRESSORS[kind]) if f.name != "shapes"]  # type: ignore[arg-type]  # dataclasses


def _known(kind: str) -> str:
    return ", ".join(_options(kind)) or "none"


def _value(text: str) -> bool | int | float | str:
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
