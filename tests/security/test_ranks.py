"""Whoever reaches the port where ranks meet is not let in, and no rank can make another run code."""

import contextlib
import pickle
import socket
from datetime import timedelta
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fedtrain.errors import ConfigError, ConnectError, WireError
from fedtrain.messages import Metrics
from fedtrain.runtime import meeting
from fedtrain.runtime.meeting import VARIABLE, secret_of
from fedtrain.runtime.rank_store import FRAME_BYTES, RankStore, StoreCall, context_of
from fedtrain.training import collectives
from fedtrain.training.collectives import everyones, firsts, refuse_pickles
from tests.ports import free_port
from tests.processes import fedtrain
from tests.waves import Waves
from tests.worlds import Command

SECRET = "a" * 32


class Runs:
    """As a pickle, a command: it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


def attack(arguments: list[str]) -> None:
    """Be a rank of fedtrain's, whose every object is a command to whoever loads it."""
    mark, *rest = arguments
    honest = distributed_c10d._object_to_tensor
    distributed_c10d._object_to_tensor = lambda obj, *also: honest(Runs(Path(mark)), *also)
    fedtrain(rest)


def start(
    folder: Path, rank: int, port: int, run=fedtrain, before: tuple[str, ...] = (), **env: str
) -> Command:
    return Command(
        run, [*before, "datacenter", "--set", "evaluate.every=1", "--set", "run.rounds=1"],
        folder=folder, log=folder / f"rank-{rank}.log",
        env={
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **env,
        },
    )  # fmt: skip


@pytest.mark.slow(8)
def test_s20_a_stranger_who_reaches_the_port_of_the_ranks_runs_nothing_and_they_train(tmp_path):
    project, port, mark = Waves(tmp_path / "p", pace=0.0), free_port(), tmp_path / "ran"
    other = Waves(tmp_path / "other", pace=0.0)
    first = start(project.folder, 0, port)
    stranger = start(other.folder, 1, port, attack, (str(mark),))
    second = None
    try:
        with contextlib.suppress(TimeoutError):
            stranger.wait(20)
        assert not mark.exists(), "the stranger's command ran at rank 0"
        second = start(project.folder, 1, port)
        assert second.wait(60) == 0
        assert first.wait(60) == 0
    finally:
        for each in (first, stranger, *([second] if second else [])):
            each.kill()


def test_s20_the_ranks_of_one_machine_meet_on_loopback_and_no_other_address():
    store = RankStore.hosted(SECRET, "127.0.0.1", 0, 5)
    mine = [c for c in psutil.Process().net_connections() if c.laddr and c.laddr.port == store.port]
    assert [(c.laddr.ip, c.status) for c in mine] == [("127.0.0.1", "LISTEN")]


def test_s20_a_caller_without_the_secret_is_refused_before_a_byte_of_it_is_decoded(capfd):
    store = RankStore.hosted(SECRET, "127.0.0.1", 0, 5)
    store.set("key", b"kept")
    with pytest.raises(ConnectError, match=r"refuses this rank's secret.* same FEDTRAIN_RANKS_SECRET"):
        RankStore.joined("b" * 32, lambda: ("127.0.0.1", store.port), 5)
    for said in (
        b"\x00\x00\x00\x08" + msgspec.msgpack.encode(StoreCall("check")),
        pickle.dumps(Runs(Path("x"))),
    ):
        # It may be refused at any byte.
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", store.port), 5) as plain:
            plain.sendall(said)
            plain.shutdown(socket.SHUT_WR)
            assert b"kept" not in plain.recv(4096)
    other = RankStore.joined(SECRET, lambda: ("127.0.0.1", store.port), 5)
    assert other.get("key") == b"kept"
    assert capfd.readouterr().err.count("rank 0 refused 127.0.0.1, who does not hold the ranks' secret") >= 1


def test_s21_who_holds_the_secret_can_declare_no_length_that_fills_rank_0s_memory():
    store = RankStore.hosted(SECRET, "127.0.0.1", 0, 5)
    with context_of(SECRET, server=False).wrap_socket(
        socket.create_connection(("127.0.0.1", store.port), 5), server_hostname="ranks"
    ) as channel:
        assert channel.recv(1) == b"+"
        channel.sendall(b"\xff\xff\xff\xff")
        assert channel.recv(1) == b"", "the connection is ended"
    with pytest.raises(WireError, match="are allowed"):
        store_of(store).set("key", b"x" * (FRAME_BYTES + 1))


def test_a_store_answers_as_torchs_own_does():
    store = RankStore.hosted(SECRET, "127.0.0.1", 0, 5)
    other = store_of(store)
    other.set("key", "value")
    assert (store.get("key"), other.check(["key"]), other.check(["key", "none"])) == (b"value", True, False)
    assert (other.add("n", 3), store.add("n", -1)) == (3, 2)
    with pytest.raises(RuntimeError, match=r"has not got none after 0\.01 s"):
        other.wait(["none"], timedelta(seconds=0.01))


def test_ranks_of_several_machines_need_a_secret_and_those_of_one_keep_their_own(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"FEDTRAIN_RANKS_SECRET is not set.*openssl rand -hex 32"):
        secret_of(tmp_path, one_machine=False)
    runs = tmp_path / "runs"
    found = secret_of(runs, one_machine=True)
    assert len(found) == 64
    assert secret_of(runs, one_machine=True) == found
    (file,) = runs.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        secret_of(runs, one_machine=True)
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(ConfigError, match="5 characters, 32 are needed"):
        secret_of(runs, one_machine=True)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    kept = distributed_c10d._object_to_tensor, distributed_c10d._tensor_to_object
    yield
    distributed_c10d._object_to_tensor, distributed_c10d._tensor_to_object = kept
    dist.destroy_process_group()


def test_s20_torchs_own_collectives_of_objects_are_refused_in_a_rank(alone):
    refuse_pickles()
    with pytest.raises(WireError, match="load pickles"):
        dist.all_gather_object([None], {"a": 1})
    with pytest.raises(WireError, match="load pickles"):
        dist.broadcast_object_list([None], 0)


def test_s20_a_frame_of_another_rank_is_read_as_the_expected_type_and_nothing_else(alone):
    metrics = {"loss": (1.5, 2.0), "counts": ([1.0, 2.0], 3.0)}
    assert everyones(metrics, Metrics) == [metrics]
    assert firsts("word", str) == "word"
    for lie in ("no metrics", {"loss": "high"}, pickle.dumps(Runs(Path("x")))):
        with pytest.raises(WireError, match="rank 0 of the group sent what can't be read"):
            everyones(lie, Metrics)


def test_s21_a_length_that_a_rank_declares_is_checked_before_room_is_made_for_it(alone, monkeypatch):
    monkeypatch.setattr(collectives, "_frame", lambda value, device: torch.empty(0, dtype=torch.uint8))
    honest = dist.all_gather

    def lies(boxes, mine, group=None):
        honest(boxes, mine, group=group)
        boxes[0].fill_(1 << 40)

    monkeypatch.setattr(dist, "all_gather", lies)
    with pytest.raises(WireError, match=r"announces a message of 1,099,511,627,776 bytes"):
        everyones({}, Metrics)


def store_of(hosted: RankStore) -> RankStore:
    return RankStore.joined(SECRET, lambda: ("127.0.0.1", hosted.port), 5)


def test_torchruns_own_store_that_loads_pickles_is_told_at_the_start(monkeypatch):
    """Of c10d, which gives the run an id; plain torchrun calls it "none"."""
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert meeting.advice() == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "5f1c7b1e")
    assert meeting.advice() == [meeting.OPEN]
