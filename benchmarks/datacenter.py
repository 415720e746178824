"""A datacenter's step beside bare torch DDP, a checkpoint's stall, and the time to the first step.

Everything that is compared runs in one launch of two processes, by turns: a step of ours, a step of theirs.
The bare loop is what anyone writes: DistributedDataParallel, the same model, optimizer and batches.

    step_ratio             median time of our step / of the bare one (bar: 1.02)
    ckpt_async_over_sync   how long a save in the background holds up training / one in the foreground (0.15)
    start_ratio            from the launch to the first step done, ours / a bare script (1.15)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common

RANKS = 2
CASES = {"mlp5m": "Mlp", "gpt10m": "Gpt"}
TASK = """
import torch
from torch import nn
from torch.nn import functional as F
import fedtrain

class Mlp(fedtrain.Task):  # 5.3 million parameters
    def model(self):
        wide = [nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()]
        return nn.Sequential(*wide, nn.Linear(2048, 256))

    def data(self, site):
        g = torch.Generator().manual_seed(1)
        return torch.randn(4096, 256, generator=g), torch.randint(0, 256, (4096,), generator=g)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

class Gpt(fedtrain.Task):  # 10.7 million
    def model(self):
        from gpt import GPT
        return GPT(vocabulary=128, length=64, width=384, heads=6, layers=6)

    def data(self, site):
        text = torch.randint(0, 128, (512, 65), generator=torch.Generator().manual_seed(1))
        return text[:, :-1], text[:, 1:]

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
"""
BARE_START = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[1])
import task as tasks
torch.set_num_threads(1)
dist.init_process_group("gloo")
task = getattr(tasks, sys.argv[2])()
torch.manual_seed(0)
model = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), 0.001)
data = task.data("")
task.loss(model, [column[:8] for column in data]).backward()
optimizer.step()
if dist.get_rank() == 0:
    print("first step", time.time(), flush=True)
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def config_of(folder: Path, case: str) -> dict[str, object]:
    return {
        "run": {"task": f"task:{CASES[case]}", "name": case, "rounds": 1, "seed": 1},
        "train": {"batch_size": 16, "optimizer": "adamw", "lr": 0.001, "local_steps": 1, "device": "cpu"},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 0},
        "parallel": {"timeout": "120s"},
    }


# --- in each rank


def ranks(folder: Path, case: str, steps: int) -> None:
    """Steps of ours and of bare DDP by turns; saves of both kinds. Rank 0 prints one JSON line."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from fedtrain.config import Config
    from fedtrain.runtime.datacenter import Datacenter, silent
    from fedtrain.training.checkpoint import Checkpoints
    from fedtrain.training.local import build_model
    from fedtrain.training.mesh import Mesh, Sizes, joined
    from fedtrain.training.task import load_task

    config = Config.of(config_of(folder, case), folder)
    with joined(config.parallel, "cpu") as device:
        task = load_task(config.run.task, folder)
        room = Datacenter(config, task, Mesh(Sizes.of(config.parallel, RANKS), device), None, silent)
        model = build_model(task, 1, device)
        bare = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), 0.001, weight_decay=0.0)

        def ours() -> None:
            room.engine.seed("step", room.state.step, 0, room.mesh.data_rank)
            room.engine.step(room.data.take(), "step")
            room.state.step += 1

        order = torch.Generator().manual_seed(1)
        data, at, index = task.data(""), 0, torch.empty(0, dtype=torch.int64)
        rank, half = dist.get_rank(), config.train.batch_size // RANKS

        def theirs() -> None:
            nonlocal at, index
            if at + RANKS * half > len(index):
                at, index = 0, torch.randperm(len(data[0]), generator=order)
            mine = index[at + rank * half : at + (rank + 1) * half]
            at += RANKS * half
            optimizer.zero_grad()
            task.loss(bare, [column[mine] for column in data]).backward()
            optimizer.step()

        def timed(work: Callable[[], None]) -> float:
            dist.barrier()
            began = time.perf_counter()
            work()
            return time.perf_counter() - began

        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for i in range(steps + 5):
            for name, work in (
                (("ours", ours), ("theirs", theirs)) if i % 2 else (("theirs", theirs), ("ours", ours))
            ):
                seconds = timed(work)
                if i >= 5:
                    times[name].append(seconds)
        stalls: dict[str, list[float]] = {"background": [], "foreground": []}
        saved = {name: Checkpoints(folder / name, background=name == "background") for name in stalls}
        for i in range(6):
            for name, checkpoints in saved.items():
                seconds = timed(lambda c=checkpoints, i=i: c.save(i, room.state))  # type: ignore[misc]
                checkpoints.wait()
                if i:
                    stalls[name].append(seconds)
        for checkpoints in saved.values():
            checkpoints.close()
        if rank == 0:
            middle = {name: statistics.median(each) for name, each in (times | stalls).items()}
            pairs = [a / b for a, b in zip(times["ours"], times["theirs"], strict=True)]
            print(json.dumps({**middle, "ratio": statistics.median(pairs)}), flush=True)


# --- the launcher


def launch(folder: Path, *arguments: str) -> tuple[str, float]:
    """What rank 0 printed, and when the launch began."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    began = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=500
    )
    if done.returncode and not done.stdout:
        raise SystemExit(done.stderr[-3000:])
    return done.stdout, began


def start_s(folder: Path, case: str, *, bare: bool) -> float:
    """Seconds from the launch to the first step done."""
    if bare:
        out, began = launch(folder, str(folder / "bare.py"), str(folder), CASES[case])
        return float(out.split("first step")[1].split()[0]) - began
    arguments = ["-m", "fedtrain", "datacenter", "--json", "--set", "parallel.log_every=1"]
    out, began = launch(folder, *arguments, "--set", f"run.name=start-{time.time_ns()}")
    return next(json.loads(line)["time"] for line in out.splitlines() if '"kind":"step"' in line) - began


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="one of them; all without it")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each")
    parser.add_argument("--starts", type=int, default=3, help="launches of each")
    parser.add_argument("--rank", metavar="FOLDER", type=Path, help="used by the benchmark itself")
    args = parser.parse_args()
    if args.rank is not None:
        ranks(args.rank, args.case[0], args.steps)
        return
    common.begin(args)
    for case in args.case or sorted(CASES):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "task.py").write_text(TASK)
            (folder / "bare.py").write_text(BARE_START)
            gpt = Path(__file__).parents[1] / "examples" / "shakespeare" / "gpt.py"
            (folder / "gpt.py").write_text(gpt.read_text())
            lines = [
                f"[{section}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items())
                for section, keys in config_of(folder, case).items()
            ]
            (folder / "fedtrain.toml").write_text("\n".join(lines))
            out, _ = launch(folder, __file__, "--rank", name, "--case", case, "--steps", str(args.steps))
            found = json.loads(out.splitlines()[-1])
            common.emit("datacenter", case, "step", found["ours"] * 1e3, "ms")
            common.emit("datacenter", case, "bare_step", found["theirs"] * 1e3, "ms")
            common.emit("datacenter", case, "step_ratio", found["ratio"], "×")
            common.emit("datacenter", case, "ckpt_sync", found["foreground"] * 1e3, "ms")
            stall = found["background"] / found["foreground"]
            common.emit("datacenter", case, "ckpt_async_over_sync", stall, "×")
            starts = [
                (start_s(folder, case, bare=False), start_s(folder, case, bare=True))
                for _ in range(args.starts)
            ]
            ours, bare = (statistics.median(each) for each in zip(*starts, strict=True))
            common.emit("datacenter", case, "start", ours, "s")
            common.emit("datacenter", case, "start_ratio", ours / bare, "×")


if __name__ == "__main__":
    main()
