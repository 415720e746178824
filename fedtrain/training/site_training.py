"""One site in one round, as a strategy sees it (learning.Local), over an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import nn

from ..arena import Arena, joined, split_into, subtract
from ..config import TrainConfig
from ..digest import seed_of
from ..errors import ConfigError
from ..learning import (
    Context,
    Contribution,
    Correct,
    Extras,
    Found,
    Group,
    Only,
    Summed,
    check_bounds,
    clipped_to,
)
from ..messages import Metrics, SiteId, Update
from .batches import Batch
from .engine import Step
from .examples import Examples, examples_of
from .task import Task, collate_of, folder_of, mean_and_weight, user_code

OWN = "local/"  # in a site's memory, before the names of the model's tensors that stay there


class SiteEngine(Protocol):
    """What trains the model of a site: local.Engine, or the ranks of an island together."""

    task: Task
    config: TrainConfig
    run_seed: int
    device: torch.device
    model: nn.Module
    local: Arena  # of the model's own tensors, those that are exchanged
    own: Arena  # and those that stay here
    first_own: Arena  # as the task's model() has them

    @property
    def exchanged(self) -> Sequence[torch.Tensor]:
        """The pieces whose gradients a correction sees one by one, in the order of a vector of learning."""

    @property
    def exchanged_gradients(self) -> Sequence[torch.Tensor]:
        """Their gradients, 1-D, as the last backward() left them."""

    def own_optimizer(self, parameters: list[nn.Parameter], round: int) -> torch.optim.Optimizer | None: ...
    def seed(self, *purpose: object) -> int: ...
    def load(self, weights: Arena, *, training: bool) -> None: ...
    def gather_buffers(self) -> None: ...
    def train_only(self, only: Only | None) -> None: ...
    def steps(
        self, site: SiteId, dataset: Any, round: int, given: Sequence[Context] = (),
        correct: Correct | None = None, config: TrainConfig | None = None,
    ) -> tuple[Examples, Step]: ...  # fmt: skip

    def step_batches(self, site: SiteId, dataset: Any, round: int, draw: int) -> Iterator[Group]:
        """The batches of each local step, see learning.Local."""

    def all_batches(self, dataset: Any) -> Group:
        """All examples, as one group."""

    def backward(self, group: Group, scale: float, doing: str = "") -> Step:
        """Leave the gradient over a group in the model; what was seen. See engine.Backend."""

    def dealt(self, dataset: Any) -> Iterator[tuple[Batch, bool]]:
        """All examples in batches, on the device, as far as they are this rank's; whether they count."""

    def over_ranks(self, number: float) -> float:
        """Summed over all that train this site."""

    def evaluate(
        self, dataset: Any, weights: Arena, own: Arena | None = None, site: SiteId = ""
    ) -> Metrics: ...


class SiteTraining:
    """The site's half of a round: what it was given, its trainings, and what it sends and remembers."""

    def __init__(
        self,
        engine: SiteEngine,
        site: SiteId,
        data: Callable[[], Any],
        round: int,
        weights: Arena,
        memory: Mapping[str, torch.Tensor],
        *,
        out: Arena | None = None,
        summed: Summed | None = None,
    ) -> None:
        """
        Args:
            data: Loads the site's training data, when it is asked for.
            weights: The model, and the entries of the server's state that came with it.
            memory: What the site kept after the last round that it counted in: the strategy's entries, and
                the tensors that stay here; those that are missing are the task's own.
            out: Receives what is sent; None where nothing is trained.
            summed: See learning.Local.as_summed; None: sums of this run are not exact.
        """
        self._engine, self._site, self._data, self._round = engine, site, data, round
        self._weights, self._out, self._summed = weights.to(engine.device), out, summed
        self.down = self._weights.extras()
        self.memory = {n: t.to(engine.device) for n, t in memory.items() if not n.startswith(OWN)}
        self._own = Arena.zeros(engine.own.schema, str(engine.device))
        for name, view in self._own.views().items():
            view.copy_(memory.get(OWN + name, engine.first_own.views()[name]))
        self.lr, self.epochs = engine.config.lr, engine.config.local_epochs
        self.seed = seed_of(engine.run_seed, "site", round, site)
        self._examples: float | None = None
        self._written = False  # whether `out` has a delta
        self._trained = False  # whether the site's examples and loss are those of a training
        self._stepping = False  # whether the engine holds what a gradient of a step's batches left
        self._seen = 0.0, 0.0, 0  # by gradients: Σ loss, Σ weight, examples
        self._clipped: dict[str, int] = {}  # coordinates of each vector
        self.metrics: Metrics = {}

    @cached_property
    def start(self) -> torch.Tensor:
        return joined(self._weights.trained())

    @property
    def examples(self) -> float:
        return float(self._dataset.count) if self._examples is None else self._examples

    @cached_property
    def _dataset(self) -> Examples:
        """One object for the whole round: a stream knows its count from the first pass over it."""
        data = self._data()
        with self._user_code(f"round {self._round}"):
            return examples_of(data, collate_of(self._engine.task))

    # --- learning.Local

    def train(
        self,
        start: torch.Tensor | None = None,
        correct: Correct | None = None,
        *,
        lr: float = 0.0,
        epochs: int = 0,
        only: Only | None = None,
    ) -> Found:
        assert self._out is not None, "a site that trains has room for its update"
        engine = self._engine
        self._load(start, training=True)
        config = engine.config if not lr else replace(engine.config, lr=lr)
        config = config if not epochs else replace(config, local_epochs=epochs, local_steps=0)
        if lr and engine.own_optimizer(list(engine.model.parameters()), self._round) is not None:
            raise ConfigError("the strategy trains at a rate of its own: leave out the task's optimizer()")
        engine.train_only(only)
        try:
            examples, seen = engine.steps(
                self._site, self._dataset, self._round, self._given(only), correct, config
            )
        finally:
            engine.train_only(None)
        loss, weight = seen.total()
        self._examples, self.metrics = examples.count * (weight / seen.examples), {"loss": (loss, weight)}
        self._trained = True
        self._own.copy_(engine.own)
        return Found(self._delta(start), seen.steps)

    def loss(self, weights: torch.Tensor) -> float:
        self._load(weights, training=False)
        engine, total, count = self._engine, 0.0, 0.0
        with self._user_code("loss"), torch.no_grad():
            for batch, counts in engine.dealt(self._dataset):
                mean, weight = mean_and_weight(engine.task.loss(engine.model, batch), batch)
                if counts:
                    total, count = total + float(mean) * weight, count + weight
        total, count = engine.over_ranks(total), engine.over_ranks(count)
        return total / count if count else 0.0

    def batches(self, draw: int = 0) -> Iterator[Group]:
        with self._user_code(f"round {self._round + 1}"):
            yield from self._engine.step_batches(self._site, self._dataset, self._round, draw)

    def gradient(self, weights: torch.Tensor, batches: Group | None = None) -> torch.Tensor:
        engine, step = self._engine, batches is not None
        if step and self._stepping:  # buffers go on from one step to the next, as in a training
            split_into(engine.local.trained(), weights.to(engine.device))
        else:
            self._load(weights, training=True)
        if not step:
            engine.seed(self._round, self._site, "gradient")
        self._stepping = step
        with self._user_code("gradient"):
            seen = engine.backward(batches or engine.all_batches(self._dataset), 1.0)
        if self._out is not None and not self._trained:
            self._take_down(seen, self._out, step)
        return joined({str(i): t for i, t in enumerate(engine.exchanged_gradients)}).clone()

    def _take_down(self, seen: Step, out: Arena, step: bool) -> None:
        """What gradients saw, and the buffers that they left, where the site does not train besides."""
        now, before = seen.total(), self._seen
        loss, weight, examples = before[0] + now[0], before[1] + now[1], before[2] + seen.examples
        self._seen, self.metrics = (loss, weight, examples), {"loss": (loss, weight)}
        self._examples = self._dataset.count * (weight / examples) if step else now[1]
        self._engine.gather_buffers()
        if not self._written:
            out.data.zero_()
            self._written = True
        there, here = self._weights.others(), self._engine.local.others()
        for dtype, vector in out.others().items():
            vector.copy_(here[dtype] - there[dtype])

    def as_summed(self, name: str, vector: torch.Tensor) -> torch.Tensor:
        if self._summed is None:
            raise ConfigError(
                f"the strategy asks for {name} as it is summed. Let its property `exact` be True."
            )
        found, self._clipped[name] = self._summed(name, vector)
        return found

    # --- what comes of it

    def found(self, update: Update, steps: int) -> Found:
        """What a training of this site gave that somebody else did, who wrote its delta to `out`."""
        assert self._out is not None, "a site that trains has room for its update"
        self._examples, self.metrics = update.num_examples, update.metrics
        self._written = self._trained = True
        return Found(joined(self._out.trained()), steps)

    def sent(self, contribution: Contribution, extras: Extras) -> tuple[Update, dict[str, torch.Tensor]]:
        """(what the site sends, what it remembers when that counted). Vectors are clipped to their bounds.
        BadUpdate for a number beyond its bound."""
        out = self._out
        assert out is not None, "a site that trains has room for its update"
        if not self._written:
            out.data.zero_()
        check_bounds(contribution.scalars, contribution.weight, extras)
        bounds = {each.name: each.bound for each in extras.up}
        split_into(out.trained(), contribution.delta)
        for name, view in out.extras().items():
            within, clipped = clipped_to(contribution.up[name], bounds[name])
            self._clipped[name] = self._clipped.get(name, 0) + clipped
            view.copy_(within)
        out.changed()
        update = Update(
            delta=out, num_examples=self.examples, metrics=self.metrics, weight=contribution.weight,
            scalars=dict(contribution.scalars), clipped=sum(self._clipped.values()),
        )  # fmt: skip
        own = {OWN + name: view for name, view in self._own.views().items()}
        return update, {**contribution.memory, **own}

    def evaluate(self, dataset: Any, weights: torch.Tensor) -> Metrics:
        """What the task's evaluate() gives of these weights on a dataset, with the tensors that stay here."""
        return self._engine.evaluate(dataset, self._with(weights), self._own, self._site)

    def tensors(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same model by name, without frozen parameters."""
        return self._with(weights).views() | self._own.views()

    def _with(self, weights: torch.Tensor) -> Arena:
        """The global model with these coordinates."""
        present = self._weights.model.load()
        split_into(present.trained(), weights)
        return present

    def _load(self, start: torch.Tensor | None, *, training: bool) -> None:
        engine, self._stepping = self._engine, False
        engine.load(self._weights.model, training=training)
        engine.own.copy_(self._own)
        if start is not None:
            split_into(engine.local.trained(), start.to(engine.device))

    def _given(self, only: Only | None) -> list[Context]:
        """What the correction of each dtype's gradient sees."""
        if only == "local":
            return []
        shapes = [piece.shape for piece in self._engine.exchanged]
        if len(shapes) == 1 and len(shapes[0]) == 1:
            return [Context(self.start, self.down, self.memory, self.lr)]
        total = sum(shape.numel() for shape in shapes)

        def cut(vector: torch.Tensor, at: int, shape: torch.Size) -> torch.Tensor:
            return vector[at : at + shape.numel()].view(shape)

        def parts(of: Mapping[str, torch.Tensor], at: int, shape: torch.Size) -> dict[str, torch.Tensor]:
            return {n: cut(t, at, shape) if t.numel() == total else t for n, t in of.items()}

        starts = accumulate((shape.numel() for shape in shapes), initial=0)
        return [
            Context(cut(self.start, *here), parts(self.down, *here), parts(self.memory, *here), self.lr)
            for here in zip(starts, shapes, strict=False)
        ]

    def _user_code(self, doing: str) -> AbstractContextManager[None]:
        return user_code(folder_of(self._engine.task), f"site {self._site}, {doing}")

    def _delta(self, start: torch.Tensor | None) -> torch.Tensor:
        """How far the engine's weights are from `start`; buffers are written to `out`."""
        assert self._out is not None
        engine, first = self._engine, not self._written and start is None
        target = self._out if first else Arena.empty(self._out.schema)
        subtract(engine.local, self._weights, target)
        if not first:
            for mine, theirs in zip(self._out.others().values(), target.others().values(), strict=True):
                mine.copy_(theirs)
        self._written = True
        if start is None and engine.device.type == "cpu":
            return joined(target.trained())
        start = self.start if start is None else start
        return joined(engine.local.trained()).to(start) - start
