"""Checkpoints: what is stored, that it is whole, and what happens when it isn't."""

import errno
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from fedtrain.errors import StoreError
from fedtrain.training.checkpoint import Checkpoints
from fedtrain.training.manifest import MANIFEST, newest, plain, unplain
from tests.bucket import bucket


class Run:
    """A model, Adam, a schedule and a place in the data, as a training loop has them."""

    def __init__(self, width=16):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.taken = 0

    def steps(self, count):
        for _ in range(count):
            g = torch.Generator().manual_seed(self.taken)
            self.optimizer.zero_grad()
            self.model(torch.randn(12, 8, generator=g)).square().mean().backward()
            self.optimizer.step()
            self.schedule.step()
            self.taken += 12
        return self

    def state_dict(self):
        for p in self.model.parameters():
            if p not in self.optimizer.state:
                zeros = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
                self.optimizer.state[p] = zeros
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "taken": self.taken,
        }

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        groups = state["optimizer"]["param_groups"]
        slots = {int(k): v for k, v in state["optimizer"]["state"].items()}
        self.optimizer.load_state_dict({"state": slots, "param_groups": groups})
        self.schedule.load_state_dict(state["schedule"])
        self.taken = state["taken"]

    def bits(self):
        digest = hashlib.sha256()
        for t in self.model.state_dict().values():
            digest.update(t.numpy().tobytes())
        return digest.hexdigest()


def checkpoints(where, **kwargs):
    kwargs.setdefault("background", False)
    return Checkpoints(where, **kwargs)


@pytest.mark.parametrize("background", [False, True])
def test_stop_and_resume_is_not_stopping_bit_for_bit(tmp_path, background):
    whole = Run().steps(10)
    first = checkpoints(tmp_path, background=background)
    first.save(4, Run().steps(4))
    first.close()
    again = Run()
    assert checkpoints(tmp_path).load(again) == 4
    again.steps(6)
    assert again.bits() == whole.bits()
    assert again.schedule.state_dict() == whole.schedule.state_dict()


def test_a_background_save_holds_the_state_of_its_step_whatever_training_does_next(tmp_path):
    saved, run, bits = checkpoints(tmp_path, background=True), Run(), {}
    for step in (1, 2, 3):
        if step == 3:
            run = Run(width=5)  # of other shapes than what was kept of the saves before
        bits[step] = run.steps(1).bits()
        saved.save(step, run)
        run.steps(3)
    saved.close()
    for step in (3, 2, 1):
        again = Run(width=5 if step == 3 else 16)
        assert checkpoints(tmp_path).load(again) == step
        assert again.bits() == bits[step]
        shutil.rmtree(tmp_path / f"step-{step:09d}")


# --- What counts, and what stays


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_the_newest_few_stay(tmp_path):
    saved, run = checkpoints(tmp_path, keep=2), Run()
    for step in (1, 2, 3, 4):
        saved.save(step, run.steps(1))
    assert names(tmp_path) == ["step-000000003", "step-000000004"]
    assert saved.last == 4


def test_it_is_saved_when_due_and_at_the_end_once(tmp_path):
    saved, run = checkpoints(tmp_path, every=2, keep=9), Run()
    for step in (1, 2, 3, 4):
        saved.maybe_save(run.steps(1), step)
    saved.finish(run, 4)
    assert names(tmp_path) == ["step-000000002", "step-000000004"]
    checkpoints(tmp_path, every=2, keep=9).finish(run.steps(1), 5)
    assert names(tmp_path)[-1] == "step-000000005"


def test_an_unfinished_save_never_counts_and_is_swept_by_the_next(tmp_path):
    run = Run().steps(1)
    checkpoints(tmp_path).save(1, run)
    checkpoints(tmp_path).save(2, run.steps(1))
    (tmp_path / "step-000000002" / MANIFEST).unlink()
    again = Run()
    assert checkpoints(tmp_path).load(again) == 1
    checkpoints(tmp_path).save(3, run)
    assert names(tmp_path) == ["step-000000001", "step-000000003"]


def test_nothing_saved_is_nothing_loaded(tmp_path):
    run = Run()
    before = run.bits()
    assert checkpoints(tmp_path).load(run) is None
    assert checkpoints(tmp_path / "never").restore(run) is False
    assert run.bits() == before


def test_a_step_saved_twice_is_the_second_one(tmp_path):
    run = Run().steps(1)
    checkpoints(tmp_path).save(1, run)
    checkpoints(tmp_path).save(1, run.steps(1))
    again = Run()
    assert checkpoints(tmp_path).load(again) == 1
    assert again.bits() == run.bits()
    assert len(names(tmp_path / "step-000000001")) == 2


def test_a_full_checkpoint_is_one_file_that_safetensors_reads(tmp_path):
    run = Run().steps(2)
    checkpoints(tmp_path, format="full").save(2, run)
    (file,) = (tmp_path / "step-000000002").glob("*.safetensors")
    found = load_file(file)
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(found[f"model.{name}"], tensor)


def test_the_manifest_has_the_sha256_of_each_file(tmp_path):
    checkpoints(tmp_path).save(2, Run())
    folder = tmp_path / "step-000000002"
    files = json.loads((folder / MANIFEST).read_text())["manifest"]["files"]
    assert files
    for name, file in files.items():
        content = (folder / name).read_bytes()
        assert file == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


# --- Damage


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    """Two checkpoints, and the bits of the first."""
    folder = tmp_path_factory.mktemp("two")
    run, saved = Run().steps(1), checkpoints(folder)
    saved.save(1, run)
    bits = run.bits()
    saved.save(2, run.steps(1))
    return folder, bits


def damaged(folder, file, damage):
    """The folder's newest checkpoint with one file changed, until the block ends."""
    path = next((folder / "step-000000002").glob(file))
    before = path.read_bytes()
    path.write_bytes(damage(before))
    return path, before


@settings(deadline=None)
@given(
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    file=st.sampled_from(["*.safetensors", MANIFEST]),
)
def test_any_flipped_bit_is_found_named_and_the_checkpoint_before_is_used(two_saved, where, bit, file):
    folder, bits = two_saved

    def flip(content):
        at = int(where * len(content))
        return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]

    path, before = damaged(folder, file, flip)
    try:
        lines, run = [], Run()
        assert checkpoints(folder, notice=lines.append).load(run) == 1
        assert run.bits() == bits
        assert len(lines) == 1
        assert f"step-000000002/{path.name}" in lines[0]
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b""])
@pytest.mark.parametrize("file", ["*.safetensors", MANIFEST])
def test_a_file_of_another_length_is_found(two_saved, file, damage):
    folder, bits = two_saved
    path, before = damaged(folder, file, damage)
    try:
        run = Run()
        assert checkpoints(folder).load(run) == 1
        assert run.bits() == bits
    finally:
        path.write_bytes(before)


def test_a_file_that_is_gone_is_found(two_saved):
    folder, _ = two_saved
    path, before = damaged(folder, "*.safetensors", lambda b: b)
    path.unlink()
    try:
        lines, run = [], Run()
        assert checkpoints(folder, notice=lines.append).load(run) == 1
        assert "is gone" in lines[0]
    finally:
        path.write_bytes(before)


def test_only_damaged_checkpoints_are_an_error_never_a_fresh_start(tmp_path):
    checkpoints(tmp_path).save(1, Run())
    (file,) = (tmp_path / "step-000000001").glob("*.safetensors")
    file.write_bytes(b"")
    with pytest.raises(StoreError, match=r"no good one: .*0 bytes"):
        checkpoints(tmp_path).load(Run())


def test_after_damage_the_next_save_sweeps_the_damaged_one(tmp_path):
    run, saved = Run(), checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        saved.save(step, run.steps(1))
    next((tmp_path / "step-000000003").glob("*.safetensors")).write_bytes(b"")
    again = checkpoints(tmp_path, keep=2)
    assert again.load(run) == 2
    again.save(3, run.steps(1))
    assert names(tmp_path) == ["step-000000002", "step-000000003"]
    assert checkpoints(tmp_path).load(Run()) == 3


def test_a_checkpoint_of_another_model_is_refused_and_not_passed_over(tmp_path):
    checkpoints(tmp_path).save(1, Run())
    with pytest.raises(StoreError, match="another model or optimizer"):
        checkpoints(tmp_path).load(Run(width=17))


def test_a_checkpoint_of_another_run_is_refused_whole_or_damaged_and_a_program_without_settings_takes_any(
    tmp_path,
):
    checkpoints(tmp_path, run={"train.lr": "0.1", "run.seed": "0"}).save(1, Run())
    next((tmp_path / "step-000000001").glob("*.safetensors")).write_bytes(b"")
    differ = r"other settings: run\.seed was 0, is 7, train\.lr was 0\.1, is 0\.5"
    with pytest.raises(StoreError, match=differ):
        checkpoints(tmp_path, run={"train.lr": "0.5", "run.seed": "7"}).load(Run())
    checkpoints(tmp_path, run={"run.seed": "0"}).save(2, Run())
    assert checkpoints(tmp_path).load(Run()) == 2


def test_a_checkpoint_of_a_later_format_says_so(tmp_path):
    checkpoints(tmp_path).save(1, Run())
    file = tmp_path / "step-000000001" / MANIFEST
    body = json.loads(file.read_text())["manifest"] | {"format": 3}
    text = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(f'{{"sha256":"{digest}","manifest":{text}}}')
    with pytest.raises(StoreError, match="has format 3; this fedtrain reads 1 and 2"):
        checkpoints(tmp_path).load(Run())


# --- A crash at each step that the disk sees


def crash(folder, run, at):
    """Save step 2 in a child that is killed at its `at`-th operation in `folder`; False: it had fewer."""
    saved = checkpoints(folder, keep=1)
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event, args):
            nonlocal count
            writes = event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
            if writes and str(folder) in str(args[0]):
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        saved.save(2, run)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_killed_at_any_file_operation_of_a_save_the_last_checkpoint_or_the_new_one_is_whole(tmp_path):
    one, two = Run().steps(1), Run().steps(2)
    bits, found = {1: one.bits(), 2: two.bits()}, []
    for at in range(1, 60):
        folder = tmp_path / str(at)
        checkpoints(folder, keep=1).save(1, one)
        killed = crash(folder, two, at)
        run = Run()
        found.append(checkpoints(folder).load(run))
        assert run.bits() == bits[found[-1]]
        if not killed:
            break
    assert not killed
    assert found == sorted(found)
    assert found[0] == 1
    assert found[-1] == 2
    assert len(found) > 8


# --- No room


def test_a_full_disk_is_a_notice_with_numbers_and_training_goes_on(tmp_path):
    lines, run = [], Run().steps(1)
    saved = checkpoints(tmp_path, notice=lines.append)
    saved.save(1, run)
    bits = run.bits()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        saved.save(2, run.steps(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert len(lines) == 1
    assert "step 2 was not written: no room for" in lines[0]
    assert os.strerror(errno.EFBIG) in lines[0]
    assert "4,096 bytes" in lines[0]
    assert "the last good one is of step 1" in lines[0]
    with pytest.raises(StoreError, match="step 2 was not written"):
        saved.wait()
    again = Run()
    assert checkpoints(tmp_path).load(again) == 1
    assert again.bits() == bits
    saved.save(3, run)
    saved.wait()
    assert names(tmp_path) == ["step-000000001", "step-000000003"]


# --- Values


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.lists(inside, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inside, max_size=3)
    ),
    max_leaves=8,
)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a.hex() == b.hex()  # tells -0.0 from 0.0, and knows NaN
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a == b


@settings(deadline=None)
@given(json_like)
def test_values_come_back_as_they_were(value):
    assert same(value, unplain(json.loads(json.dumps(plain(value)))))


class Holds:
    def __init__(self, **values):
        self.values = values

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = dict(state)


def test_tensors_of_every_kind_come_back(tmp_path):
    kinds = (
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    )
    g = torch.Generator().manual_seed(0)
    made = {str(k): torch.randn(5, 3, generator=g).to(k) for k in kinds}
    made |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "t": torch.randn(4, 6, generator=g).T}
    state = Holds(tensors=made, tuple=(0.9, 0.999), nan=float("nan"), none=None, nested={"a": {"b": [1, 2]}})
    checkpoints(tmp_path).save(1, {"x": state})
    blank = Holds(
        tensors={k: torch.zeros_like(t) for k, t in made.items()},
        tuple=None, nan=0, none=1, nested={"a": {"b": None}},
    )  # fmt: skip
    checkpoints(tmp_path).load({"x": blank})
    assert all(torch.equal(blank.values["tensors"][k], t) for k, t in made.items())
    assert blank.values["tuple"] == (0.9, 0.999)
    assert math.isnan(blank.values["nan"])
    assert blank.values["none"] is None
    assert blank.values["nested"] == {"a": {"b": [1, 2]}}


def test_an_object_that_is_no_value_is_refused_by_its_name(tmp_path):
    with pytest.raises(StoreError, match=r"x\.inner\.thing: a object can't be stored"):
        checkpoints(tmp_path).save(1, {"x": Holds(inner={"thing": object()})})


def test_a_value_too_long_for_the_manifest_is_refused(tmp_path):
    with pytest.raises(StoreError, match="Make it a tensor"):
        checkpoints(tmp_path).save(1, {"x": Holds(text="a" * (1 << 21))})


def test_s20_a_checkpoint_with_a_pickle_in_it_is_never_unpickled(tmp_path):
    """What stock DCP would run is no value here, and no manifest."""
    checkpoints(tmp_path).save(1, {"x": Holds(value=1)})
    (tmp_path / "step-000000001" / MANIFEST).write_bytes(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(StoreError, match="damaged"):
        checkpoints(tmp_path).load({"x": Holds(value=0)})


# --- A bucket


@pytest.fixture(scope="module")
def s3():
    with pytest.MonkeyPatch.context() as patch, bucket(patch) as found:
        yield found


def test_a_bucket_holds_checkpoints_as_a_folder_does(s3):
    url, _ = s3
    saved, run = checkpoints(f"{url}/a/b", keep=2), Run()
    for step in (1, 2, 3):
        saved.save(step, run.steps(1))
    again = Run()
    other = checkpoints(f"{url}/a/b")
    assert newest(other.place) == ["step-000000003", "step-000000002"]
    assert other.load(again) == 3
    assert again.bits() == run.bits()
    assert checkpoints(f"{url}/a").load(Run()) is None


def test_damage_in_a_bucket_is_found(s3):
    url, _ = s3
    saved, run, lines = checkpoints(f"{url}/damage"), Run(), []
    saved.save(1, run.steps(1))
    bits = run.bits()
    saved.save(2, run.steps(1))
    (file,) = (f for f in saved.place.files("step-000000002") if f != MANIFEST)
    saved.place.write(f"step-000000002/{file}", lambda: [b"not what it was"])
    assert checkpoints(f"{url}/damage", notice=lines.append).load(run) == 1
    assert run.bits() == bits
    assert f"{url}/damage/step-000000002/{file} is damaged: 15 bytes" in lines[0]


@pytest.mark.parametrize("which", range(4))  # a file's upload begins, ends; so does the next's
def test_an_answer_of_a_bucket_that_is_lost_on_its_way_is_asked_for_again(s3, which):
    url, wire = s3
    saved, run = checkpoints(f"{url}/lost/{which}"), Run()
    with wire.losing("POST", which) as lost:
        saved.save(1, run.steps(1))
    with wire.losing("GET", which) as other:
        assert checkpoints(f"{url}/lost/{which}").load(again := Run()) == 1
    assert lost
    assert other
    assert again.bits() == run.bits()


def test_a_large_tensor_goes_to_a_bucket_in_parts(s3):
    url, _ = s3
    made = torch.randn(5 << 20, generator=torch.Generator().manual_seed(1))  # 20 MiB
    checkpoints(f"{url}/large").save(1, {"x": Holds(t=made)})
    found = Holds(t=torch.zeros_like(made))
    checkpoints(f"{url}/large").load({"x": found})
    assert torch.equal(found.values["t"], made)


@pytest.mark.slow(2)
def test_a_bucket_that_is_away_for_a_while_is_waited_for(s3):
    url, wire = s3
    saved, run = checkpoints(f"{url}/away", background=True, patience_s=60), Run().steps(1)
    wire.cut()
    threading.Timer(1.5, wire.mend).start()
    saved.save(1, run)
    saved.close()
    assert checkpoints(f"{url}/away").load(Run()) == 1


def test_a_bucket_that_stays_away_is_a_notice_and_training_goes_on(s3):
    url, wire = s3
    lines, run = [], Run().steps(1)
    saved = checkpoints(f"{url}/gone", patience_s=1, notice=lines.append)
    wire.cut()
    try:
        saved.save(1, run)
    finally:
        wire.mend()
    assert "step 1 was not written" in lines[0]
    assert "AWS_ENDPOINT_URL" in lines[0]
    with pytest.raises(StoreError):
        saved.wait()
    saved.save(2, run)
    saved.close()
    assert checkpoints(f"{url}/gone").load(Run()) == 2


def test_a_bucket_that_does_not_exist_says_what_to_look_at(s3):
    with pytest.raises(StoreError, match=r"can't be listed.*AWS_ENDPOINT_URL"):
        checkpoints("s3://nobody-made-this", patience_s=1).load(Run())
