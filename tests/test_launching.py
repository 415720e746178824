"""What starts a datacenter's ranks: manifests and scripts of deployment/, held by their own validators."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from fedtrain.cli import cli
from fedtrain.runtime.meeting import VARIABLE
from fedtrain.training.elastic import LEFT

DEPLOYMENT = Path(__file__).parents[1] / "deployment"
SBATCH = DEPLOYMENT / "slurm" / "fedtrain.sbatch"
POLICY, RUNTIME, JOB = yaml.safe_load_all((DEPLOYMENT / "kubeflow" / "trainjob.yaml").read_text())
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


def test_only_the_jobs_own_pods_reach_its_ranks_and_their_secret_is_not_in_the_manifest():
    pods = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": JOB["metadata"]["name"]}}
    assert POLICY["spec"]["podSelector"] == pods
    assert POLICY["spec"]["ingress"] == [{"from": [{"podSelector": pods}]}]
    assert POLICY["spec"]["policyTypes"] == ["Ingress"]
    (secret,) = [e for e in JOB["spec"]["trainer"]["env"] if e["name"] == VARIABLE]
    assert secret["valueFrom"]["secretKeyRef"] == {"name": "fedtrain-ranks", "key": "secret"}


# --- SLURM


def test_the_sbatch_script_draws_a_secret_and_a_port_that_nobody_can_foretell():
    lines = [line for line in SBATCH.read_text().splitlines() if "/dev/urandom" in line]
    shown = "\n".join([*lines, f'echo "${VARIABLE} $MASTER_PORT"'])
    env = {"PATH": os.environ["PATH"]}
    said = [subprocess.check_output(["bash", "-uc", shown], text=True, env=env).split() for _ in range(2)]
    (one, _), (other, _) = said
    assert len(one) == 64
    assert one != other
    assert all(20_000 <= int(port) < 40_000 for _, port in said)


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
