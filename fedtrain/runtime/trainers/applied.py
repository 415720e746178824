"""What a trainer makes of a model and of a patch, or of a sum of updates: the next model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...arena import AnyArena, Arena, ArenaFile
from ...config import Config
from ...digest import seed_of
from ...strategies import Strategy
from ..sites import compressed
from ..star.secure_terms import encoding_of
from . import trainer_messages as msg


def applied(config: Config, strategy: Strategy, about: msg.Description, command: msg.Apply) -> Arena:
    """The model, in memory. BadUpdate for a patch that can't be used, SecAggError for such a sum."""
    base = ArenaFile(about.schema, Path(command.base.path), command.base.digest)
    if command.summed is not None:
        shown = np.memmap(command.patch.path, np.uint8, "r")  # each byte is read once
        return moved(config, strategy, about, base, shown, command.summed)
    codec = compressed.down_codec(config, about.schema)
    assert codec is not None, "no patches come without compression.down"
    return compressed.patched(config, codec, base.load(), ArenaFile(codec.coded, command.patch.path))


def moved(
    config: Config, strategy: Strategy, about: msg.Description, base: AnyArena,
    data: np.ndarray[tuple[int], np.dtype[np.uint8]], summed: msg.Summed,
) -> Arena:  # fmt: skip
    """A model moved by a checked sum, as the aggregator's federated_round moves it."""
    from ...strategies import server_step

    encoding = encoding_of(config, summed.round, summed.cohort, about.schema.model, about.extras)
    vector = data[: len(data) // encoding.point.dtype.itemsize * encoding.point.dtype.itemsize]
    found = encoding.decode(
        vector.view(encoding.point.dtype)[: encoding.numel(summed.names)], summed.sites, summed.names
    )
    assert found.delta is not None
    weights, _ = server_step(
        strategy, base, {}, found.delta, number=summed.round, sites=summed.sites, registered=summed.sites,
        weight=found.weight, sums=dict(found.sums), scalars=dict(found.scalars),
        seed=seed_of(config.run.seed, "server", summed.round),
    )  # fmt: skip
    return weights
