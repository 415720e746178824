"""Memory that passes for a GPU's, so that what a GPU alone would run is run where none is.

Tensors "on cuda" are a CPU's, with real numbers, whose storages are marked. While `PretendedGPU` is entered
they say that they are on cuda:0, and torch.cuda is there. What a GPU refuses is refused: an operation on both
devices, numpy, a CPU's generator, a collective that Gloo has for CPU tensors alone. What makes a program wait
for a GPU is counted. A copy from the GPU that nobody waits for is NaN until somebody waits for something.

What no pretence has: kernels, streams that run beside each other, NCCL, the compiler.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

aten, functorch = torch.ops.aten, torch._C._functorch
FAKE = torch._C._TorchDispatchModeKey.FAKE
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BASE = torch._C.TensorBase
REAL = {name: getattr(torch.Tensor, name) for name in (
    "to", "cpu", "cuda", "numpy", "tolist", "pin_memory", "is_pinned", "record_stream", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided", "__array__", "get_device",
)}  # fmt: skip
LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
READS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten._unique2.default, aten.unique_dim.default, aten.bincount.default,
}  # fmt: skip
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
ASKED = ("synchronize", "Event.synchronize", "Stream.synchronize")  # of which torch does not warn
# What Gloo takes of tensors on a GPU; NCCL takes all, Gloo on a CPU too (ProcessGroupGloo.cpp).
GLOO_ON_GPU = {"broadcast_", "allreduce_", "allgather_", "_allgather_base_", "gather_", "scatter_", "reduce_",
               "alltoall_base_", "barrier", "reduce_scatter_", "_reduce_scatter_base_"}  # fmt: skip


class Allocation:
    """What marks a storage as the GPU's, for as long as the storage lives."""

    def __init__(self, gpu: PretendedGPU, nbytes: int) -> None:
        self.gpu, self.nbytes = gpu, 0
        self.resize(nbytes)

    def resize(self, nbytes: int) -> None:
        self.gpu.allocated += nbytes - self.nbytes
        self.nbytes, self.gpu.most = nbytes, max(self.gpu.most, self.gpu.allocated)

    def __del__(self) -> None:
        self.gpu.allocated -= self.nbytes


def storage_of(tensor: torch.Tensor) -> Any:
    """None of a tensor without memory of its own."""
    if functorch.is_functorch_wrapped_tensor(tensor):  # within vmap
        return storage_of(functorch.get_unwrapped(tensor))
    inner = getattr(tensor, "_local_tensor", None)  # a DTensor's
    inner = tensor.elem if inner is None and hasattr(tensor, "elem") else inner  # a collective's under way
    if inner is not None:
        return storage_of(inner)
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def on_gpu(tensor: torch.Tensor) -> bool:
    return getattr(storage_of(tensor), "allocation", None) is not None


def pinned(tensor: torch.Tensor) -> bool:
    return getattr(storage_of(tensor), "pinned", False)


class Event:
    """In the order of the program: there is one stream, whatever others are called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.gpu, self.at = PRESENT[0], -1

    def record(self, stream: Any = None) -> None:
        self.at = self.gpu.issued

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return 1.0

    def synchronize(self) -> None:
        self.gpu.waited("Event.synchronize")
        self.gpu.land(self.at)


class Stream:
    stream_id = cuda_stream = 0
    device, device_index, device_type = GPU, 0, 1

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Stream) -> None: ...

    def wait_event(self, _: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        PRESENT[0].waited("Stream.synchronize")
        PRESENT[0].land()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Autocast(torch.autocast):
    """The CPU's, under whatever name: its list of operations is a little another."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


PRESENT: list[PretendedGPU] = []


class PretendedGPU(TorchDispatchMode):
    """Within it this process has a GPU."""

    def __init__(self, memory: int = 80 << 30, name: str = "NVIDIA Pretended") -> None:
        super().__init__()
        self.memory, self.name = memory, name
        self.allocated = self.most = self.issued = 0
        self.waits: Counter[str] = Counter()  # by what, since it was last cleared
        self.generator = torch.Generator()
        self._late: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # copies that nobody waited for
        self._reducing = False  # within DDP's C++, whose buckets are on the GPU
        self._stack = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second

    # --- entering

    def __enter__(self) -> PretendedGPU:
        assert not PRESENT
        PRESENT.append(self)
        enter = self._stack.enter_context
        import torch._dynamo  # which looks at torch's functions when it is loaded

        for where, patches in self._patches():
            for name, value in patches.items():
                enter(mock.patch.object(where, name, value, create=True))
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._stack.close()
        PRESENT.clear()

    def _patches(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        from torch.nn.attention import bias

        yield torch.Tensor, self._of_tensors()
        wrapper, lower_right = torch.Tensor._make_wrapper_subclass, bias.causal_lower_right

        def subclass(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            return wrapper(*args, device=CPU if device == GPU else device, **kwargs)

        def causal(*args: Any) -> Any:
            with _disable_current_modes():
                return lower_right(*args)

        run = threading.Thread.run

        def run_here(thread: threading.Thread) -> None:
            torch._C._push_on_torch_dispatch_stack(self)
            try:
                run(thread)
            finally:
                torch._C._pop_torch_dispatch_stack(None)

        yield threading.Thread, {"run": run_here}
        from torch.cuda import _pin_memory_utils

        yield _pin_memory_utils, dict.fromkeys(("pin_memory", "unpin_memory"), lambda *_: None)
        yield torch.Tensor, {"_make_wrapper_subclass": staticmethod(subclass)}
        yield bias, {"causal_lower_right": causal}
        yield torch.cuda, self._of_cuda()
        yield (
            torch.cuda.memory,
            {name: value for name, value in self._of_cuda().items() if hasattr(torch.cuda.memory, name)}
            | {
                "_record_memory_history": lambda *_, **__: None,
                "_dump_snapshot": lambda file: Path(file).touch(),
            },
        )
        yield torch.accelerator, {
            "is_available": lambda: True, "current_accelerator": lambda *_, **__: GPU,
            "current_device_index": lambda: 0, "set_device_index": lambda _: None,
            "current_stream": lambda *_: Stream(), "synchronize": self._synchronize,
        }  # fmt: skip
        yield torch, {name: self._like(getattr(torch, name)) for name in LIKE}
        yield torch, {"autocast": Autocast, "tensor": self._made(torch.tensor)}
        yield torch, {"as_tensor": self._made(torch.as_tensor)}
        yield torch.UntypedStorage, {"resize_": self._resize(torch.UntypedStorage.resize_)}
        by_device = torch.optim.Optimizer._group_tensors_by_device_and_dtype

        def grouped(*args: Any, **kwargs: Any) -> dict[Any, Any]:  # torch's, in C, sees a CPU's tensors
            found = by_device(*args, **kwargs)
            return {(each[0][0][0].device, kind): each for (_, kind), each in found.items()}

        yield torch.optim.Optimizer, {"_group_tensors_by_device_and_dtype": staticmethod(grouped)}
        begin = dist.init_process_group

        def init(backend: str, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
            if device_id is not None:
                raise RuntimeError("torch splits groups of a bound device, and so clones their store")
            self.backend = "nccl" if "nccl" in backend else "gloo"
            begin("gloo", *args, **kwargs)

        yield dist, {"init_process_group": init}
        from torch.nn.parallel import DistributedDataParallel as DDP

        yield (
            DDP,
            {name: self._within_ddp(getattr(DDP, name)) for name in ("_ddp_init_helper", "_pre_forward")},
        )

    backend = "gloo"

    def _within_ddp(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(ddp: Any, *args: Any, **kwargs: Any) -> Any:
            self._reducing = any(map(on_gpu, ddp.module.parameters()))
            try:
                return function(ddp, *args, **kwargs)
            finally:
                self._reducing = False

        return called

    # --- tensors

    def _of_tensors(self) -> dict[str, Any]:
        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            copy = kwargs.pop("copy", False)
            if args and isinstance(args[0], torch.Tensor):
                args = args[0].device, args[0].dtype, *args[1:]
            device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
            return moved(tensor, device, dtype, non_blocking, copy, layout)

        def moved(
            tensor: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None = None,
            non_blocking: bool = False, copy: bool = False, layout: Any = None,
        ) -> torch.Tensor:  # fmt: skip
            if torch._C._get_dispatch_mode(FAKE) is not None:
                return REAL["to"](tensor, device=device, dtype=dtype, non_blocking=non_blocking, copy=copy)
            here, device = tensor.device, normal(device or tensor.device)
            options: dict[str, Any] = {} if layout is None else {"memory_format": layout}
            if device == here or "meta" in (device.type, here.type):
                if device.type == "meta":
                    options["device"] = device
                return REAL["to"](tensor, dtype=dtype or tensor.dtype, copy=copy, **options)
            options |= {"device": device, "pin_memory": False, "non_blocking": non_blocking}
            return aten._to_copy(tensor, dtype=dtype or tensor.dtype, **options)

        def cpu(tensor: torch.Tensor, memory_format: Any = None) -> torch.Tensor:
            return moved(tensor, CPU, layout=memory_format)

        def cuda(
            tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any
        ) -> torch.Tensor:
            return moved(tensor, GPU, non_blocking=non_blocking)

        def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if on_gpu(tensor):
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
            return REAL["numpy"](tensor, *args, **kwargs)

        def array(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return numpy(tensor) if on_gpu(tensor) else REAL["__array__"](tensor, *args, **kwargs)

        def tolist(tensor: torch.Tensor) -> Any:
            return REAL["tolist"](tensor.detach().cpu() if on_gpu(tensor) else tensor)

        def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
            if on_gpu(tensor):
                raise RuntimeError(
                    "cannot pin 'torch.cuda.FloatTensor', only dense CPU tensors can be pinned"
                )
            if pinned(tensor):
                return tensor
            copy = tensor.clone()
            storage_of(copy).pinned = True
            return copy

        def device(tensor: torch.Tensor) -> torch.device:
            return GPU if on_gpu(tensor) else BASE.device.__get__(tensor)

        return {
            "to": to, "cpu": cpu, "cuda": cuda, "numpy": numpy, "__array__": array, "tolist": tolist,
            "pin_memory": pin_memory, "is_pinned": lambda tensor, *_: pinned(tensor),
            "record_stream": lambda *_: None, "device": property(device),
            "is_cuda": property(on_gpu), "is_cpu": property(lambda t: device(t).type == "cpu"),
            "get_device": lambda t: 0 if on_gpu(t) else -1,
        } | {name: self._like(REAL[name]) for name in REAL if name.startswith("new_")}  # fmt: skip

    def _like(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """In Python's binding the CPU's device is filled in where none is given."""

        @functools.wraps(function)
        def made(tensor: torch.Tensor, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            if function is REAL["new_tensor"]:
                dtype = kwargs.get("dtype", tensor.dtype)
                return torch.tensor(*args, device=device or tensor.device, dtype=dtype)
            return function(tensor, *args, device=device or tensor.device, **kwargs)

        return made

    def _made(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def made(data: Any, *, device: Any = None, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
            if isinstance(data, torch.Tensor) and function.__name__ == "as_tensor":
                return data.to(device or data.device, dtype or data.dtype)
            return function(data, dtype=dtype, **kwargs).to(device or CPU)

        return made

    def _resize(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def resize(storage: Any, nbytes: int) -> Any:
            found = function(storage, nbytes)
            if (allocation := getattr(storage, "allocation", None)) is not None:
                allocation.resize(nbytes)
            return found

        return resize

    # --- torch.cuda

    def _of_cuda(self) -> dict[str, Any]:
        properties = SimpleNamespace(
            name=self.name, uuid="pretended", major=9, minor=0, total_memory=self.memory,
            multi_processor_count=132, L2_cache_size=50 << 20,
        )  # fmt: skip

        def reset(*_: Any) -> None:
            self.most = self.allocated

        def allow(fraction: float, *_: Any) -> None:
            self.memory = int(fraction * properties.total_memory)

        stream = Stream()
        nothing: Callable[..., None] = lambda *_, **__: None
        return {
            "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
            "init": nothing, "_lazy_init": nothing, "current_device": lambda: 0, "set_device": nothing,
            "is_bf16_supported": lambda *_: True,
            "get_device_name": lambda *_: self.name, "get_device_capability": lambda *_: (9, 0),
            "get_device_properties": lambda *_: properties, "default_generators": (self.generator,),
            "manual_seed": self.generator.manual_seed, "manual_seed_all": self.generator.manual_seed,
            "get_rng_state": lambda *_: self.generator.get_state(),
            "set_rng_state": lambda state, *_: self.generator.set_state(state),
            "mem_get_info": lambda *_: (self.memory - self.allocated, self.memory),
            "memory_allocated": lambda *_: self.allocated, "max_memory_allocated": lambda *_: self.most,
            "memory_reserved": lambda *_: self.allocated, "max_memory_reserved": lambda *_: self.most,
            "reset_peak_memory_stats": reset, "empty_cache": nothing, "synchronize": self._synchronize,
            "Stream": Stream, "Event": Event, "current_stream": lambda *_: stream,
            "default_stream": lambda *_: stream, "set_stream": nothing, "stream": lambda s: s or stream,
            "device": lambda *_: stream, "ipc_collect": nothing, "set_sync_debug_mode": self._warn,
            "set_per_process_memory_fraction": allow,
        }  # fmt: skip

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(FAKE) is not None:  # DTensor asks for shapes alone
            return func(*args, **kwargs)
        if any(t not in (torch.Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # a DTensor, say, which calls what it does of its parts
        flat, shape = tree_flatten((args, kwargs))
        tensors = [a for a in flat if isinstance(a, torch.Tensor)]
        here, there = self._apart(tensors)
        device = self._of_result(func, here, there, args, kwargs)
        self._check(func, device, here, there, args, kwargs)
        flat = [CPU if isinstance(a, torch.device) and a.type == "cuda" else a for a in flat]
        args, kwargs = tree_unflatten(flat, shape)
        pin = bool(kwargs.get("pin_memory"))
        if pin:
            kwargs = {**kwargs, "pin_memory": False}
        late = self._late_copy(func, device, here, args, kwargs)
        found = self._on_gpu(func, args, kwargs) if device == GPU else func(*args, **kwargs)
        for result in tree_leaves(found):
            if isinstance(result, torch.Tensor) and device == GPU:
                self.mark(result)
            if isinstance(result, torch.Tensor) and pin:
                storage_of(result).pinned = True
            if late and isinstance(result, torch.Tensor):
                self._postpone(result)
        if device == GPU and self.allocated > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return found

    @staticmethod
    def _apart(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those on the GPU, and those that are not."""
        here, there = [], []
        for tensor in tensors:
            (here if on_gpu(tensor) else there).append(tensor)
        return here, there

    def mark(self, tensor: torch.Tensor) -> None:
        """From here on its memory is the GPU's."""
        storage = storage_of(tensor)
        if storage is not None and getattr(storage, "allocation", None) is None:
            storage.allocation = Allocation(self, storage.nbytes())

    def _of_result(
        self, func: Any, here: list[Any], there: list[Any], args: Any, kwargs: Any
    ) -> torch.device:
        if func in (aten.copy_.default, aten._foreach_copy_.default):
            return CPU  # in the memory of its first argument
        given = kwargs.get("device")
        if given is None:
            return GPU if here else CPU
        if given.type == "cpu" and kwargs.get("pin_memory") is None:
            # From C++, which takes the device of a tensor for the CPU.
            backward = torch._C._current_graph_task_id() != -1 and not there
            return GPU if here or self._reducing or backward else CPU
        return normal(given)

    def _check(
        self, func: Any, device: torch.device, here: list[Any], there: list[Any], args: Any, kwargs: Any
    ) -> None:  # fmt: skip
        if func.namespace in ("c10d", "_c10d_functional"):
            self._check_collective(func, here, there)
            return
        if func in (aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default):
            self._count_copy(func, device, args, kwargs)
            return
        generator = kwargs.get("generator")
        if device == GPU and generator is not None and generator is not self.generator:
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu': {func}")
        if not here:
            return
        if func in READS:
            self.waited(func.overloadpacket.__name__)
            self.land()
        if func in INDEXED:
            for index in args[1]:
                if index is not None and not on_gpu(index) and on_gpu(args[0]):
                    self.waited("an index on the CPU")
                    there = [t for t in there if t is not index]
                elif index is not None and index.dtype is torch.bool:
                    self.waited("a mask as an index")
        if far := [t for t in there if t.dim() > 0 and t.device.type == "cpu"]:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                f"cpu! {func} of {[(*t.shape,) for t in here]} there and {[(*t.shape,) for t in far]} here"
            )

    def _count_copy(self, func: Any, device: torch.device, args: Any, kwargs: Any) -> None:
        """A copy between devices is waited for, unless it was asked for otherwise."""
        if func is aten._foreach_copy_.default:
            apart = any(on_gpu(a) != on_gpu(b) for a, b in zip(args[0], args[1], strict=True))
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        elif func is aten.copy_.default:
            apart = on_gpu(args[0]) != on_gpu(args[1])
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        else:
            apart = (device == GPU) != on_gpu(args[0])
            non_blocking = kwargs.get("non_blocking", False)
        if apart and not non_blocking:
            self.waited("a copy between devices")
            self.land()

    def _check_collective(self, func: Any, here: list[Any], there: list[Any]) -> None:
        name = func.overloadpacket.__name__
        there = [t for t in there if t.dim() or t.numel()]
        if here and there and name not in ("barrier",) and func.namespace == "c10d":
            raise RuntimeError(f"No backend has tensors of both devices: {func}")
        if here and self.backend == "gloo" and func.namespace == "c10d" and name not in GLOO_ON_GPU:
            raise RuntimeError(f"Gloo has no {name} for tensors on a GPU")

    def _on_gpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return self._drawn(func, args, kwargs)
        except RuntimeError as e:
            if "can't allocate memory" not in str(e):
                raise
            raise torch.OutOfMemoryError("CUDA out of memory.") from None

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What draws random numbers takes them from the GPU's generator."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        own, general = self.generator, torch.default_generator
        before = general.get_state()
        general.set_state(own.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            own.set_state(general.get_state())
            general.set_state(before)

    # --- waiting

    def _synchronize(self, *_: Any) -> None:
        self.waited("synchronize")
        self.land()

    def waited(self, what: str) -> None:
        self.waits[what] += 1
        if self.warns and what not in ASKED:
            warnings.warn(f"called a synchronizing CUDA operation: {what}", stacklevel=4)

    def _warn(self, mode: str) -> None:
        self.warns = mode == "warn"

    warns = False

    def _late_copy(self, func: Any, device: torch.device, here: list[Any], args: Any, kwargs: Any) -> bool:
        """Whether it is a copy from the GPU into pinned memory that goes on when the call has returned."""
        if not kwargs.get("non_blocking", False) and not (
            func is aten.copy_.default and len(args) > 2 and args[2]
        ):
            return False
        if func is aten._to_copy.default:
            return bool(here) and device == CPU
        return func is aten.copy_.default and on_gpu(args[1]) and not on_gpu(args[0]) and pinned(args[0])

    def _postpone(self, result: torch.Tensor) -> None:
        storage_of(result).pinned = True
        self.issued += 1
        self._late.append((self.issued, result.detach(), result.detach().clone()))
        with torch.no_grad():
            result.detach().view(-1).view(torch.uint8).fill_(0xFF) if result.is_contiguous() else None

    def land(self, until: int | None = None) -> None:
        """Copies that were begun have arrived, those up to number `until`."""
        late, self._late = self._late, []
        for number, result, value in late:
            if until is None or number <= until:
                with torch.no_grad():
                    result.copy_(value)
            else:
                self._late.append((number, result, value))


def normal(device: Any) -> torch.device:
    device = torch.device(device)
    return GPU if device.type == "cuda" else device
