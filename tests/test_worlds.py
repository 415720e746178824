"""Commands as tests start them: they hear what they are sent, and one that goes on tells why."""

import os
import signal
import threading
import time

import pytest
from torch.multiprocessing import ProcessExitedException

from tests import worlds
from tests.limits import WAIT_S
from tests.worlds import FORKED, Command


def interrupts_itself(_):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted")


def stands_still(_):
    print("begun", flush=True)
    threading.Event().wait()


def end_by_a_fault(rank, ranks):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.slow(5)
def test_a_rank_that_a_fault_ends_shows_where_it_was():
    with pytest.raises(ProcessExitedException, match="SIGSEGV") as failed:
        worlds.world(2, end_by_a_fault)
    (note,) = failed.value.__notes__
    assert "rank 1, by its faulthandler:\nFatal Python error: Segmentation fault" in note
    assert "in end_by_a_fault" in note


def in_the_background(log):
    """The command where the tests run under `nohup … &`."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    worlds._command(interrupts_itself, [], log.parent, log, {**os.environ})


@pytest.mark.slow(5)  # until there is a process with torch to fork
def test_a_command_hears_ctrl_c_wherever_its_test_was_started(tmp_path):
    process = FORKED.Process(target=in_the_background, args=(tmp_path / "log",))
    process.start()
    process.join(WAIT_S)
    assert (process.exitcode, (tmp_path / "log").read_text()) == (0, "interrupted\n")


@pytest.mark.slow(5)
def test_a_command_that_goes_on_is_an_error_with_its_log_and_where_it_stands(tmp_path):
    log, until = tmp_path / "log", time.monotonic() + WAIT_S
    command = Command(stands_still, [], folder=tmp_path, log=log, env={})
    try:
        while not (log.exists() and log.read_text()):
            assert time.monotonic() < until
            time.sleep(0.01)
        with pytest.raises(TimeoutError, match=r"(?s)goes on after 0.1 s:\nbegun\n.*in stands_still"):
            command.wait(0.1)
    finally:
        command.kill()
        command.wait(WAIT_S)
