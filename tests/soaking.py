"""How much of a long list of faults `make soak` tries: what its minutes allow, another part each day."""

import os
import random
import time
from datetime import date

WORKERS = 2
MINUTES = float(os.environ.get("SOAK_MINUTES") or "28")  # of the whole of it; 0: all there is
DAY = int(os.environ.get("SOAK_DAY") or date.today().toordinal())


def taken(things, part, request):
    """These in an order that is the day's, until this part of all workers' time is over; at the end the test
    tells how many they were."""
    things, began, tried = [*things], time.monotonic(), 0
    random.Random(DAY).shuffle(things)
    for thing in things:
        if MINUTES and tried and time.monotonic() - began > MINUTES * 60 * WORKERS * part:
            break
        tried += 1
        yield thing
    request.node.user_properties.append(("tried", f"{tried} of {len(things)}"))
