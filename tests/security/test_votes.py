"""Most of the roster vote for the one model of peers, whatever one of them shows the others."""

import asyncio

import pytest

from fedtrain.errors import BadUpdate
from fedtrain.exchange import Contact
from fedtrain.gossip import Parcel
from fedtrain.runtime.peers.consensus import PHASES, Consensus
from fedtrain.runtime.peers.parcels import share_of_model, trained_part
from fedtrain.runtime.peers.votes import Voters
from fedtrain.runtime.peers.whole_models import sha256
from fedtrain.store.rounds import MadeOf

from ..limits import bounded
from ..peers import village
from ..rosters import FixedRoster, signs
from ..test_gossip_peers import PLAIN, arena

ROUNDS = 3
FAST = {"rounds": ROUNDS, "round_deadline": "3s"}


def notices(v, name):
    return " ".join(each["text"] for each in v.of(name, "notice"))


@pytest.mark.slow(5)
def test_a3_a_root_that_shows_each_another_block_gives_no_model(tmp_path, monkeypatch):
    swap = Consensus._swap

    async def lie(self, number, given, expected, like):
        if self._peer.name == "e" and (number - self._first) % PHASES == 1:
            given = {
                name: Parcel({part: vector + i for part, vector in parcel.parts.items()})
                for i, (name, parcel) in enumerate(given.items())
            }
        return await swap(self, number, given, expected, like)

    monkeypatch.setattr(Consensus, "_swap", lie)

    async def main():
        async with village(tmp_path, "abcde", **FAST) as v:
            ends = [v.start(name, strategy={"min_sites": 5}) for name in "abcde"]
            results = [await end for end in ends[:4]]
            assert all(result.own_model for result in results)  # fedtrain peer exits with 3
            assert not any(v.of(name, "agreed") for name in "abcd")
            assert notices(v, "a").count(": digest ") == 4

    bounded(main())


@pytest.mark.slow(5)
def test_a4_an_invented_model_of_one_peer_is_not_taken(tmp_path, monkeypatch):
    run = Consensus.run

    async def invent(self, least):
        if self._peer.name != "e":
            return await run(self, least)
        trained_part(self._peer.model).fill_(666.0)
        of = MadeOf(8, [f"s{i}" for i in range(8)])
        self._neighbors.publish(self.done, share_of_model(self._peer.model, of))
        self._neighbors.announce(self.done)
        await asyncio.sleep(3600)
        return None

    monkeypatch.setattr(Consensus, "run", invent)

    async def main():
        async with village(tmp_path, "abcde", **FAST) as v:
            ends = [v.start(name, strategy={"min_sites": 5}) for name in "abcde"]
            results = [await end for end in ends[:4]]
            assert not any(result.own_model for result in results)
            assert len({v.of(name, "agreed")[-1]["digest"] for name in "abcd"}) == 1
            assert {*v.of("a", "agreed")[-1]["of"]} <= {*"abcde"}
            assert float(v.model("a").max()) < 100

    bounded(main())


@pytest.mark.slow(10)
@pytest.mark.parametrize(("here", "away"), [("abc", "def"), ("abcd", "ef")])
def test_a5_a_part_of_the_peers_ends_with_one_model_if_it_is_most(tmp_path, here, away):
    """A minority that comes back takes the model of the others, from one of them."""

    async def main():
        async with village(tmp_path, here + away, **{**FAST, "rounds": 12}) as v:
            ends = {name: v.start(name, strategy={"min_sites": 2}, pace_s=0.1) for name in here + away}
            await v.until(lambda: all(v.rounds_of(name) >= 1 for name in here + away))
            for name in away:
                await v.stop(name)
            results = [await ends[name] for name in here]
            most = len(here) > len(away)
            assert [result.own_model for result in results] == [not most] * len(here)
            assert len({v.of(n, "agreed")[-1]["digest"] for n in here if v.of(n, "agreed")}) == most
            if most:
                one, listen = here[0], f"127.0.0.1:{v.ports[here[0]]}"
                network = {"listen": listen, "idle": "1h"}
                has_it = v.start(one, strategy={"min_sites": 2}, network=network)
                await v.until(lambda: len(v.of(one, "run_started")) == 2)
                late = [v.start(name, strategy={"min_sites": 2}) for name in away]
                assert not any([(await end).own_model for end in [*late, has_it]])
                assert len({v.of(name, "agreed")[-1]["digest"] for name in (*away, here[0])}) == 1
                assert "your model is not in the model of all" in notices(v, away[0])

    bounded(main())


def voters(name):
    roster = FixedRoster([Contact(each, each.encode()) for each in "abcde"])
    return Voters(roster.peers(), signs(name), roster.proves, run="r")


def vote(name, number, made):
    return made, signs(name)(voters(name).message(number, made))


def test_a3_the_votes_of_a_peer_that_votes_for_two_models_do_not_count():
    told = [
        {"a": vote("a", 7, "A"), "e": vote("e", 7, "A")},
        {"b": vote("b", 7, "A"), "e": vote("e", 7, "B")},
    ]
    votes, twice = voters("a").checked(7, told)
    assert (votes.keys(), twice) == ({"a", "b"}, ["e"])


@pytest.mark.parametrize(
    "bad",
    [("B", signs("d")(b"other")), vote("d", 6, "B"), vote("e", 7, "B")],
    ids=["other words", "another attempt", "another peer"],
)
def test_a3_a_vote_counts_only_with_its_peers_signature(bad):
    votes, twice = voters("a").checked(7, [{"d": vote("d", 7, "A")}, {"d": bad}, {"x": vote("x", 7, "A")}])
    assert (votes.keys(), twice) == ({"d"}, [])


@pytest.mark.parametrize("of", [MadeOf(2, ["a", "x"]), MadeOf(6, [])])
def test_a4_a_model_of_more_than_the_roster_has_is_refused(of):
    with pytest.raises(BadUpdate, match="it is said to be of"):
        voters("a").check(of)


def test_a4_a_model_with_the_votes_of_most_is_taken_from_one_peer():
    model, made_of = arena(PLAIN, 5), MadeOf(5, [*"abcde"])
    made = voters("a").made(sha256(model), made_of)
    for names, taken in (("abc", True), ("ab", False), ("aab", False)):
        votes = {name: vote(name, 4, made)[1] for name in names}
        letter = MadeOf(5, [*"abcde"], 4, votes)
        found = [voters("a").voted(p, letter.attempt, made, v) for p, v in letter.votes.items()]
        assert (sum(found) >= voters("a").need) is taken
