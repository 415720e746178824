"""H6: what the other end may have a site, and a site the aggregator, keep on its disk."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from fedtrain.errors import WireError
from fedtrain.messages import Failure, Train
from fedtrain.runtime.sites.site import MODELS, Site
from fedtrain.store import Ledger
from fedtrain.store.spool import UNFINISHED, Spool
from tests.federation import aggregator, certificates, hello, link, random_arena
from tests.limits import bounded
from tests.test_site import SCHEMA, Scripted

HUGE = 1 << 20  # numbers, where the site's model has 64


def inbox_of(site: Path) -> list[str]:
    return sorted(path.name for path in (site / "inbox").rglob("*") if path.is_file())


def test_s21_an_aggregator_cannot_fill_a_sites_disk_with_models_that_are_not_the_sites(tmp_path):
    """The model is refused by its schema, before a byte of it is fetched: nothing is kept of any attempt."""
    certs = certificates(tmp_path / "certs", "a")

    async def run() -> list[str]:
        reasons = []
        ledger = Ledger(tmp_path / "a")
        site = Site("a", SCHEMA, ledger, Scripted())
        async with aggregator(certs, tmp_path, SCHEMA) as agg:
            mine = link(certs, "a", agg.cohort.port, tmp_path / "a")
            mine._inbox = ledger.inbox
            serving = asyncio.create_task(mine.serve(hello(SCHEMA), site.fulfil, refusal=site.refusal))
            await agg.cohort.members(1)
            for attempt in range(3):
                huge = random_arena(HUGE, attempt)
                ask = Train(id=f"r/0/{attempt}/train", round=0, weights=huge)
                async for _, reply in agg.cohort.exchange({"a": ask}, 30):
                    assert isinstance(reply, Failure)
                    reasons.append(reply.reason)
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        ledger.close()
        return reasons

    reasons = bounded(run())
    assert len(reasons) == 3
    assert all("the aggregator's model is not this site's" in reason for reason in reasons)
    assert inbox_of(tmp_path / "a") == []


def test_s21_who_begins_transfers_and_ends_none_leaves_a_bounded_number_of_them(tmp_path):
    spool = Spool(tmp_path)
    for n in range(40):
        transfer = spool.receive(f"{n:032x}", 1 << 20)
        transfer.write(b"x" * 1000)
        transfer.close()
    left = [path for path in tmp_path.iterdir() if path.suffix == ".part"]
    assert len(left) == UNFINISHED + 1
    assert tmp_path / f"{39:032x}.part" in left


def test_s21_the_models_that_lie_at_a_site_stay_under_its_limit_whatever_is_asked_and_cancelled(tmp_path):
    models = [random_arena(1000, n) for n in range(12)]
    spool, nbytes = Spool(tmp_path), models[0].schema.nbytes
    spool.limit = MODELS * nbytes
    for model in models:
        transfer = spool.receive(model.digest, nbytes)
        transfer.write(model.payload)
        transfer.finish()
        transfer.close()
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= spool.limit
    assert spool.has(models[-1].digest, nbytes)
    assert not spool.has(models[0].digest, nbytes)
    with pytest.raises(WireError, match="may lie"):
        spool.receive("f" * 32, spool.limit + 1)
