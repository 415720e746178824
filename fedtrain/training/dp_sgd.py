"""DP-SGD (Abadi et al. 2016, Algorithm 1): a site trains so that no single example shows in its update.

In each optimizer step every example is drawn by itself with probability q = batch_size / n (a Poisson sample,
whose size varies), the gradient of each one is shortened to an L2 norm of `clip`, and the sum of them gets
Gaussian noise of standard deviation noise_multiplier · clip in each coordinate. The sum is divided by q·n,
the expected size of the sample, because the real one would tell of the data.

torch.func computes many examples' gradients at once. A model that it can't differentiate so is differentiated
example by example, to the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.func import functional_call, grad, vmap

from ..arena import Arena
from ..config import TrainConfig
from ..errors import ConfigError, TaskError
from ..keystream import Keystream
from ..learning import Context, Correct
from ..messages import SiteId, Update
from .batches import Batch, cut, examples_in
from .compat import BatchNorm, tree_leaves, tree_map
from .engine import Step, Steps
from .examples import Examples, Items, Stream, Tensors, examples_of, spans
from .local import Engine
from .task import Task, mean_and_weight, user_code

PIECE_BYTES = 32 << 20  # of examples' gradients at once, at most


class Sampled:
    """A site's examples, of which each batch is a Poisson sample."""

    def __init__(self, examples: Tensors | Items, stream: Keystream) -> None:
        self.examples, self.count, self._stream = examples, examples.count, stream

    def batches(self, size: int, drop_last: bool, order: object) -> Iterator[Batch]:
        """As many as a pass has batches of `size` (0: all examples), each of so many in expectation; None for
        one in which there is nobody."""
        expected = min(size or self.count, self.count)
        for _ in spans(self.count, expected, drop_last):
            index = torch.from_numpy(self._stream.sample(self.count, expected / self.count))
            yield self.examples.take(index) if len(index) else None


class PrivateEngine(Engine):
    """An engine whose updates protect every example. It tells neither losses nor how large its samples
    were."""

    def __init__(
        self, task: Task, config: TrainConfig, run_seed: int, correct: Correct | None, rounds: int, *,
        clip: float, noise_multiplier: float, streams: Callable[[int, SiteId, Arena], Keystream],
    ) -> None:  # fmt: skip
        """`streams(round, site, weights)`: what a round draws from, which nobody else may foresee.

        ConfigError for a model whose BatchNorm mixes examples.
        """
        super().__init__(task, config, run_seed, correct, rounds)
        self._clip, self._multiplier, self._streams = clip, noise_multiplier, streams
        for name, module in self.model.named_modules():
            if isinstance(module, BatchNorm):
                raise ConfigError(
                    f'privacy.unit: "example", but {name} is a {type(module).__name__}, in which examples '
                    f"of a batch change each other's results. Use GroupNorm or LayerNorm."
                )
        self._objective = _Objective(self)
        trained = {f"model.{n}": p for n, p in self.model.named_parameters() if p.requires_grad}
        self._parameters = {name: p.detach() for name, p in trained.items()}
        self._pieces = {name: self._lent[p].view(-1) for name, p in trained.items()}
        wide = {name: torch.promote_types(p.dtype, torch.float32) for name, p in trained.items()}
        self._sums = {n: torch.zeros_like(piece, dtype=wide[n]) for n, piece in self._pieces.items()}
        self._at_once = vmap(grad(self._objective.of), in_dims=(None, 0), randomness="different")
        self._room = max(1, PIECE_BYTES // max(1, sum(p.nbytes for p in self._parameters.values())))
        self._differentiates: bool | None = None  # whether torch.func can; None: nobody has tried

    def train(self, site: SiteId, dataset: Any, round: int, weights: Arena, out: Arena) -> Update:
        """As Engine.train. TaskError for a stream, of which no sample can be drawn."""
        self._stream = self._streams(round, site, weights)
        if self._differentiates is None:
            self.load(weights, training=True)
            with user_code(self._folder, f"site {site}, round {round + 1}"):
                examples = self._sampled(examples_of(dataset, self._collate)).examples
                self._differentiates = self._can(examples.take(torch.zeros(1, dtype=torch.int64)))
        return replace(super().train(site, dataset, round, weights, out), metrics={})

    def _round(self, steps: Steps, examples: Examples, round: int, given: Sequence[Context]) -> Step:
        sampled: Any = self._sampled(examples)  # which has all that a round asks of examples
        self._expected = min(self.config.batch_size or examples.count, examples.count)
        return super()._round(steps, sampled, round, given)

    def _sampled(self, examples: Examples) -> Sampled:
        if isinstance(examples, Stream):
            raise TaskError(
                'privacy.unit = "example" draws each batch at random from all examples: let data() return '
                "tensors or a Dataset"
            )
        if not examples.count:
            raise TaskError("data() is empty")
        return Sampled(examples, self._stream)

    def backward(self, group: list[Batch], scale: float, doing: str = "") -> Step:
        """See Backend: the gradient has noise. The step tells nothing of what it saw, not even of how
        many."""
        for sums in self._sums.values():
            sums.zero_()
        if group[0] is not None:
            (self._add_at_once if self._differentiates else self._add_one_by_one)(self.here(group[0]))
        for gradient in self.gradients:  # of a dtype, in the order of its parameters
            parts = [s for n, s in self._sums.items() if self._pieces[n].dtype == gradient.dtype]
            noise = torch.from_numpy(self._stream.normals(len(gradient))).to(self.device)
            noise.mul_(self._multiplier * self._clip).add_(torch.cat(parts))
            gradient.copy_(noise.div_(self._expected))
        return Step([torch.zeros(())], [1.0], 1)

    # --- The sum of the shortened gradients of a batch's examples

    def _add_at_once(self, batch: Batch) -> None:
        count = examples_in(batch)
        for low in range(0, count, self._room):
            found = self._at_once(self._parameters, cut(batch, low, min(low + self._room, count)))
            rows = {name: g.reshape(len(g), -1).to(self._sums[name].dtype) for name, g in found.items()}
            norms = torch.stack([torch.linalg.vector_norm(g, dim=1).double() for g in rows.values()])
            factors = self._factors(torch.linalg.vector_norm(norms, dim=0))
            for name, g in rows.items():
                self._sums[name].add_(factors.to(g.dtype) @ g)

    def _add_one_by_one(self, batch: Batch) -> None:
        for i in range(examples_in(batch)):
            for gradient in self.gradients:
                gradient.zero_()
            with self._autocast:
                example = cut(batch, i, i + 1)
                loss, _ = mean_and_weight(self.task.loss(self.model, example), example)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            factor = self._factors(self.norm().double())
            for name, sums in self._sums.items():
                sums.add_(self._pieces[name].to(sums.dtype) * factor.to(sums.dtype))

    def _factors(self, norms: torch.Tensor) -> torch.Tensor:
        """By which gradients of these norms are multiplied: to at most `clip`."""
        if not bool(norms.isfinite().all()):
            raise TaskError(
                "the gradient of an example is not finite. Look for NaN in the data, or lower train.lr"
            )
        return (self._clip / norms).clamp_(max=1.0)

    def _can(self, example: Batch) -> bool:
        """Whether torch.func differentiates the loss of a batch of one."""
        if not all(isinstance(part, torch.Tensor) and part.dim() for part in tree_leaves(example)):
            return False
        try:
            self._at_once(self._parameters, self.here(example))
        except RuntimeError:
            return False
        return True


class _Objective(nn.Module):
    """An example's loss as a function of the trained parameters."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.model, self._engine = engine.model, engine

    def of(self, parameters: dict[str, torch.Tensor], example: Batch) -> torch.Tensor:
        batch = tree_map(lambda part: part[None], example)
        found: torch.Tensor = functional_call(self, parameters, (batch,))
        return found

    def forward(self, batch: Batch) -> torch.Tensor:
        with self._engine._autocast:
            loss = self._engine.task.loss(self.model, batch)
        if not isinstance(loss, tuple):
            return loss
        weight = torch.as_tensor(loss[1])
        mean: torch.Tensor = loss[0] / torch.where(weight == 0, 1, weight)
        return mean
