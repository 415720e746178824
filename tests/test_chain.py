"""A chain keeps what was added to it, over lost files, half-written lines, full disks; it shows a change."""

import errno
import os

import msgspec
import pytest

from fedtrain.errors import Damaged, StoreError
from fedtrain.store.chain import Chain


class Value(msgspec.Struct, frozen=True):
    n: int
    text: str = ""


VALUES = [Value(1, "ä"), Value(2), Value(3, "{}\\n")]


@pytest.fixture
def path(tmp_path):
    chain = Chain(tmp_path / "given", Value, "Restore it.")
    for value in VALUES:
        chain.append(value)
    return tmp_path / "given"


def read(path, warn=lambda line: None):
    return Chain(path, Value, "Restore it.", warn).values


def copy(path):
    return path.with_name("given.copy")


def test_what_was_added_is_there_again(path):
    assert read(path) == VALUES
    Chain(path, Value, "").append(Value(4))
    assert [value.n for value in read(path)] == [1, 2, 3, 4]
    assert path.read_bytes() == copy(path).read_bytes()


def test_of_a_chain_whose_values_are_kept_in_part_each_is_read_again_from_the_file_that_has_it(path):
    chain = Chain(path, Value, "Restore it.", kept=lambda value: value.n)
    chain.append(Value(4, "d"))
    assert chain.values == [1, 2, 3, 4]
    assert [*chain.stored([3, 0, 2])] == [Value(4, "d"), VALUES[0], VALUES[2]]
    path.write_bytes(path.read_bytes().replace(b"\xc3\xa4", b"ab"))
    assert [*chain.stored(range(4))] == [*VALUES, Value(4, "d")]
    copy(path).unlink()
    with pytest.raises(Damaged, match=r"changed while it was in use. Restore it\."):
        [*chain.stored([0])]


def test_a_chain_whose_files_were_replaced_while_it_was_in_use_stops(path, tmp_path):
    chain, other = Chain(path, Value, "Restore it."), Chain(tmp_path / "other", Value, "")
    for value in (Value(9), *VALUES):
        other.append(value)
    for each in (path, copy(path)):
        each.write_bytes((tmp_path / "other").read_bytes())
    with pytest.raises(Damaged, match="changed while it was in use"), chain.alone():
        pass
    assert chain.values == VALUES


def test_a_chain_that_never_was_is_empty(tmp_path):
    assert read(tmp_path / "none") == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("which", [lambda path: path, copy])
@pytest.mark.parametrize("cut", [0, 1, 70, 200])
def test_of_a_shorter_or_lost_file_the_other_has_all(path, which, cut):
    whole = path.read_bytes()
    which(path).write_bytes(whole[:cut])
    if not cut:
        which(path).unlink()
    assert read(path) == VALUES
    assert path.read_bytes() == copy(path).read_bytes() == whole


@pytest.mark.parametrize("which", [lambda path: path, copy])
def test_a_changed_line_is_seen_and_the_other_file_used(path, which):
    text = which(path).read_bytes()
    which(path).write_bytes(text.replace(b'"n":2', b'"n":5'))
    lines = []
    assert read(path, lines.append) == VALUES
    assert "line 2 is not sealed" in lines[0]
    assert "the other of the two files is used" in lines[0]
    assert path.read_bytes() == copy(path).read_bytes() == text


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0], lines[2]],  # one left out
        lambda lines: [lines[1], lines[0], lines[2]],
        lambda lines: [line.replace(b'"n":1', b'"n":0') for line in lines],
    ],
)
def test_a_change_of_both_files_stops(path, change):
    text = b"".join(change(path.read_bytes().splitlines(keepends=True)))
    path.write_bytes(text)
    copy(path).write_bytes(text)
    with pytest.raises(Damaged, match=r"given is damaged.*Restore it"):
        read(path)


def test_a_damaged_file_that_is_longer_than_its_copy_stops(path):
    """What its last line said, nobody knows any more."""
    lines = path.read_bytes().splitlines(keepends=True)
    copy(path).write_bytes(b"".join(lines[:2]))
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(b'"n":3', b'"n":4')]))
    with pytest.raises(Damaged, match="its copy doesn't have all of it"):
        read(path)


def test_two_whole_files_that_differ_stop(path, tmp_path):
    other = Chain(tmp_path / "other", Value, "")
    other.append(Value(9))
    copy(path).write_bytes((tmp_path / "other").read_bytes())
    with pytest.raises(Damaged, match="tell different things"):
        read(path)


def test_a_line_that_was_not_finished_was_not_added(path):
    chain = Chain(path, Value, "")
    for each in (path, copy(path)):
        with each.open("ab") as file:
            file.write(b'12ab {"n":')
    assert read(path) == VALUES
    chain.append(Value(4))
    assert [value.n for value in read(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("lines", [0, 2])
def test_a_line_of_which_a_power_cut_left_some_sectors_was_not_added(path, lines):
    """Found by seed 968 of tests.vsim: it is as long as it was to be, with zeros where sectors are missing;
    its copy was not begun. Where both files have such a line it was once whole, and is not forgotten."""
    whole = path.read_bytes().splitlines(keepends=True)
    torn = whole[lines][:40] + bytes(len(whole[lines]) - 41) + b"\n"
    copy, told = path.with_name("given.copy"), []
    path.write_bytes(b"".join(whole[:lines]) + torn)
    copy.write_bytes(path.read_bytes())
    with pytest.raises(Damaged, match="its copy doesn't have all of it"):
        read(path)
    if lines:
        copy.write_bytes(b"".join(whole[:lines]))
    else:
        copy.unlink()
    assert read(path, told.append) == VALUES[:lines]
    assert len(told) == 1
    Chain(path, Value, "Restore it.").append(VALUES[lines])
    assert read(path) == VALUES[: lines + 1]


def test_after_a_full_disk_the_chain_goes_on(path, monkeypatch):
    chain, fsync = Chain(path, Value, ""), os.fsync

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="no room for"):
            chain.append(Value(9))
    assert os.fsync is fsync
    chain.append(Value(4))
    assert [value.n for value in read(path)] == [1, 2, 3, 4]
