"""A model that is described before it is made: its large tensors are made one at a time, each when asked for.

model() runs as ever, but what it does to large tensors is noted down instead of done. A tensor is made by
repeating the operations that it comes from, with the random numbers that each drew: the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from .compat import TorchDispatchMode, storage_address, tree_flatten, tree_unflatten, version_of

LARGE = 1 << 16  # bytes: smaller tensors are made at once


class Unmade(NamedTuple):
    """A tensor that is not made yet: part of a storage."""

    storage: int
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def within(self, made: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """The tensor, once its storage is made."""
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(made[self.storage], self.offset, self.size, self.stride)

    @property
    def nbytes(self) -> int:
        """From the first number to the last."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


@dataclass(slots=True)
class NotedOperation:
    """One that was noted down."""

    function: Callable[..., Any]
    arguments: list[Any]  # with a Unmade for each tensor that is not made
    shape: Any  # of the arguments, as tree_unflatten takes it
    reads: set[int]  # storages
    made: list[Unmade | None]  # the results that are new storages
    versions: list[tuple[torch.Tensor, int]]  # of the tensors among the arguments that are made already
    random: tuple[torch.Generator, torch.Tensor] | None  # what it draws from, and the state before

    def check(self) -> None:
        if any(version_of(tensor) != version for tensor, version in self.versions):
            raise ModelChanged("model() changed a tensor that it had copied before")

    def run(self, made: dict[int, torch.UntypedStorage]) -> None:
        self.check()
        if self.random is not None:
            self.random[0].set_state(self.random[1])
        given = [a.within(made) if isinstance(a, Unmade) else a for a in self.arguments]
        results = tree_flatten(called(self.function, given, self.shape, "cpu"))[0]
        for place, result in zip(self.made, results, strict=True):
            if place is not None:
                if (result.stride(), result.storage_offset()) != (place.stride, place.offset):
                    own = torch.empty_strided(place.size, place.stride, dtype=place.dtype)
                    result = own.copy_(result)
                made[place.storage] = result.untyped_storage()


class ModelChanged(RuntimeError):
    """The model can't be made from what was noted down."""


class Deferred(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Within `with deferred:` large tensors are described: they are on torch's meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log: list[NotedOperation] = []
        self._writers: dict[int, list[int]] = {}  # storage -> the operations that write to it
        self._described: list[torch.Tensor] = []  # kept, so that no storage's number is given twice
        self._unseen = Unseen(self)
        self._scratch = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Deferred:
        self._unseen.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._unseen.__exit__(*error)  # type: ignore[no-untyped-call]
        self._scratch = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """ModelChanged where what was noted down would not give the same any more."""
        for operation in self._log:
            operation.check()

    def place(self, tensor: torch.Tensor) -> Unmade | None:
        """Of a tensor that is not made yet; None of others."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None
        number = storage_address(tensor.untyped_storage())
        if number not in self._writers:
            return None
        return Unmade(
            number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def make(self, place: Unmade) -> torch.Tensor:
        """The tensor itself. What it draws leaves torch's generator as it was."""
        return self._made([place])[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, shape = tree_flatten((args, kwargs))
        given = [self.place(a) or a if isinstance(a, torch.Tensor) else a for a in flat]
        places = [a for a in given if isinstance(a, Unmade)]
        tensors = [a for a in given if isinstance(a, torch.Tensor)]
        here = ("cpu", "meta") if places else ("cpu",)  # as new_empty() of a described tensor says
        elsewhere = torch.device(kwargs.get("device") or "cpu").type not in here
        if not places and (tensors or elsewhere or not _makes(func)):
            return func(*args, **kwargs)
        written = [self.place(tensor) for tensor in _written(func, args, kwargs)]
        if elsewhere or None in written:  # numbers that are made depend on some that are not
            return self._now(func, given, shape)
        try:
            described = called(func, [self._described_as(a) for a in flat], shape, "meta")
        except (NotImplementedError, RuntimeError):  # it asks for numbers, or torch knows no shapes of it
            if written:
                raise
            return self._now(func, given, shape)
        results = [r for r in tree_flatten(described)[0] if isinstance(r, torch.Tensor)]
        if not places and sum(r.nbytes for r in results) < LARGE:
            return func(*args, **kwargs)
        writes = {place.storage for place in written if place is not None}
        made = [self._new(result) for result in results]
        writes |= {place.storage for place in made if place is not None}
        if writes:  # else it is a view
            for storage in writes:
                self._writers[storage].append(len(self._log))
            drawn = self._draw(func, given, shape, alone=len(places) == len(written) and not tensors)
            versions = [(tensor, version_of(tensor)) for tensor in tensors]
            reads = {place.storage for place in places}
            self._log.append(NotedOperation(func, given, shape, reads, made, versions, drawn))
        return described

    def _described_as(self, value: Any) -> Any:
        """A tensor without its numbers; anything else as it is."""
        if not isinstance(value, torch.Tensor) or self.place(value) is not None:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    def _new(self, result: torch.Tensor) -> Unmade | None:
        """The place of a result that is no part of a storage that is known."""
        storage = storage_address(result.untyped_storage())
        if storage in self._writers:
            return None
        self._described.append(result)
        self._writers[storage] = []
        return self.place(result)

    def _draw(
        self, func: Any, given: list[Any], shape: Any, *, alone: bool
    ) -> tuple[torch.Generator, torch.Tensor] | None:
        """Draw what the operation draws, so that others draw what they would. `alone`: the only tensors are
        those that it writes, so that their numbers don't matter."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        named = (a for a in given if isinstance(a, torch.Generator))
        generator = next(named, torch.default_generator)
        state = generator.get_state()
        if alone:
            called(func, [self._room(a) if isinstance(a, Unmade) else a for a in given], shape, "cpu")
        else:
            self._now(func, given, shape)
        return generator, state

    def _room(self, place: Unmade) -> torch.Tensor:
        """A tensor of that shape, of any numbers, until the next call."""
        if self._scratch.nbytes() < place.nbytes:
            self._scratch = torch.UntypedStorage(place.nbytes)  # type: ignore[no-untyped-call]
        return place._replace(storage=0, offset=0).within({0: self._scratch})

    def _now(self, func: Any, given: list[Any], shape: Any) -> Any:
        """The operation itself, of tensors that are made for it."""
        made = iter(self._made([a for a in given if isinstance(a, Unmade)]))
        return called(func, [next(made) if isinstance(a, Unmade) else a for a in given], shape, None)

    def _made(self, places: Sequence[Unmade]) -> list[torch.Tensor]:
        made: dict[int, torch.UntypedStorage] = {}
        generators: dict[torch.Generator, torch.Tensor] = {}
        with torch.no_grad():
            for number in sorted(self._needed(places)):
                operation = self._log[number]
                if operation.random is not None:
                    generators.setdefault(operation.random[0], operation.random[0].get_state())
                operation.run(made)
        for generator, state in generators.items():
            generator.set_state(state)
        return [place.within(made) for place in places]

    def _needed(self, places: Sequence[Unmade]) -> set[int]:
        """The operations that these tensors come from."""
        found: set[int] = set()
        todo = [(place.storage, len(self._log)) for place in places]
        while todo:
            storage, before = todo.pop()
            for number in self._writers[storage]:
                if number < before and number not in found:
                    found.add(number)
                    todo += [(read, number) for read in self._log[number].reads]
        return found


class Unseen(TorchFunctionMode):
    """Has described tensors say that they are on the CPU: some code leaves out what is on torch's meta
    device, as torch.nn.init.orthogonal_ does."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self._deferred = deferred
        self._said = {
            torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]  # a getter
            torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
            torch.Tensor.device.__get__: torch.device("cpu"),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._said and self._deferred.place(args[0]) is not None:
            return self._said[func]
        return func(*args, **(kwargs or {}))


def called(function: Any, flat: Sequence[Any], shape: Any, device: str | None) -> Any:
    """The function of flattened arguments, on a device where it takes one; None: on the one that it says."""
    args, kwargs = tree_unflatten(flat, shape)
    if device is not None and _takes_device(function):
        kwargs = {**kwargs, "device": torch.device(device)}
    return function(*args, **kwargs)


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments that the function changes."""
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor))


def _takes_device(function: Any) -> bool:
    return any(argument.name == "device" for argument in function._schema.arguments)


def _makes(function: Any) -> bool:
    """Whether it may make tensors out of none."""
    return _takes_device(function) and any(str(r.type) == "Tensor" for r in function._schema.returns)
