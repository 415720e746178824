"""Averaging among peers of other frameworks, for `gossip.py --beside PYTHON`: hivemind 1.1, p2pfl 0.4.

It imports nothing of fedtrain: PYTHON is the interpreter of a virtual environment, outside this repository,
that has one of the two. Peers are processes, each with a random vector of its own in each round. The clock
runs from when all have theirs, by a barrier, until the slowest has the mean of all, which is checked. So
what the frameworks do before (hivemind's matchmaking, p2pfl's votes and pauses) is not counted.

    PYTHON benchmarks/beside.py NUMEL PEERS ROUNDS [HOSTS]     -> {name: {"version": ..., "seconds": [...]}}

HOSTS, [[namespace, address] of each peer] as JSON, has hivemind's peers each in a network namespace (wan.py).
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
from wan import enter

WAIT_S = 120.0  # for anything of theirs, before we give up


def vector(peer: int, round: int, numel: int) -> np.ndarray:
    return np.random.default_rng([peer, round]).standard_normal(numel, np.float32)


def check(found: np.ndarray, peers: int, round: int) -> None:
    mean = sum(vector(peer, round, len(found)) for peer in range(peers)) / peers
    np.testing.assert_allclose(found, mean, atol=1e-5, err_msg="the peers did not end with the mean")


# --- hivemind: groups are formed first, then all-reduce is triggered


def hivemind_peer(me: int, numel: int, peers: int, rounds: int, barrier: Any, shared: Any, pipe: Any) -> None:
    import torch
    from hivemind import DHT, DecentralizedAverager
    from hivemind.averaging.control import AveragingStage

    torch.set_num_threads(1)
    if me:
        shared["ready"].wait(WAIT_S)
    first = list(shared["addresses"]) if me else []
    address = "127.0.0.1"
    if shared["hosts"]:
        namespace, address = shared["hosts"][me]
        enter(namespace)
    dht = DHT(start=True, initial_peers=first, host_maddrs=[f"/ip4/{address}/tcp/0"])
    if not me:
        shared["addresses"].extend([str(address) for address in dht.get_visible_maddrs()])
        shared["ready"].set()
    averager = DecentralizedAverager(
        [torch.zeros(numel)],
        dht,
        prefix="benchmark",
        target_group_size=peers,
        min_group_size=peers,
        start=True,
    )
    seconds = []
    for round in range(rounds):
        mine = torch.from_numpy(vector(me, round, numel))
        with averager.get_tensors() as tensors:
            tensors[0].copy_(mine)
        barrier.wait(WAIT_S)
        step = averager.step(require_trigger=True, wait=False, timeout=WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while step.stage is not AveragingStage.AWAITING_TRIGGER:
            assert time.monotonic() < deadline, f"no group was formed: {step.stage}"
            time.sleep(0.01)
        barrier.wait(WAIT_S)
        began = time.perf_counter()
        step.allow_allreduce()
        group = step.result(WAIT_S)
        seconds.append(time.perf_counter() - began)
        assert group is not None, "the all-reduce failed"
        assert len(group) == peers, f"a group of {len(group)}"
        with averager.get_tensors() as tensors:
            check(tensors[0].numpy(), peers, round)
    pipe.send(seconds)
    barrier.wait(WAIT_S)
    averager.shutdown()
    dht.shutdown()


# --- p2pfl: fit() ends when all are there; the round is over when the learner is given the aggregate


def p2pfl_peer(me: int, numel: int, peers: int, rounds: int, barrier: Any, shared: Any, pipe: Any) -> None:
    from p2pfl.settings import Settings

    Settings.general.DISABLE_RAY = True  # before the rest is imported, which starts it
    from datasets import Dataset
    from p2pfl.learning.dataset.p2pfl_dataset import P2PFLDataset
    from p2pfl.learning.frameworks.learner import Learner
    from p2pfl.learning.frameworks.p2pfl_model import P2PFLModel
    from p2pfl.node import Node

    seconds: list[float] = []

    class Vector(P2PFLModel):
        def get_parameters(self) -> list[np.ndarray]:
            return [self.model["x"]]

        def set_parameters(self, params: Any) -> None:
            if isinstance(params, bytes):
                params, self.additional_info = self.decode_parameters(params)
            self.model = {"x": params[0]}

        def get_framework(self) -> str:
            return "pytorch"

    class Draws(Learner):
        began: float | None = None
        round = 0

        def fit(self) -> P2PFLModel:
            model = self.get_model()
            model.set_parameters([vector(me, self.round, numel)])
            model.set_contribution([self.addr], 1)
            barrier.wait(WAIT_S)
            self.began = time.perf_counter()
            return model

        def set_model(self, model: Any) -> None:
            super().set_model(model)
            if self.began is not None:
                seconds.append(time.perf_counter() - self.began)
                self.began = None
                check(self.get_model().get_parameters()[0], peers, self.round)
                self.round += 1

        set_model.__no_addr_check__ = True  # type: ignore[attr-defined]  # as the method that it replaces

        def interrupt_fit(self) -> None:
            pass

        def evaluate(self) -> dict[str, float]:
            return {}

        def get_framework(self) -> str:
            return "pytorch"

    data = P2PFLDataset(Dataset.from_dict({"x": [0]}), dataset_name="benchmark")
    node = Node(Vector({"x": np.zeros(numel, np.float32)}), data, f"127.0.0.1:{shared['ports'][me]}", Draws())
    node.start()
    barrier.wait(WAIT_S)
    for other in range(me):
        assert node.connect(f"127.0.0.1:{shared['ports'][other]}")
    barrier.wait(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while len(node.get_neighbors()) < peers - 1:
        assert time.monotonic() < deadline, f"{len(node.get_neighbors())} neighbours"
        time.sleep(0.1)
    barrier.wait(WAIT_S)
    if me == 0:
        node.set_start_learning(rounds=rounds, epochs=1, trainset_size=peers)
    while len(seconds) < rounds:
        assert time.monotonic() < deadline + rounds * WAIT_S, f"{len(seconds)} of {rounds} rounds were done"
        time.sleep(0.1)
    pipe.send(seconds)
    barrier.wait(WAIT_S)
    node.stop()


FRAMEWORKS: dict[str, Callable[..., None]] = {"hivemind": hivemind_peer, "p2pfl": p2pfl_peer}


def averaging(
    peer: Callable[..., None], numel: int, peers: int, rounds: int, hosts: list[list[str]]
) -> list[float]:
    """Seconds of each round, the slowest peer's."""
    fork = multiprocessing.get_context("fork")  # hivemind's own processes can't be started in another way
    with fork.Manager() as manager, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(peers)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        shared = {"addresses": manager.list(), "ready": manager.Event(), "hosts": hosts,
                  "ports": [each.getsockname()[1] for each in sockets]}  # fmt: skip
        for each in sockets:
            each.close()
        barrier, pipes, workers = fork.Barrier(peers), [], []
        for me in range(peers):
            here, there = fork.Pipe()
            workers.append(fork.Process(target=peer, args=(me, numel, peers, rounds, barrier, shared, there)))
            workers[-1].start()
            pipes.append(here)
        try:
            deadline = time.monotonic() + WAIT_S * (rounds + 1)
            while not all(pipe.poll(0.1) for pipe in pipes):
                assert time.monotonic() < deadline, "a peer did not answer"
                assert not any(worker.exitcode for worker in workers), "a peer failed; its story is on stderr"
            seconds = [pipe.recv() for pipe in pipes]
            for worker in workers:
                worker.join(WAIT_S)
        finally:
            for worker in workers:
                worker.kill()
    return [max(each) for each in zip(*seconds, strict=True)]


def main() -> None:
    numel, peers, rounds = map(int, sys.argv[1:4])
    hosts = json.loads(sys.argv[4]) if len(sys.argv) > 4 else []
    found = {}
    with tempfile.TemporaryDirectory() as folder:  # p2pfl writes its logs where it stands
        os.chdir(folder)
        for name, peer in FRAMEWORKS.items():
            if find_spec(name) and (name == "hivemind" or not hosts):
                seconds = averaging(peer, numel, peers, rounds, hosts)
                found[name] = {"version": version(name), "seconds": seconds}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
