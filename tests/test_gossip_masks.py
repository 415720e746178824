"""Masked sums over a neighbourhood: exact, and no single model at the receiver."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain import gossip
from fedtrain.config import Config
from fedtrain.errors import ConfigError, JoinRefused, SecAggError
from fedtrain.messages import Update
from fedtrain.runtime.peers.gossip import Peer
from fedtrain.runtime.peers.gossip_setup import algorithm_of, check_hearing
from fedtrain.runtime.peers.parcels import Inbox, other_parts, trained_part
from fedtrain.runtime.star.agreement import agree_as_peers
from fedtrain.schema import Schema, TensorSpec
from fedtrain.secagg.keys import KeyPair
from fedtrain.secagg.peer_sums import Layout, PeerSums
from fedtrain.topology import names, parse
from fedtrain.transport.memory import Faults, LocalNetwork
from fedtrain.wire.gossip import Greeting

from .gossip import party
from .limits import bounded
from .test_gossip_peers import MIXED, PLAIN, arena, committed, config, halfway_to, run_peers, simulated

SINGLE = Schema((TensorSpec("w", (70_001,), "float32", True), TensorSpec("mean", (5,), "float32", False)))


def sums_of(members, masks=True, run="r"):
    """All peers' PeerSums, that have met."""
    made = {
        name: PeerSums(name, run, 7, KeyPair(bytes([i + 1] * 32)) if masks else None)
        for i, name in enumerate(members)
    }
    for one in made.values():
        for name, other in made.items():
            if name != one.me:
                one.meet(name, other.public)
    return made


def told(sums, taker, round=0, numel=1000, seed=0):
    """What each member tells `taker`, and the plain weighted sums."""
    members = [name for name in sums if name != taker]
    random = np.random.default_rng(seed)
    vectors, plain = {}, [np.zeros(numel), np.zeros(3)]
    for name in members:
        values, scalars = random.normal(size=numel), random.normal(size=3) * 100
        layout, weight = Layout.of(len(members), 16.0, values, 3), 1 / (1 + len(members))
        session = sums[name].session(round, taker, members)
        vectors[name], clipped = sums[name].masked(layout, values, scalars, weight, session)
        assert clipped == 0
        plain[0] += weight * values
        plain[1] += weight * scalars
    return layout, vectors, plain


# --- one sum


@settings(max_examples=20, deadline=None)
@given(n=st.integers(3, 8), seed=st.integers(0, 99))
def test_a_sum_under_masks_is_the_same_sum_without_to_the_bit_and_near_the_plain_one(n, seed):
    masked = told(sums_of(names(n + 1)), "0", numel=100, seed=seed)
    open_ = told(sums_of(names(n + 1), masks=False), "0", numel=100, seed=seed)
    totals = [np.sum(list(vectors.values()), axis=0) for _, vectors, _ in (masked, open_)]
    assert np.array_equal(*totals)
    values, scalars = masked[0].decode(totals[0])
    np.testing.assert_allclose(values, masked[2][0], rtol=0, atol=n * masked[0].point.step)
    np.testing.assert_allclose(scalars, masked[2][1], rtol=0, atol=n * 2.0**-20)


def test_one_vector_and_any_part_of_the_sum_look_like_noise():
    layout, vectors, _ = told(sums_of(names(5)), "0", numel=20_000)
    _, plain, _ = told(sums_of(names(5), masks=False), "0", numel=20_000)
    some = list(vectors)
    for part in (some[:1], some[:2], some[:3]):
        rest = np.sum([vectors[p] for p in part], axis=0) - np.sum([plain[p] for p in part], axis=0)
        top = (rest[: layout.numel] >> 56).astype(np.uint8)
        counts = np.bincount(top, minlength=256)
        chi2 = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
        assert 160 < chi2 < 370  # 255 degrees of freedom: five standard deviations either way


def test_masks_differ_from_round_to_round_from_receiver_to_receiver_and_from_start_to_start():
    seen = set()
    for run, round, taker in [("r", 0, "0"), ("r", 1, "0"), ("r", 0, "1"), ("s", 0, "0")]:
        sums = sums_of(names(5), run=run)
        values = np.zeros(64)
        members = [p for p in names(5) if p != taker]
        session = sums["4"].session(round, taker, members)
        vector, _ = sums["4"].masked(Layout.of(4, 16.0, values, 0), values, np.zeros(0), 0.2, session)
        seen.add(vector[:8].tobytes())
    other = sums_of(names(5))
    other["3"].meet("4", KeyPair(b"\x77" * 32).public)  # it was started again
    assert other["3"].session(0, "0", names(5)[1:]).id != other["2"].session(0, "0", names(5)[1:]).id
    assert len(seen) == 4


def test_a_mask_serves_once():
    sums = sums_of(names(4))
    told(sums, "0", round=3)
    for round in (3, 2):
        with pytest.raises(SecAggError, match="has its part already"):
            told(sums, "0", round=round)
    told(sums, "0", round=4)
    told(sums, "1", round=3)


def test_there_is_no_session_with_two_or_with_a_stranger():
    sums = sums_of(names(4))["1"]
    assert sums.session(0, "0", ["1", "2"]) is None
    assert sums.session(0, "0", ["1", "2", "7"]) is None
    assert sums.session(0, "0", ["3", "2", "1"]).id == sums.session(0, "0", ["1", "2", "3"]).id


@pytest.mark.parametrize("key", [b"", bytes(32), b"\x01" + bytes(31), b"\xff" * 32])
def test_s10_a_key_that_keeps_no_secret_is_refused_at_the_greeting(key):
    mine = Greeting(version="1", task_digest="t", schema_digest="s", agreed={})
    theirs = Greeting(version="1", task_digest="t", schema_digest="s", agreed={}, mask_key=key)
    with pytest.raises(JoinRefused, match="keeps no secret"):
        agree_as_peers("0", mine, "1", theirs, sums_of(names(2))["0"])


# --- peers


def with_sums(n, graph="complete", rounds=3, masks=True, kind="dpsgd", schema=SINGLE, **options):
    """run_peers, each peer with its PeerSums."""
    made = sums_of(names(n), masks)
    return asyncio.run(
        run_peers(gossip.build(kind, {}), graph, n, rounds, schema=schema, sums=made, **options)
    )


@pytest.mark.parametrize("kind", ["dpsgd", "periodic", "diloco", "gradient-tracking"])
@pytest.mark.parametrize("schema", [MIXED, PLAIN])
def test_peers_under_masks_have_the_bits_of_sums_without_and_are_near_peers_in_the_open(kind, schema):
    masked, _, errors = with_sums(6, "regular:4", kind=kind, schema=schema)
    plain, _, _ = with_sums(6, "regular:4", kind=kind, schema=schema, masks=False)
    open_, _, _ = asyncio.run(run_peers(gossip.build(kind, {}), "regular:4", 6, 3, schema=schema))
    assert errors == {}
    for name, peer in masked.items():
        assert torch.equal(peer.model.data, plain[name].model.data)
        ours, theirs = trained_part(peer.model), trained_part(open_[name].model)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.07 if schema is MIXED else 1e-9)  # bfloat16
        for part, vector in other_parts(peer.model).items():
            torch.testing.assert_close(vector, other_parts(open_[name].model)[part], rtol=0, atol=1e-4)


def test_what_a_peer_is_sent_has_no_neighbours_model_in_it(monkeypatch):
    """All bytes that come, searched for the first values of every model that was told."""
    came, models = [], []
    mix, begin = Inbox.mix, Peer.step

    def seen(self, peer, offset, chunk):
        came.append(bytes(chunk))
        mix(self, peer, offset, chunk)

    async def stepped(self, near, deadline_s):
        models.append(trained_part(self.model).clone())
        return await begin(self, near, deadline_s)

    monkeypatch.setattr(Inbox, "mix", seen)
    monkeypatch.setattr(Peer, "step", stepped)

    def found():
        told = b"".join(came)
        vectors = [m.numpy().tobytes() for m in models]
        return sum(v[i : i + 8] in told for v in vectors for i in range(0, 80, 8))

    noise = {"models": noisy, "rounds": 1, "schema": SINGLE}
    asyncio.run(run_peers(gossip.build("dpsgd", {"overlap": True}), "complete", 5, **noise))
    assert found() == 50  # in the open every model is there
    came.clear(), models.clear()
    made = sums_of(names(5))
    asyncio.run(run_peers(gossip.build("dpsgd", {"overlap": True}), "complete", 5, sums=made, **noise))
    assert len(b"".join(came)) > 5 * 4 * SINGLE.numel * 3
    assert found() == 0


def noisy(number):
    made = arena(SINGLE, number)
    made.views()["w"].copy_(torch.randn(70_001, generator=torch.Generator().manual_seed(number)))
    return made


def test_a_neighbour_that_is_gone_costs_the_round_and_no_secret():
    """What came of the others stays noise: nobody takes its masks out, and the share returns to self."""
    silent = Faults(delay_s=1e-3, cut=lambda giver, taker, now: giver == "4")
    peers, told_, errors = with_sums(5, rounds=1, faults=silent, schema=PLAIN, deadline_s=5.0)
    assert errors == {}
    for i, name in enumerate(names(4)):
        assert told_[name][0].missing.keys() == {"4"}
        x, target = trained_part(arena(PLAIN, i)), trained_part(arena(PLAIN, 100 + i))
        torch.testing.assert_close(trained_part(peers[name].model), (x + target) / 2, rtol=0, atol=1e-12)


def test_when_the_view_has_changed_the_rest_go_on():
    """The graph of the next round is over those that are left, and so are its sums."""
    peers, told_, _ = with_sums(4, "complete", rounds=2)
    assert all(not each.missing for rounds in told_.values() for each in rounds)
    xs = torch.stack([trained_part(p.model) for p in peers.values()])
    assert float((xs - xs.mean(0)).norm()) < 1e-3


def test_peers_whose_keys_differ_do_not_sum_and_say_so():
    made = sums_of(names(5))
    made["3"].meet("4", KeyPair(b"\x55" * 32).public)  # "3" knows another key of "4" than the others
    peers, told_, _ = asyncio.run(
        run_peers(gossip.build("dpsgd", {}), "complete", 5, 1, schema=PLAIN, sums=made)
    )
    assert "it is for other peers than those" in " ".join(told_["0"][0].missing.values())
    x, target = trained_part(arena(PLAIN, 0)), trained_part(arena(PLAIN, 100))
    torch.testing.assert_close(trained_part(peers["0"].model), (x + target) / 2, rtol=0, atol=1e-12)


def test_a_vector_of_another_session_is_refused_before_its_bytes():
    made = sums_of(names(5))
    made["2"].meet("4", KeyPair(b"\x55" * 32).public)
    _, told_, _ = asyncio.run(run_peers(gossip.build("dpsgd", {}), "complete", 5, 1, schema=PLAIN, sums=made))
    assert "2" in told_["0"][0].missing


def test_values_beyond_the_bound_are_clipped_and_counted():
    def large(number):
        made = arena(PLAIN, number)
        trained_part(made)[:3] = 1e4
        return made

    made = sums_of(names(5))
    _, told_, _ = asyncio.run(
        run_peers(gossip.build("dpsgd", {}), "complete", 5, 1, schema=PLAIN, sums=made, models=large)
    )
    assert told_["0"][0].clipped == 3
    assert told_["0"][0].estimates["clipped"] == 3.0


async def over_sockets(n, rounds, schema):
    made = sums_of(names(n))
    async with party(names(n)) as all_:

        async def live(name, number):
            target = trained_part(arena(schema, 100 + number)).clone()
            peer = Peer(
                name, gossip.build("dpsgd", {}), arena(schema, number), halfway_to(target), all_.peers[name],
                made[name],
            )  # fmt: skip
            for t in range(rounds):
                told = await peer.step(parse("complete").round(n, t).graph[name], 60.0)
                assert told.missing == {}
            return peer

        peers = await asyncio.gather(*(live(name, i) for i, name in enumerate(names(n))))
        return {peer.name: peer for peer in peers}


def test_masked_peers_over_sockets_have_the_bits_of_masked_peers_in_memory():
    real = bounded(over_sockets(4, 2, SINGLE))
    memory, _, errors = with_sums(4, rounds=2)
    assert errors == {}
    for name, peer in real.items():
        assert torch.equal(peer.model.data, memory[name].model.data)


# --- a run


def run_config(root, name="run", masks=False, **keys):
    plain = config(root, name, **({"topology": "regular:4", "masks": True} | keys))
    return Config.of({**plain.table(), "simulate": plain.table()["simulate"] | {"masks": masks}}, root)


def test_a_simulation_has_the_same_models_with_real_masks_and_without(tmp_path):
    found = []
    for masks in (True, False):
        settings = run_config(tmp_path, "same", masks, task="task:Normed")
        result, log = simulated(settings, fresh=True)
        assert result.metrics["accuracy"] > 0.7
        assert not log.of("update_refused")
        found.append(committed(settings.gossip_dir).weights.digest)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"algorithm": "sgp", "topology": "exponential"}, "sgp wants more of its neighbours than the sum"),
        ({"algorithm": "choco"}, "content with it: .*dpsgd"),
        ({"algorithm": "swift"}, "swift wants more"),
        ({"rule": "median"}, "median compares single models, which masks hide"),
        ({"clip": 0}, "gossip.clip: 0.0 must be positive"),
    ],
)
def test_masks_that_make_no_sense_are_refused_before_anything_starts(tmp_path, keys, line):
    with pytest.raises(ConfigError, match=line):
        algorithm_of(run_config(tmp_path, **keys))


@pytest.mark.parametrize("graph", ["ring", "base:1", "star", "regular:2"])
def test_a_graph_of_less_than_three_neighbours_is_refused(graph):
    with pytest.raises(ConfigError, match="a sum of fewer than 3 hides nobody"):
        check_hearing(gossip.build("dpsgd", {}), parse(graph), names(8), 0, masks=True)


@pytest.mark.parametrize("kind", ["dpsgd", "gradient-tracking"])
def test_a_sum_to_which_a_member_gave_another_weight_by_its_own_view_is_none(kind, tmp_path):
    """3 knows that 4 and 5 have left, the others do not yet: each circle of these has the members that 3
    sees, and 3 counts 1/4 there by its own degree, 1/6 by theirs. Summed, one model of all grew by 1/12."""
    pairs = ["0 1", "0 2", "0 3", "1 2", "1 3", "2 3", "3 4", "3 5"]
    (tmp_path / "graph.txt").write_text("\n".join(pairs))
    graph, made = parse(f"file:{tmp_path / 'graph.txt'}"), sums_of(names(4))
    near = dict(graph.round(names(6), 0).graph) | {"3": graph.round(names(4), 0).graph["3"]}
    assert near["0"].incoming.keys() == near["3"].outgoing.keys() - {"0"} | {"3"}
    network, told, ended = LocalNetwork(names(4)), {}, {}

    async def still(round, weights, delta):
        return Update(delta=delta, num_examples=1.0, metrics={"loss": (1.0, 1.0)})

    async def live(name):
        async with network.join(name) as neighbors:
            peer = Peer(name, gossip.build(kind, {}), arena(SINGLE, 1), still, neighbors, made[name])
            told[name] = await peer.step(near[name], 5.0)
            ended[name] = trained_part(peer.model)

    async def main():
        await asyncio.gather(*map(live, names(4)))

    bounded(main())
    for name in "012":
        assert told[name].missing == {
            "3": "refused: it counts 0.25 by its view of who is here, 0.166667 by ours"
        }
    for x in ended.values():
        torch.testing.assert_close(x, trained_part(arena(SINGLE, 1)), rtol=0, atol=1e-6)
