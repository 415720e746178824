"""The end of a run of peers: one model of all, the same bits at each, whoever is lost or hostile."""

import asyncio
import hashlib
import json
import os
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from fedtrain import gossip
from fedtrain.aggregation import WeightedMean
from fedtrain.digest import sha256_of
from fedtrain.errors import BadUpdate
from fedtrain.exchange import Exchanged, ReceivedShare, Share
from fedtrain.gossip import rules
from fedtrain.messages import Update
from fedtrain.runtime.peers.consensus import EXCHANGES, Consensus
from fedtrain.runtime.peers.gossip import Peer
from fedtrain.runtime.peers.gossip_setup import fewest, without_memory
from fedtrain.runtime.peers.keeping_up import reason_to_end
from fedtrain.runtime.peers.parcels import Inbox, made_of, share_of_model, trained_part
from fedtrain.runtime.peers.votes import Voters
from fedtrain.runtime.peers.whole_models import mass_of, of_all, sha256
from fedtrain.schema import Schema, TensorSpec
from fedtrain.secagg.keys import KeyPair
from fedtrain.secagg.peer_sums import PeerSums
from fedtrain.store.rounds import MadeOf
from fedtrain.topology import names, parse
from fedtrain.transport.memory import LocalNetwork
from fedtrain.wire.gossip import NOTE_BYTES

from .limits import bounded
from .peers import Toy, village
from .test_gossip_peers import MIXED, PLAIN, arena, committed, config, halfway_to, simulated

ROUNDS, DEADLINE_S = 3, 10.0


def with_rule(text):
    from fedtrain import aggregation

    own = {kind: rule for kind, rule in aggregation.RULES.items() if rule.of_rows and not rule.linear}
    return gossip.build("dpsgd", {}, rule=rules.parse(text, own, partial(without_memory, Path()), ROUNDS))


class Dies(Exception):
    """A peer's process ends."""


async def ended(
    algorithm,
    n,
    graph="base:1",
    schema=PLAIN,
    sums=None,
    rounds=ROUNDS,
    touch=None,
    dies=None,
    turns=1,
    sees=lambda name, up: up,
):
    """What each of n peers has in the end. `touch(peer)`: after its last round; `dies`: (name,
    exchange of the end in which it dies, whether its own bytes have left)."""
    network, up, peers = LocalNetwork(names(n)), set(names(n)), {}

    async def live(name, number):
        async with network.join(name) as neighbors:
            target = trained_part(arena(schema, 100 + number)).clone()
            peer = Peer(
                name, algorithm, arena(schema, number), halfway_to(target), neighbors, (sums or {}).get(name)
            )
            peers[name] = peer
            for t in range(rounds):
                await peer.step(parse(graph).round(n, t).graph[name], DEADLINE_S)
            if touch:
                touch(peer)
            if dies and dies[0] == name:
                mortal(neighbors, *dies[1:])
            end = Consensus(
                peer, rounds, arena(schema, 77), lambda: sees(name, up), DEADLINE_S, Voters(names(n)), turns
            )
            try:
                found = await end.run(max(2, fewest(algorithm, bool(sums))))
            except Dies:
                up.discard(name)
                return None
            await neighbors.sleep(1.0)  # for those who are slower
            return found

    def mortal(neighbors, last, sent):
        exchange = neighbors.exchange

        async def until(number, *arguments):
            if number == rounds + last:
                if sent:
                    await exchange(number, *arguments)
                raise Dies
            return await exchange(number, *arguments)

        neighbors.exchange = until

    found = await asyncio.gather(*(live(name, i) for i, name in enumerate(names(n))))
    assert network.now <= (1 + EXCHANGES) * turns * DEADLINE_S  # nobody waits for long
    return peers, dict(zip(names(n), found, strict=True))


def masked(n, pair=True):
    made = {name: PeerSums(name, "r", 5, KeyPair(os.urandom(32)) if pair else None) for name in names(n)}
    for one in made.values():
        for name, other in made.items():
            if name != one.me:
                one.meet(name, other.public)
    return made


def digests(found):
    return {one.digest for one in found.values() if one is not None}


@pytest.mark.parametrize(
    ("kind", "graph"),
    [("dpsgd", "ring"), ("sgp", "exponential"), ("epidemic", "epidemic:2"), ("noloco", "matching"),
     ("gradient-tracking", "ring"), ("diloco", "torus")],
)  # fmt: skip
@pytest.mark.parametrize("schema", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_all_peers_end_with_one_model_the_mean_by_mass_to_the_bit(kind, graph, schema):
    peers, found = bounded(ended(gossip.build(kind, {}), 7, graph, schema))
    assert len(digests(found)) == 1
    assert all(one.peers == names(7) for one in found.values())
    expected = of_all(peers, ROUNDS, arena(schema, 77))
    assert sha256(expected) == found["0"].digest == hashlib.sha256(found["3"].model.payload).hexdigest()
    whole = WeightedMean(schema)
    for name in sorted(peers):
        whole.add(Update(delta=peers[name].model, num_examples=mass_of(peers[name])))
    torch.testing.assert_close(trained_part(expected), trained_part(whole.result()), rtol=1e-6, atol=1e-6)
    if schema is MIXED:  # what never travels is the first model's
        assert torch.equal(expected.views()["mask"], arena(schema, 77).views()["mask"])


@pytest.mark.parametrize("last", range(3))
@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("rule", ["mean", "median"])
def test_when_a_peer_dies_in_the_end_the_others_have_one_model_all_the_same(last, sent, rule):
    if rule == "median" and last == 1:
        pytest.skip("with a rule there is no second exchange")
    _, found = bounded(ended(with_rule(rule), 5, "complete", dies=("2", last, sent)))
    assert found.pop("2") is None
    assert None not in found.values()
    assert len(digests(found)) == 1


@pytest.mark.parametrize(("rule", "masks"), [("mean", False), ("mean", True), ("median", False)])
def test_many_peers_that_turn_to_few_at_a_time_end_with_the_same_bits(rule, masks):
    both = [
        bounded(ended(with_rule(rule), 9, "complete", sums=masked(9) if masks else None, turns=turns))[1]
        for turns in (1, 3)
    ]
    assert len(digests(both[0]) | digests(both[1])) == 1


@pytest.mark.parametrize("last", [0, 1, 3, 7])
def test_when_one_of_many_dies_between_turns_the_others_have_one_model_all_the_same(last):
    _, found = bounded(ended(with_rule("mean"), 9, "complete", dies=("2", last, False), turns=3))
    assert found.pop("2") is None
    assert None not in found.values()
    assert len(digests(found)) == 1


def test_a_peer_that_counts_with_other_members_keeps_nobody_from_the_model_and_takes_it():
    apart = {"2": {"4"}}  # whom it takes for dead; blocks of so small a model are of one size all the same
    sees = lambda name, up: up - apart.get(name, set())
    tiny = Schema((TensorSpec("w", (3,), "float64", True),))
    _, found = bounded(ended(with_rule("mean"), 5, "complete", tiny, sees=sees))
    assert None not in found.values()
    assert len(digests(found)) == 1


def test_several_of_many_who_count_with_other_members_each_keep_nobody_from_the_model_and_take_it():
    """In turns most of the others see them where they expect them, and few see that anything is wrong."""
    apart = {"03": {"17"}, "11": {"05", "20"}}
    sees = lambda name, up: up - apart.get(name, set())
    tiny = Schema((TensorSpec("w", (3,), "float64", True),))
    _, found = bounded(ended(with_rule("mean"), 24, "base:1", tiny, sees=sees, turns=3))
    assert None not in found.values()
    assert len(digests(found)) == 1


def test_who_comes_when_the_others_have_finished_takes_their_model():
    """Its share is not in it; it is not left with a model of its own."""

    async def main():
        network, up = LocalNetwork("abc"), {"a", "b", "c"}
        algorithm, over = gossip.build("dpsgd", {}), asyncio.Event()

        async def live(name, number, late):
            async with network.join(name) as neighbors:
                peer = Peer(name, algorithm, arena(PLAIN, number), halfway_to(torch.zeros(50)), neighbors)
                if late:
                    await neighbors.sleep(3 * DEADLINE_S)
                found = await Consensus(peer, 0, arena(PLAIN, 77), lambda: up, DEADLINE_S, Voters("abc")).run(
                    2
                )
                over.set() if late else await neighbors.sleep(20 * DEADLINE_S)
                return found

        return await asyncio.gather(*(live(name, i, name == "c") for i, name in enumerate("abc")))

    found = bounded(main())
    assert len({one.digest for one in found}) == 1
    assert found[0].peers == ["a", "b"]
    assert "c" in found[2].peers


def test_a_share_for_one_who_has_finished_is_refused_at_once():
    """Its giver would wait for the deadline, and by then all who have the model may be gone."""

    async def main():
        network, algorithm = LocalNetwork("abc"), gossip.build("dpsgd", {})

        async def has(name, number):
            async with network.join(name) as neighbors:
                peer = Peer(name, algorithm, arena(PLAIN, number), halfway_to(torch.zeros(50)), neighbors)
                await Consensus(peer, 0, arena(PLAIN, 77), lambda: "ab", DEADLINE_S, Voters("abc")).run(2)
                await neighbors.sleep(3 * DEADLINE_S)

        async def gives():
            async with network.join("c") as neighbors:
                await neighbors.sleep(DEADLINE_S)
                gifts = {name: Share(memoryview(b"x" * 8)) for name in "ab"}
                done = await neighbors.exchange(EXCHANGES, gifts, [], Inbox({}, {}, 0), DEADLINE_S)
                return network.now, done

        *_, (now, done) = await asyncio.gather(has("a", 0), has("b", 1), gives())
        assert now < 1.5 * DEADLINE_S
        assert done.kept.keys() == {"a", "b"}

    bounded(main())


@pytest.mark.parametrize("turns", [1, 3])
def test_who_waits_for_somebody_silent_takes_the_model_of_those_who_have_finished_before_they_leave(turns):
    """An exchange may wait for one as long as a round's deadline; those who have the model stay for less."""

    class Stuck:
        """Everybody else has finished, but for one who says nothing and is not gone."""

        exchanges, stopped = 0, 0

        def progress(self):
            return {"a": end.done} if self.exchanges else {}

        async def exchange(self, round, shares, expected, mixer, deadline_s):
            if round >= end.done - 1:
                return Exchanged()
            self.exchanges += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.stopped += 1

        async def pull(self, peer, timeout_s):
            return ReceivedShare(peer, end.done, share_of_model(arena(PLAIN, 5)))

        def announce(self, round):
            assert self.stopped == self.exchanges, "one exchange at a time"

        def publish(self, round, share):
            self.published = round

    neighbors = Stuck()
    peer = Peer("c", gossip.build("dpsgd", {}), arena(PLAIN, 1), halfway_to(torch.zeros(50)), neighbors)
    alive = ["a", "b", "c", "d", *"efghijk"]
    voters = Voters("a")  # whose model comes with the vote that is most of the roster
    end = Consensus(peer, 0, arena(PLAIN, 77), lambda: alive, 1e9, voters, turns, 0.05)
    found = bounded(end.run(2))
    assert found.digest == sha256(arena(PLAIN, 5))
    assert neighbors.published == end.done
    assert neighbors.exchanges == 3, "of models, of votes and of votes that came, a turn each"


def test_under_masks_the_last_model_is_the_mean_and_that_of_the_same_sums_without_masks():
    results = [
        bounded(ended(gossip.build("dpsgd", {}), 6, "complete", MIXED, masked(6, pair)))
        for pair in (True, False)
    ]
    (peers, found), (_, plain) = results
    assert digests(found) == digests(plain)
    assert len(digests(found)) == 1
    expected = of_all(peers, ROUNDS, arena(MIXED, 77))
    torch.testing.assert_close(trained_part(found["0"].model), trained_part(expected), rtol=0, atol=0.05)


def test_too_few_for_a_rule_or_masks_agree_on_nothing_and_say_so():
    _, found = bounded(ended(with_rule("krum:f=1"), 5, "complete", touch=None, dies=("2", 0, False)))
    assert set(found.values()) == {None}  # krum:f=1 needs five


def test_whose_models_are_in_one_travels_with_it_as_names_alone_and_as_a_number_where_they_are_too_many():
    def given(note):
        return ReceivedShare("a", 9, Share(memoryview(b""), note=note))

    for count in (3, 5_000):
        of = [f"site-{i}" for i in range(count)]
        told = share_of_model(arena(PLAIN, 5), MadeOf(count, of)).note
        assert len(told) < NOTE_BYTES
        assert made_of(given(told)) == MadeOf(count, of if count == 3 else [])
    for bad in (["a\x1b[2J"], ["a\n"], ["a" * 64], [7]):
        with pytest.raises(BadUpdate, match="its note can't be read"):
            made_of(given(msgspec.msgpack.encode([b"", 1, bad])))


# --- simulations and real peers


def test_a_simulation_ends_with_one_model_and_says_its_digest(tmp_path):
    settings = config(tmp_path, topology="base:1")
    _, log = simulated(settings)
    (agreed,) = log.of("agreed")
    last = committed(settings.gossip_dir)
    assert agreed["round"] == 6
    assert agreed["digest"] == sha256_of(settings.gossip_dir / "model" / "model.safetensors")
    assert agreed["peers"] == agreed["of"] == [f"site-{i}" for i in range(1, 7)]
    assert last.round == 6
    assert log.of("evaluated")[-1]["round"] == 6
    _, again = simulated(settings)
    assert again.of("agreed") == []  # it is agreed


def test_without_agreement_a_run_ends_as_it_is(tmp_path):
    _, log = simulated(config(tmp_path, topology="base:1", agree=False))
    assert log.of("agreed") == []


@pytest.mark.parametrize("rule", ["median", "self_clip:f=1"])
def test_a_simulations_last_model_is_the_rules_and_was_evaluated(tmp_path, rule):
    settings = config(tmp_path, topology="complete", rule=rule)
    result, log = simulated(settings)
    (agreed,) = log.of("agreed")
    assert agreed["digest"] == sha256_of(settings.gossip_dir / "model" / "model.safetensors")
    card = (settings.gossip_dir / "model" / "MODEL_CARD.md").read_text()
    assert f"the one model of all at the end, what {rule} makes of 6 peers' models" in card
    assert result.metrics["accuracy"] > 0.5


@pytest.mark.slow(3)
def test_real_peers_end_together_with_one_model_that_each_exports(tmp_path):
    async def main():
        async with village(tmp_path, "abc", rounds=4, topology="base:1") as v:
            results = [await task for task in [v.start(name, evaluate={"every": 1}) for name in "abc"]]
            assert [one.rounds for one in results] == [4, 4, 4]
            (one,) = {v.of(name, "agreed")[-1]["digest"] for name in "abc"}
            assert v.of("a", "agreed")[-1]["peers"] == ["a", "b", "c"]
            folders = [tmp_path / f"runs/r+gossip@{n}/model" for n in "abc"]
            assert {sha256_of(folder / "model.safetensors") for folder in folders} == {one}
            about = json.loads((folders[0] / "model.json").read_text())
            assert (about["sites"], about["updates"], about["peer"]) == (["a", "b", "c"], 3, "a")
            assert about["config_digest"] == v.of("a", "run_started")[-1]["config_digest"]
            card = (folders[0] / "MODEL_CARD.md").read_text()
            assert "round 4; the one model of all at the end, the mean of 3 peers' models." in card
            assert "stayed at the sites: a, b, c" in card
            assert "## Evaluation at a, on its own data" in card
            (cost,) = v.of("a", "agreed")
            assert 213 < cost["bytes_out"] < 1500  # two models of 160, but for its own block, and votes
            exported = [load_file(folder / "model.safetensors") for folder in folders]
            assert all(torch.equal(each["w"], exported[0]["w"]) for each in exported)
            assert torch.equal(v.model("a"), v.model("c"))
            assert len(one) == 64
            again = await v.start("a")  # alone: it has it
            assert again.rounds == 4
            assert len(v.of("a", "agreed")) == 1

    bounded(main())


@pytest.mark.slow(3)
def test_peers_whose_patience_is_over_end_all_with_the_same_round(tmp_path, monkeypatch):
    monkeypatch.setattr(Toy, "metrics", {"loss": (1.0, 2.0)})

    async def main():
        async with village(tmp_path, "abc", rounds=500, topology="base:1") as v:
            stops = {"every": 1, "patience": 3}
            results = [await task for task in [v.start(name, evaluate=stops) for name in "abc"]]
            assert len({one.rounds for one in results}) == 1
            assert 4 < results[0].rounds < 20
            assert len({v.of(name, "agreed")[-1]["digest"] for name in "abc"}) == 1
            again = await v.start("b", evaluate=stops)  # alone
            assert again.rounds == results[0].rounds

    bounded(main())


def test_one_peer_whose_patience_is_over_goes_on_with_the_others():
    class Others:
        me, said = "a", {}

        def ends(self):
            return self.said

        def end_after(self, round):
            self.said = self.said | {"a": round}

    class Roster:
        def peers(self):
            return ["a", "b", "c"]

    others, roster = Others(), Roster()
    assert [reason_to_end(others, roster, t, "it has not improved") for t in range(4, 9)] == [None] * 5
    assert others.said == {"a": 4}
    others.said |= {"b": 8, "struck": 1}
    assert reason_to_end(others, roster, 9, None) is None
    assert reason_to_end(others, roster, 10, None) == "2 of 3 peers see no improvement any more"
