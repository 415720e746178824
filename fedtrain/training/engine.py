"""What a round, an optimizer step and an evaluation are, wherever the weights lie and however gradients come
about: in one process (local.py), for many small sites at once (stacked.py), over ranks (parallel/engine.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch import nn

from ..config import TrainConfig
from ..digest import seed_of
from ..errors import TaskError
from ..learning import Context, Correct
from ..messages import Metrics, SiteId, add_metrics
from .batches import Batch, move
from .compat import foreach_mul_
from .devices import seed_all, set_arithmetic
from .examples import Examples, Stream, examples_of
from .optimizers import Coordinates, Factor, Optimizer, schedule
from .precision import LossScale, autocast
from .signatures import optimizer_of
from .task import Task, collate_of, folder_of, measured, user_code

T = TypeVar("T")
Number = float | torch.Tensor  # a scalar on a device is one that nobody has waited for

FROZEN_CHANGED = (
    "the task changed a parameter whose requires_grad is False, which is not sent back. "
    "Make it a buffer (register_buffer): buffers travel"
)
INTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes
MAX_SKIPPED = 20  # steps in a row that may be left out


@dataclass(slots=True)
class Step:
    """What an optimizer step saw, or several together; of this rank, where not said otherwise."""

    losses: list[torch.Tensor]  # each batch's mean loss, a scalar; of stacked sites [sites]
    weights: list[Any]  # each batch's weight: a float, a scalar on a GPU; of stacked sites [sites]
    examples: int  # of all ranks
    taken: bool | torch.Tensor = True  # by all ranks or by none; a scalar where nobody has waited for it
    steps: int = 1
    norm: torch.Tensor | None = None  # of the whole gradient before clipping, where it was asked for

    @property
    def loss(self) -> torch.Tensor:
        """Σ loss over the examples, a float64 scalar: a GPU is not waited for."""
        nothing = torch.zeros((), dtype=torch.float64)
        return sum((m.double() * w for m, w in zip(self.losses, self.weights, strict=True)), nothing)

    @property
    def weight(self) -> Number:
        return sum_of(self.weights)

    def total(self) -> tuple[float, float]:
        """(Σ loss, Σ weight)."""
        few = len(self.losses) < 3  # a GPU is asked once, and for few values that is no sooner
        values = [loss.item() for loss in self.losses] if few else torch.stack(self.losses).tolist()
        weights = [float(weight) for weight in self.weights]
        return math.fsum(map(float.__mul__, values, weights)), math.fsum(weights)


class Backend:
    """Where weights and gradients are. A group is the batches of one optimizer step."""

    weights: Sequence[torch.Tensor]  # trained here: vectors, slabs [sites, n] or a rank's pieces
    gradients: list[torch.Tensor]  # of them, as the last backward() left them
    unreached: Sequence[Coordinates] = ()  # of parameters that it gave no gradient: they are not stepped

    def backward(self, group: Any, scale: float, doing: str) -> Step:
        """Leave the gradient of (Σ loss) / (Σ weight) over the group, and over all ranks, in `gradients`: it
        was computed with a loss of `scale` times as much. A group without weight is not `taken`."""
        raise NotImplementedError("a backend says how gradients come about")

    def norm(self) -> torch.Tensor:
        """L2, over all gradients together, the same on all ranks: [1], or [sites, 1] of slabs."""
        norms = [torch.linalg.vector_norm(g, dim=-1, keepdim=True) for g in self.gradients]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0) if norms[1:] else norms[0]
        return total

    def loss_finite(self, step: Step) -> bool:
        """Whether the losses that it saw are finite, on all ranks."""
        return all(bool(loss.isfinite()) for loss in step.losses)


class Steps:
    """The one who takes optimizer steps: of a round at a site, or of a run, one after the other."""

    def __init__(
        self, backend: Backend, config: TrainConfig, correct: Correct | None = None, nonfinite: str = "take"
    ) -> None:
        """`nonfinite`: what becomes of a step whose gradient is not finite: take | skip | raise."""
        self.backend, self.config, self.correct, self.nonfinite = backend, config, correct, nonfinite
        self.given: Sequence[Context] = ()
        self.scale = LossScale(config.precision)
        self.factor: Factor | None = None  # of the learning rate
        self._judged = self.scale.moves or nonfinite != "take"
        self._normed = self._judged or config.clip_norm > 0
        self._finite: list[bool | torch.Tensor] = []  # whether gradients were, of the steps not yet checked
        self._skipped = 0  # steps left out since the last one taken

    def begin(self, optimizer: Optimizer, given: Sequence[Context] = ()) -> None:
        """From here on with this optimizer, and the first loss scale. `given`: for the correction of each of
        the first gradients; the others are tensors that are not exchanged."""
        self.optimizer, self.given = optimizer, given
        self.scale.begin()

    def take(self, group: Any, doing: str = "", number: int = 0) -> Step:
        """One optimizer step. `number` steps of the run are done; `doing` stands in errors: "step 7", say.

        TaskError where a gradient is not finite and `nonfinite` says so. Where the optimizer can leave a step
        out by itself nobody waits to learn whether one was taken, and `check` is to be called now and then.
        """
        backend = self.backend
        unread = self.nonfinite == "skip" and not self.scale.moves and self.optimizer.skips
        while True:
            step = backend.backward(group, self.scale.value, doing)
            finite: bool | torch.Tensor = True
            if not unread:
                step.taken = bool(step.taken)
            if self._normed and step.taken is not False:
                step.norm = backend.norm()
                if self._judged:
                    # One kernel, where isfinite() takes four. NaN is not less.
                    finite = step.norm < math.inf if unread else math.isfinite(step.norm.sum())
            if unread or not self.scale.again(bool(finite), partial(backend.loss_finite, step)):
                break
        if self.nonfinite != "take":
            self._judge(step, finite, doing)
            if not unread:
                self.check(doing)
        if step.taken is not False:
            gradients = backend.gradients
            if self.config.clip_norm and step.norm is not None:
                clip(gradients, step.norm, self.config.clip_norm)
            if self.correct is not None:
                for given, gradient, weights in zip(self.given, gradients, backend.weights, strict=False):
                    self.correct(gradient, weights, given)
            factor = 1.0 if self.factor is None else self.factor(number)
            self.optimizer.step(gradients, factor, step.taken, backend.unreached)
        return step

    def check(self, doing: str) -> None:
        """TaskError where too many steps in a row were left out; a GPU is waited for to know."""
        found, self._finite = self._finite, []
        for finite in map(bool, found):
            self._skipped = 0 if finite else self._skipped + 1
            if self._skipped == MAX_SKIPPED:
                raise TaskError(
                    f"{doing}: the gradient was not finite in {MAX_SKIPPED} steps in a row, and none of them "
                    f"was taken. Look for NaN in the data and in loss(), lower train.lr, or set "
                    f"train.clip_norm."
                )

    def round(
        self, groups: Iterable[Any], examples: Examples, round: int, rounds: int, doing: str = ""
    ) -> Step:
        """All steps of a round of a site's `examples`, one for each group; what they saw together. The
        learning rate is scheduled over the site's `rounds`."""
        steps = steps_in_round(self.config, examples)
        self.factor = schedule(self.config, steps and steps * rounds, counted=steps is not None)
        total = Step([], [], 0, steps=0)
        for number, group in enumerate(groups, (steps or 0) * round):
            step = self.take(group, doing, number)
            total.losses += step.losses
            total.weights += step.weights
            total.examples += step.examples
            total.steps += 1
        return total

    def _judge(self, step: Step, finite: bool | torch.Tensor, doing: str) -> None:
        if self.nonfinite == "raise" and not finite and step.norm is not None:
            raise TaskError(
                f"{doing}: the gradient is not finite (norm {float(step.norm)}). Lower train.lr or set "
                f"train.clip_norm; parallel.nonfinite = skip leaves such steps out."
            )
        step.taken = finite if step.taken is True else finite & step.taken
        self._finite.append(finite)


def over(config: TrainConfig, steps: int, passes: int) -> bool:
    """Whether a round is done after so many steps, and whole passes over the data."""
    return steps >= config.local_steps if config.local_steps else passes >= config.local_epochs


def groups(config: TrainConfig, one_pass: Callable[[], Iterator[T]]) -> Iterator[T]:
    """A round's, of as many passes as it takes; none where the data is empty."""
    steps = 0
    for passes in count():
        before = steps
        for group in one_pass():
            yield group
            steps += 1
            if over(config, steps, passes):
                return
        if steps == before and passes:
            raise TaskError("data() gave its batches only once: return a list or a DataLoader")
        if steps == before or over(config, steps, passes + 1):
            return


def steps_in_round(config: TrainConfig, examples: Examples) -> int | None:
    """None of a stream that ends when it ends."""
    if not isinstance(examples, Stream):
        return config.steps_in_round(examples.count)
    if config.local_steps or (batches := examples.batches_in_pass) is None:
        return config.local_steps or None
    return -(-batches // config.accumulate) * config.local_epochs


def clip(gradients: list[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """Bound the norm, that of each site where there are several; as clip_grad_norm_."""
    factor = (limit / (norm + 1e-6)).clamp_(max=1.0)
    if not factor.dim():
        multiply(gradients, factor)
        return
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))


def multiply(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """All by a scalar, which is not waited for."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for (dtype, device), some in alike.items():
        foreach_mul_(some, factor.to(device, dtype))


def sum_of(numbers: Sequence[Number]) -> Number:
    """Σ; a scalar where one of them is."""
    if any(isinstance(number, torch.Tensor) for number in numbers):
        return sum(numbers)
    return math.fsum(numbers)


class Trainable(Backend):
    """A task's model where it is trained and evaluated: what all engines have."""

    model: nn.Module

    def __init__(self, task: Task, config: TrainConfig, run_seed: int, device: torch.device) -> None:
        torch.set_num_threads(config.threads)
        set_arithmetic(device, deterministic=config.deterministic, tf32=config.tf32)
        self.task, self.config, self.run_seed, self.device = task, config, run_seed, device
        self._folder, self._collate = folder_of(task), collate_of(task)
        self.own_optimizer = optimizer_of(task)
        self._autocast = autocast(config.precision, device)

    def seed(self, *purpose: object) -> int:
        """Every source of random numbers that a task may draw from, by the run and what they are for."""
        seed_all(seed := seed_of(self.run_seed, *purpose), self.device)
        return seed

    def here(self, batch: Batch) -> Batch:
        """On the device."""
        return batch if self.device.type == "cpu" else move(batch, self.device)

    def measure(self, batch: Batch) -> Metrics:
        """What the task's evaluate() gives of a batch."""
        return self.metrics(self.model, batch)

    def metrics(self, model: nn.Module, batch: Batch) -> Metrics:
        with self._autocast:
            return measured(self.task, model, batch)

    def measured(self, batches: Iterable[tuple[Batch, bool]], site: SiteId = "") -> Metrics:
        """The sum over batches; one that does not count is only there for ranks that work together. A
        TaskError names the `site`, where there is one."""
        total: Metrics = {}
        with user_code(self._folder, f"site {site}, evaluation" if site else "evaluation"), torch.no_grad():
            for batch, counts in batches:
                try:
                    metrics = self.measure(self.here(batch))
                except TaskError as e:
                    raise (TaskError(f"site {site}: {e}") if site else e) from e.__cause__
                if counts:
                    add_metrics(total, metrics)
        return total

    def in_order(self, dataset: Any) -> Iterator[Batch]:
        """Batches of train.eval_batch_size, not shuffled."""
        return examples_of(dataset, self._collate).batches(self.config.eval_batch_size, False, None)


def weighs_items(task: Task, model: nn.Module, batches: Iterable[Batch]) -> bool:
    """Whether the task's loss comes as (sum, weight), so that num_examples counts tokens, say: asked of one
    batch. How many a site has is then known only when it has trained."""
    model.eval()
    with user_code(folder_of(task), "training"), torch.no_grad():
        for batch in batches:
            return isinstance(task.loss(model, batch), tuple)
    return False


def checksum(tensor: torch.Tensor) -> int:
    """A sum of a tensor's bits that changes when one of them does, taken where they lie."""
    return int(tensor.contiguous().view(INTS[tensor.itemsize]).sum(dtype=torch.int64))
