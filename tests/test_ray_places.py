"""Places for trainers in a Ray cluster, by a stand-in for Ray: what fails is told, and nothing is left."""

import asyncio
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from fedtrain.runtime.simulations import on_ray
from fedtrain.runtime.trainers.supervised import TrainerLost

MISSING = RuntimeError("The actor failed to import.\n\nModuleNotFoundError: No module named 'fedtrain'\n")


class ActorError(Exception):
    """As Ray's RayActorError."""

    def __init__(self, text, actor_init_failed=False):
        super().__init__(text)
        self.actor_init_failed = actor_init_failed


class Ray(SimpleNamespace):
    """A cluster of one machine with two CPUs. What becomes of each actor: an error, None (it begins), or
    "pending"; the last one holds for all that follow."""

    def __init__(self, *fates):
        super().__init__(
            is_initialized=lambda: True, cluster_resources=lambda: {"CPU": 2.0},
            nodes=lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}],
            exceptions=SimpleNamespace(RayActorError=ActorError), kill=self._kill,
            remote=lambda room: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._create)),
            fates=[*fates], created=[], killed=[],
        )  # fmt: skip

    def _create(self):
        fate = self.fates.pop(0) if len(self.fates) > 1 else self.fates[0]
        begun = Future()
        if isinstance(fate, Exception):
            begun.set_exception(fate)
        elif fate is None:
            begun.set_result(None)
        reference = SimpleNamespace(future=lambda: begun)
        self.created.append(time.monotonic())
        return Actor(len(self.created), SimpleNamespace(remote=lambda: reference))

    def _kill(self, actor):
        self.killed.append(actor.number)


class Actor:
    def __init__(self, number, begun):
        self.number, self.begun = number, begun


@pytest.fixture
def cluster(monkeypatch):
    def of(*fates):
        monkeypatch.setitem(sys.modules, "ray", Ray(*fates))
        return on_ray.RayCluster(gpus=False)

    monkeypatch.setattr(on_ray, "LOOK_S", 0.02)
    monkeypatch.setattr(on_ray, "PLACE_S", 0.3)
    return of


@pytest.mark.parametrize("error", [MISSING, ActorError(str(MISSING), actor_init_failed=True)])
def test_what_keeps_ray_from_starting_a_trainer_is_told_at_once(cluster, error):
    there = cluster(error)
    with pytest.raises(TrainerLost, match=r"^Ray can't start a trainer: ModuleNotFoundError: No module"):
        asyncio.run(there._place())
    assert len(there.ray.created) == 1
    assert there.ray.killed == [1]


def test_an_actor_that_got_a_machine_just_lost_is_started_again_after_a_pause(cluster):
    there = cluster(ActorError("its node died"), ActorError("its node died"), None)
    actor = asyncio.run(there._place())
    first, second, third = there.ray.created
    assert second - first >= 0.02
    assert third - second >= 0.02
    assert actor.number == 3
    assert there.ray.killed == [1, 2]
    assert there.living == {actor}


def test_where_no_machine_keeps_an_actor_the_last_error_is_told(cluster):
    there = cluster(ActorError("its node died\nby hand"))
    with pytest.raises(TrainerLost, match="no place for another trainer beside 0: by hand"):
        asyncio.run(there._place())
    assert len(there.ray.created) <= 0.3 / 0.02 + 1
    assert len(there.ray.killed) == len(there.ray.created)


def test_a_pending_actor_ends_with_a_run_that_is_cancelled(cluster):
    there = cluster("pending")

    async def cancelled():
        placing = asyncio.create_task(there._place())
        await asyncio.sleep(0)  # as far as the actor that does not begin
        placing.cancel()
        await asyncio.wait([placing])
        return placing.cancelled()

    assert asyncio.run(cancelled())
    assert there.ray.killed == [1]
    assert not there.living
