"""How much of a long list of faults `make soak` tries: what its minutes allow, another part each day. The
test of such a list is marked `soak(part=0.05)`, and starts when the tests of the short lists are done."""

import os
import random
import time
from datetime import date

WORKERS = 2
MINUTES = float(os.environ.get("SOAK_MINUTES") or "28")  # of the whole of it; 0: all there is
END_S = time.monotonic() + MINUTES * 60  # when this module is imported, the tests are collected
DAY = int(os.environ.get("SOAK_DAY") or date.today().toordinal())


def taken(things, request):
    """These in an order that is the day's, until the test's part of all workers' time is over, or the whole
    of it; at the end the test tells how many they were."""
    part = request.node.get_closest_marker("soak").kwargs["part"]
    things, until_s, tried = [*things], time.monotonic() + MINUTES * 60 * WORKERS * part, 0
    random.Random(DAY).shuffle(things)
    for thing in things:
        if MINUTES and tried and time.monotonic() > min(until_s, END_S):
            break
        tried += 1
        yield thing
    request.node.user_properties.append(("tried", f"{tried} of {len(things)}"))
