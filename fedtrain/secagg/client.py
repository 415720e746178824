"""A site's side of secure aggregation, without I/O: requests go in, replies come out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ..update import Failure, SiteId
from .masking import Spread
from .messages import Agree, Agreed, Keys, Mask, Masked, Share, Shares, Terms, Unmask, Unmasked

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes, bytes], tuple[SiteId, bytes]]  # (certificate, message, signature) ->
# (the site's name, its certificate's fingerprint); raises FedtrainError unless all is as it must be
Encode = Callable[[tuple[str, ...]], NDArray[Any]]  # names of all metrics -> uint [Terms.numel(names)], owned


@dataclass(frozen=True)
class Policy:
    """What this site insists on, from its own configuration; the aggregator's word changes none of it."""

    federation: str
    run: str
    ring_bits: int
    value_bits: int
    clip: float
    max_weight: float
    length: int
    privacy: str = ""
    min_sites: int = 3
    full_graph: int = 100  # up to so many sites everybody masks with everybody
    adversaries: float = 1 / 3  # in larger cohorts: this part of the sites may side with the aggregator ...
    dropouts: float = 1 / 3  # ... while this part is lost

    def check(self, terms: Terms) -> None:
        """SecAggError, with the numbers, for terms that would protect less than this."""
        raise NotImplementedError


class Client:
    """One site, through any number of sessions, one at a time."""

    def __init__(
        self,
        site: SiteId,
        policy: Policy,
        *,
        certificate: bytes,
        sign: Sign,
        verify: Verify,
        random: Callable[[int], bytes] = os.urandom,
        spread: Spread = map,
    ) -> None:
        """`certificate` is what others give to `verify`; `random(n)` gives n unforeseeable bytes."""

    def begin(
        self, request_id: str, terms: Terms, model: bytes, names: tuple[str, ...], encode: Encode
    ) -> Keys | Failure:
        """Step 0, when the update is there: a new session, which ends any other.

        `model`: SHA-256 of the weights that this site trained on. `names`: of its metrics. `encode` is called
        once, at step 2, for the vector to mask, in place.
        """
        raise NotImplementedError

    def answer(self, request: Share | Mask | Agree | Unmask) -> Shares | Masked | Agreed | Unmasked | Failure:
        """Steps 1 to 4. The last request again gets the last reply again; a Failure ends the session."""
        raise NotImplementedError
