"""deployment/slurm on a real SLURM of two virtual nodes: ranks that die, a job that is told to leave."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import slurm
from tests.torchrun import kill
from tests.waves import STEPS, Waves, undisturbed

SCRIPT = Path(__file__).parents[1] / "deployment" / "slurm" / "fedtrain.sbatch"
pytestmark = [
    pytest.mark.slow(70),
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "all there"),
]


def wait_for(condition, job, cluster, project):
    until = time.monotonic() + 200
    while not (found := condition()):
        logs = "\n".join(p.read_text()[-3000:] for p in project.folder.glob("slurm-*.out"))
        assert time.monotonic() < until, f"{cluster.job(job)}\n{logs}"
        time.sleep(0.05)
    return found


def rank(number, job):
    """The process of a rank of a job."""
    for process in psutil.process_iter():
        try:
            env = process.environ()
        except psutil.Error:
            continue
        if env.get("SLURM_JOB_ID") == job and env.get("RANK") == str(number):
            return process
    return None


def test_a_dead_rank_and_a_requeued_job_end_with_the_model_of_an_undisturbed_run(tmp_path):
    project = Waves(tmp_path / "p", pace=0.1)
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm.Slurm(folder) as cluster:
        env = {"PYTHON": sys.executable, "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": os.getcwd()}
        job = cluster.run(
            "sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--time=30",
            str(SCRIPT), "--json", cwd=project.folder, **env,
        ).strip()  # fmt: skip

        def until(condition):
            return wait_for(condition, job, cluster, project)

        until(lambda: project.step() >= 5)
        kill(rank(1, job))
        until(lambda: len(project.events("run_started")) == 2)
        project.set_pace(1)
        until(lambda: project.events("step")[-1]["time"] > project.events("run_started")[-1]["time"])
        cluster.run("scancel", "--batch", "--signal=TERM", job)  # what SLURM does before the time limit
        until(lambda: cluster.job(job)["Restarts"] == "1")
        assert "Told to leave (SIGTERM)" in project.notices()[-1]
        reached = project.step()
        project.set_pace(0.05)
        until(lambda: cluster.job(job)["JobState"] == "PENDING" and cluster.idle())
        # Else it waits two minutes. Sooner than some seconds a node may still hold the job for killed.
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+10")
        until(lambda: cluster.job(job)["JobState"] in ("COMPLETED", "FAILED"))
        assert cluster.job(job)["JobState"] == "COMPLETED", cluster.log()
        steps = [e["step"] for e in project.events("step")]
        assert steps[-(STEPS - reached) :] == list(range(reached + 1, STEPS + 1)), "none was lost by leaving"
    assert project.model().digest == undisturbed(tmp_path / "whole").model().digest
