"""Peers as processes: killed, frozen, and back again. No round waits longer than its deadline."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedtrain.transport.zmq import Curve

ROOT = Path(__file__).parents[2]


class Peers:
    def __init__(self, folder, n, *, rounds, deadline_s, train_s=0.3):
        self.folder, self.names, self.processes = folder, [f"p{i}" for i in range(n)], {}
        peers = {}
        for i, name in enumerate(self.names):
            curve = Curve.new()
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{s.getsockname()[1]}"
            peers[name] = {"public": curve.public.decode(), "secret": curve.secret.decode(),
                           "address": address, "start": i}  # fmt: skip
        self.spec = {"peers": peers, "rounds": rounds, "deadline_s": deadline_s, "train_s": train_s}
        (folder / "spec.json").write_text(json.dumps(self.spec))

    def __enter__(self):
        for name in self.names:
            self.start(name)
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(10)

    def start(self, name, *more):
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "tests.gossip_peer", name, str(self.folder / "spec.json"), *more]
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)

    def said(self, name, kind="round"):
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [each for each in found if each["kind"] == kind]

    def wait_for(self, what, seconds=60.0):
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, {
                n: (self.folder / f"{n}.log").read_text()[-600:] for n in self.names
            }
            time.sleep(0.05)


@pytest.mark.slow
def test_peers_killed_and_frozen_in_a_round_stop_nobody_and_those_who_return_catch_up(tmp_path):
    with Peers(tmp_path, 6, rounds=60, deadline_s=6.0) as peers:
        peers.wait_for(lambda: all(len(peers.said(n)) >= 3 for n in peers.names))
        killed, frozen, rest = ["p0", "p1"], "p2", ["p3", "p4", "p5"]
        for name in killed:
            peers.processes[name].kill()
            peers.processes[name].wait(10)
        peers.processes[frozen].send_signal(signal.SIGSTOP)
        at = {n: len(peers.said(n)) for n in rest}
        peers.wait_for(lambda: all(len(peers.said(n)) >= at[n] + 10 for n in rest))
        peers.processes[frozen].send_signal(signal.SIGCONT)
        peers.start("p0", "--back")
        peers.wait_for(
            lambda: all(peers.said(n) and peers.said(n)[-1]["round"] == 60 for n in ["p0", frozen, *rest]), 90
        )
        for name in rest:
            rounds = peers.said(name)
            assert [each["round"] for each in rounds] == list(range(1, 61))
            # a second beside the deadline: a busy machine wakes a process late
            assert max(each["waited_s"] for each in rounds) < 6.0 + 1.0
            assert any(set(each["both"]) == set(rest) - {name} for each in rounds)
        assert peers.said("p0", "pulled")  # the one that came back took the state of the others,
        assert peers.said(frozen, "pulled")  # and so did the one that had slept
        last = {n: peers.said(n)[-1] for n in ["p0", frozen, *rest]}
        for name in last:
            assert set(last[name]["both"]) == set(last) - {name}
        xs = [each["x"] for each in last.values()]
        assert max(xs) - min(xs) < 1e-9
        assert 0 <= xs[0] <= 5
