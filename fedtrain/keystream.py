"""Random numbers that nobody can foresee without a key: noise, and samples of examples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KEY_BYTES = 16


class Keystream:
    """Random numbers from the AES-128 keystream of a key, one after the other."""

    def __init__(self, key: bytes) -> None:
        """`key` [16 bytes]: unpredictable to whoever reads what the numbers protect."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        assert len(key) == KEY_BYTES
        self._stream: Any = Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor()

    def normals(self, size: int) -> NDArray[np.float64]:
        """Independent standard normal numbers [size].

        Box–Muller with 53 bits for each uniform number, in float64: up to 8.5 standard deviations.
        """
        import numpy as np

        pairs = (size + 1) // 2
        words = self._bits(2 * pairs).reshape(2, pairs)
        radius = np.sqrt(-2 * np.log((words[0] + 1) * 2.0**-53))
        angle = words[1] * (2 * math.pi * 2.0**-53)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]

    def sample(self, count: int, probability: float) -> NDArray[np.intp]:
        """Which of `count` examples are in a Poisson sample, in order: each by itself with this
        probability."""
        import numpy as np

        return np.flatnonzero(self._bits(count) * 2.0**-53 < probability)

    def _bits(self, size: int) -> NDArray[np.uint64]:
        """Uniform integers below 2^53 [size]."""
        import numpy as np

        words: NDArray[np.uint64] = np.frombuffer(self._stream.update(bytes(8 * size)), dtype="<u8")
        return words >> np.uint64(11)
