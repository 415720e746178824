"""Peers: algorithms between the training engine and the graph seam, in memory and in a simulation."""

import asyncio
import math
import re
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from fedtrain import compression, gossip, topology
from fedtrain.arena import Arena
from fedtrain.cli import cli
from fedtrain.config import Config, GossipConfig
from fedtrain.errors import BadUpdate, ConfigError, StoreError, TaskError
from fedtrain.exchange import Exchanged, ReceivedShare, Share, ShareHeader
from fedtrain.gossip import Blend, Parcel, Receive, Received, Send
from fedtrain.gossip.choco import _name
from fedtrain.messages import Update
from fedtrain.runtime.peers.gossip import Peer
from fedtrain.runtime.peers.gossip_setup import agreed as agreed_of_peers
from fedtrain.runtime.peers.gossip_setup import algorithm_of
from fedtrain.runtime.peers.mailbox import Letters
from fedtrain.runtime.peers.parcels import Inbox, ParcelHeader, other_parts, share_of, trained_part, write
from fedtrain.runtime.peers.pledges import Pledges
from fedtrain.runtime.simulations import gossip_simulation, simulation
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import RunStore
from fedtrain.topology import names, parse
from fedtrain.transport.memory import Faults, LocalNeighbors, LocalNetwork

torch.set_num_threads(1)

F64 = torch.float64
PLAIN = Schema((TensorSpec("w", (50,), "float64", True),))
MIXED = Schema(
    (
        TensorSpec("w", (5,), "float32", True),
        TensorSpec("mean", (3,), "float32", False),
        TensorSpec("half", (4,), "bfloat16", True),
        TensorSpec("count", (), "int64", False),
        TensorSpec("mask", (2,), "bool", False),
    )
)

TASK = """
import torch
from click.testing import CliRunner
from torch import nn
import fedtrain

class Linear(fedtrain.Task):
    def model(self):
        return nn.Linear(6, 3, dtype=torch.float64)

    def data(self, site):
        random = torch.Generator().manual_seed(1)
        x = torch.randn(240, 6, generator=random, dtype=torch.float64)
        y = (x @ torch.randn(6, 3, generator=random, dtype=torch.float64)).argmax(1)
        return torch.utils.data.TensorDataset(x, y)

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def evaluate(self, model, batch):
        x, y = batch
        return {"accuracy": (float((model(x).argmax(1) == y).sum()), len(y))}

class Normed(Linear):
    def model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
"""


def arena(schema, seed):
    made, random = Arena.zeros(schema), torch.Generator().manual_seed(seed)
    for view in made.views().values():
        view.copy_(
            torch.randint(-20, 20, view.shape, generator=random) / (4 if view.is_floating_point() else 1)
        )
    return made


def config(root, name="run", **gossip_keys):
    (root / "task.py").write_text(TASK)
    return Config.of(
        {
            "run": {"name": name, "rounds": 6, "task": gossip_keys.pop("task", "task:Linear"), "seed": 3},
            "train": {"lr": 0.2, "batch_size": 20},
            "simulate": {"sites": 6, "workers": 1},
            "secagg": {"enabled": False},
            "strategy": {"kind": gossip_keys.pop("strategy", "fedavg"), "min_sites": 2},
            "gossip": gossip_keys,
        },
        root,
    )


class Log:
    def __init__(self):
        self.events = []

    def __call__(self, event):
        self.events.append((event.kind, event.fields()))

    def of(self, kind):
        return [fields for k, fields in self.events if k == kind]


def simulated(config, **options):
    log = Log()
    result = asyncio.run(gossip_simulation.simulate(config, emit=log, **options))
    return result, log


def committed(folder):
    store = RunStore(folder, read_only=True)
    try:
        return store.latest()
    finally:
        store.close()


# --- peers over a network in memory


def halfway_to(target):
    """A task without data: local steps go half way to a peer's own target."""

    async def train(round, weights, delta):
        trained_part(delta).copy_((target - trained_part(weights)) / 2)
        return Update(delta=delta, num_examples=1.0, metrics={"loss": (float(target[0]), 1.0)})

    return train


async def run_peers(
    algorithm, graph, n, rounds, faults=None, schema=PLAIN, deadline_s=10.0, models=None, sums=None,
    seed=1, within_s=0.0, folder=None,
):  # fmt: skip
    """The peers after so many rounds, and how each round went for each."""
    network = LocalNetwork(names(n), faults=faults, seed=seed)
    told = {name: [] for name in names(n)}

    async def live(name, number):
        model = models(number) if models else arena(schema, number)
        target = trained_part(arena(schema, 100 + number)).clone()
        async with network.join(name) as neighbors:
            pledges = None
            if folder is not None:
                (folder / name).mkdir(parents=True)
                pledges = Pledges(folder / name, algorithm)
            peer = Peer(
                name, algorithm, model, halfway_to(target), neighbors, (sums or {}).get(name), pledges=pledges
            )
            everyone[name] = peer
            for t in range(rounds):
                mixing = parse("complete" if algorithm.everyone(t) else graph).round(n, t)
                told[name].append(await peer.step(mixing.graph[name], deadline_s))
                peer.tell_account()
                if not algorithm.waits:
                    await neighbors.sleep(1.0)
            if pledges is not None:
                for _ in range(20):  # one of them arrives
                    neighbors.announce(peer.round)
                    await neighbors.sleep(2.0)
                _, peer.state, _ = pledges.settle(
                    neighbors.accounts(), trained_part(peer.model), peer.state, peer._gauge
                )
                assert not pledges._given

    everyone = {}
    results = await asyncio.gather(
        *(live(name, i) for i, name in enumerate(names(n))), return_exceptions=True
    )
    errors = {name: e for name, e in zip(names(n), results, strict=True) if e is not None}
    assert network.now <= max(deadline_s, rounds, within_s)
    return everyone, told, errors


@pytest.mark.parametrize(
    ("kind", "graph"),
    [
        ("dpsgd", "base:1"), ("dpsgd", "regular:4"), ("sgp", "exponential"), ("epidemic", "epidemic:2"),
        ("gradient-tracking", "ring"), ("choco", "regular:4"), ("diloco", "torus"), ("noloco", "matching"),
        ("periodic", "ring"), ("streaming-diloco", "torus"),
    ],
)  # fmt: skip
def test_peers_over_a_network_have_the_bits_of_the_plain_driver(kind, graph):
    compressor = compression.parse("quantize").contraction() if kind == "choco" else None
    algorithm = gossip.build(kind, {"every": 3} if kind == "periodic" else {}, compressor)
    peers, told, errors = asyncio.run(run_peers(algorithm, graph, 7, 5))
    assert errors == {}
    assert all(not t.missing for each in told.values() for t in each)

    xs = {name: trained_part(arena(PLAIN, i)).clone() for i, name in enumerate(names(7))}
    targets = {name: trained_part(arena(PLAIN, 100 + i)).clone() for i, name in enumerate(names(7))}
    states = {name: algorithm.init(x) for name, x in xs.items()}
    for t in range(5):
        mixing = parse("complete" if algorithm.everyone(t) else graph).round(7, t)
        xs, states = gossip.step(
            algorithm, xs, states, mixing.graph, t, lambda name, x: x + (targets[name] - x) / 2
        )
    for name, peer in peers.items():
        assert torch.equal(trained_part(peer.model), xs[name])
        assert peer.state.keys() == states[name].keys()
        assert all(torch.equal(peer.state[k], v) for k, v in states[name].items())


def test_every_peer_estimates_the_mean_loss_of_all_without_a_server():
    peers, told, _ = asyncio.run(run_peers(gossip.build("dpsgd", {}), "ring", 8, 60))
    mean = sum(float(trained_part(arena(PLAIN, 100 + i))[0]) for i in range(8)) / 8
    for name in peers:
        assert told[name][-1].loss == pytest.approx(mean, abs=1e-3)


def test_every_peer_estimates_how_far_models_are_apart_without_a_server():
    """Its own move by the average is a neighbourhood's disagreement; all follow the mean of the squares."""
    peers, told, _ = asyncio.run(run_peers(gossip.build("dpsgd", {}), "ring", 8, 60))
    moves = [float(peer._now[1]) for peer in peers.values()]
    assert max(moves) > 1.5 * min(moves)
    for name in peers:
        assert told[name][-1].moved ** 2 == pytest.approx(sum(moves) / 8, rel=0.01)
        assert told[name][-1].moved > 0.1  # each is drawn to a target of its own


def test_on_the_complete_graph_each_peer_knows_how_far_the_round_before_moved_the_models():
    complete = lambda rounds: asyncio.run(run_peers(gossip.build("dpsgd", {}), "complete", 6, rounds))
    moves = [float(peer._now[1]) for peer in complete(2)[0].values()]
    for rounds in complete(3)[1].values():
        assert rounds[-1].moved == pytest.approx((sum(moves) / 6) ** 0.5, rel=1e-9)
        assert {"mean_loss", "moved"} == rounds[-1].estimates.keys()


def test_a_simulation_tells_both_how_far_averaging_moved_models_and_how_far_they_are_apart_after_it(tmp_path):
    """On the complete graph the one is what training has drawn apart, and the other nothing."""
    _, log = simulated(config(tmp_path, topology="complete"), fresh=True)
    for each in log.of("round_committed"):
        assert each["metrics"]["moved"] > 1e-3
        assert each["metrics"]["disagreement"] < 1e-9


def test_when_peers_die_the_others_go_on_and_none_waits_longer_than_its_deadline():
    faults = Faults(crash_s={"2": 0.0, "5": 0.0}, notice_s=3.0)
    peers, told, errors = asyncio.run(run_peers(gossip.build("dpsgd", {}), "complete", 8, 12, faults))
    assert set(errors) == {"2", "5"}
    alive = [name for name in peers if name not in errors]
    assert all(len(told[name]) == 12 for name in alive)
    mean = torch.stack([trained_part(peers[name].model) for name in alive]).mean(0)
    wanted = torch.stack([trained_part(arena(PLAIN, 100 + int(name))) for name in alive]).mean(0)
    torch.testing.assert_close(
        mean, wanted, rtol=0, atol=0.01
    )  # the mean of those that are left: W is theirs
    assert told[alive[0]][-1].missing.keys() == {"2", "5"}


@pytest.mark.parametrize(("kind", "graph"), [("dpsgd", "ring"), ("sgp", "exponential"), ("choco", "ring")])
def test_lost_and_doubled_messages_cost_time_but_no_bit(kind, graph):
    compressor = compression.parse("sign") if kind == "choco" else None
    algorithm = gossip.build(kind, {}, compressor)
    faults = Faults(drop=0.1, duplicate=0.1, delay_s=0.01)
    clean, _, _ = asyncio.run(run_peers(algorithm, graph, 5, 4, deadline_s=1e6))
    rough, told, errors = asyncio.run(run_peers(algorithm, graph, 5, 4, faults, deadline_s=1e6))
    assert errors == {}
    assert all(not t.missing for each in told.values() for t in each)
    for name in clean:
        assert torch.equal(trained_part(clean[name].model), trained_part(rough[name].model))


@pytest.mark.parametrize("kind", ["sgp", "epidemic", "gradient-tracking"])
def test_what_did_not_arrive_in_time_is_with_its_sender_and_never_at_both(kind, monkeypatch, tmp_path):
    """Deadlines shorter than what messages may take: some shares are late, some senders can't know."""
    outcomes = Counter()
    exchange = LocalNeighbors.exchange

    async def noted(self, *arguments):
        done = await exchange(self, *arguments)
        outcomes.update(kept=len(done.kept), unsure=len(done.unsure))
        return done

    monkeypatch.setattr(LocalNeighbors, "exchange", noted)
    graph = "ring" if kind == "gradient-tracking" else "exponential"
    for seed in range(6):
        faults = Faults(drop=0.25, duplicate=0.2, delay_s=0.8)
        peers, _, errors = asyncio.run(
            run_peers(
                gossip.build(kind, {}), graph, 5, 6, faults, deadline_s=4.0, seed=seed, within_s=100.0,
                folder=tmp_path / str(seed),
            )
        )  # fmt: skip
        assert errors == {}
        if kind == "gradient-tracking":
            tracked, moved = (sum(peer.state[name] for peer in peers.values()) for name in "yd")
            torch.testing.assert_close(tracked, moved, rtol=0, atol=1e-9)
        else:
            mass = sum(float(peer.state["mass"]) for peer in peers.values())
            assert mass == pytest.approx(5, abs=1e-9)
    assert min(outcomes["kept"], outcomes["unsure"]) > 0  # both happened


@pytest.mark.parametrize("ours_arrived", [True, False])
def test_where_ours_did_not_arrive_theirs_is_left_out_too(ours_arrived):
    """So a pair moves at both its ends or at neither, and the mean stays."""
    theirs = trained_part(arena(PLAIN, 1))

    class Meets(gossip.Algorithm):
        """A pair's mean of models that are not mixed as they come."""

        def round(self, x, state, near, t):
            yield Send(Parcel({"x": x}))
            received = yield Receive()
            for parcel in received.parcels.values():
                x = (x + parcel.parts["x"]) / 2
            return x, state

    class Pair:
        bytes_out = 0

        def announce(self, round, to=None):
            """Nobody hears it."""

        async def exchange(self, round, shares, expected, mixer, deadline_s):
            parts = {"x": theirs, "gauge": torch.zeros(2, dtype=F64)}
            offer, share = offered(parts, {})
            mixer.begin(offer)
            mixer.mix("1", 0, share.payload)
            kept = {} if ours_arrived else {"1": "did not take it within 10 s"}
            return Exchanged(frozenset(expected), kept=kept, given=frozenset(shares) - kept.keys())

    async def stay(round, weights, delta):
        return Update(delta=delta, num_examples=1.0, metrics={})

    ours = trained_part(arena(PLAIN, 0)).clone()
    peer = Peer("0", Meets(), arena(PLAIN, 0), stay, Pair())
    asyncio.run(peer.step(parse("ring").round(2, 0).graph["0"], 10.0))
    assert torch.equal(trained_part(peer.model), (ours + theirs) / 2 if ours_arrived else ours)


def test_peers_that_never_wait_hear_of_each_other_by_letters():
    peers, _, errors = asyncio.run(run_peers(gossip.build("swift", {}), "complete", 6, 30))
    assert errors == {}
    xs = torch.stack([trained_part(p.model) for p in peers.values()])
    alone = torch.stack([trained_part(arena(PLAIN, 100 + i)) for i in range(6)])
    assert float((xs - xs.mean(0)).norm()) < 0.6 * float((alone - alone.mean(0)).norm())


def test_buffers_and_integers_are_averaged_plainly_and_booleans_stay():
    peers, _, _ = asyncio.run(run_peers(gossip.build("dpsgd", {}), "complete", 4, 1, schema=MIXED))
    models = [arena(MIXED, i).views() for i in range(4)]
    for i, peer in enumerate(peers.values()):
        views = peer.model.views()
        torch.testing.assert_close(views["mean"], torch.stack([m["mean"] for m in models]).mean(0))
        assert views["count"].item() == round(sum(m["count"].item() for m in models) / 4)
        assert torch.equal(views["mask"], models[i]["mask"])


def test_a_model_comes_apart_and_together_again():
    model = arena(MIXED, 5)
    assert trained_part(model).dtype == torch.float32
    assert trained_part(model).numel() == 9
    again = write(arena(MIXED, 6), trained_part(model), other_parts(model)).views()
    for name, view in model.views().items():
        assert torch.equal(again[name], view) or name == "mask"


def test_one_part_travels_without_a_copy():
    x = torch.arange(8, dtype=F64)
    share = share_of(Parcel({"x": x}), 0.5, 1)
    assert torch.frombuffer(bytearray(share.payload), dtype=F64).tolist() == x.tolist()
    x[0] = 7.0
    assert torch.frombuffer(bytearray(share.payload), dtype=F64)[0] == 7.0


# --- what is refused (S16, S17)


def offered(parts, fields, nbytes=None, note=None):
    share = share_of(Parcel(parts, fields), 0.5, 1)
    size = len(share.payload) if nbytes is None else nbytes
    return ShareHeader("1", 0, size, 0.5, 1, 0, share.note if note is None else note), share


def inbox():
    x = torch.zeros(40, dtype=F64)
    near = parse("ring").round(4, 0).graph["0"]
    return Inbox({"x": Blend(x, near)}, {"x": x}, most_bytes=100)


@pytest.mark.parametrize(
    ("parts", "fields", "line"),
    [
        ({"x": torch.zeros(41, dtype=F64)}, {}, r"x is float64\[41\], ours torch.float64\[40\]"),
        ({"x": torch.zeros(40)}, {}, "x is float32"),
        ({"y": torch.zeros(5)}, {}, "it has no x"),
        (
            {"x": torch.zeros(40, dtype=F64), "y": torch.zeros(101, dtype=torch.uint8)},
            {},
            "101 bytes to be held",
        ),
        ({"x": torch.zeros(40, dtype=F64)}, {"mass": math.inf}, "not finite"),
        ({"x": torch.zeros(40, dtype=F64)}, {"mass": -1.0}, "its mass is -1"),
        ({"x": torch.zeros(40, dtype=F64)}, {"mass": 1e9}, r"its mass is 1e\+09, not between 0 and 10000"),
        ({"x": torch.zeros(40, dtype=torch.int16)}, {}, "its parts are not of"),
    ],
)
def test_s16_a_parcel_that_is_not_as_ours_is_refused_before_its_bytes(parts, fields, line):
    with pytest.raises(BadUpdate, match=line):
        inbox().begin(offered(parts, fields)[0])


@pytest.mark.parametrize("note", [b"", b"\x80\x04K\x01.", msgspec.msgpack.encode({"parts": []})])
def test_s16_a_note_that_is_not_ours_is_refused(note):
    with pytest.raises(BadUpdate, match="its note can't be read"):
        inbox().begin(offered({"x": torch.zeros(40, dtype=F64)}, {}, note=note)[0])


def test_s16_more_bytes_than_the_parts_have_are_refused():
    with pytest.raises(BadUpdate, match="400 bytes, its parts have 320"):
        inbox().begin(offered({"x": torch.zeros(40, dtype=F64)}, {}, nbytes=400)[0])


def test_s16_a_negative_size_is_refused():
    note = msgspec.msgpack.encode(ParcelHeader([("x", "float64", 40), ("y", "uint8", -64)], {}))
    with pytest.raises(BadUpdate, match="its parts are not of"):
        inbox().begin(offered({"x": torch.zeros(40, dtype=F64)}, {}, nbytes=256, note=note)[0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_s17_values_that_are_not_finite_are_refused_before_they_are_mixed(value):
    x = torch.zeros(40, dtype=F64)
    x[33] = value
    offer, share = offered({"x": x}, {})
    box = inbox()
    box.begin(offer)
    with pytest.raises(BadUpdate, match="x has NaN or Inf"):
        box.mix("1", 0, share.payload)


# --- the simulation


@pytest.mark.slow(5)
def test_gossip_on_the_complete_graph_is_fedavg_with_all_sites(tmp_path):
    """Equal sites, float64: the same model to 1e-12, from the engine to the store."""
    settings = config(tmp_path, topology="complete")
    simulated(settings)
    asyncio.run(simulation.simulate(settings, emit=Log()))
    ours, theirs = committed(settings.gossip_dir), committed(settings.simulate_dir)
    assert ours.round == theirs.round == 6
    a, b = (trained_part(c.weights.load()) for c in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert float(a.norm()) > 0.1


@pytest.mark.parametrize("algorithm", ["dpsgd", "choco", "gradient-tracking", "sgp"])
def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(tmp_path, algorithm):
    graph = "exponential" if algorithm == "sgp" else "ring"
    whole = config(tmp_path, "whole", algorithm=algorithm, topology=graph, task="task:Normed")
    halves = config(tmp_path, "halves", algorithm=algorithm, topology=graph, task="task:Normed")
    simulated(whole)
    first = Config.of(halves.table() | {"run": halves.table()["run"] | {"rounds": 3}}, tmp_path)
    simulated(first)
    result, log = simulated(halves)
    assert (result.rounds, log.of("run_started")[0]["resumed_from"]) == (6, 3)
    a, b = committed(whole.gossip_dir), committed(halves.gossip_dir)
    assert a.weights.digest == b.weights.digest
    assert a.state.keys() == b.state.keys()
    assert all(torch.equal(a.state[k], b.state[k]) for k in a.state)


def test_peers_learn_the_task_and_come_together(tmp_path):
    result, log = simulated(config(tmp_path, topology="base:1"))
    assert result.metrics["accuracy"] > 0.8
    rounds = log.of("round_committed")
    assert [r["round"] for r in rounds] == [1, 2, 3, 4, 5, 6]
    assert rounds[-1]["loss"] < rounds[0]["loss"]
    assert 0 < rounds[-1]["metrics"]["disagreement"] < 0.2
    assert rounds[0]["bytes_out"] == rounds[0]["bytes_in"] > 0


def test_bytes_are_what_the_topology_needs(tmp_path):
    _, log = simulated(config(tmp_path, topology="ring"))
    model, gauge = 8 * (6 * 3 + 3), 64
    padded = -(-model // 64) * 64
    assert {r["bytes_out"] for r in log.of("round_committed")} == {6 * 2 * (padded + gauge)}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"strategy": "fedadam"}, "fedadam steps at the server, and gossip has none"),
        ({"topology": "epidemic:2"}, "dpsgd would lose the mean on epidemic:2"),
        ({"algorithm": "choco"}, "base:1 changes from round to round"),
        ({"algorithm": "choco", "compressor": "error_feedback:sign"}, "remembers errors itself"),
        ({"algorithm": "dpsgd", "gamma": 0.5}, "dpsgd has no such option"),
        ({"topology": "rign"}, "Did you mean 'ring'"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_starts(tmp_path, keys, line):
    with pytest.raises(ConfigError, match=line):
        algorithm_of(config(tmp_path, **keys))


def test_a_sites_half_of_a_strategy_works_in_gossip_too(tmp_path):
    plain, prox = config(tmp_path, "a"), config(tmp_path, "b", strategy="fedprox")
    models = [trained_part((simulated(c), committed(c.gossip_dir))[1].weights.load()) for c in (plain, prox)]
    assert 0 < float((models[0] - models[1]).norm()) < 0.5


def test_a_graph_file_lies_beside_the_settings(tmp_path):
    (tmp_path / "graph.txt").write_text("\n".join(f"site-{i} site-{i + 1}" for i in range(1, 6)))
    result, _ = simulated(config(tmp_path, topology="file:graph.txt"))
    assert result.rounds == 6
    (tmp_path / "graph.txt").write_text("site-1 site-2")
    topology._round.cache_clear()
    with pytest.raises(ConfigError, match="not connected"):
        simulated(config(tmp_path, topology="file:graph.txt"), fresh=True)


def test_256_peers_are_simulated_in_one_process_by_the_code_of_real_ones(tmp_path):
    settings = of_speed(tmp_path, "many", "equal", rounds=2, topology="one-peer-exponential", sites=256)
    (tmp_path / "task.py").write_text(TASK.replace("240", "512"))
    _, log = simulated(settings)
    rounds = log.of("round_committed")
    assert [each["sites"] for each in rounds] == [256, 256]
    assert rounds[0]["bytes_out"] == rounds[1]["bytes_out"] == 256 * (192 + 64)
    assert 0 < rounds[1]["metrics"]["disagreement"] < 0.5


# --- peers of different speed


def of_speed(root, name, speeds, rounds=20, sites=6, **keys):
    plain = config(root, name, **keys).table()
    simulate = plain["simulate"] | {"speeds": speeds, "sites": sites}
    changed = {"run": plain["run"] | {"rounds": rounds}, "simulate": simulate}
    return Config.of(plain | changed, root)


def models(settings):
    return committed(settings.gossip_dir).weights.digest


def test_where_peers_never_wait_a_slow_one_does_fewer_rounds_and_holds_nobody_up(tmp_path):
    keys = {"algorithm": "swift", "topology": "ring"}
    slow = of_speed(tmp_path, "slow", "straggler:10", **keys)
    _, log = simulated(slow)
    sites = [each["sites"] for each in log.of("round_committed")]
    assert sites == ([5] * 9 + [6]) * 2  # of the sixth a round takes ten
    assert log.of("round_committed")[-1]["loss"] < log.of("round_committed")[0]["loss"]

    again = of_speed(tmp_path, "again", "straggler:10", **keys)
    simulated(of_speed(tmp_path, "again", "straggler:10", rounds=13, **keys))
    _, rest = simulated(again)  # stopped in the middle of a slow round
    assert [each["sites"] for each in rest.of("round_committed")] == [5] * 6 + [6]

    equal = of_speed(tmp_path, "equal", "equal", **keys)
    simulated(equal)
    assert models(equal) != models(slow)


def test_a_run_of_uneven_peers_is_the_same_each_time_and_some_do_more_rounds_than_others(tmp_path):
    runs = []
    for name in ("one", "two"):
        settings = of_speed(tmp_path, name, "lognormal:1", algorithm="swift", topology="complete")
        _, log = simulated(settings)
        runs.append((models(settings), [each["bytes_out"] for each in log.of("round_committed")]))
    assert len(set(runs[0][1])) > 1
    assert runs[0] == runs[1]


def test_speeds_change_nothing_where_peers_wait_for_each_other(tmp_path):
    both = [of_speed(tmp_path, name, s, rounds=3) for name, s in [("a", "equal"), ("b", "straggler:10")]]
    for settings in both:
        simulated(settings)
    assert models(both[0]) == models(both[1])


@pytest.mark.parametrize("pace", [0.1, 0.3, 1.0, 2.0, 10.0, 1 / 3])
def test_rounds_of_a_pace_are_counted_once_wherever_a_run_is_stopped(pace):
    parts = [gossip_simulation.turns(t + 1, pace) - gossip_simulation.turns(t, pace) for t in range(60)]
    assert sum(parts) == gossip_simulation.turns(60, pace) == round(60 / pace)


def test_a_letter_that_can_t_be_read_is_as_if_it_had_not_come():
    class Silent:
        def take(self):
            return [ReceivedShare("1", 0, Share(memoryview(b"garbage"), note=b"garbage"))]

    assert dict(Letters(Silent(), False).newest(0, 8, {"x": torch.zeros(50, dtype=F64)}).parcels) == {}


@pytest.mark.parametrize(
    "parts",
    [
        {"x": torch.zeros(49, dtype=F64)},
        {"y": torch.zeros(50, dtype=F64)},
        {"x": torch.full((50,), math.nan).double()},
    ],
)
def test_s16_a_letter_that_is_not_as_ours_is_as_if_it_had_not_come(parts):
    class Sent:
        def take(self):
            return [ReceivedShare("1", 0, share_of(Parcel(parts), 0.5, 1))]

    assert dict(Letters(Sent(), False).newest(0, 8, {"x": torch.zeros(50, dtype=F64)}).parcels) == {}


ONES = float(_name(torch.ones(20, dtype=F64)))  # the number of the copy that both ends begin with


@pytest.mark.parametrize(
    ("parts", "fields"),
    [
        ({}, {"base": ONES}),
        ({"q": torch.zeros(3, dtype=torch.uint8)}, {"base": ONES}),
        ({"q": torch.zeros(24, dtype=torch.uint8)}, {}),
        ({"q": torch.zeros(24, dtype=torch.uint8)}, {"base": ONES + 1}),
        ({"copy": torch.ones(20, dtype=F64)}, {"base": ONES}),
        ({"q": torch.zeros(24, dtype=torch.uint8), "copy": torch.zeros(3, dtype=F64)}, {"base": 5.0}),
        ({"q": torch.zeros(24, dtype=torch.uint8), "copy": torch.zeros(20)}, {"base": 5.0}),
    ],
)
def test_s16_choco_takes_a_parcel_that_makes_no_sense_as_lost(parts, fields):
    algorithm = gossip.build("choco", {}, compression.parse("quantize").contraction())
    x, near = torch.ones(20, dtype=F64), parse("ring").round(2, 0).graph["0"]
    party = algorithm.round(x, algorithm.init(x), near, 0)
    next(party)
    party.send(x)
    party.send(None)
    with pytest.raises(StopIteration) as end:
        party.send(Received({"1": Parcel(parts, fields)}))
    mixed, state = end.value.value
    assert torch.equal(mixed, x)
    assert "copy/1" not in state


@pytest.mark.parametrize("taken", [True, False])
def test_a_peer_whose_model_no_neighbour_took_keeps_what_it_found(taken):
    class Others:
        bytes_out = 0

        def announce(self, round, to=None):
            """Nobody hears it."""

        async def exchange(self, round, shares, expected, mixer, deadline_s):
            late = {} if taken else dict.fromkeys(shares, "did not take it within 10 s")
            return Exchanged(
                missing=dict.fromkeys(expected, "late"), kept=late, given=shares.keys() - late.keys()
            )

    async def stay(round, weights, delta):
        return Update(delta=delta, num_examples=1.0, metrics={})

    peer = Peer("0", gossip.build("dpsgd", {}), arena(PLAIN, 0), stay, Others())
    asyncio.run(peer.step(parse("ring").round(3, 0).graph["0"], 10.0))
    assert (peer.unheard is None) is taken


def test_a_run_without_a_round_done_takes_changed_settings(tmp_path, monkeypatch):
    before = config(tmp_path, topology="ring")
    with monkeypatch.context() as broken:
        broken.setattr(Peer, "step", None)
        with pytest.raises(TypeError):
            simulated(before)
    changed = config(tmp_path, topology="complete", task="task:Normed")
    assert simulated(changed)[0].rounds == 6
    with pytest.raises(StoreError, match=r"gossip\.topology was 'complete'"):
        simulated(config(tmp_path, topology="ring", task="task:Normed"))


@pytest.mark.parametrize(("rule", "partition", "told"), [
    ("median", "dirichlet:0.1", True), ("mean", "dirichlet:0.1", False), ("median", "iid", False),
    ("self_clip:f=1", "shards:2", True),
])  # fmt: skip
def test_what_a_robust_rule_costs_on_uneven_data_is_said_at_the_start(tmp_path, rule, partition, told):
    table = config(tmp_path, topology="complete", rule=rule).table()
    table["simulate"] |= {"partition": partition}
    table["run"] |= {"rounds": 1}
    _, log = simulated(Config.of(table, tmp_path))
    assert any("leaves out what honest" in each["text"] for each in log.of("notice")) is told


async def _up(network, stack):
    return {name: await stack.enter_async_context(network.join(name)) for name in network.names}


@pytest.mark.parametrize(("value", "reason"), [(math.nan, "NaN"), (1e300, "squares are beyond")])
def test_a_peer_refuses_a_neighbours_nan_or_what_no_model_survives_and_goes_on_without_it(value, reason):
    async def go():
        network, near = LocalNetwork(names(3)), parse("complete").round(3, 0).graph
        async with AsyncExitStack() as stack:
            ends = await _up(network, stack)
            models = {name: arena(PLAIN, i) for i, name in enumerate(names(3))}
            trained_part(models["2"])[7] = value
            peers = {n: Peer(n, gossip.build("dpsgd", {}), models[n], stay, ends[n]) for n in names(3)}
            steps = (peers[n].step(near[n], 5.0) for n in names(3))
            return peers, await asyncio.gather(*steps, return_exceptions=True)

    async def stay(round, weights, delta):
        return Update(delta=delta, num_examples=1.0, metrics={})

    peers, told = asyncio.run(go())
    assert reason in told[0].missing["2"]
    assert isinstance(told[2], TaskError), "its own training is what diverges"
    assert peers["2"].round == 0
    start = trained_part(arena(PLAIN, 0)), trained_part(arena(PLAIN, 1))
    torch.testing.assert_close(trained_part(peers["0"].model), (2 * start[0] + start[1]) / 3)


def test_a_task_that_fails_while_bytes_move_ends_the_round_with_its_error_and_changes_nothing():
    async def go():
        network, near = LocalNetwork(names(2)), parse("ring").round(2, 0).graph["0"]
        async with AsyncExitStack() as stack:
            ends = await _up(network, stack)
            peer = Peer("0", gossip.build("dpsgd", {"overlap": True}), arena(PLAIN, 0), broken, ends["0"])
            with pytest.raises(TaskError, match="no such file"):
                await peer.step(near, 5.0)
            assert peer.round == 0
            assert torch.equal(peer.model.data, arena(PLAIN, 0).data)

    async def broken(round, weights, delta):
        raise TaskError("no such file")

    asyncio.run(go())


def test_the_command_simulates_peers_and_a_run_can_be_exported(tmp_path, monkeypatch):
    config(tmp_path)
    toml = '[run]\ntask = "task:Linear"\nname = "peers"\nrounds = 2\n[simulate]\nsites = 5\n'
    (tmp_path / "fedtrain.toml").write_text(toml)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["simulate", "--mode", "gossip", "--set", "gossip.topology=ring"])
    assert done.exit_code == 0, done.output
    assert "run peers (gossip): 2 rounds, 5 sites" in done.output
    assert "disagreement" in done.output
    assert "peers+gossip" in CliRunner().invoke(cli, ["runs"]).output
    exported = CliRunner().invoke(cli, ["export", "peers+gossip", "-o", "model"])
    assert exported.exit_code == 0, exported.output
    assert (tmp_path / "model" / "model.safetensors").exists()


TENSORS = TASK.replace("torch.utils.data.TensorDataset(x, y)", "x, y")  # of the same numbers


@pytest.mark.parametrize(
    "keys",
    [{"topology": "ring"}, {"overlap": True}, {"algorithm": "gradient-tracking", "topology": "ring"},
     {"algorithm": "sgp", "topology": "exponential"}, {"algorithm": "streaming-diloco", "compressor": ""}],
    ids=str,
)  # fmt: skip
def test_peers_that_are_trained_at_once_have_the_loops_numbers_up_to_rounding(tmp_path, keys):
    ends = []
    for engine in ("loop", "stacked"):
        table = config(tmp_path, engine, **keys).table()
        (tmp_path / "task.py").write_text(TENSORS)
        table["simulate"] |= {"engine": engine}
        found = Config.of(table, tmp_path)
        _, log = simulated(found)
        ends.append((log.of("round_committed")[-1]["metrics"], committed(found.gossip_dir).state))
    (metrics, looped), (measured, stacked) = ends
    assert metrics == pytest.approx(measured)
    assert looped.keys() == stacked.keys()
    names = [name for name in looped if "/" in name]  # of peers
    assert len(names) >= 6 * 4
    for name in names:  # a model by its bytes
        one, other = (value.view(F64) if name.endswith("/model") else value
                      for value in (looped[name], stacked[name]))  # fmt: skip
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12), name


def test_an_error_in_a_task_of_peers_that_are_trained_at_once_ends_the_run(tmp_path):
    table = config(tmp_path).table()
    (tmp_path / "task.py").write_text(TENSORS.replace("return nn.", "raise OSError() or nn."))
    table["simulate"] |= {"engine": "stacked"}
    with pytest.raises((ConfigError, TaskError), match=r"OSError in task\.py"):
        simulated(Config.of(table, tmp_path))


def test_the_keys_of_gossip_are_the_same_at_all_peers_but_for_those_that_the_page_says_are_a_peers_own():
    page = (Path(__file__).parent.parent / "docs/configuration.md").read_text().partition("## [gossip]")[2]
    own = re.search(r"same at all peers, but\n`(gossip.\w+)`", page)
    every = {f"gossip.{field.name}" for field in fields(GossipConfig)}
    compared = agreed_of_peers(Config.of({"gossip": {"agree": False}})).keys()
    assert every - compared == {*own.groups()}
