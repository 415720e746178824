"""Every update is checked before it is used (DESIGN: size before allocation, then keys, shapes, values).

`admit` looks at a reply's header alone, before one byte of its model is accepted; `inspect` at the values.
Both are the same for every cohort, so a simulation refuses what a federation refuses. `flaw` checks the
model that a round has made of the updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...arena import AnyArena, Row
from ...config import LimitsConfig
from ...errors import BadUpdate
from ...learning import NO_EXTRAS, Extras, check_bounds
from ...messages import MAX_SUMS, Evaluate, Evaluation, Failure, Metrics, Reply, Request, Train, Update
from ...schema import Schema, Section, chunks

if TYPE_CHECKING:
    import torch

MAX_METRICS = 64
MOST_COUNTED = 2.0**53  # that a metric is over: up to it counts are exact, and no sum of metrics overflows
LARGEST_METRIC = (2 - 2**-23) * 2.0**127  # of an average: the largest float32, as what a loss computes is one


def admit(
    request: Request,
    reply: Reply,
    schema: Schema,
    limits: LimitsConfig,
    examples: float | None,
    extras: Extras = NO_EXTRAS,
) -> None:
    """BadUpdate unless the reply answers this request and claims nothing impossible.

    `schema`: of an update. `examples` is what the site registered at joining (S18); None when its task
    weighs items itself. `exchange`: what the strategy has sites send beside it.
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
        check_bounds(reply.scalars, reply.weight, extras)
        most = schema.numel if extras.up or extras.exact else 0
        if not 0 <= reply.clipped <= most:
            raise BadUpdate(f"says that it clipped {reply.clipped} values; {most} have a bound")
        _check_metrics(reply.metrics)
        if any(isinstance(total, list) for total, _ in reply.metrics.values()):
            raise BadUpdate("a metric of its training is several numbers")
    elif isinstance(request, Evaluate) and isinstance(reply, Evaluation):
        _check_metrics(reply.metrics)
        _check_values(reply.metrics)
    elif not (isinstance(request, Train | Evaluate) and isinstance(reply, Failure)):
        raise BadUpdate(f"{type(reply).__name__} does not answer {type(request).__name__}")


def answers(
    request: Train | Evaluate, reply: Reply, limits: LimitsConfig, extras: Extras = NO_EXTRAS
) -> None:
    """BadUpdate unless the reply is what was asked for: the header again, for cohorts without a wire."""
    if isinstance(reply, Failure):
        raise BadUpdate(reply.reason)
    admit(request, reply, extras.update(request.weights.schema), limits, None, extras)


def inspect(update: Update, limits: LimitsConfig, extras: Extras = NO_EXTRAS) -> float:
    """The L2 norm of an update's floats; BadUpdate when one is NaN or Inf, or the norm over its bound, or a
    metric is no number that training gives, or a vector of the strategy's is beyond its bound."""
    norm = _norm(update, limits)
    _check_values(update.metrics)
    bounds = {each.name: each.bound for each in extras.up}
    for name, bound in bounds.items():
        section, first, last = update.delta.schema.places[name]
        for start, stop in chunks(section):
            part = update.delta.chunk(section, max(start, first), max(first, min(stop, last)))
            if len(part) and not bool(part.abs().max() <= bound):  # compared in the dtype, as sites clip
                raise BadUpdate(f"a value of its {name} is beyond the strategy's bound of {bound:g}")
    return norm


def norms_of(updates: Sequence[Update | None], schema: Schema, limits: LimitsConfig) -> list[float]:
    """The norms of the updates when they are all the rows of a slab, and `answers` and `inspect` surely pass
    each of them; [] when they have to be asked. `schema`: of an update, without vectors of a strategy."""
    slab = updates[0].delta.slab if updates[0] and isinstance(updates[0].delta, Row) else None
    names = updates[0].metrics.keys() if updates[0] else ()
    if slab is None or slab.rows != len(updates) or schema.difference(slab.schema):
        return []
    if len(names) > MAX_METRICS or not all(len(name) <= 64 and name.isprintable() for name in names):
        return []
    for place, update in enumerate(updates):
        if update is None or not isinstance(update.delta, Row) or update.weight is not None:
            return []
        delta, metrics = update.delta, update.metrics
        if delta.slab is not slab or delta.index != place or metrics.keys() != names or update.scalars:
            return []
        if update.clipped or not 0 < update.num_examples <= limits.max_examples:
            return []
        for total, count in metrics.values():
            if isinstance(total, list) or not 0 <= count <= MOST_COUNTED:
                return []
            if not abs(total) <= LARGEST_METRIC * max(count, 1.0):
                return []
    most = 0.999 * limits.max_norm if limits.max_norm else math.inf
    return slab.norms if all(norm < most for norm in slab.norms) else []


def _norm(update: Update, limits: LimitsConfig) -> float:
    if isinstance(update.delta, Row):  # the slab has all norms; one near its bound is computed again below
        norm = update.delta.slab.norms[update.delta.index]
        if math.isfinite(norm) and not (limits.max_norm and norm > 0.999 * limits.max_norm):
            return norm
    square = 0.0
    for section in update.delta.schema.model.sections:
        if section.floating:
            for start, stop in chunks(section):
                part = sum_of_squares(update.delta, section, start, stop)
                if not math.isfinite(part):
                    raise BadUpdate(_name_bad_tensor(update.delta))
                square += part
    norm = math.sqrt(square)
    if limits.max_norm and norm > limits.max_norm:
        raise BadUpdate(f"its norm {norm:.4g} is over limits.max_norm = {limits.max_norm:g}")
    return norm


def flaw(weights: AnyArena, state: Mapping[str, torch.Tensor]) -> str | None:
    """Why a model, with its strategy's state, can't be trained further; None when it can.

    Every value must be finite, and the square of the weights' norm a number of their dtype (of float32 for
    narrower ones): a loss, weight decay or an optimizer that squares them would be Inf at the next step.
    """
    for section in weights.schema.sections:
        if section.floating:
            square = sum(sum_of_squares(weights, section, *part) for part in chunks(section))
            if not math.isfinite(square):
                return _name_bad_tensor(weights)
            if square > _largest(section.dtype):
                return f"its norm is {math.sqrt(square):.3g}, whose square is beyond {section.dtype}"
    for name, values in state.items():
        if values.is_floating_point() and not finite(values):
            return f"the strategy's {name.rpartition('/')[2]} has NaN or Inf"
    return None


def finite(values: torch.Tensor) -> bool:
    """Whether all values are finite: by their sum, and one by one when the sum overflows."""
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())


def _largest(dtype: str) -> float:
    """What the squared norm of weights of this dtype may be at most."""
    import torch

    return torch.finfo(torch.float64 if dtype == "float64" else torch.float32).max


def sum_of_squares(delta: AnyArena, section: Section, start: int, stop: int) -> float:
    """Of a chunk. Non-finite exactly when a coordinate is: a float32 overflow of finite values is summed
    again wider."""
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

    for name, (section, start, stop) in delta.schema.places.items():
        if section.floating and (bad := int((~torch.isfinite(delta.chunk(section, start, stop))).sum())):
            return f"{name} has {bad} NaN or Inf of {stop - start} values"
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
        if not 0 <= count <= MOST_COUNTED:
            raise BadUpdate(f"metric {name} counts {count:g} items")


def _check_values(metrics: Metrics) -> None:
    for name, (total, count) in metrics.items():
        for value in total if isinstance(total, list) else [total]:
            if not abs(value) <= LARGEST_METRIC * max(count, 1.0):
                raise BadUpdate(f"metric {name} is {value / max(count, 1.0):g}; did its training diverge?")
