"""`fedtrain peer`: real processes, real sockets, the commands that users type."""

import signal
import subprocess
import sys

import pytest

from fedtrain.pki import issue
from fedtrain.store import RunStore
from tests.ports import free_port
from tests.processes import SITES, Project


def start_peers(project, *sets, names=SITES):
    return {
        name: project.start("peer", name, "--set", f"network.listen=127.0.0.1:{free_port()}", *sets)
        for name in names
    }


def models(project, run):
    """Each peer's last model, by a run directory of one peer or of all."""
    store = RunStore(project.root / "runs" / run, read_only=True)
    try:
        last = store.latest()
        return last.round, {n.partition("/")[0]: v for n, v in last.state.items() if n.endswith("/model")}
    finally:
        store.close()


def model_of(project, run):
    """The digest of the run's model."""
    store = RunStore(project.root / "runs" / run, read_only=True)
    try:
        return store.latest().weights.digest
    finally:
        store.close()


def ends_as_simulated(project, names, *sets, of_peers=()):
    """Peers as processes end with the models, bit for bit, of a simulation with the same settings."""
    simulated = project.start("simulate", "--mode", "gossip", *sets)
    assert simulated.wait(240) == 0, project.log("simulate-gossip")
    for name, process in start_peers(project, *sets, *of_peers, names=names).items():
        assert process.wait(240) == 0, project.log(f"peer-{name}")
    rounds, expected = models(project, "r+gossip")
    for name in names:
        got_rounds, got = models(project, f"r+gossip@{name}")
        assert got_rounds == rounds == 3
        assert (got[name] == expected[name]).all()
        assert model_of(project, f"r+gossip@{name}") == model_of(project, "r+gossip")  # one for all


@pytest.mark.slow
def test_peers_over_zeromq_end_with_the_bits_of_their_simulation(tmp_path):
    with Project(tmp_path, rounds=3) as project:
        ends_as_simulated(project, SITES)


CHOCO = (
    "--set",
    "gossip.algorithm=choco",
    "--set",
    "gossip.topology=ring",
    "--set",
    "gossip.compressor=quantize:4",
)


OWN = """
import json, sys
from safetensors.numpy import load_file, save_file

request = json.load(open(sys.argv[1]))
moved, far = load_file(request["weights"]), (1 + request["round"]) / ord(request["site"])
for name, tensor in moved.items():
    tensor += (far * (tensor + 1)).astype(tensor.dtype)
save_file(moved, request["out"])
json.dump({"examples": ord(request["site"]), "metrics": {"loss": far}}, open(request["report"], "w"))
"""


@pytest.mark.slow(15)
def test_peers_over_zeromq_that_train_by_a_command_end_with_the_bits_of_their_simulation(tmp_path):
    with Project(tmp_path, rounds=3) as project:
        (tmp_path / "own.py").write_text(OWN)
        ends_as_simulated(project, SITES, "--set", "train.command=python own.py {request}")
        (last,) = (
            each
            for each in project.events("r+gossip@b")
            if (each["kind"], each.get("round")) == ("round_committed", 3)
        )
        assert last["loss"] == pytest.approx(3 / ord("b"))  # the command's own word, of its last training


@pytest.mark.slow(20)
def test_compressed_differences_over_zeromq_give_the_bits_of_their_simulation(tmp_path):
    with Project(tmp_path, rounds=3) as project:
        ends_as_simulated(project, SITES, *CHOCO)


LIVELY = ("--set", "gossip.round_deadline=60s", "--set", "network.idle=2s", "--set", "network.heartbeat=1s")
AWAY, BACK, ALL = 4, 8, 16  # rounds before a peer is killed, before it is back, and in all


def killed_and_back(project, *sets):
    """Peers of whom c is killed in a round, and is back when the others have done some without it; the state
    that it left."""

    def of(name, kind):
        return [e for e in project.events(f"r+gossip@{name}") if e["kind"] == kind]

    def are_at(names, kind, number):
        return all(of(n, kind) and of(n, kind)[-1]["round"] == number for n in names)

    sets = *LIVELY, *sets, "--set", "strategy.min_sites=3"  # at the start
    project.let_train(0)
    peers = start_peers(project, *sets)
    project.wait_for(lambda: all(len({e["site"] for e in of(n, "site_joined")}) == 2 for n in SITES))
    project.wait_for(lambda: are_at(SITES, "round_started", 1))
    project.let_train(AWAY)
    project.wait_for(lambda: are_at(SITES, "round_started", AWAY + 1))
    peers["c"].kill()
    peers["c"].wait(30)
    store = RunStore(project.root / "runs" / "r+gossip@c", read_only=True)
    assert store.latest().round == AWAY
    left = store.latest().state
    store.close()
    project.let_train(BACK)
    project.wait_for(lambda: are_at("ab", "round_committed", BACK))
    late = [e for n in "ab" for e in of(n, "update_refused") if "did not finish within" in e["reason"]]
    assert not late, "they waited for it until the deadline"
    peers["c"] = start_peers(project, *sets, names=["c"])["c"]
    project.wait_for(lambda: are_at("c", "round_started", BACK + 1))
    project.let_train(ALL)
    for name, process in peers.items():
        assert process.wait(200) == 0, project.log(f"peer-{name}")
    return left


@pytest.mark.slow(15)
def test_what_a_compressor_left_out_survives_kill_9_of_a_peer(tmp_path):
    """Its copy and residual are of its last committed round; its neighbours hold the same copy again."""
    with Project(tmp_path, rounds=ALL, task="Held") as project:
        left = killed_and_back(project, *CHOCO)
        assert bool((left["c/state/copy"] != 0).any())
        assert {"c/state/base", "c/state/copy/a", "c/state/base/b"} <= left.keys()
        states = {}
        for name in SITES:
            store = RunStore(project.root / "runs" / f"r+gossip@{name}", read_only=True)
            states[name] = store.latest().state
            store.close()
        for name in SITES:
            for other in set(SITES) - {name}:
                ours, theirs = states[name][f"{name}/state/copy"], states[other][f"{other}/state/copy/{name}"]
                assert (ours == theirs).all(), (name, other)
        assert len({model_of(project, f"r+gossip@{name}") for name in SITES}) == 1


STREAMING = ("--set", "gossip.algorithm=streaming-diloco", "--set", "gossip.topology=base:1")


@pytest.mark.slow(20)
def test_streaming_diloco_over_zeromq_gives_the_bits_of_its_simulation(tmp_path):
    """Fragments travel, a byte a coordinate, while the peers train."""
    with Project(tmp_path, rounds=3) as project:
        ends_as_simulated(project, SITES, *STREAMING)


@pytest.mark.slow(20)
def test_outer_momentum_and_residuals_of_streaming_diloco_survive_kill_9_of_a_peer(tmp_path):
    """Four fragments in four rounds: those whose turn was before the kill, in the third, are as they were, at
    the end."""
    sets = ("--set", "gossip.algorithm=streaming-diloco", "--set", "gossip.topology=complete", "--set",
            "gossip.fragments=4", "--set", "strategy.min_sites=2", "--set", "network.idle=300s")  # fmt: skip

    def of_c():
        store = RunStore(project.root / "runs" / "r+gossip@c", read_only=True)
        last = store.latest()
        found = {n.removeprefix("c/state/"): v.clone() for n, v in last.state.items() if "/state/" in n}
        store.close()
        return last.round, found

    with Project(tmp_path, rounds=4, task="Held") as project:
        project.let_train(2)
        peers = start_peers(project, *sets)
        project.wait_for(lambda: project.count("round_started", "r+gossip@c") == 3)
        peers["c"].kill()
        peers["c"].wait(30)
        reached, left = of_c()
        assert reached == 2
        peers["c"] = start_peers(project, *sets, names=["c"])["c"]
        project.wait_for(lambda: project.count("round_started", "r+gossip@c") == 4)
        project.let_train(4)
        for name, process in peers.items():
            assert process.wait(200) == 0, project.log(f"peer-{name}")
        reached, ended = of_c()
        assert reached == 4
        assert len({model_of(project, f"r+gossip@{name}") for name in SITES}) == 1
        assert {"slow", "momentum", "x0/residual"} <= left.keys() == ended.keys()
        before, after = pieces(left), pieces(ended)
        done = [p for p in before if bool(before[p]["residual"].any())]
        assert len(done) == 2
        assert any(bool(before[p]["momentum"].any()) for p in done)  # but the first: no steps before
        for p in done:
            assert all((before[p][what] == after[p][what]).all() for what in before[p]), p
        assert all(bool(piece["residual"].any()) for piece in after.values())


def pieces(state):
    """What a peer keeps of each of the four fragments."""
    cut = {what: state[what].tensor_split(4) for what in ("slow", "momentum")}
    return {p: {what: cut[what][p] for what in cut} | {"residual": state[f"x{p}/residual"]} for p in range(4)}


@pytest.mark.slow(15)
def test_a_peer_killed_and_started_again_goes_on_and_the_others_did_not_wait_for_it(tmp_path):
    with Project(tmp_path, rounds=ALL, task="Held") as project:
        killed_and_back(project)
        for name in SITES:
            assert models(project, f"r+gossip@{name}")[0] == ALL


@pytest.mark.slow(40)
def test_a_newcomer_joins_a_run_by_invitation_and_who_is_revoked_is_cut_off_while_it_goes_on(tmp_path):
    sets = *LIVELY, "--set", "strategy.min_sites=2"
    with Project(tmp_path, rounds=10_000, slow=0.02) as project:

        def fedtrain(*arguments):
            command = [sys.executable, "-m", "fedtrain", *arguments]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        def of(name, kind):
            return [each for each in project.events(f"r+gossip@{name}") if each["kind"] == kind]

        def go_on_with(name, sites):
            return of(name, "round_started") and of(name, "round_started")[-1]["sites"] == sites

        address = f"network.listen=127.0.0.1:{free_port()}"
        peers = {"a": project.start("peer", "a", "--set", address, *sets)}
        peers |= start_peers(project, *sets, names=["b", "c"])
        project.wait_for(lambda: of("a", "round_committed"))
        issue(tmp_path / "certs", "site", "d")
        code = fedtrain("invite", "d", "--by", "a", "--set", address)
        by_code = (f"--invitation={code}", "--set", "gossip.roster=roster-of-d")
        peers |= start_peers(project, *by_code, *sets, names=["d"])
        project.wait_for(lambda: all(go_on_with(name, ["a", "b", "c", "d"]) for name in "abcd"))
        assert any("took the model of" in each["text"] for each in of("d", "notice"))
        fedtrain("certs", "revoke", "c")
        assert peers["c"].wait(120) == 1
        assert "c's own entry counts no more: its certificate was revoked" in project.log("peer-c")
        project.wait_for(lambda: all(go_on_with(name, ["a", "b", "d"]) for name in "abd"))
        at = len(of("a", "round_committed"))
        project.wait_for(lambda: len(of("a", "round_committed")) > at + 2)
        assert any("no longer on the roster" in each["reason"] for each in of("a", "site_lost"))
        for name, told, code in (("d", signal.SIGTERM, 143), ("b", signal.SIGINT, 130)):
            peers[name].send_signal(told)
            assert peers[name].wait(60) == code, project.log(f"peer-{name}")
            assert "goes on from the last committed round" in project.log(f"peer-{name}")
            left = {"site": name, "reason": "has left"}  # it said good-bye: nobody waits for its silence
            project.wait_for(lambda left=left: any(left.items() <= e.items() for e in of("a", "site_lost")))


@pytest.mark.slow(30)  # four processes with a trainer each, and a simulation
def test_masked_peers_over_zeromq_end_with_the_bits_of_their_simulation(tmp_path):
    four = (*SITES, "d")
    with Project(tmp_path, rounds=3) as project:
        issue(project.root / "certs", "site", "d")
        task = (project.root / "task.py").read_text().replace('["a", "b", "c"]', str(list(four)))
        (project.root / "task.py").write_text(task)
        ends_as_simulated(
            project, four, "--set", "gossip.masks=true", "--set", "gossip.topology=complete",
            of_peers=("--set", "strategy.min_sites=4"),
        )  # fmt: skip
