"""What one training brings over the wire to a site and from it: every frame by the real codec, every payload.

HTTP/2, TLS and TCP add to it: some hundred bytes a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...arena import ArenaFile
from ...config import Config
from ...learning import NO_EXTRAS, Extras
from ...messages import Message, Request, SiteId, Train, Update
from ...schema import Schema, TensorSpec
from ...secagg import messages as masks
from ...secagg.messages import SealedShares
from ...wire import frames
from ...wire.codec import arenas, encode, known
from ...wire.frames import INLINE_BYTES
from ..sites import compressed
from ..star.secure_terms import encoding_of, policy, verifies
from .site_models import Load

NAME = "x" * 8  # of any run, so that its time does not depend on what it is called
DIGEST = "0" * 32  # as long as a real one
CERTIFICATES, SIGNATURE, KEY = bytes(1_370), bytes(71), bytes(32)  # of a site and its issuer, PEM; ECDSA, DER
SEALED, COMMITTED = (SealedShares(bytes(text), bytes(24), bytes(24)) for text in (80, 0))
TRAINED = ("loss",)  # the metrics of a training
FETCHED = 3  # messages in turn of what doesn't fit into its frame: Ask, Fetch, the model; of one that does, 1


class TrainingBytes:
    """Of one run's trainings."""

    def __init__(self, config: Config, schema: Schema, update: Schema, extras: Extras = NO_EXTRAS) -> None:
        """
        Args:
            schema: Of the weights as they go out, with what a strategy sends beside them.
            update: Of an update as it travels in the open.
        """
        self._config, self._schema, self._update, self._extras = config, schema, update, extras
        down = compressed.down_codec(config, schema)
        self._patch = down.coded if down else None
        # Sites that make a model of patches, or of sums, fetch a whole model in a stream.
        self._patched = down is not None or verifies(config)
        self._known = known([schema, update])
        self._vectors: dict[int, int] = {}  # sites in a sum -> bytes of a masked vector

    def vector_bytes(self, sites: int) -> int:
        """The payload of one update, in a round of so many sites."""
        if not self._config.secagg.enabled:
            return self._update.nbytes
        if (many := self._together(sites)) not in self._vectors:
            encoding = encoding_of(self._config, 0, many, self._schema.model, self._extras)
            dtype = f"int{self._config.secagg.ring_bits}"  # as in Terms.schema
            checksum = encoding.point.digits(masks.CHECKSUM_BITS) if verifies(self._config) else 0
            spec = TensorSpec("masked", (encoding.numel(TRAINED) + checksum,), dtype, False)
            self._vectors[many] = Schema((spec,)).nbytes
        return self._vectors[many]

    def weights_bytes(self, round: int, counted: int) -> int:
        """The payload of the weights for a site that has those of round `counted` (-1: none): the patches of
        the rounds since, where there are any and they are smaller."""
        whole, patch = self._schema.nbytes, self._patch
        return whole if patch is None or counted < 0 else min(whole, (round - counted) * patch.nbytes)

    def load(self, round: int, counted: int, sites: Sequence[SiteId]) -> Load:
        """What one training in a round with these sites asks of one of them, but for its examples."""
        whole, down, up, messages = ArenaFile(self._schema, Path(), DIGEST), 0, 0, 0
        pairs = self._masked if self._config.secagg.enabled else self._open
        inline = INLINE_BYTES if not self._patched or round - counted == 1 <= round else 0
        for request, reply in pairs(round, counted, sites, whole):
            named, body = nbytes_of(request), encode(request, self._known)
            named = named and self.weights_bytes(round, counted)
            if named <= inline:
                down, messages = down + size(frames.Ask(body=body, data=bytes(named))), messages + 1
            else:
                down += size(frames.Ask(body=body)) + named
                up, messages = up + size(frames.Fetch(digest=DIGEST, offset=0)), messages + FETCHED
            named, body = nbytes_of(reply), encode(reply, self._known)
            if named <= INLINE_BYTES:
                answer = frames.Answered(id=request.id, body=body, data=bytes(named))
                up, messages = up + size(answer), messages + 1
            else:
                up, messages = up + size(frames.Offer(id=request.id, body=body)) + named, messages + FETCHED
                down += size(frames.Resume(digest=DIGEST, offset=0)) + size(frames.Stored())
        return Load(down, up, messages)

    def _open(
        self, round: int, counted: int, sites: Sequence[SiteId], weights: ArenaFile
    ) -> list[tuple[Request, Message]]:
        request = Train(id=f"{NAME}/{round}/0/train", round=round, weights=weights, counted=counted)
        reply = Update(
            delta=ArenaFile(self._update, Path(), DIGEST), num_examples=1.0,
            metrics=dict.fromkeys(TRAINED, (0.0, 1.0)),
            weight=None if self._extras.max_weight is None else 1.0,
            scalars={each.name: 0.0 for each in self._extras.scalars},
        )  # fmt: skip
        return [(request, reply)]

    def _together(self, sites: int) -> int:
        """How many sites of a round share a sum."""
        return max(sites // self._config.secagg.groups, 1)

    def _masked(
        self, round: int, counted: int, sites: Sequence[SiteId], weights: ArenaFile
    ) -> list[tuple[Request, Message]]:
        """A session of secure aggregation as one site sees it, when nobody drops out: what it is asked, and
        what it answers. Keys, shares and signatures are as long as real ones."""
        config, many = self._config, self._together(len(sites))
        rules = policy(config, "", self._extras)
        quorum, threshold, degree = rules.graph(many)
        encoding = encoding_of(config, 0, many, self._schema.model, self._extras)
        cohort, near, point = sites[:many], sites[: degree or many - 1], encoding.point
        terms = masks.Terms(
            federation=NAME, run=NAME, round=round, attempt=0, nonce=bytes(masks.NONCE_BYTES),
            cohort=dict.fromkeys(cohort, KEY), quorum=quorum, threshold=threshold, degree=degree,
            ring_bits=config.secagg.ring_bits, value_bits=point.value_bits, clip=point.clip,
            max_weight=point.max_weight, length=encoding.length,
            verify=rules.checks(many),
        )  # fmt: skip
        keys = masks.Keys(
            certificate=CERTIFICATES, mask_key=KEY, seal_key=KEY, commitment=KEY, names=TRAINED,
            signature=SIGNATURE,
        )  # fmt: skip
        id, sealed = terms.request_id, dict.fromkeys(near, SEALED)
        own = {} if degree else {"x": COMMITTED}  # in the full graph a site holds its own shares, too
        vector = ArenaFile(terms.schema(TRAINED), Path(), DIGEST)
        roster, lines = dict.fromkeys([*near, "x"], keys), dict.fromkeys(cohort, KEY) if degree else {}
        asked: list[Request] = [
            masks.Advertise(id=id("train"), round=round, weights=weights, counted=counted, terms=terms),
            masks.Share(id=id("share"), sid=KEY, roster=roster, lines=lines, names=TRAINED),
            masks.Mask(id=id("mask"), sid=KEY, sites=tuple(cohort), sealed=sealed),
            masks.Agree(id=id("agree"), sid=KEY, sites=tuple(cohort)),
            masks.Unmask(id=id("unmask"), sid=KEY, signatures=dict.fromkeys(near, SIGNATURE)),
        ]
        answered: list[Message] = [
            keys,
            masks.Shares(sealed=sealed | own, signature=SIGNATURE),
            masks.Masked(vector=vector, signature=SIGNATURE),
            masks.Agreed(signature=SIGNATURE),
            masks.Unmasked(seeds=dict.fromkeys([*near, *own], KEY), keys={}),
        ]
        return list(zip(asked, answered, strict=True))


def nbytes_of(message: Message) -> int:
    """Of the arenas that a message names."""
    return sum(arena.schema.nbytes for arena in arenas(message))


def size(frame: msgspec.Struct) -> int:
    """The bytes of a frame."""
    return len(encode(frame))
