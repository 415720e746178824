"""The examples' models, to the last bit as they were before the engines became one.

Floating point differs between kinds of processor, so that the digests stand under the kind on which they
were taken; on another kind the test says so and is skipped.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedtrain.tracking.export import export

from ..processes import fedtrain
from ..worlds import Command

EXAMPLES = Path(__file__).parents[2] / "examples"

RUNS = {
    "heart": ("heart", ["simulate", "--set", "run.rounds=5"]),
    "heart-open": ("heart", ["simulate", "--set", "run.rounds=5", "--set", "secagg.enabled=false"]),
    "digits": ("digits", ["simulate", "--set", "run.rounds=3"]),
    "digits-stacked": ("digits", ["simulate", "--set", "run.rounds=3", "--set", "simulate.engine=stacked"]),
    "gossip": ("heart", ["simulate", "--mode", "gossip", "--config", "gossip.toml", "--set", "run.rounds=5"]),
    "shakespeare": (
        "shakespeare",
        ["simulate", "--set", "run.rounds=1", "--set", "train.local_steps=3"],
    ),
    "shakespeare-datacenter": (
        "shakespeare",
        ["datacenter", "--set", "run.rounds=1", "--set", "train.local_steps=3"],
    ),
}

FROZEN: dict[str, dict[str, str]] = {
    "AVX512 AuthenticAMD 25, torch 2.13.0": {
        "heart": "86dd818cdd5af8a0ce91fafe6dfb40a30a821f83a267daab1d9a625eea91f0b3",
        "heart-open": "a9e12897295b9678024e2ee742f2e3a81fc214c5c752220dc769f96b7c61e90b",
        "digits": "37fc7360f2e19c258066f234e519e1a368a5a2cf2df1ee2b6a11f3f3d53cb3ea",
        "digits-stacked": "a0e933b52038a3f58da12b133bbc26ca4cdf02b1ce068de9a49f3f597cc853a4",
        "gossip": "cd046e4c2235931880df8391125307685ac11522907d123ace42aee6cbb25aa5",
        "shakespeare": "f83cc01f6383bffffa0dc17f7607996a941a64d95501313979cb2e7b3e4a22fb",
        "shakespeare-datacenter": "d660b204d3ba715b06c4618f12fa6226709b36548ee74f50adc2be33d66cef72",
    },
}


def kind_of_processor() -> str:
    """What decides which kernels torch takes: "AVX512 AuthenticAMD 25, torch 2.13.0"."""
    known = dict(
        line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    )
    about = {name.strip(): value.strip() for name, value in known.items()}
    torch_version = torch.__version__.split("+")[0]
    return (
        f"{torch.backends.cpu.get_cpu_capability()} {about.get('vendor_id')} {about.get('cpu family')}, "
        f"torch {torch_version}"
    )


def digest_of_model(exported: Path) -> str:
    """SHA-256 over the names and bytes of the exported tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(exported / "model.safetensors").items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def trained(tmp_path: Path, name: str) -> str:
    """The digest of the model that an example's command leaves."""
    example, arguments = RUNS[name]
    folder = tmp_path / example
    shutil.copytree(EXAMPLES / example, folder, ignore=shutil.ignore_patterns("runs", "certs"))
    log = tmp_path / "log"
    code = Command(fedtrain, arguments, folder=folder, log=log, env={}).wait(240)
    assert code == 0, log.read_text()[-2000:]
    (run,) = (path for path in (folder / "runs").iterdir() if path.name != "audit")
    return digest_of_model(export(run, tmp_path / "model"))


@pytest.mark.slow(5)
@pytest.mark.parametrize("name", RUNS)
def test_an_example_gives_the_model_that_it_gave_before(tmp_path: Path, name: str) -> None:
    frozen = FROZEN.get(kind_of_processor())
    if frozen is None:
        pytest.skip(f"no digests were taken on {kind_of_processor()}")
    assert trained(tmp_path, name) == frozen[name]
