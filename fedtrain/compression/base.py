"""What a compressor is: a vector to fewer bytes and back, and what is left over is said.

A custom one is a frozen dataclass that derives from Compressor, or from Linear where a sum of compressed
vectors is the compressed sum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..errors import BadUpdate

if TYPE_CHECKING:
    import numpy as np
    import torch

    Vector = torch.Tensor  # float32 [n], on the CPU
    Payload = torch.Tensor  # uint8 [bytes_for(n)]: all that travels, ready for a socket
    State = dict[str, torch.Tensor]  # what lives between rounds; {} when nothing does
    Array = np.ndarray[Any, np.dtype[np.float32]]  # [n] or [m]


class Compressor:
    """A way to say a vector in fewer bytes. Its fields are its configuration; what lives between two calls is
    in the state, which is handed in and out, so that a killed site goes on with it.

    Both ends know n and the seed, so neither travels. The seed is of (run, round) where a sum of several
    senders is wanted (see Linear), and of (run, round, site) elsewhere. It gives the same bytes on every
    machine: all that is random comes out of `keystream`.
    """

    linear: ClassVar[bool] = False

    @property
    def needs_feedback(self) -> bool:
        """Whether what it leaves out is lost for good, unless the sender keeps it for the next time."""
        return False

    def init(self, n: int) -> State:
        """The state before the first call."""
        return {}

    def encode(self, vector: Vector, seed: int, state: State) -> tuple[Payload, State]:
        """The bytes, and the next state; `vector` and `state` stay as they are. BadUpdate when a value is NaN
        or Inf."""
        raise NotImplementedError("a compressor says how it encodes")

    def decode(self, payload: Payload, seed: int, n: int, out: Vector | None = None) -> Vector:
        """The vector again, as well as it can be told; in `out` where it is given (fresh memory costs more in
        page faults than the work). BadUpdate when the bytes can't be what they should; whether the values are
        sensible is asked elsewhere, as it is of every update."""
        raise NotImplementedError("a compressor says how it decodes")

    def bytes_for(self, n: int) -> int:
        """The length of the payload of n values: known before it comes."""
        raise NotImplementedError("a compressor knows its size")

    def contraction(self) -> Compressor:
        """The variant whose result is never further from the truth than 0 is, E‖x − x̂‖² ≤ (1 − δ)‖x‖² with a
        δ > 0: what error feedback and CHOCO are proved for. Itself, but for those that are unbiased instead.
        """
        return self

    def shaped(self, shapes: Sequence[tuple[int, ...]]) -> Self:
        """The compressor for the vector that tensors of these shapes make, one after the other."""
        return self


class Linear(Compressor):
    """One for which a sum of the compressed is the compressed sum, so that secure aggregation may carry it.

    With one seed for all senders of a round: lift(Σ project(xᵢ)) = Σ lift(project(xᵢ)), to rounding. Where it
    is unbiased, E lift(project(x)) = x over the seeds. Both work on numpy and load no torch: a site's
    supervisor has none.
    """

    linear: ClassVar[bool] = True

    def project(self, vector: Array, seed: int) -> Array:
        """[n] -> [length(n)], of the same dtype."""
        raise NotImplementedError("a linear compressor projects")

    def lift(self, vector: Array, seed: int, n: int) -> Array:
        """[length(n)] -> [n], of the same dtype."""
        raise NotImplementedError("a linear compressor lifts")

    def length(self, n: int) -> int:
        """How many values a projection of n has."""
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
    """The payload, if it is as long as it must be."""
    expected = compressor.bytes_for(n)
    if payload.numel() != expected:
        raise BadUpdate(f"{payload.numel()} bytes for {n} values by {compressor}, expected {expected}")
    return payload


def room(n: int, out: Vector | None) -> Vector:
    """Where a decoded vector goes."""
    import torch

    assert out is None or out.shape == (n,), (n, out)
    return torch.empty(n) if out is None else out


class Keystream:
    """Random bytes of a seed: the AES-128-CTR keystream under a key made of it.

    The same on every machine and with every version of every library, which numpy's and torch's generators
    don't promise; and faster. The seed is no secret, and the bytes are none.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        key = hashlib.sha256(f"fedtrain.compression/{purpose}/{seed}".encode()).digest()[:16]
        self._stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def fill(self, out: np.ndarray[Any, Any]) -> None:
        """The next bytes, into a contiguous array."""
        import numpy as np

        room = out.reshape(-1).view(np.uint8)
        for at in range(0, len(room), len(_ZEROS)):
            part = room[at : at + len(_ZEROS)]
            self._stream.update_into(memoryview(_ZEROS)[: len(part)], part.data)


_ZEROS = bytes(1 << 16)
