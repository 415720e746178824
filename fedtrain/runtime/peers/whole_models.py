"""Whole models at the end of a run, without I/O: their parts, their numbers under masks, one of them all."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...arena import Arena
from ...exchange import PeerId
from ...gossip import MixingRule, Ruled, rules
from ...gossip.one_model import mean, ruled
from ...secagg.fixedpoint import Floats
from ...secagg.masking import RingVector
from .gossip import Peer
from .parcels import other_parts, trained_part, write

if TYPE_CHECKING:
    import torch

    Vector = torch.Tensor
    Parts = Mapping[str, Vector]  # of a model: "x", all that is trained, and the parts that are averaged


def of_all(peers: Mapping[PeerId, Peer], first: int, initial: Arena) -> Arena | None:
    """What peers agree on in the open when nothing is lost; None where they are too few for the rule."""
    names, one = sorted(peers), next(iter(peers.values()))
    each = [parts_of(peers[name].model) for name in names]
    rows = {name: [parts[name] for parts in each] for name in each[0]}
    if (rule := rule_of(one)) is None:
        masses = [mass_of(peers[name]) for name in names]
        return as_model({name: mean(vectors, masses) for name, vectors in rows.items()}, initial)
    return as_model(ruled(rule, names, rows, first), initial) if len(names) >= max(rule.needs, 2) else None


def rule_of(peer: Peer) -> MixingRule | None:
    """The robust rule of a peer's algorithm; None where it has none."""
    algorithm = peer.algorithm
    robust = isinstance(algorithm, Ruled) and not isinstance(algorithm.rule, rules.GraphMean)
    return algorithm.rule if isinstance(algorithm, Ruled) and robust else None


def mass_of(peer: Peer) -> float:
    """How much a peer's model counts: its push-sum mass, where it has one."""
    return float(peer.state["mass"]) if "mass" in peer.state else 1.0


def parts_of(model: Arena) -> Parts:
    """The parts of a model that are averaged."""
    return {"x": trained_part(model), **other_parts(model)}


def as_model(parts: Parts, initial: Arena) -> Arena:
    """A model of these parts; what is never averaged is the initial model's."""
    return write(initial.load(), parts["x"], {name: part for name, part in parts.items() if name != "x"})


def as_numbers(parts: Parts) -> tuple[Floats, Floats]:
    """(a model's values, the exact scalars) of a sum under masks."""
    scalars = [part.numpy().astype(np.float64) for name, part in parts.items() if name != "x"]
    return parts["x"].numpy(), np.concatenate([np.empty(0), *scalars])


def with_own(own: Parts, weight: float, values: Floats, scalars: Floats) -> Parts:
    """The mean: a peer's own part of it, and the sum of all others' parts."""
    import torch

    rest = torch.from_numpy(np.concatenate([values, scalars]))
    lengths = [len(part) for part in own.values()]
    pieces = torch.split(rest, lengths)
    return {name: (part.double() * weight + piece).to(part.dtype)
            for (name, part), piece in zip(own.items(), pieces, strict=True)}  # fmt: skip


def signed(ring: RingVector) -> Vector:
    """A vector of the ring as the integers in which it travels."""
    import torch

    return torch.from_numpy(ring.view(f"i{ring.itemsize}"))


def sha256(model: Arena) -> str:
    """In hex, of a model's bytes."""
    return hashlib.sha256(model.payload).hexdigest()


def among(members: Collection[PeerId], parts: Parts) -> Parts:
    """The parts under names that only a peer takes who counts with the same members (OF_SOME)."""
    tag = hashlib.sha256("\x1f".join(members).encode()).hexdigest()[:16]
    return {f"{tag}/{name}": part for name, part in parts.items()}
