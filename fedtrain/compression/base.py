"""The base classes of compressors, which turn a vector into fewer bytes and back."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..config.values import Settings
from ..errors import BadUpdate

if TYPE_CHECKING:
    import numpy as np
    import torch

    Vector = torch.Tensor  # float32 [n], on the CPU
    Payload = torch.Tensor  # uint8 [bytes_for(n)]: the bytes to send
    State = dict[str, torch.Tensor]  # kept by the sender between rounds; {} for a compressor without state
    Array = np.ndarray[Any, np.dtype[np.float32]]  # [n] or [m]


class Compressor(Settings):
    """A way to encode a vector in fewer bytes. The fields of a compressor are its configuration. Everything
    that changes between calls is in the state, which callers keep, so that a killed site goes on with it.

    Both ends know n and the seed, so neither travels. The seed is of (run, round) where a sum over several
    senders is wanted (see Linear), and of (run, round, site) elsewhere. A compressor gives the same bytes on
    every machine: it takes all random numbers from `Keystream`. A custom compressor is a frozen dataclass
    that defines `encode`, `decode` and `bytes_for`; a text "module:Class:0.5" names it, with its options.
    Whatever loses more than the norm of a vector also defines `contraction`, for error feedback:

    >>> from dataclasses import dataclass
    >>> import torch
    >>> @dataclass(frozen=True)
    ... class Half(Compressor):
    ...     def encode(self, vector, seed, state):
    ...         return vector.half().view(torch.uint8), state
    ...     def decode(self, payload, seed, n, out=None):
    ...         return payload.view(torch.float16).float()
    ...     def bytes_for(self, n):
    ...         return 2 * n
    >>> payload, _ = Half().encode(torch.tensor([1.0, 0.1]), seed=0, state={})
    >>> payload.numel(), Half().decode(payload, seed=0, n=2)
    (4, tensor([1.0000, 0.1000]))
    """

    section: ClassVar[str] = "compression"
    linear: ClassVar[bool] = False

    @property
    def needs_feedback(self) -> bool:
        """Whether the values that the compressor leaves out are lost for good, unless the sender keeps them
        for the next call (error feedback)."""
        return False

    def init(self, n: int) -> State:
        """The state before the first call."""
        return {}

    def encode(self, vector: Vector, seed: int, state: State) -> tuple[Payload, State]:
        """(the bytes, the next state); `vector` and `state` stay as they are. BadUpdate when a value is NaN
        or Inf."""
        raise NotImplementedError("a compressor says how it encodes")

    def decode(self, payload: Payload, seed: int, n: int, out: Vector | None = None) -> Vector:
        """An approximation of the vector; in `out`, if given (page faults of fresh memory cost more than the
        work). BadUpdate when the bytes are malformed. Callers check the values, as they do for every
        update."""
        raise NotImplementedError("a compressor says how it decodes")

    def bytes_for(self, n: int) -> int:
        """The length of the payload for n values, known before the payload arrives."""
        raise NotImplementedError("a compressor knows its size")

    def contraction(self) -> Compressor:
        """The variant with E‖x − x̂‖² ≤ (1 − δ)‖x‖² for some δ > 0, for which error feedback and CHOCO are
        proved. Compressors that are unbiased instead override this method."""
        return self

    def shaped(self, shapes: Sequence[tuple[int, ...]]) -> Self:
        """The compressor for a vector that is the concatenation of tensors with these shapes."""
        return self


class Linear(Compressor):
    """A compressor whose compressed vectors may be summed, so that secure aggregation can carry them.

    With one seed for all senders of a round: lift(Σ project(xᵢ)) = Σ lift(project(xᵢ)), to rounding. For an
    unbiased one, E lift(project(x)) = x over the seeds. Both methods work on numpy arrays and load no torch,
    because a site's supervisor has none.
    """

    linear: ClassVar[bool] = True

    def project(self, vector: Array, seed: int) -> Array:
        """[n] -> [length(n)], of the same dtype."""
        raise NotImplementedError("a linear compressor projects")

    def lift(self, vector: Array, seed: int, n: int) -> Array:
        """[length(n)] -> [n], of the same dtype."""
        raise NotImplementedError("a linear compressor lifts")

    def length(self, n: int) -> int:
        """The number of values in the projection of n values."""
        raise NotImplementedError("a linear compressor knows its length")

    def encode(self, vector: Vector, seed: int, state: State) -> tuple[Payload, State]:
        import numpy as np
        import torch

        return torch.from_numpy(self.project(checked(vector).numpy(), seed).view(np.uint8)), state

    def decode(self, payload: Payload, seed: int, n: int, out: Vector | None = None) -> Vector:
        import numpy as np
        import torch

        values = sized(payload, self, n).numpy().view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # bytes off the wire may be any floats
            vector = torch.from_numpy(self.lift(values, seed, n))
        return vector if out is None else out.copy_(vector)

    def bytes_for(self, n: int) -> int:
        return 4 * self.length(n)


def checked(vector: Vector) -> Vector:
    """The vector, contiguous; BadUpdate when it has a NaN or Inf."""
    import torch

    assert vector.ndim == 1, vector.shape
    assert vector.dtype == torch.float32, vector.dtype
    if not math.isfinite(float(vector.sum())):  # the sum of finite values may overflow, so it is no proof
        bad = int((~torch.isfinite(vector)).sum())
        if bad:
            raise BadUpdate(f"{bad} of {len(vector)} values are NaN or Inf, which can't be compressed")
    return vector.detach().contiguous()


def sized(payload: Payload, compressor: Compressor, n: int) -> Payload:
    """The payload; BadUpdate when its length is not `bytes_for(n)`."""
    expected = compressor.bytes_for(n)
    if payload.numel() != expected:
        raise BadUpdate(f"{payload.numel()} bytes for {n} values by {compressor}, expected {expected}")
    return payload


def buffer_of(n: int, out: Vector | None) -> Vector:
    """`out`, or a new float32 vector [n] where `out` is None."""
    import torch

    assert out is None or out.shape == (n,), (n, out)
    return torch.empty(n) if out is None else out


class Keystream:
    """Random bytes of a seed: the AES-128-CTR keystream under a key derived from the seed.

    The bytes are the same on every machine and with every library version, which numpy's and torch's
    generators don't promise, and come faster. Neither the seed nor the bytes are secret.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        key = hashlib.sha256(f"fedtrain.compression/{purpose}/{seed}".encode()).digest()[:16]
        self._stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def fill(self, out: np.ndarray[Any, Any]) -> None:
        """Fill a contiguous array with the next bytes."""
        import numpy as np

        buffer = out.reshape(-1).view(np.uint8)
        for at in range(0, len(buffer), len(_ZEROS)):
            part = buffer[at : at + len(_ZEROS)]
            self._stream.update_into(memoryview(_ZEROS)[: len(part)], part.data)


_ZEROS = bytes(1 << 16)
