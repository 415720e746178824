"""Causal attention over parts of sequences, in bf16: by the flash kernel, which makes no mask, and right."""

from collections import Counter

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fedtrain import Plan
from fedtrain.training.devices import device_of_rank
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.parallel.context import Gathered
from tests.equivalence.ranks import launch
from tests.equivalence.tiny import case, project
from tests.gpu.on import GPUS_ONLY, gathers, slowly
from tests.worlds import world

BF16 = 2e-2  # of the whole's norm
STEPS = 2
FLASH = {"cpu": "_scaled_dot_product_flash_attention_for_cpu", "cuda": "_scaled_dot_product_flash_attention"}
TASK = """
from mesh_task import Single
from tests.gpu.test_attention import only_flash

class Flash(Single):  # no other kernel may be taken
    def loss(self, model, batch):
        with only_flash(batch[0].device.type, self.layers):
            return super().loss(model, batch)
"""


class only_flash(TorchDispatchMode):
    """Within it attention has no other kernel, and it is called so many times."""

    def __init__(self, device, calls):
        super().__init__()
        self.kernel, self.calls, self.seen = FLASH[device], calls, Counter()
        self.allowed = sdpa_kernel([SDPBackend.FLASH_ATTENTION])

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "attention" in (name := function.overloadpacket.__name__):
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        self.allowed.__enter__()
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        self.allowed.__exit__(*raised)
        if raised[0] is None:
            assert self.seen.pop(self.kernel, 0) == self.calls, self.seen
            assert self.seen.keys() <= {f"{self.kernel}_backward"}, self.seen


def far(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def attend(rank, ranks, device, backend, length, exact):
    """Attention and its gradients over this rank's part: held to one process in float32, where `exact`; else
    to take less memory than half a mask."""
    here = device_of_rank(device, backend)
    draw = torch.Generator().manual_seed(3)
    whole = torch.randn(4, 2, 2, length, 16, generator=draw).to(here, torch.bfloat16)
    *parts, slope = (t.chunk(ranks, -2)[rank].clone() for t in whole.unbind())
    parts = [part.requires_grad_() for part in parts]
    gathered = Gathered(Mesh(Sizes(cp=ranks), here), Plan())
    if not exact:
        torch.cuda.reset_peak_memory_stats(here)
        before = torch.cuda.memory_allocated(here)
    with only_flash(device, 1), gathered:
        mine = F.scaled_dot_product_attention(*parts, is_causal=True)
        mine.backward(slope)
    if not exact:
        grown, mask = torch.cuda.max_memory_allocated(here) - before, length**2 // ranks
        print(f"length {length}: {grown >> 20} MiB, beside which a mask would be {mask >> 20}")
        assert grown < mask / 2
    else:
        wanted = [t.float().requires_grad_() for t in whole[:3]]
        out = F.scaled_dot_product_attention(*wanted, is_causal=True)
        out.backward(whole[3].float())
        both = [(mine, out), *((part.grad, t.grad) for part, t in zip(parts, wanted, strict=True))]
        apart = [far(one.detach(), other.detach().chunk(ranks, -2)[rank]) for one, other in both]
        assert max(apart) < BF16, apart


@slowly(4)
def test_causal_parts_take_the_flash_kernel(device):
    gathers(device)
    world(2, attend, device, "gloo", 64, True, device=device, backend="gloo")


@GPUS_ONLY
def test_causal_parts_make_no_mask(device):
    """Of 32,768 places a mask would be 512 MiB at each of two ranks."""
    gathers(device)
    world(2, attend, device, "gloo", 1 << 15, False, device=device, backend="gloo")


@pytest.mark.gpu2
def test_cp_causal_flash():
    """By NCCL, a GPU each, in bf16."""
    world(2, attend, "cuda", "nccl", 1 << 12, True, device="cuda", backend="nccl")


@slowly(5)
def test_bf16_context_parallel_trains_by_the_flash_kernel_as_one_rank_does(tmp_path, device):
    """What the model moved by is the gradient, for the optimizer is plain SGD of rate 1."""
    gathers(device)
    folder = project(tmp_path / "project")
    (folder / "flash_task.py").write_text(TASK)
    train = {"precision": "bf16", "optimizer": "sgd", "lr": 1.0}
    table = case("flash_task:Flash", steps=STEPS, train=train, log_every=1, peak_tflops=1.0)
    still = {**table, "train": {**table["train"], "lr": 1e-30}}
    alone = launch(folder, 1, {"one": table, "still": still}, device)
    parts = {**table, "parallel": {**table["parallel"], "cp": 2}}
    found = launch(folder, 2, {"parts": parts}, device, "gloo")["parts"]
    runs, begun = (found, alone["one"]), alone["still"].model
    moved = [torch.cat([(run.model[name] - t).flatten() for name, t in begun.items()]) for run in runs]
    assert far(*moved) < BF16
    losses = [[e["loss"] for e in run.of("step")] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=BF16)
    assert len(losses[0]) == STEPS
