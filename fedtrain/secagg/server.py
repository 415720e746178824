"""The aggregator's side of secure aggregation: five exchanges, and the sum of the vectors that arrived."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from ..exchange import Cohort
from ..update import Request, SiteId
from .client import Verify
from .masking import Spread
from .messages import Terms


class Aside(Protocol):
    """How long work is kept off the event loop: asyncio.to_thread, or `at_once`."""

    def __call__(self, work: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


async def at_once(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


@dataclass(frozen=True)
class SecureSum:
    """Σ of the survivors' vectors modulo 2^ring_bits, and who they are."""

    vector: NDArray[Any]  # uint16, uint32 or uint64 [terms.numel(names)]
    names: tuple[str, ...]  # of the metrics in it
    sites: tuple[SiteId, ...]  # U3, sorted
    dropped: dict[SiteId, str] = field(default_factory=dict)  # who else was asked -> at which step, and why
    blamed: dict[SiteId, str] = field(default_factory=dict)  # who sent what cannot be -> what it was


async def secure_sum(
    cohort: Cohort,
    terms: Terms,
    model: bytes,
    advertise: Request,
    verify: Verify,
    *,
    deadline_s: float,
    step_deadline_s: float,
    agreed: Callable[[Sequence[SiteId]], None] = lambda sites: None,
    aside: Aside = at_once,
    spread: Spread = map,
) -> SecureSum:
    """One session with the sites of terms.cohort. TooFewSites below the quorum: then nothing was learnt.

    `advertise` is step 0's request (messages.Advertise), answered when a site has trained, within
    `deadline_s`; each later step has `step_deadline_s`. `agreed(U3)` is called before the first share
    is asked for: from then on an honest site gives this update into no sum over other sites (Client), so a
    caller that tries again must plan just these.
    """
    raise NotImplementedError
