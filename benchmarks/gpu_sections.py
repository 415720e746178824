"""The sections of benchmarks/gpu.py, each prints its figures as it measures them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fedtrain
from fedtrain.config import Config
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel.engine import MeshEngine
from fedtrain.training.parallel.flops import peak_flops

ROOT = Path(__file__).parents[1]
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
TURNS = 8  # of each of what is compared
Work = Callable[[], None]


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def clock() -> float:
    """Seconds. Of the wall on a GPU; of this process' CPU time on a CPU, which may be shared."""
    synchronize()
    return time.perf_counter() if GPU else time.process_time()


# --- versions


def versions(small: bool) -> None:
    """The machine, and how fast it multiplies large matrices."""
    about: dict[str, object] = {
        **common.machine_line(), "device": torch.cuda.get_device_name() if GPU else "cpu",
        "cuda": torch.version.cuda, "small": small,
    }  # fmt: skip
    if GPU:
        properties = torch.cuda.get_device_properties(0)
        about |= {
            "gpu_gib": round(properties.total_memory / 2**30, 1), "driver": driver(),
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]  # torch's
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        }  # fmt: skip
    common.say({"machine": about})
    size = 512 if small else 8192
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a = torch.randn(size, size, device=DEVICE).to(dtype)
        seconds = []
        for _ in range(4):
            began = clock()
            a @ a
            seconds.append(clock() - began)
        rate = 2 * size**3 / max(1e-9, min(seconds))
        common.emit("gpu", f"matmul-{name}", "tflops", rate / 1e12, "TFLOP/s")


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as e:
        return f"unknown ({type(e).__name__})"


# --- gpt


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 50304
    length: int = 1024
    width: int = 768
    heads: int = 12
    layers: int = 12


SMALL = Shape(vocabulary=256, length=32, width=64, heads=2, layers=2)


class Words(fedtrain.Task):
    """Next-token prediction over random tokens by the GPT of examples/shakespeare."""

    def __init__(self, shape: Shape, batch: int, *, planned: bool) -> None:
        self.shape, self.batch, self.planned = shape, batch, planned

    @cached_property
    def gpt(self) -> Any:
        spec = spec_from_file_location("gpt", ROOT / "examples" / "shakespeare" / "gpt.py")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def model(self) -> nn.Module:
        model: nn.Module = self.gpt.GPT(**vars(self.shape))
        return model

    def data(self, site: str) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1)
        text = torch.randint(self.shape.vocabulary, (self.batch, self.shape.length + 1), generator=draw)
        return text[:, :-1], text[:, 1:]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def parallel_plan(self) -> Any:
        return self.gpt.plan() if self.planned else None


def ours(shape: Shape, batch: int, *, compile: bool = False, planned: bool = True) -> Work:
    """Our training step of the GPT, on one batch over and over."""
    task = Words(shape, batch, planned=planned)
    train = {"precision": "bf16", "optimizer": "adamw", "lr": 1e-4, "tf32": True, "device": DEVICE.type}
    config = Config.of({"train": train, "parallel": {"compile": compile}}, ROOT)
    engine = MeshEngine(task, config, Mesh(Sizes(), DEVICE))
    there = tuple(column.to(DEVICE) for column in task.data(""))

    def step() -> None:
        engine.steps.take([(there, batch)])

    return step


def bare(shape: Shape, batch: int, *, compile: bool = False) -> Work:
    """The same in plain torch, with nothing but the same optimizer."""
    task = Words(shape, batch, planned=False)
    model = task.model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True, weight_decay=0.0)
    there = tuple(column.to(DEVICE) for column in task.data(""))
    called: Any = torch.compile(model) if compile else model

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = task.loss(called, there)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()

    return step


def gpt(small: bool) -> None:
    """Eager at two batch sizes, then compiled."""
    shape = SMALL if small else Shape()
    for batch in (4, 2) if small else (16, 8):
        works = {"bare": bare(shape, batch), "ours": ours(shape, batch)}
        name = f"gpt-batch-{batch}"
        report_steps(name, works, shape, batch)
        for who, work in works.items():
            common.emit("gpu", name, f"{who}_launches", launches(work), "operations a step")
        works.clear()
        release()
    batch, compiled = (4 if small else 16), {}
    for who, start in (
        ("ours", partial(ours, compile=True)),
        ("bare", partial(bare, compile=True)),
        ("whole", partial(ours, compile=True, planned=False)),
    ):
        began = clock()
        compiled[who] = start(shape, batch)
        compiled[who]()
        common.emit("gpu", "gpt-compiled", f"{who}_first_step_s", clock() - began, "s")
        if len(compiled) > 1:
            report_steps("gpt-compiled", compiled, shape, batch)


def report_steps(case: str, works: dict[str, Work], shape: Shape, batch: int) -> None:
    """Tokens a second of each, and of ours beside bare torch."""
    parameters = 12 * shape.layers * shape.width**2 + 2 * shape.vocabulary * shape.width
    times = by_turns(works, 2 if shape is SMALL else 5)
    peak = peak_flops(DEVICE)
    for who, seconds in times.items():
        rate = batch * shape.length / max(1e-9, statistics.median(seconds))
        common.emit("gpu", case, f"{who}_tokens_per_s", rate, "tokens/s")
        if peak:
            common.emit("gpu", case, f"{who}_mfu", 6 * parameters * rate / peak, "")
        if who != "bare":
            pairs = zip(seconds, times["bare"], strict=True)
            ratio = statistics.median(a / max(1e-9, b) for a, b in pairs)
            common.emit("gpu", case, f"{who}_over_bare", ratio, "×")


def by_turns(works: dict[str, Work], steps: int) -> dict[str, list[float]]:
    """Seconds of a step of each, turn by turn; who begins changes with every turn."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(TURNS + 1):
        names = [*works]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = clock()
            for _ in range(steps):
                works[name]()
            if turn:  # the first one warms up
                times[name].append((clock() - began) / steps)
    return times


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(function)] += 1
        return function(*args, **(kwargs or {}))


def launches(work: Work) -> int:
    """Kernels that a step starts on a GPU; on a CPU, torch's operations, views too."""
    work()
    if not GPU:
        with Calls() as calls:
            work()
        return sum(calls.names.values())
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        work()
        synchronize()
    events: Any = profiled.key_averages()
    return sum(int(each.count) for each in events if "LaunchKernel" in each.key)


def release() -> None:
    import gc

    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


# --- simulation


def simulation(small: bool) -> None:
    """A plain loop, pfl, ours as users run it and ours stacked: each alone, one after the other."""
    from simulation_cases import GPU_CASES

    for case in GPU_CASES:
        if small:
            few = max(4, case.sites // 50)
            case = replace(case, sites=few, drawn=min(4, few) if case.drawn else None)
        with tempfile.TemporaryDirectory() as folder:
            simulate_case(case, Path(folder), turn_s=0.0 if small else 1.0, turns=1 if small else 2)


def simulate_case(case: Any, folder: Path, *, turn_s: float, turns: int) -> None:
    from peers.participants import Absent, Participant
    from simulation_cases import work_of

    work = work_of(case, folder)
    given = [str(work.path), DEVICE.type]
    pfl = "apple_pfl" if find_spec("pfl") else "pfl_loop"
    starts: dict[str, list[str]] = {
        "plain": ["-m", "peers.plain_torch", "plain", *given], pfl: ["-m", f"peers.{pfl}", pfl, *given],
    }  # fmt: skip
    for engine in ("auto", "stacked"):
        settings = replace(case, engine=engine).settings(folder, "auto" if GPU else 1)
        settings["run"]["dir"] += f"-{engine}"
        settings["train"]["device"] = DEVICE.type
        about = [engine, str(work.path), json.dumps(settings)]
        starts[engine] = ["-m", "simulation_by_turns", *about]
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for name, command in starts.items():
            try:
                participant = stack.enter_context(closing(Participant([sys.executable, *command])))
                common.emit("gpu", case.name, f"{name}_first_round_s", participant.first_round(), "s")
                participant.turn(turn_s / 2)  # to get warm
                rates[name] = [participant.turn(turn_s) for _ in range(turns)]
            except Absent as why:
                common.say({"case": case.name, "absent": name, "reason": str(why)[:500]})
                continue
            updates = statistics.median(rates[name]) * work.sizes.shape[1]
            common.emit("gpu", case.name, f"{name}_updates_per_s", updates, "updates/s")
            for other in ("plain", pfl):
                if name not in ("plain", pfl) and other in rates:
                    ratio = statistics.median(rates[name]) / statistics.median(rates[other])
                    common.emit("gpu", case.name, f"{name}_over_{other}", ratio, "×")
    if not {"auto", "plain"} <= rates.keys():
        raise SystemExit(f"{case.name}: ours or the plain loop did not run, see the line `absent`")


# --- checkpoint


def checkpoint(small: bool) -> None:
    """A save in the background and one in the foreground by turns, of model and optimizer."""
    from fedtrain.events import silent
    from fedtrain.runtime.datacenters.datacenter import Datacenter
    from fedtrain.training.checkpoint import Checkpoints

    task = Words(SMALL if small else Shape(), 2, planned=True)
    train = {"precision": "bf16", "optimizer": "adamw", "device": DEVICE.type, "batch_size": 2}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        config = Config.of({"train": train, "evaluate": {"every": 0}}, Path(folder))
        room = Datacenter(config, task, Mesh(Sizes(), DEVICE), None, silent)
        saved = {
            kind: stack.enter_context(
                closing(Checkpoints(Path(folder) / kind, background=kind == "background", keep=1))
            )
            for kind in ("background", "foreground")
        }
        stalls: dict[str, list[float]] = {kind: [] for kind in saved}
        for i in range(1, 4):
            for kind, checkpoints in saved.items():
                room.engine.steps.take(room.data.take())
                synchronize()
                began = time.perf_counter()
                checkpoints.save(i, room.state)
                stalls[kind].append(time.perf_counter() - began)
                checkpoints.wait()
                common.emit("gpu", "checkpoint", f"{kind}_save_{i}", stalls[kind][-1] * 1e3, "ms")
        sooner = statistics.median(stalls["background"][1:]) / statistics.median(stalls["foreground"][1:])
        common.emit("gpu", "checkpoint", "background_over_foreground", sooner, "×")


# --- tests


def tests(small: bool) -> None:
    """tests/gpu: several at a time where memory allows, then those that measure time by themselves."""
    kind = "gpu and not gpu2" if GPU else "not gpu and not gpu2 and not slow"
    free = torch.cuda.mem_get_info()[0] if GPU else 8 << 30
    side_by_side = max(1, min(len(os.sched_getaffinity(0)) // 2, free // (16 << 30)))
    files = [str(path) for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))]
    if small:
        files = [f"{ROOT}/tests/gpu/test_steps.py", f"{ROOT}/tests/gpu/test_checkpoints.py"]
    codes = [
        run_tests([*files, "-m", f"({kind}) and not timed", *(["-n", str(side_by_side)] if GPU else [])]),
        run_tests([*files, "-m", f"({kind}) and timed"]),
    ]
    if any(code not in (0, 5) for code in codes):  # 5: no test was left
        raise SystemExit("tests failed, see their lines")


def run_tests(arguments: list[str]) -> int:
    """pytest's exit status. Its plugin (gpu_tests.py) writes a line for each test to our standard output."""
    command = [sys.executable, "-m", "pytest", "-p", "gpu_tests", "-p", "no:cacheprovider", *arguments]
    command += ["-o", f"timeout={20 if GPU else 300}"]
    lines = os.dup(1)
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "GPU_TESTS_FD": str(lines)}, pass_fds=[lines],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    os.close(lines)
    if done.returncode not in (0, 5):
        common.say({"pytest": done.returncode, "said": done.stdout[-1500:]})
    return done.returncode


SECTIONS: dict[str, Callable[[bool], None]] = {
    "versions": versions, "gpt": gpt, "simulation": simulation, "checkpoint": checkpoint, "tests": tests,
}  # fmt: skip
