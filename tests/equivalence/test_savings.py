"""What saves memory or time leads where two ranks without it go: to the model of one."""

import gc
import weakref

import pytest
import torch

from fedtrain.config import Config
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel.engine import MeshEngine
from fedtrain.training.task import load_task
from tests.equivalence.ranks import launch, run_case
from tests.equivalence.tiny import case, furthest, project
from tests.worlds import world

EXACT = 1e-12  # float64
MOMENTUM = {"optimizer": "sgd", "momentum": 0.9}
SAME = {
    "offload-zero2": case(zero=2, offload="cpu"),
    "offload-zero3": case(zero=3, offload="cpu", train={"clip_norm": 0.1}),
    "offload-disk-zero3": case(zero=3, offload="disk", offload_dir="disk", train={"accumulate": 2}),
    "activations-again": case(checkpoint_activations=True),
    "activations-again-tp": case(tp=2, checkpoint_activations=True),
    "activations-again-pp": case(pp=2, checkpoint_activations=True),
    "activations-again-cp": case(cp=2, checkpoint_activations=True),
    "compiled-activations-again-zero3": case(zero=3, checkpoint_activations=True, compile=True),
    "sgd-zero1": case(zero=1, train=MOMENTUM),
    "sgd-zero3": case(zero=3, train=MOMENTUM),
    "sgd-tp": case(tp=2, train=MOMENTUM),
}
NARROW = {
    f"{precision}-{name}": case("Single", train={"precision": precision}, **mesh)
    for precision in ("bf16", "fp16")
    for name, mesh in {"ddp": {}, "zero2": {"zero": 2}, "zero3": {"zero": 3}, "pp": {"pp": 2}}.items()
}


@pytest.mark.slow(40)  # 19 cases on two ranks, one of which is compiled
def test_what_saves_memory_or_time_changes_only_roundings(tmp_path):
    folder = project(tmp_path / "project")
    outcomes = launch(folder, 2, SAME | NARROW)
    alone = {}

    def far(name, table):
        key = repr(table["train"]) + table["run"]["task"]
        if key not in alone:
            single = {**table, "parallel": {}, "run": table["run"] | {"name": f"alone-{len(alone)}"}}
            alone[key] = run_case(Config.of(single, folder), [], torch.device("cpu"))
        return furthest(outcomes[name].model, alone[key])

    assert {name: off for name, table in SAME.items() if (off := far(name, table)) >= EXACT} == {}
    wide = case("Single")
    off = {name: far(name, {**table, "train": wide["train"]}) for name, table in NARROW.items()}
    assert all(0 < each < 0.1 for each in off.values()), off  # in 16 bits: near, and not the same


def keep_stages(rank, ranks, folder, cases):
    """Of the tensors that model() made, this rank has those of its stages, and no others."""
    for name, table in cases.items():
        config = Config.of({**table, "run": {**table["run"], "name": name}}, folder)
        task = load_task(config.run.task, folder)
        made, count, build = weakref.WeakSet(), len([*task.model().parameters()]), task.model

        def model(build=build, made=made):
            whole = build()
            made.update(whole.parameters())
            return whole

        task.model = model
        x, y = task.data("")
        mesh = Mesh(Sizes.of(config.parallel, ranks), torch.device("cpu"))
        engine = MeshEngine(task, config, mesh, example=(x[:16], y[:16]))
        gc.collect()
        kept = {id(p) for part in engine.parts for p in part.parameters()}
        assert 0 < len(made) < count, f"{name}: {len(made)} of {count}"
        assert {id(p) for p in made} <= kept, name


@pytest.mark.slow(4)
def test_a_rank_of_a_pipeline_keeps_its_stages_alone(tmp_path):
    """A plan's stages, and a Sequential's."""
    cases = {
        "planned": case(pp=2),
        "planned-zbv": case("Deep", pp=2, schedule="zbv"),
        "rows": case("Rows", pp=2),
    }
    world(2, keep_stages, project(tmp_path / "project"), cases)
