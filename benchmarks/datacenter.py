"""A datacenter's step beside bare torch DDP, a checkpoint's stall, and the time to the first step.

Everything that is compared runs in one launch of two processes, by turns: a step of ours, a step of theirs.
The bare loop is what anyone writes: DistributedDataParallel, the same model, optimizer and batches.

    fused_step_ratio       median time of our step / of the bare one with the same fused optimizer (bar: 1.02)
    fused_cpu_ratio        the same in processor time, of all threads of rank 0: what others do on the machine
                           moves it less
    unfused_step_ratio     the same beside a bare loop that doesn't ask for the fused one (no bar)
    PEER_ratio             the same of accelerate, Lightning Fabric (`fabric`) and Ray Train (`ray`), where
                           they are installed; Ray starts ranks of its own, with a bare loop in them
    ckpt_async_over_sync   how long a save in the background holds up training / one in the foreground (0.15)
    start_ratio            from the launch to the first step done, ours / a bare script (1.15)
    readers_ratio          (case `input`) a step over a dataset that takes 20 ms an example, read by four
                           processes of each rank, / one over data that takes no time (1.05)
    no_readers_ratio       the same, read as each step asks
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    from fedtrain.runtime.datacenters.datacenter import Datacenter

RANKS, BATCH = 2, 16
WARM = 5  # turns that don't count
SAVES = 10  # of each kind
TURNS = 7  # of the case `input`, each with a block of steps of each kind
Setup = Callable[[Any, Any], tuple[Any, Any, Callable[[Any], None]]]  # (model, optimizer, backward)
CASES = {"mlp5m": "Mlp", "gpt10m": "Gpt", "input": "Slow"}
TASK = """
import time
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

class Slow(fedtrain.Task):  # its examples take so many seconds
    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def model(self):
        wide = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        return nn.Sequential(nn.Linear(256, 1024), *wide, nn.Linear(1024, 256))

    def data(self, site):
        return Examples(self.seconds)

    def loss(self, model, batch):
        again = [F.cross_entropy(model(batch[0]), batch[1]) for _ in range(2)]
        return torch.stack(again).mean()

class Examples(torch.utils.data.Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 4096

    def __getitem__(self, i):
        time.sleep(self.seconds)
        return torch.full((256,), i / 4096), i % 256

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


def config_of(folder: Path, case: str) -> dict[str, dict[str, object]]:
    return {
        "run": {"task": f"task:{CASES[case]}", "name": case, "rounds": 1, "seed": 1},
        "train": {"batch_size": BATCH, "optimizer": "adamw", "lr": 0.001, "local_steps": 1, "device": "cpu"},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 0},
        "parallel": {"timeout": "120s"},
    }


# --- in each rank


def ranks(folder: Path, case: str, steps: int) -> None:
    """Steps of ours and of bare DDP by turns; saves of both kinds. Rank 0 prints one JSON line."""
    import torch.distributed as dist

    from fedtrain.config import Config
    from fedtrain.events import silent
    from fedtrain.runtime.datacenters.datacenter import Datacenter
    from fedtrain.training.checkpoint import Checkpoints
    from fedtrain.training.mesh import Mesh, Sizes, joined
    from fedtrain.training.task import load_task

    config = Config.of(config_of(folder, case), folder)
    # A plain group, for peers may exchange pickles in it.
    with joined(lambda backend, _: dist.init_process_group(backend), "cpu") as device:
        task = load_task(config.run.task, folder)
        mesh = Mesh(Sizes.of(config.parallel, RANKS), device)
        room = Datacenter(config, task, mesh, None, silent)
        works = {"ours": steps_of(room), "bare": loop(task, bare), "fused": loop(task, bare, fused=True)}
        for peer, setup in PEERS.items():
            if find_spec({"fabric": "lightning_fabric"}.get(peer, peer)):
                works[peer] = loop(task, setup)
        cpu: dict[str, list[float]] = {name: [] for name in works}
        times = by_turns(works, steps, cpu)
        stalls: dict[str, list[float]] = {"background": [], "foreground": []}
        saved = {name: Checkpoints(folder / name, background=name == "background") for name in stalls}
        for i in range(SAVES + 1):
            for name, checkpoints in saved.items():
                dist.barrier()
                began = time.perf_counter()
                checkpoints.save(i, room.state)
                seconds = time.perf_counter() - began
                checkpoints.wait()
                if i:  # the first makes what later ones reuse
                    stalls[name].append(seconds)
        for checkpoints in saved.values():
            checkpoints.close()
        if dist.get_rank() == 0:
            middle = {name: statistics.median(each) for name, each in (times | stalls).items()}
            found = {"ratios": ratios(times, "bare"), "fused_ratios": ratios(times, "fused")}
            stall = ratios(stalls, "foreground")["background"]
            found["cpu_ratios"] = ratios(cpu, "fused")
            print(json.dumps(middle | found | {"stall": stall}), flush=True)


def steps_of(room: Datacenter) -> Callable[[], None]:
    """Our own step."""

    def step() -> None:
        room.engine.seed("step", room.state.step, 0, room.mesh.data_rank)
        room.engine.steps.take(room.data.take(), "step")
        room.state.step += 1

    return step


def input_ranks(folder: Path, steps: int) -> None:
    """Steps over slow examples, with readers and without, and over fast ones; in blocks, for who reads ahead
    would do so in the others' turns. Rank 0 prints one JSON line."""
    import torch.distributed as dist

    from fedtrain.config import Config
    from fedtrain.events import silent
    from fedtrain.runtime.datacenters.datacenter import Datacenter
    from fedtrain.training.mesh import Mesh, Sizes, joined
    from fedtrain.training.task import load_task

    def step_of(spec: str, readers: int) -> Callable[[], None]:
        table = config_of(folder, "input")
        table["train"]["batch_size"] = 8
        table["run"]["task"], table["parallel"]["readers"] = spec, readers
        config = Config.of(table, folder)
        task, mesh = load_task(spec, folder), Mesh(Sizes.of(config.parallel, RANKS), device)
        room = Datacenter(config, task, mesh, None, silent)

        def take() -> None:
            room.engine.steps.take(room.data.take(), "step")

        return take

    with joined(lambda backend, _: dist.init_process_group(backend), "cpu") as device:
        slow = "task:Slow(0.02)"
        kinds = {"fast": ("task:Slow", 0), "readers": (slow, 4), "no_readers": (slow, 0)}
        works = {name: step_of(*kind) for name, kind in kinds.items()}
        turns: list[dict[str, float]] = []
        for _ in range(TURNS):
            blocks = {name: by_turns({name: work}, steps)[name] for name, work in works.items()}
            turns.append({name: statistics.median(times) for name, times in blocks.items()})
        del turns[0]  # the first starts the readers
        if dist.get_rank() == 0:
            found = {f"{name}_ratio": statistics.median(t[name] / t["fast"] for t in turns) for name in works}
            print(json.dumps(found | {"step": statistics.median(t["fast"] for t in turns)}), flush=True)


def ray_ranks(folder: Path, case: str, steps: int) -> None:
    """The same in ranks that Ray Train starts: its step and a bare one by turns."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

    def work() -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        sys.path[:0] = [str(folder), str(Path(__file__).parent)]
        import task as tasks

        task = getattr(tasks, CASES[case])()
        loops = {"bare": loop(task, bare), "ray": loop(task, lambda m, o: (prepare_model(m), o, backward))}
        found = ratios(by_turns(loops, steps), "bare")
        if dist.get_rank() == 0:
            (folder / "ray.json").write_text(json.dumps(found))

    ranks = ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 0.5})
    TorchTrainer(work, scaling_config=ranks, torch_config=TorchConfig(backend="gloo")).fit()


def by_turns(
    works: dict[str, Callable[[], None]], steps: int, cpu: dict[str, list[float]] | None = None
) -> dict[str, list[float]]:
    """Seconds of each call; who comes after whom changes with every turn, alike on all ranks. `cpu`: where
    the processor's seconds are put."""
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in works}
    for i in range(steps + WARM):
        for name, work in random.Random(i).sample([*works.items()], len(works)):
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            work()
            if i >= WARM:
                times[name].append(time.perf_counter() - began)
            if i >= WARM and cpu is not None:
                cpu[name].append(time.process_time() - worked)
    return times


def ratios(times: dict[str, list[float]], to: str) -> dict[str, float]:
    """Of each to that one: the median over the turns, in each of which both ran."""
    return {
        name: statistics.median(a / b for a, b in zip(each, times[to], strict=True))
        for name, each in times.items()
        if name != to
    }


def loop(task: Any, setup: Setup, *, fused: bool | None = None) -> Callable[[], None]:
    """One step of the loop that anyone writes, of a model and an optimizer as a peer sets them up."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(1)
    plain = task.model()
    optimizer = torch.optim.AdamW(plain.parameters(), 0.001, weight_decay=0.0, fused=fused)
    model, optimizer, backward = setup(plain, optimizer)
    order = torch.Generator().manual_seed(1)
    data, at, index = task.data(""), 0, torch.empty(0, dtype=torch.int64)
    rank, half = dist.get_rank(), BATCH // RANKS

    def step() -> None:
        nonlocal at, index
        if at + BATCH > len(index):
            at, index = 0, torch.randperm(len(data[0]), generator=order)
        mine = index[at + rank * half : at + (rank + 1) * half]
        at += BATCH
        optimizer.zero_grad()
        backward(task.loss(model, [column[mine] for column in data]))
        optimizer.step()

    return step


def backward(loss: Any) -> None:
    loss.backward()


def bare(model: Any, optimizer: Any) -> tuple[Any, Any, Callable[[Any], None]]:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer, backward


def accelerate(model: Any, optimizer: Any) -> tuple[Any, Any, Callable[[Any], None]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, accelerator.backward


def fabric(model: Any, optimizer: Any) -> tuple[Any, Any, Callable[[Any], None]]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    return *fabric.setup(model, optimizer), fabric.backward


PEERS: dict[str, Setup] = {"accelerate": accelerate, "fabric": fabric}


# --- the launcher


def launch(folder: Path, *arguments: str) -> tuple[str, float]:
    """What rank 0 printed, and when the launch began."""
    began = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=environment(), capture_output=True, text=True, timeout=500
    )
    if done.returncode and not done.stdout:
        raise SystemExit(done.stderr[-3000:])
    return done.stdout, began


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}


def in_ray(folder: Path, case: str, steps: int) -> dict[str, float]:
    """{"ray": its ratio}; empty where Ray Train is not installed."""
    if not (find_spec("ray") and find_spec("pyarrow")):
        return {}
    command = [sys.executable, __file__, "--ray", str(folder), "--case", case, "--steps", str(steps)]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=500)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, float] = json.loads((folder / "ray.json").read_text())
    return found


def start_s(folder: Path, case: str, *, bare: bool) -> float:
    """Seconds from the launch to the first step done."""
    if bare:
        out, began = launch(folder, str(folder / "bare.py"), str(folder), CASES[case])
        return float(out.split("first step")[1].split()[0]) - began
    arguments = ["-m", "fedtrain", "datacenter", "--json", "--set", "parallel.log_every=1"]
    out, began = launch(folder, *arguments, "--set", f"run.name=start-{time.time_ns()}")
    steps = (json.loads(line) for line in out.splitlines() if '"kind":"step"' in line)
    return float(next(steps)["time"]) - began


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="one of them; all without it")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each")
    parser.add_argument("--starts", type=int, default=3, help="launches of each")
    parser.add_argument("--rank", metavar="FOLDER", type=Path, help="used by the benchmark itself")
    parser.add_argument("--ray", metavar="FOLDER", type=Path, help="used by the benchmark itself")
    args = parser.parse_args()
    if args.rank is not None and args.case[0] == "input":
        input_ranks(args.rank, args.steps)
        return
    if args.rank is not None:
        ranks(args.rank, args.case[0], args.steps)
        return
    if args.ray is not None:
        ray_ranks(args.ray, args.case[0], args.steps)
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
            if case == "input":
                common.emit("datacenter", case, "step", found["step"] * 1e3, "ms")
                for kind in ("readers_ratio", "no_readers_ratio"):
                    common.emit("datacenter", case, kind, found[kind], "×")
                continue
            common.emit("datacenter", case, "step", found["ours"] * 1e3, "ms")
            common.emit("datacenter", case, "bare_step", found["bare"] * 1e3, "ms")
            common.emit("datacenter", case, "fused_step_ratio", found["fused_ratios"]["ours"], "×")
            common.emit("datacenter", case, "fused_cpu_ratio", found["cpu_ratios"]["ours"], "×")
            common.emit("datacenter", case, "unfused_step_ratio", found["ratios"].pop("ours"), "×")
            del found["ratios"]["fused"]
            for peer, ratio in (found["ratios"] | in_ray(folder, case, args.steps)).items():
                common.emit("datacenter", case, f"{peer}_ratio", ratio, "×")
            common.emit("datacenter", case, "ckpt_sync", found["foreground"] * 1e3, "ms")
            common.emit("datacenter", case, "ckpt_async", found["background"] * 1e3, "ms")
            common.emit("datacenter", case, "ckpt_async_over_sync", found["stall"], "×")
            if not args.starts:
                continue
            starts: dict[str, list[float]] = {"ours": [], "bare": []}
            for _ in range(args.starts):
                for whose, times in starts.items():
                    times.append(start_s(folder, case, bare=whose == "bare"))
            common.emit("datacenter", case, "start", statistics.median(starts["ours"]), "s")
            common.emit("datacenter", case, "start_ratio", ratios(starts, "bare")["ours"], "×")


if __name__ == "__main__":
    main()
