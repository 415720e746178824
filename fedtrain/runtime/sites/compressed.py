"""What travels in fewer bytes: which compressor, under which seed, and both ends of either way.

Up: a site's trainer encodes what it found (`UpEncoder`), a `Decompressing` cohort makes it a whole
update again before anybody looks at it: checks, rules, strategies and stores know of nothing.

Down: the committed model itself moves by a compressed step (`shortened`), and what was left out is part of
the committed state, to be added to the next step (DoubleSqueeze, Tang et al. 2019, Algorithm 1). So a site
that has the model of the round before fetches the step alone, a patch, and makes the very model that was
committed (`patched`).

A simulation goes the same way, so it has the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from ... import compression
from ...arena import AnyArena, Arena
from ...compression import Compressor, DeltaCodec, ErrorFeedback
from ...config import Config
from ...digest import seed_of
from ...errors import BadUpdate, ConfigError
from ...exchange import Cohort, CohortWrapper
from ...messages import Failure, Reply, Request, SiteId, Train, Update
from ...schema import Schema
from ...store import Checkpoint
from ...training.task import user_code
from ..star.answers import compares, rule_of

if TYPE_CHECKING:
    import torch

UP = "compression/"  # in a site's memory, before the names of what the codec keeps
DOWN = "down/"  # in a checkpoint's state, before the names of what the codec keeps
SPARSE = (compression.COMPRESSORS["topk"], compression.COMPRESSORS["randomk"])


def check_config(config: Config) -> None:
    """ConfigError for a compressor that can't do here what was asked."""
    if config.compression.down:
        _down(config)
    if not config.compression.up:
        return
    found = _up(config)
    if config.secagg.enabled and not isinstance(found, compression.Linear):
        able = ", ".join(name for name, kind in compression.COMPRESSORS.items() if kind.linear)
        raise ConfigError(
            f"compression.up: {config.compression.up!r} is not linear, as sums under masks need it: a sum of "
            f"what it makes is not what it makes of the sum. These are: {able}. "
            f"Or set secagg.enabled = false."
        )
    inner = found.inner if isinstance(found, ErrorFeedback) else found
    if not config.secagg.enabled and isinstance(inner, SPARSE) and not rule_of(config).linear:
        raise ConfigError(
            f'compression.up: "{config.compression.up}" sends few coordinates, and {compares(config)} '
            f"compares sites coordinate by coordinate, most of which would be 0. "
            f'Use "quantize:8", or aggregation.rule = "mean" without aggregation.before.'
        )


def check_own(config: Config) -> None:
    """ConfigError for a compressor of the user's own that breaks what compressors promise."""
    for key, text, compressor_of in (
        ("compression.up", config.compression.up, _up),
        ("compression.down", config.compression.down, _down),
    ):
        if compression.own_in(text):
            with user_code(config.root, key):
                found = compressor_of(config)
                if isinstance(found, ErrorFeedback):
                    found = found.inner
                    compression.check_contraction(found, key)
                compression.probe(found, key)


def _up(config: Config) -> Compressor:
    found = compression.parse(config.compression.up, config.root, "compression.up")
    if config.compression.error_feedback and found.needs_feedback and not config.secagg.enabled:
        return ErrorFeedback(found)
    return found


def _down(config: Config) -> Compressor:
    found = compression.parse(config.compression.down, config.root, "compression.down")
    if config.compression.error_feedback and not isinstance(found, ErrorFeedback):
        return ErrorFeedback(found)
    return found


def up_codec(config: Config, schema: Schema) -> DeltaCodec | None:
    """The codec of a site's updates; None where they travel as they are, or masked."""
    if not config.compression.up or config.secagg.enabled:
        return None
    return DeltaCodec(schema, _up(config))


def down_codec(config: Config, schema: Schema) -> DeltaCodec | None:
    """The codec of the model's steps; None where they are not compressed."""
    return DeltaCodec(schema, _down(config)) if config.compression.down else None


def linear(config: Config) -> compression.Linear:
    """The compressor under masks: sums are over what it makes of the updates."""
    found = _up(config)
    assert isinstance(found, compression.Linear), found
    return found


def up_seed(config: Config, round: int, site: SiteId) -> int:
    """The seed of one site's compression: sites differ, so that what is left out evens out over them."""
    return seed_of(config.run.seed, "compression", round, site)


class UpEncoder:
    """A trainer's end of compression.up: it encodes updates."""

    def __init__(self, config: Config, codec: DeltaCodec) -> None:
        self._config, self.codec = config, codec

    @classmethod
    def of(cls, config: Config, schema: Schema) -> UpEncoder | None:
        """None where updates travel as they are, or masked."""
        codec = up_codec(config, schema)
        return None if codec is None else cls(config, codec)

    @cached_property
    def whole(self) -> Arena:
        """An arena for an update before it is encoded."""
        return Arena.empty(self.codec.schema)

    def encode(
        self, update: Update, site: SiteId, round: int, out: Arena, memory: Mapping[str, torch.Tensor]
    ) -> tuple[Update, dict[str, torch.Tensor]]:
        """(the update with its delta compressed into `out`, what error feedback keeps): `memory` is what it
        kept after the last round that this site counted in; {} before that."""
        delta, seed = update.delta, up_seed(self._config, round, site)
        assert isinstance(delta, Arena), delta
        before = {n.removeprefix(UP): t for n, t in memory.items() if n.startswith(UP)}
        _, after = self.codec.encode(delta, seed, before or self.codec.init(), out)
        return msgspec.structs.replace(update, delta=out), {UP + n: t for n, t in after.items()}


def shortened(config: Config, before: Checkpoint, after: Checkpoint) -> Checkpoint:
    """The next round as it is committed: moved from the one before by what its patch tells of the step."""
    codec = down_codec(config, before.weights.schema)
    if codec is None:
        return after
    own = {name.removeprefix(DOWN): t for name, t in before.state.items() if name.startswith(DOWN)}
    old, step = before.weights.load(), after.weights.load()  # what is not trained travels as it is now
    for vector, start in zip(step.trained().values(), old.trained().values(), strict=True):
        vector -= start
    patch, kept = codec.encode(step, _down_seed(config, old.digest), own or codec.init())
    state = after.state | {f"{DOWN}{name}": tensor for name, tensor in kept.items()}
    return Checkpoint(after.round, patched(config, codec, old, patch), state, patch)


def patched(config: Config, codec: DeltaCodec, base: Arena, patch: AnyArena) -> Arena:
    """The next model: `base`, changed in place, moved by a patch. BadUpdate for one that can't be."""
    step = codec.decode(patch, _down_seed(config, base.digest))
    for vector, moved in zip(base.trained().values(), step.trained().values(), strict=True):
        vector += moved
    for vector, present in zip(base.others().values(), step.others().values(), strict=True):
        vector.copy_(present)
    base.changed()
    return base


def _down_seed(config: Config, base: str) -> int:
    return seed_of(config.run.seed, "compression", "down", base)


class Decompressing(CohortWrapper):
    """A cohort whose sites send compressed updates, before one that gets them as they were."""

    def __init__(
        self, config: Config, codec: DeltaCodec, others: Cohort, keep: Callable[[SiteId, Arena], AnyArena]
    ) -> None:
        """`keep(site, delta)`: where an update waits until it is needed, so that memory doesn't grow with the
        sites; from any thread."""
        super().__init__(others)
        self._config, self._codec, self._keep = config, codec, keep

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        async with aclosing(self._inner.exchange(requests, deadline_s)) as replies:
            async for site, reply in replies:
                request = requests[site]
                if isinstance(reply, Update) and isinstance(request, Train):
                    yield site, await asyncio.to_thread(self._decoded, request, site, reply)
                else:
                    yield site, reply

    def _decoded(self, request: Train, site: SiteId, update: Update) -> Reply:
        try:
            delta = self._codec.decode(update.delta, up_seed(self._config, request.round, site))
        except BadUpdate as e:
            return Failure(reason=str(e))
        kept = self._keep(site, delta)
        kept.sent_bytes = update.delta.schema.nbytes
        return msgspec.structs.replace(update, delta=kept)


def decompressing(
    config: Config,
    schema: Schema,
    cohort: Cohort,
    keep: Callable[[SiteId, Arena], AnyArena] = lambda site, delta: delta,
) -> Cohort:
    """The cohort, with its sites' updates as they were before they were compressed, if they are."""
    codec = up_codec(config, schema)
    return cohort if codec is None else Decompressing(config, codec, cohort, keep)
