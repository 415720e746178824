"""What rules are worth when sites are hostile: accuracy of every rule under every attack, on digits.

Fifteen sites share 1,438 of scikit-learn's digits by Dirichlet(1), 359 are for testing; some of the sites
are hostile and do as benchmarks/attacks.py says. A model is linear (650 weights); a round is ten steps of
SGD in batches of 32 at each site, all at once in numpy; everything else is the code of a federation in the
open. Rules that ask for f are told the number of hostile sites. FLTrust has a sixteenth site, honest, with
100 examples of all kinds. A figure is the accuracy after the last round, in percent, the median over seeds;
"-" where the rule refuses to start.

    python benchmarks/robustness.py [--json] [--table] [--rounds 30] [--seeds 5] [--hostile 3 6] [--alpha 1]
                                    [--rule NAME]
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from attacks import ATTACKS, Array, Attack

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.errors import ConfigError, Diverged
from fedtrain.events import silent
from fedtrain.messages import Reply, Request, SiteId, Train, Update
from fedtrain.runtime.star.answers import InTheOpen
from fedtrain.runtime.star.federated import federated_round
from fedtrain.schema import Schema, TensorSpec
from fedtrain.store import Checkpoint, RoundPlan
from fedtrain.strategies import build
from fedtrain.transport.memory import LocalCohort

SITES, ROOT_SITE, ROOT_EXAMPLES = 15, "site-15", 100
STEPS, BATCH, LR = 10, 32, 1.0
SHAPE = (65, 10)  # weights of 64 pixels and a constant, for ten digits
SCHEMA = Schema((TensorSpec("w", SHAPE, "float32", True),))


def rules(f: int) -> dict[str, dict[str, Any]]:
    """Name -> [aggregation], for f hostile sites."""
    plain: dict[str, dict[str, Any]] = {
        "mean": {},
        "median": {},
        "trimmed_mean": {"f": f},
        "geometric_median": {},
        "centered_clip": {},
        "centered_clip, last": {"rule": "centered_clip", "start": "last"},
        "krum": {"f": f},
        "multi_krum": {"f": f},
    }
    before = {
        "bucketing:2": ("median", "geometric_median", "centered_clip"),
        "nnm": tuple(kind for kind in plain if kind not in ("mean", "krum")),
        "clip:0.5": ("mean", "geometric_median"),
        "clip:0.5, nnm": ("median", "trimmed_mean", "geometric_median", "centered_clip", "multi_krum"),
        "clip:0.25, nnm": ("geometric_median",),
        "clip:1, nnm": ("geometric_median",),
    }
    found = {kind: {"rule": kind} | keys for kind, keys in plain.items()}
    for names, kinds in before.items():
        own = names.replace("nnm", f"nnm:{f}").split(", ")
        found |= {f"{names}, {kind}": {"rule": kind, "before": own} | plain[kind] for kind in kinds}
    return found | {"fltrust": {"rule": "fltrust", "root": ROOT_SITE}}


@dataclass(frozen=True)
class Digits:
    """The pixels with a constant, and each label as a row of the identity."""

    x: Array
    y: Array
    test_x: Array
    test_y: Array

    @classmethod
    def load(cls) -> Digits:
        spec = find_spec("sklearn")
        assert spec is not None, "pip install scikit-learn"
        assert spec.origin is not None
        path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
        rows = np.loadtxt(path, delimiter=",")
        x, y = np.hstack([rows[:, :64] / 16, np.ones((len(rows), 1))]), np.eye(10)[rows[:, 64].astype(int)]
        held_out = np.arange(len(rows)) % 5 == 4
        return cls(x[~held_out], y[~held_out], x[held_out], y[held_out])

    def dealt(self, draw: np.random.Generator, alpha: float) -> list[list[int]]:
        """The examples of each site: of each digit, parts by Dirichlet(alpha)."""
        parts: list[list[int]] = [[] for _ in range(SITES)]
        for digit in range(10):
            own = draw.permutation(np.flatnonzero(self.y[:, digit]))
            cuts = np.cumsum(draw.dirichlet([alpha] * SITES))[:-1] * len(own)
            for part, some in zip(parts, np.split(own, cuts.astype(int)), strict=True):
                part += some.tolist()
        return parts

    def accuracy(self, weights: Array) -> float:
        """In percent, on the examples for testing."""
        right = (self.test_x @ weights).argmax(axis=1) == self.test_y.argmax(axis=1)
        return float(100 * right.mean())


class Federation(LocalCohort):
    """All sites; the first f are hostile."""

    def __init__(self, digits: Digits, attack: Attack, f: int, seed: int, alpha: float, root: bool) -> None:
        draw = np.random.default_rng([seed, 0])
        self._digits, self._attack, self._f, self._seed = digits, attack, f, seed
        self._examples = digits.dealt(draw, alpha)
        if root:
            self._examples.append(draw.choice(len(digits.x), ROOT_EXAMPLES, replace=False).tolist())
        self._labels = np.repeat(digits.y[None], len(self._examples), axis=0)
        if attack.flips:
            self._labels[:f] = digits.y[:, ::-1]
        super().__init__({f"site-{i:02}": _never for i in range(len(self._examples))})

    @cached_property
    def sites(self) -> list[SiteId]:
        return [f"site-{i:02}" for i in range(len(self._examples))]

    async def exchange(
        self, requests: Mapping[SiteId, Request], deadline_s: float
    ) -> AsyncGenerator[tuple[SiteId, Reply], None]:
        request = next(iter(requests.values()))
        assert isinstance(request, Train), request
        start = request.weights.load().views()["w"].numpy().astype(np.float64)
        found = (self._trained(start, request.round) - start).reshape(len(self.sites), -1)
        draw = np.random.default_rng([self._seed, 2, request.round])
        if self._f:
            found[: self._f] = self._attack.forge(found[self._f : SITES], found[: self._f], draw)
        for site, row, own in zip(self.sites, found, self._examples, strict=True):
            delta = Arena.zeros(SCHEMA)
            delta.views()["w"].copy_(torch.from_numpy(row).view(SHAPE))
            yield site, Update(delta=delta, num_examples=max(1.0, float(len(own))))

    def _trained(self, start: Array, number: int) -> Array:
        """Each site's weights [sites, 65, 10] after its steps."""
        draw = np.random.default_rng([self._seed, 1, number])
        weights, site = np.repeat(start[None], len(self.sites), axis=0), np.arange(len(self.sites))[:, None]
        for _ in range(STEPS):
            batch = np.stack([draw.choice(own or [0], BATCH) for own in self._examples])
            x, y = self._digits.x[batch], self._labels[site, batch]
            logits = x @ weights
            odds = np.exp(logits - logits.max(axis=2, keepdims=True))
            error = odds / odds.sum(axis=2, keepdims=True) - y
            weights -= LR / BATCH * x.transpose(0, 2, 1) @ error
        return weights


def _never(request: Request) -> Reply:
    raise AssertionError("Federation answers for all sites")


def accuracy(
    digits: Digits,
    aggregation: dict[str, Any],
    attack: Attack,
    f: int,
    seed: int,
    rounds: int,
    alpha: float = 1.0,
) -> float:
    """The accuracy in percent after so many rounds with f hostile sites. ConfigError where the rule refuses
    to start; 0 where the model diverges."""
    config = Config.of({"run": {"seed": seed}, "strategy": {"min_sites": SITES, "round_deadline": "60s"},
                        "secagg": {"enabled": False}, "aggregation": aggregation})  # fmt: skip
    cohort = Federation(digits, attack, f, seed, alpha, root=aggregation["rule"] == "fltrust")
    answers, strategy = InTheOpen(config, cohort, silent), build("fedavg", {})

    async def run() -> Checkpoint:
        checkpoint = Checkpoint(0, Arena.zeros(SCHEMA))
        for number in range(rounds):
            plan = RoundPlan(number, 0, cohort.sites)
            checkpoint, *_ = await federated_round(answers, plan, strategy, checkpoint)
        return checkpoint

    try:
        weights = asyncio.run(run()).weights
    except Diverged:
        return 0.0
    return digits.accuracy(weights.load().views()["w"].numpy().astype(np.float64))


def row(
    digits: Digits, aggregation: dict[str, Any], f: int, seeds: int, rounds: int, alpha: float
) -> list[float]:
    """The median accuracy over seeds under each attack; [] where the rule refuses to start."""
    try:
        return [
            statistics.median(
                accuracy(digits, aggregation, attack, f if name != "none" else 0, seed, rounds, alpha)
                for seed in range(seeds)
            )
            for name, attack in ATTACKS.items()
        ]
    except ConfigError:
        return []


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hostile", type=int, nargs="+", default=[3, 6], help=f"of {SITES} sites")
    parser.add_argument("--alpha", type=float, default=1.0, help="of the Dirichlet; less: sites differ more")
    parser.add_argument("--rule", action="append", choices=rules(0), help="only this one; may be repeated")
    parser.add_argument("--table", action="store_true", help="as a table in Markdown")
    args = parser.parse_args()
    common.begin(args)
    torch.set_num_threads(1)
    digits = Digits.load()
    for f in args.hostile:
        if args.table:
            print(f"\n| {f} of {SITES} hostile | {' | '.join([*ATTACKS, 'worst'])} |")
            print("|" + "---|" * (2 + len(ATTACKS)))
        for name, aggregation in rules(f).items():
            if args.rule and name not in args.rule:
                continue
            found = row(digits, aggregation, f, args.seeds, args.rounds, args.alpha)
            if args.table:
                worst = [min(found)] if found else []
                cells = [f"{value:.1f}" for value in found + worst] or ["-"] * (1 + len(ATTACKS))
                print(f"| `{name}` | {' | '.join(cells)} |", flush=True)
                continue
            for attack, value in zip(ATTACKS, found, strict=False):
                common.emit("robustness", f"{f} of {SITES}, {attack}, {name}", "accuracy", value, "%")


if __name__ == "__main__":
    main()
