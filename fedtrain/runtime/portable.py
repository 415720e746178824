"""A finished model as a file that other programs run. Each format is an entry point of the group
"fedtrain.formats": a function (task, model, batches, file) that writes it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ..config import Config
from ..errors import ConfigError, TaskError
from ..training.batches import cut, examples_in
from ..training.devices import generators_kept
from ..training.examples import examples_of
from ..training.task import Task, collate_of, folder_of, user_code
from .evaluation import model_with_weights
from .sites.start import task_for
from .trained import as_trained

FILES = {"onnx": "model.onnx", "torch-export": "model.pt2"}
EXAMPLES = 4  # in a batch: 0 and 1 are sizes of their own to torch.export


def add(
    config: Config, source: Path, folder: Path, kind: str, *, round: int | Literal["best"] | None = None,
    site: str | None = None, data_dir: Path | None = None, sites: Sequence[str] = (),
) -> float:  # fmt: skip
    """Put the model of `source` into `folder`; returns how far its outputs are from the model's, at most.

    `site`: that one's own model. `sites`: whose data to try beside those that the task names. ConfigError
    where the model can't be written in this format; there is no file then."""
    config = as_trained(config, source)
    task = task_for(config, site, data_dir)
    (installed,) = entry_points(group="fedtrain.formats", name=kind) or (None,)
    if installed is None:
        raise ConfigError(f"--format: this installation of fedtrain has no format {kind}.")
    with generators_kept():
        model = model_with_weights(config, source, round, task, site).cpu()
        batches = _batches(task, _data(task, site, sites))
        with user_code(folder_of(task), f"export --format {kind}"):
            apart: float = installed.load()(task, model, batches, folder / FILES[kind])
    return apart


def _data(task: Task, site: str | None, joined: Sequence[str]) -> Any:
    """The evaluation data of this site; without one, of the first whose data is here."""
    with user_code(folder_of(task), "sites()"):
        names = [site] if site else [*islice(task.sites() or ["central"], 100), *joined]

    def of(name: str) -> Any:
        with user_code(folder_of(task), f"eval_data({name!r})"):
            return task.eval_data(name)

    for name in names[:-1]:
        with suppress(TaskError):
            return of(name)
    return of(names[-1])


def _batches(task: Task, data: Any) -> list[tuple[Any, int]]:
    """Two batches of the data, and one of them without its last example, with their numbers of examples."""
    with user_code(folder_of(task), "a batch for --format"):
        batches = [*islice(examples_of(data, collate_of(task)).batches(EXAMPLES, False, None), 2)]
        if not batches or examples_in(batches[0]) < 2:
            raise ConfigError("--format needs a batch of two examples or more; eval_data() has none.")
        batches.append(cut(batches[0], 0, min(examples_in(batches[0]), EXAMPLES) - 1))
        return [(batch, examples_in(batch)) for batch in batches]
