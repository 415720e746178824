"""`fedtrain peer`: who comes, goes and comes back; what is wrong and what is said of it. Real sockets, all in
this process; tests/network/test_peer.py has processes."""

import asyncio
import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from fedtrain import gossip, topology
from fedtrain.arena import Arena
from fedtrain.errors import ConfigError, ConnectError, JoinRefused
from fedtrain.runtime.peers import enrolment
from fedtrain.runtime.peers.enrolment import called_at, invite, to_pin
from fedtrain.runtime.peers.gossip import Peer
from fedtrain.runtime.peers.keeping_up import catch_up
from fedtrain.runtime.peers.parcels import share_of_model, trained_part
from fedtrain.runtime.peers.shape import Shape
from fedtrain.runtime.sites.approval import key_in
from fedtrain.runtime.trainers import trainer_messages as msg
from fedtrain.transport.admission import join
from fedtrain.transport.memory import LocalNetwork

from .limits import WAIT_S, bounded
from .peers import SCHEMA, Toy, village
from .ports import serving

torch.set_num_threads(1)


# --- who comes and goes


@pytest.mark.slow(3)
def test_whoever_comes_or_goes_peers_go_on_with_the_graph_nearest_to_theirs(tmp_path):
    """regular:3 is nothing for five peers, nor for three: it ends nobody's run."""

    async def main():
        async with village(tmp_path, "abcde", topology="regular:3") as v:
            for name in "abcd":
                v.start(name)
            await v.until(lambda: v.are_with("abcd", "abcd"))
            code = invite(v.config(network={"listen": f"127.0.0.1:{v.ports['a']}"}), "e", "a", days=1)
            v.start("e", invitation=code, gossip={"roster": "roster-of-e"})
            await v.until(lambda: v.are_with("abcde", "abcde"))
            notices = [each["text"] for each in v.of("a", "notice")]
            assert any("5 peers have 15" in text and "it is regular:4" in text for text in notices)
            await v.stop("e")
            await v.stop("d")
            await v.until(lambda: v.are_with("abc", "abc"))
            assert any("it is regular:2" in each["text"] for each in v.of("a", "notice"))
            at = v.rounds_of("a")
            await v.until(lambda: v.rounds_of("a") > at + 3)

    bounded(main())


@pytest.mark.slow(4)
def test_a_newcomer_is_let_in_by_each_peer_as_soon_as_that_has_pinned_it_and_no_peer_starts_anew(tmp_path):
    async def main():
        async with village(tmp_path, "abc") as v:

            def start(name, **more):
                task = v.start(name, gossip={"roster": f"roster-of-{name}"}, **more)
                v.pin(name, "abc" if name == "c" else "ab")
                return task

            host = v.config(network={"listen": f"127.0.0.1:{v.ports['a']}"})
            start("a")
            start("b", invitation=invite(host, "b", "a", days=1))
            await v.until(lambda: v.are_with("ab", "ab"))
            code, key = invite(host, "c", "a", days=1), key_in(tmp_path / "certs/sites/c")
            assert "a has not pinned c" in to_pin(host, "c", "a")
            assert to_pin(host, "b", "a") == ""
            with pytest.raises(JoinRefused) as refused:  # it is read at c, so it says where to do what
                await start("c", invitation=code)
            assert "a has not pinned c with its key. The people of a " in str(refused.value)
            assert f"run at a: fedtrain policy pin c={key}. Then give this command again." in str(
                refused.value
            )
            v.pin("a", "abc")
            start("c", invitation=code)
            refusal = "a passed on an entry that is refused: c is not pinned here with its key"
            await v.until(lambda: any(refusal in each["text"] for each in v.of("b", "notice")))
            v.pin("b", "abc")
            await v.until(lambda: v.are_with("abc", "abc"))
            v.pin("b", "ab")  # nor is a pin that is taken out a matter of the next start
            lost = {"site": "c", "reason": "its key is no longer on the roster"}
            await v.until(lambda: lost in v.of("b", "site_lost"))

    bounded(main())


def test_a_newcomer_that_has_not_pinned_who_invited_it_is_told_to(tmp_path):
    async def main():
        async with village(tmp_path, "ab") as v:
            v.start("a")
            code = invite(v.config(network={"listen": f"127.0.0.1:{v.ports['a']}"}), "b", "a", days=1)
            task = v.start("b", invitation=code, gossip={"roster": "roster-of-b"})
            v.pin("b", "b")
            key = key_in(tmp_path / "certs/sites/a")
            with pytest.raises(JoinRefused, match=f"run here: fedtrain policy pin a={key}.*Then give this"):
                await task

    bounded(main())


def test_a_newcomer_that_is_told_to_stop_goes_on_asking_nobody(tmp_path, monkeypatch):
    """A process ends when its threads have, and an answer may take a minute not to come."""
    asking, gone = threading.Event(), threading.Event()

    def asks(*arguments):
        asking.set()
        with contextlib.suppress(ConnectError):
            join(*arguments)
        gone.set()

    monkeypatch.setattr(enrolment, "join", asks)

    async def main():
        async with village(tmp_path, "ab") as v:
            code = invite(v.config(network={"listen": f"127.0.0.1:{v.ports['a']}"}), "b", "a", days=1)
            v.start("b", invitation=code, gossip={"roster": "roster-of-b"})  # and a runs nowhere
            assert await asyncio.to_thread(asking.wait, WAIT_S)
            await v.stop("b")
            assert await asyncio.to_thread(gone.wait, enrolment.JOIN_S / 2)

    bounded(main())


@pytest.mark.slow(6)
def test_a_peer_that_waits_says_who_is_missing_and_what_answers_in_their_place(tmp_path):
    async def main():
        async with village(tmp_path, "abc") as v:
            roster = v.config().root / v.config().gossip.roster
            for name in "bc":
                v.start(name)
            await v.until(lambda: len([*roster.glob("*.peer")]) == 2)
            for name in "bc":
                await v.stop(name)
            with serving(HTTPServer(("127.0.0.1", v.ports["b"]), BaseHTTPRequestHandler)):
                v.start("a")
                await v.until(lambda: any("not here yet" in each["text"] for each in v.of("a", "notice")))
            (line,) = [each["text"] for each in v.of("a", "notice") if "not here yet" in each["text"]]
            assert f"b (127.0.0.1:{v.ports['b']}: what answers there is no fedtrain peer" in line
            assert f"c (127.0.0.1:{v.ports['c']}: nothing listens there yet)" in line

    bounded(main())


@pytest.mark.slow(2)
def test_a_peer_that_had_finished_ends_at_once_when_it_is_started_again(tmp_path):
    async def main():
        async with village(tmp_path, "ab", rounds=3) as v:
            await asyncio.gather(v.start("a"), v.start("b"))
            model = v.model("a")
            result = await asyncio.wait_for(v.start("a"), 30)  # the other is gone
            assert (result.rounds, result.reason) == (3, "rounds done")
            assert torch.equal(v.model("a"), model)

    bounded(main())


@pytest.mark.slow(3)
def test_all_peers_stopped_and_started_again_go_on_where_they_were(tmp_path):
    async def main():
        async with village(tmp_path, "abc", rounds=12, topology="ring") as v:
            for name in "abc":
                v.start(name, pace_s=0.05)
            await v.until(lambda: min(v.rounds_of(name) for name in "abc") >= 4)
            await asyncio.gather(*map(v.stop, "abc"))
            at = {name: v.rounds_of(name) for name in "abc"}
            for task in [v.start(name) for name in "abc"]:
                assert (await task).rounds == 12
            for name in "abc":
                # A round may be committed as the peer is stopped, before it is told.
                assert v.of(name, "run_started")[-1]["resumed_from"] - at[name] in (0, 1)
                rounds = [each["round"] for each in v.of(name, "round_committed")]
                assert rounds == sorted(set(rounds))  # none was done twice
            assert torch.allclose(v.model("a"), v.model("b"), atol=0.2)

    bounded(main())


@pytest.mark.slow(5)
def test_peers_that_can_not_be_called_take_part_over_the_calls_that_they_make(tmp_path):
    """b and c can't be called, so they never meet: a is between them, and all three agree all the same."""

    async def main():
        async with village(tmp_path, "abc", rounds=25) as v:
            least = {"min_sites": 3}  # or one may have had a round before another came
            between = v.start("a", strategy=least)
            tasks = [between, *(v.start(name, network={"listen": ""}, strategy=least) for name in "bc")]
            assert [(await task).rounds for task in tasks] == [25] * 3
            missing = {(name, each["site"]) for name in "abc" for each in v.of(name, "update_refused")}
            assert missing <= {("b", "c"), ("c", "b")}
            last = {name: v.of(name, "round_committed")[-1] for name in "abc"}
            assert {name: each["sites"] for name, each in last.items()} == {"a": 3, "b": 2, "c": 2}
            for name in "abc":  # half of what each adds is its own
                assert 0.3 < float(v.model(name).mean()) < 1.7

    bounded(main())


@pytest.mark.slow(5)
def test_nobody_waits_for_a_slow_peer_where_peers_never_wait_and_it_keeps_its_own_model(tmp_path):
    async def main():
        async with village(tmp_path, "abc", rounds=60, algorithm="swift") as v:
            paces = {"c": 0.2, "a": 0.02, "b": 0.02}
            slow, *fast = [v.start(n, pace_s=s, strategy={"min_sites": 3}) for n, s in paces.items()]
            await v.until(lambda: v.rounds_of("c") >= 2)
            v.trainers["c"].pace_s = 3600.0
            joined = len(v.of("c", "notice"))  # where it met them late, it took a model to begin with
            await v.until(lambda: v.rounds_of("a") == v.rounds_of("b") == 60)
            v.trainers["c"].pace_s = 0.0
            v.trainers["c"].woken.set()
            assert [(await task).rounds for task in fast] == [60, 60]
            ended = await slow  # with them: alone it would only move away from what all have learnt
            assert (ended.reason, ended.rounds < 30) == ("most peers have done all rounds", True)
            assert not any("took the model" in each["text"] for each in v.of("c", "notice")[joined:])
            rounds = [each["round"] for each in v.of("c", "round_committed")]
            assert rounds == list(range(rounds[0], ended.rounds + 1))

    bounded(main())


@pytest.mark.slow(5)
def test_a_peer_that_nobody_waits_for_any_more_ends_with_the_others(tmp_path):
    """They ended while it trained, and are gone: its own rounds would lead away from their model."""

    async def main():
        async with village(tmp_path, "abc", rounds=6, round_deadline="300ms") as v:
            slow = v.start("c", pace_s=3600.0, strategy={"min_sites": 3})
            for task in [v.start(name, strategy={"min_sites": 3}) for name in "ab"]:
                assert (await task).rounds == 6
            assert v.of("c", "round_started")
            await v.until(lambda: len(v.of("c", "site_lost")) >= 2)
            v.trainers["c"].pace_s = 0.0
            v.trainers["c"].woken.set()
            ended = await slow
            assert (ended.reason, ended.rounds) == ("most peers have done all rounds", 1)

    bounded(main())


@pytest.mark.slow(5)
def test_what_a_peer_finds_counts_that_trains_for_longer_than_the_deadline(tmp_path):
    """It gives its model at the start of a round then, with what it found before it took that of others."""

    async def main():
        async with village(tmp_path, "abc", rounds=10_000, round_deadline="400ms") as v:
            for name in "ab":
                v.start(name)
            v.start("c", pace_s=1.5)
            late = "did not finish within 0.4 s"
            await v.until(lambda: any(late in each["reason"] for each in v.of("a", "update_refused")))
            heard = len(done_by("c", v.of("a", "site_state")))
            await v.until(lambda: len(done_by("c", v.of("a", "site_state"))) >= heard + 3)

    bounded(main())


def done_by(name, states):
    return [each for each in states if each["site"] == name and each["state"] == "done"]


# --- what does not fit


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"run": {"seed": 6}}, "differ in run.seed: 6 at b, 5 at a"),
        ({"run": {"rounds": 20}}, "differ in run.rounds: 20 at b, 10000 at a"),
        ({"strategy": {"min_sites": 3}}, "differ in strategy.min_sites: 3 at b, 2 at a"),
        ({"gossip": {"agree": False}}, "differ in gossip.agree: False at b, True at a"),
        ({"task": "u"}, "different task code"),
        ({"gossip": {"algorithm": "periodic"}}, "differ in gossip.algorithm"),
    ],
)
def test_a_peer_with_other_settings_is_named_with_what_differs_and_the_others_go_on(tmp_path, changes, line):
    async def main():
        async with village(tmp_path, "abc") as v:
            v.start("b", **changes)
            v.start("a")
            v.start("c")
            await v.until(lambda: v.rounds_of("a") >= 2 and v.are_with("ac", "ac"))
            await v.until(lambda: is_told(v, "a", line))
            assert v.rounds_of("b") == 0

    bounded(main())


def is_told(v, name, line):
    """Whether a peer has refused another for this, or was refused for it, whichever came first."""
    return any(line in each["reason"] for kind in ("join_refused", "site_lost") for each in v.of(name, kind))


@pytest.mark.slow(2)
def test_peers_with_different_graph_files_do_not_train_together(tmp_path):
    async def main():
        (tmp_path / "graph").write_text("a b\nb c\n")
        async with village(tmp_path, "abc", topology="file:graph") as v:
            v.start("a")
            await v.until(lambda: v.of("a", "waiting"))  # it has read the graph
            (tmp_path / "graph").write_text("a b\nb c\nc a\n")
            v.start("b")
            await v.until(lambda: is_told(v, "b", "differ in gossip.graph"))
            assert v.rounds_of("a") == v.rounds_of("b") == 0

    bounded(main())


@pytest.mark.slow(2)
def test_a_disconnected_graph_is_refused_before_a_round(tmp_path):
    async def main():
        (tmp_path / "graph").write_text("a b\n")
        async with village(tmp_path, "abc", topology="file:graph") as v:
            tasks = [v.start(name) for name in "abc"]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # who sees all of it
            with pytest.raises(ConfigError, match="c never hears of a"):
                done.pop().result()
            assert [v.rounds_of(name) for name in "abc"] == [0, 0, 0]

    bounded(main())


@pytest.mark.parametrize("network", [{"listen": "0.0.0.0:8440"}, {"listen": "[::]:8440"}, {"listen": "h:0"}])
def test_an_address_that_nobody_can_call_is_refused_and_says_what_to_set(tmp_path, network):
    async def main():
        async with village(tmp_path, "a") as v:
            with pytest.raises(ConfigError, match=r'Set network\.address = "HOST:(8440|0)"'):
                await v.start("a", network=network)
            assert called_at(v.config(network=network | {"address": "heart-1.example:8441"}))
            with pytest.raises(ConfigError, match="a can't be called, so it can't invite"):
                invite(v.config(network={"listen": ""}), "b", "a", days=1)

    bounded(main())


def test_a_view_in_which_a_graph_falls_apart_is_told_once_and_ends_nothing(tmp_path):
    (tmp_path / "graph").write_text("a b\nb c\n")
    told = []
    shape = Shape(topology.parse(f"file:{tmp_path / 'graph'}"), 0, lambda event: told.append(event.text))
    for t in range(3):
        assert set(shape.round(("a", "b", "c"), 0, t, None)["b"].incoming) == {"a", "c"}
    assert told == []
    for t in range(3):
        assert shape.round(("a", "c"), 7, t, None)["a"].incoming == {}
    assert len(told) == 1
    assert "c never hears of a" in told[0]


# --- a peer that was away


ROUNDS = 20_000  # of the run


class Given:
    """A neighbour's state, as it was published."""

    def __init__(self, fill, round):
        self.round, self.model = round, Arena.zeros(SCHEMA)
        self.model.views()["w"].fill_(fill)


def after_catching_up(given):
    """The newcomer after one look at peers that published these, and what it said."""
    told = []

    async def main():
        network = LocalNetwork(["new", *given])
        newcomer = Peer("new", gossip.build("dpsgd", {}), Arena.zeros(SCHEMA), None, None)
        over = asyncio.Event()

        async def there(name):
            async with network.join(name) as neighbors:
                state = given[name]
                neighbors.publish(state.round, share_of_model(state.model))
                neighbors.announce(state.round)
                waiting = asyncio.create_task(neighbors.sleep(1e6))
                await over.wait()
                waiting.cancel()

        async with network.join("new") as neighbors:
            others = [asyncio.create_task(there(name)) for name in given]
            while len(neighbors.progress()) < len(given):  # noqa: ASYNC110 - they run on this loop
                await asyncio.sleep(0)
            await catch_up(
                newcomer, neighbors, lambda event: told.append((event.kind, event.fields())), rounds=ROUNDS
            )
            over.set()
            await asyncio.gather(*others, return_exceptions=True)
        return newcomer

    return bounded(main()), told


def test_a_newcomer_takes_the_model_of_one_of_those_who_are_ahead():
    newcomer, told = after_catching_up({"a": Given(1.0, 9), "b": Given(2.0, 9), "c": Given(3.0, 8)})
    assert (newcomer.round, float(trained_part(newcomer.model)[0])) == (9, 1.0)
    assert told == [("notice", {"text": "took the model of a after round 9"})]


@pytest.mark.parametrize("rounds", [(50, 0, 1), (50, 50, 1, 0), (1, 1, 1)])
def test_where_no_more_than_half_are_ahead_a_peer_keeps_its_own_model(rounds):
    peer, told = after_catching_up({name: Given(7.0, t) for name, t in zip("abcd", rounds, strict=False)})
    assert (peer.round, float(trained_part(peer.model)[0]), told) == (0, 0.0, [])


def test_a_newcomer_believes_nobody_who_says_that_he_is_further_than_most():
    newcomer, _ = after_catching_up({"a": Given(7.0, 10_000), "b": Given(2.0, 9), "c": Given(3.0, 9)})
    assert (newcomer.round, float(trained_part(newcomer.model)[0])) == (9, 2.0)


def test_a_newcomer_believes_nobody_who_says_to_be_further_than_the_run_has_rounds():
    """Where there is one other, it is most of them: its word would end the run, or jump over its rounds."""
    peer, told = after_catching_up({"a": Given(7.0, 10**9)})
    assert (peer.round, float(trained_part(peer.model)[0]), told) == (0, 0.0, [])


def test_s16_a_newcomer_refuses_a_state_with_nan_names_who_gave_it_and_takes_anothers():
    newcomer, told = after_catching_up({"a": Given(float("nan"), 9), "b": Given(2.0, 9), "c": Given(3.0, 9)})
    assert (newcomer.round, float(trained_part(newcomer.model)[0])) == (9, 2.0)
    assert told[0][0] == "update_refused"
    assert told[0][1]["site"] == "a"
    assert "w has 20 NaN or Inf of 20 values" in told[0][1]["reason"]


def test_a_peer_that_is_alone_says_so_and_no_estimates_until_others_are_back(tmp_path):
    async def main():
        async with village(tmp_path, "abc") as v:
            for name in "abc":
                v.start(name, pace_s=0.02)
            await v.until(lambda: v.rounds_of("a") > 2)
            for name in "bc":
                await v.stop(name)
            await v.until(
                lambda: v.are_with("a", "a") and "moved" not in v.of("a", "round_committed")[-1]["metrics"]
            )
            said = [each["text"] for each in v.of("a", "notice") if each["text"].startswith("alone: ")]
            assert len(said) == 1
            assert "none of the 2 others answers" in said[0]
            v.start("b", pace_s=0.02)
            await v.until(lambda: "moved" in v.of("a", "round_committed")[-1]["metrics"])

    bounded(main())


@pytest.mark.slow(6)
def test_a_peer_that_stood_still_while_the_others_ended_the_run_ends_and_says_so(tmp_path):
    class Stands(Toy):
        trained, goes_on = 0, None

        async def _ask(self, message):
            Stands.trained += isinstance(message, msg.TrainOne)
            if Stands.trained == 3:
                await Stands.goes_on.wait()
            return await super()._ask(message)

    async def main():
        Stands.goes_on = asyncio.Event()
        async with village(tmp_path, "abc", rounds=6, round_deadline="1s") as v:
            standing = v.start("a", toy=Stands)
            await asyncio.gather(v.start("b"), v.start("c"))
            Stands.goes_on.set()
            result = await standing
            assert 3 <= result.rounds < 6
            assert result.reason == "most peers have done all rounds"
            assert result.own_model
            assert v.of("a", "run_finished")[-1]["own_model"]
            card = result.run_dir / "model" / "MODEL_CARD.md"
            assert "a's own model, which no other peer has" in card.read_text()
            assert "no model of all" in v.of("a", "notice")[-1]["text"]
            assert not v.of("a", "agreed")
            assert len(v.of("b", "agreed")) == 1
            Stands.trained = 100
            has_it, result = v.start("b"), await v.start("a")
            assert (result.rounds, result.reason) == (6, "rounds done")
            assert v.of("a", "agreed")[-1]["digest"] == v.of("b", "agreed")[-1]["digest"]
            assert (await has_it).rounds == 6
            assert not result.own_model
            assert "own model" not in card.read_text()

    bounded(main())


@pytest.mark.slow(9)
def test_a_peer_that_is_started_again_after_the_others_ended_takes_their_model_from_one_of_them(tmp_path):
    """It says what it waits for. One alone gives it the model, also where a sum takes four peers."""

    async def main():
        names = "abcde"
        async with village(tmp_path, names, rounds=8, masks=True) as v:
            least = {"min_sites": len(names)}
            ends = [v.start(name, strategy=least, pace_s=0.05) for name in names]
            await v.until(lambda: v.rounds_of("a") >= 2)
            await v.stop("a")
            await asyncio.gather(*ends[1:])
            others = {v.of(name, "agreed")[-1]["digest"] for name in names[1:]}
            late = v.start("a", strategy=least)
            wait = "start one of them again: it gives this peer the model"
            await v.until(lambda: any(wait in each["text"] for each in v.of("a", "notice")))
            has_it = v.start("b", strategy=least)
            assert (await late).rounds == 8
            assert {v.of("a", "agreed")[-1]["digest"]} == others
            await has_it
            assert v.of("a", "agreed")[-1]["of"] == [*"bcde"]  # its own is none of them, and its card says so
            about = json.loads((tmp_path / "runs/r+gossip@a/model/model.json").read_text())
            assert (about["sites"], about["updates"]) == ([*"bcde"], 4)
            assert torch.equal(v.model("a"), v.model("b"))

    bounded(main())


@pytest.mark.slow(4)
def test_a_peer_that_is_started_again_while_the_others_end_ends_with_their_model(tmp_path):
    """They stay for it, for the idle time, and as long as it comes nearer."""

    async def main():
        async with village(tmp_path, "abc", rounds=5) as v:
            network = lambda name: {"listen": f"127.0.0.1:{v.ports[name]}", "idle": "1h"}
            ends = {name: v.start(name, strategy={"min_sites": 3}, network=network(name)) for name in "abc"}
            await v.until(lambda: v.rounds_of("a") >= 2)
            await v.stop("a")
            await v.until(lambda: v.of("b", "agreed") and v.of("c", "agreed"))
            assert not ends["b"].done()
            assert (await v.start("a", strategy={"min_sites": 3}, network=network("a"))).rounds == 5
            assert all([(await ends[name]).rounds == 5 for name in "bc"])  # before the idle time is over
            assert len({v.of(name, "agreed")[-1]["digest"] for name in "abc"}) == 1

    bounded(main())


@pytest.mark.slow(4)
def test_a_peer_that_lost_its_disk_enters_again_with_another_key(tmp_path):
    """What it says of itself now counts more than what it said before."""

    async def main():
        async with village(tmp_path, "ab", rounds=10_000) as v:
            v.start("a")
            v.start("b")
            await v.until(lambda: v.are_with("ab", "ab"))
            await v.stop("b")
            (tmp_path / "certs" / "sites" / "b" / "curve.key").unlink()
            second = int(time.time())
            await v.until(lambda: int(time.time()) > second)  # by which entries are numbered
            entries = tmp_path / "roster-of-b"
            entries.mkdir()
            (entries / "a.peer").write_bytes((tmp_path / "roster" / "a.peer").read_bytes())
            v.start("b", gossip={"roster": "roster-of-b"})
            (tmp_path / "roster" / "b.peer").unlink()
            at = v.rounds_of("b")
            await v.until(lambda: (entries / "b.peer").exists())
            (tmp_path / "roster" / "b.peer").write_bytes((entries / "b.peer").read_bytes())
            await v.until(lambda: v.rounds_of("b") > at and v.are_with("ab", "ab"))

    bounded(main())


# --- masks between those who never meet


@pytest.mark.slow(5)
def test_peers_that_never_meet_mask_with_each_other_by_what_a_peer_between_carries(tmp_path):
    """d, e and f can't be called, and tell their models to a, b and c, under masks that they share."""

    async def main():
        (tmp_path / "graph").write_text("".join(f"{x} {y}\n" for x in "abc" for y in "def"))
        async with village(tmp_path, "abcdef", topology="file:graph", masks=True) as v:
            for name in "abcdef":
                v.start(name, pace_s=0.1, **({"network": {"listen": ""}} if name in "def" else {}))
            sums = lambda name: [each["sites"] for each in v.of(name, "round_committed")]
            await v.until(lambda: all(4 in sums(name) for name in "abcdef"))  # its own model, and a sum of 3
            met = {name: {each["site"] for each in v.of(name, "site_joined")} for name in "def"}
            assert all(each == {"a", "b", "c"} for each in met.values())

    bounded(main())
