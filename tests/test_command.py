"""A site that trains by a command of its own sends what a site sends, or fails by name."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.errors import ConfigError, TaskError
from fedtrain.events import silent
from fedtrain.modes import check
from fedtrain.runtime.simulations.gossip_simulation import simulate as gossip
from fedtrain.runtime.simulations.simulation import simulate
from fedtrain.runtime.trainers.workbench import Workbench
from tests.forked import fork_trainers
from tests.inline import SITES, project
from tests.inprocess import Events, federation, simulated
from tests.limits import WAIT_S

SCRIPT = """
import json, sys
import numpy as np
from safetensors.numpy import load_file, save_file

request = json.load(open(sys.argv[1]))
weights, frozen = load_file(request["weights"]), load_file(request["frozen"])
assert sorted(frozen) == ["0.bias"] and request["train"]["lr"] == 0.5
x = np.load("x.npy")[request["examples"]]
errors = x @ weights["0.weight"].T + frozen["0.bias"] - 1
slope = 2 * (errors.T @ x) / len(x)
moved = -request["train"]["lr"] * slope
made = {"0.weight": (moved if DELTA else weights["0.weight"] + moved).astype(np.float32)}
save_file(made, request["out"])
report = {"examples": len(x), "metrics": {"loss": float((errors ** 2).mean())}, "delta": DELTA}
json.dump(report, open(request["report"], "w"))
"""
TASK = """
import fedtrain, torch
from torch import nn

class Line(fedtrain.Task):
    def model(self):
        line = nn.Linear(5, 1)
        line.bias.requires_grad_(False)
        return nn.Sequential(line)

    def data(self, site):
        return torch.randn(40, 5, generator=torch.Generator().manual_seed(2))

    def loss(self, model, batch):
        return (model(batch) - 1).square().mean()
"""
COPY = "cp {weights} {out} && echo '{\"examples\": 3}' > {report}"


def bench_of(folder: Path, command: str, **train: object) -> Workbench:
    (folder / "line.py").write_text(TASK)
    table = {"run": {"task": "line:Line", "seed": 4}, "simulate": {"sites": 4, "partition": "iid"},
             "train": {"lr": 0.5, "batch_size": 0, "device": "cpu", "command": command, **train}}  # fmt: skip
    return Workbench(Config.of(table, folder), simulated=True)


@pytest.mark.parametrize("delta", [False, True])
def test_a_command_that_takes_the_same_step_sends_the_same_update(tmp_path, delta):
    (tmp_path / "train.py").write_text(SCRIPT.replace("DELTA", str(delta)))
    ours, theirs = (bench_of(tmp_path, command) for command in ("", "python train.py {request}"))
    x = ours._task.data("")
    import numpy as np

    np.save(tmp_path / "x.npy", x.numpy())
    weights, outs = ours.initial(), [Arena.zeros(ours.description.update) for _ in range(2)]
    site = ours.description.sites[1]
    plain, update = (b.train(site, 0, weights, out) for b, out in zip((ours, theirs), outs, strict=True))
    assert update.num_examples == plain.num_examples == 10
    assert update.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-5)
    assert torch.allclose(outs[0].views()["0.weight"], outs[1].views()["0.weight"], atol=1e-6)
    assert outs[0].views()["0.weight"].abs().max() > 0.01
    assert theirs.examples(site) is None  # only its training can tell


BAD = {
    "exit 3": "ended with exit status 3",
    "kill -9 $$": "was ended by signal 9",
    "true": "wrote no {report}",
    "echo none > {report}": "{report} is not what it should be",
    'echo \'{"examples": 1, "epochs": 2}\' > {report}': "unknown field `epochs`",
    "echo '{\"examples\": 0}' > {report}": "says 0 examples",
    "echo '{\"examples\": 3}' > {report}": "wrote no {out}",
    "cp {request} {out}; echo '{\"examples\": 3}' > {report}": "can't be read as safetensors",
    "python other.py {out} {report} name": "lacks: 0.weight; unknown: name",
    "python other.py {out} {report} 0.weight": r"0.weight in {out} is float64 [1, 5], the model's float32",
}


@pytest.mark.parametrize("command", BAD)
def test_a_command_that_fails_or_writes_something_else_fails_its_site_by_name(tmp_path, command):
    (tmp_path / "other.py").write_text(
        "import json, sys\nimport numpy as np\nfrom safetensors.numpy import save_file\n"
        "save_file({sys.argv[3]: np.zeros((1, 5))}, sys.argv[1])\n"
        'json.dump({"examples": 3}, open(sys.argv[2], "w"))\n'
    )
    bench = bench_of(tmp_path, f": {{request}}; {command}")
    with pytest.raises(TaskError) as error:
        bench.train(bench.description.sites[0], 0, bench.initial(), Arena.zeros(bench.description.update))
    assert BAD[command] in str(error.value)


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    bench = bench_of(tmp_path, ": {out}; sleep 1000 & echo $! > pid; wait", command_timeout="1s")
    with pytest.raises(TaskError, match=r"longer than train.command_timeout = 1 s"):
        bench.train(bench.description.sites[0], 0, bench.initial(), Arena.zeros(bench.description.update))
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/status")
    until_s = time.monotonic() + WAIT_S
    while runs(status) and time.monotonic() < until_s:  # a signal takes a moment
        time.sleep(0.01)
    assert not runs(status)


def runs(status):
    try:
        return "State:\tZ" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"strategy": {"kind": "fedprox"}}, "fedprox corrects each step"),
        ({"strategy": {"kind": "scaffold"}}, "scaffold keeps a memory"),
        ({"privacy": {"noise_multiplier": 1.0, "unit": "example"}}, "adds noise to each step"),
        ({"parallel": {"ranks": 2}}, "takes steps on several ranks"),
        ({"simulate": {"engine": "stacked"}}, "trains many sites at once"),
        ({"train": {"command": "python train.py"}}, "has no {out}"),
    ],
)
def test_what_a_command_can_not_keep_is_refused(tmp_path, section, match):
    (tmp_path / "line.py").write_text(TASK)
    table = {"run": {"task": "line:Line"}, "train": {"command": COPY}, **section}
    with pytest.raises(ConfigError, match=match):
        Workbench(Config.of(table, tmp_path), simulated="parallel" not in section)


def test_a_datacenter_refuses_a_command(tmp_path):
    (tmp_path / "fedtrain.toml").write_text('[train]\ncommand = "x {out}"\n')
    with pytest.raises(ConfigError, match=r"train\.command"):
        check(Config.load(tmp_path / "fedtrain.toml", env={}), "datacenter")


SAID = 'cp {weights} {out} && echo \'{"examples": 3, "metrics": {"loss": 0.25}}\' > {report}'


def test_sites_train_by_a_command_in_a_simulation_and_in_a_masked_federation(tmp_path, monkeypatch):
    config = project(tmp_path, run={"rounds": 2}, train={"command": SAID}, evaluate={"every": 0})
    for events in (simulated(config, monkeypatch), federation(config, [*SITES])):
        assert [fields["loss"] for fields in events.of("round_committed")] == pytest.approx([0.25, 0.25])
        assert events.of("round_failed") == []


def test_peers_train_by_a_command(tmp_path):
    told = "test {round} -lt 9 && " + SAID.replace("} && echo", "} && echo {site} >> sites && echo")
    config = project(tmp_path, run={"rounds": 2}, train={"command": told}, gossip={"topology": "ring"})
    asyncio.run(gossip(config, emit=silent))
    assert sorted((tmp_path / "sites").read_text().split()) == ["a", "a", "b", "b", "c", "c"]


@pytest.mark.slow(3)
def test_a_round_whose_trainer_was_killed_within_a_command_is_trained_again(tmp_path, monkeypatch):
    fork_trainers(monkeypatch)
    command = "test -e once || { touch once; kill -9 $PPID; }; " + SAID
    config = project(tmp_path, run={"rounds": 1}, train={"command": command}, evaluate={"every": 0})
    events = Events()
    asyncio.run(simulate(config, emit=events, workers=1))
    assert (tmp_path / "once").exists()
    assert [fields["loss"] for fields in events.of("round_committed")] == [pytest.approx(0.25)]


@pytest.mark.slow(4)  # a process that loads torch
def test_the_examples_plain_script_trains_a_hospital():
    heart = Path(__file__).parents[1] / "examples" / "heart"
    config = Config.load(heart / "fedtrain.toml", env={})
    train = replace(config.train, command="python plain.py {request}", device="cpu")
    bench = Workbench(replace(config, train=train), simulated=True)
    update = bench.train("hungary", 0, bench.initial(), out := Arena.zeros(bench.description.update))
    assert update.num_examples == 174
    assert out.views()["weight"].norm() > 0.1
