"""The Gaussian mechanism for an update: clip its norm, then add noise proportional to the clipping norm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..arena import Arena
from ..errors import BadUpdate, ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Normals = NDArray[np.float64]  # 1-D

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

        BadUpdate for an update that isn't finite, ConfigError for a model whose buffers move.
        """
        self._check_rest(delta)
        parts = [t[i : i + PIECE] for t in delta.trained().values() for i in range(0, len(t), PIECE)]
        norm = math.sqrt(math.fsum(float(part.double().square().sum()) for part in parts))
        if not math.isfinite(norm):
            raise BadUpdate("its update has NaN or infinite values, so it can't be clipped")
        scale = min(1.0, self.clip / norm) if norm else 1.0
        import torch

        for part, noise in zip(parts, normals(key, [len(part) for part in parts]), strict=True):
            part.copy_(
                part.double().mul_(scale).add_(torch.from_numpy(noise), alpha=self.multiplier * self.clip)
            )
        delta.changed()
        return norm

    def _check_rest(self, delta: Arena) -> None:
        if any(bool(vector.any()) for vector in delta.others().values()):
            raise ConfigError(
                "privacy: training moves buffers of the model (BatchNorm's statistics?), and noise would "
                "spoil them. Use GroupNorm or LayerNorm, or leave [privacy] out."
            )


def normals(key: bytes, sizes: list[int]) -> Iterator[Normals]:
    """Vectors of independent standard normal numbers with these sizes, from the AES-128 keystream of a key.

    Box–Muller with 53 bits for each uniform number, in float64: up to 8.5 standard deviations.
    """
    import numpy as np
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    assert len(key) == KEY_BYTES
    stream: Any = Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor()
    for size in sizes:
        pairs = (size + 1) // 2
        words = np.frombuffer(stream.update(bytes(16 * pairs)), dtype="<u8").reshape(2, pairs) >> 11
        radius = np.sqrt(-2 * np.log((words[0] + 1) * 2.0**-53))
        angle = words[1] * (2 * math.pi * 2.0**-53)
        yield np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]
