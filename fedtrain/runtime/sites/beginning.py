"""The rule policy.initial: a site rejects a run that begins with another model than the site expects.

From a first model that the aggregator chose, one sum over all sites gives it whole examples ("Robbing
the Fed", Fowl et al. 2022). So before a site works on the model of round 0, it compares that model with
policy.initial:

  own      what its own trainer makes of the task's model(), or weights(), and run.seed; or a model of an
           earlier run, of which this site gave an update or an evaluation into an opened sum
  SHA-256  the model with this hash_of, as the aggregator prints it
  any      whatever comes

A later model is compared with nothing here: with secagg.verify it is proven to follow from the first one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from ...config import SitePolicy
from ...messages import Evaluate, Request, Train
from ..star.secure_terms import hash_of
from ..threads import all_cores
from ..trainers.trainer import Trains
from .gate import Gate


async def bind(
    gate: Gate, policy: SitePolicy, trainer: Trains, scratch: Path, answered: Callable[[str], bool]
) -> None:
    """Add the rule policy.initial to the gate, before a model of round 0 is remembered. `answered`: whether
    the site answered for the model with this hash_of, as hex digits, in any of its runs."""
    expected = await own_model(trainer, scratch) if policy.initial == "own" else policy.initial

    def rule(request: Request, model: str) -> str:
        first = isinstance(request, Train | Evaluate) and request.round == 0
        if not first or model == expected or policy.initial == "any":
            return ""
        if policy.initial == "own" and answered(model):
            return ""
        mine = "the task's own model() gives" if policy.initial == "own" else "this site expects"
        return (
            f"the run would begin with the model {model}, and {mine} {expected}. A chosen first model can "
            f"reveal single examples. If the people of the run confirm this model, by a way that the "
            f"aggregator doesn't carry, run here: fedtrain policy set initial={model} (its own "
            f"policy.initial)"
        )

    gate.models = {"policy.initial": rule} | gate.models


async def own_model(trainer: Trains, scratch: Path) -> str:
    """The hash_of of the model that the site's own trainer begins with, as hex digits."""
    out = scratch / "own"
    try:
        initial = await trainer.initial(out)
        frozen = trainer.description.frozen.sha256
        return (await asyncio.to_thread(hash_of, initial, all_cores(), frozen)).hex()
    finally:
        out.unlink(missing_ok=True)
