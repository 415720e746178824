"""Signals, as a command hears them that a person starts in a terminal."""

import signal

# Before a command that a test will send SIGINT or SIGHUP: what a shell, or nohup, starts in the background
# does not hear them, and passes that on to all that it starts. A `preexec_fn` would fork beside our threads.
IN_TERMINAL = ("env", "--default-signal=INT,HUP")


def hear_ctrl_c() -> None:
    """As IN_TERMINAL, in a process that was forked."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
