"""A site that trains by a command of its own (train.command): weights out and new ones in, as safetensors.

The command is given files, and whatever it starts (torchtitan, Accelerate, a script) is its own affair. What
it writes is checked against the model's schema; from there on it is an update as any other.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict

from ...arena import Arena, subtract
from ...config import COMMAND_WORDS, Config
from ...config.project import check_approved
from ...digest import seed_of
from ...errors import TaskError, some
from ...messages import Metrics, SiteId, Update
from ..own_code import WORD, command_files
from ..processes import end_tree, ending

if TYPE_CHECKING:
    import torch

    from ...training.partition import SimulatedSites

REPORT_BYTES = 1 << 16
FILES = ("weights.safetensors", "out.safetensors", "report.json", "request.json", "frozen.safetensors")


class TrainingRequest(msgspec.Struct):
    """What a training is about, for the command: the file {request}, as JSON."""

    site: SiteId
    round: int  # the first is 0
    rounds: int  # of the run
    seed: int  # of this site in this round
    train: dict[str, Any]  # section [train], such as lr and local_epochs
    data_dir: str  # as the task's own
    weights: str  # the other files' paths
    out: str
    report: str
    frozen: str | None  # safetensors of the parameters that no round changes, where the model has some
    examples: list[int] | None  # those of the pool that are this site's, in a simulation without sites()


class TrainingReport(msgspec.Struct, forbid_unknown_fields=True):
    """What the command says of a training: the file {report}, as JSON."""

    examples: float  # that it trained on: the weight of the update
    metrics: dict[str, float] = {}  # averages over these examples; "loss" is shown
    delta: bool = False  # whether {out} is what the weights moved by, and not the new weights


class OwnTrainer:
    """Trains a site by a command."""

    def __init__(
        self, config: Config, data_dir: Path, simulated: SimulatedSites | None, frozen: Callable[[], Arena]
    ) -> None:  # fmt: skip
        """`simulated`: whose site each is; None at a real one. `frozen`: the parameters that stay."""
        self._config, self._data_dir, self._simulated, self._frozen = config, data_dir, simulated, frozen

    def train(self, site: SiteId, round: int, weights: Arena, out: Arena) -> Update:
        """Train one site; `out` receives what its weights moved by. TaskError where the command fails, or
        writes anything but tensors of this model."""
        with TemporaryDirectory(prefix="command-") as folder:  # in the trainer's scratch folder
            request, about = self._request(site, round, weights.model, Path(folder))
            self._run({**asdict(request), "request": about}, Path(folder) / "files")
            report = read_report(Path(request.report))
            read_tensors(Path(request.out), out)
        if not report.delta:
            subtract(out, weights.model, out)
        count = report.examples
        metrics: Metrics = {name: (mean * count, count) for name, mean in report.metrics.items()}
        return Update(delta=out, num_examples=count, metrics=metrics)

    def _request(
        self, site: SiteId, round: int, weights: Arena, folder: Path
    ) -> tuple[TrainingRequest, Path]:
        """What the command is asked, and the file that says so; the tensors are written."""
        from safetensors.torch import save_file

        config, frozen, part = self._config, self._frozen(), None
        if self._simulated is not None and not self._simulated.natural:
            part = [*map(int, self._simulated.part(site))]
        given, made, told, about, rest = (str(folder / name) for name in FILES)
        save_file(weights.views(), given)
        if frozen.schema.tensors:
            save_file(frozen.views(), rest)
        request = TrainingRequest(
            site, round, config.run.rounds, seed_of(config.run.seed, round, site), config.table()["train"],
            str(self._data_dir), given, made, told, rest if frozen.schema.tensors else None, part,
        )  # fmt: skip
        Path(about).write_bytes(msgspec.json.encode(request))
        return request, Path(about)

    def _run(self, values: dict[str, Any], folder: Path) -> None:
        """The command, to its end, with copies in `folder` in place of the project's files that it names. Its
        output is the trainer's own."""
        config, copies = self._config, copied(self._config, folder)
        # With `python -m` and `-c` Python would look for modules in the current folder first.
        safe = "1" if re.search(r"(^|\s)-\w*[mc]", config.train.command) else ""
        words = "".join(
            copies.get(os.path.normpath(word), word) for word in re.split(f"({WORD})", config.train.command)
        )
        for name in COMMAND_WORDS:
            words = words.replace(f"{{{name}}}", shlex.quote(str(values[name])))
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        modules = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
        process = subprocess.Popen(
            ["/bin/sh", "-c", words], cwd=config.root, stdin=subprocess.DEVNULL, stdout=2, stderr=2,
            env={**os.environ, "PATH": path, "PYTHONPATH": modules, "PYTHONSAFEPATH": safe},
        )  # fmt: skip
        try:
            status = process.wait(config.train.command_timeout)
        except subprocess.TimeoutExpired:
            raise TaskError(
                f"train.command took longer than train.command_timeout = {config.train.command_timeout:g} s"
            ) from None
        finally:
            if process.poll() is None:
                end_tree(process.pid)
                process.wait()
        if status:
            raise TaskError(f"train.command {ending(status)}; what it said is in this site's output")


def copied(config: Config, folder: Path) -> dict[str, str]:
    """The project's files that train.command names, and what these import, copied below `folder`, by their
    paths in the project, quoted for the shell. At a site ConfigError where one is not as it was approved."""
    found = {}
    for source in command_files(config):
        check_approved(source)
        path = folder / source.name
        found[source.name] = shlex.quote(str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.content)
        path.chmod(0o700)  # a script may be started by its name
    return found


def read_report(file: Path) -> TrainingReport:
    """TaskError where the command wrote none, or something else."""
    try:
        with file.open("rb") as opened:
            report = msgspec.json.decode(opened.read(REPORT_BYTES), type=TrainingReport)
    except FileNotFoundError:
        raise TaskError('train.command wrote no {report}: JSON such as {"examples": 120}') from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise TaskError(f"train.command: {{report}} is not what it should be: {e}") from None
    if not 0 < report.examples < float("inf"):
        raise TaskError(f"train.command: {{report}} says {report.examples:g} examples. Say how many it took.")
    return report


def read_tensors(file: Path, into: Arena) -> None:
    """The tensors of a file, which are those of an arena. TaskError where they differ by name, shape or
    dtype."""
    from safetensors import SafetensorError, safe_open

    views = into.views()
    try:
        with safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            lacks, more = sorted(views.keys() - names), sorted(names - views.keys())
            if lacks or more:
                raise TaskError(
                    f"train.command: {{out}} has not the model's tensors. It lacks: {some(lacks) or 'none'}; "
                    f"unknown: {some(more) or 'none'}. Save what {{weights}} has, under the same names."
                )
            for name, view in views.items():
                found = opened.get_tensor(name)
                if (found.shape, found.dtype) != (view.shape, view.dtype):
                    raise TaskError(
                        f"train.command: {name} in {{out}} is {_form(found)}, the model's {_form(view)}. "
                        f"Save it as {{weights}} has it."
                    )
                view.copy_(found)
    except FileNotFoundError:
        raise TaskError("train.command wrote no {out}: a safetensors file of the new weights") from None
    except (OSError, SafetensorError) as e:
        raise TaskError(f"train.command: {{out}} can't be read as safetensors: {type(e).__name__}") from None
    into.changed()


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
