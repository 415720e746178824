"""Checkpoints of what lies on a GPU: the state of their step, memory taken once, leaving in a kernel."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from fedtrain.training.checkpoint import Checkpoints
from fedtrain.training.elastic import LEFT, STUCK_S, Leave
from tests.gpu.on import EACH, GPUS_ONLY, slowly
from tests.test_checkpoint import Run
from tests.worlds import Command


class Placed(Run):
    """Its model and optimizer are on a device."""

    def __init__(self, device, width=16):
        super().__init__(width)
        self.device = device
        self.model.to(device)

    def steps(self, count):
        for _ in range(count):
            x = torch.randn(12, 8, generator=torch.Generator().manual_seed(self.taken))
            self.optimizer.zero_grad()
            self.model(x.to(self.device)).square().mean().backward()
            self.optimizer.step()
            self.taken += 12
        return self


@EACH
def test_async_checkpoint_snapshot_is_of_its_step(device, tmp_path):
    saved, run = Checkpoints(tmp_path, background=True), Placed(device)
    for step in (1, 2):
        kept = {name: t.cpu().clone() for name, t in run.steps(1).model.state_dict().items()}
        saved.save(step, run)
        with torch.no_grad():
            for p in run.model.parameters():
                p.fill_(float("nan"))
        saved.wait()
        again = Placed("cpu")
        assert Checkpoints(tmp_path).load(again) == step
        assert all(torch.equal(t, kept[name]) for name, t in again.model.state_dict().items())
        run.model.load_state_dict(kept)
    saved.close()


@GPUS_ONLY
@pytest.mark.timed
def test_async_checkpoint_stalls_little(device, tmp_path):
    """A save in the background holds training up for a fifth of what one in the foreground takes, or less."""
    took = {}
    for background in (False, True):
        run = Placed(device, width=1 << 20)
        saved = Checkpoints(tmp_path / str(background), background=background)
        for step in range(1, 4):
            run.steps(1)
            torch.cuda.synchronize()
            began = time.perf_counter()
            saved.save(step, run)
            took[background] = time.perf_counter() - began
            saved.wait()
        saved.close()
    print(f"stall {took[True]:.3f} s, whole save {took[False]:.3f} s")
    assert took[True] < 0.2 * took[False]


@EACH
def test_checkpoint_pinned_memory_once(device, tmp_path):
    saved, run = Checkpoints(tmp_path, background=True, keep=1), Placed(device, width=1 << 14)
    held = []
    for step in range(1, 9):
        saved.save(step, run.steps(1))
        saved.wait()
        held.append(psutil.Process().memory_info().rss)
    saved.close()
    size = sum(t.nbytes for t in run.model.state_dict().values())
    assert held[-1] - held[3] < 6 * size, "another copy a save would be twelve"


def stay_in_a_kernel(arguments: list[str]) -> None:
    """Write a file when the first step is done, and never end the second."""
    device, told = arguments
    with Leave() as leave:
        with leave.during("step"):
            torch.ones(1, device=device).add_(1)
        with leave.during("step"):
            Path(told).touch()
            if device == "cuda":
                torch.cuda._sleep(1 << 60)
                torch.cuda.synchronize()
            time.sleep(600)
    sys.exit(LEFT)


@slowly(6)
def test_sigterm_in_a_kernel(device, tmp_path):
    told = tmp_path / "told"
    process = Command(
        stay_in_a_kernel, [device, str(told)], folder=tmp_path, log=tmp_path / "log", env=dict(os.environ)
    )
    while not told.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(STUCK_S + 10) in (1, LEFT)
    assert "told to leave (SIGTERM), but its step" in (tmp_path / "log").read_text()
