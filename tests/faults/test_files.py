"""Every file of every run directory, damaged in every way while nobody is there: whoever goes on makes the
same model, bit for bit, or stops with a line that names the file. Which files there are, the folders say."""

import asyncio
import re
import shutil
import subprocess
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.errors import StoreError
from fedtrain.messages import Train
from fedtrain.runtime.datacenters import datacenter
from fedtrain.runtime.simulations import gossip_simulation, simulation
from fedtrain.runtime.trainers.trainer_messages import TrainOne
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.store import Ledger, RunStore
from fedtrain.transport.memory import LocalCohort
from tests.damage import (
    DAMAGES,
    Image,
    Killed,
    Star,
    flip,
    flip_another,
    goes_on,
    is_named,
    may_be_quiet,
    remove,
    star_image,
)
from tests.equivalence.tiny import case, project
from tests.limits import bounded
from tests.peers import Toy, village

MODES = [
    "simulate", "simulate masks", "compressed", "asynchronous", "gossip", "gossip masks", "datacenter",
    "islands",
]  # fmt: skip
pytestmark = [pytest.mark.slow(2), pytest.mark.timeout(300)]
MEMORY = Path("/dev/shm")
EVERY = pytest.mark.parametrize(
    "every", [pytest.param(3, id="a third"), pytest.param(1, id="all", marks=pytest.mark.soak)]
)


@pytest.fixture(scope="module")
def memory():
    """A folder in memory, so that hundreds of runs wait for no disk."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def room(memory):
    """A fresh folder in there."""
    with TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def check(image, files, damage, room, world, whole, every):
    """`world(folder)` is whoever goes on; each of the files is damaged in a copy of its own."""
    wrong = []
    if damage is flip_another:  # one place in a database tells little of the others
        files = [file for file in files if ".db" in file.name]
    files = files[DAMAGES.index(damage) % every :: every]  # other files by each damage
    used = used_in(image)
    for i, file in enumerate(files):
        folder = room / str(i)
        image.damaged(file, damage, folder)
        quiet, stops = may_be_quiet(file, damage, used), bool({"memory", "audit"} & {*file.parts})
        quiet = quiet or image.same(file, folder)
        wrong.append(goes_on(lambda to=folder: world(to), whole, file, quiet=quiet, may_stop=stops))
        shutil.rmtree(folder)
    assert not any(wrong), "\n".join(filter(None, wrong))


def used_in(image):
    """The models of the rounds that the stores of an image keep, or the newest checkpoint in their place."""
    used, rows = set(), "SELECT round, weights FROM rounds"
    with TemporaryDirectory() as folder:
        shutil.copytree(image.newer, folder, dirs_exist_ok=True)
        for db in Path(folder).rglob("run.db"):
            run = db.parent.relative_to(folder)
            if steps := sorted(db.parent.glob("checkpoints/*")):
                used |= {run / "checkpoints" / steps[-1].name / file.name for file in steps[-1].iterdir()}
                continue
            with closing(RunStore(db.parent)) as store:
                kept = store._kept()
                names = {f"{where}/{digest}" for number, digest in store.db.all(rows) if number in kept
                         for where in ("blobs", "copies/blobs")}  # fmt: skip
                used |= {run / name for name in names}
    return used


# --- an aggregator and its sites


@pytest.fixture(scope="module", params=[False, True], ids=["open", "masks"])
def star(request, memory):
    return request.param, *star_image(memory / f"star-{request.param}", masks=request.param)


@pytest.mark.parametrize("damage", DAMAGES)
@EVERY
def test_any_file_of_an_aggregator_and_of_a_site(star, room, damage, every):
    masks, whole, image = star
    files = [file for file in image.files() if file.parts[1] in ("r", "r@b", "@b")]
    kinds = {"blobs", "inbox", "outbox", "run.db", "run.db-wal", "ledger.db", "ledger.db-wal"}
    kinds |= {"sums.json"} if masks else {"releases.jsonl"}
    assert kinds <= {part for file in files for part in file.parts}
    check(image, files, damage, room, lambda folder: Star(folder, masks=masks), whole, every)


def test_under_masks_a_round_whose_sum_was_opened_already_is_made_again_from_the_one_before(
    room, monkeypatch
):
    """Killed between the sum of round 4 and its commit, and round 3's model is damaged: sites that gave
    shares for round 4 take part in round 3 again, over the same sites."""
    whole = asyncio.run(Star(room / "whole", masks=True).go())
    killed, commit = Star(room / "killed", masks=True), RunStore.commit

    def until(store, checkpoint, *rest):
        if checkpoint.round == 4:
            raise Killed
        commit(store, checkpoint, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "commit", until)
        with pytest.raises(Killed):
            asyncio.run(killed.go())
    store = RunStore(killed.config.run_dir, read_only=True)
    newest = store.latest()
    store.close()
    assert newest.round == 3
    flip(store.blobs / newest.weights.digest, b"")
    assert asyncio.run(killed.go()) == whole
    assert any(f"{newest.weights.digest} is damaged" in line for line in killed.lines)
    assert any("goes on after round 2" in line for line in killed.lines)


# --- who coordinates alone


TASK = """
import mesh_task

class Half(mesh_task.Rows):  # of its parameters only one half is trained
    def model(self):
        model = super().model()
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        return model
"""


class Alone:
    """A run in this process; `killed` right after the commit of a round it leaves an image."""

    def __init__(self, root, mode):
        self.root, self.mode, self.lines = root, mode, []
        (project(root) / "half_task.py").write_text(TASK)

    async def go(self):
        table = case("Rows", rounds=4, steps=8)
        table |= {
            "run": table["run"] | {"name": "r", "rounds": 4, "task": "half_task:Half"},
            "evaluate": {"every": 1},
            "checkpoint": {"every": 2, "background": False},
            "strategy": {"kind": "fedadam", "min_sites": 3},
            "simulate": {
                "sites": 4,
                "workers": 1,
                "engine": "loop",
                "masks": self.mode.endswith("masks"),
            },
            "secagg": {"enabled": "masks" in self.mode},
            "gossip": {"masks": "masks" in self.mode, "topology": "complete"},
        }
        if self.mode == "compressed":
            table["compression"] = {"up": "topk:0.1"}
        if self.mode == "asynchronous":
            table |= {"asynchronous": {"enabled": True, "buffer": 2}}
        if self.mode.startswith("gossip"):
            table["strategy"] = {"min_sites": 3}
        if self.mode == "datacenter":
            del table["strategy"]
        if self.mode == "islands":
            table["parallel"]["sync"] = "local"
        config = Config.of(table, self.root)
        if self.mode in ("datacenter", "islands"):
            result = datacenter.run(config, emit=self.emit)
        elif self.mode.startswith("gossip"):
            result = await gossip_simulation.simulate(config, emit=self.emit)
        else:
            result = await simulation.simulate(config, emit=self.emit)
        store = RunStore(result.run_dir, read_only=True)
        try:
            return store.latest().weights.digest
        finally:
            store.close()

    def emit(self, event):
        self.lines.append(str(event))

    def image(self, patch):
        commit = RunStore.commit

        def until(store, checkpoint, *rest):
            commit(store, checkpoint, *rest)
            if checkpoint.round in (2, 3):
                shutil.copytree(self.root / "runs", self.root / f"{checkpoint.round}/runs")
            if checkpoint.round == 3:
                raise Killed

        patch.setattr(RunStore, "commit", until)
        with pytest.raises(Killed):
            asyncio.run(self.go())
        return Image(self.root / "3", self.root / "2")


class Pool(LocalCohort):
    """A simulation's pool without processes."""

    workers = 1

    def __init__(self, bench):
        super().__init__({})
        self.machines = str
        self.bench, self.description = bench, bench.description

    @classmethod
    async def start(cls, config, *_):
        return cls(Workbench(config, simulated=True))

    async def train_by(self, engine):
        assert engine == "loop"

    async def examples(self, site):
        return self.bench.examples(site)

    async def partition_note(self):
        return self.bench.partition_note()

    async def members(self, at_least):
        return self.description.sites

    async def exchange(self, requests, deadline_s):
        for site, request in requests.items():
            weights = request.weights.load()
            if isinstance(request, Train):
                out = Arena.zeros(self.description.update)
                yield site, self.bench.train(site, request.round, weights, out, request.counted)
            else:
                yield site, self.bench.evaluate(site, request.round, weights)

    async def beginning(self, start):
        return self.bench.initial(), self.bench.initial(frozen=True)

    async def freeze(self, frozen):
        self.bench.freeze(frozen)

    async def shown(self, total, by_site):
        return self.bench.shown(total, by_site)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass


@pytest.fixture(
    scope="module",
    params=MODES,
)
def alone(request, memory):
    """(a world, the model it makes, an image)"""
    name = request.param.replace(" ", "-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "PoolCohort", Pool)
        whole = asyncio.run(Alone(memory / f"{name}-whole", request.param).go())
        with pytest.MonkeyPatch.context() as killing:
            image = Alone(memory / f"{name}-killed", request.param).image(killing)
        yield (lambda folder: Alone(folder, request.param)), whole, image


@pytest.mark.parametrize("damage", DAMAGES)
@EVERY
def test_any_file_of_who_coordinates_alone(alone, room, damage, every):
    world, whole, image = alone
    assert len(image.files()) >= 6
    check(image, image.files(), damage, room, world, whole, every)


# --- peers


@pytest.mark.slow(10)
@pytest.mark.parametrize(("masks", "damage"), [(False, flip), (True, flip), (True, remove)])
def test_any_file_of_a_peer(room, masks, damage):
    """Nobody else has a peer's own model: it has two copies of it."""
    damaged_peer(room, masks, damage)


@pytest.mark.soak
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("masks", [False, True])
def test_any_file_of_a_peer_damaged_in_any_way(room, masks, damage):
    damaged_peer(room, masks, damage)


class Stands(Toy):
    """Trains `most` times, and then stands still."""

    most, trained, standing = 0, 0, 0

    async def _ask(self, message):
        self.trained += isinstance(message, TrainOne)
        if self.trained > Stands.most:
            Stands.standing += 1
            await asyncio.Event().wait()
        return await super()._ask(message)


def damaged_peer(room, masks, damage):
    names = "abcd"

    async def all_of(v, **options):
        tasks = {name: v.start(name, strategy={"min_sites": 4}, **options) for name in names}
        await asyncio.gather(*tasks.values())
        return [v.model(name).tolist() for name in names]

    async def main():
        options = {"rounds": 5, "topology": "complete", "masks": masks}
        async with village(room / "whole", names, **options) as v:
            whole = await all_of(v)
        async with village(room / "killed", names, **options) as v:
            for folder, Stands.most in (("older", 2), ("newer", 1)):  # of the run, two rounds and three
                Stands.standing = 0
                for name in names:
                    v.start(name, toy=Stands, strategy={"min_sites": 4})
                await v.until(lambda: Stands.standing == len(names))  # nobody writes
                shutil.copytree(v.root / "runs", room / folder)
                for name in names:
                    await v.stop(name)
            image = Image(room / "newer", room / "older")
            used = used_in(image)
            for file in (file for file in image.files() if file.parts[0].endswith("@b")):
                shutil.rmtree(v.root / "runs")
                image.damaged(file, damage, v.root / "runs")
                if image.same(file, v.root / "runs"):
                    continue
                before = len(v.of("b", "notice"))
                models = await all_of(v)
                told = [each["text"] for each in v.of("b", "notice")[before:]]
                assert models == whole, (file, told)
                assert any(is_named(line, file) for line in told) or may_be_quiet(file, damage, used), (
                    file,
                    told,
                )

    bounded(main())


# --- a disk that is full


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory):
    """A disk of 4 MiB."""
    folder = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def on_full_disk(image, world, whole, disk, free_kib):
    """Goes on where so much is free, and again with more; what was wrong with that, or \"\"."""
    folder, ballast = disk / "run", disk / "ballast"
    shutil.copytree(image.newer, folder)
    runner = world(folder)
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free - (free_kib << 10)))
    try:
        digest = asyncio.run(runner.go())
        said = "" if digest == whole else "another model"
    except (StoreError, OSError) as e:
        fine = str(disk) in str(e) and re.search("free|No space left", str(e)) and "\n" not in str(e)
        said = "" if fine and "damaged" not in str(e) else f"{type(e).__name__}: {e}"
    except BaseException as e:
        said = f"{type(e).__name__}: {e}"
    ballast.unlink()
    try:
        after = asyncio.run(world(folder).go())
    except BaseException as e:
        after = f"with space again: {type(e).__name__}: {e}"
    shutil.rmtree(folder)
    return [f"{free_kib} KiB: {what}" for what in (said, "" if after == whole else after) if what]


def test_no_file_of_a_healthy_run_is_called_damaged_on_a_full_disk(small_disk):
    """As when it was stopped and is started again: SQLite makes its log and its index anew."""
    Star(small_disk, masks=False, rounds=2).config.run_dir.mkdir(parents=True)
    whole = asyncio.run(Star(small_disk, masks=False, rounds=2).go())
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free))
    for make in (lambda: RunStore(small_disk / "runs/r"), lambda: Ledger(small_disk / "runs/r@a")):
        with pytest.raises(StoreError, match=r"\.db can't be read or written: .*; 0 bytes are free"):
            make()
    ballast.unlink()
    assert asyncio.run(Star(small_disk, masks=False, rounds=2).go()) == whole
    shutil.rmtree(small_disk / "runs")


FREE_KIB = [0, 4, 12, 24, 36, 52, 72]


def test_an_aggregator_and_its_sites_on_a_full_disk_say_so_and_go_on_when_there_is_space(star, small_disk):
    masks, whole, image = star
    world = lambda folder: Star(folder, masks=masks)
    assert not [wrong for kib in FREE_KIB for wrong in on_full_disk(image, world, whole, small_disk, kib)]


def test_who_coordinates_alone_on_a_full_disk_says_so_and_goes_on_when_there_is_space(alone, small_disk):
    world, whole, image = alone
    assert not [wrong for kib in FREE_KIB for wrong in on_full_disk(image, world, whole, small_disk, kib)]
