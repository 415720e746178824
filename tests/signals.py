"""Signals, as a command hears them that a person starts in a terminal."""

import signal


def hear_ctrl_c() -> None:
    """What a shell, or nohup, starts in the background does not, and passes that on to all that it starts: so
    a test calls this in each process that it will send SIGINT or SIGHUP."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
