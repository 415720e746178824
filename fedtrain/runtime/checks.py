"""Every update is checked before it is used (DESIGN: size before allocation, then keys, shapes, values).

`admit` looks at a reply's header alone, before one byte of its model is accepted; `inspect` at the values.
Both are the same for every cohort, so a simulation refuses what a federation refuses.
"""

from __future__ import annotations

import math

from ..config import LimitsConfig
from ..errors import BadUpdate
from ..update import (
    FLOATS,
    MAX_SUMS,
    AnyArena,
    Evaluate,
    Evaluation,
    Failure,
    Metrics,
    Reply,
    Request,
    Row,
    Schema,
    Section,
    Train,
    Update,
    chunks,
)

MAX_METRICS = 64


def admit(
    request: Request, reply: Reply, schema: Schema, limits: LimitsConfig, examples: float | None
) -> None:
    """BadUpdate unless the reply answers this request and claims nothing impossible.

    `examples` is what the site registered at joining (S18); None when its task weighs items itself.
    """
    if isinstance(request, Train) and isinstance(reply, Update):
        if difference := schema.difference(reply.delta.schema):
            raise BadUpdate(f"the update does not fit the model: {difference}")
        claimed = reply.num_examples
        if not 0 < claimed < math.inf:
            raise BadUpdate(f"claims {claimed:g} examples; it must be a positive number")
        if claimed > limits.max_examples:
            raise BadUpdate(
                f"claims {claimed:g} examples, over limits.max_examples = {limits.max_examples:g}"
            )
        if examples is not None and claimed > examples:
            raise BadUpdate(f"claims {claimed:g} training examples, but registered {examples:g} at joining")
        _check_metrics(reply.metrics)
        if any(isinstance(total, list) for total, _ in reply.metrics.values()):
            raise BadUpdate("a metric of its training is several numbers")
    elif isinstance(request, Evaluate) and isinstance(reply, Evaluation):
        _check_metrics(reply.metrics)
    elif not (isinstance(request, Train | Evaluate) and isinstance(reply, Failure)):
        raise BadUpdate(f"{type(reply).__name__} does not answer {type(request).__name__}")


def answers(request: Train | Evaluate, reply: Reply, limits: LimitsConfig) -> None:
    """BadUpdate unless the reply is what was asked for: the header again, for cohorts without a wire."""
    if isinstance(reply, Failure):
        raise BadUpdate(reply.reason)
    admit(request, reply, request.weights.schema, limits, None)


def inspect(update: Update, limits: LimitsConfig) -> float:
    """The L2 norm of an update's floats; BadUpdate when one is NaN or Inf, or the norm over its bound."""
    if isinstance(update.delta, Row):  # one look for all of them; what is not clearly good is looked at below
        norm = update.delta.slab.norms[update.delta.index]
        if math.isfinite(norm) and not (limits.max_norm and norm > 0.999 * limits.max_norm):
            return norm
    square = 0.0
    for section in update.delta.schema.sections:
        if section.dtype in FLOATS:
            for start, stop in chunks(section):
                part = _sum_of_squares(update.delta, section, start, stop)
                if not math.isfinite(part):
                    raise BadUpdate(_name_bad_tensor(update.delta))
                square += part
    norm = math.sqrt(square)
    if limits.max_norm and norm > limits.max_norm:
        raise BadUpdate(f"its norm {norm:.4g} is over limits.max_norm = {limits.max_norm:g}")
    return norm


def _sum_of_squares(delta: AnyArena, section: Section, start: int, stop: int) -> float:
    """Non-finite exactly when a coordinate is: a float32 overflow of finite values is summed again wider."""
    import torch

    values = delta.chunk(section, start, stop)
    if section.dtype in ("float32", "float64"):
        quick = float(torch.dot(values, values))
        if math.isfinite(quick):
            return quick
    wide = values.double()
    if not bool(torch.isfinite(wide).all()):
        return math.nan
    return float(torch.dot(wide, wide).clamp(max=torch.finfo(torch.float64).max))


def _name_bad_tensor(delta: AnyArena) -> str:
    """Which tensor holds the NaN or Inf, for the log."""
    import torch

    at = {section.dtype: 0 for section in delta.schema.sections}
    sections = {section.dtype: section for section in delta.schema.sections}
    for spec in delta.schema.tensors:
        start = at[spec.dtype]
        at[spec.dtype] = start + spec.numel
        if spec.dtype in FLOATS:
            values = delta.chunk(sections[spec.dtype], start, start + spec.numel)
            bad = int((~torch.isfinite(values)).sum())
            if bad:
                return f"{spec.name} has {bad} NaN or Inf of {spec.numel} values"
    return "its values are NaN or Inf"


def _check_metrics(metrics: Metrics) -> None:
    if len(metrics) > MAX_METRICS:
        raise BadUpdate(f"{len(metrics)} metrics, at most {MAX_METRICS} are allowed")
    numbers = sum(len(total) for total, _ in metrics.values() if isinstance(total, list))
    if numbers > MAX_SUMS:
        raise BadUpdate(f"metrics of {numbers} numbers, at most {MAX_SUMS} are allowed")
    for name, (_, count) in metrics.items():
        if len(name) > 64 or not name.isprintable():
            raise BadUpdate("a metric's name must be at most 64 printable characters")
        if not 0 <= count < math.inf:
            raise BadUpdate(f"metric {name} counts {count:g} items")
