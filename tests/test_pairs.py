"""AD-PSGD: averages of pairs, atomic, without rounds, with slow peers, losses and questions that cross."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from fedtrain import gossip
from fedtrain.errors import ConfigError
from fedtrain.exchange import ReceivedShare
from fedtrain.gossip import Parcel
from fedtrain.messages import Update
from fedtrain.runtime.peers.gossip import Peer
from fedtrain.runtime.peers.gossip_setup import algorithm_of
from fedtrain.runtime.peers.parcels import share_of, trained_part
from fedtrain.topology import names, parse
from fedtrain.transport.memory import Faults, LocalNetwork

from .limits import bounded
from .peers import village
from .test_gossip_peers import PLAIN, arena, config, models, of_speed, simulated

F64 = torch.float64


async def run(
    paces, rounds_of_one, *, step=0.0, faults=None, graph="complete", staleness=4, targets=None, seed=0
):
    """Peers that train for so long each, until as much time is over; (peers, rounds of each)."""
    network = LocalNetwork(names(len(paces)), faults=faults, seed=seed)
    near = parse(graph).round(len(paces), 0).graph
    peers: dict[str, Peer] = {}

    async def live(name, pace):
        async with network.join(name) as neighbors:

            async def train(round, weights, delta):
                await neighbors.sleep(pace)
                x = trained_part(weights)
                if targets is not None:
                    trained_part(delta).copy_((targets[name] - x) * step)
                return Update(delta=delta, num_examples=1.0, metrics={})

            algorithm = gossip.build("adpsgd", {"staleness": staleness})
            peer = Peer(name, algorithm, arena(PLAIN, int(name)), train, neighbors)
            peers[name] = peer
            while network.now < rounds_of_one:
                await peer.step(near[name], 30.0)
            await peer.pairs.end(30.0)
            await neighbors.sleep(rounds_of_one)  # what was answered arrives

    results = await asyncio.gather(*map(live, names(len(paces)), paces), return_exceptions=True)
    assert [each for each in results if each is not None] == []
    return {name: peers[name] for name in names(len(paces))}


def stacked(peers):
    return torch.stack([trained_part(peer.model) for peer in peers.values()])


def start(n):
    return torch.stack([trained_part(arena(PLAIN, i)) for i in range(n)])


LOSSY = Faults(drop=0.2, duplicate=0.1, delay_s=0.6)


@pytest.mark.parametrize("graph", ["complete", "ring", "star"])
@pytest.mark.parametrize("faults", [None, Faults(delay_s=0.9), LOSSY])
def test_averages_of_pairs_keep_the_sum_and_bring_all_together_whatever_is_lost_or_late(graph, faults):
    for seed in range(2):
        peers = asyncio.run(run([1.0, 1.3, 0.7, 2.1, 1.0], 50.0, faults=faults, graph=graph, seed=seed))
        xs, first = stacked(peers), start(5)
        assert float((xs.mean(0) - first.mean(0)).abs().max()) < 1e-12
        assert float((xs - xs.mean(0)).norm()) < 0.6 * float((first - first.mean(0)).norm())


def test_beside_a_peer_ten_times_slower_the_others_keep_their_speed_and_its_data_count():
    """In time that messages take, too: half a round each way."""
    paces, faults = [1.0] * 4 + [10.0], Faults(delay_s=0.5)
    targets = {name: torch.zeros(50, dtype=F64) for name in names(5)}
    with_its = targets | {"4": torch.full((50,), 20.0, dtype=F64)}
    ends = {}
    for key, aims in (("zeros", targets), ("its own", with_its)):
        peers = asyncio.run(run(paces, 200.0, faults=faults, step=0.1, targets=aims))
        assert min(peers[name].round for name in names(4)) >= 0.95 * 200
        assert 18 <= peers["4"].round <= 21
        ends[key] = float(stacked(peers)[:4].mean())
    share = 0.1 / 4.1  # of all rounds are its own
    assert 0.5 * share < (ends["its own"] - ends["zeros"]) / 20.0 < 2 * share


class Letters:
    """A network of letters that come when the test says so. Implements what pairs use of Neighbors."""

    bytes_out = 0

    def __init__(self, me: str, post: list[tuple[str, str, ReceivedShare]]) -> None:
        self.me, self._post, self.reached = me, post, dict[str, int]()

    def announce(self, round, to=None):
        """Nobody needs it."""

    def progress(self):
        return self.reached

    def listen(self, heard, lost):
        self.heard, self.lost = heard, lost

    def post(self, round, shares, *, answers=False):
        self._post += [(self.me, to, ReceivedShare(self.me, round, s, answers)) for to, s in shares.items()]

    async def until(self, over, timeout_s):
        return over()


class Circle:
    """Peers whose letters are on their way until `deliver`."""

    def __init__(self, n: int, staleness: int = 4) -> None:
        self.post: list[tuple[str, str, ReceivedShare]] = []
        self.networks = {name: Letters(name, self.post) for name in names(n)}
        self.near = parse("complete").round(n, 0).graph
        self.peers = {
            name: Peer(name, gossip.build("adpsgd", {"staleness": staleness}), arena(PLAIN, i), idle, net)  # type: ignore[arg-type]  # as much of it as pairs use
            for i, (name, net) in enumerate(self.networks.items())
        }

    def ask(self, name: str, other: str) -> None:
        """A round of one peer, which then asks another."""
        peer, only = self.peers[name], self.near[name]
        toward = type(only)(name, 0.5, only.incoming, {other: 0.5})
        asyncio.run(peer.step(toward, 10.0))

    def deliver(self) -> list[tuple[str, str, bool]]:
        """All that is on its way now; (from, to, whether it moves anything)."""
        came, self.post[:] = list(self.post), []
        for _, to, letter in came:
            self.networks[to].heard(letter)
        return [(source, to, bool(letter.share.payload)) for source, to, letter in came]

    @property
    def xs(self) -> torch.Tensor:
        return stacked(self.peers)


async def idle(round: int, weights: Any, delta: Any) -> Update:
    return Update(delta=delta, num_examples=1.0, metrics={})


def test_two_that_ask_each_other_at_once_average_once():
    """Answered both ways, their models would only change places."""
    made = Circle(2)
    made.ask("0", "1")
    made.ask("1", "0")
    assert made.deliver() == [("0", "1", True), ("1", "0", True)]
    assert made.deliver() == [("0", "1", False)]  # "1" is behind "0" and busy: it is refused; its own waits
    assert made.deliver() == [("1", "0", True)]
    torch.testing.assert_close(made.xs, start(2).mean(0).expand(2, -1), rtol=0, atol=1e-14)
    assert made.post == []


def test_questions_in_a_circle_end_and_each_average_is_of_whole_models():
    made, x = Circle(3), start(3)
    made.ask("0", "1")
    made.ask("1", "2")
    made.ask("2", "0")
    while made.post:
        made.deliver()
    x[[1, 2]] = x[[1, 2]].mean(0)  # "2" is refused by "0", and answers "1", which then answers "0"
    x[[0, 1]] = x[[0, 1]].mean(0)
    torch.testing.assert_close(made.xs, x, rtol=0, atol=1e-14)


def test_a_question_that_is_too_old_or_of_no_neighbour_or_comes_at_the_end_is_refused():
    made, x = Circle(3, staleness=2), start(3)
    for name in "12":
        made.ask(name, "0")
    made.post.clear()
    made.networks["0"].reached["1"] = 3
    made.peers["0"].pairs.near = made.near["0"]
    made.networks["0"].heard(question("1", x[1], 0))
    assert [(to, bool(letter.share.payload)) for _, to, letter in made.post] == [("1", False)]
    made.networks["0"].heard(question("stranger", x[1], 0))
    asyncio.run(made.peers["0"].pairs.end(1.0))
    made.networks["0"].heard(question("2", x[2], 0))
    assert not any(letter.share.payload for _, _, letter in made.post)
    assert len(made.post) == 3
    assert torch.equal(made.xs, x)


def question(name, x, round):
    return ReceivedShare(name, round, share_of(Parcel({"x": x, "gauge": torch.zeros(2, dtype=F64)}), 0.5, 1))


@pytest.mark.parametrize("bad", [
    {"x": torch.zeros(49, dtype=F64), "gauge": torch.zeros(2, dtype=F64)},
    {"gauge": torch.zeros(2, dtype=F64)},
    {"x": torch.full((50,), float("nan"), dtype=F64), "gauge": torch.zeros(2, dtype=F64)},
])  # fmt: skip
@pytest.mark.parametrize("answers", [False, True])
def test_s16_what_is_not_as_ours_changes_nothing_and_its_sender_is_named(bad, answers):
    made, x = Circle(2), start(2)
    made.ask("0", "1")
    if not answers:
        made.peers["0"].pairs._close()
    made.networks["0"].heard(ReceivedShare("1", 0, share_of(Parcel(bad), 0.5, 1), answers))
    told = asyncio.run(made.peers["0"].step(made.near["0"], 1.0))
    assert torch.equal(made.xs, x)
    assert any(word in told.missing["1"] for word in ("float64[49]", "it has no x", "NaN"))


def test_an_answer_that_nobody_waits_for_any_more_does_not_count():
    made, x = Circle(2), start(2)
    made.ask("0", "1")
    made.networks["0"].lost("1")
    made.networks["0"].heard(ReceivedShare("1", 0, question("1", x[1], 0).share, True))
    assert torch.equal(made.xs, x)


def test_a_graph_that_changes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="needs neighbours that stay"):
        algorithm_of(config(tmp_path, algorithm="adpsgd", topology="base:1"))


def test_a_simulated_slow_peer_does_fewer_rounds_and_a_run_in_two_parts_has_the_same_bits(tmp_path):
    keys = {"algorithm": "adpsgd", "topology": "ring"}
    whole = of_speed(tmp_path, "whole", "straggler:10", **keys)
    _, log = simulated(whole)
    assert [each["sites"] for each in log.of("round_committed")] == ([5] * 9 + [6]) * 2
    assert log.of("round_committed")[-1]["loss"] < log.of("round_committed")[0]["loss"]
    simulated(of_speed(tmp_path, "parts", "straggler:10", rounds=13, **keys))
    parts = of_speed(tmp_path, "parts", "straggler:10", **keys)
    simulated(parts)
    assert models(parts) == models(whole)


def averaged_with_c(v, name):
    return any(each["site"] == "c" for each in v.of(name, "site_state"))


@pytest.mark.slow(5)
def test_between_real_peers_nobody_waits_for_one_that_trains_for_ever_and_all_average_with_it(tmp_path):
    async def main():
        async with village(tmp_path, "abc", algorithm="adpsgd", agree=False) as v:
            for name in "abc":
                v.start(name, pace_s=3600.0 if name == "c" else 0.01)

            await v.until(lambda: all(v.rounds_of(name) >= 40 and averaged_with_c(v, name) for name in "ab"))
            assert v.rounds_of("c") == 0  # it answered while it trained
            for name in "abc":
                await v.stop(name)

    bounded(main())


@pytest.mark.slow(5)
def test_a_real_peer_that_trains_for_ever_averages_with_one_that_came_after_its_round_began(tmp_path):
    async def main():
        async with village(tmp_path, "abc", algorithm="adpsgd", agree=False) as v:
            for name in "ac":
                v.start(name, pace_s=3600.0 if name == "c" else 0.01)
            await v.until(lambda: v.of("c", "round_started"))
            assert v.of("c", "round_started")[0]["sites"] == ["a", "c"]
            v.start("b")
            await v.until(lambda: averaged_with_c(v, "b"))
            for name in "abc":
                await v.stop(name)

    bounded(main())


@pytest.mark.slow(5)
def test_real_peers_of_different_speed_agree_on_one_model_and_go_on_after_a_stop(tmp_path):
    async def main():
        async with village(tmp_path, "abcd", rounds=30, algorithm="adpsgd", topology="ring") as v:
            for name in "abcd":
                v.start(name, pace_s=0.2 if name == "d" else 0.02)
            await v.until(lambda: v.rounds_of("a") >= 8)
            await v.stop("a")
            tasks = [v.start("a", pace_s=0.02), *(v.running[name] for name in "bcd")]
            for task in tasks:
                await task
            assert v.of("a", "run_started")[-1]["resumed_from"] >= 8
            digests = {v.of(name, "agreed")[-1]["digest"] for name in "abcd"}
            assert len(digests) == 1
            assert 0.5 < float(v.model("a").mean()) < 2.5

    bounded(main())
