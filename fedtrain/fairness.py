"""How even a model is over sites: what an evaluation says of each metric beside its average over all data.

    accuracy               the average over all examples, wherever they are
    accuracy/uniform       the mean over sites, each of which counts alike
    accuracy/worst_decile  the mean of the worst tenth of sites, rounded up to whole sites
    accuracy/std           the standard deviation over sites

The last three are how fairness is reported since Li et al. 2020 (q-FFL, arXiv 1905.10497, section 5.1). They
are known where each site's own metrics are, of two sites or more. Under masks they are not. Sums of the
sites' own averages and of their squares would, with the sums that are there, open each of three sites. The
averages alone would open small ones: of 4/7 + 8/9 + 6/11 the denominators tell each numerator.

So a suffix says how sites become one number. A prefix says what was evaluated, where that is not the global
model on the sites' data: "server/accuracy" is on data that the server holds. What else a site evaluates, a
model of its own say, has a prefix in the names that it gives, and is worked out over sites like the rest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .errors import ConfigError

if TYPE_CHECKING:
    from .messages import SiteId

SERVER = "server"  # a prefix, and the site whose eval_data() the server holds
UNIFORM, WORST, STD = "uniform", "worst_decile", "std"
SUFFIXES = (UNIFORM, WORST, STD)
COSTS = {"mae", "mse", "rmse", "mape", "nll", "ppl", "bpc", "wer", "cer", "brier", "ece"}


def is_cost(metric: str) -> bool:
    """Whether a smaller value is better, as far as its name tells."""
    words = re.split(r"[^a-z]+", metric.lower())
    return any(word in metric for word in ("loss", "error", "perplexity")) or not COSTS.isdisjoint(words)


def with_sites(
    metrics: Mapping[str, float], by_site: Mapping[SiteId, Mapping[str, float]], lower: Callable[[str], bool]
) -> dict[str, float]:
    """The averages of an evaluation, and what is worked out over sites. `lower`: as in `over_sites`."""
    return joined(metrics, over_sites(by_site, lower))


def with_server(metrics: Mapping[str, float], at_server: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an evaluation, and those of the data that the server holds."""
    return joined(metrics, {f"{SERVER}/{name}": value for name, value in at_server.items()})


def joined(metrics: Mapping[str, float], ours: Mapping[str, float]) -> dict[str, float]:
    """Both. ConfigError where the task has given one of our names to a metric of its own."""
    if taken := sorted(ours.keys() & metrics.keys()):
        raise ConfigError(
            f"the task gives a metric {taken[0]!r}, and fedtrain makes one of this name. Give the task's "
            f"another name."
        )
    return {**metrics, **ours}


def over_sites(
    by_site: Mapping[SiteId, Mapping[str, float]], lower: Callable[[str], bool]
) -> dict[str, float]:
    """The metrics with a suffix, of each metric that two sites or more give; a site whose value is NaN gives
    none. `lower`: whether a smaller value of the metric of this name is better."""
    values: dict[str, list[float]] = {}
    for site in sorted(by_site):
        for name, value in by_site[site].items():
            if value == value:
                values.setdefault(name, []).append(value)
    found: dict[str, float] = {}
    for name, each in values.items():
        if len(each) > 1:
            worst_first = sorted(each, reverse=lower(name))
            mean = _mean(each)
            found[f"{name}/{UNIFORM}"] = mean
            found[f"{name}/{WORST}"] = _mean(worst_first[: math.ceil(len(each) / 10)])
            found[f"{name}/{STD}"] = math.sqrt(_mean([(value - mean) ** 2 for value in each]))
    return found


def split(name: str) -> tuple[str, str]:
    """("accuracy", "std") of "accuracy/std"; the suffix is "" for a name without one."""
    metric, _, suffix = name.rpartition("/")
    return (metric, suffix) if metric and suffix in SUFFIXES else (name, "")


def averaged(metrics: Mapping[str, float | None]) -> list[str]:
    """The names of the metrics that are averages over all data: what is left without those over sites."""
    return [name for name in metrics if not split(name)[1] or split(name)[0] not in metrics]


def _mean(values: Sequence[float]) -> float:
    """NaN where a value is infinite or NaN."""
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan
