"""What can be checked of a compressor before a run relies on it: on one vector, and by asking twice."""

from __future__ import annotations

from ..config import require
from .base import Compressor, Linear

SIZES = (1, 1000)  # of the vectors
SEED = 7
CLOSE = 1e-3  # of float32


def probe(compressor: Compressor, key: str) -> float:
    """The part of a normal vector's norm that the compressor loses without feedback. ConfigError, about
    `key`, where it breaks what Compressor or Linear promise: other bytes for the same arguments, say."""
    import torch

    def check(holds: bool, what: str) -> None:
        require(holds, key, f"{type(compressor).__name__}.{what}.")

    for n in SIZES:
        vector = torch.randn(n, generator=torch.Generator().manual_seed(n))
        kept, size = vector.clone(), compressor.bytes_for(n)
        payload = compressor.encode(vector, SEED, compressor.init(n))[0]
        check(torch.equal(vector, kept), "encode() changed the vector that it was given")
        good = payload.dtype == torch.uint8 and payload.shape == (size,)
        check(good, f"encode() made {payload.dtype} {[*payload.shape]} of {n} values: by bytes_for() it must "
              f"be torch.uint8 [{size}]")  # fmt: skip
        again = compressor.encode(vector, SEED, compressor.init(n))[0]
        check(torch.equal(payload, again), "encode() made other bytes of the same vector, seed and state. "
              "Draw from fedtrain.compression.base.Keystream(seed, ...)")  # fmt: skip
        found = compressor.decode(payload, SEED, n)
        good = found.dtype == torch.float32 and found.shape == (n,)
        check(good, f"decode() made {found.dtype} {[*found.shape]} of the bytes of {n} values: it must be "
              f"torch.float32 [{n}]")  # fmt: skip
        same = torch.equal(found, compressor.decode(payload, SEED, n))
        check(same, "decode() made other values of the same bytes and seed")
    if isinstance(compressor, Linear):
        two = [torch.randn(n, generator=torch.Generator().manual_seed(i)).numpy() for i in (1, 2)]
        projected, length = [compressor.project(one, SEED) for one in two], compressor.length(n)
        good = all(one.shape == (length,) for one in projected)
        check(
            good, f"project() made {[*projected[0].shape]} of {n} values: by length() it must be [{length}]"
        )
        summands = projected[0] + projected[1], *projected
        whole, *parts = (torch.from_numpy(compressor.lift(one, SEED, n)) for one in summands)
        linear = torch.allclose(whole, parts[0] + parts[1], rtol=CLOSE, atol=CLOSE)
        check(linear, "lift() of a sum is not the sum of what it makes of each. Derive from Compressor")
    return float((found - vector).norm() / vector.norm())


def check_contraction(compressor: Compressor, key: str) -> None:
    """ConfigError where the variant for error feedback and CHOCO would let grow what it leaves out."""
    lost = probe(compressor.contraction(), key)
    require(lost < 1, key, f"{type(compressor).__name__} loses {lost:.2g} times the norm of a vector, so "
            f"under error feedback or CHOCO what it leaves out grows. Have its contraction() give a "
            f"variant that loses less than 1: without the scale that makes it unbiased, say")  # fmt: skip
