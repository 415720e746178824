"""Compressors of vectors, one file each.

A new one of ours needs a line in COMPRESSORS; one of the user's own is a class in a file beside the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import config
from .base import Compressor, Linear
from .bfloat16 import BFloat16
from .codec import DeltaCodec
from .error_feedback import ErrorFeedback
from .float16 import Float16
from .lowrank import LowRank
from .powersgd import PowerSGD
from .probe import check_contraction, probe
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

__all__ = [
    "COMPRESSORS", "Compressor", "DeltaCodec", "ErrorFeedback", "Linear", "build", "check_contraction",
    "own_in", "parse", "probe",
]  # fmt: skip


def parse(text: str, root: Path | None = None, key: str = "compression") -> Compressor:
    """The compressor of a text: "float16", "topk:0.01", "quantize:4,block=128", "error_feedback:sign".

    The options after the colon have names, or stand in the order of the fields. The option of error_feedback
    is the compressor inside. "module:Class", "module:Class:0.5" is a class of the user's in module.py in the
    folder `root`, next to the task. ConfigError, about `key`, for an unknown kind or option.
    """
    kind, rest = config.kind_in(text, COMPRESSORS)
    cls = config.class_of(key, kind, COMPRESSORS, Compressor, root, "a compressor")
    if cls is ErrorFeedback:
        return build(kind, {"inner": parse(rest, root, key)} if rest else {}, key=key)
    return build(kind, config.options_in(key, kind, rest, config.options_of(cls, SHAPES)), root, key)


def build(
    kind: str, options: Mapping[str, Any], root: Path | None = None, key: str = "compression"
) -> Compressor:
    """The compressor `kind` with these options; ConfigError for an unknown kind or option."""
    cls = config.class_of(key, kind, COMPRESSORS, Compressor, root, "a compressor")
    config.check_options(key, kind, options, {**COMPRESSORS, kind: cls}, parts=SHAPES)
    if cls is ErrorFeedback:
        inner = options.get("inner")
        config.require(inner, key, 'error_feedback wraps another: "error_feedback:topk:0.01"')
        return ErrorFeedback(inner if isinstance(inner, Compressor) else parse(str(inner), root, key))
    return config.build(cls, dict(options), "compression")


def own_in(text: str) -> str:
    """The class of the user's own that a text names, "module:Class"; "" for one of ours."""
    kind, rest = config.kind_in(text, COMPRESSORS)
    if kind == "error_feedback":
        return own_in(rest or "")
    return kind if config.is_own(kind) else ""
