"""Gossip against theory: how fast peers agree, on what, and what is kept when parcels are lost."""

import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain import compression, strategies
from fedtrain.aggregation import WeightedMean
from fedtrain.arena import Arena
from fedtrain.errors import ConfigError
from fedtrain.exchange import Neighborhood
from fedtrain.gossip import (
    ALGORITHMS,
    Blend,
    Choco,
    LocalSteps,
    Mailbox,
    Meet,
    Parcel,
    Receive,
    Received,
    build,
    step,
)
from fedtrain.gossip.swift import by_speed
from fedtrain.messages import Update
from fedtrain.schema import Schema, TensorSpec
from fedtrain.topology import names, parse
from fedtrain.topology.analysis import deviation, left, product

from .test_topology import CASES, SIZES

F64 = torch.float64
INT8 = "quantize:8,unbiased=false"
torch.set_num_threads(1)  # of vectors this small a second thread is only waited for


class Peers:
    """n peers on a graph, each with a model; `train` is what local steps do, nothing without it."""

    def __init__(self, algorithm, graph, n, d=64, seed=0, train=lambda peer, x: x.clone(), xs=None):
        self.algorithm, self.train, self.t, self.post = algorithm, train, 0, {}
        self.graph = parse(graph) if isinstance(graph, str) else graph
        random = torch.Generator().manual_seed(seed)
        self.xs = xs or {p: torch.randn(d, dtype=F64, generator=random) for p in names(n)}
        self.states = {p: algorithm.init(x) for p, x in self.xs.items()}
        if isinstance(algorithm, Choco):  # whose copies begin at a model that all have
            self.states = {p: algorithm.init(torch.zeros_like(x)) for p, x in self.xs.items()}
        self.start, self.first = self.mean, self.disagreement
        self.seed = seed

    def run(self, rounds=1, lost=lambda t, sender, receiver: False):
        for _ in range(rounds):
            graph = parse("complete") if self.algorithm.everyone(self.t) else self.graph
            mixing = graph.round(list(self.xs), self.t, self.seed)
            self.xs, self.states = step(
                self.algorithm, self.xs, self.states, mixing.graph, self.t, self.train,
                lambda sender, receiver: lost(self.t, sender, receiver), self.post,
            )  # fmt: skip
            self.t += 1
        return self

    @property
    def mean(self):
        return torch.stack(list(self.xs.values())).mean(0)

    @property
    def disagreement(self):
        xs = torch.stack(list(self.xs.values()))
        return float((xs - xs.mean(0)).norm())

    @property
    def drift(self):
        return float((self.mean - self.start).abs().max())

    def rounds_to(self, goal, most=2000):
        while float((torch.stack(list(self.xs.values())) - self.start).norm()) > goal * self.first:
            assert self.t < most
            self.run()
        return self.t


def both_ways(probability, seed=0):
    """Edges that are lost in both directions, drawn anew each round."""
    return lambda t, a, b: Random(f"{seed}/{t}/{sorted((a, b))}").random() < probability


def quadratic(n, d=5, seed=0, lr=0.1):
    """A gradient step on ½hᵢ(x − aᵢ)², with another optimum and curvature at each peer; the sum's optimum."""
    random = torch.Generator().manual_seed(seed)
    a = {p: torch.randn(d, dtype=F64, generator=random) * 3 for p in names(n)}
    h = {p: 0.5 + torch.rand(d, dtype=F64, generator=random) for p in names(n)}
    best = sum(h[p] * a[p] for p in a) / sum(h.values())
    return (lambda p, x: x - lr * h[p] * (x - a[p])), best


# --- consensus against theory


@pytest.mark.parametrize(("spec", "n"), [case for case in CASES if case[0] not in ("matching", "epidemic:2")])
def test_disagreement_shrinks_by_sigma_of_the_topology(spec, n):
    graph = parse(spec)
    period = graph.period(n)
    _, sigmas, directions = np.linalg.svd(product(graph, n, period) - 1 / n)
    worst = torch.from_numpy(directions[0].copy())  # the start that is forgotten most slowly
    peers = Peers(build("dpsgd", {}), graph, n, xs=dict(zip(names(n), 5 + worst[:, None], strict=True)))
    peers.run(period)
    rounding = 6 * 2**-53 * n * period  # of values up to 6, each the sum of at most n products a round
    assert peers.disagreement / peers.first == pytest.approx(sigmas[0], rel=1e-9, abs=rounding)
    assert deviation(product(graph, n, period)) == pytest.approx(sigmas[0], abs=rounding)
    assert peers.drift < 1e-12


@pytest.mark.parametrize(
    ("spec", "n"), [("ring", 8), ("ring", 16), ("torus", 16), ("star", 8), ("regular:4", 16)]
)
def test_from_a_random_start_the_ratio_of_disagreements_tends_to_sigma(spec, n):
    sigma = deviation(parse(spec).round(n, 0).matrix)
    peers = Peers(build("dpsgd", {}), spec, n).run(math.ceil(8 / (1 - sigma)))
    before = peers.disagreement
    assert peers.run().disagreement / before == pytest.approx(sigma, rel=0.02)


@pytest.mark.parametrize(
    "spec", ["ring", "torus", "star", "exponential", "one-peer-exponential", "matching", "regular:4"]
)
@pytest.mark.parametrize("n", [7, 25])
def test_disagreement_after_t_rounds_is_the_norm_of_the_product(spec, n):
    peers = Peers(build("dpsgd", {}), spec, n, d=4000)
    for t in (1, 2, 5):
        peers.run(t - peers.t)
        assert peers.disagreement / peers.first == pytest.approx(left(product(peers.graph, n, t)), rel=0.02)


@pytest.mark.parametrize("n", SIZES)
def test_an_epidemics_disagreement_is_the_norm_of_its_product_by_mass(n):
    peers = Peers(build("epidemic", {}), "epidemic:2", n, d=4000).run(4)
    xs = torch.stack(list(peers.xs.values())) - peers.start
    e0 = peers.first
    assert float(xs.norm()) / e0 == pytest.approx(left(product(peers.graph, n, 4)), rel=0.03)


@pytest.mark.parametrize(
    ("n", "rounds"), [(3, 3), (5, 5), (6, 4), (7, 5), (8, 3), (11, 7), (13, 7), (25, 9), (32, 5)]
)
def test_models_on_the_base_graph_are_equal_after_the_tables_rounds_and_not_before(n, rounds):
    peers = Peers(build("dpsgd", {}), "base:1", n).run(rounds - 1)
    assert peers.disagreement > 1e-2
    assert peers.run().disagreement < 1e-13
    assert peers.drift < 1e-14


@pytest.mark.parametrize(
    "kind",
    ["dpsgd", "gradient-tracking", "noloco", "periodic", "sgp", "epidemic", "choco", "diloco", "adpsgd"],
)
def test_the_mean_is_kept_to_1e_12(kind):
    compressor = compression.parse(INT8) if kind == "choco" else None
    peers = Peers(build(kind, {}, compressor), "regular:4", 8).run(40)
    assert peers.disagreement < 1e-3
    assert peers.drift < 1e-12


# --- the complete graph


def test_gossip_on_the_complete_graph_is_the_plain_mean():
    peers = Peers(build("dpsgd", {}), "complete", 9).run()
    for x in peers.xs.values():
        torch.testing.assert_close(x, peers.start, rtol=0, atol=1e-14)


SCHEMA = Schema((TensorSpec("w", (5,), "float64", True),))


@pytest.mark.parametrize(
    ("kind", "options", "strategy"),
    [
        ("dpsgd", {}, ("fedavg", {})),
        ("sgp", {}, ("fedavg", {})),
        ("diloco", {}, ("fedavgm", {"server_lr": 0.7, "momentum": 0.9, "nesterov": True})),
    ],
)
def test_gossip_on_the_complete_graph_is_the_aggregators_strategy(kind, options, strategy):
    train, _ = quadratic(6)
    x0 = torch.ones(5, dtype=F64)
    peers = Peers(build(kind, options), "complete", 6, xs={p: x0.clone() for p in names(6)}, train=train).run(
        20
    )
    server = strategies.build(*strategy)
    weights = Arena.zeros(SCHEMA)
    weights.flat(SCHEMA.sections[0]).copy_(x0)
    state = strategies.beginning(server, weights)[1]
    for _ in range(20):
        mean = WeightedMean(SCHEMA)
        for p in names(6):
            delta, x = Arena.zeros(SCHEMA), weights.flat(SCHEMA.sections[0])
            delta.flat(SCHEMA.sections[0]).copy_(train(p, x) - x)
            mean.add(Update(delta=delta, num_examples=10.0))
        weights, state = strategies.server_step(server, weights, state, mean.result())
    for x in peers.xs.values():
        torch.testing.assert_close(x, weights.flat(SCHEMA.sections[0]), rtol=0, atol=1e-12)


def test_a_periodic_average_makes_all_models_equal_every_so_many_rounds():
    train, _ = quadratic(8)
    peers = Peers(build("periodic", {"every": 4}), "ring", 8, d=5, train=train)
    equal = [peers.run().disagreement < 1e-12 for _ in range(12)]
    assert equal == [False, False, False, True] * 3


# --- push-sum


def irregular(tmp_path, n, seed):
    """A strongly connected directed graph: a cycle, and arrows at random."""
    random = Random(seed)
    lines = [f"{names(n)[i]} -> {names(n)[(i + 1) % n]}" for i in range(n)]
    lines += [f"{a} -> {b}" for a in names(n) for b in names(n) if a != b and random.random() < 0.15]
    (tmp_path / f"graph{seed}").write_text("\n".join(lines))
    return parse(f"file:{tmp_path / f'graph{seed}'}", "push-sum")


@pytest.mark.parametrize("n", [4, 7, 16, 32])
def test_push_sum_is_exact_on_irregular_directed_graphs(tmp_path, n):
    graph = irregular(tmp_path, n, seed=n)
    assert not np.allclose(graph.round(n, 0).matrix.sum(1), 1)  # else any mean would be exact
    peers = Peers(build("sgp", {}), graph, n)
    for _ in range(600):
        peers.run()
        if peers.disagreement < 1e-12:
            break
    for x in peers.xs.values():
        torch.testing.assert_close(x, peers.start, rtol=0, atol=1e-12)
    assert sum(float(s["mass"]) for s in peers.states.values()) == pytest.approx(n, abs=1e-12)


def test_without_push_sum_the_mean_is_lost_on_such_a_graph(tmp_path):
    peers = Peers(build("epidemic", {"push_sum": False}), irregular(tmp_path, 7, seed=7), 7).run(300)
    assert peers.disagreement < 1e-9
    assert peers.drift > 0.05


def test_masses_given_at_the_start_weigh_the_mean(tmp_path):
    peers = Peers(build("sgp", {}), irregular(tmp_path, 7, seed=7), 7)
    masses = dict(zip(peers.xs, [1.0, 2.0, 0.5, 3.0, 1.0, 1.0, 0.1], strict=True))
    expected = sum(masses[p] * x for p, x in peers.xs.items()) / sum(masses.values())
    peers.states = {p: {"mass": torch.tensor(masses[p], dtype=F64)} for p in peers.xs}
    for x in peers.run(300).xs.values():
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-9)


def test_sgps_mean_by_mass_moves_by_the_mean_of_the_local_steps(tmp_path):
    def center(peers):
        return sum(float(peers.states[p]["mass"]) * x for p, x in peers.xs.items()) / 7

    steps = {p: torch.full((64,), float(i), dtype=F64) for i, p in enumerate(names(7))}
    peers = Peers(build("sgp", {}), irregular(tmp_path, 7, 7), 7, train=lambda p, x: x + steps[p])
    before = center(peers)
    torch.testing.assert_close(center(peers.run(10)), before + 10 * 3.0, rtol=0, atol=1e-12)


# --- compressed


@pytest.mark.parametrize(
    ("compressor", "gamma", "rounds"),
    [(None, 1.0, 29), (INT8, 1.0, 29), ("sign", 1.0, 58), ("topk:0.1", 0.3, 98)],
)
def test_choco_agrees_to_a_thousandth_in_the_rounds_of_the_table(compressor, gamma, rounds):
    plain = build("dpsgd", {})
    algorithm = build("choco", {"gamma": gamma}, compression.parse(compressor)) if compressor else plain
    peers = Peers(algorithm, "ring", 8, d=1000)
    assert peers.rounds_to(1e-3) == rounds
    assert peers.drift < 1e-12


@settings(max_examples=12, deadline=None)
@given(
    compressor=st.sampled_from([INT8, "quantize:4", "sign", "topk:0.2", "bfloat16"]),
    probability=st.floats(0, 0.6),
    seed=st.integers(0, 1000),
)
def test_choco_keeps_the_mean_when_parcels_are_lost(compressor, probability, seed):
    peers = Peers(build("choco", {"gamma": 0.2}, compression.parse(compressor)), "ring", 6, d=40, seed=seed)
    assert peers.run(20, both_ways(probability, seed)).drift < 1e-12


def test_choco_catches_up_after_losses():
    peers = Peers(build("choco", {}, compression.parse(INT8)), "ring", 8)
    peers.run(40, both_ways(0.3))
    assert peers.run(60).disagreement < 1e-4
    for p, state in peers.states.items():
        for q, part in peers.graph.round(8, 0).graph.items():
            if p in part.incoming:
                assert torch.equal(state["copy"], peers.states[q][f"copy/{p}"])


def test_choco_sends_the_whole_copy_only_to_who_lost_it():
    peers, sent = Peers(build("choco", {}, compression.parse("sign")), "ring", 8), []
    for t in range(6):
        peers.run(1, lambda t, a, b: t == 2 and {a, b} == {"0", "1"})
        parcels = {p: letter for box in peers.post.values() for p, (at, letter) in box.items() if at == t}
        sent.append({p for p, parcel in parcels.items() if "copy" in parcel.parts})
    assert sent == [set(), set(), set(), set(), {"0", "1"}, set()]


# --- uneven data


def distance(peers, best):
    return max(float((x - best).abs().max()) for x in peers.xs.values())


def test_gradient_tracking_has_no_bias_where_dpsgd_has_one():
    train, best = quadratic(8)
    assert distance(Peers(build("dpsgd", {}), "ring", 8, d=5, train=train).run(400), best) > 0.1
    assert distance(Peers(build("gradient-tracking", {}), "ring", 8, d=5, train=train).run(400), best) < 1e-9


def test_gradient_tracking_stands_steps_as_large_as_dpsgd_does():
    """Moving after the average (DIGing) diverges here from a step of 0.08 on."""
    train, best = quadratic(16, lr=0.6)  # of curvatures up to 1.5
    assert np.linalg.eigvalsh(parse("torus").round(16, 0).matrix).min() == pytest.approx(-0.6)
    peers = Peers(build("gradient-tracking", {}), "torus", 16, d=5, train=train).run(400)
    assert distance(peers, best) < 1e-9


def test_the_mean_of_the_trackers_is_the_mean_gradient_in_every_round():
    train, _ = quadratic(7)
    peers = Peers(build("gradient-tracking", {}), "star", 7, d=5, train=train)
    for _ in range(5):
        peers.run()
        gradients = sum(train(p, x) - x for p, x in peers.xs.items())
        torch.testing.assert_close(sum(s["y"] for s in peers.states.values()), gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "graph", "within"), [
    ("dpsgd", "regular:4", 0.3), ("choco", "regular:4", 0.3), ("sgp", "exponential", 0.3),
    ("epidemic", "epidemic:3", 0.6), ("diloco", "complete", 0.01),
    ("noloco", "matching", 0.6), ("swift", "regular:4", 0.3), ("periodic", "ring", 0.6),
    ("gradient-tracking", "regular:4", 0.01), ("adpsgd", "regular:4", 0.6),
    ("streaming-diloco", "complete", 1.0),
])  # fmt: skip
def test_every_algorithm_comes_near_the_optimum_of_the_sum(kind, graph, within):
    train, best = quadratic(8, lr=0.02)
    compressor = compression.parse(INT8) if kind == "choco" else None
    peers = Peers(build(kind, {}, compressor), graph, 8, d=5, train=train).run(250)
    assert distance(peers, best) < within


def test_each_alone_stays_far_from_the_optimum_of_the_sum():
    train, best = quadratic(8, lr=0.02)
    alone = Peers(build("dpsgd", {}), "matching", 8, d=5, train=train).run(250, lambda t, a, b: True)
    assert distance(alone, best) > 4


def test_overlap_is_the_papers_form_of_dpsgd():
    train, _ = quadratic(8)
    peers = Peers(build("dpsgd", {"overlap": True}), "ring", 8, d=5, train=train)
    x = torch.stack(list(peers.xs.values()))
    w = torch.from_numpy(peers.graph.round(8, 0).matrix)
    for _ in range(5):
        delta = torch.stack([train(p, row) - row for p, row in zip(names(8), x, strict=True)])
        x = w @ x + delta
    torch.testing.assert_close(torch.stack(list(peers.run(5).xs.values())), x, rtol=0, atol=1e-13)


# --- who is missing


def linear_map(kind, spec, n, lost):
    """The matrix by which one round without training maps all models: start from the identity."""
    eye = torch.eye(n, dtype=F64)
    peers = Peers(build(kind, {}), spec, n, xs=dict(zip(names(n), eye.unbind(), strict=True)))
    peers.run(1, lost)
    return torch.stack(list(peers.xs.values())), peers


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from(
        ["ring", "torus", "star", "complete", "base:1", "base:2", "matching", "erdos-renyi:0.5"]
    ),
    n=st.integers(3, 10),
    probability=st.floats(0, 1),
    seed=st.integers(0, 10_000),
)
def test_missing_neighbours_leave_w_doubly_stochastic(spec, n, probability, seed):
    w, _ = linear_map("dpsgd", spec, n, both_ways(probability, seed))
    assert (w >= 0).all()
    torch.testing.assert_close(w.sum(0), torch.ones(n, dtype=F64), rtol=0, atol=1e-12)
    torch.testing.assert_close(w.sum(1), torch.ones(n, dtype=F64), rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from(["epidemic:2", "exponential", "one-peer-exponential", "star", "ring"]),
    n=st.integers(3, 10),
    probability=st.floats(0, 1),
    seed=st.integers(0, 10_000),
)
def test_undelivered_mass_goes_back_to_its_sender(spec, n, probability, seed):
    def lost(t, sender, receiver):
        return Random(f"{seed}/{t}/{sender}/{receiver}").random() < probability

    peers = Peers(build("sgp", {}), spec, n, d=8, seed=seed).run(8, lost)
    masses = {p: float(s["mass"]) for p, s in peers.states.items()}
    assert min(masses.values()) > 0
    assert sum(masses.values()) == pytest.approx(n, abs=1e-12)
    torch.testing.assert_close(
        sum(masses[p] * x for p, x in peers.xs.items()) / n, peers.start, rtol=0, atol=1e-12
    )


def test_mass_that_is_lost_on_the_way_is_lost_with_its_model():
    x, near = torch.ones(4, dtype=F64), parse("ring").round(3, 0).graph["0"]
    blend = Blend(x, near, mass=2.0)
    blend.begin("1", {"mass": 3.0})
    blend.add("1", torch.full((4,), 5.0, dtype=F64))
    mixed, mass = blend.by_mass()  # of "2" nothing came, and nobody knows where its third of its mass is
    assert mass == pytest.approx((2 + 3) / 3)
    torch.testing.assert_close(mixed, torch.full((4,), (2 * 1 + 3 * 5) / (2 + 3), dtype=F64))


def test_half_a_vector_counts_where_it_came_and_returns_to_self_elsewhere():
    near = Neighborhood("a", 0.5, {"b": 0.25, "c": 0.25}, {"b": 0.25, "c": 0.25})
    blend = Blend(torch.zeros(4, dtype=F64), near)
    blend.begin("b", {})
    blend.begin("c", {})
    blend.add("b", torch.full((4,), 8.0, dtype=F64))
    blend.add("c", torch.full((2,), 4.0, dtype=F64))
    assert blend.to_self().tolist() == [3.0, 3.0, 2.0, 2.0]


def test_half_a_vector_has_no_mass_and_every_coordinate_stays_an_average():
    near = Neighborhood("a", 0.5, {"b": 0.5, "c": 0.5}, {"b": 0.25, "c": 0.25})
    blend = Blend(torch.zeros(4, dtype=F64), near)
    for peer, values in (("b", [8.0] * 4), ("c", [8.0] * 2)):
        blend.begin(peer, {})
        blend.add(peer, torch.tensor(values, dtype=F64))
    mixed, mass = blend.by_mass(returned=0.25)
    assert mass == 0.5 + 0.25 + 0.5
    torch.testing.assert_close(mixed, torch.tensor([8 / 1.75 * 1.0] * 2 + [4 / 1.25] * 2, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 18, (1 << 18) + 3])
def test_where_chunks_end_changes_no_bit(dtype, size):
    numel = (1 << 18) + 777
    near = Neighborhood("a", 0.4, {"b": 0.1, "c": 0.2, "d": 0.3}, {"b": 0.6})
    a, *others = torch.randn(4, numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole, pieces = Blend(a, near), Blend(a, near)
    for peer, x in zip("bcd", others, strict=True):
        for blend in (whole, pieces):
            blend.begin(peer, {})
        whole.add(peer, x)
        if size < 100:  # a few small pieces at the start suffice
            pieces.add(peer, x[:size])
            pieces.add(peer, x[size:])
        else:
            for piece in x.split(size):
                pieces.add(peer, piece)
    assert torch.equal(whole.to_self(), pieces.to_self())


# --- mailboxes


@pytest.mark.parametrize("speeds", [(1, 1, 1, 1, 1), (1, 2, 3, 5, 10)])
def test_swifts_weights_keep_the_mean_in_expectation_whatever_the_speeds(speeds):
    """Σ pᵢWᵢ, where Wᵢ is the identity but for row i, is symmetric: its columns sum to one as its rows do."""
    graph = parse("regular:4").round(5, 0)
    rounds = {p: 1000.0 * speed for p, speed in zip(names(5), speeds, strict=True)}
    expected = np.zeros((5, 5))
    for i, (peer, near) in enumerate(graph.graph.items()):
        parcels = {j: Parcel({}, {"rounds": rounds[j]}) for j in near.incoming}
        mine = by_speed(near, Received(parcels), rounds[peer])
        assert mine.own + sum(mine.incoming.values()) == pytest.approx(1.0)
        assert min(mine.own, *mine.incoming.values()) >= 0
        for j, weight in mine.incoming.items():
            expected[i, names(5).index(j)] = rounds[peer] * weight
    np.testing.assert_allclose(expected, expected.T, rtol=2e-3)


def test_where_all_are_as_fast_swifts_weights_are_the_graphs_to_the_bit():
    near = parse("torus").round(9, 0).graph["4"]
    for lag in (0.0, 1.0):
        heard = Received({j: Parcel({}, {"rounds": 7.0 - lag}) for j in near.incoming})
        assert by_speed(near, heard, 7.0) == near


def test_swift_goes_on_without_those_that_are_silent_and_forgets_what_is_stale():
    def silent(t, sender, receiver):
        return sender == "0" and t >= 1

    train = {p: float(i) for i, p in enumerate(names(3))}
    peers = Peers(build("swift", {"staleness": 2}), "complete", 3, d=1, train=lambda p, x: x + train[p])
    x0 = peers.run(1).post["1"]["0"][1].parts["x"]
    seen = []
    for t in range(1, 5):
        before = peers.xs
        peers.run(1, silent)
        own, other = before["1"] + 1, before["2"] + 2
        counts = min(1.0, 2 / (t + 1)) / 3  # it did one round, and may lag by one
        seen.append(bool(torch.allclose(peers.xs["1"], other / 3 + counts * x0 + (2 / 3 - counts) * own)))
    assert seen == [True, True, False, False]


# --- what a party is


@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_a_round_that_is_given_up_has_changed_nothing(kind):
    algorithm = build(kind, {}, compression.parse("sign") if kind == "choco" else None)
    near = parse("matching").round(2, 0).graph["0"]
    x = torch.arange(5, dtype=F64)
    state = algorithm.init(x)
    before = {name: value.clone() for name, value in state.items()}
    party, answer = algorithm.round(x, state, near, 0), None
    while not isinstance(request := party.send(answer), Receive | Mailbox | Meet):
        answer = request.x * 2 if isinstance(request, LocalSteps) else None
    party.close()
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in state)


@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_a_round_leaves_the_models_and_states_it_was_given(kind):
    algorithm = build(kind, {}, compression.parse("sign") if kind == "choco" else None)
    peers = Peers(algorithm, "matching", 6, train=lambda p, x: x * 0.9).run(2)
    xs, states = peers.xs, peers.states
    copies = (
        {p: x.clone() for p, x in xs.items()},
        {p: {k: v.clone() for k, v in s.items()} for p, s in states.items()},
    )
    peers.run(2)
    assert all(torch.equal(xs[p], copies[0][p]) for p in xs)
    assert all(torch.equal(states[p][k], v) for p in states for k, v in copies[1][p].items())


@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_float32_models_stay_float32(kind):
    algorithm = build(kind, {}, compression.parse(INT8) if kind == "choco" else None)
    peers = Peers(
        algorithm, "matching", 4, xs={p: torch.full((3,), float(i)) for i, p in enumerate(names(4))}
    ).run(3)
    assert all(x.dtype == torch.float32 for x in peers.xs.values())


def test_the_table_names_every_algorithm_once():
    assert sorted(ALGORITHMS) == list(ALGORITHMS)
    assert len(set(ALGORITHMS.values())) == len(ALGORITHMS)


@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        ("dpsdg", {}, "Did you mean 'dpsgd'"),
        ("adpsgd", {"staleness": 0}, "1 or more"),
        ("dpsgd", {"gamma": 1}, 'gossip.gamma: dpsgd has no such option. gossip.algorithm = "choco" has it'),
        ("choco", {}, "gossip.compressor"),
        ("noloco", {"momentum": 0.5, "gamma": 1.5}, "= 1.5"),
        ("diloco", {"momentum": 1.0}, r"in \[0, 1\)"),
        ("swift", {"staleness": -1}, "0 or more"),
        ("periodic", {"every": 0}, "gossip.every: 0 must be 1 or more"),
        ("gradient-tracking", {"rho": 0.0}, "positive"),
    ],
)
def test_a_wrong_option_says_what_to_change(kind, options, line):
    with pytest.raises(ConfigError, match=line):
        build(kind, options)


@pytest.mark.parametrize("graph", ["matching", "regular:4", "one-peer-exponential", "base:1"])
def test_diloco_and_noloco_peers_come_together_with_their_momentum(graph):
    for kind in ("diloco", "noloco"):
        peers = Peers(build(kind, {}), graph, 16)
        assert peers.run(150).disagreement < 1e-2 * peers.first, kind


@pytest.mark.parametrize("graph", ["matching", "one-peer-exponential", "base:1"])
def test_streaming_dilocos_peers_come_together_though_a_fragment_meets_a_part_of_the_rounds(graph):
    """Both graphs that change repeat after four rounds, as four fragments would."""
    peers = Peers(build("streaming-diloco", {}), graph, 16)
    assert peers.run(300).disagreement < 0.05 * peers.first
    assert peers.drift < 1e-12


def test_streaming_diloco_sends_one_fragment_a_round_and_all_in_as_many_rounds_as_there_are():
    algorithm, x, sent = build("streaming-diloco", {"fragments": 3}), torch.arange(8.0, dtype=F64), []
    near = parse("complete").round(["a", "b"], 0).graph["a"]
    for t in range(6):
        (part,) = next(algorithm.round(x, algorithm.init(x), near, t)).parcel.parts.values()
        sent += part.tolist()
    for found in (sent[:8], sent[8:]):  # without training each is the model's own
        assert sorted(found) == x.tolist()


def test_streaming_diloco_with_one_fragment_of_equal_peers_is_diloco_that_is_a_round_late():
    """φ is worked by hand: v ← βv + Δ, φ ← φ + η(Δ + βv), θ ← αθ' + (1 − α)φ."""
    algorithm = build("streaming-diloco", {"fragments": 1, "outer_lr": 0.5, "momentum": 0.5, "alpha": 0.25})
    x0 = torch.zeros(1, dtype=F64)
    peers = Peers(algorithm, "complete", 3, xs={p: x0.clone() for p in names(3)}, train=lambda _, x: x + 1)
    theta = phi = v = 0.0
    for _ in range(5):
        delta = theta - phi
        v = 0.5 * v + delta
        phi += 0.5 * (delta + 0.5 * v)
        theta = 0.25 * (theta + 1) + 0.75 * phi
        assert all(float(x) == pytest.approx(theta, rel=1e-12) for x in peers.run(1).xs.values())


def spread_of_pairs(alpha, gamma, n, rounds=1):
    """What rounds of random pairs, without training, make of NoLoCo's (E‖x − x̄‖², E⟨x − x̄, v⟩, E‖v‖²).

    An average over pairs takes away x's part in a subspace that has n/2 of n − 1 dimensions, any as likely.
    """

    def squares(a, b, c, d):
        return np.array([[a * a, 2 * a * b, b * b], [a * c, a * d + b * c, b * d], [c * c, 2 * c * d, d * d]])

    share = n / (2 * (n - 1))
    met, missed = squares(1 - gamma, alpha, -gamma, alpha), squares(1, alpha, 0, alpha)
    return np.linalg.matrix_power(share * met + (1 - share) * missed, rounds)


def test_nolocos_peers_come_together_as_the_mean_square_over_random_pairs_says():
    algorithm, seeds, rounds = build("noloco", {}), 80, 5
    runs = [Peers(algorithm, "matching", 8, d=8, seed=seed) for seed in range(seeds)]
    left = np.mean([(run.run(rounds).disagreement / run.first) ** 2 for run in runs])
    assert left == pytest.approx(spread_of_pairs(0.5, 0.7, 8, rounds)[0, 0], rel=0.1)


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.9])
def test_nolocos_bound_on_gamma_is_where_many_peers_stop_coming_together(momentum):
    most = 2 * (1 - momentum**2)

    def factor(gamma, n):
        return max(abs(np.linalg.eigvals(spread_of_pairs(momentum, gamma, n))))

    assert all(factor(0.99 * most, n) < 1 for n in (4, 16, 100_000))
    assert factor(1.01 * most, 100_000) > 1
    with pytest.raises(ConfigError, match="drift apart"):
        build("noloco", {"momentum": momentum, "gamma": 1.01 * most})


def test_256_peers_are_one_list_comprehension_away():
    peers = Peers(build("dpsgd", {}), "one-peer-exponential", 256, d=1000).run(8)
    assert peers.disagreement < 1e-12 * peers.first
    assert math.isclose(float(peers.drift), 0, abs_tol=1e-13)
    assert np.isfinite(peers.first)
