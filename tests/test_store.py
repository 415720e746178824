"""What survives: rounds whole or not at all, transfers that go on, disks that are refused."""

import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch

from fedtrain.arena import Arena
from fedtrain.digest import digest_of
from fedtrain.errors import Broken, Damaged, StoreError, WireError
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import Checkpoint, Ledger, RoundPlan, RunStore, Spool, chain, redo, runs
from fedtrain.store import folder as run_folder
from fedtrain.store.database import Database
from fedtrain.store.disk import COPY, Kept, refuse_network_disk
from tests.damage import DAMAGES, extend, flip, flip_another, swap
from tests.worlds import FORKED

SCHEMA = Schema((TensorSpec("w", (100,), "float32", True),))


def arena(value):
    made = Arena.zeros(SCHEMA)
    made.flat(SCHEMA.sections[0]).fill_(value)
    return made


@pytest.fixture
def lines():
    """What a person is told."""
    return []


@pytest.fixture
def store(tmp_path, lines):
    made = RunStore(tmp_path / "run", warn=lines.append)
    made.begin(SCHEMA, {"train.lr": "0.1"}, task_digest="t")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"agreed": {"train.lr": "0.2"}}, "train.lr was 0.1, is 0.2"),
        ({"schema": Schema((TensorSpec("v", (100,), "float32", True),))}, "another model: "),
        ({"task_digest": "u"}, "other task code (comments and layout don't count)"),
    ],
    ids=["config", "model", "task"],
)
def test_another_run_in_the_folder_is_refused_with_the_ways_out(store, changed, says):
    run = {"schema": SCHEMA, "agreed": {"train.lr": "0.1"}, "task_digest": "t"} | changed
    with pytest.raises(StoreError, match=re.escape(says)) as refused:
        store.begin(**run)
    assert "Change it back, give the new run its own run.name, or (a simulation)" in str(refused.value)
    assert "--fresh" in str(refused.value)


def commit(store, *rounds):
    for n in rounds:
        store.commit(
            Checkpoint(n, arena(n), {"float32/m": torch.full((3,), float(n))}), {"loss": 1 / (n + 1)}
        )


def test_what_was_committed_is_what_is_read(store, tmp_path):
    commit(store, 0, 1, 2)
    store.evaluated(1, {"loss": 0.5}, best=True)
    commit(store, 3)
    reader = RunStore(tmp_path / "run", read_only=True)  # beside the writer
    last = reader.latest()
    assert (last.round, last.weights.digest) == (3, arena(3).digest)
    assert last.state["float32/m"].tolist() == [3.0] * 3
    assert [(r.round, r.record["loss"], r.best) for r in reader.rounds()][:2] == [
        (0, 1.0, False),
        (1, 0.5, True),
    ]
    assert reader.best_round == 1
    assert reader.load(1).weights.digest == arena(1).digest  # the best is kept, whatever its age
    with pytest.raises(StoreError, match="not kept"):
        reader.load(0)
    reader.close()


def test_s33_a_damaged_checkpoint_is_detected_and_the_one_before_it_used(store, tmp_path, lines):
    commit(store, 0, 1, 2)
    store.close()
    path = store.blobs / arena(2).digest
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    store = RunStore(tmp_path / "run", warn=lines.append)
    assert store.latest().round == 1
    assert "round 2" in lines[0]
    assert f"{path} is damaged" in lines[0]
    assert (tmp_path / "run/quarantine" / f"blobs-{path.name}").exists()
    assert [r.round for r in store.rounds()] == [0, 1]
    store.close()


def test_when_no_checkpoint_is_whole_the_store_says_so_and_keeps_everything(store, tmp_path):
    commit(store, 0, 1)
    store.close()
    for path in store.blobs.iterdir():
        path.write_bytes(b"")
    store = RunStore(tmp_path / "run")
    with pytest.raises(StoreError, match="damaged"):
        store.latest()
    assert len(store.rounds()) == 2
    store.close()


def test_a_round_made_again_does_not_believe_the_damaged_blob_of_its_name(store, tmp_path, lines):
    commit(store, 0, 1, 2)
    store.close()
    (store.blobs / arena(2).digest).write_bytes(b"x" * 400)
    store = RunStore(tmp_path / "run", warn=lines.append)
    assert store.latest().round == 1
    (store.blobs / arena(2).digest).write_bytes(b"y" * 400)  # and once more, behind its back
    commit(store, 2)
    assert store.on_disk(store.latest()).weights.load().digest == arena(2).digest
    store.close()


def test_a_lost_log_of_the_database_takes_no_round_with_it(store, tmp_path, lines):
    commit(store, 0, 1, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "killed")  # as kill -9 leaves it
    store.close()
    assert (tmp_path / "killed/run.db-wal").stat().st_size
    for name in ("run.db-wal", "run.db-shm"):
        (tmp_path / "killed" / name).unlink()
    killed = RunStore(tmp_path / "killed", warn=lines.append)
    assert killed.latest().round == 2
    killed.close()
    assert lines == []


def test_a_lost_log_takes_nothing_that_was_done_after_a_reader_left(store, tmp_path, lines):
    """While somebody reads, rounds stay in the log; the next one takes them all out of it."""
    commit(store, 0)
    reader = RunStore(tmp_path / "run", read_only=True)
    reader.db._db.execute("BEGIN")
    assert [r.round for r in reader.rounds()] == [0]
    commit(store, 1, 2)
    assert [r.round for r in reader.rounds()] == [0], "as when it began to read"
    reader.db._db.execute("COMMIT")
    assert [r.round for r in reader.rounds()] == [0, 1, 2]
    reader.close()
    store.set_plan(RoundPlan(2, 0, ["alice"]))
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    for name in ("run.db-wal", "run.db-shm"):
        (tmp_path / "killed" / name).unlink()
    killed = RunStore(tmp_path / "killed", warn=lines.append)
    assert (killed.latest().round, killed.plan(2).sites) == (2, ["alice"])
    killed.close()
    assert lines == []


def test_the_plan_of_a_round_is_committed_with_the_round_before_it_or_neither_is(store, monkeypatch):
    commit(store, 0)
    plan = RoundPlan(1, 0, ["alice", "bob"], registered=2)
    with monkeypatch.context() as broken:
        broken.setattr(store, "set_plan", lambda plan: store.db.put("no such table", plan.round))
        with pytest.raises(StoreError):
            store.commit(Checkpoint(1, arena(1)), {}, following=plan)
    assert (store.latest().round, store.plan(1)) == (0, None)
    store.commit(Checkpoint(1, arena(1)), {}, following=plan)
    assert (store.latest().round, store.plan(1)) == (1, plan)


def test_a_run_whose_database_and_its_redo_log_are_lost_is_no_new_run(store, tmp_path):
    commit(store, 0, 1)
    store.close()
    (tmp_path / "run/run.db").unlink()
    (tmp_path / "run/run.redo").unlink()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"run\.db knows of no round, though .*has 4 files.*Restore it"):
            RunStore(tmp_path / "run")


def content(folder, lines):
    """All that a run's database knows."""
    found = RunStore(folder, warn=lines.append)
    try:
        last = found.latest()
        rows = [(r.round, r.weights, r.record, r.metrics, r.best) for r in found.rounds()]
        return last.weights.digest, last.state["float32/m"].tolist(), rows, found.plan(2), found.meta()
    finally:
        found.close()


def filled(store):
    commit(store, 0, 1, 2)
    store.evaluated(2, {"loss": 0.5}, best=True)
    store.set_plan(RoundPlan(2, 0, ["alice", "bob"]))


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d is not swap])
@pytest.mark.parametrize("name", ["run.db", "run.redo"])
def test_of_a_database_and_its_redo_log_the_damaged_one_is_made_again_and_named(
    store, tmp_path, lines, name, damage
):
    filled(store)
    store.close()
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    damage(tmp_path / "run" / name, b"")
    assert content(tmp_path / "run", lines) == content(tmp_path / "whole", [])
    if lines:
        assert re.search(rf"/{name} .*(damaged|gone|lacks).* made again", lines[0])
    else:  # SQLite has bytes that nobody reads
        assert (name, damage) in [("run.db", flip), ("run.db", flip_another), ("run.db", extend)]
    again = []
    assert content(tmp_path / "run", again) == content(tmp_path / "whole", [])
    assert again == []


@pytest.mark.parametrize("name", ["run.db", "run.redo"])
def test_an_old_copy_of_a_database_or_of_its_redo_log_takes_no_transaction_with_it(
    store, tmp_path, lines, name
):
    commit(store, 0)
    store.close()
    old = (tmp_path / "run" / name).read_bytes()
    store = RunStore(tmp_path / "run")
    commit(store, 1)
    filled(store)
    store.close()
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    (tmp_path / "run" / name).write_bytes(old)
    assert content(tmp_path / "run", lines) == content(tmp_path / "whole", [])
    assert re.search(rf"{name} .*lacks the last \d+", lines[0])


def test_a_redo_log_stays_about_as_long_as_what_it_is_for(store, tmp_path, lines):
    sites = [f"site-{n}" for n in range(800)]
    for i in range(500):
        store.set_plan(RoundPlan(0, i, sites))
    assert 500 * len(" ".join(sites)) > 2 << 20
    assert (tmp_path / "run/run.redo").stat().st_size < 2 << 20
    commit(store, 0)
    store.close()
    (tmp_path / "run/run.db").unlink()
    store = RunStore(tmp_path / "run", warn=lines.append)
    assert store.plan(0).attempt == 499
    store.close()


def test_a_redo_log_that_is_made_anew_in_parts_has_the_line_of_all_rows_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(redo, "PART_BYTES", 100)
    rows = [redo.packed(("rounds", number, "x" * number)) for number in range(50)]
    digest = redo.digest_of_rows(rows)
    log = redo.Redo(tmp_path / "run.redo", durable=False)
    log.begin(7, digest, len(rows), iter(rows))
    log.note(True, ("rounds", 50, "y"))
    log.append(8, redo.digest_of_rows([*rows, last := redo.packed(("rounds", 50, "y"))]))
    log.close()
    found = redo.Redo(tmp_path / "run.redo", durable=False).read()
    assert (found.number, [*found.rows.values()], found.wrong) == (8, [*rows, last], "")


def test_a_transaction_that_fails_after_it_was_written_down_is_in_neither_file(store, tmp_path, monkeypatch):
    commit(store, 0)

    class Fails:
        def __init__(self, real):
            self.real = real

        def __getattr__(self, name):
            return getattr(self.real, name)

        def execute(self, sql, *values):
            if sql == "COMMIT":
                raise sqlite3.OperationalError("disk I/O error")
            return self.real.execute(sql, *values)

    with monkeypatch.context() as broken:
        broken.setattr(store.db, "_db", Fails(store.db._db))
        with pytest.raises(StoreError, match=r"run\.db"):
            store.set_plan(RoundPlan(0, 7, ["alice"]))
    store.set_plan(RoundPlan(0, 8, ["bob"]))
    store.close()
    (tmp_path / "run/run.db").unlink()
    store = RunStore(tmp_path / "run")
    assert store.plan(0) == RoundPlan(0, 8, ["bob"])
    store.close()


@pytest.mark.slow(3)
def test_any_bit_of_a_database_or_its_logs_that_changed_changes_nothing(store, tmp_path):
    """As kill -9 left it, and as it lies after an orderly end."""
    filled(store)
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    store.close()
    shutil.copytree(tmp_path / "run", tmp_path / "ended")
    whole, draw, named = content(tmp_path / "run", []), random.Random(7), 0
    for folder, file in (
        ("killed", "run.db"),
        ("killed", "run.db-wal"),
        ("ended", "run.db"),
        ("ended", "run.redo"),
    ):
        data = (tmp_path / folder / file).read_bytes()
        for i in range(60):
            copy, lines = tmp_path / f"{folder}-{file}-{i}", []
            shutil.copytree(tmp_path / folder, copy)
            bit = draw.randrange(8 * len(data))
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            (copy / file).write_bytes(changed)
            assert content(copy, lines) == whole, (file, bit)
            named += bool(lines)
            assert lines or file != "run.redo", bit
    assert named > 60


def test_a_changed_number_in_the_database_is_found(store, tmp_path, lines):
    commit(store, 0)
    store.set_plan(RoundPlan(0, 0, ["alice", "bob"]))
    store.close()
    path = tmp_path / "run/run.db"
    path.write_bytes(path.read_bytes().replace(b"alice", b"elise"))
    with pytest.raises(
        Damaged, match=r"is damaged: its rows do not have the digest.*own command makes it again"
    ):
        RunStore(tmp_path / "run", read_only=True)
    store = RunStore(tmp_path / "run", warn=lines.append)
    assert store.plan(0).sites == ["alice", "bob"]
    assert re.search(r"run\.db is damaged: its rows.*quarantine/run\.db now.*again from run\.redo", lines[0])
    store.close()


def test_rows_of_a_redo_log_stay_under_its_name_until_the_one_made_from_it_is_on_the_disk(
    tmp_path, lines, monkeypatch
):
    """Found by seed 8458 of tests.vsim: after two power cuts the log was in the quarantine, none had its
    place, and the database, which waits for no disk, was torn: it would have begun anew."""
    path, log = tmp_path / "run.db", tmp_path / "run.redo"
    tables = "CREATE TABLE IF NOT EXISTS t (k PRIMARY KEY)"

    def dies(*_, **__):
        raise KeyboardInterrupt

    def opened():
        path.write_bytes(bytes(4096))  # as a power cut leaves it
        for end in ("-wal", "-shm"):
            (tmp_path / f"run.db{end}").unlink(missing_ok=True)
        return Database(path, tables, remedy="", warn=lines.append)

    with closing(Database(path, tables, remedy="")) as database:
        database.put("t", 7)
    log.write_bytes((whole := log.read_bytes()) + bytes(210))  # of a transaction under way
    with monkeypatch.context() as dying:
        dying.setattr(redo, "whole_file", dies)
        with pytest.raises(KeyboardInterrupt):
            opened()
    assert log.read_bytes().startswith(whole)
    for _ in range(2):
        with closing(opened()) as database:
            assert database.all("SELECT k FROM t") == [(7,)]
    assert (tmp_path / "quarantine/run.redo").read_bytes() == whole + bytes(210)
    assert re.search(r"last 210 bytes are no.*It is quarantine/run\.redo now\. It was made", " ".join(lines))


def test_one_process_holds_a_run_and_a_second_is_told_which(store, tmp_path):
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        RunStore(tmp_path / "run")


def test_a_database_that_a_power_cut_tore_before_its_first_transaction_begins_anew(tmp_path, lines):
    """Found by seed 195 of tests.vsim: the run stopped for ever, and nothing of it had been done."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.db").write_bytes(bytes(4096))
    store = RunStore(folder, warn=lines.append)
    commit(store, 0)
    store.close()
    assert re.search(r"run\.db is damaged.*quarantine/run\.db now.*no run\.redo: it begins anew", lines[0])


def test_a_torn_database_without_its_redo_log_is_no_new_run_where_there_are_models(store, tmp_path):
    commit(store, 0)
    store.close()
    (tmp_path / "run/run.redo").unlink()
    (tmp_path / "run/run.db").write_bytes(bytes(4096))
    for _ in range(2):
        with pytest.raises(StoreError, match="knows of no round, though"):
            RunStore(tmp_path / "run")


def test_a_name_that_a_killed_process_left_is_on_the_disk_before_more_depends_on_it(tmp_path, monkeypatch):
    """Found by seed 277 of tests.vsim: a kill between a rename and the folder's sync, then a power cut."""
    for life in range(2):
        synced = []
        for module in (redo, run_folder, chain):
            monkeypatch.setattr(module, "sync_folder", synced.append)
        store = RunStore(tmp_path / "run")
        store.begin(SCHEMA, {})
        store.put_blob(arena(1.0))
        store.close()
        chain.Chain(tmp_path / "releases.jsonl", int, "").append(life)
    assert synced == [tmp_path / "run", tmp_path / "run/blobs", tmp_path]


def test_the_models_of_a_run_that_a_start_forgets_are_gone_for_sure_before_the_run_is(tmp_path, monkeypatch):
    """Found by seed 1536 of tests.vsim --gossip: after a power cut the models were back, and not the run."""
    store, seen = RunStore(tmp_path / "run"), []
    store.begin(SCHEMA, {})
    store.put_blob(arena(1.0))
    monkeypatch.setattr(
        runs, "sync_folder", lambda folder: seen.append((folder, store._strangers(), bool(store.meta())))
    )
    store.forget_if_unused()
    assert seen == [(store.blobs, 0, True)]
    assert not store.meta()
    store.close()


def test_a_line_that_a_killed_process_wrote_is_on_the_disk_before_more_depends_on_it(tmp_path, monkeypatch):
    """Found by seed 2646 of tests.vsim: killed before the sync of a round's line, an aggregator found that
    round when it was started again, told its sites that the run was over, and lost it in a power cut."""
    folder, written = tmp_path / "run", 0
    for _ in range(2):
        synced = []
        with monkeypatch.context() as during:
            during.setattr(redo.os, "fdatasync", lambda fd, to=synced: to.append(os.fstat(fd).st_size))
            store = RunStore(folder)
        store.begin(SCHEMA, {})
        store.close()
        assert not written or written in synced
        written = (folder / "run.redo").stat().st_size


def test_a_reader_of_no_run_is_told_how_to_find_one(tmp_path):
    with pytest.raises(StoreError, match="fedtrain runs"):
        RunStore(tmp_path, read_only=True)


def test_a_plan_outlives_the_process_and_ends_with_its_round(store):
    commit(store, 0)
    store.set_plan(RoundPlan(0, 1, ["a", "b"]))
    assert store.plan(0) == RoundPlan(0, 1, ["a", "b"])
    commit(store, 1)
    assert store.plan(0) is None


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_network_disk_is_refused_with_advice(tmp_path, kind):
    root = "22 1 0:21 / / rw - ext4 /dev/vda rw\n"
    mount = f"36 22 0:35 / {tmp_path} rw,relatime shared:2 - {kind} server:/export rw\n"
    refuse_network_disk(tmp_path, root)
    with pytest.raises(StoreError, match=f"is on {kind}.*run.dir.*local disk"):
        refuse_network_disk(tmp_path / "runs", root + mount)


def test_an_overmounted_local_disk_is_fine(tmp_path):
    lines = f"1 0 0:1 / {tmp_path} rw - nfs s:/ rw\n2 1 0:2 / {tmp_path} rw - ext4 /dev/vdb rw\n"
    refuse_network_disk(tmp_path, lines)


# --- a crash at each write: strace kills the process at its n-th system call


def commits(folder, traced):
    """In a process of its own, when it is told that it is traced."""
    traced.recv()
    store = RunStore(folder)
    store.begin(SCHEMA, {"train.lr": "0.1"}, task_digest="t")
    commit(store, 0, 1, 2, 3)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace (apt-get install strace)")
@pytest.mark.parametrize("call", ["fsync", "rename", "pwrite64"])
def test_s31_killed_at_any_system_call_the_last_committed_round_is_whole(tmp_path, call):
    died = 0
    for when in (1, 2, 4, 8):
        folder = tmp_path / str(when)
        here, there = FORKED.Pipe()
        victim = FORKED.Process(target=commits, args=(folder, there))
        victim.start()
        strace = ["strace", "-f", "-o", os.devnull, "-e", f"inject={call}:signal=KILL:when={when}"]
        with subprocess.Popen([*strace, "-p", str(victim.pid)], stderr=subprocess.PIPE, text=True) as tracer:
            assert "attached" in tracer.stderr.readline()
            here.send("go")
            victim.join(120)
        died += victim.exitcode == -signal.SIGKILL
        store = RunStore(folder)
        store.begin(SCHEMA, {"train.lr": "0.1"}, task_digest="t")
        last = store.latest()
        commit(store, *range((last.round if last else -1) + 1, 4))
        store.close()
        store = RunStore(folder, read_only=True)
        assert store.latest().weights.digest == arena(3).digest
        assert sorted(p.name for p in store.blobs.iterdir() if re.fullmatch("[0-9a-f]{32}", p.name))
        store.close()
    assert died >= 2, "the fault fired"


# --- the spool


def receive(spool, data, digest, *, upto=None, start=None):
    arriving = spool.receive(digest, len(data))
    try:
        at = arriving.offset if start is None else start
        arriving.write(data[at:upto])
        return Path(arriving.finish()) if upto is None else arriving.offset
    finally:
        arriving.close()


def test_a_broken_transfer_goes_on_from_where_it_stopped_also_in_another_process(tmp_path):
    data = os.urandom(100_000)
    assert receive(Spool(tmp_path), data, digest_of(data), upto=60_000) == 60_000
    arriving = Spool(tmp_path).receive(digest_of(data), len(data))
    assert arriving.offset == 60_000
    arriving.close()
    assert receive(Spool(tmp_path), data, digest_of(data)).read_bytes() == data
    assert Spool(tmp_path).receive(digest_of(data), len(data)).whole  # sent again: nothing to send


def test_a_recycled_file_shows_none_of_its_old_bytes_also_after_a_kill(tmp_path):
    old, new = os.urandom(200_000), os.urandom(100_000)
    spool = Spool(tmp_path)
    inode = receive(spool, old, digest_of(old)).stat().st_ino
    spool.keep_only(())
    arriving = spool.receive(digest_of(new), len(new))
    arriving.write(new[:50_000])
    arriving._file.close()  # killed: nothing was noted, and the file is as long as the old one
    assert receive(Spool(tmp_path), new, digest_of(new)).read_bytes() == new
    assert os.stat(spool.file(digest_of(new))).st_ino == inode


def test_bytes_with_another_digest_are_refused_and_forgotten(tmp_path):
    data = os.urandom(1000)
    with pytest.raises(WireError, match="do not have the digest"):
        receive(Spool(tmp_path), data, digest_of(b"other"))
    assert [p.name for p in tmp_path.iterdir() if p.name != "free"] == []


def test_more_bytes_than_announced_are_refused(tmp_path):
    arriving = Spool(tmp_path).receive(digest_of(b"x"), 10)
    with pytest.raises(WireError, match="more than the 10 bytes"):
        arriving.write(b"y" * 11)
    arriving.close()


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "A" * 32, "a" * 31])
def test_a_digest_is_never_a_path(tmp_path, name):
    with pytest.raises(WireError, match="not a digest"):
        Spool(tmp_path).file(name)


def test_a_file_of_an_earlier_process_is_believed_when_its_digest_is_right(tmp_path, lines):
    data = os.urandom(1000)
    path = receive(Spool(tmp_path), data, digest_of(data))
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    spool = Spool(tmp_path, lines.append)
    assert not spool.has(digest_of(data), 1000)
    assert len(lines) == 1
    assert f"{path} is damaged" in lines[0]
    assert receive(spool, data, digest_of(data)).read_bytes() == data
    assert Spool(tmp_path, lines.append).has(digest_of(data), 1000)
    for i in range(5):  # what is damaged does not gather
        path.write_bytes(bytes([i]))
        assert not Spool(tmp_path).has(digest_of(data), 1000)
        receive(Spool(tmp_path), data, digest_of(data))
    assert len(list((tmp_path / "quarantine").iterdir())) <= 4


def test_a_part_that_was_damaged_meanwhile_is_sent_again_and_is_nobodys_lie(tmp_path):
    data = os.urandom(100_000)
    receive(Spool(tmp_path), data, digest_of(data), upto=60_000)
    part = tmp_path / f"{digest_of(data)}.part"
    part.write_bytes(b"x" * 60_000)
    with pytest.raises(Broken, match="some lay in"):
        receive(Spool(tmp_path), data, digest_of(data))
    assert receive(Spool(tmp_path), data, digest_of(data), start=0).read_bytes() == data


# --- the site's ledger


def test_a_finished_reply_is_remembered_until_its_bytes_are_gone(tmp_path):
    data = os.urandom(640)
    ledger = Ledger(tmp_path)
    receive(ledger.outbox, data, digest_of(data))
    ledger.put("Train/0/abc", b"header", digest_of(data), 640)
    ledger.close()
    ledger = Ledger(tmp_path)
    assert ledger.get("Train/0/abc") == b"header"
    assert ledger.get("Train/1/abc") is None
    path = Path(ledger.outbox.file(digest_of(data)))
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert ledger.get("Train/0/abc") is None
    path.write_bytes(b"cut")  # a disk that was full
    assert ledger.get("Train/0/abc") is None
    ledger.close()


def test_a_damaged_ledger_is_made_again_or_begun_again_and_a_person_is_told(tmp_path, lines):
    data = os.urandom(640)
    ledger = Ledger(tmp_path)
    receive(ledger.outbox, data, digest_of(data))
    ledger.put("Train/0/abc", b"header", digest_of(data), 640)
    ledger.close()
    path = tmp_path / "ledger.db"
    path.write_bytes(path.read_bytes().replace(b"header", b"hedder"))
    ledger = Ledger(tmp_path, lines.append)
    assert ledger.get("Train/0/abc") == b"header"
    assert re.search(r"ledger\.db is damaged.*quarantine/ledger\.db now.*ledger\.redo", lines[0])
    ledger.close()
    path.write_bytes(path.read_bytes().replace(b"header", b"hedder"))
    (tmp_path / "ledger.redo").write_bytes(b"")
    ledger = Ledger(tmp_path, lines.append)
    assert ledger.get("Train/0/abc") is None
    assert re.search(r"ledger\.db is damaged.*worked out again.*quarantine/ledger\.db", lines[1])
    ledger.close()


def test_rows_put_changed_and_removed_have_the_digest_and_are_made_again_with_more_tables_too(
    tmp_path, lines
):
    first = "CREATE TABLE IF NOT EXISTS a (name TEXT PRIMARY KEY, size REAL)"
    second = f"{first};CREATE TABLE IF NOT EXISTS b (name TEXT, n INTEGER, data BLOB, PRIMARY KEY (name, n))"
    path = tmp_path / "x.db"
    db = Database(path, first, remedy="Begin anew.", warn=lines.append)
    db.put("a", "one", 1)  # a REAL: what is noted is what SQLite keeps of it
    db.put("a", "two", 2)
    db.put("a", "one", 3)
    db.close()
    db = Database(path, second, remedy="Begin anew.", warn=lines.append)
    with db.transaction():
        db.put("b", "one", 7, b"old")
        assert db.update("b", {"data": b"new"}, "n = ?", (7,)) == 1
        db.delete("a", "size < ?", (2.5,))
    with suppress(StoreError), db.transaction():
        db.delete("b")
        db.put("no such table", 1)
    db.close()
    for again in (False, False, True):  # as it was left twice, then made again from the redo log
        if again:
            path.write_bytes(b"")
        db = Database(path, second, remedy="Begin anew.", warn=lines.append)
        assert db.all("SELECT * FROM a") == [("one", 3.0)]
        assert db.all("SELECT * FROM b") == [("one", 7, b"new")]
        assert len(lines) == again
        db.close()


def test_a_value_that_is_kept_is_on_the_disk_before_anybody_acts_on_it(tmp_path, monkeypatch):
    """A process may have been killed between its write and its sync, and the power may go later."""
    path, synced = tmp_path / "kept.json", []
    Kept(path, int, "").write(3)
    for name in ("fdatasync", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, real=real: (synced.append(os.fstat(fd).st_ino), real(fd)))
    assert Kept(path, int, "").read() == [3, 3]
    files = [path, path.with_name(path.name + COPY), tmp_path]
    assert {*synced} == {file.stat().st_ino for file in files}
