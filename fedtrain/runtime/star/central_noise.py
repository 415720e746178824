"""Noise that a strategy adds at the aggregator: where it comes from, and the ledger of what it is in."""

from __future__ import annotations

import hashlib
import secrets

from ...arena import Arena
from ...config import Config
from ...errors import Damaged
from ...events import Emit
from ...keystream import KEY_BYTES
from ...messages import SiteId
from ...privacy import Release, refuse_moving_buffers
from ...store import RunStore
from ...store.disk import Kept
from ..sites.spent import FILE, REMEDY, Spent
from .gathered import Aggregate

WHO: SiteId = "aggregator"  # who gives the models away, in events
KEPT = "noise.json"


class CentralNoise:
    """The sums of one run, and what the models made of them tell of a site at most.

    The same sums have the same noise, so that a round which is repeated gives the same model and is no second
    release; other sums have another one.
    """

    def __init__(self, config: Config, store: RunStore, emit: Emit, sigma: float, delta: float) -> None:
        """`sigma`: of the strategy; `delta`: at which its cost is told. Damaged when the run has models that
        the ledger doesn't know of."""
        self._release, self._delta = Release("gaussian", sigma), delta
        self._spent = Spent(config, store.folder, emit)
        latest = store.latest()
        if latest is not None and latest.round > self._spent.rounds:
            raise Damaged(
                f"{FILE} knows of the models of {self._spent.rounds} rounds, and this run has had "
                f"{latest.round}. {REMEDY}"
            )
        self._secret = secret_of(config, store)

    def seed(self, number: int, sums: Aggregate) -> int:
        """What the server draws from in a round, 128 bits that no site can know. ConfigError for a model
        whose buffers move: they would have no noise."""
        delta = sums.delta
        assert isinstance(delta, Arena), delta
        refuse_moving_buffers(delta)
        text = f"{self._secret}/{number}/{delta.digest}/{sums.weight!r}/{sorted(sums.scalars.items())}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:KEY_BYTES], "little")

    def releases(self, number: int, seed: int) -> None:
        """Count a round's model, before anybody has it."""
        name = hashlib.sha256(seed.to_bytes(KEY_BYTES, "little")).hexdigest()
        self._spent.give(WHO, number, self._release, name, self._delta)


def secret_of(config: Config, store: RunStore) -> str:
    """Of an aggregator's run its own, on disk; of a simulation, which is to be repeated, from run.seed."""
    if not store.durable:
        return f"simulated/{config.run.seed}"
    kept = Kept(store.folder / KEPT, str, "Begin the run anew under another run.name.")
    if not (found := kept.read()):
        found = [secrets.token_hex(KEY_BYTES)]
        kept.write(found[0])
    return str(found[0])
