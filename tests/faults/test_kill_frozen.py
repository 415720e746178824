"""kill -9 of an aggregator and a site whose frozen parameters are another model's: they are fetched once."""

import asyncio
import signal

import pytest
import torch
from safetensors.torch import save_file

from fedtrain.config import Config
from fedtrain.store import RunStore
from fedtrain.training.building import build_model
from fedtrain.training.task import load_task
from tests.inline import simulation
from tests.processes import Project


@pytest.mark.slow(15)
def test_frozen_parameters_that_were_fetched_outlive_kill_9_at_both_ends(tmp_path, inline):
    with Project(tmp_path, rounds=3, task="Held") as p:
        p.let_train(2)
        text = (tmp_path / "task.py").read_text()
        frozen = text.replace("nn.Linear(6, 16)", "nn.Linear(6, 16).requires_grad_(False)")
        frozen = frozen.replace('["a", "b", "c"]', '["a"]')
        for file in ("pace", "rounds"):
            frozen = frozen.replace(f'"{file}"', f'__file__).with_name("{file}"')
        (tmp_path / "task.py").write_text(frozen)
        toml = (tmp_path / "fedtrain.toml").read_text()
        (tmp_path / "fedtrain.toml").write_text(toml.replace("min_sites = 3", "min_sites = 1"))
        config = Config.load(tmp_path / "fedtrain.toml")
        model = build_model(load_task(config.run.task, tmp_path), config.run.seed, torch.device("cpu"))
        base = model.state_dict()
        base["0.weight"] += 0.25
        save_file(base, tmp_path / "base.safetensors")

        aggregator, a = p.start("aggregator", "--from", "base.safetensors"), p.start("site", "a")
        p.wait_for(lambda: p.count("round_committed"))
        store = RunStore(config.run_dir, read_only=True)
        kept = config.site_dir("a") / "inbox" / store.frozen.digest
        store.close()
        fetched = kept.stat()
        for process in (a, aggregator):
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        p.let_train(3)
        p.start("site", "a")
        aggregator = p.start("aggregator")
        assert aggregator.wait(120) == 0, p.log("aggregator")
        assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (fetched.st_ino, fetched.st_mtime_ns)
        asyncio.run(simulation(config, start=tmp_path / "base.safetensors"))
        assert p.final() == p.final("r+simulate")
