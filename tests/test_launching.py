"""What starts a datacenter's ranks: manifests and scripts of deployment/, held by their own validators."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from fedtrain.cli import cli
from fedtrain.training.elastic import LEFT

DEPLOYMENT = Path(__file__).parents[1] / "deployment"
SBATCH = DEPLOYMENT / "slurm" / "fedtrain.sbatch"
RUNTIME, JOB = yaml.safe_load_all((DEPLOYMENT / "kubeflow" / "trainjob.yaml").read_text())
OPTIONS = {option for parameter in cli.commands["datacenter"].params for option in parameter.opts}


# --- Kubernetes


def test_kubeflow_accepts_the_job_and_its_runtime():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    for manifest, kind in (
        (JOB, models.TrainerV1alpha1TrainJob),
        (RUNTIME, models.TrainerV1alpha1ClusterTrainingRuntime),
    ):
        read = kind.from_dict(manifest)
        assert drop_empty(read.to_dict()) == drop_empty(manifest), "every key is one that the API knows"


def drop_empty(value):
    if isinstance(value, dict):
        return {k: drop_empty(v) for k, v in value.items() if v not in (None, {}, [])}
    return [drop_empty(v) for v in value] if isinstance(value, list) else value


def test_kubernetes_accepts_the_pods():
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    (job,) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
    manifest = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, **job["template"]}
    manifest["metadata"] |= job["template"]["metadata"]
    validate.validate(manifest, validate.latest_version(), strict=True)


def test_the_job_starts_our_command_with_options_that_it_has():
    words = JOB["spec"]["trainer"]["args"]
    at = words.index("datacenter")
    assert JOB["spec"]["trainer"]["command"] == ["torchrun"]
    assert words[at - 2 : at] == ["-m", "fedtrain"]
    assert {word.partition("=")[0] for word in words[at + 1 :]} <= OPTIONS


def test_the_job_refers_to_the_runtime_beside_it():
    ref = JOB["spec"]["runtimeRef"]
    assert (ref["kind"], ref["name"]) == (RUNTIME["kind"], RUNTIME["metadata"]["name"])
    label = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["metadata"]["labels"]
    assert label == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def test_ranks_have_their_grace_time_before_kubernetes_kills():
    pod = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    env = {e["name"]: e.get("value") for e in JOB["spec"]["trainer"]["env"]}
    assert 30 < int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_no_secret_stands_in_the_manifest():
    env = JOB["spec"]["trainer"]["env"]
    assert all("value" not in e for e in env if "KEY" in e["name"] or "SECRET" in e["name"])


# --- SLURM


def test_bash_accepts_the_sbatch_script():
    subprocess.run(["bash", "-n", SBATCH], check=True)


def test_the_sbatch_script_knows_the_exit_code_of_those_that_left():
    assert f"LEFT={LEFT} " in SBATCH.read_text()


def test_the_sbatch_script_is_told_in_time_and_requeued():
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SBATCH.read_text(), re.M))
    assert options["signal"].startswith("B:TERM@")
    assert int(options["signal"].partition("@")[2]) >= 60
    assert "requeue" in options
    assert options["open-mode"] == "append"


def test_the_sbatch_script_starts_our_command():
    words = shlex.split(re.search(r"exec (.+?)'", SBATCH.read_text())[1])
    assert words == ["$0", "-m", "fedtrain", "datacenter", "$@"]
