"""A committed round as files that others read."""

import hashlib
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from fedtrain import Config
from fedtrain.arena import Arena
from fedtrain.errors import Damaged, StoreError
from fedtrain.schema import Schema
from fedtrain.store import Checkpoint, RunStore
from fedtrain.tracking.export import beginning, export

CONFIG = Config.of({"run": {"name": "heart"}, "train": {"lr": 0.5}})


class Tied(nn.Module):
    """Every kind of tensor that a model may have: tied, frozen, buffers of ints, halves, a scalar."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.small = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.tensor([0.5, 0.7]), requires_grad=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("flag", torch.tensor(True))


def a_run(folder, rounds=4, best=2):
    """A run directory with a model of its own for each round."""
    store = RunStore(folder, durable=False)
    arenas = [Arena.of(Tied(n)) for n in range(rounds + 1)]
    frozen = Arena.of(Tied(0), frozen=True)
    store.begin(arenas[0].schema, CONFIG.agreed(), frozen=frozen.schema, run="heart", task_digest="cd" * 32)
    store.keep_frozen(frozen)
    for site in ("bern", "basel"):
        store.join(site, 10.0)
    for n, arena in enumerate(arenas):
        store.commit(Checkpoint(n, arena), {"loss": 1 / (n + 1), "sites": 2} if n else {})
        if n:
            store.evaluated(n, {"accuracy": 0.5 + n / 10}, best=n == best)
    store.close()
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("runs") / "heart")


def schemas(model):
    return Schema.of(model), Schema.of(model, frozen=True)


def same(model, other):
    return all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(("round", "seed"), [(None, 4), (4, 4), (3, 3), ("best", 2)])
def test_the_exported_model_is_the_rounds_to_the_last_bit(run_dir, tmp_path, round, seed):
    export(run_dir, tmp_path / "out", round)
    model = Tied(99)
    load_model(model, tmp_path / "out" / "model.safetensors")
    assert same(model, Tied(seed))
    assert model.head.weight is model.embed.weight


def test_tied_weights_stand_once_and_every_other_tensor_under_its_name(run_dir, tmp_path):
    export(run_dir, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == Tied(0).state_dict().keys() - {"head.weight"}


def test_model_json_says_what_the_file_is(run_dir, tmp_path):
    export(run_dir, tmp_path, "best")
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["sha256"] == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert about["config_digest"] == CONFIG.digest()
    assert about["weights_digest"] == Arena.of(Tied(2)).digest
    assert (about["run"], about["round"], about["best"], about["updates"]) == ("heart", 2, True, 2)
    assert (about["sites"], about["metrics"]) == (["basel", "bern"], {"accuracy": 0.7})
    assert about["task_digest"] == "cd" * 32
    settings = about["config"]
    assert (settings["train.lr"], settings["run.task"], settings["secagg.enabled"]) == (
        0.5,
        "task:Task",
        True,
    )


def test_the_card_tells_a_reader_the_same(run_dir, tmp_path):
    export(run_dir, tmp_path, "best")
    card, about = (tmp_path / "MODEL_CARD.md").read_text(), json.loads((tmp_path / "model.json").read_text())
    assert "# heart, round 2" in card
    assert "| accuracy | 0.7000 |" in card
    assert "basel, bern" in card
    assert "| train.lr | `0.5` |" in card
    for digest in ("sha256", "config_digest", "task_digest", "schema_digest"):
        assert about[digest] in card


def test_the_same_round_gives_the_same_bytes(run_dir, tmp_path):
    for out in ("a", "b"):
        export(run_dir, tmp_path / out)
    for name in ("model.safetensors", "model.json", "MODEL_CARD.md"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_e3_all_files_of_an_export_can_be_read_by_the_same_people(run_dir, tmp_path, umask):
    before = os.umask(umask)
    try:
        export(run_dir, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {0o666 & ~umask}, modes


def test_an_export_replaces_the_one_before_and_leaves_nothing_else(run_dir, tmp_path):
    export(run_dir, tmp_path, 3)
    export(run_dir, tmp_path, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["MODEL_CARD.md", "model.json", "model.safetensors"]
    assert json.loads((tmp_path / "model.json").read_text())["round"] == 4


def test_a_run_is_exported_while_it_is_being_written(tmp_path):
    a_run(tmp_path / "heart")
    writer = RunStore(tmp_path / "heart", durable=False)
    export(tmp_path / "heart", tmp_path / "out")
    writer.commit(Checkpoint(5, Arena.of(Tied(5))), {"loss": 0.1, "sites": 2})
    export(tmp_path / "heart", tmp_path / "out")
    writer.close()
    assert json.loads((tmp_path / "out" / "model.json").read_text())["round"] == 5


@pytest.mark.parametrize(
    ("round", "message"),
    [(9, "has no round 9; its last one is 4"), (1, "round 1 of .* is not kept")],
)
def test_a_round_that_cannot_be_had_is_told(run_dir, tmp_path, round, message):
    with pytest.raises(StoreError, match=message):
        export(run_dir, tmp_path / "out", round)
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_round_has_no_model_yet(tmp_path):
    with pytest.raises(StoreError, match="no model yet"):
        export(a_run(tmp_path / "heart", rounds=0), tmp_path / "out")


def test_a_run_without_evaluation_has_no_best_round(tmp_path):
    with pytest.raises(StoreError, match="no best round"):
        export(a_run(tmp_path / "heart", best=0), tmp_path / "out", "best")


def test_what_is_no_run_directory_is_told(tmp_path):
    with pytest.raises(StoreError, match="not a run directory"):
        export(tmp_path, tmp_path / "out")


# --- what a new run begins with


@pytest.mark.parametrize("source", ["run", "folder", "file"])
def test_a_run_begins_with_another_runs_last_model_or_its_export_to_the_last_bit(run_dir, tmp_path, source):
    folder = export(run_dir, tmp_path / "out")
    where = {"run": run_dir, "folder": folder, "file": folder / "model.safetensors"}[source]
    store = RunStore(run_dir, read_only=True)
    try:
        last, frozen = store.latest().weights, store.load_frozen()
    finally:
        store.close()
    found = beginning(where, *schemas(Tied(0)))
    assert [arena.digest for arena in found] == [last.digest, frozen.digest]


@pytest.mark.parametrize("source", ["run", "folder", "file"])
def test_a_run_begins_with_no_damaged_model_nor_with_an_older_one_in_its_place(run_dir, tmp_path, source):
    run_dir = shutil.copytree(run_dir, tmp_path / "heart")
    folder = export(run_dir, tmp_path / "out")
    file = folder / "model.safetensors"
    if source == "run":
        store = RunStore(run_dir, read_only=True)
        file = store.blobs / store.rounds()[-1].weights
        store.close()
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(Damaged, match=f"{file.name}.*(is damaged|its digest)"):
        beginning({"run": run_dir, "folder": folder, "file": file}[source], *schemas(Tied(0)))


def test_what_another_run_froze_may_be_trained_here_and_the_other_way_round(run_dir):
    model = Tied(0)
    model.frozen.requires_grad_(True)
    model.embed.weight.requires_grad_(False)
    for arena, frozen in zip(beginning(run_dir, *schemas(model)), (False, True), strict=True):
        arena.bind(model)
        assert ("frozen" in arena.views()) != frozen
    assert same(model, Tied(4))


@pytest.mark.parametrize("source", ["run", "folder"])
@pytest.mark.parametrize("other", [nn.Linear(2, 2), nn.Embedding(5, 4)])
def test_a_run_does_not_begin_with_another_model(run_dir, tmp_path, source, other):
    where = run_dir if source == "run" else export(run_dir, tmp_path / "out")
    with pytest.raises(StoreError, match="holds another model"):
        beginning(where, *schemas(other))


def test_a_run_does_not_begin_with_a_model_of_other_shapes(run_dir, tmp_path):
    model = Tied(0)
    model.small = nn.Parameter(torch.randn(4).to(torch.bfloat16))
    with pytest.raises(StoreError, match=r"small is torch.bfloat16\[3\] there, torch.bfloat16\[4\] here"):
        beginning(export(run_dir, tmp_path / "out"), *schemas(model))


def test_what_is_no_model_to_begin_with_is_told(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(StoreError, match="is not a safetensors file"):
        beginning(tmp_path, *schemas(Tied(0)))
    with pytest.raises(StoreError, match="does not exist"):
        beginning(tmp_path / "nowhere", *schemas(Tied(0)))
