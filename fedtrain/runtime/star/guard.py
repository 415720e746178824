"""A guard of the model: a step far beyond the usual ones is not committed, and whoever made it so is named.

What is usual is the median of L2 norms: of this round's updates, and of what earlier rounds had as theirs. A
step is refused when it is over limits.max_ratio times that, and longer than the model itself: honest sites of
very unequal sizes, a warm-up and a model that begins at zero pass. The mean of updates within the limit is
within it too, so that a round without the sites beyond it is a sound one. Under masks the sum alone is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low
from typing import TYPE_CHECKING

from ...arena import AnyArena, Arena
from ...config import LimitsConfig
from ...errors import Diverged
from ...messages import SiteId, Update
from ...schema import chunks
from ...store import RoundPlan, Turn
from .blame import Spoiled
from .checks import flaw, inspect, sum_of_squares
from .gathered import Aggregate

if TYPE_CHECKING:
    import torch

    from ...secagg.encoding import Total

    SumOfSites = tuple[Total, Sequence[SiteId]]  # a sum, and the sites in it

REMEMBERED = 8  # earlier rounds
ENOUGH = 3  # of those, to know what is usual without other updates of the same round
RESTS = 10  # rounds in which a site that was named is not asked


def guarded(
    mean: Aggregate, weights: AnyArena, earlier: Sequence[float], limits: LimitsConfig, turns: bool = False
) -> Aggregate:
    """The mean of a round in the open, which may be committed. Diverged, with the culprits, where it may not.

    `earlier`: the norms of earlier rounds, as RunStore.norms has them. `turns`: as in `outliers`."""
    beyond = outliers(mean.norms, earlier, limits, turns)
    if beyond and (problem := excess(mean.delta, weights, usual([*mean.norms.values()], earlier), limits)):
        raise Diverged(problem, mean.sizes, beyond)
    return replace(mean, norm=usual([*mean.norms.values()]))


def stepped(
    step: Callable[[], tuple[Arena, dict[str, torch.Tensor]]], mean: Aggregate, updates: Mapping[str, Update],
    weights: AnyArena, earlier: Sequence[float], limits: LimitsConfig,
) -> tuple[Arena, dict[str, torch.Tensor], float]:  # fmt: skip
    """What the `step` by these updates' mean, without rounds, makes, and the usual norm; Diverged where it
    may not be. The mean's norms are 0 where they have to be found anew."""
    norms = {name: mean.norms[name] or inspect(update, limits) for name, update in updates.items()}
    sizes = {name: norm * updates[name].counts for name, norm in norms.items()}
    good = guarded(replace(mean, norms=norms, sizes=sizes), weights, earlier, limits, turns=True)
    after, state = step()
    if problem := flaw(after, state):
        raise Diverged(problem, sizes)
    return after, state, good.norm


def name_of(site: SiteId, turn: Turn) -> str:
    """An update without rounds, for people."""
    return f"{site}, turn {turn.number}"


def sound(
    sums: Sequence[SumOfSites], weights: AnyArena, plan: RoundPlan, limits: LimitsConfig,
    unread: Sequence[Sequence[SiteId]] = (),
) -> tuple[list[SumOfSites], list[Sequence[SiteId]]]:  # fmt: skip
    """The sums under masks, each with its sites, that may be a step, and the sites of the others. Spoiled
    where there are only others. `unread`: the sites of sums that no updates can make: others too."""
    common = usual((), plan.earlier) if len(plan.earlier) >= ENOUGH else 0.0
    why = [total.delta and excess(total.delta, weights, common, limits) for total, _ in sums]
    good = [each for each, problem in zip(sums, why, strict=True) if not problem]
    absurd = [sites for (_, sites), problem in zip(sums, why, strict=True) if problem]
    spoiled = [*unread, *absurd]
    if absurd and not good:
        raise Spoiled(spoiled, f"the new model is of no use and is not committed: {next(filter(None, why))}")
    return good, spoiled


def moving(sums: Sequence[SumOfSites], plan: RoundPlan, verify: bool) -> Sequence[SumOfSites]:
    """The good sums that move the model. Where sites `verify` them, it is the largest one of a round that
    looks for the site that spoils them: its sites can check the model."""
    return [max(sums, key=lambda each: len(each[1]))] if plan.groups and verify else sums


def outliers(
    norms: Mapping[SiteId, float], earlier: Sequence[float], limits: LimitsConfig, turns: bool = False
) -> list[SiteId]:
    """The sites whose updates are beyond the limit; [] where most are, for then training itself is so. Where
    an update is alone, or they are of `turns`, most of which may be one site's, earlier rounds decide."""
    limit = limits.max_ratio * usual([*norms.values()], earlier)
    beyond = [site for site, norm in norms.items() if norm > limit > 0]
    known = (turns or len(norms) == 1) and len(earlier) >= ENOUGH
    return beyond if known or 2 * len(beyond) < len(norms) else []


def usual(norms: Sequence[float], earlier: Sequence[float] = ()) -> float:
    """The usual norm, of four digits, as sums of squares are not the same to the last bit everywhere; 0 where
    none is known. Norms of 0 don't count."""
    now = [median_low(moved)] if (moved := [norm for norm in norms if norm]) else []
    return float(f"{median_low(known):.4g}") if (known := [*now, *filter(None, earlier)]) else 0.0


def excess(delta: AnyArena, weights: AnyArena, common: float, limits: LimitsConfig) -> str | None:
    """Why a step of this mean may not be; None when it may. `common`: the usual norm; 0: not known."""
    limit, step = limits.max_ratio * common, norm_of(delta)
    if not limit or step <= limit:
        return None
    if step <= (own := norm_of(weights)):
        return None
    return (
        f"it would move by {step:.3g}, {step / common:.3g} times the usual {common:.3g} (limits.max_ratio = "
        f"{limits.max_ratio:g}), and its own norm is {own:.3g}"
    )


def norm_of(arena: AnyArena) -> float:
    """The L2 norm of a model's floats, or of a mean of updates."""
    return math.sqrt(
        sum(
            sum_of_squares(arena, section, *part)
            for section in arena.schema.model.sections
            if section.floating
            for part in chunks(section)
        )
    )
