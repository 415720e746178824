"""Files that are damaged, lost or taken from an old copy; and a federation in one process that keeps all its
files: what travels goes through its spools as over gRPC."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from fedtrain.arena import AnyArena, Arena, ArenaFile
from fedtrain.config import Config
from fedtrain.errors import Broken, FedtrainError, WireError
from fedtrain.events import Event
from fedtrain.messages import Evaluate, Evaluation, Failure, Found, Reply, Request, Train, Update
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.simulations.simulated_masks import SimulatedKeys
from fedtrain.runtime.sites import secure_site
from fedtrain.runtime.sites.site import Site
from fedtrain.runtime.sites.spent import Spent
from fedtrain.runtime.star import federated, secure_rounds
from fedtrain.runtime.star.answers import InTheOpen
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import Checkpoint, Ledger, RunStore, Spool
from fedtrain.store.disk import write_whole
from fedtrain.store.memory import NEVER
from fedtrain.strategies import beginning, build
from fedtrain.transport.memory import LocalCohort
from fedtrain.transport.streams import read_chunk
from fedtrain.wire.codec import arenas, decode, encode, fetch_list

SCHEMA = Schema((TensorSpec("w", (200,), "float32", True),))
SITES = ("a", "b", "c")


# --- Damage

BLOCK = 4096  # bytes


def flip(path: Path, older: bytes, seed: int = 0) -> None:
    """One bit."""
    data = bytearray(path.read_bytes())
    if data:
        bit = random.Random(f"{seed} {path.name}").randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)


def flip_another(path: Path, older: bytes) -> None:
    flip(path, older, seed=1)


def truncate(path: Path, older: bytes) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path, older: bytes) -> None:
    """A block that the disk never wrote."""
    data = path.read_bytes()
    at = random.Random(path.name).randrange(max(1, len(data) - BLOCK)) // BLOCK * BLOCK
    path.write_bytes(data[:at] + bytes(len(data[at : at + BLOCK])) + data[at + BLOCK :])


def extend(path: Path, older: bytes) -> None:
    """More than was written, as after a torn truncation."""
    path.write_bytes(path.read_bytes() + b"\x5a" * BLOCK)


def empty(path: Path, older: bytes) -> None:
    path.write_bytes(b"")


def remove(path: Path, older: bytes) -> None:
    path.unlink()


def swap(path: Path, older: bytes) -> None:
    path.write_bytes(older)


DAMAGES: list[Callable[[Path, bytes], None]] = [
    flip, flip_another, zero, truncate, extend, empty, remove, swap,
]  # fmt: skip


class Image:
    """A folder as kill -9 leaves it, and one of a while before."""

    def __init__(self, newer: Path, older: Path) -> None:
        self.newer, self.older = newer, older

    def files(self) -> list[Path]:
        return sorted(p.relative_to(self.newer) for p in self.newer.rglob("*") if p.is_file())

    def damaged(self, file: Path, damage: Callable[[Path, bytes], None], to: Path) -> None:
        """A copy of the newer one in `to`, with one file damaged."""
        shutil.copytree(self.newer, to, dirs_exist_ok=True)
        damage(to / file, self._older(file))

    def same(self, file: Path, other: Path) -> bool:
        """Whether a damage left the file as it was, in a copy of the newer one: swapped for its like."""
        return (other / file).exists() and (other / file).read_bytes() == (self.newer / file).read_bytes()

    def _older(self, file: Path) -> bytes:
        """The file as it was; of one that is named by its digest, what another one of its folder was."""
        if (path := self.older / file).is_file():
            return path.read_bytes()
        others = sorted(p for p in path.parent.glob("*") if p.is_file() and p.suffix != ".part")
        return others[0].read_bytes() if others else b"old"


def is_named(line: str, file: Path) -> bool:
    """Whether a line names the file, or the database whose log it is; of one that is gone, its folder, of
    which a line that leaves the site has the end alone."""
    names = re.sub(r"-(wal|shm)$", "", file.name), f"{'/'.join(file.parent.parts[-2:])} has no"
    return any(name in line for name in names) and "\n" not in line


def may_be_quiet(file: Path, damage: Callable[[Path, bytes], None], used: Collection[Path]) -> bool:
    """Whether a damage takes nothing that anybody uses, so that nobody need be told. `used`: what is read of
    folders that also have older files."""
    return (
        file.name
        in ("lock", "free", "events.jsonl", "released", "opened", "data.txt", "weights", "newest.json")
        or file.name.endswith((".part", ".at", "-shm", "-wal"))  # sent again; SQLite's own
        or bool(
            {"train", "trainer", "ranks"} & {*file.parts}
        )  # written anew before it is read; read by people alone
        or (bool({"blobs", "inbox", "outbox", "checkpoints"} & {*file.parts}) and file not in used)
        or (file.name == "manifest.json" and damage is remove)  # as of a save that was never finished
        or (file.suffix == ".db" and damage in (flip, flip_another, zero, extend, swap))  # see -wal
        or (file.name.startswith("sums.json") and damage in (truncate, swap))  # blanks; its copy is newer
        or (file.name.startswith("releases.jsonl") and damage is swap)  # the same
    )


def goes_on(make: Callable[[], Any], whole: str, file: Path, *, quiet: bool, may_stop: bool) -> str:
    """ "" where it goes on to the same model, and has named the file unless that may be `quiet`; else what
    went wrong. Where it `may_stop`, it may also stop with a line that names the file, the second time too."""
    for _ in range(2):
        world = make()

        async def within(world: Any = world) -> str:
            async with asyncio.timeout(60):
                return str(await world.go())

        try:
            digest = asyncio.run(within())
        except FedtrainError as e:
            if not may_stop or not is_named(str(e), file):
                return f"{file} stops it: {e}"
        except Exception as e:
            return f"{file}: {type(e).__name__}: {e}"
        else:
            if digest != whole:
                return f"{file}: another model"
            named = quiet or may_stop or any(is_named(line, file) for line in world.lines)
            return "" if named else f"{file} is not named"
    return ""


# --- A federation


class Killed(BaseException):
    """As kill -9: what is on the disk stays as it is."""


class Star:
    """An aggregator and its sites; `runs/` is all that outlives `go`."""

    def __init__(self, root: Path, *, masks: bool, rounds: int = 5) -> None:
        self.runs, self.lines = root / "runs", list[str]()
        self.config = Config.of(
            {
                "run": {"name": "r", "rounds": rounds, "seed": 3},
                "strategy": {"kind": "fedadam", "min_sites": 3, "round_deadline": "20s"},
                "secagg": {"enabled": masks, "max_examples": 10, "verify": False},
                "privacy": {} if masks else {"clip": 100.0, "noise_multiplier": 1.0},
                "network": {"idle": "1s"},
            },
            root,
        )
        self.keys, self.masks = SimulatedKeys(), masks

    async def go(self, watch: Callable[[int], None] = lambda transfer: None) -> str:
        """The last model's digest. `watch` is called in the middle of each transfer, with its number."""
        config = self.config
        with ExitStack() as stack:
            store = stack.enter_context(closing(RunStore(config.run_dir, warn=self.lines.append)))
            strategy = build(config.strategy.kind, config.strategy.options)
            store.begin(SCHEMA, config.agreed(), task_digest="t")
            if store.latest() is None:
                initial = Arena.zeros(SCHEMA)
                store.commit(Checkpoint(0, *beginning(strategy, initial)), {})
            ledgers = {
                name: stack.enter_context(closing(Ledger(config.site_dir(name), self.lines.append)))
                for name in SITES
            }
            sites = {name: self._site(name, ledger) for name, ledger in ledgers.items()}
            cohort = LocalCohort(
                {n: Wire(sites[n], ledgers[n], store.inbox(n), self.masks, watch) for n in SITES}
            )
            answers: Any = InTheOpen(config, cohort, self._emit)
            if self.masks:
                answers = secure_rounds.UnderMasks(
                    config, cohort, self._emit, federation=SimulatedKeys.FEDERATION,
                    callers=self.keys, verifier=self.keys, store=store,
                )  # fmt: skip
            journal = Journal(config, store, self._emit)
            result = await federated.run(journal, answers, strategy)
            journal.finish(result)
            last = store.latest()
            assert last is not None
            return last.weights.digest

    def _site(self, name: str, ledger: Ledger) -> Site:
        mine = None
        if self.masks:
            mine = secure_site.SecureSite(
                self.config, name, SimulatedKeys.FEDERATION, self.keys.signer(name), self.keys, sums=ledger,
            )  # fmt: skip
        spent = Spent.of_site(self.config, ledger.folder, self._emit)
        return Site(name, SCHEMA, ledger, Toy(), secure=mine, spent=spent)

    def _emit(self, event: Event) -> None:
        if text := getattr(event, "text", "") or getattr(event, "reason", ""):
            self.lines.append(text)


class Toy:
    """A site's trainer: what it finds depends on the weights, the site and the round."""

    async def train(
        self, site: str, round: int, weights: ArenaFile, out: Path, counted: int = NEVER
    ) -> Update:
        delta = Arena.zeros(SCHEMA)
        draw = torch.Generator().manual_seed(100 * round + ord(site))
        flat, model = delta.flat(SCHEMA.sections[0]), weights.load().flat(SCHEMA.sections[0])
        flat.copy_((torch.rand(200, generator=draw) - model) / 2)
        write_whole(out, delta.payload, durable=False)
        count = float(1 + ord(site) % 3)
        return Update(delta=delta, num_examples=count, metrics={"loss": (float(flat.norm()), count)})

    async def evaluate(self, site: str, round: int, weights: ArenaFile, counted: int = -1) -> Evaluation:
        return Evaluation(metrics={"loss": (float(weights.load().flat(SCHEMA.sections[0]).norm()), 1.0)})

    async def close(self) -> None:
        """Nothing runs."""


class Wire:
    """A site at the other end of a wire: messages as bytes, models through the spools of both ends."""

    transfers = 0

    def __init__(
        self, site: Site, ledger: Ledger, inbox: Spool, masks: bool, watch: Callable[[int], None]
    ) -> None:
        self.site, self.ledger, self.inbox, self.watch = site, ledger, inbox, watch
        self.requests = secure_site.SECURE_REQUESTS if masks else Train | Evaluate
        self.replies = secure_rounds.REPLIES if masks else Found

    async def __call__(self, request: Request) -> Reply:
        asked = decode(encode(request), self.requests)
        for try_again in (True, True, False):
            try:
                self._carry(arenas(request), asked, self.ledger.inbox)
                reply = await self.site.answer(asked)
                heard: Reply = decode(encode(reply), self.replies)
                self._carry(arenas(reply), heard, self.inbox)
            except Broken:
                assert try_again, "a transfer that breaks for ever"
            except WireError as e:
                return Failure(reason=str(e))
            else:
                return heard
        raise AssertionError("unreachable")

    def _carry(self, sent: list[AnyArena], message: Any, inbox: Spool) -> None:
        for source, arena in zip(sent, fetch_list(message), strict=True):
            with closing(inbox.receive(arena.digest, arena.schema.nbytes)) as arriving:
                data = read_chunk(source, 0)
                half = len(data) // 2
                if arriving.offset < half:
                    arriving.write(data[arriving.offset : half])
                    arriving._note_offset()
                Wire.transfers += 1
                self.watch(Wire.transfers)
                if not arriving.whole:
                    arriving.write(data[arriving.offset :])
                arena.file = arriving.finish()


def star_image(root: Path, *, masks: bool) -> tuple[str, Image]:
    """The model of a run that nothing happens to, and what it had on disk when it was killed in mid-round."""
    Wire.transfers, whole = 0, Star(root / "whole", masks=masks)
    digest = asyncio.run(whole.go())
    count, star = Wire.transfers, Star(root / "killed", masks=masks)
    older, newer = count * 5 // 10, count * 7 // 10
    Wire.transfers = 0

    def watch(transfer: int) -> None:
        if transfer in (older, newer):
            shutil.copytree(star.runs, root / str(transfer) / "runs")
        if transfer == newer:
            raise Killed

    try:
        asyncio.run(star.go(watch))
    except Killed:
        return digest, Image(root / str(newer), root / str(older))
    raise AssertionError("it was not killed")
