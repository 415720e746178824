"""The Gaussian mechanism for an update: clip its norm, then add noise proportional to the clipping norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..arena import Arena
from ..errors import BadUpdate, ConfigError
from ..keystream import Keystream

PIECE = 1 << 18  # coordinates processed at a time


@dataclass(frozen=True)
class Gaussian:
    """Δ·min(1, clip/‖Δ‖₂) + N(0, (multiplier·clip)²) in each trained coordinate.

    Any two clipped updates lie at most 2·clip apart, so this is local differential privacy with
    σ = multiplier/2 (see `epsilon`): a reader of the result can hardly infer the site's data. No other value
    may leave the site, so coordinates that are not trained must not have moved.
    """

    clip: float  # the largest L2 norm of an update, over all trained coordinates
    multiplier: float  # the noise's standard deviation divided by `clip`

    @property
    def sigma(self) -> float:
        """The noise's standard deviation divided by the sensitivity."""
        return self.multiplier / 2

    def apply(self, delta: Arena, key: bytes) -> float:
        """Clip `delta` and add noise, in place; returns the norm before clipping. `key` [16 bytes]: fresh and
        unpredictable for each call, except in a simulation.

        BadUpdate for an update that isn't finite.
        """
        parts = [t[i : i + PIECE] for t in delta.trained().values() for i in range(0, len(t), PIECE)]
        norm = math.sqrt(math.fsum(float(part.double().square().sum()) for part in parts))
        if not math.isfinite(norm):
            raise BadUpdate("its update has NaN or infinite values, so it can't be clipped")
        scale = min(1.0, self.clip / norm) if norm else 1.0
        import torch

        stream = Keystream(key)
        for part in parts:
            noise = torch.from_numpy(stream.normals(len(part)))
            part.copy_(part.double().mul_(scale).add_(noise, alpha=self.multiplier * self.clip))
        delta.changed()
        return norm


def refuse_moving_buffers(delta: Arena) -> None:
    """ConfigError for an update that moves more than trained coordinates, the only ones that get noise."""
    if any(bool(vector.any()) for vector in delta.others().values()):
        raise ConfigError(
            "privacy: training moves buffers of the model (BatchNorm's statistics?), and noise would "
            "spoil them. Use GroupNorm or LayerNorm, or leave [privacy] out."
        )
