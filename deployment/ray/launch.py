"""A run in a datacenter, on Ray: the ranks of `fedtrain datacenter`, each in a place that Ray finds for it.

    cd PROJECT && python launch.py --ranks 16 --gpus 1 [--address auto] -- --set parallel.zero=3

The project's folder, and fedtrain[ray], have to be on all machines under the same paths; checkpoint.dir on a
disk that they share, or in a bucket. When a rank dies, or its machine, all start again from the last
checkpoint.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(max_restarts=0)
class Rank:
    """One rank's place."""

    def address(self) -> tuple[str, int]:
        """Where the others can meet it: this machine, and a port that is free on it now."""
        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    def run(self, env: dict[str, str], folder: str, options: list[str]) -> int:
        """`fedtrain datacenter` until it ends; its exit code."""
        if "CUDA_VISIBLE_DEVICES" in os.environ:  # Ray shows each rank its own GPUs alone
            env["LOCAL_RANK"] = "0"
        command = [sys.executable, "-m", "fedtrain", "datacenter", *options]
        return subprocess.run(command, env=os.environ | env, cwd=folder, check=False).returncode


def attempt(ranks: int, gpus: float, cpus: float, options: list[str]) -> list[int | str]:
    """All ranks, started once: their exit codes, or why there is none."""
    resources = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    group = placement_group([resources] * ranks, strategy="PACK")
    ray.get(group.ready())
    try:
        actors = [
            Rank.options(
                num_cpus=cpus, num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            ).remote()
            for i in range(ranks)
        ]  # fmt: skip
        host, port = ray.get(actors[0].address.remote())
        places = [host for host, _ in ray.get([actor.address.remote() for actor in actors])]
        secret, running = secrets.token_hex(32), []
        for i, actor in enumerate(actors):
            env = {
                "RANK": str(i), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(places[:i].count(places[i])),
                "MASTER_ADDR": host, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                "FEDTRAIN_RANKS_SECRET": secret,
            }  # fmt: skip
            running.append(actor.run.remote(env, os.getcwd(), options))
        return [_result(each) for each in running]
    finally:
        ray.util.remove_placement_group(group)


def _result(running: ray.ObjectRef) -> int | str:
    try:
        return int(ray.get(running))
    except ray.exceptions.RayActorError as e:
        return f"lost: {e}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--gpus", type=float, default=0, help="of each rank")
    parser.add_argument("--cpus", type=float, default=1, help="of each rank")
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--address", help="of a running cluster; without it, Ray starts here")
    parser.add_argument("options", nargs="*", help="of `fedtrain datacenter`, after --")
    args = parser.parse_args()
    ray.init(address=args.address, log_to_driver=True)
    for number in range(args.restarts + 1):
        codes = attempt(args.ranks, args.gpus, args.cpus, args.options)
        if all(code == 0 for code in codes):
            return 0
        print(f"launch.py: attempt {number} ended with {codes}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
