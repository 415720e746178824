"""One site's mistake, or the aggregator's, does not end the run of the others (findings D1 and D2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedtrain.config import Config, keep_policy, policy_from
from fedtrain.pki import issue, revocation
from fedtrain.runtime.sites import site
from fedtrain.runtime.sites.approval import key_in
from fedtrain.runtime.star import aggregator, mutual
from tests.allowed import allowed
from tests.inline import project
from tests.inprocess import Events

FIVE = ("a", "b", "c", "d", "e")


class Log(Events):
    """What one end told, and a way to wait for a line of it."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def __call__(self, event: Any) -> None:
        super().__call__(event)
        self._changed.set()

    def notices(self, part: str) -> list[str]:
        return [e["text"] for e in self.of("notice") if part in e["text"]]

    async def until(self, true: Callable[[], Any]) -> None:
        while not true():
            self._changed.clear()
            await self._changed.wait()

    async def committed(self, more: int = 1) -> None:
        due = len(self.of("round_committed")) + more
        await self.until(lambda: len(self.of("round_committed")) >= due)


class World:
    """An aggregator and sites over mutual TLS in this process, each of which may be started and ended."""

    def __init__(self, config: Config, *sites: str) -> None:
        self.config, self.logs = config, {name: Log() for name in ("aggregator", *sites)}
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        for name in sites:
            if not (config.root / "certs/sites" / name).exists():
                issue(config.root / "certs", "site", name)

    def __getitem__(self, name: str) -> Log:
        return self.logs[name]

    def policy(self, name: str, **rules: Any) -> None:
        folder = self.config.root / "certs/sites" / name
        keep_policy(folder, replace(policy_from(folder), **rules))

    def pin(self, *names: str, at: str) -> None:
        keys = {name: key_in(self.config.root / "certs/sites" / name) for name in names}
        self.policy(at, members={name: key for name, key in keys.items() if name != at})

    def start(self, *names: str) -> None:
        for name in names:
            run: Coroutine[Any, Any, Any] = (
                aggregator.serve(self.config, emit=self.logs[name])
                if name == "aggregator"
                else site.run(self.config, name, emit=self.logs[name])
            )
            self.tasks[name] = asyncio.create_task(run)

    async def end(self, *names: str) -> None:
        for name in names:
            self.tasks[name].cancel()
        await asyncio.gather(*(self.tasks[name] for name in names), return_exceptions=True)

    def go(self, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def told() -> None:
            try:
                async with asyncio.timeout(90):
                    telling = asyncio.create_task(story())
                    while not telling.done():
                        running = [task for task in self.tasks.values() if not task.done()]
                        await asyncio.wait([telling, *running], return_when=asyncio.FIRST_COMPLETED)
                        for name, task in self.tasks.items():
                            if task.done() and not task.cancelled():
                                assert task.exception() is None, (name, task.exception())
                    telling.result()
            finally:
                telling.cancel()
                await self.end(*self.tasks)

        asyncio.run(told())


@pytest.fixture
def world(tmp_path: Path, inline: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """A federation whose sites read pins and lists of revoked certificates every 50 ms."""
    monkeypatch.setattr(revocation, "RELOAD_S", 0.05)

    def make(*sites: str, own: Mapping[str, Mapping[str, Any]] = {}, **sections: Any) -> World:
        sections["run"] = {"rounds": 1000, **sections.get("run", {})}
        found = World(project(tmp_path, **sections), *sites)
        allowed(found.config, *sites)
        return found

    return make


# --- D1: a site that some have not pinned


@pytest.mark.slow(6)
def test_d1_a_site_that_no_other_has_pinned_is_left_out_until_they_pin_it(world):
    run = world(*FIVE, "late", strategy={"min_sites": 5})
    for name in FIVE:
        run.pin(*FIVE, at=name)

    async def story() -> None:
        run.start("aggregator", *FIVE)
        await run["aggregator"].committed(2)
        run.start("late")
        await run["aggregator"].until(lambda: run["aggregator"].notices("late is left out"))
        await run["late"].until(lambda: run["late"].notices("this site is left out"))
        await run["aggregator"].committed(5)
        for name in FIVE:
            run.pin(*FIVE, "late", at=name)
        await run["aggregator"].until(lambda: run["aggregator"].notices("late is in the sums again"))
        await run["aggregator"].committed(2)

    run.go(story)
    said = run["aggregator"].notices("late is left out")
    key = key_in(run.config.root / "certs/sites/late")
    assert f"not pinned at a, b, c, d, e (policy.pin_members). If `fedtrain policy show` prints" in said[0]
    assert said[0].endswith(f"run there: fedtrain policy pin late={key}")
    assert len(said) == len({*said}) <= 5, "once for each set of sites that lack the pin"
    assert not run["aggregator"].of("round_failed")
    inside = [e["sites"] for e in run["aggregator"].of("round_committed")]
    assert inside[:5] == [5] * 5
    assert inside[-1] == 6
