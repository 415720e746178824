"""`fedtrain watch` shows runs of every mode, by the name that the settings give them."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from fedtrain import events as e
from fedtrain.cli import cli
from tests.logs import datacenter, federation, write


def peer():
    yield e.RunStarted(run="r", mode="peer", rounds=1, sites=2)
    yield e.RoundStarted(round=1, sites=["a", "b"], neighbors=["b"])
    yield e.SiteState(site="a", round=1, state="training")
    metrics = {"loss": 0.5, "disagreement": 0.25}
    yield e.RoundCommitted(round=1, loss=0.5, metrics=metrics, seconds=1.0, bytes_in=1500, bytes_out=1500)
    yield e.PeersAgreed(
        round=1, digest="ab" * 32, peers=["a", "b"], models=2, of=["a", "b"], bytes_in=2500, bytes_out=2500
    )  # fmt: skip
    yield e.RunFinished(round=1, reason="rounds done")


def site():
    yield e.RunStarted(run="r", mode="site", rounds=2)
    yield e.SiteJoined(site="aggregator")
    yield e.SiteState(site="north", round=1, state="training")
    yield e.PrivacySpent(site="north", round=1, releases=1, epsilon=0.75, delta=1e-5)
    yield e.RunFinished(reason="rounds done")


def aggregator():
    yield from federation(last=2, planned=2)
    yield e.RunFinished(round=2, reason="rounds done")


SHOWN = {
    "r": (aggregator, ["round 2/2: done: 3 sites", "evaluated: accuracy 0.5000", "epsilon 1 at delta 1e-05"]),
    "r+simulate": (aggregator, ["round 2/2: done"]),
    "r+gossip": (
        peer,
        ["hears b", "disagreement 0.2500", "in 1.5 kB", "one model of 2 peers (a, b), at a, b", "in 2.5 kB"],
    ),
    "r+datacenter": (datacenter, ["ranks 4", "step 20", "10,000 items/s", "MFU 41.0%", "comm 20%", "1.0 GB"]),
    "r@north": (site, ["connected to the aggregator", "round 1/2: training", "epsilon 0.75"]),
}


@pytest.mark.parametrize("folder", SHOWN)
def test_a_run_of_each_mode_is_found_by_its_name_and_shown(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fedtrain.toml").write_text('[run]\ntask = "task:T"\n')
    events, words = SHOWN[folder]
    write(tmp_path / "runs" / folder, events())
    done = CliRunner().invoke(cli, ["watch", folder.partition("+")[0]])
    assert done.exit_code == 0
    assert [word for word in words if word not in done.output] == []
    assert "finished" in done.output.splitlines()[-1]
