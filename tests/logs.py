"""Event logs for tests of what reads them, written as a run writes them."""

from __future__ import annotations

import itertools

from fedtrain import events as e
from fedtrain.tracking.log import EventLog

SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"


class Written(list):
    """All events of a log, as they stand in it."""


def write(folder, events, began=1_700_000_000.0, every=0.05):
    """Write events to a run directory, so many seconds apart; returns them as they were written."""
    found, ticks = Written(), itertools.count()
    with EventLog(folder, found.append, clock=lambda: began + every * next(ticks)) as log:
        for event in events:
            log.emit(event)
    return found


def rounds(sites, first, last):
    """A federation's rounds: each site fetches, trains and uploads; every second round is evaluated."""
    for number in range(first, last + 1):
        yield e.RoundStarted(round=number, sites=sites)
        for state in ("training", "uploading"):
            yield from (e.SiteState(site=site, state=state) for site in sites)
        for place, site in enumerate(sites):
            loss = 1 / number + place / 100
            yield e.UpdateReceived(round=number, site=site, loss=loss, num_examples=10 + place, nbytes=100)
        yield e.RoundCommitted(
            round=number, loss=1 / number, metrics={"loss": 1 / number}, seconds=0.5, sites=len(sites),
            bytes_in=100 * len(sites), bytes_out=50, commit_s=0.01,
        )  # fmt: skip
        if number % 2 == 0:
            own = {site: {"accuracy": 1 - 1 / number - place / 100} for place, site in enumerate(sites)}
            yield e.Evaluated(round=number, metrics={"accuracy": 1 - 1 / number}, by_site=own)
            yield e.Best(round=number, metric="accuracy", value=1 - 1 / number)


def federation(sites=("north", "south", "<b>"), last=4, planned=6, name="clinic"):
    """The first rounds of a run."""
    yield e.RunStarted(run=name, mode="federated", rounds=planned, sites=len(sites), config_digest="ab" * 32)
    yield e.Notice(text=f"listening on 127.0.0.1:1 {SCRIPT}")
    yield from (e.SiteJoined(site=site) for site in sites)
    yield from rounds(sites, 1, last)
    yield e.UpdateRefused(site=sites[0], round=last, reason="it is NaN")
    yield e.PrivacySpent(site=sites[0], round=last, releases=last, epsilon=0.5 * last, delta=1e-5)


def datacenter(steps=20):
    """A run of ranks."""
    yield e.RunStarted(run="gpt", mode="datacenter", rounds=2, config_digest="cd" * 32)
    yield e.Notice(text="ranks 4, mesh dp 2, tp 2")
    for number in (1, 2):
        yield e.RoundStarted(round=number)
        for step in range(1, steps // 2 + 1):
            at = (number - 1) * steps // 2 + step
            yield e.Stepped(step=at, round=number, loss=3 - at / steps, lr=1e-3, seconds=0.1, items_per_s=1e4,
                            mfu=0.41, comm_share=0.2, memory_bytes=10**9)  # fmt: skip
        yield e.RoundCommitted(round=number, loss=2.0, metrics={"loss": 2.0}, seconds=1.0)
    yield e.RunFinished(round=2, reason="rounds done")
