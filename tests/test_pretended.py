"""The pretended GPU refuses what a GPU refuses, and waits where a GPU is waited for."""

import pytest
import torch
from torch.nn import functional as F

from tests.pretended import PretendedGPU


@pytest.fixture
def gpu():
    with PretendedGPU(memory=1 << 20) as gpu:
        yield gpu


def test_tensors_of_both_devices_do_not_meet_but_for_single_numbers(gpu):
    there, here = torch.ones(3, device="cuda"), torch.ones(3)
    for together in (lambda: there + here, lambda: torch.cat([there, here]), lambda: F.mse_loss(there, here)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            together()
    assert (there + here[0]).device.type == "cuda"
    assert (there + here.to("cuda")).tolist() == [2, 2, 2]


def test_what_lies_on_it_is_no_array(gpu):
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        torch.ones(3, device="cuda").numpy()
    assert torch.ones(3, device="cuda").cpu().numpy().sum() == 3


def test_what_follows_from_a_tensor_is_where_it_is(gpu):
    x = torch.ones(3, 2, device="cuda", requires_grad=True)
    made = [x * 2, x.T, torch.zeros_like(x), x.new_ones(2), x.detach().half(), F.dropout(x), x.sum()]
    (x.double() ** 2).sum().backward()
    assert {t.device for t in [*made, x.grad]} == {torch.device("cuda", 0)}
    assert torch.zeros_like(x, device="cpu").device.type == "cpu"
    assert torch.empty(2).device.type == "cpu"


def test_numbers_that_are_read_are_waited_for(gpu):
    x, y = torch.ones(3).to("cuda", non_blocking=True), torch.ones(3)
    assert not gpu.waits
    for read in (
        x.sum().item, lambda: bool(x.sum() > 1), x.tolist, x.cpu, lambda: x[x > 0], x.nonzero,
        lambda: y.copy_(x), lambda: torch.tensor([1.0], device="cuda"), lambda: x[torch.tensor([0])],
    ):  # fmt: skip
        gpu.waits.clear()
        read()
        assert gpu.waits


def test_a_copy_that_nobody_waits_for_has_no_numbers_yet(gpu):
    copied = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
    assert copied.isnan().all()
    event = torch.cuda.Event()
    event.record()
    later = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
    event.synchronize()
    assert (copied == 1).all()
    assert later.isnan().all()
    torch.cuda.synchronize()
    assert (later == 1).all()


def test_it_draws_from_a_generator_of_its_own(gpu):
    before = torch.get_rng_state()
    torch.cuda.manual_seed(3)
    drawn = torch.rand(4, device="cuda")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn.cpu(), torch.rand(4, generator=torch.Generator().manual_seed(3)))
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(4, device="cuda", generator=torch.Generator())


def test_its_memory_is_counted_and_ends(gpu):
    held = torch.zeros(1000, device="cuda")
    assert torch.cuda.memory_allocated() == 4000
    del held
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() == 4000
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 20, device="cuda")


def test_afterwards_there_is_none():
    with PretendedGPU():
        assert torch.cuda.is_available()
    assert torch.Tensor.device is torch._C.TensorBase.device
    assert torch.ones(1).device.type == "cpu"
