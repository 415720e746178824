"""What releases of noised values cost together: ε at a δ.

Three ways, each the tightest that holds for what was released:

- Gaussian noise on everything is one Gaussian release of μ² = Σ 1/σ², whose ε is exact (Balle and Wang 2018).
- Gaussian noise on a Poisson sample is composed by dp-accounting's privacy loss distributions, of the extra
  `privacy`. Their memory grows with ε, so where ε may be above 1000, which promises nothing, ε is an upper
  bound in closed form.
- Discrete Gaussian noise, alone or summed over sites, has concentrated differential privacy 1/(2σ²), and so
  has Gaussian noise beside it (Canonne, Kamath, Steinke 2020, Theorem 4; Kairouz, Liu, Steinke 2021, Theorem
  1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from ..errors import ConfigError

HALVINGS = 200  # of an interval that holds ε: to the last bit
INTERVAL = (
    1e-3  # of privacy losses: a tenth of it would lower ε by less than 0.1 %, and take ten times as long
)
NOTHING = 1000.0  # an ε above which it is a bound in closed form
ORDERS = range(2, 65)  # of Rényi divergences, at which they have a closed form
COARSE = 50.0  # an ε from which the interval grows, by the square; ε grows by a few percent at most
HUGE = 1e3  # a μ above which ε is that of concentrated privacy, 1 % more at most
FAR = 25.0  # from here on erfc is computed by its asymptotic series, to 1e-12 of its logarithm


class Release(Struct, frozen=True):
    """Noised values that were given away, and what their noise says of the cost."""

    mechanism: Literal["gaussian", "discrete_gaussian"]
    sigma: float  # the noise's standard deviation divided by the sensitivity, in L2
    sampling: float = 1.0  # the probability with which an example is in a step, drawn by Poisson; 1: in each
    steps: int = 1  # equal releases that this one stands for


def epsilon(releases: Iterable[Release], delta: float) -> float:
    """ε such that all of `releases` together are (ε, delta)-differentially private.

    A release of several mechanisms is bounded by simple composition, each part at its share of `delta`.
    ConfigError for sampled releases without dp-accounting.
    """
    assert 0 < delta < 1, delta
    given = [r for r in releases if r.steps]
    assert all(r.sigma > 0 and 0 < r.sampling <= 1 for r in given), given
    sampled = [r for r in given if r.sampling < 1]
    whole = [r for r in given if r.sampling == 1]
    if sampled and all(r.mechanism == "gaussian" for r in given):
        return _by_distributions(given, delta)
    parts: list[tuple[Callable[[Sequence[Release], float], float], Sequence[Release]]] = []
    if sampled:
        parts.append((_by_distributions, sampled))
    if whole:
        discrete = any(r.mechanism == "discrete_gaussian" for r in whole)
        parts.append((_by_concentration if discrete else _exactly, whole))
    return math.fsum(account(some, delta / len(parts)) for account, some in parts)


def check_accounting() -> None:
    """ConfigError unless sampled releases can be accounted for here."""
    try:
        import dp_accounting.pld  # noqa: F401  # whether it is here
    except ImportError:
        raise ConfigError(
            "privacy: the cost of sampled batches is computed by dp-accounting, which is not here. "
            "pip install 'fedtrain[privacy]', or train on all examples in each step (train.batch_size = 0)."
        ) from None


def _squares(releases: Sequence[Release]) -> float:
    """Σ 1/σ²: that of one Gaussian release which tells as much as all of these."""
    return math.fsum(r.steps / r.sigma / r.sigma for r in releases)


# --- Gaussian noise on everything


def _exactly(releases: Sequence[Release], delta: float) -> float:
    mu = math.sqrt(_squares(releases))
    if mu > HUGE:  # ρ + 2·√(ρ·ln(1/δ)) at ρ = μ²/2 (Bun and Steinke 2016, Proposition 1.3)
        return mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta))
    high = 1.0
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    while gaussian_delta(mu, high) > delta:
        high *= 2
    low = 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(mu, middle) > delta else (low, middle)
    return high


def gaussian_delta(mu: float, eps: float) -> float:
    """The least δ at `eps` of the Gaussian mechanism with sensitivity / standard deviation `mu`:
    Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) (Balle and Wang 2018, Theorem 8)."""
    return math.exp(_log_phi(mu / 2 - eps / mu)) - math.exp(eps + _log_phi(-mu / 2 - eps / mu))


def _log_phi(x: float) -> float:
    """ln Φ(x), of the standard normal distribution."""
    z = -x / math.sqrt(2)
    if z < FAR:
        return math.log(math.erfc(z) / 2)
    tail = math.fsum((-1 / (2 * z**2), 3 / (4 * z**4), -15 / (8 * z**6)))
    return -z * z - math.log(2 * z * math.sqrt(math.pi)) + math.log1p(tail)


# --- Gaussian noise on a Poisson sample


def _by_distributions(releases: Sequence[Release], delta: float) -> float:
    check_accounting()
    import dp_accounting as dp
    from dp_accounting import pld, rdp

    steps = Counter[tuple[float, float]]()
    for r in releases:
        steps[r.sigma, r.sampling] += r.steps

    def by(accountant: Any) -> float:
        for (sigma, sampling), count in sorted(steps.items()):
            accountant.compose(dp.PoissonSampledDpEvent(sampling, dp.GaussianDpEvent(sigma)), count)
        return float(accountant.get_epsilon(delta))

    relation, bound = dp.NeighboringRelation.ADD_OR_REMOVE_ONE, _by_draws(steps, delta)
    if COARSE < bound < math.inf:
        bound = min(bound, by(rdp.RdpAccountant(ORDERS, relation)))
    if bound > NOTHING:
        return bound
    interval = INTERVAL * max(1.0, bound / COARSE) ** 2
    return by(pld.PLDAccountant(relation, value_discretization_interval=interval))


def _by_draws(steps: Mapping[tuple[float, float], int], delta: float) -> float:
    """An upper bound. Steps on a sample are a mixture, over the steps in which an example was drawn, of
    Gaussian releases without sampling. δ is convex in mixtures: half of it is for more draws than are counted
    here, and half for these."""
    from scipy.stats import binom  # type: ignore[import-untyped]  # of dp-accounting

    rare = delta / 2 / len(steps)
    drawn = [Release("gaussian", s, steps=int(binom.isf(rare, n, q))) for (s, q), n in steps.items()]
    return _exactly(drawn, delta / 2)


# --- Discrete Gaussian noise


def _by_concentration(releases: Sequence[Release], delta: float) -> float:
    """Rényi divergence ρα at each order α, ρ = Σ 1/(2σ²), gives ε = ρα + ln((α−1)/α) − (ln δ + ln α)/(α−1)
    (Canonne, Kamath, Steinke 2020, Proposition 12); the least ε of all orders."""
    rho = _squares(releases) / 2
    orders = (1 + 1.01**k for k in range(-1400, 2100))  # of which the best is within 1e-4 of the best of all
    found = (rho * a + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in orders)
    return max(0.0, min(found))
