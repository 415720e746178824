"""deployment/ray: the same ranks, in places that Ray finds."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from fedtrain.config import Config
from fedtrain.events import silent
from fedtrain.runtime.datacenters import datacenter
from tests.torchrun import kill
from tests.waves import Waves

LAUNCH = Path(__file__).parents[1] / "deployment" / "ray" / "launch.py"
pytestmark = [pytest.mark.slow(60), pytest.mark.timeout(400)]


def rank(number, folder):
    """The process of a rank whose run is in `folder`."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == str(number) and process.cwd() == str(folder):
                return process
    return None


def test_ranks_in_rays_places_survive_a_dead_one_and_train_the_same_model(tmp_path):
    pytest.importorskip("ray", reason="pip install fedtrain[ray]")
    alone = Waves(tmp_path / "alone", pace=0.0, dropout=False)
    with contextlib.chdir(alone.folder):
        datacenter.run(Config.load("fedtrain.toml"), emit=silent)
    project = Waves(tmp_path / "p", pace=0.1, dropout=False)
    env = os.environ | {"PYTHONPATH": os.getcwd(), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    with (tmp_path / "log").open("wb") as log:
        launcher = subprocess.Popen(
            [sys.executable, LAUNCH, "--ranks", "2", "--restarts", "2", "--", "--json"],
            cwd=project.folder, env=env, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        until = time.monotonic() + 200
        while project.step() < 5:
            assert time.monotonic() < until, (tmp_path / "log").read_text()
            assert launcher.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        kill(rank(1, project.folder))
        assert launcher.wait(200) == 0, (tmp_path / "log").read_text()
    finally:
        launcher.terminate()
        launcher.wait(60)
    assert len(project.events("run_started")) == 2
    for name, tensor in project.model().views().items():
        torch.testing.assert_close(tensor, alone.model().views()[name], rtol=1e-9, atol=1e-9)
