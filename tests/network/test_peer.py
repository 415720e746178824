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
        assert simulated.wait(120) == 0, project.log("simulate")
        for name, process in start_peers(project).items():
            assert process.wait(120) == 0, project.log(f"peer-{name}")
        rounds, expected = models(project, "r+gossip")
        for name in SITES:
            got_rounds, got = models(project, f"r+gossip@{name}")
            assert got_rounds == rounds == 3
            assert (got[name] == expected[name]).all()
