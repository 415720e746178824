"""Graphs and weights against their papers' formulas and tables."""

import math
import sys
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain import topology
from fedtrain.cli import cli
from fedtrain.errors import ConfigError
from fedtrain.topology import KINDS, analysis, names, parse
from fedtrain.topology.analysis import deviation, left, product, report, rounds_to
from fedtrain.topology.finite import base

SPECS = [
    "ring", "torus", "complete", "star", "exponential", "one-peer-exponential", "base:1", "base:2", "base:3",
    "regular:4", "erdos-renyi:0.5", "matching", "epidemic:2",
]  # fmt: skip
SIZES = [4, 7, 8, 16, 25, 32]
CASES = [(s, n) for s in SPECS for n in SIZES if (s, n) != ("regular:4", 4)]

ROUNDS = {  # of the Base-(k+1) graph: (k, n) -> rounds
    **{(1, n): r for n, r in [(3, 3), (5, 5), (6, 4), (7, 5), (8, 3), (11, 7), (13, 7), (16, 4)]},
    **{(1, n): r for n, r in [(25, 9), (32, 5)]},
    **{(2, n): r for n, r in [(5, 3), (7, 4), (13, 5), (25, 6)]},
    **{(3, n): r for n, r in [(5, 3), (7, 3), (16, 2), (25, 5), (32, 3)]},
}  # fmt: skip


# --- each graph by its theory


@pytest.mark.parametrize(("k", "n"), ROUNDS)
def test_the_base_graph_takes_the_published_number_of_rounds(k, n):
    assert len(base(n, k)) == ROUNDS[k, n]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
def test_the_base_graph_is_exact_for_any_number_of_peers_with_at_most_k_neighbours(k):
    for n in range(2, 65):
        graph = parse(f"base:{k}")
        period = graph.period(n)
        assert abs(product(graph, n, period) - 1 / n).max() < 1e-13, n
        assert max(graph.round(n, t).degree for t in range(period)) <= k, n


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64])
def test_one_peer_exponential_is_exact_after_log2_n_rounds_and_not_before(n):
    graph, needed = parse("one-peer-exponential"), int(math.log2(n))
    assert abs(product(graph, n, needed) - 1 / n).max() < 1e-14
    assert n == 2 or deviation(product(graph, n, needed - 1)) > 0.5
    assert all(graph.round(n, t).degree == 1 for t in range(needed))


@pytest.mark.parametrize("n", SIZES)
def test_a_rings_sigma_is_the_formulas(n):
    sigma = max(abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / n)) for k in range(1, n))
    assert deviation(parse("ring").round(n, 0).matrix) == pytest.approx(sigma, abs=1e-13)


@pytest.mark.parametrize("n", SIZES)
def test_a_stars_sigma_is_1_minus_1_over_n(n):
    assert deviation(parse("star").round(n, 0).matrix) == pytest.approx(1 - 1 / n, abs=1e-13)


@pytest.mark.parametrize("n", [4, 8, 16, 32, 64])
def test_the_static_exponential_graphs_sigma_is_the_formulas(n):
    hops = math.log2(n)
    assert deviation(parse("exponential").round(n, 0).matrix) == pytest.approx(
        (hops - 1) / (hops + 1), abs=1e-13
    )


@pytest.mark.parametrize("n", SIZES)
def test_random_matchings_contract_by_the_expected_factor(n):
    # Σ over the n − 1 directions of ‖We‖² is ‖W − 11ᵀ/n‖², which is the same for every perfect matching.
    factor = (n - 2) / (2 * (n - 1)) if n % 2 == 0 else 1 / 2
    for t in range(5):
        assert left(parse("matching").round(n, t).matrix) ** 2 == pytest.approx(factor, abs=1e-13)


@pytest.mark.parametrize(("n", "degree"), [(4, 2), (7, 2), (8, 3), (9, 4), (16, 4), (30, 4), (32, 4)])
def test_a_torus_of_3_by_3_or_more_has_four_neighbours_and_of_a_prime_number_is_a_ring(n, degree):
    assert {len(part.outgoing) for part in parse("torus").round(n, 0).graph.values()} == {degree}


@pytest.mark.parametrize(("n", "degree"), [(7, 4), (8, 3), (32, 6), (25, 8), (64, 16), (10, 9)])
def test_a_random_regular_graph_is_regular_and_connected(n, degree):
    graph = parse(f"regular:{degree}")
    for seed in range(5):
        graph.check(n, seed)
        assert {len(p.outgoing) for p in graph.round(n, 0, seed).graph.values()} == {degree}


def test_each_peer_of_an_epidemic_tells_s_others_and_all_are_told_alike_in_the_long_run():
    told = dict.fromkeys(names(10), 0)
    for t in range(400):
        for name, part in parse("epidemic:3").round(10, t).graph.items():
            assert len(part.outgoing) == 3
            assert name not in part.outgoing
            for other in part.outgoing:
                told[other] += 1
    assert all(1050 < count < 1350 for count in told.values())  # 1200 expected, σ = 28


# --- what holds for all of them


@pytest.mark.parametrize(("spec", "n"), CASES)
def test_weights_are_doubly_stochastic_or_push_sums_columns_are(spec, n):
    graph = parse(spec)
    for t in range(min(graph.period(n) or 5, 5)):
        mixing = graph.round(n, t)
        assert (mixing.matrix >= 0).all()
        assert abs(mixing.matrix.sum(0) - 1).max() < 1e-14
        assert abs(mixing.matrix.sum(1) - 1).max() < 1e-12 or KINDS[graph.kind].weights == "push-sum"


@pytest.mark.parametrize(("spec", "n"), CASES)
def test_a_neighbourhood_is_its_row_and_its_column_of_the_matrix(spec, n):
    mixing = parse(spec).round(n, 1, seed=3)
    for i, (name, part) in enumerate(mixing.graph.items()):
        row = {mixing.members[j]: w for j, w in enumerate(mixing.matrix[i]) if w and j != i}
        column = {mixing.members[j]: w for j, w in enumerate(mixing.matrix[:, i]) if w and j != i}
        assert (part.peer, part.own) == (name, mixing.matrix[i, i])
        assert list(part.incoming.items()) == sorted(row.items())
        assert list(part.outgoing.items()) == sorted(column.items())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_round_is_a_function_of_members_epoch_seed_and_round_alone(data):
    spec = data.draw(st.sampled_from(SPECS))
    members = data.draw(st.lists(st.text("abcdef", min_size=1), min_size=6, max_size=12, unique=True))
    seed, epoch, t = (data.draw(st.integers(0, 5)) for _ in range(3))
    shuffled = data.draw(st.permutations(members))
    topology._round.cache_clear()
    once = parse(spec).round(members, t, seed, epoch)
    topology._round.cache_clear()
    again = parse(spec).round(shuffled, t, seed, epoch)
    assert once.members == tuple(sorted(members))
    assert (once.edges, once.own) == (again.edges, again.own)


@pytest.mark.parametrize("spec", ["matching", "epidemic:2"])
def test_what_never_repeats_is_drawn_anew_each_round_seed_and_epoch(spec):
    graph = parse(spec)
    drawn = [graph.round(16, *key).edges for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    assert all(a != b for a, b in pairwise(drawn))


@pytest.mark.parametrize("spec", ["regular:4", "erdos-renyi:0.4"])
def test_a_static_drawn_graph_stays_until_the_view_changes(spec):
    graph = parse(spec)
    assert graph.round(16, 0).edges == graph.round(16, 9).edges
    assert graph.round(16, 0).edges != graph.round(16, 0, epoch=1).edges


def test_one_peer_alone_is_its_own_mean_on_every_graph():
    for spec in [
        "ring",
        "torus",
        "complete",
        "star",
        "exponential",
        "one-peer-exponential",
        "base:1",
        "matching",
    ]:
        assert parse(spec).round(1, 0).matrix.tolist() == [[1.0]]
        assert report(parse(spec), 1).rounds == 0


# --- what is refused


def test_a_disconnected_graph_is_refused(tmp_path):
    file = tmp_path / "graph.txt"
    file.write_text("a b\nc d\n")
    with pytest.raises(ConfigError, match="4 peers is not connected"):
        parse(f"file:{file}").check(["a", "b", "c", "d"])
    parse(f"file:{file}").check(["a", "b"])
    file.write_text("# one way only\na -> b\nb -> c  # and none back\n")
    with pytest.raises(ConfigError, match="not connected"):
        parse(f"file:{file}", "push-sum").check(["a", "b", "c"])


@pytest.mark.parametrize(
    ("edges", "weights", "line"),
    [
        ("a b\nc d\n", "", "c never hears of a"),
        ("a -> b\nb -> c\nc -> b\n", "push-sum", "a never hears of b"),
        ("a b\n", "", "c never hears of a"),  # a newcomer whom the file doesn't know
    ],
)
def test_a_disconnected_graph_names_two_who_can_not_agree(edges, weights, line, tmp_path):
    (tmp_path / "g").write_text(edges)
    members = sorted({*"abc", *(c for c in edges if c in "abcd")})
    with pytest.raises(ConfigError, match=line):
        parse(f"file:{tmp_path / 'g'}", weights).check(members)


@pytest.mark.parametrize("n", range(1, 12))
@pytest.mark.parametrize(
    "spec",
    ["regular:2", "regular:3", "regular:4", "regular:7", "epidemic:1", "epidemic:5", "erdos-renyi:0.05",
     "base:2", "matching", "torus", "one-peer-exponential"],
)  # fmt: skip
def test_however_many_peers_are_left_there_is_a_graph_near_the_one_that_was_asked_for(spec, n):
    graph, why = parse(spec).near(names(n))
    graph.check(n)
    if not why:
        assert graph == parse(spec)
        return
    with pytest.raises(ConfigError) as refused:
        parse(spec).round(n, 0)
    assert why == str(refused.value)
    if graph.kind == "regular":
        assert graph.round(n, 0).degree in (int(spec[-1]) + 1, n - 1)  # the next even one, or all


def test_a_graph_file_whose_members_are_gone_gives_way_to_all_with_all(tmp_path):
    (tmp_path / "g").write_text("a b\nb c\nc d\nd a\n")
    square = parse(f"file:{tmp_path / 'g'}", "uniform")
    assert square.near("abcd") == (square, "")
    graph, why = square.near("abc")  # of a square with a corner missing the ends have fewer neighbours
    assert (str(graph), "as many neighbours" in why) == ("complete", True)


@pytest.mark.parametrize(
    ("spec", "n", "line"),
    [
        ("rign", 4, "Did you mean 'ring'"),
        ("ring:3", 4, 'write "ring"'),
        ("base", 4, 'write "base:1"'),
        ("base:0", 4, "whole number"),
        ("base:x", 4, "write a number"),
        ("regular:3", 7, "even number of ends"),
        ("regular:9", 8, "from 2 to 7"),
        ("erdos-renyi:0.01", 30, "from about 0.23 on"),
        ("erdos-renyi:2", 4, "no probability"),
        ("epidemic:4", 4, "from 1 to 3"),
        ("file:/nowhere", 4, "can't be read"),
    ],
)
def test_a_wrong_spec_says_what_to_write(spec, n, line):
    with pytest.raises(ConfigError, match=line):
        parse(spec).round(n, 0)


@pytest.mark.parametrize(
    ("spec", "weights", "line"),
    [
        ("star", "uniform", "as many neighbours; here they have 1 to 4"),
        ("exponential", "metropolis", "go both ways"),
        ("base:1", "uniform", "has its own"),
        ("ring", "average", "not one of metropolis, uniform, push-sum"),
    ],
)
def test_weights_that_would_lose_the_mean_are_refused(spec, weights, line):
    with pytest.raises(ConfigError, match=line):
        parse(spec, weights).round(5, 0)


def test_a_line_that_is_no_edge_is_named(tmp_path):
    (tmp_path / "g").write_text("a b\na -> b c\n")
    with pytest.raises(ConfigError, match=r"g:2: 'a -> b c' is no edge"):
        parse(f"file:{tmp_path / 'g'}").round(["a", "b"], 0)


# --- what it costs


def test_rounds_to_a_thousandth_by_hand():
    # ring of 8: σ₂ twice in 7 directions, the others are gone by then: ½ln(2/7) + t·lnσ₂ = ln 1e-3, t = 28.9
    assert rounds_to(parse("ring"), 8, 1e-3) == 29
    assert rounds_to(parse("base:1"), 25, 1e-3) == 9
    assert rounds_to(parse("complete"), 25, 1e-3) == 1


@pytest.mark.parametrize("spec", ["ring", "torus", "star", "exponential", "regular:4"])
@pytest.mark.parametrize("n", [7, 16])
def test_rounds_to_a_thousandth_are_those_of_the_naive_product(spec, n):
    graph, m, t = parse(spec), np.eye(n), 0
    while left(m) > 1e-3:
        m, t = graph.round(n, t).matrix @ m, t + 1
    assert rounds_to(graph, n, 1e-3) == t


@pytest.mark.parametrize("n", [7, 11, 25])
def test_rounds_of_a_periodic_graph_count_rounds_within_the_period(n):
    graph, m, t = parse("one-peer-exponential"), np.eye(n), 0
    while left(m) > 1e-3:
        m, t = graph.round(n, t).matrix @ m, t + 1
    assert t % graph.period(n)
    assert rounds_to(graph, n, 1e-3) == t


def test_at_32_peers_a_finite_schedule_sends_171_times_fewer_models_than_a_ring():
    ring, finite = report(parse("ring"), 32), report(parse("base:1"), 32)
    assert finite.exact_after == 5
    assert ring.models / finite.models == pytest.approx(171, rel=0.01)


def test_push_sum_on_a_directed_graph_has_a_report_of_its_own(tmp_path):
    (tmp_path / "g").write_text("0 -> 1\n1 -> 2\n2 -> 0\n0 -> 2\n")
    found = report(parse(f"file:{tmp_path / 'g'}", "push-sum"), 3)
    assert 0 < found.sigma < 1
    assert found.rounds < 30


def test_the_command_tells_degree_gap_rounds_and_bytes_and_draws(tmp_path):
    result = CliRunner().invoke(cli, ["topology", "ring", "-n", "8", "--png", str(tmp_path / "ring.png")])
    assert result.exit_code == 0, result.output
    assert "σ₂ = 0.8047" in result.output
    assert "rounds to 1e-3  29" in result.output
    assert "bytes to 1e-3   232 MB a peer: 58 models of 4 MB" in result.output
    assert (tmp_path / "ring.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("spec", ["base:1", "exponential", "epidemic:2"])
def test_graphs_that_change_or_point_one_way_can_be_drawn(spec, tmp_path):
    analysis.draw(parse(spec), 50, tmp_path / "graph.png")
    assert (tmp_path / "graph.png").stat().st_size > 1000


@pytest.mark.slow(3)
def test_a_graph_of_many_peers_is_analysed_in_few_products():
    assert 250_000 < rounds_to(parse("ring"), 1000, 1e-3) < 350_000


def test_draws_of_a_graph_come_from_the_seed_given():
    assert parse("regular:4").round(16, 0, seed=1).edges != parse("regular:4").round(16, 0, seed=2).edges
    assert Random(0).random() == 0.8444218515250481  # the stream that all peers must have alike


def test_drawing_without_matplotlib_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    command = ["topology", "ring", "-n", "4", "--png", str(tmp_path / "ring.png")]
    assert "-m pip install matplotlib" in CliRunner().invoke(cli, command).stderr
