"""The privacy budget of releases with Gaussian noise: ε at a δ, by Rényi differential privacy (RDP)."""

from __future__ import annotations

import math

TIMES = 60  # steps of the golden-section search; each cuts the interval of orders to 0.618 of it: to 1e-12


def epsilon(sigma: float, releases: int, delta: float) -> float:
    """ε such that `releases` of the Gaussian mechanism together are (ε, delta)-differentially private.

    `sigma`: the noise's standard deviation divided by the sensitivity, the largest distance between the
    vectors of two data sets. Each release has RDP α/(2σ²) at order α (Mironov 2017, Corollary 3), releases
    add up (Proposition 1), and at each order ε = RDP + ln((α−1)/α) − (ln δ + ln α)/(α−1) (Canonne, Kamath,
    Steinke 2020, Proposition 12; Balle et al. 2020, Theorem 21). The result is the least ε of all orders.
    """
    assert sigma > 0, sigma
    assert 0 < delta < 1, delta
    if releases == 0:
        return 0.0
    rho = releases / (2 * sigma**2)

    def at(log_order: float) -> float:  # ε at order α, given ln(α − 1)
        above = math.exp(log_order)
        order = 1 + above
        return rho * order + math.log(above / order) - math.log(delta * order) / above

    ratio = (math.sqrt(5) - 1) / 2  # golden section: `at` falls and then rises
    low, high = math.log(1e-6), math.log(1e9)
    for _ in range(TIMES):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if at(a) <= at(b) else (a, high)
    return max(0.0, at((low + high) / 2))
