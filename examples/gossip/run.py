"""The heart hospitals with no aggregator: four peers as processes of their own, over ZeroMQ with CURVE.

    python examples/gossip/run.py [ROUNDS]

Cleveland starts alone; each of the others has a certificate and an invitation, and nothing else. At the end
each hospital's model is tried on the test patients of all four.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.store import RunStore
from fedtrain.training.local import Engine
from fedtrain.training.task import load_task

HEART = Path(__file__).resolve().parents[1] / "heart"
CONFIG = HEART / "gossip.toml"
FIRST, *OTHERS = HOSPITALS = ["cleveland", "hungary", "switzerland", "va-long-beach"]


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as work:
        sets = {"network.certs": f"{work}/certs", "run.dir": f"{work}/runs", "run.rounds": rounds,
                "strategy.min_sites": len(HOSPITALS)}  # fmt: skip
        fedtrain("certs", "init", *HOSPITALS, **sets)
        fedtrain("task", "approve", "--rule", "secure_sums=false", **sets)  # at each hospital
        ports = free_ports()
        own = {
            name: sets | {"network.listen": f"127.0.0.1:{port}", "gossip.roster": f"{work}/roster/{name}"}
            for name, port in zip(HOSPITALS, ports, strict=True)
        }
        peers = [start("peer", FIRST, **own[FIRST])]
        for name in OTHERS:
            code = fedtrain("invite", name, "--by", FIRST, **own[FIRST])
            peers.append(start("peer", name, f"--invitation={code}", **own[name]))
        try:
            if any(peer.wait(1800) != 0 for peer in peers):
                sys.exit("a peer failed; see above")
        finally:
            for peer in peers:
                peer.kill()
        for name, accuracy in accuracies(Config.load(CONFIG, [f"run.dir={work}/runs"])).items():
            print(f"{name:14} {accuracy:.1%} of the test patients of all four")


def accuracies(config: Config) -> dict[str, float]:
    """Of each hospital's last model."""
    task = load_task(config.run.task, config.root)
    engine, found = Engine(task, config.train, config.run.seed), {}
    for name in HOSPITALS:
        store = RunStore(config.peer_dir(name), read_only=True)
        last = store.latest()
        store.close()
        assert last is not None, f"{name} has no round"
        model = Arena(engine.schema, last.state[f"{name}/model"])
        counts = [engine.evaluate(task.eval_data(site), model)["accuracy"] for site in HOSPITALS]
        found[name] = sum(right for right, _ in counts) / sum(patients for _, patients in counts)
    return found


def command(arguments: tuple[str, ...], sets: dict[str, object]) -> list[str]:
    settings = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "fedtrain", *arguments, "--config", str(CONFIG), *settings]


def fedtrain(*arguments: str, **sets: object) -> str:
    done = subprocess.run(command(arguments, sets), check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def start(*arguments: str, **sets: object) -> subprocess.Popen[bytes]:
    """A peer; what Cleveland says is shown."""
    out = None if FIRST in arguments else subprocess.DEVNULL
    return subprocess.Popen(command(arguments, sets), stdout=out, env={**os.environ, "TERM": "dumb"})


def free_ports() -> list[int]:
    """One a hospital, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in HOSPITALS]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
