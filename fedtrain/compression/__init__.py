"""Compressors of vectors, one file each. A new compressor needs a file, and a line in COMPRESSORS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import config
from .base import Compressor, Linear
from .bfloat16 import BFloat16
from .codec import DeltaCodec
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

SHAPES = ("shapes",)  # fields that the model sets, not the user

__all__ = ["COMPRESSORS", "Compressor", "DeltaCodec", "ErrorFeedback", "Linear", "build", "parse"]


def parse(text: str) -> Compressor:
    """The compressor of a text: "float16", "topk:0.01", "quantize:4,block=128", "error_feedback:sign".

    The options after the colon have names, or stand in the order of the fields. The option of error_feedback
    is the compressor inside. ConfigError for an unknown kind or option.
    """
    kind, colon, rest = text.strip().partition(":")
    config.one_of("compression", kind, COMPRESSORS)
    if COMPRESSORS[kind] is ErrorFeedback:
        return build(kind, {"inner": rest} if colon else {})
    known = config.options_of(COMPRESSORS[kind], SHAPES)
    return build(kind, config.options_in("compression", text, known) if colon else {})


def build(kind: str, options: Mapping[str, Any]) -> Compressor:
    """The compressor `kind` with these options; ConfigError for an unknown kind or option."""
    config.one_of("compression", kind, COMPRESSORS)
    config.check_options("compression", kind, options, COMPRESSORS, parts=SHAPES)
    if COMPRESSORS[kind] is ErrorFeedback:
        inner = options.get("inner")
        config.require(inner, "compression", 'error_feedback wraps another: "error_feedback:topk:0.01"')
        return ErrorFeedback(inner if isinstance(inner, Compressor) else parse(str(inner)))
    return config.build(COMPRESSORS[kind], dict(options), "compression")
