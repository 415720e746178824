"""Peers that no longer fit together: struck off at one of them, doubled, revoked, with other settings, left
with their own model. Each says what is the matter, and no figure looks healthy that is not."""

import asyncio
import shutil
from dataclasses import replace

import pytest
from click.testing import CliRunner

from fedtrain import pki
from fedtrain.cli.commands import cli
from fedtrain.cli.output import run_row
from fedtrain.config import Config
from fedtrain.errors import BadUpdate, CertificateError, ConfigError, JoinRefused
from fedtrain.events import Notice, RunStarted, SiteJoined, UpdateRefused, Waiting
from fedtrain.exchange import Neighborhood, ShareHeader
from fedtrain.gossip import Parcel
from fedtrain.runtime.journal import Result
from fedtrain.runtime.peers import peer
from fedtrain.runtime.peers.consensus import ENDED
from fedtrain.runtime.peers.gossip import RoundReport
from fedtrain.runtime.peers.gossip_setup import algorithm_of, check_graph, needed
from fedtrain.runtime.peers.parcels import Inbox, share_of
from fedtrain.runtime.peers.telling import Stall, in_words, worded
from fedtrain.tracking.board import Board
from fedtrain.tracking.runs import Summary
from fedtrain.transport.admission import Curve, LocalPeer
from fedtrain.wire.gossip import Stamp

from .allowed import allowed
from .limits import bounded
from .peers import Toy, village
from .ports import free_port
from .rosters import FixedRoster, signs


def last_of(v, name):
    return v.of(name, "round_committed")[-1]


def said(v, name, beginning):
    return [each["text"] for each in v.of(name, "notice") if each["text"].startswith(beginning)]


async def all_with_own_rosters(v, **changes):
    """Each in a folder that nobody else reads, with the entries of all."""
    entries = {name: v.root / f"roster-{name}" / f"{name}.peer" for name in v.names}
    for name in v.names:
        v.start(name, gossip={"roster": entries[name].parent.name}, **changes)
    await v.until(lambda: all(entry.exists() for entry in entries.values()))
    for entry in entries.values():
        for other in entries.values():
            if other != entry:
                shutil.copy(entry, other.parent)


# --- under masks, struck off at one peer alone


@pytest.mark.slow(14)
def test_under_masks_a_strike_at_one_peer_is_told_at_all_and_nothing_is_shown_as_averaged(tmp_path):
    """It counts others than they do. Taken back, all average again, though nobody was started anew."""

    async def main():
        async with village(tmp_path, "abcd", masks=True) as v:
            await all_with_own_rosters(v, pace_s=0.05)
            await v.until(
                lambda: all(v.rounds_of(name) and last_of(v, name)["sites"] == 4 for name in "abcd")
            )
            assert {"moved", "mean_loss"} <= last_of(v, "b")["metrics"].keys()
            (tmp_path / "roster-a" / "d.peer").unlink()
            await v.until(lambda: all(said(v, name, "averages with nobody: ") for name in "abc"))
            for name in "abc":
                (text,) = said(v, name, "averages with nobody: ")
                assert "strike a peer off at all of them, or revoke its certificate" in text
                assert last_of(v, name)["sites"] == 1
                assert not last_of(v, name)["metrics"].keys() & {"moved", "mean_loss"}
            assert "d was struck off here" in said(v, "a", "averages with nobody: ")[0]
            assert "a counts others as here than this peer does" in said(v, "b", "averages with nobody: ")[0]
            told = [(each["site"], each["round"]) for each in v.of("b", "update_refused")]
            assert len(told) == len({*told})
            assert not any(each["reason"].startswith("refused") for each in v.of("b", "update_refused"))
            (tmp_path / "roster-a" / "d.struck").unlink()
            await v.until(lambda: all(said(v, name, "averages again, with ") for name in "abc"))
            await v.until(lambda: all(last_of(v, name)["sites"] == 4 for name in "abcd"))

    bounded(main())


def stalled(rounds):
    events = []
    stall = Stall(events.append, False)
    near = Neighborhood("a", {"b": 0.5}, {"b": 0.5}, 0.5)
    for heard in rounds:
        stall.note(near, RoundReport({}, {} if heard else {"b": "went on"}, 0.0, 0.0, heard), (), ())
    return [event.text for event in events]


def test_a_peer_says_once_that_nothing_was_averaged_for_three_rounds_and_once_that_it_is_over():
    assert stalled([(), ()]) == []
    assert stalled([(), ("b",), (), ()]) == []
    (text,) = stalled([()] * 9)
    assert "nothing was averaged in the last 3 rounds" in text
    assert "(b: went on)" in text
    assert [text.split(":")[0] for text in stalled([(), (), (), ("b",), (), (), ()])] == [
        "averages with nobody", "averages again, with b", "averages with nobody",
    ]  # fmt: skip


def test_a_round_in_which_a_graph_has_nobody_for_a_peer_is_no_stall():
    events = []
    stall, alone = Stall(events.append, False), Neighborhood("a", {}, {}, 1.0)
    for _ in range(5):
        stall.note(alone, RoundReport({}, {}, 0.0, 0.0), (), ())
    assert not events


# --- doubled


@pytest.mark.slow(16)
def test_a_copy_of_a_peer_takes_its_place_which_it_is_told_and_has_again_when_the_copy_has_left(tmp_path):
    async def main():
        async with village(tmp_path, "abc", round_deadline="5s") as v:
            await all_with_own_rosters(v, pace_s=0.05)
            await v.until(lambda: v.are_with("abc", "abc"))
            copy = tmp_path / "copy"
            shutil.copytree(tmp_path / "certs" / "sites" / "b", copy / "certs" / "sites" / "b")
            shutil.copytree(tmp_path / "roster-b", copy / "roster-b")
            shutil.copy(tmp_path / "task.py", copy)
            network = {"listen": f"127.0.0.1:{free_port()}"}
            own = replace(v.config(gossip={"roster": "roster-b"}, network=network), root=copy)
            allowed(own, "b", masks=False, pin_members=False)

            async def start_trainer(scratch):
                return Toy(1.0, 0.05)

            told = []
            double = asyncio.create_task(peer.run(own, "b", emit=told.append, start_trainer=start_trainer))
            first = v.running.pop("b")
            with pytest.raises(CertificateError, match="another process is b now, at "):
                await first
            at = v.rounds_of("a")
            await v.until(lambda: v.rounds_of("a") > at + 2 and last_of(v, "a")["sites"] == 3)
            double.cancel()
            await asyncio.wait([double])
            await v.until(lambda: v.are_with("ac", "ac"))
            v.start("b", pace_s=0.05, gossip={"roster": "roster-b"})
            await v.until(lambda: v.are_with("abc", "abc") and last_of(v, "a")["sites"] == 3)

    bounded(main())


# --- revoked


@pytest.mark.slow(5)
def test_s06_a_peer_that_was_revoked_is_told_by_who_cuts_it_off_and_ends(tmp_path):
    """It reads no list itself: the others' certs are in other folders."""

    async def main():
        async with village(tmp_path, "abc") as v:
            for name in "abc":
                shutil.copytree(
                    tmp_path / "certs" / "sites" / name, tmp_path / f"certs-{name}" / "sites" / name
                )
                network = {"listen": f"127.0.0.1:{v.ports[name]}", "certs": f"certs-{name}"}
                v.start(name, pace_s=0.05, network=network)
            await v.until(lambda: v.are_with("abc", "abc"))
            pki.revoke(tmp_path / "certs", ["c"])
            shutil.copy(tmp_path / "certs" / "revoked.pem", tmp_path / "certs-a")
            with pytest.raises(CertificateError, match="c's own entry counts no more"):
                await v.running.pop("c")
            await v.until(lambda: v.are_with("ab", "ab"))

    bounded(main())


# --- settings


@pytest.mark.slow(6)
def test_a_peer_that_is_refused_for_its_settings_is_not_said_to_be_silent(tmp_path):
    async def main():
        async with village(tmp_path, "ab") as v:
            v.start("a")
            v.start("b", run={"rounds": 20})
            await v.until(lambda: said(v, "a", "not here yet: ") and said(v, "b", "not here yet: "))
            for name in "ab":
                (text,) = said(v, name, "not here yet: ")
                assert "differ in run.rounds" in text
                assert "no answer yet" not in text
                assert "network.listen" not in text

    bounded(main())


def config_of(min_sites=2, **gossip):
    table = {
        "run": {"task": "task:T"}, "strategy": {"min_sites": min_sites}, "secagg": {"enabled": False},
        "gossip": gossip,
    }  # fmt: skip
    return Config.of(table)


@pytest.mark.parametrize(
    ("keys", "need", "because"),
    [
        ({"min_sites": 3}, 3, ""),
        ({"min_sites": 1}, 2, "a peer averages with another one at least; strategy.min_sites = 1 is less"),
        (
            {"masks": True},
            4,
            "under gossip.masks a model hides among those of 3 others; strategy.min_sites = 2",
        ),
        ({"masks": True, "min_sites": 5}, 5, ""),
        ({"rule": "krum:f=1"}, 5, "gossip.rule = 'krum:f=1' needs so many models; strategy.min_sites = 2"),
    ],
)
def test_how_many_peers_are_needed_and_by_which_key(keys, need, because):
    config = config_of(**keys)
    found = needed(config, algorithm_of(config)[0])
    assert found[0] == need
    assert found[1].startswith(because)
    assert bool(found[1]) == bool(because)


def test_a_peer_that_waits_counts_itself():
    board = Board.of([RunStarted(run="r", mode="peer", rounds=3, sites=4), Waiting(need=4, have=1)])
    assert board.waiting == (1, 4)
    board.add(SiteJoined(site="b"))
    assert board.waiting == (2, 4)


@pytest.mark.parametrize("graph", ["ring", "base:1", "star", "regular:2", "matching"])
def test_masks_on_a_graph_where_nobody_ever_hears_three_are_refused_before_anybody_is_there(graph):
    algorithm, topology = algorithm_of(config_of(masks=True, topology=graph))
    with pytest.raises(
        ConfigError, match=r"gossip.masks: each peer must hear 3 others .* Set gossip.topology"
    ):
        check_graph(algorithm, topology, 0, True)


@pytest.mark.parametrize("graph", ["complete", "regular:3", "regular:4", "torus", "exponential"])
def test_masks_on_a_graph_that_can_have_them_are_not_refused_before_it_is_known_who_comes(graph):
    algorithm, topology = algorithm_of(config_of(masks=True, topology=graph))
    check_graph(algorithm, topology, 0, True)


def test_peers_of_different_runs_are_told_which():
    own = LocalPeer("a", Curve.new(), signs("a"), FixedRoster(), Stamp.of("north", "s", "a"))
    with pytest.raises(JoinRefused, match="b and a are in different runs: 'south' at b, 'north' at a"):
        own.check("b", Stamp.of("south", "s", "b"), "south", "north")


# --- the end


def test_what_comes_after_the_last_round_is_told_in_words():
    assert in_words("went on to round 7", 8) == "went on to round 7"
    assert in_words("went on to round 10", 8) == "has done all rounds"
    assert in_words(f"went on to round {8 + ENDED + 1}", 8) == "has ended the run"
    events = []
    tell = worded(events.append, 8)
    tell(UpdateRefused(site="b", round=11, reason="refused"))
    tell(UpdateRefused(site="b", round=8, reason="went on to round 9"))
    tell(Notice(text="went on to round 9"))
    assert events == [
        UpdateRefused(site="b", reason="at the one model of all: refused"),
        UpdateRefused(site="b", round=8, reason="has done all rounds"),
        Notice(text="went on to round 9"),
    ]


@pytest.mark.parametrize("part", ["sum/12ae", "2627451132424908/other/float32"])
def test_a_part_that_is_for_others_is_refused_in_words(part):
    import torch

    share = share_of(Parcel({"y": torch.zeros(3)}), 1.0, 1)
    inbox = Inbox({}, {part: torch.zeros(3)}, 1 << 20)
    with pytest.raises(BadUpdate, match="it is for other peers than those whom this peer counts"):
        inbox.begin(ShareHeader("b", 0, len(share.payload), 1.0, 1, share.codec, share.note))


@pytest.mark.parametrize("own", [False, True])
def test_a_script_knows_by_the_exit_code_that_a_peer_ended_with_its_own_model(tmp_path, monkeypatch, own):
    async def run(config, name, **_):
        return Result(3, "rounds done", {}, None, tmp_path, own)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(peer, "run", run)
    (tmp_path / "fedtrain.toml").write_text('[run]\nname = "r"\ntask = "task:T"\n')
    assert CliRunner().invoke(cli, ["peer", "a"]).exit_code == (3 if own else 0)


def test_the_list_of_runs_says_that_a_peers_model_is_its_own():
    one = Summary("r+gossip@a", "peer", "finished", 3, 3, None, {}, None, None, None, None, "runs/r")
    assert run_row(one)[1] == "finished"
    assert run_row(Summary(**{f: getattr(one, f) for f in one.__struct_fields__} | {"own_model": True}))[
        1
    ] == ("finished, own model")
