"""Weights & Biases: a run's numbers and settings. `where`: the project. Without WANDB_API_KEY and WANDB_MODE
it is offline: files in RUN/wandb, which `wandb sync` sends later."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

import wandb

from ... import events as e
from ...events import Event
from ...tracking.runs import settings_of
from .base import Tracker, scalars


class WandB(Tracker):
    """A W&B run, whose id is the run directory's and its config's; curves are by round, or by step."""

    extra = "wandb"

    def __init__(self, run_dir: Path, where: str, kept: dict[str, str]) -> None:
        super().__init__(run_dir, where, kept)
        key = kept.setdefault("run", hashlib.sha256(os.urandom(16)).hexdigest()[:16])
        told = os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY")
        mode: Literal["offline"] | None = None if told else "offline"
        self._run = wandb.init(
            project=where or "fedtrain", name=run_dir.name, id=key, dir=str(run_dir), mode=mode,
            resume="allow", config=dict(settings_of(run_dir)), settings=wandb.Settings(silent=True),
        )  # fmt: skip
        for name in ("train", "eval", "site", "round"):
            self._run.define_metric(f"{name}/*", step_metric="at_round")
        self._run.define_metric("step/*", step_metric="at_step")

    def __call__(self, event: Event) -> None:
        at, found = scalars(event)
        if found:
            axis = "at_step" if isinstance(event, e.Stepped) else "at_round"
            self._run.log({**found, axis: at})

    def close(self) -> None:
        self._run.finish()
