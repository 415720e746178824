"""`fedtrain peer`: real processes, real sockets, the commands that users type."""

import socket

import pytest

from fedtrain.store import RunStore
from tests.processes import SITES, Project


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


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


@pytest.mark.slow
def test_peers_over_zeromq_end_with_the_bits_of_their_simulation(tmp_path):
    with Project(tmp_path, rounds=3) as project:
        simulated = project.start("simulate", "--mode", "gossip")
        assert simulated.wait(240) == 0, project.log("simulate")
        for name, process in start_peers(project).items():
            assert process.wait(240) == 0, project.log(f"peer-{name}")
        rounds, expected = models(project, "r+gossip")
        for name in SITES:
            got_rounds, got = models(project, f"r+gossip@{name}")
            assert got_rounds == rounds == 3
            assert (got[name] == expected[name]).all()


@pytest.mark.slow
def test_a_peer_killed_and_started_again_goes_on_and_the_others_did_not_wait_for_it(tmp_path):
    sets = ("--set", "gossip.round_deadline=20s", "--set", "network.idle=2s", "--set", "network.heartbeat=1s",
            "--set", "strategy.min_sites=2")  # fmt: skip
    with Project(tmp_path, rounds=60, slow=0.1) as project:
        peers = start_peers(project, *sets)
        project.wait_for(lambda: project.count("round_committed", "r+gossip@c") >= 3)
        peers["c"].kill()
        peers["c"].wait(30)
        at = project.count("round_committed", "r+gossip@a")
        project.wait_for(lambda: project.count("round_committed", "r+gossip@a") >= at + 4)
        again = start_peers(project, *sets, names=["c"])["c"]
        for process in (peers["a"], peers["b"], again):
            assert process.wait(200) == 0, project.log("peer-c")
        for name in SITES:
            assert models(project, f"r+gossip@{name}")[0] == 60
        seconds = [e["seconds"] for e in project.events("r+gossip@a") if e["kind"] == "round_committed"]
        assert max(seconds) < 25  # 20 s, and a busy machine
