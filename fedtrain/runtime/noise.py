"""What is known of the noise in a run's models, and of what it cost, at the end that commits its rounds. It
is kept with each round, and stands in the card of the round's model."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ..config import Config
from ..events import Emit, Event, PrivacySpent
from ..messages import SiteId
from ..privacy import epsilon
from .sites.privacy import release_of

DELTA = 1e-5  # of an aggregator, for a site's own privacy.delta is its own affair


class KnownNoise:
    """Of one run; it hears what is told as spent."""

    def __init__(self, config: Config, emit: Emit) -> None:
        self._config, self._emit = config, emit
        self._spent: PrivacySpent | None = None
        self.sigma: float | None = None  # of a strategy that adds noise at the server
        self.said: dict[SiteId, bool] = {}  # of sites elsewhere: whether each adds noise, by its own word

    def emit(self, event: Event) -> None:
        """Tell an event."""
        if isinstance(event, PrivacySpent):
            self._spent = event
        self._emit(event)

    def after(self, rounds: int, *, simulated: bool) -> dict[str, Any]:
        """Of the model of so many rounds, as model.json has it; {} where no noise is known.

        Where nothing was told as spent, as at an aggregator whose sites add noise to their sums, it is the
        price of an update in each of the rounds."""
        own, spent = self._config.privacy, self._spent
        if self.sigma is not None:
            found: dict[str, Any] = {"where": "server", "unit": "site", "sigma": self.sigma}
        elif own.in_sums or spent is not None:
            found = {
                "where": own.where, "unit": own.unit, "noise_multiplier": own.noise_multiplier,
                "clip": own.clip,
            }  # fmt: skip
        elif any(self.said.values()):
            return {"where": "site", "sites": sorted(site for site, adds in self.said.items() if adds),
                    "others": sorted(site for site, adds in self.said.items() if not adds)}  # fmt: skip
        else:
            return {}
        if spent is not None:
            by = "simulation" if simulated else "server" if self.sigma is not None else "peer"
            return found | {"epsilon": spent.epsilon, "delta": spent.delta, "unit": spent.unit, "by": by}
        if own.in_sums:
            release = release_of(self._config, 1.0)
            cost = epsilon([replace(release, steps=release.steps * rounds)], DELTA)
            found |= {"epsilon": cost, "delta": DELTA, "by": "rounds"}
        return found
