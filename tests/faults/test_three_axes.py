"""Eight ranks in three axes, of which one is killed now and then, train what they train undisturbed."""

import contextlib
import json
import random

import pytest

from fedtrain.store import RunStore
from tests.equivalence.ranks import launch
from tests.equivalence.tiny import case, furthest, project
from tests.torchrun import Cluster, kill

EXACT = 1e-12  # float64
STEPS, KILLS = 24, 3


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_eight_ranks_of_which_some_are_killed_train_what_eight_train(tmp_path):
    """Two stages, two data-parallel ranks of each, two parts of each layer."""
    table = case(steps=STEPS, pp=2, tp=2, log_every=1, train={"device": "cpu", "clip_norm": 0.1})
    table["checkpoint"] = {"every": 2, "keep": 2}
    folder = project(tmp_path / "p")
    whole = launch(folder, 8, {"whole": table})["whole"].model
    table["run"]["name"] = "r"
    lines = []
    for section, settings in table.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())]
    (folder / "fedtrain.toml").write_text("\n".join(lines))
    told = folder / "runs" / "r+datacenter" / "events.jsonl"

    def steps():
        return told.read_text().count('"kind":"step"') if told.exists() else 0

    draw = random.Random(8)
    with Cluster(folder, "-m", "fedtrain", "datacenter", "--json", ranks=8, restarts=KILLS + 1) as cluster:
        agent = cluster.add()
        for _ in range(KILLS):
            due = steps() + draw.randint(2, 5)  # also those that are taken again count
            cluster.wait_for(lambda due=due: steps() >= due or agent.poll() is not None)
            assert agent.poll() is None, cluster.log()
            kill(cluster.wait_for(lambda: cluster.rank(draw.randrange(8))))
        assert agent.wait(900) == 0, cluster.log()
    with contextlib.closing(RunStore(told.parent, read_only=True)) as store:
        last = store.latest()
    assert furthest(dict(last.weights.load().views()), whole) < EXACT
