"""Run directories and frames of earlier versions, kept in tests/kept: this version goes on with them bit for
bit, or says exactly why it does not. Where a processor rounds otherwise than the one which began them, last
bits may differ."""

import asyncio
import json
import tarfile
from pathlib import Path

import pytest
import torch

from fedtrain.errors import StoreError
from fedtrain.runtime.simulations import simulation
from fedtrain.store import RunStore
from fedtrain.store.runs import VERSION
from fedtrain.wire import decode, encode, frames
from tests.damage import Star
from tests.decoders import FRAMES
from tests.equivalence.test_frozen_models import FROZEN, kind_of_processor
from tests.faults.test_files import Alone, Pool

KEPT = Path(__file__).parent / "kept"
RUNS = sorted(KEPT.glob("runs-*.tar.xz"))
WIRE = sorted(KEPT.glob("frames-*.txt"))
SAFE = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.2, of Debian 12, has none


def of(name, folder):
    kind, _, rest = name.partition(" ")
    return Star(folder, masks=rest == "masks") if kind == "star" else Alone(folder, name)


@pytest.mark.slow(4)
@pytest.mark.parametrize("kept", RUNS, ids=[path.name for path in RUNS])
def test_a_run_that_an_earlier_version_began_ends_with_the_same_model_or_says_why_not(
    kept, tmp_path, monkeypatch
):
    monkeypatch.setattr(simulation, "PoolCohort", Pool)
    with tarfile.open(kept) as archive:
        archive.extractall(tmp_path, **SAFE)
    models = json.loads((tmp_path / "models.json").read_text())
    assert len(models) >= 6
    ours = int(kept.name.split("-")[1].split(".")[0]) == VERSION
    for name, digest in models.items():
        world = of(name, tmp_path / name)
        if ours:
            if (found := asyncio.run(world.go())) != digest:
                assert kind_of_processor() not in FROZEN, (name, found)
                assert_rounded_otherwise(name, tmp_path)
            continue
        with pytest.raises(StoreError, match=f"has store version .*; fedtrain has {VERSION}"):
            asyncio.run(world.go())


def assert_rounded_otherwise(name, folder):
    """The model is but for float32's last bits, in which it begins, that of a run which began here, too."""
    asyncio.run(of(name, folder / "here" / name).go())
    for kept, here in zip(model(folder / name), model(folder / "here" / name), strict=True):
        torch.testing.assert_close(kept, here, rtol=0, atol=1e-6)


def model(folder):
    (run,) = folder.glob("runs/*/run.db")
    store = RunStore(run.parent, read_only=True)
    try:
        return [vector.clone() for vector in store.latest().weights.load().trained().values()]
    finally:
        store.close()


def test_the_present_version_is_kept():
    assert any(path.name.startswith(f"runs-{VERSION}.") for path in RUNS)
    assert KEPT / f"frames-{frames.PROTOCOL}.txt" in WIRE, "python -m tests.kept.make keeps them"


@pytest.mark.parametrize("kept", WIRE, ids=[path.name for path in WIRE])
def test_frames_of_this_protocol_have_the_same_bytes_and_a_greeting_of_another_tells_its_number(kept):
    protocol = int(kept.stem.split("-")[1])
    found = {}
    for line in kept.read_text().splitlines():
        name, _, text = line.rpartition(" ")
        found[name] = bytes.fromhex(text)
    if protocol == frames.PROTOCOL:
        ours = {name: encode(FRAMES[name][1]) for name in found}
        assert found == ours, "raise PROTOCOL, and keep its frames: python -m tests.kept.make"
    else:  # whatever else has changed, agreement.agree must have this number to refuse it by
        assert decode(found["hello"], FRAMES["hello"][0]).protocol == protocol
