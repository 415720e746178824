"""How one site trains in one round: the loop that every mode runs.

The model's tensors are views of one arena, so loading the global weights is one copy, the local
optimizer steps on one vector per dtype, and the delta is one subtraction.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from ..arena import Arena, Frozen, subtract
from ..config import TrainConfig
from ..digest import seed_of
from ..errors import ConfigError, TaskError
from ..messages import Metrics, SiteId, Update, add_metrics
from ..schema import Schema, unique_tensors
from .batches import Batch, examples_in, move
from .examples import Examples, examples_of
from .loss_scale import LossScale
from .optimizers import clip, optimizer_of
from .task import Task, collate_of, folder_of, mean_and_weight, measured, user_code

# A strategy's site half, (gradient, weights, start) -> None: changes the gradient in place.
Correct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]

INTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes
FROZEN_CHANGED = (
    "the task changed a parameter whose requires_grad is False, which is not sent back. "
    "Make it a buffer (register_buffer): buffers travel"
)


class _Buffer(NamedTuple):
    module: nn.Module
    name: str
    tensor: torch.Tensor  # a view of the arena where the buffer is persistent
    first: torch.Tensor | None  # its first value where it is not, and so never travels


class Engine:
    """One model, reused for every site and round that this process trains.

    What a round gives depends on the weights, the data and (run_seed, round, site) alone, never on what
    the engine trained before.
    """

    def __init__(
        self, task: Task, config: TrainConfig, run_seed: int, correct: Correct | None = None
    ) -> None:
        torch.set_num_threads(config.threads)
        self.task, self.config, self.run_seed, self.correct = task, config, run_seed, correct
        self.device = device_of(config.device)
        self._order = torch.Generator()  # of shuffles
        self.model = self._build().to(self.device)
        self.local, self._frozen = Arena.of(self.model), Arena.of(self.model, frozen=True)
        self.frozen = Frozen.of(self._frozen)  # of the task's own model()
        for arena in (self.local, self._frozen):
            arena.data = arena.data.to(self.device)
            arena.bind(self.model)
        self._frozen_sum = checksum(self._frozen.data.view(torch.int64))
        self.model.train()

        self._folder, self._collate = folder_of(task), collate_of(task)
        self._autocast: AbstractContextManager[Any] = nullcontext()
        if config.precision != "fp32":
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]
            self._autocast = torch.autocast(self.device.type, dtype=dtype)
        self._weights = list(self.local.trained().values())  # one vector for each float dtype
        slope = Arena.zeros(self.schema, str(self.device))
        self._gradients = list(slope.trained().values())
        # Each parameter's .grad is a piece of the flat gradient, for backward() to add into.
        named, pieces = unique_tensors(self.model), slope.views()
        self._lent = {name: pieces[name] for name, p in named.items() if p.requires_grad}
        for name, piece in self._lent.items():
            named[name].grad = piece
        self._parameters = [cast(nn.Parameter, named[name]) for name in self._lent]
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

    def initial(self, *, frozen: bool = False) -> Arena:
        """The weights that a run starts from, equal at all sites; or the frozen parameters."""
        return Arena.of(self._build(), frozen=frozen)

    def freeze(self, frozen: Arena) -> None:
        """Train with these frozen parameters from here on."""
        self._frozen.copy_(frozen)
        self._frozen_sum = checksum(self._frozen.data.view(torch.int64))

    def train(self, site: SiteId, dataset: Any, round: int, weights: Arena, out: Arena) -> Update:
        """Train on the site's examples from the global `weights`; `out` receives local - global."""
        self.seed(round, site)
        self.load(weights, training=True)
        start = weights if weights.data.device == self.local.data.device else self.local.load()
        with user_code(self._folder, f"site {site}, round {round}"):
            examples = examples_of(dataset, self._collate)
            loss, weight, seen = self._steps(examples, [*start.trained().values()] if self.correct else [])
        if not seen:
            raise TaskError(f"site {site} has no examples: data({site!r}) is empty")
        self._check_frozen()
        self._gather_buffers()
        subtract(self.local, start, out)
        # The size of the dataset, in units of the loss's weight: not how often it was passed over.
        num_examples = examples.count * (weight / seen)
        return Update(delta=out, num_examples=num_examples, metrics={"loss": (loss, weight)})

    def weighs_items(self, dataset: Any) -> bool:
        """Whether the task's loss comes as (sum, weight), so that num_examples counts tokens, say: asked of
        one batch. How many a site has is then known only when it has trained."""
        self.model.eval()
        with user_code(self._folder, "training"):
            for batch in self._in_order(dataset):
                return isinstance(self.task.loss(self.model, self._here(batch)), tuple)
        return False

    def evaluate(self, dataset: Any, weights: Arena) -> Metrics:
        """What the task's evaluate() gives, summed over the dataset; the loss is always among it."""
        self.seed("evaluate")
        self.load(weights, training=False)
        total: Metrics = {}
        with user_code(self._folder, "evaluation"), torch.no_grad():
            for batch in self._in_order(dataset):
                with self._autocast:
                    add_metrics(total, measured(self.task, self.model, self._here(batch)))
        return total or {"loss": (0.0, 0.0)}

    # --- One round

    def _steps(self, examples: Examples, start: list[torch.Tensor]) -> tuple[float, float, float]:
        """Every optimizer step of the round. Returns Σ loss, Σ weight, and how many examples they saw."""
        config = self.config
        theirs = self.task.optimizer(self._parameters)
        ours = optimizer_of(config)
        states = [ours.init(w) for w in self._weights] if theirs is None else []
        scale = LossScale(config.precision)  # a round depends on none before it
        losses: list[torch.Tensor] = []  # read once, at the end: a GPU is not waited for in between
        loss_weights: list[float] = []
        seen = 0
        steps = 0
        for group in islice(self._groups(examples), config.local_steps or None):
            while True:
                means, weights = self._gradient(group, scale.value)
                finite = not scale.moves or all_finite(self._gradients)
                if not scale.again(finite, partial(all_finite, means)):
                    break
            losses += means
            loss_weights += weights
            seen += sum(map(examples_in, group))
            if not self._weights or not any(weights):
                continue
            if config.clip_norm:
                clip(self._gradients, config.clip_norm)
            if self.correct is not None:
                for gradient, present, begun in zip(self._gradients, self._weights, start, strict=True):
                    self.correct(gradient, present, begun)
            steps += 1
            if theirs is not None:
                theirs.step()
            else:
                for present, gradient, state in zip(self._weights, self._gradients, states, strict=True):
                    ours.step(present, gradient, state, steps)
        if any(p.grad is not piece for p, piece in zip(self._parameters, self._lent.values(), strict=True)):
            raise TaskError(
                "the task replaced its parameters' .grad (zero_grad() in loss()?); leave it to us"
            )
        values = torch.stack(losses).tolist() if losses else []
        return math.fsum(map(float.__mul__, values, loss_weights)), math.fsum(loss_weights), float(seen)

    def _groups(self, examples: Examples) -> Iterator[list[Batch]]:
        """The batches of each optimizer step: `accumulate` of them, fewer at the end of an epoch."""
        config = self.config
        for epoch in count() if config.local_steps else range(config.local_epochs):
            batches = map(
                self._here, examples.batches(config.batch_size, config.drop_last, self._permutation)
            )
            empty = True
            while group := list(islice(batches, config.accumulate)):
                empty = False
                yield group
            if empty and epoch == 0:
                return
            if empty:
                raise TaskError("data() gave its batches only once: return a list or a DataLoader")

    def _gradient(self, group: list[Batch], scale: float) -> tuple[list[torch.Tensor], list[float]]:
        """The gradient of (Σ loss sums) / (Σ weights) over the group, left in self._gradients.

        So accumulating over ragged batches, or over sums of tokens, is exactly the one large batch.
        Returns each batch's mean loss and weight.
        """
        for gradient in self._gradients:
            gradient.zero_()
        means, weights = [], []
        for batch in group:
            with self._autocast:
                mean, weight = mean_and_weight(self.task.loss(self.model, batch), batch)
            means.append(mean.detach())
            weights.append(weight)
            if self._weights and not mean.requires_grad:
                raise TaskError(
                    "loss() returned a tensor that no gradient leads back from: leave out detach(), "
                    "torch.no_grad() and the way through numpy"
                )
            if self._weights:
                objective = mean if len(group) == 1 else mean * weight
                (objective if scale == 1.0 else objective * scale).backward()  # type: ignore[no-untyped-call]
        divisor = scale if len(group) == 1 else scale * sum(weights)
        if divisor not in (0.0, 1.0):
            for gradient in self._gradients:
                gradient.div_(divisor)
        return means, weights

    def _in_order(self, dataset: Any) -> Iterator[Batch]:
        """Batches of train.eval_batch_size, not shuffled."""
        return examples_of(dataset, self._collate).batches(self.config.eval_batch_size, False, None)

    # --- The model, its arena, its seeds

    def _build(self) -> nn.Module:
        return build_model(self.task, self.run_seed, self.device)

    def seed(self, *purpose: object) -> None:
        """Every source of random numbers that a task may draw from, by the run and what they are for."""
        seed = seed_of(self.run_seed, *purpose)
        seed_all(seed, self.device)
        self._order.manual_seed(seed)

    def _permutation(self, examples: int) -> torch.Tensor:
        return torch.randperm(examples, generator=self._order)

    def _here(self, batch: Batch) -> Batch:
        return batch if self.device.type == "cpu" else move(batch, self.device)

    def load(self, weights: Arena, *, training: bool) -> None:
        """The global weights, and buffers as the model was built with: nothing of an earlier site stays."""
        self.local.copy_(weights)
        if self.model.training != training:
            self.model.train(training)
        for buffer in self._buffers:
            buffer.module._buffers[buffer.name] = buffer.tensor
            if buffer.first is not None:
                buffer.tensor.copy_(buffer.first)

    def _gather_buffers(self) -> None:
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


def all_finite(tensors: list[torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def checksum(tensor: torch.Tensor) -> int:
    """A sum of a tensor's bits that changes when one of them does, taken where they lie."""
    return int(tensor.contiguous().view(INTS[tensor.itemsize]).sum(dtype=torch.int64))


def build_model(task: Task, run_seed: int, device: torch.device) -> nn.Module:
    """The task's model as every site, and every rank, begins with it; on the CPU."""
    seed_all(seed_of(run_seed, "init"), device)
    with user_code(folder_of(task), "model()"):
        model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"model() returned a {type(model).__name__}, not a torch.nn.Module")
    if (parameters := list(model.parameters())) and not any(p.requires_grad for p in parameters):
        raise ConfigError(
            f"model() has nothing to train: requires_grad is False of all its {len(parameters)} parameters. "
            f"Leave it True for those that training is to change."
        )
    return model


def seed_all(seed: int, device: torch.device) -> None:
    """Every generator that a task may draw from without naming it."""
    # Not torch.manual_seed: it looks for every kind of accelerator, and takes 194 µs of a 400 µs round.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        # Not torch.cuda.manual_seed, which is for the device that is current.
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)  # the legacy one, which datasets and augmentations draw from


def device_of(name: str) -> torch.device:
    """train.device as torch knows it; "auto" is the first GPU, or else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"train.device: {name!r} is not a device. Use auto, cpu, cuda or cuda:1.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"train.device: {name} is not here; this machine has {torch.cuda.device_count()} GPUs. "
            f"Set it to auto or cpu, or install a torch that sees the GPU."
        )
    return device
