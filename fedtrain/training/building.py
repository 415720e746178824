"""A task's model as it is before any training: built under the run's seed, or read from safetensors files."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn

from ..digest import seed_of
from ..errors import ConfigError, TaskError, some
from ..schema import named_state
from .devices import seed_all
from .signatures import check_methods, model_of
from .task import Task, folder_of, user_code


def build_model(task: Task, run_seed: int, device: torch.device) -> nn.Module:
    """The task's model as every site, and every rank, begins with it; on the CPU."""
    model = called_model(task, run_seed, device)
    if (pretrained := Pretrained.of(task, model)) is not None:
        pretrained.fill(model)
    return model


def called_model(
    task: Task, run_seed: int, device: torch.device, within: AbstractContextManager[object] | None = None
) -> nn.Module:
    """What the task's model() returns, called under the run's seed, and `within` a context."""
    check_methods(task, Task)
    seed_all(seed_of(run_seed, "init"), device)
    with user_code(folder_of(task), "model()"), within or nullcontext():
        model = model_of(task, run_seed)
    if not isinstance(model, nn.Module):
        raise TaskError(f"model() returned a {type(model).__name__}, not a torch.nn.Module")
    if (parameters := list(model.parameters())) and not any(p.requires_grad for p in parameters):
        raise ConfigError(
            f"model() has nothing to train: requires_grad is False of all its {len(parameters)} parameters. "
            f"Leave it True for those that training is to change."
        )
    return model


class Pretrained:
    """The tensors of a model that its files have."""

    def __init__(self, where: Path, model: nn.Module) -> None:
        """`where`: a file, or a folder of them, such as transformers' save_pretrained() writes. ConfigError
        where they have no tensor of the model, or one of another shape."""
        self._found: dict[int, tuple[Path, str]] = {}  # id of the model's tensor -> file, name in it
        files = sorted(where.glob("*.safetensors")) if where.is_dir() else [where]
        saved = {name: (file, shape) for file in files for name, shape in _shapes(file).items()}
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        missing: dict[int, str] = {}
        for name, tensor in named_state(model):
            names = (n for n in (name, name.removeprefix(prefix), prefix + name) if n in saved)
            if (known := next(names, None)) is None:
                missing[id(tensor)] = name
                continue
            file, shape = saved[known]
            if shape != tuple(tensor.shape):
                raise ConfigError(
                    f"weights(): {known} in {file} is {list(shape)}, the model's {name} "
                    f"{list(tensor.shape)}. Let model() build the model that the file is of."
                )
            self._found[id(tensor)] = file, known
        if not self._found:
            raise ConfigError(
                f"weights(): {where} has no tensor of the model: {some(sorted(saved)) or 'none'}."
            )
        if absent := [name for key, name in missing.items() if key not in self._found]:  # tied ones have two
            print(
                f"weights(): {where} lacks {len(absent)} of the model's tensors, which begin as model() "
                f"makes them: {some(absent)}",
                file=sys.stderr,
            )

    @classmethod
    def of(cls, task: Task, model: nn.Module) -> Pretrained | None:
        """Those of the task; None where it names none."""
        with user_code(folder_of(task), "weights()"):
            where = task.weights()
        return None if where is None else cls(Path(where), model)

    def read(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What the files have for a tensor of the model, in the tensor's dtype; None where they have nothing.
        The file is closed before the caller has it, so that no more of it stays in memory."""
        from safetensors import safe_open

        if id(tensor) not in self._found:
            return None
        path, name = self._found[id(tensor)]
        with safe_open(path, framework="pt") as file:
            found: torch.Tensor = file.get_tensor(name).to(tensor.dtype)
            return found

    def fill(self, model: nn.Module) -> None:
        """Every tensor of the model that is in memory."""
        with torch.no_grad():
            for tensor in model.state_dict(keep_vars=True).values():
                if not tensor.is_meta and (found := self.read(tensor)) is not None:
                    tensor.copy_(found)


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as e:
        raise ConfigError(f"weights(): {file} can't be read as safetensors: {e}.") from None
