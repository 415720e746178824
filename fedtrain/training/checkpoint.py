"""Checkpoints of a run on a mesh: written by all ranks at once, verified whole before a byte of them is used.

    checkpoints/
      step-000000400/
        5f1c-rank-00000.safetensors    rank 0's tensors and pieces of tensors
        5f1c-rank-00001.safetensors
        manifest.json                  written last: what lies where, and the SHA-256 of each file

torch.distributed.checkpoint plans who writes and who reads which piece, for any mesh and any number of ranks;
checkpoint_plans.py has ranks agree on the plans, and checkpoint_storage.py is the storage. When the newest
checkpoint is damaged, a notice names what is, and the one before it is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from ..config import Config
from ..config.values import changes
from ..errors import StoreError, Unreadable
from .checkpoint_plans import PlanFailed, everyone_of, first_of, read, write
from .checkpoint_storage import LoadPlanner, Reader, SavePlanner, Writer
from .compat import foreach_copy_, tree_flatten, tree_leaves, tree_unflatten
from .manifest import WITHOUT_RUN, Manifest, check, newest, read_manifest, verify
from .places import place_of

Tree = dict[str, Any]  # nested dicts; leaves are tensors, DTensors or plain values


class Checkpoints:
    """The checkpoints of one run. Every rank makes one and calls each method at the same steps.

    `save` returns when the states may change again: after a copy to memory when `background`, after the disk
    otherwise. A save that fails (disk full, bucket away) is a notice, and training goes on with the
    checkpoint before it; `wait` raises when the last one asked for failed, so a run doesn't end without it.
    """

    def __init__(
        self,
        where: Path | str,
        *,
        every: int = 0,
        keep: int = 3,
        background: bool = True,
        format: Literal["sharded", "full"] = "sharded",
        patience_s: float = 120.0,
        run: Mapping[str, str] = MappingProxyType({}),
        process_group: dist.ProcessGroup | None = None,
        notice: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`where`: a folder that all ranks see, or s3://bucket/prefix. `every`: steps between `maybe_save`s
        that save; 0: only `finish` does. `keep`: how many stay. `format` full: rank 0 writes whole tensors
        in one file that any safetensors reader loads. `run`: its settings; a checkpoint of other ones is
        refused. {}: any is taken. `process_group`: one with a CPU backend that nobody else uses; None: a Gloo
        group of all ranks is made. `notice` is called on rank 0."""
        self.place, self.every, self.keep, self.format = place_of(where, patience_s), every, keep, format
        self.run = run
        self.last: int | None = None  # the step of the newest good checkpoint
        self._group = process_group
        if dist.is_initialized() and process_group is None:
            # Its own: a save in the background must not meet training's collectives. Patient: a rank may
            # be waiting for a bucket; a rank that died is noticed at once all the same.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=600 + 2 * patience_s))
        elif not dist.is_initialized():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or unini")
        self._notice = notice if self.rank == 0 else lambda line: None
        self._damaged: set[str] = set()
        self._failure: StoreError | None = None  # of the last save
        self._pending: tuple[int, Future[Any]] | None = None
        self._stager = Stager() if background else None
        self._writing = ThreadPoolExecutor(1, "checkpoint")

    @classmethod
    def of(cls, config: Config, run: Mapping[str, str], notice: Callable[[str], None]) -> Checkpoints:
        """As [checkpoint] says."""
        c = config.checkpoint
        return cls(
            config.checkpoint_dir, every=c.every, keep=c.keep, background=c.background,
            format="full" if c.format == "full" else "sharded", patience_s=c.patience, run=run,
            notice=notice,
        )  # fmt: skip

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group) if dist.is_initialized() else 0

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self._group) if dist.is_initialized() else 1

    # --- Saving

    def save(self, step: int, states: Stateful | Mapping[str, Stateful]) -> None:
        """Checkpoint `step`. Waits first for the save before it. A failure to store is a notice, see above;
        a state that can't be stored (an object that is neither tensor nor plain value) raises at once."""
        self._settle()
        tree = _tree(states)
        if self.format == "full":
            tree = _gathered(tree)
        check(tree)
        writer = Writer(self.place, self.run, step, self.ranks, self.keep, frozenset(self._damaged))
        planner = SavePlanner(dedup_save_to_lowest_rank=self.format == "full")
        if self._stager is not None:
            staged = self._stager.stage(tree)
            self._pending = step, self._writing.submit(write, staged, writer, planner, self._group)
            return
        try:
            write(tree, writer, planner, self._group)
            self._saved(step)
        except StoreError as e:
            self._failed(step, e)

    def written(self) -> bool:
        """Whether this process knows of a good checkpoint. Waits for nothing; any rank may ask alone."""
        if self._pending is not None and self._pending[1].done():
            self._settle()
        return self.last is not None

    def wait(self) -> None:
        """Until what was saved is on the disk; StoreError when that failed."""
        self._settle()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Wait, and free the memory of background saves."""
        try:
            self.wait()
        finally:
            if self._stager is not None:
                self._stager.close()
                self._stager = None
            self._writing.shutdown()

    def _settle(self) -> None:
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            try:
                future.result()
                self._saved(step)
            except StoreError as e:
                self._failed(step, e)

    def _saved(self, step: int) -> None:
        self.last, self._failure = step, None
        self._damaged.clear()

    def _failed(self, step: int, error: StoreError) -> None:
        self._failure = StoreError(f"The checkpoint of step {step} was not written: {error}")
        last = "there is none yet" if self.last is None else f"the last good one is of step {self.last}"
        self._notice(f"{self._failure} Training goes on; {last}.")

    # --- Loading

    def load(self, states: Stateful | Mapping[str, Stateful]) -> int | None:
        """The newest whole checkpoint into `states`, whatever mesh it is from; returns its step.

        None when there is no checkpoint; StoreError when there are only damaged ones, or when the newest is
        of another run or model. Nothing is written to `states` before all files were verified.
        """
        self._settle()
        lines = []
        for name in first_of(lambda: newest(self.place), list[str], self._group):
            manifest, damage = self._verified(name)
            if damage or manifest is None:
                self._damaged.add(name)
                lines += damage
                for line in damage:
                    self._notice(f"{line}. Passing over this checkpoint.")
                continue
            self._read(manifest, name, states)
            self.last = manifest.step
            return manifest.step
        if lines:
            raise StoreError(
                f"{self.place} has checkpoints, but no good one: {'; '.join(lines)}. "
                f"Restore one of them, or move them all away to begin anew."
            )
        return None

    def _verified(self, name: str) -> tuple[Manifest | None, list[str]]:
        """The manifest, and a line for each damaged file. Ranks share the work, and all know the result."""

        def look() -> tuple[Manifest | None, list[str]]:
            try:
                found = read_manifest(self.place, name)
            except Unreadable:
                raise
            except StoreError as e:
                return None, [str(e).rstrip(".")]
            known = self.run and found.format != WITHOUT_RUN
            if known and (changed := changes(found.run, self.run)):
                raise StoreError(
                    f"{name} in {self.place} is of a run of other settings: {changed}. Change them back, "
                    f"give the new run its own run.name, or move the checkpoints away to begin anew."
                )
            return found, []

        manifest, damage = first_of(look, tuple[Manifest | None, list[str]], self._group)
        if manifest is not None:
            files = manifest.files
            mine = sorted(files)[self.rank :: self.ranks]
            found = everyone_of(
                lambda: [verify(self.place, name, file, files[file]) for file in mine], list[str], self._group
            )
            damage = [line for lines in found for line in lines if line]
        return manifest, damage

    def _read(self, manifest: Manifest, name: str, states: Stateful | Mapping[str, Stateful]) -> None:
        tree = _tree(states)
        of_before = manifest.format == WITHOUT_RUN
        there = _known(tree, {*map(tuple, manifest.paths.values())}) if of_before else tree
        reader = Reader(self.place, manifest, name)
        try:
            read(there, reader, LoadPlanner(), self._group)
        except PlanFailed as e:
            raise StoreError(
                f"{name} in {self.place} is of another model or optimizer: {e}. "
                f"Restore the task and [train] as they were, or name another checkpoint.dir."
            ) from e
        _fill(there, tree)
        if isinstance(states, Stateful):
            states.load_state_dict(there)
        else:
            for key, state in states.items():
                state.load_state_dict(there[key])

    # --- As the training loop calls it

    def restore(self, state: Stateful) -> bool:
        """Load the newest whole checkpoint into `state`; False when there is none."""
        return self.load(state) is not None

    def maybe_save(self, state: Stateful, step: int) -> None:
        """After each optimizer step, counted from 1: save when one is due."""
        if self.every and step % self.every == 0:
            self.save(step, state)

    def finish(self, state: Stateful, step: int | None = None) -> None:
        """After the last step, or before leaving early: the state is on the disk when this returns."""
        self._settle()
        step = int(getattr(state, "step", 0)) if step is None else step
        if self.last != step or self._failure is not None:
            self.save(step, state)
        self.close()


class Stager(DefaultStager):
    """Copies a tree's tensors into memory that is kept from one save to the next: fresh pages cost more than
    the copy. torch's own stager makes it; from then on all tensors are copied at once, which takes half as
    long as one by one in Python."""

    def __init__(self) -> None:
        # Not is_available(): a GPU that is here and not used needs no pinned memory.
        self._cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
        super().__init__(StagingOptions(self._cuda, False, False, self._cuda))
        self._shape: Any = None
        self._kept: list[torch.Tensor] = []

    @torch.no_grad()
    def stage(self, state_dict: Tree, **kwargs: Any) -> Any:
        leaves, shape = tree_flatten(state_dict)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or shape != self._shape or not _alike(tensors, self._kept):
            staged = super().stage(state_dict, **kwargs)
            self._shape = shape
            self._kept = [leaf for leaf in tree_leaves(staged) if isinstance(leaf, torch.Tensor)]
            return staged
        foreach_copy_([*map(_local, self._kept)], [*map(_local, tensors)], self._cuda)
        if self._cuda:
            torch.cuda.synchronize()
        kept = iter(self._kept)
        return tree_unflatten([next(kept) if isinstance(x, torch.Tensor) else x for x in leaves], shape)


def _alike(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether one's tensors fit into the other's."""

    def form(t: torch.Tensor) -> object:
        return t.shape, t.dtype, t.placements if isinstance(t, DTensor) else None

    return [*map(form, some)] == [*map(form, others)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tree(states: Stateful | Mapping[str, Stateful]) -> Tree:
    if isinstance(states, Stateful):
        return dict(states.state_dict())
    return {name: state.state_dict() for name, state in states.items()}


def _gathered(tree: Tree) -> Tree:
    """The same with each DTensor whole, in memory, one after the other, on the first rank of its mesh."""
    found: Tree = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found[key] = _gathered(value)
        elif isinstance(value, DTensor):
            full = value.full_tensor()  # of all ranks of its mesh together
            if not any(value.device_mesh.get_coordinate() or ()):
                found[key] = full.cpu()
        else:
            found[key] = value
    return found


def _known(tree: Tree, paths: set[tuple[str | int, ...]], at: tuple[str | int, ...] = ()) -> Tree:
    """The tree without plain values that a format of before does not have. A tensor must be there."""
    found: Tree = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found[key] = _known(value, paths, (*at, key))
        elif isinstance(value, torch.Tensor) or (*at, key) in paths:
            found[key] = value
    return found


def _fill(tree: Tree, present: Tree) -> None:
    """Give the tree the values that it lacks, as they are at present."""
    for key, value in present.items():
        if isinstance(value, dict):
            _fill(tree[key], value)
        else:
            tree.setdefault(key, value)
