"""DP-FedAvg: noise at the aggregator, and a clipping norm that follows a quantile of the updates' norms."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from ..config.values import BelowOne, Inner, NotNegative, Positive, require
from ..keystream import KEY_BYTES, Keystream
from ..learning import Bounded, Contribution, Found, Local, RoundSums, State, Vector
from .base import Strategy


@dataclass(frozen=True)
class DPFedAvg(Strategy):
    """Andrew et al. 2021, Algorithm 1, with momentum at the server.

    A site shortens its delta to the norm C, and all sites count alike: Δ ← (Σ Δᵢ + N(0, (z_Δ·C)²)) / n. With
    clip_lr above 0 the sites also say whether their norm was at most C, and C follows the quantile:
    b ← (Σ bᵢ + N(0, σ_b²)) / n, C ← C·exp(−clip_lr·(b − quantile)). Both noises together hide as much as
    noise_multiplier alone, the paper's z, because z_Δ is larger: z_Δ^-2 = z^-2 − (2σ_b)^-2.
    """

    noise_multiplier: Positive = 1.0  # z
    clip: Positive = 0.1  # the first C
    quantile: Inner = 0.5
    clip_lr: NotNegative = 0.2  # 0: C stays as it is
    count_noise: Positive = 5.0  # σ_b; the paper has a twentieth of a round's sites
    server_lr: Positive = 1.0
    momentum: BelowOne = 0.9
    delta: Inner = 1e-5  # of the (epsilon, delta) that is reported
    down, max_weight, weighs = ("clip",), 1.0, ("equal",)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.noise_multiplier / 2
        require(not self.clip_lr or self.count_noise > least, "strategy.count_noise",
                f"{self.count_noise} must be more than half of noise_multiplier, {least}; or set "
                f"strategy.clip_lr = 0")  # fmt: skip

    @property
    def scalars(self) -> tuple[Bounded, ...]:
        return (Bounded("below", 1.0),) if self.clip_lr else ()

    @property
    def sigma(self) -> float:
        """Any two deltas of a site lie at most 2·C apart."""
        return self.noise_multiplier / 2

    @property
    def sum_noise(self) -> float:
        """z_Δ: the standard deviation of the noise of the sum, in multiples of C."""
        if not self.clip_lr:
            return self.noise_multiplier
        return float((self.noise_multiplier**-2 - (2 * self.count_noise) ** -2) ** -0.5)

    def init(self, weights: Vector) -> State:
        clip, zeros = weights.new_full((1,), self.clip).double(), weights.new_zeros(len(weights))
        return {"clip": clip, "momentum": zeros}

    def finish(self, found: Found, local: Local) -> Contribution:
        clip, norm = float(local.down["clip"]), float(found.delta.double().norm())
        delta = found.delta * min(1.0, clip / norm) if norm else found.delta
        below = {"below": float(norm <= clip)} if self.clip_lr else {}
        return Contribution(delta, 1.0, scalars=below)

    def step(self, weights: Vector, state: State, round: RoundSums) -> tuple[Vector, State]:
        import torch

        stream, clip = Keystream(round.seed.to_bytes(KEY_BYTES, "little")), float(state["clip"])
        noise = torch.from_numpy(stream.normals(len(weights))).to(round.mean)
        mean = round.mean + noise * (self.sum_noise * clip / round.weight)
        momentum = self.momentum * state["momentum"] + mean
        if self.clip_lr:
            below = round.scalars["below"] + self.count_noise * float(stream.normals(1)[0])
            clip *= exp(-self.clip_lr * (below / round.weight - self.quantile))
        after = {"clip": torch.full_like(state["clip"], clip), "momentum": momentum}
        return weights.add_(momentum, alpha=self.server_lr), after
