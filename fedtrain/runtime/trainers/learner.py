"""The site's half of a round in a trainer: the strategy, noise, compression, and what the site remembers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from msgspec.structs import replace

from ...arena import Arena, Slab
from ...config import Config
from ...digest import seed_of
from ...fairness import SERVER
from ...learning import Extras
from ...messages import Metrics, SiteId, Update
from ...store.memories import Memories, OneMemory
from ...store.memory import NEVER, SiteMemory
from ...strategies import Strategy, overrides
from ...strategies.base import WEIGHTS
from ...training.local import Engine
from ...training.partition import CENTRAL
from ...training.site_training import SiteTraining
from ...training.stacked import Stacked
from ..sites.compressed import UP, UpEncoder
from ..sites.privacy import noised
from ..star.combinations import check_optimizer
from ..star.secure_terms import grid_of

State = Mapping[str, torch.Tensor]


class Learner:
    """Trains and evaluates sites, one after the other or many at once, by one strategy."""

    def __init__(
        self, config: Config, strategy: Strategy, extras: Extras, engine: Engine | None,
        encoder: UpEncoder | None, *, simulated: bool,
    ) -> None:  # fmt: skip
        """`engine`: None where others train, and give what they found to `finished`."""
        has_own = engine is not None and bool(engine.own.schema.tensors)
        if engine is not None and strategy.plain_sgd:
            check_optimizer(config, engine.own_optimizer([*engine.model.parameters()], 0))
        self._config, self._strategy = config, strategy
        self._extras = replace(extras, max_weight=strategy.max_weight)  # before strategy.weights
        self._encoder, self._simulated = encoder, simulated
        if engine is not None:
            self._engine = engine
        # Whether there is more to a site's half than training with a correction.
        self._more = has_own or overrides(strategy, "train", "finish", "site_init")
        self._feedback = encoder is not None and encoder.codec.stateful
        self._must_remember = has_own or overrides(strategy, "site_init")
        self.remembers = self._must_remember or self._feedback
        self._personal = has_own or overrides(strategy, "personal")

    def train(
        self, site: SiteId, dataset: Any, round: int, weights: Arena, out: Arena, counted: int = NEVER
    ) -> Update:
        """One site's update, in `out`; `counted`: as in messages.Train."""
        memory, delta = self.memory(site, counted), self.room(out)
        if not self._more:
            update = self._engine.train(site, dataset, round, weights, delta)
            return self.finished(update, site, round, weights, out, counted, memory, {})
        local = self._local(site, given(dataset), round, weights, memory, delta)
        update, after = local.sent(self._strategy.train(local), self._extras)
        return self.finished(update, site, round, weights, out, counted, memory, after)

    def room(self, out: Arena) -> Arena:
        """Where the delta of an update goes that leaves in `out`."""
        return out if self._encoder is None else self._encoder.whole

    def train_many(
        self, stacked: Stacked, pairs: Sequence[tuple[SiteId, Any]], round: int, weights: Arena,
        out: torch.Tensor, outs: Sequence[Arena], counted: Sequence[int],
    ) -> list[Update]:  # fmt: skip
        """The same for many sites at once; `out` is uint8 [sites, bytes of an update], `outs` its rows."""
        memories = [self.memory(site, last) for (site, _), last in zip(pairs, counted, strict=True)]
        whole, rows = out, outs
        if self._encoder is not None:
            schema = weights.schema.model
            whole = out.new_empty(len(pairs), schema.nbytes)
            rows = [Arena(schema, row) for row in whole]
        locals_ = [
            self._local(site, given(data), round, weights, memory, row)
            for (site, data), memory, row in zip(pairs, memories, rows, strict=True)
        ] if self._more else []  # fmt: skip
        updates = stacked.train(pairs, round, weights, whole, [local.memory for local in locals_])
        found = []
        for i, update in enumerate(updates):
            after: State = {}
            if locals_:
                contribution = self._strategy.finish(locals_[i].found(update, stacked.steps[i]), locals_[i])
                update, after = locals_[i].sent(contribution, self._extras)
            found.append(
                self.finished(update, pairs[i][0], round, weights, outs[i], counted[i], memories[i], after)
            )
        return found

    def rehearse(self, stacked: Stacked, pairs: Sequence[tuple[SiteId, Any]], weights: Arena) -> None:
        """Train sites in a stack as in the first round, and keep nothing of it. `pairs`: (site, its data)."""
        out = torch.zeros(len(pairs), weights.schema.model.nbytes, dtype=torch.uint8)
        rows = Slab(weights.schema.model, out).arenas()
        memories = [
            self._local(site, given(data), 0, weights, {}, row).memory
            for (site, data), row in zip(pairs, rows, strict=True) if self._more
        ]  # fmt: skip
        stacked.train(pairs, 0, weights, out, memories)

    def evaluate(
        self, site: SiteId, dataset: Any, data: Callable[[], Any], round: int, weights: Arena, counted: int
    ) -> Metrics:
        """Of the site's own model where it has one, else of the global one; where the data is no site's, with
        the task's own tensors. `data`: loads what the site trains on."""
        of_no_site = site in (CENTRAL, SERVER)
        if not self._personal or of_no_site:
            return self._engine.evaluate(dataset, weights, self._engine.first_own, "" if of_no_site else site)
        local = self._local(site, data, round, weights, self.memory(site, counted), None)
        return local.evaluate(dataset, self._strategy.personal(local))

    def _local(
        self, site: SiteId, data: Callable[[], Any], round: int, weights: Arena, memory: State,
        out: Arena | None,
    ) -> SiteTraining:  # fmt: skip
        own = {name: t for name, t in memory.items() if not name.startswith(UP)}
        summed = grid_of(self._config, self._extras, seed_of(self._engine.run_seed, "summed", round, site))
        local = SiteTraining(self._engine, site, data, round, weights, own, out=out, summed=summed)
        if not local.memory:
            local.memory = dict(self._strategy.site_init(local.start))
        return local

    def finished(
        self, update: Update, site: SiteId, round: int, weights: Arena, out: Arena, counted: int,
        memory: State, after: State,
    ) -> Update:  # fmt: skip
        """The update as it leaves, with noise and compressed; what the site remembers is on the disk."""
        update = replace(update, weight=WEIGHTS.get(self._strategy.weights, update.weight))
        if self._config.privacy.noise_multiplier:
            update = noised(self._config, update, site, round, weights, self._simulated)
        if self._encoder is not None:
            update, kept = self._encoder.encode(update, site, round, out, memory)
            after = {**after, **kept}
        if after:
            self._kept(site).keep(round, counted, Arena.pack(after))
        return update

    def memory(self, site: SiteId, counted: int) -> State:
        """What the site kept after the last round that it counted in; {} where it never did."""
        if not self.remembers or counted == NEVER:
            return {}
        kept = self._kept(site)
        if kept.empty and not self._must_remember:  # what a compressor left out may be forgotten
            print(
                f"{site} has kept nothing of round {counted + 1}, in which it counted: it goes on as a new "
                f"site would",
                file=sys.stderr,
            )
            return {}
        return kept.load(counted).views()

    def _kept(self, site: SiteId) -> SiteMemory | OneMemory:
        if self._simulated:
            return self._memories.of(site)
        folder = self._config.site_dir(site) / "memory" / site
        return SiteMemory(folder, durable=True, needed=self._must_remember)

    @cached_property
    def _memories(self) -> Memories:
        return Memories(self._config.simulate_dir / "memory", needed=self._must_remember)

    def together(self) -> AbstractContextManager[None]:
        """Write at the end of the block what sites keep in it."""
        return self._memories.together() if self._simulated and self.remembers else nullcontext()


def given(data: Any) -> Callable[[], Any]:
    """What loads data that is here already."""
    return lambda: data
