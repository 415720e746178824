"""What releases cost together: held to dp-accounting, to mpmath, and to what is published."""

import math
import sys
from importlib.util import find_spec

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain.errors import ConfigError
from fedtrain.privacy import Release, check_accounting, epsilon
from fedtrain.privacy.accountant import gaussian_delta

pytestmark = pytest.mark.skipif(
    find_spec("dp_accounting") is None, reason="the extra privacy is not installed"
)


def gaussian(sigma, steps=1, sampling=1.0):
    return Release("gaussian", sigma, sampling, steps)


def distributions(releases, delta):
    """dp-accounting's own, at its own interval."""
    import dp_accounting as dp  # here, for it takes a second, and other tests' workers read this file, too
    from dp_accounting import pld

    accountant = pld.PLDAccountant()
    for r in releases:
        event = dp.GaussianDpEvent(r.sigma)
        accountant.compose(event if r.sampling == 1 else dp.PoissonSampledDpEvent(r.sampling, event), r.steps)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize(
    ("releases", "delta"),
    [
        ([gaussian(1.0)], 1e-5),
        ([gaussian(5.0, 10)], 1e-6),
        ([gaussian(10.0, 300), gaussian(3.0, 2)], 1e-5),
        ([gaussian(1.0, 2000, 0.02)], 1e-5),
        ([gaussian(2.0, 100, 0.1), gaussian(4.0, 3)], 1e-6),
        ([gaussian(1.1, 10, 0.01)], 1e-5),
        ([gaussian(0.8, 1, 0.05)], 1e-5),
        ([gaussian(3.0, 5000, 0.05), gaussian(2.0, 50, 0.02)], 1e-5),
    ],
)
def test_epsilon_is_within_a_hundredth_of_dp_accountings(releases, delta):
    assert epsilon(releases, delta) == pytest.approx(distributions(releases, delta), rel=0.002)


def exact_delta(mu, eps):
    """Balle and Wang 2018, Theorem 8, in 60 digits."""
    with mpmath.workdps(60):
        mu, eps = mpmath.mpf(mu), mpmath.mpf(eps)
        return float(mpmath.ncdf(mu / 2 - eps / mu) - mpmath.exp(eps) * mpmath.ncdf(-mu / 2 - eps / mu))


@settings(max_examples=60, deadline=None)
@given(mu=st.floats(1e-3, 60), log_delta=st.floats(-25, -3))
def test_epsilon_of_gaussian_noise_is_the_exact_one(mu, log_delta):
    delta = math.exp(log_delta)
    found = epsilon([gaussian(1 / mu)], delta)
    if found:
        assert exact_delta(mu, found) == pytest.approx(delta, rel=1e-8)
    else:
        assert exact_delta(mu, 0) <= delta * (1 + 1e-8)


def test_releases_with_different_noise_are_one_with_the_sum_of_their_squares():
    several = [gaussian(2.0, 3), gaussian(0.7), gaussian(5.0, 40)]
    mu = math.sqrt(3 / 4 + 1 / 0.49 + 40 / 25)
    assert epsilon(several, 1e-6) == pytest.approx(epsilon([gaussian(1 / mu)], 1e-6), rel=1e-12)


def test_discrete_noise_has_the_price_that_the_census_bureau_published():
    """For the persons of 2020: rho = 2.56 (rounded), delta = 1e-10, epsilon = 17.14."""
    low, high = (
        epsilon([Release("discrete_gaussian", 1 / math.sqrt(2 * rho))], 1e-10) for rho in (2.555, 2.565)
    )
    assert low <= 17.14 <= high


@settings(max_examples=60, deadline=None)
@given(sigma=st.floats(0.5, 50), releases=st.integers(1, 500), log_delta=st.floats(-25, -7))
def test_the_price_of_discrete_noise_is_above_the_exact_gaussians_and_below_mironovs(
    sigma, releases, log_delta
):
    delta, rho = math.exp(log_delta), releases / (2 * sigma**2)
    if not 1e-4 < rho < 50:
        return
    found = epsilon([Release("discrete_gaussian", sigma, steps=releases)], delta)
    assert gaussian_delta(math.sqrt(2 * rho), found) <= delta
    assert found <= rho + 2 * math.sqrt(rho * -log_delta)  # Mironov 2017, Proposition 3, at its best order


def test_the_price_of_discrete_noise_is_dp_accountings_by_renyi_divergence():
    import dp_accounting as dp
    from dp_accounting import rdp

    orders = [1 + 1.05**k for k in range(-60, 160)]
    accountant = rdp.RdpAccountant(orders).compose(dp.GaussianDpEvent(4.0), 12)
    found = epsilon([Release("discrete_gaussian", 4.0, steps=12)], 1e-6)
    assert found == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-3)


def test_sampled_and_discrete_releases_share_the_delta():
    sampled, discrete = gaussian(1.0, 100, 0.1), Release("discrete_gaussian", 3.0)
    assert epsilon([sampled, discrete], 1e-5) == pytest.approx(
        epsilon([sampled], 5e-6) + epsilon([discrete], 5e-6)
    )


def test_nothing_given_away_costs_nothing_and_each_release_costs():
    for kind in ("gaussian", "discrete_gaussian"):
        costs = [epsilon([Release(kind, 3.0, steps=n)], 1e-5) for n in range(6)]
        assert costs[0] == 0.0
        assert costs == sorted(set(costs))


def test_without_dp_accounting_sampled_releases_are_refused_and_others_priced(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "dp_accounting"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert epsilon([gaussian(2.0)], 1e-5) > 0
    for refused in (check_accounting, lambda: epsilon([gaussian(2.0, sampling=0.5)], 1e-5)):
        with pytest.raises(ConfigError, match=r"pip install 'fedtrain\[privacy\]'"):
            refused()
