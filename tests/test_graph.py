"""The graph of a large cohort: the published degrees, and a ring that nobody chose."""

import math
import random
from collections import Counter
from fractions import Fraction
from itertools import combinations, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain.errors import ConfigError
from fedtrain.secagg import graph
from fedtrain.secagg.graph import Degree, degree, neighbours, permutation
from fedtrain.secagg.policy import Policy

# Bell et al. (CCS 2020), security 2^-40, correctness 2^-20: {n: {corrupt / dropout, model: (k, t)}}
PUBLISHED = [
    (n, *case, *found)
    for n, row in {
        100: [(28, 6), (72, 39), (42, 37), (68, 34), (22, 11), (32, 22), (62, 42)],
        1000: [(72, 24), (398, 223), (132, 109), (286, 150), (48, 27), (96, 67), (302, 206)],
        10000: [(86, 29), (746, 420), (178, 146), (422, 221)],
    }.items()
    for case, found in zip(
        [
            (0.05, 0.33, False),
            (0.05, 0.33, True),
            (0.33, 0.05, True),
            (0.33, 0.33, False),
            (0.10, 0.10, False),
            (0.10, 0.10, True),
            (0.20, 0.20, True),
        ],
        row,
        strict=False,
    )
]


@pytest.mark.parametrize(("n", "corrupt", "dropout", "semi_malicious", "k", "t"), PUBLISHED)
def test_degree_and_threshold_are_those_published(n, corrupt, dropout, semi_malicious, k, t):
    assert degree(n, corrupt, dropout, semi_malicious) == Degree(k, t)


def test_small_cohorts_need_the_full_graph():
    assert degree(5, 0.2, 0.2) == Degree(4, 3)


def test_more_security_needs_more_neighbours():
    found = [degree(1000, 0.1, 0.1, security=s).neighbours for s in (20, 40, 60)]
    assert found == sorted(set(found))


@pytest.mark.parametrize(("corrupt", "dropout"), [(0.5, 0.5), (0.0, 1.0), (-0.1, 0.1), (0.45, 0.45)])
def test_fractions_that_leave_nobody_to_protect_are_refused(corrupt, dropout):
    with pytest.raises(ConfigError, match=r"Lower the fractions"):
        degree(100, corrupt, dropout)


@pytest.mark.parametrize(
    ("population", "marked", "draws"), [(9, 4, 5), (12, 0, 3), (12, 12, 3), (30, 17, 20)]
)
def test_tails_are_the_exact_ones(population, marked, draws):
    exact = [
        Fraction(
            math.comb(marked, x) * math.comb(population - marked, draws - x), math.comb(population, draws)
        )
        for x in range(draws + 1)
    ]
    for x, (above, below) in enumerate(
        zip(
            graph._at_least(population, marked, draws),
            graph._fewer_than(population, marked, draws),
            strict=True,
        )
    ):
        assert 2**above == pytest.approx(float(sum(exact[x:])), rel=1e-9)
        assert 2**below == pytest.approx(float(sum(exact[:x])), rel=1e-9)


@pytest.mark.parametrize(("n", "gone", "run"), [(8, 4, 1), (9, 5, 2), (10, 6, 2), (10, 7, 3)])
def test_a_ring_falls_apart_no_oftener_than_the_bound(n, gone, run):
    def apart(places):
        left = [i for i in range(n) if i not in places]
        reached, todo = {left[0]}, [left[0]]
        while todo:
            i = todo.pop()
            near = {(i + d) % n for d in range(-run, run + 1)} & set(left)
            todo += near - reached
            reached |= near
        return len(reached) < len(left)

    cases = list(combinations(range(n), gone))
    probability = sum(map(apart, cases)) / len(cases)
    assert 0 < probability <= 2 ** graph._apart(n, gone, run)


def gone_at_will(n, k, t, corrupt, lost):
    """Whether the sites that are neither fall apart, each of which has t neighbours that are not lost."""
    run, left = k // 2, [i for i in range(n) if i not in corrupt and i not in lost]
    near = {i: {(i + d) % n for d in range(-run, run + 1)} - {i} for i in left}
    if not left or any(len(near[i] - lost) < t for i in left):
        return False
    reached, todo = {left[0]}, [left[0]]
    while todo:
        fresh = near[todo.pop()].intersection(left) - reached
        reached |= fresh
        todo += fresh
    return len(reached) < len(left)


def fullest_runs(n, run, corrupt):
    """The most corrupt sites in two runs of so many places, with a place between them on both sides."""
    runs = [{(at + i) % n for i in range(run)} for at in range(n)]
    wider = [run | {(place + 1) % n for place in run} for run in runs]
    apart = [
        (a, b) for a, b in combinations(range(n), 2) if not wider[a] & runs[b] and not runs[a] & wider[b]
    ]
    return max(len((runs[a] | runs[b]) & corrupt) for a, b in apart)


@pytest.mark.parametrize(("n", "k", "t"), [(8, 4, 3), (9, 4, 3), (10, 4, 3), (9, 6, 5)])
def test_whoever_is_lost_at_will_a_ring_falls_apart_only_between_runs_of_corrupt_sites(n, k, t):
    """All ways to be corrupt, lost or neither: the two conditions of a chosen loss are necessary."""
    fell = 0
    for state in product(range(3), repeat=n):
        corrupt, lost = ({i for i, s in enumerate(state) if s == which} for which in (1, 2))
        if gone_at_will(n, k, t, corrupt, lost):
            fell += 1
            assert fullest_runs(n, k // 2, corrupt) >= max(k - len(lost), 2 * t - k)
    assert fell


@pytest.mark.parametrize(("n", "bad", "k"), [(9, 4, 4), (10, 5, 4), (10, 3, 6)])
def test_two_runs_are_full_of_corrupt_sites_no_oftener_than_the_bound(n, bad, k):
    cases = [fullest_runs(n, k // 2, set(corrupt)) for corrupt in combinations(range(n), bad)]
    bound = graph._split(n, bad, k)
    for x in range(1, k + 1):
        assert sum(most >= x for most in cases) / len(cases) <= 2 ** bound[x] + 1e-12


@pytest.mark.parametrize("n", [101, 150, 200, 300, 500, 1000, 2000, 10_000])
def test_m5_an_aggregator_that_chooses_who_is_lost_when_it_knows_the_ring_stays_under_the_bound(n):
    """20 % corrupt and 20 % lost, and 2^40 orders tried. With the degree for loss at random a thousand sites
    were split at 2^-34 an order; at 2^-19, had they no look at how many neighbours are left."""
    bad = lost = math.ceil(n / 5)
    found = degree(n, 0.2, 0.2, security=graph.SECURITY, chosen_loss=True)
    k, t = found.neighbours, found.threshold
    assert graph._split(n, bad, k)[max(k - lost, 2 * t - k)] < -40 - 40
    assert math.log2(n) + graph._at_least(n - 1, bad, k)[2 * t - k] < -40 - 40
    assert math.log2(n) + graph._fewer_than(n - 1, n - lost - 1, k)[t] < -20
    assert Policy("", "", 32, 1.0, 1.0, 1).graph(n)[1:] == (t, k)
    if n == 1000:
        old = degree(n, 0.2, 0.2)
        assert (old.neighbours, old.threshold) == (302, 206)
        assert graph._split(n, bad, 302)[302 - lost] == pytest.approx(-19.7, abs=0.1)
        assert graph._split(n, bad, 302)[2 * 206 - 302] == pytest.approx(-34.2, abs=0.1)
        assert k <= 1.2 * 302


def test_the_threshold_holds_in_trials_where_a_small_degree_did_not():
    """With k = 20 and t = 14, the loss of 30 of 100 sites left some site with too few neighbours."""
    found = degree(100, 0.05, 0.30)
    draws = random.Random(0)

    def short(k, t):
        near = neighbours(100, k, draws.randbytes(8))
        alive = set(draws.sample(range(100), 70))
        return any(len(alive.intersection(near[i])) < t for i in alive)

    assert any(short(20, 14) for _ in range(20))
    assert not any(short(found.neighbours, found.threshold) for _ in range(200))


# --- The ring


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 40), data=st.data(), seed=st.binary(max_size=40))
def test_everyone_has_k_neighbours_who_have_him(n, data, seed):
    k = data.draw(st.integers(2, n).filter(lambda k: k >= n - 1 or k % 2 == 0 or n % 2 == 0))
    near = neighbours(n, k, seed)
    for i, others in enumerate(near):
        assert others == sorted(set(others) - {i})
        assert len(others) == min(k, n - 1)
        assert all(i in near[j] for j in others)


@pytest.mark.parametrize(("n", "k"), [(10, 4), (11, 4), (12, 5), (9, 6)])
def test_it_takes_k_losses_to_cut_somebody_off(n, k):
    """Harary's graph: no k − 1 losses disconnect it."""
    near = neighbours(n, k, b"seed")
    for lost in combinations(range(n), k - 1):
        left = set(range(n)) - set(lost)
        reached, todo = set(), [min(left)]
        while todo:
            i = todo.pop()
            if i not in reached:
                reached.add(i)
                todo += left.intersection(near[i])
        assert reached == left


def test_an_odd_ring_with_an_odd_degree_is_refused():
    with pytest.raises(ConfigError, match="6 are possible"):
        neighbours(11, 5, b"")
    with pytest.raises(ConfigError, match="no ring of 9 sites gives each 1 neighbours"):
        neighbours(9, 1, b"")


def test_the_same_seed_gives_the_same_graph_and_another_one_another():
    assert neighbours(50, 8, b"seed") == neighbours(50, 8, b"seed") != neighbours(50, 8, b"Seed")


def test_every_order_is_as_likely_as_any():
    """χ² over the 24 orders of 4 sites; 23 degrees of freedom, so 60 is beyond one in 30,000."""
    trials = 4800
    seen = Counter(tuple(permutation(4, i.to_bytes(4, "big"))) for i in range(trials))
    expected = trials / 24
    assert sum((seen[order] - expected) ** 2 / expected for order in permutations(range(4))) < 60


def test_the_order_is_what_it_was():
    """Frozen: sites of another version draw the same graph."""
    assert permutation(12, b"fedtrain") == [5, 8, 7, 9, 3, 0, 4, 2, 11, 10, 1, 6]
    assert neighbours(7, 2, b"fedtrain")[0] == [1, 3]
