"""The Gaussian mechanism for an update: clip its norm, then add noise proportional to the clipping norm; and
where its random numbers come from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..arena import Arena
from ..errors import BadUpdate, ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]  # 1-D
    Indices = NDArray[np.intp]  # 1-D

PIECE = 1 << 18  # coordinates processed at a time
KEY_BYTES = 16


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

        draws = Draws(key)
        for part in parts:
            noise = torch.from_numpy(draws.normals(len(part)))
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


class Draws:
    """Random numbers from the AES-128 keystream of a key, one after the other."""

    def __init__(self, key: bytes) -> None:
        """`key` [16 bytes]: unpredictable to whoever reads what the numbers protect."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        assert len(key) == KEY_BYTES
        self._stream: Any = Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor()

    def normals(self, size: int) -> Numbers:
        """Independent standard normal numbers [size].

        Box–Muller with 53 bits for each uniform number, in float64: up to 8.5 standard deviations.
        """
        import numpy as np

        pairs = (size + 1) // 2
        words = self._bits(2 * pairs).reshape(2, pairs)
        radius = np.sqrt(-2 * np.log((words[0] + 1) * 2.0**-53))
        angle = words[1] * (2 * math.pi * 2.0**-53)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]

    def sample(self, count: int, probability: float) -> Indices:
        """Which of `count` examples are in a Poisson sample, in order: each by itself with this
        probability."""
        import numpy as np

        return np.flatnonzero(self._bits(count) * 2.0**-53 < probability)

    def _bits(self, size: int) -> NDArray[np.uint64]:
        """Uniform integers below 2^53 [size]."""
        import numpy as np

        words: NDArray[np.uint64] = np.frombuffer(self._stream.update(bytes(8 * size)), dtype="<u8")
        return words >> np.uint64(11)
