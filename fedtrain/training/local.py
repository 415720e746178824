"""A model in one process: how a site trains and evaluates it.

The model's tensors are views of one arena, so loading the global weights is one copy, the local
optimizer steps on one vector per dtype, and the delta is one subtraction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ..arena import Arena, Frozen, subtract
from ..config import TrainConfig
from ..digest import seed_of
from ..errors import TaskError
from ..learning import Context, Correct, Only
from ..messages import Metrics, SiteId, Update
from ..schema import Schema, unique_tensors
from .batches import Batch, examples_in
from .building import build_model
from .compat import version_of
from .devices import device_of
from .engine import FROZEN_CHANGED, Step, Steps, Trainable, checksum, groups, weighs_items
from .examples import Examples, examples_of, in_groups
from .optimizers import OPTIMIZERS, Coordinates, TorchOptimizer
from .task import Task, mean_and_weight, user_code
from .tensors import Shares, kept_at_a_site


class _Buffer(NamedTuple):
    module: nn.Module
    name: str
    tensor: torch.Tensor  # a view of the arena where the buffer is persistent
    first: torch.Tensor | None  # its first value where it is not, and so never travels


class Engine(Trainable):
    """One model, reused for every site and round that this process trains.

    What a round gives depends on the weights, the data and (run_seed, round, site) alone, never on what
    the engine trained before.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        run_seed: int,
        correct: Correct | None = None,
        rounds: int = 1,
        shares: Shares | None = None,
    ) -> None:
        """`rounds`: of the run, over which train.decay goes. `shares`: what becomes of each tensor of the
        model; None: all but frozen parameters are exchanged."""
        super().__init__(task, config, run_seed, device_of(config.device))
        self.correct, self.rounds, self.shares = correct, rounds, shares
        self._order = torch.Generator()  # of shuffles
        self.model = build_model(task, run_seed, self.device).to(self.device)
        own = kept_at_a_site(self.model, shares)
        self.local, self._frozen = Arena.of(self.model, without=own), Arena.of(self.model, frozen=True)
        self.own = Arena.pack({n: t for n, t in unique_tensors(self.model).items() if n in own})
        self.first_own = self.own.load()  # as the task's model() has them
        self.frozen = Frozen.of(self._frozen)  # of the task's own model()
        for arena in (self.local, self._frozen, self.own):
            arena.data = arena.data.to(self.device)
            arena.bind(self.model)
        self._frozen_sum = checksum(self._frozen.data.view(torch.int64))
        self.model.train()

        slopes = [Arena.zeros(arena.schema, str(self.device)) for arena in (self.local, self.own)]
        # One vector for each float dtype: first those that are exchanged, then those of this site alone.
        self._weights = [list(arena.trained().values()) for arena in (self.local, self.own)]
        self._gradients = [list(slope.trained().values()) for slope in slopes]
        self._steps = Steps(self, config, correct)
        # Each parameter's .grad is a piece of the flat gradient, for backward() to add into. By .data a piece
        # has a version of its own, which grows when backward() reaches the parameter.
        named, pieces = unique_tensors(self.model), slopes[0].views() | slopes[1].views()
        self._lent = {cast(nn.Parameter, p): pieces[n].data for n, p in named.items() if p.requires_grad}
        self._unreached = list(self._lent)  # their .grad is None, as torch leaves it
        self._lend()
        self._kept = {p for name, p in named.items() if name in own}
        self.train_only(None)
        self._buffers = [
            _Buffer(
                module, name, buffer, buffer.clone() if name in module._non_persistent_buffers_set else None
            )
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @property
    def schema(self) -> Schema:
        return self.local.schema

    @property
    def frozen_weights(self) -> Arena:
        """The parameters that no training changes, as they are now; in memory."""
        return self._frozen.to(torch.device("cpu"))

    def initial(self, *, frozen: bool = False) -> Arena:
        """The weights that a run starts from, equal at all sites; or the frozen parameters."""
        model = build_model(self.task, self.run_seed, self.device)
        return Arena.of(model, frozen=frozen, without=kept_at_a_site(model, self.shares))

    @property
    def exchanged(self) -> list[torch.Tensor]:  # one vector for each float dtype
        return self._weights[0]

    @property
    def exchanged_gradients(self) -> list[torch.Tensor]:  # of these, as the last backward() left them
        return self._gradients[0]

    def train_only(self, only: Only | None) -> None:
        """Have steps move the exchanged tensors only, or those of this site; None: all."""
        chosen = {"shared": [0], "local": [1], None: [0, 1]}[only]
        self._trained = [p for p in self._lent if (p in self._kept) in chosen]
        self.weights = [vector for i in chosen for vector in self._weights[i]]
        self.gradients = [vector for i in chosen for vector in self._gradients[i]]

    def freeze(self, frozen: Arena) -> None:
        """Train with these frozen parameters from here on."""
        self._frozen.copy_(frozen)
        self._frozen_sum = checksum(self._frozen.data.view(torch.int64))

    def train(self, site: SiteId, dataset: Any, round: int, weights: Arena, out: Arena) -> Update:
        """Train on the site's examples from the global `weights`; `out` receives local - global."""
        self.load(weights.model, training=True)
        start = weights if weights.data.device == self.local.data.device else self.local.load()
        given = [Context(vector, lr=self.config.lr) for vector in start.trained().values()]
        examples, seen = self.steps(site, dataset, round, given if self.correct else ())
        subtract(self.local, start, out)
        loss, weight = seen.total()
        # The size of the dataset, in units of the loss's weight: not how often it was passed over.
        num_examples = examples.count * (weight / seen.examples)
        return Update(delta=out, num_examples=num_examples, metrics={"loss": (loss, weight)})

    def steps(
        self,
        site: SiteId,
        dataset: Any,
        round: int,
        given: Sequence[Context] = (),
        correct: Correct | None = None,
        config: TrainConfig | None = None,
    ) -> tuple[Examples, Step]:
        """Take a round's steps from the weights that are loaded; what they saw. `correct` and `config` take
        the place of the engine's own."""
        self._order.manual_seed(self.seed(round, site))
        steps = self._steps if config is None else Steps(self, config, correct or self.correct)
        with user_code(self._folder, f"site {site}, round {round + 1}"):
            examples = examples_of(dataset, self._collate)
            seen = self._round(steps, examples, round, given)
        if not seen.examples:
            raise TaskError(f"site {site} has no examples: data({site!r}) is empty")
        self._check_frozen()
        self.gather_buffers()
        return examples, seen

    def dealt(self, dataset: Any) -> Iterator[tuple[Batch, bool]]:  # all examples, and all count
        return ((self.here(batch), True) for batch in self.in_order(dataset))

    def over_ranks(self, number: float) -> float:  # there is one
        return number

    def all_batches(self, dataset: Any) -> list[Batch]:
        """All examples, as one group."""
        return [*self.in_order(dataset)]

    def step_batches(self, site: SiteId, dataset: Any, round: int, draw: int) -> Iterator[list[Batch]]:
        """The batches of each local step, see learning.Local."""
        seed = self.seed(round, site)
        order = torch.Generator().manual_seed(seed_of(seed, draw) if draw else seed)
        given = examples_of(dataset, self._collate), self.config, order
        yield from groups(self.config, partial(in_groups, *given))

    def weighs_items(self, dataset: Any) -> bool:
        """See engine.weighs_items."""
        return weighs_items(self.task, self.model, map(self.here, self.in_order(dataset)))

    def evaluate(self, dataset: Any, weights: Arena, own: Arena | None = None, site: SiteId = "") -> Metrics:
        """What the task's evaluate() gives, summed over the dataset; the loss is always among it. `own`: the
        tensors of this site, where they are others than those that are loaded. `site`: see `measured`."""
        self.seed("evaluate")
        self.load(weights.model, training=False)
        if own is not None:
            self.own.copy_(own)
        batches = ((batch, True) for batch in self.in_order(dataset))
        return self.measured(batches, site) or {"loss": (0.0, 0.0)}

    # --- One round

    def _round(self, steps: Steps, examples: Examples, round: int, given: Sequence[Context]) -> Step:
        """Every optimizer step of it."""
        config = steps.config
        own, ours = self.own_optimizer(self._trained, round), OPTIMIZERS[config.optimizer]
        optimizer = ours(config, self.weights) if own is None else TorchOptimizer(own)
        steps.begin(optimizer, given)
        one_pass = partial(in_groups, examples, config, self._order)
        seen = steps.round(groups(config, one_pass), examples, round, self.rounds)
        self._lend()
        if any(p.grad is not piece for p, piece in self._lent.items()):
            raise TaskError(
                "the task replaced its parameters' .grad (zero_grad() in loss()?); leave it to us"
            )
        return seen

    def backward(self, group: list[Batch], scale: float, doing: str = "") -> Step:
        """See Backend. Accumulating over ragged batches, or over sums of tokens, is the one large batch."""
        self._lend()
        for gradient in self.gradients:
            gradient.zero_()
        before = [version_of(piece) for piece in self._lent.values()]
        losses, weights = [], []
        for batch in map(self.here, group):  # one after the other: a device holds one of them at a time
            with self._autocast:
                mean, weight = mean_and_weight(self.task.loss(self.model, batch), batch)
            losses.append(mean.detach())
            weights.append(weight)
            if not self.weights:
                continue
            if not mean.requires_grad:
                raise TaskError(
                    "loss() returned a tensor that no gradient leads back from: leave out detach(), "
                    "torch.no_grad() and the way through numpy"
                )
            objective = mean if len(group) == 1 else mean * weight
            (objective if scale == 1.0 else objective * scale).backward()  # type: ignore[no-untyped-call]
        divisor = scale if len(group) == 1 else scale * sum(weights)
        if divisor not in (0.0, 1.0):
            for gradient in self.gradients:
                gradient.div_(divisor)
        self._note_unreached(before)
        taken = bool(self.weights) and any(weights)
        return Step(losses, weights, sum(map(examples_in, group)), taken)

    def _lend(self) -> None:
        """Give parameters that the last backward() did not reach their piece of the gradient again."""
        for p in self._unreached:
            p.grad = self._lent[p]
        self._unreached = []

    def _note_unreached(self, before: list[int]) -> None:
        """Find the parameters that backward() did not reach. `before`: the versions of all pieces."""
        pieces = zip(self._lent.items(), before, strict=True)
        self._unreached = [p for (p, t), old in pieces if version_of(t) == old and p.grad is t]
        found: list[Coordinates] = []
        for p in self._unreached:
            p.grad, piece = None, self._lent[p]
            for i, vector in enumerate(self.gradients):
                start = (piece.data_ptr() - vector.data_ptr()) // vector.itemsize
                if 0 <= start < len(vector):
                    # One range with the parameter before it, where they are neighbours.
                    first = found.pop()[1] if found and found[-1][::2] == (i, start) else start
                    found.append((i, first, start + piece.numel()))
        self.unreached = found

    # --- The model and its arena

    def load(self, weights: Arena, *, training: bool) -> None:
        """The global weights, and buffers as the model was built with: nothing of an earlier site stays."""
        self.local.copy_(weights)
        if self.model.training != training:
            self.model.train(training)
        for buffer in self._buffers:
            buffer.module._buffers[buffer.name] = buffer.tensor
            if buffer.first is not None:
                buffer.tensor.copy_(buffer.first)

    def gather_buffers(self) -> None:
        """Buffers that forward() replaced, rather than wrote into, go back to their place in the arena."""
        for buffer in self._buffers:
            present = buffer.module._buffers[buffer.name]
            if present is not None and present is not buffer.tensor:
                buffer.tensor.copy_(present)

    def _check_frozen(self) -> None:
        """TaskError when the task changed what does not travel: what others have would silently differ."""
        views = self._frozen.views()
        if not views:
            return
        tensors = unique_tensors(self.model)
        kept = all(tensors[name].data_ptr() == view.data_ptr() for name, view in views.items())
        if not kept or checksum(self._frozen.data.view(torch.int64)) != self._frozen_sum:
            raise TaskError(FROZEN_CHANGED)
