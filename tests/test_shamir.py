"""Shamir's sharing: any threshold of shares gives the secret, and fewer fit every secret."""

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain.errors import SecAggError
from fedtrain.secagg.shamir import PRIME, Weights, share

SECRETS = st.integers(0, PRIME - 1)


def numbers(seed):
    """Coefficients that a test can foresee."""
    draws = random.Random(seed)
    return lambda: draws.randrange(PRIME)


def drawing(coefficients):
    """Random bytes that give these coefficients."""
    numbers = iter(coefficients)
    return lambda n: next(numbers).to_bytes(n, "little")


def rebuilt(xs, ys):
    return Weights.at_zero(xs).combine(ys)


def test_the_shares_of_a_line_are_worked_by_hand():
    ys = share(10, [1, 2, 7], 2, drawing([3]))  # 10 + 3x
    assert ys == [13, 16, 31]
    assert Weights.at_zero([1, 2]).values == (2, PRIME - 1)  # 2·y(1) − y(2)


@pytest.mark.parametrize("threshold", [1, 2, 3, 4, 5])
def test_every_subset_of_threshold_shares_gives_the_secret(threshold):
    xs = [3, 1, 4, 15, 9]
    ys = share(PRIME - 7, xs, threshold, drawing(iter(numbers(0), None)))
    for count in range(threshold, 6):
        for chosen in combinations(range(5), count):
            assert rebuilt([xs[i] for i in chosen], [ys[i] for i in chosen]) == PRIME - 7


@settings(max_examples=50, deadline=None)
@given(secret=SECRETS, data=st.data())
def test_any_threshold_of_shares_gives_the_secret(secret, data):
    xs = data.draw(st.lists(st.integers(1, PRIME - 1), unique=True, min_size=1, max_size=40))
    threshold = data.draw(st.integers(1, len(xs)))
    ys = dict(zip(xs, share(secret, xs, threshold), strict=True))
    chosen = data.draw(st.permutations(xs))[:threshold]
    assert rebuilt(chosen, [ys[x] for x in chosen]) == secret


@settings(max_examples=25, deadline=None)
@given(secret=SECRETS, other=SECRETS, threshold=st.integers(2, 12))
def test_one_share_too_few_fits_every_secret(secret, other, threshold):
    """All but one of the shares are given: for each secret some last share makes it that one."""
    xs = list(range(1, threshold + 1))
    at_zero, ys = Weights.at_zero(xs), share(secret, xs, threshold)
    assert at_zero.combine(ys) == secret
    last = (other - at_zero.combine([*ys[:-1], 0])) * pow(at_zero.values[-1], -1, PRIME) % PRIME
    assert at_zero.combine([*ys[:-1], last]) == other


def test_sharing_draws_as_many_coefficients_as_the_threshold_needs():
    drawn = iter(range(1, 3))
    share(5, [1, 2, 3, 4], 3, drawing(drawn))
    assert list(drawn) == []


def test_the_same_secret_is_shared_differently_each_time():
    assert share(5, [1, 2, 3], 2) != share(5, [1, 2, 3], 2)


@pytest.mark.parametrize(
    ("secret", "xs", "threshold", "message"),
    [
        (-1, [1, 2], 2, "a secret to share must be in"),
        (PRIME, [1, 2], 2, "a secret to share must be in"),
        (5, [1, 2], 3, "a threshold of 3 with 2 holders"),
        (5, [1, 2], 0, "a threshold of 0 with 2 holders"),
        (5, [], 1, "a threshold of 1 with 0 holders"),
        (5, [1, 2, 1], 2, "two holders have the same x"),
        (5, [0, 1, 2], 2, "at 0 lies the secret itself"),
        (5, [1, PRIME], 2, "must be in 1"),
    ],
)
def test_what_cannot_be_shared_is_refused(secret, xs, threshold, message):
    with pytest.raises(SecAggError, match=message):
        share(secret, xs, threshold)


def test_a_secret_does_not_show_in_the_error_about_it():
    with pytest.raises(SecAggError) as caught:
        share(PRIME + 123456789, [1, 2], 2)
    assert str(PRIME + 123456789) not in str(caught.value)


def test_shares_that_are_too_few_for_their_weights_are_refused():
    with pytest.raises(SecAggError, match="2 shares came for the 3 holders"):
        Weights.at_zero([1, 2, 3]).combine([4, 5])


def test_weights_are_computed_once_for_the_same_holders():
    assert Weights.at_zero([5, 6, 7]) is Weights.at_zero((5, 6, 7))


def test_many_steps_between_reductions_change_nothing():
    """Horner's rule in one step each, reduced each time, beside the runs of the real one."""
    draws, xs = numbers(3), [*range(1, 200), PRIME - 1]
    coefficients = [draws() for _ in range(199)]
    for x, y in zip(xs, share(77, xs, 200, drawing(coefficients)), strict=True):
        plain = 0
        for c in [*coefficients, 77]:
            plain = (plain * x + c) % PRIME
        assert y == plain


def test_shares_are_what_they_were():
    """Frozen: with the same coefficients another version makes the same shares."""
    coefficients = [2**200 + 9, 2**254 + 1, 123456789]
    ys = share(2**255 - 20, [1, 2, 3, 1000, PRIME - 1], 4, drawing(coefficients))
    assert [f"{y:064x}" for y in ys] == [
        "40000000000001000000000000000000000000000000000000000000075bcd1e",
        "000000000000080000000000000000000000000000000000000000000eb79a9b",
        "4000000000001b00000000000000000000000000000000000000000016136886",
        "0000003b9aca0000000000000000000000000000000000000000001ed7aa6ba7",
        "3ffffffffffffefffffffffffffffffffffffffffffffffffffffffff8a432e2",
    ]
